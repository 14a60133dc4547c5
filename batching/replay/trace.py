"""Recorded traffic: read it from an Azure CSV or a Mooncake JSONL file, or generate the built-in trace."""

from __future__ import annotations

import codecs
import itertools
import json
import random
import re
import reprlib
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import attrs

BLOCK_TOKENS = 512
"""Prompt tokens that one block id stands for."""

MAX_LENGTH = 2**31 - 1
"""Longest prompt or output accepted, in tokens."""


@attrs.frozen(slots=True)
class TraceRequest:
    """One request as it was recorded."""

    arrival: float
    """Seconds after the first request of the trace; negative where the file is out of order."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens that were generated, at least 1."""
    blocks: tuple[int, ...] = ()
    """One id per block of the prompt, the last one may be partial; equal leading ids are a shared prefix.
    Empty when the trace does not record them."""


class TraceError(ValueError):
    """A file that is no trace (`line` is None), or a row of it that cannot be used."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        if line is None:
            message = f"{path}: {reason}; a trace is {_FORMATS}"
        else:
            message = f"{path}, line {line}: {reason}; --skip-bad-rows leaves such rows out"
        super().__init__(message)
        self.path = path
        self.line = line
        self.reason = reason


def read_trace(
    path: Path | str,
    *,
    limit: int | None = None,
    on_bad_row: Callable[[TraceError], None] | None = None,
) -> list[TraceRequest]:
    """Read the requests of a trace file, in file order; its format is recognised by its first line.

    Reading stops after `limit` requests. A row that cannot be used goes to `on_bad_row` and is left out;
    without `on_bad_row` the first such row raises.

    Raises `TraceError` for a bad row and, whether or not `on_bad_row` is given, for a file that cannot be
    read, has neither format, or holds no usable row. Raises `ValueError` for a `limit` below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    path = Path(path)
    requests: list[TraceRequest] = []
    parse: Callable[[str], _Row] | None = None
    start = 0
    with closing(_lines(path)) as lines:
        for number, line in lines:
            if parse is None:
                if line.split(b",") == _AZURE_HEADER:
                    parse = _azure_row
                    continue
                if not line.startswith(b"{"):
                    raise TraceError(path, None, f"the first line is {_shown(line)}")
                parse = _mooncake_row
            try:
                nanoseconds, input_length, output_length, blocks = parse(_text(line))
            except _BadRow as bad:
                error = TraceError(path, number, str(bad))
                if on_bad_row is None:
                    raise error from None
                on_bad_row(error)
                continue
            if not requests:
                start = nanoseconds
            arrival = (nanoseconds - start) / 1_000_000_000
            requests.append(TraceRequest(arrival, input_length, output_length, blocks))
            if len(requests) == limit:
                break
    if not requests:
        raise TraceError(path, None, "the file is empty" if parse is None else "the file holds no usable row")
    return requests


