"""Takes out the library's guards one by one, each in a copy of its own, and sees that a test notices.

python tests/run_mutations.py                  # all of them; exits 0 only when every one is caught
python tests/run_mutations.py --list           # what there is
python tests/run_mutations.py -k quarantine    # those with this word in their name

A mutation is a piece of source that has to stand in its file exactly once, what takes its place, and the few tests
that must fail then. The same tests must pass without it: that is run first. A test may notice in two ways: a wrong
value, or an error that did not come.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("staging", "batching", "tests", "pyproject.toml")
LIMIT_S = 120
"""A mutation whose tests run longer has not been caught by a test."""


class MutationError(Exception):
    """The script no longer fits the source or the tests."""


@attrs.frozen
class Mutation:
    """One guard taken out."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Below `tests/`, as pytest names them."""


@attrs.frozen
class Outcome:
    """What became of one mutation."""

    caught: bool
    test: str = ""
    how: str = ""


MUTATIONS: list[Mutation] = []


def mutation(name: str, file: str, old: str, new: str, *tests: str) -> None:
    MUTATIONS.append(Mutation(name, file, old, new, tests))


# The ring: when a slot may be reused.

POOL, RING, LEASE = "staging/pool.py", "staging/_ring.py", "staging/lease.py"
GUARD, RINGS = "staging/test_guard.py", "staging/test_ring.py"
FAULTS, LEASES, LAYOUTS = "staging/test_faults.py", "staging/test_lease.py", "staging/test_layout.py"
MUTANTS, INTERRUPTS = "staging/test_mutants.py", "staging/test_interrupts.py"

