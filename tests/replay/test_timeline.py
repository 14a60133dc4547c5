"""The timeline of a replay, read back: valid events, and the same story as the pool's own statistics."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from batching import cache
from batching.__main__ import main
from batching.replay import command
from batching.replay.observe import ObservedDevice, ObservedPool, ObservedScheduler
from batching.replay.scheduler import Scheduler, Settings
from batching.replay.timeline import DEVICE, HOST, SLOTS, CudaMarks, Timeline, TimelineError
from batching.replay.trace import builtin_trace
from staging import Field, Layout, PoolExhausted, StagingPool
from staging._device import CpuDevice, Device
from staging.testing import SimulatedDevice, SimulatedEvent

ROW = Layout([Field("a", torch.int64)])


class LateDevice(CpuDevice):
    """A CPU whose copies seem to run until they were asked about so many times."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def new_event(self):
        return Counter()

    def record(self, event, stream):
        event["left"] = self.polls

    def done(self, event):
        event["left"] -= 1
        return event["left"] < 0


@attrs.frozen
class Run:
    document: dict[str, Any]
    stats: Any
    result: Any

    def spans(self, pid: int, name: str | None = None) -> list[dict[str, Any]]:
        events = [event for event in self.document["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]
        return [event for event in events if name in (None, event["name"])]

    def counts(self, pid: int) -> list[dict[str, Any]]:
        return [event for event in self.document["traceEvents"] if event["ph"] == "C" and event["pid"] == pid]


def replay(path: Path, device: Device | None = None, *, requests=40, slots=4, max_slots=None, steps=2000, **settings):
    """A replay with a timeline, of the built-in trace on the CPU, and the timeline read back and found valid."""
    with Timeline(path, device or CpuDevice(), steps) as timeline:
        with ObservedPool(timeline, slots=slots, max_slots=max_slots) as pool:
            result = ObservedScheduler(timeline, builtin_trace(requests), pool, Settings(**settings)).run()
            stats = pool.stats()
        if isinstance(device, SimulatedDevice):
            device.finish_all()
    document = json.loads(path.read_text())
    assert timeline.events == len(document["traceEvents"])
    assert_valid(document)
    return Run(document, stats, result)


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    begin = round(event["ts"] * 1e3)
    return begin, begin + round(event["dur"] * 1e3)


def assert_valid(document: dict[str, Any]) -> None:
    """What a viewer needs: the keys of each kind, no negative time, spans that nest, slots in one state at a time."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] == "ns"
    names: dict[tuple[int, int], str] = {}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name", "args"} <= set(event)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"].endswith("_name"):
                names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(nanoseconds(event))
        else:
            assert event["ph"] == "C"
            assert all(type(value) is int and value >= 0 for value in event["args"].values()), event
    assert set(tracks) <= set(names), "each track has a name"
    assert {names[pid, 0] for pid in (HOST, SLOTS)} == {"host", "slots"}
    assert names[DEVICE, 0].startswith("device ")
    for (pid, tid), spans in tracks.items():
        if pid == HOST:
            assert_nested(spans)
        else:  # a stream does one thing after the other; a slot is in one state at a time
            ordered = sorted(spans)
            for (_, end), (begin, _) in itertools.pairwise(ordered):
                assert end <= begin, (pid, tid)
        if pid == SLOTS:
            assert names[pid, tid] == f"slot {tid - 1}"


def assert_nested(spans: list[tuple[int, int]]) -> None:
    """Of two spans of one track one lies in the other, or they do not touch."""
    open_ends: list[int] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "two spans overlap"
        open_ends.append(end)


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return nanoseconds(outer)[0] <= nanoseconds(inner)[0] and nanoseconds(inner)[1] <= nanoseconds(outer)[1]


def by_upload(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found = {event["args"]["upload"]: event for event in events}
    assert len(found) == len(events), "each upload has one"
    return found


def test_every_upload_step_and_forward_is_in_the_timeline(tmp_path):
    """As many events as pool and scheduler counted, less the warm-up, which comes before the first iteration."""
    run = replay(tmp_path / "timeline.json")
    stats, result = run.stats, run.result
    host = Counter(event["name"] for event in run.spans(HOST))
    assert host["upload"] == stats.uploads - 5  # one from each slot, and the batch that compiles the kernel
    assert host["lease"] == stats.leases - 5
    assert host["fill"] == host["lease"]
    assert host["empty upload"] == stats.leases_empty
    assert (host["prefill"], host["decode"], host["filter"]) == (
        result.prefill_steps, result.decode_steps, result.filters,
    )  # fmt: skip
    assert host["read tokens"] > 0
    assert set(host) == {
        "lease", "fill", "upload", "empty upload", "prefill", "decode", "filter", "read tokens",
    }  # fmt: skip
    on_device = Counter(event["name"] for event in run.spans(DEVICE))
    assert on_device["copy"] == host["upload"]
    assert on_device["kernel"] == result.prefill_steps
    assert on_device["forward"] == result.prefill_steps + result.decode_steps
    states = Counter(event["name"] for event in run.spans(SLOTS))
    assert states == {"filling": host["upload"], "in flight": host["upload"]}
    assert len({event["tid"] for event in run.spans(SLOTS)}) == stats.slots
    assert sum(event["args"]["bytes"] for event in run.spans(HOST, "upload")) == (
        stats.bytes_used + stats.bytes_padded - warm_up_bytes()
    )


def warm_up_bytes() -> int:
    """What a pool of four slots sends before the first iteration."""
    with StagingPool("cpu") as pool:
        cache.warm(pool)
        return pool.stats().bytes_used + pool.stats().bytes_padded


def test_lease_fill_upload_copy_and_slot_fit_together(tmp_path):
    """One upload's spans, found by its number: filling ends where in flight begins, and in flight covers the copy."""
    run = replay(tmp_path / "timeline.json")
    uploads = by_upload(run.spans(HOST, "upload"))
    copies = by_upload(run.spans(DEVICE, "copy"))
    in_flight = by_upload(run.spans(SLOTS, "in flight"))
    assert set(uploads) == set(copies) == set(in_flight) == set(range(1, len(uploads) + 1))
    filling = {(event["tid"], nanoseconds(event)[1]): event for event in run.spans(SLOTS, "filling")}
    fills = {nanoseconds(event) for event in run.spans(HOST, "fill")}
    leases = {nanoseconds(event)[1]: event for event in run.spans(HOST, "lease")}
    for number, upload in uploads.items():
        slot = upload["args"]["slot"]
        assert in_flight[number]["tid"] == slot + 1
        assert within(copies[number], upload)
        assert within(copies[number], in_flight[number])
        assert nanoseconds(in_flight[number])[0] == nanoseconds(upload)[0]
        filled = filling[slot + 1, nanoseconds(upload)[0]]
        assert nanoseconds(filled) in fills
        assert leases[nanoseconds(filled)[0]]["args"]["slot"] == slot
        assert copies[number]["args"]["bytes"] == upload["args"]["bytes"] == filled["args"]["bytes"]


@pytest.mark.parametrize("late", [0, 2])
def test_the_counters_say_what_the_slot_tracks_show(tmp_path, late):
    """At every change: as many slots filling and in flight as spans cover that time, the rest free."""
    run = replay(tmp_path / "timeline.json", LateDevice(late), requests=15, slots=2, max_slots=3)
    spans = [(event["name"], *nanoseconds(event)) for event in run.spans(SLOTS)]
    counts = run.counts(SLOTS)
    assert len(counts) > 10
    for event in counts:
        at = round(event["ts"] * 1e3)
        covering = Counter(name for name, begin, end in spans if begin <= at < end)
        assert event["args"]["filling"] == covering["filling"]
        assert event["args"]["in flight"] == covering["in flight"]
        assert sum(event["args"].values()) in (2, 3)
    assert sum(counts[-1]["args"].values()) == run.stats.slots
    assert max(event["args"]["in flight"] for event in counts) <= run.stats.in_flight_peak
    queue = run.counts(HOST)
    assert len(queue) == run.document["otherData"]["iterations"]
    assert queue[0]["args"] == {"waiting": 15, "running": 0}
    assert queue[-1]["args"] == {"waiting": 0, "running": 0}


def test_too_few_slots_show_as_waits_that_the_statistics_count_too(tmp_path):
    """Waits, their time, the slots met in flight and the growth: timeline and statistics tell the same story."""
    run = replay(tmp_path / "timeline.json", LateDevice(4), requests=15, slots=1, max_slots=2)
    stats = run.stats
    waits, leases = run.spans(HOST, "wait"), run.spans(HOST, "lease")
    # The warm-up leases too, before the timeline begins: what it counted is had from a pool that only warmed up.
    with StagingPool(LateDevice(4), slots=1, max_slots=2) as pool:
        cache.warm(pool)
        before = pool.stats()
    assert len(waits) == stats.leases_waited - before.leases_waited > 0
    assert sum(lease["args"]["met_in_flight"] for lease in leases) == stats.met_in_flight - before.met_in_flight > 0
    assert len(run.spans(HOST, "host buffer")) == stats.leases_grown - before.leases_grown
    assert 0 < sum(wait["dur"] for wait in waits) * 1e3 <= stats.wait_ns
    assert max(wait["dur"] for wait in waits) * 1e3 <= stats.wait_ns_max
    for wait in waits:
        assert wait["args"]["pauses"] >= 1
        assert sum(within(wait, lease) for lease in leases) == 1, "each wait lies in its lease"


def test_the_wait_of_the_timeline_is_the_wait_of_the_statistics_to_the_nanosecond(tmp_path):
    """On a simulated clock, which only moves in pauses; of three, one sees a copy finish."""

    def finish_now_and_then(device):
        if device.copies and device.calls["sleep"] % 3 == 0:
            device.finish()

    device = SimulatedDevice(on_sleep=finish_now_and_then)
    run = replay(tmp_path / "timeline.json", device, requests=15, slots=2, max_slots=2)
    with StagingPool(SimulatedDevice(on_sleep=device.on_sleep), slots=2, max_slots=2) as pool:
        cache.warm(pool)
        before = pool.stats().wait_ns
    assert round(sum(wait["dur"] for wait in run.spans(HOST, "wait")) * 1e3) == run.stats.wait_ns - before > 0
    assert max(wait["args"]["pauses"] for wait in run.spans(HOST, "wait")) == 3
    assert device.violations == []


def test_enough_slots_show_no_wait_and_no_growth(tmp_path):
    """Nor a slot met in flight, nor a new host buffer."""
    run = replay(tmp_path / "timeline.json", requests=15)
    assert run.stats.leases_waited == 0
    assert run.spans(HOST, "wait") == run.spans(HOST, "host buffer") == []
    assert all(lease["args"]["met_in_flight"] == 0 for lease in run.spans(HOST, "lease"))


def test_a_ring_that_grows_shows_the_new_buffer_and_the_new_track(tmp_path):
    """The buffer is made within a lease; the slot's track and its place in the counters follow."""
    run = replay(tmp_path / "timeline.json", LateDevice(10), requests=15, slots=1, max_slots=3)
    buffers = run.spans(HOST, "host buffer")
    assert len(buffers) >= 1
    leases = run.spans(HOST, "lease")
    assert all(any(within(buffer, lease) for lease in leases) for buffer in buffers)
    assert {event["tid"] for event in run.spans(SLOTS)} == {1, 2, 3}
    assert sum(run.counts(SLOTS)[-1]["args"].values()) == 3


def test_a_long_replay_is_recorded_for_so_many_iterations(tmp_path):
    """What is in flight at the end of the last one is followed to its end; the rest of the replay goes unseen."""
    run = replay(tmp_path / "timeline.json", LateDevice(1), steps=6)
    assert run.document["otherData"]["iterations"] == run.document["otherData"]["iterations_limit"] == 6
    assert len(run.counts(HOST)) == 6
    assert 6 <= len(run.spans(HOST, "upload")) < run.stats.uploads - 5
    assert len(run.spans(SLOTS, "in flight")) == len(run.spans(HOST, "upload"))
    assert not any("cut" in event["args"] for event in run.spans(SLOTS))
    # The counters stop with the recording: what they would say after it is only half of the truth.
    assert run.counts(SLOTS)[-1]["args"]["in flight"] > 0


def test_a_replay_with_a_timeline_does_what_it_does_without(tmp_path):
    """The same counts of scheduler and pool; only times differ."""
    run = replay(tmp_path / "timeline.json", requests=25)
    with StagingPool("cpu") as pool:
        result = Scheduler(builtin_trace(25), pool, Settings()).run()
        stats = pool.stats()

    def counts(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if "_ns" not in name}

    assert counts(attrs.asdict(run.result)) == counts(attrs.asdict(result))
    assert counts(run.stats.as_dict()) == counts(stats.as_dict())


def test_a_lease_that_is_given_up_or_fails_shows_how_it_ended(tmp_path):
    """Discarded: filled, and free again. An upload that fails, a lease that is refused: under names of their own."""
    path = tmp_path / "timeline.json"
    device = SimulatedDevice()
    waited_for = []
    device.wait = lambda stream, event: waited_for.append((stream, event))
    after = SimulatedEvent()
    with Timeline(path, device) as timeline, ObservedPool(timeline, slots=1, max_slots=1, timeout=0.001) as pool:
        timeline.iteration(1, 0, 0)
        device.time_ns += 1000
        with pool.lease(ROW, rows=2):
            device.time_ns += 1000
        with pool.lease(ROW, rows=1) as lease:
            device.time_ns += 1000
            lease["a"] = [1]
            assert (lease.nbytes, lease.layout) == (16, ROW)
            upload = lease.upload(after=after)
            upload.wait(7)
            # The device gets its own events, whoever made them.
            assert waited_for == [(0, after), (7, pool._ring.slots[0].event.inner)]
        with pytest.raises(PoolExhausted):
            pool.lease(ROW, rows=1)
        device.finish_all()
        device.time_ns += 1000
        device.fail("copy")
        with pool.lease(ROW, rows=1) as lease:
            lease["a"] = [1]
            with pytest.raises(RuntimeError, match="injected"):
                lease.upload()
    document = json.loads(path.read_text())
    assert_valid(document)
    run = Run(document, None, None)
    assert [event["args"].get("error") for event in run.spans(HOST, "lease")] == [None, None, "PoolExhausted", None]
    assert [event["args"]["error"] for event in run.spans(HOST, "failed upload")] == ["RuntimeError"]
    assert [(event["name"], event["ts"], event["dur"]) for event in run.spans(SLOTS)][:3] == [
        ("filling", 1.0, 1.0),
        ("filling", 2.0, 1.0),
        ("in flight", 3.0, pytest.approx(run.spans(SLOTS)[2]["dur"])),
    ]
    assert len(run.spans(HOST, "upload")) == len(run.spans(DEVICE, "copy")) == 1


def test_each_slot_ends_when_its_copy_was_seen_done(tmp_path):
    """Observed, each event is asked by itself: one that answered for several would leave the others without an end."""
    path = tmp_path / "timeline.json"
    device = SimulatedDevice()
    with Timeline(path, device) as timeline, ObservedPool(timeline, slots=3, max_slots=3, timeout=0) as pool:
        timeline.iteration(3, 0, 0)
        for _ in range(3):
            device.time_ns += 1000
            with pool.lease(ROW, rows=1) as lease:
                lease["a"] = [1]
                lease.upload()
        device.finish_all()
        pool._ring._reach = 3
        leases = []
        for _ in range(3):
            device.time_ns += 1000
            leases.append(pool.lease(ROW, rows=1))
        for lease in leases:
            lease.discard()
    run = Run(json.loads(path.read_text()), None, None)
    in_flight = sorted((event["ts"], event["ts"] + event["dur"]) for event in run.spans(SLOTS, "in flight"))
    assert in_flight == [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]


def test_a_replay_that_is_cut_off_leaves_the_timeline_until_then(tmp_path):
    """Slots that never come free: the last lease waits, fails, and the slots are in flight to the end."""
    path = tmp_path / "timeline.json"

    class Stuck(LateDevice):
        def record(self, event, stream):
            event["left"] = 10**9 if timeline.recording else 0

    timeline = Timeline(path, Stuck(0))
    with timeline, ObservedPool(timeline, slots=2, max_slots=2, timeout=0.02) as pool:
        scheduler = ObservedScheduler(timeline, builtin_trace(10), pool)
        with pytest.raises(PoolExhausted):
            scheduler.run()
    document = json.loads(path.read_text())
    assert_valid(document)
    run = Run(document, None, None)
    last = run.spans(HOST, "lease")[-1]
    assert last["args"]["error"] == "PoolExhausted"
    assert any(within(wait, last) for wait in run.spans(HOST, "wait"))
    assert [event["args"]["cut"] for event in run.spans(SLOTS, "in flight")] == [True, True]


def test_the_command_writes_the_timeline_and_names_it_in_the_table(tmp_path, capsys):
    """Over an older file, through a link, and with nothing else left in the folder."""
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("an older one")
    link.symlink_to(target)
    arguments = ["replay", "--device", "cpu", "--requests", "12", "--timeline", str(link), "--timeline-steps", "9"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    document = json.loads(target.read_text())
    assert_valid(document)
    assert f"timeline                   {link}: {len(document['traceEvents']):,} events of 9 iterations" in out
    assert err == ""
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
    about = document["otherData"]
    assert (about["device"], about["memory"], about["torch"]) == ("cpu", "pageable", torch.__version__)


def test_without_the_option_nothing_is_observed(tmp_path, capsys, monkeypatch):
    """A plain pool on a plain device, a plain scheduler, and the functions of the kernel as they were."""
    plain = (cache.kernel_launch, cache.write_with_torch)
    seen = []
    original = command._replay

    def spied(scheduler, *others):
        seen.append((type(scheduler), type(scheduler.pool), type(scheduler.pool._device)))
        return original(scheduler, *others)

    monkeypatch.setattr(command, "_replay", spied)
    arguments = ["replay", "--device", "cpu", "--requests", "5"]
    assert main(arguments) == 0
    assert "timeline" not in capsys.readouterr().out
    assert main([*arguments, "--timeline", str(tmp_path / "timeline.json")]) == 0
    assert seen == [(Scheduler, StagingPool, CpuDevice), (ObservedScheduler, ObservedPool, ObservedDevice)]
    assert (cache.kernel_launch, cache.write_with_torch) == plain


@pytest.mark.parametrize("place", ["nowhere/timeline.json", ".", "file/timeline.json", "pipe", "long" * 100])
def test_a_place_that_cannot_be_written_stops_the_command_before_the_replay(place, tmp_path, capsys, monkeypatch):
    """Status 2 and one line that names the place."""
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(command, "_replay", lambda *arguments: pytest.fail("it was started"))
    path = tmp_path / place
    assert main(["replay", "--device", "cpu", "--requests", "5", "--timeline", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"replay: cannot write the timeline {path}: ")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_file_that_cannot_be_finished_is_an_error_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    """The older file stays as it was, and what the replay found is told all the same."""
    path = tmp_path / "timeline.json"
    path.write_text("an older one")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["replay", "--device", "cpu", "--requests", "5", "--timeline", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "5 finished" in out
    assert err == f"replay: cannot write the timeline {path}: No space left on device\n"
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["an older one"]


def test_a_replay_that_does_not_begin_writes_no_timeline(tmp_path, capsys):
    """A bad trace: its own message, and no file."""
    path = tmp_path / "timeline.json"
    assert main(["replay", "--device", "cpu", str(tmp_path / "nowhere.csv"), "--timeline", str(path)]) == 2
    assert "nowhere.csv" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_command_tells_of_the_timeline_until_then(tmp_path, capsys, monkeypatch):
    """Status 130, and the file holds what was seen."""
    path = tmp_path / "timeline.json"

    def interrupt(self, queued):
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "_read", interrupt)
    assert main(["replay", "--device", "cpu", "--requests", "5", "--timeline", str(path)]) == 130
    assert f"the timeline until then: {path}" in capsys.readouterr().err
    assert_valid(json.loads(path.read_text()))


# The device's clock, with events of a made-up CUDA.


class FakeEvent:
    """A timing event: its time on a device's clock that runs differently, read back as CUDA gives it."""

    time_ms: float = 0.0

    def record(self, stream):
        self.time_ms = FakeCuda.device_ms()

    def synchronize(self):
        FakeCuda.host_ns += 4_000

    def elapsed_time(self, other):
        return float(torch.tensor(other.time_ms - self.time_ms, dtype=torch.float32))


class FakeCuda:
    host_ns = 0
    drift = 0.0

    @classmethod
    def device_ms(cls) -> float:
        return 123_456.0 + (cls.host_ns + 2_000) * 1e-6 * (1 + cls.drift)


@pytest.fixture
def fake_cuda(monkeypatch):
    FakeCuda.host_ns, FakeCuda.drift = 5_000_000_000, 0.0
    monkeypatch.setattr(CudaMarks, "_event", lambda self: FakeEvent())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return CudaMarks(torch.device("cuda", 0), lambda: FakeCuda.host_ns)


@pytest.mark.parametrize("drift", [0.0, 20e-6, -20e-6])
def test_the_devices_times_are_laid_beside_the_hosts(fake_cuda, drift):
    """Over an hour, with clocks that drift apart: right to the microsecond, where plain elapsed times are not."""
    FakeCuda.drift = drift
    fake_cuda.start()
    spans, expected = [], []
    for step in range(3600):
        FakeCuda.host_ns += 1_000_000_000 - (step % 7) * 100_000
        begin, at = fake_cuda.mark(), FakeCuda.host_ns + 2_000
        FakeCuda.host_ns += 5_000_000
        spans.append((begin, fake_cuda.mark()))
        expected.append(at)
    found = fake_cuda.resolve(spans)
    assert max(abs(begin - at) for (begin, _), at in zip(found, expected, strict=True)) < 1_000
    assert all(abs(end - begin - 5_000_000) < 1_000 for begin, end in found)
    about = fake_cuda.about()
    assert about["error_us"] == 2.0
    assert about["drift_ppm"] == pytest.approx(-drift * 1e6, abs=0.2)


def test_spans_of_one_stream_never_overlap_for_the_resolution_of_the_events(tmp_path):
    """Half a microsecond either way is evened out, and nothing ends before it begins."""
    path = tmp_path / "timeline.json"
    with Timeline(path, CpuDevice()) as timeline:
        timeline.iteration(1, 0, 0)
        start = timeline._start
        for name in ("copy", "kernel", "forward"):
            timeline.on_device(name, lambda: None)
        timeline._marks.resolve = lambda spans: [
            (start - 300, start + 1000), (start + 800, start + 2000), (start + 1900, start + 1950),
        ]  # fmt: skip
    run = Run(json.loads(path.read_text()), None, None)
    assert [(event["ts"], event["dur"]) for event in run.spans(DEVICE)] == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.0)]


def test_a_device_that_broke_costs_its_own_track_only(tmp_path):
    """What the host and the slots did is in the file, and why the device's spans are not."""
    path = tmp_path / "timeline.json"

    def broken(spans):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Timeline(path, CpuDevice()) as timeline:
        timeline.iteration(1, 0, 0)
        timeline.on_device("copy", lambda: None)
        timeline._marks.resolve = broken
    document = json.loads(path.read_text())
    assert "illegal memory access" in document["otherData"]["device_spans_lost"]
    assert Run(document, None, None).spans(DEVICE) == []
    assert len(Run(document, None, None).counts(HOST)) == 1


def test_a_timeline_error_names_a_loop_of_links(tmp_path):
    """Whatever the system says of the place, it is one kind of error."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(TimelineError, match="cannot write the timeline"), Timeline(tmp_path / "a", CpuDevice()):
        pytest.fail("it was opened")
