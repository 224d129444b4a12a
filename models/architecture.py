"""What an architecture file declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.hf_config import HfConfig


@dataclass(frozen=True)
class ExpertTensors:
    """How the layers of a checkpoint hold a mixture of experts.

    Each expert has its matrices, [out, in], under `experts.{number}`; `gate`, `up` and `down` are
    their names. With `fused` a tensor holds those of all E experts, of F features:

    - halves: `experts.gate_up_proj` [E, 2F, D], the rows of gate first, `experts.down_proj`
      [E, D, F], as transformers 5 has them in memory.
    - alternating: [E, D, 2F] with the columns of gate and up taking turns, and [E, F, D]; biases
      [E, 2F] and [E, D] have "_bias" at the end of these names.

    `names` maps a dotted path within a layer, or the beginning of one, to what the checkpoint calls
    it. `ndim` tells of the tensors, by their path, that have dimensions of one entry in front.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: Literal["halves", "alternating"] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ndim: Mapping[str, int] = field(default_factory=dict)

    def name(self, path: str) -> str:
        """What the checkpoint calls `path` of a layer."""
        for ours in sorted(self.names, key=len, reverse=True):
            if path == ours or path.startswith(ours + "."):
                return self.names[ours] + path[len(ours) :]
        return path


FUSED = ExpertTensors(fused="halves")


@dataclass(frozen=True)
class Architecture:
    """An architecture: how its config.json is read, and where its checkpoint keeps the tensors.

    Tensors follow the names of the Flax modules, which are those of Hugging Face, behind one of
    `prefixes`; the head has none. `experts` are the forms that a mixture of experts may have,
    that of published checkpoints first.

    `ignored` lists the beginnings, behind the prefix, of the names of tensors that a checkpoint may
    hold and the model does not use. `{prediction}` stands for the number of each layer that
    `DecoderConfig.num_prediction_layers` counts. Any other tensor left over is an error.
    """

    parse_config: Callable[[HfConfig, Any], DecoderConfig]
    experts: tuple[ExpertTensors, ...] = ()
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str, config: DecoderConfig) -> bool:
        """Whether the tensor that is called `name` behind the prefix is one of `ignored`."""
        first = config.num_layers
        layers = range(first, first + config.num_prediction_layers)
        return any(
            name.startswith(prefix.format(prediction=layer))
            for prefix in self.ignored
            for layer in (layers if "{prediction}" in prefix else (None,))
        )