mutation(
    "the event is not asked before reuse",
    RING,
    "if not device.done(slot.event):",
    "if False:",
    f"{GUARD}::test_with_the_guard_the_same_batches_arrive_as_they_were_written",
)
mutation(
    "the event is not recorded",
    POOL,
    "device.record(slot.event, stream)",
    "pass",
    f"{GUARD}::test_with_the_guard_the_same_batches_arrive_as_they_were_written",
)
mutation(
    "a slot is not marked in flight",
    RING,
    "slot.state = _IN_FLIGHT\n        slot.since",
    "slot.state = _FREE\n        slot.since",
    f"{GUARD}::test_with_the_guard_the_same_batches_arrive_as_they_were_written",
)
mutation(
    "an ended lease is not told from an open one",
    LEASE,
    "if slot.generation != self._generation:\n            raise",
    "if False:\n            raise",
    f"{LEASES}::test_a_stale_lease_never_reaches_the_slots_next_owner",
)
mutation(
    "an upload does not end its lease",
    RING,
    "slot.behind = self.counters.uploads\n        slot.generation += 1",
    "slot.behind = self.counters.uploads",
    f"{LEASES}::test_a_lease_can_be_uploaded_only_once",
)
mutation(
    "a discard does not end its lease",
    RING,
    "self._enter(slot, _FREE)\n        slot.generation += 1",
    "self._enter(slot, _FREE)",
    f"{LEASES}::test_nothing_can_be_done_with_an_ended_lease",
)
mutation(
    "a hand-out does not begin a generation",
    RING,
    "generation = slot.generation + 1\n        ticket = Ticket",
    "generation = slot.generation\n        ticket = Ticket",
    f"{MUTANTS}::test_an_upload_whose_slot_was_handed_out_again_has_nothing_to_wait_for",
)
mutation(
    "closing does not end the leases that are open",
    RING,
    "slot.ticket.generation == slot.generation:  # not one whose upload goes on",
    "False:",
    f"{FAULTS}::test_closing_ends_leases_of_this_thread_without_waiting",
)
mutation(
    "unwritten fields are uploaded",
    POOL,
    "missing = plan.all_bits & ~lease._written",
    "missing = 0",
    f"{LEASES}::test_an_unwritten_field_is_refused_and_the_lease_stays_open",
)
mutation(
    "a refused column counts as written",
    LEASE,
    "self._written &= ~place.bit\n        # Into",
    "# Into",
    f"{LAYOUTS}::test_a_refused_column_counts_as_unwritten",
)
mutation(
    "a failed upload frees its slot instead of quarantine",
    RING,
    "+= 1\n        self.quarantine(slot, error)",
    "+= 1\n        self._enter(slot, _FREE)",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "after a failed upload the old event is trusted, no quarantine",
    RING,
    "+= 1\n        self.quarantine(slot, error)",
    "+= 1\n        self._enter(slot, _IN_FLIGHT)",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "only a failed copy is put in quarantine, a failed record is not",
    RING,
    "+= 1\n        self.quarantine(slot, error)",
    "+= 1\n        self.quarantine(slot, error) if 'copy' in str(error) else self._enter(slot, _FREE)",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "only a failed record is put in quarantine, a failed copy is not",
    RING,
    "+= 1\n        self.quarantine(slot, error)",
    "+= 1\n        self.quarantine(slot, error) if 'record' in str(error) else self._enter(slot, _FREE)",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "a failed query frees the slot instead of quarantine",
    RING,
    "self.quarantine(slot, error)\n            else:",
    "self._enter(slot, _FREE)\n            else:",
    f"{FAULTS}::test_an_event_that_cannot_be_asked_puts_its_slot_in_quarantine",
)
mutation(
    "healing trusts an event that was never recorded",
    RING,
    "device.record(event, slot.stream)",
    "pass",
    f"{FAULTS}::test_an_event_that_was_never_recorded_is_never_trusted",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "healing records on another stream than the copy's",
    RING,
    "device.record(event, slot.stream)",
    "device.record(event, device.current_stream())",
    f"{FAULTS}::test_late_bytes_of_a_failed_upload_are_still_its_own",
)
mutation(
    "healing gives the old upload an event that was never recorded",
    RING,
    "event = device.new_event()",
    "event = slot.event = device.new_event()",
    f"{FAULTS}::test_waiting_for_an_upload_never_rests_on_an_event_that_was_never_recorded",
)
mutation(
    "waiting for an upload rests on a later upload's event",
    POOL,
    "if slot.generation == lease._generation + 1 and slot.buffer is not None:",
    "if slot.buffer is not None:",
    f"{LEASES}::test_waiting_marks_each_fresh_allocation_and_asks_for_no_event_twice",
)
mutation(
    "the row fields are copied behind the event",
    POOL,
    "device.copy_on_device(fresh[1], landing, plan.row_runs, stream)\n"
    "                device.record(slot.event, stream)",
    "device.record(slot.event, stream)\n"
    "                    device.copy_on_device(fresh[1], landing, plan.row_runs, stream)\n"
    "                else:\n"
    "                    device.record(slot.event, stream)",
    f"{LEASES}::test_waiting_for_an_upload_waits_for_all_of_its_tensors",
)
mutation(
    "row fields share the storage of token fields",
    POOL,
    "if plan.row_runs:",
    "if False:",
    f"{LEASES}::test_row_fields_do_not_keep_the_storage_of_token_fields",
)
mutation(
    "a usual chunk gets a second allocation",
    "staging/layout.py",
    "if others > KEPT_ALONG:",
    "if others:",
    f"{LEASES}::test_token_fields_up_to_a_usual_chunk_share_the_allocation_of_the_row_fields",
)
mutation(
    "another stream's use of an upload is not marked",
    "staging/upload.py",
    "pool._device.record_stream(fresh, stream)",
    "pass",
    f"{LEASES}::test_waiting_marks_each_fresh_allocation_and_asks_for_no_event_twice",
)
mutation(
    "the copy does not wait for the readers of its destination",
    POOL,
    "device.wait(stream, after)",
    "pass",
    f"{LEASES}::test_the_copy_waits_for_the_readers_of_its_destination",
)
mutation(
    "on the CPU the tensors are the slot",
    "staging/_device.py",
    "landing.numpy()[:] = source.numpy()",
    "landing.set_(source)",
    f"{LEASES}::test_an_uploads_tensors_are_the_callers_own",
)
mutation(
    "out= may be too small",
    POOL,
    "elif out.numel() < plan.total:",
    "elif False:",
    f"{LEASES}::test_an_unsuitable_destination_is_refused_and_the_lease_stays_open",
)
mutation(
    "out= may be on another device",
    POOL,
    "elif out.device != self.device:",
    "elif False:",
    f"{LEASES}::test_an_unsuitable_destination_is_refused_and_the_lease_stays_open",
)
mutation(
    "out= may begin at any byte",
    POOL,
    "elif out.data_ptr() % ALIGNMENT or out.storage_offset() % ALIGNMENT:",
    "elif False:",
    f"{LEASES}::test_an_unsuitable_destination_is_refused_and_the_lease_stays_open",
)
mutation(
    "max_bytes does not refuse a lease",
    POOL,
    "if need > self.max_bytes:",
    "if False:",
    f"{RINGS}::test_a_batch_beyond_max_bytes_is_refused_before_anything_is_touched",
)
mutation(
    "max_bytes does not bound a buffer",
    POOL,
    "size = min(_power_of_two(max(need, self._slot_bytes)), self.max_bytes)",
    "size = _power_of_two(max(need, self._slot_bytes))",
    f"{RINGS}::test_max_bytes_need_not_be_a_power_of_two",
)
mutation(
    "capture is not refused at the lease",
    POOL,
    "if device.capturing(device.current_stream()):",
    "if False:",
    f"{LEASES}::test_capture_is_refused_at_the_lease",
)
mutation(
    "capture is not refused at the upload",
    POOL,
    "if device.capturing(stream):",
    "if False:",
    f"{LEASES}::test_capture_is_refused_at_the_upload_and_the_lease_survives",
)
mutation(
    "a closed pool leases what needs no slot",
    POOL,
    "if ring.refusal is not None:\n                raise",
    "if False:\n                raise",
    f"{LEASES}::test_a_closed_pool_leases_nothing",
)
mutation(
    "a pool that is closed while a lease waits still hands out",
    RING,
    "if self.refusal is not None:\n            raise",
    "if False:\n            raise",
    f"{RINGS}::test_a_wait_ends_when_the_pool_is_closed",
)
mutation(
    "a forked child goes on with its parent's pool",
    "staging/_lifetime.py",
    "pool._after_fork()",
    "pass",
    f"{FAULTS}::test_in_a_forked_child_the_pool_refuses_and_the_parent_goes_on",
)
mutation(
    "a broken device is not noticed",
    RING,
    "sticky = self._device.broken()",
    "sticky = None",
    f"{FAULTS}::test_a_broken_device_breaks_the_pool_for_good",
)
mutation(
    "a broken pool still uploads",
    POOL,
    "if ring.refusal is not None and not isinstance(ring.refusal, PoolClosed):",
    "if False:",
    f"{FAULTS}::test_a_broken_device_breaks_the_pool_for_good",
)
mutation(
    "a thread waits for itself",
    POOL,
    "self._check_not_stuck(plan)",
    "pass",
    f"{RINGS}::test_a_thread_that_holds_every_slot_is_told_at_once",
)
mutation(
    "a wait has no deadline",
    POOL,
    "if deadline is not None and self._device.now() >= deadline:",
    "if False:",
    f"{MUTANTS}::test_a_wait_is_given_up_within_its_time",
)
mutation(
    "late comers overtake who waits",
    RING,
    "left = self._ahead_of(turn) if self.waiting else 0",
    "left = 0",
    f"{RINGS}::test_whoever_waits_is_served_before_whoever_comes_later",
)
mutation(
    "dropped leases are not taken back",
    RING,
    "if self.dropped or self.discarded or _lifetime.orphans:",
    "if False:",
    f"{LEASES}::test_a_dropped_lease_comes_back_at_the_next_lease",
)
mutation(
    "a dropped lease says nothing",
    RING,
    "slot.ticket = ticket",
    "pass",
    f"{LEASES}::test_a_dropped_lease_comes_back_at_the_next_lease",
)
mutation(
    "an ended lease is given back again",
    RING,
    'says whether it was."""\n        if slot.generation != generation:',
    'says whether it was."""\n        if False:',
    f"{MUTANTS}::test_a_lease_discarded_twice_while_the_ring_is_busy_is_given_back_once",
)
mutation(
    "views of a slot's old buffer are used for the new one",
    RING,
    "slot.prepared = {}",
    "pass",
    "staging/test_prepared.py::test_lengths_that_come_again_after_the_slot_got_a_larger_buffer",
)
mutation(
    "a destination that moved is taken for the old one",
    "staging/_fixed.py",
    "or known.address != out.data_ptr()\n            or known.nbytes != out.numel()\n            or",
    "or known.nbytes != out.numel()\n            or",
    "staging/test_prepared.py::test_a_destination_that_was_changed_is_checked_again",
)
mutation(
    "a destination that shrank is taken for the old one",
    "staging/_fixed.py",
    "or known.nbytes != out.numel()\n            or",
    "or",
    "staging/test_prepared.py::test_a_destination_that_was_changed_is_checked_again",
)
mutation(
    "a destination is kept alive by its views",
    "staging/_fixed.py",
    "pop(number, None))",
    "None)",
    "staging/test_prepared.py::test_a_fixed_destination_that_is_dropped_gives_its_memory_back",
)
mutation(
    "an inference tensor once found good is written outside of inference mode",
    "staging/_fixed.py",
    "return known.views[_in_inference_mode()].get(plan)",
    "return known.views[True].get(plan) or known.views[False].get(plan)",
    "staging/test_prepared.py::test_a_destination_made_in_inference_mode_is_refused_outside_it_however_often",
)
mutation(
    "a slot is not held while a copy reads it",
    POOL,
    "_lifetime.held.add(slot)",
    "pass",
    "staging/test_lifetime.py::test_an_interrupt_that_the_pools_finaliser_swallows",
    "staging/test_lifetime.py::test_an_upload_that_was_cut_off_twice_and_its_pool_forgotten",
    f"{FAULTS}::test_closing_leaks_what_is_in_flight_at_the_deadline",
)
mutation(
    "closing ends the lease of an upload that goes on",
    RING,
    "if slot.ticket is not None and slot.ticket.generation == slot.generation:",
    "if slot.state is _FILLING:",
    "staging/test_lifetime.py::test_an_upload_that_goes_on_when_its_pool_is_closed_is_waited_for",
)
mutation(
    "an empty upload waits for the zeros of its destination",
    "staging/_fixed.py",
    "if plan.total and stream not in self._streams:",
    "if stream not in self._streams:",
    "staging/test_destination.py::test_another_stream_comes_behind_the_zeros",
)
mutation(
    "closing says nothing of an upload that goes on",
    POOL,
    " or s in _lifetime.held]",
    "]",
    "staging/test_lifetime.py::test_closing_beside_an_upload_that_is_going_on",
)
mutation(
    "a forgotten slot whose event cannot be asked is freed",
    "staging/_lifetime.py",
    "except Exception:\n            flying = []",
    "except Exception:\n            pass",
    "staging/test_lifetime.py::test_a_forgotten_pool_whose_event_cannot_be_asked",
)
mutation(
    "a list that was cut off counts as written",
    LEASE,
    "if written & bit:",
    "if False:",
    f"{LEASES}::test_a_list_that_was_cut_off_counts_as_unwritten",
)
mutation(
    "a copy on the device that the runtime refused counts as queued",
    "staging/_cuda.py",
    "_DEVICE_TO_DEVICE, stream)\n            if error:",
    "_DEVICE_TO_DEVICE, stream)\n            if False:",
    "staging/test_cuda_calls.py::test_an_error_of_the_runtime_is_raised_and_taken_from_torch",
)
mutation(
    "a destination forgets which streams come behind its zeros",
    "staging/_fixed.py",
    "            self._streams.add(stream)\n",
    "",
    "staging/test_destination.py::test_another_stream_comes_behind_the_zeros",
)
mutation(
    "a slot is held for ever",
    RING,
    "_lifetime.held.discard(slot)",
    "pass",
    "staging/test_lifetime.py::test_what_is_read_no_more_is_let_go",
)
mutation(
    "an upload does not wait for the zeros of its destination",
    "staging/_fixed.py",
    "device.wait(stream, self._zeroed)",
    "pass",
    "staging/test_destination.py::test_another_stream_comes_behind_the_zeros",
)
mutation(
    "another stream's use of a destination is not marked",
    "staging/_fixed.py",
    "device.record_stream(self._memory, stream)",
    "pass",
    "staging/test_destination.py::test_another_stream_comes_behind_the_zeros",
)
mutation(
    "a closed pool makes destinations",
    POOL,
    """if self._ring.refusal is not None:
            raise self._ring.refused()
        if self._device.capturing""",
    "if self._device.capturing",
    "staging/test_destination.py::test_a_pool_of_no_use_makes_no_destination",
)
mutation(
    "a destination is made while a graph is captured",
    POOL,
    "if self._device.capturing(self._device.current_stream()):",
    "if False:",
    "staging/test_destination.py::test_none_is_made_while_a_graph_is_captured",
)
mutation(
    "the runtime is asked for another device's default stream",
    "staging/_cuda.py",
    "stream > _LAST_DEFAULT and",
    "",
    "staging/test_cuda_calls.py::test_default_streams_are_the_runtimes_only_where_there_is_one_device",
)
mutation(
    "another pool's destination is taken",
    "staging/_fixed.py",
    "if found is None or device is not self._device:",
    "if found is None:",
    "staging/test_destination.py::test_a_destination_is_for_the_pool_that_made_it",
)
mutation(
    "an upload may be larger than its destination",
    "staging/_fixed.py",
    "if plan.total > self.nbytes:",
    "if False:",
    "staging/test_destination.py::test_an_upload_that_does_not_fit_is_refused_and_its_lease_goes_on",
)
mutation(
    "a destination's tensors cannot be changed outside the mode they were made in",
    "staging/_fixed.py",
    "with torch.inference_mode(False):  # or",
    "if True:  # or",
    "staging/test_destination.py::test_inference_mode_makes_no_difference",
)
mutation(
    "a destination of the pool's remembers views without end",
    "staging/_fixed.py",
    "if len(self._landings) >= MOST:",
    "if False:",
    "staging/test_destination.py::test_lengths_that_never_come_again_fill_no_memory",
)
mutation(
    "a destination holds anything before the first upload",
    "staging/_fixed.py",
    "device.empty(nbytes, torch.uint8).zero_()",
    "device.empty(nbytes, torch.uint8).fill_(7)",
    "staging/test_destination.py::test_uploads_of_the_same_lengths_have_the_same_tensors",
)
mutation(
    "joined records of any length are taken",
    LEASE,
    "elif len(joined) != targets.nbytes:",
    "elif len(joined) < targets.nbytes:",
    f"{LAYOUTS}::test_records_that_do_not_fit_the_layout_are_refused",
)
mutation(
    "joined records of any length are taken the first time",
    LEASE,
    "if len(joined) != _bytes_of(layout, plan):",
    "if False:",
    "staging/test_prepared.py::test_records_of_a_batch_without_rows_are_none",
)
mutation(
    "records without a slot are not counted",
    LEASE,
    "if len(joined) != _bytes_of(layout, self._plan):",
    "if False:",
    "staging/test_prepared.py::test_records_of_a_batch_without_rows_are_none",
)
mutation(
    "records that were cut off count as written",
    LEASE,
    "self._written &= ~targets.bits",
    "pass",
    "staging/test_prepared.py::test_records_that_were_cut_off_count_as_unwritten",
)
mutation(
    "parts of another dtype are converted unchecked",
    LEASE,
    'casting="no"',
    'casting="unsafe"',
    "staging/test_parts.py::test_what_does_not_fit_is_refused_and_the_field_is_unwritten",
)
mutation(
    "parts are written into the slot of a lease that ended while they were read",
    LEASE,
    """        self._check_open("write")
        self._written &= ~place.bit
        if set""",
    """        self._written &= ~place.bit
        if set""",
    "staging/test_parts.py::test_an_ended_lease_takes_no_parts",
)
mutation(
    "a field counts as written where its parts were refused",
    LEASE,
    """        self._written &= ~place.bit
        if set""",
    """        if set""",
    "staging/test_parts.py::test_what_does_not_fit_is_refused_and_the_field_is_unwritten",
)
mutation(
    "whatever marshal writes counts as an integer",
    "staging/_fill.py",
    ' or data[5::5] != b"i" * count:',
    ":",
    "staging/test_small_integers.py::test_anything_else_among_them_is_noticed",
)
mutation(
    "a list is packed while code of the caller's may change it",
    "staging/_fill.py",
    "marshal.dumps([*values], 2)",
    "marshal.dumps(values, 2)",
    "staging/test_small_integers.py::test_the_list_that_is_packed_is_nobody_elses",
)
mutation(
    "a list is written into the slot of a lease that ended while it was packed",
    LEASE,
    """                    self._check_open("write")  # again: code of the caller's may have run in it
""",
    "",
    "staging/test_small_integers.py::test_a_lease_that_ends_while_a_list_is_packed_writes_nothing",
)
mutation(
    "wide integers are tried as small ones at every batch",
    LEASE,
    "column.small = numbers is not None",
    "pass",
    "staging/test_small_integers.py::test_a_field_of_wide_integers_is_not_tried_each_time",
)
mutation(
    "a list of another length is stretched",
    LEASE,
    "if numbers is not None and len(numbers) == column.length:",
    "if numbers is not None:",
    "staging/test_small_integers.py::test_a_list_of_another_length_is_refused",
)
mutation(
    "an event answers for a slot that was healed while it was recorded",
    RING,
    "slot.healed_at < later.behind",
    "slot.healed_at <= later.behind",
    "staging/test_asking.py::test_a_slot_that_is_healed_while_a_later_upload_is_entered_is_asked_itself",
)
mutation(
    "a stream of one thread's is healed in another",
    RING,
    "if slot.state is _QUARANTINED and not slot.lasting and slot.holder != get_ident():",
    "if False:",
    "staging/test_asking.py::test_a_stream_that_may_be_another_in_another_thread_is_healed_where_it_was_used",
)
mutation(
    "a question reaches beyond the ring",
    RING,
    " and self._reach < len(self.slots)",
    "",
    "staging/test_asking.py::test_a_question_reaches_no_further_than_the_ring",
)
mutation(
    "who was interrupted while it waited is kept a slot for",
    RING,
    "self.known = weakref.ref(self)",
    "self.known = lambda: self",
    "staging/test_interrupts.py::test_an_interrupt_anywhere_loses_no_slot[giving_up-False]",
)
mutation(
    "a name of the caller's class is looked up behind the check",
    LEASE,
    "            and type(name) is str",
    "            and True",
    "staging/test_reentry.py::test_a_name_whose_hash_ends_the_lease_never_reaches_a_slot_in_flight",
)
mutation(
    "numbers are written while code of the caller's says their value",
    LEASE,
    "written_aside: npt.NDArray[Any] = np.empty(place.shape, place.numpy_dtype)",
    "written_aside: npt.NDArray[Any] = self._column(place)",
    "staging/test_reentry.py::test_a_number_whose_value_ends_the_lease_never_reaches_a_slot_in_flight",
)
mutation(
    "a field keeps a name of the caller's class",
    "staging/layout.py",
    "if type(self.name) is not str:",
    "if False:",
    "staging/test_reentry.py::test_a_name_whose_hash_ends_the_lease_never_reaches_a_slot_in_flight",
)
mutation(
    "all of a list is written out before its first value is looked at",
    "staging/_fill.py",
    "if not values or type(values[0]) is not int:",
    "if False:",
    "staging/test_small_integers.py::test_nothing_is_packed_that_does_not_begin_with_an_integer",
)
mutation(
    "an audit hook that forbids marshal forbids writing",
    "staging/_fill.py",
    "except Exception:",
    "except ValueError:",
    "staging/test_small_integers.py::test_an_audit_hook_that_forbids_it_is_no_error",
)
mutation(
    "an event answers for uploads on other streams",
    RING,
    "slot.stream == later.stream and slot.lasting",
    "slot.lasting",
    "staging/test_asking.py::test_between_streams_those_of_the_own_are_freed",
)
mutation(
    "an event answers for what stands between, of other streams too",
    RING,
    "if slot.state is _IN_FLIGHT and _proves(last, slot):",
    "if slot.state is _IN_FLIGHT:",
    "staging/test_asking.py::test_between_streams_those_of_the_own_are_freed",
)
mutation(
    "an event answers for what was recorded after it",
    RING,
    "slot.upload <= later.behind",
    "True",
    "staging/test_asking.py::test_the_order_of_the_ring_is_not_that_of_the_stream",
)
mutation(
    "an upload does not note what it is behind",
    RING,
    "slot.behind = self.counters.uploads\n        slot",
    "slot.behind = 1 << 62\n        slot",
    "staging/test_asking.py::test_the_order_of_the_ring_is_not_that_of_the_stream",
)
mutation(
    "an event answers for a slot that was healed after it",
    RING,
    " and slot.healed_at < later.behind",
    "",
    "staging/test_asking.py::test_a_healed_slot_is_asked_itself",
)
mutation(
    "an event answers for streams that somebody may destroy",
    RING,
    " and slot.lasting and slot.upload",
    " and slot.upload",
    "staging/test_asking.py::test_a_stream_that_somebody_may_destroy_is_asked_slot_by_slot",
)
mutation(
    "every stream is said to last",
    "staging/_cuda.py",
    "now.stream_id != stream",
    "True",
    "staging/test_cuda_calls.py::test_only_streams_of_torchs_own_last",
)
mutation(
    "a stream that is not current is said to last",
    "staging/_cuda.py",
    "if now.cuda_stream != stream:",
    "if False:",
    "staging/test_cuda_calls.py::test_only_streams_of_torchs_own_last",
)
mutation(
    "a slot that another's event frees is not looked at in debug mode",
    RING,
    """                        if self.watch is not None:
                            self.watch.done(slot)
""",
    "",
    "staging/test_asking.py::test_a_write_into_a_slot_that_is_freed_by_anothers_event_is_found",
)
mutation(
    "a no frees the slots before it",
    RING,
    """                    self._reach, self._yes = reach - 1, 0
                    return last
""",
    """                    self._reach, self._yes = reach - 1, 0
""",
    "staging/test_asking.py::test_a_no_costs_one_question_and_the_oldest_is_asked_all_the_same",
)
mutation(
    "a question that was answered no reaches as far again",
    RING,
    "self._reach, self._yes = reach - 1, 0",
    "pass",
    "staging/test_asking.py::test_a_busy_ring_is_asked_for_what_is_over",
)
mutation(
    "the slot that was asked is asked twice",
    RING,
    "if slot is not asked and slot.state is _IN_FLIGHT:",
    "if slot.state is _IN_FLIGHT:",
    "staging/test_asking.py::test_a_no_costs_one_question_and_the_oldest_is_asked_all_the_same",
)
mutation(
    "the timeline does not see the end of slots that another's event frees",
    "batching/replay/observe.py",
    "return False  # or a slot",
    "return self._inner.lasting(stream)  # or a slot",
    "replay/test_timeline.py::test_each_slot_ends_when_its_copy_was_seen_done",
)
mutation(
    "the runtime is asked whatever device is current",
    "staging/_cuda.py",
    "stream > _LAST_DEFAULT and self._current_device() == self._index",
    "stream > _LAST_DEFAULT",
    "staging/test_cuda_calls.py::test_without_a_runtime_or_with_another_device_current_torch_does_it",
)
mutation(
    "an event that torch has not made is recorded by the runtime",
    "staging/_cuda.py",
    "if not handle or not (self._alone or self._is_direct(stream)):",
    "if not (self._alone or self._is_direct(stream)):",
    "staging/test_cuda_calls.py::test_an_event_is_recorded_by_torch_first_which_makes_it_and_then_by_the_runtime",
)
mutation(
    "a copy that the runtime refused counts as queued",
    "staging/_cuda.py",
    """source.size, _HOST_TO_DEVICE, stream)
        if error:""",
    """source.size, _HOST_TO_DEVICE, stream)
        if False:""",
    "staging/test_cuda_calls.py::test_an_error_of_the_runtime_is_raised_and_taken_from_torch",
)
mutation(
    "a record that the runtime refused counts as done",
    "staging/_cuda.py",
    """self._record(handle, stream)
        if error:""",
    """self._record(handle, stream)
        if False:""",
    "staging/test_cuda_calls.py::test_an_error_of_the_runtime_is_raised_and_taken_from_torch",
)
mutation(
    "an error of the runtime is left to torch's next kernel",
    "staging/_cuda.py",
    "self._runtime.cudaGetLastError()",
    "pass",
    "staging/test_cuda_calls.py::test_an_error_of_the_runtime_is_raised_and_taken_from_torch",
)
mutation(
    "a pool is closed below its own thread",
    POOL,
    "if not self._ring.wait_until_unlocked():\n            raise",
    "if False:\n            raise",
    "staging/test_reentry.py::test_a_pool_is_not_closed_below_its_own_thread",
)
mutation(
    "a lease discarded while the ring is busy goes on",
    POOL,
    "lease._generation = ~lease._generation",
    "pass",
    f"{MUTANTS}::test_a_lease_discarded_twice_while_the_ring_is_busy_is_given_back_once",
)
mutation(
    "a destination that is no longer in one piece is written",
    "staging/_fixed.py",
    "            or not out.is_contiguous()\n",
    "",
    "staging/test_prepared.py::test_a_destination_of_another_shape_is_checked_again",
)
mutation(
    "a lease that found no slot says nothing of the depth",
    RING,
    "needed = max(least, min(least - 1 + self.in_a_row, 2 * len(self.slots)))",
    "needed = 0",
    "staging/test_stats.py",
)
mutation(
    "a healed slot lags since its upload",
    RING,
    "max(slot.upload, slot.healed_at)",
    "slot.upload",
    "staging/test_stats.py",
)
mutation(
    "a slot is left by its lease's watch before it is in flight",
    RING,
    "slot.upload = counters.uploads + 1\n",
    "slot.ticket = None\n        slot.upload = counters.uploads + 1\n",
    f"{MUTANTS}::test_an_upload_cut_off_while_it_is_booked_is_watched_until_it_is_in_flight",
)
mutation(
    "an upload that came too late quarantines the other's slot",
    RING,
    "lease._claim is token and ",
    "",
    f"{MUTANTS}::test_of_two_uploads_at_once_the_one_that_comes_too_late_harms_nothing",
)
mutation(
    "notes that are gone are an error",
    POOL,
    "except IndexError:\n                return",
    "except ZeroDivisionError:\n                return",
    f"{MUTANTS}::test_notes_that_another_thread_logs_first_are_no_error",
)
mutation(
    "a closed pool keeps what it knew of destinations",
    POOL,
    "        self._destinations.clear()\n",
    "",
    "staging/test_prepared.py::test_a_closed_pool_keeps_no_destination",
)
mutation(
    "records of fields that are not adjacent are moved as one run",
    "staging/layout.py",
    "and place.offset == last.target + last.target_strides[0] * len(last.names)",
    "",
    "staging/test_prepared.py::test_records_of_any_order_and_of_some_fields_arrive",
)
mutation(
    "a slot remembers views without end",
    "staging/_slots.py",
    "if len(self.prepared) >= MOST:",
    "if False:",
    "staging/test_prepared.py::test_lengths_that_never_come_again_fill_no_memory",
)
mutation(
    "a destination remembers views without end",
    "staging/_fixed.py",
    "if len(views) >= MOST:",
    "if False:",
    "staging/test_prepared.py::test_lengths_that_never_come_again_fill_no_memory",
)
mutation(
    "a slot counts as covered before the pattern is there",
    "staging/_debug.py",
    "_bytes(slot)[:covered] = _PATTERN\n        watched.patterned = covered",
    "watched.patterned = covered\n        _bytes(slot)[:covered] = _PATTERN",
    f"{INTERRUPTS}::test_an_interrupt_anywhere_loses_no_slot[failing-True]",
)
mutation(
    "who comes late may not even have what the others leave",
    RING,
    "        return ahead",
    "        return ahead if turn is not None else len(self.slots)",
    f"{RINGS}::test_a_newcomer_gets_what_is_left_for_those_who_wait",
)
mutation(
    "a lease is watched only when its slot is reserved",
    RING,
    "slot.ticket = ticket\n        lease._slot, lease._generation = slot, generation\n"
    "        slot.generation = generation\n        slot.state = _FILLING\n        slot.since = self._device.now()\n",
    "lease._slot, lease._generation = slot, generation\n        slot.generation = generation\n"
    "        slot.state = _FILLING\n        slot.since = self._device.now()\n        slot.ticket = ticket\n",
    f"{INTERRUPTS}::test_an_interrupt_anywhere_loses_no_slot[steady-False]",
)
mutation(
    "an upload cut off by two exceptions is forgotten",
    RING,
    'self._upload_lost(slot, LeaseError("interrupted"))',
    "pass",
    f"{INTERRUPTS}::test_an_interrupt_anywhere_loses_no_slot[failing-False]",
)
mutation(
    "the order of the ring changes in two steps",
    RING,
    "self.slots = [*slots[:at], *slots[at + 1 :], slot]",
    "slots.remove(slot); slots.append(slot)",
    f"{INTERRUPTS}::test_an_interrupt_anywhere_loses_no_slot[steady-False]",
)
mutation(
    "statistics wait for ever",
    POOL,
    "if not self._ring.wait_until_unlocked():\n            return read(False)",
    "if False:\n            return read(False)",
    "staging/test_reentry.py::test_statistics_never_hang",
)
mutation(
    "a pin that failed says nothing about the device",
    RING,
    " and not isinstance(error, PinningError)):",
    "):",
    f"{FAULTS}::test_a_pin_that_fails_because_the_device_is_lost_marks_the_pool_broken",
)
mutation(
    "no triton, no table",
    "batching/cache.py",
    'no Triton (%s)", error)\n        return None',
    'no Triton (%s)", error)\n        raise',
    "batching/test_cache.py::test_without_triton_a_cuda_table_is_written_by_torch",
)
mutation(
    "a prefix is kept alive by its pointer",
    "batching/stage.py",
    "known = (weakref.ref(prefix), ",
    "known = ((lambda: prefix), ",
    "batching/test_stage.py::test_a_replaced_prefix_is_let_go_before_the_next_batch",
)
mutation(
    "a collected pool frees slots under their copies",
    POOL,
    "_lifetime.orphans.append((self._device, slots))",
    "pass",
    f"{FAULTS}::test_copies_of_a_forgotten_pool_still_arrive",
)
mutation(
    "orphans are let go before their copies are done",
    "staging/_lifetime.py",
    "if not all(device.done(slot.event) for slot in flying):",
    "if False:",
    "staging/test_lifetime.py::test_an_interrupt_while_a_forgotten_pool_is_looked_at",
)
mutation(
    "orphans in quarantine are freed",
    "staging/_lifetime.py",
    "held.difference_update(flying)",
    "held.difference_update(slots)",
    f"{FAULTS}::test_a_forgotten_pools_quarantined_slots_are_never_freed",
)
mutation(
    "a broken pool's memory is freed",
    RING,
    "_lifetime.leak(self.slots)",
    "pass",
    f"{FAULTS}::test_memory_of_a_broken_pool_is_never_freed",
)

