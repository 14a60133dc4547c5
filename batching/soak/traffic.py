"""Random batches from many threads: layouts, sizes, forms of values, streams, delays, and what becomes of each lease.

Every random choice of a thread comes from the seed and the thread's number. How threads interleave does not.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batching.soak.lanes import lanes_of
from batching.soak.plain import PlainUpload, PlainWay
from batching.soak.values import DTYPES, STAMP, Batch, DeviceValues, HostValues, Tally
from staging import Field, Layout, PoolStats, StagingPool, Upload
from staging._device import Device, open_device
from staging.layout import ROWS

_WARM = Layout([Field("warm", torch.uint8)], "soak warm-up")
_WARM_PART = 0.1
_POLL_S = 0.1

_LAYOUTS = 16
_MOST_FIELDS = 12
_ENTRY_SHAPES: tuple[tuple[int, ...], ...] = ((), (), (), (1,), (3,), (2, 4))
_ROOM = 1024
"""Bytes for padding, and for one entry of each field."""
_LONGEST_LIST = 2000
_LONGEST_SLEEP_S = 1e-3
_MOST_KEPT = 64
_LONGEST_KEPT = 200

_FATES = {"uploaded": 78, "uploaded to a fixed place": 12, "discarded": 4, "raised": 3, "dropped": 3}


@attrs.frozen
class Settings:
    """How much traffic, of what kind."""

    threads: int = 8
    seconds: float = 60.0
    batches: int | None = None
    """For each thread; in the place of `seconds`."""
    seed: int = 0
    delays: bool = True
    """Random pauses of host and device."""
    warm: bool = False
    """Make every slot, and as large as any batch needs, before the traffic begins."""
    largest: int = 1 << 19
    """Bytes of the largest batch, padding included; at least 4096."""


@attrs.define(kw_only=True)
class Result:
    """What was seen. Times in nanoseconds."""

    way: str
    """ "pool" or "plain"."""
    memory: str
    wall_ns: int
    batches: int
    """Batches begun, whatever became of them."""
    uploads: int
    """Those uploaded, the empty ones included."""
    fields: int
    bytes: int
    """Of the fields, without padding."""
    checks: int
    """Comparisons on the device, each of a whole upload; some uploads are checked several times."""
    bad_checks: int | None
    """Checks that found a difference; None when the device could not be asked any more."""
    bad_elements: int | None
    lowest: int | None
    """Arrived number minus expected number, the most negative one: an older batch's bytes."""
    highest: int | None
    """The most positive one: a later batch's bytes, from a slot that was rewritten too early."""
    allocations: tuple[int, int, int] | None
    """Host buffers made before the first batch, until every thread had done its first tenth, and after. None where
    nobody counts them."""
    host_ns: npt.NDArray[np.int64] = attrs.field(repr=False)
    """From the lease to the end of the upload, without the deliberate delays; of non-empty uploads after the first
    tenth."""
    stats: PoolStats | None
    interrupted: bool
    failure: str | None
    """What ended the soak early: an error of a thread, or books that do not add up."""


class _Planned(Exception):
    """What a worker raises inside its own block."""


def _without_guard(device: Device) -> Device:
    """The event is never asked: the pool believes each copy is done at once. For the positive control only."""
    device.done = lambda event: True  # type: ignore[method-assign]
    return device


def open_seam(device: str | Device, *, guard: bool = True) -> Device:
    """The device for the soak's pool, with its event guard or without. Raises `StagingError` as the pool does."""
    seam = open_device(device)
    return seam if guard else _without_guard(seam)


def random_layout(choice: random.Random) -> Layout:
    """A stamp and up to eleven columns of any dtype; all per row, all per token, or mixed."""
    counts = choice.choice(((ROWS,), ("tokens",), (ROWS, "tokens"), (ROWS, "tokens")))
    fields = [Field(STAMP, torch.int64, choice.choice(counts))]
    fields += [
        Field(f"column{k}", choice.choice(DTYPES), choice.choice(counts), choice.choice(_ENTRY_SHAPES))
        for k in range(choice.randrange(_MOST_FIELDS))
    ]
    return Layout(fields, "soak")


def random_lengths(choice: random.Random, layout: Layout, largest: int) -> dict[str, int]:
    """Lengths for a few bytes up to `largest`, as often small as large; now and then one is 0."""
    target = min(largest ** choice.uniform(0.2, 1.0), largest - _ROOM)
    share = dict(zip(layout.counts, (choice.random(), choice.random()), strict=False))
    lengths: dict[str, int] = {}
    for count in layout.counts:
        entry = sum(field.entry_bytes for field in layout.fields if field.counts == count)
        length = max(1, int(target * share[count] / sum(share.values()) / entry))
        lengths[count] = 0 if choice.random() < 0.06 else length
    return lengths


