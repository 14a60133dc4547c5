"""Builds the sdist and the wheel, checks what is in them, installs each in clean environments, and tests it there.

python tests/release.py                                      # this Python, and what pip chooses
python tests/release.py python3.10:lowest python3.13         # the lower bound of every dependency; another Python
python tests/release.py python3.11:torch=2.13.0:no-triton    # one torch, and so for numpy=; Triton taken out again

The library is built from a copy of what git knows, so nothing else that lies about gets in. The environments are made
in a temporary folder, and no command or test that runs in them can see the source tree. The wheel and the one that
is built from the sdist have to be equal, byte for byte, so the tests run with the wheel only. Prints a Markdown table,
the one of docs/release.md. Exits 0 when all is as it should be, 1 when something is not, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("staging", "batching")
BESIDE = ("LICENSE", "README.md", "pyproject.toml")
"""What is built from, together with the packages."""

COMMANDS = {
    "replay": "replay --device cpu --requests 100",
    "soak": "soak --device cpu --batches 5 --no-delays",
    "bench": "bench --device cpu --rows 1,4 --repeats 1 --batches 5 --queued-batches 2",
}
"""`python -m batching …`, each seconds long."""

TESTS = ("tests/batching", "tests/replay", "tests/bench", "tests/staging", "tests/test_commands.py")
SLOW = ("tests/staging/test_exhaustive.py", "tests/staging/test_interrupts.py", "tests/staging/test_mutants.py")
"""Left out: they look for orders of events in the ring that no version of anything changes."""

DEPENDENCIES = ("torch", "triton", "numpy", "attrs", "tqdm")
LIMIT_S = 1800
NOT_RUN, FAILED = "not run", "FAILED"

INSTALLED = """
import pathlib, sys
import batching, staging
for package in (staging, batching):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), f"{package.__file__} is not in {sys.prefix}"
"""
"""Run in an environment, and in the process that tests: the packages are the installed ones."""

WHAT_IS_THERE = """
import importlib.metadata, json, torch
for entry in importlib.metadata.distribution("staging-pool").entry_points:
    entry.load()
