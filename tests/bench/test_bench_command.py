"""`python -m batching bench` on the CPU, with little to do: the tables, the JSON, and how it ends."""

from __future__ import annotations

import json

import pytest

from batching.__main__ import main
from batching.bench import sections, strategies, timing
from batching.bench.kernels import SHAPES
from batching.bench.report import claims
from batching.bench.sections import Results, Settings
from batching.bench.timing import Samples

TINY = ["bench", "--device", "cpu", "--rows", "1,3", "--repeats", "2", "--batches", "3"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Collecting garbage before each block takes longer than all else here."""
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


def test_the_command_prints_tables_and_writes_json(tmp_path, capsys):
    """All sections; those that need a GPU say so."""
    path = tmp_path / "bench.json"
    assert main([*TINY, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for part in ("cpu, nothing is pinned", "## Host time", "## What buys what", "## The whole upload", "## Packing"):
        assert part in printed
    for section in ("queued", "copies", "kernel"):
        assert f"Not run on the CPU: {section}, " in printed
    assert "What was to be shown" not in printed
    found = json.loads(path.read_text())
    assert set(found["host"]) == set(found["prefill"]) == {"1", "3"}
    host = found["host"]["3"]
    assert set(host) == {
        runner
        for name, runner in vars(strategies).items()
        if name.isupper() and isinstance(runner, str) and not name.startswith("_")
    }
    one = host[strategies.OURS_RECORDS]
    assert one["copies"] == 1
    assert one["samples"] == 6
    assert len(one["medians_us"]) == 2
    assert one["lowest_median_us"] <= one["median_us"] <= one["highest_median_us"] <= one["p99_us"] + 1e9
    assert found["prefill"]["1"]["one by one, 13 arrays"]["copies"] == 13
    assert found["queued"] is found["copies"] is found["kernel"] is None
    assert found["repeats"] == 2
    assert found["pool"]["allocations"] == found["pool"]["slots"] == 4


def test_every_table_is_markdown(capsys):
    """Each row of a table has as many cells as its head."""
    assert main([*TINY, "--sections", "host,packing"]) == 0
    cells = 0
    for line in capsys.readouterr().out.splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        cells = cells or line.count("|")
        assert line.count("|") == cells, line


def test_a_wrong_strategy_ends_the_command_before_anything_is_timed(monkeypatch, capsys):
    """Status 1, the strategy and the field named, no table."""
    honest = strategies.Slab.by_records

    def wrong(self, batch):
        tensors = honest(self, batch)
        tensors["min_ps"][0] += 1
        return tensors

    monkeypatch.setattr(strategies.Slab, "by_records", wrong)
    monkeypatch.setattr(sections, "time_all", lambda *_: pytest.fail("timed a wrong strategy"))
    assert main([*TINY, "--sections", "host"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if line.startswith("bench: results differ")]
    assert len(lines) == 2
    assert lines[0].startswith("bench: results differ: columns, 1 rows, fresh slab, records: min_ps, row 0: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "0"],
        ["--rows", "1,,4"],
        ["--rows", "many"],
        ["--rows", "100000000"],
        ["--sections", "host,nothing"],
        ["--repeats", "-1"],
        ["--device", "tpu"],
    ],
)
def test_a_mistake_is_a_usage_error(arguments, capsys):
    """Status 2 and one line, no traceback."""
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path, capsys, monkeypatch):
    """A missing folder, or a folder itself."""
    monkeypatch.setattr(sections, "compare_all", lambda *_: pytest.fail("measured in vain"))
    for path in (tmp_path / "missing" / "x.json", tmp_path):
        assert main([*TINY, "--json", str(path)]) == 2
        assert "cannot write" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch, capsys):
    """As the replay."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("batching.bench.command.compare_all", interrupted)
    assert main(TINY) == 130
    assert capsys.readouterr().err.endswith("bench: interrupted\n")


def test_no_cuda_is_2(monkeypatch, capsys):
    """Asked for, and not there."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*TINY, "--device", "cuda"]) == 2
    assert "bench: " in capsys.readouterr().err


def test_the_progress_bar_ends_where_it_said(monkeypatch):
    """The number of steps that was announced is the number that is made."""
    with sections.bench_pool("cpu") as pool:
        machine = timing.Machine(pool.device)
        settings = Settings(rows=(1, 2), repeats=2, batches=2)
        made: list[None] = []
        assert sections.compare_all(machine, pool, settings, lambda: made.append(None)) == []
        sections.time_all(machine, pool, settings, lambda: made.append(None))
        assert len(made) == sections.steps(settings, pool.device)


def constant(value_us: float, quiet: float | None = None) -> Samples:
    samples = Samples([[int(value_us * 1e3)] * 4] * 5, still_busy=20)
    if quiet is not None:
        samples.quiet = [[int(quiet * 1e3)] * 4] * 5
    return samples


def test_a_ratio_is_the_median_of_the_repeats_ratios():
    """What slows both down in one repeat does not count."""
    one = Samples([[100_000], [1_000_000], [120_000]])
    other = Samples([[50_000], [500_000], [50_000]])
    assert one.over(other) == 2.0
    assert (one.median, one.p99 > 900) == (120.0, True)


def test_a_claim_that_does_not_hold_says_so():
    """Numbers made up: slower than the slab, and too slow behind queued work."""
    names = [name for key, name in vars(strategies).items() if key.isupper() and isinstance(name, str)]
    host = {1: {name: constant(10) for name in names}}
    host[1][strategies.OURS_RECORDS] = constant(11)
    queued = {1: {name: constant(10, quiet=9) for name in names}}
    queued[1][strategies.FIXED_COLUMNS] = constant(21, quiet=10)
    kernel = {SHAPES[0].label: {"serial": [9.0] * 5, "ours": [4.0] * 5, "nothing": [1.0] * 5}}
    found = {claim: holds for claim, _, holds in claims(Results(host=host, queued=queued, kernel=kernel))}
    assert found["never slower than the slab with equal fill, columns, 1 rows"]
    assert not found["never slower than the slab with equal fill, records, 1 rows"]
    assert not found["ours fresh, records: 2x faster than fresh pinned per field, 1 rows"]
    assert found["ours fixed at most 2.5x the floor, 1 rows"]
    assert not found["behind queued work within 2x of quiet, 1 rows"]
    assert not found["kernel 3x less GPU time than the serial form, 1 x 131072 + 64"]
