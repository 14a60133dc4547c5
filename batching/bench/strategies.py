"""The rivals and ours: each builds the same six columns of one batch on the device.

Every class reads like the engine it stands for and is written as well as we can: one list comprehension or one join
for each batch, no call that could be made once instead. By *columns* a list is made per field; by *records* the bytes
that each request packed when it was made are joined and transposed. `build` returns the device tensors by name.

Names in the tables: `FRESH_PINNED`, `SLAB_…`, `OURS_…` and `FLOOR` are what the ratios refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from operator import countOf
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batching.bench.batches import (
    COLUMNS,
    NAMES,
    Batch,
    Expected,
    all_new,
    columns,
    expected_columns,
    one_new,
    records,
    unchanged,
)
from batching.params import DEFAULT_SEED
from staging import Layout, StagingPool
from staging._fill import small_integers
from staging._prepared import Column

Tensors = Mapping[str, torch.Tensor]
Build = Callable[[Batch], Tensors]

ON_DEVICE = "created on the device"
PAGEABLE = "pageable, non_blocking"
FRESH_PINNED = "fresh pinned per field"
REWRITTEN = "persistent pinned per field, rewritten"
ADMITTED_NONE = "written at admission: unchanged"
ADMITTED_ONE = "written at admission: one new"
ADMITTED_ALL = "written at admission: all new"
SLAB_COLUMNS = "fresh slab, columns"
SLAB_CHECKED = "fresh slab, columns checked"
SLAB_RECORDS = "fresh slab, records"
OURS_COLUMNS = "ours fresh, columns"
OURS_RECORDS = "ours fresh, records"
FIXED_COLUMNS = "ours fixed, columns"
FIXED_RECORDS = "ours fixed, records"
FLAGS = "the flags alone"
FLOOR = "floor"

_FEW = 32
"""Values up to which they are packed faster without a `partial`."""
_DTYPES = tuple((field.name, field.dtype) for field in COLUMNS.fields)


@attrs.define(eq=False)
class Contender:
    """One strategy with the batches it builds in turn."""

    name: str
    build: Build
    batches: list[Batch]
    copies: int
    """Host-to-device copies per batch."""
    owned: bool = True
    """Whether the tensors are the caller's own; otherwise the next batch overwrites them."""
    with_flags: bool = True
    pool: StagingPool | None = None
    """The pool behind it, which counts its copies."""
    expected: Callable[[Batch], Expected] = lambda batch: expected_columns(batch.requests)
    turn: Iterator[Batch] = attrs.field(init=False, repr=False)
    """Batches without end, one iterator for life: what is written at admission depends on the batch before."""

    def __attrs_post_init__(self) -> None:
        self.turn = cycle(self.batches)


def contenders(device: torch.device, pool: StagingPool, rows: int, seed: int) -> list[Contender]:
    """All strategies for batches of `rows` requests, in the order of the tables."""
    batches = all_new(rows, seed)
    few = one_new(rows, seed)
    same = unchanged(rows, seed)
    fields = len(NAMES)
    return [
        Contender(ON_DEVICE, OnDevice(device).build, batches, fields),
        Contender(PAGEABLE, Pageable(device).build, batches, fields),
        Contender(FRESH_PINNED, FreshPinned(device).build, batches, fields),
        Contender(REWRITTEN, Rewritten(device, rows).build, batches, fields),
        Contender(ADMITTED_NONE, AtAdmission(device, rows, same[-1]).build, same, 0, owned=False),
        Contender(ADMITTED_ONE, AtAdmission(device, rows, few[-1]).build, few, fields, owned=False),
        Contender(ADMITTED_ALL, AtAdmission(device, rows, batches[-1]).build, batches, fields, owned=False),
        Contender(SLAB_COLUMNS, Slab(device, COLUMNS).by_columns, batches, 1),
        Contender(SLAB_CHECKED, Slab(device, COLUMNS).by_checked_columns, batches, 1),
        Contender(SLAB_RECORDS, Slab(device, COLUMNS).by_records, batches, 1),
        Contender(OURS_COLUMNS, Ours(pool).by_columns, batches, 1, pool=pool),
        Contender(OURS_RECORDS, Ours(pool).by_records, batches, 1, pool=pool),
        Contender(FIXED_COLUMNS, Ours(pool, rows).by_columns, batches, 1, owned=False, pool=pool),
        Contender(FIXED_RECORDS, Ours(pool, rows).by_records, batches, 1, owned=False, pool=pool),
        Contender(FLAGS, lambda batch: {}, batches, 0, expected=lambda batch: {}),
        Contender(FLOOR, Floor(device, batches).build, batches, 1, owned=False, with_flags=False),
    ]