# Layouts and values: exactly or not at all.

LAYOUT, FILL = "staging/layout.py", "staging/_fill.py"

mutation(
    "fields are not aligned",
    LAYOUT,
    "ALIGNMENT = 16",
    "ALIGNMENT = 8",
    f"{LAYOUTS}::test_fields_lie_in_order_at_multiples_of_16_without_overlap",
)
mutation(
    "a length of True finds the plan of 1",
    LAYOUT,
    "if type(length) is not int:",
    "if False:",
    f"{LAYOUTS}::test_a_length_is_judged_by_itself_not_by_what_was_planned_before",
)
mutation(
    "records may have any length",
    LAYOUT,
    "if not set(map(len, records)) <= {size}:",
    "if False:",
    f"{LAYOUTS}::test_each_record_is_as_long_as_a_record",
)
mutation(
    "records of another dtype are taken",
    LEASE,
    "if records.dtype is not layout.record_dtype and records.dtype != layout.record_dtype:",
    "if False:",
    f"{LAYOUTS}::test_records_that_do_not_fit_the_layout_are_refused",
)
mutation(
    "floats of a list overflow to infinity",
    FILL,
    'np.errstate(over="raise")',
    'np.errstate(over="ignore")',
    f"{LAYOUTS}::test_a_bad_value_in_a_column_is_named_with_its_row",
)
mutation(
    "integers of an array wrap",
    FILL,
    "wrong = (array < bounds.min) | (array > bounds.max)",
    "wrong = np.zeros(array.shape, bool)",
    f"{LAYOUTS}::test_a_bad_value_in_an_array_or_tensor_is_named_with_its_row",
)
mutation(
    "floats of an array overflow to infinity",
    FILL,
    "if wrong.any():",
    "if wrong.any() and want in 'iu':",
    f"{LAYOUTS}::test_a_bad_value_in_an_array_or_tensor_is_named_with_its_row",
)
mutation(
    "integers of an array are rounded on their own way",
    FILL,
    'if want == "f" and have in "iu":',
    "if False:",
    f"{LAYOUTS}::test_integers_are_rounded_alike_in_every_form",
)
mutation(
    "an array of another kind is converted",
    FILL,
    "if have not in {",
    'if have not in "biuf" and have not in {',
    f"{LAYOUTS}::test_values_of_the_wrong_kind_name_the_field",
)
mutation(
    "booleans of a list are integers",
    FILL,
    '"i": (int,),',
    '"i": (int, bool),',
    f"{LAYOUTS}::test_a_bad_value_in_a_column_is_named_with_its_row",
)
mutation(
    "floats of a list are integers",
    FILL,
    '"i": (int,),',
    '"i": (int, float),',
    f"{LAYOUTS}::test_a_bad_value_in_a_column_is_named_with_its_row",
)
mutation(
    "a boolean is a number",
    LAYOUT,
    "if isinstance(value, (bool, np.bool_, np.timedelta64)) or",
    "if",
    f"{LAYOUTS}::test_a_bad_scalar_and_a_bad_record_are_named",
)
mutation(
    "a float is an integer",
    LAYOUT,
    "if isinstance(value, (float, np.floating)):",
    "if False:",
    f"{LAYOUTS}::test_a_bad_scalar_and_a_bad_record_are_named",
)
mutation(
    "an integer is not measured",
    LAYOUT,
    "if not bounds.min <= int(value) <= bounds.max:",
    "if False:",
    f"{LAYOUTS}::test_a_bad_scalar_and_a_bad_record_are_named",
)
mutation(
    "a float is not measured",
    LAYOUT,
    "fits = math.isfinite(dtype.type(as_float)) or not math.isfinite(as_float)",
    "fits = True",
    f"{LAYOUTS}::test_a_bad_scalar_and_a_bad_record_are_named",
)
mutation(
    "a list of one value fills a column of any length",
    FILL,
    "if len(values) != len(column):\n        raise _wrong_length(len(values), column, field)\n    kind",
    "kind",
    f"{LAYOUTS}::test_a_column_of_the_wrong_length_is_refused",
)

