"""What a server is refused for before its processes start, each with one line that says why."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

import json
import math
import re
import socket
from typing import Any

import jax.numpy as jnp
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.hf_transformers_utils import get_tokenizer
from sgl_jax.srt.server_args import ServerArgs

from jax_mla.integrations.sglang import fp8, sparse_config

DENSE = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
# --kv-cache-dtype. `auto` is the model's dtype.
CACHE_DTYPES = {
    "auto": None,
    "bf16": jnp.dtype(jnp.bfloat16),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
}
# What config.json has as a number of at least 1.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
# The engine takes prompts that are shorter than the cache by more than this.
TOKENS_BESIDE_PROMPT = 6


def read_arguments() -> ServerArgs:
    """Return the arguments of the command line; the engine reads one of them as JSON."""
    try:
        return ServerArgs.from_cli()
    except json.JSONDecodeError as error:
        check_dtype_config(error.doc)
        raise


def check(args: ServerArgs) -> None:
    """Refuse what could not be served, before anything is started.

    Raises:
      ValueError: names the argument, what was expected and what came.
    """
    check_port(args.host, args.port)
    check_overrides(args.json_model_override_args)
    check_dtype_config(args.dtype_config)
    try:
        config = ModelConfig.from_server_args(args)
    except (OSError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--model-path: {_first_line(error)}") from error
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            "--model-path: expected a config.json that the engine can read, got one with a value "
            f"of the wrong kind: {_first_line(error)}"
        ) from error
    check_engine(args, config)
    if args.enable_lora and args.enable_static_lora:
        raise ValueError("--enable-lora, --enable-static-lora: expected at most one, got both")
    # The server would find the rest after all checks here, and show a traceback.
    args.check_server_args()
    check_tokenizer(args)


def check_engine(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse what an engine could not serve, whoever starts it."""
    check_model(config)
    check_features(args, config)
    if sparse_config.is_sparse(config):
        sparse_config.check(args, config)
    check_dtypes(args, config)
    check_mesh(args, config)
    check_quantization(args, config)
    check_cache(args, config)
    check_scheduling(args)


def check_port(host: str, port: int) -> None:
    """Refuse a port that is not free; the engine would find out after it has loaded the model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--port: expected a free port on {host}, got {port}: {why}"
            ) from error


def check_overrides(text: str) -> None:
    """Refuse overrides that are no JSON object; the engine would blame the model's own file."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError(f"--json-model-override-args: expected a JSON object, got {text!r}")


def check_dtype_config(given: object) -> None:
    """Refuse dtypes of single modules, which the engine's DeepSeek models do not read."""
    if given is not None:
        raise ValueError(
            f"--dtype-config: expected none, since DeepSeek models do not read it, got {given!r}"
        )


def check_tokenizer(args: ServerArgs) -> None:
    """Refuse a tokenizer that cannot be loaded; the engine would find out beside the model."""
    if args.skip_tokenizer_init:
        return
    try:
        get_tokenizer(
            args.tokenizer_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
            tokenizer_backend=args.tokenizer_backend,
            download_dir=args.download_dir,
        )
    except Exception as error:  # those of several packages
        raise ValueError(
            "--tokenizer-path: expected a tokenizer that the engine can load, got "
            f"{args.tokenizer_path}: {_first_line(error)}"
        ) from error


def check_model(config: ModelConfig) -> None:
    """Refuse checkpoints without Multi-head Latent Attention, and those that nobody has tried."""
    architecture = config.hf_config.architectures[0]
    served = (*DENSE, *sparse_config.ARCHITECTURES)
    if architecture not in served:
        raise ValueError(
            "--model-path: expected a checkpoint with Multi-head Latent Attention "
            f"({' or '.join(served)}), got {architecture}"
        )
    text = config.hf_text_config
    sizes = [(name, getattr(text, name, None)) for name in SIZES]
    for name, size in (*sizes, ("n_routed_experts", text.n_routed_experts or 1)):  # or none
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"--model-path: expected {name} to be an int of at least 1, got {size!r}"
            )
    if text.kv_lora_rank % 128:
        raise ValueError(
            f"--model-path: expected kv_lora_rank to be a multiple of 128, got {text.kv_lora_rank}"
        )


