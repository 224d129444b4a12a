"""Options of XLA that let it overlap collectives with compute, by platform, in one place."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jaxlib.version
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.host.folders import cache_folder
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.exchange import TRANSPORTS, Transport

logger = logging.getLogger(__name__)

Options = dict[str, str | bool]

# Without these every all-to-all on TPU runs in line with compute (libtpu 0.0.52, v5e to tpu7x).
_TPU: Options = {
    "xla_tpu_enable_async_all_to_all": "true",
    "xla_tpu_enable_async_ragged_all_to_all": "true",
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
}
_GPU = ("gpu", "cuda")  # how devices that are there, and those of a topology, are called
_GPU_COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
)
_GPU_COMBINED = ("all_reduce", "all_gather", "reduce_scatter")
_JOINED_SUMS = str(30 << 20)  # bytes; XLA's own default
_MOST_COLLECTIVES = 1000  # of one kind in a program that is given a profile


def compiler_options(
    mesh: Mesh,
    strategy: Strategy,
    transport: Transport = "all_to_all",
    *,
    training: bool = False,
) -> Options:
    """For `jax.jit(compiler_options=...)` or `Lowered.compile(...)`.

    An option that the compiler does not know, because another version of it renamed it, is left
    out, and one warning names it.

    Args:
        mesh: of the program. Its devices need not be there (`jax.experimental.topologies`), so
            JAX's default backend is not asked.
        strategy: of the program. What only matters for one that overlaps is left out for others.
        transport: of the expert exchange.
        training: whether all-reduces are sums of gradients, which nothing waits for.
    """
    device = mesh.devices.flat[0]
    options = overlap_options(device.platform, mesh.size, strategy, transport, training)
    return known_options(options, mesh) | process_options(mesh)


def process_options(mesh: Mesh) -> Options:
    """What every program of several processes needs, as well one without communication.

    XLA:GPU shares the work of autotuning among the processes, and each waits for the others'
    results, 24 hours at most. JAX looks a program up in its persistent cache in each process
    alone, and writes to it in the first only. At the second start the first process finds the
    program, never enters XLA, and the others wait for it.
    """
    platform = mesh.devices.flat[0].platform
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    alone: Options = {"xla_gpu_shard_autotuning": False}
    return known_options(alone, mesh) if several and platform in _GPU else {}


def overlap_options(
    platform: str,
    num_devices: int,
    strategy: Strategy,
    transport: Transport = "all_to_all",
    training: bool = False,
) -> Options:
    """What lets collectives run beside compute, by the names of the XLA that this was written for.

    See `compiler_options`; `platform` is that of the devices ("cpu", "gpu" or "cuda", "tpu").
    """
    if num_devices == 1 or platform not in (*_GPU, "tpu"):
        return {}  # nothing to overlap; XLA:CPU refuses options of other platforms
    if platform == "tpu":
        return dict(_TPU)
    options: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    ragged = TRANSPORTS[transport].sizes_are_data
    if ragged:
        # XLA's default, kept whatever the environment says. Above it others saw gradients that
        # changed from run to run, hangs, and steps a third slower (marin-community/marin 8077).
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = "1"
    if strategy.overlaps:
        options |= {
            "xla_gpu_pgle_profile_file_or_directory_path": str(
                _collectives_first(ragged, training)
            ),
            # Else XLA warns of every instruction that the profile does not name.
            "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
        }
        # Else XLA joins small sums of both micro-batches to one, which then waits for the second.
        options |= {f"xla_gpu_{kind}_combine_threshold_bytes": "0" for kind in _GPU_COMBINED}
        if training:  # those of gradients may be joined
            options["xla_gpu_all_reduce_combine_threshold_bytes"] = _JOINED_SUMS
    return options


def known_options(options: Options, mesh: Mesh) -> Options:
    """`options` without those that the compiler of the mesh does not know."""
    unknown = _unknown(tuple(options.items()), mesh) if options else {}
    return {name: value for name, value in options.items() if name not in unknown}


@functools.cache
def _unknown(options: tuple[tuple[str, str | bool], ...], mesh: Mesh) -> frozenset[str]:
    """Names that the compiler of the mesh refuses, found by compiling next to nothing; warns."""
    shape = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(lambda x: x + 1).lower(shape)
    asked, unknown = dict(options), set()
    while asked:
        try:
            lowered.compile(asked)
            break
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"No such compile option: '(\w+)'", str(error))
            if found is None or found[1] not in asked:
                raise  # of the value, or of something else
            del asked[found[1]]
            unknown.add(found[1])
            logger.warning(
                "the compiler of jaxlib %s has no option %s; left out, what it is for may be lost: "
                "tbo-jax schedule shows the overlap",
                jaxlib.version.__version__,
                found[1],
            )
    return frozenset(unknown)


@functools.cache
def _collectives_first(ragged: bool = False, training: bool = False) -> Path:
    """A profile for XLA's scheduler that says that every collective takes a second.

    The order of compute is fixed by barriers, so a collective can only gain from an early start.
    XLA:GPU's own estimate takes a loop for an instant and starts a collective so late that it only
    runs beside the end of the other micro-batch's stage: 21 of 136 microseconds of a decode step of
    Qwen3-30B-A3B, modelled for 8 H100. With the profile it starts when its message is ready.
    XLA takes a profile by file name only, and the name is a part of its cache's key.

    With the ragged transport an all-to-all carries counts, which the payload waits for. It is left
    out: XLA would hold back the payload until the other micro-batch's compute had hidden the counts
    (in the step above, 15 of 360 microseconds of compute were left beside the payload).

    In training an all-reduce is left out too: one collective is in flight at a time, and the sum of
    a gradient took the compute that was to hide an exchange of the backward pass.
    """
    left_out = {"all-to-all": ragged, "all-reduce": training}
    names = [
        f"{kind}-start{f'.{number}' if number else ''}"
        for kind in _GPU_COLLECTIVES
        if not left_out.get(kind)
        for number in range(_MOST_COLLECTIVES)
    ]
    text = "".join(f'costs {{ name: "{name}" cost_us: 1000000 }}\n' for name in names)
    root, file = cache_folder(), "payloads_first.pbtxt" if ragged else "collectives_first.pbtxt"
    file = f"training_{file}" if training else file
    try:
        return _write_once(root / file, text)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="tbo_jax-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning("no profile in %s (%s), put in %s: programs are not found again in XLA's "
                       "cache", root, error, folder)  # fmt: skip
        return _write_once(folder / file, text)


def _write_once(path: Path, text: str) -> Path:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)
    return path
