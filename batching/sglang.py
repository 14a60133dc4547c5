"""A plugin for SGLang 0.5.23: what a prefill uploads one by one, in one upload from a `StagingPool`.

SGLang finds `plugin` by the entry point group `sglang.srt.plugins`. Nothing of SGLang is rewritten: each of the four
functions is compiled once more from its own source, with the places where it pins and copies a list changed to ask for
the tensor first. Everything else in them, with every check, flag and optional feature, is SGLang's code as it stands.

A prefill batch makes one upload. `prepare_for_extend` knows the lengths; `alloc_for_extend`, which it calls, then knows
the rows and the prefixes, so everything is uploaded there, the sampling columns along with it. `write_cache_indices`
and, at the end, `from_schedule_batch` find their part of it. Any other caller of `from_schedule_batch` uploads the
columns alone. Whatever goes wrong here, SGLang's own way is taken.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import hashlib
import inspect
import logging
import os
import pkgutil
import struct
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from batching.params import DEFAULT_SEED, SAMPLING
from staging import Field, Layout, StagingPool, Upload
from staging.layout import DTYPES
from staging.stats import PoolStats

log = logging.getLogger("batching")

SWITCH = "STAGING_SGLANG"
"""The environment variable that turns the plugin off: 0. Read once, when SGLang loads its plugins."""

SAMPLE = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
WRITE = "sglang.srt.mem_cache.allocation.write_cache_indices"
ALLOCATE = "sglang.srt.mem_cache.allocation.alloc_for_extend"
PREPARE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
KNOWN = {
    SAMPLE: "48352e06affec043",
    WRITE: "8ffefc8b52e60fa1",
    ALLOCATE: "79929fe4dbc6fcec",
    PREPARE: "e7ca2d0e335a570e",
}
"""The functions that are hooked, and the fingerprints of the sources that this was written for: SGLang 0.5.23."""

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
EVICT = f"{BATCH}.maybe_evict_swa"
PREFIX = "sglang.srt.mem_cache.allocation._prefix_kv_indices"
ONLOOKERS = {
    EVICT: "d7f6ce9984583fe6",
    f"{BATCH}._evict_swa": "b45c0574011b14d9",
    f"{BATCH}._swa_eviction_trigger": "baf8598a070a970d",
    f"{BATCH}.is_dllm": "e47c5310e458232b",
    PREFIX: "53239ce78ed9dc4f",
}
"""Functions that are given the batch between `prepare_for_extend` and the upload. These versions of them do not look at
its `seq_lens`, which may then come with the upload; behind any other version SGLang's own copy of it is made."""

COLUMNS = tuple(field.name for field in SAMPLING.fields)
POINTERS = "prefix_pointers"
LENGTHS = ("prefix_lens_device", "extend_lens_device")
ROWS = "req_pool_indices_device"
SEQUENCE = "seq_lens_tensor"
ORIGINAL = "orig_seq_lens_tensor"

_FIELDS = {
    field.name: field
    for field in (
        *SAMPLING.fields,
        Field(POINTERS, torch.uint64),
        *(Field(name, torch.int64) for name in (*LENGTHS, ROWS, SEQUENCE)),
        Field(ORIGINAL, torch.int32),
    )
}
"""Every column, by the name of SGLang's variable."""
_METRICS_EVERY_S = 1.0


def plugin() -> None:
    """What SGLang calls: registers a hook for each function whose source is the one that is known."""
    if os.environ.get(SWITCH) == "0":
        log.info("staging: %s=0, SGLang is left as it is", SWITCH)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    feeder = Feeder({target: function for target in KNOWN if (function := _known(target)) is not None}, onlookers())
    for target, hook in feeder.hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)
        log.info("staging: hooks %s", target)


@attrs.define(eq=False)
class Prefill:
    """One `prepare_for_extend` in progress, and what was uploaded in it. It ends with the call, also by an error."""

    batch: Any
    with_sampling: bool
    """Whether `from_schedule_batch` is to find its columns in the upload."""
    columns: dict[str, list[int]] = attrs.Factory(dict)
    """What is known so far of rows and lengths."""
    own_seq_lens: Callable[[], torch.Tensor] | None = None
    """SGLang's own upload of `seq_lens`, while the batch is without it."""
    tried: bool = False
    upload: Upload | None = None
    pool: StagingPool | None = None
    pointers_of: Any = None
    """The list of prefixes whose pointers were uploaded."""
    sampling: dict[str, list[Any]] | None = None
    """The sampling columns that were uploaded, until somebody takes them."""

    def settle(self) -> None:
        """Give the batch its `seq_lens`, from the upload or by SGLang's own."""
        own, self.own_seq_lens = self.own_seq_lens, None
        if own is not None:
            self.batch.seq_lens = own() if self.upload is None else self.upload[SEQUENCE]

    def take(self, name: str) -> torch.Tensor | None:
        """A column of the upload, if there is one, for the stream that is current now, which may be another one."""
        if self.upload is None:
            return None
        self.upload.wait()
        return self.upload[name]


