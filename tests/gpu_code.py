"""Compiles programs for GPUs that are not there, and reads the code that their kernels become.

Needs the plugin and the assembler of `tbo-jax[cuda12]`, and no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.schedule.targets import Target, find_target

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs tbo-jax[cuda12]"
)

# Of later versions it is in a dump of everything, which takes minutes for a program.
WRITES_PTX = jaxlib.version.__version_info__ < (0, 11)

# The chip that is described, what differs, and bytes of shared memory of a block where less.
SMALL = 101376
CAPABILITIES: dict[str, tuple[str, dict[str, int], int | None]] = {
    "8.0": ("a100x1", {}, None),
    "8.6": ("a100x1", {"minor": 6}, SMALL),
    "8.9": ("a100x1", {"minor": 9}, SMALL),
    "9.0": ("h100x1", {}, None),
    "10.0": ("b200x1", {}, None),
    "12.0": ("b200x1", {"major": 12, "minor": 0}, SMALL),
}


@cache
def target(capability: str) -> Target:
    """A machine with one GPU of a compute capability."""
    name, changes, memory = CAPABILITIES[capability]
    found = find_target(name)
    device: dict[str, Any] = dict(found.description["gpu_device_info"])
    device["cuda_compute_capability"] = device["cuda_compute_capability"] | changes
    if memory is not None:
        device["shared_memory_per_block_optin"] = memory
    description = {**found.description, "gpu_device_info": device}
    return dataclasses.replace(found, name=f"sm {capability}", description=description)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler says of a kernel, and its PTX."""

    registers: int  # of a thread, 255 at most
    spilled: int  # bytes that a thread stores because they do not fit
    ptx: str


def lower(function: Callable[..., Any], arguments: Any, capability: str) -> jax.stages.Lowered:
    """A function for one GPU, with arrays or their shapes for arguments."""
    mesh, whole = target(capability).mesh(), PartitionSpec()
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=NamedSharding(mesh, whole)),
        arguments,
    )
    # jax 0.12 lowers kernels for the GPU of a mesh.
    on_one = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    with no_triton_warnings():
        return jax.jit(on_one).lower(*placed)


def compiled(lowered: jax.stages.Lowered) -> tuple[str, dict[str, Kernel]]:
    """The optimised HLO of a program, and its kernels by name, if `WRITES_PTX`."""
    with tempfile.TemporaryDirectory() as folder, no_triton_warnings():
        options = {
            "xla_gpu_autotune_level": "0",
            "xla_dump_to": folder,
            "xla_backend_optimization_level": "3",  # unlike conftest.py
        }
        text = lowered.compile(options).as_text()
        assert text is not None
        kernels: dict[str, Kernel] = {}
        for file in sorted(Path(folder).glob("*.ptx")):
            kernels |= _assembled(file)
    assert kernels or not WRITES_PTX
    return text, kernels


@contextmanager
def no_triton_warnings() -> Iterator[None]:
    """Do not take it for an error that jax 0.12 calls Pallas' Triton backend deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Triton backend is deprecated", DeprecationWarning)
        yield


def _assembled(file: Path) -> dict[str, Kernel]:
    ptx = file.read_text()
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if found is None:
        return {}
    words = [_assembler(), "-v", f"-arch={found[1]}", str(file), "-o", f"{file}.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    kernel = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {
        name: Kernel(int(registers), int(spilled), ptx)
        for name, spilled, registers in kernel.findall(said)
    }


@cache
def _assembler() -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        for file in Path(folder).glob("*/bin/ptxas"):
            return str(file)
    raise FileNotFoundError(f"no ptxas in {folders}")
