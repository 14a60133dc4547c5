"""One rank of a job that torchrun started: what is its own, and how it waits for the others and gathers from all."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import attrs
import torch

from batching.arguments import CommandError, chosen_device, duration

START_S = 300.0
"""How long a rank waits at the start for the others to come: they import and read the trace at different speeds."""
PATIENCE_S = 60.0
"""How long it waits for them later, besides what it took itself."""
_JOIN_S = 60
_COLLECTIVE_S = 60
"""All ranks are there by then: they have only to connect, and to send a few kilobytes."""
_POLL_S = 0.1
_GRACE_S = 2.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ALONE = f"unset {', '.join(_VARIABLES)} to replay in one process"
_T = TypeVar("_T")

_groups: list[Any] = []
"""Of gloo, until the process ends. torch 2.6 hangs where one is freed just after it has gathered: it waits for the
group's thread with the GIL held, and that needs the GIL to free what was sent."""


@attrs.define(eq=False)
class Job:
    """This process as one of the ranks of a job; its `with` block is the rank's life.

    All that the ranks say to each other while they work goes through the job's store, a TCP server of torchrun's, by
    calls that return at once: a rank that waits can tell who is missing, and be stopped. A process group exists only
    while something is gathered, when all have come. So nothing of it runs beside a replay, and a rank that fails has
    none to take down, which with NCCL needs the others.
    """

    rank: int
    size: int
    local_rank: int
    gathered: bool = False
    """Whether the ranks have gathered what they did: from then on no one's end may come before the others'."""
    backend: str = "gloo"
    """What carries what is gathered: NCCL between GPUs, else gloo."""
    _store: Any = None
    _before: Any = signal.SIG_DFL

    @classmethod
    def from_environment(cls) -> Job | None:
        """None where no launcher has set RANK, WORLD_SIZE and LOCAL_RANK. `CommandError` where they cannot be."""
        if not all(name in os.environ for name in _VARIABLES):
            return None
        rank, size, local_rank = (_number(name) for name in _VARIABLES)
        if rank >= size:
            raise CommandError(
                f"RANK={rank} is not below WORLD_SIZE={size}; start the ranks with torchrun, or {_ALONE}"
            )
        return cls(rank, size, local_rank)

    def own(self, arguments: argparse.Namespace) -> argparse.Namespace:
        """The arguments of the command line, made this rank's: its device, its port, its timeline."""
        own = argparse.Namespace(**vars(arguments))
        own.device = self._device(arguments.device)
        if arguments.metrics_port:  # each rank finds a free one where it is 0
            own.metrics_port += self.rank
            if own.metrics_port > 65_535:
                raise CommandError(
                    f"--metrics-port {arguments.metrics_port} leaves no port for this rank, which serves that number "
                    f"plus {self.rank}; give {65_536 - self.size} or less"
                )
        path: Path | None = arguments.timeline
        if path is not None and path.name:
            own.timeline = path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
        return own

    def _device(self, wish: str) -> str:
        kind = chosen_device(wish)
        if kind != "cuda":
            return kind
        seen = torch.cuda.device_count()
        if self.local_rank >= seen:
            remedy = f"start at most {seen} ranks (--nproc-per-node {seen}), or use" if seen else "use"
            raise CommandError(
                f"LOCAL_RANK={self.local_rank} replays on cuda:{self.local_rank}, and this process sees {seen} CUDA "
                f"devices; {remedy} --device cpu"
            )
        torch.cuda.set_device(self.local_rank)  # also for what asks no one: NCCL, and the kernel that keeps it busy
        self.backend = "nccl"
        return f"cuda:{self.local_rank}"

    # What is between the ranks.

    def join(self) -> None:
        """Connect to the job's store. `CommandError` when it cannot be reached."""
        import torch.distributed as dist

        try:
            self._store, _, _ = next(
                dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_S))  # type: ignore[attr-defined]
            )
        except (RuntimeError, ValueError) as error:
            raise CommandError(
                f"the job's store cannot be reached ({_line(error)}); start the ranks with torchrun, or {_ALONE}"
            ) from error

    def gather(self, what: str, mine: _T, patience_s: float) -> list[_T]:
        """What every rank has given under this name, in order of rank, for every rank.

        Each name once, by all ranks in the same order. `CommandError` when a rank has failed, or has not come
        `patience_s` after this one, or when they cannot connect.
        """
        import torch.distributed as dist

        try:
            self._come(what)
            self._wait(what, patience_s)
        except RuntimeError as error:
            raise CommandError(f"the job's store is gone, and with it torchrun ({_line(error)})") from error
        found: list[Any] = [None] * self.size
        try:
            with _stopped_at_once():
                dist.init_process_group(
                    self.backend,
                    store=dist.PrefixStore(what, self._store),  # type: ignore[attr-defined]
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timedelta(seconds=_COLLECTIVE_S),
                    device_id=torch.device("cuda", self.local_rank) if self.backend == "nccl" else None,
                )
                dist.all_gather_object(found, mine)
                if self.backend == "gloo":
                    _groups.append(dist.group.WORLD)
                dist.destroy_process_group()  # not after an error: it may need those that are gone
        except (RuntimeError, ValueError) as error:
            raise CommandError(f"the ranks could not gather through {self.backend} ({_line(error)})") from error
        return found

    def fail(self, reason: str) -> None:
        """Let those know that wait for what this rank has done."""
        try:
            if not self.gathered and self._store is not None and not self._store.check(["failed"]):
                self._store.set("failed", f"rank {self.rank} failed: {reason}")
        except RuntimeError:
            pass  # the store is gone, and with it who would read this

    def leave(self, status: int, patience_s: float) -> None:
        """After what was gathered. Any status but 0 is held back until the others have come here as well, since
        torchrun stops them when it sees one: a table half printed, a timeline not yet written."""
        try:
            self._come("end")
            if status:
                self._wait("end", patience_s)
        except (CommandError, RuntimeError, KeyboardInterrupt):
            pass  # there is nothing left to be told

    def _come(self, what: str) -> None:
        self._store.set(f"at {what}/{self.rank}", "")

    def _wait(self, what: str, patience_s: float) -> None:
        """Return when every rank has come there."""
        deadline = time.monotonic() + patience_s
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._store.check([f"at {what}/{rank}"])]:
            if self._store.check(["failed"]):
                time.sleep(_GRACE_S)  # torchrun stops this rank before, and so names the one that failed first
                raise CommandError(self._store.get("failed").decode())
            if time.monotonic() > deadline:
                raise CommandError(
                    f"rank {', '.join(map(str, missing))} of {self.size} did not come to the {what} within "
                    f"{duration(patience_s * 1e9)} of this one: it hangs or has ended; if there is no other rank, "
                    f"{_ALONE}"
                )
            time.sleep(_POLL_S)

    # The rank's life.

    def __enter__(self) -> Job:
        self._before = signal.signal(signal.SIGTERM, _interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if error is not None:
            self.fail(repr(error))


def _interrupted(number: int, frame: FrameType | None) -> None:
    """As by Ctrl-C: what is open gets closed, and a timeline is written."""
    raise KeyboardInterrupt("SIGTERM, by which torchrun ends all ranks when one has failed")


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """SIGTERM ends the process by itself: while torch waits for others, no handler of Python's would run."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise CommandError(f"{name}={text!r} is not a whole number; start the ranks with torchrun, or {_ALONE}")
    return int(text)


def _line(error: Exception) -> str:
    """The first line: torch puts a C++ stack under it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
