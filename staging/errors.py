"""Everything `staging` raises. Each message says which pool or field, what was asked, and what to do next."""

from __future__ import annotations


class StagingError(Exception):
    """Base of every error of this package; after any of them the pool's gauges still add up."""


class FieldError(StagingError, ValueError):
    """A field, a length or a value does not fit the layout. Nothing of it reaches the device."""


class LeaseError(StagingError):
    """The lease cannot do this any more: it was uploaded, discarded, abandoned, or a field is still unwritten."""


class LeaseTooLarge(StagingError, ValueError):
    """The layout with these lengths needs more than `max_bytes`. Nothing was written."""


class PoolExhausted(StagingError, TimeoutError):
    """No slot came free before the deadline, or waiting could never end: this thread holds all of them."""


class PoolClosed(StagingError):
    """The pool was closed."""


class PoolBroken(StagingError):
    """The device reported an error that does not go away; the first one is the `__cause__`."""


class PoolForked(StagingError):
    """The pool was made by the parent of this process; CUDA memory and events do not survive a fork."""


class CaptureError(StagingError):
    """A CUDA graph is being captured on the current stream, where an upload would be wrong at each replay."""


class SlotOverwritten(StagingError):
    """Debug mode found that somebody wrote to a slot around the lease; the message has slot, upload and field."""


class PinningError(StagingError, MemoryError):
    """Host memory for a slot could not be had."""


def shown(value: object) -> str:
    """`repr(value)` with its type, short enough for a message."""
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        # Not its values: printing a tensor on a device waits for the device.
        return f"a tensor of {value.dtype} on {value.device}"  # type: ignore[attr-defined]
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a value without repr"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
