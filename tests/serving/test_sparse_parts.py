"""Sparse attention as jax_mla puts it into sglang-jax, without a server."""

# pyright: reportMissingImports=false
# The engine is not where the linters run.

import functools
import types
from typing import Any

import pytest

pytest.importorskip("sgl_jax", reason="needs sglang-jax: tools/ci_serving.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.mem_cache.memory_pool import MLATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

import jax_mla
from jax_mla.integrations.sglang import install, sparse_config
from jax_mla.integrations.sglang.sparse import JaxMlaSparseBackend
from jax_mla.testing.hlo import collectives, num_copies, pointers

HEADS, INDEX_HEADS, RANKS, PAGE_SIZE, TOKENS, TOPK = 4, 8, 2, 16, 48, 5
NUM_PAGES = 4
# Layer 1 has no indexer: it attends to what layer 0 chose.
LAYERS, INDEX_LAYERS = 3, (0, 2)


def shapes_and_specs() -> dict[str, tuple[tuple[int, ...], P]]:
    data, heads = P("data", None), P("data", "tensor", None)
    return {
        "q": ((RANKS * TOKENS, HEADS, 512), heads),
        "q_rope": ((RANKS * TOKENS, HEADS, 64), heads),
        "k": ((RANKS * TOKENS, 1, 512), P("data", None, None)),
        "k_rope": ((RANKS * TOKENS, 1, 64), P()),
        "q_idx": ((RANKS * TOKENS, INDEX_HEADS, 128), P("data", None, None)),
        "k_idx": ((RANKS * TOKENS, 128), data),
        "idx_weights": ((RANKS * TOKENS, INDEX_HEADS), data),
    }


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn], ids=["bf16", "f32", "fp8"]
)
def test_a_step_of_three_layers(dtype: Any) -> None:
    """Tokens are chosen one by one, pools stay in place, and nothing is communicated.

    Each of two ranks has a token that decodes behind 20 others and a prompt of 40, with a page
    that no sequence has between theirs.
    """
    install()
    devices = np.array(jax.devices()[:4]).reshape(RANKS, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        check_a_step(mesh, jnp.dtype(dtype))


def check_a_step(mesh: Mesh, dtype: Any) -> None:
    pool = MLATokenToKVPool(
        size=RANKS * 6 * PAGE_SIZE, page_size=PAGE_SIZE, dtype=dtype, kv_lora_rank=512,
        qk_rope_head_dim=64, layer_num=LAYERS, mesh=mesh, dp_size=RANKS, start_layer=0,
        indexer_key_dim=128, num_indexer_layers=len(INDEX_LAYERS),
    )  # fmt: skip
    backend = JaxMlaSparseBackend(
        topk=TOPK, index_layers=INDEX_LAYERS, pages_per_seq=NUM_PAGES, num_attn_heads=HEADS,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        page_size=PAGE_SIZE, mesh=mesh,
    )  # fmt: skip
    pages = np.array([[6, 3, 1, 4, 5], [1, 2, 5, 6, 3]])
    seq_lens, q_lens = np.array([21, 40] * RANKS, np.int32), np.array([1, 40] * RANKS)
    batch = types.SimpleNamespace(
        dp_size=RANKS, per_dp_bs_size=2, forward_mode=ForwardMode.EXTEND, seq_lens=seq_lens,
        extend_seq_lens=q_lens,
        cache_loc=np.repeat(pages * PAGE_SIZE, PAGE_SIZE).astype(np.int32),
    )  # fmt: skip
    backend.forward_metadata = backend.get_forward_metadata(batch)
    rng = np.random.default_rng(0)
    is_fp8 = dtype == jnp.float8_e4m3fn
    of_model = jnp.dtype(jnp.bfloat16) if is_fp8 else dtype

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        return values.astype(np.float32 if "weights" in name else of_model)

    arrays = {
        n: jax.device_put(draw(n, shape), NamedSharding(mesh, spec))
        for n, (shape, spec) in shapes_and_specs().items()
    }
    host = {n: np.asarray(x, np.float32) for n, x in arrays.items()}
    if is_fp8:
        host |= {n: host[n].astype(dtype).astype(np.float32) for n in ("k", "k_rope")}
        host |= {n: rounded_behind_hadamard(host[n]) for n in ("q_idx", "k_idx")}
    of_rank = np.r_[20, np.arange(40), np.zeros(TOKENS - 41)].astype(np.int32)
    positions = jax.device_put(np.tile(of_rank, RANKS), NamedSharding(mesh, P("data")))

    def step(rows: list[jax.Array], keys: list[jax.Array], positions: Any, arrays: Any) -> Any:
        pools = types.SimpleNamespace(
            get_fused_kv_buffer=rows.__getitem__, get_indexer_key_buffer=keys.__getitem__
        )
        outs, chosen = [], (None, None)
        for i in range(LAYERS):
            layer = types.SimpleNamespace(
                layer_id=i, scaling=0.1, sliding_window_size=None, logit_cap=None
            )
            tokens = {n: x for n, x in arrays.items() if i in INDEX_LAYERS or "idx" not in n}
            q, k = tokens.pop("q"), tokens.pop("k")
            out, new = backend(
                q, k, k, layer, types.SimpleNamespace(positions=positions), pools,
                dsa_topk_in=chosen[0], dsa_topk_pages_in=chosen[1], **tokens,
            )  # fmt: skip
            rows[i] = new.kv
            if new.idx is not None:
                keys[INDEX_LAYERS.index(i)], chosen = new.idx, (new.topk, new.topk_pages)
            outs.append(out)
        return outs, rows, keys

    # The 20 tokens that are there already: their rows and keys are ones, or, if the key's bytes are
    # codes and a scale, next to nothing.
    old = [jax.tree.map(jnp.ones_like, x) for x in (pool.kv_buffer, pool.indexer_key_buffer)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*old, positions, arrays).compile()
    assert collectives(compiled) == []
    for buffer in (old[0][0], old[1][0]):
        assert num_copies(compiled, buffer.sharding.shard_shape(buffer.shape)) == 0
    before = [pointers(x) for x in jax.tree.leaves(old)]
    outs, *new = compiled(*old, positions, arrays)
    assert [pointers(x) for x in jax.tree.leaves(new)] == before
    for rank in range(RANKS):
        own = {n: x.reshape(RANKS, TOKENS, *x.shape[1:])[rank] for n, x in host.items()}
        old_key = 0 if is_fp8 else 1
        wanted = [attend(own, new, n, old_key) for new, n in ((slice(0, 1), 20), (slice(1, 41), 0))]
        for out in outs:
            got = np.asarray(out, np.float32).reshape(RANKS, TOKENS, HEADS, 512)[rank]
            atol = 1e-4 if of_model == jnp.float32 else 0.03
            np.testing.assert_allclose(got[:41], np.concatenate(wanted), atol=atol)
            assert (got[41:] == 0).all()


def rounded_behind_hadamard(x: np.ndarray) -> np.ndarray:
    codes, scales = jax_mla.reference.encode_index_keys(
        jnp.asarray(x @ scipy.linalg.hadamard(128) / 128**0.5), power_of_two_scales=x.ndim == 2
    )
    return np.asarray(codes, np.float32) * np.asarray(scales)[..., None]


def attend(tokens: dict[str, np.ndarray], new: slice, num_old: int, old_key: float) -> np.ndarray:
    """Return what a sequence's new tokens have to give, by the definition, in numpy."""
    own = {name: x[new] for name, x in tokens.items()}
    rows, keys = np.ones((num_old, 576)), np.full((num_old, 128), old_key)
    rows = np.r_[rows, np.concatenate([own["k"][:, 0], own["k_rope"][:, 0]], -1)]
    keys = np.r_[keys, own["k_idx"]]
    outs = []
    for i in range(len(own["q"])):
        seen = num_old + i + 1
        scores = own["idx_weights"][i] @ np.maximum(own["q_idx"][i] @ keys[:seen].T, 0)
        chosen = np.sort(np.argsort(-scores, kind="stable")[:TOPK])
        q = np.concatenate([own["q"][i], own["q_rope"][i]], -1)
        weights = np.exp(0.1 * (q @ rows[chosen].T))
        outs.append(weights / weights.sum(-1, keepdims=True) @ rows[chosen, :512])
    return np.stack(outs)


@pytest.mark.parametrize("option", ["sliding_window_size", "logit_cap"])
def test_options_are_refused_by_name(option: str) -> None:
    options: dict[str, Any] = dict(sliding_window_size=None, logit_cap=None) | {option: 30}
    backend: Any = types.SimpleNamespace()
    call = functools.partial(JaxMlaSparseBackend.__call__, backend, *[None] * 3)
    with pytest.raises(ValueError, match="sliding_window|soft_cap"):
        call(types.SimpleNamespace(**options), None, None, q_rope=None, k_rope=None)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (dict(), (0, 1, 2, 3, 4, 5)),
        (dict(index_topk_freq=2), (0, 1, 3, 5)),
        (dict(index_topk_freq=3, index_skip_topk_offset=1), (0, 3)),
        (dict(index_topk_pattern="FSSFSF"), (0, 3, 5)),
        (dict(indexer_types=["full", *["shared"] * 5]), (0,)),
    ],
    ids=str,
)
def test_layers_with_an_indexer(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    """As transformers reads the fields."""
    text = types.SimpleNamespace(num_hidden_layers=6, **fields)
    assert sparse_config.index_layers(text) == layers
