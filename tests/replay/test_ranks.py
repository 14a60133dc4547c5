"""A replay by many ranks: two real processes under torchrun with gloo, one killed, one that fails; and a rank alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from batching.__main__ import main
from batching.arguments import CommandError, duration
from batching.replay import command, ranks
from batching.replay.ranks import Job
from batching.replay.report import RankReport, differences, job_json, job_report, summed_results, summed_stats
from batching.replay.scheduler import Result
from batching.replay.serve import HOST
from batching.replay.trace import builtin_trace, write_mooncake
from staging import PoolStats
from staging.stats import COUNTERS, PEAKS
from tests.replay.test_metrics_port import scrape

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "multi-gpu.md"
REPLAY = ["replay", "--device", "cpu", "--requests", "50"]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MARK = "REPLAY_RANKS_TEST"
LIMIT_S = 120


# Jobs of two processes.


class Launched:
    """A running `torchrun`, and all processes of its job by a mark in their environment."""

    def __init__(self, folder: Path, ranks: int, target: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        self._errors = folder / "stderr"
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*LAUNCHER, str(ranks), *target],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env={**environment, MARK: self.mark, "PYTHONPATH": str(ROOT)},
            )

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def pids(self) -> dict[str, int]:
        """Pid by rank of the ranks that are alive; torchrun itself has none, and is under ""."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = dict(line.partition("=")[::2] for line in path.read_text().split("\0"))
            except (OSError, UnicodeDecodeError):
                continue
            if environment.get(MARK) == self.mark:
                found[environment.get("RANK", "")] = int(path.parent.name)
        return found

    def until(self, come: Callable[[], bool]) -> None:
        """Wait for it; the job must not end before."""
        deadline = time.monotonic() + LIMIT_S
        while not come():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Status, standard output, standard error; every process of the job is gone."""
        out, _ = self.process.communicate(timeout=limit_s)
        assert self.pids() == {}
        return self.process.returncode, out, self.errors

    def kill(self) -> None:
        for pid in [*self.pids().values(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a job of `python -m batching` with these arguments, or of a program in which each rank does as it says."""
    made = []

    def start(*arguments: str, program: str = "", ranks: int = 2) -> Launched:
        target = ["-m", "batching"]
        if program:
            path = tmp_path / "program.py"
            path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{program}")
            target = [str(path)]
        made.append(Launched(tmp_path, ranks, [*target, *arguments]))
        return made[-1]

    yield start
    for job in made:
        job.kill()


def settled(text: str) -> list[str]:
    """Words without what differs from run to run: times, the version, and which rank was slowest."""
    text = re.sub(r"\d[\d.,]* (ns|µs|ms|s|min)\b", "TIME", text)
    text = re.sub(r"\d, which took [\d.]+ % longer than rank \d", "SLOWEST", text)
    return re.sub(r"\btorch \S+", "torch VERSION", text).split()


