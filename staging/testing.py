"""A simulated device: races without a GPU, exact and repeatable. Shipped, so that you can test your scheduler with it.

device = SimulatedDevice()
pool = StagingPool(device)
...                      # copies are queued; nothing is finished until the test says so
device.finish()          # the oldest copy runs now, and reads its source now
device.violations        # empty, unless somebody wrote a slot too early
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import torch

from staging._device import HostBuffer, copy_runs, pageable_buffer
from staging.errors import PinningError

_CALLS = ("host_buffer", "empty", "copy", "copy_on_device", "record", "done", "wait")


@attrs.define(eq=False)
class SimulatedCopy:
    """One copy that was queued, and whether it has run."""

    number: int
    stream: int
    landing: torch.Tensor
    source: torch.Tensor
    """The host memory itself, read again when the copy runs."""
    snapshot: torch.Tensor
    """What it held when the copy was queued."""
    finished: bool = False
    rows: torch.Tensor | None = None
    runs: tuple[tuple[int, int, int], ...] = ()
    """What a device copy took on from `landing` to `rows`: (from, to, bytes)."""


@attrs.frozen
class Violation:
    """A copy that found other bytes when it ran than when it was queued."""

    copy: int
    """Number of the copy, counted from 0."""
    offset: int
    """First byte that differed."""


@attrs.define(eq=False)
class SimulatedEvent:
    """An event: done when the copies queued before its record have run. Never recorded, it reports done, as CUDA's."""

    behind: tuple[SimulatedCopy, ...] = ()


class SimulatedDevice:
    """A device on the CPU whose time is the test's.

    A copy delivers its bytes at once, so code that uses it behaves as it would on a stream. It also keeps the source
    address with a snapshot; when the test lets it run (`finish`), the source is read again. A difference is what a
    real copy would have sent: it is recorded in `violations`, and the late bytes are then in the device tensor.

    Copies finish in any order the test chooses. `stream` is the current stream, an integer. `capturing_now` says
    that a graph is being captured. The clock is `time_ns`; `sleep` moves it on and calls `on_sleep`, where a test
    that expects a wait makes progress. `calls` counts what was asked of the device, by name.
    """

    torch_device = torch.device("cpu")
    can_pin = True

    def __init__(self, *, on_sleep: Callable[[SimulatedDevice], None] | None = None) -> None:
        self.stream = 0
        self.capturing_now = False
        self.foreign: set[int] = set()
        """Streams that somebody may destroy, and whose number another one may then have."""
        self.time_ns = 0
        self.on_sleep = on_sleep
        self.copies: list[SimulatedCopy] = []
        """Copies that have not run, in the order in which they were queued."""
        self.violations: list[Violation] = []
        self.calls: Counter[str] = Counter()
        self._queued = 0
        self._faults: dict[str, list[tuple[Exception, bool]]] = {name: [] for name in _CALLS}
        self._sticky: Exception | None = None

    # What a test does.

    def finish(self, copy: int | SimulatedCopy = 0) -> None:
        """Let one copy run: the queued one at this position (default: the oldest), or this one."""
        ran = copy if isinstance(copy, SimulatedCopy) else self.copies[copy]
        self.copies.remove(ran)
        ran.finished = True
        differs = ran.source != ran.snapshot
        if bool(differs.any()):
            self.violations.append(Violation(ran.number, int(differs.nonzero()[0])))
            ran.landing[differs] = ran.source[differs]
            if ran.rows is not None:
                copy_runs(ran.rows, ran.landing, ran.runs)

    def finish_all(self) -> None:
        """Let every queued copy run, the oldest first."""
        while self.copies:
            self.finish()

    def fail(self, call: str, error: Exception | None = None, *, times: int = 1, after: bool = False) -> None:
        """Make the next `times` calls of `call` raise `error`: any of those that `calls` counts but "sleep".

        With `after`, a copy is queued (a record made) before it raises, so that the caller cannot know.
        """
        if call == "host_buffer":
            error = error or PinningError("injected: no host memory")
        self._faults[call].extend([(error or RuntimeError(f"injected: {call} failed"), after)] * times)

    def break_down(self, error: Exception) -> None:
        """From now on every call raises `error`, as after an illegal memory access."""
        self._sticky = error

    # What a pool asks.

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        self._enter("host_buffer")
        buffer = pageable_buffer(nbytes)
        return attrs.evolve(buffer, pinned=pinned, locked_bytes=nbytes if pinned else 0)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self._enter("empty")
        return torch.empty(elements, dtype=dtype, device="cpu")

    def current_stream(self) -> int:
        return self.stream

    def same_stream(self, stream: int, current: int) -> bool:
        return stream == current

    def lasting(self, stream: int) -> bool:
        return stream not in self.foreign

    def capturing(self, stream: int) -> bool:
        return self.capturing_now

    def copy(self, landing: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        fault = self._enter("copy")
        landing, source = landing.view(torch.uint8), source.view(torch.uint8)  # a NaN differs from itself, bytes do not
        landing.copy_(source)
        self.copies.append(SimulatedCopy(self._queued, stream, landing, source, source.clone()))
        self._queued += 1
        if fault:
            raise fault

    def copy_on_device(
        self, rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        fault = self._enter("copy_on_device")
        rows = rows.view(torch.uint8)
        copy_runs(rows, landing.view(torch.uint8), runs)
        self.copies[-1].rows, self.copies[-1].runs = rows, tuple(runs)
        if fault:
            raise fault

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def record(self, event: SimulatedEvent, stream: int) -> None:
        fault = self._enter("record")
        event.behind = tuple(copy for copy in self.copies if copy.stream == stream)
        if fault:
            raise fault

    def done(self, event: SimulatedEvent) -> bool:
        self._enter("done")
        return all(copy.finished for copy in event.behind)

    def wait(self, stream: int | None, event: SimulatedEvent) -> None:
        self._enter("wait")

    def record_stream(self, tensor: torch.Tensor, stream: int | None) -> None:
        self.calls["record_stream"] += 1

    def broken(self) -> Exception | None:
        return self._sticky

    def now(self) -> int:
        return self.time_ns

    def sleep(self, seconds: float) -> None:
        self.calls["sleep"] += 1
        self.time_ns += max(1, int(seconds * 1e9))
        if self.on_sleep is not None:
            self.on_sleep(self)

    def _enter(self, call: str) -> Exception | None:
        """Count the call; raise what a test injected, or return it where the call is to fail after its effect."""
        self.calls[call] += 1
        if self._sticky is not None:
            raise self._sticky
        if self._faults[call]:
            error, after = self._faults[call].pop(0)
            error = copy.copy(error)  # a fresh one each time: its traceback must not keep the caller's slots alive
            if not after:
                raise error
            return error
        return None
