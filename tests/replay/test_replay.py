"""The replay end to end, on the CPU: right by its own check, and the check itself can fail."""

from __future__ import annotations

import json
import random
from pathlib import Path

import attrs
import pytest
import torch

from batching.__main__ import main
from batching.replay import scheduler as scheduling
from batching.replay.scheduler import Scheduler, Settings
from batching.replay.trace import TraceRequest, builtin_trace, write_mooncake
from staging import StagingPool
from staging.testing import SimulatedDevice


def replay(trace, pool=None, check=True, **settings):
    with StagingPool("cpu") if pool is None else pool as pool:
        scheduler = Scheduler(trace, pool, Settings(**settings), check=check)
        return scheduler, scheduler.run()


def assert_nothing_is_lost(scheduler: Scheduler, trace: list[TraceRequest]) -> None:
    """All requests are accounted for, all rows and KV indices are free or in the cache, each index once."""
    result = scheduler.result
    assert result.requests + result.refused == len(trace)
    kv, cache = scheduler._kv, scheduler._cache
    assert kv.available + cache.owned == kv.capacity
    assert scheduler._reserved == 0
    assert sorted(scheduler._free_rows) == list(range(scheduler.settings.max_batch))
    cache.evict(kv.capacity)
    assert sorted(kv.alloc(kv.capacity).tolist()) == list(range(1, kv.capacity + 1))


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_the_builtin_trace_replays_without_a_mismatch(ahead):
    """However far the host runs ahead: every request finishes, every byte and token agrees, no index is lost."""
    trace = builtin_trace(60)
    scheduler, result = replay(trace, ahead=ahead)
    assert result.mismatches == dict.fromkeys(result.mismatches, 0)
    assert result.output_tokens == sum(row.output_length for row in trace)
    assert result.prompt_tokens == sum(row.input_length for row in trace)
    assert result.cached_tokens > 0
    assert_nothing_is_lost(scheduler, trace)


def test_a_small_memory_makes_requests_wait_and_blocks_leave_the_cache():
    """Little room for KV indices and few rows: nothing is lost, blocks are evicted, the tokens are the same number."""
    trace = builtin_trace(80)
    scheduler, result = replay(trace, kv_tokens=24_000, max_batch=7, prefill_tokens=2000)
    assert sum(result.mismatches.values()) == 0
    assert result.evicted_blocks > 0
    assert result.requests == 80
    assert_nothing_is_lost(scheduler, trace)


def test_what_can_never_fit_is_refused_and_counted():
    """A request longer than the memory does not stop those behind it."""
    trace = [TraceRequest(0.0, 50, 3), TraceRequest(0.0, 5000, 3), TraceRequest(0.0, 60, 2)]
    scheduler, result = replay(trace, kv_tokens=1000)
    assert (result.requests, result.refused, result.output_tokens) == (2, 1, 5)
    assert_nothing_is_lost(scheduler, trace)


def test_a_prompt_cached_whole_needs_one_index_more_than_its_tokens():
    """Its last token gets an index of its own: a memory without room for that refuses it rather than wait for ever."""
    trace = [TraceRequest(0.0, 512, 4, (1,)), TraceRequest(0.0, 512, 4, (1,))]
    for room, finished in ((518, 0), (519, 2)):
        scheduler, result = replay(trace, kv_tokens=room, ahead=2)
        assert (result.requests, result.refused) == (finished, 2 - finished)
        assert_nothing_is_lost(scheduler, trace)


def test_a_prefill_keeps_to_its_token_budget_except_for_one_longer_request():
    """Batches are cut at the budget; a longer request gets one of its own."""
    trace = [TraceRequest(0.0, length, 1) for length in (60, 40, 1, 500, 30)]
    _, result = replay(trace, prefill_tokens=100)
    assert result.prefill_steps == 4  # 60+40, then 1 alone since 500 would exceed, then 500, then 30


