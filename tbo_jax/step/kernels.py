"""Which kernel computes what: chosen once, by the platform of the mesh and the model's shape.

A kernel says itself what it does not take (`unsupported`). A shape that the kernel of a platform
does not take falls back to XLA, with one warning that says why. A new kernel is a line in a table.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tbo_jax.attention.cpu_paged import CpuAttention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionKernel, AttentionShape
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.attention.tpu_paged import TpuAttention
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe.experts import XlaExperts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.kernel import ExpertKernel, ExpertShape
from tbo_jax.moe.tpu_experts import TpuExperts

logger = logging.getLogger(__name__)

# Of an expert's products that are to be deterministic. For 16 decodes of a model of 8 experts this
# is a third faster than 4 (2 cores), and no slower than sizes that follow the routing.
EQUAL_BLOCK_ROWS = 16
OLDEST_GPU = 8.0  # compute capability: bfloat16 tensor cores

# By platform: "gpu" is one of NVIDIA from Ampere on.
ATTENTION: Mapping[str, type[AttentionKernel]] = {
    "cpu": CpuAttention,
    "gpu": GpuAttention,
    "tpu": TpuAttention,
}
EXPERTS: Mapping[str, type[ExpertKernel]] = {"gpu": GpuExperts, "tpu": TpuExperts}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program."""

    attention: AttentionKernel
    experts: ExpertKernel


def attention_shape(config: DecoderConfig, masked: bool = False) -> AttentionShape:
    """The attention of a model, or of what a device has of it (`DecoderConfig.of_device`).

    `masked` says whether batches have `mask_offsets`.
    """
    return AttentionShape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        value_dim=None if config.latent is None else config.value_dim,
        sinks=config.attention_sinks,
        masked=masked,
    )


def expert_shape(config: DecoderConfig, weight_bits: float | None = None) -> ExpertShape:
    """The experts of a model; `weight_bits` as in `ExpertShape`."""
    return ExpertShape(
        config.hidden_size, config.expert_intermediate_size, config.dtype, weight_bits
    )


def choose_kernels(
    device: Any, config: DecoderConfig, masked: bool = False, deterministic: bool = False
) -> Kernels:
    """The kernels for a model on devices like `device`, which need not be there.

    With `deterministic` those of XLA, so that no token's bits depend on the tokens beside it
    (`check_deterministic`).
    """
    platform, shape = _platform(device), attention_shape(config, masked)
    if deterministic:
        experts = XlaExperts(expert_shape(config), block_rows=EQUAL_BLOCK_ROWS)
        return Kernels(XlaAttention(shape), experts)
    attention: type[AttentionKernel] = ATTENTION.get(platform, XlaAttention)
    if not _takes("attention", platform, attention.unsupported(shape, device)):
        attention = XlaAttention
    of_experts = expert_shape(config)
    kind: type[ExpertKernel] = XlaExperts  # that a dense model has no use for
    if config.num_experts:
        kernel = EXPERTS.get(platform, XlaExperts)
        if _takes("experts", platform, kernel.unsupported(of_experts, device)):
            kind = kernel
    return Kernels(attention(shape), kind.for_device(of_experts, device))


def _platform(device: Any) -> str:
    """The name that the tables have for it: only a GPU with NVIDIA's tensor cores is a "gpu"."""
    if device.platform not in ("gpu", "cuda"):
        return device.platform
    capability = str(getattr(device, "compute_capability", ""))  # ROCm: gfx942
    try:
        return "gpu" if float(capability) >= OLDEST_GPU else "old gpu"
    except ValueError:
        return "gpu" if device.platform == "cuda" else "other gpu"


def _takes(what: str, platform: str, reason: str | None) -> bool:
    """Whether a kernel runs; if not, warns of the reason, once."""
    if reason is not None:
        _warn(what, platform, reason)
    return reason is None


@functools.cache
def _warn(what: str, platform: str, reason: str) -> None:
    logger.warning("the %s kernel for %s is not used: %s; XLA's own is slower",
                   platform.upper(), what, reason)  # fmt: skip
