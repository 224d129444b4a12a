"""The name scopes of `run_layers`, as the compiler keeps them in an instruction's `op_name`."""

from __future__ import annotations

import re
from dataclasses import dataclass

BACKWARD = "(backward)"  # at the end of a label
_SCOPE = re.compile(r"(?:^|[/(])(layers|layer_\d+)/micro_batch_(\d+)/([^/()]+)\)*(?:/|$)")


@dataclass(frozen=True)
class Scope:
    """The stage that an instruction comes from."""

    layer: str  # "layer_3", or "layers" in the body of a scan
    micro_batch: int
    function: str  # what computes or communicates
    backward: bool = False  # in the transpose, where JAX recomputes and differentiates

    @property
    def index(self) -> int | None:
        """The layer's number; None in the body of a scan."""
        return int(self.layer.removeprefix("layer_")) if self.layer != "layers" else None

    @property
    def label(self) -> str:
        return f"{self.function} {BACKWARD}" if self.backward else self.function


def find_scope(op_name: str) -> Scope | None:
    """The scope in an instruction's `op_name`; None if it comes from outside the layers."""
    found = _SCOPE.search(op_name)
    if found is None:
        return None
    layer, micro_batch, function = found.groups()
    return Scope(layer, int(micro_batch), function, "transpose(" in op_name[: found.start() + 1])
