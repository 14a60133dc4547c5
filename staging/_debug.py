"""Debug mode: finds writes to a slot that the lease protocol cannot prevent, because they go around it.

Three nets. Checksums of the fields, taken at the upload and again when the event has passed: somebody wrote under the
copy. A fixed pattern over every released slot, looked for at the next hand-out: somebody wrote to a slot that was not
leased. A canary behind the bytes in use: somebody wrote past the end. Off, none of this runs.
"""

from __future__ import annotations

import zlib

import attrs
import numpy as np
import numpy.typing as npt

from staging._slots import Slot
from staging.errors import SlotOverwritten
from staging.layout import Plan
from staging.stats import Counters

GUARD = 64
"""Bytes that a debug-mode buffer has behind its capacity, for the canary of a full slot."""

_Bytes = npt.NDArray[np.uint8]
_PATTERN = 0xA5
_CANARY = 0x5A


@attrs.frozen
class Sum:
    """The checksum of one field of an upload."""

    field: str
    offset: int
    nbytes: int
    crc: int


@attrs.define
class Watched:
    """What is known about one slot's bytes."""

    patterned: int = 0
    """Bytes from the start that hold the pattern, since the slot was released."""
    end: int = 0
    """Where the canary stands: the bytes that the lease may write end here."""
    sums: tuple[Sum, ...] = ()
    upload: int = 0
    """Number of the upload the sums belong to, counted from 1 over the pool."""


class Watch:
    """The nets of one pool. Called under the ring's lock. Raises `SlotOverwritten`, having put things in order."""

    def __init__(self, name: str, counters: Counters) -> None:
        self._name = name
        self._counters = counters
        self._slots: dict[int, Watched] = {}
        self._uploads = 0

    def taken(self, slot: Slot) -> None:
        """Before a free slot is handed out: the pattern must be whole."""
        watched = self._slots.get(slot.index)
        if watched is None or not watched.patterned:
            return
        wrong = np.flatnonzero(_bytes(slot)[: watched.patterned] != _PATTERN)
        watched.patterned = 0
        if len(wrong):
            self._counters.violations_unleased += 1
            raise self._overwritten(slot, f"byte {wrong[0]} was written while the slot was leased to nobody")

    def leased(self, slot: Slot, plan: Plan) -> None:
        """At the hand-out, the slot being large enough: the canary is set behind what the lease may write."""
        self._slots.setdefault(slot.index, Watched()).end = plan.total
        _bytes(slot)[plan.total : plan.total + GUARD] = _CANARY

    def uploading(self, slot: Slot, plan: Plan) -> None:
        """Before the copy: the canary must be whole. Then every field's checksum is taken."""
        watched = self._slots[slot.index]
        self._check_canary(slot, watched, f"the lease of {plan.layout.name!r}")
        data = _bytes(slot)
        self._uploads += 1
        watched.upload = self._uploads
        watched.sums = tuple(
            Sum(
                place.field.name,
                place.offset,
                place.nbytes,
                _sum(data, place.offset, place.nbytes),
            )
            for place in plan.places
        )

    def done(self, slot: Slot) -> None:
        """When the event has passed: checksums and canary must be as they were. Then the pattern covers it all."""
        watched = self._slots.get(slot.index)
        if watched is None:
            return
        data = _bytes(slot)
        changed = [one.field for one in watched.sums if _sum(data, one.offset, one.nbytes) != one.crc]
        try:
            if changed:
                self._counters.violations_under_copy += 1
                fields = ", ".join(repr(name) for name in changed)
                raise self._overwritten(slot, f"upload {watched.upload}: field {fields} was written under the copy")
            if watched.sums:
                self._check_canary(slot, watched, f"upload {watched.upload}")
        finally:
            self.released(slot)

    def released(self, slot: Slot) -> None:
        """At the end of a lease without an upload, and after `done`: the pattern covers what was in use."""
        watched = self._slots.setdefault(slot.index, Watched())
        watched.sums = ()
        covered = min(watched.end + GUARD, len(_bytes(slot)))
        _bytes(slot)[:covered] = _PATTERN
        watched.patterned = covered  # not before it is there: an exception may come in between

    def enlarged(self, slot: Slot) -> None:
        """The slot has another buffer, of which nothing is known."""
        self._slots[slot.index] = Watched()

    def _check_canary(self, slot: Slot, watched: Watched, what: str) -> None:
        wrong = np.flatnonzero(_bytes(slot)[watched.end : watched.end + GUARD] != _CANARY)
        if len(wrong):
            self._counters.violations_behind_end += 1
            raise self._overwritten(slot, f"{what}: byte {watched.end + wrong[0]} behind its {watched.end} was written")

    def _overwritten(self, slot: Slot, what: str) -> SlotOverwritten:
        where = f", last leased at {slot.site}" if slot.site else ""
        return SlotOverwritten(
            f"pool {self._name!r}, slot {slot.index}: {what}{where}; somebody writes to the slot's memory by a view or "
            f"pointer of his own"
        )


def _sum(data: _Bytes, offset: int, nbytes: int) -> int:
    return zlib.crc32(data[offset : offset + nbytes])  # type: ignore[arg-type]  # numpy's arrays are buffers


def _bytes(slot: Slot) -> _Bytes:
    assert slot.buffer is not None, "a slot that was leased has memory"
    return slot.buffer.array
