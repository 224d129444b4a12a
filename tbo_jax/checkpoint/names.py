"""Where each parameter of a model lies in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture

_LEAVES = {"scale": "weight", "embedding": "weight"}  # named otherwise by Flax


@dataclass(frozen=True)
class Source:
    """A weight of the checkpoint and its place in a parameter.

    The place is `parameter[*at]`, then from column `column` on along the last dimension. With
    `transpose` the checkpoint keeps a matrix the other way round, [out, in]. It may keep the weight
    with `leading` more dimensions of one entry in front, or as the rows from `row` on of one that
    has `of_rows` rows. Where `alternating`, column j of the first half of the parameter's last
    dimension is column 2j in the checkpoint, and of the second 2j + 1.
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
        shape = self.shape[::-1] if self.transpose else self.shape
        if self.of_rows is not None:
            shape = (self.of_rows, *shape[1:])
        return (1,) * self.leading + shape

    def part(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where `index` of what is taken lies in the checkpoint's weight."""
        index = index[::-1] if self.transpose else index
        if self.of_rows is not None:
            index = (slice(index[0].start + self.row, index[0].stop + self.row), *index[1:])
        return (slice(0, 1),) * self.leading + index


def parameter_sources(
    path: Sequence[object],
    shape: tuple[int, ...],
    config: DecoderConfig,
    architecture: Architecture,
) -> list[Source]:
    """The tensors that make up the parameter of shape `shape` at `path` of a `CausalLM`."""
    if path[0] != "layers":
        prefix = "" if path[0] == "lm_head" else "model."
        return [_plain(path, shape, prefix)]
    if path[1] != "stacked":
        return list(_layer(path[2:], shape, int(str(path[1])), (), config, architecture))
    return [
        source
        for layer in range(config.num_layers)
        for source in _layer(path[2:], shape[1:], layer, (layer,), config, architecture)
    ]


def _layer(
    path: Sequence[object],
    shape: tuple[int, ...],
    layer: int,
    at: tuple[int, ...],
    config: DecoderConfig,
    architecture: Architecture,
) -> Iterator[Source]:
    prefix = f"model.layers.{layer}."
    names = architecture.experts
    if path[:2] == ("self_attn", "kv_b_proj"):
        yield from _expansion(str(path[2]), shape, prefix, at, config)
    elif path[0] != "mlp" or names is None or not config.is_sparse(layer):
        yield _plain(path, shape, prefix, at)
    elif path[1] == "gate" and path[2] == "correction_bias":
        yield Source(prefix + names.router_bias, shape, at, leading=names.router_bias_rank - 1)
    elif path[1] == "gate":
        yield Source(prefix + names.router.removesuffix("weight") + str(path[2]), shape, at)
    elif path[1] == "shared_experts":
        yield _plain(path[2:], shape, f"{prefix}{names.shared}.", at)
    elif path[1] == "shared_expert_gate":
        yield Source(prefix + names.shared_gate, shape, at)
    elif names.fused:
        name = {
            "gate_up_proj": names.gate_up,
            "gate_up_bias": names.gate_up_bias,
            "down_proj": names.down,
            "down_bias": names.down_bias,
        }[str(path[1])]
        alternating = name in (names.gate_up, names.gate_up_bias)
        yield Source(prefix + name, shape, at, alternating=alternating)
    elif path[1] == "gate_up_proj":
        num_experts, hidden, width = shape[0], shape[1], shape[2] // 2
        for e in range(num_experts):
            for column, name in ((0, names.gate), (width, names.up)):
                name = prefix + name.format(e=e)
                yield Source(name, (hidden, width), (*at, e), column, transpose=True)
    else:
        for e in range(shape[0]):
            name = prefix + names.down.format(e=e)
            yield Source(name, shape[1:], (*at, e), transpose=True)


def _expansion(
    kind: str, shape: tuple[int, ...], prefix: str, at: tuple[int, ...], config: DecoderConfig
) -> Iterator[Source]:
    """The key or the value rows of each head, from a matrix that has both of all heads."""
    assert config.latent is not None
    keys, values = config.latent.plain_dim, config.latent.value_dim
    heads, *part = shape
    for head in range(heads):
        row = head * (keys + values) + (0 if kind == "key" else keys)
        yield Source(
            f"{prefix}self_attn.kv_b_proj.weight", tuple(part), (*at, head),
            row=row, of_rows=heads * (keys + values),
        )  # fmt: skip


def _plain(
    path: Sequence[object], shape: tuple[int, ...], prefix: str, at: tuple[int, ...] = ()
) -> Source:
    """A parameter that is one tensor, under the names of the modules that lead to it."""
    *modules, leaf = map(str, path)
    name = prefix + ".".join([*modules, _LEAVES.get(leaf, leaf)])
    return Source(name, shape, at)
