"""docs/cases.md: every case is there once, and the tests it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (B\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
CASES = [f"B{number:02d}" for number in range(1, 129) if number % 3]
"""The collection has no number that is a multiple of three."""


def named_in(cell: str) -> list[tuple[str, str]]:
    """Every `file::test` of a cell."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", cell)


def written_in(file: str) -> dict[str, str]:
    """The tests of a file, with their docstrings, without importing it."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_is_in_the_table_exactly_once():
    """All 86, in order, with nothing that looks like a row left out."""
    assert len(CASES) == 86
    assert [case for case, _, _ in ROWS] == CASES
    assert len(re.findall(r"^\| *B\d+", PAGE, re.MULTILINE)) == 86


@pytest.mark.parametrize(("case", "named", "cell"), ROWS, ids=[case for case, _, _ in ROWS])
def test_a_case_has_tests_that_exist_or_a_reason(case, named, cell):
    """Each row names its report, and tests that are there, or says why the case does not apply."""
    assert re.search(r"\([\w.-]+/[\w.-]+ #\d+\)$", named), "a row ends its property with project and number"
    tests = named_in(cell)
    assert tests or re.match(r"does not apply: \S", cell)
    for file, name in tests:
        assert name in written_in(file), f"{case}: {file} has no {name}"


def test_tests_written_for_a_case_are_in_its_row():
    """Where a test's docstring begins with cases, the rows of these name it; each of these tests begins so."""
    rows = {case: named_in(cell) for case, _, cell in ROWS}
    files = [*TESTS.glob("cases/test_*.py"), TESTS / "gpu/test_gpu_cases.py", TESTS / "gpu/test_gpu_two_devices.py"]
    assert len(files) > 2
    for path in files:
        file = path.relative_to(TESTS).as_posix()
        for name, docstring in written_in(file).items():
            begins = re.match(r"((?:B\d+, )*B\d+): ", docstring)
            assert begins, f"{file}::{name} does not begin with a case"
            for case in begins[1].split(", "):
                assert (file, name) in rows[case], f"{case} does not name {file}::{name}"