def test_random_traces_replay_without_a_mismatch():
    """Shared prefixes, whole blocks, repeats, one-token prompts, tight memory: still not one differing byte."""
    for seed in range(4):
        draw = random.Random(seed)
        trace = []
        for _ in range(40):
            length = draw.choice([1, 511, 512, 513, 1024, draw.randrange(1, 3000)])
            start = draw.choice([0, 100])
            blocks = tuple(range(start, start + -(-length // 512))) if draw.random() < 0.7 else ()
            trace.append(TraceRequest(0.0, length, draw.randrange(1, 20), blocks))
        scheduler, result = replay(
            trace, kv_tokens=draw.randrange(5000, 9000), max_batch=draw.randrange(1, 9), ahead=draw.randrange(4)
        )
        assert sum(result.mismatches.values()) == 0
        assert_nothing_is_lost(scheduler, trace)


def test_slots_are_met_in_flight_on_a_simulated_device_and_no_copy_finds_other_bytes():
    """Copies lag behind by several leases; the ring waits for them, and each still reads what was filled."""
    device = SimulatedDevice(on_sleep=lambda device: device.finish() if device.copies else None)
    pool = StagingPool(device, slots=2, max_slots=3)
    _, result = replay(builtin_trace(40), pool)
    device.finish_all()
    assert device.violations == []
    assert sum(result.mismatches.values()) == 0
    assert pool.stats().met_in_flight > 0
    assert pool.stats().leases_waited > 0


def test_without_the_event_guard_the_simulated_replay_finds_other_bytes():
    """The same with the guard taken out: copies run late and read a later batch's bytes."""

    class Unguarded(SimulatedDevice):
        def done(self, event):
            while len(self.copies) > 5:  # time passes: the oldest copies run, too late
                self.finish()
            return True

    device = Unguarded()
    replay(builtin_trace(40), StagingPool(device, slots=2, max_slots=2))
    device.finish_all()
    assert device.violations != []


def test_a_wrong_byte_in_any_column_is_reported(monkeypatch):
    """Each sampling column and each cache column, damaged in one batch, shows as a mismatch."""
    original = scheduling.write_cache_indices
    for name in (
        "temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed",
        "prefix_pointers", "req_pool_indices", "prefix_lens", "extend_lens", "seq_lens", "extend_starts",
    ):  # fmt: skip

        def damaged(batch, table, out, pool, name=name):
            staged = original(batch, table, out, pool)
            damage(staged.tensors[name])
            return staged

        def damage(tensor):
            tensor.view(torch.uint8).reshape(-1)[0] ^= 1

        monkeypatch.setattr(scheduling, "write_cache_indices", damaged)
        _, result = replay([TraceRequest(0.0, 700, 2, (1, 2))], max_batch=4)
        assert sum(result.mismatches.values()) > 0, name


def test_a_wrong_entry_of_the_table_is_reported(monkeypatch):
    """An entry overwritten behind the kernel's back shows as a mismatch of the table."""
    original = scheduling.write_cache_indices

    def damaged(batch, table, out, pool):
        staged = original(batch, table, out, pool)
        table[batch.reqs[0].req_pool_idx, 3] += 1
        return staged

    monkeypatch.setattr(scheduling, "write_cache_indices", damaged)
    _, result = replay([TraceRequest(0.0, 700, 2)])
    assert result.mismatches["req_to_token"] > 0


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    """Exit status 0, the numbers a machine wants in the JSON, no progress bar where there is no terminal."""
    path = tmp_path / "result.json"
    assert main(["replay", "--device", "cpu", "--requests", "50", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "mismatches                 0" in out
    assert "slots met in flight" in out
    assert err == ""
    result = json.loads(path.read_text())
    assert (result["requests"], result["mismatches"], result["in_flight_met"]) == (50, 0, 0)
    assert result["uploads"] == result["pool"]["uploads"]
    assert result["prefill_steps"] > 0
    assert result["decode_steps"] > 0


def test_a_steady_replay_makes_one_copy_per_prefill_batch():
    """Leases and copies add up: one for each prefill, decode and filter, and those of the warm-up."""
    with StagingPool("cpu") as pool:
        _, result = replay(builtin_trace(80), pool)
        stats = pool.stats()
    warm_up = 4 + 1  # a copy from each slot, and one batch that compiles the kernel where there is one
    assert stats.uploads + stats.leases_empty == result.prefill_steps + result.decode_steps + result.filters + warm_up
    assert (stats.allocations, stats.discards, stats.dropped) == (4, 0, 0)


def test_the_exit_status_is_1_when_bytes_differ(monkeypatch, capsys):
    """Only a replay with 0 mismatches succeeds."""
    original = scheduling.write_cache_indices

    def damaged(*arguments):
        staged = original(*arguments)
        staged.tensors["top_ks"][0] = 7
        return staged

    monkeypatch.setattr(scheduling, "write_cache_indices", damaged)
    assert main(["replay", "--device", "cpu", "--requests", "10"]) == 1
    assert "sampling columns" in capsys.readouterr().out


def test_a_malformed_row_stops_the_command_with_file_line_and_reason(tmp_path, capsys):
    """No traceback: the message names what to do; with --skip-bad-rows the others are replayed."""
    path = tmp_path / "trace.jsonl"
    write_mooncake(builtin_trace(5), path)
    lines = path.read_text().splitlines()
    lines.insert(2, '{"timestamp": 0, "input_length": -4, "output_length": 1, "hash_ids": []}')
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", "--device", "cpu", str(path)]) == 2
    message = capsys.readouterr().err
    assert f"{path}, line 3: input_length must be an integer" in message
    assert "--skip-bad-rows" in message
    assert main(["replay", "--device", "cpu", "--skip-bad-rows", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "5 finished" in out
    assert "1 malformed rows left out" in out
    assert "line 3" in err


@pytest.mark.parametrize(
    "arguments",
    [["nowhere.csv"], ["--requests", "0"], ["--max-batch", "x"], ["--slots", "-1"], ["--device", "tpu"]],
    ids=" ".join,
)
def test_mistakes_on_the_command_line_exit_with_status_2(arguments, capsys):
    """A message, no traceback."""
    try:
        status = main(["replay", "--device", "cpu", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_asking_for_cuda_without_a_device_says_so(capsys):
    """Status 2 and the way out."""
    assert main(["replay", "--device", "cuda"]) == 2
    assert "use 'cpu'" in capsys.readouterr().err


def test_the_results_of_two_replays_are_the_same_tokens():
    """The replay is deterministic: counts of everything but time agree."""
    first, second = (attrs.asdict(replay(builtin_trace(25))[1]) for _ in range(2))
    timed = {name for name in first if name.endswith("_ns")}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}


def test_traces_given_by_the_environment_replay_without_a_mismatch(request):
    """The first 200 requests of every file in the folder that STAGING_TRACES names."""
    import os

    folder = os.environ.get("STAGING_TRACES")
    if not folder:
        pytest.skip("STAGING_TRACES names no folder with recorded traces")
    for path in sorted(Path(folder).glob("*.*")):
        if path.suffix in (".csv", ".jsonl"):
            assert main(["replay", "--device", "cpu", "--requests", "200", str(path)]) == 0, path.name
