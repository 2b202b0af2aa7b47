"""What is replaced in sglang-jax, and why. docs/integrations.md says what upstream could offer."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from sgl_jax.srt.entrypoints import engine
from sgl_jax.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sgl_jax.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sgl_jax.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
from sgl_jax.srt.entrypoints.openai.serving_rerank import OpenAIServingRerank
from sgl_jax.srt.kernels.quantized_matmul import kernel as quantized_matmul
from sgl_jax.srt.layers import moe
from sgl_jax.srt.layers.attention.hybrid_linear_attn_backend import attn_backend_wrapper
from sgl_jax.srt.managers.detokenizer_manager import run_detokenizer_process
from sgl_jax.srt.managers.io_struct import EmbeddingReqInput
from sgl_jax.srt.managers.scheduler import run_scheduler_process
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.mem_cache.memory_pool import MLATokenToKVPool
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.models.deepseek_v3 import DeepseekV3Attention, DeepseekV3ForCausalLM
from sgl_jax.srt.models.glm5_moe import (
    Glm5Attention,
    Glm5ForCausalLM,
    GlmDsaIndexer,
    GlmMoeDsaForCausalLM,
)

from jax_mla.integrations.sglang import (
    attention,
    deepseek_v32,
    fp8,
    indexer,
    pools,
    refusals,
    requests,
    shutdown,
    sparse,
    sparse_config,
)
from jax_mla.integrations.sglang.experts import grouped_product


def install() -> None:
    """Put jax_mla into the engine of this process and of those that it starts. Once is enough."""
    # The choice of the attention backend has no registry; it maps `fa` to a kernel for TPUs, and
    # on a CPU to a backend that has no MLA.
    ModelRunner._get_attention_backend = _attention_backend
    # The model absorbs the up-projections before it calls the backend, also for long prompts.
    DeepseekV3Attention._forward_mqa = attention.forward
    # The command line offers fp8_e4m3, the runner refuses it.
    ModelRunner._init_kv_cache_dtype = _set_cache_dtype
    # The experts' product is a kernel for TPUs, which is interpreted elsewhere. It is no setting.
    moe.gmm = grouped_product
    # So is the product by FP8 weights in blocks. Experts get a scale for each output, not for each
    # block, which is 128 times as many, and those of `wo` on every device.
    quantized_matmul.get_blockwise_kernel = lambda: fp8.product
    moe.EPMoE.quantize_weights = fp8.place_scales
    moe.EPMoE._normalize_scale_for_gmm = fp8.whole_scales
    moe.EPMoE._forward = fp8.forward
    # The runner refuses such weights without a TPU, the loader fails at blocks that devices cut,
    # and the up-projection is rounded to bfloat16 in any model.
    for model in (DeepseekV3ForCausalLM, Glm5ForCausalLM):
        model.load_weights = fp8.load_weights
    DeepseekV3ForCausalLM._create_layer_mappings = fp8.layer_mappings
    for module in (DeepseekV3Attention, Glm5Attention):
        module.post_load_weights = fp8.split_up_projection
    # GLM-5's indexer rounds what decides the choice. Its other layers have kernels for TPUs.
    GlmDsaIndexer.__init__ = indexer.init
    GlmDsaIndexer.project = indexer.project
    GlmMoeDsaForCausalLM.patch_model_config = classmethod(_patch_glm5_config)
    # XLA copies pools of index keys that a step has to reshape.
    MLATokenToKVPool._create_buffers = pools.create_buffers
    # The engine has no DeepSeek V3.2.
    deepseek_v32.register()
    # The engine spawns its processes, and they import the engine afresh.
    engine.run_scheduler_process = run_scheduler
    engine.run_detokenizer_process = run_detokenizer
    # On SIGTERM the engine waits for its requests without a limit, and then kills itself.
    TokenizerManager.sigterm_watchdog = shutdown.stop_when_asked
    # An invalid token id kills the engine. An empty chat, a prompt without tokens and tools are
    # internal errors there.
    TokenizerManager._validate_one_request = requests.check_tokens
    OpenAIServingChat._validate_request = requests.check_chat
    OpenAIServingCompletion._validate_request = requests.check_completion
    # So are wishes for embeddings, by whatever address they come.
    OpenAIServingEmbedding._validate_request = requests.refuse_embeddings
    OpenAIServingRerank._validate_request = requests.refuse_embeddings
    EmbeddingReqInput.normalize_batch_and_arguments = requests.refuse_embedding


def run_scheduler(*args: Any) -> None:
    """Run the engine's scheduler in a new process, which imports this module to find this."""
    shutdown.leave_interrupts_to_parent()
    install()
    run_scheduler_process(*args)


def run_detokenizer(*args: Any) -> None:
    """Run the engine's detokenizer in a new process."""
    shutdown.leave_interrupts_to_parent()
    run_detokenizer_process(*args)


def _attention_backend(runner: ModelRunner) -> Any:
    """Stand for `ModelRunner._get_attention_backend`."""
    refusals.check_engine(runner.server_args, runner.model_config)
    config, page_size = runner.model_config.hf_text_config, runner.page_size
    options = dict(
        pages_per_seq=-(-runner.model_config.context_len // page_size),
        num_attn_heads=runner.num_attn_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        page_size=page_size,
        mesh=runner.mesh,
    )
    if sparse_config.is_sparse(runner.model_config):
        layers = sparse_config.index_layers(config)
        backend = sparse.JaxMlaSparseBackend(topk=config.index_topk, index_layers=layers, **options)
    else:
        backend = attention.JaxMlaAttentionBackend(**options)
    return attn_backend_wrapper(runner, backend)


_patch_config = GlmMoeDsaForCausalLM.patch_model_config


def _patch_glm5_config(_: type, config: Any) -> None:
    """Stand for `GlmMoeDsaForCausalLM.patch_model_config`."""
    _patch_config(config)
    # The layers' MLPs would be a kernel for TPUs.
    config.hf_config._sgl_use_fused_mlp = False
    # The engine does not read the other fields that say which layers have an indexer.
    config.hf_config.indexer_types = sparse_config.indexer_types(config.hf_config)


def _set_cache_dtype(runner: ModelRunner) -> None:
    """Stand for `ModelRunner._init_kv_cache_dtype`."""
    name = runner.server_args.kv_cache_dtype
    runner.kv_cache_dtype = refusals.CACHE_DTYPES[name] or jnp.dtype(runner.dtype)
