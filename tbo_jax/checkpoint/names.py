"""Where each parameter of a model lies in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture

_LEAVES = {"weight": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and its place in a parameter.

    The place is `parameter[*at]`, then from column `column` on along the last dimension. With
    `transpose` the checkpoint keeps a matrix the other way round, [out, in]. It may keep the tensor
    with `leading` more dimensions of one entry in front.
    """

    name: str
    shape: tuple[int, ...]  # as it stands in the parameter
    at: tuple[int, ...] = ()  # entries of the leading dimensions: layer, expert
    column: int = 0
    transpose: bool = False
    leading: int = 0

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have it in."""
        shape = self.shape[::-1] if self.transpose else self.shape
        return (1,) * self.leading + shape


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
    if path[0] != "mlp" or names is None or not config.is_sparse(layer):
        yield _plain(path, shape, prefix, at)
    elif path[1] == "gate" and path[2] == "correction_bias":
        yield Source(prefix + names.router_bias, shape, at, leading=names.router_bias_rank - 1)
    elif path[1] == "gate":
        yield Source(prefix + names.router, shape, at)
    elif path[1] == "shared_experts":
        yield _plain(path[2:], shape, f"{prefix}{names.shared}.", at)
    elif path[1] == "shared_expert_gate":
        yield Source(prefix + names.shared_gate, shape, at)
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


def _plain(
    path: Sequence[object], shape: tuple[int, ...], prefix: str, at: tuple[int, ...] = ()
) -> Source:
    """A parameter that is one tensor, under the names of the modules that lead to it."""
    *modules, leaf = map(str, path)
    name = prefix + ".".join([*modules, _LEAVES[leaf]])
    return Source(name, shape, at)
