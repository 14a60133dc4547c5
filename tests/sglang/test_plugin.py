"""When the plugin feeds SGLang, when it keeps out of it, and that nothing of SGLang is left changed."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from real_sglang import (
    DEVICE,
    VOCABULARY,
    Engine,
    differences,
    first_chunk,
    load,
    plugged,
    pool_of,
    request,
    server,
    unhook,
)

import batching.sglang
from batching.sglang import (
    ALLOCATE,
    BATCH,
    EVICT,
    KNOWN,
    ONLOOKERS,
    PREFIX,
    PREPARE,
    SAMPLE,
    SWITCH,
    WRITE,
    Prefill,
    _preparing,
    fed,
    fingerprint,
)
from staging import Field, Layout, StagingPool, Upload

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def two(**values: Any) -> list[Any]:
    return [request("a", 0, 3, temperature=0.5, **values), request("b", 0, 2, top_k=7, top_p=0.25, sampling_seed=-1)]


def columns(info: Any) -> list[list[Any]]:
    return [getattr(info, name).flatten().tolist() for name in ("temperatures", "top_ps", "top_ks", "min_ps")]


OF_TWO = [[0.5, 1.0], [1.0, 0.25], [1 << 30, 7], [0.0, 0.0]]


def current(target: str) -> Any:
    """What is at this path now, unbound."""
    path, name = target.rsplit(".", 1)
    attribute = inspect.getattr_static(load().hook_registry.pkgutil.resolve_name(path), name)
    return getattr(attribute, "__func__", attribute)


# ---------------------------------------------------------------------- getting in, and out


def test_sglang_finds_the_plugin_by_its_entry_point(srt, monkeypatch):
    """SGLang's own loader, given what pyproject.toml says."""
    import tomllib  # not there in Python 3.10, and neither is SGLang

    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][srt.plugins.GENERAL_PLUGINS_GROUP]
    points = [EntryPoint(name, value, srt.plugins.GENERAL_PLUGINS_GROUP) for name, value in declared.items()]
    before = {target: current(target) for target in KNOWN}
    monkeypatch.setattr(srt.plugins, "entry_points", lambda group: points if group == points[0].group else [])
    monkeypatch.setattr(srt.plugins, "_plugins_loaded", False)
    srt.plugins.load_plugins()
    try:
        assert {target: current(target).__wrapped__ for target in KNOWN} == before
        assert srt.schedule_batch.SamplingBatchInfo.from_schedule_batch.__func__.__wrapped__ is before[SAMPLE]
    finally:
        for target in KNOWN:
            unhook(target)
        srt.hook_registry.HookRegistry.reset()
    assert {target: current(target) for target in KNOWN} == before


@pytest.mark.parametrize(("setting", "hooked"), [("0", set()), ("1", set(KNOWN)), ("", set(KNOWN))])
def test_an_environment_variable_turns_it_off(srt, monkeypatch, caplog, setting, hooked):
    """STAGING_SGLANG=0: not one hook, and a line in the log."""
    monkeypatch.setenv(SWITCH, setting)
    caplog.set_level(logging.INFO, "batching")
    with plugged():
        assert set(srt.hook_registry.HookRegistry._hooks) == hooked
    assert any("is left as it is" in line for line in caplog.messages) == (not hooked)


