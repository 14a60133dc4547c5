"""The timeline of a replay: what host, device and slots did when, as a file in the Chrome trace format.

This is the book and the file; `observe.py` sees what happens and enters it here. All times are nanoseconds of the
pool's own clock (`Device.now`) until they are written. Only one thread may write in the book.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import torch

from staging._device import Device

HOST, DEVICE, SLOTS = 1, 2, 3
"""The processes of the trace format: the groups of tracks that a viewer shows."""

STEPS = 2000
"""Iterations recorded unless told otherwise: some ten megabytes."""

SlotState = Literal["filling", "in flight"]
_Args = dict[str, Any]
_REANCHOR_MS = 1000.0


class TimelineError(Exception):
    """The timeline cannot be written where it was asked for."""


class Timeline:
    """Collects spans and counts, and writes them at the end of its `with` block, whatever ended it.

    The file appears whole or not at all, and only if at least one iteration was seen. Whether its place can be written
    is found out on entry: `TimelineError`. After `steps` iterations nothing new is recorded, but slots that are in
    flight then are followed to their end.
    """

    def __init__(self, path: Path, device: Device, steps: int = STEPS) -> None:
        self.path = path
        self.device = device
        self.steps = steps
        self.recording = False
        """Whether spans are wanted now: between the first iteration and the last one recorded."""
        self.iterations = 0
        """Iterations recorded."""
        self.events = 0
        """Events in the file, once it is written."""
        self.uploads = 0
        """Uploads recorded; the number of the last one, too."""
        self.about: _Args = {}
        """What else the file says of the run."""
        self._marks = _marks_for(device)
        self._start = self._stop = 0
        self._slots = 0  # slots of the ring when recording began
        self._host: list[tuple[str, int, int, _Args]] = []
        self._device: list[tuple[str, Any, Any, _Args]] = []
        self._slot_spans: list[tuple[int, str, int, int, _Args]] = []
        self._slot_now: dict[int, tuple[SlotState, int, _Args]] = {}
        self._queue: list[tuple[int, int, int]] = []
        self._file: TextIO | None = None
        self._part = path

    # ------------------------------------------------------------------ what is entered

    def iteration(self, slots: int, waiting: int, running: int) -> None:
        """One iteration of the scheduler begins, with so many slots in the ring and requests in its queues."""
        if self.iterations == self.steps:
            if self.recording:
                self._stop = self.device.now()
            self.recording = False
            return
        if self.iterations == 0:
            self._marks.start()
            self._start = self.device.now()
            self._slots = slots
            self.recording = True
        self.iterations += 1
        self._queue.append((self.device.now(), waiting, running))

    def host(self, name: str, begin: int, end: int, **args: Any) -> None:
        """The host did this, from `begin` to `end`."""
        if self.recording:
            self._host.append((name, begin, end, args))

    def on_device(self, name: str, call: Callable[..., Any], *arguments: Any, **args: Any) -> Any:
        """Make a call that queues work, with marks in front of the work and behind it. Does not wait for it."""
        if not self.recording:
            return call(*arguments)
        begin = self._marks.mark()
        result = call(*arguments)
        self._device.append((name, begin, self._marks.mark(), args))
        return result

    def slot(self, index: int, state: SlotState | None, at: int, **args: Any) -> None:
        """Slot `index` enters a state at that time (None: free), which ends the one it was in."""
        before = self._slot_now.pop(index, None)
        if before is not None:
            name, since, about = before
            self._slot_spans.append((index, name, since, at, about))
        if state is not None and self.recording:
            self._slot_now[index] = (state, at, args)

    # ------------------------------------------------------------------ the file

    def __enter__(self) -> Timeline:
        try:
            self._part = self.path.resolve()
            if os.path.lexists(self._part) and not self._part.is_file():  # still a link: a loop, from Python 3.13 on
                raise TimelineError(f"cannot write the timeline {self.path}: it exists and is no ordinary file")
            self._part = self._part.with_name(f".{self._part.name}.{os.getpid()}.part")
            self._file = open(self._part, "w", encoding="utf-8", newline="\n")
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with a zero byte
            reason = getattr(error, "strerror", None) or error
            raise TimelineError(f"cannot write the timeline {self.path}: {reason}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        assert file is not None, "it was entered"
        try:
            with file:
                events = self._write(file) if self.iterations else 0
            if events:
                os.replace(self._part, self.path.resolve())
                self.events = events
        except OSError as fault:
            if error is None:
                raise TimelineError(f"cannot write the timeline {self.path}: {fault.strerror}") from fault
        finally:
            self._part.unlink(missing_ok=True)

    def _write(self, file: TextIO) -> int:
        end = self.device.now()
        if self.recording:
            self.recording, self._stop = False, end
        for index, (_, _, args) in list(self._slot_now.items()):
            args["cut"] = True  # its end was not seen
            self.slot(index, None, end)
        on_device = self._device_spans()
        file.write('{"displayTimeUnit": "ns",\n"otherData": ' + json.dumps(self._other_data()) + ',\n"traceEvents": [')
        written = 0
        for event in self._events(on_device):
            file.write((",\n" if written else "\n") + json.dumps(event, separators=(",", ":")))
            written += 1
        file.write("\n]}\n")
        return written

    def _device_spans(self) -> list[tuple[str, int, int, _Args]]:
        try:
            times = self._marks.resolve([(begin, end) for _, begin, end, _ in self._device])
        except RuntimeError as error:  # the device is broken: what it did cannot be read any more
            self.about["device_spans_lost"] = str(error)
            return []
        spans = []
        last = self._start
        for (name, _, _, args), (begin, end) in zip(self._device, times, strict=True):
            # One stream does one thing after the other; times of half a microsecond's resolution may say otherwise.
            begin = max(begin, last)
            last = max(begin, end)
            spans.append((name, begin, last, args))
        return spans

    def _other_data(self) -> _Args:
        device = self.device.torch_device
        return {
            "iterations": self.iterations,
            "iterations_limit": self.steps,
            "slots": self._slots,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "device_clock": self._marks.about(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "python": platform.python_version(),
            **self.about,
        }

    def _events(self, on_device: list[tuple[str, int, int, _Args]]) -> Iterator[_Args]:
        yield from _named(HOST, "host", {1: "scheduler"})
        yield from _named(DEVICE, f"device {self.device.torch_device}", {1: "stream"})
        indices = sorted({index for index, *_ in self._slot_spans})
        yield from _named(SLOTS, "slots", {index + 1: f"slot {index}" for index in indices})
        # Of two that begin together the longer one comes first: the other lies in it.
        for name, begin, end, args in sorted(self._host, key=lambda span: (span[1], -span[2])):
            yield self._span(HOST, 1, name, begin, end, args)
        for name, begin, end, args in on_device:
            yield self._span(DEVICE, 1, name, begin, end, args)
        for index, name, begin, end, args in self._slot_spans:
            yield self._span(SLOTS, index + 1, name, begin, end, args)
        for at, waiting, running in self._queue:
            yield self._count(HOST, "queue", at, {"waiting": waiting, "running": running})
        for at, counts in _slot_counts(self._slot_spans, self._start, self._slots):
            if at <= self._stop:
                yield self._count(SLOTS, "slots", at, counts)

    def _span(self, pid: int, tid: int, name: str, begin: int, end: int, args: _Args) -> _Args:
        ts, dur = (begin - self._start) / 1e3, (end - begin) / 1e3
        return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": args}

    def _count(self, pid: int, name: str, at: int, counts: dict[str, int]) -> _Args:
        return {"ph": "C", "pid": pid, "tid": 0, "ts": (at - self._start) / 1e3, "name": name, "args": counts}


class HostMarks:
    """For a device that has done its work when the call returns: its times are the host's."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.mark = now
        """Remember this place in the device's work."""

    def start(self) -> None:
        """Set the clocks."""

    def resolve(self, spans: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
        """Host times of marks, in the order in which they were made."""
        return list(spans)

    def about(self) -> _Args:
        """How the device's clock was laid beside the host's."""
        return {"kind": "host"}


class CudaMarks:
    """Timing events on the current stream, read only at the end.

    Both clocks are compared twice, before the first mark and after the last: an event is recorded on an idle stream
    and waited for between two looks at the host's clock. It lies between them; the middle is taken, of the closest of
    several tries. What lies between is interpolated, since two clocks drift apart by microseconds a second.
    """

    def __init__(self, device: torch.device, now: Callable[[], int]) -> None:
        self._device = device
        self._now = now
        self._base: tuple[Any, int, int] | None = None
        self._about: _Args = {"kind": "cuda events"}

    def start(self) -> None:
        """Set the clocks. Waits for the device."""
        self._base = self._compared()
        self._about["error_us"] = self._base[2] / 1e3

    def mark(self) -> Any:
        """Remember this place in the device's work. Does not wait."""
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def resolve(self, spans: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
        """Host times of marks, in the order in which they were made. Waits for the device."""
        assert self._base is not None, "started"
        base, base_ns, _ = self._base
        last, last_ns, error_ns = self._compared()
        # Elapsed times are 32-bit floats of milliseconds: exact enough only from an event that is not far away.
        found: list[tuple[float, int]] = []  # begin, from the base, and duration, in the device's nanoseconds
        anchor, anchor_at = base, 0.0
        for begin, end in spans:
            elapsed = anchor.elapsed_time(begin)
            at = anchor_at + elapsed * 1e6
            if elapsed > _REANCHOR_MS:
                anchor, anchor_at = begin, at
            found.append((at, round(begin.elapsed_time(end) * 1e6)))
        took = anchor_at + anchor.elapsed_time(last) * 1e6
        rate = (last_ns - base_ns) / took if took > 0 else 1.0
        self._about |= {"error_us": max(self._about["error_us"], error_ns / 1e3), "drift_ppm": (rate - 1) * 1e6}
        begins = [base_ns + round(at * rate) for at, _ in found]
        return [(begin, begin + duration) for begin, (_, duration) in zip(begins, found, strict=True)]

    def about(self) -> _Args:
        """How the device's clock was laid beside the host's."""
        return self._about

    def _compared(self, tries: int = 5) -> tuple[Any, int, int]:
        """An event, when it was on the host's clock, and how far off that may be."""
        torch.cuda.synchronize(self._device)
        found: tuple[Any, int, int] | None = None
        for _ in range(tries):
            event = self._event()
            event.record(torch.cuda.current_stream(self._device))  # the first record makes it, which takes its time
            event.synchronize()
            before = self._now()
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()
            half = (self._now() - before) // 2
            if found is None or half < found[2]:
                found = (event, before + half, half)
        assert found is not None, "at least one try"
        return found

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _marks_for(device: Device) -> HostMarks | CudaMarks:
    if device.torch_device.type == "cuda":
        return CudaMarks(device.torch_device, device.now)
    return HostMarks(device.now)


def _named(pid: int, name: str, threads: dict[int, str]) -> Iterator[_Args]:
    """Names and order of a process and its threads."""
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, thread in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slot_counts(
    spans: Iterable[tuple[int, str, int, int, _Args]], start: int, slots: int
) -> Iterator[tuple[int, dict[str, int]]]:
    """How many slots were in which state, whenever that changed; from the spans, so that both always agree."""
    changes = [(start, "", 0, 0)]
    for index, name, begin, end, _ in spans:
        changes += [(begin, name, 1, index + 1), (end, name, -1, 0)]
    changes.sort(key=lambda change: change[0])
    counts = {"filling": 0, "in flight": 0}
    for position, (at, name, step, deep) in enumerate(changes):
        slots = max(slots, deep)  # a slot not seen before: the ring has grown
        if name:
            counts[name] += step
        if position + 1 == len(changes) or changes[position + 1][0] != at:
            yield at, {"free": slots - sum(counts.values()), **counts}
