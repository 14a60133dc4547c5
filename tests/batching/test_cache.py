"""`write_cache_indices`: the rows of the table, by torch and by the kernel under Triton's interpreter."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_builders import EXAMPLES, KINDS, expected_table, new_tokens, open_pool, prefill_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import BatchError, CacheIndexError, ScheduleBatch, stage_batch, warm, write_cache_indices
from batching.cache import kernel_launch
from staging import StagingPool
from staging.testing import SimulatedDevice

UNTOUCHED = -1


def write_by_torch(
    batch: ScheduleBatch, table: torch.Tensor, fresh: torch.Tensor, pool: StagingPool | None = None
) -> None:
    write_cache_indices(batch, table, fresh, pool)


def write_by_kernel(
    batch: ScheduleBatch, table: torch.Tensor, fresh: torch.Tensor, pool: StagingPool | None = None
) -> None:
    """The kernel itself, with the tensors that are staged for it."""
    kernel = pytest.importorskip("batching.kernel", reason="triton is for Linux only")
    tensors = stage_batch(batch, pool, "cache").tensors
    longest = max(tensors["seq_lens"].tolist(), default=0)
    if longest:
        kernel.launch(table, tensors, fresh, longest)


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, the kernel is compiled for it and cannot take CPU tensors"
)
WRITERS = [
    pytest.param(write_by_torch, id="torch"),
    pytest.param(write_by_kernel, id="kernel", marks=interpreted),
]
Writer = Callable[..., None]


def check(
    write: Writer, batch: ScheduleBatch, table: torch.Tensor, fresh: torch.Tensor, pool: StagingPool | None = None
) -> None:
    wanted = expected_table(table, batch, fresh)
    write(batch, table, fresh, pool)
    assert torch.equal(table, wanted)


def blank(slots: int, width: int) -> torch.Tensor:
    return torch.full((slots, width), UNTOUCHED, dtype=torch.int32)


# ---------------------------------------------------------------------- right


SHAPES = {
    "one request": [(3, 2)],
    "one token": [(0, 1)],
    "no extend": [(4, 0), (2, 0)],
    "no prefix": [(0, 5), (0, 1), (0, 3)],
    "mixed emptiness": [(0, 2), (3, 0), (0, 0), (1, 1)],
    "all empty": [(0, 0), (0, 0)],
    "no requests": [],
    "a block": [(1024, 0), (0, 1024), (512, 512)],
    "around a block": [(1023, 1), (1024, 1), (1025, 0), (1023, 0), (1, 1023), (0, 1025), (1, 1024)],
    "around two blocks": [(2047, 2), (1, 2046), (1024, 1024), (2048, 1)],
    "exactly two blocks": [(2048, 0), (1000, 1048)],
    "long and short": [(3000, 17), (0, 1), (1, 0), (0, 2999)],
}


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("write", WRITERS)
def test_each_row_is_its_prefix_then_its_new_tokens(
    any_pool: StagingPool | None, write: Writer, lengths: list[tuple[int, int]]
) -> None:
    """Compared with one assignment per entry; every other entry of the table is untouched."""
    batch = prefill_batch(lengths)
    check(write, batch, blank(len(lengths) + 2, 3100), new_tokens(batch), any_pool)


@interpreted
def test_a_long_row_among_many_is_shared_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one block each would be too many programs, each writes several; the last ones of a row are cut short."""
    kernel = pytest.importorskip("batching.kernel", reason="triton is for Linux only")
    for most in (1, 2, 8, 20):
        monkeypatch.setattr(kernel, "MOST_PROGRAMS", most)
        batch = prefill_batch([(3 * kernel.BLOCK + 7, 5), (2, 1), (0, kernel.BLOCK + 1), (0, 0)])
        check(write_by_kernel, batch, blank(6, 3100), new_tokens(batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITERS)
def test_random_batches_are_written_right(kind: str, write: Writer) -> None:
    """Any order of table rows, any lengths, indices of any size that the table can hold."""
    dice = random.Random(4)
    with open_pool(kind) as pool:
        table = blank(40, 2100)
        for _ in range(15):
            rows = dice.randrange(1, 16)
            longest = dice.choice([3, 3, 40, 1000])
            batch = prefill_batch([(dice.randrange(longest), dice.randrange(longest)) for _ in range(rows)])
            for one, slot in zip(batch.reqs, dice.sample(range(40), rows), strict=True):
                one.req_pool_idx = slot
                one.prefix_indices = torch.randint(0, 2**31 - 1, (len(one.prefix_indices),))
            fresh = torch.randint(0, 2**31 - 1, (len(new_tokens(batch)),))
            check(write, batch, table, fresh, pool)


def test_without_triton_a_cuda_table_is_written_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once in the log, and right; nothing is staged for a kernel that never comes."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "batching.kernel", raising=False)
    kernel_launch.cache_clear()
    try:
        for lengths in ([(3, 2), (0, 4)], [(1, 1)]):
            batch = prefill_batch(lengths)
            check(write_by_torch, batch, blank(4, 12), new_tokens(batch))
    finally:
        kernel_launch.cache_clear()
    assert caplog.text.count("no Triton") == 1


@settings(EXAMPLES, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=10), st.integers(0, 3), st.data())
def test_both_writers_agree_with_the_oracle(lengths: list[tuple[int, int]], padding: int, data: st.DataObject) -> None:
    """Generated batches, table rows in generated order, a table that is a view of a wider one."""
    batch = prefill_batch(lengths)
    for one, slot in zip(batch.reqs, data.draw(st.permutations(range(12))), strict=False):
        one.req_pool_idx = slot
    for parameter in WRITERS:
        write = parameter.values[0]
        if write is write_by_kernel and torch.cuda.is_available():
            continue
        whole = blank(12, 24 + padding)
        check(write, batch, whole[:, padding:], new_tokens(batch))
        assert bool((whole[:, :padding] == UNTOUCHED).all())


