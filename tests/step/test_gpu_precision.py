"""The step of a float32 model, compiled for a GPU: none of its products is rounded to TF32.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU. Run with jax 0.10.2: all pass.
"""

from __future__ import annotations

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

from tbo_jax.checkpoint.load import read_config
from tbo_jax.schedule.model_step import abstract_model
from tbo_jax.step import runner as module
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket
from tests.golden_cases import Golden
from tests.gpu_code import compiled, needs_compiler, no_triton_warnings, target
from tests.models.parity import CACHE

pytestmark = needs_compiler


def rounded(name: str, bucket: Bucket) -> list[str]:
    """What multiplies in TF32: calls of cuBLAS, and kernels."""
    config, _ = read_config(Golden(name).folder, jnp.float32)
    runner = ModelRunner(abstract_model(config, False), CACHE, mesh=target("9.0").mesh())
    with jax.numpy_dtype_promotion("standard"), no_triton_warnings():
        text, kernels = compiled(runner.lower(bucket))
    calls = [line for line in text.splitlines() if 'custom_call_target="__cublas' in line]
    products = re.findall(r" dot\(.*", text)  # in fusions of Triton, or alone
    assert len(calls) + len(products) > 5
    exact = re.compile(
        r'"operand_precision":\["HIGHEST","HIGHEST"\]|operand_precision={highest,highest}'
    )
    found = [line for line in (*calls, *products) if not exact.search(line)]
    return found + [name for name, kernel in kernels.items() if "tf32" in kernel.ptx]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("bucket", [Bucket(16, 4), Bucket(4, 4, True)], ids=["prefill", "decode"])
def test_float32_is_float32(name: str, bucket: Bucket) -> None:
    assert rounded(name, bucket) == []


def test_by_default_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "exact_products", lambda dtype: nullcontext())
    assert rounded("qwen3_moe", Bucket(16, 4))
