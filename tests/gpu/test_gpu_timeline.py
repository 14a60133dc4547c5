"""The timeline of a replay on a real device: its spans lie where the host saw them, and marks make nobody wait."""

from __future__ import annotations

import json
from statistics import median

import torch

from batching.replay.observe import ObservedPool, ObservedScheduler
from batching.replay.scheduler import Settings
from batching.replay.timeline import DEVICE, HOST, SLOTS, Timeline
from batching.replay.trace import builtin_trace
from staging import Field, Layout
from staging._device import open_device
from tests.replay.test_timeline import Run, assert_valid, by_upload, nanoseconds


def test_copies_lie_between_their_upload_and_the_time_their_slot_was_seen_done(tmp_path):
    """Device times fit host times within the error that the file states; too few slots show as the waits counted."""
    path = tmp_path / "timeline.json"
    # A forward far slower than the host, so that several iterations are really queued.
    settings = Settings(ahead=4, forward_us=15_000.0)
    with Timeline(path, open_device("cuda")) as timeline, ObservedPool(timeline, slots=1, max_slots=2) as pool:
        result = ObservedScheduler(timeline, builtin_trace(40), pool, settings).run()
        stats = pool.stats()
    assert sum(result.mismatches.values()) == 0
    document = json.loads(path.read_text())
    assert_valid(document)
    run = Run(document, stats, result)

    clock = document["otherData"]["device_clock"]
    assert clock["error_us"] < 5000  # a third of a forward, on a machine that does other things as well
    error = clock["error_us"] * 1e3 + 5_000
    uploads = by_upload(run.spans(HOST, "upload"))
    copies = by_upload(run.spans(DEVICE, "copy"))
    in_flight = by_upload(run.spans(SLOTS, "in flight"))
    assert set(uploads) == set(copies) == set(in_flight)
    for number, copy in copies.items():
        begin, end = nanoseconds(copy)
        assert begin >= nanoseconds(uploads[number])[0] - error
        assert end <= nanoseconds(in_flight[number])[1] + error
    assert any(nanoseconds(copies[number])[0] > nanoseconds(uploads[number])[1] for number in copies), "none was late"

    assert len(run.spans(DEVICE, "kernel")) == result.prefill_steps
    forwards = run.spans(DEVICE, "forward")
    assert len(forwards) == result.prefill_steps + result.decode_steps
    assert median(forward["dur"] for forward in forwards) > settings.forward_us / 2
    # Two leases at most are taken before the first iteration, and the ring has room for two.
    assert len(run.spans(HOST, "wait")) == stats.leases_waited > 0
    assert sum(lease["args"]["met_in_flight"] for lease in run.spans(HOST, "lease")) >= stats.met_in_flight - 2


def test_a_mark_does_not_wait_for_the_device(tmp_path, held_stream):
    """Leases, uploads and marks go on while the stream stands still; `held_stream` sees it if one of them waited."""
    path = tmp_path / "timeline.json"
    layout = Layout([Field("a", torch.int64)])
    with Timeline(path, open_device("cuda")) as timeline, ObservedPool(timeline, slots=4) as pool:
        pool.warm()
        timeline.iteration(4, 0, 0)
        with held_stream():
            for number in range(3):
                with pool.lease(layout, rows=1) as lease:
                    lease["a"] = [number]
                    upload = lease.upload()
                timeline.on_device("forward", upload["a"].add, 1)
    document = json.loads(path.read_text())
    assert_valid(document)
    assert len(Run(document, None, None).spans(DEVICE)) == 6
