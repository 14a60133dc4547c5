"""SGLang's own prefill on a real device, with the plugin and without it: the same tensors, calls counted, host time.

Needs SGLang's wheel, as tests/sglang does. Calls and times are printed, and kept as JSON where STAGING_RESULTS says:

    STAGING_RESULTS=results python -m pytest tests/gpu/test_gpu_sglang.py tests/sglang -q
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang"))

from real_sglang import Engine, differences, first_chunk, load, plugged, pool_of, request, server, why_not

DEVICE = "cuda"
CONTEXT = 2048
SEEDS = {"enable_deterministic_inference": True}


@pytest.fixture(autouse=True, scope="module")
def with_sglang() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    load()


def chunks(engine: Engine, rows: int, *, longest: int = 1500) -> list[Any]:
    """Requests whose first chunk is in the table: each prefill after that has their prefixes."""
    prefixes = [(row * 389) % longest for row in range(rows)]
    made = [
        request(
            f"r{row}",
            prefix,
            1 + row % 7,
            temperature=0.1 + row / rows,
            top_p=1 - row / (2 * rows),
            top_k=(-1, 20, 1)[row % 3],
            min_p=(row % 2) / 8,
            sampling_seed=(None, row)[row % 2],
        )
        for row, prefix in enumerate(prefixes)
    ]
    first_chunk(engine, made, prefixes)
    return made


@contextmanager
def prepared(engine: Engine, requests: Sequence[Any]) -> Iterator[Any]:
    """A batch that is about to be prepared; afterwards its new tokens are free again."""
    batch = engine.batch(requests)
    yield batch
    engine.allocator.free(batch.out_cache_loc)


def read(engine: Engine, batch: Any) -> dict[str, Any]:
    """What a forward would read."""
    state = {name: value for name, value in vars(batch.sampling_info).items() if name != "penalizer_orchestrator"}
    of_batch = (
        "out_cache_loc",
        "req_pool_indices",
        "req_pool_indices_cpu",
        "seq_lens",
        "seq_lens_cpu",
        "orig_seq_lens",
    )
    tensors = {name: getattr(batch, name).clone() for name in of_batch}
    return {"info": state, "table": engine.table.req_to_token.clone(), "batch": tensors}


@pytest.mark.parametrize("rows", [1, 16, 257])
@pytest.mark.parametrize("features", [{}, SEEDS], ids=["no seeds", "seeds"])
def test_the_prefill_is_the_same_bit_for_bit(rows, features):
    """SGLang's kernel, compiled, with all that it reads from one pinned upload; every table entry, every column."""

    def outcome() -> dict[str, Any]:
        engine = Engine(DEVICE, rows=rows, context=CONTEXT)
        requests = chunks(engine, rows)
        with prepared(engine, requests) as batch:
            batch.prepare_for_extend()
        return read(engine, batch)

    with server(features):
        expected = outcome()
        with plugged() as feeder:
            found = outcome()
            pool = pool_of(feeder)
            assert (pool.memory, pool.stats().uploads) == ("pinned", 2 if rows > 1 else 1)
            assert feeder._noted == set()
    torch.cuda.synchronize()
    assert differences(expected, found) == []


def calls(rows: int, *, plugin: bool, features: dict[str, bool]) -> dict[str, int]:
    """What the profiler sees of one steady `prepare_for_extend`."""
    engine = Engine(DEVICE, rows=rows, context=CONTEXT)
    with server(features), plugged() if plugin else nullcontext() as feeder:
        requests = chunks(engine, rows)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        for profiled in (False, False, False, True, True):  # the profiler's own first use is not looked at
            torch.cuda.synchronize()
            own = torch.cuda.host_memory_stats()
            uploads = pool_of(feeder).stats().uploads if plugin and feeder._pools else 0
            with (
                prepared(engine, requests) as batch,
                profile(activities=activities, acc_events=True) if profiled else nullcontext() as seen,
            ):
                batch.prepare_for_extend()
            now = torch.cuda.host_memory_stats()
        if plugin:
            assert pool_of(feeder).stats().uploads - uploads == 1
    names = [event.name for event in seen.events()]
    return {
        "copies from the host": sum(name.startswith("Memcpy HtoD") for name in names),
        "of pageable memory": sum(name.startswith("Memcpy HtoD (Pageable") for name in names),
        "event records": sum(name.startswith("cudaEventRecord") for name in names),
        # The profiler synchronises the device when it stops.
        "waits": sum("Synchronize" in name and name != "cudaDeviceSynchronize" for name in names),
        "pinned blocks taken": now.get("active_requests.allocated", 0) - own.get("active_requests.allocated", 0),
        "new pinned memory": now.get("num_host_alloc", 0) - own.get("num_host_alloc", 0),
    }


