"""What a replay with a timeline is run with: the device, the pool, its leases and the scheduler, observed from outside.

Each does what the plain one does and enters in the timeline what it saw. Nothing here is used by a replay without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import attrs
import torch

from batching import cache
from batching.info import SamplingBatchInfo
from batching.replay.scheduler import ReplayRequest, Result, Scheduler, Settings, _Pending
from batching.replay.timeline import Timeline
from batching.replay.trace import TraceRequest
from staging import Destination, Layout, Lease, StagingPool, Upload
from staging._device import Device, HostBuffer

_T = TypeVar("_T")


@attrs.define(eq=False)
class ObservedEvent:
    """A slot's event, and the slot whose copy it stands behind: -1 before an upload that was recorded."""

    inner: Any
    slot: int = -1


@attrs.define(eq=False)
class _Asking:
    """What happened while one lease was asked for."""

    met_in_flight: int = 0
    """Slots whose copy had not run yet, at the first look."""
    wait_begin: int = 0
    wait_end: int = 0
    pauses: int = 0


class ObservedDevice:
    """A device that passes everything on, and enters copies, pauses, new host buffers and events seen done."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._inner: Device = timeline.device
        self.torch_device = self._inner.torch_device
        self.can_pin = self._inner.can_pin
        self.asking: _Asking | None = None
        """Of the lease that is being asked for now."""
        # Passed on as they are, without a call in between.
        self.empty = self._inner.empty
        self.current_stream = self._inner.current_stream
        self.capturing = self._inner.capturing
        self.record_stream = self._inner.record_stream
        self.same_stream = self._inner.same_stream
        self.broken = self._inner.broken
        self.now = self._inner.now

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        begin = self.now()
        try:
            return self._inner.host_buffer(nbytes, pinned=pinned)
        finally:
            self._timeline.host("host buffer", begin, self.now(), bytes=nbytes, pinned=pinned)

    def copy(self, landing: torch.Tensor, source: Any, stream: Any) -> None:
        upload = self._timeline.uploads + 1
        self._timeline.on_device("copy", self._inner.copy, landing, source, stream, upload=upload, bytes=source.nbytes)

    def copy_on_device(
        self, rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]], stream: Any
    ) -> None:
        upload = self._timeline.uploads + 1
        self._timeline.on_device(
            "copy on device", self._inner.copy_on_device, rows, landing, runs, stream, upload=upload, bytes=rows.nbytes
        )

    def new_event(self) -> ObservedEvent:
        return ObservedEvent(self._inner.new_event())

    def record(self, event: ObservedEvent, stream: Any) -> None:
        self._inner.record(event.inner, stream)

    def done(self, event: ObservedEvent) -> bool:
        answer = self._inner.done(event.inner)
        if answer:
            if event.slot >= 0:
                self._timeline.slot(event.slot, None, self.now())
        elif self.asking is not None and not self.asking.pauses:
            self.asking.met_in_flight += 1
        return answer

    def lasting(self, stream: Any) -> bool:
        return False  # or a slot might be free without its event being asked, and its end not seen here

    def wait(self, stream: Any, event: Any) -> None:
        self._inner.wait(stream, event.inner if isinstance(event, ObservedEvent) else event)

    def sleep(self, seconds: float) -> None:
        asking = self.asking
        if asking is not None and not asking.pauses:
            asking.wait_begin = self.now()
        self._inner.sleep(seconds)
        if asking is not None:
            asking.wait_end = self.now()
            asking.pauses += 1


class ObservedPool(StagingPool):
    """A pool on an observed device, which hands out observed leases. For one thread."""

    def __init__(self, timeline: Timeline, **options: Any) -> None:
        self._timeline = timeline
        self._seam = ObservedDevice(timeline)
        super().__init__(self._seam, **options)
        timeline.about |= {"pool": self.name, "memory": self.memory, "max_slots": self.max_slots}

    def lease(self, layout: Layout, /, **options: Any) -> Lease:
        """As `StagingPool.lease`."""
        timeline, now = self._timeline, self._seam.now
        if not timeline.recording:
            return super().lease(layout, **options)
        asking = self._seam.asking = _Asking()
        outcome: dict[str, Any] = {}
        begin = now()
        try:
            lease = super().lease(layout, **options)
            outcome["slot"] = lease._slot.index
        except BaseException as error:
            outcome["error"] = type(error).__name__
            raise
        finally:
            end = now()
            self._seam.asking = None
            if asking.pauses:
                timeline.host("wait", asking.wait_begin, asking.wait_end, pauses=asking.pauses)
            timeline.host("lease", begin, end, layout=layout.name, met_in_flight=asking.met_in_flight, **outcome)
        return cast(Lease, ObservedLease(timeline, lease, end))


class ObservedLease:
    """A lease whose filling and upload are entered; everything else is the lease's own."""

    def __init__(self, timeline: Timeline, lease: Lease, handed_out: int) -> None:
        self._timeline = timeline
        self._lease = lease
        self._handed_out = handed_out
        self._filling = True
        self._about = {"layout": lease.layout.name, "bytes": lease.nbytes}
        self._slot = lease._slot
        if self._slot.index >= 0:  # a lease of zero bytes has no slot of the ring
            timeline.slot(self._slot.index, "filling", handed_out, **self._about)

    def upload(self, out: Destination | torch.Tensor | None = None, after: Any = None) -> Upload:
        """As `Lease.upload`."""
        timeline, index, now = self._timeline, self._slot.index, self._timeline.device.now
        begin = now()
        try:
            upload = self._lease.upload(out, after)
        except BaseException as error:
            timeline.host("failed upload", begin, now(), slot=index, error=type(error).__name__)
            raise
        end = now()
        self._filled(begin)
        if index < 0:
            timeline.host("empty upload", begin, end, **self._about)
            return upload
        timeline.uploads += 1
        number = timeline.uploads
        timeline.host("upload", begin, end, slot=index, upload=number, **self._about)
        # From the call on: the copy may run before the call returns.
        timeline.slot(index, "in flight", begin, upload=number, **self._about)
        self._slot.event.slot = index
        return upload

    def discard(self) -> None:
        """As `Lease.discard`."""
        self._lease.discard()
        if self._filling:
            now = self._timeline.device.now()
            self._filled(now)
            if self._slot.index >= 0:
                self._timeline.slot(self._slot.index, None, now)

    def _filled(self, at: int) -> None:
        self._filling = False
        self._timeline.host("fill", self._handed_out, at, slot=self._slot.index, **self._about)

    def __setitem__(self, name: str, values: Any) -> None:
        self._lease[name] = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def __enter__(self) -> ObservedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._filling:
            self.discard()


