"""The documents: their programs run as they stand and are right, and their links lead somewhere."""

import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
HAS_FLAX = importlib.util.find_spec("flax") is not None
Arrays = dict[str, np.ndarray]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def notebook_cells() -> list[str]:
    """The code of the quickstart's notebook. The first cell is its own: it asks for 8 devices."""
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


DEVICES = "--xla_force_host_platform_device_count=8"
# As in conftest.py: most of the time is XLA compiling small programs.
FLAGS = f"--xla_backend_optimization_level=0 {DEVICES}"


def run(program: str, flags: str = FLAGS) -> Arrays:
    """Run a program in a new process with 8 CPU devices; return the arrays that it saves."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if not flags:  # the program sets them itself
        del env["XLA_FLAGS"]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "results.npz")
        # -P: the source tree, which need not hold the extension, is not to come before the package.
        warnings = [] if "flax" in program else ["-W", "error"]  # flax may have its own
        command = [sys.executable, "-P", *warnings, "-c", program, path]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-4000:]
        with np.load(path) as arrays:
            return dict(arrays)


# What the tests append to the quickstart, to see what it computed.
SAVE = """
import sys
f32 = lambda x: np.asarray(x, np.float32)
lite = [
    {k: v for k, v in layer.items() if not k.startswith("q_")}
    | {"q_proj.weight": layer["q_b_proj.weight"] @ layer["q_a_proj.weight"]}
    for layer in published
]
lite_pages = Pages(range(num_pages), page_size, batch, max_pages_per_seq)
_, lite_output = forward(
    jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(split_heads, lite)), jnp.zeros_like(pool),
    prompts, lite_pages.grow(prompt_lens), newest_positions(prompt_lens, prompts.shape[1]),
)
results = {
    "prompt_lens": prompt_lens, "prompts": f32(prompts), "new_tokens": f32(new_tokens),
    "outputs": f32(jnp.stack(outputs)), "ragged_outputs": f32(jnp.array(ragged_outputs)),
    "mesh_outputs": np.stack([f32(y) for y in mesh_outputs]),
    "mesh_pool_shards": np.array([s.data.shape for s in mesh_pool.addressable_shards]),
    "lite_output": f32(lite_output[:, -1:]), "fp8_output": f32(fp8_y[:, -1:]),
    "bounded": f32(bounded),
    "unbounded": f32(jax_mla.reference.decode(
        query[..., :d_ckv], query[..., d_ckv:], pool, wide_table[:, :max_pages_per_seq],
        jnp.asarray(prompt_lens + len(new_tokens)), sm_scale=(d_nope + d_pe) ** -0.5, layer=0,
    )),
    "sparse": f32(sparse),
    "sparse_keys": [  # the rows that the indexer's stand-in chose, of every sequence
        f32(pool[0])[pages.table[b, chosen // page_size], chosen % page_size] for b in range(batch)
    ],
    "sparse_lens": (prompt_lens + len(new_tokens) + 2) // 3, "query": f32(query),
    "layer_lens": sparse_lens, "layer_positions": place[1],
    "layer_all": f32(sparse_layer(
        sparse_pool, index_pool, 0, sparse_row, index_key, sparse_q, index_q, index_weights, *place,
        topk=128,
    )[2]),
    "layer_dense": f32(jax_mla.decode(
        *sparse_q, jax_mla.append(jnp.zeros_like(pool), *sparse_row, *place, layer=0), place[0],
        jnp.asarray(prompt_lens), sm_scale=(d_nope + d_pe) ** -0.5, layer=0,
    )),
    "layer_out": f32(sparse_out),
    "long_values": f32(values), "mixed_values": f32(mixed_values),
    "long_bounds": long_bounds, "long_ckv": f32(ckv),
    "long_kpe": f32(kpe), "long_q": f32(jnp.concatenate([q_nope, q_pe], -1)),
    **{f"{i}.{name}": f32(w) for i, layer in enumerate(published) for name, w in layer.items()},
    **{f"lite.{i}.{name}": f32(w) for i, layer in enumerate(lite) for name, w in layer.items()},
}
"""
SAVE_NNX = """
before = model.pool[...].unsafe_buffer_pointer()
nnx_step(model, new_tokens[0], nnx_pages.grow(seq_lens), newest_positions(seq_lens, 1))
results["nnx_in_place"] = before == model.pool[...].unsafe_buffer_pointer()
results["nnx_outputs"] = np.stack([f32(y) for y in nnx_outputs])

mesh_pool = put(jnp.zeros(pool.shape, dtype), None, "cp")
mesh_model = Attention(jax.tree.map(jnp.copy, mesh_layers), mesh_pool)
mesh_pages = Pages(in_turn, page_size, batch, max_pages_per_seq)
operands = prompts, mesh_pages.grow(prompt_lens), newest_positions(prompt_lens, prompts.shape[1])
y = nnx_step(mesh_model, *(put(x, "dp") for x in operands))
results["nnx_mesh_output"] = f32(y[:, -1:])
results["nnx_mesh_pool_spec"] = str(mesh_model.pool[...].sharding.spec)
"""


DTYPES = [pytest.param("float32", 1e-5, marks=pytest.mark.full), ("bfloat16", 2e-2)]


@functools.cache
def quickstart(dtype: str) -> Arrays:
    """Run the notebook once; the part with NNX in bfloat16 only, and only with flax."""
    with_nnx = HAS_FLAX and dtype == "bfloat16"
    parts = [cell for cell in notebook_cells() if with_nnx or "flax" not in cell]
    assert len(parts) == (16 if with_nnx else 15)
    tail = [SAVE, SAVE_NNX if with_nnx else "", "np.savez(sys.argv[1], **results)"]
    program = "\n".join([*parts, *tail]).replace("jnp.bfloat16", f"jnp.{dtype}")
    assert program.count(DEVICES) == 1
    program = program.replace(DEVICES, FLAGS)
    return run(program, flags="")


def draw_pictures() -> Any:
    """The module of tools/draw_pictures.py."""
    path = ROOT / "tools" / "draw_pictures.py"
    spec = importlib.util.spec_from_file_location("draw_pictures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_drawn_from_the_tables_of_the_pages(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw_pictures.py", "--check"])
    assert draw_pictures().main() == 0


def test_a_layer_is_drawn_by_part():
    drawing = draw_pictures()
    parts = {"projections": 35.0, **dict.fromkeys(drawing.OURS, 10.0), "output": 25.0}
    names = " | ".join([*parts, "sum", "layer"])
    figures = " | ".join(f"{time:.1f}" for time in [*parts.values(), 100, 99])
    page = f"\n| batch x context | {names} |\n|---|\n| 1 x 8192 | {figures} |\n\n"
    rows = drawing.layer_rows(page)
    assert rows == [("1 x 8192", parts)] and drawing.layer_rows("") == []
    svg = drawing.draw_layer(rows).svg()
    assert "100, jax_mla 40%" in svg and svg.count(f'width="{560 * 0.35:.4g}"') == 1


def test_the_notebook_has_the_programs_of_the_page():
    """Which the tests below run, so that the page's programs are tested as well."""
    programs = [block.strip("\n") for block in blocks("docs/quickstart.md", "python")]
    assert notebook_cells()[1:] == programs
    command = [sys.executable, str(ROOT / "tools" / "make_notebook.py"), "--check"]
    assert subprocess.run(command).returncode == 0


def mla_without_cache(weights: Arrays, x: np.ndarray, score_dims: int) -> np.ndarray:
    """One MLA layer as the DeepSeek-V2 paper writes it, keys and values of every head, in float64.

    Args:
      weights: the published tensors of one layer.
      x: [tokens, hidden], one whole sequence.
      score_dims: the scores are divided by its square root; 192 is right.

    Returns:
      [tokens, hidden], and every token attends to those up to itself.
    """
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in weights.items()}
    tokens, heads = len(x), 8

    def norm(y: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale

    def rotated(y: np.ndarray) -> np.ndarray:  # [tokens, ..., 64], as complex numbers
        turn = np.arange(tokens)[:, None] * 10000.0 ** -(np.arange(0, 64, 2) / 64)
        turn = np.exp(1j * turn).reshape(tokens, *[1] * (y.ndim - 2), 32)
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(y.shape)

    if "q_proj" in w:
        q = x @ w["q_proj"].T
    else:
        q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q = q.reshape(tokens, heads, 192)
    latent = x @ w["kv_a_proj_with_mqa"].T
    kv = norm(latent[:, :512], w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    k_nope, v = np.split(kv.reshape(tokens, heads, 256), 2, axis=-1)
    k_pe = np.broadcast_to(rotated(latent[:, 512:])[:, None], (tokens, heads, 64))
    q = np.concatenate([q[..., :128], rotated(q[..., 128:])], -1)
    k = np.concatenate([k_nope, k_pe], -1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(score_dims)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("hqk,khv->qhv", weight, v).reshape(tokens, -1) @ w["o_proj"].T


def expected_outputs(got: Arrays, prefix: str = "", score_dims: int = 192) -> np.ndarray:
    """What the quickstart has to compute: [1 + steps, batch, 1, hidden]."""
    columns = []
    for b, length in enumerate(got["prompt_lens"]):
        prompt = got["prompts"][b, got["prompts"].shape[1] - length :]
        x = np.concatenate([prompt, got["new_tokens"][:, b, 0]]).astype(np.float64)
        for layer in range(2):
            start = f"{prefix}{layer}."
            published = {k.removeprefix(start): v for k, v in got.items() if k.startswith(start)}
            x = x + mla_without_cache(published, x, score_dims)
        columns.append(x[length - 1 :])
    return np.stack(columns, 1)[:, :, None]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_quickstart_equals_attention_without_cache_or_absorption(dtype, bound):
    got = quickstart(dtype)
    expected = expected_outputs(got)
    assert expected.shape == got["outputs"].shape == (21, 4, 1, 256)
    size = np.abs(expected).max()
    assert np.abs(got["outputs"] - expected).max() < bound * size
    assert np.abs(got["mesh_outputs"] - expected).max() < bound * size
    by_sequence = expected[:, :, 0].swapaxes(0, 1)
    assert np.abs(got["ragged_outputs"] - by_sequence).max() < bound * size
    assert (got["mesh_pool_shards"] == (2, 16, 16, 576)).all()  # 16 of the 32 pages on each device
    assert np.abs(got["bounded"] - got["unbounded"]).max() < bound
    fp8_error = np.abs(got["fp8_output"] - expected[0]).max()
    assert 1e-3 * size < fp8_error < 0.1 * size
    lite = expected_outputs(got, "lite.")[0]
    assert np.abs(got["lite_output"] - lite).max() < bound * np.abs(lite).max()
    # The comparison can tell this scale from that of a cache row's width.
    wrong = expected_outputs(got, score_dims=576)
    assert np.abs(wrong - expected).max() > 2 * bound * size


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_sparse_attention_of_the_quickstart(dtype, bound):
    """Every third token of each sequence, in numpy."""
    got = quickstart(dtype)
    for b, count in enumerate(got["sparse_lens"]):
        rows = got["sparse_keys"][b][:count].astype(np.float64)
        scores = got["query"][b] @ rows.T / np.sqrt(192)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weight @ rows[:, :512] / weight.sum(-1, keepdims=True)
        assert np.abs(got["sparse"][b] - expected).max() < bound * np.abs(expected).max()


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_the_indexer_of_the_quickstart(dtype, bound):
    """A layer that chooses all tokens is a dense one; one that chooses 16 is so up to 16."""
    got = quickstart(dtype)
    place = got["layer_positions"]
    np.testing.assert_array_equal(got["layer_lens"], np.minimum(place + 1, 16))
    size = np.abs(got["layer_dense"]).max()
    assert np.abs(got["layer_all"] - got["layer_dense"]).max() < bound * size
    differs = np.abs(got["layer_out"] - got["layer_dense"]).max((2, 3)) > bound * size
    assert not differs[place < 16].any() and differs[place >= 32].all()


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_long_prompts_of_the_quickstart(dtype, bound):
    got = quickstart(dtype)
    kv_b = got["0.kv_b_proj.weight"].reshape(8, 256, 512).astype(np.float64)
    for begin, end in itertools.pairwise(got["long_bounds"]):
        q, ckv, kpe = (got[f"long_{x}"][begin:end] for x in ("q", "ckv", "kpe"))
        k_nope, v = np.split(np.einsum("kc,hnc->khn", ckv, kv_b), 2, axis=-1)
        k = np.concatenate([k_nope, np.broadcast_to(kpe[:, None], (*k_nope.shape[:2], 64))], -1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(192)
        scores = np.where(np.tri(end - begin, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        expected = np.einsum("hqk,khv->qhv", weight, v)
        # On a CPU, XLA sums the products with absorbed weights in bfloat16.
        for name, factor in (("long_values", 1), ("mixed_values", 4)):
            error = np.abs(got[name][begin:end] - expected).max()
            assert error < factor * bound * np.abs(expected).max(), name


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("q_rank", [192, None])
def test_published_names_and_formulas_are_those_of_transformers(q_rank):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="the published layer needs torch (CPU)")
    pytest.importorskip("transformers", reason="the published layer needs transformers")
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    config: Any = DeepseekV3Config(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=q_rank,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = published.DeepseekV3Attention(config, layer_idx=0).float().eval()
    x, positions = torch.randn(1, 40, 256), torch.arange(40)[None]
    mask = torch.full((1, 1, 40, 40), -torch.inf).triu(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        angles = published.DeepseekV3RotaryEmbedding(config)(x, positions)
        expected = layer(x, position_embeddings=angles, attention_mask=mask)[0][0].numpy()
    weights = {name: value.numpy() for name, value in layer.state_dict().items()}
    got = mla_without_cache(weights, x[0].numpy().astype(np.float64), 192)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.full
@pytest.mark.skipif(not HAS_FLAX, reason="the NNX part of the quickstart needs flax")
def test_quickstart_with_nnx_computes_the_same_in_place():
    got = quickstart("bfloat16")
    np.testing.assert_array_equal(got["nnx_outputs"], got["outputs"])
    assert got["nnx_in_place"]
    size = np.abs(got["outputs"]).max()
    assert np.abs(got["nnx_mesh_output"] - got["outputs"][0]).max() < 2e-2 * size
    assert "cp" in str(got["nnx_mesh_pool_spec"])


SAVE_README_INPUT = """
import sys, numpy as np
f32 = lambda x: np.asarray(x, np.float32)
inputs = {
    "pool": f32(pool), "q_nope": f32(q_nope), "q_pe": f32(q_pe), "ckv": f32(ckv), "kpe": f32(kpe),
    "page_table": np.asarray(page_table), "seq_lens": np.asarray(seq_lens),
}
"""
STEP = "pool, out = step("


def test_readme_examples_are_right():
    (one_device,) = blocks("README.md", "python")
    on_mesh = blocks("docs/sharding.md", "python")[0]
    assert one_device.count(STEP) == on_mesh.count(STEP) == 1
    program = "\n".join([
        one_device.replace(STEP, f"{SAVE_README_INPUT}\n{STEP}"),
        "first = f32(out)",
        on_mesh,
        "np.savez(sys.argv[1], **inputs, first=first, second=f32(out), after=f32(pool),",
        "         pool_spec=str(pool.sharding.spec))",
    ])  # fmt: skip
    got = run(program)
    assert "cp" in str(got["pool_spec"])
    for b, length in enumerate(got["seq_lens"]):
        rows = got["pool"][got["page_table"][b]].reshape(-1, 576).astype(np.float64)
        rows[length] = np.concatenate([got["ckv"][b, 0], got["kpe"][b, 0]])
        rows = rows[: length + 1]
        pages = got["after"][got["page_table"][b]].reshape(-1, 576)
        np.testing.assert_array_equal(pages[: length + 1], rows)
        q = np.concatenate([got["q_nope"][b, 0], got["q_pe"][b, 0]], -1)
        scores = q @ rows.T * 192**-0.5
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weight / weight.sum(-1, keepdims=True) @ rows[:, :512]
        for out in (got["first"], got["second"]):  # the mesh example runs the same step again
            np.testing.assert_allclose(out[b, 0], expected, atol=2e-2)


def test_readme_has_the_two_commands_that_ci_runs():
    install, test = blocks("README.md", "sh")
    assert install.startswith("pip install ") and "examples/deepseek/generate.py" in install
    assert test.startswith("pip install ") and test.strip().endswith("&& pytest")


SAVE_LOCAL_PAGES_INPUT = """
import sys, numpy as np
f32 = lambda x: np.asarray(x, np.float32)
arrays = [pool, q_nope, q_pe, ckv, kpe, page_table, seq_lens]
hlo = step.lower(*arrays).compile().as_text()
inputs = {f"in{i}": f32(x) for i, x in enumerate(arrays)}
"""


@pytest.mark.full
def test_local_pages_snippet_is_right_without_a_collective():
    (snippet,) = (b for b in blocks("docs/sharding.md", "python") if "local_pages=" in b)
    assert snippet.count(STEP) == 1
    got = run(
        snippet.replace(STEP, f"{SAVE_LOCAL_PAGES_INPUT}\n{STEP}")
        + "np.savez(sys.argv[1], **inputs, pool=f32(pool), out=f32(out), hlo=hlo,\n"
        + "         pool_spec=str(pool.sharding.spec))\n"
    )
    assert not re.search("all-|reduce-scatter|collective-", str(got["hlo"]))
    assert "data" in str(got["pool_spec"])
    pools, q_nope, q_pe, ckv, kpe, tables, lens = (got[f"in{i}"] for i in range(7))
    tables, lens = tables.astype(int), lens.astype(int)
    pools, after = (x.reshape(4, 6, 64, 576) for x in (pools, got["pool"]))
    for b, length in enumerate(lens):
        part, table = b // 2, tables[b]
        rows = pools[part, table].reshape(-1, 576).astype(np.float64)
        if length == 0:
            assert not got["out"][b].any()
            continue
        rows[length - 1] = np.concatenate([ckv[b], kpe[b]])
        np.testing.assert_array_equal(after[part, table].reshape(-1, 576), rows)
        scores = np.concatenate([q_nope[b], q_pe[b]], -1) @ rows[:length].T * 192**-0.5
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weight / weight.sum(-1, keepdims=True) @ rows[:length, :512]
        np.testing.assert_allclose(got["out"][b], expected, atol=2e-2)


@pytest.mark.full
def test_integrations_snippets_are_right():
    snippets = blocks("docs/integrations.md", "python")
    assert len(snippets) == 2
    save = """
import sys, numpy as np
f32 = lambda x: np.asarray(x, np.float32)
np.savez(sys.argv[1], out=f32(out), sglang_out=f32(sglang_out), pool=f32(cache_kv),
         q_nope=f32(ql_nope), q_pe=f32(q_pe), ckv=f32(new_kv_c), kpe=f32(new_k_pe))
"""
    got = run("\n".join([*snippets, save]))
    out = got["out"].swapaxes(0, 1)
    np.testing.assert_array_equal(got["sglang_out"], out)
    rows = np.concatenate([got["ckv"], got["kpe"]], -1).astype(np.float64)
    query = np.concatenate([got["q_nope"].swapaxes(0, 1), got["q_pe"]], -1)
    expected_pool = np.zeros((12, 64, 640), np.float32)
    expected_pool[3, :1, :576], expected_pool[7, :5, :576] = rows[:1], rows[1:6]
    np.testing.assert_array_equal(got["pool"].reshape(12, 64, 640), expected_pool)
    for token, keys in enumerate([rows[:1], *(rows[1 : i + 2] for i in range(5))]):
        scores = query[token] @ keys.T * 192**-0.5
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weight / weight.sum(-1, keepdims=True) @ keys[:, :512]
        np.testing.assert_allclose(out[token], expected, atol=2e-2)
    assert not out[6:].any()


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path):
    links: Any = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


FOLDERS = "csrc|jax_mla|tests|tools|cmake|benchmarks|examples|docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_documents_exist(document: Path):
    paths = set(re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)[` ]", document.read_text()))
    missing = [path for path in sorted(paths) if not any(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize(
    "constants", sorted(ROOT.glob("csrc/**/tuning.h")), ids=lambda p: p.parent.name
)
def test_tables_that_constants_name_exist(constants: Path):
    headings = set().union(*(anchors(p.read_text()) for p in ROOT.glob("docs/kernels/*.md")))
    comments = constants.read_text().replace("\n//", "")
    titles = re.findall(r'"([A-Z][\w ]+)"', comments)
    assert titles
    assert not [title for title in titles if title.lower().replace(" ", "-") not in headings]
