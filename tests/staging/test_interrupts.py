"""An exception from outside (Ctrl-C) at every place where Python can raise one: no slot is lost, no lock is kept.

Python looks for signals after a call, at the start of a function and where a loop turns back. A tracer raises there, at
one place in each run, in all code of the library, until a run has come to its end undisturbed.
"""

from __future__ import annotations

import dis
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
import torch

import staging
from staging import Field, Layout, Lease, PoolExhausted, PoolStats, StagingPool, Upload
from staging._slots import State
from staging.testing import SimulatedDevice

pytestmark = pytest.mark.no_cover  # coverage counts lines, which would make this several times slower

MIXED = Layout([Field("rows", torch.int64), Field("tokens", torch.int32, "tokens")], "mixed")
OWN = str(Path(staging.__file__).parent)
LEFT_OUT = {str(Path(OWN, name)) for name in ("testing.py", "_device.py", "layout.py", "_fill.py")}
"""What an interrupt does inside of a driver's call is not the pool's to say; layouts and fills change no slot."""


class Interrupted(BaseException):
    """What a signal handler raises here."""


class Interrupter:
    """Raises at the n-th place. Used as a tracer of opcodes, of which it looks at the one that went before."""

    _places: ClassVar[dict[CodeType, set[tuple[int, int]]]] = {}

    def __init__(self, place: int) -> None:
        self.left = place
        self.where = ""
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OWN) or code.co_filename in LEFT_OUT:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame, -1), frame.f_lasti
            if (last, frame.f_lasti) in (self._places.get(code) or places_of(code, self._places)):
                self.left -= 1
                if self.left == 0:
                    self.where = f"{code.co_filename}:{frame.f_lineno}"
                    self._last.clear()
                    raise Interrupted
        elif event == "return":
            self._last.pop(frame, None)
        return self


def places_of(code: CodeType, known: dict[CodeType, set[tuple[int, int]]]) -> set[tuple[int, int]]:
    """Pairs of instructions (offsets) between which Python looks for signals.

    A signal's exception counts as raised by the first of them, the tracer's by the second: so only where the same
    handler takes both.
    """
    handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((one.target for one in handlers if one.start <= offset < one.end), None)

    pairs: set[tuple[int, int]] = set()
    for one, following in itertools.pairwise(dis.get_instructions(code)):
        if one.opname.startswith("JUMP_BACKWARD"):
            pairs.add((one.offset, one.argval))
        elif one.opname == "RESUME":
            pairs.add((-1, following.offset))  # a frame's first event may be for the instruction behind it
        elif one.opname.startswith("CALL"):
            pairs.add((one.offset, following.offset))
    known[code] = {(a, b) for a, b in pairs if a < 0 or handler(a) == handler(b)} or {(-2, -2)}
    return known[code]


def one_batch(pool: StagingPool, rows: int, sent: list[tuple[Upload, int]], value: int) -> None:
    with pool.lease(MIXED, rows=rows, tokens=2) as lease:
        lease["rows"] = value
        lease["tokens"] = [value, value]
        upload = lease.upload()
    sent.append((upload, value))


