"""`LLM`: a checkpoint, ready to generate."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import jax
import numpy as np

from tbo_jax.checkpoint.hub import fetch_config, fetch_weights
from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.checkpoint.quantized import find_format, read_quantization
from tbo_jax.engine.cache_size import cache_config, longest_context, pages_that_fit
from tbo_jax.engine.config import DTYPES, EngineConfig
from tbo_jax.engine.devices import make_devices, use_compilation_cache
from tbo_jax.engine.engine import Engine, TokenEvent
from tbo_jax.engine.scheduling.request import FinishReason
from tbo_jax.engine.sharing import Calls
from tbo_jax.host.progress import progress_bar
from tbo_jax.layers.exchange import check_exchange
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS
from tbo_jax.parallel.processes import agree, from_first, is_first
from tbo_jax.parallel.sharding import TENSOR
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import CacheConfig
from tbo_jax.text import (
    Tokenizer,
    check_template_arguments,
    default_sampling,
    end_of_sequence_ids,
)

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt gave."""

    prompt: Prompt
    prompt_token_ids: list[int]  # none if it could not be run
    token_ids: list[int]  # generated, without the token that ended it
    text: str
    finish_reason: FinishReason  # with "abort" and "error" the tokens and text are those until then
    error: str | None = None  # with "error", why
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were there already
    logprobs: list[TokenLogprobs] | None = None  # of each of `token_ids`, where asked for
    others: tuple[Completion, ...] = ()  # with `n` above 1: the second completion, the third, ...


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
        if config is not None and not isinstance(config, EngineConfig):
            raise TypeError(f"config is {config!r:.80}: expected an EngineConfig")
        if config is not None and options:
            raise TypeError(f"expected a config or options, got both: config and {set(options)}")
        config = EngineConfig(**options) if config is None else config
        overlap = OverlapConfig.from_env() if config.overlap is None else config.overlap
        self.config = replace(config, overlap=overlap)
        if config.compilation_cache:
            use_compilation_cache()
        # Before anything asks JAX which process this is: that finds the devices, and on CPU so many
        # as were asked for can only be made before.
        self.mesh = make_devices(config.devices, config.tensor_parallel)
        show_progress = show_progress and is_first()
        self.folder = fetch_config(os.fspath(model), quiet=not show_progress)
        platform = self.mesh.devices.flat[0].platform
        dtype = DTYPES[config.dtype or ("float32" if platform == "cpu" else "bfloat16")]
        decoder, _ = read_config(self.folder, dtype)
        longest = longest_context(config, decoder)
        # What is not supported is refused before the weights are fetched.
        decoder.of_device(config.tensor_parallel)
        check_exchange(decoder, self.mesh, config.transport, config.dispatch_dtype)
        find_format(self.folder, read_quantization(self.folder))
        self.tokenizer = Tokenizer.from_folder(self.folder)
        end_of_sequence = end_of_sequence_ids(self.folder, self.tokenizer)
        if end_of_sequence and min(end_of_sequence) >= decoder.vocab_size:
            raise ValueError(
                f"{self.folder}: eos_token_id is {sorted(end_of_sequence)}, and the vocabulary has "
                f"{decoder.vocab_size} ids: nothing would end a text"
            )
        if jax.process_count() > 1:
            agree(
                asdict(self.config)
                | dict(
                    devices=self.mesh.size,
                    decoder=repr(decoder),
                    tokenizer=self.tokenizer.digest(),
                    end_of_sequence=sorted(end_of_sequence),
                    jax=jax.__version__,
                )
            )
        self.default_sampling = default_sampling(self.folder)
        if (message := self.default_sampling.message()) is not None and is_first():
            logger.warning("%s", message)
        self.folder = fetch_weights(os.fspath(model), self.folder, quiet=not show_progress)

        start = time.perf_counter()
        with progress_bar("loading", show_progress) as update:
            weights = load_model(
                self.folder, mesh=self.mesh, dtype=dtype, scanned=config.scanned, progress=update
            )
        self.load_seconds = time.perf_counter() - start

        def make_runner(cache: CacheConfig) -> ModelRunner:
            return ModelRunner(
                weights,
                cache,
                mesh=self.mesh,
                overlap=overlap,
                transport=config.transport,
                dispatch_dtype=config.dispatch_dtype,
            )

        max_logprobs = config.max_logprobs if config.request_options else None
        cache, held = cache_config(config, decoder, self.mesh, longest)
        runner = make_runner(cache)
        if config.num_pages is None:
            pages = pages_that_fit(runner, config.max_sequences, config.speculate, max_logprobs)
            if pages < cache.num_pages:
                fitting = replace(config, num_pages=pages)
                cache, held = cache_config(fitting, decoder, self.mesh, longest)
                runner = make_runner(cache)
        self.engine = Engine(
            runner,
            self.tokenizer,
            end_of_sequence,
            max_sequences=config.max_sequences,
            max_context=held,
            look_ahead=config.look_ahead,
            speculate=config.speculate,
            prefix_cache=config.prefix_cache,
            max_logprobs=max_logprobs,
        )
        with progress_bar("compiling", show_progress) as update:
            self.engine.warm_up(update)
        self._calls = Calls()

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> list[Completion]:
        """Generate for all prompts, batched continuously.

        Several threads may call this at a time, and `on_token` may call it too: their prompts are
        batched together, and what is raised in one call ends the requests of that call only. Of
        several processes each calls it from one thread.

        Args:
            prompts: texts, token-id lists, or chats (lists of {"role", "content"}), all read before
                the first is run. One text counts as a list of it. Of several processes only the
                first's count, and its other arguments.
            params: for all, or one for each; default `default_sampling.params()`: greedy, unless
                the model's generation_config.json asks for something else.
            on_token: called with (index of the prompt, `TokenEvent`) for each token as it comes;
                with `n` above 1, the event's `sample` says of which completion.
            chat_template_kwargs: what the chat template of the model knows beside the messages,
                such as {"enable_thinking": False}; for the prompts that are chats.
            cache_salt: what is kept of these prompts is found only by those with the same one, so
                that nobody learns from the time that a prompt takes what others have asked.

        Returns:
            One `Completion` per prompt, in order; with `n` above 1 it has the others. A prompt that
            cannot run (empty, too long, ...) gives one with an error and does not disturb the
            others. Neither does one whose logits are not finite, or that is aborted.

        Raises:
            ValueError: `prompts`, `params`, `on_token` or `cache_salt` are of another kind, or
                `params` of another number than `prompts`.
            RuntimeError: there are several processes, and another thread is in a call; or somebody
                took a request of this call out of the engine.
        """
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token is {on_token!r:.80}: expected a function, or None")
        with self._calls.enter():
            asked, salt = self._ask(prompts, params, chat_template_kwargs, cache_salt)
            return self._generate(asked, salt, on_token)

    def _generate(
        self,
        asked: Sequence[_Asked],
        salt: str,
        on_token: Callable[[int, TokenEvent], None] | None,
    ) -> list[Completion]:
        done: dict[tuple[int, int], Completion] = {}  # by prompt and sample
        running: dict[int, _Sample] = {}  # by request id
        call = object()
        try:
            for index, each in enumerate(asked):
                try:
                    for sample, params in enumerate(each.of_samples()):
                        request_id = self.engine.add(each.encoded(), params, call, salt)
                        running[request_id] = _Sample(index, sample)
                except ValueError as error:
                    done[index, 0] = Completion(each.prompt, [], [], "", "error", str(error))
                    if on_token is not None:
                        on_token(index, TokenEvent(None, None, "", "error"))
            while running:
                events = self.engine.step(call)
                for event in events:
                    assert event.request_id is not None
                    of = running[event.request_id]
                    if event.logprobs is not None:
                        of.logprobs.append(event.logprobs)
                    if event.finish_reason is not None:
                        prompt = asked[of.prompt].prompt
                        done[of.prompt, of.sample] = self._complete(event.request_id, prompt, of)
                        del running[event.request_id]
                    if on_token is not None:
                        on_token(of.prompt, replace(event, sample=of.sample))
                gone = [i for i in running if not self.engine.holds(i)]
                if gone and not events:
                    raise RuntimeError(f"requests {gone} were taken out of the engine")
        finally:
            for request_id in running:  # not empty only when something was raised
                self.engine.abort(request_id)
                with contextlib.suppress(ValueError):  # it is gone already
                    self.engine.pop(request_id)
        self.engine.check()
        completions: list[Completion] = []
        for (_, sample), one in sorted(done.items(), key=lambda item: item[0]):
            if sample:
                first = completions[-1]
                completions[-1] = replace(first, others=(*first.others, one))
            else:
                completions.append(one)
        return completions

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> list[Completion]:
        """Generate what an assistant says next, as vLLM's `LLM.chat`.

        Args:
            messages: of one conversation, or a list of conversations; of several processes those of
                the first count.
            params, on_token, chat_template_kwargs, cache_salt: as `generate` takes them.

        Returns:
            One `Completion` per conversation, as `generate` gives them.

        Raises:
            ValueError: `messages` is neither; and as `generate`.
            RuntimeError: as `generate`.
        """
        listed: Any = messages
        if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping | Set):
            listed = list(messages)
            if listed and all(isinstance(message, Mapping) for message in listed):
                listed = [listed]
        if not isinstance(listed, list) or not all(
            isinstance(chat, list | tuple) and all(isinstance(m, Mapping) for m in chat)
            for chat in listed
        ):
            raise ValueError(
                f"messages is {messages!r:.80}: expected a list of messages, or a list of such"
            )
        return self.generate(listed, params, on_token, chat_template_kwargs, cache_salt)

    def _ask(
        self, prompts: object, params: object, template_kwargs: Any, salt: object
    ) -> tuple[list[_Asked], str]:
        """What the first process was asked for, in all; an error there is one in all.

        The first process alone makes token ids of prompts and draws seeds: a chat template may look
        at the clock, and its time is limited.
        """
        asked, refused = None, None
        if is_first():
            try:
                if not isinstance(salt, str):
                    raise ValueError(f"cache_salt is {salt!r:.80}: expected a text")
                kwargs = check_template_arguments(template_kwargs)
                listed, each = _as_lists(prompts, params, self.default_sampling.params)
                asked = [self._one(*pair, kwargs) for pair in zip(listed, each, strict=True)]
            except Exception as error:  # of the caller's generators too: the others wait for word
                refused = error
        asked, salt, told = from_first((asked, salt, None if refused is None else str(refused)))
        if told is not None:
            raise refused or ValueError(told)
        assert asked is not None and isinstance(salt, str)
        return asked, salt

    def _one(self, prompt: Prompt, params: SamplingParams, kwargs: Mapping[str, Any]) -> _Asked:
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        try:
            return _Asked(prompt, self.encode(prompt, kwargs), None, params)
        except ValueError as error:
            return _Asked(prompt, [], str(error), params)

    def abort(self, request_id: int) -> bool:
        """End a request of a running `generate`: its `Completion` has what there is, and "abort".

        It may be called from `on_token` or from another thread. Of several processes each has to
        call it, from `on_token` and for the same event.

        Args:
            request_id: as its `TokenEvent`s name it.

        Returns:
            Whether it was unfinished; otherwise nothing happens.

        Raises:
            RuntimeError: there are several processes, and another thread is in `generate`.
        """
        self._calls.check_thread("abort")
        return self.engine.abort(request_id)

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
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping | Set):
            raise ValueError(f"{refused}, got {type(prompt).__name__}")
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.encode_chat(items, arguments=chat_template_kwargs)
        if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
        raise ValueError(refused)

    @property
    def statistics(self) -> dict[str, Any]:
        """Counts and times since this object was made, seconds and tokens.

        `link_bytes` is what a device sent to others, padding included. With the ragged transport
        it is `link_bytes_at_most`, as if every token had its experts on as many devices as can be.
        """
        stats, seconds = self.engine.counts(), self._calls.seconds
        if TRANSPORTS[self.engine.runner.transport].sizes_are_data:
            stats["link_bytes_at_most"] = stats.pop("link_bytes")
        rate = stats["generated_tokens"] / seconds if seconds else 0.0
        return {
            "use_tbo": {"off": 0, "on": 1, "auto": "auto"}[self.engine.runner.overlap.mode],
            **stats,
            **self.engine.runner.memory(),
            "seconds": seconds,
            "tokens_per_second": rate,
            "load_seconds": self.load_seconds,
            "devices": self.mesh.size,
            "tensor_parallel": self.mesh.shape[TENSOR],
            "platform": self.mesh.devices.flat[0].platform,
        }

    def _complete(self, request_id: int, prompt: Prompt, of: _Sample) -> Completion:
        request, text = self.engine.pop(request_id)
        tokens, params = request.generated_token_ids, request.params
        ended = tokens and self.engine.ends(params, tokens[-1])
        if ended and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        reason = request.finish_reason
        assert reason is not None
        ids = list(request.prompt_token_ids)
        logprobs = None if params.logprobs is None else of.logprobs[: len(tokens)]
        return Completion(
            prompt, ids, tokens, text, reason, request.error, request.num_cached, logprobs
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt, and what is to be done with it."""

    prompt: Prompt
    token_ids: list[int]
    error: str | None  # why it has no token ids
    params: SamplingParams  # with a seed

    def encoded(self) -> list[int]:
        """The token ids; ValueError if it has none."""
        if self.error is not None:
            raise ValueError(self.error)
        return self.token_ids

    def of_samples(self) -> list[SamplingParams]:
        """The params of each of the `n` completions, whose seeds count up as vLLM's do."""
        seed = self.params.seed
        assert seed is not None
        return [
            replace(self.params, n=1, seed=(seed + sample) % (MAX_SEED + 1))
            for sample in range(self.params.n)
        ]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A completion under way: of which prompt, which one, and its log-probabilities so far."""

    prompt: int
    sample: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def _as_lists(
    prompts: Any, params: Any, default: Callable[[], SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams]]:
    """The prompts, and the params of each."""
    if isinstance(prompts, str):
        prompts = [prompts]
    unordered = bytes | bytearray | Mapping | Set
    if not isinstance(prompts, Iterable) or isinstance(prompts, unordered):
        raise ValueError(
            f"prompts is {prompts!r:.80}: expected a text, or a list of prompts, each a text, a "
            "list of token ids, or a list of chat messages"
        )
    # A prompt that can be read only once is told to the other processes, and returned.
    listed = [list(prompt) if isinstance(prompt, Iterator) else prompt for prompt in prompts]
    for kind, what in ((int, "token ids"), (Mapping, "chat messages")):
        if listed and all(isinstance(item, kind) for item in listed):
            raise ValueError(f"prompts is one list of {what}: expected a list of prompts, [prompt]")
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or default()] * len(listed)
    if not isinstance(params, Iterable) or isinstance(params, str | unordered):
        raise ValueError(f"params must be SamplingParams, or one for each prompt, got {params!r}")
    each = list(islice(params, len(listed) + 1))  # they may have no end
    if len(each) != len(listed):
        more = "more" if len(each) > len(listed) else len(each)
        raise ValueError(f"{len(listed)} prompts and {more} SamplingParams")
    for wanted in each:
        if not isinstance(wanted, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {wanted!r}")
    return listed, each
