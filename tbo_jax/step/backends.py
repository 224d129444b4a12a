"""The choice of kernels, written once: for the engine, for command lines and for the runner."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax

from tbo_jax import _pallas

Backend = Literal["triton", "mosaic"]
KernelChoice = Literal["auto", "triton", "mosaic", "xla"]
KERNELS: tuple[KernelChoice, ...] = get_args(KernelChoice)

OLDEST_GPU = 8.0  # compute capability: bfloat16 tensor cores
# Mosaic multiplies with wgmma on Hopper and tcgen05 on Blackwell; consumer's Blackwell, 12, has
# neither.
MOSAIC_GPUS = ("9", "10")


def platform_of(device: Any) -> str:
    """The name that the table of kernels has for a device, which need not be there.

    Only a GPU with NVIDIA's tensor cores is a "gpu".
    """
    if device.platform not in ("gpu", "cuda"):
        name: str = device.platform
        return name
    capability = _capability(device)  # ROCm: gfx942
    try:
        return "gpu" if float(capability) >= OLDEST_GPU else "old gpu"
    except ValueError:
        return "gpu" if device.platform == "cuda" else "other gpu"


def missing(backend: Backend, device: Any) -> str | None:
    """Why kernels of a backend cannot run on devices like `device`; None if they can."""
    platform = platform_of(device)
    if platform == "tpu" and backend == "mosaic":
        return None
    if platform != "gpu":
        return f"{_name(device)} has none"
    if backend == "triton":
        if _pallas.triton is None:
            return f"JAX {jax.__version__} has no Triton backend of Pallas"
        return None
    capability = _capability(device)
    if capability and capability.partition(".")[0] not in MOSAIC_GPUS:
        return f"{_name(device)} is neither Hopper (9.0) nor Blackwell (10.0 or 10.3)"
    return None


def check_kernels(choice: KernelChoice, device: Any) -> None:
    """Refuse kernels that cannot run on devices like `device`.

    Raises:
        ValueError: there is no such choice, or the device or this JAX has no such kernels.
    """
    if choice not in KERNELS:
        raise ValueError(f"kernels is {choice!r}: expected one of {', '.join(map(repr, KERNELS))}")
    if choice == "auto" or choice == "xla":
        return
    reason = missing(choice, device)
    if reason is not None:
        others: tuple[Backend, ...] = get_args(Backend)
        known = ["auto", *(one for one in others if missing(one, device) is None), "xla"]
        raise ValueError(
            f"kernels is {choice!r}, and {reason}: expected one of {', '.join(map(repr, known))}"
        )


def _capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", "") or "")


def _name(device: Any) -> str:
    """A device for people."""
    kind = str(getattr(device, "device_kind", device.platform))
    capability = _capability(device)
    return f"{kind} of compute capability {capability}" if capability else kind
