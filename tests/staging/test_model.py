"""The pool against a model of it: random actions in any order, the rules of the design after each of them."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staging import (
    CaptureError,
    Field,
    FieldError,
    Layout,
    Lease,
    LeaseError,
    LeaseTooLarge,
    PinningError,
    PoolClosed,
    PoolExhausted,
    StagingPool,
    Upload,
)
from staging._slots import State  # an open copy is told from a free slot by looking inside
from staging.testing import SimulatedCopy, SimulatedDevice

MAX_BYTES = 256
LAYOUTS = [
    Layout([Field("a", torch.int64)], "one"),
    Layout([Field("a", torch.int8), Field("b", torch.float32, shape=(1,)), Field("c", torch.bool)], "three"),
    Layout([Field("t", torch.int16, "tokens"), Field("a", torch.uint64), Field("b", torch.uint8, shape=(2,))], "mixed"),
    Layout([Field("t", torch.int32, "tokens")], "tokens only"),
]
BAD = {"b": 2, "i": True, "u": -1, "f": "x"}
"""A value that no column of this kind takes."""


@attrs.define(eq=False)
class Open:
    """A lease being filled, and what was written."""

    lease: Lease
    written: dict[str, np.ndarray[Any, Any]] = attrs.Factory(dict)

    def unwritten(self) -> list[str]:
        fields = self.lease.layout.fields
        return [f.name for f in fields if self.lease.lengths[f.counts] and f.name not in self.written]


@attrs.define(eq=False)
class Sent:
    """Device tensors that an upload returned, and the values they must have for good."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, np.ndarray[Any, Any]]
    copies: list[SimulatedCopy]

    def check(self) -> None:
        for name, expected in self.values.items():
            assert self.tensors[name].numpy().tobytes() == expected.tobytes(), name


