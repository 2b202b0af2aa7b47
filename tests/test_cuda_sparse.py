"""Sparse attention where only a GPU shows it: command buffers, pools beyond 4 GiB."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_params import gpu_params

import jax_mla
from jax_mla._runtime import _ffi
from jax_mla.testing.run import device_of

pytestmark = pytest.mark.gpu

D_CKV, D_KPE, HEADS, PAGE_SIZE = 512, 64, 16, 64
SM_SCALE = 192**-0.5
NUM_LAYERS = 8

# sm100 takes no lists of slots.
cuda_backends = pytest.mark.parametrize(
    "gpu_backend", [b for b in gpu_params() if "sm100" not in str(b)] or ["none"]
)


@pytest.fixture(autouse=True)
def default_to_gpu():
    """Put plain arrays on the first GPU."""
    with jax.default_device(device_of("sm80")):
        yield


def normal(key: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)


def newest_slots(table: jax.Array, lens: jax.Array, k: int) -> jax.Array:
    """Return the slots of the last k tokens of each sequence, the newest first, -1 behind."""
    positions = lens[:, None] - 1 - jnp.arange(k)
    page = jnp.take_along_axis(table, jnp.maximum(positions, 0) // PAGE_SIZE, axis=1)
    return jnp.where(positions < 0, -1, page * PAGE_SIZE + positions % PAGE_SIZE)


@cuda_backends
def test_host_handlers_are_not_called_in_steady_state(gpu_backend: str) -> None:
    """XLA replays its command buffer. Lists are computed on the device in each step."""
    batch, max_pages, k = 3, 6, 130
    pool = normal(0, NUM_LAYERS, batch * max_pages, PAGE_SIZE, D_CKV + D_KPE)
    q_nope, q_pe = normal(1, batch, HEADS, D_CKV), normal(2, batch, HEADS, D_KPE)
    ckv, kpe = normal(3, batch, 1, D_CKV), normal(4, batch, 1, D_KPE)
    table = jnp.arange(batch * max_pages, dtype=jnp.int32).reshape(batch, max_pages)
    attend = functools.partial(jax_mla.sparse_attention, sm_scale=SM_SCALE, backend=gpu_backend)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), keep_unused=True)
    def step(pool, lens, last_outs):
        outs = []
        for layer in range(NUM_LAYERS):
            pool = jax_mla.append(pool, ckv, kpe, table, lens[:, None] - 1, layer=layer)
            slots = newest_slots(table, lens, k)
            outs.append(attend(q_nope, q_pe, pool, slots, layer=layer))
        return pool, lens + 1, jnp.stack(outs)

    outs = jnp.zeros((NUM_LAYERS, batch, HEADS, D_CKV), jnp.bfloat16)
    state = (pool, jnp.asarray([63, 200, 1], jnp.int32), outs)
    for _ in range(6):
        state = jax.block_until_ready(step(*state))
    before = _ffi.extension().call_counts()
    for _ in range(10):
        state = jax.block_until_ready(step(*state))
    assert before["decode_cuda"] > 0
    assert _ffi.extension().call_counts() == before
    pool, lens, outs = state
    slots = newest_slots(table, lens - 1, k)
    want, _ = jax_mla.reference.sparse_attention(
        q_nope, q_pe, pool, slots, sm_scale=SM_SCALE, layer=NUM_LAYERS - 1, return_lse=True
    )
    want = want.astype(jnp.float32)
    error = jnp.linalg.norm(outs[-1].astype(jnp.float32) - want)
    assert error < 8e-3 * jnp.linalg.norm(want)


@cuda_backends
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3"])
def test_slots_beyond_4_gib(gpu_backend: str, kv_format: str | None, heads: int) -> None:
    """The same tokens at the far end of a big pool give the same bits."""
    k, num_tokens = 200, 256
    rows = normal(0, num_tokens // PAGE_SIZE, PAGE_SIZE, D_CKV + D_KPE)
    small = rows if kv_format is None else rows.astype(jnp.float8_e4m3fn)
    num_pages = (1 << 32) // small[0].nbytes + 100
    far = num_pages - small.shape[0]
    big = jax.jit(
        lambda: jnp.full((num_pages, *small.shape[1:]), jnp.nan, small.dtype).at[far:].set(small)
    )()
    assert big.nbytes > 1 << 32
    q_nope, q_pe = normal(1, 3, heads, D_CKV), normal(2, 3, heads, D_KPE)
    rng = np.random.default_rng(0)
    slots = jnp.asarray([rng.permutation(num_tokens)[:k] for _ in range(3)], jnp.int32)
    attend = functools.partial(
        jax_mla.sparse_attention,
        sm_scale=SM_SCALE,
        return_lse=True,
        kv_format=kv_format,
        kv_scale=None if kv_format is None else 1.0,
        backend=gpu_backend,
    )
    got = attend(q_nope, q_pe, big, slots + far * PAGE_SIZE)
    want = attend(q_nope, q_pe, small, slots)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
