"""A simulated device, and pools that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from staging import StagingPool
from staging.testing import SimulatedDevice


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., StagingPool]]:
    """Makes pools; at the end of the test all copies run, none may find other bytes, and each pool is closed."""
    made: list[tuple[Any, StagingPool]] = []

    def make(device: Any, **options: Any) -> StagingPool:
        pool = StagingPool(device, **{"name": "case", "slot_bytes": 4096, **options})
        made.append((device, pool))
        return pool

    yield make
    for device, pool in made:
        if isinstance(device, SimulatedDevice):
            device.finish_all()
        pool.close(timeout=0)