# Batches: what was staged serves nobody else.

STAGE, CACHE, INFO, PARAMS = "batching/stage.py", "batching/cache.py", "batching/info.py", "batching/params.py"
KERNEL = "batching/kernel.py"
STAGES, CACHES, INFOS, PARAM = (f"batching/test_{name}.py" for name in ("stage", "cache", "info", "params"))
CHANGED_CACHE = f"{STAGES}::test_cache_rows_of_a_batch_changed_in_between_are_staged_anew"
CHANGED_SAMPLING = f"{STAGES}::test_sampling_columns_of_a_batch_changed_in_between_are_staged_anew"
TABLE_REFUSED = f"{CACHES}::test_what_does_not_fit_is_refused_before_anything_is_uploaded"

mutation(
    "other requests get what was staged",
    STAGE,
    "if len(self.requests) != len(batch.reqs) or not all(map(operator.is_, self.requests, batch.reqs)):",
    "if len(self.requests) != len(batch.reqs):",
    CHANGED_SAMPLING,
    f"{STAGES}::test_a_batch_is_known_by_its_requests_not_by_their_values",
)
mutation(
    "other parameters get what was staged",
    STAGE,
    "return all(map(operator.is_, self.params, params))",
    "return True",
    CHANGED_SAMPLING,
)
mutation(
    "foreign parameters that changed get what was staged",
    STAGE,
    "return self.sampling.tobytes() == table_of(batch.reqs, params).tobytes()",
    "return True",
    f"{STAGES}::test_foreign_params_are_compared_by_value_in_between",
)
mutation(
    "other prefixes get what was staged",
    STAGE,
    "all(a is request.prefix_indices for a, request in zip(cache.prefixes, requests, strict=True))",
    "True",
    CHANGED_CACHE,
)
mutation(
    "other lengths get what was staged",
    STAGE,
    "and cache.extend_lens.tolist() == [request.extend_input_len for request in requests]",
    "",
    CHANGED_CACHE,
)
mutation(
    "other rows of the table get what was staged",
    STAGE,
    "and cache.pool_indices.tolist() == [request.req_pool_idx for request in requests]",
    "",
    CHANGED_CACHE,
)
mutation(
    "deterministic batches get what was staged for others",
    STAGE,
    " or self.deterministic != batch.deterministic",
    "",
    CHANGED_SAMPLING,
    CHANGED_CACHE,
)
mutation(
    "another pool gets what was staged",
    STAGE,
    " or self.pool is not pool",
    "",
    f"{STAGES}::test_another_pool_stages_anew",
)
mutation(
    "an entry point gets what it has had",
    STAGE,
    "if part in self.taken or ",
    "if ",
    f"{STAGES}::test_calling_an_entry_point_again_stages_anew",
)
mutation(
    "an error leaves what was staged",
    STAGE,
    "staged, batch.staged = batch.staged, None",
    "staged = batch.staged",
    f"{STAGES}::test_a_refused_table_clears_what_was_staged",
)
mutation(
    "an error of the write leaves what was staged",
    CACHE,
    "batch.staged = None",
    "pass",
    f"{STAGES}::test_a_write_that_fails_after_the_upload_clears_what_was_staged",
)
mutation(
    "the second entry point does not wait for the copy",
    STAGE,
    "staged.tensors.wait()",
    "pass",
    f"{STAGES}::test_the_second_entry_point_on_another_stream_waits_for_the_copy",
)
mutation(
    "the second entry point does not check its table",
    STAGE,
    "if check is not None and staged.cache is not None:",
    "if False:",
    f"{STAGES}::test_a_refused_table_clears_what_was_staged",
)
mutation(
    "the table is checked after the upload",
    STAGE,
    "        if check is not None:\n            check(cache)\n",
    "",
    TABLE_REFUSED,
)
mutation(
    "prefix tensors are not held",
    STAGE,
    "        prefixes=prefixes,",
    "        prefixes=[None for _ in prefixes],",
    f"{STAGES}::test_prefix_tensors_are_held_until_the_table_is_written",
)
mutation(
    "a prefix is remembered when there is another",
    STAGE,
    " or known[0]() is not prefix",
    "",
    f"{STAGES}::test_a_replaced_prefix_replaces_the_remembered_pointer",
)
mutation(
    "a prefix is remembered for another device",
    STAGE,
    " or (known[3] is not device and known[3] != device)",
    "",
    f"{STAGES}::test_a_remembered_prefix_is_checked_against_the_batch_s_device",
)
mutation(
    "a prefix may be of any dtype",
    STAGE,
    "if prefix.dtype != torch.int64:",
    "if False:",
    TABLE_REFUSED,
)
mutation("a prefix may have any shape", STAGE, "elif prefix.ndim != 1:", "elif False:", TABLE_REFUSED)
mutation(
    "a prefix need not be contiguous",
    STAGE,
    "elif not prefix.is_contiguous():",
    "elif False:",
    TABLE_REFUSED,
)
mutation(
    "a prefix may be on another device",
    STAGE,
    "elif not same_device(prefix.device, device):",
    "elif False:",
    TABLE_REFUSED,
)
mutation(
    "lengths and rows may be negative or huge",
    STAGE,
    "if values and not 0 <= min(values) <= max(values) < _MOST_TOKENS:",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "a batch goes through another device's pool",
    STAGE,
    "if pool is not None and not same_device(pool.device, batch.device):",
    "if False:",
    f"{STAGES}::test_a_pool_for_another_device_is_refused",
)
mutation(
    "the table may be of any dtype and layout",
    CACHE,
    "if req_to_token.dtype != torch.int32 or req_to_token.ndim != 2 or req_to_token.stride(1) != 1:",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "out_cache_loc may be of any dtype and layout",
    CACHE,
    "if out_cache_loc.dtype != torch.int64 or out_cache_loc.ndim != 1 or not out_cache_loc.is_contiguous():",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "out_cache_loc may be of any size",
    CACHE,
    "if out_cache_loc.numel() != new:",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "a sequence may be longer than its row",
    CACHE,
    "if rows.longest > width:",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "a row may be beyond the table",
    CACHE,
    "if np.maximum.reduce(rows.pool_indices) >= slots:",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "two requests may share a row",
    CACHE,
    "if len(set(used)) != len(used):",
    "if False:",
    TABLE_REFUSED,
)
mutation(
    "the kernel addresses the table in 32 bits",
    KERNEL,
    "tl.load(req_pool_indices + row) * tl.cast(stride, tl.int64)",
    "(tl.load(req_pool_indices + row).to(tl.int32) * tl.cast(stride, tl.int32))",
    f"{CACHES}::test_rows_beyond_two_to_the_31_elements_are_addressed",
)
mutation(
    "the kernel writes beyond a sequence",
    KERNEL,
    "mask=positions < seq_len)",
    "mask=positions < seq_len + 1)",
    f"{CACHES}::test_a_shorter_sequence_leaves_the_rest_of_its_row",
    f"{CACHES}::test_each_row_is_its_prefix_then_its_new_tokens",
)
mutation(
    "keep-indices may be out of range",
    INFO,
    "if not 0 <= index < rows:",
    "if False:",
    f"{INFOS}::test_a_wrong_index_is_refused_and_nothing_changes",
)
mutation(
    "keep-indices may be negative",
    INFO,
    "if not 0 <= index < rows:",
    "if not index < rows:",
    f"{INFOS}::test_a_wrong_index_is_refused_and_nothing_changes",
)
mutation(
    "keep-indices may name a row twice",
    INFO,
    "if len(set(keep)) != len(keep):",
    "if False:",
    f"{INFOS}::test_a_wrong_index_is_refused_and_nothing_changes",
)
mutation(
    "keep-indices may be booleans",
    INFO,
    " or isinstance(index, (bool, np.timedelta64))",
    "",
    f"{INFOS}::test_a_wrong_index_is_refused_and_nothing_changes",
)
mutation(
    "keep-indices on the device may be any number",
    INFO,
    "elif not isinstance(keep_indices_device, torch.Tensor) or keep_indices_device.shape != (len(keep),):",
    "elif False:",
    f"{INFOS}::test_unsuitable_indices_on_the_device_change_nothing",
)
mutation(
    "batches with and without seeds merge",
    INFO,
    "if (self.sampling_seed is None) != (other.sampling_seed is None):",
    "if False:",
    f"{INFOS}::test_deterministic_and_other_batches_do_not_merge",
)
mutation(
    "batches for different vocabularies merge",
    INFO,
    "if self.vocab_size != other.vocab_size or",
    "if",
    f"{INFOS}::test_batches_for_different_vocabularies_do_not_merge",
)
mutation(
    "seeds are given without deterministic sampling",
    INFO,
    "if not batch.deterministic:",
    "if False:",
    f"{INFOS}::test_seeds_are_there_only_under_deterministic_sampling",
)
mutation(
    "foreign parameters are asked what they need",
    "batching/params.py",
    "if 0 < len(params) <= FEW and set(map(type, params)) <= {SamplingParams}:",
    "if 0 < len(params) <= FEW and type(params[0]) is SamplingParams:",
    "batching/test_params.py::test_what_requests_need_is_the_same_asked_of_them_and_of_the_table",
)
mutation(
    "merged batches need what the first one needs",
    INFO,
    "self._set_flags(self._needs | other._needs)",
    "self._set_flags(self._needs)",
    f"{INFOS}::test_random_filters_and_merges_keep_rows_and_flags_right",
)
mutation(
    "flags are not computed anew after a filter",
    INFO,
    "self._table = self._table[keep]\n        self._set_flags(needs_of(self._table))",
    "self._table = self._table[keep]",
    f"{INFOS}::test_random_filters_and_merges_keep_rows_and_flags_right",
)