def steady(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """The plain path, twice."""
    for value in (1, 2):
        one_batch(pool, 2, sent, value)


def at_once(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """Two slots are in flight, and one question frees both of them."""
    with pool.lease(MIXED, rows=2, tokens=2):
        one_batch(pool, 2, sent, 1)
    one_batch(pool, 2, sent, 2)
    pool._device.finish_all()  # type: ignore[attr-defined]
    pool._ring._reach = 2
    for value in (3, 4):
        one_batch(pool, 2, sent, value)


def growing(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """A slot is enlarged, another one made."""
    one_batch(pool, 100, sent, 4)
    with pool.lease(MIXED, rows=1, tokens=1):
        one_batch(pool, 200, sent, 5)


def waiting(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """All slots are in flight, so the last lease waits."""
    for value in range(3):
        one_batch(pool, 2, sent, value)


def giving_up(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """All slots are being filled by another thread, so to speak: the last lease waits in vain."""
    with pool.lease(MIXED, rows=1, tokens=1) as one, pool.lease(MIXED, rows=1, tokens=1) as two:
        one._slot.holder = two._slot.holder = -1
        with pytest.raises(PoolExhausted):
            pool.lease(MIXED, rows=1, tokens=1, timeout=1e-4)


def ending(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """A discard, a drop, statistics, an empty batch."""
    pool.lease(MIXED, rows=1, tokens=1).discard()
    pool.lease(MIXED, rows=1, tokens=1)
    pool.stats()
    pool.lease(MIXED, rows=0, tokens=0).upload()


def failing(pool: StagingPool, sent: list[tuple[Upload, int]]) -> None:
    """The copy fails, so the slot goes into quarantine and is healed."""
    pool._device.fail("copy", after=True)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="injected"):
        one_batch(pool, 2, sent, 6)
    one_batch(pool, 2, sent, 7)
    one_batch(pool, 2, sent, 8)


def interrupted_runs(run: Callable[[StagingPool, list[tuple[Upload, int]]], None], debug: bool) -> Iterator[str]:
    """One run for each place; after each, the pool must be whole."""
    for place in itertools.count():
        device = SimulatedDevice(on_sleep=lambda device: device.finish() if device.copies else None)
        pool = StagingPool(device, slots=1, max_slots=2, slot_bytes=64, timeout=1, debug=debug, name="interrupted")
        sent: list[tuple[Upload, int]] = []
        if not place:  # an undisturbed run, so that plans are known and the runs to come take the same way
            run(pool, sent)
            pool.close(timeout=0)
            continue
        interrupter = Interrupter(place)
        before = sys.gettrace()
        gc.disable()  # or the finaliser of an earlier run's pool may be what is interrupted
        sys.settrace(interrupter)
        try:
            run(pool, sent)
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
            gc.enable()
        if not interrupter.where:
            pool.close(timeout=0)
            return
        yield interrupter.where
        check_whole(pool, device, sent, interrupter.where)


def check_whole(pool: StagingPool, device: SimulatedDevice, sent: list[tuple[Upload, int]], where: str) -> None:
    assert not pool._ring.lock.locked(), where
    for queue in device._faults.values():
        queue.clear()
    assert pool._ring.slots, where  # the first one is never given up
    if pool._ring.refusal is None:
        stats = whole(pool)
        assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined, where
        assert pool._ring._ahead_of(None) == 0, where  # nobody who is gone is kept a slot for
        assert pool.stats().waiting == 0, where
        # Every slot can be had at once, with copies still on their way first.
        leases: list[Lease] = []
        while True:
            device.finish_all()
            stats = pool.stats()
            if len(leases) == stats.slots:
                break
            leases.append(pool.lease(MIXED, rows=1, tokens=1, timeout=0))
        assert len({lease._slot for lease in leases}) == len(leases), where
        for value, lease in enumerate(leases):
            lease["rows"], lease["tokens"] = value, value
            sent.append((lease.upload(), value))
    device.finish_all()
    assert device.violations == [], where
    for upload, value in sent:
        assert set(upload["rows"].tolist()) == {value}, where
        assert upload["tokens"].tolist() == [value] * len(upload["tokens"]), where
    pool.close(timeout=0)
    assert pool.stats().slots == 0, where


def whole(pool: StagingPool) -> PoolStats:
    """What was interrupted in the middle of a lease comes back with the next one, as after a drop."""
    pool.stats()
    if pool._ring.count(State.FILLING):
        gc.collect()  # the exception's frames may hold the lease in a cycle
    pool.lease(MIXED, rows=1, tokens=1).discard()
    return pool.stats()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python's own table of exception handlers")
@pytest.mark.parametrize(
    ("run", "debug"),
    [*((run, False) for run in (steady, at_once, growing, waiting, giving_up, ending, failing)), (failing, True)],
)
def test_an_interrupt_anywhere_loses_no_slot(
    run: Callable[[StagingPool, list[tuple[Upload, int]]], None], debug: bool
) -> None:
    """Wherever it comes, every slot can be leased again afterwards, and every upload keeps its values."""
    places = list(interrupted_runs(run, debug))
    assert len(places) > 50
    files = {Path(place).name.split(":")[0] for place in places}
    assert {"pool.py", "_ring.py", "lease.py"} <= files
