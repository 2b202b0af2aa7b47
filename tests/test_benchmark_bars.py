"""The bars of bench_decode.py, with recorded times of the peers and made-up times of jax_mla."""

import dataclasses
from importlib import import_module as load

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


def recorded_run(ours_over_floor=1.02, ours_plus_us=2.0):
    """Rows of a run with the recorded times of the peers and a made-up time of jax_mla."""
    grid, roofline = load("grid"), load("roofline")
    rows = {}
    for case, recorded in grid.recorded_peers().items():
        us = ours_over_floor * recorded.floor_us + ours_plus_us
        moved = roofline.num_bytes(case)
        rows[case] = {
            "case": case.label,
            "floor_us": recorded.floor_us,
            "bytes": moved,
            "times": {
                "jax_mla": {"us": us, "tb_per_s": moved / us / 1e6},
                "flash_mla": {"us": recorded.flash_mla_us},
                "flashinfer": {"us": recorded.flashinfer_us},
                "xla": {"us": 0.1},
            },
        }
    return rows


def reached_bars(rows, **kwargs):
    return {bar.name: bar for bar in load("bars").reached(rows, "jax_mla", **kwargs)}


def test_bars_of_a_recorded_run():
    rows = recorded_run()
    found = reached_bars(rows, on_h200=True)
    best = load("grid").recorded_peers()
    ratio = {c: best[c].best_us / rows[c]["times"]["jax_mla"]["us"] for c in rows}

    def mean(chosen):
        return pytest.approx(np.exp(np.mean([np.log(ratio[c]) for c in rows if chosen(c)])))

    small = found["best peer / ours, batch 1 and 8, mean"]
    assert small.reached == mean(lambda c: c.batch in (1, 8))
    assert (small.rows, small.must, small.met) == (24, 1.6, True)
    middle = found["best peer / ours, batch 32 and skewed, mean"]
    assert middle.reached == mean(lambda c: c.batch in (32, 64))
    assert middle.rows == 9 + 2
    assert found["best peer / ours, all rows, mean"].reached == mean(lambda c: True)
    every = found["best peer / ours, every row"]
    assert (every.rows, every.reached) == (51, min(ratio.values()))
    assert ratio[next(c for c in rows if c.label == every.worst_case)] == every.reached
    heavy = found["best peer / ours, batch 128, 128 heads, 4096+"]
    assert (heavy.rows, heavy.must) == (5, 1.05)
    assert found["us - floor, batch 1 and 8"].worst_case == "b8 s4096 h128 q4"
    assert found["us - floor, batch 1 and 8"].met is None  # an aim without a bar
    for seq, count in ((4096, 4), (8192, 2), (32768, 1)):
        rate = found[f"TB/s, batch 128, 16 and 64 heads, {seq}"]
        assert rate.rows == count
        assert rate.met == (rate.reached >= rate.must)
        assert 4.2 < rate.reached < 4.55
    assert found["us - bytes / 4.55 TB/s, batch 128, 16 and 64 heads"].reached < 2.0 + 25


def test_bars_without_rows_in_the_run_are_left_out():
    rows = recorded_run()
    for row in rows.values():
        row["times"] = {"jax_mla": row["times"]["jax_mla"]}
    alone = reached_bars(rows, on_h200=True)
    assert not any("peer" in name for name in alone)
    assert len(alone) == 6
    assert reached_bars(rows, on_h200=False) == {}


def test_page_sizes_are_compared_within_a_shape():
    grid = load("grid")
    rows = recorded_run()
    for case in grid.page_size_grid():
        base = rows[dataclasses.replace(case, page_size=64)]
        slower = 1.1 if (case.page_size, case.num_heads) == (1, 64) else 1.01
        times = {"jax_mla": {"us": slower * base["times"]["jax_mla"]["us"], "tb_per_s": 1.0}}
        rows[case] = {**base, "case": case.label, "times": times}
    found = reached_bars(rows, on_h200=True)
    pages = found["us / us with pages of 64"]
    assert (pages.rows, pages.worst_case, pages.met) == (18, "b32 s4096 h64 p1", False)
    assert pages.reached == pytest.approx(1.1)
    # The other bars count only the rows with pages of 64.
    assert found["best peer / ours, every row"].rows == 51


def test_bars_are_printed_as_a_table(capsys):
    load("decode_rows").print_bars(load("bars").reached(recorded_run(), "jax_mla", on_h200=True))
    lines = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert any("b8 s4096 h128 q4" in line for line in lines)
