"""The checkpoint files of the model example: names, shapes, fp8, errors that name the tensor."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples.deepseek.checkpoint import load, published_tensors, save
from examples.deepseek.config import Config, parse_config
from examples.deepseek.mesh import Placement, parse_mesh
from examples.deepseek.recall_model import init_params, raw_config
from examples.deepseek.tensor_files import DTYPES, INDEX, SINGLE, TensorFiles, write
from examples.deepseek.weights import Fp8

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}


def small(**overrides: object) -> tuple[dict[str, Any], Config, Any]:
    raw = raw_config(**SMALL, **overrides)
    config = parse_config(raw)
    plain = dataclasses.replace(config, fp8_block=None)
    shapes = jax.eval_shape(lambda key: init_params(plain, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    return raw, config, params


def write_files(directory: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    (directory / "config.json").write_text(json.dumps(raw))
    write(directory / SINGLE, tensors)


def test_saving_and_loading_gives_the_same_parameters(tmp_path: Path) -> None:
    raw, config, params = small()
    save(tmp_path, raw, params, ["a"])
    loaded = load(tmp_path, config, np.float32)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(loaded), jax.tree.leaves(params), strict=True
    ):
        if path[-1].key != "router_bias":  # float32 in the file
            expected = expected.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(got, expected, err_msg=str(path))


def test_safetensors_reads_what_write_writes(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="compares with the safetensors package")
    from safetensors.numpy import load_file

    _, config, params = small()
    tensors = published_tensors(config, params)
    write(tmp_path / SINGLE, tensors)
    theirs = load_file(tmp_path / SINGLE)
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(theirs[name], tensor)


def fp8_tensors(
    config: Config, params: Any, keep: tuple[str, ...] = ()
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Quantise the published tensors by blocks of 16 x 16; also return their values."""
    tensors, values, rng = published_tensors(config, params), {}, np.random.default_rng(0)
    for name in list(tensors):
        if "_proj" not in name or any(part in name for part in keep):
            continue
        rows, cols = tensors[name].shape
        scale = rng.uniform(0.5, 2, (-(-rows // 16), -(-cols // 16))).astype(np.float32)
        full = np.kron(scale, np.ones((16, 16), np.float32))[:rows, :cols]
        tensors[name] = (tensors[name] / full).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        values[name] = tensors[name].astype(np.float32) * full
    return tensors, values


@pytest.mark.full
def test_fp8_weights_stay_as_they_are(tmp_path: Path) -> None:
    raw, config, params = small(quantization_config=FP8)
    # Tensors that are not in FP8 may be among them.
    tensors, expected = fp8_tensors(config, params, keep=("o_proj", "experts.1.up"))
    kept = {name: x for name, x in tensors.items() if "o_proj" in name}
    tensors["model.layers.1.mlp.experts.1.up_proj.weight"] = tensors[
        "model.layers.1.mlp.experts.1.up_proj.weight"
    ].astype(np.float32)
    write_files(tmp_path, raw, tensors)
    with pytest.raises(
        ValueError, match="experts.1.up_proj.weight: expected FP8 like .*0.gate.* got float32"
    ):
        load(tmp_path, config, np.float32)
    tensors, expected = fp8_tensors(config, params, keep=("o_proj",))
    write_files(tmp_path, raw, tensors)
    loaded = load(tmp_path, config, np.float32)
    got = published_tensors(config, loaded)
    for name, tensor in (kept | expected).items():
        np.testing.assert_allclose(got[name], tensor, rtol=1e-6, err_msg=name)
    layer = loaded["layers"][1]
    assert all(isinstance(layer[name], Fp8) for name in ("qkv_a", "q_b", "expert_gate_up"))
    assert layer["expert_down"].codes.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("wide", ["q_a", "kv_a"])
def test_input_projections_in_two_formats_are_refused(wide: str, tmp_path: Path) -> None:
    raw, config, params = small(quantization_config=FP8)
    tensors, _ = fp8_tensors(config, params, keep=(f".{wide}_proj",))
    write_files(tmp_path, raw, tensors)
    is_fp8 = wide == "kv_a"
    words = f"{'' if is_fp8 else 'no '}FP8 like .*q_a_proj.weight, got float{32 if is_fp8 else 8}"
    with pytest.raises(ValueError, match=f"kv_a_proj_with_mqa.weight: expected {words}"):
        load(tmp_path, config, np.float32)


def test_a_device_reads_its_share_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, config, params = small()
    write_files(tmp_path, raw, published_tensors(config, params))
    whole = load(tmp_path, config, np.float32)
    build, taken = Placement.build, {}

    def counting(placement, parameter, read):
        def counted(index):
            part = read(index)
            taken.setdefault(parameter.shape, []).append(part.size)
            return part

        return build(placement, parameter, counted)

    monkeypatch.setattr(Placement, "build", counting)
    for mesh in ("dp=2,tp=4", "tp=8,experts=width"):
        taken.clear()
        placement = Placement.over(parse_mesh(mesh), jax.devices("cpu"))
        parts = load(tmp_path, config, np.float32, placement.build)
        jax.tree.map(np.testing.assert_array_equal, parts, whole)
        shape = (8, 2, 16, 32)  # experts, gate and up, width, hidden
        assert taken[shape] == [np.prod(shape) // 8] * 8 * 2  # two layers
        stored = parts["layers"][1]["expert_down"]
        assert stored.addressable_shards[0].data.size == stored.size // 8


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    write_files(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=f"{name}: expected quantization_config"):
        load(tmp_path, config)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.down_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params)
    tensor = tensors.pop(name)
    write_files(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=rf"{name}: expected a tensor, got no such name"):
        load(tmp_path, config)
    tensors[name] = tensor[:-1]
    write_files(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=rf"{name}: expected shape \({tensor.shape[0]},.* got \("):
        load(tmp_path, config)


def test_fewer_layers_than_the_files_have_are_refused(tmp_path: Path) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params)
    write_files(tmp_path, raw, tensors)
    fewer = dataclasses.replace(config, num_layers=config.num_layers - 1)
    message = f"num_hidden_layers: expected {config.num_layers}, .* got {fewer.num_layers}$"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, fewer, np.float32)
    # DeepSeek-V3 has a layer behind the last one, which predicts the token after the next.
    tensors[f"model.layers.{config.num_layers}.eh_proj.weight"] = np.zeros((2, 4), np.float32)
    tensors[f"model.layers.{config.num_layers}.enorm.weight"] = np.zeros(2, np.float32)
    write_files(tmp_path, raw, tensors)
    load(tmp_path, config, np.float32)


AT = "model.layers.1."


@pytest.mark.parametrize(
    "name",
    [
        f"{AT}self_attn.sinks",
        f"{AT}self_attn.q_norm.weight",
        f"{AT}self_attn.k_norm.weight",
        f"{AT}self_attn.q_a_proj.bias",
        f"{AT}self_attn.o_proj.bias",
        f"{AT}self_attn.o_proj.lora_A.weight",
        f"{AT}self_attn.indexer.wk.weight",
        f"{AT}self_attn.gate_scale_inv",
        f"{AT}mlp.experts.8.up_proj.weight",
        f"{AT}mlp.up_proj.weight",
        "lm_head.bias",
        "model.layers.x.self_attn.o_proj.weight",
        "output.weight",
    ],
)
def test_a_tensor_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params) | {name: np.zeros((2, 2), np.float32)}
    write_files(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=f"{name}: expected no such tensor"):
        load(tmp_path, config)


