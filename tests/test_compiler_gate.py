"""The compiler gate reads compiler reports right. The gate itself runs in CI: it takes minutes."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).resolve().parent.parent / "tools" / "compiler_gate.py"

CLEAN = """
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90a'
ptxas info    : Function properties for _Z4goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 224 registers, used 1 barriers
"""
SPILLED = CLEAN.replace("good", "bad").replace("0 bytes spill stores", "12 bytes spill stores")
RESOURCES = """
 Common:
  GLOBAL:0
 Function _Z4goodv:
  REG:224 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:736 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	.section	.text._Z4goodv,"ax",@progbits
        /*0230*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0240*/              @!P0 STL [R1], R2 ;
        /*0250*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""


@pytest.fixture(scope="module")
def gate():
    if not PATH.exists():
        pytest.skip("tools/ is not part of an installed package")
    spec = importlib.util.spec_from_file_location("compiler_gate", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)  # as for a script: the gate imports its neighbour
        spec.loader.exec_module(module)
    return module


def test_clean_report(gate) -> None:
    (kernel,) = gate.parse_report(CLEAN).values()
    assert (kernel.name, kernel.registers, kernel.spills) == ("_Z4goodv", 224, 0)
    assert gate.problems_of(kernel, gate.Rule("*", 224), "90a") == []
    assert "224 registers" in gate.problems_of(kernel, gate.Rule("*", 168), "90a")[0]


def test_resources_of_an_object(gate) -> None:
    """What cuobjdump says of the kernels of an object, where there is no report of ptxas."""
    (kernel,) = gate.parse_resources(RESOURCES).values()
    assert (kernel.name, kernel.registers, kernel.stack) == ("_Z4goodv", 224, 16)
    assert "16 bytes of stack" in gate.problems_of(kernel, gate.Rule("*", 224), "90a")[0]


def test_a_build_without_an_object_is_refused(gate, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gate, "find_tool", lambda name: name)
    number, problems = gate.check_build(tmp_path, "ptxas info : (C7510) wgmma serialized", 1)
    assert number == 0
    assert "append/append.cu: not in the build" in problems
    assert "ptxas info : (C7510) wgmma serialized" in problems


def test_spills_are_problems(gate) -> None:
    (kernel,) = gate.parse_report(SPILLED).values()
    assert "12 bytes of spills" in gate.problems_of(kernel, gate.Rule("*", 255), "90a")[0]


def test_instructions_are_counted(gate) -> None:
    kernels = gate.parse_report(CLEAN)
    gate.read_sass(SASS, kernels)
    kernel = kernels["_Z4goodv"]
    assert kernel.opcodes == {"HGMMA": 2, "STL": 1}
    rule = gate.Rule("*", 255, counts={"good": {"HGMMA": 3}, "other": {"HGMMA": 9}})
    problems = gate.problems_of(kernel, rule, "80")
    assert problems == ["1 accesses of local memory", "2 HGMMA, 3 expected"]


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_a_kernel_without_the_instructions_is_a_problem(gate, may_be_empty) -> None:
    (kernel,) = gate.parse_report(CLEAN).values()
    rule = gate.Rule("*", 255, counts={"good": {"HGMMA": 3}}, may_be_empty=may_be_empty)
    assert gate.problems_of(kernel, rule, "80") == ([] if may_be_empty else ["0 HGMMA, 3 expected"])


def test_copies_that_trap_are_problems(gate) -> None:
    kernels = gate.parse_report(CLEAN)
    good = "        /*0260*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR8][R14.64], P1 ;\n"
    bad = "        /*0270*/                   LDGSTS.E.BYPASS.128 [R6+UR0], desc[UR1][R14.64] ;\n"
    gate.read_sass(SASS.replace("@!P0 STL", "STG") + good + bad, kernels)
    (problem,) = gate.problems_of(kernels["_Z4goodv"], gate.Rule("*", 255), "80")
    assert problem == "1 copies with a descriptor that traps"


def listing(*lines: str) -> str:
    """An nvdisasm listing of one kernel. A line that ends in a colon is a label."""
    text = '\t.section\t.text._Z4goodv,"ax",@progbits\n'
    for address, line in enumerate(lines):
        text += f"{line}\n" if line.endswith(":") else f"        /*{16 * address:04x}*/  {line} ;\n"
    return text