def builtin_trace(requests: int = 400, seed: int = 0) -> list[TraceRequest]:
    """Generate the built-in trace: `requests` chat-like requests, the same ones for the same `seed`.

    Most prompts open with one system prompt, and conversations come back with a longer prompt each turn.
    The corner cases occur as well: one-token prompts, a few documents of some 20,000 tokens, bursts, prompts
    of whole blocks, and such prompts sent again, so that all of their blocks are cached.
    """
    draw = random.Random(seed)
    new_ids = itertools.count()
    system_prompt = tuple(itertools.islice(new_ids, 2))
    conversations: list[TraceRequest] = []  # the latest turn of each
    whole_block_prompts: list[TraceRequest] = []
    rows: list[TraceRequest] = []
    milliseconds = 0
    burst = 0

    for _ in range(requests):
        if rows and burst == 0:
            milliseconds += 1 + int(draw.expovariate(1 / 40))
            burst = draw.randint(4, 12) if draw.random() < 0.03 else 0
        else:
            burst = max(0, burst - 1)

        known: tuple[int, ...] = ()
        length = 1 + int(draw.lognormvariate(5.0, 1.0))  # a message: about 150 tokens, now and then thousands
        output_length = min(120, 1 + int(draw.expovariate(1 / 30)))
        kind = draw.random()
        if kind < 0.04:
            length = 1
        elif kind < 0.07:
            length = min(20_000, int(3_000 * draw.paretovariate(0.8)))
        elif kind < 0.12 and whole_block_prompts:
            again = draw.choice(whole_block_prompts)
            known, length = again.blocks, again.input_length
        elif kind < 0.60 and conversations:
            turn = conversations.pop(draw.randrange(len(conversations)))
            known = turn.blocks[: turn.input_length // BLOCK_TOKENS]
            length += turn.input_length + turn.output_length
        elif kind < 0.90:
            known = system_prompt
            length += len(system_prompt) * BLOCK_TOKENS
        if length > 1 and draw.random() < 0.12:
            length = _block_count(length) * BLOCK_TOKENS

        new = itertools.islice(new_ids, _block_count(length) - len(known))
        row = TraceRequest(milliseconds / 1000, length, output_length, known + tuple(new))
        rows.append(row)
        if length % BLOCK_TOKENS == 0:
            whole_block_prompts.append(row)
        if 1 < length < 6_000:
            conversations.append(row)
    return rows


def write_mooncake(rows: Iterable[TraceRequest], path: Path | str) -> None:
    """Write requests as Mooncake JSONL, which keeps whole milliseconds of each arrival.

    Raises `ValueError` for what the format cannot hold: an arrival before the start, or a request without
    the ids of all its blocks.
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(rows, start=1):
            count = _block_count(row.input_length)
            if row.arrival < 0 or len(row.blocks) != count:
                raise ValueError(
                    f"request {number} does not fit the Mooncake format: it needs an arrival of at least 0, "
                    f"got {row.arrival}, and {count} block ids, got {len(row.blocks)}"
                )
            record = {
                "timestamp": round(row.arrival * 1000),
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": row.blocks,
            }
            file.write(json.dumps(record) + "\n")


_Row = tuple[int, int, int, tuple[int, ...]]  # nanoseconds since some epoch, input and output length, blocks

_FORMATS = (
    "either a CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens (Azure) or JSON lines with "
    "timestamp, input_length, output_length and hash_ids (Mooncake)"
)
_AZURE_HEADER = [b"TIMESTAMP", b"ContextTokens", b"GeneratedTokens"]
# The fraction has its own group because the recordings have seven decimals, one more than datetime reads.
_AZURE_TIMESTAMP = re.compile(r"([0-9-]{10} [0-9:]{8})(?:\.([0-9]{1,9}))?(?:\+00:00)?")
_AZURE_INTEGER = re.compile(r"-?[0-9]{1,18}")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_MILLISECONDS = 2**53  # beyond it a float no longer tells one millisecond from the next


class _BadRow(Exception):
    """Why a row cannot be used; the reader adds file and line."""


def _lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """The lines that are not blank, stripped, with their numbers. Bytes, so that one line that is not text
    costs that line only."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                line = line.strip()
                if line:
                    yield number, line
    except OSError as error:
        raise TraceError(path, None, f"cannot read the file ({error.strerror})") from error


def _shown(line: bytes) -> str:
    return reprlib.repr(line[:80].decode("utf-8", errors="replace"))


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadRow(f"byte {error.start + 1} of the row is not UTF-8") from None


def _azure_row(line: str) -> _Row:
    columns = [column.strip() for column in line.split(",")]
    if len(columns) != len(_AZURE_HEADER):
        raise _BadRow(f"expected {len(_AZURE_HEADER)} columns, found {len(columns)}")
    timestamp, *lengths = columns
    input_length, output_length = (int(x) if _AZURE_INTEGER.fullmatch(x) else x for x in lengths)
    return (
        _azure_nanoseconds(timestamp),
        _integer("ContextTokens", input_length, 1, MAX_LENGTH),
        _integer("GeneratedTokens", output_length, 1, MAX_LENGTH),
        (),
    )


def _azure_nanoseconds(timestamp: str) -> int:
    match = _AZURE_TIMESTAMP.fullmatch(timestamp)
    try:
        if match is None:
            raise ValueError
        seconds = (datetime.fromisoformat(match[1]) - datetime.min) // timedelta(seconds=1)
    except ValueError:
        raise _BadRow(f"TIMESTAMP must look like 2023-11-16 18:15:46.6805900, got {reprlib.repr(timestamp)}") from None
    return seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))


def _mooncake_row(line: str) -> _Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadRow(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):
        raise _BadRow("not usable JSON: a number is too long, or the nesting too deep") from None
    if not isinstance(row, dict):
        raise _BadRow(f"expected a JSON object, got {reprlib.repr(row)}")
    missing = [key for key in _MOONCAKE_KEYS if key not in row]
    if missing:
        raise _BadRow(f"missing {', '.join(missing)}")
    input_length = _integer("input_length", row["input_length"], 1, MAX_LENGTH)
    return (
        _integer("timestamp", row["timestamp"], 0, _MAX_MILLISECONDS) * 1_000_000,
        input_length,
        _integer("output_length", row["output_length"], 1, MAX_LENGTH),
        _mooncake_blocks(row["hash_ids"], input_length),
    )


def _mooncake_blocks(ids: object, input_length: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(block) is not int or block < 0 for block in ids):
        raise _BadRow(f"hash_ids must be a list of integers of at least 0, got {reprlib.repr(ids)}")
    if len(ids) != _block_count(input_length):
        raise _BadRow(
            f"{input_length} tokens are {_block_count(input_length)} blocks of {BLOCK_TOKENS}, "
            f"but hash_ids has {len(ids)}"
        )
    # An id stands for its block and all before it: a second one would make two blocks share one entry.
    if len(set(ids)) != len(ids):
        raise _BadRow("hash_ids has the same id twice")
    return tuple(ids)


def _integer(name: str, value: object, low: int, high: int) -> int:
    # Not isinstance: JSON's true is an int to Python.
    if type(value) is not int or not low <= value <= high:
        raise _BadRow(f"{name} must be an integer from {low} to {high}, got {reprlib.repr(value)}")
    return value


def _block_count(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
