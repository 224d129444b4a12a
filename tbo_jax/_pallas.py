"""Pallas' backends for NVIDIA GPUs, as far as this JAX has them, in one place.

JAX calls the Triton backend deprecated since 0.11, and will remove it. Mosaic GPU is imported when
it is first used: it takes 0.3 s, and most programs have no use for it.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any

import jax

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None


def mosaic() -> Any:
    """The module `jax.experimental.pallas.mosaic_gpu`.

    Raises:
        ImportError: this JAX has none.
    """
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def load_mosaic(ref: Any, index: tuple[Any, ...], layout: Any, interpret: bool) -> Any:
    """`ref[index]` in a Mosaic GPU kernel, laid out over the lanes of a warp group."""
    if interpret:  # JAX 0.10.2 cannot interpret the other ones, and lanes have no layout there
        return ref[index]
    load = functools.partial(mosaic().load, layout=layout, optimized=False)
    if jax.__version_info__ < (0, 12):
        return load(ref, index)
    return load(ref.at[index])


def store_mosaic(ref: Any, value: Any, interpret: bool) -> None:
    """`ref[...] = value` in a Mosaic GPU kernel, for rows that are not swizzled.

    JAX 0.12 refuses a store whose lanes meet in a bank of shared memory, unless it is told.
    """
    if interpret or jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        mosaic().store(ref, value, optimized=False)


def interpret_mosaic() -> AbstractContextManager[None]:
    """A context in which kernels of Mosaic GPU are interpreted on CPU, slowly."""
    found = mosaic()
    if not hasattr(found, "force_gpu_interpret_mode"):  # public since JAX 0.12
        found = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    context: AbstractContextManager[None] = found.force_gpu_interpret_mode()
    return context