_preparing: contextvars.ContextVar[Prefill | None] = contextvars.ContextVar("staging_prefill", default=None)
"""Of this thread. `write_cache_indices` is not told for which batch it is called."""


class Feeder:
    """The hooks, with what they share in this process: a pool for each device, made for the first batch on it."""

    def __init__(
        self, targets: Mapping[str, Callable[..., Any]], onlookers: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.utils.common import is_pin_memory_available

        self._context = runtime_context
        self._may_pin: Callable[[Any], bool] = is_pin_memory_available
        self._targets = targets
        self._onlookers = onlookers
        known = (onlookers or {}).items()
        self._methods = [(target.removeprefix(BATCH + "."), one) for target, one in known if target.startswith(BATCH)]
        self._sample = fed(targets[SAMPLE], COLUMNS) if SAMPLE in targets else None
        self._write = fed(targets[WRITE], (POINTERS,)) if WRITE in targets else None
        self._allocate = (
            fed(
                targets[ALLOCATE],
                (*LENGTHS, ROWS),
                ("prefix_tensors", "req_pool_indices"),
                dict.fromkeys(LENGTHS, ROWS),
            )
            if ALLOCATE in targets
            else None
        )
        self._prepare = (
            fed(targets[PREPARE], (SEQUENCE, ORIGINAL), ("seq_lens", "orig_seq_lens"), {ORIGINAL: "out_cache_loc"})
            if PREPARE in targets
            else None
        )
        self._lock = threading.Lock()
        self._pools: dict[torch.device, StagingPool | None] = {}
        self._by_name: dict[Any, StagingPool | None] = {}
        self._metrics: dict[StagingPool, Metrics] = {}
        self._noted: set[tuple[str, type]] = set()

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """By target, the functions that are called instead, with the original as first argument."""
        hooks = {
            SAMPLE: self.from_schedule_batch,
            WRITE: self.write_cache_indices,
            ALLOCATE: self.alloc_for_extend,
            PREPARE: self.prepare_for_extend,
        }
        return {target: hooks[target] for target in self._targets}

    # ------------------------------------------------------------------ the hooks

    def prepare_for_extend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Remember the batch for the length of the call, with its lengths."""
        prefill = Prefill(args[0], self._sample is not None)
        token = _preparing.set(prefill)
        try:
            if self._prepare is None or not self._is_plain(PREPARE, original, args):
                return original(*args, **kwargs)

            def feed(name: str, own: Callable[[], torch.Tensor], seq_lens: Any, orig_seq_lens: Any) -> Any:
                if name == ORIGINAL:  # after the allocation
                    return _or_own(prefill.take(name), own)
                prefill.columns[ORIGINAL] = orig_seq_lens
                if not self._may_come_late(prefill.batch):
                    return own()
                prefill.columns[SEQUENCE] = seq_lens
                prefill.own_seq_lens = own
                return None

            return self._prepare(*args, feed=feed, **kwargs)
        finally:
            _preparing.reset(token)
            prefill.settle()  # the allocation has not come to it

    def alloc_for_extend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upload lengths, rows and pointers, and the sampling columns of the batch that is being prepared with them."""
        if self._allocate is None or not self._is_plain(ALLOCATE, original, args):
            return original(*args, **kwargs)
        prefill = _preparing.get()
        token = None
        if prefill is None or prefill.batch is not args[0] or prefill.tried:
            prefill = Prefill(args[0], False)  # nothing is known of it, or this is a second try with other rows
            token = _preparing.set(prefill)

        def feed(name: str, own: Callable[[], torch.Tensor], prefixes: Any, rows: Any) -> Any:
            if name == ROWS:  # the first of them
                batch = prefill.batch
                prefill.columns |= {ROWS: rows, LENGTHS[0]: batch.prefix_lens, LENGTHS[1]: batch.extend_lens}
                same_device = batch.req_to_token_pool.device == batch.device
                self._stage(prefill, batch.device, prefixes if self._write is not None and same_device else None)
                prefill.settle()
            return own() if prefill.upload is None else prefill.upload[name]

        try:
            return self._allocate(*args, feed=feed, **kwargs)
        finally:
            if token is not None:
                _preparing.reset(token)

    def write_cache_indices(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give the pointers that `alloc_for_extend` uploaded; where it is not hooked, upload what is known."""
        if self._write is None or not self._is_plain(WRITE, original, args):
            return original(*args, **kwargs)
        prefixes, table = args[-2:]

        def feed(name: str, own: Callable[[], torch.Tensor]) -> torch.Tensor:
            prefill = _preparing.get() or Prefill(None, False)
            if prefill.pointers_of is not prefixes:
                if prefill.upload is not None or getattr(prefill.batch, "device", table.device) != table.device:
                    prefill = Prefill(None, False)  # the pointers alone
                self._stage(prefill, table.device, prefixes)
            return _or_own(prefill.take(name), own)

        return self._write(*args, feed=feed, **kwargs)

    def from_schedule_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give the columns that were uploaded for this batch, or upload them now."""
        if self._sample is None or not self._is_plain(SAMPLE, original, args):
            return original(*args, **kwargs)
        upload = self._for_sampling(args[1])
        if upload is None:
            return original(*args, **kwargs)
        return self._sample(*args, feed=lambda name, own: upload[name], **kwargs)

    def _is_plain(self, target: str, original: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this is SGLang's own call of its own function, and not another plugin's of something else."""
        known = self._targets[target]
        if original is known and len(args) == known.__code__.co_argcount:
            return True
        self._note(_own_way(target), TypeError("it is called in an unknown way, or hooked by another plugin as well"))
        return False

    def _may_come_late(self, batch: Any) -> bool:
        """Whether nobody looks at `batch.seq_lens` before our `alloc_for_extend` gives it: who could is known."""
        if self._allocate is None or self._onlookers is None:
            return False
        called = self._targets[PREPARE].__globals__["alloc_for_extend"]
        kind = type(batch)
        return (
            all(getattr(kind, name, None) is known for name, known in self._methods)
            and self._targets[ALLOCATE].__globals__["_prefix_kv_indices"] is self._onlookers[PREFIX]
            and getattr(called, "__wrapped__", None) is self._targets[ALLOCATE]  # nobody else's hook is around it
        )

    # ------------------------------------------------------------------ what they give

    def _stage(self, prefill: Prefill, device: Any, prefixes: Sequence[torch.Tensor] | None) -> None:
        """The one upload of a prefill, tried once: what is known of it, with the sampling columns and the pointers."""
        if prefill.tried:
            return
        prefill.tried = True
        try:
            pool = self._pool(device)
            if pool is None:
                return
            sampling = self._sampling(prefill.batch) if prefill.with_sampling else None
            columns: dict[str, list[Any]] = {**(sampling or {}), **prefill.columns}
            if prefixes is not None:
                columns[POINTERS] = [prefix.data_ptr() for prefix in prefixes]
            prefill.upload = self._upload(pool, columns)
            prefill.pool, prefill.sampling, prefill.pointers_of = pool, sampling, prefixes
        except Exception as error:
            self._note("a prefill goes SGLang's own way", error)

    def _for_sampling(self, batch: Any) -> Upload | None:
        if not batch.reqs:  # an idle batch has nothing to upload
            return None
        prefill = _preparing.get()
        try:
            pool = self._pool(batch.device)
            if pool is None:
                return None
            if prefill is not None and prefill.tried:
                if prefill.upload is None:
                    return None
                sampling, prefill.sampling = prefill.sampling, None  # nobody else may get the same tensors
                # Read again: nobody can know when a parameter changes.
                if prefill.pool is pool and sampling == self._sampling(batch):
                    prefill.upload.wait()  # this may be another stream
                    return prefill.upload
            return self._upload(pool, self._sampling(batch))
        except Exception as error:
            self._note(_own_way(SAMPLE), error)
            return None

    def _sampling(self, batch: Any) -> dict[str, list[Any]]:
        params = [request.sampling_params for request in batch.reqs]
        columns: dict[str, list[Any]] = {
            "temperatures": [one.temperature for one in params],
            "top_ps": [one.top_p for one in params],
            "top_ks": [one.top_k for one in params],
            "min_ps": [one.min_p for one in params],
        }
        if self._context.get_exec().deterministic.enable_deterministic_inference:
            seeds = [one.sampling_seed for one in params]
            columns["sampling_seed"] = [DEFAULT_SEED if seed is None else seed for seed in seeds]
        return columns  # else SGLang has no seeds, and does not look at them

    def _upload(self, pool: StagingPool, columns: Mapping[str, list[Any]]) -> Upload:
        layout, pack = _layout(tuple(columns))
        (rows,) = {*map(len, columns.values())}  # one length, or an error: map() would stop at the shortest
        with pool.lease(layout, rows=rows) as lease:
            try:
                records = b"".join(map(pack, *columns.values()))  # half the time of a column at a time
            except (struct.error, OverflowError):
                for name, values in columns.items():
                    lease[name] = values  # says which value does not fit
            else:
                lease.write_records(records, layout)
            upload = lease.upload()
        if pool in self._metrics:
            try:
                self._metrics[pool].update()
            except Exception as error:  # a full disk, say
                del self._metrics[pool]
                self._note("no metrics", error)
        return upload

    # ------------------------------------------------------------------ pools

    def _pool(self, device: Any) -> StagingPool | None:
        """The pool for this device, made for the first batch: SGLang loads plugins before it has chosen its GPU."""
        # SGLang says "cuda", which is whichever is current.
        name = torch.cuda.current_device() if device == "cuda" else device
        try:
            return self._by_name[name]
        except KeyError:
            pass
        resolved = torch.device(device)
        if resolved.type == "cuda" and resolved.index is None:
            name = torch.cuda.current_device()
            resolved = torch.device("cuda", name)
        self._by_name[name] = pool = self._pool_on(resolved, device)
        return pool

    def _pool_on(self, resolved: torch.device, device: Any) -> StagingPool | None:
        """The same for the device itself, which may go by several names; `device` is SGLang's."""
        try:
            return self._pools[resolved]
        except KeyError:
            pass
        with self._lock:
            if resolved not in self._pools:
                self._pools[resolved] = None  # not tried again if it fails
                self._pools[resolved] = pool = StagingPool(
                    resolved,
                    timeout=0,  # a scheduler does not wait: without a free slot, SGLang's own way is taken
                    memory="auto" if self._may_pin(device) else "pageable",
                    name=self._name(),
                )
                try:
                    self._watch(pool)
                except Exception as error:
                    self._note("no metrics", error)
            return self._pools[resolved]

    def _name(self) -> str:
        """`sglang` with the ranks of this process, so that each has series of its own among the metrics."""
        name = "sglang"
        for rank in ("dp_rank", "pp_rank", "tp_rank"):
            try:
                value = getattr(self._context.get_parallel(), rank)
            except (AttributeError, RuntimeError, ValueError):
                continue  # not a process with ranks
            name += "" if value is None else f"-{rank[:2]}{value}"
        return name

    def _watch(self, pool: StagingPool) -> None:
        if self._context.get_observability().enable_metrics:
            self._metrics[pool] = Metrics(pool)

    def _note(self, what: str, error: Exception) -> None:
        """Say why SGLang's own way is taken, once for each kind of reason."""
        if (what, type(error)) not in self._noted:
            self._noted.add((what, type(error)))
            log.warning("staging: %s: %s: %s", what, type(error).__name__, error)


class Metrics:
    """The numbers of a pool as metrics in the files that SGLang's `/metrics` is made from.

    SGLang runs prometheus_client in its multiprocess mode, where nobody would see a collector of the scheduler's, only
    what the scheduler sets. The families are those of `staging.metrics`, without the histogram of waits: these pools
    never wait.
    """

    def __init__(self, pool: StagingPool) -> None:
        from staging.metrics import FAMILIES

        self._pool = pool
        self._families = FAMILIES
        self._series = _series()
        self._last: PoolStats | None = None
        self._due = 0.0

    def update(self) -> None:
        """Set them, unless that was done within the last second."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _METRICS_EVERY_S
        stats = self._pool.stats()
        for family in self._families:
            metric = self._series[family.name]
            for value, key in family.keys.items():
                labels = {"pool": self._pool.name, "device": str(self._pool.device)}
                if family.label:
                    labels[family.label] = value
                number = getattr(stats, key)
                scale = 1e9 if family.seconds else 1
                if family.is_counter:
                    before = getattr(self._last, key) if self._last is not None else 0
                    metric.labels(**labels).inc((number - before) / scale)
                else:
                    metric.labels(**labels).set(number / scale)
        self._last = stats


@functools.cache
def _series() -> dict[str, Any]:
    """The metrics of this process by name, in prometheus_client's own registry."""
    from prometheus_client import Counter, Gauge

    from staging.metrics import FAMILIES

    series: dict[str, Any] = {}
    for family in FAMILIES:
        labels = ["pool", "device", *([family.label] if family.label else [])]
        series[family.name] = (
            Counter(family.name, family.help, labels)
            if family.is_counter
            else Gauge(family.name, family.help, labels, multiprocess_mode="mostrecent")
        )
    return series


def fed(
    function: Callable[..., Any],
    names: Sequence[str],
    given: Sequence[str] = (),
    late: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., Any]:
    """`function` once more, from its own source, with a keyword `feed`.

    Where an assignment to one of `names` uploads something, `….to(…)`, the copy has `feed(name, lambda: ….to(…))`,
    which is also handed the variables `given`. The assignments to the keys of `late` come right behind the one to the
    variable that they are mapped to: the same where nobody reads or changes what is in them before. It has the same
    globals, and its tracebacks show the same lines. Raises `ValueError` unless there is exactly one upload for each
    name, and one such assignment.
    """
    module = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef), "a plain function"
    definition.decorator_list.clear()
    definition.args.kwonlyargs.append(ast.arg("feed"))
    definition.args.kw_defaults.append(None)
    uploads = _Uploads(names, given)
    uploads.visit(definition)
    if sorted(uploads.found) != sorted(names):
        raise ValueError(f"{function.__qualname__} uploads {uploads.found}, not {list(names)}")
    for name, leader in reversed([*late.items()]):
        (moved,) = (statement for statement in definition.body if name in _assigned(statement))
        definition.body.remove(moved)
        (place,) = (at for at, statement in enumerate(definition.body) if leader in _assigned(statement))
        definition.body.insert(place + 1, moved)
    ast.fix_missing_locations(module)
    code = function.__code__
    ast.increment_lineno(module, code.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    # Annotations stay text, here as there: compile() takes that over from this module.
    exec(compile(module, code.co_filename, "exec"), function.__globals__, scope)
    copy: Callable[..., Any] = scope[function.__name__]
    return copy


def _assigned(statement: ast.stmt) -> list[str]:
    """The variables that a statement assigns, if it is an assignment."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]


class _Uploads(ast.NodeTransformer):
    """Wraps `….to(…)` in the value of an assignment to one of `names`."""

    def __init__(self, names: Sequence[str], given: Sequence[str]) -> None:
        self.found: list[str] = []
        self._names = names
        self._given = given
        self._name = ""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self._names:
            self._name = target.id
            node.value = self.visit(node.value)
            self._name = ""
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (self._name and isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
            return self.generic_visit(node)
        self.found.append(self._name)
        own = ast.Lambda(ast.arguments([], [], None, [], [], None, []), node)
        given = [ast.Name(name, ast.Load()) for name in self._given]
        call = ast.Call(ast.Name("feed", ast.Load()), [ast.Constant(self._name), own, *given], [])
        return ast.copy_location(call, node)


def fingerprint(function: Callable[..., Any]) -> str:
    """Of the source of this very function; of what it wraps, if anything, it says nothing."""
    return hashlib.sha256(inspect.getsource(function.__code__).encode()).hexdigest()[:16]


def onlookers() -> dict[str, Callable[..., Any]] | None:
    """The functions of `ONLOOKERS`, if all are those that are known."""
    found = {target: function for target in ONLOOKERS if (function := _known(target, "seq_lens")) is not None}
    return found if len(found) == len(ONLOOKERS) else None


def _known(target: str, what: str = "") -> Callable[..., Any] | None:
    """The function at this path, if its source is the one that is known. Else `what`, or itself, is left alone."""
    path, name = target.rsplit(".", 1)
    left = f"{what or target} is left as it is"
    known = (KNOWN | ONLOOKERS)[target]
    try:
        attribute = inspect.getattr_static(pkgutil.resolve_name(path), name)
        function: Callable[..., Any] = getattr(attribute, "__func__", attribute)
        found = fingerprint(function)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        log.warning("staging: %s: %s cannot be read (%s: %s)", left, target, type(error).__name__, error)
        return None
    if found != known:
        log.warning(
            "staging: %s: the source of %s (%s) is not that of SGLang 0.5.23 (%s), or another plugin has replaced it",
            left,
            target,
            found,
            known,
        )
        return None
    return function


def _own_way(target: str) -> str:
    return f"{target} goes SGLang's own way"


def _or_own(given: torch.Tensor | None, own: Callable[[], torch.Tensor]) -> torch.Tensor:
    return own() if given is None else given


@functools.cache
def _layout(names: tuple[str, ...]) -> tuple[Layout, Callable[..., bytes]]:
    """The layout of these columns, and what makes its records from one value of each."""
    layout = Layout([_FIELDS[name] for name in names], "SGLang's " + ", ".join(names))
    return layout, struct.Struct("<" + "".join(DTYPES[field.dtype][1] for field in layout.fields)).pack
