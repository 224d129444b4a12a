"""The kernels of Mosaic for Hopper, interpreted on CPU, against one expert after another in numpy.

The interpreter takes seconds for a shape, so few of them are quick tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.kernel import ExpertLoad, ExpertShape
from tbo_jax.moe.mosaic_experts import MosaicExperts
from tbo_jax.quantized.array import QuantizedArray
from tests.gpu_code import lower, needs_compiler
from tests.moe.stacks import CLAMPED, between_others, one_by_one
from tests.moe.test_gpu_experts import TOLERANCE, Shape, choices, draw
from tests.quantized.arrays import FORMS, random_array

SMALL = Shape(12, 3, 4, dtype=jnp.bfloat16)
LARGE = Shape(90, 2, 2, hidden=256, dtype=jnp.bfloat16)
BIASED = Shape(20, 2, 4, hidden=256, dtype=jnp.bfloat16, biased=True)


def check(shape: Shape, operands: list[np.ndarray]) -> np.ndarray:
    def apply(rows, ids, weights, *arrays):
        activation = CLAMPED if shape.biased else SwiGlu()
        kernel = MosaicExperts(shape.of_experts, interpret=True)
        return kernel(rows, ids, weights, between_others(*arrays, activation=activation))

    out = jax.jit(apply)(*operands)
    assert out.dtype == shape.dtype
    found, expected = np.asarray(out).astype(np.float32), one_by_one(*operands)
    np.testing.assert_allclose(
        found, expected, atol=TOLERANCE["bfloat16"] * (1 + abs(expected).max())
    )
    ids = operands[1]
    assert not found[((ids < 0) | (ids >= shape.experts)).all(1)].any()
    return found


def test_equals_the_reference() -> None:
    """Some experts have no row, rows of others are NaN, and so is what nobody owns."""
    check(SMALL, draw(SMALL, choices(SMALL, 0, 0.3, 0.5), 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "skew", "outside"),
    [
        (SMALL, 0.0, 1.0),  # no row at all
        (SMALL, 9.0, 0.0),  # nearly all rows to a few
        (LARGE, 0.0, 0.1),  # several tiles of an expert
        (BIASED, 0.0, 0.1),
        (Shape(5, 3, 16, dtype=jnp.bfloat16), 0.0, 0.0),
        (Shape(70, 1, 3, width=256, dtype=jnp.bfloat16), 9.0, 0.0),  # all rows to one
    ],
    ids=["none here", "few experts", "several tiles", "biased", "more experts", "all to one"],
)
def test_equals_the_reference_for_all_routings(shape: Shape, skew: float, outside: float) -> None:
    check(shape, draw(shape, choices(shape, 1, skew, outside), 1))


@pytest.mark.parametrize(
    ("shape", "capability", "reason"),
    [
        (ExpertShape(2048, 768, jnp.bfloat16), "9.0", None),
        (ExpertShape(2880, 2880, jnp.bfloat16), "9.0", "hidden size 2880 is no multiple of 128"),
        (ExpertShape(2048, 700, jnp.bfloat16), "9.0", "expert width 700 is no multiple of 128"),
        (ExpertShape(2048, 768, jnp.float32), "9.0", "it takes bfloat16, not float32"),
        (
            ExpertShape(2048, 768, jnp.bfloat16),
            "10.0",
            "it multiplies as Hopper does, and compute capability 10.0 does not",
        ),
    ],
)
def test_unsupported(shape: ExpertShape, capability: str, reason: str | None) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    assert MosaicExperts.unsupported(shape, device) == reason


def test_quantised_experts_are_computed_by_xla(caplog: Any) -> None:
    shape = Shape(6, 2, 4, hidden=512, width=256, dtype=jnp.bfloat16)
    rows, ids, weights, *_ = draw(shape, choices(shape, 0, 0.0, 0.0), 0)
    form = FORMS["fp8, blocks"]
    stacks = [random_array(form, axes, seed) for seed, axes in enumerate(shape.operands()[2:])]
    matrices: Any = ExpertWeights(*stacks)
    assert isinstance(matrices.gate_up, QuantizedArray)
    out = MosaicExperts(shape.of_experts)(jnp.asarray(rows), jnp.asarray(ids), weights, matrices)
    decoded = [np.asarray(stack.decode(jnp.float32)) for stack in stacks]
    expected = one_by_one(rows, ids, weights, *decoded)
    assert abs(np.asarray(out, np.float32) - expected).max() < 0.02 * abs(expected).max()
    assert "reads none of fp8" in caplog.text


@needs_compiler
@pytest.mark.parametrize("biased", [False, True])
def test_compiles_for_hopper(biased: bool) -> None:
    """The kernels have the names that the report finds their work by, and no stack is copied."""
    shape = Shape(512, 8, 16, hidden=2048, width=768, dtype=jnp.bfloat16, biased=biased)
    kernel = MosaicExperts(shape.of_experts)

    def apply(rows, ids, weights, *arrays):
        activation = CLAMPED if biased else SwiGlu()
        return kernel(rows, ids, weights, ExpertWeights(*arrays, activation=activation))

    rows, weights, *arrays = (jax.ShapeDtypeStruct(a, shape.dtype) for a in shape.operands())
    ids = jax.ShapeDtypeStruct((shape.rows, shape.top_k), jnp.int32)
    lowered = lower(apply, (rows, ids, weights, *arrays), "9.0")
    text = lowered.compile({"xla_gpu_autotune_level": "0"}).as_text()
    assert text is not None
    for name in kernel.expected_work(ExpertLoad(512, 8, 512.0, 16)):
        assert f"/{name}/" in text
    assert text.count('custom_call_target="mosaic_gpu') == 4
    assert not [line for line in text.split("\n") if " copy(" in line and "16,2048,1536" in line]
