"""Properties of the split-KV schedule, checked on its host twin over thousands of random batches.

The decode kernels run the same closed form (csrc/decode/schedule/schedule.h) on the device.
"""

import collections
import itertools
import random

import pytest

from jax_mla._runtime import _ffi

_extension = _ffi.extension()
BLOCK = 64  # tokens, kScheduleBlock
SLACKS = [(1, 4), (6, 5), (7, 3), (10, 2), (0, 1)]  # blocks, shift


def make_shape(lens, *, heads=16, q_len=1, page_size=64, max_len=None, **options):
    """Describes a call whose page table holds the longest of `lens`, or `max_len`."""
    longest = max(max_len or 0, *lens, 1)
    return _extension.DecodeShape(
        dtype="bfloat16",
        batch=len(lens),
        q_len=q_len,
        num_heads=heads,
        d_ckv=512,
        d_kpe=64,
        page_size=page_size,
        max_pages_per_seq=-(-longest // page_size),
        **options,
    )


def run(
    lens,
    *,
    num_ctas=132,
    block_m=16,
    seq_cost=0,
    max_single_blocks=66,
    scratch_bytes=None,
    can_cluster=False,
    slack=(1, 4),
    **options,
):
    """Returns the items of all workers, and the scratch they may use."""
    shape = make_shape(lens, **options)
    scratch = _extension.decode_scratch_bytes(shape) if scratch_bytes is None else scratch_bytes
    items = _extension.schedule(
        shape,
        lens,
        block_m=block_m,
        num_ctas=num_ctas,
        seq_cost=seq_cost,
        max_single_blocks=max_single_blocks,
        scratch_bytes=scratch,
        can_cluster=can_cluster,
        slack_blocks=slack[0],
        slack_shift=slack[1],
    )
    return items, scratch


def check(lens, items, scratch, *, max_partials_per_worker=None):
    """Every block exactly once, slots unique and inside the scratch, parts numbered in order."""
    by_seq = collections.defaultdict(list)
    for item in items:
        by_seq[item.seq_idx].append(item)
    assert sorted(by_seq) == list(range(len(lens)))
    for seq, parts in by_seq.items():
        blocks = -(-lens[seq] // BLOCK)
        parts.sort(key=lambda item: item.part_idx)
        assert [part.part_idx for part in parts] == list(range(len(parts)))
        assert {part.num_parts for part in parts} == {len(parts)}
        ends = [0] + [part.block_end for part in parts]
        assert [part.block_begin for part in parts] == ends[:-1]
        assert ends[-1] == blocks
        assert all(part.block_begin < part.block_end for part in parts) or blocks == 0
        assert all((part.slot < 0) == (len(parts) == 1) for part in parts)
    slots = [item.slot for item in items if item.slot >= 0]
    assert len(slots) == len(set(slots))
    assert all(item.slot_end_bytes <= scratch for item in items)
    if max_partials_per_worker is not None:
        partials = collections.Counter(item.worker for item in items if item.slot >= 0)
        assert max(partials.values(), default=0) <= max_partials_per_worker


def random_lens(rng):
    """A batch of one of several kinds: short, long, (about) equal, skewed, with empty sequences."""
    batch = rng.choice([1, 2, 3, 7, 8, 16, 33, 48, 64, 96, 131, 132, 133, 200, 300])
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randint(0, 600) for _ in range(batch)]
    if kind == 1:
        return [rng.choice([0, 1, 63, 64, 65, 128, rng.randint(0, 40000)]) for _ in range(batch)]
    if kind == 2:
        return [rng.randint(1, 9000)] * batch
    if kind == 3:
        return [min(int(rng.paretovariate(1.1) * 200), 100000) for _ in range(batch)]
    if kind == 4:
        longest = rng.randint(100, 9000)
        return [longest - rng.randint(0, longest // 10) for _ in range(batch)]
    return [0] * batch


@pytest.mark.parametrize("seed", range(8))
def test_automatic_schedule_covers_every_block_once(seed):
    rng = random.Random(seed)
    for _ in range(250):
        lens = random_lens(rng)
        heads = rng.choice([1, 8, 16, 20, 64, 128])
        block_m = min(rng.choice([8, 16, 32, 64]), max(8, heads))
        items, scratch = run(
            lens,
            heads=heads,
            q_len=rng.choice([1, 1, 2, 4]),
            block_m=block_m if heads <= 64 else 64,
            num_ctas=rng.choice([16, 84, 108, 132, 148, 188]),
            seq_cost=rng.choice([0, 0, 1, 5]),
            max_single_blocks=rng.choice([0, 16, 66, 66]),
            page_size=rng.choice([1, 16, 64, 256]),
            can_cluster=rng.random() < 0.5,
            slack=rng.choice(SLACKS),
        )
        check(lens, items, scratch, max_partials_per_worker=2)
        merging = collections.Counter(item.worker for item in items if item.merges)
        assert max(merging.values(), default=0) <= 1
        split = {item.seq_idx for item in items if item.num_parts > 1}
        assert {item.seq_idx for item in items if item.merges} == split


@pytest.mark.parametrize("seed", range(4))
def test_workers_end_with_what_they_continue(seed):
    """The wide kernel merges a part that it still has, if that is the worker's last one."""
    rng = random.Random(200 + seed)
    num_ends = 0
    for _ in range(250):
        lens = random_lens(rng)
        items, _ = run(lens, num_ctas=rng.choice([16, 132]), seq_cost=rng.choice([0, 2]))
        for _, group in itertools.groupby(items, key=lambda item: item.worker):
            group = list(group)
            assert [item.seq_idx for item in group] == sorted(
                (item.seq_idx for item in group), reverse=True
            )
            assert all(item.part_idx == 0 for item in group[:-1])
            assert all(item.part_idx == item.num_parts - 1 for item in group[1:])
            num_ends += len(group) > 1 and group[-1].part_idx > 0
    assert num_ends > 1000


@pytest.mark.parametrize("seed", range(4))
def test_fixed_splits_cover_every_block_once(seed):
    rng = random.Random(100 + seed)
    for _ in range(250):
        lens = random_lens(rng)
        num_splits = rng.choice([1, 2, 3, 5, 8, 64, 1000])
        items, scratch = run(lens, num_splits=num_splits, num_ctas=rng.choice([16, 132]))
        check(lens, items, scratch)
        assert all(item.num_parts <= num_splits for item in items)


def parts_of(items, seq):
    return sorted((i.block_begin, i.block_end) for i in items if i.seq_idx == seq)


def test_batch_invariant_split_depends_on_the_sequence_alone():
    rng = random.Random(7)
    for _ in range(100):
        length = rng.choice([0, 1, 64, 65, rng.randint(0, 70000)])
        alone, _ = run([length], batch_invariant=True)
        mates = random_lens(rng)
        together, scratch = run(
            [*mates, length], batch_invariant=True, num_ctas=rng.choice([16, 132])
        )
        check([*mates, length], together, scratch)
        assert parts_of(together, len(mates)) == parts_of(alone, 0)


def test_scratch_bounds_the_workers():
    """A GPU with more SMs than the scratch was sized for runs with fewer workers."""
    lens = [5000, 100, 30000, 0, 64]
    for scratch_bytes in (0, 256, 100_000, 1_000_000, 10_000_000):
        items, scratch = run(lens, num_ctas=100_000, scratch_bytes=scratch_bytes)
        check(lens, items, scratch, max_partials_per_worker=2)


def loads_of(items):
    """Blocks of every worker that has work; an empty sequence counts as one."""
    load = collections.Counter()
    for item in items:
        load[item.worker] += max(item.block_end - item.block_begin, 1)
    return load


@pytest.mark.parametrize("slack", SLACKS)
def test_skewed_batch_is_balanced(slack):
    rng = random.Random(3)
    for _ in range(50):
        lens = [min(int(rng.paretovariate(1.2) * 300), 60000) for _ in range(64)]
        items, _ = run(lens, slack=slack)
        total = sum(max(-(-length // BLOCK), 1) for length in lens)
        assert max(loads_of(items).values()) <= -(-total // 132) + max(1, total // 132 // 16)


@pytest.mark.parametrize("slack", SLACKS)
def test_slack_bounds_the_longest_worker(slack):
    """About equal lengths: one item a worker if that costs less than the slack, else balanced."""
    rng = random.Random(11)
    whole = 0
    for _ in range(200):
        batch, longest = rng.randint(1, 132), rng.randint(1000, 9000)
        lens = [longest - rng.randint(0, longest // 10) for _ in range(batch)]
        items, scratch = run(lens, slack=slack)
        check(lens, items, scratch, max_partials_per_worker=2)
        ideal = -(-sum(-(-length // BLOCK) for length in lens) // 132)
        longest_load = max(loads_of(items).values())
        assert longest_load <= max(ideal + max(slack[0], 1) + (ideal >> slack[1]), 2)
        whole += longest_load > ideal + 1
    assert whole > 0


@pytest.mark.parametrize(
    "batch, tokens, slack",
    [(128, 8192, (1, 4)), (110, 8192, (10, 2)), (96, 8192, (0, 1)), (80, 1024, (6, 5))],
)
def test_equal_lengths_are_not_split_where_whole_sequences_fit(batch, tokens, slack):
    items, _ = run([tokens] * batch, slack=slack)
    assert all(item.num_parts == 1 for item in items)
    items, _ = run([tokens] * (batch - 16), slack=slack)
    assert any(item.num_parts > 1 for item in items)


def test_slack_gives_equal_parts():
    """Two workers a sequence where balanced ones would have a few blocks less."""
    items, _ = run([2048] * 48, slack=(5, 3))
    assert {item.block_end - item.block_begin for item in items} == {16}
    assert len(items) == 96


@pytest.mark.parametrize("max_single_blocks, blocks", [(66, 1), (64, 1), (63, 2), (0, 2)])
def test_small_calls_have_parts_of_a_single_block(max_single_blocks, blocks):
    for lens in ([4096], [1024] * 4):
        items, _ = run(lens, max_single_blocks=max_single_blocks)
        assert {item.block_end - item.block_begin for item in items} == {blocks}


def test_about_equal_lengths_go_to_clusters_of_two_workers():
    rng = random.Random(5)
    for _ in range(100):
        longest = rng.randint(1000, 9000)
        lens = [longest - rng.randint(0, 60) for _ in range(64)]
        lens[rng.randrange(64)] = rng.choice([0, 64, longest])
        items, scratch = run(lens, num_ctas=rng.choice([132, 133]), can_cluster=True)
        check(lens, items, scratch, max_partials_per_worker=1)
        assert all(item.worker == 2 * item.seq_idx + item.part_idx for item in items)


def test_scratch_of_a_call_that_cannot_split_is_minimal():
    assert _extension.decode_scratch_bytes(make_shape([64] * 128)) <= 256
    assert _extension.decode_scratch_bytes(make_shape([9000] * 128, num_splits=1)) <= 256
