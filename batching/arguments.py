"""What the commands share: reading arguments, telling mistakes, and saying numbers in units that people read."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from staging import PoolStats

_LINE = 100
_STATUSES = {
    2: "it could not be run: a wrong option, a file, a device, memory",
    130: "interrupted (Ctrl-C)",
    141: "nobody reads the output any more, as in `… | head`",
}


class CommandError(Exception):
    """What the person at the command line can put right: told in one line, status 2."""


class Parser(argparse.ArgumentParser):
    """Answers a mistake with the mistake, not with all the options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\noptions and examples: {self.prog} --help\n")


def lessons(examples: Mapping[str, str], statuses: Mapping[int, str]) -> str:
    """The end of a command's help: examples, each with what it does, and what the exit status says."""
    lines = ["examples:"]
    for command, what in examples.items():
        lines += [f"  python -m batching {command}", f"      {what}"]
    lines += ["", "exit status:"]
    for status, meaning in sorted({**_STATUSES, **statuses}.items()):
        lines.append(textwrap.fill(meaning, 80, initial_indent=f"  {status:<5}", subsequent_indent=" " * 7))
    return "\n".join(lines)


# Arguments.


def chosen_device(wish: str) -> str:
    """`auto` is CUDA if there is a device."""
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wish


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads an argument that is a whole number within these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            bounds = f"of {least:,} or more" if most is None else f"from {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return value

    return read


positive = whole(1)
"""Reads an argument that is 1 or more."""


def number(least: float, most: float) -> Callable[[str], float]:
    """Reads an argument that is a number within these bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:,} to {most:,}")
        return value

    return read


def output(text: str) -> Path:
    """Reads the name of a file to write at the end: one that cannot be written is found out before the work is done."""
    path = Path(text)
    try:
        folder = path.absolute().parent
        if path.is_dir():
            problem = "it is a folder"
        elif not folder.is_dir():
            problem = f"there is no folder {folder}"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            problem = "permission denied"
        else:
            return path
    except OSError as error:
        problem = str(error.strerror)
    raise argparse.ArgumentTypeError(f"cannot write {text}: {problem}")


def write_output(path: Path, text: str) -> None:
    """Write it; `CommandError` when that fails after all."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def is_out_of_memory(error: Exception) -> bool:
    """torch has a type of its own only for a GPU's memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


# Tables.


def device_name(device: torch.device) -> str:
    """For tables: the name of a GPU, with its index."""
    return f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else str(device)


def duration(ns: float) -> str:
    """Nanoseconds in a unit that leaves few digits: `1.07 ms`, `42.1 s`, `3 min 12 s`."""
    if ns >= 3600e9:
        return f"{ns // 3600e9:.0f} h {ns % 3600e9 // 60e9:02.0f} min"
    if ns >= 60e9:
        return f"{ns // 60e9:.0f} min {ns % 60e9 // 1e9:02.0f} s"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{_three_digits(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def size(nbytes: int) -> str:
    """Bytes in a unit that leaves few digits: `512 bytes`, `39.6 KiB`, `1.00 MiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{_three_digits(nbytes / (1 << power))} {unit}"
    return f"{nbytes} bytes"


def pool_rows(stats: PoolStats) -> list[tuple[str, str]]:
    """What a pool says of itself, for a table: all that is not 0 and not only of the moment."""
    outcomes = ("ready", "grown", "waited", "empty", "timed_out", "refused")
    leases = ", ".join(f"{getattr(stats, f'leases_{name}'):,} {name.replace('_', ' ')}" for name in outcomes)
    waits = "none"
    if stats.waits:
        waits = (
            f"{stats.waits:,}, {duration(stats.wait_ns)} in all, {duration(stats.wait_ns_max)} the longest, "
            f"{stats.waiting_peak:,} at once at the most"
        )
    rows = [("leases", leases), ("waits", waits)]
    if stats.discards or stats.dropped:
        rows.append(("given back", f"{stats.discards:,} discarded, {stats.dropped:,} dropped"))
    copied = f"{size(stats.bytes_used)} and {size(stats.bytes_padded)} of padding, {size(stats.bytes_peak)} at the most"
    made = f"{stats.allocations:,} made in {duration(stats.allocation_ns)}, {stats.enlarged:,} to enlarge a slot"
    rows += [
        ("copies", f"{stats.uploads:,} for {stats.fields:,} fields: {stats.copies_avoided:,} avoided"),
        ("copied", copied),
        ("slots", f"{stats.slots:,}, together {size(stats.host_bytes)}, {size(stats.pinned_bytes)} pinned"),
        ("slots in flight", f"{stats.in_flight_peak:,} at the most"),
        ("slots met in flight", f"{stats.met_in_flight:,}"),
        ("host buffers", made),
    ]
    names = ("uploads_failed", "allocations_failed", "quarantines", "heals", "violations")
    faults = [f"{getattr(stats, name):,} {name.replace('_', ' ')}" for name in names if getattr(stats, name)]
    if faults:
        rows.append(("faults", ", ".join(faults)))
    return [*rows, ("advice", str(stats.advice()))]


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns; what is too long for a line goes on in the next. Only a long word makes a line longer."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows) + 2
    lines: list[str] = []
    for label, value in rows:
        parts = textwrap.wrap(value, _LINE - width, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{name:<{width}}{part}" for name, part in zip([label] + [""] * len(parts), parts, strict=False)]
    return "\n".join(lines)


def _three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
