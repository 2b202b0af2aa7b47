"""Read a Hugging Face `config.json` of the DeepSeek family into one small dataclass.

One `Config` describes DeepSeek-V2-Lite, V2, V3, R1, Kimi-K2 and MiniCPM3. What the model code does
not implement is refused here, by the name of the field, before any weight is read.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: plain, YaRN or LongRoPE.

    Attributes:
      theta: base of the frequencies.
      kind: "default", "yarn" or "longrope".
      factor: context extension factor (YaRN, LongRoPE).
      original_max_positions: context length before extension.
      beta_fast: rotations above which YaRN leaves a frequency alone.
      beta_slow: rotations below which YaRN divides a frequency by `factor`.
      mscale: numerator of YaRN's amplitude correction.
      mscale_all_dim: denominator of it, and YaRN's correction of the softmax scale.
      amplitude: explicit factor on cos and sin, in place of the one derived from the above.
      short_factors: LongRoPE divisors of the frequencies up to `original_max_positions`.
      long_factors: LongRoPE divisors beyond it.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    amplitude: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Moe:
    """Mixture-of-experts feed-forward layers and their router.

    Attributes:
      num_experts: routed experts.
      num_experts_per_token: routed experts that each token visits.
      intermediate_size: width of one expert.
      num_shared_experts: experts that every token visits.
      scoring: "softmax" (V2) or "sigmoid" (V3, Kimi-K2).
      num_groups: groups of experts; 1 means no group limit.
      num_groups_per_token: groups that each token may choose experts from.
      normalize: divide the chosen weights by their sum.
      scale: factor on the chosen weights.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    scoring: str
    num_groups: int
    num_groups_per_token: int
    normalize: bool
    scale: float


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything the model code needs to know; hashable, so that it can be a static argument.

    Attributes:
      model_type: as in config.json.
      vocab_size: tokens in the vocabulary.
      hidden_size: width of the residual stream.
      num_layers: layers, dense ones first.
      num_dense_layers: leading layers with a dense feed-forward network.
      num_heads: query heads.
      q_lora_rank: rank of the query projection; None for a full one.
      kv_lora_rank: width of the latent, `d_ckv`.
      qk_nope_head_dim: unrotated part of a head's query and key.
      qk_rope_head_dim: rotated part, `d_kpe`.
      v_head_dim: a head's value.
      intermediate_size: width of the dense feed-forward network.
      rms_norm_eps: epsilon of the layer norms.
      rope: rotary embedding.
      rope_interleaved: the published weights hold rotation pairs side by side.
      moe: expert layers, or None.
      tied_head: the output head is the embedding.
      embed_scale: factor on embeddings (MiniCPM3).
      residual_scale: factor on each residual branch (MiniCPM3).
      logit_scale: factor on the hidden state before the head (MiniCPM3).
      fp8_block: block shape of fp8 weights with `weight_scale_inv`, or None.
      eos_token_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    rope_interleaved: bool
    moe: Moe | None
    tied_head: bool
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    fp8_block: tuple[int, int] | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def sm_scale(self) -> float:
        """Softmax scale, with YaRN's correction for the longer context."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.rope.kind == "yarn" and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's growth of attention amplitude with the extension factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def load_config(directory: str | Path) -> Config:
    """Read `directory/config.json`.

    Args:
      directory: a checkpoint directory.

    Returns:
      The configuration.

    Raises:
      ValueError: a field has a value that this example does not implement; the field is named.
    """
    return parse_config(json.loads((Path(directory) / "config.json").read_text()))


def parse_config(raw: dict[str, Any]) -> Config:
    """Turn the fields of a config.json into a `Config`; see `load_config`."""
    raw = _Fields(raw)
    model_type = raw.get("model_type")
    _require(model_type in MODEL_TYPES, "model_type", model_type, f"one of {MODEL_TYPES}")
    _require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    for field in ("attention_bias", "mlp_bias"):
        _require(not raw.get(field), field, raw.get(field), "false")
    minicpm = model_type == "minicpm3"
    num_layers, hidden_size = raw["num_hidden_layers"], raw["hidden_size"]
    moe = None if minicpm or not raw.get("n_routed_experts") else _parse_moe(raw)
    scales = {}
    if minicpm:  # its own code's defaults are "no scaling"
        scales = {
            "embed_scale": float(raw.get("scale_emb") or 1.0),
            "residual_scale": (raw.get("scale_depth") or num_layers**0.5) / num_layers**0.5,
            "logit_scale": (raw.get("dim_model_base") or hidden_size) / hidden_size,
        }
    eos = raw.get("eos_token_id")
    return Config(
        model_type=str(model_type),
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_layers
        if moe is None
        else min(raw.get("first_k_dense_replace") or 0, num_layers),
        num_heads=raw["num_attention_heads"],
        q_lora_rank=raw.get("q_lora_rank"),
        kv_lora_rank=raw["kv_lora_rank"],
        qk_nope_head_dim=raw["qk_nope_head_dim"],
        qk_rope_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw.get("v_head_dim") or hidden_size // raw["num_attention_heads"],
        intermediate_size=raw["intermediate_size"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw),
        rope_interleaved=raw.get("rope_interleave", not minicpm),
        moe=moe,
        tied_head=raw.get("tie_word_embeddings", minicpm),
        fp8_block=_parse_quantization(raw),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **scales,
    )


class _Fields(dict[str, Any]):
    """A dict whose missing keys are named as fields of config.json."""

    def __missing__(self, field: str) -> Any:
        """Raise ValueError in place of KeyError."""
        raise ValueError(f"config.json: {field}: expected a value, got no such field")


def _require(condition: bool, field: str, got: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"config.json: {field}: expected {expected}, got {got!r}")


def _parse_moe(raw: dict[str, Any]) -> Moe:
    """Routing of V2 (softmax, group maximum) or V3 and Kimi-K2 (sigmoid, bias, group top-2)."""
    v2 = raw["model_type"] == "deepseek_v2"
    scoring = raw.get("scoring_func") or ("softmax" if v2 else "sigmoid")
    expected = "softmax" if v2 else "sigmoid"
    _require(scoring == expected, "scoring_func", scoring, f"{expected!r} for this model_type")
    method = raw.get("topk_method") or ("greedy" if v2 else "noaux_tc")
    methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
    _require(method in methods, "topk_method", method, f"one of {methods}")
    frequency = raw.get("moe_layer_freq", 1)
    _require(frequency == 1, "moe_layer_freq", frequency, "1")
    normalize = bool(raw.get("norm_topk_prob", not v2))
    # DeepSeek's V2 code and transformers scale normalised softmax weights differently, and no
    # published V2 checkpoint asks for them.
    _require(not (v2 and normalize), "norm_topk_prob", True, "false with softmax routing")
    grouped = method != "greedy"
    num_groups = (raw.get("n_group") or 1) if grouped else 1
    num_experts = raw["n_routed_experts"]
    _require(num_experts % num_groups == 0, "n_group", num_groups, f"a divisor of {num_experts}")
    return Moe(
        num_experts=num_experts,
        num_experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        num_shared_experts=raw.get("n_shared_experts") or 0,
        scoring=scoring,
        num_groups=num_groups,
        num_groups_per_token=(raw.get("topk_group") or num_groups) if grouped else 1,
        normalize=normalize,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
    )


def _parse_rope(raw: dict[str, Any]) -> Rope:
    """Both spellings: published `rope_theta` + `rope_scaling`, transformers 5 `rope_parameters`."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kinds = ("default", "yarn", "longrope")
    _require(kind in kinds, "rope_scaling.type", kind, f"one of {kinds}")
    for field, only in (("truncate", True), ("partial_rotary_factor", 1.0)):
        got = scaling.get(field, only)
        _require(got == only, f"rope_scaling.{field}", got, str(only))
    if kind == "default":
        return Rope(theta)
    max_positions = raw["max_position_embeddings"]
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    amplitude = scaling.get("attention_factor")
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor") or max_positions / original),
        original_max_positions=original,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=float(scaling.get("mscale") or 0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0),
        amplitude=None if amplitude is None else float(amplitude),
        short_factors=tuple(scaling.get("short_factor") or ()),
        long_factors=tuple(scaling.get("long_factor") or ()),
    )


def _parse_quantization(raw: dict[str, Any]) -> tuple[int, int] | None:
    """Block shape of V3's published fp8 weights; every other quantisation is refused."""
    quantization = raw.get("quantization_config")
    if not quantization:
        return None
    method, fmt = quantization.get("quant_method"), quantization.get("fmt")
    described = f"{method} {fmt}"  # DeepSeek-V3's and Kimi-K2's
    _require(described == "fp8 e4m3", "quantization_config", described, "fp8 e4m3, or none")
    rows, cols = _Fields(quantization)["weight_block_size"]
    return int(rows), int(cols)
