"""The event guard: with it every upload carries its own values, without it the values of the future."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staging import Field, Layout, Lease, PinningError, PoolExhausted, StagingPool
from staging.testing import SimulatedCopy, SimulatedDevice, SimulatedEvent

STAMPS = Layout([Field("stamps", torch.int64)], "stamps")
MIXED = Layout([Field("stamps", torch.int64), Field("ids", torch.int64, "tokens")], "mixed")


class GuardTakenOut(SimulatedDevice):
    """A device whose events say that every copy has finished."""

    def done(self, event: SimulatedEvent) -> bool:
        super().done(event)
        return True


class HalfGuarded(SimulatedDevice):
    """A device whose events now and then say too early that a copy has finished."""

    def done(self, event: SimulatedEvent) -> bool:
        return super().done(event) or self.calls["done"] % 10 == 0


class InjectedError(Exception):
    """An error that the run itself caused."""


@attrs.define
class Run:
    """A scheduler that builds stamped batches: stamp k belongs to batch k, and to no other."""

    device: SimulatedDevice
    pool: StagingPool
    choice: random.Random
    stamp: int = 0
    requests: int = 0
    leases: list[Lease] = attrs.Factory(list)
    flying: dict[SimulatedCopy, tuple[int, list[torch.Tensor]]] = attrs.Factory(dict)
    distances: list[int] = attrs.Factory(list)
    """got - expected for each value that was wrong when its copy had finished; positive: from the future."""

    def lease(self) -> Lease | None:
        layout, lengths = STAMPS, {"rows": self.choice.choice((1, 2, 3, 9))}
        if self.choice.random() < 0.3:
            layout, lengths = MIXED, {**lengths, "tokens": self.choice.choice((0, 1, 20))}
        self.requests += 1
        try:
            return self.pool.lease(layout, **lengths)
        except PoolExhausted:
            return None
        except PinningError as error:
            raise InjectedError from error

    def write(self, lease: Lease) -> None:
        for field in lease.layout.fields:
            length = lease.lengths[field.counts]
            if field.counts == "rows" and self.choice.random() < 0.2:
                lease.write_records([lease.layout.pack(stamps=self.stamp)] * length)
            else:
                lease[field.name] = [self.stamp] * length

    def upload(self, lease: Lease) -> None:
        self.stamp += 1
        self.write(lease)
        self.device.stream = self.choice.randrange(3)
        out = torch.empty(lease.nbytes, dtype=torch.uint8) if self.choice.random() < 0.2 else None
        queued = len(self.device.copies)
        tensors: list[torch.Tensor] = []
        try:
            tensors = list(lease.upload(out=out).values())
        except RuntimeError as error:
            lease.discard()
            raise InjectedError from error
        finally:
            if len(self.device.copies) > queued:  # whether or not the call returned
                self.flying[self.device.copies[-1]] = (self.stamp, tensors)

    def finish(self, position: int) -> None:
        copy = self.device.copies[position]
        self.device.finish(copy)
        stamp, tensors = self.flying.pop(copy)
        for tensor in tensors:
            self.distances += [got - stamp for got in tensor.tolist() if got != stamp]

    def step(self) -> None:
        """One thing that may happen to a pool."""
        roll = self.choice.random()
        if roll < 0.45:  # the common case: one batch, one block
            with contextlib.suppress(InjectedError):
                lease = self.lease()
                if lease is not None:
                    with lease:
                        self.upload(lease)
        elif roll < 0.80:
            if self.device.copies:
                self.finish(0 if self.choice.random() < 0.6 else self.choice.randrange(len(self.device.copies)))
        elif roll < 0.86:
            with contextlib.suppress(InjectedError):
                lease = self.lease()
                if lease is not None:
                    self.leases.append(lease)
        elif roll < 0.91:
            if self.leases:
                with contextlib.suppress(InjectedError):
                    self.upload(self.leases.pop(self.choice.randrange(len(self.leases))))
        elif roll < 0.93:
            if self.leases:
                self.leases.pop().discard()
        elif roll < 0.95:
            if self.leases:
                self.leases.pop()  # dropped
        elif roll < 0.98:
            with contextlib.suppress(InjectedError):
                lease = self.lease()
                if lease is not None:
                    with lease:
                        self.write(lease)
                        raise InjectedError
        else:
            call = self.choice.choice(("host_buffer", "empty", "copy", "record", "done"))
            self.device.fail(call, times=self.choice.choice((1, 1, 3)), after=self.choice.random() < 0.5)

    def check(self) -> None:
        """What holds at every moment."""
        stats = self.pool.stats()
        assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined
        assert stats.slots <= self.pool.max_slots
        assert stats.leases == self.requests
        assert stats.filling >= len(self.leases)
        assert stats.waiting == 0
        served = stats.leases_ready + stats.leases_grown + stats.leases_waited
        ended = stats.uploads + stats.uploads_failed + stats.discards + stats.dropped
        assert served == ended + stats.filling
        assert self.device.violations == []
        assert self.distances == []

    def end(self) -> None:
        """Let everything finish, and see that no slot was lost."""
        for lease in self.leases:
            lease.discard()
        self.leases.clear()
        while self.device.copies:
            self.finish(0)


def walk(seed: int, steps: int, slots: int, max_slots: int, check_every: int = 1) -> Run:
    """A run of random steps on a fresh pool, checked as it goes."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=slots, max_slots=max_slots, slot_bytes=16, timeout=0)
    run = Run(device, pool, random.Random(seed))
    for step in range(steps):
        run.step()
        if step % check_every == 0:
            run.check()
    run.end()
    run.check()
    return run