@contextmanager
def edited(monkeypatch: pytest.MonkeyPatch, folder: Path, target: str, old: str, new: str) -> Iterator[ModuleType]:
    """A copy of the module with one function edited, in place of the module."""
    path = target.rsplit(".", 1)[0]
    name = path if path in sys.modules else path.rsplit(".", 1)[0]
    original = sys.modules[name]
    text = Path(original.__file__).read_text()
    assert text.count(old) == 1
    copy = folder / Path(original.__file__).name
    copy.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    parent, _, child = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules[parent], child, module)
    spec.loader.exec_module(module)
    if name == ALLOCATE.rpartition(".")[0]:  # whose functions the others have imported, and the tests patched
        monkeypatch.setattr(load().schedule_batch, "alloc_for_extend", module.alloc_for_extend)
        monkeypatch.setattr(module, "support_triton", original.support_triton)
    if name == PREPARE.rsplit(".", 2)[0]:
        monkeypatch.setattr(load(), "schedule_batch", module)
    yield module
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("target", "old", "new", "uploads", "fields"),
    [
        (
            SAMPLE,
            "top_k <= 1 for r in reqs),\n            is_any",
            "top_k < 2 for r in reqs),\n            is_any",
            1,
            6,
        ),
        (WRITE, "[t.data_ptr() for t in prefix_tensors]", "[one.data_ptr() for one in prefix_tensors]", 1, 9),
        (ALLOCATE, "    # free out-of-window swa tokens\n", "", 1, 6),
        (PREPARE, "extend_lens = [r.extend_len for r in reqs]", "extend_lens = [one.extend_len for one in reqs]", 2, 8),
    ],
    ids=["from_schedule_batch", "write_cache_indices", "alloc_for_extend", "prepare_for_extend"],
)
def test_a_changed_function_gets_a_line_in_the_log_and_no_change(
    srt, engine, monkeypatch, tmp_path, caplog, target, old, new, uploads, fields
):
    """A copy of SGLang's module with one edited function: that one is left alone, the others are fed as ever."""
    with edited(monkeypatch, tmp_path, target, old, new):
        before = current(target)
        assert before.__code__.co_filename.startswith(str(tmp_path))
        with plugged() as feeder:
            assert current(target) is before
            assert set(feeder.hooks()) == set(KNOWN) - {target}
            assert columns(engine.prefill(two()).sampling_info) == OF_TWO
            stats = pool_of(feeder).stats()
            assert (stats.uploads, stats.fields) == (uploads, fields)  # nothing that nobody takes
    lines = [line for line in caplog.messages if target in line]
    assert len(lines) == 1
    assert "is left as it is" in lines[0]


def test_a_function_that_another_plugin_has_replaced_is_not_known(srt, monkeypatch, caplog):
    """inspect.getsource would look through a wrapper and find SGLang's source: the wrapper's own counts."""
    original = srt.allocation.write_cache_indices

    @functools.wraps(original)
    def other(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(srt.allocation, "write_cache_indices", other)
    with plugged() as feeder:
        assert srt.allocation.write_cache_indices is other
        assert WRITE not in feeder.hooks()
    assert "replaced it" in "".join(caplog.messages)


def test_what_is_not_there_is_left_alone(srt, monkeypatch, caplog):
    """A version of SGLang that has moved the function."""
    monkeypatch.delattr(srt.sampling_batch_info.SamplingBatchInfo, "from_schedule_batch")
    with plugged() as feeder:
        assert SAMPLE not in feeder.hooks()
    assert "cannot be read (AttributeError" in "".join(caplog.messages)


@pytest.mark.parametrize("target", KNOWN)
def test_hooks_of_another_plugin_below_ours_are_called(srt, engine, caplog, target):
    """Ours would skip them: it steps aside, and says so."""
    registry = srt.hook_registry.HookRegistry
    calls = []

    def other(original: Any, *args: Any) -> Any:
        calls.append(target)
        return original(*args)

    with plugged() as feeder:
        pass
    registry.register(target, other, srt.hook_registry.HookType.AROUND)
    hook = feeder.hooks()[target]
    registry.register(target, hook, srt.hook_registry.HookType.AROUND)
    registry.apply_hooks()
    try:
        assert columns(engine.prefill(two()).sampling_info) == OF_TWO
    finally:
        unhook(target)  # ours
        unhook(target)  # the other one
        registry.reset()
    assert calls == [target]
    assert feeder._pools == {}
    assert "hooked by another plugin" in "".join(caplog.messages)


# ---------------------------------------------------------------------- the callers of from_schedule_batch


def test_a_prefill_is_one_upload(feeder, engine):
    """Lengths, rows, pointers and sampling columns together: views of one allocation that do not overlap."""
    batch = engine.prefill(two())
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.fields) == (1, 10)
    assert columns(batch.sampling_info) == OF_TWO
    assert batch.sampling_info.sampling_seed is None
    kept = uploaded(batch)
    assert len({one.untyped_storage().data_ptr() for one in kept}) == 1
    spans = sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def uploaded(batch: Any) -> list[torch.Tensor]:
    """What a prefill uploads and the batch keeps."""
    info = batch.sampling_info
    return [
        *(batch.seq_lens, batch.orig_seq_lens, batch.req_pool_indices),
        *(info.temperatures, info.top_ps, info.top_ks, info.min_ps),
    ]


