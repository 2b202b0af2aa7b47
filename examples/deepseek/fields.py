"""The fields of a `config.json`: which models they may be of, and which fields change attention.

Every field whose name says that it concerns attention is read, or is known to change nothing, or is
refused by its name. So a model with something new is an error, and not a wrong text.
"""

from typing import Any, TypeVar

Default = TypeVar("Default", int, None)
MOST_INTEGER = 2**31 - 1
MOST_NUMBER = 2.0**127  # float32 has it
MOST_COUNT = 2**16  # of layers, and of experts

SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
MODEL_TYPES = (
    "deepseek_v2", "deepseek_v3", *SPARSE_TYPES, "glm4_moe_lite", "kimi_k2", "minicpm3", "mistral4",
    "sarvam_mla", "youtu",
)  # fmt: skip
# Models that read pictures too: their `model_type`, and those of the `text_config` that is loaded.
NESTED_TYPES = {"kimi_k25": ("kimi_k2", "deepseek_v3"), "mistral3": ("mistral4",)}
TEXT_PREFIX = "language_model."  # of the names of their tensors
NOT_SERVED = {
    "axk1": "the results of its experts are normalised",
    "axk2": "its norms and its attention have gates",
    "bailing_hybrid": "most of its layers have linear attention",
    "deepseek_v4": "one vector is key and value, and compressors make it",
    "dots3_note": "its attention has an output gate and a norm of the keys' rotary part",
    "glm5_next": "most of its layers have linear attention, and an index key stands for 16 tokens",
    "hy_v4": "its attention has learned sinks and its residual stream several channels",
    "hy_v4_vl": "its attention has learned sinks and its residual stream several channels",
    "kimi_linear": "most of its layers have linear attention",
    "longcat_flash": "a layer has two attention blocks, beside which its experts run, and some "
    "experts are the identity",
    "mistral_large4": "its indexer has no query latent, its layers share caches, and some do not "
    "rotate",
}  # fmt: skip

# What some checkpoints call a field.
ALIASES = {
    "sarvam_mla": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
}
# Fields whose names say that they may change attention, and which parse_config reads, or which do
# not change what the model computes.
SERVED = {
    "kv_lora_rank", "mlp_layer_types", "model_type", "num_attention_heads",
    "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave", "rope_parameters", "rope_scaling",
    "rope_theta", "routed_scaling_factor", "scale_depth", "scale_emb", "v_head_dim",
}  # fmt: skip
SERVED_IF_SPARSE = {
    "index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "indexer_types",
}  # fmt: skip
HARMLESS = {
    # MLA has no such heads; its sizes are those of the fields above.
    "head_dim", "num_key_value_heads", "q_head_dim", "qk_head_dim",
    "attention_dropout", "attn_implementation", "_attn_implementation", "max_window_layers",
    "_attn_implementation_autoset", "output_attentions", "use_flash_attention",
    "use_sliding_window",  # says whether sliding_window counts
    # about layers that only predict further tokens, which this example does not run
    "index_share_for_mtp_iteration",
    "moe_router_enable_expert_bias",  # is a tensor that is read
}  # fmt: skip
ATTENTION_WORDS = (
    "alibi", "attention", "attn", "causal", "chunk", "compress", "differential", "gate", "head",
    "index", "k_norm", "key_norm", "kv", "layer_types", "local_", "logit_cap", "lora", "mla",
    "nope", "position_embedding_type", "q_", "qk", "rope", "rotary", "scal", "sink", "softcap",
    "soft_cap", "sparse", "temperature_tuning", "value_residual", "window",
)  # fmt: skip
# Fields of rope_scaling or rope_parameters: those that may have one value, and those that are read.
ROPE_ONLY = {"truncate": True, "apply_yarn_scaling": True}
ROPE_SERVED = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
ROPE_SERVED_IN_MISTRAL = {"llama_4_scaling_beta", "max_position_embeddings"}
ROPE_SERVED_BY_KIND: dict[str, set[str]] = {
    "default": set(),
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "attention_factor",
    },
    "longrope": {
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
        "long_factor",
    },
}  # fmt: skip
# Fields of quantization_config: those that are read, and those that change nothing here, because
# the files say which tensors are in FP8 and their scales are numbers in any case.
QUANTIZATION_SERVED = {"quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt"}
QUANTIZATION_HARMLESS = {"modules_to_not_convert", "ignored_layers"}
# Models whose normalisations add 1e-5 if config.json does not say, as transformers has it.
EPS_1E_5_TYPES = ("glm_moe_dsa", "glm4_moe_lite", "minicpm3")
# Models whose experts are in several groups; those of the other models may leave the fields out.
GROUPED_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
# Beside a text_config, fields with these words are about pictures; ignore_index is of training.
PICTURE_WORDS = ("vision", "image", "video", "projector", "ignore_index")


