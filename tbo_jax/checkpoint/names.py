"""Where each parameter of a model lies in a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.stored import StoredAs, StoredExperts, StoredRows
from tbo_jax.models.architecture import Architecture, ExpertTensors

HEAD = "lm_head.weight"
_LEAVES = {"scale": "weight", "embedding": "weight"}  # named otherwise by Flax


@dataclass(frozen=True)
class Source:
    """A weight of the checkpoint and its place in a parameter.

    The place is `parameter[*at]`, then from column `column` on along the last dimension. With
    `transpose` the checkpoint keeps the last two dimensions the other way round, [out, in]. It may
    keep the weight with `leading` more dimensions of one entry in front, or as the rows from `row`
    on of one that has `of_rows` rows. Where `alternating`, column j of the first half of the
    parameter's last dimension is column 2j in the checkpoint, and of the second 2j + 1.
    """

    name: str
    shape: tuple[int, ...]  # as it stands in the parameter
    at: tuple[int, ...] = ()  # entries of the leading dimensions: layer, expert
    column: int = 0
    transpose: bool = False
    leading: int = 0
    row: int = 0
    of_rows: int | None = None
    alternating: bool = False

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have the weight in, whole."""
        shape = _swapped(self.shape) if self.transpose else self.shape
        if self.of_rows is not None:
            shape = (self.of_rows, *shape[1:])
        return (1,) * self.leading + shape

    def part(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where `index` of what is taken lies in the checkpoint's weight."""
        index = _swapped(index) if self.transpose else index
        if self.of_rows is not None:
            index = (slice(index[0].start + self.row, index[0].stop + self.row), *index[1:])
        return (slice(0, 1),) * self.leading + index


def _swapped(pair: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last two the other way round."""
    return (*pair[:-2], pair[-1], pair[-2])


@dataclass(frozen=True)
class Layout:
    """Which of the forms that an architecture may be stored in a checkpoint has."""

    prefix: str = "model."  # of all names but that of the head
    experts: ExpertTensors = ExpertTensors()  # noqa: RUF009, frozen
    embedding: str = "model.embed_tokens.weight"

    def behind_prefix(self, name: str) -> str:
        """`name` as the model that the prefix stands for calls it."""
        # A part that is left out, like a vision tower, may stand beside the language model.
        return name.removeprefix(self.prefix).removeprefix("model.")


def published_layout(architecture: Architecture) -> Layout:
    """The form that checkpoints are published, and saved, in."""
    return Layout(experts=next(iter(architecture.experts), ExpertTensors()))


def find_layout(
    names: Collection[str], config: DecoderConfig, architecture: Architecture
) -> Layout:
    """The form of a checkpoint with tensors of these names."""
    norms = "norm.weight", "layers.0.input_layernorm.weight"  # which no format quantises
    prefix = next(
        (p for p in architecture.prefixes if any(p + norm in names for norm in norms)), "model."
    )
    experts = published_layout(architecture).experts
    for form in architecture.experts:
        expert = form.name("mlp") + ".experts."
        first = f"{expert}gate_up_proj" if form.fused else f"{expert}0.{form.gate}.weight"
        pattern = re.compile(rf"{re.escape(prefix)}layers\.\d+\.{re.escape(first)}")
        if any(pattern.fullmatch(name) for name in names):
            experts = form
            break
    embedding = f"{prefix}embed_tokens.weight"
    if config.tie_word_embeddings and embedding not in names and HEAD in names:
        embedding = HEAD  # either of the two is both
    return Layout(prefix, experts, embedding)


def count_layers(names: Collection[str], layout: Layout) -> int:
    """How many layers the tensors are of."""
    pattern = re.compile(rf"{re.escape(layout.prefix)}layers\.(\d+)\.")
    found = (pattern.match(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def parameter_sources(
    path: Sequence[object], parameter: nnx.Variable, config: DecoderConfig, layout: Layout
) -> list[Source]:
    """The tensors that make up `parameter` at `path` of a `CausalLM`."""
    names, shape = tuple(map(str, path)), parameter.shape
    stored = parameter.get_metadata().get("stored")
    if names[0] == "embed_tokens":
        return [Source(layout.embedding, shape)]
    if names[0] != "layers":
        prefix = "" if names[0] == "lm_head" else layout.prefix
        return list(_sources(names, shape, stored, prefix, (), layout))
    stacked = names[1] == "stacked"
    of_layer = shape[1:] if stacked else shape
    return [
        source
        for layer in (range(config.num_layers) if stacked else [int(names[1])])
        for source in _sources(
            names[2:], of_layer, stored, f"{layout.prefix}layers.{layer}.",
            (layer,) if stacked else (), layout,
        )
    ]  # fmt: skip


def _sources(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    stored: Any,
    prefix: str,
    at: tuple[int, ...],
    layout: Layout,
) -> Iterator[Source]:
    """Those of a parameter at `path` behind `prefix`; `at` is its place in a stack."""
    *modules, leaf = path
    match stored:
        case StoredExperts():
            yield from _experts(modules, shape, stored, prefix, at, layout.experts)
        case StoredRows(first, period):
            name = prefix + layout.experts.name(".".join([*modules, "weight"]))
            entries = shape[0]
            for entry in range(entries):
                yield Source(
                    name, shape[1:], (*at, entry),
                    row=entry * period + first, of_rows=entries * period,
                )  # fmt: skip
        case _:
            leaf = stored.name if isinstance(stored, StoredAs) else _LEAVES.get(leaf, leaf)
            whole = ".".join([*modules, leaf])
            leading = layout.experts.ndim.get(whole, len(shape)) - len(shape)
            yield Source(prefix + layout.experts.name(whole), shape, at, leading=leading)


def _experts(
    modules: Sequence[str],
    shape: tuple[int, ...],
    stored: StoredExperts,
    prefix: str,
    at: tuple[int, ...],
    experts: ExpertTensors,
) -> Iterator[Source]:
    folder = f"{prefix}{experts.name('.'.join(modules))}.experts"
    count = len(stored.projections)
    if experts.fused:
        name = f"{folder}.{'_'.join(stored.projections)}_proj{'_bias' if stored.bias else ''}"
        halves = experts.fused == "halves"
        yield Source(
            name, shape, at,
            transpose=halves and not stored.bias, alternating=not halves and count == 2,
        )  # fmt: skip
        return
    leaf = "bias" if stored.bias else "weight"
    part = *shape[1:-1], shape[-1] // count
    for expert in range(shape[0]):
        for number, projection in enumerate(stored.projections):
            name = f"{folder}.{expert}.{getattr(experts, projection)}.{leaf}"
            column = number * part[-1]
            yield Source(name, part, (*at, expert), column, transpose=not stored.bias)
