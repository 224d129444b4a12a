"""Engines on small models, and others with the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tbo_jax import LLM, OverlapConfig
from tbo_jax.engine.engine import Engine


def small_llm(folder, devices=1, mode="off", **options) -> LLM:
    """With few tokens a step and small pages; compiled programs are not kept."""
    small = dict(max_batched_tokens=16, page_size=4, compilation_cache=False)
    return LLM(folder, devices=devices, overlap=OverlapConfig(mode), **small | options)


def like(engine: Engine, **options) -> Engine:
    """Another engine with the same steps, by default with look-ahead."""
    other = Engine(
        engine.runner,
        engine.tokenizer,
        engine.end_of_sequence,
        max_sequences=engine.max_sequences,
        max_context=engine.max_context,
        **options,
    )
    other.warm_up()
    return other


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds; a test in which it never does fails."""
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("nothing came")
