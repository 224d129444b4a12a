"""Decode with a Hugging Face checkpoint, with or without two-batch overlap.

    tbo-jax decode --model DIR_OR_HUB_ID --prompt "In the beginning"
    USE_TBO=1 tbo-jax decode --model DIR_OR_HUB_ID --devices 4 --prompt "And it came to pass" --json

USE_TBO=auto times the steps of each size both ways and splits those that this makes faster.

Text streams as it comes: of several prompts, which are decoded together, the first unfinished one
streams and the others follow in order. With --json one object per completion is printed, prompts in
the order given, then one with statistics. Exit status: 0, 1 if a prompt could not run, 2 if nothing
could.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.devices import find_devices, use_most_memory
from tbo_jax.engine.generation import Completion
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.running import TokenEvent
from tbo_jax.host.command import FAILED, run_command
from tbo_jax.host.json_files import parse_json_object
from tbo_jax.host.progress import progress_bar
from tbo_jax.host.quiet import silence_libraries
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.parallel.processes import connect, from_first, is_first
from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.text import check_template_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Command line."""

    model: str
    """Hugging Face folder, or id of a model on the hub."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; repeat for several prompts (--prompt=TEXT if it begins with a dash)."""
    prompts_file: Path | None = None
    """File with a prompt per line, after those of --prompt; empty lines are passed over."""
    chat: bool = False
    """Each prompt is a user's message, put into the model's chat template."""
    chat_template_kwargs: str | None = None
    """What the chat template knows beside the messages, as JSON: '{"enable_thinking": false}'."""
    max_new_tokens: int | None = None
    """Most tokens to generate for a prompt. Default of this and the next five: what the model's
    generation_config.json says, else 128."""
    temperature: float | None = None
    """0 is greedy decoding. Default: see --max-new-tokens; else 0."""
    top_k: int | None = None
    """Sample among the K most probable tokens; 0 is off."""
    top_p: float | None = None
    """Sample among the most probable tokens that reach this mass; 1 is off."""
    min_p: float | None = None
    """Drop tokens less probable than this fraction of the best one's; 0 is off."""
    repetition_penalty: float | None = None
    """Divide the logit of each token that was in prompt or text if above 0, else multiply it; 1 is
    off."""
    frequency_penalty: float | None = None
    """Take this off a token's logit for each time that it was generated; 0 is off."""
    presence_penalty: float | None = None
    """Take this off the logit of each token that was generated; 0 is off."""
    logit_bias: str | None = None
    """What is added to the logits of tokens, by id, as JSON: '{"1734": -2.5}'."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Generate nothing but these tokens."""
    bad_words: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Texts that are not generated, token by token; several, or the option repeated."""
    min_tokens: int | None = None
    """Generate so many tokens before a token or a stop string can end the text."""
    n: int | None = None
    """Completions of each prompt, with seeds that count on from its own; needs --json."""
    logprobs: int | None = None
    """Tell the log-probability of each token and of the N most probable ones; needs --json."""
    prompt_logprobs: int | None = None
    """Tell the same of each token of the prompt but the first; needs --json."""
    seed: int | None = None
    """Prompt i samples with seed SEED + i; default: a random one."""
    stop: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Texts that end a generation; several, or the option repeated."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a generation."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the token, that ended a text."""
    skip_special_tokens: bool = True
    """Print no special tokens."""
    json_schema: str | None = None
    """Generate JSON that this schema allows: JSON text, or a file with it."""
    json_object: bool = False
    """Generate a JSON object."""
    regex: str | None = None
    """Generate a text that matches this regular expression as a whole."""
    grammar: str | None = None
    """Generate a text of this grammar, in Lark or GBNF: the grammar, or a file with it."""
    choice: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Generate one of these texts; several, or the option repeated."""
    coordinator: str | None = None
    """Run as one of several processes, started alike: HOST:PORT of the first one, or "auto" where
    SLURM, Open MPI or Kubernetes started them."""
    num_processes: int | None = None
    """How many there are, unless --coordinator is "auto"."""
    process_id: int | None = None
    """Which of them this is, from 0, unless --coordinator is "auto"."""
    micro_batches: int | None = None
    """Into how many micro-batches steps are cut with USE_TBO=1 or auto; default 2."""
    expert_chunks: int | None = None
    """Into how many chunks the expert exchange is cut with USE_TBO=expert_chunks or auto; default
    2."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = dataclasses.field(
        default_factory=EngineConfig
    )
    """The model on the machine."""
    json: bool = False
    """Print JSON lines instead of text."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress and no statistics on stderr."""