def test_later_prefills_and_writes_in_place_change_no_other_tensor(feeder, engine):
    """SGLang's sampler writes in place (`top_ks.masked_fill_`): what is beside it stays, and so do other batches."""
    batch = engine.prefill(two())
    for position in range(len(uploaded(batch))):
        before = [one.clone() for one in uploaded(batch)]
        uploaded(batch)[position].add_(1)
        before[position] += 1
        assert all(map(torch.equal, uploaded(batch), before))
    for _ in range(pool_of(feeder).max_slots + 1):
        engine.prefill([request("c", 0, 1, temperature=0.75)])
    assert all(map(torch.equal, uploaded(batch), before))


def test_without_kernels_the_upload_is_the_same(feeder, engine):
    """SGLang's fallback of write_cache_indices has no use for the pointers in it."""
    with server({}, kernel=False):
        batch = engine.prefill(two())
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.fields) == (1, 10)
    assert columns(batch.sampling_info) == OF_TWO


def test_an_idle_batch_uploads_nothing(feeder, engine, srt):
    """Its columns are SGLang's own, empty and of the same kinds."""
    batch = engine.batch([])
    batch.prepare_for_idle()
    found = batch.sampling_info
    own = srt.sampling_batch_info.SamplingBatchInfo.from_schedule_batch.__func__.__wrapped__
    assert differences(own(type(found), batch, VOCABULARY), found) == []
    assert found.temperatures.shape == (0, 1)
    assert (feeder._pools, feeder._noted) == ({}, set())


def test_a_prebuilt_batch_uploads_the_columns(feeder, engine):
    """The decode side of disaggregation: `prepare_for_prebuilt`, without an allocation."""
    reqs = two()
    first_chunk(engine, reqs, [3, 2])
    before = pool_of(feeder).stats()
    batch = engine.batch(reqs)
    batch.prepare_for_prebuilt()
    assert columns(batch.sampling_info) == OF_TWO
    since = pool_of(feeder).stats() - before
    assert (since.uploads, since.fields) == (1, 4)


def test_a_batch_made_by_hand_uploads_the_columns(feeder, engine, srt):
    """As the scheduler does it for requests that go on decoding: nothing was prepared before."""
    batch = engine.batch(two())
    info = srt.sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
    assert columns(info) == OF_TWO
    assert pool_of(feeder).stats().uploads == 1


def test_seeds_exist_under_deterministic_inference_only(feeder, engine):
    """A missing seed is SGLang's 42; without deterministic inference there is no tensor, and none is uploaded."""
    with server({"enable_deterministic_inference": True}):
        info = engine.prefill(two()).sampling_info
    assert (info.sampling_seed.dtype, info.sampling_seed.tolist()) == (torch.int64, [42, -1])
    assert pool_of(feeder).stats().fields == 11
    assert engine.prefill(two()).sampling_info.sampling_seed is None
    assert pool_of(feeder).stats().fields == 21


def test_a_call_in_another_form_is_sglangs_own(feeder, engine, srt, caplog):
    """Keywords, which none of SGLang's callers use: the order of the arguments is not guessed."""
    batch = engine.batch(two())
    info = srt.sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch=batch, vocab_size=VOCABULARY)
    assert columns(info) == OF_TWO
    assert feeder._pools == {}
    assert "unknown way" in "".join(caplog.messages)


def test_subclasses_and_their_hooks_are_respected(feeder, engine, srt):
    """The class that was asked makes the object, and `adjusted_from_schedule_batch` is called."""
    seen = []

    class Own(srt.sampling_batch_info.SamplingBatchInfo):
        def adjusted_from_schedule_batch(self, batch: Any, vocab_size: int) -> None:
            seen.append((self, batch, vocab_size))

    batch = engine.batch(two())
    info = Own.from_schedule_batch(batch, VOCABULARY)
    assert type(info) is Own
    assert seen == [(info, batch, VOCABULARY)]
    assert pool_of(feeder).stats().uploads == 1


def test_requests_parameters_and_batches_get_no_attribute(srt):
    """What the plugin remembers of a batch lives as long as `prepare_for_extend`, and on nobody's object."""

    def attributes() -> list[set[str]]:
        engine = Engine(DEVICE, rows=16, context=64)
        batch = engine.prefill(two())
        return [set(vars(batch)), set(vars(batch.sampling_info)), *(set(vars(one)) for one in batch.reqs)]

    expected = attributes()
    with plugged():
        assert attributes() == expected


# ---------------------------------------------------------------------- when things go wrong