@pytest.mark.parametrize("empty", ["none", "fresh", "start", "middle", "of another length"])
@pytest.mark.parametrize("write", WRITERS)
def test_empty_prefixes_of_every_origin_have_length_zero(write: Writer, empty: str) -> None:
    """Their pointer is never read, and their neighbours are right."""
    some = torch.arange(9) + 70
    prefix = {
        "none": None,
        "fresh": torch.empty(0, dtype=torch.int64),
        "start": some[:0],
        "middle": some[5:5],
        "of another length": torch.zeros(0, 3, dtype=torch.int64).reshape(-1),
    }[empty]
    batch = prefill_batch([(0, 2), (3, 1), (0, 0), (1, 4)])
    batch.reqs[0].prefix_indices = batch.reqs[2].prefix_indices = prefix
    check(write, batch, blank(4, 8), new_tokens(batch))


@pytest.mark.parametrize("start", [1, 3, 7, 13])
@pytest.mark.parametrize("write", WRITERS)
def test_new_tokens_may_be_a_view_at_any_offset(write: Writer, start: int) -> None:
    """Nothing relies on the alignment of `out_cache_loc`, of a prefix or of the table."""
    batch = prefill_batch([(2, 3), (0, 4), (5, 1)])
    for one in batch.reqs:
        one.prefix_indices = torch.cat([torch.zeros(start, dtype=torch.int64), one.prefix_indices])[start:]
    fresh = torch.cat([torch.zeros(start, dtype=torch.int64), new_tokens(batch), torch.zeros(2, dtype=torch.int64)])
    table = torch.full((5 * 9 + start,), UNTOUCHED, dtype=torch.int32)[start:].view(5, 9)
    check(write, batch, table, fresh[start:-2])


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 5), (3, 0), (16, 16), (1, 1)])
@pytest.mark.parametrize("write", WRITERS)
def test_a_table_may_be_a_window_of_a_wider_one(write: Writer, left: int, right: int) -> None:
    """Stride and width differ; sequences fill the window to its last column and nothing beside it."""
    whole = blank(6, left + 8 + right)
    batch = prefill_batch([(8, 0), (0, 8), (3, 5)])
    batch.reqs[0].req_pool_idx = 5
    check(write, batch, whole[:, left : left + 8], new_tokens(batch))
    assert bool((whole[:, :left] == UNTOUCHED).all())
    assert bool((whole[:, left + 8 :] == UNTOUCHED).all())
    assert bool((whole[[3, 4]] == UNTOUCHED).all())


@pytest.mark.parametrize("write", WRITERS)
def test_a_shorter_sequence_leaves_the_rest_of_its_row(write: Writer) -> None:
    """What an earlier, longer request wrote behind it is none of this batch's business."""
    table = blank(2, 10)
    for lengths in ([(6, 4), (10, 0)], [(1, 1), (0, 3)], [(0, 0), (2, 0)]):
        batch = prefill_batch(lengths)
        check(write, batch, table, new_tokens(batch))
    assert table[0, 4].item() != UNTOUCHED


