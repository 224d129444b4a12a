"""Engines whose keys and values have 8 bits."""

from __future__ import annotations

import numpy as np
import pytest

from tbo_jax import LLM, EngineConfig, SamplingParams
from tests.engine.engines import small_llm
from tests.golden_cases import with_tokenizer

slow = pytest.mark.slow
PROMPTS = [[5, 9, 3, 11, 7] * 7, [8, 2, 6], [4] * 19, [5, 9, 3, 11, 7] * 7 + [1, 2]]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def texts(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def make(tmp_path, name: str, devices: int = 1, mode: str = "off", **options) -> LLM:
    sizes = dict(max_sequences=3, num_pages=48, max_batched_tokens=24, request_options=False)
    options = sizes | options
    return small_llm(with_tokenizer(name, tmp_path), devices, mode, **options)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=slow)])
def test_bytes_are_those_of_the_step(tmp_path, dtype) -> None:
    """And the tokens are alike, whatever runs beside them and whether prefixes are kept."""
    full = make(tmp_path, "llama")
    llm = make(tmp_path, "llama", cache_dtype=dtype)
    runner = llm.engine.runner
    cache = runner._buffer_shapes.cache
    held = sum(a.size * a.dtype.itemsize for layer in cache.pages for a in layer)
    held += sum(a.size * a.dtype.itemsize for layer in cache.factors for a in layer)
    assert llm.statistics["cache_bytes"] == held
    head_dim = runner.config.head_dim
    assert held / full.statistics["cache_bytes"] == (head_dim + 4) / (4 * head_dim)
    together = texts(llm)
    assert texts(llm) == together  # with what the first run left in the cache
    assert [llm.generate([p], GREEDY)[0].token_ids for p in PROMPTS] == together
    of_full = texts(full)
    same = np.mean([a == b for x, y in zip(together, of_full) for a, b in zip(x, y, strict=True)])
    assert same > 0.5, (together, of_full)


@slow
@pytest.mark.parametrize(
    ("name", "devices", "mode", "options"),
    [
        ("qwen3_moe", 4, "on", {}),
        ("deepseek_v3", 2, "on", {}),
        ("llama", 2, "off", dict(tensor_parallel=2)),
        ("llama", 1, "on", dict(scanned=True)),
        ("gpt_oss", 1, "off", dict(speculate=2)),
    ],
)
def test_two_micro_batches_and_the_like_change_nothing(
    tmp_path, name, devices, mode, options
) -> None:
    plain = texts(make(tmp_path, name, cache_dtype="int8"))
    assert texts(make(tmp_path, name, devices, mode, cache_dtype="int8", **options)) == plain


def test_what_is_no_type_of_a_cache() -> None:
    with pytest.raises(ValueError, match=r"cache_dtype is 'int4': expected one of None, 'float8_"):
        EngineConfig(cache_dtype="int4")  # type: ignore[arg-type]
