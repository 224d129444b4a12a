"""GPTQ's and AWQ's layouts of 4 bits, packed here number by number as their documentation says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tbo_jax.checkpoint.encoding import halves
from tbo_jax.checkpoint.int4 import GroupedInt4Weights
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder

OUTPUTS, INPUTS, GROUP = 24, 32, 8
NAME = "model.layers.0.self_attn.q_proj."
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in an int32, from its lowest bits on


def packed(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """[N, 8 M] -> [N, M] int32."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for row, column in np.ndindex(*out.shape):
        for place, which in enumerate(order):
            out[row, column] |= np.uint32(int(numbers[row, 8 * column + which]) << 4 * place)
    return out.view(np.int32)


def write(folder: Path, form: str, symmetric: bool) -> tuple[dict[str, Any], np.ndarray]:
    """A layer of the format; the tensors, and what the weight stands for, [out, in] float32."""
    rng = np.random.default_rng(len(form))
    numbers = rng.integers(0, 16, (OUTPUTS, INPUTS))
    zeros = (
        np.full((OUTPUTS, INPUTS // GROUP), 8) if symmetric else rng.integers(0, 16, (OUTPUTS, 4))
    )
    scales = rng.uniform(0.5, 2, (OUTPUTS, INPUTS // GROUP)).astype(np.float16)
    tensors = {NAME + "scales": np.ascontiguousarray(scales.T)}
    if form == "awq":
        tensors[NAME + "qweight"] = packed(numbers.T, AWQ_ORDER)
        tensors[NAME + "qzeros"] = packed(zeros.T, AWQ_ORDER)
    else:
        tensors[NAME + "qweight"] = np.ascontiguousarray(packed(numbers).T)
        tensors[NAME + "qzeros"] = packed((zeros - (form == "gptq")).T % 16)
        tensors[NAME + "g_idx"] = (np.arange(INPUTS) // GROUP).astype(np.int32)
    save_file(tensors, folder / "model.safetensors")
    factors = np.repeat(scales.astype(np.float32), GROUP, axis=1)
    return tensors, (numbers - np.repeat(zeros, GROUP, axis=1)) * factors


def weights_of(folder: Path, form: str, symmetric: bool) -> GroupedInt4Weights:
    how = partial(GroupedInt4Weights, group=GROUP, symmetric=symmetric)
    return how(TensorFolder.open(folder), awq=form == "awq", less=int(form == "gptq"))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
def test_every_part_is_that_of_the_whole(tmp_path: Path, form: str, symmetric: bool) -> None:
    _, expected = write(tmp_path, form, symmetric)
    weights = weights_of(tmp_path, form, symmetric)
    name = NAME + "weight"
    assert set(weights.stored(name, expected.shape)) == set(TensorFolder.open(tmp_path).names)
    rng = np.random.default_rng(0)
    for transpose in (False, True):
        for _ in range(20):
            index = tuple(
                slice(*sorted(rng.integers(0, n + 1, 2).tolist())) for n in expected.shape
            )
            part = expected[index].T if transpose else expected[index]
            found = np.full(part.shape, np.nan, np.float32)
            weights.read_into(name, found, index, transpose=transpose)
            np.testing.assert_array_equal(found, part)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
def test_what_is_held_is_the_same(tmp_path: Path, form: str) -> None:
    """Bytes of pairs of inputs, zero points as they are, and the file's own factors."""
    _, expected = write(tmp_path, form, False)
    encoding = weights_of(tmp_path, form, False).encoding(NAME + "weight", expected.shape, -1)
    assert encoding is not None and encoding.zeros is not None
    assert encoding.form.block == (1, GROUP) and encoding.scale_dtype == np.float16
    values = np.empty((OUTPUTS, INPUTS // 2), np.uint8)
    scales = np.empty((OUTPUTS, INPUTS // GROUP), np.float16)
    zeros = np.empty(scales.shape, np.uint8)
    for reader, out in (
        (encoding.values, values),
        (encoding.scales, scales),
        (encoding.zeros, zeros),
    ):
        reader.read_into(NAME + "weight", out, (slice(0, OUTPUTS), slice(0, out.shape[1])))
    numbers = halves(values).astype(np.float32) - np.repeat(zeros, GROUP, axis=1)
    np.testing.assert_array_equal(numbers * np.repeat(scales, GROUP, axis=1), expected)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", {"g_idx": np.arange(INPUTS, dtype=np.int32)[::-1] // GROUP}, "g_idx: groups that follow"),
        ("gptq", {"qzeros": np.zeros((4, 3), np.int32)}, "qzeros has zero points beside 8"),
        ("awq", {"qweight": np.zeros((INPUTS, 3), np.int64)}, "qweight is int64, expected int32"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    tmp_path: Path, form: str, change: dict[str, Any], message: str
) -> None:
    tensors, expected = write(tmp_path, form, True)
    tensors |= {NAME + key: np.ascontiguousarray(value) for key, value in change.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        weights_of(tmp_path, form, True).stored(NAME + "weight", expected.shape)
