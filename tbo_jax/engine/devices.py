"""The devices that an engine runs on, and where its compiled programs are kept."""

from __future__ import annotations

import contextlib

import jax
from jax.sharding import Mesh

from tbo_jax.host.folders import cache_folder
from tbo_jax.parallel.sharding import make_mesh


def use_compilation_cache() -> None:
    """Have JAX keep compiled programs in the user's cache folder, if nothing else is configured."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def make_devices(count: int | None, tensor_parallel: int) -> Mesh:
    """The mesh of `count` devices, or all, of which `tensor_parallel` share a rank.

    On CPU that many are made, unless JAX is in use already.

    Raises:
        ValueError: there are not so many, or they do not divide.
    """
    if count is not None and count >= 1:
        # RuntimeError: JAX is in use already, and the devices are what they are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be at least 1, got {tensor_parallel}")
    nodes = jax.process_count()
    if nodes > 1 and count not in (None, jax.device_count()):
        raise ValueError(
            f"devices is {count}: {nodes} processes use all that they have, {jax.device_count()}"
        )
    return make_mesh(count, tensor=tensor_parallel, nodes=nodes)