def printed(number: int) -> str:
    """One of the blocks on the page that this file compares."""
    comment = "<!-- printed by tests/replay/test_ranks.py -->"
    blocks = re.findall(rf"^{comment}\n```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    return str(blocks[number])


def assert_told(block: str, text: str) -> None:
    """Each line of it, in any order, since two processes print at once; a line that ends in `…` goes on.

    torch 2.6 has no name of the signal behind the pid.
    """
    told = [re.sub(r"(pid: |PID )\d+", r"\g<1>4242", line).rstrip() for line in text.splitlines()]
    told += [f"{line}  (SIGKILL)" for line in told if line.endswith("(pid: 4242)")]
    for line in block.splitlines():
        begin = line.removesuffix("…")
        assert any(one == line or (begin != line and one.startswith(begin)) for one in told), (line, text)


def grid(text: str) -> dict[str, dict[str, str]]:
    """The ranks' table: of each row the cells by column."""
    lines = [re.split(r"  +", line.strip()) for line in text.partition("\n\n")[0].splitlines()]
    columns = [name for name in lines[0] if name not in ("device", "time")]
    rows = {line[0]: line for line in lines[1:]}
    found = {rank: dict(zip(lines[0], line, strict=True)) for rank, line in rows.items() if rank != "sum"}
    return {**found, "sum": dict(zip(columns, rows["sum"], strict=True))}  # of which no device and no time is told


def test_two_ranks_print_one_table_and_write_one_document(launch, tmp_path, monkeypatch, capsys):
    """docs/multi-gpu.md has this command and its output. Each rank did what one process does; the sum is their sum."""
    shown = re.search(
        r"^    torchrun --standalone --nproc-per-node 2 -m batching (.*)$", PAGE.read_text(), re.MULTILINE
    )
    assert shown
    job = launch(*shown[1].split())
    status, out, err = job.end()
    assert (status, "replay" in err) == (0, False), err
    assert settled(out) == settled(printed(0))
    document = json.loads((tmp_path / "job.json").read_text())
    first, second = document["ranks"]
    assert (first["rank"], second["rank"], document["backend"], document["differences"]) == (0, 1, "gloo", {})

    table, total = grid(out), document["sum"]
    assert list(table) == ["0", "1", "sum"]
    for rank, numbers in (("0", first), ("1", second), ("sum", total)):
        row, pool = table[rank], numbers["pool"]
        assert row["requests"] == str(numbers["requests"])
        assert (row["leases"], row["copies"], row["avoided"]) == tuple(
            str(pool[name]) for name in ("leases", "uploads", "copies_avoided")
        )
    assert (first["requests"], total["requests"], total["mismatches"]) == (50, 100, 0)
    assert total["pool"]["uploads"] == first["pool"]["uploads"] + second["pool"]["uploads"]
    slowest = max(document["ranks"], key=lambda one: one["wall_ns"])
    assert document["slowest_rank"] == slowest["rank"]
    assert total["wall_ns"] == slowest["wall_ns"]
    assert re.search(rf"^slowest rank +{slowest['rank']}, which took", out, re.MULTILINE)
    assert table[str(slowest["rank"])]["time"] == duration(slowest["wall_ns"])

    alone = tmp_path / "alone.json"
    assert main([*REPLAY, "--json", str(alone)]) == 0
    single = json.loads(alone.read_text())
    for numbers in (first, second):
        for name in attrs.fields_dict(Result):
            assert name.endswith("_ns") or numbers[name] == single[name], name


def test_a_rank_killed_in_the_middle_ends_the_job(launch, tmp_path):
    """Within seconds: torchrun names the rank and the signal, the other is stopped and closes what it has open."""
    # Not the first one that is free: the same test of another run may be about to take that one.
    begin = 20_000 + os.getpid() % 20_000
    port = next(port for port in range(begin, 60_000, 7) if free(port) and free(port + 1))
    write_mooncake(builtin_trace(4000), tmp_path / "long.jsonl")
    job = launch("replay", "--device", "cpu", "long.jsonl", "--metrics-port", str(port), "--timeline", "run.json")

    def both_at_work() -> bool:
        """By their own metrics, each under its rank and at its port."""
        try:
            return all(uploads(port + rank, rank) > 30 for rank in (0, 1))
        except (OSError, KeyError):
            return False

    job.until(both_at_work)
    os.kill(job.pids()["1"], signal.SIGKILL)
    status, out, err = job.end(limit_s=25)  # torchrun's SIGKILL for one that does not listen would come after 30
    assert (status, out) == (1, "")
    assert_told(printed(1), err)
    assert re.search(r"Root Cause.*rank +: 1 .*Signal 9 \(SIGKILL\)", err, re.DOTALL), err
    assert f"replay: rank 0: metrics at http://{HOST}:{port}/metrics\n" in err
    assert f"replay: rank 1: metrics at http://{HOST}:{port + 1}/metrics\n" in err
    assert "replay: rank 0: the timeline until then: run.rank0.json: " in err
    assert json.loads((tmp_path / "run.rank0.json").read_text())["traceEvents"]
    assert not list(tmp_path.glob(".*rank0*.part"))


def free(port: int) -> bool:
    with suppress(OSError), socket.create_server((HOST, port)):
        return True
    return False


def uploads(port: int, rank: int, device: str = "cpu") -> float:
    labels = frozenset({"pool": "replay", "device": device, "rank": str(rank)}.items())
    return scrape(f"http://{HOST}:{port}/metrics")["staging_uploads_total", labels]


def test_a_rank_that_fails_by_itself_ends_the_job_with_its_own_error(launch):
    """It cannot read its trace: its line names it, torchrun ends with status 1 and names it too; nobody hangs."""
    job = launch(
        *REPLAY,
        program="""
from pathlib import Path
from batching.__main__ import main
from batching.replay.ranks import Job
join, joined = Job.join, Path("joined")

def together(job):
    # Rank 1 fails when rank 0 is there to be stopped: else that may die of SIGTERM while it still imports.
    join(job)
    if rank == 0:
        joined.touch()
    while not joined.exists():
        time.sleep(0.01)

Job.join = together
sys.exit(main([*sys.argv[1:], *(["nowhere.csv"] if rank == 1 else [])]))
""",
    )
    status, out, err = job.end()
    assert (status, out) == (1, "")
    assert_told(printed(2), err)
    assert re.search(r"Root Cause.*rank +: 1 .*exitcode +: 2 ", err, re.DOTALL), err
    assert err.count("Traceback") == 1  # torchrun's own


def test_mismatches_in_one_rank_do_not_cut_off_the_others(launch, tmp_path):
    """Rank 1's bytes are wrong, and rank 0 is slow to tell: the table is whole, each timeline is there, status 1."""
    job = launch(
        *REPLAY,
        *("--timeline", "run.json"),
        program="""
from batching.__main__ import main
from batching.replay import command, scheduler
original, report = scheduler.write_cache_indices, command.job_report

def damaged(*arguments):
    staged = original(*arguments)
    staged.tensors["top_ks"][0] = 7
    return staged

def slow(*arguments):
    time.sleep(3)
    return report(*arguments)

if rank == 1:
    scheduler.write_cache_indices = damaged
else:
    command.job_report = slow
sys.exit(main())
""",
    )
    status, out, err = job.end()
    assert status == 1
    table = grid(out)
    assert (table["0"]["mismatches"], table["1"]["mismatches"] == table["sum"]["mismatches"]) == ("0", True)
    assert re.search(r"^mismatches +\d+ in sampling columns", out, re.MULTILINE)
    assert re.search(r"^timeline +run\.rank0\.json: .*\n\Z", out, re.MULTILINE)
    assert re.search(r"Root Cause.*rank +: 1 .*exitcode +: 1 ", err, re.DOTALL), err
    assert "interrupted" not in err
    assert {path.name for path in tmp_path.glob("run*")} == {"run.rank0.json", "run.rank1.json"}


# A rank by itself, in this process.


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job of one rank, which holds the store itself."""
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": HOST, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def two() -> Iterator[tuple[Job, Job]]:
    """Both ranks of a job, joined to a store."""
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    joined = []
    for rank in (0, 1):
        store = dist.TCPStore(HOST, server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        joined.append(Job(rank, 2, rank, store=store))
    yield joined[0], joined[1]
    del server


def test_without_a_launcher_nothing_is_joined(monkeypatch, capsys):
    """Also with some of the variables, which other programs set."""
    monkeypatch.setattr(Job, "join", lambda self: pytest.fail("it was joined"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(REPLAY) == 0
    out, err = capsys.readouterr()
    assert out.startswith("trace  ")
    assert err == ""


def test_a_job_of_one_rank_is_a_job(alone, capsys):
    """The table has its row; afterwards nothing of torch.distributed is left, and SIGTERM is as it was."""
    before = signal.getsignal(signal.SIGTERM)
    assert main(REPLAY) == 0
    out, err = capsys.readouterr()
    assert list(grid(out)) == ["0", "sum"]
    assert err == ""
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "first"}, "RANK='first' is not a whole number; start the ranks with torchrun, or unset RANK, "),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a whole number"),
        ({"RANK": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"MASTER_PORT": ""}, "rank 0: the job's store cannot be reached (Error initializing torch.distributed"),
        ({"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "rank 0: the job's store cannot be reached ("),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_an_environment_that_is_wrong_is_told_in_a_line(alone, variables, told, monkeypatch, capsys):
    """Status 2, the variable, and the way out."""
    monkeypatch.setattr(ranks, "_JOIN_S", 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(REPLAY) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"replay: {told}")
    assert "unset RANK, WORLD_SIZE, LOCAL_RANK to replay in one process" in err


@pytest.mark.parametrize(("seen", "remedy"), [(0, "use"), (1, r"start at most 1 ranks \(--nproc-per-node 1\), or use")])
def test_a_rank_without_a_device_of_its_own_says_so(seen, remedy, monkeypatch):
    """Named by its LOCAL_RANK, with what there is and what to do."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    arguments = command_line("--device", "cuda")
    with pytest.raises(
        CommandError, match=rf"^LOCAL_RANK=1 replays on cuda:1, .* sees {seen} CUDA .*{remedy} --device cpu$"
    ):
        Job(5, 8, 1).own(arguments)


def test_a_rank_has_a_device_of_its_own(monkeypatch):
    """By LOCAL_RANK, which is made the current one; NCCL then gathers. On the CPU gloo does."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    job = Job(5, 8, 1)
    assert (job.own(command_line()).device, current, job.backend) == ("cuda:1", [1], "nccl")
    job = Job(5, 8, 1)
    assert (job.own(command_line("--device", "cpu")).device, current, job.backend) == ("cpu", [1], "gloo")


def test_a_rank_has_a_port_and_a_timeline_of_its_own():
    """The port plus the rank, the rank in the name; a free port stays one; the arguments given are left as they are."""
    given = command_line("--device", "cpu", "--metrics-port", "9400", "--timeline", "out/run.v2.json")
    own = Job(3, 4, 1).own(given)
    assert (own.metrics_port, own.timeline) == (9403, Path("out/run.v2.rank3.json"))
    assert (given.metrics_port, given.timeline) == (9400, Path("out/run.v2.json"))
    own = Job(3, 4, 1).own(command_line("--device", "cpu", "--metrics-port", "0", "--timeline", "."))
    assert (own.metrics_port, own.timeline) == (0, Path("."))
    with pytest.raises(CommandError, match=r"--metrics-port 65533 leaves no port .* give 65532 or less"):
        Job(3, 4, 1).own(command_line("--device", "cpu", "--metrics-port", "65533"))


def command_line(*options: str) -> Any:
    return command_parser().parse_args(["replay", *options])


def command_parser() -> Any:
    from batching.__main__ import parser

    return parser()


def test_a_rank_that_does_not_come_is_named(two):
    """After the time it was given, not later: a rank that hangs holds nobody up for good."""
    late = threading.Timer(10, two[1].fail, ["too late"])
    late.start()
    with pytest.raises(CommandError, match=r"^rank 1 of 2 did not come to the result within 300 ms of this one"):
        two[0].gather("result", None, 0.3)
    two[0].leave(1, 0.1)
    late.cancel()


def test_a_rank_that_has_failed_is_named_with_its_reason(two, monkeypatch):
    """At once, however long the others would be waited for; only the first reason counts."""
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    two[1].fail("nowhere.csv: cannot read the file")
    two[1].fail("and one more thing")
    with pytest.raises(CommandError, match=r"^rank 1 failed: nowhere\.csv: cannot read the file$"):
        two[0].gather("start", None, 20)


def test_a_mistake_is_told_to_the_others_as_well(alone, monkeypatch, capsys):
    """Not only on standard error: those that wait see no other rank's."""
    told: list[str] = []
    monkeypatch.setattr(Job, "fail", lambda self, reason: told.append(reason))
    assert main([*REPLAY, "nowhere.csv"]) == 2
    assert capsys.readouterr().err == f"replay: rank 0: {told[0]}\n"
    assert told[0].startswith("nowhere.csv: cannot read the file")


def test_an_error_that_nobody_foresaw_is_told_to_the_others(two, monkeypatch):
    """A traceback ends this rank, and its last line is their reason."""
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    with pytest.raises(ZeroDivisionError), two[1]:
        _ = 1 // 0
    with pytest.raises(CommandError, match=r"^rank 1 failed: ZeroDivisionError\("):
        two[0].gather("start", None, 20)


def test_once_all_have_gathered_a_failure_waits_for_the_others(two):
    """It is no reason for them any more; and its rank leaves when they do."""
    two[0].gathered = two[1].gathered = True
    two[1].fail("cannot write run.rank1.json")
    assert not two[0]._store.check(["failed"])
    two[0].leave(0, 300)  # returns at once, though rank 1 has not come
    begin = time.monotonic()
    two[1].leave(2, 300)
    assert time.monotonic() - begin < 5


def test_a_rank_that_holds_its_status_back_can_be_stopped(two):
    """By SIGTERM: there is nothing left to be told."""
    stop = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM])
    begin = time.monotonic()
    with two[1]:
        stop.start()
        try:
            two[1].leave(1, 20)
        except KeyboardInterrupt:
            pytest.fail("it was interrupted, with a traceback")
    assert time.monotonic() - begin < 5


