"""merge: log-sum-exp merge of partial attention."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla.testing.run import cpu_mesh

pytestmark = pytest.mark.usefixtures("no_rank_promotion")


def parts(seed: int = 0):
    rng = np.random.default_rng(seed)
    keys = jnp.asarray(rng.standard_normal((3, 5, 8), dtype=np.float32))  # [parts, tokens, d]
    q = jnp.asarray(rng.standard_normal((4, 8), dtype=np.float32))

    def attend(k):
        s = q @ k.T
        return jax.nn.softmax(s) @ k, jax.nn.logsumexp(s, axis=-1)

    outs, lses = jax.vmap(attend)(keys)
    return outs, lses, attend(keys.reshape(-1, 8))


def test_merges_to_the_whole() -> None:
    outs, lses, (out, lse) = parts()
    got_out, got_lse = jax_mla.merge(outs, lses)
    np.testing.assert_allclose(got_out, out, atol=1e-6)
    np.testing.assert_allclose(got_lse, lse, atol=1e-6)


def test_empty_parts_are_neutral() -> None:
    outs, lses, _ = parts()
    want = jax_mla.merge(outs, lses)
    empty_out, empty_lse = jnp.zeros((2, 4, 8)), jnp.full((2, 4), -jnp.inf)
    got = jax_mla.merge(jnp.concatenate([empty_out, outs]), jnp.concatenate([empty_lse, lses]))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    out, lse = jax_mla.merge(empty_out, empty_lse)
    assert (out == 0).all() and jnp.isneginf(lse).all()


def test_keeps_the_dtype_and_large_scores() -> None:
    outs, lses, _ = parts()
    out, lse = jax_mla.merge(outs.astype(jnp.bfloat16), lses + 1e4)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert jnp.isfinite(out).all() and jnp.isfinite(lse).all()


def merge_over(sizes: tuple[int, ...], outs, lses, check_vma: bool = True):
    """Merge over all axes of a mesh; devices without one of the given parts get an empty part."""
    mesh = cpu_mesh(sizes, names := ("a", "b")[: len(sizes)])
    pad = ((0, math.prod(sizes) - len(outs)), (0, 0))
    outs = jnp.pad(outs, (*pad, (0, 0)))
    lses = jnp.pad(lses, pad, constant_values=-jnp.inf)

    def local(o, s):
        return jax_mla.merge(o[0], s[0], axis_name=names)

    # Without check_vma the result of each device is returned, to see that they are the same.
    spec = jax.sharding.PartitionSpec
    out_specs = spec() if check_vma else spec(names)
    fun = jax.shard_map(
        local, mesh=mesh, in_specs=(spec(names),) * 2, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(fun)(outs, lses)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sizes", [(3,), (4,), (2, 2), (4, 2)], ids=str)
def test_over_mesh_axes(sizes, check_vma) -> None:
    outs, lses, want = parts()
    for got, expected in zip(merge_over(sizes, outs, lses, check_vma), want, strict=True):
        for device in np.split(np.asarray(got), len(got) // len(expected)):
            np.testing.assert_allclose(device, expected, atol=1e-6)
            np.testing.assert_array_equal(device, got[: len(expected)])


def test_over_a_mapped_axis() -> None:
    outs, lses, want = parts()
    merge = jax.vmap(lambda o, s: jax_mla.merge(o, s, axis_name="cp"), axis_name="cp")
    for got, expected in zip(merge(outs, lses), want, strict=True):
        np.testing.assert_allclose(got, jnp.broadcast_to(expected, got.shape), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", [0, 2])
def test_a_bad_part_spoils_its_rows_only(part, value) -> None:
    """Every device gets the NaN, whatever its maximum does with one. An lse of inf is no key."""
    outs, lses, (out, lse) = parts()
    outs, lses = outs.at[part, 1].set(jnp.nan), lses.at[part, 1].set(value)
    spoilt = np.arange(4) == 1
    for got_out, got_lse in (jax_mla.merge(outs, lses), merge_over((4,), outs, lses)):
        assert jnp.isnan(got_out[spoilt]).all()
        assert jnp.isnan(got_lse[spoilt]).all() == np.isnan(value)
        np.testing.assert_allclose(got_out[~spoilt], out[~spoilt], atol=1e-6)
        np.testing.assert_allclose(got_lse[~spoilt], lse[~spoilt], atol=1e-6)


def test_is_differentiable() -> None:
    outs, lses, _ = parts()
    grad = jax.grad(lambda o: jax_mla.merge(o, lses)[0].sum())(outs)
    np.testing.assert_allclose(grad.sum(0), 1, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
def test_over_mesh_axes_has_the_same_derivatives(check_vma) -> None:
    """With respect to outs and lses. Row 2 has no key in one part, row 3 has none in any part."""
    outs, lses, _ = parts()
    lses = lses.at[1, 2].set(-jnp.inf).at[:, 3].set(-jnp.inf)

    def loss(merged):
        out, lse = merged
        return (jnp.sin(out).sum() + jnp.where(jnp.isneginf(lse), 0, lse**2).sum()) * 4 / out.size

    def over_axes(outs, lses):
        return loss(merge_over((4,), outs, lses, check_vma))

    want = jax.grad(lambda *args: loss(jax_mla.merge(*args)), (0, 1))(outs, lses)
    for got, expected in zip(jax.grad(over_axes, (0, 1))(outs, lses), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_an_lse_of_inf_means_no_keys_in_value_and_gradient() -> None:
    """FlashAttention returns it so. Row 2 has no key in one part, row 3 has none in any part."""
    outs, lses, _ = parts()
    is_empty = jnp.zeros(lses.shape, bool).at[1, 2].set(True).at[:, 3].set(True)
    outs = jnp.where(is_empty[..., None], 0, outs)

    def results(merge, empty: float):
        def loss(outs, lses):
            out, lse = merge(outs, lses)
            return jnp.sin(out).sum() + jnp.where(jnp.isneginf(lse), 0, lse**2).sum()

        given = outs, jnp.where(is_empty, empty, lses)
        return *merge(*given), *jax.grad(loss, (0, 1))(*given)

    want = results(jax_mla.merge, -np.inf)
    assert all(jnp.isfinite(grad).all() for grad in want[2:])
    for merge in (jax_mla.merge, functools.partial(merge_over, (4,))):
        for got, expected in zip(results(merge, np.inf)[:2], want[:2], strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-6)
    for got, expected in zip(results(jax_mla.merge, np.inf)[2:], want[2:], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    over_axes = results(functools.partial(merge_over, (4,)), np.inf)
    assert all(jnp.isfinite(grad).all() for grad in over_axes[2:])
