"""The order of compute, fixed by data dependence, forward and backward.

Forward, a compute takes its input through an `optimization_barrier` together with what the compute
before it gave. The barrier has a transpose, which is a barrier, but that one adds zeros to the
gradient of all that it passed, and leaves the gradients of weights free: XLA then puts them at the
end of the step, and keeps everything that they need until then. So the backward order is written
down here: a scalar, the token, goes from compute to compute, and its gradient comes back through
all of them, last first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        leaves = [
            leaf
            for leaf in jax.tree.leaves(inputs)
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
        ]
        if not leaves:
            return cls(None, jnp.zeros((), jnp.float32))
        # All gradients go into the token's, so it had better vary over all axes that they do.
        with _reverse_only():
            return cls(None, _token(max(leaves, key=lambda leaf: len(_axes(leaf)))))


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

    Raises:
        TypeError: a forward-mode derivative is taken.
    """
    token = order.token
    if order.after is not None:
        with _reverse_only():
            inputs, weights, token = _begin(inputs, weights, order.after, token)
    outputs, others = compute(weights, *inputs)
    with _reverse_only():
        outputs, token = _end(outputs, token)
    return (outputs, others), Order(outputs, token)


def waiting(tree: Any, after: Any) -> Any:
    """The same arrays, once `after`, a pytree of arrays, is there."""
    return _barrier((tree, after))[0] if jax.tree.leaves(after) else tree


@contextmanager
def _reverse_only() -> Iterator[None]:
    """Say what to do instead where JAX says that a `custom_vjp` has no forward-mode derivative.

    A `jit` around the derivative finds it out too late to be caught here.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "run_layers with several micro-batches has no forward-mode derivative (jax.jvp, "
            "linearize, jacfwd, hessian): take a reverse-mode one (jax.grad, vjp, jacrev), or one "
            "micro-batch"
        ) from error


def _axes(array: Any) -> frozenset[str]:
    """The mesh axes over which an array varies, inside `jax.shard_map` with `check_vma`."""
    return jax.typeof(array).manual_axis_type.varying


def _varying(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The same numbers, as an array that varies over these axes too; no operation."""
    missing = tuple(sorted(axes - _axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@jax.custom_vjp
def _token(x: jax.Array) -> jax.Array:
    """A token whose gradient has a use, or else XLA takes it out of all barriers."""
    return _varying(jnp.zeros((), jnp.float32), _axes(x))


def _token_backward(like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    nothing = (0 * grad).astype(like.dtype)  # that XLA does not see through: grad may be a NaN
    zeros = _varying(jnp.zeros_like(like), _axes(like))
    return (zeros.at[(0,) * like.ndim].set(nothing),)


_token.defvjp(lambda x: (_token(x), x), _token_backward)


def _begin_forward(inputs: Any, weights: Any, after: Any, token: jax.Array) -> Any:
    inputs, _ = _barrier((inputs, after))
    return inputs, weights, token


def _begin_backward(_: None, grads: Any) -> Any:
    inputs, weights, token = grads
    known = [grad for grad in jax.tree.leaves(_none_for_zeros((inputs, weights))) if grad.size]
    if _is_zero(token) and known:  # nothing comes later
        token = _number(known, token.aval.manual_axis_type.varying)
    _, weights, token = _barrier(_none_for_zeros((inputs, weights, token)))
    return _none_for_zeros(inputs), weights, None, token


def _number(known: list[jax.Array], axes: frozenset[str]) -> jax.Array:
    """Any number that XLA cannot know, for a constant goes past barriers; it varies over `axes`."""
    best = min(known, key=lambda grad: len(_axes(grad) - axes))
    number = jnp.real(best.reshape(-1)[0]).astype(jnp.float32)
    more = tuple(sorted(_axes(best) - axes))
    return _varying(jax.lax.psum(number, more) if more else number, axes)


def _end_forward(outputs: Any, token: jax.Array) -> Any:
    return outputs, token


def _end_backward(_: None, grads: Any) -> Any:
    return _barrier(_none_for_zeros(grads))


def _barrier(tree: Any) -> Any:
    """One barrier around all arrays, each of which varies over the axes that it did before.

    With JAX 0.10 all that comes out of a barrier varies over all axes that anything in it does.
    Then there is one barrier for each kind, which waits for what varies over these axes or fewer.
    """
    leaves, structure = jax.tree.flatten(tree)
    kinds = [_axes(leaf) for leaf in leaves]
    passed = optimization_barrier(leaves)
    if [_axes(leaf) for leaf in passed] != kinds:
        for kind in dict.fromkeys(kinds):
            within = [at for at, axes in enumerate(kinds) if axes <= kind]
            group = optimization_barrier([_varying(leaves[at], kind) for at in within])
            for at, leaf in zip(within, group, strict=True):
                passed[at] = leaf if kinds[at] == kind else passed[at]
    return jax.tree.unflatten(structure, passed)


def _none_for_zeros(grads: Any) -> Any:
    return jax.tree.map(lambda g: None if _is_zero(g) else g, grads, is_leaf=_is_zero)


def _is_zero(grad: Any) -> bool:
    return isinstance(grad, SymbolicZero) or getattr(grad, "dtype", None) == jax.dtypes.float0


def _with_backward(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """`forward`, with a backward pass that is told which gradients are zero.

    `shard_map` outside of `jit` refuses such functions, hence the `jit`; inside it adds nothing.
    """

    def primal(*args: Any) -> tuple[Any, None]:
        wrapped = lambda leaf: isinstance(leaf, CustomVJPPrimal)  # noqa: E731
        return forward(*jax.tree.map(lambda leaf: leaf.value, args, is_leaf=wrapped)), None

    function = jax.custom_vjp(forward)
    function.defvjp(primal, backward, symbolic_zeros=True)
    return jax.jit(function, inline=True)


_begin = _with_backward(_begin_forward, _begin_backward)
_end = _with_backward(_end_forward, _end_backward)