versions = {"python": sys.version.split()[0], "torch": torch.__version__}
for name in ("triton", "numpy", "attrs", "tqdm"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = "none"
print(json.dumps(versions))
"""
"""Run behind it: entry points load; prints the versions."""


class ReleaseError(Exception):
    """Something is not as it should be."""


class NoCheckout(Exception):
    """There is no telling what to build from."""


@attrs.frozen
class Environment:
    """What an environment is to have."""

    text: str
    """As on the command line."""
    python: str
    """The interpreter's path."""
    pinned: tuple[str, ...] = ()
    """Dependencies whose versions are not left to pip, as constraints."""
    lowest: bool = False
    triton: bool = True

    @classmethod
    def read(cls, text: str) -> Environment:
        """From the command line, as `python3.11:torch=2.13.0:no-triton`."""
        name, *words = text.split(":")
        python = shutil.which(os.path.expanduser(name))
        if python is None:
            raise argparse.ArgumentTypeError(f"{name!r} is no Python; give a path, or a name in PATH")
        chosen = cls(text, python)
        for word in words:
            if word == "lowest":
                chosen = attrs.evolve(chosen, lowest=True)
            elif word == "no-triton":
                chosen = attrs.evolve(chosen, triton=False)
            elif (pin := re.fullmatch(r"(\w+)=([\w.]+)", word)) and pin[1] in DEPENDENCIES:
                chosen = attrs.evolve(chosen, pinned=(*chosen.pinned, f"{pin[1]}=={pin[2]}"))
            else:
                raise argparse.ArgumentTypeError(
                    f"{word!r} in {text!r} is not lowest, no-triton, or VERSION after one of "
                    f"{', '.join(f'{name}=' for name in DEPENDENCIES)}"
                )
        if chosen.lowest and chosen.pinned:
            raise argparse.ArgumentTypeError(f"{text!r}: lowest says every version; leave {chosen.pinned[0]} away")
        return chosen


@attrs.frozen
class Row:
    """One artifact in one environment: a row of the table."""

    python: str = "?"
    torch: str = "?"
    triton: str = "?"
    numpy: str = "?"
    attrs: str = "?"
    tqdm: str = "?"
    built: str = "?"
    commands: str = NOT_RUN
    tests: str = NOT_RUN

    @property
    def good(self) -> bool:
        """Whether commands and tests have passed."""
        return not {self.commands, self.tests} & {NOT_RUN, FAILED}


@attrs.frozen
class Built:
    """What is released, and a second wheel to compare."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


class Log:
    """Runs commands away from the source tree, and keeps all that they print."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGING_")}
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            self._environment.pop(name, None)
        self._environment["PYTHONNOUSERSITE"] = "1"

    def run(self, what: str, *command: str | Path, cwd: Path | None = None) -> str:
        """What it printed. Raises `ReleaseError` with the end of that when its status is not 0."""
        place = self.path.parent / "empty" if cwd is None else cwd
        place.mkdir(exist_ok=True)
        try:
            done = subprocess.run(
                command,
                cwd=place,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                # A shell lets what it starts in the background ignore Ctrl-C, and there are tests of Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        except subprocess.TimeoutExpired:
            raise ReleaseError(f"{what}: not done after {LIMIT_S} s") from None
        with self.path.open("a") as file:
            file.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
        if done.returncode:
            end = "\n".join(done.stdout.splitlines()[-15:])
            raise ReleaseError(f"{what}: status {done.returncode}\n{end}")
        return done.stdout


# What is built, and what is in it.


def git(*command: str) -> str:
    """What git says of the checkout."""
    try:
        done = subprocess.run(("git", *command), cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCheckout(
            f"{ROOT}: what belongs to a release is what git knows, and it does not answer: {error}"
        ) from error
    return done.stdout


def known_to_git() -> list[str]:
    """Files below ROOT that git does not ignore, by their paths from there."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted({name for name in listed if name and (ROOT / name).is_file()})


def copy(names: Sequence[str], to: Path) -> Path:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to


def only(paths: list[Path]) -> Path:
    if len(paths) != 1:
        raise ReleaseError(f"one file was to be built, not {[path.name for path in paths]}")
    return paths[0]


def build(names: Sequence[str], work: Path) -> Built:
    """The sdist and the wheel from a copy of these files, and a wheel from the sdist."""
    log = Log(work / "build.txt")
    source = copy(names, work / "source")
    python = virtual_environment(sys.executable, work / "tools", log)
    log.run("installing build", python, "-m", "pip", "install", "--only-binary", ":all:", "build")
    dist, again = work / "dist", work / "again"
    log.run("building", python, "-m", "build", "--sdist", "--wheel", "--outdir", dist, source)
    sdist = only(list(dist.glob("*.tar.gz")))
    log.run("building from the sdist", python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", again, sdist)
    return Built(sdist, only(list(dist.glob("*.whl"))), only(list(again.glob("*.whl"))))


def read_archive(path: Path) -> dict[str, bytes]:
    """Every file of a wheel; of an sdist, without the folder that all its files are in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(path) as sdist:
        found = {}
        for member in sdist.getmembers():
            content = sdist.extractfile(member)
            if content is not None:
                found[member.name.partition("/")[2]] = content.read()
        return found


def faults(archive: Mapping[str, bytes], files: Mapping[str, bytes], generated: str) -> list[str]:
    """What is missing from an archive, is not wanted in it, or has other bytes than the file has.

    `generated` is a pattern for the names of what the build itself adds.
    """
    extra = [name for name in archive if name not in files and not re.fullmatch(generated, name)]
    return [
        *(f"{name} is missing" for name in sorted(files) if name not in archive),
        *(f"{name} should not be there" for name in sorted(extra)),
        *(f"{name} is not the file's bytes" for name in sorted(files) if archive.get(name, files[name]) != files[name]),
    ]


def wheel_faults(wheel: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[str]:
    """Both packages whole, the licence and the README, entry points that lead somewhere, and nothing else."""
    info = next((name.partition("/")[0] for name in wheel if name.endswith(".dist-info/METADATA")), "")
    if not info:
        return ["METADATA is missing"]
    packaged = {name: content for name, content in files.items() if name.split("/")[0] in PACKAGES}
    packaged[f"{info}/licenses/LICENSE"] = files["LICENSE"]
    generated = rf"{re.escape(info)}/(METADATA|WHEEL|RECORD|top_level\.txt|entry_points\.txt)"
    found = faults(wheel, packaged, generated)
    for package in PACKAGES:
        if f"{package}/py.typed" not in wheel:
            found.append(f"{package}/py.typed is missing: its types would not count")
    if metadata(wheel).get_payload() != files["README.md"].decode():
        found.append("METADATA: the description is not README.md")
    entries = wheel.get(f"{info}/entry_points.txt", b"").decode()
    for module in re.findall(r"^[^\[=]+= *([\w.]+)", entries, re.MULTILINE):
        if f"{module.replace('.', '/')}.py" not in wheel:
            found.append(f"entry point: there is no module {module}")
    return found


def sdist_faults(sdist: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[str]:
    """What the wheel is built from, and nothing else."""
    return faults(sdist, files, r"PKG-INFO|setup\.cfg|staging_pool\.egg-info/.*")


def difference(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Where the two wheels are not the same."""
    names = sorted({*one, *other})
    return [f"{name} is not the same in the wheel of the sdist" for name in names if one.get(name) != other.get(name)]


def metadata(wheel: Mapping[str, bytes]) -> email.message.Message:
    name = next(name for name in wheel if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel[name].decode())


def requirements(wheel: Mapping[str, bytes], extra: str | None = None) -> list[str]:
    """What the wheel asks for, or what an extra adds to that, without markers."""
    found = []
    for line in metadata(wheel).get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        of_extra = re.search(r"extra == [\"']([\w-]+)[\"']", marker)
        if (of_extra[1] if of_extra else None) == extra:
            found.append(requirement.strip())
    return found


def lowest(wheel: Mapping[str, bytes]) -> list[str]:
    """The lower bounds, of the extra for the tests as well, as constraints."""
    bounds = [
        re.fullmatch(r"([\w.-]+)>=([\w.]+)", asked) for extra in (None, "test") for asked in requirements(wheel, extra)
    ]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


# Environments.


def virtual_environment(python: str, folder: Path, log: Log) -> Path:
    """Its interpreter."""
    log.run("venv", python, "-m", "venv", folder)
    return folder / "bin" / "python"


def try_out(environment: Environment, built: Built, tests: Path, folder: Path) -> list[Row]:
    """Both wheels, each in an environment of its own; torch is installed once, and the files are linked."""
    folder.mkdir()
    log = Log(folder / "log.txt")
    wheel = read_archive(built.wheel)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*(lowest(wheel) if environment.lowest else environment.pinned), ""]))

    def pip(python: Path, *what: str | Path) -> None:
        options = ("--only-binary", ":all:", "--constraint", constraints)
        log.run(f"installing {what[0]}", python, "-m", "pip", "install", *options, *what)

    rows = []
    try:
        base = virtual_environment(environment.python, folder / "torch", log)
        pip(base, "torch")
        for name, artifact in (("wheel", built.wheel), ("sdist", built.wheel_of_sdist)):
            row = Row(built=name)
            rows.append(row)
            shutil.copytree(folder / "torch", folder / name, copy_function=os.link, symlinks=True)
            python = folder / name / "bin" / "python"
            pip(python, artifact)
            log.run("pip check", python, "-m", "pip", "check")
            if not environment.triton:
                log.run("without triton", python, "-m", "pip", "uninstall", "--yes", "triton")
            versions = log.run("import", python, "-W", "error", "-c", INSTALLED + WHAT_IS_THERE)
            rows[-1] = row = attrs.evolve(row, **json.loads(versions), commands=FAILED)
            for command in COMMANDS.values():
                log.run(command, python, "-W", "error", "-m", "batching", *command.split())
            rows[-1] = row = attrs.evolve(row, commands=f"{len(COMMANDS)} passed")
            if name == "wheel":
                rows[-1] = attrs.evolve(row, tests=FAILED)
                pip(python, *requirements(wheel, "test"))
                rows[-1] = attrs.evolve(row, tests=run_tests(python, tests, log))
            else:
                rows[-1] = attrs.evolve(row, tests="the same files")
    except ReleaseError as error:
        print(f"{environment.text}: {error}", file=sys.stderr, flush=True)
        if not rows:
            rows.append(Row(built="nothing", commands=FAILED))
    finally:
        for name in ("torch", "wheel", "sdist"):  # gigabytes each
            shutil.rmtree(folder / name, ignore_errors=True)
    return rows


def run_tests(python: Path, tests: Path, log: Log) -> str:
    """How many passed."""
    skipped = tuple(f"--ignore={name}" for name in SLOW)
    options = ("-q", "-p", "no:cacheprovider", "-p", "installed", "--durations=5", *skipped)
    printed = log.run("tests", python, "-m", "pytest", *options, *TESTS, cwd=tests)
    counted = re.search(r"^(\d+ passed.*) in \d", printed, re.MULTILINE)
    if counted is None:
        raise ReleaseError("tests: none passed")
    return counted[1]


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    names = [field.name for field in attrs.fields(Row)]
    lines = [names, ["---"] * len(names), *(list(attrs.astuple(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def release(names: Sequence[str], environments: Sequence[Environment], work: Path) -> bool:
    """All of it, in this folder; prints the table. Returns whether all is as it should be."""
    released = [name for name in names if name in BESIDE or name.split("/")[0] in PACKAGES]
    files = {name: (ROOT / name).read_bytes() for name in released}
    built = build(released, work)
    wheel = read_archive(built.wheel)
    found = [
        *(f"{built.wheel.name}: {fault}" for fault in wheel_faults(wheel, files)),
        *(f"{built.sdist.name}: {fault}" for fault in sdist_faults(read_archive(built.sdist), files)),
        *difference(wheel, read_archive(built.wheel_of_sdist)),
    ]
    for fault in found:
        print(fault, file=sys.stderr)
    tests = copy([name for name in names if name.split("/")[0] not in PACKAGES], work / "tests")
    (tests / "installed.py").write_text(INSTALLED)
    rows = []
    for number, environment in enumerate(environments, 1):
        rows += try_out(environment, built, tests, work / f"environment-{number}")
    changed = ", changed since" if git("status", "--porcelain") else ""
    commit = git("rev-parse", "--short", "HEAD").strip() + changed
    print(f"{built.wheel.name} and {built.sdist.name}, commit {commit}, {time.strftime('%Y-%m-%d')}\n")
    print(table(rows))
    return not found and all(row.good for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python tests/release.py",
        description=lines[0],
        epilog="\n".join(lines[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "environments", nargs="*", type=Environment.read, metavar="ENVIRONMENT",
        help="a Python, and after colons what differs from pip's choice: lowest, no-triton, torch=VERSION, numpy=…",
    )  # fmt: skip
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="a new folder for what is built and all output; else a temporary one, which "
        "is left where something went wrong",
    )
    chosen = parser.parse_args(arguments)
    try:
        names = known_to_git()
    except NoCheckout as error:
        parser.error(str(error))
    if chosen.keep is None:
        work = Path(tempfile.mkdtemp(prefix="staging-release-"))
    else:
        work = chosen.keep.resolve()
        try:
            work.mkdir(parents=True)
        except OSError as error:
            parser.error(f"argument --keep: {error}; name a new folder")
    good = False
    try:
        good = release(names, chosen.environments or [Environment.read(sys.executable)], work)
    except ReleaseError as error:
        print(error, file=sys.stderr)
    finally:
        if good and chosen.keep is None:
            shutil.rmtree(work)
        else:
            print(f"\nwhat was built, and all output: {work}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
