"""Which kernel computes what: chosen once, by the platform of the mesh and the model's shape.

| platform | attention | experts |
|---|---|---|
| NVIDIA GPU from Ampere on | `attention/gpu_paged.py` (Triton) | `moe/gpu_experts.py` (Triton) |
| any other | `attention/paged.py` (XLA) | `moe/experts.py` (XLA) |

A shape that a kernel does not take falls back to XLA, with one warning that says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from tbo_jax.attention import gpu_paged, paged
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe import experts, gpu_experts

logger = logging.getLogger(__name__)

OLDEST_GPU = 8.0  # compute capability: bfloat16 tensor cores


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program."""

    attention: Callable[..., jax.Array] = paged.paged_attention
    experts: Callable[..., jax.Array] = experts.apply_experts
    prefill_query_block: int = paged.QUERY_BLOCK  # queries of a work item of a step that prefills


def choose_kernels(device: Any, config: DecoderConfig) -> Kernels:
    """The kernels for a model on devices like `device`, which need not be there."""
    if not _is_gpu(device):
        return Kernels()
    group = config.num_heads // config.num_kv_heads
    kernels = Kernels()
    reason = gpu_paged.unsupported(config.head_dim, group)
    if reason is None:
        kernels = Kernels(
            attention=gpu_paged.paged_attention,
            prefill_query_block=gpu_paged.query_block(group),
        )
    else:
        _warn("attention", reason)
    if not config.num_experts:
        return kernels
    reason = gpu_experts.unsupported(config.hidden_size, config.expert_intermediate_size)
    if reason is not None:
        _warn("experts", reason)
        return kernels
    return Kernels(kernels.attention, gpu_experts.apply_experts, kernels.prefill_query_block)


def _is_gpu(device: Any) -> bool:
    """An NVIDIA GPU that has the tensor cores."""
    if device.platform not in ("gpu", "cuda"):
        return False
    capability = str(getattr(device, "compute_capability", ""))  # ROCm: gfx942
    try:
        return float(capability) >= OLDEST_GPU
    except ValueError:
        return device.platform == "cuda"


@functools.cache
def _warn(what: str, reason: str) -> None:
    logger.warning("the GPU kernel for %s is not used: %s; XLA's own is slower", what, reason)