def random_writes(
    choice: random.Random, batch: Batch, columns: dict[str, npt.NDArray[Any]]
) -> list[tuple[str | None, Any]]:
    """How the columns are written, in random order: (field, values in some form), or (None, records)."""
    writes: list[tuple[str | None, Any]] = []
    fields = list(batch.layout.fields)
    rows = [field for field in fields if field.counts == ROWS]
    if rows and choice.random() < 0.25:
        fields = [field for field in fields if field.counts != ROWS]
        table = np.empty(batch.lengths[ROWS], batch.layout.record_dtype)
        for field in rows:
            table[field.name] = columns[field.name]
        records: Any = table
        if len(table) <= 32:
            records = [_record(batch.layout, row) for row in table]
        writes.append((None, records))
    for field in fields:
        writes.append((field.name, _in_some_form(choice, field, columns[field.name], field.name in batch.uniform)))
    choice.shuffle(writes)
    return writes


def _record(layout: Layout, row: np.void) -> bytes:
    values = {name: np.ravel(row[name]) for name in row.dtype.names or ()}
    return layout.pack(**{name: list(value) if value.size > 1 else value[0] for name, value in values.items()})


def _in_some_form(choice: random.Random, field: Field, column: npt.NDArray[Any], uniform: bool) -> Any:
    if uniform or (field.name == STAMP and choice.random() < 0.5):
        number = column.flat[0] if column.size else field.numpy_dtype.type(0)
        return choice.choice((number, number.item(), torch.from_numpy(np.array(number))))
    form = choice.choice(("list", "tuple", "array", "strided", "tensor"))
    if form == "tensor":
        return torch.from_numpy(column)
    if form == "strided":
        return np.repeat(column, 2, axis=0)[::2]
    if form == "array" or column.size > _LONGEST_LIST:
        return column
    return column.tolist() if form == "list" else tuple(column.tolist())


@attrs.define
class _Kept:
    """An upload that is looked at again later."""

    due: int
    batch: Batch
    upload: Upload | PlainUpload


