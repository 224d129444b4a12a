"""Quality of quantised weights and caches: the logits of a model beside those of it in full.

    python benchmarks/quality.py --model DIR [--quantize int8,fp8] [--cache-dtypes int8]
        [--checkpoints DIR ...]

Of each position of a text, both given the same tokens before it: the Kullback-Leibler divergence
sum(p log(p / q)) of the quantised model's distribution q from the full one p, in nats; whether both
find the same token most probable; and the probability of the token that follows, of which the
perplexity is made. Everything but the weights or the cache is in `--dtype`, alike for both. The
text is cut into windows, of which each is read with nothing before it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from tbo_jax import Bucket, CacheConfig, ForwardBatch, ModelRunner
from tbo_jax.attention.rounded import CACHE_DTYPES, CacheDtype
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.quantizing import Quantize, Target
from tbo_jax.engine.config import DTYPES
from tbo_jax.host.progress import progress_bar
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.quantized.array import QuantizedArray
from tbo_jax.text import Tokenizer

PAGE = 16  # tokens
DOCS = Path(__file__).parent.parent / "docs"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/quality.py."""

    model: Path
    """Hugging Face folder with the weights in full."""
    quantize: str = "int8,fp8"
    """What to make of these weights while loading: values of --quantize; none if empty."""
    cache_dtypes: str = ""
    """How to hold keys and values, of weights in full: values of --cache-dtype; none if empty."""
    checkpoints: tuple[Path, ...] = ()
    """Folders of the same model that were quantised before."""
    text: Path | None = None
    """A file of UTF-8; default the pages of the documentation, one after another."""
    positions: int = 4096
    """Tokens of the text that are compared."""
    window: int = 512
    """Tokens that are read together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations, and of the weights in full."""
    scanned: bool = False
    """One loop over stacked layers, which compiles in a tenth of the time; not of all models."""
    json: Path | None = None
    """Write the results there too."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A way to hold the weights, and keys and values."""

    name: str
    folder: Path
    quantize: Quantize = "stored"
    cache_dtype: CacheDtype | None = None


