"""Causal attention of whole sequences on TPU, with a gradient: JAX's splash attention.

It writes no scores to memory, and skips blocks that causality or a window hides. JAX keeps it for
TPU in `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.attention.kernel import AttentionLoad, AttentionShape

LANES = 128
LARGEST_BLOCK = 512  # queries or keys of a program
# What the kernels are called in XLA's text.
FORWARD, QUERIES_GRAD, KEYS_GRAD = (
    f"splash_mha_{phase}" for phase in ("fwd_residuals", "dq_no_residuals", "dkv_no_residuals")
)


@dataclass(frozen=True)
class TpuFlashAttention:
    """`dense_causal_attention` for TPUs, for one shape; `interpret` runs it without one, slowly."""

    shape: AttentionShape
    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        """Why the kernels cannot run this shape; None if they can."""
        dtype = jnp.dtype(shape.dtype)
        if dtype != jnp.bfloat16:
            return f"{dtype.name} would be rounded to bfloat16 by the matrix units"
        return None

    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        length: int,
        scale: float,
        sliding_window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Takes and gives what `dense_causal_attention` does; differentiable in all arrays."""
        tokens, heads, _ = queries.shape
        block = _block(length)
        padded = -(-length // block) * block
        kernel = _kernel(heads, padded, sliding_window, block, self.interpret)

        def by_head(x: jax.Array) -> jax.Array:
            """[T, N, H] -> [T / length, N, padded, H]; keys behind the end are seen by nobody."""
            x = x.reshape(-1, length, *x.shape[1:])
            x = jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
            return x.swapaxes(1, 2)

        attend = functools.partial(kernel, sinks=sinks)
        scaled = (queries * jnp.asarray(scale, queries.dtype)).astype(queries.dtype)
        out = jax.vmap(attend)(by_head(scaled), by_head(keys), by_head(values))
        return out.swapaxes(1, 2)[:, :length].reshape(tokens, heads, values.shape[2])

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        """Floating-point operations and bytes, by the name that XLA's text has for each kernel.

        A product counts the masked half of the blocks on the diagonal too. The keys of a block are
        read again for each block of queries that sees them, and the other way round.
        """
        shape, tokens = self.shape, load.tokens
        width = jnp.dtype(shape.dtype).itemsize
        size, values, heads = shape.head_dim, shape.value_elements, shape.heads
        block = _block(load.context)
        product = tokens * heads * (load.seen + block)  # 2 x half the pairs
        blocks = (load.seen + block) / (2 * block)  # that one of the other kind is used with
        of_queries, of_values = tokens * heads * size, tokens * heads * values
        sums = 4 * LANES * tokens * heads  # a float32 for each query and head, in all lanes
        return {
            FORWARD: (
                float(product * (size + values)),
                float(width * (of_queries + of_values) * (1 + blocks) + sums),
            ),
            QUERIES_GRAD: (
                float(product * (2 * size + values)),
                float(width * (2 * of_queries + of_values + blocks * (of_queries + of_values))),
            ),
            KEYS_GRAD: (
                float(product * 2 * (size + values)),
                float(width * (of_queries + of_values) * (2 + blocks)),
            ),
        }


def _block(length: int) -> int:
    """Queries, and keys, of a block: a multiple of `LANES`."""
    whole = -(-length // LANES) * LANES
    return min(whole, LARGEST_BLOCK)


def _kernel(heads: int, length: int, window: int | None, block: int, interpret: bool) -> Any:
    """[N, S, H], [G, S, H], [G, S, V] -> [N, S, V]."""
    # Imported here: it takes a quarter of a second, and has no use on other platforms.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    mask = (
        splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    )
    sizes = splash.splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
        block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