class _Worker:
    """One thread's traffic."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.number = number
        self.batches = 0
        self.uploads = 0
        self.fields = 0
        self.bytes = 0
        self.checks = 0
        self.host_ns = array("q")
        self.warm_at = 0
        """How many of `host_ns` are of the first tenth."""
        self._soak = soak
        self._choice = random.Random(f"{soak.settings.seed} {number}")
        self._layouts = [random_layout(self._choice) for _ in range(_LAYOUTS)]
        self._lane = number % soak.lanes.count
        self._tallies = [Tally(soak.found[number, lane]) for lane in range(soak.lanes.count)]
        self._kept: list[_Kept] = []
        self._destination = torch.empty(soak.settings.largest, dtype=torch.uint8, device=soak.source.device)
        self._destination_read: Any = None
        """Event behind the last reader of the destination."""

    def run(self) -> None:
        """The whole of it. An error ends the soak, and is reported."""
        try:
            warm = False
            while not self._soak.stop.is_set() and (part := self._soak.part_done(self)) < 1:
                if not warm and part >= _WARM_PART:
                    warm = True
                    self.warm_at = len(self.host_ns)
                    self._soak.one_is_warm()
                self._one_batch()
                self._look_again(self.batches)
            self._look_again(None)
        except BaseException as error:
            self._soak.fail(f"thread {self.number}, batch {self.batches}", error)

    def _one_batch(self) -> None:
        choice = self._choice
        self.batches += 1
        if choice.random() < 0.1:
            self._lane = choice.randrange(self._soak.lanes.count)
        if choice.random() < 0.02:
            self._layouts[choice.randrange(_LAYOUTS)] = random_layout(choice)
        layout = choice.choice(self._layouts)
        lengths = random_lengths(choice, layout, self._soak.settings.largest)
        fate = choice.choices(list(_FATES), list(_FATES.values()))[0]
        uniform = frozenset(field.name for field in layout.fields[1:] if choice.random() < 0.15)
        with self._soak.lanes.on(self._lane):
            try:
                built = self._build(layout, lengths, uniform, fate)
            except _Planned:
                return
        if built is not None:
            self._use(*built, fixed=fate == "uploaded to a fixed place")

    def _build(
        self, layout: Layout, lengths: dict[str, int], uniform: frozenset[str], fate: str
    ) -> tuple[Batch, Upload | PlainUpload] | None:
        soak, choice, now = self._soak, self._choice, time.perf_counter_ns
        start = now()
        lease = soak.source.lease(layout, **lengths)
        took = now() - start
        # Only now: of two leases of one slot the later one has the higher number.
        batch = Batch(layout, lengths, next(soak.numbers), uniform)
        columns = soak.host_values.columns(batch)
        writes = random_writes(choice, batch, columns)
        if not fate.startswith("uploaded"):
            writes = writes[: choice.randrange(len(writes) + 1)]
        if fate == "dropped":
            _write(lease, writes)
            return None  # and nobody gives it back
        with lease:
            start = now()
            _write(lease, writes)
            took += now() - start
            for column in columns.values():
                column.fill(0)  # the values were copied when they were written
            if fate == "raised":
                raise _Planned
            if fate == "discarded":
                lease.discard()
                return None
            if soak.settings.delays:
                if choice.random() < 0.15:
                    time.sleep(choice.uniform(0, _LONGEST_SLEEP_S))
                if choice.random() < 0.5:
                    soak.lanes.delay(choice)
            start = now()
            if fate == "uploaded to a fixed place":
                upload = lease.upload(out=self._destination, after=self._destination_read)
            else:
                upload = lease.upload()
            took += now() - start
        self.uploads += 1
        self.fields += len(layout.fields)
        self.bytes += batch.nbytes
        if batch.nbytes:
            self.host_ns.append(took)
        return batch, upload

    def _use(self, batch: Batch, upload: Upload | PlainUpload, *, fixed: bool) -> None:
        choice = self._choice
        lane = self._read(batch, upload)
        if fixed:
            self._destination_read = self._soak.lanes.mark(lane)  # the next upload there waits for this reader
            return
        if choice.random() < 0.25:
            self._read(batch, upload)
        # The others are dropped here, perhaps before their copy or their readers have run.
        if choice.random() < 0.4 and len(self._kept) < _MOST_KEPT:
            self._kept.append(_Kept(self.batches + choice.randint(1, _LONGEST_KEPT), batch, upload))

    def _read(self, batch: Batch, upload: Upload | PlainUpload) -> int:
        """A consumer on some lane: it waits for the upload, and checks it. Returns the lane."""
        soak, choice = self._soak, self._choice
        lane = choice.randrange(soak.lanes.count) if choice.random() < 0.5 else self._lane
        with soak.lanes.on(lane):
            upload.wait(soak.lanes.stream(lane) if choice.random() < 0.5 else None)
            if soak.settings.delays and choice.random() < 0.2:
                soak.lanes.delay(choice)
            soak.device_values.check(upload, batch, self._tallies[lane])
        self.checks += 1
        return lane

    def _look_again(self, now: int | None) -> None:
        """Check what was kept until now; None: all of it."""
        due = [kept for kept in self._kept if now is None or kept.due <= now]
        self._kept = [kept for kept in self._kept if now is not None and kept.due > now]
        for kept in due:
            self._read(kept.batch, kept.upload)


def _write(lease: Any, writes: list[tuple[str | None, Any]]) -> None:
    for name, values in writes:
        if name is None:
            lease.write_records(values)
        else:
            lease[name] = values


class Soak:
    """Threads, what they share, and the result. `source` is the pool, or the per-call way in its place."""

    def __init__(self, source: StagingPool | PlainWay, settings: Settings) -> None:
        self.source = source
        self.settings = settings
        self.stop = threading.Event()
        self.numbers = itertools.count()
        self.lanes = lanes_of(source.device)
        self.host_values = HostValues(settings.largest)
        self.device_values = DeviceValues(settings.largest, source.device)
        self.found = torch.zeros((settings.threads, self.lanes.count, 4), dtype=torch.int64, device=source.device)
        """For each thread and lane, as `Tally` names them: nobody adds to the same numbers on two streams."""
        self.workers = [_Worker(self, number) for number in range(settings.threads)]
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._warm = 0
        self._allocated: list[int | None] = [self._allocations()]
        self._start = 0

    def run(self, on_progress: Callable[[Soak], None] = lambda soak: None) -> Result:
        """Until the time or the batches are over, a thread fails, or Ctrl-C: then with what was seen so far."""
        asked_before, interrupted = 0, False
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        if self.settings.warm and isinstance(self.source, StagingPool):
            _make_all_slots(self.source, self.settings.largest)
        if isinstance(self.source, StagingPool):
            asked_before = self.source.stats().leases
        self.lanes.finish()  # what the threads share was made on the default stream
        self._allocated.append(self._allocations())
        self._start = time.perf_counter_ns()
        try:
            for thread in threads:
                thread.start()
            while alive := [thread for thread in threads if thread.is_alive()]:
                alive[0].join(_POLL_S)
                on_progress(self)
        except KeyboardInterrupt:
            interrupted = True
        except Exception as error:
            self.fail("the main thread", error)
        self.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        wall_ns = time.perf_counter_ns() - self._start
        self._allocated.append(self._allocations())
        found: list[int | None] = [None] * 4
        try:
            self.lanes.finish()
            table = self.found.reshape(-1, 4)
            found = [*table[:, :2].sum(0).tolist(), int(table[:, 2].min()), int(table[:, 3].max())]
        except RuntimeError as error:
            self.fail("the device", error)
        stats = None
        if isinstance(self.source, StagingPool):
            if self.failure is None:
                self.failure = _books(self.source, asked_before + self.batches)
            stats = self.source.stats()
        return Result(
            way="plain" if stats is None else "pool",
            memory=self.source.memory,
            wall_ns=wall_ns,
            batches=self.batches,
            uploads=sum(worker.uploads for worker in self.workers),
            fields=sum(worker.fields for worker in self.workers),
            bytes=sum(worker.bytes for worker in self.workers),
            checks=sum(worker.checks for worker in self.workers),
            bad_elements=found[0],
            bad_checks=found[1],
            lowest=found[2],
            highest=found[3],
            allocations=self._allocation_phases(),
            host_ns=np.concatenate([np.array(worker.host_ns[worker.warm_at :], np.int64) for worker in self.workers]),
            stats=stats,
            interrupted=interrupted,
            failure=self.failure,
        )

    @property
    def batches(self) -> int:
        """Batches begun by all threads."""
        return sum(worker.batches for worker in self.workers)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return (time.perf_counter_ns() - self._start) / 1e9

    def mismatches(self) -> int:
        """Wrong elements found so far. Waits for the default stream: to be asked seldom."""
        return int(self.found[:, :, 0].sum())

    def part_done(self, worker: _Worker) -> float:
        """From 0 to 1."""
        if self.settings.batches is not None:
            return worker.batches / self.settings.batches
        return self.seconds / self.settings.seconds

    def one_is_warm(self) -> None:
        """A thread has done its first tenth. With the last one the warm-up is over."""
        with self._lock:
            self._warm += 1
            if self._warm == len(self.workers):
                self._allocated.append(self._allocations())

    def fail(self, where: str, error: BaseException) -> None:
        """The first error ends the soak, and is what gets reported."""
        with self._lock:
            if self.failure is None:
                self.failure = f"{where}, seed {self.settings.seed}: {''.join(traceback.format_exception(error))}"
        self.stop.set()

    def _allocations(self) -> int | None:
        """Host buffers made so far: by the pool, or by torch's pinned allocator where it counts them."""
        if isinstance(self.source, StagingPool):
            return self.source.stats().allocations
        if self.source.memory != "pinned" or not hasattr(torch.cuda, "host_memory_stats"):
            return None
        return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))

    def _allocation_phases(self) -> tuple[int, int, int] | None:
        counts = self._allocated if len(self._allocated) == 4 else [*self._allocated, self._allocated[-1]]
        made, begun, warm, end = counts
        if made is None or begun is None or warm is None or end is None:
            return None
        before = begun if isinstance(self.source, StagingPool) else begun - made  # a pool makes its first slots itself
        return before, warm - begun, end - warm


def _make_all_slots(pool: StagingPool, largest: int) -> None:
    leases = [pool.lease(_WARM, rows=largest) for _ in range(pool.max_slots)]
    for lease in leases:
        lease["warm"] = 0
        lease.upload()


def _books(pool: StagingPool, asked: int) -> str | None:
    """What is wrong with the pool's statistics when every thread has ended, or None."""
    pool.lease(_WARM, rows=1).discard()  # takes back what was dropped last
    stats = pool.stats()
    served = stats.leases_ready + stats.leases_grown + stats.leases_waited
    ended = stats.uploads + stats.uploads_failed + stats.discards + stats.dropped
    wrong = []
    if stats.leases != asked + 1:
        wrong.append(f"{asked + 1} leases asked for, {stats.leases} counted")
    if served != ended:
        wrong.append(f"{served} leases served, {ended} ended")
    if stats.filling or stats.quarantined or stats.waiting:
        wrong.append(f"{stats.filling} slots filling, {stats.quarantined} in quarantine, {stats.waiting} waiting")
    return f"the pool's books do not add up: {'; '.join(wrong)}" if wrong else None
