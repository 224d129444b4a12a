"""The compiler for TPUs, which needs no TPU: for tests that look at what it makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.experimental import topologies

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: tbo-jax[tpu]"
)


def prepare_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have libtpu load in this process, which reads the environment when it is loaded first."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud to ask for metadata
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # It ends the process over a flag that it does not know, such as one of XLA:CPU's.
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def compiled_for_tpu(
    function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], target: str
) -> jax.stages.Compiled:
    """A function compiled for one chip of a topology, such as v5e:2x4, which need not be there."""
    chip = topologies.get_topology_desc(target, platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(chip)
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(function).lower(*placed).compile()
