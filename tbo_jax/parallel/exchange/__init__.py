"""The expert exchange: one interface, a file for each transport, and the table of them."""

from tbo_jax.parallel.exchange.all_gather import AllGather
from tbo_jax.parallel.exchange.all_to_all import PaddedAllToAll
from tbo_jax.parallel.exchange.base import Exchange, check_divisible
from tbo_jax.parallel.exchange.chunks import in_chunks
from tbo_jax.parallel.exchange.local import LocalExchange
from tbo_jax.parallel.exchange.message import DispatchDtype
from tbo_jax.parallel.exchange.ragged import RaggedAllToAll
from tbo_jax.parallel.exchange.transports import TRANSPORTS, Transport, make_exchange
from tbo_jax.parallel.exchange.two_level import TwoLevel

__all__ = [
    "TRANSPORTS",
    "AllGather",
    "DispatchDtype",
    "Exchange",
    "LocalExchange",
    "PaddedAllToAll",
    "RaggedAllToAll",
    "Transport",
    "TwoLevel",
    "check_divisible",
    "in_chunks",
    "make_exchange",
]
