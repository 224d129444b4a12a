"""Where a step can be deterministic: no bit of a token depends on what is computed beside it."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from tbo_jax.overlap.config import OverlapConfig


def check_deterministic(mesh: Mesh, overlap: OverlapConfig) -> None:
    """Refuse what is not known to be deterministic.

    Raises:
        ValueError: the devices are no CPUs, there are several processes, the mode is "auto", or
            the strategy "expert_chunks".
    """
    platform, processes = mesh.devices.flat[0].platform, jax.process_count()
    if platform != "cpu":
        raise ValueError(
            f"deterministic=True on {platform}: expected devices of platform cpu, on which alone "
            "rows of a step were found not to depend on each other"
        )
    if processes > 1:
        raise ValueError(
            f"deterministic=True in {processes} processes: expected one, as sums over processes "
            "were not found to be alike in each row of a step"
        )
    if overlap.enabled and overlap.strategy == "expert_chunks":
        raise ValueError(
            "deterministic=True with USE_TBO=expert_chunks: expected 0 or 1, as the order in which "
            "a token's experts are added up may depend on where the tokens beside it go"
        )
    if overlap.mode == "auto":
        raise ValueError(
            "deterministic=True with USE_TBO=auto: expected 0 or 1, as what is decided from times "
            "may be another program at each start"
        )
