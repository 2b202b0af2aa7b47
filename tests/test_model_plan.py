"""What DeepSeek-V3 in FP8 needs on eight devices, by shapes alone."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_model_config import FP8, GLM5, MINICPM3, V2_LITE, V3, V32

from examples.deepseek import plan
from examples.deepseek.config import parse_config
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.weights import parameters

BF16 = jnp.dtype(jnp.bfloat16)


def gigabytes(raw: dict, mesh: str) -> float:
    rows = plan.weight_rows(parse_config(raw), Placement.planned(parse_mesh(mesh)), BF16)
    return sum(row.num_bytes for row in rows) / 1e9


def test_the_parameters_are_as_many_as_published() -> None:
    for raw, billions in ((V3, 671), (V2_LITE, 15.7)):
        tree = parameters(dataclasses.replace(parse_config(raw), fp8_block=None), BF16)
        count = sum(math.prod(parameter.shape) for parameter in jax.tree.leaves(tree))
        assert abs(count / 1e9 - billions) < 0.005 * billions


@pytest.mark.parametrize(
    ("mesh", "least", "most"),
    [
        ("", 670, 690),  # one byte a parameter, and what is not in FP8
        ("dp=8", 100, 104),  # attention is whole on every device
        ("tp=8", 85, 89),
        ("tp=8,experts=width", 85, 89),
    ],
)
def test_v3_fits_eight_devices_of_141_gb(mesh: str, least: float, most: float) -> None:
    assert least < gigabytes(V3, mesh) < most


def test_every_expert_matrix_is_on_one_device_only() -> None:
    for mesh in ("dp=8", "dp=2,tp=2,cp=2", "tp=8,experts=width"):
        rows = plan.weight_rows(parse_config(V3), Placement.planned(parse_mesh(mesh)), BF16)
        experts = [row for row in rows if "expert" in row.name]
        assert len(experts) == 4
        for row in experts:
            assert math.prod(row.part) * 8 == math.prod(row.parameter.shape)


@pytest.mark.parametrize("mesh", ["dp=8", "tp=8,experts=width"])
def test_a_step_of_v3_traces_by_shapes(mesh: str) -> None:
    config, placement = parse_config(V3), Placement.planned(parse_mesh(mesh))
    hidden, cache = plan.step_shapes(config, placement, BF16, slots=64, pages=800, page_size=64)
    assert hidden.shape == (64, 7168) and hidden.dtype == BF16
    assert cache.shape == (61, 800, 64, 576)


def test_the_widths_blocks_must_be_divided() -> None:
    with pytest.raises(ValueError, match="divides 16 blocks of 128, the width of an expert in FP8"):
        Placement.planned(parse_mesh("tp=32,experts=width")).check(parse_config(V3))


def test_a_latent_that_fp8_ds_mla_cannot_hold_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = r"--kv-format: expected a latent of 512 \+ 64 values for fp8_ds_mla, got 256 \+ 32"
    with pytest.raises(ValueError, match=words):
        plan.show(
            parse_config(MINICPM3), Placement.planned(parse_mesh("")), "bfloat16", "fp8_ds_mla"
        )
    assert not capsys.readouterr().out


def test_index_keys_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    placement = Placement.planned(parse_mesh("dp=8"))
    config = parse_config(V32)
    for index_format, size in ((None, 256), ("fp8", 132)):
        plan.show(config, placement, "bfloat16", None, index_format)
        expected = f"{config.num_layers * (1152 + size) / 1e3:.2f} KB of cache a token"
        assert expected in capsys.readouterr().out


def test_index_keys_in_fp8_that_a_model_does_not_have_are_refused() -> None:
    placement = Placement.planned(parse_mesh(""))
    with pytest.raises(ValueError, match="--index-format: expected a model with an indexer, got"):
        plan.show(parse_config(V3), placement, "bfloat16", None, "fp8")
    small = V32 | {"index_head_dim": 64}
    with pytest.raises(ValueError, match="--index-format: expected index keys of 128 .*got 64"):
        plan.show(parse_config(small), placement, "bfloat16", None, "fp8")


def test_what_the_page_says_of_sparse_models() -> None:
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    lines = page.split("## What a sparse model needs")[1].split("\n## ")[0].splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:4] for line in lines if line[:1] == "|"}
    (on_tp,) = (row for name, row in cells.items() if "tp=8" in name)
    (on_dp,) = (row for name, row in cells.items() if "dp=8" in name)
    stored = [row for name, row in cells.items() if "of a token" in name or "the same" in name]
    for mesh in ("tp=8", "dp=8"):
        assert f"{gigabytes(GLM5, mesh):.1f} GB" in page  # in bfloat16
    for column, raw in enumerate((V32, GLM5 | {"quantization_config": FP8})):
        config = parse_config(raw)
        for mesh, row in (("tp=8", on_tp), ("dp=8", on_dp)):
            assert f"{gigabytes(raw, mesh):.1f} GB" in row[column]
        rows, packed, keys, codes = (row[column].strip() for row in stored)
        layers, index = config.num_layers, config.index
        assert index is not None
        for text, size in ((rows, 1152), (packed, 656), (keys, 256), (codes, 132)):
            assert text == f"{layers} x {size} = {layers * size / 1e3:.1f} KB"
        assert (config.kv_lora_rank + config.qk_rope_head_dim) * 2 == 1152
        assert index.head_dim * 2 == 256
        assert (
            f"{layers * 1152 * 65536 / 1e9 + layers * 256 * 65536 / 1e9:.1f} GB"
            in cells["a sequence of 65,536 tokens, bfloat16"][column]
        )


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan.show(parse_config(V3), Placement.planned(parse_mesh("dp=8")), "bfloat16", None)
    text = capsys.readouterr().out
    assert "(32, 7168, 2, 2048)" in text  # 32 of 256 experts
    assert "70.27 KB of cache a token; a device holds the tokens of 1 in 8 pages (dp=8)" in text
