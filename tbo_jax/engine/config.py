"""The options of an engine, written once: for `LLM`, for command lines, and for other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import jax.numpy as jnp
import tyro

from tbo_jax.overlap.checks import whole_number
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS, DispatchDtype, Transport

DTYPES: dict[str, Any] = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. What is None is chosen when the model and the machine are known.

    Raises:
        ValueError: a value that no model and no machine could have, by name.
    """

    devices: int | None = None
    """How many devices to use; default all, which several processes need. On CPU that many are
    made (default 1), unless JAX is in use already."""
    tensor_parallel: int = 1
    """Devices that share the attention and the feed-forward of a sequence."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of weights and compute; default float32 on CPU, bfloat16 elsewhere."""
    overlap: Annotated[OverlapConfig | None, tyro.conf.Suppress] = None
    """Two-batch overlap; default `OverlapConfig.from_env()` (`USE_TBO`)."""
    max_context: int | None = None
    """Most tokens of a request, prompt and generated together; default what the model was made
    for, as far as the cache holds it."""
    max_sequences: int = 16
    """Most sequences of one step on one rank; further ones wait."""
    max_tokens: int = 256
    """Most tokens of one step on one rank; longer prompts are cut in chunks."""
    page_size: int = 16
    """Tokens of one page of the key/value cache."""
    num_pages: int | None = None
    """Pages of each device; default what max_sequences full contexts need, within 1 GiB on CPU and
    what weights and the largest step leave free on an accelerator, 90 % at most."""
    scanned: bool = False
    """One loop over stacked layers instead of unrolled ones: compiles in a fraction of the time,
    and copies each layer's weights but the experts in every step on CPU and GPU."""
    transport: Transport = "all_to_all"
    """How tokens travel to the devices of their experts."""
    dispatch_dtype: DispatchDtype | None = None
    """Round what travels to the experts to 8 bits, with a scale for each token: half the bytes of
    bfloat16, and other text."""
    look_ahead: bool | None = None
    """Dispatch a step before the tokens of the last one are read; default: unless speculate."""
    speculate: int = 0
    """Verify up to so many draft tokens of a sequence in a step, guessed from its text; 0: none."""
    prefix_cache: bool = True
    """Keep the keys and values of ended requests while there is room, and compute only what follows
    where a prompt begins like one of them, or like one that runs."""
    request_options: bool = True
    """Compile what penalties, biases, log-probabilities and the like need, and leave memory for it;
    requests that ask for such options are refused without."""
    max_logprobs: int = 20
    """Most log-probabilities of other tokens that a request may ask for with each of its own."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, unless JAX is told another one."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "max_sequences", "max_tokens", "page_size"):
            whole_number(name, getattr(self, name), 1)
        whole_number("max_logprobs", self.max_logprobs, 0)
        for name, least in {"devices": 1, "max_context": 2, "num_pages": 2}.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if self.max_tokens < self.max_sequences:
            raise ValueError(
                f"max_tokens is {self.max_tokens}: expected at least max_sequences, "
                f"{self.max_sequences}"
            )
        for name, allowed in {
            "dtype": (None, *DTYPES),
            "transport": tuple(TRANSPORTS),
            "dispatch_dtype": (None, *get_args(DispatchDtype)),
            "look_ahead": (None, True, False),
            "scanned": (True, False),
            "prefix_cache": (True, False),
            "request_options": (True, False),
            "compilation_cache": (True, False),
        }.items():
            value = getattr(self, name)
            if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
                known = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {value!r}: expected one of {known}")
        if self.overlap is not None and not isinstance(self.overlap, OverlapConfig):
            raise ValueError(f"overlap is {self.overlap!r}: expected an OverlapConfig or None")
        takes_drafts(self.speculate, self.max_tokens, self.look_ahead)


def takes_drafts(speculate: int, max_tokens: int, look_ahead: bool | None) -> bool:
    """Whether decodes verify drafts: `speculate` of them beside the token that is due.

    Raises:
        ValueError: a step of `max_tokens` has no room for them, or they go with `look_ahead`.
    """
    if whole_number("speculate", speculate, 0) >= max_tokens:
        raise ValueError(f"speculate is {speculate}: expected less than max_tokens, {max_tokens}")
    if speculate and look_ahead:
        raise ValueError(
            f"look_ahead with speculate={speculate}: expected one of them, as drafts need the "
            "tokens of the last step"
        )
    return speculate > 0
