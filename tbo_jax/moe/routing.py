"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def top_k_softmax(logits: jax.Array, top_k: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts, then the `top_k` largest (Mixtral, Qwen3-MoE).

    Args:
        logits: [T, E] router logits; the softmax is in float32.
        top_k: experts per token, K.
        renormalize: scale the chosen weights of a token to sum to one.

    Returns:
        weights [T, K] in the dtype of `logits`, expert ids [T, K] int32.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights.astype(logits.dtype), experts.astype(jnp.int32)


def load_balancing_loss(logits: jax.Array, experts: jax.Array) -> jax.Array:
    """Auxiliary loss that is 1 when tokens are spread evenly over the experts, more when not.

    Switch Transformer (Fedus et al. 2021), equation 4, with K choices a token.

    Args:
        logits: [T, E] router logits.
        experts: [T, K] chosen experts.
    """
    num_experts = logits.shape[-1]
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).mean(0)
    share = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32).mean((0, 1))
    return num_experts * jnp.sum(probability * share)


@jax.custom_vjp
def attach_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """`x` unchanged; the gradient of whatever is differentiated gains the gradient of `loss`.

    An auxiliary loss inside a layer thus needs no way out through the stages (the technique of
    Megatron-LM's `MoEAuxLossAutoScaler`). It presumes that the cotangents are those of a loss with
    weight one.
    """
    return x


def _attach_forward(x, loss):
    return x, loss


def _attach_backward(loss, grad):
    return grad, jnp.ones_like(loss)


attach_loss.defvjp(_attach_forward, _attach_backward)
