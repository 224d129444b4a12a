"""The world all tests run in: several CPU devices, strict dtype promotion, no programs on disk."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.version
import pytest
from jax import monitoring

# Before the first use of a backend, hence at import. Processes that tests start have it too.
# LLVM's optimisation is a third of the time of a test that compiles a step; XLA's own stays.
FLAGS = ["--xla_backend_optimization_level=0"]
if jaxlib.version.__version_info__ < (0, 11):
    # Fusions by the older of two generators of code: tests of models take 38 % less time on a
    # processor (jaxlib 0.10.2). Later jaxlibs do not have it; the suite runs on those too.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
if not jax.config.jax_platforms:  # JAX_PLATFORMS in the environment wins
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)
# Python's default walks over all that JAX has traced again and again: 12 % of the same tests.
gc.set_threshold(50_000, 20, 50)
jax.devices()  # now, so that no test can ask for another number of them


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    """Gives the number of programs that XLA compiled since the test began."""
    count = 0

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count
    monitoring.unregister_event_duration_listener(listen)