@pytest.mark.parametrize("write", WRITERS)
def test_rows_beyond_two_to_the_31_elements_are_addressed(write: Writer, tmp_path: Path) -> None:
    """Row times stride is 2.2 thousand million: a sparse file stands in for the memory such a table needs."""
    slots, width = 2_201, 1_000_000
    try:
        mapped = np.memmap(tmp_path / "table", dtype=np.int32, mode="w+", shape=(slots, width))
    except OSError as error:
        pytest.skip(f"no sparse file of 9 GB to be had here: {error}")
    table = torch.from_numpy(mapped)
    batch = prefill_batch([(5, 2), (1, 1)])
    batch.reqs[0].req_pool_idx = slots - 1
    write(batch, table, new_tokens(batch))
    assert table[slots - 1, :8].tolist() == [1000, 1001, 1002, 1003, 1004, 500_000, 500_001, 0]
    assert table[1, :3].tolist() == [2000, 500_002, 0]
    wrapped = ((slots - 1) * width - 2**31) // width, ((slots - 1) * width - 2**31) % width
    assert table[0, :8].tolist() == [0] * 8
    assert table[wrapped[0], wrapped[1] : wrapped[1] + 8].tolist() == [0] * 8


def test_the_returned_lengths_are_for_the_forward(any_pool: StagingPool | None) -> None:
    """int64, one for each request."""
    batch = prefill_batch([(3, 2), (0, 4), (1, 0)])
    staged = write_cache_indices(batch, blank(3, 8), new_tokens(batch), any_pool)
    assert staged.tensors["seq_lens"].dtype == torch.int64
    assert staged.tensors["seq_lens"].tolist() == [5, 4, 1]
    assert staged.tensors["extend_starts"].tolist() == [0, 2, 6]


def test_all_lengths_zero_write_nothing(pool: StagingPool, device: SimulatedDevice) -> None:
    """With requests and without; with requests the rows are still uploaded for the forward."""
    table = blank(3, 4)
    none = torch.empty(0, dtype=torch.int64)
    assert write_cache_indices(prefill_batch([]), table, none, pool).tensors["seq_lens"].tolist() == []
    assert device.calls["copy"] == 0
    assert write_cache_indices(prefill_batch([(0, 0)] * 3), table, none, pool).tensors["seq_lens"].tolist() == [0] * 3
    assert device.calls["copy"] == 1
    assert bool((table == UNTOUCHED).all())


def test_a_table_without_rows_or_columns_serves_an_empty_batch(any_pool: StagingPool | None) -> None:
    """Warm-up before the cache exists."""
    none = torch.empty(0, dtype=torch.int64)
    for shape in ((0, 0), (0, 8), (3, 0)):
        write_cache_indices(prefill_batch([]), torch.empty(shape, dtype=torch.int32), none, any_pool)
    write_cache_indices(prefill_batch([(0, 0)]), torch.empty((3, 0), dtype=torch.int32), none, any_pool)


def test_default_dtype_and_device_of_the_application_change_nothing(any_pool: StagingPool | None) -> None:
    """The torch path makes its own index tensors; they follow the batch, not the application's defaults."""
    batch = prefill_batch([(3, 2), (0, 4)])
    table, fresh = blank(3, 8), new_tokens(batch)
    wanted = expected_table(table, batch, fresh)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        write_cache_indices(batch, table, fresh, any_pool)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(table, wanted)


def test_warming_touches_every_slot_and_leaves_the_ring_free(pool: StagingPool, device: SimulatedDevice) -> None:
    """First-use costs are paid by a dummy batch on the ordinary path, whatever the application's defaults are."""
    torch.set_default_device("meta")
    try:
        warm(pool)
    finally:
        torch.set_default_device(None)
    device.finish_all()
    assert device.violations == []
    stats = pool.stats()
    assert (stats.filling, stats.quarantined, stats.uploads) == (0, 0, stats.leases)
    attempt = Attempt()
    check(write_by_torch, attempt.batch, attempt.table, attempt.fresh, pool)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.array, torch.tensor])
def test_lengths_and_rows_may_be_integers_of_any_type(any_pool: StagingPool | None, kind: Any) -> None:
    """numpy scalars, 0-d arrays and 0-d tensors, as schedulers come to have them."""
    batch = prefill_batch([(3, 2), (0, 4)])
    fresh, table = new_tokens(batch), blank(3, 8)
    wanted = expected_table(table, batch, fresh)
    for one in batch.reqs:
        one.extend_input_len, one.req_pool_idx = kind(one.extend_input_len), kind(one.req_pool_idx)
    write_cache_indices(batch, table, fresh, any_pool)
    assert torch.equal(table, wanted)


# ---------------------------------------------------------------------- refused


class Attempt:
    """A good call in three parts, for a test to spoil one of them."""

    def __init__(self) -> None:
        self.batch = prefill_batch([(3, 2), (2, 1), (0, 4)])
        self.table = blank(8, 8)
        self.fresh = new_tokens(self.batch)

    @property
    def second(self) -> Any:
        return self.batch.reqs[1]


