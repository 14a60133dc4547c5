"""SGLang's own code without its heavy dependencies: the wheel, stubs for what it imports and does not need here, and
the parts of its scheduler that prepare a batch.

    pip install --no-deps sglang==0.5.23 && pip install dill msgspec orjson

Everything that prepares a batch is real: `ScheduleBatch`, `Req`, `SamplingParams`, `SamplingBatchInfo`, penalties,
watermarks, logit processors, allocators, `write_cache_indices` and its kernel, the hook registry, the configuration.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSION = "0.5.23"
VOCABULARY = 97
NEEDED = ("dill", "msgspec", "orjson")

MODULES = (
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.runtime_context",
    "sglang.srt.sampling.custom_logit_processor",
    "sglang.srt.sampling.sampling_batch_info",
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.speculative.spec_info",
    "sglang.srt.utils.common",
)
"""What the tests use of SGLang."""

STUBS = {
    "IPython": "shows images in notebooks",
    "PIL": "images of multimodal requests",
    "psutil": "free memory of the machine",
    "pybase64": "images and audio in requests",
    "pydantic": "the HTTP server's messages, KV events",
    "pydantic_core": "the HTTP server's messages",
    "requests": "downloads of images, the frontend",
    "safetensors": "reading weights",
    "starlette": "the HTTP server's routes",
    "tvm_ffi": "loading compiled kernels",
    "zmq": "messages between processes",
    "sglang.srt.configs": "model configurations: would need transformers; a batch asks for vocab_size and one flag",
    "sglang.srt.layers.quantization": "quantised layers of models: would need compressed_tensors, gguf, transformers",
    "sglang.srt.lora": "LoRA layers and memory: would need transformers",
    "sglang.srt.parser": "reasoning and tool-call parsers: would need openai, xgrammar, transformers",
}
"""What is replaced by modules whose names can be imported, and do nothing; each with what SGLang uses it for. What is
installed is taken as it is, except for SGLang's own parts. `sglang/__init__.py`, which patches transformers and imports
the frontend, is not run."""


def why_not() -> str | None:
    """Why SGLang's code cannot be had here, with the remedy; None if it can."""
    remedy = f"pip install --no-deps sglang=={VERSION} && pip install {' '.join(NEEDED)}"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return f"SGLang is not installed: {remedy}"
    if version != VERSION:
        return f"SGLang {version} is installed, these tests are for {VERSION}: {remedy}"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: {remedy}" if missing else None


@functools.cache
def load() -> types.SimpleNamespace:
    """SGLang's modules, by the last part of their names; imported once, with a configuration published."""
    importlib.import_module("torch._dynamo")  # torch's own imports are to see no stub
    with _stubs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import: what its modules think of this machine
        srt = types.SimpleNamespace(**{path.rpartition(".")[2]: importlib.import_module(path) for path in MODULES})
        srt.runtime_context.get_context().override_server_args(device=DEVICE, attention_backend="triton").install()
    return srt


class Engine:
    """What SGLang's scheduler has to prepare batches with: a table, an allocator, a cache without prefix sharing."""

    def __init__(self, device: str, *, rows: int = 64, context: int = 512, page_size: int = 1) -> None:
        srt = load()
        tokens = rows * context
        self.device = device
        self.table = srt.memory_pool.ReqToTokenPool(rows, context, device, False)
        if page_size == 1:
            self.allocator = srt.allocator.TokenToKVPoolAllocator(tokens, torch.float16, device, None, False)
        else:
            self.allocator = srt.allocator.PagedTokenToKVPoolAllocator(
                tokens, page_size, torch.float16, device, None, False
            )
        self.cache = srt.radix_cache.RadixCache(
            srt.cache_init_params.CacheInitParams(
                disable=True,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
            )
        )
        self.model = types.SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False)

    def batch(self, requests: Sequence[Any]) -> Any:
        """A `ScheduleBatch` of these requests, as `Scheduler` makes it; nothing is prepared yet."""
        srt = load()
        none = srt.spec_info.SpeculativeAlgorithm.NONE
        return srt.schedule_batch.ScheduleBatch.init_new(
            list(requests), self.table, self.allocator, self.cache, self.model, True, none
        )

    def prefill(self, requests: Sequence[Any]) -> Any:
        """The same, prepared for its prefill."""
        batch = self.batch(requests)
        batch.prepare_for_extend()
        return batch


@contextmanager
def server(features: Mapping[str, bool], kernel: bool = True) -> Iterator[None]:
    """SGLang's configuration with these features, and an attention backend with kernels or without."""
    of_exec = load().runtime_context.get_exec()
    seeds = "enable_deterministic_inference"
    others = {name: on for name, on in features.items() if name != seeds}
    with ExitStack() as stack:
        stack.enter_context(of_exec.deterministic.override(**{seeds: features.get(seeds, False)}))
        stack.enter_context(of_exec.features.override(watermark_key="0x2a", watermark_context_window=4, **others))
        stack.enter_context(of_exec.kernel.override(attention_backend="triton" if kernel else "torch_native"))
        yield


