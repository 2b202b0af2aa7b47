"""Read the `config.json` of a DeepSeek-architecture checkpoint.

One `Config` describes every model that loads (`fields.MODEL_TYPES`). A field with a value that the
model code does not implement is an error here, before any weight is read.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from .fields import (
    EPS_1E_5_TYPES,
    GROUPED_TYPES,
    MOST_COUNT,
    MOST_INTEGER,
    QUANTIZATION_HARMLESS,
    QUANTIZATION_SERVED,
    ROPE_ONLY,
    ROPE_SERVED,
    ROPE_SERVED_BY_KIND,
    ROPE_SERVED_IN_MISTRAL,
    SPARSE_TYPES,
    Fields,
    of_text,
    refuse_other_attention,
    require,
    wrap,
)

MAX_TOPK = 2**20  # what `jax_mla.index_topk` takes


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: plain, YaRN or LongRoPE.

    Attributes:
      theta: base of the frequencies.
      kind: "default", "yarn" or "longrope".
      factor: how many times longer the extended context is (YaRN, LongRoPE).
      original_max_positions: context length before the extension.
      beta_fast: YaRN keeps frequencies that rotate more often than this over the original context.
      beta_slow: YaRN divides frequencies that rotate less often than this by `factor`.
      mscale: numerator of YaRN's factor on cos and sin.
      mscale_all_dim: denominator of that factor. It also enters YaRN's softmax scale.
      amplitude: the factor on cos and sin, if config.json gives it. Otherwise it is derived.
      short_factors: LongRoPE's divisors of the frequencies up to `original_max_positions`.
      long_factors: LongRoPE's divisors for longer runs.
      query_beta: queries are multiplied by 1 + query_beta * ln(1 + floor(position /
        original_max_positions)) (Mistral 4).
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
    query_beta: float = 0.0


@dataclasses.dataclass(frozen=True)
class Moe:
    """Mixture-of-experts feed-forward layers and their router.

    Attributes:
      num_experts: number of routed experts.
      num_experts_per_token: routed experts of each token.
      intermediate_size: width of one expert.
      num_shared_experts: experts that process every token.
      scoring: "softmax" (V2, Mistral 4) or "sigmoid" (V3 and the others).
      num_groups: groups of experts. 1 means that a token may choose any expert.
      num_groups_per_token: groups from which a token may choose its experts.
      normalize: whether the weights of the chosen experts are divided by their sum.
      scale: factor on the weights of the chosen experts.
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
class Index:
    """The indexer of sparse attention (DeepSeek-V3.2, GLM-5).

    Attributes:
      num_heads: index heads.
      head_dim: size of an index query and of an index key.
      topk: how many cached tokens a query attends to.
      rope_interleaved: whether the two entries of a rotated pair lie side by side. In V3.2 they do
        not, although those of the latent cache do.
      own: for each layer, whether it has an indexer. A layer without one attends to the tokens that
        the nearest layer below with an indexer chose.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    own: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """How many layers have an indexer, and so keep index keys."""
        return sum(self.own)


@dataclasses.dataclass(frozen=True)
class Config:
    """What the model code needs to know. It is hashable, so it can be a static argument of jit.

    Attributes:
      model_type: as in config.json, or in its `text_config`.
      vocab_size: tokens in the vocabulary.
      hidden_size: width of the residual stream.
      num_layers: number of layers.
      num_dense_layers: how many of the first layers have a dense feed-forward network.
      num_heads: query heads.
      q_lora_rank: rank of the query projection. None if it is one full matrix.
      kv_lora_rank: width of the latent `ckv`; jax_mla's `d_ckv`.
      qk_nope_head_dim: size of a head's query and key without rotary embedding.
      qk_rope_head_dim: size of a head's query and key with it; jax_mla's `d_kpe`.
      v_head_dim: size of a head's value.
      intermediate_size: width of the dense feed-forward networks.
      max_positions: longest sequence that the model was made for, in tokens.
      rms_norm_eps: epsilon of the layer norms.
      rope: rotary embedding.
      rope_interleaved: whether the published weights hold the two entries of a rotated pair side by
        side.
      moe: the expert layers, or None.
      index: the indexer, or None if attention is dense.
      tensor_prefix: what the names of the tensors begin with.
      tied_head: whether the output head is the embedding.
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
    max_positions: int
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
    index: Index | None = None
    tensor_prefix: str = ""

    @property
    def q_dim(self) -> int:
        """Size of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        """The softmax scale: one over the root of a head's query size, times YaRN's correction."""
        scale = self.q_dim**-0.5
        if self.rope.kind == "yarn" and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor on the attention amplitude."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def load_config(directory: str | Path) -> Config:
    """Read `directory/config.json`.

    Args:
      directory: a checkpoint directory.

    Returns:
      The configuration.

    Raises:
      ValueError: the file cannot be read, or a field has a value that this example does not
        implement. The message names the file or the field.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the JSON file of a checkpoint directory ({error})"
        ) from error
    try:
        return parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def parse_config(fields: dict[str, Any]) -> Config:
    """Turn the fields of a config.json into a `Config`.

    Args:
      fields: the parsed file.

    Returns:
      The configuration.

    Raises:
      ValueError: a field is missing or has a value that this example does not implement.
    """
    raw, tensor_prefix = of_text(fields)
    model_type = raw["model_type"]
    require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
    refuse_other_attention(raw)
    minicpm = model_type == "minicpm3"
    num_layers, hidden_size = (
        raw.integer("num_hidden_layers", most=MOST_COUNT),
        raw.integer("hidden_size"),
    )
    num_heads, rope_dim = raw.integer("num_attention_heads"), raw.integer("qk_rope_head_dim")
    require(rope_dim % 2 == 0, "qk_rope_head_dim", rope_dim, "an even number")
    moe = None if minicpm or not raw.get("n_routed_experts") else _parse_moe(raw)
    scales = _parse_scales(raw, num_layers, hidden_size) if minicpm else {}
    fp8_block, q_lora_rank = _parse_quantization(raw), raw.integer_or("q_lora_rank", None)
    if fp8_block:  # the latent's projection lies below the query's, and so do their scales
        field = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
        q_rows = num_heads * (raw.integer("qk_nope_head_dim") + rope_dim)
        if q_lora_rank is not None:
            field, q_rows = "q_lora_rank", q_lora_rank
        expected = f"a multiple of {fp8_block[0]}, a block's rows"
        require(q_rows % fp8_block[0] == 0, field, q_rows, expected)
    num_dense_layers = num_layers
    if moe is not None:
        first = 1 if model_type in ("glm4_moe_lite", "sarvam_mla") else 0
        num_dense_layers = min(raw.integer_or("first_k_dense_replace", first, least=0), num_layers)
        num_dense_layers = _parse_mlp_types(raw, num_layers, num_dense_layers)
    return Config(
        model_type=str(model_type),
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=raw.integer("kv_lora_rank"),
        qk_nope_head_dim=raw.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=raw.integer_or("v_head_dim", hidden_size // num_heads),
        intermediate_size=raw.integer("intermediate_size"),
        max_positions=raw.integer("max_position_embeddings"),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-5 if model_type in EPS_1E_5_TYPES else 1e-6),
        rope=_parse_rope(raw),
        rope_interleaved=raw.boolean("rope_interleave", not minicpm),
        moe=moe,
        tied_head=raw.boolean("tie_word_embeddings", model_type in ("minicpm3", "youtu")),
        fp8_block=fp8_block,
        index=_parse_index(raw, num_layers) if model_type in SPARSE_TYPES else None,
        eos_token_ids=_parse_eos(raw),
        tensor_prefix=tensor_prefix,
        **scales,
    )


