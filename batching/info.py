"""`SamplingBatchInfo`: the sampling columns of a batch on the device, through filter and merge."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from batching.errors import BatchError
from batching.needs import FLAGS
from batching.params import Table, needs_of
from batching.request import ScheduleBatch
from batching.stage import stage_rows, staged_for
from staging import Field, Layout, StagingPool

KEEP = Layout([Field("keep_indices", torch.int64)], name="keep indices")

_FLAGS = ("is_all_greedy", "is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
_COLUMNS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


@attrs.define(eq=False, repr=False)
class SamplingBatchInfo:
    """The sampling parameters of a batch, one row for each request, on the batch's device.

    The tensors belong to this object and stay with the running batch for as long as it likes; `filter_batch` and
    `merge_batch` replace them and never write into them, so a forward in flight keeps reading what it was given.
    """

    temperatures: torch.Tensor
    """(rows, 1) float32."""
    top_ps: torch.Tensor
    """(rows,) float32."""
    top_ks: torch.Tensor
    """(rows,) int32; 1 << 30 is the whole vocabulary. Not clamped to `vocab_size`: the sampler does that."""
    min_ps: torch.Tensor
    """(rows,) float32."""
    sampling_seed: torch.Tensor | None
    """(rows,) int64 under deterministic sampling, else None."""
    vocab_size: int
    device: torch.device
    is_all_greedy: bool = attrs.field(init=False)
    """Every top_k is at most 1; True for an empty batch."""
    is_any_greedy: bool = attrs.field(init=False)
    """Some top_k is at most 1."""
    need_top_p_sampling: bool = attrs.field(init=False)
    """Some top_p is not 1."""
    need_top_k_sampling: bool = attrs.field(init=False)
    """Some top_k is not the whole vocabulary."""
    need_min_p_sampling: bool = attrs.field(init=False)
    """Some min_p is more than 0."""
    _table: Table = attrs.field(alias="table", repr=False)
    """The same rows on the host: flags are computed from it after a filter, without asking the device."""
    _needs: int = attrs.field(alias="needs", repr=False)
    """The flags as bits, see `batching.needs`."""

    def __attrs_post_init__(self) -> None:
        self._set_flags(self._needs)

    @classmethod
    def from_schedule_batch(
        cls, batch: ScheduleBatch, vocab_size: int, pool: StagingPool | None = None
    ) -> SamplingBatchInfo:
        """Build the sampling columns of `batch`, in one copy through `pool`, queued on the current stream.

        For an extend batch the copy carries the prefix pointers and lengths as well; when `write_cache_indices` was
        called for this batch before, nothing is copied here. Without a pool each column is pinned and copied by
        itself. An empty batch gives typed tensors of length 0 and takes no slot. `vocab_size` is kept as it is.

        Raises `SamplingValueError` or `CacheIndexError`, naming the request, before a slot is taken, and the errors
        of `StagingPool.lease` and `Lease.upload`.
        """
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            raise BatchError(f"vocab_size is {vocab_size!r}; it must be a positive integer")
        staged = staged_for(batch, pool, "sampling")
        columns = {name: staged.tensors[name] for name in _COLUMNS}
        if not batch.deterministic:
            columns["sampling_seed"] = None  # type: ignore[assignment]
        device = columns["temperatures"].device
        needs = needs_of(staged.sampling, staged.params)
        return cls(**columns, vocab_size=vocab_size, device=device, table=staged.sampling, needs=needs)

    def __repr__(self) -> str:
        # Without the values: printing a tensor waits for the device.
        seeds = "no seeds" if self.sampling_seed is None else "seeds"
        flags = [name for name in _FLAGS if getattr(self, name)]
        return (
            f"<SamplingBatchInfo: {len(self)} rows on {self.device}, vocabulary {self.vocab_size}, {seeds}"
            f"{', ' if flags else ''}{', '.join(flags)}>"
        )

    def __len__(self) -> int:
        return len(self._table)

    def filter_batch(
        self,
        keep_indices: Sequence[int],
        keep_indices_device: torch.Tensor | None = None,
        *,
        pool: StagingPool | None = None,
    ) -> None:
        """Keep these rows, in this order; flags are recomputed. The current stream does the work.

        `keep_indices_device`: the same indices as an int64 tensor on the device, if there is one already. Otherwise
        they are uploaded through `pool`, since indexing by a list would make the host wait. Raises `BatchError` for
        an index that is out of range (negative ones included) or given twice; nothing is changed then.
        """
        keep = checked_keep_indices(keep_indices, len(self))
        if keep_indices_device is None:
            keep_indices_device = stage_rows(KEEP, {"keep_indices": keep}, pool, self.device)["keep_indices"]
        elif not isinstance(keep_indices_device, torch.Tensor) or keep_indices_device.shape != (len(keep),):
            raise BatchError(f"keep_indices_device must be a tensor of the {len(keep)} kept rows")
        self._replace({name: column.index_select(0, keep_indices_device) for name, column in self._columns()})
        self._table = self._table[keep]
        self._set_flags(needs_of(self._table))

    def merge_batch(self, other: SamplingBatchInfo) -> None:
        """Append the rows of `other`, whose tensors stay its own; flags are combined. The current stream does it.

        Raises `BatchError` when one has seeds and the other has not, or device or vocabulary differ.
        """
        if (self.sampling_seed is None) != (other.sampling_seed is None):
            raise BatchError("one batch samples deterministically, the other does not; they cannot be merged")
        if self.vocab_size != other.vocab_size or self.device != other.device:
            raise BatchError(
                f"cannot merge a batch for vocabulary {other.vocab_size} on {other.device} into one for "
                f"{self.vocab_size} on {self.device}"
            )
        self._replace({name: torch.cat([column, getattr(other, name)]) for name, column in self._columns()})
        self._table = np.concatenate([self._table, other._table])
        self._set_flags(self._needs | other._needs)

    def _columns(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, column) for name in _COLUMNS if (column := getattr(self, name)) is not None]

    def _replace(self, columns: dict[str, torch.Tensor]) -> None:
        """All or none: making a column may fail for lack of memory, assigning it does not."""
        for name, column in columns.items():
            setattr(self, name, column)

    def _set_flags(self, needs: int) -> None:
        self._needs = needs
        (
            self.is_all_greedy,
            self.is_any_greedy,
            self.need_top_p_sampling,
            self.need_top_k_sampling,
            self.need_min_p_sampling,
        ) = FLAGS[needs]


def checked_keep_indices(keep_indices: Sequence[int], rows: int) -> list[int]:
    """`keep_indices` as a list of distinct rows of a batch of `rows`, or `BatchError`."""
    keep = list(keep_indices)
    for index in keep:
        if not isinstance(index, (int, np.integer)) or isinstance(index, (bool, np.timedelta64)):
            raise BatchError(f"keep_indices has {index!r}, which is no row number")
        if not 0 <= index < rows:
            raise BatchError(f"keep_indices has {index!r}; the batch has rows 0 to {rows - 1}")
    if len(set(keep)) != len(keep):
        raise BatchError("keep_indices names a row twice")
    return keep
