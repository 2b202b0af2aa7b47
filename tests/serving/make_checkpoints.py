"""Makes tiny DeepSeek checkpoints, and what Hugging Face answers: `make_checkpoints.py DIR`.

Runs in an environment of its own, with torch and transformers, because the engine pins versions of
transformers that the torch of this machine need not fit.
"""

import json
import pathlib
import shutil
import sys
from typing import Any

import safetensors.torch
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
import transformers

NEW_TOKENS = 16
LEAST_GAP = 2e-3  # between the two best logits, so that rounding cannot change a token
MOST_PROMPTS = 8  # of a length are tried
PROMPT_LENS = (2, 17, 45, 189)
SPARSE_PROMPT_LENS = (2, 45, 189, 420)
COMMON: dict[str, Any] = dict(
    vocab_size=384, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1,
    n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=32, max_position_embeddings=1024,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.1,
)  # fmt: skip
# With FP8 weights in blocks. Two devices cut blocks of the queries, of the up-projection and of the
# experts' width. The queries' rank is half a block; latent and rotary key are 4.5 blocks.
FP8: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=384, n_shared_experts=2,
    qk_nope_head_dim=112,
)  # fmt: skip
GLM5_FP8 = FP8 | dict(qk_nope_head_dim=192)
BLOCK = 128
# Index heads choose 16 of hundreds of tokens. The engine knows only GLM-5's own sizes of heads, and
# the layer in the middle attends to what the first one chose (GLM-5.2).
INDEX: dict[str, Any] = dict(index_topk=16, index_n_heads=32, index_head_dim=128)
GLM5: dict[str, Any] = INDEX | dict(
    q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1,
    indexer_types=["full", "shared", "full"],
)  # fmt: skip
SIGMOID: dict[str, Any] = dict(
    scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True
)  # fmt: skip
YARN: dict[str, Any] = dict(
    factor=4.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1,
)  # fmt: skip


def v2(**sizes: Any) -> tuple[Any, dict[str, Any]]:
    """Return DeepSeek-V2 (softmax gate, one projection for the queries) and its config's rest."""
    own: dict[str, Any] = dict(
        q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0,
    )  # fmt: skip
    model = transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(**COMMON | own | sizes)
    )
    rest: dict[str, Any] = dict(scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)
    return model, rest | dict(rope_scaling=None)


def v3(**sizes: Any) -> tuple[Any, dict[str, Any]]:
    """Return DeepSeek-V3 (sigmoid gate, low-rank queries, YaRN) and its config's rest."""
    config, rest = v3_config(transformers.DeepseekV3Config, rope_interleave=True, **sizes)
    model = transformers.DeepseekV3ForCausalLM(config)
    move_biases(model)
    return model, rest


def v32(**sizes: Any) -> tuple[Any, dict[str, Any]]:
    """Return DeepSeek-V3.2 (sparse attention; the indexer's rotary pairs are halves)."""
    config, rest = v3_config(transformers.DeepseekV32Config, **INDEX | sizes)
    model = transformers.DeepseekV32ForCausalLM(config)
    move_biases(model)
    return model, rest


def v3_config(kind: Any, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a config with what V3 and V3.2 share, and the rest of what they publish."""
    own: dict[str, Any] = dict(q_lora_rank=64, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    sizes = COMMON | own | sizes
    before_yarn = int(sizes["max_position_embeddings"] / YARN["factor"])
    yarn = YARN | dict(original_max_position_embeddings=before_yarn)
    rope: dict[str, Any] = dict(rope_type="yarn", rope_theta=10000.0, **yarn)
    return kind(**sizes, rope_parameters=rope), SIGMOID | dict(
        rope_scaling=dict(type="yarn", **yarn)
    )


def glm5(**sizes: Any) -> tuple[Any, dict[str, Any]]:
    """Return GLM-5 (sparse attention, interleaved rotary pairs) and its config's rest."""
    rope: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0)
    config = transformers.GlmMoeDsaConfig(**COMMON | GLM5 | sizes, rope_parameters=rope)
    model = transformers.GlmMoeDsaForCausalLM(config)
    move_biases(model)
    return model, SIGMOID | dict(rope_parameters=rope)


def move_biases(model: Any) -> None:
    """Give the experts' choice and the index keys biases that matter."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "k_norm.bias")):
                value.copy_(torch.randn_like(value) * 0.1)


def save(model: Any, rest: dict[str, Any], directory: pathlib.Path) -> None:
    """Write a checkpoint as DeepSeek publishes them, which the engine's transformers can read."""
    dtype = str(model.dtype).removeprefix("torch.")
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    if "rope_parameters" not in rest:
        config |= dict(rope_theta=10000.0)
    config |= dict(torch_dtype=dtype, attention_bias=False, moe_layer_freq=1, **rest)
    path.write_text(json.dumps(config, indent=1))


