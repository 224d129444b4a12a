"""What is not known to be deterministic is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tbo_jax import OverlapConfig
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.step.deterministic import check_deterministic


def test_cpus_of_one_process_are_taken() -> None:
    check_deterministic(make_mesh(2), OverlapConfig("on"))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_are_refused(platform: str) -> None:
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    with pytest.raises(ValueError, match=f"deterministic=True on {platform}: expected devices of"):
        check_deterministic(mesh, OverlapConfig())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match="deterministic=True in 3 processes: expected one"):
        check_deterministic(make_mesh(1), OverlapConfig())


def test_what_is_decided_from_times_is_refused() -> None:
    chunks = OverlapConfig("on", strategy="expert_chunks")
    with pytest.raises(ValueError, match="with USE_TBO=expert_chunks: expected 0 or 1"):
        check_deterministic(make_mesh(1), chunks)
    with pytest.raises(ValueError, match="deterministic=True with USE_TBO=auto: expected 0 or 1"):
        check_deterministic(make_mesh(1), OverlapConfig("auto"))
