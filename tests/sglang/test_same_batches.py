"""SGLang's batches with the plugin and without it, from the same requests, equal bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_sglang import DEVICE, VOCABULARY, Engine, differences, first_chunk, load, plugged, pool_of, request, server


def floats(low: float, high: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False, **options)


@st.composite
def requests(draw: st.DrawFn, features: dict[str, bool]) -> dict[str, Any]:
    """What makes a request: every optional feature on and off, those of the server where the server has them on."""
    values: dict[str, Any] = {
        "prefix": draw(st.sampled_from([0, 0, 1, 4, 5, 17])),
        "new": draw(st.sampled_from([1, 2, 4, 9])),
        "temperature": draw(st.one_of(st.sampled_from([0, 0.0, 1e-7, 1e-6, 1, 0.7]), floats(0, 3))),
        "top_p": draw(st.one_of(st.sampled_from([1, 1.0, 0.9]), floats(0, 1, exclude_min=True))),
        "top_k": draw(st.sampled_from([-1, 1, 2, 40, 1024, 1025, (1 << 30) - 1, 1 << 30])),
        "min_p": draw(st.one_of(st.sampled_from([0, 0.0, 0.05, 1]), floats(0, 1))),
        "sampling_seed": draw(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
    }
    optional = {
        "frequency_penalty": st.sampled_from([0.5, -2.0]),
        "presence_penalty": st.sampled_from([0.25, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "min_new_tokens": st.integers(1, 3),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1).map(str), floats(-5, 5), max_size=3),
        "return_sampling_mask": st.booleans(),
        "sampling_logprobs_mode": st.sampled_from(["selected", "support"]),
    }
    if features["enable_custom_logit_processor"]:
        optional["processor"] = st.just("disallowed tokens")
    if features["enable_watermark"]:
        optional["watermark"] = st.sampled_from(
            [{"enabled": True}, {"enabled": False}, {"key": "0x1", "enabled": True}]
        )
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        values[name] = draw(optional[name])
    if "processor" in values:
        values["custom_params"] = {"token_ids": [1, 2]}
    if "min_new_tokens" in values:
        values["max_new_tokens"] = 8
    return values


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    features = {
        name: draw(st.booleans())
        for name in ("enable_deterministic_inference", "enable_custom_logit_processor", "enable_watermark")
    }
    batches = draw(st.lists(st.lists(requests(features), min_size=1, max_size=5), min_size=1, max_size=2))
    return {
        "features": features,
        "page_size": draw(st.sampled_from([1, 4])),
        "kernel": draw(st.booleans()),
        "batches": batches,
        "keep": draw(st.lists(st.integers(0, 9), max_size=6, unique=True)),
        "keep_first": draw(st.booleans()),
        "inference_mode": draw(st.booleans()),
        "in_place": draw(st.booleans()),
    }


def built(number: int, values: dict[str, Any]) -> Any:
    """A request of SGLang's."""
    values = dict(values)
    if values.pop("processor", None):
        values["processor"] = load().custom_logit_processor.DisallowedTokensLogitsProcessor.to_str()
    return request(f"r{number}", values.pop("prefix"), values.pop("new"), **values)


def history(scenario: dict[str, Any]) -> tuple[list[Any], int]:
    """Everything a scheduler does with these batches: prefill, filter, merge; a picture of all state after each step.

    Also how many batches were prepared.
    """
    engine = Engine(DEVICE, rows=16, context=64, page_size=scenario["page_size"])
    pictures: list[Any] = []
    prepared = 0
    running = None
    for values in scenario["batches"]:
        prefixes = [one["prefix"] for one in values]
        made = [built(number, one) for number, one in enumerate(values)]
        first_chunk(engine, made, prefixes)
        prepared += 1 + any(prefixes)
        batch = engine.prefill(made)
        pictures.append(picture(engine, batch))
        if scenario["in_place"]:  # nobody else has these bytes
            for one in (batch.seq_lens, batch.orig_seq_lens, batch.sampling_info.top_ks):
                one.add_(1)
            pictures.append(picture(engine, batch))
        if scenario["keep_first"]:
            keep(batch, scenario["keep"])
        if running is None or not running.reqs:
            running = batch
        elif batch.reqs:
            running.merge_batch(batch)
        pictures.append(picture(engine, running))
    keep(running, scenario["keep"])
    pictures.append(picture(engine, running))
    return pictures, prepared


def keep(batch: Any, indices: list[int]) -> None:
    batch.filter_batch(keep_indices=[index for index in indices if index < len(batch.reqs)])


def picture(engine: Engine, batch: Any) -> dict[str, Any]:
    """All that a forward would read, copied."""
    info = batch.sampling_info
    if len(info) == len(batch.reqs):
        info.update_penalties()  # as before a forward
    orchestrator = info.penalizer_orchestrator
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(info).items()
        if name not in ("penalizer_orchestrator", "custom_params")
    }
    return {
        "sampling_info": state,
        "params": [{k: v for k, v in (one or {}).items() if k != "__req__"} for one in info.custom_params or []],
        "penalties": {kind.__name__: kind_state(one) for kind, one in orchestrator.penalizers.items()},
        "penalized": orchestrator.is_required,
        "table": engine.table.req_to_token.clone(),
        "batch": {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name in OF_BATCH
            if (value := getattr(batch, name)) is not None
        },
    }


OF_BATCH = (
    *("out_cache_loc", "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens"),
    *("prefix_lens", "extend_lens", "prefill_input_ids_cpu"),
)


def kind_state(penalizer: Any) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(penalizer).items()
        if name != "_orchestrator_ref"
    }


@given(scenario=scenarios())
@settings(max_examples=60, deadline=None)
def test_batches_are_the_same_bit_for_bit(srt, scenario):
    """Prefills with and without prefixes, pages of 1 and 4 tokens, all features, filters, merges; one upload each."""
    with server(scenario["features"], scenario["kernel"]), torch.inference_mode(scenario["inference_mode"]):
        expected, _ = history(scenario)
        with plugged() as feeder:
            found, prepared = history(scenario)
            stats = pool_of(feeder).stats()
    assert differences(expected, found) == []
    assert (stats.uploads, feeder._noted) == (prepared, set())