def test_a_store_that_is_gone_ends_the_wait():
    """torchrun was killed: nothing is left to wait for."""
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore(HOST, server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    job = Job(0, 2, 0, store=store)
    del server
    with pytest.raises(CommandError, match="the job's store is gone, and with it torchrun"):
        job.gather("start", None, 20)
    job.fail("this nobody reads")
    job.leave(1, 300)


def test_ranks_that_cannot_connect_say_through_what(alone, monkeypatch, capsys):
    """Found out at the start, before the replay."""
    monkeypatch.setattr(dist, "init_process_group", fails)
    monkeypatch.setattr(command, "_replay", lambda *arguments: pytest.fail("it was started"))
    assert main(REPLAY) == 2
    assert capsys.readouterr().err == "replay: rank 0: the ranks could not gather through gloo (no interface)\n"


def fails(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("no interface\nException raised from somewhere in C++")


def test_a_group_of_gloo_outlives_the_gathering(alone, monkeypatch):
    """Freed just after it, torch 2.6's often hangs: with the GIL held it waits for a thread that needs it."""
    job = Job(0, 1, 0)
    job.join()
    destroy, groups = dist.destroy_process_group, []

    def looking() -> None:
        groups.append(weakref.ref(dist.group.WORLD))
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", looking)
    assert job.gather("start", "mine", 10) == ["mine"]
    del job
    assert [group() is None for group in groups] == [False]


def test_sigterm_ends_a_rank_at_once_while_torch_waits_for_others(alone, monkeypatch):
    """No handler of Python's would run then; before and after, it is an interruption that closes what is open."""
    seen: list[Any] = []
    gather = dist.all_gather_object

    def looking(*arguments: Any) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        gather(*arguments)

    monkeypatch.setattr(dist, "all_gather_object", looking)
    replay = command._replay

    def stopped(*arguments: Any) -> Result:
        seen.append(signal.getsignal(signal.SIGTERM))
        return replay(*arguments)

    monkeypatch.setattr(command, "_replay", stopped)
    assert main(REPLAY) == 0
    assert seen == [signal.SIG_DFL, ranks._interrupted, signal.SIG_DFL]


def test_only_rank_0_speaks(monkeypatch, capsys, tmp_path):
    """Of the malformed rows, by the table and by the document."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,9,3\nnonsense\n2023-11-16 18:15:47.68,9,3\n"
    )
    arguments = ["replay", "--device", "cpu", "--skip-bad-rows", str(path), "--json"]
    monkeypatch.setattr(Job, "join", lambda self: None)
    monkeypatch.setattr(Job, "leave", lambda self, status, patience_s: None)
    monkeypatch.setattr(Job, "gather", lambda self, what, mine, patience_s: [mine, mine])
    said = {}
    for rank in (0, 1):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        assert main([*arguments, str(tmp_path / f"{rank}.json")]) == 0
        said[rank] = capsys.readouterr()
    assert said[0].err.startswith("left out: ")
    assert "trace.csv (1 malformed rows left out)" in said[0].out
    assert said[1] == ("", "")
    assert [path.name for path in tmp_path.glob("*.json")] == ["0.json"]


# The report.


def stats(**values: int) -> PoolStats:
    """All keys 0, but for these."""
    return PoolStats(**{**dict.fromkeys(attrs.fields_dict(PoolStats), 0), **values})


def reports() -> list[RankReport]:
    """Two ranks, of which the second is slower, waited, and threw more tokens away."""
    document = {"trace": "t.csv", "bad_rows": 0, "memory": "pinned", "torch": "2", "device": "cpu"}
    zero = {"sampling columns": 0, "tokens": 0}
    first = Result(
        requests=7, decode_steps=10, decode_build_ns=2000, longest_prefix=4, wall_ns=1_000_000, mismatches=zero
    )
    second = attrs.evolve(first, wall_ns=1_500_000, decode_build_ns=4000, mismatches={**zero, "tokens": 2})
    waited = stats(
        slots=4, leases_waited=3, waits_to_1ms=3, wait_ns=900_000, depth_needed=6, oldest_lag=1, bytes_peak=5
    )
    ready = stats(slots=4, leases_ready=3, bytes_peak=9, oldest_lag=2)
    return [RankReport(0, "cuda:0", document, first, ready), RankReport(1, "cuda:1", document, second, waited)]


def test_the_sum_adds_counters_and_keeps_the_highest_peak():
    """Each key by its kind; the books of the sum are those of a pool."""
    names = attrs.fields_dict(PoolStats)
    one, other = ({name: start + step * at for at, name in enumerate(names)} for start, step in ((100, 3), (900, -5)))
    pair = [attrs.evolve(report, stats=PoolStats(**each)) for report, each in zip(reports(), (one, other), strict=True)]
    total = summed_stats(pair)
    for name in names:
        want = max(one[name], other[name]) if name in (*PEAKS, "oldest_lag") else one[name] + other[name]
        assert getattr(total, name) == want, name
    assert set(COUNTERS) < set(names)
    assert total.leases == sum(one.stats.leases for one in pair)


def test_the_sum_of_what_was_done():
    """Counts are added, mismatches by kind; the job took as long as its slowest rank."""
    total = summed_results(reports())
    assert (total.requests, total.decode_steps, total.decode_build_ns) == (14, 20, 6000)
    assert (total.wall_ns, total.longest_prefix) == (1_500_000, 4)
    assert total.mismatches == {"sampling columns": 0, "tokens": 2}
    first, second = reports()
    unchecked = attrs.evolve(second, result=attrs.evolve(second.result, mismatches=None))
    assert summed_results([first, unchecked]).mismatches is None
    assert "\nmismatches                 not checked" in job_report([first, unchecked], "gloo")
    assert grid(job_report([first, unchecked], "gloo"))["1"]["mismatches"] == "–"


def test_the_report_names_the_slowest_rank_and_the_one_whose_ring_was_too_short():
    """Advice is on one pool's ring: the sum of two rings has none."""
    text, document = job_report(reports(), "nccl"), job_json(reports(), "nccl")
    assert re.search(r"^slowest rank +1, which took 50\.0 % longer than rank 0$", text, re.MULTILINE)
    assert re.search(r"^time of a rank +1\.00 ms min, 1\.25 ms median, 1\.50 ms max$", text, re.MULTILINE)
    assert re.search(r"^host time per batch built +200 ns min, 300 ns median, 400 ns max$", text, re.MULTILINE)
    assert re.search(r"^advice +rank 1: 3 leases waited.*\s+with slots=6$", text, re.MULTILINE)
    assert text.count("\nadvice ") == 1
    assert re.search(r"^mismatches +2 in tokens$", text, re.MULTILINE)
    assert re.search(r"^ranks +2, gathered through nccl$", text, re.MULTILINE)
    assert (document["slowest_rank"], document["sum"]["mismatches"]) == (1, 2)
    assert (document["sum"]["pool"]["slots"], document["sum"]["pool"]["suggested_slots"]) == (8, 6)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    eight = [attrs.evolve(reports()[rank % 2], rank=rank) for rank in range(8)]
    assert max(map(len, job_report(eight, "nccl").splitlines())) <= 100


def test_ranks_that_did_not_do_the_same_are_told_apart(alone, monkeypatch, capsys):
    """Two ranks of one trace have the same batches: anything else is a fault, and status 1."""
    assert differences(reports()) == {}
    gather = Job.gather

    def other(self: Job, what: str, mine: Any, patience_s: float) -> list[Any]:
        found = gather(self, what, mine, patience_s)
        if what == "result":
            found.append(attrs.evolve(mine, rank=1, result=attrs.evolve(mine.result, decode_steps=3)))
        return found

    monkeypatch.setattr(Job, "gather", other)
    assert main(REPLAY) == 1
    out = capsys.readouterr().out
    assert re.search(r"^ranks differ +in decode_steps: 101, 3$", out, re.MULTILINE)
    assert "mismatches                 0: " in out