# Sampling parameters.

STORED = f"{PARAM}::test_a_value_in_range_is_stored_as_the_documented_mapping_says"
OUT_OF_RANGE = f"{PARAM}::test_a_value_out_of_range_is_refused_naming_field_and_value"
FOREIGN = f"{PARAM}::test_own_foreign_and_mixed_requests_give_the_oracle_s_bytes"

mutation("a tiny temperature is not greedy", PARAMS, "temperature, top_k = 1.0, 1", "pass", STORED)
mutation("a foreign tiny temperature is not greedy", PARAMS, 'table["top_ks"][greedy] = 1', "pass", FOREIGN)
mutation(
    "top_p is judged before rounding", PARAMS, "0 < np.float32(top_p) <= 1", "0 < top_p <= 1", STORED, OUT_OF_RANGE
)
mutation("min_p is judged before rounding", PARAMS, "0 <= np.float32(min_p) <= 1", "0 <= min_p <= 1", STORED)
mutation("a negative temperature is taken", PARAMS, "if not temperature >= 0:", "if False:", OUT_OF_RANGE)
mutation("top_k may be 0 or less", PARAMS, "if top_k != -1 and top_k < 1:", "if False:", OUT_OF_RANGE)
mutation("infinities are taken", PARAMS, "if not math.isfinite(checked):", "if False:", OUT_OF_RANGE)
mutation(
    "foreign values out of range are taken",
    PARAMS,
    "if not in_range.all():",
    "if False:",
    f"{PARAM}::test_a_foreign_value_out_of_range_names_its_request_and_costs_no_lease",
)
mutation("the seed of a request without one is another", PARAMS, "DEFAULT_SEED = 42", "DEFAULT_SEED = 0", FOREIGN)
mutation(
    "seed 0 is no seed",
    PARAMS,
    "sampling_seed=DEFAULT_SEED if seed is None else seed",
    "sampling_seed=seed or DEFAULT_SEED",
    FOREIGN,
)
mutation(
    "a foreign seed 0 is no seed",
    PARAMS,
    "[DEFAULT_SEED if seed is None else seed for",
    "[seed or DEFAULT_SEED for",
    FOREIGN,
)