def test_tensors_that_change_nothing_may_be_there(tmp_path: Path) -> None:
    raw, config, params = small(tie_word_embeddings=True)
    tensors = published_tensors(config, params)
    zeros = np.zeros((2, 2), np.float32)
    others = ("model.rotary_emb.inv_freq", f"{AT}self_attn.rotary_emb.inv_freq", "lm_head.weight")
    write_files(tmp_path, raw, tensors | dict.fromkeys(others, zeros))
    load(tmp_path, config)
    # A layer of GLM-5.2 that shares an indexer does not read its own.
    sparse = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
    sparse |= {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]}
    raw, config, params = small(**sparse)
    tensors = published_tensors(config, params)
    others = ("self_attn.indexer.wk.weight", "self_attn.rotary_emb.inv_freq")
    write_files(tmp_path, raw, tensors | {AT + name: zeros for name in others})
    load(tmp_path, config)


def test_a_router_that_takes_a_softmax_has_no_bias(tmp_path: Path) -> None:
    v2 = {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False}
    raw, config, params = small(**v2, topk_method="greedy")
    tensors = published_tensors(config, params)
    write_files(tmp_path, raw, tensors)
    load(tmp_path, config)
    name = f"{AT}mlp.gate.e_score_correction_bias"
    write_files(tmp_path, raw, tensors | {name: np.zeros(8, np.float32)})
    with pytest.raises(ValueError, match=f"{name}: expected no such tensor"):
        load(tmp_path, config)


def test_beside_a_text_model_there_may_be_one_of_pictures(tmp_path: Path) -> None:
    raw, config, params = small()
    config = dataclasses.replace(config, tensor_prefix="language_model.")
    tensors = published_tensors(config, params)
    zeros = np.zeros((2, 2), np.float32)
    pictures = ("vision_tower.patch_embed.proj.bias", "mm_projector.linear.weight")
    tensors |= dict.fromkeys((*pictures, "multi_modal_projector.norm.weight"), zeros)
    write_files(tmp_path, raw, tensors)
    load(tmp_path, config)
    for name, words in (
        ("language_model.lm_head.bias", "no such tensor"),
        ("lm_head.bias", "language_model.. or a tensor that is about pictures"),
    ):
        write_files(tmp_path, raw, tensors | {name: zeros})
        with pytest.raises(ValueError, match=f": {name}: expected {words}"):
            load(tmp_path, config)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    raw, config, params = small()
    with pytest.raises(ValueError, match="found neither"):
        load(tmp_path, config)
    write_files(tmp_path, raw, published_tensors(config, params))
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut off"):
        load(tmp_path, config)
    (tmp_path / SINGLE).write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load(tmp_path, config)


