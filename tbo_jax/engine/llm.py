"""`LLM`: a checkpoint, ready to generate."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from tbo_jax.checkpoint.formats import find_format, read_quantization
from tbo_jax.checkpoint.hub import fetch_config, fetch_weights
from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.engine.cache_size import cache_config, longest_context, pages_that_fit
from tbo_jax.engine.compiling import serves_early
from tbo_jax.engine.config import DTYPES, EngineConfig
from tbo_jax.engine.devices import make_devices, use_compilation_cache
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.generation import Asked, Completion, Generation, Prompt, Score
from tbo_jax.engine.request_options import check_prompt_logprobs
from tbo_jax.engine.row_state import with_sampling
from tbo_jax.engine.running import TokenEvent
from tbo_jax.engine.sharing import Calls
from tbo_jax.host.progress import progress_bar
from tbo_jax.layers.exchange import check_exchange
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.exchange import TRANSPORTS
from tbo_jax.parallel.processes import agree, from_first, is_first
from tbo_jax.parallel.sharding import TENSOR
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.step.backends import check_kernels
from tbo_jax.step.deterministic import check_deterministic
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import CacheConfig
from tbo_jax.text import (
    Tokenizer,
    check_template_arguments,
    default_sampling,
    end_of_sequence_ids,
)

logger = logging.getLogger(__name__)

STEPS_BEFORE_A_LOOK = 64  # without events, whether the requests of a call are in the engine still


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
        served: bool = False,
        **options: Any,
    ):
        """Load and compile.

        Args:
            model: a Hugging Face folder, or the id of a model on the hub.
            config: the options of the engine.
            show_progress: bars on stderr while loading and compiling.
            served: a server's, which chooses the default of `serve_early`.
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
        config = EngineConfig.from_options(options) if config is None else config
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
        check_kernels(config.kernels, self.mesh.devices.flat[0])
        if config.deterministic:
            check_deterministic(self.mesh, overlap)
        early = serves_early(config.serve_early, served, overlap, platform)
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
                self.folder,
                mesh=self.mesh,
                dtype=dtype,
                scanned=config.scanned,
                quantize=config.quantize,
                progress=update,
            )
        self.load_seconds = time.perf_counter() - start

        def make_runner(cache: CacheConfig) -> ModelRunner:
            runner = ModelRunner(
                weights,
                cache,
                mesh=self.mesh,
                overlap=overlap,
                transport=config.transport,
                dispatch_dtype=config.dispatch_dtype,
                deterministic=config.deterministic,
                kernels=config.kernels,
            )
            return with_sampling(runner, config.max_sequences)

        max_logprobs = config.max_logprobs if config.request_options else None
        max_prompt_logprobs = config.max_logprobs if config.prompt_logprobs else None
        cache, held = cache_config(config, decoder, self.mesh, longest)
        runner = make_runner(cache)
        if config.num_pages is None:
            pages = pages_that_fit(
                runner, config.max_sequences, config.speculate, max_logprobs, max_prompt_logprobs
            )
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
            max_prompt_logprobs=max_prompt_logprobs,
        )
        with progress_bar("compiling", show_progress) as update:
            self.engine.warm_up(update, early=early)
        self.calls = Calls()

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int | Iterable[int] | None = None,
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
            priority: of all prompts, or a list with that of each, as vLLM's: the lower the number,
                the earlier its turn; default 0. Equals have their turn in the order in which they
                came, and those of other calls count. A prompt may wait as long as others of lower
                numbers come.

        Returns:
            One `Completion` per prompt, in order; with `n` above 1 it has the others. A prompt that
            cannot run (empty, too long, ...) gives one with an error and does not disturb the
            others. Neither does one whose logits are not finite, or that is aborted.

        Raises:
            ValueError: `prompts`, `params`, `on_token`, `cache_salt` or `priority` are of another
                kind, or `params` or `priority` of another number than `prompts`.
            RuntimeError: there are several processes, and another thread is in a call; or somebody
                took a request of this call out of the engine.
        """
        if on_token is not None and not callable(on_token):
            raise ValueError(f"on_token is {on_token!r:.80}: expected a function, or None")

        def encode_with() -> Callable[[Prompt], list[int]]:
            kwargs = check_template_arguments(chat_template_kwargs)
            return partial(self.encode, chat_template_kwargs=kwargs)

        with self.calls.enter():
            asked = self._ask(prompts, params, encode_with, cache_salt, priority)
            return self._generate(asked, on_token)

    def _generate(
        self, asked: Sequence[Asked], on_token: Callable[[int, TokenEvent], None] | None
    ) -> list[Completion]:
        done: dict[int, Completion] = {}  # by prompt
        running: dict[int, tuple[int, Generation]] = {}  # prompt and generation, by request id
        call, steps_without = object(), 0
        try:
            for index, each in enumerate(asked):
                try:
                    generation = Generation(self.engine, each, call, on_token is not None)
                except ValueError as error:
                    done[index] = Completion(each.prompt, [], [], "", "error", str(error))
                    if on_token is not None:
                        on_token(index, TokenEvent(None, None, "", "error"))
                else:
                    running |= dict.fromkeys(generation.request_ids, (index, generation))
            while running:
                events = self.engine.step(call)
                for event in events:
                    assert event.request_id is not None
                    index, generation = running[event.request_id]
                    event_of_sample = generation.take(event)
                    if event.finish_reason is not None:
                        del running[event.request_id]
                        if generation.is_over:
                            done[index] = generation.completion
                    if on_token is not None:
                        on_token(index, event_of_sample)
                # Now and then: where nobody listens to tokens most steps give no events.
                steps_without = 0 if events else steps_without + 1
                waits = steps_without > 0 and not self.engine.has_work
                if waits or steps_without == STEPS_BEFORE_A_LOOK:
                    steps_without = 0
                    for generation in {generation for _, generation in running.values()}:
                        generation.check_held()
        finally:
            for _, generation in running.values():  # some only when something was raised
                generation.drop()
        self.engine.check()
        return [done[index] for index in range(len(asked))]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_token: Callable[[int, TokenEvent], None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int | Iterable[int] | None = None,
    ) -> list[Completion]:
        """Generate what an assistant says next, as vLLM's `LLM.chat`.

        Args:
            messages: of one conversation, or a list of conversations; of several processes those of
                the first count.
            params, on_token, chat_template_kwargs, cache_salt, priority: as `generate` takes them.

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
        return self.generate(listed, params, on_token, chat_template_kwargs, cache_salt, priority)

    def score(
        self,
        texts: Iterable[str | Sequence[int]],
        cache_salt: str = "",
        priority: int | Iterable[int] | None = None,
    ) -> list[Score]:
        """Tell how probable texts are: the log-probability of each token given those before it.

        They are those of the model, without temperature or any other option. The engine must have
        been made with `prompt_logprobs=True`.

        Args:
            texts: texts or token-id lists, all read before the first is run. One text counts as a
                list of it. Texts get the special tokens that a prompt gets. Of several processes
                those of the first count.
            cache_salt, priority: as `generate` takes them.

        Returns:
            One `Score` per text, in order. The first token of a text has no log-probability, so
            that a text of one token has none.

        Raises:
            ValueError: the engine was made without; a text is a chat, is empty, or leaves no room
                for one more token in the context or the cache of a device; and as `generate`. Then
                none was run.
            RuntimeError: the logits of a text are not finite; and as `generate`.
        """
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
        check_prompt_logprobs(params, self.engine.max_prompt_logprobs)
        with self.calls.enter():
            asked = self._ask(texts, params, lambda: self._encode_text, cache_salt, priority)
            for number, each in enumerate(asked):
                if each.error is not None:
                    raise ValueError(f"text {number}: {each.error}")
                self.engine.check_prompt(f"text {number}", each.token_ids)
            done = self._generate(asked, None)
        return [Score.of(f"text {number}", each) for number, each in enumerate(done)]

    def _encode_text(self, text: Any) -> list[int]:
        items = list(text) if isinstance(text, list | tuple) else []
        if any(isinstance(item, Mapping) for item in items):
            raise ValueError("it is a chat: expected a text or a list of token ids")
        return self.encode(text)

    def _ask(
        self,
        prompts: object,
        params: object,
        encode_with: Callable[[], Callable[[Prompt], list[int]]],
        salt: Any,
        priority: Any,
    ) -> list[Asked]:
        """What the first process was asked for, in all; an error there is one in all.

        The first process alone makes token ids of prompts and draws seeds: a chat template may look
        at the clock, and its time is limited.
        """
        asked, refused = None, None
        if is_first():
            try:
                encode = encode_with()
                listed, each = _as_lists(prompts, params, self.default_sampling.params)
                of_each = zip(listed, each, _priorities(priority, len(listed)), strict=True)
                asked = [
                    Asked.read(prompt, wanted, salt, encode, turn)
                    for prompt, wanted, turn in of_each
                ]
            except Exception as error:  # of the caller's generators too: the others wait for word
                refused = error
        asked, told = from_first((asked, None if refused is None else str(refused)))
        if told is not None:
            raise refused or ValueError(told)
        assert asked is not None
        return asked

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
        self.calls.check_thread("abort")
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
        return self._statistics(at_once=False)

    def snapshot(self) -> dict[str, Any]:
        """The `statistics`, read at once while another thread runs steps: they may be of two."""
        return self._statistics(at_once=True)

    def _statistics(self, at_once: bool) -> dict[str, Any]:
        stats, seconds = self.engine.counts(at_once=at_once), self.calls.seconds
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


def _as_lists(
    prompts: Any, params: Any, default: Callable[[], SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams]]:
    """The prompts, and for each what should be its params."""
    if isinstance(prompts, str):
        prompts = [prompts]
    unordered = bytes | bytearray | Mapping | Set
    if not isinstance(prompts, Iterable) or isinstance(prompts, unordered):
        raise ValueError(
            f"prompts is {prompts!r:.80}: expected a text, or a list of prompts, each a text, a "
            "list of token ids, or a list of chat messages"
        )
    listed = list(prompts)
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
    return listed, each


def _priorities(given: Any, count: int) -> list[Any]:
    """What should be the priority of each of so many prompts."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping | Set):
        return [0 if given is None else given] * count
    each = list(islice(given, count + 1))
    if len(each) != count:
        more = "more" if len(each) > count else len(each)
        raise ValueError(f"{count} prompts and {more} priorities")
    return each
