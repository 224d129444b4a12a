"""Linear maps and norms, as all decoder layers make them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tbo_jax.layers import stacked_product
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.stacked_product import StackedMatrix
from tbo_jax.parallel.sharding import Shard
from tbo_jax.quantized import gpu_product
from tbo_jax.quantized.array import QuantizedArray, times, times_each

FEW_ROWS = 64  # up to here `project` has forms of its own for CPU


def project(x: jax.Array, weight: jax.Array | QuantizedArray) -> jax.Array:
    """`x @ weight.T`: [T, K], [N, K] -> [T, N]."""
    if isinstance(weight, QuantizedArray):
        return _quantized(x, weight).astype(x.dtype)
    if x.shape[0] > FEW_ROWS:
        return _plain(x, weight)
    on_cpu = _summed_in_float32 if x.dtype == jnp.bfloat16 else _weight_on_the_left
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=_plain)


def project_with_one(x: jax.Array, weight: StackedMatrix) -> jax.Array:
    """`project` with one matrix of a stack [L, N, K]; read in place where that is of use."""

    def sliced(x: jax.Array, weight: StackedMatrix) -> jax.Array:
        return project(x, weight.sliced())

    if not stacked_product.takes(x.shape[0], x.dtype, weight.stack):
        return sliced(x, weight)
    return jax.lax.platform_dependent(x, weight, cuda=stacked_product.product, default=sliced)


def project_each(x: jax.Array, weight: jax.Array | QuantizedArray, summed: int) -> jax.Array:
    """Products with a matrix for each of N heads, in the dtype of `x`.

    [T, N, K], [N, K, R] -> [T, N, R]; with `summed` -1 the weight is [N, R, K].
    """
    by_xla = functools.partial(times_each, summed=summed)
    if not isinstance(weight, QuantizedArray) or not gpu_product.takes_each(
        x.shape[0], x.dtype, weight, summed
    ):
        return by_xla(x, weight)
    by_kernel = functools.partial(gpu_product.product_each, summed=summed)
    return jax.lax.platform_dependent(x, weight, cuda=by_kernel, default=by_xla)


def _quantized(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """[T, K], [N, K] -> [T, N] float32."""
    decoding = functools.partial(times, summed=-1)
    if not gpu_product.takes(x.shape[0], x.dtype, weight):
        return decoding(x, weight)
    return jax.lax.platform_dependent(x, weight, cuda=gpu_product.product, default=decoding)


def _plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("tk,nk->tn", x, weight)


def _summed_in_float32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product, its float32 result rounded here: for that XLA:CPU calls a library.

    40 products of [16, 576] and [1536, 576] in bfloat16, 2 cores: 17 ms against 104 with a bfloat16
    result (jax 0.10.2; 8 and 8 on 0.12).
    """
    return times(x, weight, summed=-1).astype(x.dtype)


def _weight_on_the_left(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product turned round: Eigen, which XLA:CPU calls, is faster so with few rows.

    The seven products of a layer of SmolLM2-135M, 30 layers, 2 cores, jax 0.10.2: 43 ms against 67
    for 16 rows, 32 against 50 for 2. The clamp changes nothing; without it XLA turns the product
    back before it compiles it.
    """
    turned = jnp.einsum("nk,tk->nt", weight, x)
    limit = jnp.array(jnp.inf, turned.dtype)
    return jax.lax.clamp(-limit, turned, limit).T


class Linear(nnx.Module):
    """`x @ weight.T + bias` with the weight as checkpoints keep it, [out, in].

    With tensor parallelism a device has some of the outputs, or of the inputs. With some of the
    inputs `product` is a partial sum, and the bias has to wait until it is complete.
    """

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        config: DecoderConfig,
        *,
        bias: bool = False,
        sharded_outputs: int = 0,
        sharded_inputs: int = 0,
        rngs: nnx.Rngs,
    ):
        """Args:
        fan_in, fan_out, config: sizes, dtype and scale of the initial weights.
        bias: whether there is one.
        sharded_outputs, sharded_inputs: share the outputs or the inputs out over the devices of
            a rank, in so many units that stay whole; 0: do not.
        """
        init = nnx.initializers.normal(config.initializer_range)
        outputs = Shard("tensor", 0, sharded_outputs) if sharded_outputs else None
        shard = Shard("tensor", 1, sharded_inputs) if sharded_inputs else outputs
        weight = init(rngs.params(), (fan_out, fan_in), config.dtype)
        self.weight = nnx.Param(weight, shard=shard, inputs=-1)
        self.bias = nnx.Param(jnp.zeros(fan_out, config.dtype), shard=outputs) if bias else None
        # Which one, where the weight is that of all layers.
        self.layer: jax.Array | None = nnx.data(None)

    def share_stack(self, stacked: Linear, layer: Any) -> None:
        """Use the weights of all layers [L, out, in], of which this is number `layer`.

        Those that are quantised stay as they are.
        """
        if not isinstance(stacked.weight.get_raw_value(), QuantizedArray):
            self.weight = stacked.weight
            self.layer = nnx.data(jnp.asarray(layer, jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, out]."""
        return self.add_bias(self.product(x))

    def product(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, out], without the bias."""
        if self.layer is None:
            return project(x, self.weight[...])
        return project_with_one(x, StackedMatrix(self.weight[...], self.layer))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """`y` [T, out] plus the bias, if there is one."""
        return y if self.bias is None else y + self.bias[...]


def share_projections(module: nnx.Module, stacked: nnx.Module, layer: Any) -> None:
    """Have the linear maps of a module read the stack of all layers: see `StackedLayers`."""
    for name, part in vars(module).items():
        if isinstance(part, Linear):
            part.share_stack(getattr(stacked, name), layer)


def rms_norm(
    features: int, config: DecoderConfig, rngs: nnx.Rngs, epsilon: float | None = None
) -> nnx.RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich 2019), by default with the model's epsilon."""
    return nnx.RMSNorm(
        features,
        epsilon=config.rms_norm_eps if epsilon is None else epsilon,
        dtype=config.dtype,
        param_dtype=config.dtype,
        rngs=rngs,
    )
