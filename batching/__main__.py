"""`python -m batching COMMAND`: the package's commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from batching.arguments import Parser, lessons
from batching.bench import command as bench
from batching.replay import command as replay
from batching.soak import command as soak

_DESCRIPTION = """\
What an LLM scheduler uploads when it builds a batch, through a ring of pinned
host buffers: replayed, soaked and measured. Each command says more of itself:
python -m batching COMMAND --help"""

_EXAMPLES = {
    "replay": "traffic through the pool, every batch checked bit for bit",
    "soak --seconds 30": "random batches from eight threads, every upload checked on the device",
    "bench --rows 1,16,256": "the pool beside the ways in which engines upload today",
}


def parser() -> Parser:
    """The whole command line."""
    whole = Parser(
        prog="python -m batching",
        description=_DESCRIPTION,
        epilog=lessons(_EXAMPLES, {0: "done, nothing wrong", 1: "the command found a fault"}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_parser(commands)
    replay.add_parser(commands)
    soak.add_parser(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 fine, 1 the command found a fault, 2 it could not be run, …"""
    chosen = parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone. What is still to be written goes nowhere, or Python complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
