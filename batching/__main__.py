"""`python -m batching COMMAND`: the package's commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from batching.bench import command as bench
from batching.replay import command as replay
from batching.soak import command as soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 fine, 1 the command found a fault, 2 it could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m batching",
        description="Batch uploads for LLM schedulers through a ring of pinned buffers.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_parser(commands)
    replay.add_parser(commands)
    soak.add_parser(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