def request(rid: str, prefix: int, new: int, *, processor: str | None = None, **values: Any) -> Any:
    """A `Req` whose first `prefix` tokens are to be prefilled by a first chunk, the next `new` by a second one.

    `values`: those of `SamplingParams`, and `return_sampling_mask`, `sampling_logprobs_mode` of `Req`.
    """
    srt = load()
    of_request = {
        name: values.pop(name) for name in ("return_sampling_mask", "sampling_logprobs_mode") if name in values
    }
    params = srt.sampling_params.SamplingParams(**values)
    params.verify(VOCABULARY)
    tokens = array("q", [token % VOCABULARY for token in range(1, prefix + new + 1)])
    made = srt.schedule_batch.Req(
        rid, "", tokens, params, custom_logit_processor=processor, vocab_size=VOCABULARY, **of_request
    )
    made.tokenizer = types.SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)  # for min_new_tokens
    made.refresh_fill_ids()
    made.extend_end = len(tokens)
    return made


def first_chunk(engine: Engine, requests: Sequence[Any], prefixes: Sequence[int]) -> None:
    """Prefill each request's prefix, as chunked prefill does: afterwards it has a row, and its prefix is in it."""
    some = [one for one, prefix in zip(requests, prefixes, strict=True) if prefix]
    for one, prefix in zip(requests, prefixes, strict=True):
        one.extend_end = prefix
    if some:
        engine.prefill(some)
    for one, prefix in zip(requests, prefixes, strict=True):
        one.prefix_len, one.extend_end = prefix, len(one.origin_input_ids)


@contextmanager
def plugged() -> Iterator[Any]:
    """SGLang with the plugin's hooks; yields what the hooks share. Afterwards SGLang is as it was."""
    from batching.sglang import plugin

    srt = load()
    registry = srt.hook_registry.HookRegistry
    registry.reset()
    plugin()
    registry.apply_hooks()
    hooks = [hook for registered in registry._hooks.values() for _, hook, _ in registered]
    feeder = hooks[0].__self__ if hooks else None
    try:
        yield feeder
    finally:
        for target in registry._patched:
            unhook(target)
        registry.reset()
        if feeder is not None:
            for pool in feeder._pools.values():
                if pool is not None:
                    pool.close()


def unhook(target: str) -> None:
    """Put the original back, everywhere where the registry has put its wrapper."""
    srt = load()
    path, name = target.rsplit(".", 1)
    holder = srt.hook_registry.pkgutil.resolve_name(path)
    wrapped = getattr(holder, name)
    inner = getattr(wrapped, "__func__", wrapped)
    is_method_of_class = hasattr(wrapped, "__func__")
    setattr(holder, name, classmethod(inner.__wrapped__) if is_method_of_class else inner.__wrapped__)
    srt.hook_registry._propagate_patch(inner, inner.__wrapped__, holder)


def pool_of(feeder: Any) -> Any:
    """The one pool that the hooks have made."""
    (pool,) = feeder._pools.values()
    return pool


# ---------------------------------------------------------------------- comparing


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two values differ: tensors by kind, shape and bytes, objects by their attributes, numbers also by type."""
    if type(one) is not type(other):
        return [f"{name}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        kinds = [(t.dtype, t.shape, t.device, t.is_inference()) for t in (one, other)]
        if kinds[0] != kinds[1]:
            return [f"{name}: {kinds[0]}, {kinds[1]}"]
        same = torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
        return [] if same else [f"{name}: {one.tolist()}, {other.tolist()}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{name}: {list(one)}, {list(other)}"]
        return [line for key in one for line in differences(one[key], other[key], f"{name}[{key}]")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{name}: {len(one)} and {len(other)} long"]
        return [
            line
            for row, pair in enumerate(zip(one, other, strict=True))
            for line in differences(*pair, f"{name}[{row}]")
        ]
    if isinstance(one, types.SimpleNamespace) or type(one).__module__.startswith("sglang."):
        left, right = ({key: value for key, value in vars(each).items() if key not in _LINKS} for each in (one, other))
        return differences(left, right, name)
    return [] if one == other else [f"{name}: {one!r}, {other!r}"]


_LINKS = ("_batch_ref", "_orchestrator_ref")
"""Weak references back to the batch, which is another one for each of the two."""


# ---------------------------------------------------------------------- stubs


@contextmanager
def _stubs() -> Iterator[None]:
    """While SGLang is being imported. Afterwards no other test finds a stub of something that is not installed."""
    wanted = [name for name in STUBS if name.startswith("sglang.") or importlib.util.find_spec(name) is None]
    finder = _Finder(wanted)
    package = types.ModuleType("sglang")
    spec = importlib.machinery.PathFinder.find_spec("sglang", sys.path)
    assert spec is not None, "why_not() has looked"
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__version__ = VERSION
    sys.modules["sglang"] = package
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.stands_for(name) and not name.startswith("sglang.")]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def stands_for(self, name: str) -> bool:
        return any(name == stub or name.startswith(f"{stub}.") for stub in self._names)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if self.stands_for(name) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return _anything(name)


class _Meta(type):
    """A class of which everything can be asked that modules ask while they are imported."""

    def __getattr__(cls, name: str) -> type:
        return _anything(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), {})
    return _Meta(
        name,
        (),
        {
            "__init__": lambda self, *args, **options: None,
            "__init_subclass__": classmethod(lambda cls, **options: None),
            "__call__": lambda self, *args, **options: args[0] if args else self,  # also as a decorator
        },
    )
