"""The model example against Hugging Face transformers: same files, same logits, in float32."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="the parity tests need torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the parity tests need transformers")
safetensors: Any = pytest.importorskip("safetensors.torch", reason="the parity tests write files")

from examples.deepseek.checkpoint import load  # noqa: E402
from examples.deepseek.config import Config, load_config  # noqa: E402
from examples.deepseek.fields import MODEL_TYPES, NESTED_TYPES, NOT_SERVED  # noqa: E402
from examples.deepseek.model import Place, logits, paged_attention, paged_forward  # noqa: E402
from examples.deepseek.options import RECALL  # noqa: E402
from examples.deepseek.pages import PagePool, row_layout  # noqa: E402
from examples.deepseek.sparse import SparseCache, index_pool  # noqa: E402
from jax_mla.reference import decode_rows, encode_rows  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' own
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="float32 runs on the CPU backend"),
]

PROMPT_LENS = (37, 5, 20, 1)
DECODE_STEPS = 32
CHUNK = 16
STEP_TOKENS = 48
PAGE_SIZE = 8
ATOL = 1e-3

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 2048,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
V2_LITE = SMALL | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": YARN,
}
V2_GROUPS = V2_LITE | {
    "q_lora_rank": 40,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
}
V3 = SMALL | {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}
V3_PLAIN = V3 | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
}
V3_HALF_SPLIT = V3 | {"rope_interleave": False, "first_k_dense_replace": 4}
V32 = V3 | {
    "q_lora_rank": 40,
    "index_topk": 16,
    "index_head_dim": 24,
    "index_n_heads": 12,
}
GLM5 = V32 | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
# No mesh divides its index heads: every device has them all.
GLM52 = GLM5 | {"indexer_types": ["full", "shared", "full", "shared"], "index_n_heads": 11}
MINICPM3 = SMALL | {
    "num_hidden_layers": 3,
    "q_lora_rank": 40,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
    },
}
GLM4_FLASH = V3 | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
YOUTU = SMALL | {"num_hidden_layers": 3, "q_lora_rank": 40, "eos_token_id": 1}
SARVAM = V3_PLAIN | {"q_lora_rank": None, "first_k_dense_replace": 1, "tie_word_embeddings": False}
MISTRAL4 = V3 | {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN
    | {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        # Queries grow every 16 tokens.
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3,
        "partial_rotary_factor": 0.4,
    },
}
MODELS = {
    "v2_lite": ("DeepseekV2", V2_LITE),
    "v2_groups": ("DeepseekV2", V2_GROUPS),
    "v3": ("DeepseekV3", V3),
    "v3_plain_rope_tied": ("DeepseekV3", V3_PLAIN),
    "v3_half_split_dense": ("DeepseekV3", V3_HALF_SPLIT),
    "v3.2": ("DeepseekV32", V32),
    "glm5": ("GlmMoeDsa", GLM5),
    "glm5.2": ("GlmMoeDsa", GLM52),
    "minicpm3": ("MiniCPM3", MINICPM3),
    "glm4_flash": ("Glm4MoeLite", GLM4_FLASH),
    "youtu": ("Youtu", YOUTU),
    "sarvam": ("DeepseekV3", SARVAM),
    "mistral4": ("Mistral4", MISTRAL4),
    "kimi_k25": ("DeepseekV3", V3),
    "mistral_small_4": ("Mistral4", MISTRAL4),
}
# Models that read pictures too: transformers' class of the whole, and the fields of its config.
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
WHOLE = {
    "kimi_k25": ("Kimi_K25", {"model_type": "kimi_k25"}, "kimi_k2"),
    "mistral_small_4": (
        "Mistral3",
        {"model_type": "mistral3", "image_token_index": 999},
        "mistral4",
    ),
}


def make_model(name: str, directory: Path):
    """Write a random model with transformers; every weight matters, biases and norms included."""
    prefix, fields = MODELS[name]
    torch.manual_seed(0)
    prefix_of_config = "SarvamMLA" if name == "sarvam" else prefix  # there is no other difference
    config = getattr(transformers, f"{prefix_of_config}Config")(**fields, initializer_range=0.2)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.add_(0.3 * torch.randn_like(tensor))
            if "e_score_correction_bias" in key:
                tensor.add_(0.2 * torch.randn_like(tensor))
    # Many small files: the index is read too.
    model.save_pretrained(directory, max_shard_size="100KB")
    return model if name not in WHOLE else nest(name, directory)


def nest(name: str, directory: Path):
    """Make the files those of a model that reads pictures too, as published; load it."""
    prefix, fields, text_type = WHOLE[name]
    tensors = {}
    for path in directory.glob("*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors |= safetensors.load_file(path)
        path.unlink()
    tensors = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    text = json.loads((directory / "config.json").read_text()) | {"model_type": text_type}
    fields = fields | {"tie_word_embeddings": False, "text_config": text, "vision_config": VISION}
    (directory / "config.json").write_text(json.dumps(fields))
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")
    model, loading = model.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not [key for key in loading["missing_keys"] if "language_model" in key]
    return model.eval()


def paged_logits(
    config: Config,
    params,
    texts: list[np.ndarray],
    kv_format: str | None = None,
    index_format: str | None = None,
) -> list[np.ndarray]:
    """Logits at every token: ragged steps with chunks of the prompts, then decode steps."""
    batch, max_tokens = len(texts), max(map(len, texts))
    pages_per_seq = -(-max_tokens // PAGE_SIZE)
    pool = PagePool(batch * pages_per_seq, PAGE_SIZE)
    page_table = np.array([pool.take(pages_per_seq * PAGE_SIZE) for _ in texts], np.int32)
    width, dtype = row_layout(config, kv_format, jnp.dtype(jnp.float32))
    shape = (config.num_layers, batch * pages_per_seq, PAGE_SIZE, width)
    cache: Any = jnp.full(shape, jnp.nan if kv_format is None else 0x7F, dtype)
    kv_scale = 1.0 if kv_format == "fp8_e4m3" else None
    attend = paged_attention(config, kv_format=kv_format, kv_scale=kv_scale)
    if config.index is not None:
        pages, float32 = batch * pages_per_seq, jnp.dtype(jnp.float32)
        keys = index_pool(config.index, pages, PAGE_SIZE, float32, index_format)
        poison = 0xFF if index_format else jnp.nan
        cache = SparseCache(cache, jnp.full(keys.shape, poison, keys.dtype))

    @jax.jit
    def step(cache, tokens, positions, place):
        hidden, cache = paged_forward(
            config, params, cache, tokens, positions, place, max_positions=max_tokens, attend=attend
        )
        return logits(config, params, hidden), cache

    got: list[list[np.ndarray]] = [[] for _ in texts]
    fed = np.zeros(batch, np.int32)
    while (fed < [len(text) for text in texts]).any():
        rest = np.maximum(np.array(PROMPT_LENS) - fed, 0)
        q_lens = np.minimum(rest, CHUNK) if rest.any() else np.ones(batch, np.int32)
        bounds = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        size = STEP_TOKENS if rest.any() else batch
        tokens, positions = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        for b, text in enumerate(texts):
            span = slice(bounds[b], bounds[b + 1])
            positions[span] = np.arange(fed[b], fed[b] + q_lens[b])
            tokens[span] = text[positions[span]]
        fed += q_lens.astype(np.int32)
        place = Place(page_table, fed.copy(), bounds if rest.any() else None)
        out, cache = step(cache, tokens, positions, place)
        for b in range(batch):
            got[b] += list(np.asarray(out[bounds[b] : bounds[b + 1]]))
    return [np.stack(rows) for rows in got]


def both_logits(
    model, directory: Path, kv_format: str | None = None, index_format: str | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The paged logits of the files in `directory`, and those of `model`."""
    config = load_config(directory)
    params = load(directory, config, np.float32)
    texts = texts_of(config.vocab_size)
    tokens = [t.numpy().astype(np.int32) for t in texts]
    got = paged_logits(config, params, tokens, kv_format, index_format)
    with torch.no_grad():
        expected = [model(text[None]).logits[0].numpy() for text in texts]
    return got, expected


