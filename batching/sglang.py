"""A plugin for SGLang 0.5.23: `from_schedule_batch` and `write_cache_indices`, its own, are fed by a `StagingPool`.

SGLang finds `plugin` by the entry point group `sglang.srt.plugins`. Nothing of SGLang is rewritten: each of the two
functions is compiled once more from its own source, with the places where it pins and copies a list changed to ask for
the tensor first. Everything else in them, with every check, flag and optional feature, is SGLang's code as it stands.

A prefill batch makes one upload: `write_cache_indices` needs the prefix pointers in the middle of `prepare_for_extend`
and takes the sampling columns along, `from_schedule_batch` finds them there at its end. Any other caller of
`from_schedule_batch` uploads the columns alone. Whatever goes wrong here, SGLang's own way is taken.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import hashlib
import inspect
import logging
import operator
import os
import pkgutil
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from batching.params import DEFAULT_SEED, SAMPLING
from batching.stage import CACHE
from staging import Layout, StagingPool, Upload
from staging.stats import PoolStats

log = logging.getLogger("batching")

SWITCH = "STAGING_SGLANG"
"""The environment variable that turns the plugin off: 0. Read once, when SGLang loads its plugins."""

SAMPLE = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
WRITE = "sglang.srt.mem_cache.allocation.write_cache_indices"
PREPARE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
KNOWN = {SAMPLE: "48352e06affec043", WRITE: "8ffefc8b52e60fa1", PREPARE: "e7ca2d0e335a570e"}
"""The functions that are hooked, and the fingerprints of the sources that this was written for: SGLang 0.5.23."""

COLUMNS = tuple(field.name for field in SAMPLING.fields)
POINTERS = "prefix_pointers"

Feed = Callable[[str, Callable[[], torch.Tensor]], torch.Tensor]
"""Asked with a column's name and SGLang's own upload of it, which is the answer where there is no other."""

_FIELDS = {field.name: field for field in (*SAMPLING.fields, *CACHE.fields)}
_VALUES = operator.attrgetter("temperature", "top_p", "top_k", "min_p", "sampling_seed")
_METRICS_EVERY_S = 1.0


def plugin() -> None:
    """What SGLang calls: registers a hook for each function whose source is the one that is known."""
    if os.environ.get(SWITCH) == "0":
        log.info("staging: %s=0, SGLang is left as it is", SWITCH)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    feeder = Feeder({target: function for target in KNOWN if (function := _known(target)) is not None})
    for target, hook in feeder.hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)
        log.info("staging: hooks %s", target)


@attrs.define(eq=False)
class Prefill:
    """One `prepare_for_extend` in progress, and what was uploaded in it. It ends with the call, also by an error."""

    batch: Any
    values: list[Any] | None = None
    """The sampling values that were uploaded, in the order of the requests."""
    upload: Upload | None = None
    pool: StagingPool | None = None


_preparing: contextvars.ContextVar[Prefill | None] = contextvars.ContextVar("staging_prefill", default=None)
"""Of this thread. `write_cache_indices` is not told for which batch it is called."""


class Feeder:
    """The hooks, with what they share in this process: a pool for each device, made for the first batch on it."""

    def __init__(self, targets: Mapping[str, Callable[..., Any]]) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.utils.common import is_pin_memory_available

        self._context = runtime_context
        self._may_pin: Callable[[Any], bool] = is_pin_memory_available
        self._targets = targets
        self._sample = fed(targets[SAMPLE], COLUMNS) if SAMPLE in targets else None
        self._write = fed(targets[WRITE], (POINTERS,)) if WRITE in targets else None
        self._lock = threading.Lock()
        self._pools: dict[torch.device, StagingPool | None] = {}
        self._metrics: dict[StagingPool, Metrics] = {}
        self._noted: set[tuple[str, type]] = set()

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """By target, the functions that are called instead, with the original as first argument."""
        hooks = {SAMPLE: self.from_schedule_batch, WRITE: self.write_cache_indices, PREPARE: self.prepare_for_extend}
        return {target: hooks[target] for target in self._targets}

    # ------------------------------------------------------------------ the hooks

    def prepare_for_extend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Remember the batch for the length of the call."""
        token = _preparing.set(Prefill(args[0]))
        try:
            return original(*args, **kwargs)
        finally:
            _preparing.reset(token)

    def write_cache_indices(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upload the prefix pointers, and the sampling columns of the batch that is being prepared along with them."""
        if self._write is None or not self._is_plain(WRITE, original, args):
            return original(*args, **kwargs)
        prefixes, table = args[-2:]

        def feed(name: str, own: Callable[[], torch.Tensor]) -> torch.Tensor:
            upload = self._with_pointers(prefixes, table.device)
            return own() if upload is None else upload[name]

        return self._write(*args, feed=feed, **kwargs)

    def from_schedule_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give the columns that `write_cache_indices` uploaded for this batch, or upload them now."""
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

    # ------------------------------------------------------------------ what they give

    def _with_pointers(self, prefixes: Sequence[torch.Tensor], device: Any) -> Upload | None:
        prefill = _preparing.get()
        values: list[Any] | None = None
        upload = None
        try:
            pool = self._pool(device)
            if pool is not None:
                columns: dict[str, Sequence[Any]] = {POINTERS: [prefix.data_ptr() for prefix in prefixes]}
                if prefill is not None and self._sample is not None:
                    values = _values(prefill.batch)
                    columns = {**self._columns(values), **columns}
                upload = self._upload(pool, columns)
                if prefill is not None and values is not None:
                    prefill.values, prefill.upload, prefill.pool = values, upload, pool
        except Exception as error:
            self._note(_own_way(WRITE), error)
        return upload

    def _for_sampling(self, batch: Any) -> Upload | None:
        prefill = _preparing.get()
        try:
            pool = self._pool(batch.device)
            if pool is None or not batch.reqs:  # an idle batch has nothing to upload
                return None
            values = _values(batch)
            if prefill is not None and prefill.pool is pool:
                upload, prefill.upload = prefill.upload, None  # nobody else may get the same tensors
                if upload is not None and prefill.values == values:  # nobody can know when a parameter changes
                    upload.wait()  # this may be another stream
                    return upload
            return self._upload(pool, self._columns(values))
        except Exception as error:
            self._note(_own_way(SAMPLE), error)
            return None

    def _columns(self, values: list[Any]) -> dict[str, Sequence[Any]]:
        columns: dict[str, Sequence[Any]] = dict(zip(COLUMNS, zip(*values, strict=True), strict=True))
        if self._context.get_exec().deterministic.enable_deterministic_inference:
            columns[COLUMNS[-1]] = tuple(DEFAULT_SEED if seed is None else seed for seed in columns[COLUMNS[-1]])
        else:
            del columns[COLUMNS[-1]]  # SGLang then has no seeds, and does not look at them
        return columns

    def _upload(self, pool: StagingPool, columns: Mapping[str, Sequence[Any]]) -> Upload:
        with pool.lease(_layout(tuple(columns)), rows=len(next(iter(columns.values())))) as lease:
            for name, values in columns.items():
                lease[name] = values
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
        resolved = torch.device(device)
        if resolved.type == "cuda" and resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
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


def fed(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`function` once more, from its own source, with a keyword `feed`.

    Where an assignment to one of `names` uploads something, `….to(…)`, the copy has `feed(name, lambda: ….to(…))`.
    It has the same globals, and its tracebacks show the same lines. Raises `ValueError` unless there is exactly one
    upload for each name.
    """
    module = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    definition = module.body[0]
    assert isinstance(definition, ast.FunctionDef), "a plain function"
    definition.decorator_list.clear()
    definition.args.kwonlyargs.append(ast.arg("feed"))
    definition.args.kw_defaults.append(None)
    uploads = _Uploads(names)
    uploads.visit(definition)
    if sorted(uploads.found) != sorted(names):
        raise ValueError(f"{function.__qualname__} uploads {uploads.found}, not {list(names)}")
    ast.fix_missing_locations(module)
    code = function.__code__
    ast.increment_lineno(module, code.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    # Annotations stay text, here as there: compile() takes that over from this module.
    exec(compile(module, code.co_filename, "exec"), function.__globals__, scope)
    copy: Callable[..., Any] = scope[function.__name__]
    return copy


class _Uploads(ast.NodeTransformer):
    """Wraps `….to(…)` in the value of an assignment to one of `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.found: list[str] = []
        self._names = names
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
        call = ast.Call(ast.Name("feed", ast.Load()), [ast.Constant(self._name), own], [])
        return ast.copy_location(call, node)


def fingerprint(function: Callable[..., Any]) -> str:
    """Of the source of this very function; of what it wraps, if anything, it says nothing."""
    return hashlib.sha256(inspect.getsource(function.__code__).encode()).hexdigest()[:16]


def _known(target: str) -> Callable[..., Any] | None:
    """The function at this path, if its source is the one that is known."""
    path, name = target.rsplit(".", 1)
    try:
        attribute = inspect.getattr_static(pkgutil.resolve_name(path), name)
        function: Callable[..., Any] = getattr(attribute, "__func__", attribute)
        found = fingerprint(function)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        log.warning("staging: %s is left as it is: it cannot be read (%s: %s)", target, type(error).__name__, error)
        return None
    if found != KNOWN[target]:
        log.warning(
            "staging: %s is left as it is: its source (%s) is not that of SGLang 0.5.23 (%s), or another plugin has "
            "replaced it",
            target,
            found,
            KNOWN[target],
        )
        return None
    return function


def _own_way(target: str) -> str:
    return f"{target} goes SGLang's own way"


def _values(batch: Any) -> list[Any]:
    return [_VALUES(request.sampling_params) for request in batch.reqs]


@functools.cache
def _layout(names: tuple[str, ...]) -> Layout:
    return Layout([_FIELDS[name] for name in names], "SGLang's " + ", ".join(names))
