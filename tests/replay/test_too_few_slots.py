"""A replay with too few slots, in which statistics, metrics, timeline, advice and table agree; and one with enough.

The device is simulated: one stream, on which a copy runs when what was queued before it has run, and a forward takes
5 ms of the device's clock. That clock moves when the host waits, for a slot or for tokens, and only then. So the
numbers are the same on every machine, and docs/replay.md prints them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import deque
from pathlib import Path
from typing import Any

import attrs
import pytest

from batching.arguments import duration
from batching.replay.command import report
from batching.replay.observe import ObservedPool, ObservedScheduler
from batching.replay.scheduler import Result, Settings
from batching.replay.serve import MetricsServer
from batching.replay.timeline import HOST, SLOTS, Timeline
from batching.replay.trace import builtin_trace
from staging import PoolStats
from staging.metrics import WAIT
from staging.stats import WAIT_BUCKETS
from staging.testing import SimulatedDevice
from tests.replay.test_metrics_port import Samples, scrape, value
from tests.replay.test_timeline import assert_valid, nanoseconds, within

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
FORWARD_NS = 5_000_000
Span = dict[str, Any]


class Stream(SimulatedDevice):
    """A device that does one thing after the other, by a clock that moves when the host waits."""

    def __init__(self) -> None:
        super().__init__(on_sleep=lambda device: self.catch_up())
        self._busy_until = 0
        self._due: deque[tuple[int, Any]] = deque()

    def copy(self, *arguments: Any) -> None:
        super().copy(*arguments)
        self._due.append((max(self._busy_until, self.time_ns), self.copies[-1]))

    def done(self, event: Any) -> bool:
        self.catch_up()
        return super().done(event)

    def forward(self) -> int:
        """Queue one; returns when it will have run."""
        self._busy_until = max(self._busy_until, self.time_ns) + FORWARD_NS
        return self._busy_until

    def wait_until(self, time_ns: int) -> None:
        """The host waits."""
        self.time_ns = max(self.time_ns, time_ns)
        self.catch_up()

    def catch_up(self) -> None:
        """Run what is due by now."""
        while self._due and self._due[0][0] <= self.time_ns:
            self.finish(self._due.popleft()[1])


class Overlapped(ObservedScheduler):
    """Its forwards run on the stream, and reading their tokens waits for them."""

    def __init__(self, stream: Stream, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stream = stream
        self._ends: deque[int] = deque()

    def _model(self, *arguments: Any) -> Any:
        self._ends.append(self._stream.forward())
        return super()._model(*arguments)

    def _read(self, queued: list[Any]) -> int:
        for _ in queued:
            self._stream.wait_until(self._ends.popleft())
        return super()._read(queued)


@attrs.frozen
class Story:
    """One replay, told by everybody."""

    stats: PoolStats
    metrics: Samples
    waits: list[Span]
    leases: list[Span]
    in_flight: list[Span]
    counts: list[Span]
    table: str
    result: Result

    @property
    def waited_ns(self) -> int:
        """By the timeline."""
        return sum(end - begin for begin, end in map(nanoseconds, self.waits))

    def lines(self) -> list[str]:
        """For the docs."""
        stats, waited = self.stats, value(self.metrics, "staging_leases_total", outcome="waited")
        return [
            f"slots {stats.slots}",
            f"  statistics  {stats.leases_waited} of {stats.leases} leases waited, {stats.wait_ns / 1e6:.3f} ms in all",
            f'  metrics     staging_leases_total{{outcome="waited"}} {waited:g}, {WAIT}_sum '
            f"{value(self.metrics, f'{WAIT}_sum'):g}",
            f"  timeline    {len(self.waits)} waits, {self.waited_ns / 1e6:.3f} ms in all",
            *textwrap.wrap(f"advice      {stats.advice()}", 110, initial_indent="  ", subsequent_indent=" " * 14),
        ]


def replay(path: Path, slots: int) -> Story:
    """Forty requests, two iterations ahead, on a ring of so many slots that may not grow."""
    device = Stream()
    with (
        MetricsServer(0) as server,
        Timeline(path, device) as timeline,
        ObservedPool(timeline, slots=slots, max_slots=slots, name="replay") as pool,
    ):
        server.show(pool)
        result = Overlapped(device, timeline, builtin_trace(40), pool, Settings(ahead=2)).run()
        stats, metrics = pool.stats(), scrape(server.address)
        table = report("built-in trace", pool, result, stats, 0)
        device.wait_until(device.forward())
    document = json.loads(path.read_text())
    assert_valid(document)
    assert device.violations == []
    assert result.mismatches is not None
    assert sum(result.mismatches.values()) == 0
    events = document["traceEvents"]
    return Story(
        stats,
        metrics,
        waits=[event for event in events if event["name"] == "wait"],
        leases=[event for event in events if event["name"] == "lease"],
        in_flight=[event for event in events if event["name"] == "in flight"],
        counts=[event for event in events if event["ph"] == "C" and event["pid"] == SLOTS],
        table=table,
        result=result,
    )


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Story]:
    """By slots."""
    folder = tmp_path_factory.mktemp("stories")
    return {slots: replay(folder / f"{slots}.json", slots) for slots in (2, 4, 5)}


@pytest.mark.parametrize("slots", [2, 4, 5])
def test_everybody_tells_the_same_waits(stories, slots):
    """Their number, their time to the nanosecond, the longest, the histogram: statistics, metrics, timeline, advice and
    table."""
    story = stories[slots]
    stats, metrics, waits = story.stats, story.metrics, story.waits
    took = [end - begin for begin, end in map(nanoseconds, waits)]
    assert len(took) == stats.leases_waited == stats.waits == value(metrics, f"{WAIT}_count")
    assert len(took) == value(metrics, "staging_leases_total", outcome="waited")
    assert sum(took) == stats.wait_ns
    assert sum(took) / 1e9 == value(metrics, f"{WAIT}_sum")
    assert max(took, default=0) == stats.wait_ns_max
    assert max(took, default=0) / 1e9 == value(metrics, "staging_wait_peak_seconds")
    for bound in WAIT_BUCKETS.values():
        assert value(metrics, f"{WAIT}_bucket", le=repr(bound / 1e9)) == sum(one <= bound for one in took)
    assert sum(lease["args"]["met_in_flight"] for lease in story.leases) == stats.met_in_flight
    assert stats.met_in_flight == value(metrics, "staging_met_in_flight_total")
    advice = stats.advice()
    assert advice.suggested_slots == value(metrics, "staging_suggested_slots")
    if took:
        assert str(advice).startswith(f"{len(took)} leases waited, {sum(took) / 1e6:.3f} ms in all")
        told = f"waits {{22}}{len(took)}, {duration(sum(took))} in all, {duration(max(took))} the longest"
        assert f"build the pool with slots={advice.suggested_slots}" in " ".join(story.table.split())
    else:
        assert str(advice) == f"every lease found a slot in a ring of {slots}"
        told = "waits {22}none"
    assert re.search(rf"^{told}", story.table, re.MULTILINE), story.table


@pytest.mark.parametrize("slots", [2, 4])
def test_the_timeline_shows_what_was_waited_for(stories, slots):
    """In each wait no slot is free, and it ends when the slot that was handed out has been seen to leave its flight."""
    story = stories[slots]
    assert story.waits
    for wait in story.waits:
        begin, end = nanoseconds(wait)
        (lease,) = (lease for lease in story.leases if within(wait, lease))
        assert begin < end
        assert lease["pid"] == HOST
        ended = [nanoseconds(span)[1] for span in story.in_flight if span["tid"] == lease["args"]["slot"] + 1]
        assert end in ended
        during = [count["args"]["free"] for count in story.counts if begin <= round(count["ts"] * 1e3) < end]
        before = [count["args"]["free"] for count in story.counts if round(count["ts"] * 1e3) <= begin]
        assert set(during[:-1] + before[-1:]) <= {0}


def test_the_advice_leads_from_too_few_slots_to_enough(stories):
    """Followed twice, it is right: fewer leases wait each time, then none; and it is not more than was needed."""
    assert stories[2].stats.suggested_slots == 4
    assert str(stories[2].stats.advice()).endswith("this is a guess")
    assert stories[4].stats.suggested_slots == 5
    assert str(stories[4].stats.advice()).endswith("build the pool with slots=5")
    assert stories[2].stats.leases_waited > stories[4].stats.leases_waited > stories[5].stats.leases_waited == 0


def test_with_enough_slots_nobody_has_anything_to_tell(stories):
    """No wait, no slot met in flight; and the same batches as with too few."""
    enough, few = stories[5], stories[2]
    assert enough.waits == []
    assert (enough.stats.wait_ns, enough.stats.met_in_flight, enough.stats.depth_needed) == (0, 0, 0)
    assert value(enough.metrics, f"{WAIT}_count") == value(enough.metrics, "staging_depth_needed_slots") == 0

    def counts(result: Result) -> dict[str, Any]:
        return {name: number for name, number in attrs.asdict(result).items() if not name.endswith("_ns")}

    assert counts(enough.result) == counts(few.result)


def test_the_docs_print_this_very_story(stories):
    """docs/replay.md has the text, to the letter."""
    told = "\n".join(line for story in stories.values() for line in story.lines())
    assert f"```text\n{told}\n```" in PAGE.read_text(encoding="utf-8"), told
