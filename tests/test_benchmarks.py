"""The benchmarks: shapes, roofline, statistics and reports, and small runs of each program."""

import argparse
import json
from importlib import import_module as load

import jax.numpy as jnp
import numpy as np
import pytest

import jax_mla

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


def test_published_grid_has_the_recorded_rows_in_their_order():
    grid = load("grid")
    assert grid.full_grid() == list(grid.recorded_peers())
    assert len(grid.full_grid()) == 51


def test_floor_is_the_recorded_one():
    grid, roofline = load("grid"), load("roofline")
    h200 = roofline.KNOWN_DEVICES["NVIDIA H200"]
    for case, recorded in grid.recorded_peers().items():
        floor_us = roofline.floor_seconds(case, h200) * 1e6
        assert floor_us == pytest.approx(recorded.floor_us, abs=0.06), case.label


def test_bytes_and_operations_of_one_call():
    grid, roofline = load("grid"), load("roofline")
    case = grid.Case(batch=2, num_heads=3, seq=100, q_len=4, dtype="float32", d_ckv=256, d_kpe=32)
    rows = 2 * 4 * 3
    assert roofline.num_bytes(case) == 4 * (2 * 100 * 288 + rows * 288 + rows * 256)
    assert roofline.num_flops(case) == 100 * rows * (2 * 288 + 2 * 256)


def test_known_ceilings_can_be_replaced_one_by_one():
    roofline = load("roofline")
    device = argparse.Namespace(platform="gpu", device_kind="NVIDIA H200")
    assert roofline.ceilings_for(device).bytes_per_s == 4.55e12
    replaced = roofline.ceilings_for(device, tflop_per_s=600)
    assert (replaced.bytes_per_s, replaced.flops_per_s) == (4.55e12, 600e12)
    unknown = argparse.Namespace(platform="gpu", device_kind="nobody's")
    given = roofline.ceilings_for(unknown, tb_per_s=1, tflop_per_s=2)
    assert (given.bytes_per_s, given.flops_per_s) == (1e12, 2e12)


@pytest.mark.parametrize(("mean", "longest"), [(1024, 7930), (1806, 25027)])
def test_skewed_lengths_have_the_published_mean_and_maximum(mean, longest):
    lengths = load("grid").pareto_lengths(64, mean)
    assert lengths.dtype == np.int32
    assert abs(lengths.mean() - mean) < 0.02
    assert lengths.max() == longest
    assert np.median(lengths) < 0.7 * mean  # most sequences are short


def test_other_skewed_means_are_drawn_too():
    lengths = load("grid").pareto_lengths(33, 500)
    assert lengths.shape == (33,)
    assert lengths.mean() == pytest.approx(500, rel=0.01)
    assert lengths.min() >= 1


def parse(*argv: str):
    grid = load("grid")
    parser = argparse.ArgumentParser()
    grid.add_arguments(parser)
    return grid.cases_from_arguments(parser.parse_args(argv))


def test_command_line_chooses_products_of_shapes():
    cases = parse("--batch", "2", "3", "--heads", "20", "--seq", "64", "skewed:128", "--q-len", "2")
    assert [(c.batch, c.seq, c.skewed) for c in cases] == [
        (2, 64, False), (3, 64, False), (2, 128, True), (3, 128, True),
    ]  # fmt: skip
    assert {(c.num_heads, c.q_len) for c in cases} == {(20, 2)}


def test_command_line_changes_a_grid_as_a_whole():
    grid = load("grid")
    assert parse() == grid.full_grid()
    assert len(parse("--quick")) < 10
    cases = parse("--page-size", "1", "16", "--layout", "split", "--dtype", "float16")
    assert len(cases) == 2 * len(grid.full_grid())
    assert {(c.page_size, c.layout, c.dtype) for c in cases} == {
        (1, "split", "float16"), (16, "split", "float16"),
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "pareto:4", "skewed:", "1.5"])
def test_a_wrong_length_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="skewed:MEAN"):
        load("grid").parse_seq(text)


