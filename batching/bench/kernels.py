"""`write_cache_indices` on the GPU: the serial form and ours, compared bit for bit and then timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from batching.bench.timing import Machine, gpu_time
from batching.params import SamplingParams
from batching.request import Request, ScheduleBatch
from batching.stage import stage_batch
from staging import StagingPool

UNTOUCHED = -1
_LAUNCHES = 100
_VARIANT_ROWS = (1, 2, 3, 7, 15, 16, 17, 64, 255, 256, 1023, 1024, 1025, 2047, 2048)
_VARIANT_WIDTHS = (1, 2, 15, 16, 17, 63, 257, 1000, 1023, 1024, 1025, 4097)


@attrs.frozen
class Shape:
    """Requests by the length of their prefix, with as many new tokens each."""

    prefixes: tuple[int, ...]
    new: int
    note: str = ""

    @property
    def label(self) -> str:
        return self.note or f"{len(self.prefixes)} x {self.prefixes[0]} + {self.new}"


SHAPES = (
    Shape((131072,), 64),
    Shape((32768,) * 8, 256),
    Shape((4096,) * 64, 256),
    Shape((1024,) * 256, 128),
    Shape((256,) * 1024, 16),
    Shape((64,) * 2048, 8),
    Shape((0,), 128),
    Shape((190_000,) + (64,) * 2047, 8, "1 x 190000 among 2047 x 64, + 8"),
)
"""Requests x prefix + new tokens."""


class Case:
    """One batch on the device with its prefixes, and the two kernels ready to be launched on it."""

    def __init__(self, shape: Shape, pool: StagingPool, width: int = 0, seed: int = 0) -> None:
        from batching.bench.serial_kernel import launch_serial
        from batching.kernel import launch  # triton, when it is needed

        device = pool.device
        random = torch.Generator().manual_seed(seed)
        rows = len(shape.prefixes)
        slots = torch.randperm(rows, generator=random).tolist()
        longest = max(shape.prefixes) + shape.new
        prefixes = torch.randint(0, 2**31 - 1, (sum(shape.prefixes),), generator=random).to(device)
        requests = [
            Request(f"r{row}", SamplingParams(), prefix, shape.new, slots[row])
            for row, prefix in enumerate(torch.split(prefixes, list(shape.prefixes)))
        ]
        self.requests = requests
        self.fresh = torch.randint(0, 2**31 - 1, (rows * shape.new,), generator=random).to(device)
        self.size = (rows, width or longest)
        # Without a pool: the arrays of the serial form and of ours are the same, and nobody times this.
        self.tensors = dict(stage_batch(ScheduleBatch(requests, device), None, "cache").tensors)
        self.tensors["extend_lens"] = torch.full((rows,), shape.new, dtype=torch.int64, device=device)
        self.ways: dict[str, Callable[[torch.Tensor], None]] = {
            "serial": lambda table: launch_serial(table, self.tensors, self.fresh),
            "ours": lambda table: launch(table, self.tensors, self.fresh, longest),
        }

    def table(self) -> torch.Tensor:
        """A table that nobody has written."""
        return torch.full(self.size, UNTOUCHED, dtype=torch.int32, device=self.fresh.device)

    def expected(self) -> torch.Tensor:
        """The table by definition: one slice after the other."""
        table = self.table()
        begin = 0
        for request in self.requests:
            prefix, new = request.prefix_indices, request.extend_input_len
            assert prefix is not None
            line = table[request.req_pool_idx]
            line[: len(prefix)] = prefix
            line[len(prefix) : len(prefix) + new] = self.fresh[begin : begin + new]
            begin += new
        return table

    def differences(self, *names: str) -> list[str]:
        """Which kernel (of these; default: all) does not write exactly the expected table."""
        wanted = self.expected()
        found = []
        for name in names or self.ways:
            table = self.table()
            self.ways[name](table)
            if not torch.equal(table, wanted):
                row, column = (int(index) for index in (table != wanted).nonzero()[0])
                found.append(
                    f"{name} kernel: entry ({row}, {column}) is {table[row, column]}, not {wanted[row, column]}"
                )
        return found


def time_shape(machine: Machine, case: Case, repeats: int) -> dict[str, list[float] | None]:
    """GPU microseconds of both kernels and of one that does nothing."""
    from batching.bench.serial_kernel import launch_nothing

    table = case.table()
    numbers = {
        name: gpu_time(machine, lambda way=way: way(table), _LAUNCHES, repeats)  # type: ignore[misc]
        for name, way in case.ways.items()
    }
    numbers["nothing"] = gpu_time(machine, lambda: launch_nothing(table), _LAUNCHES, repeats)
    return numbers


def exercise_variants(pool: StagingPool) -> list[str]:
    """Our kernel for 1 to 2048 requests and odd widths, so that every variant there is gets compiled; what is wrong."""
    found = []
    for number, rows in enumerate(_VARIANT_ROWS):
        width = _VARIANT_WIDTHS[number % len(_VARIANT_WIDTHS)]
        new = max(1, width // 3)
        case = Case(Shape((width - new,) * rows, new), pool, width)
        found += [f"{rows} x {width - new} + {new}: {line}" for line in case.differences("ours")]
    return found


def variants() -> int | None:
    """How many variants of our kernel this process compiled for one device; None where this Triton does not say."""
    from batching import kernel

    try:
        caches: Mapping[Any, Sequence[Any]] = kernel.write_rows.device_caches
        return max((len(cache[0]) for cache in caches.values()), default=0)
    except (AttributeError, TypeError, IndexError):
        return None
