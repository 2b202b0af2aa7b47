"""sglang-jax's server with jax_mla: tokens, requests of all kinds, load, and its end.

A server takes ten seconds to start, so tests share one where they can, in this file's order.
"""

# pyright: reportMissingImports=false
# The engine and its packages are not where the linters run.

import collections
import concurrent.futures
import json
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: tools/ci_serving.sh installs it")

import openai
import psutil
import requests
from server import ARGUMENTS, STOP_SECONDS, Server, command, environment
from sgl_jax import launch_server

from jax_mla.integrations.sglang.__main__ import main

CONTEXT = 1024  # of the checkpoints
SPARSE = "--attention-backend=dsa_sparse"
OVERRIDE = "--json-model-override-args=%s"
QUANTISED = '--json-model-override-args={"quantization_config": {"quant_method": "fp8", %s}}'


def in_parallel(function: Any, items: Any, workers: int = 16) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))


# ---- Tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "arguments"),
    [
        ("v3", ()),
        ("v3", ("--tp-size=2",)),
        ("v3", ("--tp-size=2", "--dp-size=2")),
        ("v3", ("--tp-size=2", "--ep-size=2")),
        ("v3_fp8", ()),
        ("v3_fp8", ("--tp-size=2",)),
        ("v3_fp8", ("--tp-size=2", "--ep-size=2")),
        ("v32", (SPARSE,)),
        ("v32", (SPARSE, "--tp-size=2", "--dp-size=2")),
        ("v32_fp8", (SPARSE, "--tp-size=2")),
        ("glm5", (SPARSE,)),
        ("glm5", (SPARSE, "--tp-size=2")),
        ("glm5_fp8", (SPARSE, "--tp-size=2")),
        ("v2", ()),
    ],
    ids=lambda x: "-".join(x).replace("--", "") or "one" if isinstance(x, tuple) else str(x),
)
def test_tokens_are_those_of_hugging_face(
    start: Any, answers: Any, checkpoint: str, arguments: tuple[str, ...]
) -> None:
    """All prompts at once, in chunks, and once more with their beginnings cached."""
    server = start(checkpoint, *arguments)
    expected = answers(checkpoint)
    for is_cached in (False, True):
        got = in_parallel(lambda a: server.generate(a["prompt"], len(a["tokens"])), expected)
        for result, answer in zip(got, expected, strict=True):
            assert result["output_ids"] == answer["tokens"]
            pages = (len(answer["prompt"]) - 1) // 16
            assert result["meta_info"]["cached_tokens"] == (16 * pages if is_cached else 0)


# ---- Requests, on one server -------------------------------------------------------------------


@pytest.fixture
def server(start: Any) -> Server:
    return start("v2")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    message: Any = dict(role="user", content=text)
    return client.chat.completions.create(
        model="m", messages=[message], temperature=0, max_tokens=8, **options
    )


def is_alive(server: Server, answers: Any) -> bool:
    answer = answers("v2")[0]
    tokens = server.generate(answer["prompt"], len(answer["tokens"]))["output_ids"]
    return tokens == answer["tokens"] and all(process.is_running() for process in server.family)


def test_concurrent_chats_and_streams(client: openai.OpenAI) -> None:
    texts = [f"{i}: hello world " * (i % 7 + 1) for i in range(12)]

    def chat(text: str) -> str:
        return ask(client, text).choices[0].message.content

    def stream(text: str) -> str:
        events = ask(client, text, stream=True)
        return "".join(e.choices[0].delta.content or "" for e in events if e.choices)

    chats = in_parallel(chat, texts)
    assert all(chats) and in_parallel(stream, texts) == chats


