"""The docs say what is so: every block runs and prints what stands under it, every name, option and error is there.

A page is plain Markdown. A `python` block is run, in order, all of a page as one program; the `text` block behind it is
what it prints. A `diff` is run twice, with its `-` lines and with its `+` lines, and both give what its comment says. A
`console` block is a command line with its output. A comment in front of a block says where it is otherwise:
`<!-- printed by tests/x.py -->` names the test that compares it, `<!-- not run: … -->` gives a reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import batching
import batching.errors
import staging
import staging.errors
import staging.testing
from batching import (
    BatchError,
    CacheIndexError,
    Request,
    SamplingBatchInfo,
    SamplingParams,
    SamplingValueError,
    ScheduleBatch,
    write_cache_indices,
)
from batching.__main__ import main, parser
from staging import (
    CaptureError,
    Field,
    FieldError,
    Layout,
    LeaseError,
    LeaseTooLarge,
    PinningError,
    PoolBroken,
    PoolClosed,
    PoolExhausted,
    PoolForked,
    PoolStats,
    SlotOverwritten,
    StagingError,
    StagingPool,
)
from staging._device import Device
from staging.metrics import PoolCollector
from staging.testing import SimulatedDevice, Violation

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXT = {path: path.read_text(encoding="utf-8") for path in PAGES}
COMMANDS = ("bench", "replay", "soak")

BLOCK = re.compile(r"^(?:<!-- (?P<note>[^\n]+?) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, *kinds: str) -> list[re.Match[str]]:
    return [block for block in BLOCK.finditer(TEXT[path]) if not kinds or block["kind"] in kinds]


def settled(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"\bthread \d+", "thread N", text)
    text = re.sub(r"\bpid \d+", "pid N", text)
    text = re.sub(r"\bleased at [^;\n]+", "leased at PLACE", text)
    return re.sub(r"RLIMIT_MEMLOCK is .*? limit (\d+ bytes|\w+);", "RLIMIT_MEMLOCK is …;", text)


def timeless(text: str) -> str:
    """And without times and versions, for what a command prints."""
    text = re.sub(r"\d[\d.,]* (ns|µs|ms|s|min)\b", "TIME", text)
    return re.sub(r"\btorch \S+", "torch VERSION", text)


# Blocks.


def program(path: Path) -> types.ModuleType:
    """The module that a page's Python blocks are run in."""
    return types.ModuleType(f"page_{path.stem}")


def run(code: str, path: Path, line: int, names: dict[str, Any]) -> None:
    """Run a block, with its own line numbers in a traceback."""
    exec(compile("\n" * line + code, name_of(path), "exec"), names)


def closed(names: dict[str, Any]) -> None:
    """Let what a page has made end in peace."""
    for value in list(names.values()):
        if isinstance(value, SimulatedDevice):
            value.finish_all()
    for value in list(names.values()):
        if isinstance(value, StagingPool):
            value.close(timeout=0)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_run(path):
    """So that no output is claimed which nobody compares; and what a comment says is so."""
    assert TEXT[path].count("\n```") == 2 * len(blocks(path)), "a block is not closed, or is indented"
    before: re.Match[str] | None = None
    for block in blocks(path):
        note, kind = block["note"] or "", block["kind"]
        if note.startswith("printed by "):
            test = ROOT / note.removeprefix("printed by ")
            assert path.name in test.read_text(encoding="utf-8"), f"{note}, which does not know this page"
        elif kind == "text" and path.name == "errors.md":
            continue  # messages, which a test of their own compares
        elif kind == "text":
            assert before is not None, "nothing printed it"
            assert before["kind"] == "python", "nothing printed it"
            assert not (before["note"] or "").startswith("not run"), "what printed it is not run"
        elif kind == "diff":
            assert note.startswith("both sides: "), "a diff needs `<!-- both sides: what they give -->`"
        else:
            assert kind in ("python", "console"), f"a block of {kind!r} is run by nobody"
        assert kind != "python" or not note or re.match(r"not run: \S|example", note)
        before = block


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python", "diff")], ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(path):
    """In order, as one program; a diff both ways."""
    module = program(path)
    names, printed = module.__dict__, io.StringIO()
    try:
        for block in blocks(path, "python", "text", "diff"):
            note, kind = block["note"] or "", block["kind"]
            line = TEXT[path][: block.start("body")].count("\n")
            if kind == "diff":
                both_sides_agree(block["body"], note.removeprefix("both sides: "), path, line, names)
            elif kind == "python" and note.startswith("not run"):
                ast.parse(block["body"])
            elif kind == "python":
                with contextlib.redirect_stdout(printed):
                    run(block["body"], path, line, names)
            elif path.name != "errors.md" and not note.startswith("printed by "):
                assert settled(printed.getvalue()) == settled(block["body"]), f"line {line + 1}"
                printed.seek(0)
                printed.truncate()
        assert printed.getvalue() == "", "the page does not show what is printed last"
    finally:
        closed(names)


