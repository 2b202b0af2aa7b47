"""bench_sparse.py: its rows, its data, its bars, and small runs."""

import argparse
import dataclasses
import json
from importlib import import_module as load

import numpy as np
import pytest

import jax_mla

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")
TINY = "--repeats 1 --cache-mb 0.1 --dispatch-ms 0.1 --tb-per-s 1 --tflop-per-s 1 --no-trace"


def run(tmp_path, *argv):
    path = tmp_path / "sparse.json"
    status = load("bench_sparse").main([*TINY.split(), *argv, "--json", str(path)])
    return status, json.loads(path.read_text())


def test_published_rows():
    cases = load("sparse_grid").full_grid()
    assert len({case.label for case in cases}) == len(cases) == 28
    decode = [c for c in cases if not (c.is_prefill or c.mixed) and c.topk == 2048]
    for heads in (64, 128):
        sizes = {(c.batch, c.q_len) for c in decode if c.num_heads == heads}
        assert sizes == {(b, 1) for b in (1, 8, 32, 64, 128)} | {(8, 2), (128, 2)}
    assert sorted(c.batch for c in decode if c.num_heads == 16) == [1, 8, 32, 64, 128]
    assert {c.num_heads for c in cases if c.is_prefill} == {16, 64, 128}
    assert {c.query_shape[0] for c in cases if c.is_prefill} == {4096}


def test_bytes_and_operations_of_a_call():
    grid, roofline = load("sparse_grid"), load("roofline")
    case = grid.SparseCase(batch=2, num_heads=3, seq=100, q_len=2, topk=50)
    assert case.num_pairs == 2 * 2 * 50
    assert roofline.num_flops(case) == 200 * 3 * 2 * (576 + 512)
    # Two lists of half of the rows name three quarters of them.
    queries = 2 * 2 * 3 * (576 + 512) * 2
    assert roofline.num_bytes(case) == 2 * 75 * 1152 + queries
    assert roofline.num_bytes(case.stored_as("fp8_ds_mla")) == 2 * 75 * 656 + queries
    assert roofline.num_bytes(case.stored_as("fp8_e4m3")) == 2 * 75 * 576 + queries