@pytest.mark.parametrize(("features", "fields"), [({}, 10), (SEEDS, 11)], ids=["no seeds", "seeds"])
def test_one_copy_takes_the_place_of_one_for_each_field(features, fields, capsys):
    """Lengths, rows, pointers, columns: nothing else is uploaded; nothing waits, nothing is pinned anew."""
    own = calls(16, plugin=False, features=features)
    ours = calls(16, plugin=True, features=features)
    keep({"calls per prefill of 16": {"SGLang": own, "with the plugin": ours}}, f"sglang-calls-{fields}.json", capsys)
    assert own["copies from the host"] - ours["copies from the host"] == fields - 1
    if "active_requests.allocated" in torch.cuda.host_memory_stats():
        # Three stay: SGLang keeps rows and lengths on the host as well, pinned, and hands these out.
        assert own["pinned blocks taken"] - ours["pinned blocks taken"] == fields - 3
    assert ours["of pageable memory"] == own["of pageable memory"]
    assert ours["event records"] < own["event records"]  # torch records one for each pinned block that comes back
    assert ours["waits"] <= own["waits"]
    assert ours["new pinned memory"] == 0


def test_prefills_queued_behind_work_keep_their_own_values():
    """Seven prefills are prepared while the device is busy: none waits, and none gets another one's columns."""
    engine = Engine(DEVICE, rows=14, context=64)
    with server(SEEDS), plugged() as feeder:
        for burst in range(2):  # in the first one the ring, and torch's cache of pinned blocks, grow to what is needed
            requests = [
                request(f"{burst}-{row}", 0, 1 + row, temperature=1 + row, sampling_seed=row) for row in range(7)
            ]
            torch.cuda.synchronize()
            torch.cuda._sleep(400_000_000)  # 200 ms at 2 GHz
            worked = torch.cuda.Event()
            worked.record()
            batches = [engine.prefill([one]) for one in requests]
        assert not worked.query()
        stats = pool_of(feeder).stats()
        assert (stats.uploads, stats.leases_timed_out) == (14, 0)
    infos = [batch.sampling_info for batch in batches]
    assert [info.temperatures.item() for info in infos] == [1 + row for row in range(7)]
    assert [info.sampling_seed.item() for info in infos] == list(range(7))
    assert [batch.seq_lens.item() for batch in batches] == [1 + row for row in range(7)]
    assert [batch.req_pool_indices.item() for batch in batches] == [int(one.kv.req_pool_idx) for one in requests]


def keep(result: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Print it, and keep it where STAGING_RESULTS says."""
    text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **result}, indent=1)
    with capsys.disabled():
        print(f"\n{text}")
    folder = os.environ.get("STAGING_RESULTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(text + "\n")


def timed(engine: Engine, requests: Sequence[Any], batches: int) -> dict[str, float]:
    """Median host microseconds of `prepare_for_extend`, and of `from_schedule_batch` when it is called by itself."""
    info = load().sampling_batch_info.SamplingBatchInfo
    whole, alone = [], []
    gc.disable()
    try:
        for number in range(batches + 10):
            with prepared(engine, requests) as batch:
                start = time.perf_counter_ns()
                batch.prepare_for_extend()
                middle = time.perf_counter_ns()
                info.from_schedule_batch(batch, engine.model.vocab_size)
                end = time.perf_counter_ns()
            if number % 2:
                torch.cuda.synchronize()
            if number >= 10:
                whole.append((middle - start) / 1e3)
                alone.append((end - middle) / 1e3)
    finally:
        gc.enable()
    return {"prepare_for_extend": statistics.median(whole), "from_schedule_batch": statistics.median(alone)}


def test_host_times_of_both_in_one_run(capsys):
    """Medians of the medians of blocks with the plugin and without it, in turn. No time is asserted."""
    result: dict[str, Any] = {}
    for rows in (1, 4, 16, 64, 256):
        engine = Engine(DEVICE, rows=rows, context=CONTEXT)
        requests = chunks(engine, rows)
        blocks: dict[str, list[dict[str, float]]] = {"SGLang": [], "with the plugin": []}
        with server({}):
            for _ in range(7):
                blocks["SGLang"].append(timed(engine, requests, 60))
                with plugged() as feeder:
                    blocks["with the plugin"].append(timed(engine, requests, 60))
                    stats = pool_of(feeder).stats()
                    assert (stats.uploads, stats.leases_timed_out) == (2 * 70, 0)
        result[str(rows)] = {
            who: {what: round(statistics.median(block[what] for block in each), 1) for what in each[0]}
            for who, each in blocks.items()
        }
    keep({"host microseconds by requests": result}, "sglang-host.json", capsys)
