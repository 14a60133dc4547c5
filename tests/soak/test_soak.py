"""The soak: right traffic passes, wrong bytes are counted one by one, the guard is what keeps a late device right."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from batching.__main__ import main
from batching.soak import command
from batching.soak.plain import PlainLease, PlainWay
from batching.soak.traffic import Settings, Soak, open_seam, random_layout, random_lengths, random_writes
from batching.soak.values import (
    DTYPES,
    STAMP,
    Batch,
    DeviceValues,
    HostValues,
    Tally,
    WrongShape,
    is_stamp,
    number_of,
    stamp,
)
from staging import Field, Layout, StagingPool
from staging._device import CpuDevice
from staging.testing import SimulatedDevice, SimulatedEvent

EVERY_DTYPE = Layout(
    [Field(STAMP, torch.int64)]
    + [Field(str(dtype), dtype, "tokens") for dtype in DTYPES]
    + [Field("pairs", torch.uint16, shape=(2,))],
    "every dtype",
)
LENGTHS = {"rows": 3, "tokens": 50}
SMALL = Settings(threads=1, batches=300, seed=1, delays=False, largest=4096)


class LateDevice(SimulatedDevice):
    """Copies run after a random number of later ones, or when somebody waits for a slot. For one thread."""

    def __init__(self) -> None:
        super().__init__(on_sleep=lambda device: device.finish())
        self._choice = random.Random(5)

    def record(self, event: SimulatedEvent, stream: int) -> None:
        super().record(event, stream)
        while len(self.copies) > self._choice.randrange(8):
            self.finish(self._choice.randrange(len(self.copies)))


class StaleDevice(CpuDevice):
    """Every tenth copy delivers the first bytes of the copy before it."""

    def __init__(self) -> None:
        self.copies = 0
        self.before = torch.zeros(16, dtype=torch.uint8)

    def copy(self, landing, source, stream) -> None:
        super().copy(landing, source, stream)
        first = landing[:16].clone()
        self.copies += 1
        if self.copies % 10 == 0:
            landing[:16] = self.before
        self.before = first


class FailingDevice(CpuDevice):
    """The fifth copy raises."""

    copies = 0

    def copy(self, *arguments: Any) -> None:
        self.copies += 1
        if self.copies == 5:
            raise RuntimeError("injected: the fifth copy")
        super().copy(*arguments)


class LateReader(PlainWay):
    """Reads the values that it is given at the upload only."""

    def lease(self, layout, /, **lengths):
        return LateReaderLease(self, layout, lengths)


class LateReaderLease(PlainLease):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given: dict[str, Any] = {}

    def __setitem__(self, name: str, values: Any) -> None:
        self._given[name] = values

    def upload(self, out=None, after=None):
        for name, values in self._given.items():
            super().__setitem__(name, values)
        return super().upload()


def checked(tensors: dict[str, torch.Tensor], batch: Batch) -> list[int]:
    """Elements, checks, lowest and highest distance that one check counts."""
    numbers = torch.zeros(4, dtype=torch.int64)
    DeviceValues(4096, torch.device("cpu")).check(tensors, batch, Tally(numbers))
    return numbers.tolist()


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in HostValues(4096).columns(batch).items()}


def batch_of(number: int, uniform: frozenset[str] = frozenset()) -> Batch:
    return Batch(EVERY_DTYPE, LENGTHS, number, uniform)


@pytest.mark.parametrize("uniform", [frozenset(), frozenset(field.name for field in EVERY_DTYPE.fields[1:])])
def test_the_check_counts_each_wrong_element_of_each_dtype(uniform):
    """What the host made is right; one changed bit anywhere is one wrong element; a neighbour's stamp is all wrong."""
    batch = batch_of(7, uniform)
    tensors = tensors_of(batch)
    assert checked(tensors, batch) == [0, 0, 0, 0]
    for name, tensor in tensors.items():
        for position in (0, tensor.numel() - 1):
            spoiled = tensor.clone()
            bits = spoiled.view(torch.uint8).reshape(-1)
            bits[position * tensor.element_size()] ^= 1
            found = checked({**tensors, name: spoiled}, batch)
            assert found[:2] == [1, 1], (name, position)