def test_what_was_staged_is_dropped_when_allocation_raises(feeder, engine, monkeypatch):
    """Out of memory behind `write_cache_indices`: nothing is kept, and the next attempt has its own upload."""
    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", no_memory, raising=False)
    reqs = two()
    batch = engine.batch(reqs)
    with pytest.raises(RuntimeError, match="no memory"):
        batch.prepare_for_extend()
    assert _preparing.get() is None
    assert pool_of(feeder).stats().uploads == 1
    monkeypatch.undo()
    reqs[0].sampling_params.temperature = 0.75
    for one in reqs:
        one.kv.kv_allocated_len = 1  # it has a row from the first attempt
    batch.prepare_for_extend()
    assert columns(batch.sampling_info)[0] == [0.75, 1.0]
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.filling) == (2, 0)


def no_memory(**options: Any) -> None:
    raise RuntimeError("no memory")


def test_a_parameter_that_changes_during_allocation_is_read_again(feeder, engine, monkeypatch):
    """SGLang reads it at the end of `prepare_for_extend`, so that is the value that counts."""
    reqs = two()

    def change(**options: Any) -> None:
        reqs[1].sampling_params.min_p = 0.125

    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", change, raising=False)
    info = engine.prefill(reqs).sampling_info
    assert info.min_ps.tolist() == [0.0, 0.125]
    assert info.need_min_p_sampling
    assert pool_of(feeder).stats().uploads == 2


def test_the_streams_that_take_the_columns_wait_for_their_copy(feeder, engine, monkeypatch):
    """Each function may run on another one than `alloc_for_extend`: for the pointers, the lengths, the columns."""
    waits = []
    monkeypatch.setattr(Upload, "wait", lambda self, stream=None: waits.append(stream))
    engine.prefill(two())
    assert waits == [None] * 3


@pytest.mark.skipif(DEVICE != "cpu", reason="two names for one device, as the CPU has them")
def test_columns_on_another_device_are_not_taken(feeder, engine):
    """The table is on one device, the batch on another: an upload to each."""
    engine.table.device = "cpu:0"
    batch = engine.batch(two())
    batch.device = "cpu"
    batch.prepare_for_extend()
    assert columns(batch.sampling_info) == OF_TWO
    assert [pool.stats().uploads for pool in feeder._pools.values()] == [1, 1]


def test_no_two_infos_share_tensors(feeder, engine, monkeypatch, srt):
    """A second one for the same batch within `prepare_for_extend` gets an upload of its own, as in SGLang."""
    made = []
    own = srt.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch

    def again(self: Any, batch: Any, vocab_size: int) -> None:
        made.append(self)
        if len(made) < 2:
            made.append(type(self).from_schedule_batch(batch, vocab_size))
        own(self, batch, vocab_size)

    monkeypatch.setattr(srt.sampling_batch_info.SamplingBatchInfo, "adjusted_from_schedule_batch", again)
    engine.prefill(two())
    assert columns(made[0]) == columns(made[-1]) == OF_TWO
    assert made[0].temperatures.data_ptr() != made[-1].temperatures.data_ptr()


def test_a_value_that_cannot_be_staged_goes_sglangs_own_way(srt, caplog):
    """Too large for float32: SGLang makes it infinite. The batch is SGLang's own, with a line in the log, once."""

    def infos() -> list[Any]:
        engine = Engine(DEVICE, rows=16, context=64)
        reqs = two()
        reqs[0].sampling_params.temperature = 1e300
        return [engine.prefill(reqs).sampling_info for _ in range(1)]

    expected = infos()
    with plugged() as feeder:
        assert columns(infos()[0]) == columns(expected[0])
        assert columns(infos()[0])[0][0] == torch.inf
        assert pool_of(feeder).stats().uploads == 0
    assert sum("temperatures" in line and "own way" in line for line in caplog.messages) == 1  # tried once a prefill


def test_a_busy_ring_goes_sglangs_own_way_at_once(feeder, engine):
    """All slots taken: the scheduler does not wait for one."""
    engine.prefill(two())
    pool = pool_of(feeder)
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # its slot is free again
    layout = Layout([Field("x", torch.int32)])
    held = [pool.lease(layout, rows=1) for _ in range(pool.max_slots)]
    batch = engine.prefill(two())
    assert columns(batch.sampling_info) == OF_TWO
    assert [one.tolist() for one in (batch.seq_lens, batch.orig_seq_lens)] == [[3, 2]] * 2
    stats = pool.stats()
    assert (stats.leases_timed_out, stats.leases_waited, stats.uploads) == (1, 0, 1)  # tried once a prefill
    for lease in held:
        lease.discard()
    engine.prefill(two())
    assert pool.stats().uploads == 2