class OrderedStream:
    """Prints the texts of prompts that are decoded together one after another, each as it comes."""

    def __init__(self, prompts: Sequence[str]):
        self.prompts = prompts
        self.waiting = [""] * len(prompts)
        self.finished = [False] * len(prompts)
        self.current = -1
        self._next()

    def push(self, index: int, event: TokenEvent) -> None:
        """A token of prompt `index`, or the news that it cannot run."""
        self.waiting[index] += event.text
        self.finished[index] |= event.finish_reason is not None
        self._flush()

    def _flush(self) -> None:
        while self.current < len(self.prompts):
            self._write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.finished[self.current]:
                return
            self._write("\n")
            self._next()

    def _next(self) -> None:
        self.current += 1
        if self.current < len(self.prompts):
            gap = "\n" if self.current else ""
            self._write(f"{gap}>>> {self.prompts[self.current]}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def read_prompts(args: Arguments) -> list[str]:
    """The prompts of the command line, then those of the file.

    Raises:
        ValueError: there is none, or the file cannot be read.
    """
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        lines = read_text(args.prompts_file, "--prompts-file").split("\n")
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("nothing to decode: give --prompt TEXT or --prompts-file FILE")
    return prompts


def sampling_params(
    args: Arguments, count: int, make: Callable[..., SamplingParams] = SamplingParams
) -> list[SamplingParams]:
    """One for each of `count` prompts; `make` knows what the command line leaves open.

    Raises:
        ValueError: a value out of range, or one that only --json has a place for.
    """
    given: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(SamplingParams)
        if (value := getattr(args, field.name, None)) is not None
    }
    for name in ("n", "logprobs", "prompt_logprobs"):
        if name in given and not args.json:
            raise ValueError(f"--{name.replace('_', '-')} {given[name]} needs --json")
    for name in ("stop", "bad_words", "choice"):
        given[name] = tuple(text for texts in given[name] for text in texts)
    given["choice"] = given["choice"] or None
    # What each of them is written in does not look like the name of a file.
    for name, mark in (("json_schema", "{"), ("grammar", ":")):
        if name in given and mark not in given[name]:
            given[name] = read_text(Path(given[name]), f"--{name.replace('_', '-')}")
    if args.logit_bias is not None:
        given["logit_bias"] = read_bias(args.logit_bias)
    if args.seed is not None and not 0 <= args.seed <= MAX_SEED:
        raise ValueError(f"--seed must be from 0 to {MAX_SEED}, got {args.seed}")
    seeds = [None if args.seed is None else (args.seed + i) % (MAX_SEED + 1) for i in range(count)]
    return [make(**{**given, "seed": seed}) for seed in seeds]


