"""Serves small models of DeepSeek's dims in bfloat16, and judges their tokens.

tools/serving_gpu.sh runs the parts, each in the environment that it needs:

* `make DIR v2|v3|v3_fp8|v32|glm5 full|small`: a checkpoint with random weights, prompts, and what
  Hugging Face answers in bfloat16.
* `serve DIR DEVICE NAME [ARGUMENT...]`: starts the server, sends the prompts, says which kernels
  ran. `load` is the same, and then 200 requests at once, twice.
* `judge DIR...`: by how much the tokens are worse than the best ones, in Hugging Face's logits in
  float32. Two programs in bfloat16 need not agree where two tokens are nearly as good.
"""

# pyright: reportMissingImports=false
# No environment has the packages of all parts.

import collections
import concurrent.futures
import functools
import gzip
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

NEW_TOKENS = 32
INDEX_TOPK = 256  # of sparse models: prompts are shorter and longer
PROMPT_LENS = (1, 40, 65, 300, 700, 1500)
CONTEXT = 4096
SIZES: dict[str, dict[str, Any]] = {
    "full": dict(hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1408),
    # For a CPU. Larger weights, so that attention still looks at few tokens.
    "small": dict(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, initializer_range=0.08
    ),
}  # fmt: skip
COMMON: dict[str, Any] = dict(
    vocab_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
    n_shared_experts=2, n_routed_experts=16, num_experts_per_tok=6, v_head_dim=128,
    max_position_embeddings=CONTEXT, initializer_range=0.05,
)  # fmt: skip
# Few sizes of batches, because each is compiled.
ARGUMENTS = (
    "--dtype=bfloat16", "--page-size=64", "--chunked-prefill-size=2048", "--max-total-tokens=16384",
    "--max-running-requests=8", "--mem-fraction-static=0.5",
    "--precompile-token-paddings", "256", "2048", "--precompile-bs-paddings", "8",
)  # fmt: skip
LOAD_ARGUMENTS = ("--max-running-requests=32", "--precompile-bs-paddings", "8", "32")
LOAD = 200  # requests at once
LOAD_GROWTH_MIB = 64  # of the GPU's memory in a second round
HF_LOSS = 1.0  # of Hugging Face in bfloat16 on average; 0.08 and 0.26 were seen


def make(root: pathlib.Path, kind: str, size: str) -> None:
    """Write the checkpoint, the prompts and the answers."""
    import make_checkpoints
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = COMMON | SIZES[size]
    if kind == "v2":
        model, rest = make_checkpoints.v2(**sizes)
    elif kind == "v32":
        rank = 3 * sizes["hidden_size"] // 4
        own = dict(q_lora_rank=rank, n_group=4, topk_group=2, index_topk=INDEX_TOPK)
        model, rest = make_checkpoints.v32(**sizes | own)
    elif kind == "glm5":
        types = ["full", "shared", "full", "full"]
        own = dict(v_head_dim=256, index_topk=INDEX_TOPK, indexer_types=types)
        model, rest = make_checkpoints.glm5(**sizes | own)
    else:
        rank = sizes["hidden_size"] // 2 if kind == "v3_fp8" else 3 * sizes["hidden_size"] // 4
        model, rest = make_checkpoints.v3(**sizes, q_lora_rank=rank, n_group=4, topk_group=2)
    model = model.to(torch.bfloat16).eval()
    # Special tokens are never the best ones, because the server leaves them out of its answers.
    model.lm_head.weight.data[: model.config.eos_token_id + 1] = 0
    make_checkpoints.save(model, rest, root)
    if kind == "v3_fp8":
        model = make_checkpoints.to_fp8(root).to(torch.bfloat16)
    make_checkpoints.save_tokenizer(root)
    model.to(device)
    answers = []
    for length in PROMPT_LENS:
        prompt = torch.randint(3, 256, (1, length), device=device)
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        answers.append(dict(prompt=prompt[0].tolist(), tokens=tokens[0, length:].tolist()))
    write(root, "huggingface", answers)


def write(root: pathlib.Path, name: str, answers: list[dict[str, Any]]) -> None:
    """Write prompts and tokens where `judge` looks for them."""
    (root / "answers").mkdir(exist_ok=True)
    (root / "answers" / f"{name}.json").write_text(json.dumps(answers))


