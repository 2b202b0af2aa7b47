"""The model example against transformers: greedy tokens of long prompts, on meshes too."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="the parity tests need torch (CPU)")
pytest.importorskip("transformers", reason="the parity tests need transformers")

from test_model_parity import make_model  # noqa: E402

from examples.deepseek.checkpoint import load  # noqa: E402
from examples.deepseek.config import load_config  # noqa: E402
from examples.deepseek.engine import Engine  # noqa: E402
from examples.deepseek.mesh import Placement, parse_mesh  # noqa: E402
from examples.deepseek.scheduler import Request  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' own
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="float32 runs on the CPU backend"),
]

PROMPT_LENS = (210, 260, 11)  # index_topk is 16
NEW_TOKENS = 16
MESHES = {
    "v3.2": ("", "dp=2,tp=2"),
    "glm5.2": ("cp=2,tp=2",),
    "glm4_flash": ("", "dp=2,tp=2"),
    "kimi_k25": ("cp=2",),
    "mistral_small_4": ("tp=4",),
}


def generate(directory: Path, mesh: str, prompts: list[list[int]]) -> list[list[int]]:
    """Continue the prompts, greedily: in chunks, and while others decode."""
    placement = Placement.over(parse_mesh(mesh))
    config = dataclasses.replace(load_config(directory), eos_token_ids=())
    params = load(directory, config, np.float32, placement.build)
    engine = Engine(
        config,
        params,
        placement,
        slots=len(prompts),
        max_tokens=max(PROMPT_LENS) + NEW_TOKENS,
        step_tokens=96,
    )
    requests = [Request(prompt, NEW_TOKENS, []) for prompt in prompts]
    for request in requests:
        engine.add(request)
    for _ in engine.run():
        pass
    return [request.ids for request in requests]


@pytest.mark.parametrize("name", MESHES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, 101, n).tolist() for n in PROMPT_LENS]
    expected = []
    for prompt in prompts:
        kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        tokens = torch.tensor([prompt])
        kwargs["attention_mask"] = torch.ones_like(tokens)  # a prompt may hold the pad token
        ids = model.generate(tokens, eos_token_id=None, use_cache=True, **kwargs)
        expected.append(ids[0, len(prompt) :].tolist())
    assert len({tuple(ids) for ids in expected}) == len(prompts)
    for mesh in MESHES[name]:
        assert generate(tmp_path, mesh, prompts) == expected, mesh
