"""What is released is declared, is what was tried, and the check of the archives finds what is wrong with one."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.release import (
    BESIDE,
    FAILED,
    INSTALLED,
    PACKAGES,
    Environment,
    Log,
    ReleaseError,
    Row,
    difference,
    lowest,
    requirements,
    sdist_faults,
    table,
    wheel_faults,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "release.md"
GENERATED = ("__pycache__", ".egg-info")

INFO = "staging_pool-0.1.0.dist-info"
FILES = {
    **{f"{package}/{name}": f"# {package} {name}".encode() for package in PACKAGES for name in ("__init__.py", "a.py")},
    **{f"{package}/py.typed": b"" for package in PACKAGES},
    **{name: f"the {name}".encode() for name in BESIDE},
}
METADATA = b"""\
Metadata-Version: 2.4
Name: staging-pool
Requires-Dist: torch>=2.6
Requires-Dist: triton>=3.2; platform_system == "Linux"
Provides-Extra: test
Requires-Dist: pytest>=8.0; extra == "test"
Requires-Dist: hypothesis; extra == "test"
Provides-Extra: lint
Requires-Dist: mypy>=1.15; extra == "lint"

the README.md"""
WHEEL = {
    **{name: content for name, content in FILES.items() if name not in BESIDE},
    f"{INFO}/licenses/LICENSE": FILES["LICENSE"],
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/RECORD": b"",
    f"{INFO}/entry_points.txt": b"[a.group]\nname = batching.a:plugin\n",
}
SDIST = {**FILES, "PKG-INFO": METADATA, "setup.cfg": b"", "staging_pool.egg-info/SOURCES.txt": b""}


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 does not read TOML")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def tried() -> list[dict[str, str]]:
    """The rows of the page's table."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## What was tried\n")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_newest_heading_of_the_changelog_is_the_version(declared):
    newest = re.search(r"^## (\S+)", (ROOT / "docs" / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == declared["project"]["version"]


def test_every_file_of_the_packages_is_declared(declared):
    """setuptools packs what is named, and leaves the rest out without a word."""
    packages, data = declared["tool"]["setuptools"]["packages"], declared["tool"]["setuptools"]["package-data"]
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    for path in files:
        relative = path.relative_to(ROOT)
        if any(part.endswith(GENERATED) for part in relative.parts):
            continue
        package = ".".join(relative.parent.parts)
        assert package in packages, f"{relative}: {package} is not among the packages"
        assert path.suffix == ".py" or path.name in data.get(package, []), f"{relative} is not package data"
    assert sorted(packages) == sorted(name for name in packages if (ROOT / name.replace(".", "/")).is_dir())


def test_what_is_claimed_was_tried(declared):
    """Each Python of the classifiers, from the oldest that is allowed on, has passed, and each lower bound."""
    rows = tried()
    assert list(rows[0]) == list(attrs.asdict(Row()))
    assert [row for row in rows if "passed" not in row["commands"] or "FAILED" in row["tests"]] == []
    minors = {".".join(row["python"].split(".")[:2]) for row in rows}
    claimed = {
        line.rpartition(" ")[2]
        for line in declared["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: \d\.\d+", line)
    }
    assert claimed == minors
    assert declared["project"]["requires-python"] == f">={min(minors, key=lambda minor: int(minor[2:]))}"
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(declared["project"]["dependencies"]), re.MULTILINE))
    assert any(
        all(re.match(rf"{re.escape(bound)}(\.0)*(\+|$)", row[name]) for name, bound in bounds.items()) for row in rows
    ), f"no row has {bounds}"
    assert any(row["triton"] == "none" for row in rows)
    assert {row["built"] for row in rows} == {"wheel", "sdist"}


# The check of the archives, which would be no use if it found nothing.


def test_archives_that_are_right_have_no_faults():
    assert wheel_faults(WHEEL, FILES) == []
    assert sdist_faults(SDIST, FILES) == []
    assert difference(WHEEL, dict(WHEEL)) == []


def without(name: str, archive: dict[str, bytes]) -> dict[str, bytes]:
    return {key: content for key, content in archive.items() if key != name}