def texts_of(vocab_size: int) -> list:
    """Random tokens."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.integers(0, vocab_size, n + DECODE_STEPS)) for n in PROMPT_LENS]


def check(model, directory: Path) -> None:
    """Compare the paged logits of the files in `directory` with those of `model`."""
    for rows, expected in zip(*both_logits(model, directory), strict=True):
        assert rows.shape == expected.shape
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (name not in WHOLE)
    check(model, tmp_path)


def make_wide_model(name: str, directory: Path, index_head_dim: int = 64):
    """Make a model whose rows have 512 + 64 values."""
    prefix, fields = MODELS[name]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    sizes |= {"index_head_dim": index_head_dim} if "index_head_dim" in fields else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, name, (prefix, fields | sizes))
        return make_model(name, directory)


def round_rows(model, kv_format: str) -> None:
    """Have a model of transformers round its rows as a cache in FP8 does."""
    kv_scale = 1.0 if kv_format == "fp8_e4m3" else None

    def rounded(ckv, kpe):
        parts = jnp.asarray(ckv.numpy()), jnp.asarray(kpe.numpy())
        rows = encode_rows(*parts, kv_format, kv_scale, [jnp.float8_e4m3fn])
        values = decode_rows(rows, ckv.shape[-1], kpe.shape[-1], kv_format, kv_scale)
        return tuple(torch.from_numpy(np.array(x)) for x in values)

    for layer in model.model.layers:
        expand = layer.self_attn.expand_kv
        layer.self_attn.expand_kv = lambda *row, expand=expand: expand(*rounded(*row))


@pytest.mark.parametrize(("name", "kv_format"), [("v3", "fp8_e4m3"), ("v3.2", "fp8_ds_mla")])
def test_an_fp8_cache_is_that_of_a_model_with_rounded_rows(
    name: str, kv_format: str, tmp_path: Path
) -> None:
    """The difference to one without rounding is what docs/models.md states."""
    model = make_wide_model(name, tmp_path)
    got, exact = map(np.concatenate, both_logits(model, tmp_path, kv_format))
    round_rows(model, kv_format)
    with torch.no_grad():
        expected = np.concatenate([model(text[None]).logits[0].numpy() for text in texts_of(101)])
    # A few values are rounded otherwise, because the two programs add in different orders. With
    # random weights that may change which experts and which tokens are chosen.
    norm = np.linalg.norm(exact)
    errors = np.linalg.norm(got - expected) / norm, np.linalg.norm(got - exact) / norm
    same = np.mean(got.argmax(-1) == exact.argmax(-1))
    print(f"{name} {kv_format}: {errors[0]:.4f} {errors[1]:.4f}, same token {same:.3f}")
    assert errors[0] < 0.25 * errors[1]


@pytest.mark.parametrize("name", ["v3.2", "glm5"])
def test_index_keys_in_fp8_choose_nearly_the_same_tokens(name: str, tmp_path: Path) -> None:
    """The difference to index keys in float32 is what docs/models.md states."""
    model = make_wide_model(name, tmp_path, index_head_dim=128)
    got, exact = map(np.concatenate, both_logits(model, tmp_path, index_format="fp8"))
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    same = np.mean(got.argmax(-1) == exact.argmax(-1))
    print(f"{name} index keys in fp8: {error:.4f}, same token {same:.3f}")
    # A token that sees at most index_topk others gets all of them, so its logits are exact. With
    # random weights the others choose by small margins.
    firsts = np.concatenate([np.arange(n + DECODE_STEPS) for n in PROMPT_LENS]) < 16
    assert np.abs(got - exact)[firsts].max() < ATOL
    assert 0 < error < 0.5


def test_every_latent_model_of_transformers_is_known() -> None:
    """And so in the tables of docs/models.md."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    known, unknown = {*MODEL_TYPES, *NESTED_TYPES, *NOT_SERVED}, set()
    for model_type in mapping:
        config = transformers.CONFIG_MAPPING[model_type]
        fields = getattr(config, "__dataclass_fields__", {})
        # The text_config of a model that is refused is refused with it.
        is_known = model_type in known or model_type.removesuffix("_text") in known
        if "kv_lora_rank" in fields and not is_known:
            unknown.add(model_type)
    assert not unknown


def test_the_recall_checkpoint_is_one_of_transformers() -> None:
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(RECALL, dtype=torch.float32)
    check(model.eval(), RECALL)
