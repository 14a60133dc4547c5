"""Cases about the end of a process, late finalisers, and threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_builders import fill, send, slow_device

import staging.lease
import staging.pool
from batching.stage import PREFILL
from staging import StagingPool
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

ROOT = Path(__file__).parents[2]
ENDS = {
    "module level": 0,
    "cycle": 0,
    "daemon thread": 0,
    "exit in a step": 3,
    "at once": 4,
    "signal": -15,
    "exception": 1,
    "closed": 0,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_ends_quietly_whatever_its_pool_is_doing() -> None:
    """B76: eight ways to end with a pool in use: the expected exit code, and stderr has nothing but the user's."""
    script = Path(__file__).with_name("ways_to_end.py")
    done = subprocess.run(
        [sys.executable, script, "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout)
    assert {way: code for way, (code, _) in found.items()} == ENDS
    errors = {way: text for way, (_, text) in found.items() if text}
    assert errors.keys() <= {"exception"}, errors
    assert errors["exception"].endswith("LookupError: own mistake\n")
    assert "Exception ignored" not in errors["exception"]


def without_globals(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The module's names are gone, as late in the interpreter's end."""
    for name in vars(module):
        if not name.startswith("__"):
            monkeypatch.setattr(module, name, None)


def test_a_late_finaliser_of_a_lease_needs_no_global(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, make_pool: MakePool
) -> None:
    """B77: with every name of its module gone, and torch gone, a lease is finalised without an exception."""
    pool = make_pool(device, slots=2)
    leases = [pool.lease(staging.pool._WARM, rows=1), pool.lease(staging.pool._WARM, rows=0)]
    ended = pool.lease(staging.pool._WARM, rows=1)
    ended.discard()
    with monkeypatch.context() as patch:
        without_globals(patch, staging.lease)
        patch.delitem(sys.modules, "torch")
        object.__new__(type(ended))
        del leases, ended
        assert len(pool._ring.dropped) == 1  # those that were open and had a slot


@pytest.mark.parametrize(
    "made",
    [
        True,
        False,
    ],
    ids=["whole", "half made"],
)
def test_a_late_finaliser_of_a_pool_needs_no_global(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, made: bool
) -> None:
    """B77: the same for a pool, whole or half made: no exception, no import, no log record."""
    pool = StagingPool(device, slots=1) if made else object.__new__(StagingPool)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        without_globals(patch, staging.pool)
        patch.delitem(sys.modules, "torch")
        pool.__del__()
    if made:
        pool.close()


def test_a_pool_starts_no_thread(make_pool: MakePool) -> None:
    """B64: neither making a pool nor using, exhausting or closing it starts one."""
    before = threading.active_count()
    device = slow_device()
    pool = make_pool(device, slots=1, max_slots=2)
    for step in range(10):
        send(pool, step)
        assert threading.active_count() == before
    pool.warm(2)
    pool.close()
    assert threading.active_count() == before


def test_snapshots_add_up_while_threads_work(make_pool: MakePool) -> None:
    """B128: eight threads read statistics while eight others run steps: each snapshot is whole, none negative."""
    pool = make_pool("cpu", slots=2, max_slots=4, timeout=30)
    wrong: list[object] = []
    over = threading.Event()

    def work(worker: int) -> None:
        try:
            for step in range(150):
                lease = pool.lease(staging.pool._WARM, rows=8)
                if step % 3:
                    lease["warm"] = worker
                    if set(lease.upload()["warm"].tolist()) != {worker}:
                        wrong.append((worker, step))
                else:
                    lease.discard()
                    lease.discard()
        except BaseException as error:
            wrong.append(error)

    def read() -> None:
        while not over.is_set():
            stats = pool.stats()
            if stats.slots != stats.free + stats.filling + stats.in_flight + stats.quarantined:
                wrong.append(stats)
            wrong.extend(item for item in stats.as_dict().items() if item[1] < 0)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    readers = [threading.Thread(target=read) for _ in range(8)]
    for thread in (*workers, *readers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    stats = pool.stats()
    assert (stats.uploads, stats.discards, stats.leases) == (8 * 100, 8 * 50, 8 * 150)
    assert (stats.filling, stats.quarantined, stats.violations) == (0, 0, 0)


def test_the_last_right_to_a_slot_is_given_up_once(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B128: ends that arrive twice, by every pair of ways, are one end: no count goes down twice."""
    pool = make_pool(device, slots=1, max_slots=1)

    def collect(lease: Any) -> None:
        pool._ring.dropped.append(ticket)  # what happens when the lease is collected

    ends = [lambda lease: lease.discard(), lambda lease: fill(lease, 1).upload(), collect]
    for first in ends:
        for second in ends:
            lease = pool.lease(PREFILL, rows=1)
            ticket = lease._slot.ticket
            for end in (first, second):
                try:
                    end(lease)
                except staging.LeaseError:
                    pass
            device.finish_all()
            del lease
            pool.lease(staging.pool._WARM, rows=1).discard()
            stats = pool.stats()
            assert (stats.slots, stats.free, stats.filling, stats.in_flight) == (1, 1, 0, 0)
    assert stats.discards + stats.uploads + stats.dropped == stats.leases
