"""What every transport of the expert exchange offers, and what one is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax

from tbo_jax.parallel.exchange.message import MessageFormat, local_experts


class Exchange(Protocol):
    """What the mixture-of-experts block asks of a transport. T tokens, K experts each, D hidden."""

    # Whether rows are sent as routed, their number told in a collective of its own.
    sizes_are_data: ClassVar[bool] = False

    chunks: int = 1  # messages each way; with several see `chunks.py`

    def pack(self, hidden, experts, weights, arrived=None) -> tuple[Any, Any]:
        """[T, D], [T, K] int32 global ids (negative: no expert), [T, K] -> message, places.

        What is sent already in here, such as sizes, waits for `arrived`, any pytree of arrays: see
        `Stage.announces`.
        """

    def dispatch(self, message: Any) -> Any:
        """The first communication."""

    def unpack(self, received: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """received -> rows [M, D], ids among this device's experts [M, K], weights [M, K]."""

    def pack_results(self, results: jax.Array, received: Any) -> Any:
        """[M, D], and what `dispatch` gave -> message."""

    def combine(self, message: Any) -> Any:
        """The second communication."""

    def unpack_results(self, returned: Any, places: Any) -> jax.Array:
        """returned, places -> [T, D]."""

    def take_in(self, received: Any, places: Any, kept: Any) -> tuple[Any, Any, Any, Any]:
        """`unpack` of a chunk, with what `pack` gave and the chunk before left; what it leaves."""
        return *self.unpack(received), None

    def give_back(
        self, results: jax.Array, received: Any, places: Any, kept: Any
    ) -> tuple[Any, Any]:
        """`pack_results` of a chunk, which takes what `take_in` kept; and what the next needs."""
        return self.pack_results(results, received), None

    def link_bytes(self, tokens: int, hidden_size: int, dtype: Any) -> int:
        """Bytes that a device sends to others for T = `tokens`, both ways; at most, if ragged."""


@dataclass(frozen=True)
class ShardedExchange(Exchange):
    """What a transport between several devices is told, and what most of them do alike."""

    axis: str | tuple[str, ...]  # of the mesh, or several
    num_devices: int  # R, of all of these axes
    num_nodes: int  # size of the first axis, for a transport that tells nodes apart
    experts_per_device: int
    form: MessageFormat
    platform: str  # of the devices

    @property
    def destinations(self) -> int:
        """To how many places a device sends: devices, or nodes, or one that is all devices."""
        return self.num_devices

    def local(self, experts: jax.Array) -> jax.Array:
        """Global expert ids -> index among this device's experts; outside [0, E) when not here."""
        return local_experts(experts, self.axis, self.experts_per_device)

    def unpack(self, received):
        hidden, experts, weights = self.form.part(received.reshape(-1, received.shape[-1]))
        return hidden, self.local(experts), weights

    def link_bytes(self, tokens, hidden_size, dtype):
        rows = (self.num_devices - 1) * tokens  # each token once to every other device
        return rows * self.form.round_trip_bytes(hidden_size, dtype)


def check_divisible(num_experts: int, num_devices: int) -> None:
    """Raise ValueError, naming the device counts that work, unless devices divide the experts."""
    if num_experts % num_devices:
        works = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts cannot be shared equally by {num_devices} devices; "
            f"device counts that work: {', '.join(works)}"
        )