# What runs in the middle of the pool's own code.

REENTRY = "staging/test_reentry.py"
mutation(
    "a discard waits for the lock",
    POOL,
    "if self._ring.lock.locked():",
    "if False:",
    f"{REENTRY}::test_a_lease_ended_by_garbage_collection_inside_the_ring_does_not_hang",
)
mutation(
    "the caller's code runs between check and write",
    LEASE,
    '        self._check_open("write")\n        self._column(place)',
    "        self._column(place)",
    f"{REENTRY}::test_values_whose_reading_ends_the_lease_never_reach_a_slot_in_flight",
)
mutation(
    "a slot is enlarged though the pool was closed",
    RING,
    'or a larger one."""\n        if slot.generation != generation:',
    'or a larger one."""\n        if False:',
    f"{REENTRY}::test_a_pool_closed_while_a_slot_is_enlarged_hands_nothing_out",
)
mutation(
    "a failed upload quarantines whoever has the slot",
    RING,
    "slot.generation == lease._generation + 1 and slot.state is _FILLING",
    "True",
    f"{REENTRY}::test_an_upload_that_fails_after_its_slot_moved_on_leaves_the_new_owner_alone",
)
mutation(
    "an interrupted close is never finished",
    POOL,
    "elif not isinstance(self._ring.refusal, PoolClosed) or not self._ring.slots:",
    "else:",
    f"{REENTRY}::test_an_interrupted_close_can_be_taken_up_again",
)
mutation(
    "an empty batch is refused during a capture",
    POOL,
    "if slot.buffer is not None:\n                if device.capturing(stream):",
    "if slot.buffer is not None or device.capturing(stream):\n                if device.capturing(stream):",
    f"{REENTRY}::test_an_empty_batch_is_fine_during_a_capture",
)
mutation(
    "a child asks the events of collected pools",
    "staging/_lifetime.py",
    "orphans.clear()",
    "pass",
    f"{REENTRY}::test_a_forked_child_asks_nothing_of_what_the_parent_left",
)
mutation(
    "a child waits for the parent's events",
    POOL,
    "if isinstance(self._ring.refusal, PoolForked):",
    "if False:",
    f"{REENTRY}::test_a_forked_child_asks_nothing_of_what_the_parent_left",
)
mutation(
    "uploads are compared by their tensors",
    "staging/upload.py",
    "__hash__ = object.__hash__",
    "pass",
    f"{REENTRY}::test_uploads_are_compared_by_identity",
)
mutation(
    "a refused tensor on a device is printed",
    "staging/errors.py",
    'if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":',
    "if False:",
    "cases/test_cases_values.py::test_a_refused_number_on_a_device_is_not_printed",
)
mutation(
    "a merge puts columns in place one by one",
    "batching/info.py",
    "self._replace({name: torch.cat([column, getattr(other, name)]) for name, column in self._columns()})",
    "[setattr(self, name, torch.cat([column, getattr(other, name)])) for name, column in self._columns()]",
    "batching/test_info.py::test_a_merge_that_runs_out_of_memory_changes_nothing",
)
mutation(
    "a prompt cached whole is admitted without room for its last token",
    "batching/replay/scheduler.py",
    "tokens + self.settings.ahead + 1 > self._kv.capacity",
    "tokens + self.settings.ahead > self._kv.capacity",
    "replay/test_replay.py::test_a_prompt_cached_whole_needs_one_index_more_than_its_tokens",
)