def test_a_device_of_an_untried_kind_goes_sglangs_own_way(feeder, engine, srt, caplog):
    """Here torch's "meta", which has no memory; in SGLang's world an NPU. A pool is tried for once."""
    batch = engine.batch(two())
    batch.device = "meta"
    for _ in range(2):
        info = srt.sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
        assert info.temperatures.device.type == "meta"
    prefill = Prefill(batch, True)
    feeder._stage(prefill, "meta", [])
    assert prefill.upload is None
    assert feeder._pools == {torch.device("meta"): None}
    assert [line for line in caplog.messages if "own way" in line] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("pins", "memory"), [(True, "auto"), (False, "pageable")])
def test_where_sglang_does_not_pin_the_pool_does_not_either(srt, monkeypatch, engine, pins, memory):
    """Under confidential computing, say."""
    options = {}

    def made(device: Any, **given: Any) -> StagingPool:
        options.update(given)
        return StagingPool(device, **given)

    monkeypatch.setattr(batching.sglang, "StagingPool", made)
    monkeypatch.setattr(srt.common, "is_pin_memory_available", lambda device=None: pins)
    with plugged():
        engine.prefill(two())
    assert (options["memory"], options["timeout"]) == (memory, 0)


@pytest.mark.parametrize(("dp_rank", "name"), [(1, "sglang-dp1-tp0"), (None, "sglang-tp0")])
def test_the_pool_bears_the_ranks_of_its_process(srt, engine, dp_rank, name):
    """So that the series of several schedulers do not mix; a process without data parallelism has no such rank."""
    with plugged() as feeder, srt.runtime_context.get_parallel().override(tp_rank=0, dp_rank=dp_rank):
        engine.prefill(two())
        assert pool_of(feeder).name == name


def test_a_device_without_an_index_is_the_current_one(feeder, monkeypatch):
    """SGLang's batches are on "cuda", whichever GPU their process has chosen."""
    current = [3]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(batching.sglang, "StagingPool", lambda device, **options: StagingPool("cpu", name="stand-in"))
    assert feeder._pool("cuda") is feeder._pool("cuda:3") is feeder._pool(torch.device("cuda"))
    current[0] = 4
    assert feeder._pool("cuda") is feeder._pool("cuda:4") is feeder._pool(torch.device("cuda"))
    assert set(feeder._pools) == {torch.device("cuda:3"), torch.device("cuda:4")}


