"""What observing a pool costs: the same uploads counted only, with statistics read, scraped, and in a timeline.

Also where the time of one upload goes, part by part.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from batching.bench.batches import COLUMNS, Batch, all_new, flags_of, records
from batching.bench.strategies import Contender, Ours, Tensors
from batching.bench.timing import SETTLE_EVERY, Machine, NoCollection, rounds
from batching.replay.observe import ObservedPool
from batching.replay.timeline import Timeline
from staging import StagingPool
from staging._device import open_device

COUNTED = "counted, as always"
READ = "statistics read after each batch"
SCRAPED = "scraped 100 times a second"
TIMELINE = "in a timeline"

_SCRAPE_EVERY_S = 0.01


class Read(Ours):
    """Statistics are read after every batch, as no scheduler would."""

    def by_records(self, batch: Batch) -> Tensors:
        tensors = super().by_records(batch)
        self.pool.stats()
        return tensors


class Scraped(Ours):
    """Another thread collects the pool's metrics and writes them out, for as long as batches are built."""

    def __init__(self, pool: StagingPool, fixed_rows: int) -> None:
        super().__init__(pool, fixed_rows)
        self.building = False

    def by_records(self, batch: Batch) -> Tensors:
        self.building = True
        return super().by_records(batch)

    @contextmanager
    def scraper(self) -> Iterator[None]:
        """The thread, while the block runs. Raises ImportError without the client (extra `metrics`)."""
        from prometheus_client import CollectorRegistry, generate_latest

        from staging.metrics import PoolCollector

        registry = CollectorRegistry()
        registry.register(PoolCollector(self.pool))
        over = threading.Event()

        def scrape() -> None:
            while not over.wait(_SCRAPE_EVERY_S):
                if self.building:  # not beside the others
                    self.building = False
                    generate_latest(registry)

        thread = threading.Thread(target=scrape, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def contenders(device: torch.device, rows: int, seed: int) -> Iterator[list[Contender]]:
    """Ours to a fixed destination, by records: the cheapest upload there is, so that the difference shows most."""
    batches = all_new(rows, seed)
    with ExitStack() as stack:
        pools = [stack.enter_context(StagingPool(device, name=f"bench observing {part}")) for part in range(3)]
        scraped = Scraped(pools[2], rows)
        ways: list[tuple[str, Ours]] = [(COUNTED, Ours(pools[0], rows)), (READ, Read(pools[1], rows))]
        try:
            stack.enter_context(scraped.scraper())
            ways.append((SCRAPED, scraped))
        except ImportError:
            pass  # the report has a row less
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        timeline = stack.enter_context(Timeline(folder / "timeline.json", open_device(device)))
        observed = stack.enter_context(ObservedPool(timeline, name="bench observing timeline"))
        timeline.iteration(observed.max_slots, 0, 0)
        ways.append((TIMELINE, Ours(observed, rows)))
        for _, way in ways:
            way.pool.warm()
        yield [Contender(name, way.by_records, batches, 1, owned=False, pool=way.pool) for name, way in ways]


def parts(
    machine: Machine, pool: StagingPool, rows: int, seed: int, repeats: int, count: int
) -> dict[str, list[float]]:
    """Host microseconds of each part of one upload to a fixed destination by records; a median for each repeat, of the
    means of rounds, so that each has its share of the questions.

    Each part has the cost of reading the clock in it, which is measured beside them.
    """
    batches = all_new(rows, seed)
    out = pool.destination(COLUMNS, rows=rows)
    clock = time.perf_counter_ns
    found: dict[str, list[float]] = {}
    with NoCollection():
        for _ in range(repeats):
            times: dict[str, list[int]] = {}
            for number in range(count):
                batch = batches[number % len(batches)]
                marks = [clock()]
                marks.append(clock())
                joined = records(batch.requests)
                marks.append(clock())
                lease = pool.lease(COLUMNS, rows=rows)
                marks.append(clock())
                with lease:
                    marks.append(clock())
                    lease.write_records(joined)
                    marks.append(clock())
                    lease.upload(out)
                    marks.append(clock())
                marks.append(clock())
                flags_of(batch)
                marks.append(clock())
                for name, begin, end in zip(_PARTS, marks, marks[1:], strict=False):
                    times.setdefault(name, []).append(end - begin)
                if number % SETTLE_EVERY == SETTLE_EVERY - 1:
                    machine.settle()
            machine.settle()
            # Loops of their own: in that above these leases would take the questions of the batches.
            for name, every in ((CONDUCTING, 1), (COLD, SETTLE_EVERY)):
                for number in range(count):
                    if number % every == 0:
                        start = clock()
                        pool.lease(COLUMNS, rows=rows).discard()
                        times.setdefault(name, []).append(clock() - start)
                    with pool.lease(COLUMNS, rows=rows) as lease:
                        lease.write_records(joined)
                        lease.upload(out)
                    if number % SETTLE_EVERY == SETTLE_EVERY - 1:
                        machine.settle()
            machine.settle()
            for _ in range(count):
                start = clock()
                pool.lease(COLUMNS, rows=rows).discard()
                times.setdefault(FREE_SLOT, []).append(clock() - start)
            for name, taken in times.items():
                found.setdefault(name, []).append(statistics.median(taken if name == COLD else rounds(taken)) / 1e3)
    return found


CLOCK = "reading the clock"
CONDUCTING = "conducting alone: a lease and its discard, before each batch, with its share of the questions"
COLD = "the same right after the host has waited, before four batches"
FREE_SLOT = "the same with a slot that is free, many in a row"

_PARTS = (
    CLOCK,
    "joining the records",
    "lease: the capture check, the lock, its share of the questions, the slot reserved",
    "entering the block",
    "writing the records",
    "upload: the destination, the copy, the event, the books",
    "leaving the block",
    "the flags",
)