def prefix(value: Any) -> Callable[[Attempt], None]:
    return lambda attempt: setattr(attempt.second, "prefix_indices", value)


def number(name: str, value: Any) -> Callable[[Attempt], None]:
    return lambda attempt: setattr(attempt.second, name, value)


def table(change: Callable[[torch.Tensor], Any]) -> Callable[[Attempt], None]:
    return lambda attempt: setattr(attempt, "table", change(attempt.table))


def fresh(change: Callable[[torch.Tensor], Any]) -> Callable[[Attempt], None]:
    return lambda attempt: setattr(attempt, "fresh", change(attempt.fresh))


def swap_a_long_one_in(attempt: Attempt) -> None:
    attempt.second.prefix_indices = torch.arange(8)


WHO = "request 'r1': "
MOST = 2**48 - 1
REFUSALS: dict[str, tuple[Callable[[Attempt], None], str]] = {
    **{
        f"prefix of {dtype}": (prefix(torch.ones(2, dtype=dtype)), f"{WHO}prefix_indices is {dtype}, .*int64")
        for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint64, torch.float32, torch.float64, torch.bool)
    },
    "strided prefix": (prefix(torch.arange(6)[::2]), f"{WHO}prefix_indices is not contiguous"),
    "expanded prefix": (prefix(torch.tensor([5]).expand(3)), f"{WHO}prefix_indices is not contiguous"),
    "prefix with a gradient": (prefix(torch.ones(2, requires_grad=True)), f"{WHO}prefix_indices "),
    "prefix on meta": (
        prefix(torch.empty(2, dtype=torch.int64, device="meta")),
        f"{WHO}.*is on meta, the batch on cpu",
    ),
    "two-dimensional prefix": (prefix(torch.ones(1, 2, dtype=torch.int64)), f"{WHO}.*has shape \\(1, 2\\)"),
    "empty prefix of two dimensions": (prefix(torch.ones(0, 2, dtype=torch.int64)), f"{WHO}.*has shape \\(0, 2\\)"),
    "0-d prefix": (prefix(torch.tensor(5)), f"{WHO}.*has shape \\(\\)"),
    "list as prefix": (prefix([1, 2]), f"{WHO}prefix_indices is a list"),
    "array as prefix": (prefix(np.arange(2)), f"{WHO}prefix_indices is a ndarray"),
    "address as prefix": (prefix(140_000_000), f"{WHO}prefix_indices is a int"),
    "boolean length": (number("extend_input_len", True), f"{WHO}extend_input_len: True .*is not a number"),
    "numpy boolean length": (number("extend_input_len", np.bool_(True)), f"{WHO}extend_input_len: .*is not a number"),
    "float length": (number("extend_input_len", 1.0), f"{WHO}extend_input_len: 1.0 .*is not an integer"),
    "text length": (number("extend_input_len", "1"), f"{WHO}extend_input_len: '1' .*is not a number"),
    "negative length": (number("extend_input_len", -1), f"{WHO}extend_input_len is -1; .*from 0 to {MOST}"),
    "huge length": (number("extend_input_len", 2**48), f"{WHO}extend_input_len is {2**48}; .*from 0 to {MOST}"),
    "length beyond int64": (number("extend_input_len", 2**64 + 1), f"{WHO}extend_input_len is {2**64 + 1}"),
    "no row": (number("req_pool_idx", None), f"{WHO}req_pool_idx: None .*is not a number"),
    "boolean row": (number("req_pool_idx", False), f"{WHO}req_pool_idx: False .*is not a number"),
    "negative row": (number("req_pool_idx", -1), f"{WHO}req_pool_idx is -1"),
    "negative numpy row": (number("req_pool_idx", np.int32(-1)), f"{WHO}req_pool_idx is -1"),
    "row out of range": (number("req_pool_idx", 8), f"{WHO}req_pool_idx is 8, req_to_token has 8 rows"),
    "row used twice": (number("req_pool_idx", 0), f"{WHO}req_pool_idx 0 is used twice"),
    "prefix too long": (swap_a_long_one_in, f"{WHO}9 tokens \\(prefix 8\\) do not fit .* 8 wide"),
    "int64 table": (table(lambda t: t.to(torch.int64)), "req_to_token must be an int32 table .*torch.int64"),
    "one-dimensional table": (table(lambda t: t[0]), "req_to_token must be .* of shape \\(8,\\)"),
    "transposed table": (table(lambda t: t.t()), "req_to_token must be .*adjacent columns.* strides \\(1, 8\\)"),
    "every second column": (table(lambda t: blank(8, 16)[:, ::2]), "req_to_token must be .*adjacent columns"),
    "narrow table": (table(lambda t: t[:, :4]), "request 'r0': 5 tokens \\(prefix 3\\) do not fit .* 4 wide"),
    "table of few rows": (table(lambda t: t[:2]), "request 'r2': req_pool_idx is 2, req_to_token has 2 rows"),
    "table on meta": (table(lambda t: t.to("meta")), "the batch is on cpu, req_to_token on meta, out_cache_loc on cpu"),
    "new tokens on meta": (fresh(lambda f: f.to("meta")), "req_to_token on cpu, out_cache_loc on meta"),
    "too few new tokens": (fresh(lambda f: f[:-1]), "out_cache_loc has 6 indices, the batch extends by 7"),
    "too many new tokens": (fresh(lambda f: torch.cat([f, f])), "out_cache_loc has 14 indices, .* by 7"),
    "no new tokens": (fresh(lambda f: f[:0]), "out_cache_loc has 0 indices, .* by 7"),
    "int32 new tokens": (fresh(lambda f: f.to(torch.int32)), "out_cache_loc must be .*int64, got torch.int32"),
    "float new tokens": (fresh(lambda f: f.to(torch.float64)), "out_cache_loc must be .*int64, got torch.float64"),
    "strided new tokens": (fresh(lambda f: torch.arange(14)[::2]), "out_cache_loc must be contiguous"),
    "two-dimensional new tokens": (fresh(lambda f: f[None]), "out_cache_loc must be .*shape \\(1, 7\\)"),
}