class Step:
    """The logits of all tokens of a window."""

    def __init__(self, subject: Subject, args: Arguments):
        window, mesh = args.window, make_mesh(1)
        model = load_model(
            subject.folder,
            mesh=mesh,
            dtype=DTYPES[args.dtype],
            scanned=args.scanned,
            quantize=subject.quantize,
        )
        held = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(model))]
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
        quantized = [a for a in held if isinstance(a, QuantizedArray)]
        self.quantized_bytes = sum(a.nbytes for a in quantized)
        self.quantized = sum(int(np.prod(a.shape)) for a in quantized)
        self.pages = list(range(1, 1 + -(-window // PAGE)))
        self.bucket = Bucket(window, 1)
        pages = len(self.pages)
        cache = CacheConfig(1 + pages, PAGE, pages, window, subject.cache_dtype)
        self.runner = ModelRunner(model, cache, mesh=mesh, logits="all")
        self.buffers = self.runner.allocate()

    @property
    def bits(self) -> float:
        """Bits of a number of what is quantised, its factors included."""
        return 8 * self.quantized_bytes / max(1, self.quantized)

    def __call__(self, tokens: Sequence[int]) -> jax.Array:
        """[T] -> [T, V] float32."""
        batch = ForwardBatch.pack(
            [tokens],
            [0],
            [self.pages],
            token_capacity=self.bucket.tokens,
            sequence_capacity=1,
            pages_per_sequence=len(self.pages),
        )
        logits, self.buffers = self.runner.step(self.bucket, self.buffers, stack_batches([batch]))
        return logits[0, : len(tokens)]


@jax.jit
def compare(full: jax.Array, other: jax.Array, following: jax.Array) -> dict[str, jax.Array]:
    """Figures of each position, from logits [T, V] of both and the tokens [T] that follow."""
    p, q = (jax.nn.log_softmax(logits.astype(jnp.float32)) for logits in (full, other))
    at = jnp.arange(len(following)), following
    return {
        "divergence": jnp.sum(jnp.exp(p) * (p - q), axis=-1),
        "same": full.argmax(-1) == other.argmax(-1),
        "full": p[at],
        "other": q[at],
    }


def summary(of_positions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over all positions; `divergence_99` is what one position of a hundred exceeds."""
    of = {k: np.concatenate([np.asarray(p[k], np.float64) for p in of_positions]) for k in KEYS}
    return {
        "positions": len(of["same"]),
        "divergence": of["divergence"].mean(),
        "divergence_99": float(np.quantile(of["divergence"], 0.99)),
        "same": of["same"].mean(),
        "perplexity_full": float(np.exp(-of["full"].mean())),
        "perplexity": float(np.exp(-of["other"].mean())),
    }


KEYS = "divergence", "same", "full", "other"


def read_text(path: Path | None) -> str:
    """The text to read."""
    pages = sorted(DOCS.glob("*.md")) if path is None else [path]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def windows_of(tokens: Sequence[int], window: int, positions: int) -> Iterator[list[int]]:
    """Windows with one token more, which is the one that follows.

    Raises:
        ValueError: the text has fewer tokens than are wanted.
    """
    if not 0 < positions < len(tokens):
        raise ValueError(
            f"positions is {positions}: expected 1 to {len(tokens) - 1}, what the text has"
        )
    for start in range(0, positions, window):
        yield list(tokens[start : min(start + window, positions) + 1])


def subjects_of(args: Arguments) -> list[Subject]:
    """What is compared with the weights in full.

    Raises:
        ValueError: a value of `quantize` that does not quantise, or of `cache_dtypes` that there
            is not.
    """

    def chosen(option: str, values: str, known: Sequence[str]) -> list[Any]:
        found = [value for value in values.split(",") if value]
        for value in found:
            if value not in known:
                raise ValueError(f"{option} {value!r}: expected some of {', '.join(known)}")
        return found

    kinds = chosen("--quantize", args.quantize, get_args(Target))
    made = [Subject(f"--quantize {kind}", args.model, kind) for kind in kinds]
    for dtype in chosen("--cache-dtypes", args.cache_dtypes, CACHE_DTYPES):
        made.append(Subject(f"cache in {dtype}", args.model, cache_dtype=dtype))
    return made + [Subject(folder.name, folder) for folder in args.checkpoints]


def measure(args: Arguments) -> Iterator[tuple[str, dict[str, float]]]:
    """Figures of each subject, as they come to be known.

    The logits of the weights in full are kept: 4 bytes for each position and token.
    """
    subjects = subjects_of(args)
    tokens = Tokenizer.from_folder(args.model).encode(read_text(args.text))
    windows = list(windows_of(tokens, args.window, args.positions))
    runs, done = (1 + len(subjects)) * len(windows), 0
    with progress_bar("comparing", True) as update:

        def logits_of(step: Step) -> Iterator[jax.Array]:
            nonlocal done
            for window in windows:
                yield jax.block_until_ready(step(window[:-1]))
                done += 1
                update(done, runs)

        step = Step(Subject("in full", args.model), args)
        full_bytes, full = step.bytes, list(logits_of(step))
        for subject in subjects:
            step = Step(subject, args)
            rows = [
                compare(expected, found, jnp.asarray(window[1:], jnp.int32))
                for expected, found, window in zip(full, logits_of(step), windows, strict=True)
            ]
            sizes = {"bits": step.bits, "weight_bytes": step.bytes, "full_bytes": full_bytes}
            yield subject.name, summary(rows) | sizes


def main(args: Arguments) -> None:
    found: dict[str, dict[str, float]] = {}
    for name, of in measure(args):
        found[name] = of
        if args.json is not None:
            setting = {"model": args.model.name, "dtype": args.dtype, "window": args.window}
            args.json.write_text(json.dumps({**setting, "subjects": found}, indent=1))
    table = Table(
        "weights", "bits a number", "bytes", "KL, nats", "99 % below", "same token", "perplexity"
    )
    for name, of in found.items():
        table.add_row(
            name, f"{of['bits']:.2f}", f"{of['weight_bytes'] / 1e6:.1f} MB",
            f"{of['divergence']:.4f}", f"{of['divergence_99']:.4f}", f"{of['same']:.2%}",
            f"{of['perplexity']:.3f}",
        )  # fmt: skip
    Console().print(table)
    if found:
        first = next(iter(found.values()))
        print(
            f"In full: perplexity {first['perplexity_full']:.3f}, "
            f"{first['full_bytes'] / 1e6:.1f} MB in {args.dtype}; {first['positions']} positions, "
            f"windows of {args.window}"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
