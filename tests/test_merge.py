"""merge: log-sum-exp merge of partial attention."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from jax_mla.testing.run import cpu_mesh


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


def test_over_a_mesh_axis() -> None:
    outs, lses, (out, lse) = parts()
    pad = ((0, 1), (0, 0))
    outs = jnp.pad(outs, (*pad, (0, 0)))
    lses = jnp.pad(lses, pad, constant_values=-jnp.inf)
    mesh = cpu_mesh((4,), ("cp",))
    spec = jax.sharding.PartitionSpec

    def local(o, s):
        return jax_mla.merge(o[0], s[0], axis_name="cp")

    merged = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec("cp"), spec("cp")), out_specs=spec())
    )(outs, lses)
    np.testing.assert_allclose(merged[0], out, atol=1e-6)
    np.testing.assert_allclose(merged[1], lse, atol=1e-6)


def test_is_differentiable() -> None:
    outs, lses, _ = parts()
    grad = jax.grad(lambda o: jax_mla.merge(o, lses)[0].sum())(outs)
    np.testing.assert_allclose(grad.sum(0), 1, atol=1e-5)
