"""The model example with an indexer: what it refuses, and its queries in FP8."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("torch", reason="the parity tests need torch (CPU)")
pytest.importorskip("transformers", reason="the parity tests need transformers")

from test_model_parity import make_model  # noqa: E402

from examples.deepseek.checkpoint import load  # noqa: E402
from examples.deepseek.config import load_config  # noqa: E402
from examples.deepseek.mesh import Placement, parse_mesh  # noqa: E402
from examples.deepseek.sparse import encode_queries  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own


def test_a_missing_index_weight_is_named(tmp_path: Path) -> None:
    make_model("glm5", tmp_path)
    config = load_config(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b"indexer.wk.", b"indexer.wx."))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("indexer.wk.", "indexer.wx."))
    with pytest.raises(ValueError, match="model.layers.0.self_attn.indexer.wk.weight"):
        load(tmp_path, config, np.float32)


def test_what_the_example_does_not_run_is_refused(tmp_path: Path) -> None:
    make_model("glm5", tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(ValueError, match="--mesh: expected dp or cp, but not both, for glm_moe"):
        Placement.over(parse_mesh("dp=2,cp=2")).check(config)


def test_queries_in_fp8_keep_the_scores() -> None:
    """Whatever the sizes of the heads' queries; zeros stay zeros."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((5, 12, 128)) * np.geomspace(1e-3, 1e3, 12)[:, None]
    q[2, 3] = 0
    weights = rng.random((5, 12)) / np.geomspace(1e-3, 1e3, 12)
    keys = rng.standard_normal((40, 128))
    codes, scaled = encode_queries(jnp.asarray(q, jnp.float32), jnp.asarray(weights, jnp.float32))
    assert codes.dtype == np.dtype("float8_e4m3fn") and not np.asarray(codes[2, 3], float).any()

    def scores(q, weights):
        return np.einsum("th,htk->tk", weights, np.maximum(np.einsum("thd,kd->htk", q, keys), 0))

    expected = scores(q, weights)
    got = scores(np.asarray(codes, np.float64), np.asarray(scaled, np.float64))
    assert np.abs(got - expected).max() < 0.03 * np.abs(expected).max()
