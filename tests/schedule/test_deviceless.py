"""The command of the README, for machines that are not there: the same figures on every JAX.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU. Run with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import jax
import pytest

from tbo_jax.schedule.model_step import StepShape, inspect_model, read_shape
from tbo_jax.schedule.targets import find_target
from tests.gpu_code import needs_compiler, no_triton_warnings

pytestmark = needs_compiler

SHAPE = StepShape("decode", 256, 2048)
# Of four layers of Qwen3-30B-A3B, with one micro-batch and with two: milliseconds of the step and
# of the link, jax 0.10.2. Modelled.
EXPECTED = {
    "h100x8": ((2.474, 0.195), (2.961, 0.259)),
}


@pytest.mark.parametrize("target", EXPECTED)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_figures(target: str, micro_batches: int) -> None:
    config = read_shape("qwen3-30b-a3b", 4)
    # The norm of Flax relies on promotion in bfloat16.
    with jax.numpy_dtype_promotion("standard"), no_triton_warnings():
        report = inspect_model(config, find_target(target), SHAPE, micro_batches=micro_batches)
    found = 1e3 * report.step, 1e3 * report.communication
    assert found == pytest.approx(EXPECTED[target][micro_batches - 1], rel=0.02)
    assert report.findings == ()
    if micro_batches == 2:
        assert report.hidden_share > 0.9