@pytest.mark.parametrize("mixed", [False, True])
def test_lists_name_distinct_tokens_of_their_sequence(mixed):
    grid, work = load("sparse_grid"), load("sparse_work")
    case = grid.SparseCase(3, 1, seq=100, q_len=2, page_size=8, topk=20, mixed=mixed)
    lists = work.slots(case)
    table = load("workload").page_table(case)
    for i, (row, length) in enumerate(zip(lists, case.topk_lens, strict=True)):
        entries = row[:length]
        assert len(set(entries)) == length
        assert set(entries // 8) <= set(table[i // 2])
        assert (row[length:] == -1).all()
    if mixed:
        assert case.topk_lens[0] == 0 and case.topk_lens.max() == 20
    assert not (np.diff(lists[-1]) > 0).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_format", [None, "fp8_ds_mla"])
def test_host_knows_the_rows_that_lists_name(kv_format):
    grid, work, workload = load("sparse_grid"), load("sparse_work"), load("workload")
    case = grid.SparseCase(2, 1, seq=40, page_size=8, topk=12, mixed=True)
    base = workload.make_workload(case, *workload.make_pools(case, 3))
    stored = base if kv_format is None else base.stored_as(kv_format)
    made = work.make(case, base).with_cache_of(stored)
    rows, table = made.as_decode().host_cache(2, np.array([1, 0]))
    decoded = jax_mla.reference.decode_rows([made.pools[2]], 512, 64, kv_format, None)
    values = np.concatenate(decoded, axis=-1).reshape(-1, 576)
    for row, query in enumerate((1, 0)):
        length = case.topk_lens[query]
        slots = np.asarray(made.indices)[query, :length]
        np.testing.assert_array_equal(rows[table[row, :length], 0], values[slots])


def test_options_choose_products():
    parse = load("bench_sparse").parse_arguments
    grid = load("sparse_grid")
    assert parse([]).cases == grid.full_grid()
    assert parse(["--quick"]).cases == grid.quick_grid()
    cases = parse(["--batch", "1", "64", "--q-len", "2", "--topk", "512", "--heads", "20"]).cases
    assert [(c.batch, c.seq, c.topk, c.num_heads, c.q_len) for c in cases] == [
        (1, 16384, 512, 20, 2), (64, 8192, 512, 20, 2),
    ]  # fmt: skip
    assert {c.num_heads for c in parse(["--only", "^prefill .* h64"]).cases} == {64}
    assert parse(["--mixed", "--seq", "4096"]).cases[0].label == "b8 k0-2048 of 4096 h64"


def test_a_list_longer_than_its_sequence_is_refused(capsys):
    with pytest.raises(SystemExit):
        load("bench_sparse").parse_arguments(["--topk", "300", "--seq", "200"])
    assert "--topk: expected from 1 to 200 entries" in capsys.readouterr().err


@pytest.mark.full
def test_every_kind_of_row_is_checked_and_timed(tmp_path, monkeypatch):
    grid = load("sparse_grid")
    small = grid.SparseCase(2, 4, seq=64, topk=16)
    kinds = [small, dataclasses.replace(small, q_len=2), dataclasses.replace(small, mixed=True)]
    kinds.append(dataclasses.replace(small, batch=1, q_len=3, is_prefill=True))
    monkeypatch.setattr(grid, "quick_grid", lambda: kinds)
    status, content = run(tmp_path, "--quick", "--peers")
    assert status == 0
    assert [row["case"] for row in content["rows"]] == [case.label for case in kinds]
    for row in content["rows"]:
        assert set(row["times"]) == {"jax_mla", "jax_mla fp8_ds_mla", "jax_mla fp8_e4m3"}
        assert all(entry["relative_error"] < 1e-2 for entry in row["times"].values())
        assert set(row["backends"].values()) <= {status.name for status in jax_mla.backends()}
    assert len(load("sparse_grid").quick_grid()) < 10


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    attend = jax_mla.sparse_attention
    monkeypatch.setattr(jax_mla, "sparse_attention", lambda *a, **k: 1.1 * attend(*a, **k))
    argv = "--batch 1 --heads 2 --seq 32 --topk 8 --kv-format plain --peers".split()
    status, content = run(tmp_path, *argv)
    assert status == 1
    assert "out: " in content["rows"][0]["wrong"]["jax_mla"]
    assert not content["rows"][0]["times"]


@pytest.mark.full
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", None])
def test_a_peer_takes_turns_over_the_format_that_it_reads(tmp_path, monkeypatch, kv_format):
    bench, contenders = load("bench_sparse"), load("contenders")
    dtypes = []

    def adapter(work):
        dtypes.append(str(work.pools.dtype))
        call = bench.sparse_attention(work.sm_scale, "reference", work.options)
        operands, caches = work.call_operands, work.num_caches
        return argparse.Namespace(
            description="",
            outputs=lambda cache: np.asarray(call(*operands, cache)),
            contender=lambda calls: contenders.ChainedCalls(
                "flash_mla", call, operands, caches=caches, calls=calls
            ),
        )

    peer = argparse.Namespace(
        NAME="flash_mla", why_not=lambda *_: "", Adapter=adapter, kv_format_of=lambda _: kv_format
    )
    monkeypatch.setattr(bench, "PEERS", (peer,))
    argv = "--batch 1 --heads 2 --seq 32 --topk 8 --kv-format plain".split()
    status, content = run(tmp_path, *argv)
    assert status == 0
    assert dtypes == ["bfloat16" if kv_format is None else "uint8"]
    times = content["rows"][0]["times"]
    assert set(times) == {"jax_mla", "flash_mla"}
    assert times["flash_mla"]["kv_format"] == kv_format


def test_a_missing_peer_says_so(tmp_path):
    grid, peers = load("sparse_grid"), load("peers")
    for case in (grid.decode_call(1, 64), grid.prefill_call(64)):
        peer = load("peers.flash_mla_sparse")
        reason = peers.why_not(peer, case, peer.kv_format_of(case))
        assert reason == "" or "torch" in reason or "flash_mla" in reason


def times_of(us, tflop_per_s=500.0):
    return {"us": us, "tflop_per_s": tflop_per_s}


def made_up_run(ours, theirs=100.0, e4m3=1.0):
    """Rows of the published run: FlashMLA's time, ours in bf16, in fp8_ds_mla and in fp8_e4m3."""
    rows = {}
    for case in load("sparse_grid").full_grid():
        us = ours(case)
        rows[case] = {
            "case": case.label,
            "times": {
                "jax_mla": times_of(us),
                "jax_mla fp8_ds_mla": times_of(0.5 * us),
                "jax_mla fp8_e4m3": times_of(0.5 * us * e4m3),
                "flash_mla": times_of(theirs),
            },
        }
    return rows


def test_bars():
    rows = made_up_run(lambda case: 80.0 if case.num_heads > 16 else 50.0, e4m3=1.1)
    found = {bar.name: bar for bar in load("bars").reached_sparse(rows, "jax_mla", on_h200=True)}
    decode = found["bfloat16: peer / ours, decode, every row"]
    assert (decode.rows, decode.reached, decode.must, decode.met) == (14, 1.25, 1.1, True)
    mean = found["fp8_ds_mla: peer / ours, decode, mean"]
    assert (mean.rows, mean.reached, mean.aim) == (14, pytest.approx(2.5), 1.6)
    few = found["bfloat16: peer / ours, decode, 16 heads"]
    assert (few.rows, few.reached, few.must) == (5, 2.0, 1.5)
    assert found["fp8_ds_mla: peer / ours, decode, 16 heads"].must == 1.8
    assert found["bfloat16: peer / ours, prefill"].rows == 2
    assert found["bfloat16: us, prefill, 16 heads"].met is True
    assert found["bfloat16: us of 16 heads / us of 64"].reached == 50 / 80
    e4m3 = found["fp8_e4m3: us / us of fp8_ds_mla, decode, mean"]
    assert (e4m3.rows, e4m3.met) == (19, False)
    # Lists of 512 take as long as those of 2048 here, so four times as long an entry.
    lists = found["bfloat16: us an entry / us an entry of 2048"]
    assert (lists.rows, lists.reached, lists.met) == (6, 4.0, False)


def test_bars_without_rows_in_the_run_are_left_out():
    rows = made_up_run(lambda _: 80.0)
    for row in rows.values():
        row["times"] = {"jax_mla": row["times"]["jax_mla"]}
    alone = [bar.name for bar in load("bars").reached_sparse(rows, "jax_mla", on_h200=False)]
    assert alone == [
        "bfloat16: us of 16 heads / us of 64", "bfloat16: us an entry / us an entry of 2048",
    ]  # fmt: skip
    assert load("bars").reached_sparse({}, "jax_mla", on_h200=True) == []
