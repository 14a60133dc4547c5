"""The cases of docs/cases.md that need two GPUs: devices that are not the current one, and tensors of the wrong one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from batching import CacheIndexError, Request, SamplingParams, ScheduleBatch, write_cache_indices
from staging import Field, FieldError, Layout, PoolExhausted, StagingPool
from staging._cuda import CudaDevice

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

Hold = Callable[..., AbstractContextManager[Callable[[], None]]]

ROOT = Path(__file__).parents[2]
COLUMN = Layout([Field("column", torch.int64), Field("half", torch.float32)])


def send(pool: StagingPool, stamp: int, **options: Any) -> torch.Tensor:
    with pool.lease(COLUMN, rows=1000) as lease:
        lease["column"] = stamp
        lease["half"] = stamp / 2
        return lease.upload(**options)["column"]


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.tolist())


def test_pools_of_two_devices_take_turns_in_one_thread() -> None:
    """B68: each has events of its own device; steps interleaved, whichever device is current: all values right."""
    with StagingPool("cuda:0", slots=2, max_slots=2) as first, StagingPool("cuda:1", slots=2, max_slots=2) as second:
        sent = []
        for step in range(100):
            with torch.cuda.device(step // 2 % 2):
                sent += [(step, first, send(first, step)), (step, second, send(second, step))]
        for step, pool, column in sent:
            assert column.device == pool.device
            assert values(column) == {step}


@pytest.mark.parametrize("current", [0, 1])
def test_an_event_that_cannot_be_recorded_on_the_other_device_frees_nothing(held_stream: Hold, current: int) -> None:
    """B68: with the record failing on cuda:1 the slot is quarantined until its copy has run, whatever is current."""
    with StagingPool("cuda:1", slots=1, max_slots=1, timeout=0) as pool:
        assert values(send(pool, 1)) == {1}
        out = torch.zeros(COLUMN.nbytes(rows=1000), dtype=torch.uint8, device="cuda:1")
        record = pool._device.record

        def fails_once(event: Any, stream: Any) -> None:
            pool._device.record = record  # type: ignore[method-assign]
            raise RuntimeError("injected: no event")

        stream = torch.cuda.Stream(1)
        torch.cuda.synchronize(1)
        with torch.cuda.device(0), held_stream():
            gate = torch.cuda.Event()
            gate.record()
            stream.wait_event(gate)  # holds cuda:1's stream as long as cuda:0's is held
            with torch.cuda.stream(stream), torch.cuda.device(current):
                pool._device.record = fails_once  # type: ignore[method-assign]
                with pytest.raises(RuntimeError, match="injected: no event"):
                    send(pool, 2, out=out)
                for _ in range(2):
                    with pytest.raises(PoolExhausted):
                        send(pool, 3)
        stream.synchronize()
        assert values(out[: 8 * 1000].view(torch.int64)) == {2}
        assert values(send(pool, 4)) == {4}


def test_the_stream_is_that_of_the_pool_s_device_not_of_the_current_one() -> None:
    """B70: with device 0 current: the current stream of device 1, and a named one; device 0's is not used."""
    with torch.cuda.device(0), StagingPool("cuda:1", slots=2) as pool:
        assert values(send(pool, 1)) == {1}
        named = torch.cuda.Stream(1)
        with torch.cuda.stream(named), torch.cuda.device(0):
            column = send(pool, 2)
        named.synchronize()
        assert values(column) == {2}
        with torch.cuda.stream(torch.cuda.Stream(0)):  # a stream of the other device is not where the copy goes
            assert values(send(pool, 3)) == {3}
        with pool.lease(COLUMN, rows=1000) as lease:
            lease["column"], lease["half"] = 4, 2
            upload = lease.upload()
        reader = torch.cuda.Stream(1)
        upload.wait(reader)
        with torch.cuda.stream(reader):
            read = upload["column"].clone()
        reader.synchronize()
        assert values(read) == {4}
        assert pool.stats().slots == 2


