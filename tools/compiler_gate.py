"""Compile every CUDA source for every architecture and check what the compiler made of it.

    python tools/compiler_gate.py [--jobs 2] [--archs 90a,80] [--only sm80]
    python tools/compiler_gate.py --build DIRECTORY --log FILE

The second form compiles nothing. It reads the objects of a CMake build, and what the compilers said
while it ran. No GPU is needed.

Some of what it refuses costs speed without failing a test: too many registers, spills, a stack
frame, local memory, an unexpected number of matrix instructions, and ptxas warnings that a wgmma
was serialised or setmaxnreg ignored. The rest is wrong: copies that ptxas encodes so that they
trap, and an access of global memory that may run before a kernel has waited for the kernels before
it (early_accesses). Needs nvcc, nvdisasm for all that is read from the machine code, and for a
build cuobjdump (pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump).
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

import kernel_instances

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHS = ("80", "86", "89", "90a", "100", "120")  # as cmake/cuda.cmake
OPCODES = ("HGMMA", "HMMA", "LDL", "QGMMA", "STL", "UTCHMMA")
# C7508: setmaxnreg ignored. C7510 and its relatives: wgmma serialised, or waits inserted. C7519
# only says that a fence of registers was added.
BAD_WARNINGS = re.compile(r"\(C75(?!19)\d\d\)|wgmma.*serializ|setmaxnreg.*ignored", re.IGNORECASE)
# ptxas 13.0 gives a cp.async with a cache hint, of whose shared address a part is uniform, a
# descriptor in an odd uniform register: [R6+UR0], desc[UR1]. The GPU traps (illegal instruction).
BAD_COPY = re.compile(r"LDGSTS.*desc\[UR\d*[13579]\]")

INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
# What reads or writes global memory, generic addresses included. A prefetch into L2 (CCTL, UBLKPF,
# UTMAPF) is none of it: it gives no value to anybody.
GLOBAL_ACCESSES = frozenset(
    "LD LDG LDGSTS ST STG ATOM ATOMG RED REDG UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG".split()
)
WAIT = "ACQBULK"  # griddepcontrol.wait
LAUNCH = "PREEXIT"  # griddepcontrol.launch_dependents
FIRST_ARCH_WITH_WAIT = 90  # gpu::kPdlArchitecture
JUMPS = ("BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What holds for the kernels of the sources that match `sources`; the first match counts.

    Attributes:
      sources: glob, relative to csrc.
      max_registers: cap on every kernel's registers a thread.
      archs: architectures the sources are compiled for.
      counts: regular expression on the mangled kernel name -> {opcode: exact count}. A kernel that
        matches none is not counted, but one has to.
      may_be_empty: on some architectures, where the kernel's layout does not exist.
      early_loads: regular expression on opcodes that may stand before the wait for earlier kernels.
      max_spills: bytes of spills, stores and loads, that a kernel may have.
    """

    sources: str
    max_registers: int
    archs: tuple[str, ...] = ARCHS
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    may_be_empty: bool = False
    early_loads: str = ""
    max_spills: int = 0


# The plan of a call of units is loaded past L1, lengths and page ids through the read-only cache.
PLAN_LOADS = r"LDG\.E\.CONSTANT|LDG\.E\.(64\.|128\.)?STRONG\.GPU"
# Hopper's kernels for such calls (Config::kHasUnits) load it before their wait. The kernel in front
# writes rows to the cache, and has already waited for whoever wrote what they load.
UNIT_KERNELS = re.compile(r"(Narrow|Pairs|Codes64|Wide)Decode.*ELb1ELb0E+v")

