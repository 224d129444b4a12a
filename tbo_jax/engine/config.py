"""The options of an engine, written once: for `LLM`, for command lines, and for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, get_args

import jax.numpy as jnp
import tyro

from tbo_jax.attention.rounded import CACHE_DTYPES, CacheDtype
from tbo_jax.checkpoint.quantizing import QUANTIZE, Quantize
from tbo_jax.overlap.checks import whole_number
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS, DispatchDtype, Transport
from tbo_jax.step.backends import KERNELS, KernelChoice

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
    quantize: Quantize = "stored"
    """How weights are held: as the checkpoint has them, decoded to dtype ("none"), or with 8 bits a
    number and a factor for each output where the checkpoint is not quantised."""
    cache_dtype: CacheDtype | None = None
    """Hold keys and values in 8 bits, with a factor for each head of each token: half the bytes of
    bfloat16, and other text; default in dtype."""
    overlap: Annotated[OverlapConfig | None, tyro.conf.Suppress] = None
    """Two-batch overlap; default `OverlapConfig.from_env()` (`USE_TBO`)."""
    max_context: int | None = None
    """Most tokens of a request, prompt and generated together; default what the model was made
    for, as far as the cache holds it."""
    max_sequences: int = 16
    """Most sequences of one step on one rank; further ones wait."""
    max_batched_tokens: int = 256
    """Most tokens of one step on one rank; longer prompts are cut in chunks."""
    page_size: int = 16
    """Tokens of one page of the key/value cache."""
    num_pages: int | None = None
    """Pages of each device; default what max_sequences full contexts need, within 1 GiB on CPU and
    what weights and the largest step leave free on an accelerator, 90 % at most."""
    kernels: KernelChoice = "auto"
    """Kernels for attention and experts: of Pallas' Triton backend (GPUs from Ampere on, where JAX
    still has it), of Mosaic (Hopper, Blackwell, TPU) or XLA's own; auto: the first that there is
    for the machine and takes the model's shape, in this order."""
    scanned: bool = False
    """One loop over stacked layers instead of unrolled ones: compiles in a fraction of the time,
    and copies each layer's weights but the experts in every step on CPU and GPU."""
    transport: Transport = "all_to_all"
    """How tokens travel to the devices of their experts."""
    dispatch_dtype: DispatchDtype | None = None
    """Round what travels to the experts to 8 bits, with a scale for each token: half the bytes of
    bfloat16, and other text."""
    look_ahead: bool | None = None
    """Dispatch a step before the tokens of the last one are read; default: yes."""
    speculate: int = 0
    """Verify up to so many draft tokens of a sequence in a step, guessed from its text; 0: none."""
    prefix_cache: bool = True
    """Keep the keys and values of ended requests while there is room, and compute only what follows
    where a prompt begins like one of them, or like one that runs."""
    deterministic: bool = False
    """Give a request the same logits and tokens, bit by bit, whatever runs beside it; on CPU only,
    and slower."""
    request_options: bool = True
    """Compile what penalties, biases, log-probabilities and the like need, and leave memory for it;
    requests that ask for such options are refused without."""
    max_logprobs: int = 20
    """Most log-probabilities of other tokens that a request may ask for with each of its own."""
    prompt_logprobs: Annotated[bool, tyro.conf.Suppress] = False
    """Compile what log-probabilities of prompts need, a second program for each size of prefill;
    requests that ask for them are refused without."""
    serve_early: bool | None = None
    """Take requests as soon as the largest step of each kind is compiled, which can run all others;
    these are compiled beside the requests, smallest first. Not with USE_TBO=auto, nor in several
    processes. Default: yes for `tbo-jax serve` on CPU and TPU, no elsewhere."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, unless JAX is told another one."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make one from options by name.

        Raises:
            TypeError: an option does not exist, or has another name now.
            ValueError: as above.
        """
        if "max_tokens" in options:
            raise TypeError(
                f"max_tokens is {options['max_tokens']!r:.80}: expected max_batched_tokens, as the "
                "most tokens of one step on one rank are called now; those of a request are the "
                "max_new_tokens of its SamplingParams"
            )
        known = [field.name for field in fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise TypeError(f"an engine has no options {unknown}: expected some of {known}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "max_sequences", "max_batched_tokens", "page_size"):
            whole_number(name, getattr(self, name), 1)
        whole_number("max_logprobs", self.max_logprobs, 0)
        for name, least in {"devices": 1, "max_context": 2, "num_pages": 2}.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}: expected at least "
                f"max_sequences, {self.max_sequences}"
            )
        for name, allowed in {
            "dtype": (None, *DTYPES),
            "quantize": QUANTIZE,
            "cache_dtype": (None, *CACHE_DTYPES),
            "transport": tuple(TRANSPORTS),
            "dispatch_dtype": (None, *get_args(DispatchDtype)),
            "look_ahead": (None, True, False),
            "kernels": KERNELS,
            "scanned": (True, False),
            "prefix_cache": (True, False),
            "deterministic": (True, False),
            "request_options": (True, False),
            "prompt_logprobs": (True, False),
            "serve_early": (None, True, False),
            "compilation_cache": (True, False),
        }.items():
            value = getattr(self, name)
            if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
                known = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {value!r}: expected one of {known}")
        if self.overlap is not None and not isinstance(self.overlap, OverlapConfig):
            raise ValueError(f"overlap is {self.overlap!r}: expected an OverlapConfig or None")
        check_drafts(self.speculate, self.max_batched_tokens, self.deterministic)


def check_drafts(speculate: int, max_batched_tokens: int, deterministic: bool = False) -> None:
    """Check the number of drafts that decodes verify beside the token that is due.

    Raises:
        ValueError: a step of `max_batched_tokens` has no room for them, or they go with
            `deterministic`.
    """
    if whole_number("speculate", speculate, 0) >= max_batched_tokens:
        raise ValueError(
            f"speculate is {speculate}: expected less than max_batched_tokens, {max_batched_tokens}"
        )
    if speculate and deterministic:
        raise ValueError(
            f"deterministic=True with speculate={speculate}: expected one of them, as steps that "
            "verify drafts are programs of another shape"
        )
