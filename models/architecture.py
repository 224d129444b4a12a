"""What an architecture file declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.hf_config import HfConfig


@dataclass(frozen=True)
class ExpertTensors:
    """Names of the tensors of a mixture of experts within a layer of a checkpoint.

    `{e}` stands for the number of the expert. The checkpoint keeps each projection as [out, in].
    The defaults are the names that most families share; what a configuration has no use for is not
    looked for.

    With `fused`, a tensor holds all E experts: `gate_up` [E, D, 2F] with the columns of gate and up
    taking turns, `down` [E, F, D], and the biases [E, 2F] and [E, D]; `gate` and `up` are not used.
    """

    router: str = "mlp.gate.weight"  # its bias: the same, with "bias" at the end
    gate: str = "mlp.experts.{e}.gate_proj.weight"
    up: str = "mlp.experts.{e}.up_proj.weight"
    down: str = "mlp.experts.{e}.down_proj.weight"
    fused: bool = False
    gate_up: str = "mlp.experts.gate_up_proj"
    gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    down_bias: str = "mlp.experts.down_proj_bias"
    router_bias: str = "mlp.gate.e_score_correction_bias"  # added to its scores
    router_bias_rank: int = 1  # 2: [1, E] in the checkpoint
    shared: str = "mlp.shared_experts"  # module of the shared experts
    shared_gate: str = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True)
class Architecture:
    """An architecture: how its config.json is read, and where its checkpoint keeps the experts.

    All other tensors follow the names of the Flax modules, which are those of Hugging Face.

    `ignored` lists the beginnings of the names of tensors that a checkpoint may hold and the model
    does not use. `{prediction}` stands for the number of each layer that
    `DecoderConfig.num_prediction_layers` counts. Any other tensor left over is an error.
    """

    parse_config: Callable[[HfConfig, Any], DecoderConfig]
    experts: ExpertTensors | None = None
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str, config: DecoderConfig) -> bool:
        """Whether tensor `name` is one of `ignored`."""
        first = config.num_layers
        layers = range(first, first + config.num_prediction_layers)
        return any(
            name.startswith(prefix.format(prediction=layer))
            for prefix in self.ignored
            for layer in (layers if "{prediction}" in prefix else (None,))
        )