def both_sides_agree(diff: str, given: str, path: Path, line: int, names: dict[str, Any]) -> None:
    """`given` is the same after the `-` lines and after the `+` lines; a line of neither belongs to both."""
    found = []
    for other in "+-":
        code = "".join(row[1:] for row in diff.splitlines(keepends=True) if not row.startswith(other))
        side = dict(names)
        run(code, path, line, side)
        found.append(tensors(eval(given, side)))
        closed({name: value for name, value in side.items() if name not in names})
    before, after = found
    assert len(before) == len(after) > 0
    for one, two in zip(before, after, strict=True):
        assert (one.dtype, one.device) == (two.dtype, two.device)
        assert torch.equal(one, two)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in it, in order; of a mapping by name."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "keys"):
        value = [value[key] for key in sorted(value.keys())]
    return [tensor for part in value for tensor in tensors(part)]


SESSIONS = [
    session
    for path in PAGES
    for block in blocks(path, "console")
    for session in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block["body"], re.MULTILINE)
]


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_a_command_prints_what_the_page_says(command, output, tmp_path, monkeypatch, capfd):
    """Standard error first, then the output, as on a terminal; only times and versions may differ."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "batching"], command
    with contextlib.suppress(SystemExit):
        main(words[3:])
    out, err = capfd.readouterr()
    assert timeless(err + out).split() == timeless(output).split()


def test_every_command_line_on_a_page_is_one():
    """Those in the text and in the blocks: options that are there, values that are taken."""
    seen = 0
    for path, text in TEXT.items():
        lines = re.findall(r"^ {4}python -m batching (.+)$|`python -m batching ([^`\n]+)`", text, re.MULTILINE)
        for line in (indented or inline for indented, inline in lines):
            if "[" in line or "COMMAND" in line or "…" in line or " " not in line:
                continue
            with contextlib.redirect_stderr(io.StringIO()) as told:
                try:
                    parser().parse_args(shlex.split(line.partition(" #")[0]))
                except SystemExit as stop:
                    refused = stop.code
                else:
                    refused = 0
            assert not refused, f"{name_of(path)}: {line}: {told.getvalue()}"
            seen += 1
    assert seen >= 8


# Links.


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives to headings."""
    outside = BLOCK.sub("", text)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", outside, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(words)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path):
    """To a file of the project, and to a heading in it."""
    text = BLOCK.sub("", TEXT[path])
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    for link in links:
        if re.match(r"https?:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the project"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}: there is no such heading"


def test_the_index_names_every_page_once():
    """docs/README.md, in a list."""
    linked = re.findall(r"^- \[[^\]]+\]\(([\w.-]+)\): \S", TEXT[DOCS / "README.md"], re.MULTILINE)
    assert sorted(linked) == sorted(path.name for path in PAGES if path.parent == DOCS and path.name != "README.md")


@pytest.mark.parametrize("name", ["guide", "commands", "errors", "moving", "faq", "reference", "README"])
def test_lines_are_at_most_120_characters(name):
    """Tables, output and links aside."""
    long = [line for line in BLOCK.sub("", TEXT[DOCS / f"{name}.md"]).splitlines() if len(line) > 120]
    assert [line for line in long if not line.startswith("|")] == []


# Names.


def members(cls: type) -> dict[str, Any]:
    """Public attributes and methods that the project gives to a class, with what stands behind a name in the class."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith(("staging", "batching")):
            continue
        found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
        if attrs.has(base):
            found |= {field.name: None for field in attrs.fields(base) if not field.name.startswith("_")}
        elif "__init__" in vars(base):
            found |= dict.fromkeys(assigned_in(base.__init__))  # type: ignore[misc]
    return {name: getattr(value, "__func__", value) for name, value in found.items()}


def assigned_in(init: Callable[..., None]) -> list[str]:
    """`self.name = …`."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(init))))
    return [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and not node.attr.startswith("_")
    ]


SEAM = {name for name in {**vars(Device), **Device.__annotations__} if not name.startswith("_")}
"""What a pool asks of a device; of a simulated one a test uses the rest."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public name, and `Class.member`, with the object. Errors have a page of their own."""
    modules = {staging: staging.__all__, batching: batching.__all__}
    named = [(name, getattr(module, name)) for module, names in modules.items() for name in names]
    named += [(one.__name__, one) for one in (SimulatedDevice, Violation, PoolCollector)]
    for name, value in named:
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        yield name, value
        if inspect.isclass(value):
            for member, behind in members(value).items():
                if value is SimulatedDevice and member in SEAM:
                    continue
                if value is PoolStats and not inspect.isfunction(behind):
                    continue  # docs/stats.md has a table of its own, with a test of its own
                yield f"{name}.{member}", behind


