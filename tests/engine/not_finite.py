"""Engines whose weights are NaN in a place: what is to come of a load, and what came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.running import TokenEvent
from tests.engine.loads import Load, Result, random_load

BAD = [8, 36, 77, 101, 141]  # tokens whose embedding is NaN: whoever gets one has no next one
EMBEDDING = ("embed_tokens", "embedding")
ERROR = TokenEvent(None, None, "", "error")


@contextmanager
def poisoned(engine: Engine, name: tuple[Any, ...], index: Any) -> Iterator[None]:
    """For as long as it lasts, a part of one of the engine's weights is NaN.

    What it computed before is forgotten. What it computes meanwhile and is NaN it forgets by itself.
    """
    engine.clear_prefix_cache()
    runner = engine.runner
    clean = runner._weights
    state = jax.tree.unflatten(runner._structure, clean)
    place = [path for path, _ in nnx.to_flat_state(state)].index(name)
    values = np.array(clean[place])
    values[index] = np.nan
    runner._weights = list(clean)
    runner._weights[place] = jax.device_put(values, clean[place].sharding)
    try:
        yield
    finally:
        runner._weights = clean


def load_with_bad(rng: np.random.Generator, *, content: bool) -> Load:
    """Some prompts have such a token, and some requests draw one from an even distribution."""
    load = random_load(rng, content=content)
    prompts = [[token for token in prompt if token not in BAD] or [9] for prompt in load.prompts]
    for prompt in prompts[1::3]:
        prompt[int(rng.integers(len(prompt)))] = int(rng.choice(BAD))
    params = []
    for given in load.params:
        hot = SamplingParams(25, temperature=30.0, seed=int(rng.integers(1000)), ignore_eos=True)
        params.append(hot if rng.random() < 0.6 else given)
    return Load(prompts, params, load.add_at)


def until_bad(load: Load, clean: Result) -> list[list[tuple[int | None, str | None]]]:
    """The tokens and ends that are to come: those without NaN, up to its token."""
    expected = []
    for prompt, events in zip(load.prompts, clean.events, strict=True):
        bad = [number for number, event in enumerate(events, 1) if event.token_id in BAD]
        count = 0 if set(prompt) & set(BAD) else bad[0] if bad else len(events)
        kept = [(event.token_id, event.finish_reason) for event in events[:count]]
        if not kept or kept[-1][1] is None:
            kept.append((None, "error"))
        expected.append(kept)
    return expected


def check_until_bad(load: Load, clean: Result, found: Result) -> list[str]:
    """How the requests ended: errors after some tokens, or at once, or neither."""
    tokens = [[(e.token_id, e.finish_reason) for e in events] for events in found.events]
    assert tokens == until_bad(load, clean)
    ends = []
    for index, events in enumerate(found.events):
        assert "".join(event.text for event in events) == found.text[index]
        at_once = "at once" if len(events) == 1 else "later"
        ends.append(at_once if events[-1].finish_reason == "error" else "well")
    return ends
