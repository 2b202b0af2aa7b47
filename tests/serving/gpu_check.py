"""Serves a small model of DeepSeek-V2-Lite's dims in bfloat16, and judges the tokens.

tools/serving_gpu.sh runs the three parts, each in the environment that it needs:

* `make DIR`: a checkpoint with random weights, prompts, and what Hugging Face answers in bfloat16.
* `serve DIR DEVICE NAME [ARGUMENT...]`: starts the server, sends the prompts, says which kernels
  ran.
* `judge DIR NAME...`: by how much the tokens are worse than the best ones, in Hugging Face's
  logits in float32. Two programs in bfloat16 need not agree where two tokens are nearly as good.
"""

# pyright: reportMissingImports=false
# No environment has the packages of all parts.

import collections
import concurrent.futures
import gzip
import json
import pathlib
import subprocess
import sys
from typing import Any

NEW_TOKENS = 32
PROMPT_LENS = (1, 40, 65, 300, 700, 1500)
SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1408,
    num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2,
    n_routed_experts=16, num_experts_per_tok=6, first_k_dense_replace=1, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096,
    q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
    routed_scaling_factor=1.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ARGUMENTS = (
    "--dtype=bfloat16", "--page-size=64", "--chunked-prefill-size=2048", "--max-total-tokens=16384",
    "--max-running-requests=8", "--mem-fraction-static=0.5",
)  # fmt: skip


def make(root: pathlib.Path) -> None:
    """Write the checkpoint, the prompts and the answers."""
    import make_checkpoints
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(**SIZES, initializer_range=0.05)
    model: Any = transformers.DeepseekV2ForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    # Special tokens are never the best ones, because the server leaves them out of its answers.
    model.lm_head.weight.data[: SIZES["eos_token_id"] + 1] = 0
    rest = dict(scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)
    make_checkpoints.save(model, rest | dict(rope_scaling=None), root)
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
    (root / "huggingface.json").write_text(json.dumps(answers))


def serve(root: pathlib.Path, device: str, name: str, *more: str) -> None:
    """Send all prompts at once, twice, and write the tokens; profile a round of new prompts."""
    import requests
    from server import Server

    answers = json.loads((root / "huggingface.json").read_text())
    arguments = (f"--model-path={root}", f"--device={device}", *ARGUMENTS, *more)
    with Server(root / f"{name}.log", *arguments) as server:

        def send(answer: dict[str, Any]) -> Any:
            return server.generate(answer["prompt"], NEW_TOKENS)

        with concurrent.futures.ThreadPoolExecutor(len(answers)) as pool:
            first, second = (list(pool.map(send, answers)) for _ in range(2))
            profile = dict(output_dir=str(root / f"profile_{name}"))
            requests.post(f"{server.url}/start_profile", json=profile, timeout=60)
            new = [answer | dict(prompt=answer["prompt"][::-1]) for answer in answers]
            list(pool.map(send, new))
            requests.post(f"{server.url}/stop_profile", timeout=120)
        if device == "cuda":  # only the scheduler should hold the GPU
            query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
            print("processes of the engine:", [process.pid for process in server.family])
            print("on the GPU:", subprocess.run(query, capture_output=True, text=True).stdout)
        print("cached in the second round:", [r["meta_info"]["cached_tokens"] for r in second])
    show_kernels(root / f"profile_{name}")
    for kind, results in (("", first), ("_cached", second)):
        tokens = [a | dict(tokens=r["output_ids"]) for a, r in zip(answers, results, strict=True)]
        (root / f"{name}{kind}.json").write_text(json.dumps(tokens))


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


def judge(root: pathlib.Path, names: list[str]) -> None:
    """Compare the tokens of all with the best ones; end with 1 if a server's are worse."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model: Any = transformers.DeepseekV2ForCausalLM.from_pretrained(root, dtype=torch.float32)
    model.to(device).eval()
    reference = json.loads((root / "huggingface.json").read_text())
    worst = {}
    for name in ("huggingface", *names):
        gaps, others, same = [], [], 0
        answers = json.loads((root / f"{name}.json").read_text())
        for answer, wanted in zip(answers, reference, strict=True):
            tokens = torch.tensor([answer["prompt"] + answer["tokens"]], device=device)
            with torch.no_grad():
                logits = model(tokens).logits[0, len(answer["prompt"]) - 1 : -1]
            best = logits.max(-1).values
            gaps.append(best - logits.gather(-1, tokens[0, len(answer["prompt"]) :, None])[:, 0])
            print(
                f"  {name}, prompt of {len(answer['prompt'])}: {len(gaps[-1])} tokens, "
                f"worst is token {int(gaps[-1].argmax())}, by {float(gaps[-1].max()):.2f}"
            )
            others.append(best - logits.mean(-1))
            same += answer["tokens"] == wanted["tokens"]
        gap = torch.cat(gaps)
        worst[name], random = float(gap.max()), float(torch.cat(others).mean())
        print(
            f"{name:20} answers equal to Hugging Face's in bfloat16: {same} of {len(reference)}; "
            f"best token in float32: {int((gap == 0).sum())} of {len(gap)}; "
            f"worse by at most {worst[name]:.4f} (a random token: {random:.1f})"
        )
    limit = 2 * worst["huggingface"] + 0.05
    if bad := [name for name in names if worst[name] > limit]:
        sys.exit(f"worse than {limit:.4f}: {', '.join(bad)}")


def main() -> None:
    """Run one part."""
    part, root, *rest = sys.argv[1:]
    path = pathlib.Path(root)
    if part == "make":
        path.mkdir(parents=True, exist_ok=True)
        make(path)
    elif part == "serve":
        serve(path, *rest)
    else:
        judge(path, rest)


if __name__ == "__main__":
    main()
