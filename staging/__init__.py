"""A ring of pinned host buffers for many small uploads: one copy per batch, no allocation, checked reuse.

`StagingPool` is where to begin. `staging.testing` has a simulated device for tests without a GPU.
"""

from staging._fixed import Destination
from staging.errors import (
    CaptureError,
    FieldError,
    LeaseError,
    LeaseTooLarge,
    PinningError,
    PoolBroken,
    PoolClosed,
    PoolExhausted,
    PoolForked,
    SlotOverwritten,
    StagingError,
)
from staging.layout import Field, Layout
from staging.lease import Lease
from staging.pool import StagingPool
from staging.stats import Advice, PoolStats
from staging.upload import Upload

__all__ = [
    "Advice",
    "CaptureError",
    "Destination",
    "Field",
    "FieldError",
    "Layout",
    "Lease",
    "LeaseError",
    "LeaseTooLarge",
    "PinningError",
    "PoolBroken",
    "PoolClosed",
    "PoolExhausted",
    "PoolForked",
    "PoolStats",
    "SlotOverwritten",
    "StagingError",
    "StagingPool",
    "Upload",
]
