"""Which kernels a model gets on which device."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import QUERY_BLOCK, XlaAttention
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe.experts import XlaExperts, apply_experts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tbo_jax.moe.tpu_experts import TpuExperts
from tbo_jax.schedule.model_step import read_shape
from tbo_jax.step.kernels import (
    Kernels,
    TrainingKernels,
    attention_shape,
    choose_kernels,
    choose_training_kernels,
    expert_shape,
)

SPARSE = read_shape("qwen3-30b-a3b", 1)
SHAPE = attention_shape(SPARSE)
EXPERTS = expert_shape(SPARSE)
BY_XLA = Kernels(XlaAttention(SHAPE), XlaExperts(EXPERTS))
ON_GPU = Kernels(GpuAttention(SHAPE), GpuExperts(EXPERTS))
# Of fewer columns where tensor cores read registers.
ON_AMPERE = Kernels(GpuAttention(SHAPE), GpuExperts(EXPERTS, narrow=True))


def device(platform: str, **attributes: Any) -> Any:
    return SimpleNamespace(platform=platform, **attributes)


def with_shape(**sizes: Any) -> DecoderConfig:
    return dataclasses.replace(SPARSE, **sizes)


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (device("gpu", compute_capability="9.0"), ON_GPU),
        (device("gpu", compute_capability="10.0"), ON_GPU),
        (device("gpu", compute_capability="8.0"), ON_AMPERE),
        (device("gpu", compute_capability="8.9"), ON_AMPERE),
        (device("gpu", compute_capability="12.0"), ON_AMPERE),
        (device("cuda"), ON_GPU),  # described, not there
        (device("gpu", compute_capability="7.5"), BY_XLA),
        (device("gpu", compute_capability="gfx942"), BY_XLA),
        (device("rocm"), BY_XLA),
    ],
    ids=[
        "Hopper",
        "Blackwell",
        "Ampere",
        "Ada",
        "RTX Blackwell",
        "described",
        "Turing",
        "ROCm as gpu",
        "ROCm",
    ],
)
def test_by_device(on: Any, expected: Kernels) -> None:
    assert choose_kernels(on, SPARSE) == expected


def test_on_cpu_the_experts_are_those_of_xla() -> None:
    expected = Kernels(CpuAttention(SHAPE), XlaExperts(EXPERTS))
    assert choose_kernels(jax.devices()[0], SPARSE) == expected


def test_the_query_block_fills_the_rows_of_a_program() -> None:
    for group, expected in ((1, 64), (3, 16), (8, 8), (64, 1)):
        kernel = GpuAttention(AttentionShape(2 * group, 2, 128, jnp.bfloat16))
        assert kernel.query_block == expected


@pytest.mark.parametrize(
    ("sizes", "attention", "moe", "reason"),
    [
        (dict(head_dim=100), "xla", "gpu", "GPU kernel for attention is not used: head size 100"),
        (dict(expert_intermediate_size=100), "gpu", "xla", "for experts is not used: expert width"),
        (dict(hidden_size=2000), "gpu", "xla", "for experts is not used: hidden size 2000"),
    ],
)
def test_a_shape_that_a_kernel_does_not_take(
    sizes: dict[str, int], attention: str, moe: str, reason: str, caplog: Any
) -> None:
    """It falls back alone, with one warning that says why."""
    with caplog.at_level(logging.WARNING, "tbo_jax.step.kernels"):
        found = [
            choose_kernels(device("gpu", compute_capability="9.0"), with_shape(**sizes))
            for _ in range(2)
        ]
    (record,) = caplog.records
    assert reason in record.getMessage()
    use = {"gpu": ON_GPU, "xla": BY_XLA}
    assert [type(kernels.attention) for kernels in found] == [type(use[attention].attention)] * 2
    assert [type(kernels.experts) for kernels in found] == [type(use[moe].experts)] * 2


def test_a_dense_model_asks_for_no_experts(caplog: Any) -> None:
    config = with_shape(num_experts=0, expert_intermediate_size=0, dtype=jnp.float32)
    with caplog.at_level(logging.WARNING, "tbo_jax.step.kernels"):
        chosen = choose_kernels(device("cuda"), config)
    assert chosen.experts == XlaExperts(expert_shape(config))
    assert chosen.attention == GpuAttention(attention_shape(config))
    assert not caplog.records


ON_TPU = Kernels(TpuAttention(SHAPE), TpuExperts(EXPERTS))


@pytest.mark.parametrize(
    ("sizes", "attention", "moe", "reasons"),
    [
        ({}, ON_TPU, ON_TPU, ()),
        (dict(head_dim=64), BY_XLA, ON_TPU, ("TPU kernel for attention is not used: head",)),
        (
            dict(hidden_size=2000),
            ON_TPU,
            BY_XLA,
            ("TPU kernel for experts is not used: hidden",),
        ),
        (dict(dtype=jnp.float32), BY_XLA, BY_XLA, ("attention", "experts")),
        (
            dict(attention_sinks=True),
            BY_XLA,
            ON_TPU,
            ("TPU kernel for attention is not used: it takes no sinks",),
        ),
    ],
    ids=["taken", "heads", "hidden size", "float32", "sinks"],
)
def test_on_tpu(
    sizes: dict[str, Any], attention: Kernels, moe: Kernels, reasons: tuple[str, ...], caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING, "tbo_jax.step.kernels"):
        found = choose_kernels(device("tpu"), with_shape(**sizes))
    assert type(found.attention) is type(attention.attention)
    assert found.attention.layout == attention.attention.layout
    assert type(found.experts) is type(moe.experts)
    assert len(caplog.records) == len(reasons)
    for record, reason in zip(caplog.records, reasons):
        assert reason in record.getMessage()


def test_batches_with_mask_offsets(caplog: Any) -> None:
    """The GPU kernel reads them; on TPU XLA does, with one warning that names them."""
    with caplog.at_level(logging.WARNING, "tbo_jax.step.kernels"):
        on_gpu, on_cpu, on_tpu, _ = (
            choose_kernels(device(platform), SPARSE, masked=True).attention
            for platform in ("cuda", "cpu", "tpu", "tpu")
        )
    shape = attention_shape(SPARSE, masked=True)
    assert (on_gpu, on_cpu, on_tpu) == (
        GpuAttention(shape),
        CpuAttention(shape),
        XlaAttention(shape),
    )
    (record,) = caplog.records
    assert "TPU kernel for attention is not used: it takes no mask offsets" in record.getMessage()


LATENT = read_shape("deepseek-v3", 1)


@pytest.mark.parametrize(
    ("on", "sizes", "taken", "reason"),
    [
        (device("gpu", compute_capability="9.0"), {}, True, None),
        (device("cuda"), {}, True, None),
        (device("gpu", compute_capability="8.9"), {}, False, "8.9 has too little shared memory"),
        (device("cuda"), dict(head_dim=580), False, "latent keys of 512 + 68 elements are not"),
        (
            device("tpu"),
            {},
            False,
            "TPU kernel for attention is not used: it takes no latent pages",
        ),
    ],
    ids=["Hopper", "described", "little memory", "head size", "TPU"],
)
def test_latent_attention(
    on: Any, sizes: dict[str, int], taken: bool, reason: str | None, caplog: Any
) -> None:
    """Its pages are the same everywhere, whatever reads them."""
    with caplog.at_level(logging.WARNING, "tbo_jax.step.kernels"):
        found = choose_kernels(on, dataclasses.replace(LATENT, **sizes))
    assert found.attention.layout == "latent"
    assert type(found.attention) is (GpuAttention if taken else XlaAttention)
    assert found.attention.query_block == (1 if taken else QUERY_BLOCK)
    warned = [r.getMessage() for r in caplog.records]
    assert len(warned) == (reason is not None)
    assert reason is None or reason in warned[0]


def test_training_takes_kernels_with_a_gradient_where_there_are_some() -> None:
    by_xla = TrainingKernels(dense_causal_attention, apply_experts)
    hopper = device("gpu", compute_capability="9.0")
    on_gpu = TrainingKernels(GpuFlashAttention(SHAPE), DifferentiableGpuExperts(EXPERTS))
    assert choose_training_kernels(hopper, SPARSE) == on_gpu
    assert choose_training_kernels(device("cpu"), SPARSE) == by_xla
    odd = with_shape(head_dim=24, expert_intermediate_size=100)
    assert choose_training_kernels(hopper, odd) == by_xla
