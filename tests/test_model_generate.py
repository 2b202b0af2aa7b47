"""Parts of the model example, and its command line with one process and with two."""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek import generate, options, recall
from examples.deepseek.checkpoint import save
from examples.deepseek.config import Moe, parse_config
from examples.deepseek.engine import Engine
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.moe import route
from examples.deepseek.pages import PagePool
from examples.deepseek.recall_model import init_params, raw_config
from examples.deepseek.sampling import sample
from examples.deepseek.scheduler import Request
from examples.deepseek.screen import Screen

SCRIPT = Path(__file__).parents[1] / "examples" / "deepseek" / "generate.py"


def environment(devices: int = 1) -> dict[str, str]:
    """The environment of a script on virtual CPU devices, which finds the jax_mla of this test."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
    }


def run_script(*args: str, devices: int = 1, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--prompts", "3", "--questions", "4", *args],
        env=environment(devices),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def texts_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if " tokens | " in line]


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


def test_generate_streams_answers_and_reports(tmp_path: Path) -> None:
    output = finish(run_script(cwd=tmp_path))  # the current directory does not matter
    assert len(texts_of(output)) == 3
    assert "backend   cpu (cpu: cpu; mesh of one device)" in output
    assert "12 of 12 right" in output


@pytest.mark.full
def test_the_modules_of_the_example_hide_no_others(tmp_path: Path) -> None:
    names = sorted(path.stem for path in SCRIPT.parent.glob("[a-z]*.py"))
    assert {"config", "mesh", "model"} < set(names)
    # The script's own folder is first on the path when it starts, and not there when it ends.
    program = (
        "import importlib.util, runpy, sys\n"
        f"sys.argv = [{str(SCRIPT)!r}, '--help']\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"assert not [n for n in {names} if importlib.util.find_spec(n)]\n"
        "assert 'deepseek.model' in sys.modules\n"
    )
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment(), timeout=240)
    assert not [name for name in names if importlib.util.find_spec(name)]


@pytest.mark.full
def test_generate_continues_own_prompts() -> None:
    prompts = ("--prompt", "kale=41 fig=07 oak=93 fig=", "--prompt", "ant=50 bee=61 ant=")
    output = finish(run_script(*prompts, "--max-new-tokens", "1", "--dtype", "float32"))
    assert [line.split(" | ")[1] for line in texts_of(output)] == [
        "<s> kale=41 fig=07 oak=93 fig= -> 07",  # each prompt stands beside its text
        "<s> ant=50 bee=61 ant= -> 50",
    ]


@pytest.mark.full
def test_generate_runs_a_foreign_checkpoint(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads a tokenizer.json")
    words = ["<unk>", "the", "cache", "holds", "latent", "pages"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "eos_token_id": None}
    raw = raw_config(vocab_size=len(words), **sizes)
    save(tmp_path, raw, init_params(parse_config(raw), jax.random.key(0)), [])
    (tmp_path / "vocabulary.json").unlink()
    options = ("--checkpoint", str(tmp_path), "--max-new-tokens", "4")
    refusal = refused(*options, "--prompt", "the cache")
    assert "expected vocabulary.json or tokenizer.json" in refusal
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"{tmp_path}/tokenizer.json: expected a tokenizer" in refused(*options)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "give a text to continue with --prompt" in refused(*options)
    texts = texts_of(finish(run_script(*options, "--prompt", "the cache", "--prompt", "pages")))
    assert [len(text.split(" -> ")[1].split()) for text in texts] == [4, 4]


def refused(*args: str, **options: Any) -> str:
    """Run the script with a mistake; return its one line of stderr."""
    process = run_script(*args, **options)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 2, errors
    assert errors.startswith("generate.py: ") and errors.count("\n") == 1, errors
    assert not texts_of(output)
    return errors


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--max-new-tokens 0", "--max-new-tokens: expected an integer of at least 1, got '0'"),
        ("--max-new-tokens -3", "--max-new-tokens: expected an integer of at least 1, got '-3'"),
        ("--temperature -1", "--temperature: expected a number of at least 0, got '-1'"),
        ("--temperature nan", "--temperature: expected a number of at least 0, got 'nan'"),
        ("--top-p 0", "--top-p: expected a number above 0 and at most 1, got '0'"),
        ("--page-size 0", "--page-size: expected an integer of at least 1, got '0'"),
        ("--page-size few", "--page-size: expected an integer of at least 1, got 'few'"),
        ("--step-tokens 0", "--step-tokens: expected an integer of at least 1, got '0'"),
        ("--slots 0", "--slots: expected an integer of at least 1, got '0'"),
        ("--prompts 0", "--prompts: expected an integer of at least 1, got '0'"),
        ("--questions 0", "--questions: expected an integer of at least 1, got '0'"),
        ("--seed -1", "--seed: expected an integer of at least 0, got '-1'"),
        ("--seed 2147483648", "--seed: expected an integer of at most 2147483647, got '21474"),
        ("--cache-tokens 99999999999999", "--cache-tokens: expected an integer of at most 2147483"),
        ("--step-tokens 9999999999999", "--step-tokens: expected an integer of at most 21474836"),
        ("--dtype fp8", "--dtype: invalid choice: 'fp8' (choose from"),
        ("--coordinator here", "--coordinator: expected HOST:PORT, got 'here'"),
        ("--num-processes 2", "give --coordinator, --num-processes and --process-id together"),
        (
            "--coordinator localhost:1 --num-processes 2 --process-id 2",
            "--process-id: expected 0 to 1 with --num-processes 2, got 2",
        ),
    ],
)
def test_wrong_options_are_one_line(
    wrong: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", *wrong.split()])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in errors and errors.startswith("generate.py: ") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--prompt", "ant=50 ant=", "--prompt", ""], "expected a text that is not empty, got ''"),
        (["--prompt", "spam"], "not in this checkpoint's vocabulary: 'spam'"),
        (["--prompt", "ant=50 " * 600], "expected at most 1024 tokens with the new ones"),
        (["--prompt", "ant=", "--max-new-tokens", "1023"], "got 2 + 1023"),
        (["--questions", "25"], "--questions: expected at most 24, the pairs of the shortest"),
        (["--mesh", "pp=2"], "--mesh: expected AXIS=SIZE"),
        (["--mesh", "tp=²"], "--mesh: expected AXIS=SIZE"),
        (["--mesh", "dp=2,dp=1"], "--mesh: expected each name once, got 'dp=2,dp=1'"),
        (["--mesh", "tp=16"], "set JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_"),
        (["--mesh", "tp=3"], "--mesh: expected tp to divide 8 heads, got 3"),
        (["--mesh", "cp=5"], "--mesh: expected a number of devices that divides 8 experts; try"),
        (["--mesh", "cp=5,experts=width"], "that divides 48 values, the width of an expert, got 5"),
        (["--cache-tokens", "300"], "--cache-tokens: expected at least 361, room for the longest"),
        (["--backend", "sm90"], "--backend: expected one of cpu, reference, got 'sm90': "),
        (["--backend", "cpu:foo"], "--backend: expected one of cpu, reference, got 'cpu:foo': "),
        (["--backend", "reference:foo"], "--backend: expected one of cpu, reference, got 'refer"),
        (
            ["--page-size", "2147483647", "--prompts", "256"],  # more than can be addressed
            "out of memory; lower --cache-tokens, --page-size or --step-tokens, or use more "
            "devices (--plan says what a device holds): RESOURCE_EXHAUSTED",
        ),
        (["--checkpoint", "/nowhere"], "/nowhere/config.json: expected the JSON file"),
    ],
)
def test_mistakes_that_need_the_checkpoint_or_jax_are_one_line(
    wrong: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("lists the backends of a CPU")
    monkeypatch.setattr(sys, "argv", ["generate.py", *wrong])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in errors and errors.startswith("generate.py: ") and errors.count("\n") == 1


@pytest.mark.full
def test_a_step_is_not_larger_than_all_texts() -> None:
    assert small_engine(step_tokens=2**31 - 1)._sizes == [64, 256]  # 8 slots of 32 tokens


def test_other_errors_of_the_runtime_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(generate, "prepare", fail)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: broken"):
        generate.main()


def test_a_text_that_ends_early_has_wrong_answers() -> None:
    task = generate.Task([[0], [0]], np.zeros((2, 4), np.int32), [[7, 8], [9, 8]])
    assert generate.count_right(task, [[5, 7, 5, 8], [5, 9]]) == (3, 4)
    assert generate.count_right(task, [[5, 7, 5, 9], []]) == (1, 4)
    assert generate.count_right(generate.Task([[0]], task.script[:1], []), [[5, 7]]) == (0, 0)


@pytest.mark.full
def test_mistakes_of_a_script_are_one_line(tmp_path: Path) -> None:
    assert "--mesh: expected at most 1 devices in all, got 3" in refused("--mesh", "tp=3")
    words = "give --coordinator HOST:PORT --num-processes N --process-id I instead"
    assert words in refused("--distributed")
    (tmp_path / "config.json").write_text('{"model_type": ')
    checkpoint = ("--checkpoint", str(tmp_path))
    assert f"{tmp_path}/config.json: expected the JSON file" in refused(*checkpoint)


def test_the_longest_prompt_that_fits_is_accepted() -> None:
    tokenizer = recall.Vocabulary(recall.vocabulary())
    (prompt,) = generate.text_task(tokenizer, ["ant=50 " * 4], 3, max_positions=12).prompts
    assert len(prompt) == 9
    with pytest.raises(ValueError, match=r"got 9 \+ 4; shorten the text that begins with 'ant=50"):
        generate.text_task(tokenizer, ["ant=50 " * 4], 4, max_positions=12)


def test_a_prompt_without_tokens_is_refused() -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text: [])  # as one without a first token
    with pytest.raises(ValueError, match="expected a text that is not empty, got 'x'"):
        generate.text_task(tokenizer, ["x"], 1, max_positions=8)


def test_help_shows_every_default() -> None:
    parser = options.generate_parser()
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        if action.default not in (None, False, argparse.SUPPRESS, options.RECALL):
            assert f"(default: {action.default})" in text, action.option_strings
    assert "/checkpoints/recall)" in text.replace(" ", "")
    assert "(default: the first that can run)" in text


def test_requests_that_can_never_run_are_refused_by_the_engine() -> None:
    engine = small_engine(cache_tokens=8)
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
        engine.add(Request([], 1))
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"max_new_tokens: expected at least 1, got {wrong}"):
            engine.add(Request([1], wrong))
    words = "the cache is too small for one request: expected at most 16 tokens, got 15 .* 3 new"
    with pytest.raises(ValueError, match=words):
        small_engine(cache_tokens=16).add(Request([1] * 15, 3))


@pytest.mark.full
def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    engine, texts = small_engine(), []
    for steps in (100, 1):  # after which the caller leaves the loop
        requests = [Request([1, 2, 3], 9, [2, 3, 4, 5]), Request([4, 5], 5, [6, 7, 2])]
        for request in requests:
            engine.add(request)
        for _ in range(20):
            for _ in zip(range(steps), engine.run(), strict=False):
                pass
        texts.append([request.ids for request in requests])
    assert texts[0] == texts[1] and all(request.has_ended for request in requests)
    assert engine.scheduler.pools[0].num_free == engine.scheduler.pools[0].num_pages


def small_engine(**options: Any) -> Engine:
    config = parse_config(raw_config(vocab_size=8))
    params = init_params(config, jax.random.key(0))
    placement = Placement.over(parse_mesh(""), jax.devices("cpu"))
    return Engine(config, params, placement, slots=2, max_tokens=32, **options)


def test_the_engine_names_the_backend_that_runs() -> None:
    assert small_engine().backend == "cpu"
    assert small_engine(backend="reference").backend == "reference"
    with pytest.raises(ValueError, match="--backend: expected one of cpu, reference, got 'sm80'"):
        small_engine(backend="sm80")


def test_a_negative_temperature_and_a_wrong_top_p_are_refused() -> None:
    logits, key = jnp.zeros((1, 4)), jax.random.key(0)
    with pytest.raises(ValueError, match="temperature: expected at least 0, got -1"):
        sample(logits, key, temperature=-1.0)
    for top_p in (0.0, 1.5):
        with pytest.raises(ValueError, match="top_p: expected above 0 and at most 1"):
            sample(logits, key, temperature=1.0, top_p=top_p)


def test_texts_stay_beside_their_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"w{i} " for i in range(50)]
    decode: Any = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    prompts = [[1, 2], list(range(40))]
    screen = Screen(decode, prompts)
    screen.show({0: 3, 1: 4})
    screen.show({0: 5})
    screen.finish()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "    2 tokens | w1 w2  -> w3 w5 "
    assert second == f"   40 tokens | ...{decode(range(40))[-32:]} -> w4 "
    # A text whose last token holds a part of a character, and one whose end changes what was shown.
    for pieces, shown in ((["ab", "ab\ufffd"], "ab\ufffd"), (["ab", "c\ufffd"], "ab\n -> c\ufffd")):
        by_length: Any = lambda ids, pieces=pieces: ["", *pieces][len(ids)]  # noqa: E731
        screen = Screen(by_length, [[]])
        screen.show({0: 1})
        screen.show({0: 1})
        screen.finish()
        output = capsys.readouterr().out
        assert output.replace("    0 tokens | ", "") == f" -> {shown}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")  # narrower than the second line's prompt
    screen = Screen(decode, prompts)
    screen.show({0: 3, 1: 4})
    output = capsys.readouterr().out
    assert "w1 w2  -> \x1b[1mw3 \x1b[0m" in output
    assert all(len(line) < 80 for line in output.splitlines())


@pytest.mark.full
def test_sampling_options_run() -> None:
    output = finish(run_script("--temperature", "0.5", "--top-p", "0.9"))
    assert "12 of 12 right" in output


@pytest.mark.full
def test_two_processes_generate_the_same_tokens() -> None:
    expected = texts_of(finish(run_script("--dtype", "float32")))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    cluster = ("--coordinator", f"localhost:{port}", "--num-processes", "2")
    options = ("--dtype", "float32", "--mesh", "dp=2,tp=2,cp=2", *cluster)
    processes = [run_script(*options, "--process-id", str(i), devices=4) for i in range(2)]
    first, second = [finish(p) for p in processes]
    assert texts_of(first) == expected
    assert not texts_of(second)


@pytest.mark.full
def test_the_op_runs_on_the_backend_asked_for() -> None:
    for backend, calls in (("cpu", True), ("reference", False)):
        program = small_engine(backend=backend).compiled_text()
        assert ('custom_call_target="jax_mla' in program) == calls


def test_greedy_temperature_and_top_p() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(**options: float) -> np.ndarray:
        drawn = jax.vmap(lambda key: sample(logits, key, **options)[0])(keys)
        return np.bincount(np.asarray(drawn), minlength=4) / len(keys)

    assert sample(logits, keys[0]).tolist() == [0]
    rising = jnp.array([[20.0, 30.0, 30.5, 30.25]])
    for temperature in (1e-50, 1e-40, 1e-38, 1e-6):  # the first two are 0 to a device's float32
        for top_p in (1.0, 0.5):
            token = sample(rising, keys[0], temperature=temperature, top_p=top_p)
            assert token.tolist() == [2], (temperature, top_p)
    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    sharper = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(shares(temperature=0.5), sharper / sharper.sum(), atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert shares(temperature=1.0, top_p=1e-9)[0] == 1


def test_pages_are_permuted_and_never_shared() -> None:
    pool = PagePool(num_pages=12, page_size=4)
    first, second = pool.take(13), pool.take(8)
    assert first is not None and second is not None and (len(first), len(second)) == (4, 2)
    assert len({*first, *second}) == 6 and max(*first, *second) < 12
    assert first != sorted(first)
    assert pool.take(25) is None
    pool.give_back(first)
    rest = pool.take(40)
    assert rest is not None and sorted(rest + second) == list(range(12))


def test_mesh_arguments() -> None:
    sizes = {"dp": 2, "tp": 1, "cp": 4, "experts": "width"}
    assert parse_mesh("cp=4,experts=width,dp=2") == sizes
    for text in ("pp=2", "tp", "tp=0", "tp=x", "experts=2"):
        with pytest.raises(ValueError, match="--mesh"):
            parse_mesh(text)
    words = "expected at most 8 devices in all, got 16; .*_force_host_platform_device_count=16"
    with pytest.raises(ValueError, match=words):
        Placement.over(parse_mesh("tp=16"), jax.devices("cpu")[:8])


def test_the_balance_bias_chooses_experts_but_never_weighs_them() -> None:
    config = Moe(4, 2, 8, 0, "sigmoid", 1, 1, True, 3.0)
    affinity = jnp.array([0.6, 0.5, 0.4, 0.3])
    x, router = jnp.ones((1, 1, 1)), (jnp.log(affinity) - jnp.log1p(-affinity))[:, None]
    plain, chosen = (a[0, 0] for a in route(config, router, jnp.zeros(4), x))
    np.testing.assert_allclose(plain, [3 * 0.6 / 1.1, 3 * 0.5 / 1.1], rtol=1e-5)
    assert chosen.tolist() == [0, 1]
    biased, chosen = (a[0, 0] for a in route(config, router, jnp.array([0, 0, 0, 9.0]), x))
    np.testing.assert_allclose(biased, [3 * 0.3 / 0.9, 3 * 0.6 / 0.9], rtol=1e-5)
    assert chosen.tolist() == [3, 0]
