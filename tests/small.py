"""A small decode call that the tests of JAX's transformations share."""

import numpy as np

from jax_mla.testing.inputs import decode_inputs


def inputs(**kwargs):
    defaults = {
        "seq_lens": (0, 5, 16),
        "q_len": 2,
        "num_heads": 4,
        "d_ckv": 32,
        "d_kpe": 8,
        "page_size": 4,
        "dtype": "float32",
    }
    return decode_inputs(**{**defaults, **kwargs})


def decode_fn(fun, **kwargs):
    return lambda *args: fun(*args, sm_scale=0.2, return_lse=True, **kwargs)


def assert_near(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_allclose(np.asarray(a)[finite], np.asarray(b)[finite], atol=2e-5)
