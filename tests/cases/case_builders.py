"""What the tests of the cases share: uploads that carry one stamp, and batches of foreign requests."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from batching import ScheduleBatch
from batching.stage import PREFILL
from staging import Lease, StagingPool, Upload
from staging.testing import SimulatedDevice

FIELDS = [field.name for field in PREFILL.fields]
"""Every field that a prefill batch uploads: five sampling columns, pointers, lengths and offsets."""


def fill(lease: Lease, stamp: int) -> Lease:
    """Write the stamp into every row of every field."""
    for name in FIELDS:
        lease[name] = stamp
    return lease


def send(pool: StagingPool, stamp: int, rows: int = 3) -> Upload:
    """One upload in which every value is the stamp."""
    with pool.lease(PREFILL, rows=rows) as lease:
        return fill(lease, stamp).upload()


def stamps(upload: Upload) -> set[float]:
    """All values that arrived."""
    return {value for tensor in upload.values() for value in tensor.reshape(-1).tolist()}


def slow_device() -> SimulatedDevice:
    """A device on which a copy runs only when somebody has to wait for one."""
    return SimulatedDevice(on_sleep=lambda device: device.finish())


def foreign(rid: str, **values: Any) -> SimpleNamespace:
    """A request with parameters of which the library knows no more than the names."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "sampling_seed": None, **values}
    return SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(**params),
        prefix_indices=None,
        extend_input_len=0,
        req_pool_idx=0,
    )


def decode(requests: Iterable[Any], *, deterministic: bool = True) -> ScheduleBatch:
    """A batch of these requests that stages the sampling columns alone."""
    return ScheduleBatch(list(requests), "cpu", forward_mode="decode", deterministic=deterministic)
