"""Many threads at once: host time of a batch by its last percentiles, and what was pinned after the warm-up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch

from batching.bench.batches import all_new, differences, expected_columns
from batching.bench.strategies import FRESH_PINNED, OURS_COLUMNS, OURS_RECORDS, Build, FreshPinned, Ours
from batching.bench.timing import SETTLE_EVERY, NoCollection
from staging import StagingPool

_ROWS = 16
_WARM_PART = 10


@attrs.frozen
class Threaded:
    """What one way cost all threads together."""

    batches: int
    """Counted: those after the warm-up."""
    percentiles_us: dict[str, float]
    """Host time of one batch: median, p99, p99.9 and the longest."""
    pinned_allocations: int | None
    """Host allocations of torch's pinned allocator after the warm-up; None where it does not count them."""
    wrong: list[str]
    """What the last batch of a thread had wrong."""


def ways(device: torch.device, pool: StagingPool) -> dict[str, Build]:
    """By the names of the tables."""
    ours = Ours(pool)
    return {
        FRESH_PINNED: FreshPinned(device).build,
        OURS_COLUMNS: ours.by_columns,
        OURS_RECORDS: ours.by_records,
    }


@contextmanager
def threads_pool(device: str | torch.device, threads: int) -> Iterator[StagingPool]:
    """As deep as so many threads need, each with a few batches in flight; all of it made before."""
    with StagingPool(device, slots=threads * (SETTLE_EVERY + 1), name="bench threads") as pool:
        pool.warm()
        yield pool


def run(device: torch.device, build: Build, threads: int, batches: int, seed: int) -> Threaded:
    """`threads` threads, each on a stream of its own, build `batches` batches of 16 rows; the first tenth warms up."""
    warm = max(1, batches // _WARM_PART)
    times = np.zeros((threads, batches), np.int64)
    wrong: list[str] = []
    allocated: list[int | None] = []
    # The action runs in one of them while the others wait.
    all_warm = threading.Barrier(threads, lambda: allocated.append(pinned_allocations(device)))

    def work(number: int) -> None:
        turn = all_new(_ROWS, seed + 2 * number)
        clock = time.perf_counter_ns
        new_stream: Any = torch.cuda.Stream  # torch has no types for it
        stream = new_stream(device) if device.type == "cuda" else None
        settle: Callable[[], Any] = (lambda: None) if stream is None else stream.synchronize
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for step in range(batches):
                if step == warm:
                    all_warm.wait()
                batch = turn[step % len(turn)]
                start = clock()
                tensors = build(batch)
                times[number, step] = clock() - start
                if step % SETTLE_EVERY == SETTLE_EVERY - 1:
                    settle()
            settle()
            wrong.extend(differences(tensors, expected_columns(batch.requests), device))

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")
            all_warm.abort()

    with NoCollection():
        workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    allocated.append(pinned_allocations(device))
    first, last = allocated[0], allocated[-1]
    counted = times[:, warm:].ravel() / 1e3
    return Threaded(
        batches=counted.size,
        percentiles_us={
            "median": float(np.percentile(counted, 50)),
            "p99": float(np.percentile(counted, 99)),
            "p99.9": float(np.percentile(counted, 99.9)),
            "max": float(counted.max()),
        },
        pinned_allocations=None if first is None or last is None else last - first,
        wrong=wrong,
    )


def pinned_allocations(device: torch.device) -> int | None:
    """Calls of the driver by torch's pinned allocator so far."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))