def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put projections in FP8 with a scale for each block, and in `tensors` what they stand for."""
    quantised = dict(tensors)
    for name, weight in tensors.items():
        matrices = ("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")
        if not name.endswith(matrices) or name.endswith(".weights_proj.weight"):
            continue
        rows, cols = (-(-size // BLOCK) for size in weight.shape)
        scales = torch.rand(rows, cols) * 2e-3 + 5e-4  # far from each other, so that mistakes show
        full = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        full = full[: weight.shape[0], : weight.shape[1]]
        codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        quantised |= {name: codes, f"{name}_scale_inv": scales}
        tensors[name] = codes.float() * full
    return quantised


def to_fp8(directory: pathlib.Path) -> Any:
    """Rewrite a checkpoint as DeepSeek publishes V3, and return the model that it stands for.

    That model is also in the folder `values`.
    """
    file, values = directory / "model.safetensors", directory / "values"
    shutil.copytree(directory, values)
    tensors = safetensors.torch.load_file(file)
    # The tensors are views of the mapped file, which must not be written over.
    temporary = file.with_suffix(".new")
    safetensors.torch.save_file(quantise(tensors), temporary, dict(format="pt"))
    safetensors.torch.save_file(tensors, values / "new", dict(format="pt"))
    temporary.rename(file)
    (values / "new").rename(values / file.name)
    path = directory / "config.json"
    format_of_weights: dict[str, Any] = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8",
        weight_block_size=[BLOCK, BLOCK],
    )  # fmt: skip
    config = json.loads(path.read_text()) | dict(quantization_config=format_of_weights)
    if config["model_type"] == "glm_moe_dsa":  # as GLM-5 is published
        parts = (
            "input_layernorm",
            "self_attn.indexers_proj",
            "self_attn.kv_a_layernorm",
            "mlp.gate",
        )
        names = [f"model.layers.{i}.{p}" for i in range(config["num_hidden_layers"]) for p in parts]
        names += ["lm_head", "model.embed_tokens", "model.norm", "model.layers.78.eh_proj"]
        format_of_weights["modules_to_not_convert"] = names
    path.write_text(json.dumps(config, indent=1))
    return transformers.AutoModelForCausalLM.from_pretrained(values, dtype=torch.float32).eval()


def save_tokenizer(directory: pathlib.Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<bos>", "<eos>"]
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | dict(tokenizer_class="PreTrainedTokenizerFast")
    path.write_text(json.dumps(config))


@torch.no_grad()
def answers(model: Any, lengths: tuple[int, ...] = PROMPT_LENS) -> list[dict[str, list[int]]]:
    """Return prompts and the tokens that a greedy model continues them with."""
    return [answer(model, length) for length in lengths]


def answer(model: Any, length: int) -> dict[str, list[int]]:
    """Return a prompt whose next tokens are clear, and these tokens."""
    for _ in range(MOST_PROMPTS):
        prompt = torch.randint(3, 256, (1, length))
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        best = model(tokens).logits[0, length - 1 : -1].topk(2).values
        has_special = (tokens[0, length:] <= model.config.eos_token_id).any()  # servers hide them
        if (best[:, 0] - best[:, 1]).min() >= LEAST_GAP and not has_special:
            return dict(prompt=prompt[0].tolist(), tokens=tokens[0, length:].tolist())
    raise SystemExit("in all prompts two tokens were as good as each other: take another seed")


def main() -> None:
    """Make all checkpoints."""
    root = pathlib.Path(sys.argv[1])
    for name, make, sizes, lengths in (
        ("v2", v2, {}, PROMPT_LENS),
        ("v3", v3, {}, PROMPT_LENS),
        ("v3_fp8", v3, FP8, PROMPT_LENS),
        ("v32", v32, {}, SPARSE_PROMPT_LENS),
        ("v32_fp8", v32, FP8, SPARSE_PROMPT_LENS[1:2]),
        ("glm5", glm5, {}, SPARSE_PROMPT_LENS),
        ("glm5_fp8", glm5, GLM5_FP8, SPARSE_PROMPT_LENS[1:2]),
    ):
        torch.manual_seed(0)
        model, rest = make(**sizes)
        model = model.float().eval()
        save(model, rest, root / name)
        if name.endswith("_fp8"):
            model = to_fp8(root / name)
        save_tokenizer(root / name)
        (root / name / "answers.json").write_text(json.dumps(answers(model, lengths)))
    llama = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=64)
    llama.save_pretrained(root / "llama")
    (root / "list").mkdir()
    (root / "list" / "config.json").write_text("[]")


if __name__ == "__main__":
    main()