def test_the_distance_is_that_of_the_stamps_and_of_nothing_else():
    """A later batch is above 0, an older one below; another column's bytes in a stamp's place are neither."""
    batch = batch_of(7)
    assert checked(tensors_of(batch_of(12)), batch)[1:] == [1, 0, 5]
    assert checked(tensors_of(batch_of(4)), batch)[1:] == [1, -3, 0]
    foreign = {**tensors_of(batch), STAMP: torch.tensor([12345, -1, 1 << 62])}
    assert checked(foreign, batch) == [3, 1, 0, 0]


def test_a_stamp_in_pieces_is_no_stamp():
    """Any run of bytes of another number's stamp in its place, at either end, is seen not to be one."""
    first, second = (torch.tensor([stamp(number)]) for number in (70_000, 140_000_000))
    assert number_of(torch.cat([first, second])).tolist() == [70_000, 140_000_000]
    for taken in range(1, 7):  # with the seventh it is the other one, the eighth is the same in all
        torn = first.clone()
        torn.view(torch.uint8)[:taken] = second.view(torch.uint8)[:taken]
        assert is_stamp(torch.cat([first, torn, second])).tolist() == [True, False, True], taken


def test_values_follow_from_stamp_and_position():
    """Another stamp changes about every value that has room to differ, and no column repeats itself."""
    columns, others = (HostValues(4096).columns(batch_of(number)) for number in (7, 8))
    for field in EVERY_DTYPE.fields[1:]:
        column, other = columns[field.name].ravel(), others[field.name].ravel()
        assert len(np.unique(column)) > min(len(column) // 2, 1), field
        if field.dtype != torch.bool:
            assert np.count_nonzero(column != other) >= 0.9 * len(column), field


def test_a_tensor_of_another_shape_is_an_error_of_its_own():
    """Shapes are known without the device."""
    batch = batch_of(7)
    with pytest.raises(WrongShape, match="pairs"):
        checked({**tensors_of(batch), "pairs": torch.zeros((3, 3), dtype=torch.uint16)}, batch)


def test_random_traffic_has_all_that_it_should():
    """Every dtype and form, one to twelve fields, lengths of 0, sizes from bytes to the largest and never beyond."""
    choice = random.Random(3)
    host_values = HostValues(1 << 17)
    dtypes, forms, sizes, fields, empty = set(), set(), [], set(), 0
    for number in range(1500):
        layout = random_layout(choice)
        lengths = random_lengths(choice, layout, 1 << 17)
        dtypes |= {field.dtype for field in layout.fields}
        fields.add(len(layout.fields))
        empty += 0 in lengths.values()
        sizes.append(layout.nbytes(**lengths))
        if sizes[-1] < 4096:
            batch = Batch(layout, lengths, number, frozenset())
            columns = host_values.columns(batch)
            forms |= {
                "records" if name is None else type(values)
                for name, values in random_writes(choice, batch, columns)
                if name != STAMP
            }
    assert dtypes == set(DTYPES)
    assert fields == set(range(1, 13))
    assert forms == {"records", list, tuple, np.ndarray, torch.Tensor}
    assert empty > 50
    assert sorted(sizes)[100] < 100
    assert 1 << 16 < max(sizes) <= 1 << 17


@pytest.mark.parametrize("delays", [False, True])
def test_a_soak_of_a_sound_pool_finds_nothing_and_its_books_add_up(delays):
    """Four threads on a ring of two to four: every fate happens, nothing is wrong, every batch is accounted for."""
    with StagingPool("cpu", slots=2, max_slots=4, slot_bytes=64) as pool:
        result = Soak(pool, Settings(threads=4, batches=100, seed=2, delays=delays, largest=8192)).run()
    assert (result.failure, result.interrupted) == (None, False)
    assert (result.bad_checks, result.bad_elements, result.lowest, result.highest) == (0, 0, 0, 0)
    assert result.batches == 400
    assert result.checks > result.uploads > 300
    assert result.stats.bytes_used == result.bytes
    assert result.stats.discards > 0
    assert result.stats.dropped > 0
    assert result.stats.enlarged > 0
    assert 0 < len(result.host_ns) <= result.uploads


def test_with_the_guard_a_late_device_delivers_every_upload():
    """Copies run late and out of order: slots are met in flight, and every byte is right, also long after."""
    device = LateDevice()
    with StagingPool(open_seam(device), slots=2, max_slots=3) as pool:
        result = Soak(pool, SMALL).run()
    assert device.violations == []
    assert result.failure is None
    assert (result.bad_elements, result.lowest, result.highest) == (0, 0, 0)
    assert result.stats.met_in_flight > 100
    assert result.stats.leases_waited > 50


def test_without_the_guard_the_same_traffic_gets_bytes_of_later_batches():
    """The positive control: slots are rewritten under their copies, the soak counts it, and the stamps are ahead."""
    device = LateDevice()
    with StagingPool(open_seam(device, guard=False), slots=2, max_slots=3) as pool:
        result = Soak(pool, SMALL).run()
    assert device.violations
    assert result.failure is None
    assert result.bad_checks > 10
    assert result.bad_elements > result.bad_checks
    assert 0 < result.highest < 300


def test_bytes_of_an_older_batch_are_found_and_lie_behind():
    """A copy that delivers what the one before it carried: mismatches, and negative distances."""
    with StagingPool(StaleDevice()) as pool:
        result = Soak(pool, SMALL).run()
    assert result.bad_checks >= result.stats.uploads // 10
    assert result.lowest < 0
    assert result.highest == 0


def test_one_thread_and_one_seed_repeat_the_same_run():
    """All choices come from the seed: counts agree between two runs, and differ with another seed."""

    def counts(seed: int) -> tuple[Any, ...]:
        with StagingPool(open_seam(LateDevice(), guard=False), slots=2, max_slots=3) as pool:
            result = Soak(pool, Settings(threads=1, batches=100, seed=seed, delays=False, largest=4096)).run()
        return result.bytes, result.checks, result.bad_elements, result.stats.met_in_flight, result.highest

    assert counts(1) == counts(1)
    assert counts(1) != counts(2)


def test_the_per_call_way_carries_the_same_batches():
    """With one thread the plain way sees the very batches that the pool sees, and is right as well."""
    with StagingPool("cpu") as pool:
        through_pool = Soak(pool, SMALL).run()
    plain = Soak(PlainWay(torch.device("cpu")), SMALL).run()
    assert (plain.failure, plain.bad_elements, plain.stats, plain.allocations) == (None, 0, None, None)
    for name in ("batches", "uploads", "fields", "bytes", "checks"):
        assert getattr(plain, name) == getattr(through_pool, name)


def test_values_that_are_read_too_late_are_found():
    """Arrays and tensors are overwritten as soon as they are written to a lease, which has to have copied them."""
    assert Soak(LateReader(torch.device("cpu")), SMALL).run().bad_checks > 100


def test_slots_made_beforehand_are_the_last_allocations():
    """--warm: all slots, in full size, before the first batch; the traffic allocates nothing."""
    with StagingPool("cpu", slots=2, max_slots=4, slot_bytes=64) as pool:
        result = Soak(pool, Settings(threads=4, batches=60, seed=4, delays=False, largest=4096, warm=True)).run()
    assert result.allocations == (6, 0, 0)  # two small ones of the pool's, and four large ones


def test_an_error_in_a_thread_ends_the_soak_and_is_reported(monkeypatch, capsys):
    """Thread, batch, seed and the error itself; status 1, never swallowed."""
    monkeypatch.setattr(command, "open_seam", lambda device, guard: FailingDevice())
    status = main(["soak", "--device", "cpu", "--threads", "2", "--batches", "1000000", "--seed", "5", "--no-delays"])
    out, err = capsys.readouterr()
    assert status == 1
    assert "ended early" in out
    assert "RuntimeError: injected: the fifth copy" in err
    assert "soak: thread " in err
    assert ", seed 5: " in err


def test_books_that_do_not_add_up_are_a_failure():
    """A lease that nobody ended is seen when the threads are over."""
    with StagingPool("cpu") as pool:
        lost = pool.lease(EVERY_DTYPE, **LENGTHS)
        result = Soak(pool, Settings(threads=1, batches=5, seed=1, largest=4096)).run()
        lost.discard()
    assert "1 slots filling" in result.failure


def test_an_interrupt_ends_the_soak_with_what_was_seen(monkeypatch, capsys):
    """Ctrl-C: the threads finish their batch, the table is printed, status 130."""

    def interrupt(soak: Soak) -> None:
        if soak.batches > 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_with_progress", lambda soak: soak.run(interrupt))
    assert main(["soak", "--device", "cpu", "--threads", "2", "--batches", "1000000", "--beside"]) == 130
    out, err = capsys.readouterr()
    assert "ended early" in out
    assert "0 in " in out.split("mismatches", 1)[1]
    assert "per call" not in out
    assert "soak: interrupted" in err
    assert "Traceback" not in err


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    """Both ways, one after the other; what the table says stands in the JSON; notes about drops stay out of the way."""
    path = tmp_path / "soak.json"
    arguments = ["--threads", "2", "--batches", "40", "--seed", "9", "--no-delays", "--warm", "--beside"]
    assert main(["soak", "--device", "cpu", *arguments, "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == "soak: seed 9, cpu\n"
    assert out.count("mismatches") == 2
    assert out.count("p99.9") == 2
    assert "0 after the warm-up" in out
    document = json.loads(path.read_text())
    pool, plain = document["results"]
    assert document["settings"]["seed"] == 9
    assert document["guard"] is True
    assert (pool["way"], pool["batches"], pool["bad_elements"]) == ("pool", 80, 0)
    assert (plain["way"], plain["batches"], plain["pool"]) == ("plain", 80, None)
    assert set(pool["host_us"]) == {"median", "p99", "p99.9", "max"}


def test_mismatches_give_status_1(monkeypatch, capsys):
    """The exit status, and the line that says how far away the bytes were; with the guard in, status 0."""
    monkeypatch.setattr(command, "open_seam", lambda device, guard: open_seam(LateDevice(), guard=guard))
    arguments = ["soak", "--device", "cpu", "--threads", "1", "--batches", "200", "--seed", "1", "--slots", "2"]
    assert main([*arguments, "--no-delays", "--no-guard"]) == 1
    out = capsys.readouterr().out
    assert "guard" in out
    found = re.search(
        r"mismatches +(\d+) of (\d+) checks, [\d,]+ elements; stamps are [+-]\d+ to \+(\d+) uploads away", out
    )
    assert found is not None
    assert all(int(number) > 0 for number in found.groups())
    assert main([*arguments, "--no-delays", "--debug"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--batches", "0"],
        ["--threads", "x"],
        ["--seconds", "1", "--batches", "1"],
        ["--slots", "4", "--max-slots", "2"],
        ["--plain", "--no-guard"],
        ["--plain", "--beside"],
        ["--batches", "1", "--json", "/nowhere/at/all.json"],
    ],
    ids=" ".join,
)
def test_mistakes_on_the_command_line_exit_with_status_2(arguments, capsys):
    """A message, no traceback."""
    try:
        status = main(["soak", "--device", "cpu", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_asking_for_cuda_without_a_device_says_so(capsys):
    """Status 2 and the way out."""
    assert main(["soak", "--device", "cuda"]) == 2
    assert "use 'cpu'" in capsys.readouterr().err