def test_cases_that_can_share_caches_are_grouped():
    grid = load("grid")
    groups = grid.by_pool(grid.full_grid())
    assert sum(map(len, groups)) == 51
    sizes = {(group[0].batch, group[0].seq): len(group) for group in groups}
    assert sizes[8, 4096] == 3 + 4  # three head counts, and 2 x 2 of several query tokens
    assert all(len({case.pool_key for case in group}) == 1 for group in groups)


def test_page_sizes_of_a_shape_follow_each_other():
    grid = load("grid")
    cases = parse("--with-page-sizes")
    assert cases == grid.full_grid() + grid.page_size_grid()
    groups = [group[0] for group in grid.by_pool(cases)]
    sizes = [case.page_size for case in groups if (case.batch, case.seq) == (8, 4096)]
    begin = groups.index(grid.Case(8, 16, 4096))
    assert [case.page_size for case in groups[begin : begin + 4]] == sizes == [64, 32, 16, 1]


def test_page_table_is_a_permutation_of_all_pages():
    grid, workload = load("grid"), load("workload")
    case = grid.Case(batch=7, num_heads=1, seq=300, skewed=True, page_size=16)
    table = workload.page_table(case)
    used = np.concatenate([row[:n] for row, n in zip(table, case.pages_per_seq, strict=True)])
    assert sorted(used) == list(range(case.pages_per_seq.sum()))
    assert list(used) != sorted(used)


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_host_knows_what_the_caches_hold(layout):
    grid, workload = load("grid"), load("workload")
    case = grid.Case(
        batch=3, num_heads=1, seq=20, skewed=True, page_size=4, layout=layout, d_ckv=16, d_kpe=8
    )
    work = workload.make_workload(case, *workload.make_pools(case, 3))
    pools = work.pools if layout == "split" else (work.pools,)
    pool, table = work.host_cache(2, np.array([2, 0]))
    for row, sequence in enumerate((2, 0)):
        count = case.pages_per_seq[sequence]
        pages = np.asarray(work.page_table)[sequence, :count]
        want = np.concatenate([np.asarray(p)[2][pages] for p in pools], axis=-1)
        np.testing.assert_array_equal(pool[table[row, :count]], want)


def test_caches_fill_what_is_asked_for():
    grid, workload = load("grid"), load("workload")
    small, large = grid.Case(1, 16, 1024), grid.Case(128, 16, 8192)
    assert workload.num_caches(small, 4e8) * small.cache_bytes >= 4e8
    assert workload.num_caches(small, 4e8, most=32) == 32
    assert workload.num_caches(large, 4e8) == 2


def test_a_dispatch_is_long_enough_and_can_be_halved():
    calls = load("timing").calls_per_dispatch
    assert calls(11, 1e-3, min_seconds=1e-3) == 12
    assert calls(2, 1e-5, min_seconds=1e-3) == 100


class FakeContender:
    """Moves a fake clock by `start` for each run and by `dispatch` for each dispatch."""

    calls = 2

    def __init__(self, name, clock, start=0.0, dispatch=1.0):
        self.name, self.clock, self.start, self.dispatch = name, clock, start, dispatch
        self.order = clock.setdefault("order", [])

    def run(self, dispatches):
        self.order.append(self.name)
        self.clock["now"] += self.start + dispatches * self.dispatch
        return 0.1 * dispatches