def test_default_streams_of_two_devices_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """B70: their raw handles are the same; a reader on the other device's has to wait for the copy, our own has not."""
    waits: list[Any] = []
    monkeypatch.setattr(CudaDevice, "wait", lambda self, stream, event: waits.append(stream))
    with StagingPool("cuda:0", slots=2) as pool, pool.lease(COLUMN, rows=1000) as lease:
        lease["column"], lease["half"] = 4, 2
        upload = lease.upload()
        upload.wait(torch.cuda.default_stream(0))
        assert waits == []
        upload.wait(torch.cuda.default_stream(1))
        assert waits == [torch.cuda.default_stream(1)]


def test_a_destination_on_another_device_is_refused_by_name() -> None:
    """B70: naming both devices, with the slot kept safe."""
    with StagingPool("cuda:1", slots=1, max_slots=1) as pool:
        wrong = torch.zeros(COLUMN.nbytes(rows=1000), dtype=torch.uint8, device="cuda:0")
        with pytest.raises(FieldError, match=r"is on cuda:0, the pool uploads to cuda:1"):
            send(pool, 1, out=wrong)
        assert values(send(pool, 2)) == {2}


def test_every_call_leaves_the_current_device_as_it_was() -> None:
    """B71: making, leasing, uploading, waiting, warming, closing."""
    with torch.cuda.device(0):
        pool = StagingPool("cuda:1", slots=2)
        assert torch.cuda.current_device() == 0
        pool.warm()
        assert torch.cuda.current_device() == 0
        with pool.lease(COLUMN, rows=10) as lease:
            lease["column"], lease["half"] = 1, 1
            lease.upload().wait(torch.cuda.Stream(1))
        assert torch.cuda.current_device() == 0
        pool.close()
        assert torch.cuda.current_device() == 0


WORKER = """
import sys
import torch
from staging import Field, Layout, StagingPool

layout = Layout([Field("column", torch.int64)])
torch.cuda.set_device(0)
sys.stdin.readline()  # all start together
pool = StagingPool(f"cuda:{sys.argv[1]}", slots=2, max_slots=2)
for step in range(1000):
    with pool.lease(layout, rows=100) as lease:
        lease["column"] = step
        column = lease.upload()["column"]
    if step % 100 == 0:
        assert set(column.tolist()) == {step}
assert torch.cuda.current_device() == 0
pool.close()
"""


def test_processes_on_two_devices_do_not_hang() -> None:
    """B71: four processes, device 0 current in all, pools on both, started together: each ends within a minute."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(number % 2)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for number in range(4)
    ]
    try:
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            _, errors = worker.communicate(timeout=60)
            assert worker.returncode == 0, errors[-2000:]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_prefix_on_another_device_is_refused() -> None:
    """B116: the kernel would read it by its pointer; request and devices are named, and nothing is uploaded."""
    prefix = torch.arange(3, device="cuda:0")
    batch = ScheduleBatch([Request("far", SamplingParams(), prefix, 2, 0)], "cuda:1")
    table = torch.full((1, 8), -1, dtype=torch.int32, device="cuda:1")
    with StagingPool("cuda:1", slots=1) as pool:
        with pytest.raises(CacheIndexError, match=r"'far': prefix_indices is on cuda:0, the batch on cuda:1"):
            write_cache_indices(batch, table, torch.arange(2, device="cuda:1"), pool)
        assert pool.stats().uploads == 0
    assert table.tolist() == [[-1] * 8]


@pytest.mark.parametrize("named", ["req_to_token", "out_cache_loc"])
def test_a_table_on_another_device_is_refused(named: str) -> None:
    """B116: the kernel would write there by its pointer; all three devices are named, and nothing is uploaded."""
    where = {"req_to_token": "cuda:1", "out_cache_loc": "cuda:1", named: "cuda:0"}
    table = torch.full((1, 8), -1, dtype=torch.int32, device=where["req_to_token"])
    fresh = torch.arange(2, device=where["out_cache_loc"])
    batch = ScheduleBatch([Request("far", SamplingParams(), None, 2, 0)], "cuda:1")
    with StagingPool("cuda:1", slots=1) as pool:
        with pytest.raises(CacheIndexError, match=rf"the batch is on cuda:1, .*{named} on cuda:0"):
            write_cache_indices(batch, table, fresh, pool)
        assert pool.stats().uploads == 0
    assert table.tolist() == [[-1] * 8]