# Debug mode.

DEBUG, DEBUGS = "staging/_debug.py", "staging/test_debug.py"
mutation(
    "fields are not summed again",
    DEBUG,
    "if changed:",
    "if False:",
    f"{DEBUGS}::test_a_write_under_a_copy_is_found_and_named",
)
mutation(
    "no pattern is looked for",
    DEBUG,
    "watched.patterned = 0\n        if len(wrong):",
    "watched.patterned = 0\n        if False:",
    f"{DEBUGS}::test_a_write_to_a_slot_that_nobody_leased_is_found",
)
mutation(
    "no canary is looked for before the copy",
    DEBUG,
    'self._check_canary(slot, watched, f"the lease of {plan.layout.name!r}")',
    "pass",
    f"{DEBUGS}::test_a_write_behind_the_end_is_found_before_the_copy",
)
mutation(
    "no canary is looked for after the copy",
    DEBUG,
    'self._check_canary(slot, watched, f"upload {watched.upload}")',
    "pass",
    f"{DEBUGS}::test_a_write_behind_the_end_under_the_copy_is_found",
)
mutation(
    "what is found at the end is not told",
    RING,
    "self.notes.append(str(found))",
    "pass",
    f"{DEBUGS}::test_what_is_found_at_the_end_is_logged",
)