class ObservedScheduler(Scheduler):
    """The scheduler, with its steps, the kernel, the forward and its queues entered."""

    def __init__(
        self,
        timeline: Timeline,
        trace: Sequence[TraceRequest],
        pool: ObservedPool,
        settings: Settings | None = None,
        *,
        check: bool = True,
    ) -> None:
        self._timeline = timeline
        super().__init__(trace, pool, settings, check=check)

    def run(self, on_finished: Callable[[int], None] | None = None) -> Result:
        """As `Scheduler.run`."""
        with _kernel_observed(self._timeline):
            return super().run(on_finished)

    def _drop_finished(self) -> None:
        """Every iteration begins with it."""
        self._timeline.iteration(len(self.pool._ring.slots), len(self._waiting), len(self._running))
        filters, begin = self.result.filters, self._timeline.device.now()
        super()._drop_finished()
        if self.result.filters > filters:
            self._timeline.host("filter", begin, self._timeline.device.now())

    def _prefill(self, requests: list[ReplayRequest]) -> _Pending:
        return self._step("prefill", lambda: super(ObservedScheduler, self)._prefill(requests), len(requests))

    def _decode(self) -> _Pending:
        return self._step("decode", super()._decode, len(self._running))

    def _read(self, queued: list[_Pending]) -> int:
        rows = sum(len(pending.requests) for pending in queued)
        return self._step("read tokens", lambda: super(ObservedScheduler, self)._read(queued), rows)

    def _model(
        self, info: SamplingBatchInfo, last_tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._timeline.on_device(
            "forward", super()._model, info, last_tokens, rows, seq_lens, rows=len(rows)
        )
        return found

    def _step(self, name: str, call: Callable[[], _T], rows: int) -> _T:
        begin = self._timeline.device.now()
        try:
            return call()
        finally:
            self._timeline.host(name, begin, self._timeline.device.now(), rows=rows)


@contextmanager
def _kernel_observed(timeline: Timeline) -> Iterator[None]:
    """Marks around what `write_cache_indices` queues, the kernel or its torch path, for as long as the block runs.

    There is no seam there, so the two functions are exchanged in their module: for this process, so one replay at a
    time may have a timeline.
    """
    launch_of, with_torch = cache.kernel_launch, cache.write_with_torch

    def observed_launch() -> Callable[..., None] | None:
        launch = launch_of()
        return None if launch is None else lambda *arguments: timeline.on_device("kernel", launch, *arguments)

    def observed_torch(*arguments: Any) -> None:
        timeline.on_device("kernel", with_torch, *arguments)

    plain = {"kernel_launch": launch_of, "write_with_torch": with_torch}
    try:
        for name, observed in {"kernel_launch": observed_launch, "write_with_torch": observed_torch}.items():
            setattr(cache, name, observed)
        yield
    finally:
        for name, function in plain.items():
            setattr(cache, name, function)
