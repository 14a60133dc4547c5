"""What all commands have in common: mistakes are told in a line, help teaches, progress steps aside, units are read."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from batching.__main__ import main, parser
from batching.arguments import duration, pool_rows, size, table
from batching.replay import command as replay
from batching.soak import command as soak
from staging import Field, Layout, PoolExhausted, StagingPool
from staging.testing import SimulatedDevice

QUICK = {
    "replay": ["replay", "--device", "cpu", "--requests", "5"],
    "soak": ["soak", "--device", "cpu", "--batches", "3"],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status_of(arguments: list[str]) -> int:
    """However the command ends."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return -1 if stop.code is None else int(stop.code)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("replai", "invalid choice: 'replai'"),
        ("replay --slots 0", "argument --slots: '0' is not a whole number from 1 to 1,024"),
        ("replay --slots 100000", "argument --slots: '100000' is not a whole number from 1 to 1,024"),
        ("replay --ahead -1", "argument --ahead: '-1' is not a whole number from 0 to 1,000"),
        ("replay --requests many", "argument --requests: 'many' is not a whole number of 1 or more"),
        ("replay --max-batch 65537", "is not a whole number from 1 to 65,536"),
        ("replay --kv-tokens 2147483648", "is not a whole number from 1 to 2,147,483,647"),
        ("replay --forward-us nan", "argument --forward-us: 'nan' is not a number from 0 to 60,000,000"),
        ("replay --forward-us soon", "argument --forward-us: 'soon' is not a number from 0 to 60,000,000"),
        ("replay --forward-us=-3", "argument --forward-us: '-3' is not a number from 0 to 60,000,000"),
        ("replay --json nowhere/x.json", "argument --json: cannot write nowhere/x.json: there is no folder "),
        ("replay --json .", "argument --json: cannot write .: it is a folder"),
        (f"replay --json {'long' * 100}", "File name too long"),
        ("replay --device cpu --json a --timeline a", "--json and --timeline both name a; give each a file of its own"),
        ("replay --device cpu .", ".: cannot read the file (Is a directory)"),
        ("soak --threads 0", "argument --threads: '0' is not a whole number from 1 to 1,024"),
        ("soak --seconds inf", "argument --seconds: 'inf' is not a number from 0.001 to 2,592,000"),
        ("soak --json nowhere/x.json", "argument --json: cannot write nowhere/x.json: there is no folder "),
        ("soak --device cpu --slots 4 --max-slots 2", "max_slots=2 is less than slots=4"),
        ("soak --device cpu --plain --no-guard", "leave one away"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_line_and_nothing_is_begun(arguments, told, capsys, monkeypatch, tmp_path):
    """Status 2, what is wrong, and where the options are explained; not all of them, and no traceback."""
    monkeypatch.chdir(tmp_path)
    for module in (replay, soak):
        for name in ("_replay", "_with_progress"):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("it was begun"), raising=False)
    assert status_of(shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") <= 2
    if err.startswith("python"):
        assert re.search(r"^options and examples: python -m batching (\w+ )?--help$", err, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["replay", "soak"])
def test_an_unknown_kind_of_memory_in_the_environment_is_a_mistake(name, capsys, monkeypatch):
    """The variable is named."""
    monkeypatch.setenv("STAGING_MEMORY", "wrong")
    assert main(QUICK[name]) == 2
    assert "STAGING_MEMORY='wrong': 'auto', 'pinned' or 'pageable'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "place"), [("replay", "Scheduler"), ("soak", "Soak")])
def test_memory_that_is_not_to_be_had_is_told_in_a_line(name, place, capsys, monkeypatch):
    """torch's own error, by an allocation that no machine can make; other errors are no mistakes, and stay whole."""

    def too_large(*arguments, **options):
        torch.empty(1 << 60, device="cpu")

    def faulty(*arguments, **options):
        raise RuntimeError("a fault of ours")

    module = {"replay": replay, "soak": soak}[name]
    monkeypatch.setattr(module, place, too_large)
    assert main(QUICK[name]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{name}: ")
    assert "you tried to allocate" in last
    assert "use " in last
    monkeypatch.setattr(module, place, faulty)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(QUICK[name])


def test_a_folder_that_may_not_be_written_is_found_before_the_work(tmp_path, capsys, monkeypatch):
    """Permission is asked for beforehand: of the folder, or of the file where there is one."""
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    for path in (tmp_path / "x.json", tmp_path / "old.json"):
        (tmp_path / "old.json").touch()
        assert status_of([*QUICK["replay"], "--json", str(path)]) == 2
        assert f"cannot write {path}: permission denied" in capsys.readouterr().err
    assert asked == [(tmp_path, os.W_OK), (tmp_path / "old.json", os.W_OK)]


@pytest.mark.parametrize("name", ["replay", "soak"])
def test_a_result_that_cannot_be_written_after_all_is_told_behind_the_table(name, tmp_path, capsys, monkeypatch):
    """The disk is full: status 2, but the table was printed."""

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    path = tmp_path / "x.json"
    assert main([*QUICK[name], "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "mismatches" in out
    assert err.endswith(f"{name}: cannot write {path}: No space left on device\n")


@pytest.mark.parametrize("name", ["replay", "soak"])
def test_progress_is_for_terminals_only_and_leaves_nothing_behind(name, capsys, monkeypatch):
    """A bar on a terminal, wiped out at the end; none elsewhere; the table is the same either way."""
    monkeypatch.setattr(soak, "_PROGRESS_S", 0.0)
    assert main(QUICK[name]) == 0
    out, err = capsys.readouterr()
    assert "%|" not in out + err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(QUICK[name]) == 0
    assert "%|" not in capsys.readouterr().out
    drawn = terminal.getvalue()
    assert re.search(rf"\r{name}: +\d+%\|", drawn)
    assert drawn.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_a_reader_that_has_gone_ends_the_command_quietly(monkeypatch, capfd):
    """As in `… | head -1`: status 141, no traceback, also not when Python empties its buffers."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(QUICK["replay"]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["", "replay", "soak"])
def test_help_has_examples_that_are_right(name, capsys, monkeypatch):
    """Each is a command line of this very command; the exit statuses are told."""
    monkeypatch.setenv("COLUMNS", "80")
    assert status_of([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  python -m batching (.*)\n      \S", text.partition("\nexamples:\n")[2], re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        chosen = parser().parse_args(shlex.split(example))
        assert chosen.command == (name or chosen.command)
    told = re.findall(r"^  (\d+) +\S", text.partition("\nexit status:\n")[2], re.MULTILINE)
    assert told == ["0", "1", "2", "130", "141"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"), (999, "999 ns"), (1000, "1.00 µs"), (12_345, "12.3 µs"), (999_400, "999 µs"),
        (1_070_442, "1.07 ms"), (63.24e9, "1 min 03 s"), (42.06e9, "42.1 s"), (3599e9, "59 min 59 s"),
        (3600e9, "1 h 00 min"), (90_061e9, "25 h 01 min"),
    ],
)  # fmt: skip
def test_a_duration_is_told_in_a_unit_of_few_digits(ns, text):
    """From nanoseconds to hours."""
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (40_524, "39.6 KiB"), (1 << 20, "1.00 MiB"),
     (64 << 20, "64.0 MiB"), (5 << 40, "5,120 GiB")],
)  # fmt: skip
def test_a_size_is_told_in_a_unit_of_few_digits(nbytes, text):
    """Powers of 1024, and their names."""
    assert size(nbytes) == text


def test_a_table_goes_on_in_the_next_line_and_breaks_no_word():
    """Values are wrapped below each other; a long word stays whole."""
    path = "/" + "folder/" * 20
    text = table([("label", "word " * 30), ("", "more"), ("longest label", path)])
    lines = text.splitlines()
    assert lines[0].startswith("label          word")
    assert lines[1].startswith("               word")
    assert lines[2] == "               more"
    assert lines[3] == f"longest label  {path}"
    assert max(map(len, lines[:3])) <= 100


def test_the_rows_of_a_pool_tell_waits_and_faults(make_pool):
    """What went wrong is there, and only then."""
    layout = Layout([Field("a", torch.int64)])
    device = SimulatedDevice()
    pool = make_pool(device, slots=1, max_slots=1, timeout=0.001)
    assert {"faults", "given back"}.isdisjoint(dict(pool_rows(pool.stats())))
    with pool.lease(layout, rows=2) as lease:
        lease["a"] = 1
        lease.upload()
    with pytest.raises(PoolExhausted):
        pool.lease(layout, rows=1)
    device.finish_all()
    device.fail("copy")
    with pool.lease(layout, rows=1) as lease:
        lease["a"] = 1
        with pytest.raises(RuntimeError):
            lease.upload()
    device.finish_all()
    pool.lease(layout, rows=1).discard()
    stats = pool.stats()
    rows = dict(pool_rows(stats))
    assert rows["leases"] == "3 ready, 0 grown, 0 waited, 0 empty, 1 timed out, 0 refused"
    assert rows["waits"].startswith(f"1, {duration(stats.wait_ns)} in all")
    assert rows["faults"] == "1 uploads failed, 1 quarantines, 1 heals"
    assert rows["given back"] == "1 discarded, 0 dropped"
    assert rows["copied"] == "16 bytes and 0 bytes of padding, 16 bytes at the most"
    assert rows["advice"] == str(stats.advice())


def test_a_pool_on_the_cpu_is_said_to_have_nothing_pinned():
    """Where it is simulated, all is."""
    with StagingPool("cpu", slots=2) as pool:
        assert dict(pool_rows(pool.stats()))["slots"] == "2, together 512 KiB, 0 bytes pinned"
    with StagingPool(SimulatedDevice(), slots=2) as pool:
        assert dict(pool_rows(pool.stats()))["slots"] == "2, together 512 KiB, 512 KiB pinned"
