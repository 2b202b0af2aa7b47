"""Published config.json files, and what the model example refuses."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek.config import Index, load_config, parse_config
from examples.deepseek.fields import MODEL_TYPES, NESTED_TYPES, NOT_SERVED
from examples.deepseek.pages import row_layout
from examples.deepseek.rope import inverse_frequencies, query_scales

YARN = {
    "type": "yarn",
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

# The fields that matter of each published config.json.
V2_LITE = LATENT | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
V3 = LATENT | {
    "model_type": "deepseek_v3",
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V32 = V3 | {
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM5 = LATENT | {
    "model_type": "glm_moe_dsa",
    "first_k_dense_replace": 3,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM4_FLASH = LATENT | {
    "model_type": "glm4_moe_lite",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
KIMI_K25 = {
    "model_type": "kimi_k25",
    "ignore_index": -100,
    "text_config": KIMI_K2 | {"quantization_config": None},
    "tie_word_embeddings": False,
    "vision_config": {"num_attention_heads": 16, "hidden_size": 1152},
}
MISTRAL4 = LATENT | {
    "model_type": "mistral4",
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "max_position_embeddings": 1048576,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "vocab_size": 131072,
}
MISTRAL3 = {
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": MISTRAL4,
    "tie_word_embeddings": False,
    "vision_config": {"head_dim": 64, "attention_dropout": 0.0},
    "vision_feature_layer": -1,
}
SARVAM = LATENT | {
    "model_type": "sarvam_mla",
    "first_k_dense_replace": 1,
    "head_dim": 576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_shared_experts": 1,
    "q_head_dim": 192,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"type": "deepseek_yarn"},
    "routed_scaling_factor": 2.5,
    "vocab_size": 262144,
}
YOUTU = LATENT | {
    "model_type": "youtu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "q_lora_rank": 1536,
    "vocab_size": 128256,
}
MINICPM3 = {
    "model_type": "minicpm3",
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "type": "longrope",
        "long_factor": [1.0] * 16,
        "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 32768,
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 73448,
}


def test_v2_lite() -> None:
    config = parse_config(V2_LITE)
    assert (config.q_lora_rank, config.num_heads, config.num_dense_layers) == (None, 16, 1)
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.num_groups, config.moe.normalize) == (
        "softmax",
        1,
        False,
    )
    assert not config.tied_head and config.rope_interleaved and config.fp8_block is None
    # 0.1 * 0.707 * ln 40 + 1 = 1.2608
    assert config.sm_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert inverse_frequencies(config.rope, 64, 4096)[1] == pytest.approx(1.0)


def test_v3_and_r1() -> None:
    config = parse_config(V3)
    assert config.moe is not None
    assert (config.moe.num_groups, config.moe.num_groups_per_token) == (8, 4)
    assert (config.moe.scoring, config.moe.normalize, config.moe.scale) == ("sigmoid", True, 2.5)
    assert (config.num_layers, config.num_dense_layers, config.fp8_block) == (61, 3, (128, 128))
    assert config.max_positions == 163840
    assert config.sm_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.eos_token_ids == (1,)


def test_kimi_k2_is_v3_with_other_numbers() -> None:
    config = parse_config(KIMI_K2)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_groups, config.num_heads) == (384, 1, 64)
    frequencies, amplitude = inverse_frequencies(config.rope, 64, 4096)
    plain = 50000.0 ** -(np.arange(0, 64, 2) / 64)
    assert amplitude == pytest.approx(1.0)
    # beta_fast = beta_slow: a step from untouched to divided by 32 within one frequency.
    ratio = plain / frequencies
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(32)
    assert np.sum((ratio > 1.001) & (ratio < 31.9)) <= 1


def test_minicpm3() -> None:
    config = parse_config(MINICPM3)
    assert config.moe is None and config.num_dense_layers == 62
    assert config.tied_head and not config.rope_interleaved and config.v_head_dim == 64
    assert config.embed_scale == 12 and config.logit_scale == pytest.approx(0.1)
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(62))
    assert config.eos_token_ids == (2, 73440)
    assert inverse_frequencies(config.rope, 32, 1000)[1] == 1.0


def test_v32_and_glm5_have_an_indexer() -> None:
    v32, glm5 = parse_config(V32).index, parse_config(GLM5).index
    assert v32 == Index(64, 128, 2048, rope_interleaved=False, own=(True,) * 61)
    assert glm5 == Index(32, 128, 2048, rope_interleaved=True, own=(True,) * 78)
    assert parse_config(V3).index is None


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFFSSSFS"},
        {"indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]},
    ],
    ids=str,
)
def test_layers_of_glm5_may_share_an_indexer(fields: dict[str, object]) -> None:
    index = parse_config(GLM5 | {"num_hidden_layers": 8} | fields).index
    assert index is not None
    assert "".join("SF"[own] for own in index.own) == "FFFSSSFS" and index.num_layers == 4


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        (V32, "index_topk", 0),
        (V32, "index_topk", 2**20 + 1),
        (V32, "index_head_dim", 32),
        (V32, "index_n_heads", None),
        (V32, "q_lora_rank", None),
        (V32, "index_topk_freq", 4),
        (V32, "indexer_rope_interleave", True),
        (V32, "rope_interleave", False),
        (V32, "index_kpool", 16),
        (V32, "layer_types", ["full_attention"] * 61),
        (V32, "mlp_layer_types", ["sparse", *["dense"] * 60]),
        (GLM5, "indexer_rope_interleave", False),
        (GLM5, "indexer_types", ["full"] * 77),
        (GLM5, "indexer_types", ["shared"] + ["full"] * 77),
        (GLM5, "index_topk_pattern", "X" * 78),
    ],
)
def test_fields_of_an_indexer_are_checked(
    fields: dict[str, object], field: str, value: object
) -> None:
    with pytest.raises(ValueError, match=rf"^config.json: {field}: expected"):
        parse_config(fields | {field: value})


def table(heading: str) -> dict[str, list[str]]:
    """The rows of a table of docs/models.md, by the model_types in the first cell."""
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    lines = page.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        name: row
        for row in rows
        if row[0].startswith("`")
        for name in re.findall("`(.*?)`", row[0])
        if name != "model_type"
    }


PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [V2_LITE | {"num_attention_heads": 128, "q_lora_rank": 1536}, V2_LITE],
    "deepseek_v3": [V3],
    "deepseek_v32": [V32],
    "glm_moe_dsa": [GLM5],
    "glm4_moe_lite": [GLM4_FLASH],
    "kimi_k2": [KIMI_K2],
    "kimi_k25": [KIMI_K25],
    "mistral4": [MISTRAL4],
    "mistral3": [MISTRAL3],
    "minicpm3": [MINICPM3],
    "sarvam_mla": [SARVAM],
    "youtu": [YOUTU],
}


def test_the_table_of_models_has_what_the_example_loads() -> None:
    rows = table("Served")
    assert set(rows) == {*MODEL_TYPES, *NESTED_TYPES} == set(PUBLISHED)
    for name, (_, _, heads, row, nope_v, index, formats, loader, *_) in rows.items():
        configs = [parse_config(fields) for fields in PUBLISHED[name]]
        assert heads == ", ".join(str(config.num_heads) for config in configs), name
        for config in configs:
            assert row == f"{config.kv_lora_rank} + {config.qk_rope_head_dim}", name
            assert nope_v == f"{config.qk_nope_head_dim} / {config.v_head_dim}", name
            sizes = ""
            if config.index is not None:
                sizes = f"{config.index.num_heads} x {config.index.head_dim}, {config.index.topk}"
            assert index == sizes, name
            for kv_format in ("fp8_e4m3", "fp8_ds_mla"):
                is_served = True
                try:
                    row_layout(config, kv_format, jnp.dtype(jnp.bfloat16))
                except ValueError:
                    is_served = False
                assert (kv_format in formats) == is_served, (name, kv_format)
        assert "example" in loader, name


def test_the_table_of_models_says_what_is_not_served_and_why() -> None:
    rows = table("Not served")
    assert set(rows) == set(NOT_SERVED)
    for name, row in rows.items():
        assert row[-1] == NOT_SERVED[name], name
        with pytest.raises(ValueError) as error:
            parse_config(V3 | {"model_type": name})
        assert f"model_type: expected one of {(*MODEL_TYPES, *NESTED_TYPES)}" in str(error.value)
        assert f"because of {name!r} {NOT_SERVED[name]}, got {name!r}" in str(error.value)


def test_text_models_of_models_that_read_pictures() -> None:
    kimi, mistral = parse_config(KIMI_K25), parse_config(MISTRAL3)
    assert kimi.tensor_prefix == mistral.tensor_prefix == "language_model."
    bare = parse_config(KIMI_K2 | {"quantization_config": None})
    assert kimi == dataclasses.replace(bare, tensor_prefix=kimi.tensor_prefix)
    assert mistral == dataclasses.replace(
        parse_config(MISTRAL4), tensor_prefix=mistral.tensor_prefix
    )
    # The text model is a V3 by name in files that transformers wrote.
    v3 = KIMI_K25 | {"text_config": KIMI_K25["text_config"] | {"model_type": "deepseek_v3"}}
    assert parse_config(v3).moe == kimi.moe
    assert parse_config(KIMI_K25 | {"tie_word_embeddings": True}).tied_head


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_config": V32}, "text_config.model_type: expected one of .'kimi_k2', 'deepseek_v3'"),
        ({"text_config": None}, "text_config: expected a JSON object, got None"),
        ({"text_config": KIMI_K2 | {"sliding_window": 4}}, "sliding_window: expected no value"),
        ({"sliding_window": 4096}, "sliding_window: expected no value, because of text_config"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config: "),
        ({"model_type": ["kimi_k25"]}, "model_type: expected one of"),
    ],
    ids=str,
)
def test_fields_beside_a_text_config_are_checked(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: {words}"):
        parse_config(KIMI_K25 | fields)


def test_mistral4_scales_its_queries_by_their_positions() -> None:
    config = parse_config(MISTRAL4)
    assert config.moe is not None and (config.moe.scoring, config.moe.normalize) == (
        "softmax",
        True,
    )
    assert inverse_frequencies(config.rope, 64, 4096)[1] == pytest.approx(1.0)
    positions = jnp.array([-1, 0, 8191, 8192, 8192 * 9])
    scales = query_scales(config.rope, positions)
    np.testing.assert_allclose(scales, [1, 1, 1, 1 + 0.1 * math.log(2), 1.230258509], rtol=1e-6)


def without(fields: dict[str, Any], field: str) -> dict[str, Any]:
    """The fields less one, which may be a field of rope_scaling or rope_parameters."""
    outer, _, inner = field.rpartition(".")
    if outer:
        return fields | {outer: without(fields[outer], inner)}
    return {name: value for name, value in fields.items() if name != field}


# Whose text_config does not say either whether the head is the embedding.
KIMI_K25_OPEN = KIMI_K25 | {"text_config": without(KIMI_K2, "tie_word_embeddings")}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (V2_LITE, "n_shared_experts"),
        (V3, "n_shared_experts"),
        (V3, "routed_scaling_factor"),
        (V3, "n_group"),
        (V3, "topk_group"),
        (V32, "n_group"),
        (KIMI_K2, "topk_group"),
        (V2_LITE | {"topk_method": "group_limited_greedy"}, "n_group"),
        (V3, "rope_scaling.factor"),
        (V3, "rope_scaling.original_max_position_embeddings"),
        (MISTRAL4, "rope_parameters"),
        (MISTRAL4, "rope_parameters.factor"),
        (MISTRAL4, "rope_parameters.llama_4_scaling_beta"),
        (MISTRAL4, "rope_parameters.original_max_position_embeddings"),
        (MINICPM3, "rope_scaling.original_max_position_embeddings"),
        (KIMI_K25_OPEN, "tie_word_embeddings"),
        (MINICPM3, "scale_emb"),
        (MINICPM3, "scale_depth"),
        (MINICPM3, "dim_model_base"),
    ],
)
def test_a_field_that_changes_results_must_be_there(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: {field}: expected a value, got no such"):
        parse_config(without(fields, field))


def test_a_missing_field_of_sarvam_is_not_zero() -> None:
    with pytest.raises(ValueError, match="n_shared_experts: expected a value, got no such field"):
        parse_config(without(SARVAM, "num_shared_experts"))


@pytest.mark.parametrize(
    ("fields", "eps"),
    [(V3, 1e-6), (GLM5, 1e-5), (GLM4_FLASH, 1e-5), (MINICPM3, 1e-5), (SARVAM, 1e-6)],
)
def test_the_default_of_rms_norm_eps_is_that_of_transformers(
    fields: dict[str, Any], eps: float
) -> None:
    assert parse_config(without(fields, "rms_norm_eps")).rms_norm_eps == eps


def test_nulls_of_minicpm3_mean_no_factor() -> None:
    config = parse_config(MINICPM3 | {"scale_depth": None, "dim_model_base": None})
    assert (config.residual_scale, config.logit_scale) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_type": "default"}, "type: expected 'default', which rope_type is, got 'yarn'"),
        ({"rope_type": "longrope"}, "type: expected 'longrope', which rope_type is, got 'yarn'"),
        ({"type": "default"}, "beta_fast: expected no such field, .* with type 'default'"),
        ({"type": None}, "beta_fast: expected no such field, .* with type 'default'"),
        ({"type": "default", "rope_type": "yarn"}, "type: expected 'yarn', which rope_type is"),
        ({"short_factor": [1.0] * 32}, "short_factor: expected no such field"),
        ({"beta_fast": 1, "beta_slow": 32}, "beta_fast: expected at least 32.0, beta_slow, got 1"),
        ({"beta_slow": 33, "beta_fast": None}, "beta_fast: expected at least 33.0, beta_slow"),
        ({"factor": 0}, "factor: expected a number above 0"),
        ({"factor": None}, "factor: expected a number"),
    ],
    ids=str,
)
def test_fields_of_rope_must_agree(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: rope_scaling.{words}"):
        parse_config(V3 | {"rope_scaling": YARN | fields})


def test_two_names_of_the_same_rope_agree() -> None:
    scaling = YARN | {"rope_type": "yarn", "type": "deepseek_yarn"}
    assert parse_config(V3 | {"rope_scaling": scaling}) == parse_config(V3)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        (MISTRAL4, "n_group", 2),
        (MISTRAL4, "scoring_func", "sigmoid"),
        (MISTRAL4, "rope_parameters.partial_rotary_factor", 1.0),
        (V3 | {"rope_scaling": None}, "rope_parameters.partial_rotary_factor", 0.5),
        (V3 | {"rope_scaling": None}, "rope_parameters.llama_4_scaling_beta", 0.1),
        (GLM4_FLASH, "partial_rotary_factor", 0.5),
    ],
)
def test_fields_of_newer_models_are_checked(
    fields: dict[str, Any], field: str, value: object
) -> None:
    outer, _, inner = field.rpartition(".")
    changed = {inner: value}
    if outer:
        changed = {outer: fields.get(outer, YARN) | changed}
    with pytest.raises(ValueError, match=f"^config.json: {field}: expected"):
        parse_config(fields | changed)


def test_sarvam_is_v3_with_other_names() -> None:
    config = parse_config(SARVAM)
    assert config.moe is not None and config.rope.kind == "yarn"
    assert (config.moe.num_experts, config.moe.num_shared_experts) == (128, 1)
    assert config.num_dense_layers == 1 and config.q_lora_rank is None


def test_longrope_chooses_factors_by_the_run_length() -> None:
    scaling = MINICPM3["rope_scaling"] | {"long_factor": [2.0] * 16, "factor": 8.0}
    config = parse_config(MINICPM3 | {"rope_scaling": scaling})
    short, amplitude = inverse_frequencies(config.rope, 32, 32768)
    long, _ = inverse_frequencies(config.rope, 32, 32769)
    np.testing.assert_allclose(short, 2 * long)
    assert amplitude == pytest.approx(math.sqrt(1 + math.log(8) / math.log(32768)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("use_bias", True),
        ("bias", True),
        ("topk_method", "random"),
        ("scoring_func", "softmax"),
        ("moe_layer_freq", 2),
        ("n_group", 7),
        ("rope_scaling", YARN | {"type": "linear"}),
        ("rope_scaling", YARN | {"truncate": False}),
        ("rope_scaling", YARN | {"apply_yarn_scaling": False}),
        ("rope_scaling", YARN | {"llama_4_scaling_beta": 0.1}),
        ("quantization_config", {"quant_method": "awq"}),
        ("index_topk", 2048),
        ("sliding_window", 4096),
        ("llama_4_scaling", {"beta": 0.1}),
        ("mla_scale_q_lora", True),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_gated_attention", True),
        ("attention_sinks", 4),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention"]),
        ("position_embedding_type", "alibi"),
        ("use_nope", True),
        ("local_layers", [1]),
        ("logit_cap", 3),
        ("k_norm", True),
        ("compress_ratios", [4]),
        ("differential", True),
        ("value_residual", True),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_unsupported_fields_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"config.json: {field}"):
        parse_config(V3 | {field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "attention_dropout": 0.1, "index_topk": None},
        {"layer_types": ["full_attention"] * 61, "mla_scale_q_lora": False},
        {"position_embedding_type": "rope"},
        {"attention_bias": False, "use_bias": False, "moe_router_enable_expert_bias": True},
        {"unknown": 3},
    ],
    ids=str,
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, object]) -> None:
    assert parse_config(V3 | fields) == parse_config(V3)


def test_rope_scaling_wins_over_rope_parameters() -> None:
    """As in transformers 5."""
    both = V3 | {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}
    assert parse_config(both).rope == parse_config(V3 | {"rope_scaling": YARN}).rope
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    with pytest.raises(ValueError, match="config.json: rope_parameters.rope_theta: expected"):
        parse_config(both | other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 10**400),
        ("rope_theta", 1e300),
        ("rope_scaling.factor", 10**400),
        ("rope_scaling.original_max_position_embeddings", 10**30),
        ("routed_scaling_factor", math.inf),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", 2**31 - 1),
        ("n_routed_experts", 2**31 - 1),
        ("hidden_size", 10**30),
        ("quantization_config.weight_block_size", [10**30, 128]),
        ("eos_token_id", -1),
        ("eos_token_id", 129280),
        ("eos_token_id", 1.0),
        ("eos_token_id", True),
        ("eos_token_id", "1"),
        ("eos_token_id", [1, [2]]),
        ("eos_token_id", {"id": 1}),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.activation_scheme", ["dynamic"]),
        ("quantization_config.scale_fmt", "e8m0"),
        ("quantization_config.kv_cache_scheme", {"num_bits": 8}),
        ("quantization_config.weight_per_tensor", True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    outer, _, inner = field.rpartition(".")
    changed: dict[str, Any] = {inner: value}
    if outer:
        inside: Any = V3[outer]
        changed = {outer: inside | changed}
    with pytest.raises(ValueError, match=f"^config.json: {field}: expected"):
        parse_config(V3 | changed)


@pytest.mark.parametrize("field", ["short_factor", "long_factor"])
@pytest.mark.parametrize("value", [10**400, math.inf, math.nan, True], ids=lambda x: str(x)[:9])
def test_factors_out_of_range_are_named(field: str, value: object) -> None:
    scaling = MINICPM3["rope_scaling"] | {field: [value] * 16}
    with pytest.raises(ValueError, match=f"rope_scaling.{field}: expected a list of numbers"):
        parse_config(MINICPM3 | {"rope_scaling": scaling})


def test_published_fields_of_fp8_weights_change_nothing() -> None:
    published = FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    for more in ({}, {"ignored_layers": ["lm_head"]}, {"dequantize": False}):
        got = parse_config(V3 | {"quantization_config": published | more})
        assert got == parse_config(V3)


def test_a_text_may_have_no_end() -> None:
    for eos in (None, []):
        assert parse_config(V3 | {"eos_token_id": eos}).eos_token_ids == ()


def test_fp8_weights_need_a_block_shape() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3"}
    with pytest.raises(ValueError, match="quantization_config.weight_block_size: expected a value"):
        parse_config(V3 | {"quantization_config": fp8})


def test_fp8_projections_must_end_with_a_block() -> None:
    """The scales of the latent's projection come after those of the query's."""
    with pytest.raises(ValueError, match="q_lora_rank: expected a multiple of 128, .* got 1500"):
        parse_config(V3 | {"q_lora_rank": 1500})
    rows = {"q_lora_rank": None, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="qk_rope_head_dim.: expected a multiple of 128.*got 192"):
        parse_config(V3 | rows)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "7168"),
        ("tie_word_embeddings", "false"),
        ("rope_interleave", 1),
        ("norm_topk_prob", "true"),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", math.nan),
        ("qk_rope_head_dim", 63),
        ("num_experts_per_tok", 129),  # the experts of 4 groups of 32 are 128
        ("topk_group", 9),
        ("rope_theta", 1),
        ("rope_scaling", YARN | {"original_max_position_embeddings": 1}),
        ("rope_scaling", YARN | {"factor": -40}),
        ("quantization_config", FP8 | {"weight_block_size": [0, 0]}),
        ("num_hidden_layers", 0),
        ("kv_lora_rank", 512.0),
        ("max_position_embeddings", None),
        ("n_routed_experts", "many"),
        ("n_group", 0),
        ("rope_theta", "10000"),
        ("rope_scaling", 40),
        ("rope_scaling", YARN | {"factor": "40"}),
        ("quantization_config", "fp8"),
    ],
)
def test_fields_of_a_wrong_type_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^config.json: {field}.*: expected"):
        parse_config(V3 | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("short_factor", [1.0] * 5, "16 numbers above 0, one for each pair, got 5"),
        ("long_factor", [], "16 numbers above 0, one for each pair, got 0"),
        ("long_factor", [0.0] * 16, "a list of numbers above 0"),
        ("original_max_position_embeddings", 1, "an integer of at least 2, got 1"),
    ],
)
def test_longrope_fields_are_checked(field: str, value: object, words: str) -> None:
    scaling = MINICPM3["rope_scaling"] | {field: value}
    with pytest.raises(ValueError, match=rf"rope_scaling.{field}: expected {words}"):
        parse_config(MINICPM3 | {"rope_scaling": scaling})


def test_a_zero_is_kept_where_it_means_zero() -> None:
    rope = YARN | {"attention_factor": 0, "mscale": 0}
    zeros = {"rms_norm_eps": 0, "routed_scaling_factor": 0, "rope_scaling": rope}
    config = parse_config(V3 | zeros)
    assert config.moe is not None
    got = (config.rms_norm_eps, config.moe.scale, config.rope.amplitude, config.rope.mscale)
    assert got == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected the JSON file of a checkpoint directory .*No such file"),
        ("{", "expected the JSON file of a checkpoint directory"),
        ("[]", "expected a JSON object"),
    ],
)
def test_a_missing_or_broken_file_is_named(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*config.json.*{words}"):
        load_config(tmp_path)


def test_softmax_routing_with_normalised_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_topk_prob"):
        parse_config(V2_LITE | {"norm_topk_prob": True})


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    fields = {k: v for k, v in V3.items() if k != "kv_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="kv_lora_rank: expected a value"):
        load_config(tmp_path)
