"""The whole upload of a prefill batch: the 13 arrays that SGLang sends (14 with seeds), in as many copies or in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batching.bench.batches import COLUMNS, NAMES, Batch, BenchRequest, Expected, all_new, columns, records
from batching.bench.batches import expected_columns as expected_sampling
from batching.bench.strategies import Contender, Cut, Tensors, write_checked
from staging import Field, Layout, StagingPool

LENGTHS = Layout(
    [
        Field("req_pool_indices", torch.int64),
        Field("prefix_lens", torch.int64),
        Field("extend_lens", torch.int64),
        Field("seq_lens", torch.int64),
        Field("prefix_lens_32", torch.int32),
        Field("extend_lens_32", torch.int32),
        Field("seq_lens_32", torch.int32),
    ],
    name="lengths",
)
"""Request slots and lengths. The allocator and the kernel read 64 bits, attention 32."""

PREFILL = Layout(
    [*COLUMNS.fields, *LENGTHS.fields, Field("input_ids", torch.int64, "tokens")],
    name="whole prefill",
)
"""14 arrays: five sampling columns, pointers, request slots, three lengths in both widths, token ids."""

SEEDS = "sampling_seed"
MOST_TOKENS = 8192
"""New tokens of one batch at most: a usual chunk of a chunked prefill."""
TOKENS_EACH = 128

ONE_BY_ONE_13 = "one by one, 13 arrays"
ONE_BY_ONE_14 = "one by one, 14 arrays"
PREFILL_SLAB_COLUMNS = "one slab, columns"
PREFILL_SLAB_CHECKED = "one slab, columns checked"
PREFILL_SLAB_RECORDS = "one slab, records"
PREFILL_SLAB_RECORDS_CHECKED = "one slab, records, lengths checked"
PREFILL_OURS_COLUMNS = "one lease, columns"
PREFILL_OURS_RECORDS = "one lease, records"
PREFILL_FIXED_COLUMNS = "one lease fixed, columns"
PREFILL_FIXED_RECORDS = "one lease fixed, records"

_LENGTH_NAMES = tuple(field.name for field in LENGTHS.fields)


def tokens_each(rows: int) -> int:
    """New tokens of each request: 128, or fewer so that the batch keeps to `MOST_TOKENS`."""
    return max(1, min(TOKENS_EACH, MOST_TOKENS // rows))


def contenders(device: torch.device, pool: StagingPool, rows: int, seed: int) -> list[Contender]:
    """All ways to send a prefill batch of `rows` requests."""
    batches = all_new(rows, seed, tokens_each(rows))
    slab, checked = Slab(device), Slab(device, checked=True)
    fresh, fixed = Ours(pool), Ours(pool, rows)
    ways = [
        Contender(ONE_BY_ONE_13, OneByOne(device, seeds=False).build, batches, 13, expected=_without_seeds),
        Contender(ONE_BY_ONE_14, OneByOne(device, seeds=True).build, batches, 14),
        Contender(PREFILL_SLAB_COLUMNS, slab.by_columns, batches, 1),
        Contender(PREFILL_SLAB_CHECKED, checked.by_columns, batches, 1),
        Contender(PREFILL_SLAB_RECORDS, slab.by_records, batches, 1),
        Contender(PREFILL_SLAB_RECORDS_CHECKED, checked.by_records, batches, 1),
        Contender(PREFILL_OURS_COLUMNS, fresh.by_columns, batches, 1, pool=pool),
        Contender(PREFILL_OURS_RECORDS, fresh.by_records, batches, 1, pool=pool),
        Contender(PREFILL_FIXED_COLUMNS, fixed.by_columns, batches, 1, owned=False, pool=pool),
        Contender(PREFILL_FIXED_RECORDS, fixed.by_records, batches, 1, owned=False, pool=pool),
    ]
    for way in ways[1:]:
        way.expected = lambda batch: expected(batch.requests)
    return ways


def lengths(requests: list[BenchRequest]) -> tuple[list[int], ...]:
    """The lists that a scheduler makes for every batch, in the order of `LENGTHS`; the widths share theirs."""
    slots = [request.row for request in requests]
    prefix_lens = [request.prefix_len for request in requests]
    extend_lens = [len(request.input_ids) for request in requests]
    seq_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    return slots, prefix_lens, extend_lens, seq_lens, prefix_lens, extend_lens, seq_lens


class OneByOne:
    """SGLang's way: each array from a fresh pinned tensor in a copy of its own, token ids joined in pinned memory."""

    def __init__(self, device: torch.device, *, seeds: bool) -> None:
        self.device = device
        self.pin = device.type == "cuda"
        self.seeds = seeds
        self.sampling = [(field.name, field.dtype) for field in COLUMNS.fields]
        self.lengths = [(field.name, field.dtype) for field in LENGTHS.fields]

    def build(self, batch: Batch) -> Tensors:
        requests = batch.requests
        tensors = {}
        for (name, dtype), values in zip(self.sampling, columns(requests), strict=True):
            if self.seeds or name != SEEDS:
                host = torch.tensor(values, dtype=dtype, pin_memory=self.pin)
                tensors[name] = host.to(self.device, non_blocking=True)
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        for (name, dtype), integers in zip(self.lengths, lengths(requests), strict=True):
            host = torch.tensor(integers, dtype=dtype, pin_memory=self.pin)
            tensors[name] = host.to(self.device, non_blocking=True)
        ids = [request.input_ids for request in requests]
        host = torch.empty(sum(map(len, ids)), dtype=torch.int64, pin_memory=self.pin)
        np.concatenate(ids, out=host.numpy())
        tensors["input_ids"] = host.to(self.device, non_blocking=True)
        return tensors


