"""Cases about host memory: where it cannot be pinned, where it fails, how much of it there is, and when it goes."""

from __future__ import annotations

import contextlib
import gc
import logging
import platform
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from case_builders import send, slow_device, stamps

from staging import Field, Layout, PinningError, StagingError, StagingPool
from staging._cuda import CudaDevice
from staging._device import HostBuffer
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

COLUMN = Layout([Field("column", torch.int64)])


class OnPaper(CudaDevice):
    """The seam with CUDA where there is none: host memory is had as on a real device, the rest is the host's."""

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device="cpu")

    def current_stream(self) -> int:
        return 0

    def capturing(self, stream: Any) -> bool:
        return False

    def new_event(self) -> Any:
        return None

    def record(self, event: Any, stream: Any) -> None:
        pass

    def done(self, event: Any) -> bool:
        return True


class Allocator:
    """Stands in for `torch.empty`: pinned memory is ordinary memory that says it is pinned, filled with garbage."""

    def __init__(self) -> None:
        self.real = torch.empty
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def __call__(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = self.real(*size, **options)
        if pin_memory:
            tensor.fill_(255)
            tensor.is_pinned = lambda: True
            tensor = self.spoil(tensor)
        return tensor


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """Makes `OnPaper(torch.device("cuda"))` possible on any machine."""
    allocator = Allocator()
    monkeypatch.setattr(torch, "empty", allocator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return allocator


def on_paper() -> OnPaper:
    return OnPaper(torch.device("cuda"))


class Limited(SimulatedDevice):
    """Pinned memory can be had only while `allows(bytes, buffers made so far)` says so."""

    def __init__(self, allows: Callable[[int, int], bool]) -> None:
        super().__init__(on_sleep=lambda device: device.finish())
        self.allows = allows
        self.alive: list[weakref.ref[Any]] = []

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        if pinned and not self.allows(nbytes, len(self.alive)):
            raise PinningError("injected: no pinned memory")
        buffer = super().host_buffer(nbytes, pinned=pinned)
        self.alive.append(weakref.ref(buffer.array))
        return buffer

    def living(self) -> int:
        if any(reference() is not None for reference in self.alive):
            gc.collect()
        return sum(reference() is not None for reference in self.alive)


def check_steps(pool: StagingPool, device: SimulatedDevice, steps: int) -> None:
    """Many uploads through the pool, each with its own values."""
    uploads = [send(pool, step) for step in range(steps)]
    device.finish_all()
    assert device.violations == []
    for step, upload in enumerate(uploads):
        assert stamps(upload) == {step}


# ---------------------------------------------------------------------- where pinning is absent or different


@pytest.mark.parametrize(
    ("allows", "memory"),
    [
        (lambda nbytes, made: False, "pageable"),
        (lambda nbytes, made: True, "pinned"),
        (lambda nbytes, made: nbytes <= 1 << 16, "pageable"),
    ],
    ids=["none", "all", "small blocks only"],
)
def test_pinning_is_tried_and_not_guessed_from_the_system_s_name(
    monkeypatch: pytest.MonkeyPatch, make_pool: MakePool, allows: Callable[[int, int], bool], memory: str
) -> None:
    """B38: under a kernel that calls itself Microsoft's, the pool pins if it can, else goes on with one warning."""
    named = platform.uname()._replace(release="5.15.90.1-microsoft-standard-WSL2")
    monkeypatch.setattr(platform, "uname", lambda: named)
    device = Limited(allows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool = make_pool(device, slots=2, max_slots=2, slot_bytes=256 * 1024)
    assert pool.memory == memory
    assert len(caught) == (memory == "pageable")
    check_steps(pool, device, 20)


@pytest.mark.parametrize("kind", ["simulated", "cuda", "rocm", "cpu"])
@pytest.mark.parametrize("setting", ["STAGING_MEMORY=pageable", "STAGING_MEMORY=pinned", "STAGING_DEBUG=1"])
def test_every_setting_of_the_environment_is_followed_or_said_not_to_apply(
    monkeypatch: pytest.MonkeyPatch,
    allocator: Allocator,
    make_pool: MakePool,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    setting: str,
) -> None:
    """B40: on each kind of device a setting shows in the pool, or the log says that it is not applicable there."""
    name, value = setting.split("=")
    monkeypatch.setenv(name, value)
    if kind == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
        with pytest.warns(UserWarning, match="never been tried on ROCm"):
            device: Any = on_paper()
    else:
        device = {"simulated": SimulatedDevice, "cuda": on_paper, "cpu": lambda: "cpu"}[kind]()
    with caplog.at_level(logging.WARNING, logger="staging"):
        pool = make_pool(device)
    if name == "STAGING_DEBUG":
        assert pool.debug
    elif kind == "cpu":
        assert pool.memory == "pageable"
        assert f"STAGING_MEMORY={value} is not applicable on cpu" in caplog.text
    else:
        assert pool.memory == value
        assert value in repr(pool)
    assert ("not applicable" in caplog.text) == (kind == "cpu" and name == "STAGING_MEMORY")


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_a_setting_is_not_lost_on_a_kind_of_device_that_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """B40: where there can be no pool nothing is silently ignored: the kind is refused by name."""
    monkeypatch.setenv("STAGING_MEMORY", "pinned")
    with pytest.raises(StagingError, match=f"never been tried on devices of kind '{kind}'"):
        StagingPool(kind)


@pytest.mark.parametrize("value", ["locked", "PINNED", " "])
def test_a_word_the_environment_setting_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """B40: a misspelt setting is an error rather than a default."""
    monkeypatch.setenv("STAGING_MEMORY", value)
    with pytest.raises(ValueError, match=re.escape(f"STAGING_MEMORY={value!r}")):
        StagingPool("cpu")


def test_a_thousand_steps_on_a_machine_without_a_device_keep_their_values(make_pool: MakePool) -> None:
    """B41: on the CPU nothing is pinned and nothing aliases: each step's tensors are as they were, N steps later."""
    pool = make_pool("cpu", slots=2, max_slots=2)
    uploads = [send(pool, step) for step in range(1000)]
    assert pool.memory == "pageable"
    for step, upload in enumerate(uploads):
        assert {tensor.device.type for tensor in upload.values()} == {"cpu"}
        assert stamps(upload) == {step}


def _without_numpy(tensor: torch.Tensor) -> torch.Tensor:
    def numpy() -> None:
        raise RuntimeError("injected: this memory has no view")

    tensor.numpy = numpy  # type: ignore[method-assign]
    return tensor


def _not_pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_pinned = lambda: False  # type: ignore[method-assign,misc]
    return tensor


@pytest.mark.parametrize(
    "spoil",
    [lambda tensor: tensor.to("meta"), _without_numpy, _not_pinned],
    ids=["on another device", "without a numpy view", "not pinned"],
)
def test_pinned_memory_that_is_something_else_is_noticed(
    allocator: Allocator, make_pool: MakePool, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """B44: a pinned tensor that lives elsewhere, or cannot be written from the host, is not taken for host memory."""
    allocator.spoil = spoil
    with pytest.warns(RuntimeWarning, match=r"pinned memory could not be had.*goes on with pageable"):
        pool = make_pool(on_paper(), slots=2)
    assert pool.memory == "pageable"
    assert stamps(send(pool, 3)) == {3}
    with pytest.raises(PinningError):
        StagingPool(on_paper(), memory="pinned")


def test_every_byte_of_a_slot_is_touched_before_the_pool_is_ready(allocator: Allocator, make_pool: MakePool) -> None:
    """B46: memory that comes as garbage has been written from end to end when the pool is made."""
    pool = make_pool(on_paper(), slots=3, slot_bytes=1 << 20)
    assert pool.memory == "pinned"
    for slot in pool._ring.slots:
        array = slot.buffer.array
        assert (array[0], array[len(array) // 2], array[-1], array.any()) == (0, 0, 0, False)


def test_a_build_without_pinned_memory_is_reported(allocator: Allocator, make_pool: MakePool) -> None:
    """B46: no fallback without notice: one warning, and the pool says what it uses."""

    def missing(tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no pinned allocator in this build")

    allocator.spoil = missing
    with pytest.warns(RuntimeWarning, match="no pinned allocator in this build") as caught:
        pool = make_pool(on_paper())
    assert len(caught) == 1
    assert pool.memory == "pageable"
    assert "pageable" in repr(pool)
    assert pool.stats().pinned_bytes == 0


# ---------------------------------------------------------------------- where it fails


@pytest.mark.parametrize("made", [0, 1, 3])
def test_pinning_that_fails_at_any_slot_leaves_a_pool_that_works(made: int, make_pool: MakePool) -> None:
    """B47: fewer slots or pageable ones, with one warning; a thousand steps are right."""
    device = Limited(lambda nbytes, so_far: so_far < made)
    with pytest.warns(RuntimeWarning, match=f"there was enough for {made}") as caught:
        pool = make_pool(device, slots=4, max_slots=8)
    assert len(caught) == 1
    assert pool.memory == ("pinned" if made else "pageable")
    assert pool.stats().slots == (made or 4)
    check_steps(pool, device, 1000)
    assert device.living() == pool.stats().slots <= 8


@pytest.mark.parametrize("made", [0, 1, 3])
def test_a_pool_that_cannot_be_made_keeps_no_memory(made: int) -> None:
    """B47: slots that were pinned before the failure are let go of."""
    device = Limited(lambda nbytes, so_far: so_far < made)
    with pytest.raises(PinningError):
        StagingPool(device, slots=4, memory="pinned")
    assert len(device.alive) == made
    assert device.living() == 0


@pytest.mark.parametrize(
    "part",
    [
        r"131072 bytes",
        r"32768 bytes",
        r"4 slots",
        r"host \(system\) memory, not GPU memory",
        r"RLIMIT_MEMLOCK is (unlimited|\d+ bytes|unknown)",
        r"cgroup's memory limit (unlimited|\d+ bytes|unknown)",
        r"use fewer slots or a smaller slot_bytes",
        r"'case'",
    ],
)
def test_the_error_says_which_memory_how_much_and_what_to_lower(part: str) -> None:
    """B50: size, number of slots, kind of memory, the limits that locking runs into, and the arguments' names."""
    device = Limited(lambda nbytes, so_far: False)
    with pytest.raises(PinningError, match=part):
        StagingPool(device, slots=4, slot_bytes=20_000, memory="pinned", name="case")


def test_there_is_one_allocation_for_each_slot(make_pool: MakePool) -> None:
    """B52: sixty-four slots are sixty-four allocations, however many fields, rows and steps there are."""
    device = slow_device()
    pool = make_pool(device, slots=64, max_slots=64)
    for step in range(500):
        send(pool, step, rows=1 + step % 50)
    assert device.calls["host_buffer"] == 64


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_ten_thousand_pools_leave_no_mappings_behind() -> None:
    """B52: the process has as many memory mappings after ten thousand pools as before, give or take ten."""

    def mappings() -> int:
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    StagingPool("cpu", slots=1).close()
    before = mappings()
    for _ in range(10_000):
        StagingPool("cpu", slots=1, slot_bytes=4096).close()
    assert mappings() - before <= 10


# ---------------------------------------------------------------------- how much there is, and when it goes


@pytest.mark.parametrize(
    ("slot_bytes", "max_bytes", "locked"), [(1, 1, 1), (4097, 4097, 8192), ((1 << 20) + 1, (1 << 20) + 1, 1 << 21)]
)
def test_locked_bytes_are_those_the_allocator_really_takes(
    allocator: Allocator, make_pool: MakePool, slot_bytes: int, max_bytes: int, locked: int
) -> None:
    """B55: a block is rounded up to a power of two, and that is what the statistics report as pinned."""
    pool = make_pool(on_paper(), slots=3, slot_bytes=slot_bytes, max_bytes=max_bytes)
    stats = pool.stats()
    assert stats.pinned_bytes == 3 * locked
    assert stats.host_bytes == 3 * max_bytes


def test_the_default_slot_wastes_nothing_by_rounding(allocator: Allocator, make_pool: MakePool) -> None:
    """B55: the default size is a power of two already."""
    pool = StagingPool(on_paper(), slots=1)
    stats = pool.stats()
    assert stats.pinned_bytes == stats.host_bytes
    pool.close()


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_a_slot_is_never_handed_out_for_more_than_it_holds(
    device: SimulatedDevice, make_pool: MakePool, in_flight: int
) -> None:
    """B56: twice the rows with old slots in flight: each slot handed out holds them, and nothing behind is written."""
    pool = make_pool(device, slots=2, max_slots=4, slot_bytes=512, timeout=0, debug=True)
    small = []
    for step in range(in_flight):
        with pool.lease(COLUMN, rows=64) as lease:
            lease["column"] = step
            small.append(lease.upload())
    large = []
    for step in range(4 - in_flight):
        with pool.lease(COLUMN, rows=128) as lease:
            assert lease._slot.capacity >= 1024
            assert lease._slot.buffer.array.nbytes >= lease._slot.capacity
            lease["column"] = 100 + step
            large.append(lease.upload())
    device.finish_all()
    assert device.violations == []
    assert [upload["column"].tolist() for upload in small] == [[step] * 64 for step in range(in_flight)]
    assert [upload["column"].tolist() for upload in large] == [[100 + step] * 128 for step in range(4 - in_flight)]
    for _ in range(4):
        send(pool, 9).wait()  # looks at the slots again: debug mode finds no byte written beyond its lease
        device.finish_all()
    assert pool.stats().violations == 0


class Quiet(SimulatedDevice):
    """While `finalising`, every call is an error: a finaliser runs anywhere, also where CUDA must not be called."""

    finalising = False
    called = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and object.__getattribute__(self, "finalising"):
            self.called += 1
            raise RuntimeError(f"{name} was called by a finaliser")
        return found


def test_finalisers_make_no_call_to_the_device(make_pool: MakePool) -> None:
    """B59: a thousand leases and uploads are collected, none by calling the device, and every slot comes back."""
    device = Quiet(on_sleep=lambda device: device.finish())
    pool = make_pool(device, slots=2, max_slots=2)
    for step in range(1000):
        lease: Any = pool.lease(COLUMN, rows=4)
        upload: Any = None
        if step % 2:
            lease["column"] = step
            upload = lease.upload()
        device.finalising = True
        del lease, upload
        if step % 100 == 0:
            gc.collect()
        device.finalising = False
        while device.copies:
            device.finish()
    pool.lease(COLUMN, rows=4).discard()
    stats = pool.stats()
    assert (device.called, stats.dropped, stats.uploads) == (0, 500, 500)
    assert stats.free + stats.in_flight == 2


def test_fifty_engines_in_a_row_leave_no_memory_locked() -> None:
    """B61: a pool that was closed and dropped has no live block, and the next one starts from nothing."""
    for _ in range(50):
        device = Limited(lambda nbytes, made: True)
        pool = StagingPool(device, slots=3, slot_bytes=1 << 20)
        check_steps(pool, device, 5)
        assert len(device.alive) >= 3
        pool.close()
        stats = pool.stats()
        assert (stats.slots, stats.pinned_bytes, stats.host_bytes) == (0, 0, 0)
        del pool
        assert device.living() == 0


def test_a_pool_that_nobody_closed_says_so_and_is_freed_all_the_same() -> None:
    """B61: a ResourceWarning, and the same end state once another pool has looked."""
    device = Limited(lambda nbytes, made: True)
    pools = [StagingPool(device, slots=2, name="forgotten")]
    check_steps(pools[0], device, 5)

    def forget() -> None:
        pools.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="'forgotten' was never closed"):
        forget()
    with StagingPool("cpu") as other:
        other.lease(COLUMN, rows=1).discard()
    assert device.living() == 0
