"""Time to the first token of the second turn of a chat, with and without the prefix cache.

    python benchmarks/prefix.py [--model DIR] [--tokens 2000] [--repeats 3] [--json FILE]

The first turn is a prompt of random token ids, the second one that prompt, its answer and a new
message. Every repeat has other tokens. Medians over the repeats, with and without in turn.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tbo_jax import LLM, OverlapConfig, SamplingParams, TokenEvent

TURNS = ("first", "second")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/prefix.py."""

    model: Path = Path(__file__).parent.parent / "examples" / "kjv-moe"
    """Hugging Face folder."""
    tokens: int = 2000
    """Tokens of the first turn's prompt."""
    answer: int = 64
    """Tokens of its answer."""
    message: int = 32
    """Tokens of the new message in the second turn."""
    repeats: int = 3
    """Counted chats with and without the cache; medians are reported."""
    json: Path | None = None
    """Write the results there too."""


def with_context(model: Path, tokens: int, folder: Path) -> Path:
    """A copy of a model that takes so many tokens: its text beyond those it knows is worthless,
    and takes the same time."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def make_llm(model: Path, context: int, prefix_cache: bool) -> LLM:
    """An engine of one device and one row."""
    return LLM(
        model,
        devices=1,
        dtype="float32",
        overlap=OverlapConfig("off"),
        max_context=context,
        max_sequences=1,
        prefix_cache=prefix_cache,
        show_progress=True,
    )


def ask(llm: LLM, prompt: list[int], count: int) -> tuple[float, list[int], int]:
    """Seconds to the first token; the answer; and how many tokens of the prompt were there."""
    start = time.perf_counter()
    first: list[float] = []

    def on_token(index: int, event: TokenEvent) -> None:
        first.append(time.perf_counter() - start)

    wanted = SamplingParams(max_new_tokens=count, ignore_eos=True)
    (done,) = llm.generate([prompt], wanted, on_token)
    assert len(done.token_ids) == count, done.error
    return first[0], done.token_ids, done.num_cached_tokens


def measure(args: Arguments, llms: dict[bool, LLM]) -> dict[str, dict[str, float]]:
    """Median milliseconds to the first token, with the cache on and off, by turn."""
    rng = np.random.default_rng(0)
    vocabulary = next(iter(llms.values())).engine.runner.config.vocab_size
    seconds: dict[tuple[bool, str], list[float]] = {}
    for repeat in range(args.repeats + 1):
        prompt = rng.integers(5, vocabulary, args.tokens).tolist()
        message = rng.integers(5, vocabulary, args.message).tolist()
        for prefix_cache, llm in llms.items():
            took, answer, _ = ask(llm, prompt, args.answer)
            again, _, there = ask(llm, [*prompt, *answer, *message], args.answer)
            assert (there > 0) == prefix_cache
            if repeat:  # the first is a warm-up
                for turn, value in zip(TURNS, (took, again), strict=True):
                    seconds.setdefault((prefix_cache, turn), []).append(value)
    return {
        "on" if prefix_cache else "off": {
            turn: 1000 * statistics.median(seconds[prefix_cache, turn]) for turn in TURNS
        }
        for prefix_cache in llms
    }


def main(args: Arguments) -> None:
    context = args.tokens + 2 * args.answer + args.message
    with tempfile.TemporaryDirectory() as folder:
        model = with_context(args.model, context, Path(folder))
        llms = {on: make_llm(model, context, on) for on in (True, False)}
        found = measure(args, llms)
    table = Table("prefix cache", *(f"{turn} turn, ms to the first token" for turn in TURNS))
    for name, values in found.items():
        table.add_row(name, *(f"{values[turn]:.0f}" for turn in TURNS))
    Console().print(table)
    ratio = found["on"]["second"] / found["off"]["second"]
    print(f"second turn, on / off: {ratio:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"milliseconds": found, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