def test_two_threads_make_one_pool(feeder, monkeypatch):
    """Both have found none, and look once more before they make one: one after the other."""
    found_none, look_again = threading.Barrier(2), threading.Barrier(2)

    class Met(dict):
        def __missing__(self, key: Any) -> Any:
            found_none.wait()
            raise KeyError(key)

        def __contains__(self, key: Any) -> bool:
            found = super().__contains__(key)
            with suppress(threading.BrokenBarrierError):
                look_again.wait(0.2)
            return found

    made = []

    def make(device: Any, **options: Any) -> StagingPool:
        made.append(StagingPool(device, **options))
        return made[-1]

    monkeypatch.setattr(batching.sglang, "StagingPool", make)
    feeder._pools = Met()
    threads = [threading.Thread(target=feeder._pool, args=(DEVICE,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(feeder._pools.values()) == made
    assert len(made) == 1


def test_another_thread_may_prepare_a_batch_meanwhile(feeder, engine, monkeypatch):
    """What is being prepared is known for each thread: both batches get their own upload, one each."""
    others: list[Any] = []

    def prepare_another(**options: Any) -> None:
        thread = threading.Thread(target=lambda: others.append(Engine(DEVICE, rows=16, context=64).prefill(two())))
        thread.start()
        thread.join()

    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", prepare_another, raising=False)
    batch = engine.prefill([request("c", 0, 1, temperature=3.0)])
    assert batch.sampling_info.temperatures.tolist() == [[3.0]]
    assert columns(others[0].sampling_info) == OF_TWO
    assert pool_of(feeder).stats().uploads == 2


# ---------------------------------------------------------------------- what comes late


def seen_by(batch: Any, seen: list[Any]) -> None:
    seen.append(None if batch.seq_lens is None else batch.seq_lens.tolist())


@pytest.mark.parametrize("name", ["maybe_evict_swa", "is_dllm"])
def test_seq_lens_are_there_for_another_version_of_a_method(feeder, engine, monkeypatch, srt, name):
    """It is given the batch before the upload, and this one looks: it finds SGLang's own copy."""
    seen: list[Any] = []

    def look(batch: Any) -> bool:
        if batch.seq_lens is not None and not seen:
            seen_by(batch, seen)
        return False

    monkeypatch.setattr(srt.schedule_batch.ScheduleBatch, name, look)
    batch = engine.prefill(two())
    assert (seen, batch.seq_lens.tolist()) == ([[3, 2]], [3, 2])
    assert pool_of(feeder).stats().fields == 9


def test_seq_lens_are_there_for_another_version_of_the_prefixes(feeder, engine, monkeypatch, srt):
    """The same for the function that reads them."""
    seen: list[Any] = []
    own = srt.allocation._prefix_kv_indices

    def look(batch: Any, one: Any) -> torch.Tensor:
        seen_by(batch, seen)
        return own(batch, one)

    monkeypatch.setattr(srt.allocation, "_prefix_kv_indices", look)
    batch = engine.prefill(two())
    assert (seen, batch.seq_lens.tolist()) == ([[3, 2]] * 2, [3, 2])
    assert pool_of(feeder).stats().fields == 9


@pytest.mark.parametrize("ours_first", [True, False])
def test_seq_lens_are_there_for_another_plugin_around_the_allocation(srt, engine, ours_first):
    """Its hook may be above ours, or below."""
    registry = srt.hook_registry.HookRegistry
    seen: list[Any] = []

    def look(original: Any, batch: Any) -> Any:
        seen_by(batch, seen)
        return original(batch)

    with plugged() as feeder:
        pass
    hooks = dict(feeder.hooks())
    both = [hooks.pop(ALLOCATE), look]
    for hook in both if ours_first else reversed(both):
        registry.register(ALLOCATE, hook, srt.hook_registry.HookType.AROUND)
    for target, hook in hooks.items():
        registry.register(target, hook, srt.hook_registry.HookType.AROUND)
    registry.apply_hooks()
    try:
        batch = engine.prefill(two())
    finally:
        for target in (ALLOCATE, *KNOWN):
            unhook(target)
        registry.reset()
    assert (seen, batch.seq_lens.tolist()) == ([[3, 2]], [3, 2])
    assert columns(batch.sampling_info) == OF_TWO


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        (
            EVICT,
            "        if self.tree_cache.supports_swa():\n            retain",
            "        if self.tree_cache.supports_swa( ):\n            retain",
        ),
        (PREFIX, "    # A request holding its row (a later chunk, a borrowed session record)\n", ""),
        (f"{BATCH}.is_dllm", "return self.dllm_config is not None", "return self.dllm_config  is not None"),
        (f"{BATCH}._evict_swa", '"prefix cache must support swa"', '"a prefix cache must support swa"'),
        (f"{BATCH}._swa_eviction_trigger", "Default: evict only once", "By default, evict only once"),
    ],
    ids=["maybe_evict_swa", "_prefix_kv_indices", "is_dllm", "_evict_swa", "_swa_eviction_trigger"],
)
def test_a_changed_onlooker_gets_a_line_in_the_log(srt, engine, monkeypatch, tmp_path, caplog, target, old, new):
    """One copy more, of `seq_lens`; the rest is uploaded as ever."""
    with edited(monkeypatch, tmp_path, target, old, new), plugged() as feeder:
        batch = engine.prefill(two())
        assert batch.seq_lens.tolist() == [3, 2]
        stats = pool_of(feeder).stats()
        assert (stats.uploads, stats.fields) == (1, 9)
    (line,) = [line for line in caplog.messages if target in line]
    assert "seq_lens is left as it is" in line


def test_a_batch_has_its_seq_lens_when_there_are_no_rows(feeder, engine, monkeypatch):
    """The allocation raises before anything is uploaded: the batch is left as SGLang leaves it."""
    monkeypatch.setattr(engine.table, "alloc", lambda reqs: None)
    batch = engine.batch(two())
    with pytest.raises(RuntimeError, match="runs out of memory"):
        batch.prepare_for_extend()
    assert batch.seq_lens.tolist() == [3, 2]
    assert feeder._pools == {}


def test_a_second_allocation_meanwhile_has_lengths_and_rows_of_its_own(feeder, engine, monkeypatch, srt):
    """Of another batch, in the same thread: what was uploaded belongs to the batch that is being prepared."""
    found: list[Any] = []

    def allocate_another(**options: Any) -> None:
        monkeypatch.undo()
        other = engine.batch([request("c", 0, 5)])
        other.prefix_lens, other.extend_lens, other.extend_num_tokens = [0], [5], 5
        other.seq_lens, other.seq_lens_cpu = torch.tensor([5], device=DEVICE), torch.tensor([5])
        out, rows, rows_cpu = srt.schedule_batch.alloc_for_extend(other)
        found.extend(
            [rows.tolist() == rows_cpu.tolist(), engine.table.req_to_token[rows_cpu[0], :5].tolist() == out.tolist()]
        )

    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", allocate_another, raising=False)
    batch = engine.prefill(two())
    assert found == [True, True]
    assert columns(batch.sampling_info) == OF_TWO
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.fields) == (2, 14)