# What makes a batch cheap may not make it wrong.

mutation(
    "a reader on another stream does not wait for the copy",
    "staging/upload.py",
    "if pool._device.same_stream(stream, self._stream):",
    "if True:",
    f"{LEASES}::test_on_the_stream_of_the_upload_there_is_nothing_to_wait_for",
)
mutation(
    "a list's floats overflow unnoticed",
    "staging/_prepared.py",
    'f"={self.array.size}',
    'f"{self.array.size}',
    "staging/test_prepared.py::test_plain_floats_that_do_not_fit_are_named_and_infinity_is_none_of_them",
)
mutation(
    "records of one layout go where another's went",
    LEASE,
    "if targets.layout is not layout:",
    "if targets.layout is None:",
    "staging/test_prepared.py::test_records_of_two_layouts_in_turn_go_each_to_their_fields",
)
mutation(
    "an upload that is kept keeps a buffer that was replaced",
    POOL,
    "lease._prepared = None  # or",
    "pass  # or",
    "staging/test_prepared.py::test_an_ended_lease_keeps_no_buffer_that_was_replaced",
)
mutation(
    "a discarded lease keeps a buffer that was replaced",
    POOL,
    "lease._prepared = None\n        # Not waiting",
    "# Not waiting",
    "staging/test_prepared.py::test_an_ended_lease_keeps_no_buffer_that_was_replaced",
)
mutation(
    "other fields' bytes are copied as booleans",
    "staging/_cut.py",
    " if one is not torch.bool]",
    "]",
    "staging/test_prepared.py::test_no_allocation_is_of_booleans",
)
mutation(
    "a program of the kernel writes one block only",
    "batching/kernel.py",
    "for start in range(first, seq_len, tl.num_programs(1) * BLOCK):",
    "for start in range(first, tl.minimum(seq_len, first + BLOCK), BLOCK):",
    "batching/test_cache.py::test_a_long_row_among_many_is_shared_by_few_programs",
)


def mutated(one: Mutation, source: str) -> str:
    """The source without the guard. Raises `MutationError` unless the text is there exactly once."""
    found = source.count(one.old)
    if found != 1:
        raise MutationError(f"{one.name!r}: {one.file} has the text to replace {found} times, not once: {one.old!r}")
    return source.replace(one.old, one.new)


def run_pytest(scratch: Path, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
    """Exit status (None: too long) and output of these tests in the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *options]
    # First on the path: what is installed must not stand in for the copy. Wide, so that no reason is cut off.
    environment = {**os.environ, "PYTHONPATH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    try:
        ran = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return ran.returncode, ran.stdout


def copy_to(scratch: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(ROOT / name, scratch / name)


def try_out(one: Mutation) -> Outcome:
    """Run the mutation's tests in a copy without the guard."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        scratch = Path(name)
        copy_to(scratch)
        file = scratch / one.file
        file.write_text(mutated(one, file.read_text(encoding="utf-8")), encoding="utf-8")
        status, output = run_pytest(scratch, one.tests, "-x")
    if status == 0:
        return Outcome(False, how="all of its tests still pass")
    if status is None:
        return Outcome(False, how=f"its tests did not end within {LIMIT_S} s")
    failed = re.search(r"^FAILED tests/([^\[\n]+?)(?:\[.*?\])?(?: - (.*))?$", output, re.MULTILINE)
    if status is not None and status < 0:
        return Outcome(True, one.tests[0], f"the interpreter died of signal {-status}")
    if status != 1 or failed is None:
        return Outcome(False, how=f"pytest ended with status {status} and no failed test:\n{output[-3000:]}")
    return Outcome(True, failed[1], how_it_failed(failed[2] or "", output))


def how_it_failed(summary: str, output: str) -> str:
    if "DID NOT RAISE" in output:
        return "missing error"
    if "AssertionError" in output or summary.startswith("assert "):
        return "wrong value"
    found = re.findall(
        r"^E\s+(?:[\w.]+\.)?(\w+(?:Error|Exhausted|Warning|Exception|Closed|Broken|Group))\b", output, re.MULTILINE
    )
    return f"unexpected {found[-1]}" if found else f"failed: {summary[:60]}"


def check_unmutated(chosen: Sequence[Mutation]) -> None:
    """Every text is found once, and every test named passes with all guards in place."""
    for one in chosen:
        mutated(one, (ROOT / one.file).read_text(encoding="utf-8"))
    tests = list(dict.fromkeys(test for one in chosen for test in one.tests))
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_to(Path(name))
        status, output = run_pytest(Path(name), tests)
    if status != 0:
        raise MutationError(f"without any mutation the tests do not pass:\n{output[-3000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("-k", metavar="SUBSTRING", default="", help="only mutations with this in their name or file")
    parser.add_argument("-j", type=int, default=2, help="how many at a time (default: 2)")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if options.k.lower() in f"{one.name} {one.file}".lower()]
    if not chosen:
        parser.error(f"no mutation is called anything like {options.k!r}")
    if options.list:
        for one in chosen:
            print(f"{one.file}: {one.name}")
        print(f"{len(chosen)} mutations")
        return 0
    start = time.monotonic()
    check_unmutated(chosen)
    survived = 0
    with ThreadPoolExecutor(options.j) as workers:
        for one, outcome in zip(chosen, workers.map(try_out, chosen), strict=True):
            survived += not outcome.caught
            result = f"caught by {outcome.test} ({outcome.how})" if outcome.caught else f"SURVIVED: {outcome.how}"
            print(f"{one.name} -> {result}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutations caught, {time.monotonic() - start:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutationError as error:
        sys.exit(f"run_mutations: {error}")
