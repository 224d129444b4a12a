"""The option that chooses kernels, on devices that need not be there, and JAX without Triton."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tbo_jax import _pallas
from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.engine.config import EngineConfig
from tbo_jax.moe.experts import XlaExperts, apply_experts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.mosaic_experts import MosaicExperts
from tbo_jax.moe.tpu_experts import TpuExperts
from tbo_jax.quantized import gpu_product
from tbo_jax.schedule.model_step import read_shape
from tbo_jax.step.backends import KERNELS, check_kernels, missing
from tbo_jax.step.kernels import (
    ATTENTION,
    EXPERTS,
    Kernels,
    TrainingKernels,
    choose_kernels,
    choose_training_kernels,
    kernels_of,
)
from tests.quantized.arrays import FORMS, random_array

SPARSE = read_shape("qwen3-30b-a3b", 1)


def gpu(capability: str) -> Any:
    return SimpleNamespace(
        platform="gpu", device_kind="NVIDIA thing", compute_capability=capability
    )


TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5e")
CPU = jax.devices()[0]


def types_of(kernels: Kernels) -> tuple[type, type]:
    return type(kernels.attention), type(kernels.experts)


@pytest.mark.parametrize("on", [gpu("9.0"), gpu("10.0"), gpu("8.0"), TPU, CPU])
def test_xla_is_everywhere(on: Any) -> None:
    found = choose_kernels(on, SPARSE, choice="xla")
    # On CPU too XLA computes what there is.
    assert types_of(found) == (CpuAttention if on is CPU else XlaAttention, XlaExperts)
    assert not found.products


def test_triton_and_mosaic_by_name() -> None:
    assert types_of(choose_kernels(gpu("8.0"), SPARSE, choice="triton")) == (
        GpuAttention,
        GpuExperts,
    )
    assert types_of(choose_kernels(TPU, SPARSE, choice="mosaic")) == (TpuAttention, TpuExperts)
    assert missing("mosaic", gpu("9.0")) is None
    assert missing("mosaic", gpu("10.3")) is None


@pytest.mark.parametrize(
    ("choice", "on", "message"),
    [
        ("mosaic", CPU, "kernels is 'mosaic', and cpu has none: expected one of 'auto', 'xla'"),
        (
            "mosaic",
            gpu("8.0"),
            "kernels is 'mosaic', and NVIDIA thing of compute capability 8.0 is neither Hopper "
            r"\(9.0\) nor Blackwell \(10.0 or 10.3\): expected one of 'auto', 'triton', 'xla'",
        ),
        ("mosaic", gpu("12.0"), "capability 12.0 is neither"),
        ("mosaic", gpu("7.5"), "capability 7.5 has none: expected one of 'auto', 'xla'"),
        ("triton", TPU, "kernels is 'triton', and TPU v5e has none: .* 'auto', 'mosaic', 'xla'"),
        ("triton", gpu("gfx942"), "gfx942 has none"),
        ("cuda", CPU, "kernels is 'cuda': expected one of 'auto', 'triton', 'mosaic', 'xla'"),
    ],
)
def test_what_a_device_cannot_is_refused(choice: Any, on: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kernels(choice, on)
    with pytest.raises(ValueError, match=message):
        choose_kernels(on, SPARSE, choice=choice)


def test_without_triton(monkeypatch: Any) -> None:
    monkeypatch.setattr(_pallas, "triton", None)
    with pytest.raises(ValueError, match="JAX .* has no Triton backend of Pallas: expected one of"):
        check_kernels("triton", gpu("9.0"))
    assert types_of(choose_kernels(gpu("9.0"), SPARSE))[1] is MosaicExperts
    assert types_of(choose_kernels(gpu("9.0"), SPARSE, choice="mosaic"))[1] is MosaicExperts
    for capability in ("8.0", "9.0"):
        found = choose_kernels(gpu(capability), SPARSE)
        assert not {type(found.attention), type(found.experts)} & {GpuAttention, GpuExperts}


def test_names_of_kernels_are_of_one_each() -> None:
    """The schedule report finds the work of a kernel by its name."""
    for table in (ATTENTION, EXPERTS):
        assert len(set(kernels_of(table))) == len(kernels_of(table))


@pytest.mark.parametrize("choice", KERNELS)
def test_the_option_of_an_engine(choice: Any) -> None:
    assert EngineConfig(kernels=choice).kernels == choice


def test_another_option_of_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels is 'pallas': expected one of 'auto', 'triton'"):
        EngineConfig(kernels="pallas")  # type: ignore[arg-type]


def test_kernels_of_training() -> None:
    by_xla = TrainingKernels(dense_causal_attention, apply_experts)
    assert choose_training_kernels(gpu("9.0"), SPARSE, "xla") == by_xla
    assert choose_training_kernels(gpu("9.0"), SPARSE, "mosaic") == by_xla  # it has none
    found = choose_training_kernels(gpu("9.0"), SPARSE, "triton")
    assert found == choose_training_kernels(gpu("9.0"), SPARSE) != by_xla
    with pytest.raises(ValueError, match="kernels is 'triton', and .* has none"):
        choose_training_kernels(CPU, SPARSE, "triton")


def test_products_only_where_they_are_wanted() -> None:
    weight = random_array(FORMS["fp8, blocks"], (128, 128))
    assert gpu_product.takes(4, jnp.bfloat16, weight)
    with gpu_product.enabled(False):
        assert not gpu_product.takes(4, jnp.bfloat16, weight)
    assert gpu_product.takes(4, jnp.bfloat16, weight)


WITHOUT = """
    import sys
    sys.modules["jax.experimental.pallas.triton"] = None  # what an import of it finds: nothing
    import jax.experimental.pallas
    if hasattr(jax.experimental.pallas, "triton"):
        del jax.experimental.pallas.triton
    from types import SimpleNamespace
    import tbo_jax
    from tbo_jax import _pallas
    from tbo_jax.engine.llm import LLM
    from tbo_jax.sampling.params import SamplingParams
    from tbo_jax.schedule.model_step import read_shape
    from tbo_jax.step.kernels import choose_kernels
    sys.path.append("benchmarks")
    import gpu  # benchmarks/gpu.py
    assert _pallas.triton is None
    for capability in ("8.0", "9.0", "10.0"):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        found = choose_kernels(device, read_shape("qwen3-30b-a3b", 1))
        print(capability, type(found.attention).__name__, type(found.experts).__name__)
    llm = LLM("examples/kjv-moe", compilation_cache=False, show_progress=False)
    (done,) = llm.generate(["In the beginning"], [SamplingParams(max_new_tokens=4)])
    print(len(done.token_ids))
"""


def test_everything_works_without_triton() -> None:
    """In a process of its own, where it cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *chosen, tokens = done.stdout.split("\n")[:-1]
    assert len(chosen) == 3 and int(tokens) == 4
    assert not any("Gpu" in line for line in chosen)