def test_a_second_try_of_the_allocation_has_the_rows_of_that_try(feeder, engine, monkeypatch, srt):
    """Somebody around it has made room: the requests get other rows than the ones that were uploaded."""
    hooked = srt.schedule_batch.alloc_for_extend

    def twice(batch: Any) -> Any:
        monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", no_memory, raising=False)
        with pytest.raises(RuntimeError, match="no memory"):
            hooked(batch)
        monkeypatch.undo()
        for one in batch.reqs:
            engine.table.free_slots.insert(0, one.kv.req_pool_idx)
            one.kv.req_pool_idx = None
        return hooked(batch)

    monkeypatch.setattr(srt.schedule_batch, "alloc_for_extend", twice)
    batch = engine.prefill(two())
    assert batch.req_pool_indices.tolist() == batch.req_pool_indices_cpu.tolist()
    assert columns(batch.sampling_info) == OF_TWO
    assert batch.orig_seq_lens.tolist() == [3, 2]
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.fields) == (2, 9 + 4)


def test_other_pointers_meanwhile_are_not_those_of_the_batch(feeder, engine, monkeypatch, srt):
    """A second `write_cache_indices`, with prefixes that nothing was uploaded for."""
    prefix = torch.tensor([7, 8, 9], device=DEVICE)

    def write_another(**options: Any) -> None:
        row, three, none = (torch.tensor([value]) for value in (9, 3, 0))
        on = [one.to(DEVICE) for one in (row, three, none)]
        srt.allocation.write_cache_indices(
            prefix[:0], on[0], row, on[1], three, on[1], three, on[2], none, [prefix], engine.table
        )

    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", write_another, raising=False)
    batch = engine.prefill(two())
    assert engine.table.req_to_token[9, :3].tolist() == [7, 8, 9]
    assert columns(batch.sampling_info) == OF_TWO
    stats = pool_of(feeder).stats()
    assert (stats.uploads, stats.fields) == (2, 11)


def test_columns_of_unequal_lengths_are_not_uploaded(feeder):
    """An allocator that gives more rows than there are requests, say: SGLang then makes the longer tensor."""
    with pytest.raises(ValueError, match="unpack"):
        feeder._upload(feeder._pool(DEVICE), {"top_ps": [1.0], "top_ks": [1, 2]})


@pytest.mark.parametrize(
    "value", [np.float32(0.3), np.float64(0.3), True, 3, torch.tensor(0.3)], ids=lambda value: type(value).__name__
)
def test_numbers_of_other_types_become_the_same(srt, value):
    """Whatever SGLang's torch.tensor takes: the same bytes."""

    def info() -> Any:
        reqs = two()
        reqs[0].sampling_params.temperature = value
        return Engine(DEVICE, rows=16, context=64).prefill(reqs).sampling_info.temperatures

    expected = info()
    with plugged() as feeder:
        assert differences(expected, info()) == []
        assert pool_of(feeder).stats().uploads == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="two names for one device, as the CPU has them")
def test_pointers_for_another_device_go_alone(feeder, engine, monkeypatch):
    """Where `alloc_for_extend` is not hooked: the columns are for the device of the batch."""
    monkeypatch.setattr(feeder, "_allocate", None)
    engine.table.device = "cpu:0"
    batch = engine.batch(two())
    batch.device = "cpu"
    batch.prepare_for_extend()
    assert columns(batch.sampling_info) == OF_TWO
    assert {str(device): pool.stats().fields for device, pool in feeder._pools.items()} == {"cpu:0": 1, "cpu": 4}