def read(root: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """Return prompts and tokens."""
    return json.loads((root / "answers" / f"{name}.json").read_text())


# ---- A server ----------------------------------------------------------------------------------


def serve(root: pathlib.Path, device: str, name: str, *more: str, has_load: bool = False) -> None:
    """Send all prompts at once, twice, and write the tokens; profile a round of new prompts."""
    import requests
    from server import Server

    prompts = [answer["prompt"] for answer in read(root, "huggingface")]
    arguments = (f"--model-path={root}", f"--device={device}", *ARGUMENTS, *more)
    if has_load:
        arguments += LOAD_ARGUMENTS
    # Otherwise JAX takes most of the GPU at once, and nobody sees what is in use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    begin = time.monotonic()
    with Server(root / f"{name}.log", *arguments) as server:
        print(f"the first token came after {time.monotonic() - begin:.0f} s")
        send = functools.partial(server.generate, max_new_tokens=NEW_TOKENS)
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            for suffix in ("", "_cached"):
                begin = time.monotonic()
                results = list(pool.map(send, prompts))
                outputs = [result["output_ids"] for result in results]
                pairs = zip(prompts, outputs, strict=True)
                write(root, name + suffix, [dict(prompt=p, tokens=t) for p, t in pairs])
                cached = [result["meta_info"]["cached_tokens"] for result in results]
                print(f"all prompts: {time.monotonic() - begin:.1f} s, of them cached: {cached}")
            profile = dict(output_dir=str(root / f"profile_{name}"))
            requests.post(f"{server.url}/start_profile", json=profile, timeout=60)
            list(pool.map(send, [prompt[::-1] for prompt in prompts]))
            requests.post(f"{server.url}/stop_profile", timeout=120)
        if device == "cuda":  # only the scheduler should hold the GPU
            print("processes of the engine:", [process.pid for process in server.family])
            print("on the GPUs:", nvidia_smi("compute-apps=pid,used_memory"))
        if has_load:
            load(server, root, device, name, prompts)
    show_kernels(root / f"profile_{name}")


def nvidia_smi(query: str) -> str:
    """Return what nvidia-smi says of the GPUs that this process sees."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [f"--id={shown}"] if shown else []
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", *which]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Outcome(NamedTuple):
    """What became of a request. Status 0: no answer came."""

    status: int
    prompt_len: int
    tokens: list[int]


def load(server: Any, root: pathlib.Path, device: str, name: str, prompts: list[list[int]]) -> None:
    """Send 200 requests at once, twice; each is answered or refused, and memory stays flat.

    The prompts with known answers are among them.
    """

    def send(seed: int) -> Outcome:
        rng = random.Random(seed)
        length, new_tokens = int(4 * 2 ** rng.uniform(0, 10.3)), rng.randint(1, NEW_TOKENS)
        prompt = [rng.randint(3, 255) for _ in range(length)]
        if seed % LOAD < len(prompts):
            prompt, new_tokens = prompts[seed % LOAD], NEW_TOKENS
        try:
            result = server.post("/generate", prompt, new_tokens)
            tokens = result.json()["output_ids"] if result.status_code == 200 else []
        except (OSError, ValueError, KeyError) as error:
            print(f"a prompt of {len(prompt)} tokens: {error}")
            return Outcome(0, len(prompt), [])
        if result.status_code == 200:
            is_right = len(tokens) == new_tokens
        else:  # the server keeps some tokens for itself
            is_right = 400 <= result.status_code < 500 and len(prompt) + new_tokens > CONTEXT - 64
        if not is_right:
            print(
                f"a prompt of {len(prompt)} tokens, {new_tokens} to come: {result.status_code}, "
                f"{len(tokens)} tokens, {result.text[:200]}"
            )
            return Outcome(0, len(prompt), [])
        return Outcome(result.status_code, len(prompt), tokens)

    is_on_gpu = device == "cuda"
    used, outcomes = [], []
    for i in range(2):
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(LOAD) as pool:
            outcomes.append(list(pool.map(send, range((i + 1) * LOAD, (i + 2) * LOAD))))
        seconds = time.monotonic() - begin
        answered = [outcome for outcome in outcomes[i] if outcome.status == 200]
        num_prompt = sum(outcome.prompt_len for outcome in answered)
        num_new = sum(len(outcome.tokens) for outcome in answered)
        statuses = dict(collections.Counter(outcome.status for outcome in outcomes[i]))
        of_gpus = map(int, nvidia_smi("gpu=memory.used").split()) if is_on_gpu else []
        used.append(sum(of_gpus) if is_on_gpu else int(server.memory()))
        print(
            f"load, round {i + 1}: requests by status {statuses}; {num_prompt} tokens of prompts "
            f"and {num_new} new ones in {seconds:.1f} s, {(num_prompt + num_new) / seconds:.0f} "
            f"tokens/s; then {used[i]} MiB of {'GPUs' if is_on_gpu else 'this machine'} in use, "
            f"the engine's processes have {server.memory():.0f} MiB of this machine's"
        )
    if any(outcome.status == 0 for outcome in (*outcomes[0], *outcomes[1])):
        sys.exit("load: some requests were lost, or answered wrongly")
    known = zip(prompts, outcomes[1], strict=False)
    write(root, f"{name}_load", [dict(prompt=p, tokens=o.tokens) for p, o in known])
    if used[1] > used[0] + LOAD_GROWTH_MIB:
        sys.exit(f"load: memory grew from {used[0]} to {used[1]} MiB")


def show_kernels(directory: pathlib.Path) -> None:
    """Print what took most of the device's time, and all of jax_mla's kernels."""
    path = next(directory.rglob("*.trace.json.gz"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    devices = {
        e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"]["name"]
    }
    time: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices:
            time[event["name"]] += event["dur"]
            count[event["name"]] += 1
    shown = [n for n, _ in time.most_common(12)]
    shown += [n for n in time if "jax_mla" in n and n not in shown]
    print(f"kernels of one round, {len(time)} names:")
    for kernel in shown:
        print(f"  {time[kernel]:9.0f} us {count[kernel]:5} x {kernel[:110]}")


# ---- Tokens ------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """By how much logits are below the best ones."""

    worst: float
    mean: float


class Judge:
    """Hugging Face's model in float32."""

    def __init__(self, root: pathlib.Path) -> None:
        """Load it."""
        import torch
        import transformers

        torch.backends.cuda.matmul.allow_tf32 = False
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        values = root / "values"  # of weights in FP8
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            values if values.exists() else root, dtype=torch.float32
        )
        self.model.to(self.device).eval()
        self.reference = read(root, "huggingface")

    def logits(self, answer: dict[str, Any]) -> Any:
        """Return the logits of an answer's tokens: [tokens, vocabulary]."""
        import torch

        tokens = torch.tensor([answer["prompt"] + answer["tokens"]], device=self.device)
        with torch.no_grad():
            return self.model(tokens).logits[0, len(answer["prompt"]) - 1 : -1]

    def rounded(self) -> list[Any]:
        """Return the best tokens of a model whose cached rows are in FP8, after other tokens."""
        import torch

        def round_rows(_module: Any, _inputs: Any, out: Any) -> Any:
            return out.to(torch.float8_e4m3fn).to(out.dtype)

        def round_keys(_module: Any, _inputs: Any, out: Any) -> Any:
            rank = self.model.config.kv_lora_rank
            return torch.cat((out[..., :rank], round_rows(None, None, out[..., rank:])), -1)

        hooks = []
        for layer in self.model.model.layers:
            attention = layer.self_attn
            hooks.append(attention.kv_a_layernorm.register_forward_hook(round_rows))
            # The rotary keys are rounded before they are turned, which costs as much.
            hooks.append(attention.kv_a_proj_with_mqa.register_forward_hook(round_keys))
        tokens = [self.logits(answer).argmax(-1) for answer in self.reference]
        for hook in hooks:
            hook.remove()
        return tokens

    def loss(self, name: str, answers: Iterable[dict[str, Any]], tokens: Any = None) -> Loss:
        """Print by how much tokens are worse than the best ones, and return it.

        The tokens are those of the answers, unless others are given for the same places.
        """
        import torch

        gaps, others, num_same = [], [], 0
        for i, (answer, wanted) in enumerate(zip(answers, self.reference, strict=True)):
            logits = self.logits(answer)
            best = logits.max(-1).values
            took = (
                torch.tensor(answer["tokens"], device=self.device) if tokens is None else tokens[i]
            )
            gaps.append(best - logits.gather(-1, took[:, None])[:, 0])
            others.append(best - logits.mean(-1))
            num_same += took.tolist() == wanted["tokens"]
        gap = torch.cat(gaps)
        loss = Loss(float(gap.max()), float(gap.mean()))
        worst = ", ".join(f"{float(g.max()):.2f}" for g in gaps)
        print(
            f"{name:20} best token: {int((gap == 0).sum())} of {len(gap)}; worse by at most "
            f"{loss.worst:.3f}, by {loss.mean:.4f} on average (a random token: "
            f"{float(torch.cat(others).mean()):.1f}); by prompt at most {worst}; equal to Hugging "
            f"Face's in bfloat16: {num_same} of {len(self.reference)}"
        )
        return loss


