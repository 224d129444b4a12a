"""Which kernel computes what: chosen once, by the platform of the mesh and the model's shape.

| platform | attention | its pages | experts |
|---|---|---|---|
| NVIDIA GPU from Ampere on | `attention/gpu_paged.py` | separate | `moe/gpu_experts.py` |
| TPU, in bfloat16 | `attention/tpu_paged.py` | interleaved | `moe/tpu_experts.py` |
| any other, by XLA | `attention/paged.py` | separate | `moe/experts.py` |

The pages of latent attention are latent ones everywhere. On TPU XLA computes it.
A shape that a kernel does not take falls back to XLA, with one warning that says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from tbo_jax.attention import gpu_paged, paged, tpu_paged
from tbo_jax.attention.cache import PageLayout
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe import experts, gpu_experts, tpu_experts

logger = logging.getLogger(__name__)

OLDEST_GPU = 8.0  # compute capability: bfloat16 tensor cores
# A program of latent attention takes 144 KiB of shared memory; these have 99 KiB for one.
SMALL_GPUS = ("8.6", "8.9", "12.0", "12.1")


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program."""

    attention: Callable[..., jax.Array] = paged.paged_attention
    page_layout: PageLayout = "separate"  # that the attention reads
    experts: Callable[..., jax.Array] = experts.apply_experts
    prefill_query_block: int = paged.QUERY_BLOCK  # queries of a work item of a step that prefills


def choose_kernels(device: Any, config: DecoderConfig) -> Kernels:
    """The kernels for a model on devices like `device`, which need not be there."""
    if _is_gpu(device):
        return _for_gpu(device, config)
    return _for_tpu(config) if device.platform == "tpu" else _by_xla(config)


def _by_xla(config: DecoderConfig) -> Kernels:
    return Kernels(page_layout="separate" if config.latent is None else "latent")


def _for_gpu(device: Any, config: DecoderConfig) -> Kernels:
    kernels = _by_xla(config)
    group = config.num_heads // config.num_kv_heads
    value_dim = None if config.latent is None else config.value_dim
    reason = gpu_paged.unsupported(config.head_dim, value_dim)
    capability = getattr(device, "compute_capability", None)
    if reason is None and config.latent is not None and capability in SMALL_GPUS:
        reason = f"compute capability {capability} has too little shared memory for latents"
    if _takes("attention", "GPU", reason):
        kernels = replace(
            kernels,
            attention=gpu_paged.paged_attention,
            prefill_query_block=gpu_paged.query_block(group),
        )
    shape = config.hidden_size, config.expert_intermediate_size
    if config.num_experts and _takes("experts", "GPU", gpu_experts.unsupported(*shape)):
        kernels = replace(kernels, experts=gpu_experts.apply_experts)
    return kernels


def _for_tpu(config: DecoderConfig) -> Kernels:
    kernels = _by_xla(config)
    if config.latent is None:
        reason = tpu_paged.unsupported(
            config.head_dim, config.num_kv_heads, config.dtype, config.attention_sinks
        )
    else:
        reason = "it takes no latent pages"
    if _takes("attention", "TPU", reason):
        kernels = replace(
            kernels,
            attention=tpu_paged.paged_attention,
            page_layout="interleaved",
            prefill_query_block=tpu_paged.query_block(config.num_heads // config.num_kv_heads),
        )
    shape = config.hidden_size, config.expert_intermediate_size, config.dtype
    if config.num_experts and _takes("experts", "TPU", tpu_experts.unsupported(*shape)):
        kernels = replace(kernels, experts=tpu_experts.apply_experts)
    return kernels


def _is_gpu(device: Any) -> bool:
    """An NVIDIA GPU that has the tensor cores."""
    if device.platform not in ("gpu", "cuda"):
        return False
    capability = str(getattr(device, "compute_capability", ""))  # ROCm: gfx942
    try:
        return float(capability) >= OLDEST_GPU
    except ValueError:
        return device.platform == "cuda"


def _takes(what: str, platform: str, reason: str | None) -> bool:
    """Whether a kernel runs; if not, warns of the reason, once."""
    if reason is not None:
        _warn(what, platform, reason)
    return reason is None


@functools.cache
def _warn(what: str, platform: str, reason: str) -> None:
    logger.warning("the %s kernel for %s is not used: %s; XLA's own is slower",
                   platform, what, reason)  # fmt: skip