def read_text(path: Path, option: str) -> str:
    """The text of a file that an option names; ValueError if it cannot be read."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path}: {error}") from error


def read_bias(text: str) -> dict[int, Any]:
    """That of --logit-bias, by token id.

    Raises:
        ValueError: it is no JSON object, or a key is no token id.
    """
    bias = parse_json_object(text, "--logit-bias")
    for key in bias:
        if not (key.isascii() and key.isdecimal()):
            raise ValueError(f"--logit-bias has the key {key!r:.80}: expected a token id")
    return {int(key): value for key, value in bias.items()}


def template_arguments(args: Arguments) -> dict[str, Any]:
    """Those of --chat-template-kwargs.

    Raises:
        ValueError: they are no JSON object, not for a template, or there is no chat.
    """
    if args.chat_template_kwargs is None:
        return {}
    if not args.chat:
        raise ValueError("--chat-template-kwargs needs --chat")
    return check_template_arguments(
        parse_json_object(args.chat_template_kwargs, "--chat-template-kwargs")
    )


def overlap_config(micro_batches: int | None, expert_chunks: int | None = None) -> OverlapConfig:
    """That of `USE_TBO`, --micro-batches and --expert-chunks.

    Raises:
        ValueError: one of them is not understood, or there is nothing that the others would cut.
    """
    config = OverlapConfig.from_env()
    if micro_batches is not None:
        if not config.enabled or config.strategy == "expert_chunks":
            raise ValueError(f"--micro-batches {micro_batches} needs USE_TBO=1 or USE_TBO=auto")
        config = dataclasses.replace(config, num_micro_batches=micro_batches)
    if expert_chunks is not None:
        if config.mode != "auto" and config.strategy != "expert_chunks":
            raise ValueError(
                f"--expert-chunks {expert_chunks} needs USE_TBO=expert_chunks or USE_TBO=auto"
            )
        config = dataclasses.replace(config, num_expert_chunks=expert_chunks)
    return config


def print_json(prompts: Sequence[str], completions: Sequence[Completion], llm: LLM) -> None:
    """One object per completion, then the statistics."""
    for prompt, first in zip(prompts, completions, strict=True):
        for done in (first, *first.others):
            row: dict[str, Any] = {
                "prompt": prompt,
                "text": done.text,
                "prompt_token_ids": done.prompt_token_ids,
                "token_ids": done.token_ids,
                "finish_reason": done.finish_reason,
                "num_cached_tokens": done.num_cached_tokens,
            }
            if done.error is not None:
                row["error"] = done.error
            if done.logprobs is not None:
                row["logprobs"] = [dataclasses.asdict(known) for known in done.logprobs]
            if done.prompt_logprobs is not None:
                row["prompt_logprobs"] = [
                    None if known is None else dataclasses.asdict(known)
                    for known in done.prompt_logprobs
                ]
            print(json.dumps(row, ensure_ascii=False))
    print(json.dumps({"stats": llm.statistics}))


def is_one_of_several(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> bool:
    """Whether a command is one of several processes that run a model together.

    Raises:
        ValueError: it is told which one it is, but not where the first is.
    """
    if coordinator is None and (num_processes is not None or process_id is not None):
        raise ValueError("--num-processes and --process-id need --coordinator")
    return coordinator is not None


def read_on_first(args: Arguments) -> tuple[list[str], bool]:
    """The prompts of the first process, and whether this is it; joins the others before.

    Raises:
        ValueError: in all processes, if the first has nothing to read.
    """
    if not is_one_of_several(args.coordinator, args.num_processes, args.process_id):
        return read_prompts(args), True
    assert args.coordinator is not None
    connect(args.coordinator, args.num_processes, args.process_id)
    prompts, error = [], None
    if is_first():
        try:
            prompts = read_prompts(args)
        except ValueError as problem:
            error = str(problem)
    prompts, error = from_first((prompts, error))
    if error is not None:
        raise ValueError(error)
    return prompts, is_first()


def engine_config(args: Arguments, requests: int) -> EngineConfig:
    """The engine's options, with no more rows than `requests` can fill: each size is compiled."""
    config = dataclasses.replace(
        args.engine, overlap=overlap_config(args.micro_batches, args.expert_chunks)
    )
    ranks = max(len(find_devices(config.devices)) // config.tensor_parallel, 1)
    return dataclasses.replace(
        config,
        max_sequences=min(config.max_sequences, -(-requests // ranks)),
        prompt_logprobs=args.prompt_logprobs is not None,
    )


def decode(args: Arguments, name: str) -> int:
    """Run the command `name`; returns the exit status."""
    if args.quiet:
        silence_libraries()
    use_most_memory()
    # What is wrong is told before other processes are joined, and a model is loaded.
    sampling_params(args, 1)
    kwargs = template_arguments(args)
    prompts, first = read_on_first(args)
    rows = len(prompts) * (args.n or 1)
    llm = LLM(args.model, engine_config(args, rows), show_progress=not args.quiet)
    params = sampling_params(args, len(prompts), llm.default_sampling.params)
    inputs: list[Any] = list(prompts)
    if args.chat:
        inputs = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if not first:
        llm.generate(inputs, params, chat_template_kwargs=kwargs)
        return 0
    if args.json:
        most = sum(p.n * p.max_new_tokens for p in params)
        with progress_bar("decoding", not args.quiet) as update:
            done = 0

            def count(index: int, event: TokenEvent) -> None:
                nonlocal done
                done += event.token_id is not None
                update(done, most)

            completions = llm.generate(inputs, params, count, kwargs)
        print_json(prompts, completions, llm)
    else:
        stream = OrderedStream(prompts)
        completions = llm.generate(inputs, params, stream.push, kwargs)
    failed = [(i, c.error) for i, c in enumerate(completions) if c.error is not None]
    for index, error in failed:
        print(f"{name}: prompt {index}: {error}", file=sys.stderr)
    if not args.quiet:
        print(summary(llm.statistics), file=sys.stderr)
    return FAILED if failed else 0


def summary(stats: dict[str, Any]) -> str:
    """One line for people."""
    choice = f"USE_TBO={stats['use_tbo']}"
    if stats["use_tbo"] == "auto":
        chosen = [decision["strategy"] for decision in stats["decisions"].values()]
        choice += f" ({sum(one != 'off' for one in chosen)} of {len(chosen)} buckets overlap)"
    drafts = ""
    if stats["speculate"]:
        drafts = (
            f"{stats['accepted_tokens']} of {stats['drafted_tokens']} drafts accepted "
            f"({stats['acceptance_rate']:.0%}), "
            f"{stats['tokens_per_row']:.2f} tokens a sequence and step; "
        )
    return (
        f"[{stats['generated_tokens']} tokens in {stats['seconds']:.2f} s, "
        f"{stats['tokens_per_second']:.1f} tokens/s; {stats['steps']} steps, "
        f"{stats['steps_split']} split, {choice}; {drafts}"
        f"{stats['devices']} {stats['platform']} device(s); "
        f"compiled in {stats['compile_seconds']:.1f} s]"
    )


def main(words: list[str], name: str, model: str | None = None) -> int:
    """Run the command `name` with its words; returns the exit status.

    Args:
        words: the command line.
        name: of the command, for its help and its errors.
        model: that is decoded with where the words name none.
    """
    given: dict[str, Any] = {} if model is None else {"default": Arguments(model=model)}

    def command() -> int:
        return decode(
            tyro.cli(Arguments, description=__doc__, prog=name, args=words, **given), name
        )

    if isinstance(sys.stdout, io.TextIOWrapper):  # a prompt may hold what UTF-8 does not
        sys.stdout.reconfigure(errors="backslashreplace")
    return run_command(name, command)
