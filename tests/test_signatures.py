"""The annotations of the public functions can be read by tools."""

import inspect
import typing

import jax
import pytest

import jax_mla

PUBLIC = [
    jax_mla.append,
    jax_mla.backends,
    jax_mla.check_values,
    jax_mla.decode,
    jax_mla.index_append,
    jax_mla.index_topk,
    jax_mla.merge,
    jax_mla.mixed_attention,
    jax_mla.prefill,
    jax_mla.ragged_paged_attention,
    jax_mla.reference.append,
    jax_mla.reference.decode,
    jax_mla.reference.encode_index_keys,
    jax_mla.reference.index_append,
    jax_mla.reference.index_topk,
    jax_mla.reference.layer_norm,
    jax_mla.reference.rms_norm,
    jax_mla.reference.rotate,
    jax_mla.reference.sparse_attention,
    jax_mla.rope_table,
    jax_mla.sparse_attention,
    jax_mla.reference.ragged_paged_attention,
]


@pytest.mark.parametrize("fun", PUBLIC, ids=lambda fun: f"{fun.__module__}.{fun.__name__}")
def test_type_hints_can_be_read(fun) -> None:
    hints = typing.get_type_hints(fun)
    assert set(hints) == {*inspect.signature(fun).parameters, "return"}


def test_annotations_give_shapes_and_dtypes() -> None:
    hints = typing.get_type_hints(jax_mla.decode, include_extras=True)
    assert hints["seq_lens"] == typing.Annotated[jax.Array, "[batch] int32"]


@pytest.mark.parametrize(
    ("fun", "num_overloads"),
    [
        (jax_mla.append, 2),
        (jax_mla.decode, 3),
        (jax_mla.index_topk, 3),
        (jax_mla.prefill, 3),
        (jax_mla.ragged_paged_attention, 3),
        (jax_mla.sparse_attention, 3),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_overload_takes_every_argument(fun, num_overloads) -> None:
    names = set(inspect.signature(fun).parameters)
    overloads = typing.get_overloads(fun)
    assert len(overloads) == num_overloads
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        options = typing.get_type_hints(overload)["options"]
        given = set(parameters) - {"options"} | set(typing.get_type_hints(options.__args__[0]))
        assert given == names
