"""What an architecture file declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tbo_jax.layers.config import DecoderConfig, HfConfig


@dataclass(frozen=True)
class ExpertTensors:
    """Names of the tensors of a mixture of experts within a layer of a checkpoint.

    `{e}` stands for the number of the expert. The checkpoint keeps each projection as [out, in].
    """

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Architecture:
    """An architecture: how its config.json is read, and where its checkpoint keeps the experts.

    All other tensors follow the names of the Flax modules, which are those of Hugging Face.
    """

    parse_config: Callable[[HfConfig, Any], DecoderConfig]
    experts: ExpertTensors | None = None