def documented() -> dict[str, str]:
    """What the first cell of each row of docs/reference.md says, by the name it begins with."""
    names = TEXT[DOCS / "reference.md"].partition("\n## The environment\n")[0]
    cells = re.findall(r"^\| `([^`]+)` \| \S", names, re.MULTILINE)
    return {re.split(r"[(: ]", cell)[0]: cell for cell in cells}


@pytest.mark.parametrize(("name", "value"), list(public()), ids=lambda part: part if isinstance(part, str) else "")
def test_a_public_name_is_documented(name, value):
    """In docs/reference.md, by its full name; of a function with all its parameters."""
    cell = documented().get(name)
    assert cell is not None, f"docs/reference.md has no row for {name}"
    if inspect.isclass(value):
        value = value.__init__ if "(" in cell else None
    if not inspect.isfunction(value):
        return
    written = set(re.findall(r"\w+", cell.partition("(")[2]))
    assert set(inspect.signature(value).parameters) - {"self", "cls"} == written, cell


def test_the_reference_names_nothing_that_is_not_there():
    """A row for each public name, and no row more."""
    assert set(documented()) == {name for name, _ in public()}


def test_variables_of_the_environment_are_documented():
    """Those that the packages read."""
    sources = [
        path.read_text(encoding="utf-8") for name in ("staging", "batching") for path in (ROOT / name).rglob("*.py")
    ]
    read = {name for source in sources for name in re.findall(r"\bSTAGING_[A-Z]+\b", source)}
    assert {"STAGING_DEBUG", "STAGING_MEMORY"} <= read
    for name in read:
        assert f"\n| `{name}` | " in TEXT[DOCS / "reference.md"], name


# Commands.