def test_a_hundred_thousand_random_steps_keep_every_promise() -> None:
    """Leases, uploads, discards, drops, exceptions and failures in any order: no wrong byte, no lost slot."""
    totals: Counter[str] = Counter()
    for seed in range(100):
        run = walk(seed, 1000, slots=1 + seed % 4, max_slots=1 + seed % 4 + seed % 3, check_every=3)
        totals.update(run.pool.stats().as_dict())
    assert min(totals[name] for name in ("uploads", "met_in_flight", "leases_timed_out")) > 10_000
    assert min(totals[name] for name in ("quarantines", "heals", "dropped", "discards", "uploads_failed")) > 500
    assert min(totals[name] for name in ("leases_grown", "enlarged", "allocations_failed")) > 20


@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(1, 3), st.integers(0, 2))
@settings(deadline=None, max_examples=150)
def test_small_rings_keep_every_promise(seed: int, steps: int, slots: int, more: int) -> None:
    """Rings of one to three slots, which are busy most of the time, checked after each step."""
    walk(seed, steps, slots, slots + more)


def stamped_batches(device: SimulatedDevice, pool: StagingPool, count: int, depth: int) -> list[int]:
    """A scheduler that keeps `depth` copies behind: got - expected of each value that arrived wrong."""
    uploads = {}
    distances = []
    for stamp in range(count):
        with pool.lease(STAMPS, rows=4) as lease:
            lease["stamps"] = stamp
            upload = lease.upload()
        uploads[device.copies[-1]] = (stamp, upload)
        while len(device.copies) > (depth if stamp < count - 1 else 0):
            copy = device.copies[0]
            device.finish(copy)
            expected, upload = uploads.pop(copy)
            distances += [got - expected for got in upload["stamps"].tolist() if got != expected]
    return distances


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("make_device", [GuardTakenOut, HalfGuarded], ids=["never", "now and then"])
def test_without_the_guard_uploads_carry_values_of_the_future(
    make_device: Callable[[], SimulatedDevice], slots: int
) -> None:
    """If events lie, slots are rewritten under their copies: the simulated device says so, and the stamps are ahead."""
    device = make_device()
    pool = StagingPool(device, slots=slots)
    distances = stamped_batches(device, pool, count=400, depth=slots + 3)
    assert device.violations
    assert distances
    assert all(distance > 0 for distance in distances)
    pool.close()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_with_the_guard_the_same_batches_arrive_as_they_were_written(slots: int) -> None:
    """The same scheduler with honest events: the ring grows or waits, and every stamp is right."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=slots, max_slots=slots + 4)
    assert stamped_batches(device, pool, count=400, depth=slots + 3) == []
    assert device.violations == []
    assert pool.stats().slots == slots + 4
    pool.close()


def test_a_violation_says_which_copy_and_where() -> None:
    """Someone who reaches a slot behind the pool's back is found out when the copy runs, and the late bytes arrive."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, timeout=0)
    with pool.lease(STAMPS, rows=4) as lease:
        lease["stamps"] = 1
        upload = lease.upload()
    device.copies[0].source[16] = 9
    assert upload["stamps"].tolist() == [1, 1, 1, 1]
    device.finish()
    assert [(violation.copy, violation.offset) for violation in device.violations] == [(0, 16)]
    assert upload["stamps"].tolist() == [1, 1, 9, 1]
    pool.close()
