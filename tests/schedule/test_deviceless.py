"""The command of the README, for machines that are not there: the same figures on every JAX.

Needs the plugin of `tbo-jax[cuda12]`, or that of `tbo-jax[tpu]`, and no GPU and no TPU. Run with jax
0.10.2 and 0.12.0.1, which agree: of the rows below, the largest difference was 0.4 %.
"""

from __future__ import annotations

import jax
import pytest

from tbo_jax.schedule.model_step import StepShape, inspect_model, read_shape
from tbo_jax.schedule.targets import find_target
from tests.gpu_code import needs_compiler, no_triton_warnings
from tests.tpu_compiler import needs_tpu_compiler, prepare_libtpu

# Target, step, layers of Qwen3-30B-A3B; with one micro-batch and with two, milliseconds of the step
# and of the link, jax 0.10.2. Modelled.
GPU = ("h100x8", StepShape("decode", 256, 2048), 4, ((2.785, 0.265), (3.259, 0.345)))
TPU = ("v5e:2x4", StepShape("decode", 32, 1024), 2, ((1.994, 0.131), (2.593, 0.163)))


@pytest.mark.parametrize(
    "case", [pytest.param(GPU, marks=needs_compiler), pytest.param(TPU, marks=needs_tpu_compiler)]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_figures(case, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, shape, layers, expected = case
    prepare_libtpu(monkeypatch)
    config = read_shape("qwen3-30b-a3b", layers)
    # The norm of Flax relies on promotion in bfloat16.
    with jax.numpy_dtype_promotion("standard"), no_triton_warnings():
        report = inspect_model(config, find_target(target), shape, micro_batches=micro_batches)
    found = 1e3 * report.step, 1e3 * report.communication
    assert found == pytest.approx(expected[micro_batches - 1], rel=0.02)
    assert report.findings == ()
    if micro_batches == 2:
        assert report.hidden_share > 0.9