def _parse_eos(raw: Fields) -> tuple[int, ...]:
    """Read the tokens that end a text: none, one or a list."""
    got = raw.get("eos_token_id")
    tokens = [] if got is None else got if isinstance(got, list) else [got]
    size = raw.integer("vocab_size")
    valid = all(type(token) is int and 0 <= token < size for token in tokens)
    expected = f"an integer in [0, {size}), vocab_size, or a list of them"
    require(valid, "eos_token_id", got, expected)
    return tuple(tokens)


def _parse_scales(raw: Fields, num_layers: int, hidden_size: int) -> dict[str, float]:
    """Read the factors of MiniCPM3. A null means that there is none, as in transformers."""
    depth, base = raw["scale_depth"], raw["dim_model_base"]
    return {
        "embed_scale": raw.number("scale_emb"),
        "residual_scale": 1.0 if depth is None else raw.number("scale_depth") / num_layers**0.5,
        "logit_scale": 1.0 if base is None else raw.integer("dim_model_base") / hidden_size,
    }


def _parse_moe(raw: Fields) -> Moe:
    """Read the expert layers: routing by softmax (V2, Mistral 4) or sigmoid (V3 and the others)."""
    scoring, methods, normalizes = {
        "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy"), False),
        "mistral4": ("softmax", ("greedy",), True),
    }.get(raw["model_type"], ("sigmoid", ("noaux_tc",), True))
    default_scale = 1.0 if scoring == "softmax" else None
    got = raw.get("scoring_func") or scoring
    require(got == scoring, "scoring_func", got, f"{scoring!r} for this model_type")
    method = raw.get("topk_method") or methods[0]
    require(method in methods, "topk_method", method, f"one of {methods}")
    frequency = raw.get("moe_layer_freq", 1)
    require(frequency == 1, "moe_layer_freq", frequency, "1")
    normalize = raw.boolean("norm_topk_prob", normalizes)
    # No published V2 checkpoint normalises, and DeepSeek's code and transformers disagree on how.
    require(normalizes or not normalize, "norm_topk_prob", True, "false for this model_type")
    grouped = method != "greedy"
    if grouped and raw["model_type"] in GROUPED_TYPES:
        for field in ("n_group", "topk_group"):
            raw.integer(field)  # must be there
    num_groups = raw.integer_or("n_group", 1)
    # V2's greedy method ignores the groups.
    is_one = raw["model_type"] != "mistral4" or num_groups == 1
    require(is_one, "n_group", num_groups, "1 for this model_type")
    num_groups = num_groups if grouped else 1
    num_experts = raw.integer("n_routed_experts", most=MOST_COUNT)
    require(num_experts % num_groups == 0, "n_group", num_groups, f"a divisor of {num_experts}")
    open_groups = raw.integer_or("topk_group", num_groups) if grouped else 1
    require(open_groups <= num_groups, "topk_group", open_groups, f"at most {num_groups}, n_group")
    chosen, most = raw.integer("num_experts_per_tok"), open_groups * (num_experts // num_groups)
    expected = f"at most {most}, the experts of topk_group groups"
    require(chosen <= most, "num_experts_per_tok", chosen, expected)
    shared = raw["n_shared_experts"]
    return Moe(
        num_experts=num_experts,
        num_experts_per_token=chosen,
        intermediate_size=raw.integer("moe_intermediate_size"),
        num_shared_experts=0 if shared is None else raw.integer("n_shared_experts", least=0),
        scoring=scoring,
        num_groups=num_groups,
        num_groups_per_token=open_groups,
        normalize=normalize,
        scale=raw.number("routed_scaling_factor", default_scale),
    )


def _parse_mlp_types(raw: Fields, num_layers: int, num_dense_layers: int) -> int:
    """Return how many of the first layers are dense, which `mlp_layer_types` may say."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return num_dense_layers
    num_dense = types.count("dense") if isinstance(types, list) else 0
    expected = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    what = f"{num_layers} layers, first 'dense' ones and then 'sparse' ones"
    require(types == expected, "mlp_layer_types", types, what)
    return num_dense


def _parse_index(raw: Fields, num_layers: int) -> Index:
    """Read the indexer of DeepSeek-V3.2 or GLM-5."""
    is_glm, rope_dim = raw["model_type"] == "glm_moe_dsa", raw.integer("qk_rope_head_dim")
    raw.integer("q_lora_rank")  # the indexer's queries come from it
    head_dim = raw.integer("index_head_dim")
    expected = f"at least {rope_dim}, the values that are rotated (qk_rope_head_dim)"
    require(head_dim >= rope_dim, "index_head_dim", head_dim, expected)
    for field, expects in (("rope_interleave", True), ("indexer_rope_interleave", is_glm)):
        is_interleaved = raw.boolean(field, expects)
        require(is_interleaved == expects, field, is_interleaved, f"{expects}, as published")
    topk = raw.integer("index_topk")
    require(topk <= MAX_TOPK, "index_topk", topk, f"at most {MAX_TOPK}")
    return Index(
        num_heads=raw.integer("index_n_heads"),
        head_dim=head_dim,
        topk=topk,
        rope_interleaved=is_glm,
        own=_parse_own(raw, num_layers, is_glm),
    )


def _parse_own(raw: Fields, num_layers: int, is_glm: bool) -> tuple[bool, ...]:
    """Read which layers have an indexer: all, or those that GLM-5.2's fields name."""
    pattern, field = raw.get("indexer_types"), "indexer_types"
    if pattern is None:
        pattern, field = raw.get("index_topk_pattern"), "index_topk_pattern"
    if pattern is None:
        field = "index_topk_freq"
        every, offset = raw.integer_or(field, 1), raw.integer_or("index_skip_topk_offset", 2, 0)
        own = tuple(max(n - offset + 1, 0) % every == 0 for n in range(num_layers))
    else:
        names = {"F": True, "S": False, "full": True, "shared": False}
        valid = isinstance(pattern, list | str) and len(pattern) == num_layers
        valid = valid and all(isinstance(name, str) and name in names for name in pattern)
        require(valid, field, pattern, f"{num_layers} of 'full' or 'shared', or F or S")
        own = tuple(names[name] for name in pattern)  # type: ignore[union-attr]
        require(own[0], field, pattern, "an indexer in the first layer, which others may share")
    require(is_glm or all(own), field, raw.get(field), "an indexer in every layer of deepseek_v32")
    return own


def _parse_rope(raw: Fields) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # as transformers 5
    is_mistral = raw["model_type"] == "mistral4"
    # Without the field, transformers has YaRN in Mistral 4.
    scaling = wrap((raw[name] if is_mistral else raw.get(name)) or {}, f"{name}.")
    theta = scaling.number("rope_theta", 0.0) or raw.number("rope_theta", 0.0) or 10000.0
    other = wrap(raw.get("rope_parameters") or {}, "rope_parameters.")
    require(
        other.number("rope_theta", theta) == theta,
        "rope_parameters.rope_theta", other.get("rope_theta"), f"{theta}, as without this field",
    )  # fmt: skip
    require(theta > 1, "rope_theta", theta, "a number above 1")
    kind = _parse_rope_type(scaling)
    served = ROPE_SERVED | (ROPE_SERVED_IN_MISTRAL if is_mistral else set())
    served = served | ROPE_SERVED_BY_KIND[kind]
    for field, got in scaling.items():
        only = ROPE_ONLY.get(field)
        if only is not None:
            require(got == only, f"{name}.{field}", got, str(only))
        elif got is not None and field not in served:
            expected = f"no such field, which is not implemented with type {kind!r}"
            require(False, f"{name}.{field}", got, expected)
    _check_rotated_part(raw, scaling, is_mistral)
    beta = scaling.number("llama_4_scaling_beta") if is_mistral else 0.0
    if kind == "default":
        require(not beta, f"{name}.llama_4_scaling_beta", beta, "0 without yarn")
        return Rope(theta)
    max_positions = raw.integer("max_position_embeddings", least=2)
    original = scaling.integer("original_max_position_embeddings", least=2)
    factor = scaling.number("factor", max_positions / original if kind == "longrope" else None)
    require(factor > 0, f"{name}.factor", factor, "a number above 0")
    beta_fast = scaling.number("beta_fast", 0.0) or 32.0
    beta_slow = scaling.number("beta_slow", 0.0) or 1.0
    # Otherwise the frequencies are not those of transformers.
    expected = f"at least {beta_slow}, beta_slow"
    require(beta_fast >= beta_slow, f"{name}.beta_fast", beta_fast, expected)
    amplitude = scaling.get("attention_factor")
    num_pairs = raw.integer("qk_rope_head_dim") // 2
    short, long = (
        scaling.factors(field, num_pairs) if kind == "longrope" else ()
        for field in ("short_factor", "long_factor")
    )
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
        amplitude=None if amplitude is None else scaling.number("attention_factor", 0.0),
        short_factors=short,
        long_factors=long,
        query_beta=beta,
    )


