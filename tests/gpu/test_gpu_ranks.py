"""The replay by two ranks on two devices, under torchrun with NCCL: its table, one rank killed, one device too few."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batching.__main__ import main
from batching.replay.trace import builtin_trace, write_mooncake
from tests.replay.test_ranks import Launched, free, grid, launch, uploads

__all__ = ["launch"]  # the fixture: it kills what is left of a job

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEVICES = ("cuda:0", "cuda:1")
REPLAY = ("replay", "--device", "cuda", "--forward-us", "5000")
Launch = Callable[..., Launched]


def test_each_rank_replays_on_a_device_of_its_own_and_nccl_gathers(launch: Launch, tmp_path: Path) -> None:
    """Every byte and token agrees on both; each rank did what one process does alone; slots are pinned in both."""
    status, out, err = launch(*REPLAY, "--requests", "60", "--json", "job.json").end(240)
    assert (status, "replay:" in err) == (0, False), err
    assert re.search(r"^ranks +2, gathered through nccl$", out, re.MULTILINE)
    assert re.search(r"^mismatches +0: ", out, re.MULTILINE)
    table = grid(out)
    assert [table[rank]["device"] for rank in ("0", "1")] == list(DEVICES)
    document = json.loads((tmp_path / "job.json").read_text())
    assert (document["backend"], document["differences"], document["sum"]["mismatches"]) == ("nccl", {}, 0)

    assert main([*REPLAY, "--requests", "60", "--json", str(tmp_path / "alone.json")]) == 0
    alone = json.loads((tmp_path / "alone.json").read_text())
    for device, numbers in zip(DEVICES, document["ranks"], strict=True):
        assert numbers["device"].endswith(f"({device})")
        assert numbers["memory"] == "pinned"
        assert numbers["pool"]["pinned_bytes"] > 0
        for name in ("requests", "prompt_tokens", "output_tokens", "prefill_steps", "decode_steps", "mismatches"):
            assert numbers[name] == alone[name], name
    pinned = [numbers["pool"]["pinned_bytes"] for numbers in document["ranks"]]
    assert document["sum"]["pool"]["pinned_bytes"] == sum(pinned)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_the_middle_ends_the_job(launch: Launch, killed: int, tmp_path: Path) -> None:
    """Whichever it is: torchrun names it, the other is stopped within seconds, and no process is left on a device."""
    port = next(port for port in range(20_000, 60_000, 7) if free(port) and free(port + 1))
    write_mooncake(builtin_trace(4000), tmp_path / "long.jsonl")
    job = launch(*REPLAY, "long.jsonl", "--metrics-port", str(port))

    def both_at_work() -> bool:
        try:
            return all(uploads(port + rank, rank, device) > 30 for rank, device in enumerate(DEVICES))
        except (OSError, KeyError):
            return False

    job.until(both_at_work)
    os.kill(job.pids()[str(killed)], signal.SIGKILL)
    status, out, err = job.end(limit_s=28)  # torchrun's SIGKILL for one that does not listen would come after 30
    assert (status, out) == (1, "")
    assert re.search(rf"Root Cause.*rank +: {killed} .*Signal 9 \(SIGKILL\)", err, re.DOTALL), err
    assert f"replay: rank {1 - killed}: interrupted by SIGTERM" in err


def test_a_rank_without_a_device_ends_the_job_before_the_work(launch: Launch) -> None:
    """One rank more than there are devices: it says so, and nothing is replayed."""
    ranks = torch.cuda.device_count() + 1
    status, out, err = launch(*REPLAY, ranks=ranks).end(120)
    assert (status, out) == (1, "")
    assert f"replay: rank {ranks - 1}: LOCAL_RANK={ranks - 1} replays on cuda:{ranks - 1}, and this process" in err
    assert f"start at most {ranks - 1} ranks (--nproc-per-node {ranks - 1})" in err
