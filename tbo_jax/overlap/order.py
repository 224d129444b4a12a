"""The order of compute, fixed by data dependence, forward and backward.

Forward, a compute takes its input through an `optimization_barrier` together with what the compute
before it gave. The barrier has a transpose, which is a barrier, but that one adds zeros to the
gradient of all that it passed, and leaves the gradients of weights free: XLA then puts them at the
end of the step, and keeps everything that they need until then. So the backward order is written
down here: a scalar, the token, goes from compute to compute, and its gradient comes back through
all of them, last first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.lax import optimization_barrier


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Order:
    """Where a program stands: what comes next waits for this."""

    after: Any  # what the latest compute gave; None: there was none
    token: jax.Array  # [] float32

    @classmethod
    def start(cls, inputs: Any) -> Order:
        """Before the first compute, of whose inputs one at least should be differentiated."""
        leaves = (
            leaf for leaf in jax.tree.leaves(inputs) if jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        first = next(leaves, None)
        return cls(None, jnp.zeros((), jnp.float32) if first is None else _token(first))


def in_order(compute: Callable[..., Any], weights: Any, inputs: Any, order: Order) -> Any:
    """`compute(weights, *inputs)`, behind the latest compute; backward before it.

    Args:
        compute: gives (what others wait for, what they do not).
        weights: those whose gradients are to be computed before the backward pass goes on. They do
            not hold up the gradients of the inputs, which may travel meanwhile.
        inputs: tuple.
        order: so far.

    Returns:
        What `compute` gave, and the order from here on.
    """
    token = order.token
    if order.after is not None:
        inputs, weights, token = _begin(inputs, weights, order.after, token)
    outputs, others = compute(weights, *inputs)
    outputs, token = _end(outputs, token)
    return (outputs, others), Order(outputs, token)


@jax.custom_vjp
def _token(x: jax.Array) -> jax.Array:
    """A token whose gradient has a use, or else XLA takes it out of all barriers."""
    return jnp.zeros((), jnp.float32)


def _token_backward(like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    nothing = (0 * grad).astype(like.dtype)  # that XLA does not see through: grad may be a NaN
    return (jnp.zeros_like(like).at[(0,) * like.ndim].set(nothing),)


_token.defvjp(lambda x: (_token(x), x), _token_backward)


@jax.custom_vjp
def _begin(inputs: Any, weights: Any, after: Any, token: jax.Array) -> Any:
    inputs, _ = optimization_barrier((inputs, after))
    return inputs, weights, token


@jax.custom_vjp
def _end(outputs: Any, token: jax.Array) -> Any:
    return outputs, token


def _begin_backward(_: None, grads: Any) -> Any:
    inputs, weights, token = grads
    known = jax.tree.leaves(_none_for_zeros(inputs))
    if _is_zero(token) and known:  # nothing comes later
        # Any number that XLA cannot know: a constant goes past barriers.
        token = known[0].reshape(-1)[0].astype(jnp.float32)
    _, weights, token = _barrier((inputs, weights, token))
    return _none_for_zeros(inputs), weights, None, token


def _end_backward(_: None, grads: Any) -> Any:
    return _barrier(grads)


def _barrier(grads: Any) -> Any:
    """One barrier around all gradients but those that are zero, which become None."""
    leaves, structure = jax.tree.flatten(_none_for_zeros(grads), is_leaf=lambda x: x is None)
    some = iter(optimization_barrier([leaf for leaf in leaves if leaf is not None]))
    return jax.tree.unflatten(structure, [None if g is None else next(some) for g in leaves])


def _none_for_zeros(grads: Any) -> Any:
    return jax.tree.map(lambda g: None if _is_zero(g) else g, grads, is_leaf=_is_zero)


def _is_zero(grad: Any) -> bool:
    return isinstance(grad, SymbolicZero) or getattr(grad, "dtype", None) == jax.dtypes.float0


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any) -> tuple[Any, None]:
        primal = lambda leaf: isinstance(leaf, CustomVJPPrimal)  # noqa: E731
        return function(*jax.tree.map(lambda leaf: leaf.value, args, is_leaf=primal)), None

    return forward


_begin.defvjp(_forward(_begin), _begin_backward, symbolic_zeros=True)
_end.defvjp(_forward(_end), _end_backward, symbolic_zeros=True)