@pytest.fixture
def clock(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(load("timing").time, "perf_counter", lambda: clock["now"])
    return clock


def test_contenders_take_turns_in_changing_order(clock):
    timing = load("timing")
    timing.time_in_turn([FakeContender(n, clock) for n in "abcd"], repeats=6, min_dispatches=1)
    order = clock["order"][4:]
    assert order[::2] == order[1::2]  # a short run, then a long one
    turns = ["".join(order[i : i + 8 : 2]) for i in range(0, len(order), 8)]
    assert [sorted(turn) for turn in turns] == 6 * [sorted("abcd")]
    assert len(set(turns)) > 3


def test_the_start_of_a_run_does_not_count(clock):
    timing = load("timing")
    slow_start = FakeContender("slow start", clock, start=7.0, dispatch=3.0)
    (sample,) = timing.time_in_turn([slow_start], repeats=3, min_seconds=30.0, min_dispatches=4)
    assert sample.seconds == pytest.approx(3.0 / slow_start.calls)
    assert sample.spread == pytest.approx(0.0)
    assert sample.host_seconds == pytest.approx(0.1)
    assert sample.dispatches == 7  # the first four took 7 + 4 * 3 s; 30 s are 7 of that length


def test_overlapping_kernels_count_once():
    times = load("timing").summarize_spans([(0, 10, "a"), (5, 12, "b"), (20, 30, "a")])
    assert times.busy_seconds == pytest.approx(22e-9)
    assert times.kernels == {"a": (2, pytest.approx(20e-9)), "b": (1, pytest.approx(7e-9))}
    assert load("timing").summarize_spans([]) is None


def fake_rows():
    def times(us):
        return {
            "jax_mla": {"us": us, "over_floor": us},
            "peer": {"us": 2 * us, "over_floor": 2 * us},
        }

    return [{"case": f"case {us}", "floor_us": 1.0, "times": times(us)} for us in (2.0, 8.0)]


def fake_rows_by_case():
    return dict(zip(load("grid").full_grid(), fake_rows(), strict=False))


def test_summary_is_of_geometric_means():
    summary = load("decode_rows").summarize(fake_rows_by_case())
    assert summary["jax_mla"]["over_floor"] == pytest.approx(4)
    assert summary["peer"]["time_over_first"] == pytest.approx(2)
    assert summary["peer"]["rows"] == 2


def test_table_is_markdown(capsys):
    table = load("report").Table([("case", "s"), ("us", ".1f")])
    table.row(["b1", 2.0])
    table.row(["b2", None])
    lines = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "2.0" in lines[2]
    assert "-" in lines[3]


def test_json_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report, roofline = load("report"), load("roofline")
    device = argparse.Namespace(platform="cpu", device_kind="cpu")
    facts = report.environment(device, roofline.KNOWN_DEVICES["NVIDIA H200"])
    report.Report(tmp_path / "a" / "rows.json", device).save(rows=fake_rows())
    report.plot_over_floor(tmp_path / "a" / "rows.png", facts, fake_rows())
    read = json.loads((tmp_path / "a" / "rows.json").read_text())
    assert {"commit", "date", "device", "jax"} <= set(read["environment"])
    assert (tmp_path / "a" / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_peer_says_so():
    grid = load("grid")
    for peer in ("flash_mla", "flash_mla_fp8", "flashinfer"):
        reason = load(f"peers.{peer}").why_not(grid.Case(1, 16, 64))
        assert reason == "" or peer.removesuffix("_fp8") in reason or "torch" in reason


def test_decode_benchmark_runs_and_checks(tmp_path, capsys):
    pytest.importorskip("tqdm")
    bench = load("bench_decode")
    argv = "--batch 2 --heads 4 --seq 40 --page-size 8 --repeats 1 --cache-mb 0.2 --dispatch-ms 0.1"
    argv += (
        f" --peers reference --tb-per-s 1 --tflop-per-s 1 --no-trace --json {tmp_path / 'r.json'}"
    )
    assert bench.main(argv.split()) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert set(row["times"]) == {"jax_mla", "reference"}
    assert all(entry["relative_error"] < 1e-2 for entry in row["times"].values())
    assert row["auto_backend"] in [status.name for status in jax_mla.backends()]
    assert "b2 s40 h4 p8" in capsys.readouterr().out


def test_decode_benchmark_runs_rows_without_rotary_part():
    pytest.importorskip("tqdm")
    argv = "--batch 2 --heads 4 --seq 40 --page-size 8 --dims 32 0 --repeats 1 --cache-mb 0.2"
    argv += " --dispatch-ms 0.1 --tb-per-s 1 --tflop-per-s 1 --no-trace"
    assert load("bench_decode").main(argv.split()) == 0


@pytest.mark.full
def test_a_peer_is_timed_over_our_fp8_caches_if_it_reads_them(tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    bench, contenders = load("bench_decode"), load("contenders")
    dtypes = []

    def adapter(work):
        dtypes.append(str(work.pools.dtype))
        decode = contenders.jax_mla_decode(work.sm_scale, "reference", **work.options)
        name, caches = work.named("fake"), work.num_caches
        return argparse.Namespace(
            description="",
            outputs=lambda cache: np.asarray(decode(*work.operands, cache)),
            contender=lambda calls: contenders.ChainedCalls(
                name, decode, work.operands, caches=caches, calls=calls
            ),
        )

    refuses = lambda case, kv_format: "no tile scales" if kv_format == "fp8_ds_mla" else ""  # noqa: E731
    peer = argparse.Namespace(NAME="fake", why_not=refuses, Adapter=adapter)
    monkeypatch.setattr(bench, "TORCH_PEERS", (peer,))
    argv = "--batch 1 --heads 2 --seq 20 --page-size 8 --repeats 1 --cache-mb 0.1 --dispatch-ms 0.1"
    argv += " --kv-format fp8_e4m3 fp8_ds_mla --tb-per-s 1 --tflop-per-s 1 --no-trace --no-doubling"
    assert bench.main([*argv.split(), "--json", str(tmp_path / "r.json")]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    (row,) = content["rows"]
    ours = {"jax_mla", "jax_mla fp8_e4m3", "jax_mla fp8_ds_mla"}
    assert set(row["times"]) == ours | {"fake", "fake fp8_e4m3"}
    assert all(entry["relative_error"] < 1e-2 for entry in row["times"].values())
    assert content["missing"] == {"fake fp8_ds_mla": "no tile scales"}
    assert dtypes == ["bfloat16", "float8_e4m3fn"]


def test_decode_benchmark_in_a_wide_table(tmp_path, capsys):
    pytest.importorskip("tqdm")
    bench = load("bench_decode")
    argv = "--batch 2 --heads 4 --seq 40 --page-size 8 --repeats 1 --cache-mb 0.2 --dispatch-ms 0.1"
    argv += f" --peers --tb-per-s 1 --tflop-per-s 1 --no-trace --json {tmp_path / 'r.json'}"
    argv += " --table-tokens 400"
    names = {"jax_mla", "jax_mla, wide table", "jax_mla, wide table, max_seq_len"}
    for more in ("", " --max-seq-len 64"):
        assert bench.main((argv + more).split()) == 0
        (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert set(row["times"]) == names
        assert all(entry["relative_error"] < 1e-2 for entry in row["times"].values())
    assert "us with max_seq_len / us in an exact table" in capsys.readouterr().out
    assert bench.main((argv + " --max-seq-len 39").split()) == 1  # it clamps the lengths
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--max-seq-len", "64"])


def test_a_wide_table_has_the_same_pages_in_front():
    grid, workload = load("grid"), load("workload")
    case = grid.Case(batch=3, num_heads=1, seq=20, page_size=8, d_ckv=16, d_kpe=8)
    work = workload.make_workload(case, *workload.make_pools(case, 2))
    wide = work.in_wide_table(100)
    assert wide.page_table.shape == (3, 13)
    np.testing.assert_array_equal(wide.page_table[:, :3], work.page_table)
    assert work.in_wide_table(8).page_table.shape == (3, 3)


def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    bench, contenders = load("bench_decode"), load("contenders")
    monkeypatch.setattr(contenders, "jax_mla_decode", lambda *_: lambda q, *rest: q * 0)
    argv = "--batch 1 --heads 4 --seq 40 --repeats 1 --cache-mb 0.2 --peers --no-trace"
    assert bench.main([*argv.split(), "--tb-per-s", "1", "--tflop-per-s", "1"]) == 1
    assert "jax_mla is WRONG and was not timed" in capsys.readouterr().out


@pytest.mark.full
def test_append_benchmark_runs_and_checks(tmp_path):
    path = tmp_path / "append.json"
    argv = f"--batch 3 --prefill 64 --seq 20 --page-size 8 --layers 2 --repeats 1 --json {path}"
    assert load("bench_append").main(argv.split()) == 0
    rows = json.loads(path.read_text())["rows"]
    step, prefill = "b3 q1 s20 p8", "b1 q64 s64 p8"
    assert [row["case"] for row in rows[:3]] == [prefill, "b8 q8 s8 p8", step]
    assert all(set(row["times"]) == {"jax_mla", "xla scatter"} for row in rows[:3])
    forms = ("e4m3", "ds_mla", "raw", "e4m3 raw", "ds_mla raw", "e4m3 raw h16")
    assert [row["case"] for row in rows[3:]] == [f"{c} {f}" for c in (step, prefill) for f in forms]


@pytest.mark.full
def test_prefill_benchmark_runs_and_checks(tmp_path):
    path = tmp_path / "prefill.json"
    argv = "--model minicpm3 --heads 2 --tokens 40 --prefix 70 --ragged 30 5 --repeats 1"
    argv += f" --min-dispatches 1 --implementation reference --json {path}"
    assert load("bench_prefill").main(argv.split()) == 0
    one, ragged = json.loads(path.read_text())["rows"]
    assert (one["case"], ragged["case"]) == ("h2 40 behind 70", "h2 30+5 behind 70")
    assert one["flops"] == 2 * 2 * (40 * 41 // 2 + 40 * 70) * (64 + 32 + 64)
    assert set(one["times"]) >= {"jax_mla", "reference", "up", "absorbed"}
    assert set(ragged["times"]) == {"jax_mla", "reference", "mixed", "absorbed"}


def test_a_step_counts_causal_pairs_and_the_rows_it_writes():
    ragged_grid, roofline = load("ragged_grid"), load("roofline")
    case = ragged_grid.step("two", 3, ((1, 100), (4, 6)))
    assert case.num_pairs == 100 + (3 + 4 + 5 + 6)
    assert roofline.num_flops(case) == 118 * 3 * (2 * 576 + 2 * 512)
    rows = 5 * 3
    assert roofline.num_bytes(case) == 2 * ((106 + 5) * 576 + rows * (576 + 512))
    assert list(case.cu_q_lens) == [0, 1, 5]
    assert list(case.sequences) == [0, 1, 1, 1, 1]
    assert list(case.places) == [99, 2, 3, 4, 5]


def test_steps_have_different_names_and_fit_their_sequences():
    cases = load("ragged_grid").full_grid()
    assert len({case.label for case in cases}) == len(cases) == 92
    assert all((case.q_lens <= case.seq_lens).all() for case in cases)


def test_host_knows_what_a_step_leaves_in_the_caches():
    grid, ragged_grid, ragged_work = load("grid"), load("ragged_grid"), load("ragged_work")
    case = ragged_grid.step("three", 2, ((1, 100), (70, 130), (64, 64)))
    work = ragged_work.make(case, cache_bytes=1e5)
    pool, table = work.host_cache(1, np.array([1]))
    written = np.asarray(work.written().pools[1]).astype(np.float32)
    pages = np.asarray(work.page_table)[1, : case.pages_per_seq[1]]
    np.testing.assert_array_equal(pool[table[0]], written[pages])
    before = np.asarray(work.pools[1]).astype(np.float32)
    assert (written != before).any(-1).sum() == case.num_tokens
    assert isinstance(case, grid.Case)


def run_ragged(tmp_path, *argv):
    path = tmp_path / "ragged.json"
    small = "--quick --repeats 1 --cache-mb 0.2 --dispatch-ms 0.1 --tb-per-s 1 --tflop-per-s 1"
    status = load("bench_ragged").main([*small.split(), *argv, "--json", str(path)])
    return status, json.loads(path.read_text())["rows"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("1x32@64", {"jax_mla"}),
        ("b2 q16", {"jax_mla", "uniform", "append, decode"}),
        ("b4 q1 ", {"jax_mla", "uniform", "decode"}),
    ],
)
def test_ragged_benchmark_runs_and_checks(tmp_path, only, names):
    status, (row,) = run_ragged(tmp_path, "--only", only)
    assert status == 0
    assert set(row["times"]) - {"flashinfer"} == names
    assert all(entry["relative_error"] < 1e-2 for entry in row["times"].values())


def test_ragged_benchmark_sums_up_its_peer(capsys):
    bench = load("bench_ragged")
    times = {"jax_mla": {"us": 2.0}, "flashinfer": {"us": 3.0}}
    assert bench.ratio_of({"times": times}) == 1.5
    assert bench.ratio_of({"times": {"flashinfer": {"us": 3.0}}}) is None
    bench.print_ratios({"16 heads": [1.5, 1.0], "all": [1.5, 1.0, 2.0]})
    assert capsys.readouterr().out == (
        "# FlashInfer / ours, 16 heads: mean 1.25, from 1.00 to 1.50, 2 steps\n"
        "# FlashInfer / ours, all: mean 1.50, from 1.00 to 2.00, 3 steps\n"
    )


def test_ragged_benchmark_in_a_wide_table(tmp_path, capsys):
    status, (row,) = run_ragged(tmp_path, "--only", "1x32@64", "--table-tokens", "4096")
    assert status == 0
    names = {"jax_mla", "jax_mla, wide table", "jax_mla, wide table, max_seq_len"}
    assert set(row["times"]) - {"flashinfer"} == names
    assert "max_seq_len us" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out, pools: (out * 1.1, pools), "out: "),
        (lambda out, pools: (out, pools * 2), "kv_pages: differs"),
    ],
)
def test_a_wrong_step_is_not_timed(tmp_path, monkeypatch, spoil, message):
    attend = jax_mla.ragged_paged_attention
    wrong = lambda *args, **options: spoil(*attend(*args, **options))  # noqa: E731
    monkeypatch.setattr(jax_mla, "ragged_paged_attention", wrong)
    status, (row,) = run_ragged(tmp_path, "--only", "1x32@64")
    assert status == 1
    assert message in row["wrong"]["jax_mla"]
    assert "jax_mla" not in row["times"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("loop", ["unrolled", "scan", "scan --op uniform --raw"])
def test_host_benchmark_counts_handler_calls(tmp_path, loop):
    path = tmp_path / "host.json"
    argv = (
        f"--layers 3 --batch 2 --heads 2 --seq 20 --steps 2 --repeats 1 --backend cpu --loop {loop}"
    )
    if load("jax").devices()[0].platform != "cpu":
        argv = argv.replace("--backend cpu", "")
    assert load("bench_host").main([*argv.split(), "--json", str(path), "--no-trace"]) == 0
    calls = json.loads(path.read_text())["result"]["handler_calls_a_step"]
    if "--backend cpu" in argv:
        ops = ("ragged_cpu",) if "--op uniform" in loop else ("decode_cpu", "append_cpu")
        assert all(calls[op] == 3 for op in ops)


@pytest.mark.parametrize("mesh", ["auto", "explicit"])
@pytest.mark.full
def test_sharded_benchmark_checks_against_one_device(tmp_path, mesh):
    jax = load("jax")
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    path = tmp_path / "sharded.json"
    argv = f"--tokens 256 --batch 2 --seq 128 --heads 4 --devices 2 --repeats 1 --mesh {mesh}"
    assert load("bench_sharded").main([*argv.split(), "--no-trace", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["sharding"], row["devices"]) for row in rows] == [
        (name, count) for name in ("cp", "cp-sync", "tp", "tp+cp") for count in (1, 2)
    ]


def test_collective_seconds_count_neither_the_first_wait_nor_overlap():
    spans = [
        (0, 100, "decode"),
        (100, 400, "pmax_5_0_fusion"),  # the first one waits until every device has begun
        (400, 500, "decode"),
        (410, 506, "pmax_6_0_fusion"),  # launched early
        (506, 508, "loop_convert_fusion"),
        (508, 520, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ]
    sharded = load("bench_sharded")
    assert sharded.collective_seconds(spans) == pytest.approx((6 + 12) * 1e-9)
    assert sharded.collective_seconds(spans[:1]) == 0


@pytest.mark.full
def test_model_benchmark_prints_a_row_for_each_case(capsys):
    load("bench_model").main(["--quick"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == [
        "decode, batch 2",
        "prefill, 4 x 64 in steps of 64",
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"), [("v32", []), ("glm5", []), ("v32", ["--index-format", "fp8"])]
)
def test_model_benchmark_times_the_parts_of_a_layer(name, options, capsys):
    load("bench_model").main(["--quick", "--slice", name, *options])
    header, _, row = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    figures = dict(zip(*([c.strip() for c in x.split("|")] for x in (header, row)), strict=True))
    assert figures["batch x context"] == "2 x 96"
    parts = [float(figures[part]) for part in load("bench_model").PARTS]
    assert len(parts) == 7 and float(figures["sum"]) == pytest.approx(sum(parts), abs=1)
    ours = sum(float(figures[part]) for part in load("slice_work").OURS)
    share = ours / float(figures["layer"])
    assert float(figures["jax_mla"].rstrip("%")) == pytest.approx(100 * share, rel=0.05)
    assert 0 < float(figures["error"]) < 1e-5


def test_a_wrong_layer_is_not_timed(monkeypatch):
    """The check of each of the four steps of jax_mla finds its fault."""
    model, work = load("bench_model"), load("slice_work")
    fields = model.SLICES["v32"] | model.QUICK_SLICE
    config = model.parse_config(fields)
    weights = work.draw_weights(config, "float32")
    made = work.make(config, weights, batch=2, length=96, caches=1, backend=None)
    assert work.check(made) < 1e-5
    faults = {
        "append": lambda rows, *_: (rows, ()),
        "index_append": lambda keys, *_: (keys, ()),
        "index_topk": lambda lens, rest, *_, **__: (
            lens,
            tuple(
                map(
                    jnp.asarray, (np.tile(np.arange(16), (2, 1)), np.full(2, 16), np.zeros((2, 16)))
                )
            ),
        ),
        "sparse_attention": lambda q_latent, *_: (q_latent, ()),
    }
    for name, fault in faults.items():
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=name):
            patch.setattr(work, name, fault)
            work.check(made)


@pytest.mark.full
def test_load_benchmark_writes_what_it_loads(tmp_path, capsys):
    load("bench_load").main([str(tmp_path), "--quick"])
    assert " GB loaded in " in capsys.readouterr().out


def test_queries_in_e4m3_are_timed_beside_a_peer_that_takes_them(tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    bench, contenders = load("bench_decode"), load("contenders")

    def adapter(work):
        assert work.has_query_codes
        decode = contenders.jax_mla_decode(work.sm_scale, "reference", **work.options)
        out = np.asarray(decode(*work.operands, work.num_caches - 1))
        return argparse.Namespace(
            description="",
            max_relative_error=0.06,
            outputs=lambda cache: out * 1.05,  # weights in e4m3
            contender=lambda calls: contenders.ChainedCalls(
                work.named(peer.NAME),
                contenders.chained_by_scale(decode),
                ((work.operands[0], np.float32(1)), *work.operands[1:]),
                caches=work.num_caches,
                calls=calls,
            ),
        )

    peer = load("peers.flash_mla_fp8")
    monkeypatch.setattr(peer, "why_not", lambda *_: "")
    monkeypatch.setattr(peer, "Adapter", adapter)
    argv = "--batch 1 --heads 2 --seq 20 --page-size 8 --repeats 1 --cache-mb 0.1 --dispatch-ms 0.1"
    argv += " --peers flash_mla_fp8 --kv-format fp8_e4m3 --query-codes --no-trace --no-doubling"
    argv += f" --tb-per-s 1 --tflop-per-s 1 --json {tmp_path / 'r.json'}"
    assert bench.main(argv.split()) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    errors = {name: entry["relative_error"] for name, entry in row["times"].items()}
    ours = "jax_mla fp8_e4m3, e4m3 queries"
    assert set(errors) == {"jax_mla", "jax_mla fp8_e4m3", ours, f"flash_mla_fp8{ours[7:]}"}
    assert errors[ours] < 1e-2 < errors[f"flash_mla_fp8{ours[7:]}"] < 0.06
    ratio = load("bars").best_peer_over_ours(row, ours)
    assert ratio == row["times"][f"flash_mla_fp8{ours[7:]}"]["us"] / row["times"][ours]["us"]
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--query-codes"])