@pytest.mark.parametrize(
    ("wheel", "told"),
    [
        (without("batching/a.py", WHEEL), ["batching/a.py is missing", "entry point: there is no module batching.a"]),
        (without(f"{INFO}/licenses/LICENSE", WHEEL), [f"{INFO}/licenses/LICENSE is missing"]),
        (without(f"{INFO}/METADATA", WHEEL), ["METADATA is missing"]),
        ({**WHEEL, "tests/test_a.py": b""}, ["tests/test_a.py should not be there"]),
        ({**WHEEL, "staging/__pycache__/a.pyc": b""}, ["staging/__pycache__/a.pyc should not be there"]),
        ({**WHEEL, "staging/a.py": b"of yesterday"}, ["staging/a.py is not the file's bytes"]),
        ({**WHEEL, f"{INFO}/METADATA": METADATA[:-1]}, ["METADATA: the description is not README.md"]),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told(wheel, told):
    assert wheel_faults(wheel, FILES) == told


def test_both_packages_have_to_say_that_they_are_typed():
    """Also when the file is gone from the source, so that the archive has all that there is."""
    name = "staging/py.typed"
    assert wheel_faults(without(name, WHEEL), without(name, FILES)) == [f"{name} is missing: its types would not count"]


def test_what_is_wrong_with_an_sdist_is_told():
    assert sdist_faults(without("README.md", SDIST), FILES) == ["README.md is missing"]
    assert sdist_faults({**SDIST, "tests/test_a.py": b""}, FILES) == ["tests/test_a.py should not be there"]


def test_a_wheel_that_differs_from_the_sdist_s_is_told():
    other = {**without("staging/a.py", WHEEL), "batching/a.py": b"of yesterday"}
    end = "is not the same in the wheel of the sdist"
    assert difference(WHEEL, other) == [f"batching/a.py {end}", f"staging/a.py {end}"]


def test_lower_bounds_are_those_of_the_wheel():
    """Of what it needs and what its tests need; a requirement without a bound has none."""
    assert requirements(WHEEL) == ["torch>=2.6", "triton>=3.2"]
    assert requirements(WHEEL, "test") == ["pytest>=8.0", "hypothesis"]
    assert lowest(WHEEL) == ["torch==2.6", "triton==3.2", "pytest==8.0"]


def test_an_environment_is_read_from_its_words(tmp_path):
    python = tmp_path / "python"
    python.touch(0o755)
    text = f"{python}:torch=2.6.0:numpy=2.0.1:no-triton"
    pinned = ("torch==2.6.0", "numpy==2.0.1")
    assert Environment.read(text) == Environment(text, str(python), pinned, triton=False)
    assert Environment.read(f"{python}:lowest").lowest
    for words, told in (
        ("oldest", "'oldest' in"),
        ("troch=2.6.0", "after one of torch="),
        ("lowest:torch=2.6.0", "leave torch==2.6.0 away"),
    ):
        with pytest.raises(Exception, match=told):
            Environment.read(f"{python}:{words}")
    with pytest.raises(Exception, match="is no Python"):
        Environment.read(f"{python}3")


def test_what_is_run_does_not_see_the_tree(tmp_path, monkeypatch):
    """Neither by PYTHONPATH nor by the current folder; and packages that are not the installed ones are noticed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STAGING_MEMORY", "pageable")
    log = Log(tmp_path / "log.txt")
    seen = "import os; print(sorted(os.environ.keys() & {'PYTHONPATH', 'STAGING_MEMORY'}), os.listdir())"
    assert log.run("looking", sys.executable, "-c", seen) == "[] []\n"
    with pytest.raises(AssertionError, match=re.escape(f"{ROOT}/staging/__init__.py is not in {sys.prefix}")):
        exec(INSTALLED, {})


def test_what_is_run_can_be_interrupted(tmp_path):
    """Also when the script itself was started in the background, and so ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        log = Log(tmp_path / "log.txt")
        shown = log.run("looking", sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT))")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in shown


def test_a_command_that_fails_is_told_with_the_end_of_its_output(tmp_path):
    log = Log(tmp_path / "log.txt")
    with pytest.raises(ReleaseError, match=r"^building: status 3\nwhy$"):
        log.run("building", sys.executable, "-c", "print('why'); raise SystemExit(3)")
    assert log.path.read_text().endswith("\nwhy\n\n")


def test_only_what_has_passed_is_good():
    assert Row(commands="3 passed", tests="1,000 passed, 3 skipped").good
    assert not Row(commands="3 passed").good
    assert not Row(commands="3 passed", tests=FAILED).good
    assert not Row(commands=FAILED).good


def test_the_table_is_markdown():
    first, second, third = table([Row(python="3.10.13")]).splitlines()
    assert (first[:19], second[:13]) == ("| python | torch | ", "| --- | --- |")
    assert third.startswith("| 3.10.13 | ? | ")
