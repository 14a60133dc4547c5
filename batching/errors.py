"""Everything `batching` raises of its own. Each message names the request, the field, the value and the remedy."""

from __future__ import annotations


class BatchError(ValueError):
    """Base of these errors; they are raised before anything is uploaded, written or launched."""


class SamplingValueError(BatchError):
    """A sampling value is of the wrong type, out of range, or does not fit the dtype it is uploaded as."""


class CacheIndexError(BatchError):
    """A prefix, a length, a request slot or `out_cache_loc` does not fit the table that is to be written."""