class Slab:
    """One fresh pinned slab for all 14 arrays; token ids are joined in their place.

    numpy converts the lists, or (`checked`) they are written as a lease writes them.
    """

    def __init__(self, device: torch.device, *, checked: bool = False) -> None:
        self.device = device
        self.checked = checked
        self.pin = device.type == "cuda"
        self.cuts: dict[tuple[int, int], Cut] = {}

    def by_columns(self, batch: Batch) -> Tensors:
        cut, slab, data = self.slab(batch)
        self.write(cut, data, 0, columns(batch.requests))
        return self.send(batch, cut, slab, data)

    def by_records(self, batch: Batch) -> Tensors:
        cut, slab, data = self.slab(batch)
        cut.transpose(records(batch.requests), data)
        return self.send(batch, cut, slab, data)

    def slab(self, batch: Batch) -> tuple[Cut, torch.Tensor, npt.NDArray[Any]]:
        key = len(batch.requests), sum([len(request.input_ids) for request in batch.requests])
        cut = self.cuts.get(key)
        if cut is None:
            cut = self.cuts[key] = Cut(PREFILL, rows=key[0], tokens=key[1])
        slab = torch.empty(cut.elements, dtype=cut.dtype, pin_memory=self.pin)
        return cut, slab, slab.numpy()

    def send(self, batch: Batch, cut: Cut, slab: torch.Tensor, data: npt.NDArray[Any]) -> Tensors:
        self.write(cut, data, len(NAMES), lengths(batch.requests))
        dtype, offset = cut.host[-1]
        ids = [request.input_ids for request in batch.requests]
        np.concatenate(ids, out=np.ndarray(sum(map(len, ids)), dtype, data, offset))
        return cut.views(slab.to(self.device, non_blocking=True))

    def write(self, cut: Cut, data: npt.NDArray[Any], first: int, lists: Sequence[list[Any]]) -> None:
        """Lists into consecutive fields."""
        end = first + len(lists)
        if self.checked:
            for column, values in zip(cut.columns[first:end], lists, strict=True):
                write_checked(column, data, values)
        else:
            for (dtype, offset), values in zip(cut.host[first:end], lists, strict=True):
                np.ndarray(cut.rows, dtype, data, offset)[:] = values


def with_equal_fill(name: str) -> str | None:
    """The slab that is filled as this way of ours is."""
    if not name.startswith("one lease"):
        return None
    return PREFILL_SLAB_RECORDS_CHECKED if "records" in name else PREFILL_SLAB_CHECKED


class Ours:
    """One lease for all 14 arrays.

    With more token ids than `MOST_TOKENS` a fresh upload would give the per-row arrays an allocation of their own, by
    one more copy on the device, so that a sampling column that is kept does not keep them.
    """

    def __init__(self, pool: StagingPool, fixed_rows: int = 0) -> None:
        self.pool = pool
        tokens = fixed_rows * tokens_each(fixed_rows) if fixed_rows else 0
        self.out = pool.destination(PREFILL, rows=fixed_rows, tokens=tokens) if fixed_rows else None

    def by_columns(self, batch: Batch) -> Tensors:
        return self.send(batch, dict(zip(NAMES, columns(batch.requests), strict=True)), None)

    def by_records(self, batch: Batch) -> Tensors:
        return self.send(batch, {}, records(batch.requests))

    def send(self, batch: Batch, sampling: Mapping[str, list[float] | list[int]], joined: bytes | None) -> Tensors:
        requests = batch.requests
        ids = [request.input_ids for request in requests]
        with self.pool.lease(PREFILL, rows=len(requests), tokens=sum(map(len, ids))) as lease:
            for name, values in sampling.items():
                lease[name] = values
            if joined is not None:
                lease.write_records(joined, COLUMNS)
            for name, integers in zip(_LENGTH_NAMES, lengths(requests), strict=True):
                lease[name] = integers
            lease.write_parts("input_ids", ids)
            return lease.upload(self.out)


def expected(requests: list[BenchRequest]) -> Expected:
    """What must be on the device, one number at a time and by no code that is measured."""
    wanted = expected_sampling(requests)
    prefix = [request.prefix_len for request in requests]
    extend = [request.input_ids.shape[0] for request in requests]
    both = [prefix[row] + extend[row] for row in range(len(requests))]
    wanted["req_pool_indices"] = np.array([request.row for request in requests], np.int64)
    for name, numbers in (("prefix_lens", prefix), ("extend_lens", extend), ("seq_lens", both)):
        wanted[name] = np.array(numbers, np.int64)
        wanted[f"{name}_32"] = np.array(numbers, np.int32)
    wanted["input_ids"] = np.array([token for request in requests for token in request.input_ids.tolist()], np.int64)
    return wanted


def _without_seeds(batch: Batch) -> Expected:
    return {name: values for name, values in expected(batch.requests).items() if name != SEEDS}
