"""`--demo`: what it prints works as it stands, and its answers are right. One server for all."""

# pyright: reportMissingImports=false
# The engine and its packages are not where the linters run.

import concurrent.futures
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: tools/ci_serving.sh installs it")

import openai
import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families
from server import STOP_SECONDS, Server
from sgl_jax import launch_server

from jax_mla.integrations.sglang import demo, refusals
from jax_mla.integrations.sglang.__main__ import arguments, main

TOOL: Any = dict(type="function", function=dict(name="f", description="d", parameters={}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("demo") / "log.txt"
    with Server(log, "--demo", "--enable-metrics", sizes=()) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def printed(log: pathlib.Path) -> str:
    """The line that asks the server; the server answers a moment before it is printed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if lines := re.findall("^curl .*$", log.read_text(), re.MULTILINE):
            return lines[0]
        time.sleep(0.2)
    raise TimeoutError(log.read_text())


def test_the_line_that_is_printed_works_in_a_shell(server: Server) -> None:
    line = printed(server.log)
    result = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["text"] == demo.ANSWER and answer["model"] == "recall"
    assert requests.get(f"{server.url}/health", timeout=60).status_code == 200


def test_answers_are_right_over_pages(client: openai.OpenAI) -> None:
    """A chat and streams with prompts of 101 to 121 tokens, two pages."""
    names = json.loads((demo.FOLDERS[0] / "vocabulary.json").read_text())[102:]

    def is_right(seed: int) -> bool:
        rng = random.Random(seed)
        pairs = [(name, f"{rng.randrange(100):02}") for name in rng.sample(names, 60 - seed)]
        name, number = pairs[seed]
        prompt = "".join(name + number for name, number in pairs) + name
        options: Any = dict(model="recall", max_tokens=1, temperature=0)
        message: Any = dict(role="user", content=prompt)
        chat = client.chat.completions.create(messages=[message], **options)
        events = client.completions.create(prompt=prompt, stream=True, **options)
        stream = "".join(event.choices[0].text for event in events)
        return chat.choices[0].message.content == stream == number

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(12)))


def test_metrics_count_what_is_answered(server: Server, client: openai.OpenAI) -> None:
    def metrics() -> dict[str, float]:
        page = requests.get(f"{server.url}/metrics", timeout=60).text
        return {
            sample.name.removeprefix("sglang:"): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    before = metrics()
    options: Any = dict(model="recall", prompt="kale=41 fig=", max_tokens=3, temperature=0)
    client.completions.create(**options)
    assert len(list(client.completions.create(stream=True, **options))) == 3
    after = metrics()
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["num_requests_total"] == 2 and after["num_unfinished_reqs"] == 0
    assert (grown["prompt_tokens_total"], grown["generation_tokens_total"]) == (8, 6)
    assert grown["time_to_first_token_seconds_count"] == 1
    assert grown["e2e_request_latency_seconds_count"] == 2
    assert grown["e2e_request_latency_seconds_bucket"] == 2  # the last one, +Inf


def test_what_is_not_served_gets_400(server: Server, client: openai.OpenAI) -> None:
    chat: Any = dict(model="recall", messages=[dict(role="user", content="fig=07")], max_tokens=1)
    for refuse, words in (
        (
            lambda: client.chat.completions.create(tools=[TOOL], **chat),
            "tools: expected none, since the server was started without --tool-call-parser",
        ),
        (lambda: client.embeddings.create(model="recall", input="fig="), "Embeddings are not"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            refuse()
    for path, body in (
        ("/encode", dict(text="fig=")),
        ("/classify", dict(text="fig=")),
        ("/v1/rerank", dict(query="fig=", documents=["fig="])),
    ):
        result = requests.post(server.url + path, json=body, timeout=60)
        assert result.status_code == 400 and "Embeddings are not served" in result.text


def test_what_is_let_through(client: openai.OpenAI) -> None:
    """As docs/serving.md says: any name of a model, a seed, and tools that are not to be called."""
    message: Any = dict(role="user", content="kale=41 fig=07 kale=")
    answer = client.chat.completions.create(
        model="any", messages=[message], max_tokens=1, temperature=0, seed=3, tools=[TOOL],
        tool_choice="none",
    )  # fmt: skip
    assert answer.model == "any" and answer.choices[0].message.content == "41"


def test_ctrl_c_ends_it(server: Server) -> None:
    """As in a terminal, which sends it to all processes. The last test of this server."""
    for process in server.family:
        process.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_SECONDS) == 0
    assert "Traceback" not in server.log.read_text()
    _, alive = psutil.wait_procs(server.family[1:], timeout=10)
    assert not alive


# ---- Without a server --------------------------------------------------------------------------


def test_other_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--port=1", "--max-running-requests=4", "--demo", "--served-model-name=x"]
    monkeypatch.setattr(sys, "argv", ["sglang", *arguments(given)])
    args = refusals.read_arguments()
    assert (args.port, args.max_running_requests, args.served_model_name) == (1, 4, "x")
    assert (args.device, args.chunked_prefill_size, args.max_total_tokens) == ("cpu", 256, 8192)
    args.api_key = "it's"
    words = demo.command(args).split(" -H ")
    assert words[0] == "curl -s http://127.0.0.1:1/v1/completions" and "Bearer it" in words[2]


def test_a_missing_checkpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(demo, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(launch_server, "main", lambda: pytest.fail("the server was started"))
    monkeypatch.setattr(sys, "argv", ["sglang", "--demo"])
    with pytest.raises(SystemExit) as end:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and f"--demo: expected a checkpoint in {tmp_path}" in line