LOAD, WAIT = "LDG.E.128 R4, desc[UR4][R2.64]", "ACQBULK"
# A loop whose body stands before the wait, but runs after it.
BODY_FIRST = ("BRA `(.L_x_1)", ".L_x_0:", LOAD, "EXIT", ".L_x_1:", WAIT, "BRA `(.L_x_0)")
# Two roles, of which one waits: the other's load stands after that wait, but may run before it.
ONE_ROLE_WAITS = ("@P0 BRA `(.L_x_0)", WAIT, LOAD, "EXIT", ".L_x_0:", LOAD, "EXIT")


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((WAIT, LOAD, "EXIT"), []),
        ((LOAD, WAIT, "EXIT"), ["LDG.E.128"]),
        (("PREEXIT", WAIT, "EXIT"), ["PREEXIT"]),
        (("@!P1 LD.E R4, [R2.64]", WAIT, "STG.E [R2.64], R4", "EXIT"), ["LD.E"]),
        (("STG.E [R2.64], R4", WAIT, "EXIT"), ["STG.E"]),
        ((f"@P0 {WAIT}", LOAD, "EXIT"), ["LDG.E.128"]),
        (("CCTL.E.PF2 [R2]", "LDS R4, [R2]", "LDC R1, c[0x0][0x28]", WAIT, LOAD, "EXIT"), []),
        (BODY_FIRST, []),
        (ONE_ROLE_WAITS, ["LDG.E.128"]),
        (("BRA.U UP0, `(.L_x_0)", LOAD, ".L_x_0:", WAIT, "EXIT"), ["LDG.E.128"]),
        (("BRX R2 -0x40", WAIT, "EXIT"), ["BRX"]),
        (("CALL.REL.NOINC `($helper)", WAIT, "EXIT", "$helper:", LOAD, "RET"), ["LDG.E.128"]),
    ],
)
def test_accesses_before_the_wait_are_problems(gate, lines, early) -> None:
    kernels = gate.parse_report(CLEAN)
    gate.read_sass(listing(*lines), kernels)
    rule = gate.Rule("*", 255)
    expected = [f"1 {opcode} before griddepcontrol.wait" for opcode in early]
    assert gate.problems_of(kernels["_Z4goodv"], rule, "90a") == expected
    assert gate.problems_of(kernels["_Z4goodv"], rule, "120") == expected
    assert gate.problems_of(kernels["_Z4goodv"], rule, "89") == []  # has no such wait


def test_an_early_load_is_allowed_by_its_opcode(gate) -> None:
    kernels = gate.parse_report(CLEAN)
    lengths = "LDG.E.CONSTANT R4, desc[UR4][R2.64]"
    gate.read_sass(listing(lengths, LOAD, WAIT, "EXIT"), kernels)
    rule = gate.Rule("*", 255, early_loads=r"LDG\.E\.CONSTANT")
    (problem,) = gate.problems_of(kernels["_Z4goodv"], rule, "90a")
    assert problem == "1 LDG.E.128 before griddepcontrol.wait"


def test_warnings_that_cost_speed_are_found(gate) -> None:
    lines = [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored",
    ]
    assert all(gate.BAD_WARNINGS.search(line) for line in lines)
    assert not gate.BAD_WARNINGS.search("ptxas info    : Used 224 registers, used 1 barriers")


def test_every_source_has_a_rule_and_every_rule_a_source(gate, tmp_path: pathlib.Path) -> None:
    rules = {path: gate.rule_of(path) for path in gate.all_sources(tmp_path)}
    assert [rule.sources for rule in gate.RULES if rule not in rules.values()] == []
    assert {rule.archs for path, rule in rules.items() if "sm90" in path.parts} == {("90a",)}


def test_a_source_without_a_rule_is_an_error(gate) -> None:
    with pytest.raises(ValueError, match="decode/sm42/new.cu: expected a rule"):
        gate.rule_of(pathlib.PurePath("decode/sm42/new.cu"))