def _parse_rope_type(scaling: Fields) -> str:
    """Read the kind of rotary embedding, which two fields may give."""
    kinds, found = tuple(ROPE_SERVED_BY_KIND), "default"
    for n, field in enumerate(("rope_type", "type")):
        got = scaling.get(field)
        if got is None:
            continue
        kind = "yarn" if got == "deepseek_yarn" else got  # what Sarvam calls it
        require(kind in kinds, scaling.prefix + field, got, f"one of {kinds}")
        is_same = n == 0 or scaling.get("rope_type") is None or kind == found
        require(is_same, scaling.prefix + field, got, f"{found!r}, which rope_type is")
        found = kind
    return found


def _check_rotated_part(raw: Fields, scaling: Fields, is_mistral: bool) -> None:
    """Check that `partial_rotary_factor` stands for `qk_rope_head_dim`."""
    rope_dim = raw.integer("qk_rope_head_dim")
    head_dim = rope_dim + (raw.integer("qk_nope_head_dim") if is_mistral else 0)
    got = scaling.number("partial_rotary_factor", rope_dim / head_dim)
    is_same = round(head_dim * got) == rope_dim
    expected = f"{rope_dim} / {head_dim}, the part that is rotated"
    require(is_same, f"{scaling.prefix}partial_rotary_factor", got, expected)


def _parse_quantization(raw: Fields) -> tuple[int, int] | None:
    """Read the block shape of DeepSeek's and Kimi's fp8 weights; no other format is implemented."""
    quantization = raw.get("quantization_config")
    if not quantization:
        return None
    fields = wrap(quantization, "quantization_config.")
    described = f"{fields.get('quant_method')} {fields.get('fmt')}"
    require(described == "fp8 e4m3", "quantization_config", described, "fp8 e4m3, or none")
    for field, got in fields.items():
        if field not in QUANTIZATION_SERVED | QUANTIZATION_HARMLESS:
            expected = "no value, because this is not implemented"
            require(not got, fields.prefix + field, got, expected)
    # DeepSeek-V3.1 and V3.2 say that their scales are powers of two.
    for field, only in (("activation_scheme", "dynamic"), ("scale_fmt", "ue8m0")):
        got = fields.get(field)
        require(got in (None, only), fields.prefix + field, got, f"{only!r} or null")
    block = fields["weight_block_size"]
    valid = isinstance(block, list) and len(block) == 2
    valid = valid and all(type(n) is int and 0 < n <= MOST_INTEGER for n in block)
    require(valid, "quantization_config.weight_block_size", block, "two integers of at least 1")
    return block[0], block[1]
