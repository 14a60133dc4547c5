"""The README's example prints what the README says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_the_readme_says():
    """The first Python block is run; its output is the text block behind it, to the letter."""
    example, output = re.search(
        r"<!-- example -->\n```python\n(.*?)```.*?```text\n(.*?)```", README.read_text(), re.DOTALL
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert printed.getvalue() == output


def test_there_are_two_commands_and_each_is_one_line():
    """Both make their own environment; the second one runs the tests."""
    commands = re.findall(r"^    (python3 -m venv .*)$", README.read_text(), re.MULTILINE)
    assert [command.split()[-1] for command in commands] == ["replay", "pytest"]