def options_of(command: str) -> dict[str, argparse.Action]:
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        option: action
        for action in commands.choices[command]._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_documented_with_its_default(command):
    """In docs/commands.md, in the table of the command's own section, and no option that is not there."""
    page = TEXT[DOCS / "commands.md"]
    section = page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", row) for row in re.findall(r"^\| `--.*\|$", section, re.MULTILINE)]
    assert all(len(row) == 5 and row[3].strip() for row in rows), "an option has a default and a meaning"
    written = {option: row[2] for row in rows for option in re.findall(r"--[\w-]+", row[1])}
    options = options_of(command)
    assert set(written) == set(options)
    for option, action in options.items():
        default = action.default
        if isinstance(default, bool) or default is None:
            continue
        text = (
            ",".join(map(str, default))
            if isinstance(default, tuple)
            else f"{default:g}"
            if isinstance(default, float)
            else str(default)
        )
        assert text == written[option].strip().replace(",…", ""), option


def test_every_exit_status_is_documented():
    """The table of docs/commands.md has those of every help."""
    page = TEXT[DOCS / "commands.md"].partition("\n## Exit status\n")[2]
    rows = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert rows == ["0", "1", "2", "130", "141"]


# Errors.

PAIR = Layout([Field("adapter", torch.int32), Field("positions", torch.int64, "tokens")], name="lora")


def made(**options: Any) -> StagingPool:
    device = options.pop("device", None) or SimulatedDevice()
    return StagingPool(
        device, **{"slots": 1, "max_slots": 1, "slot_bytes": 256, "timeout": 0, "name": "prefill", **options}
    )


def filled(pool: StagingPool) -> Any:
    lease = pool.lease(PAIR, rows=2, tokens=5)
    lease["adapter"], lease["positions"] = 1, 0
    return lease


def a_field_error() -> None:
    filled(made())["adapter"] = [1, 2**31]


def a_lease_error() -> None:
    lease = made().lease(PAIR, rows=2, tokens=5)
    lease["adapter"] = [1, 0]
    lease.upload()


def an_exhausted_pool() -> None:
    device = SimulatedDevice()
    pool = made(device=device, slots=2, max_slots=2, timeout=0.05)
    filled(pool).upload()
    held = filled(pool)
    try:
        pool.lease(PAIR, rows=2, tokens=5)
    finally:
        held.discard()


def a_closed_pool() -> None:
    pool = made()
    pool.close()
    pool.lease(PAIR, rows=1, tokens=1)


def a_broken_pool() -> None:
    device = SimulatedDevice()
    pool = made(device=device)
    filled(pool).upload()
    device.break_down(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with contextlib.suppress(PoolBroken, RuntimeError):
        pool.lease(PAIR, rows=1, tokens=1)
    pool.lease(PAIR, rows=1, tokens=1)


def a_forked_pool() -> None:
    """The message comes from a real child."""
    pool = made(device="cpu")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            pool.lease(PAIR, rows=1, tokens=1)
        except PoolForked as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        message = answer.read()
    os.waitpid(child, 0)
    raise PoolForked(message)


def a_capture() -> None:
    device = SimulatedDevice()
    device.capturing_now = True
    made(device=device).lease(PAIR, rows=2, tokens=5)


def an_overwritten_slot() -> None:
    device = SimulatedDevice()
    pool = made(device=device, debug=True)
    filled(pool).upload()
    buffer = pool._ring.slots[0].buffer
    assert buffer is not None
    buffer.array[16] = 9  # the first byte of `positions`
    device.finish_all()
    pool.lease(PAIR, rows=2, tokens=5)


def no_memory() -> None:
    device = SimulatedDevice()
    device.fail("host_buffer", PinningError("cudaHostAlloc: out of memory"), times=9)
    made(device=device, slots=4, max_slots=4, memory="pinned")


def a_batch_error() -> None:
    batches = [
        ScheduleBatch([Request("a", SamplingParams(), None, 1, 0)], "cpu", deterministic=deterministic)
        for deterministic in (True, False)
    ]
    one, other = (SamplingBatchInfo.from_schedule_batch(batch, 32_000) for batch in batches)
    one.merge_batch(other)


def a_cache_index_error() -> None:
    batch = ScheduleBatch([Request("cmpl-17", SamplingParams(), None, 9, 0)], "cpu")
    write_cache_indices(batch, torch.zeros((2, 8), dtype=torch.int32), torch.zeros(9, dtype=torch.int64))


RAISED: dict[type[Exception], Callable[[], Any]] = {
    StagingError: lambda: StagingPool("meta"),
    FieldError: a_field_error,
    LeaseError: a_lease_error,
    LeaseTooLarge: lambda: made(max_bytes=4096).lease(PAIR, rows=2, tokens=1000),
    PoolExhausted: an_exhausted_pool,
    PoolClosed: a_closed_pool,
    PoolBroken: a_broken_pool,
    PoolForked: a_forked_pool,
    CaptureError: a_capture,
    SlotOverwritten: an_overwritten_slot,
    PinningError: no_memory,
    BatchError: a_batch_error,
    SamplingValueError: lambda: SamplingParams.of("cmpl-17", top_p=1.5),
    CacheIndexError: a_cache_index_error,
}
"""For each class, something that raises it."""


def error_classes() -> list[type[Exception]]:
    return [
        value
        for module in (staging.errors, batching.errors)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == module.__name__
    ]


def test_no_error_class_is_missing_from_its_page():
    """docs/errors.md has a section for each, in the order of the modules, and for nothing else; each is exported."""
    sections = re.findall(r"^### `(\w+)`$", TEXT[DOCS / "errors.md"], re.MULTILINE)
    assert sections == [cls.__name__ for cls in error_classes()]
    assert {cls.__name__ for cls in error_classes()} <= {*staging.__all__, *batching.__all__}
    assert set(RAISED) == set(error_classes())


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_section_of_the_errors_says_when_what_and_what_to_do_with_the_real_message(cls):
    """Three parts, and the message that such an error really has."""
    section = TEXT[DOCS / "errors.md"].partition(f"### `{cls.__name__}`\n")[2].partition("\n### ")[0]
    assert re.findall(r"^- \*\*(.*?)\*\*", section, re.MULTILINE) == ["When.", "It names", "Do."]
    (written,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    with pytest.raises(cls) as caught:
        RAISED[cls]()
    assert type(caught.value) is cls
    assert settled(str(caught.value)).split() == settled(" ".join(written.split())).split()


def test_the_errors_page_says_which_builtin_errors_they_are_too():
    """As the table at its head has it."""
    for cls in error_classes():
        builtin = {base for base in cls.__mro__ if base in (ValueError, TimeoutError, MemoryError)}
        rows = re.findall(r"^\| (`.*`) \| (.*) \|$", TEXT[DOCS / "errors.md"], re.MULTILINE)
        told = {also for names, text in rows if f"`{cls.__name__}`" in names for also in re.findall(r"`(\w+)`", text)}
        if cls not in (StagingError, BatchError):
            assert told == {base.__name__ for base in builtin}, cls


@pytest.mark.parametrize("page", sorted(TEXT), ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page):
    """No mark of a place where a number or a paragraph was to come."""
    assert re.findall(r"\b(?:TODO|TBD|FIXME|XXX|GPUNUMBERS)\b|^TABLE$|…/…", TEXT[page], re.MULTILINE) == []