NARROW_COUNTS = {
    "NarrowDecode.*Li512ELi64E": {"HGMMA": 2 + 4 + 16},
    "NarrowDecode.*Li512ELi0E": {"HGMMA": 4 + 16},
    "NarrowDecode.*Li256ELi32E": {"HGMMA": 1 + 4 + 8},
    "NarrowDecode.*Li256ELi64E": {"HGMMA": 2 + 4 + 8},
}
NARROW_FP8_COUNTS = {
    "NarrowDecode.*Li512ELi64E": {"HGMMA": 2 + 16 + 16},
    "NarrowDecode.*Li512ELi0E": {"HGMMA": 16 + 16},
    "NarrowDecode.*Li256ELi32E": {"HGMMA": 1 + 8 + 8},
    "NarrowDecode.*Li256ELi64E": {"HGMMA": 2 + 8 + 8},
}
# The sm90 kernels: add {"<part of the mangled name>": {"HGMMA": n}} for each instance to `counts`.
RULES = (
    # Tile of 16 rows x 64 tokens, d 512 + 64: 36 steps of QK and 4 x 8 tiles of PV a warp, of plain
    # caches and of FP8 caches alike.
    Rule(
        "decode/sm80/*_512_64.cu",
        255,
        counts={"Li512ELi64ELi16ELi64E": {"HMMA": 36 + 32}},
        may_be_empty=True,
    ),
    # The same with masks.
    Rule(
        "decode/sm80/masked/*_512_64.cu",
        255,
        counts={"Li512ELi64ELi16ELi64E": {"HMMA": 36 + 32}},
        may_be_empty=True,
    ),
    Rule("decode/sm80/masked/*_256_*.cu", 255),
    Rule("decode/sm80/*.cu", 255, may_be_empty=True),
    # Seesaw: QK is written three times (lead: an item's first, next pair; follower), each as the
    # steps of the rope chunk and a loop over groups of 8 steps (those of a half where threads
    # gather); PV five times 4 steps. Without rope the lead's first step, which begins a sum, is
    # written apart, twice.
    *(
        Rule(
            f"decode/sm90/wide/*_512_{d_kpe}_{load}.cu",
            168,
            archs=("90a",),
            counts={"WideDecode": {"HGMMA": 3 * (rope + steps) + first + 5 * 4}},
        )
        for d_kpe, rope, first in ((64, 4, 0), (0, 0, 2))
        for load, steps in (("kBoxes", 8), ("kGather", 16))
    ),
    *(
        Rule(
            f"decode/sm90/wide/*_256_{d_kpe}_*.cu",
            168,
            archs=("90a",),
            counts={"WideDecode": {"HGMMA": 3 * (d_kpe // 16 + 8) + 5 * 4}},
        )
        for d_kpe in (32, 64)
    ),
    # QK: half of the rope chunk and, in a loop, half of the latent chunks a warpgroup; PV: the same
    # chunks, each with its accumulators and so not in a loop.
    # So few that CTAs of the combine kernel fit beside them (narrow/config.h, kBudgets).
    # With codes, wgmma takes K and V from registers, and QK is not in a loop.
    # In pairs of blocks, QK takes all chunks, and PV is written for one block and for two.
    Rule(
        "decode/sm90/pairs/*.cu",
        168,
        archs=("90a",),
        counts={
            "PairsDecode.*Li256ELi32E": {"HGMMA": 2 + 16 + (1 + 2) * 8},
            "PairsDecode.*Li256ELi64E": {"HGMMA": 4 + 16 + (1 + 2) * 8},
        },
    ),
    # A warpgroup for the scores. QK where kpe has another scale, as codes or as bf16; QK of an
    # item's first block, and of the next one; PV. With tile scales, QK of kpe as bf16, and of the
    # four latent chunks, the first of them twice. Without rope, QK of the two blocks alone.
    # Registers at the launch.
    *(
        Rule(
            f"decode/sm90/codes64/*_512_{d_kpe}_{codes}_*_{queries}.cu",
            128,
            archs=("90a",),
            counts={"Codes64Decode": {"HGMMA": rope + 16, "QGMMA": parts * steps}},
        )
        for d_kpe, codes, rope, steps in (
            (64, "kOneScale", 4, (2 + 16) * 3),
            (64, "kTileScales", 4, 16 + 4),
            (0, "kOneScale", 0, 16 * 2),
        )
        for queries, parts in (("kCodes", 1), ("kTwoCodes", 2))
    ),
    # With codes 112 are as few. Some kernels of 16 rows with tile scales or a gather need more, and
    # leave room for one CTA alone (narrow/config.h, BudgetOf).
    *(
        Rule(
            f"decode/sm90/narrow/*_16_{codes}_1.cu",
            144,
            archs=("90a",),
            counts=NARROW_FP8_COUNTS,
        )
        for codes in ("kTileScales_*", "kOneScale_kGather")
    ),
    *(
        Rule(
            f"decode/sm90/narrow/*_{codes}_kBoxes_1.cu",
            112,
            archs=("90a",),
            counts=NARROW_FP8_COUNTS,
        )
        for codes in ("kOneScale", "kTileScales")
    ),
    # Two teams: at the launch (narrow/config.h, kBudgets).
    Rule("decode/sm90/narrow/*_2.cu", 96, archs=("90a",), counts=NARROW_FP8_COUNTS),
    Rule("decode/sm90/narrow/*.cu", 104, archs=("90a",), counts=NARROW_COUNTS),
    # CUTLASS's kernel, and two of ours around it. None is launched before its predecessor ended,
    # so none has to wait. Without sm_100a's instructions CUTLASS's kernel would be empty.
    Rule(
        "decode/sm100/*.cu",
        255,
        archs=("100a",),
        counts={"Sm100FmhaMla": {"UTCHMMA": 48}},
        early_loads=".*",
        max_spills=400,
    ),
    # QK of an item's first block and in the loop, PV in the loop and behind it: 12 and 8 steps each
    # with DeepSeek's sizes, 16 and 4 with GLM's, 8 and 8 with Mistral's, 6 and 8 with MiniCPM3's.
    # Launched when its predecessor has ended, it does not have to wait.
    Rule(
        "prefill/sm90/*.cu",
        168,
        archs=("90a",),
        counts={
            "PrefillAttention.*Li128ELi64ELi128E": {"HGMMA": 2 * (12 + 8)},
            "PrefillAttention.*Li192ELi64ELi256E": {"HGMMA": 2 * (16 + 4)},
            "PrefillAttention.*Li64ELi64ELi128E": {"HGMMA": 2 * (8 + 8)},
            "PrefillAttention.*Li64ELi32ELi64E": {"HGMMA": 2 * (6 + 8)},
        },
        early_loads=".*",
    ),
    # 80 beside a decode kernel, more where nothing fits: launch bounds, see kCombineThreads.
    # It reads seq_lens early, because the decode kernel before it has already waited for whoever
    # wrote them. Those are its only 4-byte loads through the read-only cache: a partial result is
    # loaded otherwise, and is still refused.
    # The same holds for the plan of a call of units.
    Rule("decode/merge/combine.cu", 80, early_loads=PLAN_LOADS),
    Rule("decode/sm90/combine.cu", 168, archs=("90a",), early_loads=PLAN_LOADS),
    Rule("decode/ragged/*.cu", 64),
    Rule("append/append.cu", 64),
    Rule("index_append/append.cu", 40),
    Rule("append/encode.cu", 80),  # 64 but where values are loaded one by one
    # A chunk of heads: 4 steps with codes, where two chunks are a product as well, 8 with bf16.
    Rule(
        "index/sm90/*.cu",
        128,
        archs=("90a",),
        counts={
            "IndexScores.*DTypeE3E": {"QGMMA": 4 + 4},
            "IndexScores.*DTypeE0E": {"HGMMA": 8},
        },
    ),
    Rule("index/sm80/*.cu", 128, counts={"IndexScores": {"HMMA": 8}}),
    # 64 keys a thread, and one CTA on an SM. ChooseKernel needs 40: launch bounds, 3 CTAs on an SM.
    # They read operands early where a kernel of scores, which has waited for whoever wrote them,
    # runs in front.
    Rule("index/choose.cu", 128, early_loads=r"LDG\.E(\.\w+)*"),
    Rule("index/*.cu", 40),
)


@dataclasses.dataclass
class Kernel:
    """One kernel in the compiler's report."""

    name: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    bad_copies: int = 0
    opcodes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    instructions: list[re.Match] = dataclasses.field(default_factory=list)  # of INSTRUCTION
    labels: dict[str, int] = dataclasses.field(default_factory=dict)  # index of the instruction


def parse_report(text: str) -> dict[str, Kernel]:
    """Read `ptxas -v`: kernels by mangled name."""
    kernels: dict[str, Kernel] = {}
    kernel = Kernel("")
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = kernels.setdefault(match[1], Kernel(match[1]))
        elif match := re.search(r"Function properties for (\w+)", line):
            # Device functions that were not inlined are listed too; what they spill counts.
            kernel = kernels.setdefault(match[1], Kernel(match[1]))
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            kernel.stack += int(match[1])
            kernel.spills += int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(match[1])
    return kernels


def read_sass(sass: str, kernels: dict[str, Kernel]) -> None:
    """Add the instructions of an nvdisasm listing to the kernels."""
    kernel = Kernel("")
    for line in sass.splitlines():
        if match := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            kernel = kernels.get(match[1], Kernel(match[1]))
        elif match := re.match(r"([.$][\w.$]+):", line):
            kernel.labels[match[1]] = len(kernel.instructions)
        elif match := INSTRUCTION.search(line):
            kernel.instructions.append(match)
            opcode = match["opcode"].split(".")[0]
            if opcode in OPCODES:
                kernel.opcodes[opcode] += 1
            kernel.bad_copies += bool(BAD_COPY.search(line))


def early_accesses(kernel: Kernel) -> collections.Counter[str]:
    """Count, by opcode, accesses of global memory that may run before the wait for earlier kernels.

    Every kernel here may be launched before its predecessor in the stream has ended (programmatic
    dependent launch), so until griddepcontrol.wait nothing in global memory may be read or written,
    nor the next kernel launched, which relies on this one's wait.
    The source says so with gpu::PdlWait, but a compiler may move a load of read-only data (__ldg)
    above it. Code need not stand in the order in which it runs, so this follows every branch from
    the kernel's entry and ends a path at the wait. A branch to an unknown place is reported.
    """
    found = {}
    seen = set()
    ahead = [0]
    while ahead:
        index = ahead.pop()
        if index in seen or index >= len(kernel.instructions):
            continue
        seen.add(index)
        instruction = kernel.instructions[index]
        operands = instruction["operands"]
        opcode = instruction["opcode"].split(".")[0]
        is_conditional = bool(instruction["predicate"])
        if opcode == WAIT and not is_conditional:
            continue
        if opcode in GLOBAL_ACCESSES or opcode == LAUNCH:
            found[index] = instruction["opcode"]
        if opcode in JUMPS:
            targets = re.findall(r"[.$][\w.$]+", operands)
            known = [kernel.labels[target] for target in targets if target in kernel.labels]
            if not known:
                found[index] = instruction["opcode"]
            ahead += known
            # BRA P0, `(.L_x_1) is conditional too, and a call comes back.
            is_conditional |= opcode == "CALL" or not operands.strip().startswith("`(")
        if is_conditional or opcode not in (*JUMPS, "EXIT", "RET"):
            ahead.append(index + 1)
    return collections.Counter(found.values())


def rule_of(source: pathlib.PurePath) -> Rule:
    """The rule of a source, given relative to csrc."""
    for rule in RULES:
        if source.match(rule.sources):
            return rule
    raise ValueError(f"{source}: expected a rule in RULES, got none")


def problems_of(kernel: Kernel, rule: Rule, arch: str) -> list[str]:
    """What is wrong with one kernel, compiled for one architecture."""
    problems = []
    if kernel.registers > rule.max_registers:
        problems.append(f"{kernel.registers} registers, at most {rule.max_registers} expected")
    if max(kernel.spills, kernel.stack) > rule.max_spills:
        problems.append(f"{kernel.spills} bytes of spills, {kernel.stack} bytes of stack")
    local = kernel.opcodes["LDL"] + kernel.opcodes["STL"]
    if local and not rule.max_spills:
        problems.append(f"{local} accesses of local memory")
    if kernel.bad_copies:
        problems.append(f"{kernel.bad_copies} copies with a descriptor that traps")
    if int(arch.rstrip("a")) >= FIRST_ARCH_WITH_WAIT:
        early_loads = PLAN_LOADS if UNIT_KERNELS.search(kernel.name) else rule.early_loads
        for opcode, number in sorted(early_accesses(kernel).items()):
            if not re.fullmatch(early_loads, opcode):
                problems.append(f"{number} {opcode} before griddepcontrol.wait")
    for pattern, counts in rule.counts.items():
        if not re.search(pattern, kernel.name):
            continue
        for opcode, expected in counts.items():
            got = kernel.opcodes[opcode]
            if got != expected and (got or not rule.may_be_empty):
                problems.append(f"{got} {opcode}, {expected} expected")
    return problems


def all_sources(directory: pathlib.Path) -> dict[pathlib.Path, pathlib.Path]:
    """Every CUDA source by its path relative to csrc; those of the instances go to `directory`."""
    written = kernel_instances.write_sources(directory, ["csrc"])
    sources = {path.relative_to(directory / "csrc"): path for path in written}
    csrc = ROOT / "csrc"
    return sources | {path.relative_to(csrc): path for path in csrc.rglob("*.cu")}


def include_dirs() -> list[str]:
    """Headers of csrc and of the nvidia-cutlass wheel."""
    cutlass = pathlib.Path(sysconfig.get_paths()["purelib"]) / "cutlass_library/source"
    of_cutlass = ("include", "examples/common", "examples/77_blackwell_fmha")
    return [str(ROOT / "csrc"), *(str(cutlass / folder) for folder in of_cutlass)]


def parse_resources(text: str) -> dict[str, Kernel]:
    """Read `cuobjdump --dump-resource-usage`: kernels by mangled name."""
    kernels = {}
    for match in re.finditer(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", text):
        kernels[match[1]] = Kernel(match[1], registers=int(match[2]), stack=int(match[3]))
    return kernels


def check_object(
    name: pathlib.PurePath, path: pathlib.Path, cuobjdump: str, nvdisasm: str
) -> tuple[list[str], list[str]]:
    """Check what an object has for each architecture.

    Returns:
      The architectures, and one line a problem.
    """
    archs, problems = [], []
    with tempfile.TemporaryDirectory() as directory:
        command = [cuobjdump, "--extract-elf", "all", str(path.resolve())]
        subprocess.run(command, cwd=directory, capture_output=True, check=True)
        for cubin in sorted(pathlib.Path(directory).glob("*.cubin")):
            match = re.search(r"\.sm_(\w+)\.cubin$", cubin.name)
            assert match, cubin.name
            usage = subprocess.run(
                [cuobjdump, "--dump-resource-usage", str(cubin)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            kernels = parse_resources(usage.stdout)
            archs.append(match[1])
            problems += check_kernels(name, match[1], cubin, kernels, nvdisasm)
    return archs, problems


def check_build(directory: pathlib.Path, log: str, jobs: int) -> tuple[int, list[str]]:
    """Check every object of a build; return their number, and one line a problem."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if not cuobjdump or not nvdisasm:
        return 0, ["cuobjdump or nvdisasm not found"]
    objects = {
        pathlib.PurePath(path.as_posix().rpartition("/csrc/")[2]).with_suffix(""): path
        for path in directory.rglob("*.cu.o")
    }
    with tempfile.TemporaryDirectory() as written:
        expected = set(map(pathlib.PurePath, all_sources(pathlib.Path(written))))
    problems = [f"{name}: not in the build" for name in sorted(expected - set(objects))]
    problems += [line.strip() for line in log.splitlines() if BAD_WARNINGS.search(line)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        items = sorted(objects.items())
        found = pool.map(lambda item: check_object(*item, cuobjdump, nvdisasm), items)
        for (name, _), (archs, of_object) in zip(items, found, strict=True):
            missing = set(rule_of(name).archs) - set(archs)
            problems += [f"{name}: not compiled for sm_{arch}" for arch in sorted(missing)]
            problems += of_object
    return len(objects), problems


def compile_one(
    name: pathlib.PurePath, source: pathlib.Path, arch: str, nvdisasm: str | None
) -> list[str]:
    """Compile one source for one architecture; return one line a problem."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = pathlib.Path(directory) / "out.cubin"
        command = ["nvcc", "-O3", "-std=c++20", "-cubin", "-Xptxas", "-v"]
        command += ["--expt-relaxed-constexpr", "-DJAX_MLA_WITH_CUDA", "-DNDEBUG"]
        command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(cubin), str(source)]
        command += [f"-I{path}" for path in include_dirs()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = done.stdout + done.stderr
        where = f"{name} sm_{arch}"
        if done.returncode:
            return [f"{where}: does not compile:\n{report[-2000:]}"]
        kernels = parse_report(report)
        problems = [f"{where}: {line}" for line in report.splitlines() if BAD_WARNINGS.search(line)]
        return problems + check_kernels(name, arch, cubin, kernels, nvdisasm)


def check_kernels(
    name: pathlib.PurePath,
    arch: str,
    cubin: pathlib.Path,
    kernels: dict[str, Kernel],
    nvdisasm: str | None,
) -> list[str]:
    """Check the kernels of a source on one architecture, with their machine code."""
    if nvdisasm:
        sass = subprocess.run(
            [nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True
        )
        read_sass(sass.stdout, kernels)
    where, problems, rule = f"{name} sm_{arch}", [], rule_of(name)
    if rule.counts and not any(re.search(c, k) for c in rule.counts for k in kernels):
        problems.append(f"{where}: no kernel is named as in the rule's counts")
    for kernel in kernels.values():
        problems += [f"{where}: {kernel.name}: {p}" for p in problems_of(kernel, rule, arch)]
    return problems


def find_tool(name: str) -> str | None:
    """On PATH, or in NVIDIA's wheel of this name."""
    wheel = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin" / name
    return shutil.which(name) or (str(wheel) if wheel.exists() else None)


def main() -> int:
    """Run the gate; the exit status says whether all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--archs", default="", help="comma-separated, e.g. 90a,80; default all")
    parser.add_argument("--only", default="", help="only sources whose path contains this")
    parser.add_argument("--build", type=pathlib.Path, help="a CMake build with its objects")
    parser.add_argument("--log", type=pathlib.Path, help="what it printed")
    args = parser.parse_args()
    if (args.build is None) != (args.log is None):
        parser.error("--build and --log go together")
    start = time.monotonic()
    if args.build:
        number, problems = check_build(args.build, args.log.read_text(), args.jobs)
        return report_problems(f"{number} objects", start, problems)
    if not shutil.which("nvcc"):
        print("compiler gate: nvcc is not on PATH")
        return 2
    nvdisasm = find_tool("nvdisasm")
    if not nvdisasm:
        print("compiler gate: nvdisasm not found: no machine code is read")

    wanted = args.archs.split(",") if args.archs else []
    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        work = [
            (name, source, arch, nvdisasm)
            for name, source in sorted(all_sources(pathlib.Path(directory)).items())
            for arch in rule_of(name).archs
            if (not wanted or arch in wanted) and args.only in str(name)
        ]
        found = pool.map(lambda job: compile_one(*job), work)
        problems = [problem for problems in found for problem in problems]
    return report_problems(f"{len(work)} compilations", start, problems)


def report_problems(what: str, start: float, problems: list[str]) -> int:
    """Print the problems and how long it took; return the exit status."""
    for problem in problems:
        print(problem)
    seconds = time.monotonic() - start
    print(f"compiler gate: {what} in {seconds:.0f} s, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