class Fields(dict[str, Any]):
    """The fields of config.json, or of an object in it. Errors name the field."""

    prefix = ""

    def __missing__(self, field: str) -> Any:
        """Raise ValueError in place of KeyError."""
        raise ValueError(f"config.json: {self.prefix}{field}: expected a value, got no such field")

    def integer(self, field: str, least: int = 1, most: int = MOST_INTEGER) -> int:
        """An integer of at least `least` and at most `most`."""
        got = self[field]
        valid = isinstance(got, int) and not isinstance(got, bool) and got >= least
        require(valid, self.prefix + field, got, f"an integer of at least {least}")
        require(got <= most, self.prefix + field, got, f"an integer of at most {most}")
        return got

    def integer_or(self, field: str, default: Default, least: int = 1) -> int | Default:
        """An integer of at least `least`. A missing field and null give the default."""
        return default if self.get(field) is None else self.integer(field, least)

    def number(self, field: str, default: float | None = None) -> float:
        """A number from 0 to `MOST_NUMBER`. A missing field and null give the default, if any."""
        is_left_out = default is not None and self.get(field) is None
        got: Any = default if is_left_out else self[field]
        valid = _is_number(got) and 0 <= got <= MOST_NUMBER
        require(valid, self.prefix + field, got, f"a number from 0 to {MOST_NUMBER:.2g}")
        return float(got)

    def boolean(self, field: str, default: bool) -> bool:
        """True or false. A missing field and null give the default."""
        got = default if self.get(field) is None else self[field]
        require(isinstance(got, bool), self.prefix + field, got, "true or false")
        return got

    def factors(self, field: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        got = self[field]
        valid = isinstance(got, list)
        valid = valid and all(_is_number(x) and 0 < x <= MOST_NUMBER for x in got)
        expected = f"a list of numbers above 0, at most {MOST_NUMBER:.2g}"
        require(valid, self.prefix + field, got, expected)
        expected = f"{count} numbers above 0, one for each pair"
        require(len(got) == count, self.prefix + field, len(got), expected)
        return tuple(got)


def wrap(value: object, prefix: str) -> Fields:
    """Wrap the JSON object that errors call `prefix`."""
    require(isinstance(value, dict), prefix.rstrip(".") or "content", value, "a JSON object")
    fields = Fields(value)  # type: ignore[arg-type]
    fields.prefix = prefix
    return fields


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(condition: bool, field: str, got: object, expected: str) -> None:
    """Raise ValueError unless a condition holds, naming a field of config.json."""
    if not condition:
        raise ValueError(f"config.json: {field}: expected {expected}, got {got!r}")


def of_text(content: dict[str, Any]) -> tuple[Fields, str]:
    """Return the fields of the text model, and what the names of its tensors begin with.

    Args:
      content: the parsed file. The text model may be its `text_config`.

    Raises:
      ValueError: the model is not served; a field beside `text_config` may change attention.
    """
    raw = wrap(content, "")
    model_type = raw.get("model_type")
    texts, prefix = NESTED_TYPES.get(model_type) if isinstance(model_type, str) else None, ""
    if texts is None:
        _check_type("model_type", model_type, (*MODEL_TYPES, *NESTED_TYPES))
    else:
        outer, raw, prefix = raw, wrap(raw["text_config"], "text_config."), TEXT_PREFIX
        _check_type("text_config.model_type", raw.get("model_type"), texts)
        for field, got in outer.items():
            is_harmless = field in HARMLESS or field in ("model_type", "text_config")
            if not is_harmless and not any(word in field for word in PICTURE_WORDS):
                require(
                    not (got and _may_change(field)), field, got, "no value, because of text_config"
                )
        if "tie_word_embeddings" not in raw:
            outer["tie_word_embeddings"]  # must be in either: transformers' own default is true
        # The outer object is what transformers reads these of.
        for field in ("tie_word_embeddings", "quantization_config", "eos_token_id"):
            if outer.get(field) is not None:
                raw[field] = outer[field]
        raw.prefix = ""  # errors name fields as those of other models
    for alias, field in ALIASES.get(raw["model_type"], {}).items():
        if alias in raw:
            raw.setdefault(field, raw[alias])
    return raw, prefix


def _check_type(field: str, got: object, served: tuple[str, ...]) -> None:
    reason = NOT_SERVED.get(got.removesuffix("_text")) if isinstance(got, str) else None
    expected = f"one of {served}" + (f", because of {got!r} {reason}" if reason else "")
    require(got in served, field, got, expected)


def refuse_other_attention(raw: Fields) -> None:
    """Refuse a field that may change attention, unless its value says that it does not."""
    is_sparse = raw["model_type"] in SPARSE_TYPES
    served = SERVED | HARMLESS
    if is_sparse:
        served = served | SERVED_IF_SPARSE
    expected: dict[str, Any] = {
        "partial_rotary_factor": 1.0,
        "position_embedding_type": "rope",
    }
    if raw.get("layer_types") is not None:
        of_layer = "indexed_attention" if is_sparse else "full_attention"
        expected["layer_types"] = [of_layer] * raw.integer("num_hidden_layers")
    if raw.get("use_sliding_window") is False:
        expected["sliding_window"] = raw.get("sliding_window")
    for field, got in raw.items():
        if field in expected:
            is_off = got is None or got == expected[field]
            require(is_off, field, got, f"{expected[field]!r} or null")
        elif field not in served and _may_change(field):
            require(not got, field, got, "no value, because this is not implemented")


def _may_change(field: str) -> bool:
    is_bias = field == "bias" or field.endswith("_bias")
    return is_bias or any(word in field for word in ATTENTION_WORDS)
