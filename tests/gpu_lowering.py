"""Lowers programs for a GPU that is not there, and without the plugin that would compile them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from tests.gpu_code import no_triton_warnings


def lower_for_gpu(function: Callable[..., Any], arguments: Any) -> str:
    """The text of a program for an NVIDIA GPU; raises if Triton does not take one of its kernels."""
    # jax 0.12 asks which GPU; 0.10 takes one of Hopper.
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with no_triton_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.filterwarnings("ignore", ".*use_abstract_mesh", DeprecationWarning)
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