def check_refused(spoil: Callable[[Attempt], None], match: str, pool: StagingPool | None) -> None:
    attempt = Attempt()
    spoil(attempt)
    before = attempt.table if attempt.table.is_meta else attempt.table.clone()
    stats = pool and pool.stats()
    with pytest.raises(CacheIndexError, match=match) as caught:
        write_cache_indices(attempt.batch, attempt.table, attempt.fresh, pool)
    assert isinstance(caught.value, BatchError)
    assert attempt.table.is_meta or torch.equal(attempt.table, before)
    assert attempt.batch.staged is None
    assert (pool and pool.stats()) == stats


@pytest.mark.parametrize(("spoil", "match"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_before_anything_is_uploaded(
    pool: StagingPool, device: SimulatedDevice, spoil: Callable[[Attempt], None], match: str
) -> None:
    """The error names the request and the value; no lease, no copy, the table untouched, and the next try works."""
    check_refused(spoil, match, pool)
    assert device.calls["copy"] == 0
    assert pool.stats().leases == 0
    attempt = Attempt()
    check(write_by_torch, attempt.batch, attempt.table, attempt.fresh, pool)


@pytest.mark.parametrize(("spoil", "match"), REFUSALS.values(), ids=REFUSALS)
def test_without_a_pool_the_same_is_refused(spoil: Callable[[Attempt], None], match: str) -> None:
    """The A/B switch changes no rule."""
    check_refused(spoil, match, None)


def test_a_bad_prefix_is_refused_again_on_the_next_try(pool: StagingPool) -> None:
    """A refused tensor is not remembered as a good one."""
    attempt = Attempt()
    attempt.second.prefix_indices = torch.ones(2, dtype=torch.int32)
    for _ in range(3):
        with pytest.raises(CacheIndexError, match="request 'r1'"):
            write_cache_indices(attempt.batch, attempt.table, attempt.fresh, pool)
    attempt.second.prefix_indices = attempt.second.prefix_indices.to(torch.int64)
    check(write_by_torch, attempt.batch, attempt.table, attempt.fresh, pool)


def test_a_boolean_tensor_is_no_length(pool: StagingPool) -> None:
    """Booleans are not integers, also in a tensor."""
    attempt = Attempt()
    attempt.second.extend_input_len = torch.tensor(True)
    with pytest.raises(CacheIndexError, match="request 'r1': extend_input_len"):
        write_cache_indices(attempt.batch, attempt.table, attempt.fresh, pool)


@pytest.mark.parametrize("name", ["extend_input_len", "req_pool_idx"])
def test_an_integer_on_a_device_is_refused(pool: StagingPool, name: str) -> None:
    """As for sampling values: reading it would wait for the device. Meta stands in for one."""
    attempt = Attempt()
    setattr(attempt.second, name, torch.tensor(1, device="meta"))
    with pytest.raises(CacheIndexError, match=f"request 'r1': {name}"):
        write_cache_indices(attempt.batch, attempt.table, attempt.fresh, pool)
