"""From logits to tokens (`draw`); what a caller asks of that and is told (`params`, `logprobs`).

What options of a request do to its logits before is in `options`. The two for callers need no JAX.
"""

from typing import Any

from tbo_jax.sampling.params import MAX_SEED, SamplingParams

__all__ = [
    "MAX_SEED",
    "NOT_FINITE",
    "SamplingInputs",
    "SamplingParams",
    "greedy",
    "kept_tokens",
    "sample",
]


def __getattr__(name: str) -> Any:
    # Late: who only makes `SamplingParams`, such as a process that serves HTTP, needs no JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tbo_jax.sampling import draw

    return getattr(draw, name)