class OnDevice:
    """Each column made on the device directly. The host waits for everything that is queued there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build(self, batch: Batch) -> Tensors:
        tensors = {
            name: torch.tensor(values, dtype=dtype, device=self.device)
            for (name, dtype), values in zip(_DTYPES, columns(batch.requests), strict=True)
        }
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        return tensors


class Pageable:
    """Each column through ordinary host memory: `non_blocking` is asked for, the driver stages the copy itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build(self, batch: Batch) -> Tensors:
        tensors = {
            name: torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
            for (name, dtype), values in zip(_DTYPES, columns(batch.requests), strict=True)
        }
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        return tensors


class FreshPinned:
    """SGLang's way: a fresh pinned tensor for each column, copied asynchronously; torch's allocator guards each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pin = device.type == "cuda"

    def build(self, batch: Batch) -> Tensors:
        tensors = {
            name: torch.tensor(values, dtype=dtype, pin_memory=self.pin).to(self.device, non_blocking=True)
            for (name, dtype), values in zip(_DTYPES, columns(batch.requests), strict=True)
        }
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        return tensors


class Rewritten:
    """One pinned buffer for each column, rewritten for every batch.

    Unsafe, and measured all the same since engines do it: nothing keeps the copy of the batch before from still reading
    the buffer. Behind queued work this loop sends wrong bytes; it is compared only where the device is idle.
    """

    def __init__(self, device: torch.device, most_rows: int) -> None:
        self.device = device
        self.host = [_pinned(most_rows, dtype, device) for _, dtype in _DTYPES]
        self.arrays = [host.numpy() for host in self.host]

    def build(self, batch: Batch) -> Tensors:
        rows = len(batch.requests)
        tensors = {}
        for name, host, array, values in zip(NAMES, self.host, self.arrays, columns(batch.requests), strict=True):
            array[:rows] = values
            tensors[name] = host[:rows].to(self.device, non_blocking=True, copy=True)
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        return tensors


class AtAdmission:
    """vLLM V1's way: pinned columns and device columns that live for ever.

    A request writes its row when it is admitted; the columns are copied only when the batch has changed, and an
    unchanged batch gets the views it had. Unsafe in the same way as `Rewritten`, for the rows admitted since.
    """

    def __init__(self, device: torch.device, most_rows: int, before: Batch) -> None:
        self.host = [_pinned(most_rows, dtype, device) for _, dtype in _DTYPES]
        self.arrays = [host.numpy() for host in self.host]
        self.on_device = [torch.empty(most_rows, dtype=dtype, device=device) for _, dtype in _DTYPES]
        self.tensors = self.build(Batch.of(before.requests, range(len(before.requests))))

    def build(self, batch: Batch) -> Tensors:
        if not batch.new_rows:
            return self.tensors
        temperatures, top_ps, top_ks, min_ps, seeds, pointers = self.arrays
        for row in batch.new_rows:
            request = batch.requests[row]
            params = request.params
            temperatures[row] = params.temperature
            top_ps[row] = params.top_p
            top_ks[row] = params.top_k
            min_ps[row] = params.min_p
            seeds[row] = DEFAULT_SEED if params.sampling_seed is None else params.sampling_seed
            pointers[row] = request.pointer
        rows = len(batch.requests)
        tensors = {
            name: on_device[:rows].copy_(host[:rows], non_blocking=True)
            for name, on_device, host in zip(NAMES, self.on_device, self.host, strict=True)
        }
        tensors["temperatures"] = tensors["temperatures"].view(-1, 1)
        self.tensors = tensors
        return tensors


class Slab:
    """One fresh pinned slab for the batch, filled, copied once and cut into views; torch's allocator guards it.

    The strongest rival. What depends on the number of rows is prepared once, records are transposed in two strides,
    and the views are cut by the same few calls as ours. By columns numpy converts what it is given, and takes a
    boolean for a number or cuts a fraction off; with checked columns it is filled as a lease is, which refuses these.
    """

    def __init__(self, device: torch.device, layout: Layout) -> None:
        self.device = device
        self.pin = device.type == "cuda"
        self.layout = layout
        self.cuts: dict[int, Cut] = {}

    def by_columns(self, batch: Batch) -> Tensors:
        cut = self.cut(len(batch.requests))
        slab = torch.empty(cut.elements, dtype=cut.dtype, pin_memory=self.pin)
        data = slab.numpy()
        for (dtype, offset), values in zip(cut.host, columns(batch.requests), strict=True):
            np.ndarray(cut.rows, dtype, data, offset)[:] = values
        return cut.views(slab.to(self.device, non_blocking=True))

    def by_checked_columns(self, batch: Batch) -> Tensors:
        cut = self.cut(len(batch.requests))
        slab = torch.empty(cut.elements, dtype=cut.dtype, pin_memory=self.pin)
        data = slab.numpy()
        for column, values in zip(cut.columns, columns(batch.requests), strict=True):
            write_checked(column, data, values)
        return cut.views(slab.to(self.device, non_blocking=True))

    def by_records(self, batch: Batch) -> Tensors:
        cut = self.cut(len(batch.requests))
        slab = torch.empty(cut.elements, dtype=cut.dtype, pin_memory=self.pin)
        cut.transpose(records(batch.requests), slab.numpy())
        return cut.views(slab.to(self.device, non_blocking=True))

    def cut(self, rows: int) -> Cut:
        cut = self.cuts.get(rows)
        if cut is None:
            cut = self.cuts[rows] = Cut(self.layout, rows=rows)
        return cut


class Cut:
    """Where each field lies in a slab: made once for each number of rows, like what a pool prepares."""

    def __init__(self, layout: Layout, **lengths: int) -> None:
        plan = layout.plan(lengths)
        self.rows = lengths["rows"]
        self.elements, self.dtype = plan.cut.elements, plan.cut.dtype
        self.columns = [Column(place, np.empty(plan.total, np.uint8)) for place in plan.places]
        self.host = [(place.numpy_dtype, place.offset) for place in plan.places]
        self.runs = [
            (run.target_shape, run.dtype, run.target, run.target_strides, run.record, run.record_strides)
            for run in plan.record_runs(COLUMNS)
        ]
        self.views = plan.cut.tensors

    def transpose(self, records: bytes, data: npt.NDArray[Any]) -> None:
        """Records of `COLUMNS`, joined, into the fields that they have."""
        for shape, dtype, target, target_strides, record, record_strides in self.runs:
            source: npt.NDArray[Any] = np.ndarray(shape, dtype, records, record, record_strides)
            np.ndarray(shape, dtype, data, target, target_strides)[...] = source


def write_checked(column: Column, data: npt.NDArray[Any], values: Any) -> None:
    """A list into a slab as a lease writes it: exactly, or not at all."""
    if column.small:
        numbers = small_integers(values)
        column.small = numbers is not None
        if numbers is not None:
            np.ndarray(len(values), column.array.dtype, data, column.offset)[:] = numbers
            return
    if countOf(map(type, values), column.usual) != len(values):
        raise TypeError("not a list of plain numbers")
    if len(values) > _FEW:
        partial(column.pack, data, column.offset)(*values)  # moves the values once less
    else:
        column.pack(data, column.offset, *values)


def with_equal_fill(name: str) -> str | None:
    """The slab that is filled as this strategy of ours is."""
    if not name.startswith("ours"):
        return None
    return SLAB_RECORDS if name.endswith("records") else SLAB_CHECKED


class Ours:
    """A `StagingPool`: a slot of the ring, one copy, into a fresh allocation or (with `fixed_rows`) a fixed one."""

    def __init__(self, pool: StagingPool, fixed_rows: int = 0) -> None:
        self.pool = pool
        self.out = pool.destination(COLUMNS, rows=fixed_rows) if fixed_rows else None

    def by_columns(self, batch: Batch) -> Tensors:
        requests = batch.requests
        with self.pool.lease(COLUMNS, rows=len(requests)) as lease:
            for name, values in zip(NAMES, columns(requests), strict=True):
                lease[name] = values
            return lease.upload(self.out)

    def by_records(self, batch: Batch) -> Tensors:
        requests = batch.requests
        with self.pool.lease(COLUMNS, rows=len(requests)) as lease:
            lease.write_records(records(requests))
            return lease.upload(self.out)


class Floor:
    """What no strategy can do without: one memcpy of the finished bytes, one copy, one event record on a known stream.

    No fill, no allocation, no guard, no flags: not a way to build a batch.
    """

    def __init__(self, device: torch.device, batches: list[Batch]) -> None:
        cut = Cut(COLUMNS, rows=len(batches[0].requests))
        self.ready = {id(batch): _finished(cut, batch) for batch in batches}
        self.source = _pinned(cut.elements, cut.dtype, device)
        self.array = self.source.numpy()
        self.landing = torch.empty(cut.elements, dtype=cut.dtype, device=device)
        self.tensors = cut.views(self.landing)
        self.record = _recorder(device)

    def build(self, batch: Batch) -> Tensors:
        self.array[:] = self.ready[id(batch)]
        self.landing.copy_(self.source, non_blocking=True)
        self.record()
        return self.tensors


def _finished(cut: Cut, batch: Batch) -> npt.NDArray[Any]:
    host = torch.zeros(cut.elements, dtype=cut.dtype).numpy()
    cut.transpose(records(batch.requests), host)
    return host


def _pinned(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")


def _recorder(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    return lambda: event.record(stream)
