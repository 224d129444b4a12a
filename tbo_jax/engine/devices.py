"""The devices that an engine runs on, and where its compiled programs are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from tbo_jax.host.folders import cache_folder
from tbo_jax.parallel.sharding import first_devices, make_mesh

MOST_CPU_DEVICES = 1024  # more are a mistake: a second for each thousand, and no memory for any


def use_compilation_cache() -> None:
    """Have JAX keep compiled programs in the user's cache folder, if nothing else is configured."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def use_most_memory() -> None:
    """Have JAX manage 90 % of each GPU's memory, where nothing else is configured.

    Its default of 75 % leaves a quarter idle. CUDA, NCCL and loaded programs need the rest. It
    counts from the first use of a device on.
    """
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(os.environ.get(name) for name in names):
        os.environ[names[0]] = "0.9"


def find_devices(count: int | None) -> Sequence[jax.Device]:
    """The first `count` devices, or all; on CPU that many are made, unless JAX is in use already.

    Raises:
        ValueError: there are not so many, or JAX finds none on the platform it was told of.
    """
    # The program around may want more of them, and has said so.
    known: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if count is not None and count >= 1 and count > known:
        # RuntimeError: JAX is in use already, and the devices are what they are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(count, MOST_CPU_DEVICES))
    try:
        devices = jax.devices()
    # AssertionError: what jax 0.10 raises where the only platform allowed has no plugin.
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = str(error).partition("\n")[0] or "it has no such platform"
        raise ValueError(
            f"JAX finds no device with JAX_PLATFORMS={platforms or ''}: {reason}"
        ) from error
    return first_devices(devices, count)


def make_devices(count: int | None, tensor_parallel: int) -> Mesh:
    """The mesh of `find_devices(count)`, of which `tensor_parallel` share a rank.

    Raises:
        ValueError: there are not so many, or they do not divide.
    """
    devices = find_devices(count)
    processes = jax.process_count()
    if processes > 1 and len(devices) != jax.device_count():
        raise ValueError(
            f"devices is {count}: {processes} processes use all that they have, "
            f"{jax.device_count()}"
        )
    nodes = [node_of(device) for device in devices]
    devices = [devices[i] for i in sorted(range(len(devices)), key=nodes.__getitem__)]
    return make_mesh(None, devices, tensor=tensor_parallel, nodes=len(set(nodes)))


def node_of(device: jax.Device) -> int:
    """A number for those devices that have a fast link to each other.

    JAX's word for them is a slice: the GPUs of a host, whatever number of processes they are in,
    or a slice of TPUs. Devices that are in none (CPU) are counted by process.
    """
    index: int = getattr(device, "slice_index", device.process_index)
    return index


def free_memory(mesh: Mesh) -> int | None:
    """Bytes that are free on the fullest of this process's devices; None where none of them tells.

    XLA:CPU does not tell.
    """
    told = [device.memory_stats() or {} for device in mesh.local_devices]
    free = [t["bytes_limit"] - t["bytes_in_use"] for t in told if "bytes_limit" in t]
    return min(free, default=None)