@pytest.mark.skipif(DEVICE != "cpu", reason="two names for one device, as the CPU has them")
def test_columns_for_a_device_that_changes_meanwhile_are_uploaded_again(feeder, engine, monkeypatch):
    """As "cuda" does, with the current device: SGLang makes its columns on the one that it is at the end."""
    batch = engine.batch(two())
    batch.device = "cpu"
    monkeypatch.setattr(
        engine.table, "alloc_aux_to_lengths", lambda **options: setattr(batch, "device", "cpu:0"), raising=False
    )
    batch.prepare_for_extend()
    assert columns(batch.sampling_info) == OF_TWO
    fields = {str(device): pool.stats().fields for device, pool in feeder._pools.items()}
    assert fields == {"cpu": 9 + (engine.table.device == "cpu"), "cpu:0": 4}


def test_seeds_that_are_turned_on_meanwhile_are_there(feeder, engine, monkeypatch, srt):
    """SGLang looks at its end whether there are any."""
    override = srt.runtime_context.get_exec().deterministic.override(enable_deterministic_inference=True)
    monkeypatch.setattr(engine.table, "alloc_aux_to_lengths", lambda **options: override.__enter__(), raising=False)
    try:
        info = engine.prefill(two()).sampling_info
    finally:
        override.__exit__(None, None, None)
    assert info.sampling_seed.tolist() == [42, -1]
    assert pool_of(feeder).stats().uploads == 2


# ---------------------------------------------------------------------- the copies of SGLang's functions


def test_tracebacks_show_sglangs_own_lines(srt, feeder, engine):
    """An error of SGLang's own is raised at the same line of the same file."""

    def where() -> tuple[str, int]:
        batch = engine.batch(two())
        batch.reqs[0].sampling_params.logit_bias = {"not a token": 1.0}
        with pytest.raises(ValueError, match="not a token") as caught:
            srt.sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
        frames = [frame for frame in caught.traceback if frame.path.name == "sampling_batch_info.py"]
        return str(frames[-1].path), frames[-1].lineno

    hooked = where()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeder, "_sample", None)
        assert where() == hooked


def test_the_onlookers_are_those_of_this_version(srt):
    """Else `seq_lens` would always go SGLang's own way, and nobody would notice."""
    assert {target: fingerprint(current(target)) for target in ONLOOKERS} == ONLOOKERS


def one_upload(device: Any) -> torch.Tensor:
    x = torch.tensor([1, 2], dtype=torch.int32).to(device, non_blocking=True).view(-1, 1)
    y = torch.tensor([2]).to(device)
    return (x + y).to(device)


def test_fed_asks_for_the_named_uploads_only():
    """With SGLang's own upload at hand, as it is before anything is done with it."""
    asked = []

    def feed(name: str, own: Any) -> torch.Tensor:
        asked.append((name, own().shape))
        return own() * 10

    assert fed(one_upload, ["x"])("cpu", feed=feed).tolist() == [[12], [22]]
    assert asked == [("x", (2,))]
    assert one_upload("cpu").tolist() == [[3], [4]]


def test_fed_refuses_what_uploads_something_else():
    """Each name has to be there once."""
    with pytest.raises(ValueError, match=r"uploads \['x'\], not \['x', 'z'\]"):
        fed(one_upload, ["x", "z"])


def three_uploads(device: Any, values: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor(values).to(device)
    y = torch.tensor([2]).to(device)
    values = [*values, 3]
    z = torch.tensor([len(values)]).to(device)
    w, _ = 5, 6
    return x, y, z + w - w


def test_fed_hands_over_variables_and_asks_late():
    """What is asked late is asked behind another assignment, and in the order in which it stands."""
    asked = []

    def feed(name: str, own: Any, values: list[int]) -> torch.Tensor:
        asked.append((name, values))
        return own()

    copy = fed(three_uploads, ["x", "y", "z"], ["values"], {"x": "w", "y": "w"})
    assert [one.tolist() for one in copy("cpu", [1], feed=feed)] == [[1, 3], [2], [2]]
    assert asked == [("z", [1, 3]), ("x", [1, 3]), ("y", [1, 3])]