def check_features(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse, by name, what the attention or the experts cannot do."""
    text = config.hf_text_config
    architecture = config.hf_config.architectures[0]
    asks_for_sparse = (
        args.attention_backend == sparse_config.BACKEND
        or getattr(text, "index_topk", None) is not None
    )
    refused = (
        (
            f"sparse attention (DSA) in {architecture}",
            asks_for_sparse and architecture not in sparse_config.ARCHITECTURES,
        ),
        ("a sliding window", config.sliding_window is not None),
        ("a soft cap of the scores", bool(getattr(text, "attn_logit_softcapping", None))),
        ("speculative decoding", args.speculative_algorithm is not None),
        ("--multimodal", args.multimodal),
        # What it tokenises goes round `requests.check_tokens`.
        ("--enable-tokenizer-batch-encode", args.enable_tokenizer_batch_encode),
    )
    for feature, is_asked in refused:
        if is_asked:
            raise ValueError(f"{feature}: not served through jax_mla")
    choices = (
        ("--attention-backend", args.attention_backend, ("fa", sparse_config.BACKEND)),
        ("--moe-backend", args.moe_backend, ("epmoe",)),
        ("--kv-cache-dtype", args.kv_cache_dtype, tuple(CACHE_DTYPES)),
    )
    for name, got, expected in choices:
        if got not in expected:
            raise ValueError(f"{name}: expected {' or '.join(expected)}, got {got}")


def check_dtypes(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse dtypes that no kernel of a GPU takes, and a cache in a dtype of its own."""
    dtype = jnp.dtype(config.dtype)
    if args.kv_cache_dtype == "bf16" and dtype != jnp.bfloat16:
        raise ValueError(
            f"--kv-cache-dtype: expected auto or fp8_e4m3 for a model in {dtype}, got bf16"
        )
    if args.device not in ("cuda", "gpu"):
        return
    served = ("bfloat16",) if args.kv_cache_dtype == "fp8_e4m3" else ("bfloat16", "float16")
    if dtype.name not in served:
        raise ValueError(
            f"--dtype: expected {' or '.join(served)} on a GPU with --kv-cache-dtype "
            f"{args.kv_cache_dtype}, got {dtype}"
        )


def check_mesh(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse sizes that do not divide each other."""
    text = config.hf_text_config
    _divides("--tp-size", args.tp_size, "--dp-size", args.dp_size)
    _divides("--tp-size", args.tp_size, "--ep-size", args.ep_size)
    _divides("--tp-size", args.tp_size, "--nnodes", args.nnodes)
    address = args.dist_init_addr or "none"
    if args.nnodes > 1 and not re.fullmatch(r".+:\d+", address):
        raise ValueError(
            f"--dist-init-addr: expected HOST:PORT of the first node with --nnodes {args.nnodes}, "
            f"got {address}"
        )
    heads = text.num_attention_heads
    _divides("the model's heads", heads, "--tp-size / --dp-size", args.tp_size // args.dp_size)
    _divides("the model's experts", text.n_routed_experts or 0, "--ep-size", args.ep_size)


def check_quantization(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse quantised weights, unless they are a checkpoint's and in FP8 in blocks."""
    quantization = config.quantization_config
    if quantization is None:
        return
    is_in_blocks = quantization.weight_block_size is not None
    given = args.quantization_config_path
    if given is not None and (is_in_blocks or quantization.is_static_checkpoint):
        raise ValueError(
            "--quantization-config-path: expected none for a checkpoint in FP8, and none with "
            f"blocks, got {given}"
        )
    if is_in_blocks:
        if args.enable_lora or args.enable_static_lora:
            raise ValueError("--enable-lora, --enable-static-lora: not served with FP8 weights")
        fp8.check_blocks(config, args.tp_size // args.dp_size)
    elif quantization.has_moe_quantization():
        raise ValueError(
            "--model-path, --quantization-config-path: expected experts in FP8 in blocks or not "
            "quantised, got "
            f"{jnp.dtype(quantization.moe_weight_dtype or quantization.moe_activation_dtype)}"
        )


def check_cache(args: ServerArgs, config: ModelConfig) -> None:
    """Refuse pages that the pool cannot have, and a cache that no request fits into."""
    dtype = CACHE_DTYPES[args.kv_cache_dtype] or jnp.dtype(config.dtype)
    rows = max(2, 4 // dtype.itemsize)  # a pool's rows lie in packs of 4 bytes
    if args.page_size < rows or args.page_size % rows:
        raise ValueError(
            f"--page-size: expected a multiple of {rows} for a cache in {dtype}, "
            f"got {args.page_size}"
        )
    if args.chunked_prefill_size > 0 and args.chunked_prefill_size % args.page_size:
        raise ValueError(
            f"--chunked-prefill-size: expected a multiple of --page-size ({args.page_size}), or "
            f"-1, got {args.chunked_prefill_size}"
        )
    if args.context_length is not None and args.context_length < 1:
        raise ValueError(f"--context-length: expected at least 1, got {args.context_length}")
    if args.max_total_tokens is not None:
        least = math.ceil((TOKENS_BESIDE_PROMPT + 2) / args.page_size) * args.page_size
        if args.max_total_tokens < least:
            raise ValueError(
                f"--max-total-tokens: expected at least {least}, which the shortest request needs "
                f"with pages of {args.page_size} tokens, got {args.max_total_tokens}"
            )


def check_scheduling(args: ServerArgs) -> None:
    """Refuse limits under which nothing is served; the engine would only notice while serving."""
    if args.max_running_requests is not None and args.max_running_requests < args.dp_size:
        raise ValueError(
            f"--max-running-requests: expected at least --dp-size ({args.dp_size}), got "
            f"{args.max_running_requests}"
        )
    if args.stream_interval < 1:
        raise ValueError(f"--stream-interval: expected at least 1, got {args.stream_interval}")
    if not 0 < args.mem_fraction_static <= 1:
        raise ValueError(
            "--mem-fraction-static: expected a number above 0 and at most 1, got "
            f"{args.mem_fraction_static}"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _divides(name: str, size: Any, divisor_name: str, divisor: int) -> None:
    if divisor < 1 or size % divisor:
        raise ValueError(f"{divisor_name}: expected a divisor of {name} ({size}), got {divisor}")
