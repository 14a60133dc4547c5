"""What an LLM scheduler uploads when it builds a batch, through a `StagingPool`: sampling columns and prefix pointers.

`SamplingBatchInfo.from_schedule_batch` and `write_cache_indices` are the two entry points; together they make one copy.
`python -m batching replay` runs them on recorded traffic.
"""

from batching.cache import warm, write_cache_indices
from batching.errors import BatchError, CacheIndexError, SamplingValueError
from batching.info import SamplingBatchInfo
from batching.params import SamplingParams
from batching.request import Request, ScheduleBatch
from batching.stage import Staged, stage_batch, stage_rows

__all__ = [
    "BatchError",
    "CacheIndexError",
    "Request",
    "SamplingBatchInfo",
    "SamplingParams",
    "SamplingValueError",
    "ScheduleBatch",
    "Staged",
    "stage_batch",
    "stage_rows",
    "warm",
    "write_cache_indices",
]
