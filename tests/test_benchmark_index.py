"""bench_index.py: its rows, its check, its bars, and small runs."""

import argparse
import dataclasses
import json
from importlib import import_module as load

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla
from jax_mla._runtime import _ffi

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")
TINY = "--repeats 1 --cache-mb 0.1 --dispatch-ms 0.1 --tb-per-s 1 --tflop-per-s 1 --no-trace"


def run(tmp_path, *argv):
    path = tmp_path / "index.json"
    status = load("bench_index").main([*TINY.split(), *argv, "--json", str(path)])
    return status, json.loads(path.read_text())


def small(**changes):
    grid = load("index_grid")
    return dataclasses.replace(grid.IndexCase(3, 150, 4, topk=16), **changes)


def test_published_rows():
    grid = load("index_grid")
    cases = grid.full_grid()
    assert len({case.label for case in cases}) == len(cases) == 18
    sizes = {(1, 2048), (1, 32768), (1, 131072), (32, 32768), (128, 8192), (128, 32768)}
    for heads in (32, 64):
        mine = [case for case in cases if case.num_heads == heads]
        assert {(c.batch, c.seq) for c in mine if not c.is_prefill} == sizes
        assert [c.seq - 4096 for c in mine if c.is_prefill] == [8192, 32768, 131072]
    assert [case.label for case in grid.append_grid()] == [
        "append 128", "append 8192", "append 128 raw", "append 8192 raw",
    ]  # fmt: skip


def test_bytes_and_operations_of_a_call():
    case = small(q_len=2)
    assert case.num_pairs == 3 * (149 + 150)
    assert case.num_flops == case.num_pairs * 4 * 256
    assert case.num_bytes == 3 * 150 * 132 + 6 * (4 * 132 + 17 * 4)
    # A query that sees at most k tokens needs no key.
    assert small(seq=16).num_bytes == 3 * 17 * 4
    assert small(seq=17, q_len=2).num_pairs == 3 * 17


def test_options_choose_products():
    parse, grid = load("bench_index").parse_arguments, load("index_grid")
    args = parse([])
    assert (args.cases, args.appends) == (grid.full_grid(), grid.append_grid())
    args = parse(["--batch", "2", "--heads", "8", "16", "--q-len", "5"])
    assert [case.label for case in args.cases] == [
        "b2 prefill 5 behind 32763 h8", "b2 prefill 5 behind 32763 h16",
    ]  # fmt: skip
    assert args.appends == []
    args = parse(["--only", "^append .* raw"])
    assert (len(args.cases), len(args.appends)) == (0, 2)


def test_more_new_tokens_than_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        load("bench_index").parse_arguments(["--seq", "8", "--q-len", "9"])
    assert "--q-len: expected from 1 to 8 new tokens" in capsys.readouterr().err


@pytest.mark.parametrize("q_len", [1, 3])
def test_pools_hold_the_keys_of_the_tile(q_len):
    work = load("index_work").make(small(q_len=q_len), 2)
    check = load("index_work").Check.of(work)
    lists = jax_mla.reference.index_topk(*work.operands, k=16, layer=1)
    assert check.cache == 1
    assert check.other_entries(*lists) == 0
    found = jax_mla.reference.index_topk(
        *work.operands, k=149, layer=1, return_positions=True, return_scores=True
    )
    rows = np.asarray(found[2])[check.queries]
    chosen = np.take_along_axis(check.scores, np.asarray(found[0])[check.queries], axis=1)
    np.testing.assert_allclose(rows, chosen, rtol=1e-4, atol=1e-6)


def test_wrong_lists_are_found():
    work = load("index_work").make(small(), 2)
    check = load("index_work").Check.of(work)
    slots, lens = jax_mla.reference.index_topk(*work.operands, k=16, layer=1)
    everything, _ = jax_mla.reference.index_topk(*work.operands, k=150, layer=1)
    spare = [x for x in np.asarray(everything[0]) if x not in np.asarray(slots[0])][0]
    wrong = {
        "lens": (slots, lens - 1),
        "another sequence": (slots.at[0, 3].set(slots[1, 3]), lens),
        "not ascending": (slots[:, ::-1], lens),
        "missing|not ascending": (slots.at[0, 0].set(spare), lens),
    }
    for message, lists in wrong.items():
        with pytest.raises(AssertionError, match=message):
            check.other_entries(*lists)
    other_layer = jax_mla.reference.index_topk(*work.operands, k=16, layer=0)
    with pytest.raises(AssertionError, match="missing"):
        check.other_entries(*other_layer)
    assert check.relative_error(check.scores) == 0
    with pytest.raises(AssertionError, match="off by more"):
        check.relative_error(1.01 * check.scores)