def judge(root: pathlib.Path) -> list[str]:
    """Compare the tokens of all with the best ones; return what is worse than it may be."""
    model = Judge(root)
    hf = model.loss("huggingface", model.reference)
    names = sorted(path.stem for path in (root / "answers").glob("*.json"))
    names.remove("huggingface")
    fp8 = hf
    if any("fp8" in name for name in names):
        fp8 = model.loss("huggingface, FP8 rows", model.reference, model.rounded())
    bad = []
    if hf.mean > HF_LOSS:
        bad.append(f"{root.name}: Hugging Face's two programs differ; was config.json understood?")
    for name in names:
        loss, by = model.loss(name, read(root, name)), fp8 if "fp8" in name else hf
        # Cached values that are off by a quarter cost ten times as much on average.
        limit = Loss(*(2 * x + 0.05 for x in by))
        if loss.worst > limit.worst or loss.mean > limit.mean:
            bad.append(f"{name}: worse than {limit.worst:.2f} or {limit.mean:.3f} on average")
    return bad


def main() -> None:
    """Run one part."""
    part, root, *rest = sys.argv[1:]
    path = pathlib.Path(root)
    os.environ["TQDM_DISABLE"] = "1"  # bars fill the log
    if part == "make":
        path.mkdir(parents=True, exist_ok=True)
        make(path, *rest)
    elif part in ("serve", "load"):
        serve(path, *rest, has_load=part == "load")
    elif bad := [line for folder in (root, *rest) for line in judge(pathlib.Path(folder))]:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
