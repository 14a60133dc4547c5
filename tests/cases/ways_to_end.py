"""Ends a process in every way there is, each time with a pool in use; prints what became of each as JSON.

`python ways_to_end.py cpu` or `cuda`. Each way is a child forked before any device is touched.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading

import torch

from staging import Field, Layout, StagingPool

WAYS = ("module level", "cycle", "daemon thread", "exit in a step", "at once", "signal", "exception", "closed")
COLUMN = Layout([Field("column", torch.int64)])


def main() -> str | None:
    """In the parent: starts a child for each way, waits for all, prints. In a child: the way it is to end."""
    children = {}
    for way in WAYS:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        child = os.fork()
        if not child:
            os.dup2(errors.fileno(), 2)
            return way
        children[child] = (way, errors)
    found = {}
    for child, (way, errors) in children.items():
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        found[way] = (os.waitstatus_to_exitcode(status), errors.read())
    print(json.dumps(found))
    return None


def send(pool: StagingPool, value: int) -> torch.Tensor:
    with pool.lease(COLUMN, rows=1000) as lease:
        lease["column"] = value
        return lease.upload()["column"]


def stay_in_a_step(pool: StagingPool, started: threading.Event) -> None:
    # Not in a torch call: a daemon thread that is in one when the interpreter ends aborts the process, pool or no pool.
    with pool.lease(COLUMN, rows=1000) as lease:
        lease["column"] = 6
        started.set()
        threading.Event().wait()


def end(way: str, pool: StagingPool) -> None:
    """End this process in that way, or prepare for its ending when the script does."""
    kept = send(pool, 5)
    if way == "cycle":
        cycle: list[object] = [pool, kept]
        cycle.append(cycle)
        globals()["pool"] = None
    elif way == "daemon thread":
        started = threading.Event()
        threading.Thread(target=stay_in_a_step, args=(pool, started), daemon=True).start()
        started.wait(60)
    elif way == "exit in a step":
        with pool.lease(COLUMN, rows=1000) as lease:
            lease["column"] = 6
            sys.exit(3)
    elif way == "at once":
        os._exit(4)
    elif way == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif way == "exception":
        raise LookupError("own mistake")
    elif way == "closed":
        pool.close()


if __name__ == "__main__":
    its_way = main()
    if its_way is not None:
        pool = StagingPool(sys.argv[1])
        end(its_way, pool)
