"""Several processes, usually one a host, that run the same program on one mesh.

Each makes the same decisions from the same values, so that all start the same steps. What only the
first knows (requests, seeds) is handed to the others.
"""

from __future__ import annotations

import logging
import pickle
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.parallel.sharding import RANKS

T = TypeVar("T")
logger = logging.getLogger(__name__)

SILENCE = 30  # seconds without a sign of life after which a process counts as dead
WAIT_TO_START = 300  # seconds, as JAX waits: on some host an image may still be pulled


def connect(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes; before JAX is used for anything else.

    Each process uses all devices of its host. When one of them ends or dies the others end with an
    error: at once where a connection to it breaks, after `SILENCE` seconds otherwise.

    Args:
        coordinator: HOST:PORT of the first process, or "auto" where JAX finds the others by itself
            (Kubernetes with its client, Cloud TPU, SLURM and Open MPI; the last two give a process
            one device unless `JAX_LOCAL_DEVICE_IDS` names more).
        num_processes, process_id: how many there are, and which this is; not with "auto".

    Raises:
        ValueError: one of them is missing, too much or out of range, or "auto" finds no cluster.
    """
    if coordinator == "auto":
        if num_processes is not None or process_id is not None:
            raise ValueError("with coordinator 'auto' the processes are counted by the cluster")
        try:
            _initialize()
        except ValueError as error:
            raise ValueError(
                f"coordinator 'auto' found no cluster ({error}): expected SLURM, Open MPI, "
                "Kubernetes or Cloud TPU, or else HOST:PORT"
            ) from error
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch(r"\d+", port) or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator {coordinator!r}: expected HOST:PORT or 'auto'")
    given = num_processes is not None and process_id is not None
    if not given or num_processes < 1 or not 0 <= process_id < num_processes:  # type: ignore[operator]
        raise ValueError(
            f"num_processes is {num_processes} and process_id {process_id}: expected both, and a "
            "process_id from 0 to num_processes - 1"
        )
    logger.warning(
        "process %d waits for %d at %s, %d seconds at most",
        process_id, num_processes, coordinator, WAIT_TO_START,
    )  # fmt: skip
    # Deactivated: under SLURM and Open MPI it would leave the process one device, also when told
    # where the others are.
    host = host.strip("[]")  # of IPv6
    if process_id == 0:
        _check_port(coordinator, int(port), socket.AF_INET6 if ":" in host else socket.AF_INET)
    else:
        _wait_for(coordinator, host, int(port))
    _initialize(coordinator, num_processes, process_id, cluster_detection_method="deactivate")


def _check_port(coordinator: str, port: int, family: int) -> None:
    """ValueError if the first process cannot listen: JAX would tell only that it failed."""
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((everywhere, port))
        except OSError as error:
            raise ValueError(
                f"coordinator {coordinator!r}: this is process 0, and it cannot listen on port "
                f"{port}: {error.strerror}"
            ) from error


def _wait_for(coordinator: str, host: str, port: int) -> None:
    """ValueError if nobody listens in time: JAX would abort the process with a stack of C++."""
    end = time.monotonic() + WAIT_TO_START
    while True:
        try:
            socket.create_connection((host, port), timeout=WAIT_TO_START).close()
            return
        # A name that is not known yet too: Kubernetes tells it when the pod is ready.
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"coordinator {coordinator!r}: not reached for {WAIT_TO_START} seconds "
                    f"({error.strerror or error}): expected process 0 to be started there"
                ) from error
        time.sleep(0.2)


def _initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    cluster_detection_method: str | None = None,
) -> None:
    # JAX would catch SIGTERM to save a checkpoint in time; here it has to end the process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method=cluster_detection_method,
        initialization_timeout=WAIT_TO_START,
        heartbeat_timeout_seconds=SILENCE,
        shutdown_timeout_seconds=SILENCE,
    )


def agree(values: Mapping[str, Any]) -> None:
    """Check that this process was started with the options of the first.

    Raises ValueError in all processes, naming what differs: the programs would not be the same, and
    a collective of one would wait for ever, or take what another means.
    """
    if jax.process_count() == 1:
        return
    first = from_first(dict(values))
    mine = [name for name, value in values.items() if first.get(name) != value]
    count = multihost_utils.process_allgather(np.int32(len(mine)))
    if not count.any():
        return
    told = ", ".join(f"{name} is {values[name]!r} here, {first.get(name)!r} there" for name in mine)
    others = [index for index, number in enumerate(count) if number]
    raise ValueError(
        f"processes {others} were started with other options than the first"
        + (f": {told}" if told else "")
    )


def is_first() -> bool:
    """Whether this process is the one that takes requests and prints."""
    return jax.process_index() == 0


def from_first(value: T) -> T:
    """The first process's `value` in all processes.

    Raises ValueError in all of them if it cannot be pickled.
    """
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(_pickled(value) if is_first() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    shared = data if is_first() else np.zeros(size, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(shared)).tobytes()
    found, error = pickle.loads(told)
    if error is not None:
        raise ValueError(f"this cannot be told to the other processes: {error}")
    return found


def _pickled(value: Any) -> bytes:
    """A pair for the others, who wait for it whatever happens: the value, or why there is none."""
    try:
        return pickle.dumps((value, None))
    except Exception as error:  # whatever the pickling of somebody's class raises
        return pickle.dumps((None, f"{type(error).__name__}: {error}"))


def least(value: int) -> int:
    """The least of the processes' values."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).min())


def over_ranks(tree: Any, mesh: Mesh) -> Any:
    """Leaves [R, ...] of the host, equal in all processes, as they may be handed to a program.

    Where all devices are this process's own the program takes them as they are.
    """
    if jax.process_count() == 1:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec(RANKS))

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, tree)