def write_header(path: Path, header: object, num_bytes: int = 16) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes))


def entry(**fields: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | fields


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "expected a safetensors file .header: expected a JSON object, got"),
        ("text", "expected a safetensors file .header: expected a JSON object, got"),
        ({"a": 3}, "a: expected a JSON object, got 3"),
        ({"a": {}}, "a: dtype: expected a string, got None"),
        ({"a": entry(dtype=["F32"])}, "a: dtype: expected a string"),
        ({"a": entry(shape=4)}, "a: shape: expected a list of integers of at least 0, got 4"),
        ({"a": entry(shape=[4.0])}, "a: shape: expected a list of integers"),
        ({"a": entry(shape=[-4])}, "a: shape: expected a list of integers"),
        ({"a": entry(data_offsets=None)}, "a: data_offsets: expected two integers"),
        ({"a": entry(data_offsets=[0])}, "a: data_offsets: expected two integers"),
        ({"a": entry(data_offsets=["0", 16])}, "a: data_offsets: expected two integers"),
        ({"a": entry(data_offsets=[-16, 0])}, "a: data_offsets: expected two integers"),
        ({"a": entry(data_offsets=[16, 0])}, "a: data_offsets: expected two integers, 0 <= begin"),
        ({"a": entry(data_offsets=[4, 20])}, "a: data_offsets: expected at most the 16 bytes"),
        (
            {"a": entry(data_offsets=[0, 12]), "b": entry(data_offsets=[8, 16])},
            r"b: data_offsets: expected to begin behind \[0, 12\], those of a, got \[8, 16\]",
        ),
    ],
    ids=str,
)
def test_a_header_that_is_wrong_is_named(header: object, words: str, tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE, header)
    with pytest.raises(ValueError, match=f"{SINGLE}: {words}"):
        TensorFiles(tmp_path)


def test_a_tensor_with_fewer_bytes_than_its_shape_is_named(tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE, {"a": entry(data_offsets=[0, 12])})
    with pytest.raises(ValueError, match=f"{SINGLE}: a: expected 16 bytes, got 12"):
        TensorFiles(tmp_path).read("a", (4,))


@pytest.mark.parametrize("file", [3, None, ["a.safetensors"]])
def test_a_file_that_is_no_name_is_refused(file: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ValueError, match=f"{INDEX}.*model.norm.weight: expected the name of a"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self_attn.q_a_proj.weight_scale_inv", "expected F32, F16 or BF16, got float8"),
        ("self_attn.kv_b_proj.weight_scale_inv", "expected F32, F16 or BF16, got float8"),
        ("mlp.experts.2.down_proj.weight_scale_inv", "expected F32, F16 or BF16, got float8"),
        ("input_layernorm.weight", "expected a wider format, because it is no matrix, got FP8"),
        ("self_attn.kv_a_layernorm.weight", "expected a wider format"),
    ],
)
def test_scales_and_vectors_in_fp8_are_refused(name: str, words: str, tmp_path: Path) -> None:
    raw, config, params = small(quantization_config=FP8)
    tensors, _ = fp8_tensors(config, params)
    tensors[AT + name] = tensors[AT + name].astype(ml_dtypes.float8_e4m3fn)
    write_files(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=f"{AT}{name}: {words}"):
        load(tmp_path, config, np.float32)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_scales_may_have_16_bits(dtype: Any, tmp_path: Path) -> None:
    raw, config, params = small(quantization_config=FP8)
    tensors, _ = fp8_tensors(config, params)
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] = tensors[name].astype(dtype)
    write_files(tmp_path, raw, tensors)
    layer = load(tmp_path, config, np.float32)["layers"][1]
    name = f"{AT}self_attn.o_proj.weight_scale_inv"
    np.testing.assert_array_equal(layer["o"].scales, tensors[name].astype(np.float32))


def test_an_index_that_is_wrong_is_named(tmp_path: Path) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params)
    write_files(tmp_path, raw, tensors)
    (tmp_path / SINGLE).rename(tmp_path / "a.safetensors")
    files = dict.fromkeys(tensors, "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    load(tmp_path, config)
    write(tmp_path / "b.safetensors", {})
    files["model.norm.weight"] = "b.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match="model.norm.weight: expected in b.safetensors"):
        load(tmp_path, config)
    files["model.norm.weight"] = "c.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match="c.safetensors"):
        load(tmp_path, config)
    for broken in ("{", "[]", "{}"):
        (tmp_path / INDEX).write_text(broken)
        with pytest.raises(ValueError, match=rf"{INDEX}: expected JSON with a weight_map"):
            load(tmp_path, config)


def test_an_integer_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, config, params = small()
    tensors = published_tensors(config, params)
    tensors["model.norm.weight"] = np.zeros(32, np.int32)
    monkeypatch.setitem(DTYPES, "I32", np.dtype(np.int32))
    write_files(tmp_path, raw, tensors)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="model.norm.weight: expected F32, .*, got I32"):
        load(tmp_path, config)