def test_every_call_of_a_dispatch_runs():
    work = load("index_work").make(small(batch=1), 2)
    timed = load("index_contenders").TopkCalls("jax_mla", work, 6, "cpu")
    before = _ffi.extension().call_counts()["index_topk_cpu"]
    timed.run(2)
    assert _ffi.extension().call_counts()["index_topk_cpu"] - before == 12


def test_every_kind_of_row_is_checked_and_timed(tmp_path, monkeypatch):
    grid = load("index_grid")
    kinds = [small(), small(batch=1, q_len=3), small(seq=16)]
    appends = [grid.AppendCase(2, 1, 64), grid.AppendCase(1, 8, 64, is_raw=True)]
    monkeypatch.setattr(grid, "quick_grid", lambda: (kinds, appends))
    status, content = run(tmp_path, "--quick", "--peers")
    assert status == 0
    assert [row["case"] for row in content["rows"]] == [case.label for case in kinds]
    assert all(set(row["times"]) == {"jax_mla"} for row in content["rows"])
    assert all(row["times"]["jax_mla"]["other_entries"] == 0 for row in content["rows"])
    assert [row["case"] for row in content["appends"]] == [case.label for case in appends]
    assert all(set(row["times"]) == {"jax_mla", "jax_mla append"} for row in content["appends"])


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    topk = jax_mla.index_topk
    monkeypatch.setattr(jax_mla, "index_topk", lambda q, w, *a, **k: topk(q, -w, *a, **k))
    argv = "--seq 200 --heads 2 --topk 16 --peers".split()
    status, content = run(tmp_path, *argv)
    assert status == 1
    assert "slots: " in content["rows"][0]["wrong"]["jax_mla"]
    assert not content["rows"][0]["times"]


def test_a_peer_takes_turns(tmp_path, monkeypatch):
    bench, contenders = load("bench_index"), load("index_contenders")

    def adapter(work):
        check = load("index_work").Check.of(work)
        return argparse.Namespace(
            description="",
            scores=lambda cache, queries: check.scores,
            contenders=lambda calls: [
                contenders.TopkCalls("deep_gemm scores", work, calls, "reference")
            ],
        )

    peer = argparse.Namespace(NAME="deep_gemm", why_not=lambda *_: "", Adapter=adapter)
    monkeypatch.setattr(bench, "PEERS", (peer,))
    status, content = run(tmp_path, *"--seq 64 --heads 2 --topk 16".split())
    assert status == 0
    assert set(content["rows"][0]["times"]) == {"jax_mla", "deep_gemm scores"}


def test_a_missing_peer_says_so():
    grid, peers = load("index_grid"), load("peers")
    for case in (grid.prefill_call(8192, 64), grid.IndexCase(1, 2048, 64)):
        reason = peers.why_not(load("peers.deep_gemm"), case, None)
        assert reason == "" or "torch" in reason or "deep_gemm" in reason


def test_bars():
    grid, bars = load("index_grid"), load("index_bars")
    rows = {
        case: {
            "case": case.label,
            "times": {"jax_mla": {"us": 12.0}, "deep_gemm scores": {"us": 10.0}},
        }
        for case in grid.full_grid()
    }
    appends = [
        {"case": "append 128", "times": {"jax_mla": {"us": 2.4}, "jax_mla append": {"us": 2.0}}}
    ]
    found = {bar.name: bar for bar in bars.reached(rows, appends, "jax_mla", on_h200=True)}
    assert len(found) == 6 + 2 + 1
    one = found["us, b1 s32768 h64"]
    assert (one.rows, one.reached, one.must, one.aim, one.met) == (1, 12.0, 11.0, 8.0, False)
    assert found["us, b1 s131072 h64"].met is True
    prefill = found["us / us of DeepGEMM's scores, prefill, 32 heads"]
    assert (prefill.rows, prefill.reached, prefill.met) == (3, 1.2, True)
    assert found["index_append: us above append"].reached == pytest.approx(0.4)
    elsewhere = bars.reached(rows, appends, "jax_mla", on_h200=False)
    assert {bar.name[:9] for bar in elsewhere} == {"us / us o"}
    assert bars.reached({}, [], "jax_mla", on_h200=True) == []


def test_the_twin_of_an_append_moves_as_many_bytes():
    grid, contenders = load("index_grid"), load("index_contenders")
    for case in grid.append_grid():
        scales = 4 * case.batch * case.q_len
        assert contenders.twin(case).num_bytes == contenders.append_bytes(case) - scales
    pool, new = contenders.append_operands(grid.AppendCase(2, 3, 64, is_raw=True), 2)
    assert pool.shape == (2, 2, 64, 132) and new["k"].dtype == jnp.bfloat16
    assert jax.tree.leaves(new)
