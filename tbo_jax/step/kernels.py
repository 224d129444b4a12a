"""Which kernel computes what: chosen once, by the platform of the mesh and the model's shape.

A kernel says itself what it does not take (`unsupported`). A shape that no kernel of a platform
takes falls back to XLA, with one warning that says why. A new kernel is a line in a table.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.gpu_mosaic import MosaicAttention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionKernel, AttentionShape
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.attention.rounded import CacheDtype
from tbo_jax.attention.tpu_flash import TpuFlashAttention
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe.experts import XlaExperts, apply_experts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tbo_jax.moe.kernel import ExpertKernel, ExpertShape
from tbo_jax.moe.mosaic_experts import MosaicExperts
from tbo_jax.moe.tpu_experts import TpuExperts
from tbo_jax.moe.tpu_experts_grad import DifferentiableTpuExperts
from tbo_jax.step.backends import Backend, KernelChoice, check_kernels, missing, platform_of

logger = logging.getLogger(__name__)

K = TypeVar("K")

# Of an expert's products that are to be deterministic. For 16 decodes of a model of 8 experts this
# is a third faster than 4 (2 cores), and no slower than sizes that follow the routing.
EQUAL_BLOCK_ROWS = 16

# By platform and backend of Pallas, what "auto" prefers first; "gpu" is one of NVIDIA from Ampere
# on. Triton is first there until a GPU has measured both.
ATTENTION: Mapping[str, Mapping[Backend, type[AttentionKernel]]] = {
    "gpu": {"triton": GpuAttention, "mosaic": MosaicAttention},
    "tpu": {"mosaic": TpuAttention},
}
# What XLA compiles where there is no other.
BY_XLA: Mapping[str, type[XlaAttention]] = {"cpu": CpuAttention}
EXPERTS: Mapping[str, Mapping[Backend, type[ExpertKernel]]] = {
    "gpu": {"triton": GpuExperts, "mosaic": MosaicExperts},
    "tpu": {"mosaic": TpuExperts},
}
# With a gradient, for training. The attention is of whole sequences, without pages.
TRAINING_ATTENTION: Mapping[
    str, Mapping[Backend, type[GpuFlashAttention] | type[TpuFlashAttention]]
] = {
    "gpu": {"triton": GpuFlashAttention},
    "tpu": {"mosaic": TpuFlashAttention},
}
TRAINING_EXPERTS: Mapping[str, Mapping[Backend, type[ExpertKernel]]] = {
    "gpu": {"triton": DifferentiableGpuExperts},
    "tpu": {"mosaic": DifferentiableTpuExperts},
}


def kernels_of(table: Mapping[str, Mapping[Backend, K]]) -> list[K]:
    """The kernels of all platforms and backends."""
    return [kernel for backends in table.values() for kernel in backends.values()]


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program.

    `products` says whether products with quantised matrices may use theirs, which is of Triton,
    where the step runs on a GPU that has it.
    """

    attention: AttentionKernel
    experts: ExpertKernel
    products: bool = True


@dataclass(frozen=True)
class TrainingKernels:
    """The kernels of a training step, differentiable."""

    attention: Callable[..., jax.Array]  # as `dense_causal_attention`
    experts: Callable[..., jax.Array]  # as `apply_experts`


def attention_shape(
    config: DecoderConfig, masked: bool = False, cache_dtype: CacheDtype | None = None
) -> AttentionShape:
    """The attention of a model, or of what a device has of it (`DecoderConfig.of_device`).

    `masked` says whether batches have `mask_offsets`, `cache_dtype` how the cache holds keys and
    values (`CacheConfig`).
    """
    return AttentionShape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        value_dim=None if config.latent is None else config.value_dim,
        sinks=config.attention_sinks,
        masked=masked,
        cache_dtype=cache_dtype,
    )


def expert_shape(config: DecoderConfig, weight_bits: float | None = None) -> ExpertShape:
    """The experts of a model; `weight_bits` as in `ExpertShape`."""
    return ExpertShape(
        config.hidden_size, config.expert_intermediate_size, config.dtype, weight_bits
    )


def choose_kernels(
    device: Any,
    config: DecoderConfig,
    masked: bool = False,
    deterministic: bool = False,
    choice: KernelChoice = "auto",
    cache_dtype: CacheDtype | None = None,
) -> Kernels:
    """The kernels for a model on devices like `device`, which need not be there.

    With `deterministic` those of XLA, so that no token's bits depend on the tokens beside it
    (`check_deterministic`).

    Raises:
        ValueError: the device or this JAX has no kernels of that choice (`check_kernels`).
    """
    check_kernels(choice, device)
    shape, products = attention_shape(config, masked, cache_dtype), choice in ("auto", "triton")
    if deterministic:
        experts = XlaExperts(expert_shape(config), block_rows=EQUAL_BLOCK_ROWS)
        return Kernels(XlaAttention(shape), experts, products)
    attention = _first("attention", ATTENTION, device, choice, shape)
    of_experts = expert_shape(config)
    kind: type[ExpertKernel] | None = None  # a dense model has no use for it
    if config.num_experts:
        kind = _first("experts", EXPERTS, device, choice, of_experts)
    by_xla = BY_XLA.get(platform_of(device), XlaAttention)
    return Kernels(
        (attention or by_xla)(shape),
        (kind or XlaExperts).for_device(of_experts, device),
        products,
    )


def choose_training_kernels(
    device: Any, config: DecoderConfig, choice: KernelChoice = "auto"
) -> TrainingKernels:
    """The kernels to train a model with, on devices like `device`, which need not be there.

    Raises:
        ValueError: the device or this JAX has no kernels of that choice (`check_kernels`).
    """
    check_kernels(choice, device)
    shape, of_experts = attention_shape(config), expert_shape(config)
    attention: Callable[..., jax.Array] = dense_causal_attention
    attend = _first("attention", TRAINING_ATTENTION, device, choice, shape)
    if attend is not None:
        attention = attend(shape)
    experts: Callable[..., jax.Array] = apply_experts
    if config.num_experts:
        kernel = _first("experts", TRAINING_EXPERTS, device, choice, of_experts)
        if kernel is not None:
            experts = kernel.for_device(of_experts, device)
    return TrainingKernels(attention, experts)


def _first(
    what: str,
    table: Mapping[str, Mapping[Backend, Any]],
    device: Any,
    choice: KernelChoice,
    shape: AttentionShape | ExpertShape,
) -> Any:
    """The first kernel of a choice that takes a shape, or None; warns of the reasons, once."""
    platform = platform_of(device)
    reasons: list[str] = []
    for backend, kernel in table.get(platform, {}).items():
        if choice not in ("auto", backend) or missing(backend, device) is not None:
            continue
        reason = kernel.unsupported(shape, device)
        if reason is None:
            return kernel
        reasons.append(reason)
    if reasons:
        _warn(what, platform, "; ".join(dict.fromkeys(reasons)))
    elif choice not in ("auto", "xla"):
        _warn(what, platform, f"there is none of {choice}")
    return None


@functools.cache
def _warn(what: str, platform: str, reason: str) -> None:
    logger.warning("the %s kernel for %s is not used: %s; XLA's own is slower",
                   platform.upper(), what, reason)  # fmt: skip
