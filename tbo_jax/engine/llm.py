"""`LLM`: a checkpoint, ready to generate."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.checkpoint.hub import fetch_config, fetch_weights
from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.engine.cache_size import default_num_pages
from tbo_jax.engine.devices import make_devices, use_compilation_cache
from tbo_jax.engine.engine import Engine, TokenEvent
from tbo_jax.engine.scheduling.request import FinishReason
from tbo_jax.host.progress import progress_bar
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS, Transport
from tbo_jax.parallel.exchange.message import DispatchDtype
from tbo_jax.parallel.processes import agree, from_first, is_first, least
from tbo_jax.parallel.sharding import TENSOR
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import CacheConfig
from tbo_jax.text import Tokenizer, check_template_arguments, end_of_sequence_ids

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages
DTYPES: dict[str, Any] = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt gave. With `finish_reason` "error" `error` says why, and the rest is empty."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated, without the end-of-sequence token
    text: str
    finish_reason: FinishReason
    error: str | None = None


class LLM:
    """A language model with its tokenizer, compiled and ready to generate.

    Experts are sharded over all devices; attention is data-parallel over them, in groups of
    `tensor_parallel`. Of several processes (`parallel.processes.connect`) each makes the same
    object and calls `generate`; the prompts are those of the first.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        devices: int | None = None,
        tensor_parallel: int = 1,
        dtype: Literal["bfloat16", "float32"] | None = None,
        overlap: OverlapConfig | None = None,
        max_context: int | None = None,
        max_sequences: int = 16,
        max_tokens: int = 256,
        page_size: int = 16,
        num_pages: int | None = None,
        scanned: bool = False,
        transport: Transport = "all_to_all",
        dispatch_dtype: DispatchDtype | None = None,
        look_ahead: bool | None = None,
        speculate: int = 0,
        compilation_cache: bool = True,
        show_progress: bool = False,
    ):
        """Load and compile.

        Args:
            model: a Hugging Face folder, or the id of a model on the hub.
            devices: how many devices to use; default all, which several processes need. On CPU that
                many are made, unless JAX is in use already.
            tensor_parallel: devices that share the attention and the feed-forward of a sequence.
                Groups of so many have sequences of their own.
            dtype: of weights and compute; default float32 on CPU, bfloat16 elsewhere.
            overlap: two-batch overlap; default `OverlapConfig.from_env()` (`USE_TBO`). What mode
                "auto" decided, and why, is in `statistics`.
            max_context: most tokens of a request, prompt and generated together; default what the
                model was made for, as far as the cache holds it.
            max_sequences: most sequences of one step on one device; further ones wait.
            max_tokens: most tokens of one step on one device; longer prompts are cut in chunks.
            page_size: tokens of one page of the key/value cache.
            num_pages: pages of each device; default what `max_sequences` full contexts need, within
                1 GiB on CPU and 90 % of the free memory on an accelerator.
            scanned: one loop over stacked layers instead of unrolled ones: compiles in a fraction
                of the time, and copies each layer's weights but the experts in every step on CPU
                and GPU.
            transport: of the expert exchange (`parallel.exchange` has a table).
            dispatch_dtype: round what travels to the experts to 8 bits, "float8_e4m3fn" or "int8",
                with a scale for each token: half the bytes of bfloat16, and other text.
            look_ahead: dispatch a step before the last one's tokens are read (`Engine`); default:
                unless `speculate`.
            speculate: most tokens of a sequence, guessed from its text, that a step verifies;
                0: none.
            compilation_cache: keep compiled programs in the user's cache folder, unless JAX is
                configured to keep them elsewhere already.
            show_progress: bars on stderr while loading and compiling.

        Raises:
            ValueError: something is wrong with the checkpoint (`CheckpointError`), the tokenizer
                (`TokenizerError`), an argument, or `USE_TBO`, or they are not those of the first
                process.
        """
        self.overlap = OverlapConfig.from_env() if overlap is None else overlap
        for name, value in {"max_sequences": max_sequences, "page_size": page_size}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_tokens < max_sequences:
            raise ValueError(
                f"max_tokens is {max_tokens}: expected at least max_sequences, {max_sequences}"
            )
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported: expected {' or '.join(DTYPES)}")
        if compilation_cache:
            use_compilation_cache()
        quiet = not (show_progress and is_first())
        self.folder = fetch_config(os.fspath(model), quiet)
        self.mesh = make_devices(devices, tensor_parallel)
        platform = self.mesh.devices.flat[0].platform
        chosen = DTYPES[dtype or ("float32" if platform == "cpu" else "bfloat16")]
        config, _ = read_config(self.folder, chosen)
        if max_context is not None and not 2 <= max_context <= config.max_position_embeddings:
            raise ValueError(
                f"max_context {max_context} is out of range: expected 2 to "
                f"{config.max_position_embeddings}, the model's max_position_embeddings"
            )
        agree(
            dict(
                devices=self.mesh.size,
                tensor_parallel=tensor_parallel,
                config=repr(config),
                overlap=self.overlap,
                max_context=max_context,
                max_sequences=max_sequences,
                max_tokens=max_tokens,
                page_size=page_size,
                num_pages=num_pages,
                scanned=scanned,
                transport=transport,
                dispatch_dtype=dispatch_dtype,
                look_ahead=look_ahead,
                speculate=speculate,
                jax=jax.__version__,
            )
        )
        self.tokenizer = Tokenizer.from_folder(self.folder)
        end_of_sequence = end_of_sequence_ids(self.folder, self.tokenizer)
        self.folder = fetch_weights(os.fspath(model), self.folder, quiet)

        start = time.perf_counter()
        show_progress = show_progress and is_first()
        with progress_bar("loading", show_progress) as update:
            weights = load_model(
                self.folder, mesh=self.mesh, dtype=chosen, scanned=scanned, progress=update
            )
        self.load_seconds = time.perf_counter() - start
        longest = config.max_position_embeddings if max_context is None else max_context
        if num_pages is None:
            wanted = default_num_pages(
                config.of_device(tensor_parallel), self.mesh, page_size, max_sequences, longest
            )
            num_pages = least(wanted)
        held = (num_pages - 1) * page_size
        if max_context is not None and max_context > held:
            raise ValueError(
                f"max_context {max_context} does not fit: the cache of a device holds {held} tokens"
            )
        longest = min(longest, held)
        runner = ModelRunner(
            weights,
            CacheConfig(num_pages, page_size, -(-longest // page_size), max_tokens),
            mesh=self.mesh,
            overlap=self.overlap,
            transport=transport,
            dispatch_dtype=dispatch_dtype,
        )
        self.engine = Engine(
            runner,
            self.tokenizer,
            end_of_sequence,
            max_sequences=max_sequences,
            max_context=longest,
            look_ahead=look_ahead,
            speculate=speculate,
        )
        with progress_bar("compiling", show_progress) as update:
            self.engine.warm_up(update)
        self._generate_seconds = 0.0

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts, batched continuously.

        Args:
            prompts: texts, token-id lists, or chats (lists of {"role", "content"}). Of several
                processes only the first's count, and its `params`.
            params: for all, or one for each; default greedy.
            on_token: called with (index of the prompt, `TokenEvent`) for each token as it comes.
            chat_template_kwargs: what the chat template of the model knows beside the messages,
                such as {"enable_thinking": False}; for the prompts that are chats.

        Returns:
            One `Completion` per prompt, in order. A prompt that cannot run (empty, too long, ...)
            gives one with an error and does not disturb the others.

        Raises:
            ValueError: `params` of another number than `prompts`.
        """
        prompts, params = from_first((prompts, params))
        if isinstance(prompts, str):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} SamplingParams")
        for wanted in each:
            if not isinstance(wanted, SamplingParams):
                raise ValueError(f"params must be SamplingParams, got {wanted!r}")
        # Drawn by the first process, for all.
        drawn = from_first([secrets.randbelow(MAX_SEED) for _ in each])
        each = [
            replace(p, seed=seed) if p.seed is None else p
            for p, seed in zip(each, drawn, strict=True)
        ]
        done: dict[int, Completion] = {}
        index_of: dict[int, int] = {}
        start = time.perf_counter()
        try:
            for index, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                try:
                    index_of[self.engine.add(self.encode(prompt, chat_template_kwargs), wanted)] = (
                        index
                    )
                except ValueError as error:
                    done[index] = Completion(prompt, [], [], "", "error", str(error))
                    if on_token is not None:
                        on_token(index, TokenEvent(None, None, "", "error"))
            while self.engine.has_work:
                for event in self.engine.step():
                    assert event.request_id is not None
                    index = index_of[event.request_id]
                    if event.finish_reason is not None:
                        done[index] = self._complete(event.request_id, prompts[index])
                        del index_of[event.request_id]
                    if on_token is not None:
                        on_token(index, event)
        finally:
            for request_id in index_of:  # not empty only when something was raised
                self.engine.abort(request_id)
            self._generate_seconds += time.perf_counter() - start
        self.engine.check()
        return [done[index] for index in range(len(prompts))]

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of a prompt; of a chat, with these arguments of the chat template.

        Raises:
            ValueError: it is of no known kind, or a chat that the template refuses.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        refused = "a prompt is a text, a list of token ids, or a list of chat messages"
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise ValueError(f"{refused}, got {type(prompt).__name__}")
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.encode_chat(
                items, **check_template_arguments(chat_template_kwargs)
            )
        if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
        raise ValueError(refused)

    @property
    def statistics(self) -> dict[str, Any]:
        """Counts and times since this object was made, seconds and tokens.

        `link_bytes` is what a device sent to others, padding included. With the ragged transport
        it is `link_bytes_at_most`, as if every token had its experts on as many devices as can be.
        """
        stats, seconds = asdict(self.engine.statistics), self._generate_seconds
        if TRANSPORTS[self.engine.runner.transport].sizes_are_data:
            stats["link_bytes_at_most"] = stats.pop("link_bytes")
        rate = stats["generated_tokens"] / seconds if seconds else 0.0
        return {
            "use_tbo": {"off": 0, "on": 1, "auto": "auto"}[self.overlap.mode],
            **stats,
            "speculate": self.engine.speculate,
            "acceptance_rate": self.engine.statistics.acceptance_rate,
            "tokens_per_row": self.engine.statistics.tokens_per_row,
            "preemptions": self.engine.scheduler.statistics.preemptions,
            "seconds": seconds,
            "tokens_per_second": rate,
            "load_seconds": self.load_seconds,
            "devices": self.mesh.size,
            "tensor_parallel": self.mesh.shape[TENSOR],
            "platform": self.mesh.devices.flat[0].platform,
        }

    def _complete(self, request_id: int, prompt: Prompt) -> Completion:
        request, text = self.engine.pop(request_id)
        tokens = request.generated_token_ids
        ended = tokens and tokens[-1] in self.engine.end_of_sequence
        if ended and not request.params.ignore_eos:
            tokens = tokens[:-1]
        reason = request.finish_reason or "error"
        ids = list(request.prompt_token_ids)
        return Completion(prompt, ids, tokens, text, reason, request.error)