def test_bad_requests_get_400_and_the_server_lives(
    server: Server, client: openai.OpenAI, answers: Any
) -> None:
    for refuse, words in (
        (lambda: ask(client, "x" * (CONTEXT + 1)), "longer than the model's context"),
        (lambda: ask(client, ""), "cannot be empty"),
        (lambda: ask(client, "x", logprobs=True), "log-probabilities are not served"),
        (lambda: client.completions.create(model="m", prompt=""), "The input is empty"),
        (lambda: client.completions.create(model="m", prompt=[]), "prompt: expected at least one"),
        (lambda: client.chat.completions.create(model="m", messages=[]), "messages: expected"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            refuse()
    for prompt, new_tokens in (([], 4), ([5, 384], 4), ([5, -1], 4), ([5] * (CONTEXT - 4), 8)):
        assert server.post("/generate", prompt, new_tokens).status_code == 400
    chats, json_type = f"{server.url}/v1/chat/completions", {"content-type": "application/json"}
    result = requests.post(chats, data="hello", headers=json_type, timeout=60)
    assert result.status_code == 400
    assert is_alive(server, answers)


def test_clients_that_hang_up(server: Server, answers: Any) -> None:
    sampling = dict(temperature=0, max_new_tokens=800, ignore_eos=True)
    body = dict(input_ids=[7] * 40, stream=True, sampling_params=sampling)
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as response:
        assert next(response.iter_lines()).startswith(b"data:")
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}/generate", json=body | dict(stream=False), timeout=0.2)
    assert is_alive(server, answers)
    # Nothing goes on for those that are gone: only an idle server can flush its cache.
    deadline = time.monotonic() + 60
    while not requests.post(f"{server.url}/flush_cache", timeout=60).ok:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_load(server: Server, answers: Any) -> None:
    """200 requests at once, some too long: each is answered or refused, and memory stays flat."""
    known = [a for a in answers("v2") if len(a["prompt"]) < 100]

    def send(seed: int) -> int:
        rng = random.Random(seed)
        if seed % 20 == 0:  # these have a known answer
            answer = known[seed // 20 % len(known)]
            result = server.post("/generate", answer["prompt"], len(answer["tokens"]))
            assert result.json()["output_ids"] == answer["tokens"]
            return result.status_code
        length, new_tokens = int(4 * 2 ** rng.uniform(0, 8.2)), rng.randint(1, 16)
        prompt = [rng.randint(3, 255) for _ in range(length)]
        result = server.post("/generate", prompt, new_tokens)
        if result.status_code == 200:
            assert result.json()["meta_info"]["completion_tokens"] == new_tokens
        else:
            assert length + new_tokens > CONTEXT - 16
        return result.status_code

    in_parallel(send, range(60), workers=60)  # compiles what is missing
    before = server.memory()
    statuses = collections.Counter(in_parallel(send, range(1000, 1200), workers=200))
    assert set(statuses) <= {200, 400} and sum(statuses.values()) == 200 and statuses[200] > 150
    assert server.memory() < before + 64, "the server's memory grows"
    assert is_alive(server, answers)


def test_sigterm_lets_requests_end(server: Server) -> None:
    """The last test of this server."""
    sampling = dict(temperature=0, max_new_tokens=900, ignore_eos=True)
    body = dict(input_ids=[9] * 20, sampling_params=sampling)
    url = f"{server.url}/generate"
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        requests.post(url, json=body | dict(stream=True), stream=True, timeout=60) as response,
    ):
        running = pool.submit(server.generate, [9] * 20, 900)
        events = response.iter_lines()
        assert next(events).startswith(b"data:")
        time.sleep(0.1)
        assert not running.done()
        server.process.send_signal(signal.SIGTERM)
        assert running.result()["meta_info"]["completion_tokens"] == 900
        *_, last, end = filter(None, events)
        assert json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == 900
        assert end == b"data: [DONE]"
    assert server.process.wait(STOP_SECONDS) == 0
    _, alive = psutil.wait_procs(server.family[1:], timeout=10)
    assert not alive
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


# ---- Servers that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "arguments", "line"),
    [
        ("llama", [], "--model-path: expected a checkpoint with Multi-head Latent Attention"),
        ("nowhere", [], "--model-path: Can't load the configuration of"),
        (
            "list",
            [],
            "--model-path: expected a config.json that the engine can read, got one",
        ),
        (
            "v3",
            ['--json-model-override-args={"num_attention_heads": "8"}'],
            "--model-path: expected a config.json that the engine can read, got one with a value",
        ),
        (
            "v3",
            ['--json-model-override-args={"kv_lora_rank": null}'],
            "--model-path: expected kv_lora_rank to be an int of at least 1, got None",
        ),
        (
            "v3",
            ['--json-model-override-args={"n_routed_experts": "8"}'],
            "--model-path: expected n_routed_experts to be an int of at least 1, got '8'",
        ),
        (
            "v3",
            ["--json-model-override-args={"],
            "--json-model-override-args: expected a JSON object, got '{'",
        ),
        ("v3", ["--json-model-override-args=3"], "expected a JSON object, got '3'"),
        ("v3", ["--dtype-config=/nowhere"], "No such file or directory: '/nowhere'"),
        ("v3", ["--dtype-config={"], "--dtype-config: expected none, since DeepSeek models do not"),
        ("v3", ['--dtype-config={"q_proj": "f"}'], "--dtype-config: expected none, since DeepSeek"),
        ("v3", ["--tokenizer-path=/nowhere"], "--tokenizer-path: expected a tokenizer that the"),
        ("v3", ["--tokenizer-path=LLAMA"], "--tokenizer-path: expected a tokenizer that the"),
        ("v3", ["--max-running-requests=0"], "--max-running-requests: expected at least --dp"),
        (
            "v3",
            ["--max-running-requests=1", "--tp-size=2", "--dp-size=2"],
            "--max-running-requests: expected at least --dp-size (2), got 1",
        ),
        ("v3", ["--stream-interval=0"], "--stream-interval: expected at least 1, got 0"),
        ("v3", ["--mem-fraction-static=0"], "--mem-fraction-static: expected a number above 0 and"),
        ("v3", ["--mem-fraction-static=-0.5"], "--mem-fraction-static: expected a number above 0"),
        ("v3", ["--mem-fraction-static=1.5"], "--mem-fraction-static: expected a number above 0"),
        ("v3", ["--mem-fraction-static=nan"], "--mem-fraction-static: expected a number above 0"),
        ("v3", ["--tp-size=3"], "expected a divisor of the model's heads (8), got 3"),
        ("v3", ["--tp-size=2"], "expected the number of devices that XLA_FLAGS shows (8), got 2"),
        ("v3", ["--tp-size=2", "--ep-size=3"], "--ep-size: expected a divisor of --tp-size (2)"),
        ("v3", ["--nnodes=2"], "--nnodes: expected a divisor of --tp-size (1), got 2"),
        ("v3", ["--nnodes=2", "--tp-size=2"], "--dist-init-addr: expected HOST:PORT of the first"),
        (
            "v3",
            ["--nnodes=2", "--tp-size=2", "--dist-init-addr=10.0.0.1"],
            "--dist-init-addr: expected HOST:PORT of the first node with --nnodes 2, got 10.0.0.1",
        ),
        ("v3", ["--nnodes=2", "--tp-size=2", "--dist-init-addr=h:x"], "--dist-init-addr: expected"),
        ("v3", ["--nnodes=2", "--tp-size=2", "--dist-init-addr=:1"], "--dist-init-addr: expected"),
        ("v3", ["--enable-lora"], "you need to specify both --max-lora-rank and"),
        (
            "v3",
            ["--enable-lora", "--enable-static-lora"],
            "--enable-lora, --enable-static-lora: expected at most one, got both",
        ),
        (
            "v3",
            ["--chunked-prefill-size=1000"],
            "--chunked-prefill-size: expected a multiple of --page-size (16), or -1, got 1000",
        ),
        ("v3", ["--context-length=0"], "--context-length: expected at least 1, got 0"),
        ("v3", ["--context-length=-5"], "--context-length: expected at least 1, got -5"),
        ("v3", ["--enable-tokenizer-batch-encode"], "--enable-tokenizer-batch-encode: not served"),
        ("v3", ["--max-total-tokens=15"], "--max-total-tokens: expected at least 16"),
        ("v3", ["--page-size=1"], "--page-size: expected a multiple of 2"),
        ("v3", [SPARSE], "sparse attention (DSA) in DeepseekV3ForCausalLM: not served"),
        (
            "v3",
            [OVERRIDE % '{"index_topk": 16}'],
            "sparse attention (DSA) in DeepseekV3ForCausalLM",
        ),
        ("v3", ["--attention-backend=native"], "expected fa or dsa_sparse, got native"),
        ("v32", [], "expected dsa_sparse for a model with an indexer, got fa"),
        ("v32", [SPARSE, QUANTISED % '"weight_block_size": [128, 128]'], "in F8_E4M3 and model."),
        ("glm5", [SPARSE, QUANTISED % '"weight_block_size": [128, 128]'], "in F8_E4M3 and model."),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"index_topk": 4097}'],
            "index_topk to be at most 4096, got 4097",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"index_topk": null}'],
            "index_topk to be an int of at least 1",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"q_lora_rank": null}'],
            "q_lora_rank to be an int of at least 1",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"index_window": 9}'],
            "of an indexer but ['index_head_dim', ",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"indexer_rope_interleave": true}'],
            "to be False for Deepseek",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"index_topk_freq": 2}'],
            "3 entries full, the first of them full",
        ),
        (
            "v32",
            [SPARSE, OVERRIDE % '{"index_n_heads": 33}'],
            "model.layers.0.self_attn.indexer.wq_b.weight of shape [4224, 64], got [4096, 64]",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"index_n_heads": 16}'],
            "index_n_heads to be 32 for GlmMoeDsa",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"rope_parameters": {"rope_type": "yarn"}}'],
            "expected plain rotary embeddings (rope_type default) for GlmMoeDsaForCausalLM, got",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"indexer_types": ["full", "full", "full"]}'],
            "model.layers.1.self_attn.indexer.wq_b.weight of shape [4096, 2048], got none",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"indexer_types": ["full", "shared", "shared"]}'],
            "expected indexers in the layers [0], which config.json names, got more in [2]",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"indexer_types": ["shared", "full", "full"]}'],
            "3 entries full or shared, the first of them full, got ['shared', ",
        ),
        (
            "glm5",
            [SPARSE, OVERRIDE % '{"mlp_layer_types": ["dense", "dense", "sparse"]}'],
            "expected mlp_layer_types to be dense in the first first_k_dense_replace (1) layers",
        ),
        ("v3", ["--kv-cache-dtype=fp8_e5m2"], "--kv-cache-dtype: expected auto or bf16"),
        ("v3", ["--kv-cache-dtype=bf16"], "--kv-cache-dtype: expected auto or fp8_e4m3 for a"),
        (
            "v3_fp8",
            ['--json-model-override-args={"hidden_size": 192}'],
            "expected hidden_size to be a multiple of 128, with FP8 weights in blocks of 128, got",
        ),
        (
            "v3_fp8",
            ["--tp-size=8", "--dp-size=2"],
            "expected num_attention_heads * v_head_dim to be a multiple of 512 for --tp-size / --",
        ),
        ("v3_fp8", ["--enable-lora"], "--enable-lora, --enable-static-lora: not served with FP8"),
        (
            "v3_fp8",
            ["--quantization-config-path=int8.yaml"],
            "--quantization-config-path: expected none for a checkpoint in FP8, and none with",
        ),
        (
            "v3",
            ["--quantization-config-path=fp8_block_128_dynamic.yaml"],
            "and none with blocks, got fp8_block_128_dynamic.yaml",
        ),
        (
            "v3",
            ["--quantization-config-path=int8.yaml"],
            "expected experts in FP8 in blocks or not quantised, got int8",
        ),
        (
            "v3",
            [QUANTISED % '"weight_block_size": [128, 128], "ignored_layers": ["o_proj"]'],
            "--model-path: expected all projections in FP8, got others: ['o_proj']",
        ),
        (
            "v3",
            [QUANTISED % '"weight_block_size": [64, 64]'],
            "weight in F8_E4M3 and model.layers.0.",
        ),
        (
            "v3_fp8",
            [QUANTISED % '"weight_block_size": [128, 64]'],
            "F32 [2, 8], got F8_E4M3 and F32 [2, 4]",
        ),
        (
            "v3",
            [QUANTISED % '"activation_scheme": "static"'],
            "expected experts in FP8 in blocks or not quantised, got float8_e4m3fn",
        ),
        ("v3", ["--device=cuda"], "--dtype: expected bfloat16 or float16 on a GPU with --kv-cache"),
        (
            "v3",
            ["--device=cuda", "--dtype=float16", "--kv-cache-dtype=fp8_e4m3"],
            "--dtype: expected bfloat16 on a GPU with --kv-cache-dtype fp8_e4m3, got float16",
        ),
        ("v3", ["--port=PORT"], "--port: expected a free port on 127.0.0.1"),
        ("v3", ["--port=70000"], "--port: expected a free port on 127.0.0.1, got 70000"),
    ],
)
def test_bad_arguments_are_one_line(
    checkpoints: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    arguments: list[str],
    line: str,
) -> None:
    # In this process, because a new one takes seconds to import the engine.
    is_for_gpu = "--device=cuda" in arguments  # refused before anything looks for one
    monkeypatch.setenv("JAX_PLATFORMS", "cuda" if is_for_gpu else "cpu")
    monkeypatch.setattr(launch_server, "main", lambda: pytest.fail("the server was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        llama = str(checkpoints / "llama")  # it has no tokenizer
        arguments = [a.replace("PORT", str(port)).replace("LLAMA", llama) for a in arguments]
        model = f"--model-path={checkpoints / checkpoint}"
        monkeypatch.setattr(sys, "argv", ["sglang", *ARGUMENTS, model, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    (shown,) = capsys.readouterr().err.strip().splitlines()
    assert shown.startswith("jax_mla.integrations.sglang: error: ") and line in shown


def test_two_platforms_are_refused(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(launch_server, "main", lambda: pytest.fail("the server was started"))
    model = f"--model-path={checkpoints / 'v3'}"
    monkeypatch.setattr(sys, "argv", ["sglang", *ARGUMENTS[1:], model])  # without --device
    with pytest.raises(SystemExit):
        main()
    assert "expected cpu, cuda or gpu, got cuda,cpu" in capsys.readouterr().err


def test_the_command_ends_with_one_line(checkpoints: Any) -> None:
    model = f"--model-path={checkpoints / 'llama'}"
    result = subprocess.run(
        command(model), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "got LlamaForCausalLM" in result.stderr.strip().splitlines()[-1]
