"""Published config.json files, and what the model example refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from examples.deepseek.config import MODEL_TYPES, Index, load_config, parse_config
from examples.deepseek.rope import inverse_frequencies

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
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "v_head_dim": 256,
    "vocab_size": 154880,
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


def test_the_table_of_models_has_what_the_example_loads() -> None:
    lines = (Path(__file__).parents[1] / "docs" / "models.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| `")]
    assert {row[1].strip("`") for row in rows if "example" in row[-2]} == set(MODEL_TYPES)
    index = {row[1].strip("`"): row[6] for row in rows if row[1] != "`model_type`"}
    for fields in (V32, GLM5):
        config = parse_config(fields).index
        assert config is not None
        sizes = f"{config.num_heads} x {config.head_dim}, {config.topk}"
        assert index.pop(str(fields["model_type"])) == sizes
    assert not any(index.values())


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


def test_fp8_weights_need_a_block_shape() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3"}
    with pytest.raises(ValueError, match="quantization_config.weight_block_size: expected a value"):
        parse_config(V3 | {"quantization_config": fp8})


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