class PoolModel(RuleBasedStateMachine):
    """What a scheduler, a device and bad luck can do to one pool."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.open: list[Open] = []
        self.dead: list[Lease] = []
        self.sent: list[Sent] = []
        self.slots_of: dict[SimulatedCopy, Any] = {}
        self.counts = dict.fromkeys(("requests", "timed_out", "refused", "empty", "uploads", "failed", "discards"), 0)
        self.dropped = 0
        self.closed = False
        self.helpful = 0

    @initialize(slots=st.integers(1, 3), more=st.integers(0, 2), debug=st.booleans())
    def begin(self, slots: int, more: int, debug: bool) -> None:
        self.device = SimulatedDevice(on_sleep=self.progress)
        self.pool = StagingPool(
            self.device, slots=slots, max_slots=slots + more, slot_bytes=32, max_bytes=MAX_BYTES, timeout=0, debug=debug
        )

    def progress(self, device: SimulatedDevice) -> None:
        """While a lease waits, the device gets on with as much as the rule allowed."""
        if self.helpful and device.copies:
            self.helpful -= 1
            device.finish()

    # Leases.

    @rule(
        layout=st.sampled_from(LAYOUTS),
        rows=st.integers(0, 5),
        tokens=st.integers(0, 40),
        timeout=st.sampled_from([None, 0, 0.001]),
        helpful=st.integers(0, 2),
        fate=st.sampled_from(["keep", "keep", "upload", "upload", "upload", "copy", "record", "raise", "drop"]),
        data=st.data(),
    )
    def lease(
        self,
        layout: Layout,
        rows: int,
        tokens: int,
        timeout: float | None,
        helpful: int,
        fate: str,
        data: st.DataObject,
    ) -> None:
        """A lease is asked for, and kept open, used (perhaps in vain), given up by an exception, or forgotten."""
        lease = self.take(layout, {"rows": rows, "tokens": tokens}, timeout, helpful)
        if lease is None:
            return
        held = Open(lease)
        if fate == "keep":
            self.open.append(held)
        elif fate in ("upload", "copy", "record"):
            if fate != "upload":
                self.device.fail(fate, after=True)
            for name in held.unwritten():
                self.fill(held, name, data)
            self.send(held, None)
        elif fate == "raise":
            with pytest.raises(KeyError), lease:
                raise KeyError("in the block")
            self.counts["discards"] += lease.nbytes > 0
            self.dead.append(lease)
        else:
            self.dropped += lease.nbytes > 0
            del lease, held  # the next lease takes its slot back
            gc.collect(0)

    def take(self, layout: Layout, lengths: dict[str, int], timeout: float | None, helpful: int) -> Lease | None:
        lengths = {count: lengths[count] for count in layout.counts}
        total = layout.nbytes(**lengths)
        self.counts["requests"] += 1
        self.helpful = helpful
        try:
            lease = self.pool.lease(layout, timeout=timeout if timeout is not None else 0, **lengths)
        except PoolExhausted:
            self.counts["timed_out"] += 1
            assert total
        except PoolClosed:
            self.counts["refused"] += 1
            assert self.closed
        except LeaseTooLarge:
            self.counts["refused"] += 1
            assert total > MAX_BYTES
        except CaptureError:
            self.counts["refused"] += 1
            assert self.device.capturing_now
        except PinningError:
            self.counts["refused"] += 1  # injected
        else:
            assert not self.closed
            assert total <= MAX_BYTES
            assert lease.is_open
            self.counts["empty"] += not total
            return lease
        finally:
            self.helpful = 0
        return None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """One field of some open lease is written, perhaps not for the first time."""
        held = data.draw(st.sampled_from(self.open))
        self.fill(held, data.draw(st.sampled_from([f.name for f in held.lease.layout.fields])), data)

    def fill(self, held: Open, name: str, data: st.DataObject) -> None:
        """Write numbers that nothing else was written with, in one of the forms a lease takes."""
        lease = held.lease
        field = next(field for field in lease.layout.fields if field.name == name)
        length = lease.lengths[field.counts]
        count = length * int(np.prod(field.shape, dtype=int))
        start = next(self.numbers)
        plain = [(start + k) % 101 for k in range(count)]
        values = field.array(np.array(plain).reshape(length, *field.shape).astype(field.numpy_dtype), length)
        form = data.draw(st.sampled_from(["array", "list", "tensor", "one"]))
        if form == "one":
            values[...] = values.reshape(-1)[0] if count else 0
            lease[name] = values.reshape(-1)[0].item() if count else field.numpy_dtype.type(0).item()
        else:
            entries = values.reshape(-1) if field.shape == (1,) else values  # in a list these are plain numbers
            lease[name] = {"array": values, "list": entries.tolist(), "tensor": torch.from_numpy(values.copy())}[form]
        held.written[name] = values

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write_records(self, data: st.DataObject) -> None:
        """The per-row fields of some open lease are written from records."""
        held = data.draw(st.sampled_from(self.open))
        layout, rows = held.lease.layout, held.lease.lengths.get("rows")
        if rows is None:
            return
        table = np.zeros(rows, layout.record_dtype)
        table.view(np.uint8)[...] = np.arange(table.nbytes) % 2  # bytes of 0 and 1 are good for any dtype
        held.lease.write_records(table)
        for name in layout.record_dtype.names:
            held.written[name] = np.ascontiguousarray(table[name])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write_badly(self, data: st.DataObject) -> None:
        """A value that does not fit, or a column too long: refused, and the field counts as unwritten."""
        held = data.draw(st.sampled_from(self.open))
        field = data.draw(st.sampled_from(held.lease.layout.fields))
        length = held.lease.lengths[field.counts]
        if data.draw(st.booleans()):
            bad: Any = BAD[field.numpy_dtype.kind]
        else:
            bad = np.zeros((length + 1, *field.shape), field.numpy_dtype)
        with pytest.raises(FieldError, match=f"{field.name!r}"):
            held.lease[field.name] = bad
        held.written.pop(field.name, None)

    @precondition(lambda self: self.open)
    @rule(to_out=st.booleans(), stream=st.integers(0, 2), complete=st.booleans(), data=st.data())
    def upload(self, to_out: bool, stream: int, complete: bool, data: st.DataObject) -> None:
        """Some open lease is uploaded, as it is or filled up before."""
        held = data.draw(st.sampled_from(self.open))
        for name in held.unwritten() if complete else ():
            self.fill(held, name, data)
        self.device.stream = stream
        out = torch.full((held.lease.nbytes + 16,), 77, dtype=torch.uint8) if to_out else None
        if self.send(held, out):
            self.open.remove(held)
            if out is not None:
                assert out[held.lease.nbytes :].tolist() == [77] * 16

    def send(self, held: Open, out: torch.Tensor | None) -> bool:
        """Upload; says whether that ended the lease."""
        lease, queued, before = held.lease, len(self.device.copies), self.pool.stats()
        result: Upload | None = None
        try:
            result = lease.upload(out=out)
        except LeaseError:
            assert held.unwritten()
        except CaptureError:
            assert self.device.capturing_now
        except RuntimeError as error:
            if "injected" not in str(error):
                raise
        copies = self.device.copies[queued:]
        for copy in copies:
            self.slots_of[copy] = lease._slot
        if result is None and lease.is_open:
            assert not copies
            assert self.pool.stats() == before
            if held not in self.open:
                self.open.append(held)
            return False
        self.dead.append(lease)
        if result is None:
            self.counts["failed"] += 1
            assert self.pool.stats().quarantined == before.quarantined + 1
            if copies:  # the copy is on its way all the same, and carries what was filled
                self.sent.append(Sent(self.views(lease, copies[0]), dict(held.written), copies))
            return True
        assert not held.unwritten()
        assert len(copies) == (lease.nbytes > 0)
        self.counts["uploads"] += lease.nbytes > 0
        assert {name: tuple(tensor.shape) for name, tensor in result.items()} == {
            field.name: (lease.lengths[field.counts], *field.shape) for field in lease.layout.fields
        }
        self.sent.append(Sent(dict(result), dict(held.written), copies))
        if out is not None and lease.nbytes:
            assert {tensor.untyped_storage().data_ptr() for tensor in result.values()} == {out.data_ptr()}
        return True

    @staticmethod
    def views(lease: Lease, copy: SimulatedCopy) -> dict[str, torch.Tensor]:
        return {
            place.field.name: copy.landing[place.offset : place.offset + place.nbytes]
            for place in lease.layout.plan(lease.lengths).places
        }

    @precondition(lambda self: self.open)
    @rule(twice=st.booleans(), data=st.data())
    def discard(self, twice: bool, data: st.DataObject) -> None:
        """Some open lease is given back."""
        held = data.draw(st.sampled_from(self.open))
        self.open.remove(held)
        for _ in range(1 + twice):
            held.lease.discard()
        self.counts["discards"] += held.lease.nbytes > 0
        self.dead.append(held.lease)

    @precondition(lambda self: self.open)
    @rule(in_a_cycle=st.booleans())
    def drop(self, in_a_cycle: bool) -> None:
        """The newest open lease is forgotten; in a cycle only the collector finds it."""
        held = self.open.pop()
        self.dropped += held.lease.nbytes > 0
        if in_a_cycle:
            cycle: list[Any] = [held]
            cycle.append(cycle)
            del cycle
        del held
        gc.collect(1)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_after_the_end(self, data: st.DataObject) -> None:
        """An ended lease takes no value, uploads nothing and gives nothing back."""
        lease = data.draw(st.sampled_from(self.dead))
        before = self.pool.stats()
        name = lease.layout.fields[0].name
        with pytest.raises(LeaseError, match="ended"):
            lease[name] = 0
        with pytest.raises(LeaseError, match="ended"):
            lease.write_records(b"")
        with pytest.raises(LeaseError, match="ended"):
            lease.upload()
        lease.discard()
        assert not lease.is_open
        assert self.pool.stats() == before

    # The device.

    @precondition(lambda self: self.device.copies)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Some copy runs; in order more often than not."""
        self.device.finish(data.draw(st.integers(0, len(self.device.copies) - 1)))

    @rule()
    def finish_all(self) -> None:
        """The device catches up."""
        self.device.finish_all()

    @rule(
        call=st.sampled_from(
            ["host_buffer", "empty", "copy", "copy", "copy_on_device", "record", "record", "done", "done"]
        ),
        times=st.sampled_from([1, 1, 2, 4]),
        after=st.booleans(),
    )
    def fail(self, call: str, times: int, after: bool) -> None:
        """The next calls of one kind will fail, before or after their effect."""
        self.device.fail(call, times=times, after=after)

    @rule()
    def heal_the_device(self) -> None:
        """Failures that nobody met are taken back."""
        for queue in self.device._faults.values():
            queue.clear()

    @rule(capturing=st.sampled_from([False, False, True]))
    def capture(self, capturing: bool) -> None:
        """A graph is being captured, or no longer."""
        self.device.capturing_now = capturing

    # The pool's own end.

    @precondition(lambda self: len(self.dead) > 5)
    @rule()
    def close(self) -> None:
        """The pool is closed, with copies in flight and leases open as it may be."""
        self.pool.close(timeout=0)
        self.dead += [held.lease for held in self.open if held.lease.nbytes]
        self.open = [held for held in self.open if not held.lease.nbytes]  # these have no slot to take away
        self.closed = True

    # What always holds.

    @invariant()
    def no_copy_found_other_bytes(self) -> None:
        """No slot was written while a copy still had to read it."""
        assert self.device.violations == []

    @invariant()
    def what_has_arrived_is_what_was_filled(self) -> None:
        """Values are right from the moment of the upload, and when the copies have run they are right for good."""
        for sent in self.sent:
            sent.check()
        arrived = [sent for sent in self.sent if all(copy.finished for copy in sent.copies)]
        for sent in arrived[:-20]:
            self.sent.remove(sent)

    @invariant()
    def a_slot_with_an_open_copy_is_not_free(self) -> None:
        """Never free, never being filled, with a copy that still has to read it."""
        for copy in self.device.copies:
            assert self.slots_of[copy].state in (State.IN_FLIGHT, State.QUARANTINED)

    @invariant()
    def gauges_and_outcomes_add_up(self) -> None:
        """Every slot is in one state, every request under one outcome, every lease under one end."""
        stats, counts = self.pool.stats(), self.counts
        assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined
        assert stats.slots <= self.pool.max_slots
        assert stats.waiting == 0
        assert stats.violations == 0
        assert stats.leases == counts["requests"]
        assert stats.leases_timed_out == counts["timed_out"]
        assert stats.leases_refused == counts["refused"]
        assert stats.leases_empty == counts["empty"]
        assert (stats.uploads, stats.uploads_failed) == (counts["uploads"], counts["failed"])
        assert stats.discards == counts["discards"]
        assert stats.quarantines >= stats.uploads_failed
        assert stats.allocations - stats.enlarged >= stats.slots
        if self.closed:
            assert stats.slots == stats.pinned_bytes == stats.host_bytes == 0
            return
        holding = sum(held.lease.nbytes > 0 for held in self.open)
        not_seen = self.dropped - stats.dropped
        assert 0 <= not_seen <= stats.filling
        assert stats.filling == holding + not_seen
        assert stats.host_bytes >= 32 * stats.slots

    @invariant()
    def no_tensor_aliases_a_slot(self) -> None:
        """What an upload returned lies in memory that no slot has."""
        slots = {slot.buffer.tensor.untyped_storage().data_ptr() for slot in self.pool._ring.slots if slot.buffer}
        for sent in self.sent:
            for tensor in sent.tensors.values():
                assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in slots

    @invariant()
    def ended_leases_stay_ended(self) -> None:
        """A generation never comes back."""
        assert not any(lease.is_open for lease in self.dead)
        assert all(held.lease.is_open for held in self.open)

    def teardown(self) -> None:
        """At the end every slot can be had again, and every upload still is what it was."""
        if not hasattr(self, "pool") or sys.exc_info()[0] is not None:
            return  # a step has failed: that is what is to be seen
        self.device.finish_all()
        self.heal_the_device()
        self.device.capturing_now = False
        for held in self.open:
            held.lease.discard()
        assert self.device.violations == []
        for sent in self.sent:
            sent.check()
        if not self.closed:
            if self.dropped > self.pool.stats().dropped:
                gc.collect()  # a lease dropped in a cycle may have grown too old for the small collections
            leases = [self.pool.lease(LAYOUTS[0], rows=1) for _ in range(self.pool.stats().slots)]
            for lease in leases:
                lease.discard()
            stats = self.pool.stats()
            assert stats.free == stats.slots
            assert stats.dropped == self.dropped
            self.pool.close()
        assert self.pool.stats().slots == 0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the pool logs about drops and failures is tested elsewhere."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each yes makes the next question about one slot more: the walks are short."""
    monkeypatch.setattr("staging._ring._CONFIDENCE", 1)


@pytest.fixture(autouse=True)
def few_kept_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of this model are small: some of them get two device allocations all the same."""
    monkeypatch.setattr("staging.layout.KEPT_ALONG", 100)


PoolModel.TestCase.settings = settings(
    deadline=None,
    database=None,
    max_examples=300,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestPoolModel = PoolModel.TestCase
