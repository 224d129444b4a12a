"""`LLM`: a checkpoint, ready to generate."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from tbo_jax.checkpoint.hub import resolve_model
from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.engine.cache_size import cache_config, longest_context
from tbo_jax.engine.config import DTYPES, EngineConfig
from tbo_jax.engine.devices import make_devices, use_compilation_cache
from tbo_jax.engine.engine import Engine, TokenEvent
from tbo_jax.engine.scheduling.request import FinishReason
from tbo_jax.host.progress import progress_bar
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS
from tbo_jax.parallel.processes import agree, from_first, is_first
from tbo_jax.parallel.sharding import TENSOR
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.runner import ModelRunner
from tbo_jax.text import Tokenizer, end_of_sequence_ids

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


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
        config: EngineConfig | None = None,
        *,
        show_progress: bool = False,
        **options: Any,
    ):
        """Load and compile.

        Args:
            model: a Hugging Face folder, or the id of a model on the hub.
            config: the options of the engine.
            show_progress: bars on stderr while loading and compiling.
            options: fields of `EngineConfig`, in place of `config`: `LLM(model, devices=4)`.

        Raises:
            TypeError: an option that `EngineConfig` does not have, or options beside a config.
            ValueError: something is wrong with the checkpoint (`CheckpointError`), the tokenizer
                (`TokenizerError`), an option, or `USE_TBO`, or they are not those of the first
                process.
        """
        if config is not None and options:
            raise TypeError(f"expected a config or options, got both: config and {set(options)}")
        config = EngineConfig(**options) if config is None else config
        overlap = OverlapConfig.from_env() if config.overlap is None else config.overlap
        self.config = replace(config, overlap=overlap)
        if config.compilation_cache:
            use_compilation_cache()
        self.folder = resolve_model(os.fspath(model))
        self.mesh = make_devices(config.devices, config.tensor_parallel)
        platform = self.mesh.devices.flat[0].platform
        dtype = DTYPES[config.dtype or ("float32" if platform == "cpu" else "bfloat16")]
        decoder, _ = read_config(self.folder, dtype)
        longest = longest_context(config, decoder)
        agree(
            asdict(self.config)
            | dict(devices=self.mesh.size, decoder=repr(decoder), jax=jax.__version__)
        )
        self.tokenizer = Tokenizer.from_folder(self.folder)
        end_of_sequence = end_of_sequence_ids(self.folder, self.tokenizer)

        start = time.perf_counter()
        show_progress = show_progress and is_first()
        with progress_bar("loading", show_progress) as update:
            weights = load_model(
                self.folder, mesh=self.mesh, dtype=dtype, scanned=config.scanned, progress=update
            )
        self.load_seconds = time.perf_counter() - start
        cache, longest = cache_config(config, decoder, self.mesh, longest)
        runner = ModelRunner(
            weights,
            cache,
            mesh=self.mesh,
            overlap=overlap,
            transport=config.transport,
            dispatch_dtype=config.dispatch_dtype,
        )
        self.engine = Engine(
            runner,
            self.tokenizer,
            end_of_sequence,
            max_sequences=config.max_sequences,
            max_context=longest,
            look_ahead=config.look_ahead,
            speculate=config.speculate,
        )
        with progress_bar("compiling", show_progress) as update:
            self.engine.warm_up(update)
        self._generate_seconds = 0.0

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts, batched continuously.

        Args:
            prompts: texts, token-id lists, or chats (lists of {"role", "content"}). Of several
                processes only the first's count, and its `params`.
            params: for all, or one for each; default greedy.
            on_token: called with (index of the prompt, `TokenEvent`) for each token as it comes.

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
                    index_of[self.engine.add(self.encode(prompt), wanted)] = index
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

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

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
            return self.tokenizer.encode_chat(items)
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
            "use_tbo": {"off": 0, "on": 1, "auto": "auto"}[self.engine.runner.overlap.mode],
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
