"""The weights of a model as shapes: of bfloat16, or quantised as published checkpoints are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from tbo_jax.layers import stacked_product
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.parallel.sharding import bytes_on_device, leaf_specs
from tbo_jax.quantized import gpu_product
from tbo_jax.quantized.array import Format, Kind, QuantizedArray

Weights = Literal["bf16", "fp8", "int8", "int4", "mxfp4"]


def abstract_model(config: DecoderConfig, scanned: bool, weights: Weights = "bf16") -> CausalLM:
    """The model with shapes for weights.

    "fp8" has a factor for 128 x 128 numbers of all layers' matrices (DeepSeek-V3), "int8" one for
    each output, the head's too, "int4" one for 128 inputs (AWQ, GPTQ), and "mxfp4" one for 32
    inputs of the experts alone (gpt-oss). Embedding, norms and routers are bfloat16 in each.

    Raises:
        ValueError: a format, and a matrix that it does not fit.
    """
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0), scanned=scanned))
    if weights == "bf16":
        return model
    graph, state = nnx.split(model)
    held = []
    for path, variable in nnx.to_flat_state(state):
        form = _format(path, variable, weights)
        if form is not None:
            variable = variable.replace(_abstract(form, variable.shape, path))
        held.append((path, variable))
    return nnx.merge(graph, nnx.from_flat_state(held))


def _format(path: tuple[Any, ...], variable: nnx.Variable, weights: Kind) -> Format | None:
    inputs = variable.get_metadata().get("inputs")
    of_layer, of_experts = path[0] == "layers", inputs == -2
    if inputs is None or (weights != "int8" and not of_layer):
        return None
    if weights == "mxfp4" and not of_experts:
        return None
    if weights == "fp8":
        return Format("fp8", (128, 128))
    group = {"int8": variable.shape[inputs], "int4": 128, "mxfp4": 32}[weights]
    return Format(weights, (1, group) if inputs == -1 else (group, 1), inputs)


def _abstract(form: Format, shape: tuple[int, ...], path: tuple[Any, ...]) -> QuantizedArray:
    scales = {"int4": jnp.bfloat16, "mxfp4": jnp.uint8}.get(form.kind, jnp.float32)
    try:
        return QuantizedArray.abstract(form, shape, scales)
    except ValueError as error:
        raise ValueError(f"{'.'.join(map(str, path))} of shape {list(shape)}: {error}") from error


def expert_weight_bits(model: CausalLM) -> float | None:
    """Bits of a number of the experts' weights, factors included; None without experts."""
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        if variable.get_metadata().get("inputs") == -2:
            value = variable.get_raw_value()
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
            return 8 * held / math.prod(value.shape)
    return None


def parameter_bytes(path: tuple[Any, ...], variable: nnx.Variable, mesh: Mesh) -> int:
    """Bytes of a parameter that a device of `mesh` has."""
    leaves = jax.tree.leaves(variable.get_raw_value())
    return sum(
        bytes_on_device(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, leaf_specs(path, variable, mesh), strict=True)
    )


def product_work(model: CausalLM, mesh: Mesh, rows: set[int]) -> Mapping[str, tuple[float, float]]:
    """Operations and bytes of the kernels for products, by name, with so many rows.

    These are products with quantised matrices, and with one of a stack.
    """
    work: dict[str, tuple[float, float]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_raw_value()
        if variable.get_metadata().get("inputs") != -1:
            continue
        spec = leaf_specs(path, variable, mesh)[0]
        if not isinstance(value, QuantizedArray):
            if value.ndim == 3:
                columns, inputs = NamedSharding(mesh, spec).shard_shape(value.shape)[-2:]
                for count in rows:
                    work |= stacked_product.expected_work(count, columns, inputs, value.dtype)
            continue
        *lead, columns, inputs = NamedSharding(mesh, spec).shard_shape(value.values.shape)
        inputs *= 1 + value.format.is_packed
        summed = variable.get_metadata().get("summed")
        for count in rows:
            if summed is not None:  # a matrix for each head
                each = lead[-1], columns, inputs
                work |= gpu_product.expected_work_each(count, each, summed, value, jnp.bfloat16)
                continue
            work |= gpu_product.expected_work(count, columns, inputs, value, jnp.bfloat16)
    return work
