"""Reading recorded traffic: both formats, every kind of bad row, and the built-in trace."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.replay.trace import (
    BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    builtin_trace,
    read_trace,
    write_mooncake,
)

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE_ROW = '{"timestamp": 5, "input_length": 513, "output_length": 7, "hash_ids": [0, 9]}\n'

RECORDED = {
    "azure_conv_2023.csv": 19_366,
    "azure_code_2023.csv": 8_819,
    "mooncake_conversation.jsonl": 12_031,
    "mooncake_synthetic.jsonl": 3_993,
}


def write(tmp_path: Path, content: str | bytes) -> Path:
    # A name that says nothing: formats are told by content.
    path = tmp_path / "trace.dat"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def mooncake(**changes: object) -> str:
    row = {"timestamp": 5, "input_length": 513, "output_length": 7, "hash_ids": [0, 9]}
    return json.dumps({**row, **changes})


def test_azure_rows_become_requests_without_blocks(tmp_path):
    """Seven decimals, fewer or none: arrivals are seconds after the first row."""
    path = write(
        tmp_path,
        AZURE_HEADER
        + "2023-11-16 23:59:59.6805900,374,44\n"
        + "2023-11-17 00:00:00.6805901,1,1\n"
        + "2023-11-17 00:00:01.68059,20,3\n"
        + "2023-11-17 00:00:02,2147483647,5\n",
    )
    assert read_trace(path) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(1.0000001, 1, 1),
        TraceRequest(2.0, 20, 3),
        TraceRequest(2.31941, 2147483647, 5),
    ]


def test_mooncake_rows_become_requests_with_blocks(tmp_path):
    """Milliseconds become seconds after the first row; unknown keys are ignored."""
    path = write(tmp_path, MOONCAKE_ROW + mooncake(timestamp=1505, extra="x") + "\n")
    assert read_trace(str(path)) == [
        TraceRequest(0.0, 513, 7, (0, 9)),
        TraceRequest(1.5, 513, 7, (0, 9)),
    ]


@pytest.mark.parametrize("text", [AZURE_HEADER + AZURE_ROW, MOONCAKE_ROW], ids=["azure", "mooncake"])
@pytest.mark.parametrize(
    "dress",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text.replace("\n", "\r\n\r\n"),
        lambda text: "\n  \n" + text.replace("\n", "\n\n"),
        lambda text: text.rstrip("\n"),
    ],
    ids=["bom", "crlf", "bom-crlf-blank", "blank-lines", "no-last-newline"],
)
def test_dress_of_a_text_file_does_not_matter(tmp_path, text, dress):
    """A byte order mark, line ends of another system and blank lines change nothing."""
    assert read_trace(write(tmp_path, dress(text))) == read_trace(write(tmp_path, text))


def test_rows_out_of_order_stay_in_file_order(tmp_path):
    """An earlier arrival further down is kept there, with a negative arrival."""
    path = write(tmp_path, mooncake(timestamp=100) + "\n" + mooncake(timestamp=40) + "\n")
    assert [request.arrival for request in read_trace(path)] == [0.0, -0.06]


def test_limit_counts_good_rows_and_reads_no_further(tmp_path):
    """The bad row behind the limit is never seen; the one before it does not count."""
    path = write(tmp_path, MOONCAKE_ROW + "{\n" + MOONCAKE_ROW + "{\n")
    bad: list[TraceError] = []
    assert len(read_trace(path, limit=2, on_bad_row=bad.append)) == 2
    assert [error.line for error in bad] == [2]


def test_limit_below_one_is_refused(tmp_path):
    """A limit of 0 would be an empty trace."""
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_trace(write(tmp_path, MOONCAKE_ROW), limit=0)


BAD_MOONCAKE = {
    "truncated": ('{"timestamp": 5, "input_l', "not JSON"),
    "no-object": ("[1, 2]", "expected a JSON object, got [1, 2]"),
    "deep": ("[" * 200_000, "nesting too deep"),
    "long-number": ('{"timestamp": ' + "9" * 5000 + "}", "a number is too long"),
    "missing-keys": ('{"timestamp": 5, "input_length": 3}', "missing output_length, hash_ids"),
    "float-length": (mooncake(input_length=513.0), "from 1 to 2147483647, got 513.0"),
    "bool-length": (mooncake(output_length=True), "output_length must be an integer"),
    "null-length": (mooncake(output_length=None), "got None"),
    "text-length": (mooncake(input_length="513"), "got '513'"),
    "nan-length": (mooncake(input_length=float("nan")), "got nan"),
    "nan-timestamp": (mooncake(timestamp=float("nan")), "timestamp must be an integer"),
    "infinite-timestamp": (mooncake(timestamp=float("inf")), "got inf"),
    "negative-timestamp": (mooncake(timestamp=-1), "timestamp must be an integer from 0"),
    "late-timestamp": (mooncake(timestamp=10**400), "timestamp must be an integer from 0"),
    "zero-input": (mooncake(input_length=0, hash_ids=[]), "input_length must be an integer from 1"),
    "zero-output": (mooncake(output_length=0), "output_length must be an integer from 1"),
    "long-input": (mooncake(input_length=2**31), "got 2147483648"),
    "long-output": (mooncake(output_length=2**31), "got 2147483648"),
    "ids-no-list": (mooncake(hash_ids="09"), "hash_ids must be a list of integers of at least 0, got '09'"),
    "ids-negative": (mooncake(hash_ids=[0, -9]), "hash_ids must be a list"),
    "ids-bool": (mooncake(hash_ids=[0, True]), "hash_ids must be a list"),
    "ids-float": (mooncake(hash_ids=[0, 9.0]), "hash_ids must be a list"),
    "ids-too-few": (mooncake(hash_ids=[0]), "513 tokens are 2 blocks of 512, but hash_ids has 1"),
    "ids-too-many": (mooncake(hash_ids=[0, 9, 10]), "hash_ids has 3"),
    "ids-twice": (mooncake(hash_ids=[9, 9]), "the same id twice"),
    "not-utf8": (b'{"timestamp": 5, "note": "\xff"}', "byte 27 of the row is not UTF-8"),
}

BAD_AZURE = {
    "few-columns": ("2023-11-16 18:15:46.6805900,374", "expected 3 columns, found 2"),
    "many-columns": (AZURE_ROW.strip() + ",1", "expected 3 columns, found 4"),
    "header-again": (AZURE_HEADER.strip(), "TIMESTAMP must look like 2023-11-16 18:15:46.6805900"),
    "no-timestamp": (",374,44", "TIMESTAMP must look like"),
    "no-such-day": ("2023-02-30 18:15:46.6805900,374,44", "got '2023-02-30 18:15:46.6805900'"),
    "no-such-hour": ("2023-02-20 25:15:46,374,44", "TIMESTAMP must look like"),
    "empty-length": ("2023-11-16 18:15:46,,44", "ContextTokens must be an integer from 1 to 2147483647"),
    "float-length": ("2023-11-16 18:15:46,374.0,44", "got '374.0'"),
    "grouped-length": ("2023-11-16 18:15:46,1_000,44", "got '1_000'"),
    "other-digits": ("2023-11-16 18:15:46,\u0663,44", "ContextTokens must be an integer"),
    "nan-length": ("2023-11-16 18:15:46,374,nan", "GeneratedTokens must be an integer"),
    "negative-length": ("2023-11-16 18:15:46,-374,44", "got -374"),
    "zero-output": ("2023-11-16 18:15:46,374,0", "GeneratedTokens must be an integer from 1"),
    "long-input": ("2023-11-16 18:15:46,2147483648,44", "got 2147483648"),
    "endless-length": ("2023-11-16 18:15:46," + "9" * 9000 + ",44", "got '999999999999...9999999999999'"),
    "not-utf8": (b"2023-11-16 18:15:46,\xff,44", "byte 21 of the row is not UTF-8"),
}


@pytest.mark.parametrize(
    ("head", "row", "good", "reason"),
    [pytest.param("", row, MOONCAKE_ROW, reason, id=f"mooncake-{name}") for name, (row, reason) in BAD_MOONCAKE.items()]
    + [
        pytest.param(AZURE_HEADER, row, AZURE_ROW, reason, id=f"azure-{name}")
        for name, (row, reason) in BAD_AZURE.items()
    ],
)
def test_bad_row_names_file_line_reason_and_remedy(tmp_path, head, row, good, reason):
    """The first bad row raises; with a callback it is reported, left out, and the rest is read."""
    row = row if isinstance(row, bytes) else row.encode()
    path = write(tmp_path, (head + good + "\n").encode() + row + b"\n" + good.encode())
    line = 4 if head else 3

    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert f"{path}, line {line}: " in message
    assert reason in message
    assert "--skip-bad-rows" in message
    assert len(message) < len(str(path)) + 250
    assert (caught.value.path, caught.value.line) == (path, line)
    assert reason in caught.value.reason

    bad: list[TraceError] = []
    assert len(read_trace(path, on_bad_row=bad.append)) == 2
    assert [str(error) for error in bad] == [message]


def test_arrivals_start_at_the_first_good_row(tmp_path):
    """A bad first row does not set the start."""
    path = write(tmp_path, mooncake(timestamp=1, output_length=0) + "\n" + mooncake(timestamp=70) + "\n")
    assert [request.arrival for request in read_trace(path, on_bad_row=lambda bad: None)] == [0.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf\n \r\n", "the file is empty"),
        (AZURE_HEADER.encode(), "the file holds no usable row"),
        (b"time,prompt,output\n1,2,3\n", "the first line is 'time,prompt,output'"),
        (AZURE_ROW.encode(), "the first line is '2023-11-16 1"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "the first line is "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n".encode("utf-16"), "the first line is "),
        (b"\0" * 1_000_000, "the first line is "),
    ],
    ids=["empty", "blank", "header-only", "other-csv", "no-header", "picture", "utf-16", "zeros"],
)
def test_file_that_is_no_trace_is_refused_naming_both_formats(tmp_path, content, reason):
    """Skipping bad rows does not make such a file a trace."""
    path = write(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, on_bad_row=lambda bad: None)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "TIMESTAMP,ContextTokens,GeneratedTokens" in str(caught.value)
    assert "hash_ids" in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300
    assert caught.value.line is None


def test_missing_file_and_folder_are_refused_by_name(tmp_path):
    """What cannot be opened is a TraceError like any other."""
    with pytest.raises(TraceError, match=r"nowhere\.csv: cannot read the file \(No such file or directory\)"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="cannot read the file"):
        read_trace(tmp_path)


def test_error_in_the_callback_reaches_the_caller(tmp_path):
    """A callback that stops the reading is not mistaken for a file that cannot be read."""

    def stop(bad: TraceError) -> None:
        raise BrokenPipeError("reader gone")

    with pytest.raises(BrokenPipeError, match="reader gone"):
        read_trace(write(tmp_path, MOONCAKE_ROW + "{\n"), on_bad_row=stop)


@given(head=st.sampled_from(["", "{", AZURE_HEADER, AZURE_HEADER + AZURE_ROW]), content=st.binary(max_size=200))
def test_no_content_causes_another_error(tmp_path_factory, head, content):
    """Whatever the bytes are, the answer is a list or a TraceError."""
    path = tmp_path_factory.getbasetemp() / "any.dat"
    path.write_bytes(head.encode() + content)
    try:
        assert read_trace(path, on_bad_row=lambda bad: None)
    except TraceError as error:
        if str(path) not in str(error):
            raise


def requests() -> st.SearchStrategy[TraceRequest]:
    return st.integers(1, 4 * BLOCK_TOKENS).flatmap(
        lambda length: st.builds(
            TraceRequest,
            arrival=st.integers(0, 10**9).map(lambda ms: ms / 1000),
            input_length=st.just(length),
            output_length=st.integers(1, 2**31 - 1),
            blocks=st.lists(st.integers(0, 2**63), min_size=4, max_size=4, unique=True).map(
                lambda ids: tuple(ids[: -(-length // BLOCK_TOKENS)])
            ),
        )
    )


@given(later=st.lists(requests(), max_size=5))
def test_mooncake_round_trip_is_exact(tmp_path_factory, later):
    """Any requests written come back equal, arrivals to the last bit."""
    rows = [TraceRequest(0.0, 1, 1, (0,)), *later]
    path = tmp_path_factory.getbasetemp() / "round-trip.dat"
    write_mooncake(rows, path)
    assert read_trace(path) == rows


@pytest.mark.parametrize(
    "row", [TraceRequest(0.0, 513, 1), TraceRequest(0.0, 513, 1, (4,)), TraceRequest(-0.5, 1, 1, (4,))]
)
def test_request_that_mooncake_cannot_hold_is_refused(tmp_path, row):
    """Missing block ids and arrivals before the start would not read back."""
    with pytest.raises(ValueError, match="request 2 does not fit the Mooncake format"):
        write_mooncake([TraceRequest(0.0, 1, 1, (0,)), row], tmp_path / "trace.dat")


@pytest.mark.parametrize("seed", range(5))
def test_builtin_trace_round_trips_and_repeats(tmp_path, seed):
    """The same seed gives the same trace, and the Mooncake format holds all of it."""
    rows = builtin_trace(seed=seed)
    write_mooncake(rows, tmp_path / "builtin.dat")
    assert len(rows) == 400
    assert read_trace(tmp_path / "builtin.dat") == rows == builtin_trace(seed=seed)
    assert rows != builtin_trace(seed=seed + 1)


@pytest.mark.parametrize("seed", range(5))
def test_builtin_trace_has_the_corner_cases(seed):
    """Shared prefixes, fully cached prompts, single tokens, long prompts and bursts all occur."""
    rows = builtin_trace(seed=seed)
    seen: set[int] = set()
    shared = fully_cached = 0
    for row in rows:
        full = row.blocks[: row.input_length // BLOCK_TOKENS]
        shared += bool(full) and full[0] in seen
        fully_cached += len(full) * BLOCK_TOKENS == row.input_length and seen.issuperset(full)
        seen.update(full)
    lengths = [row.input_length for row in rows]
    assert shared > len(rows) / 4
    assert fully_cached >= 5
    assert lengths.count(1) >= 5
    assert sum(length > 3_000 for length in lengths) >= 10
    assert 8_000 < max(lengths) < 21_000
    assert sum(lengths) < 1_000_000
    assert all(1 <= row.output_length <= 120 for row in rows)
    assert all(row.arrival <= after.arrival for row, after in pairwise(rows))
    assert sum(row.arrival == after.arrival for row, after in pairwise(rows)) >= 20


@pytest.mark.skipif("STAGING_TRACES" not in os.environ, reason="STAGING_TRACES names no folder of traces")
@pytest.mark.parametrize(("name", "count"), RECORDED.items())
def test_recorded_trace_reads_completely(name, count):
    """Every row of the recorded files is a good one."""
    rows = read_trace(Path(os.environ["STAGING_TRACES"]) / name)
    assert len(rows) == count
    assert rows[0].arrival == 0.0
