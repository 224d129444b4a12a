"""The loss of training: next tokens, over all ranks and micro-batches, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tbo_jax.layers.context import DenseAttention, LayerContext
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.layers.exchange import exchange_of
from tbo_jax.layers.precision import exact_products
from tbo_jax.layers.rotary import rotary_table
from tbo_jax.moe.balance import RouterLoad
from tbo_jax.overlap.config import OverlapConfig, Strategy
from tbo_jax.overlap.stages import run_layers
from tbo_jax.parallel.exchange import Transport
from tbo_jax.parallel.sharding import DEVICES, RANKS, TENSOR, parameter_spec
from tbo_jax.quantized.array import QuantizedArray
from tbo_jax.step.backends import KernelChoice
from tbo_jax.step.compiler_options import Options, compiler_options
from tbo_jax.step.kernels import choose_training_kernels

Metrics = dict[str, jax.Array]


class NextTokenLoss:
    """The loss of a model over all ranks, and its gradient: pure functions to be jitted.

    The loss is the mean cross entropy, in nats, over all predicted tokens of all ranks, plus
    `balance_weight` times the sum over the layers of the routers' balancing loss. That one is made
    of the scores and choices of all tokens of all ranks too (`RouterLoad`). So neither the number
    of ranks nor that of micro-batches changes the loss or its gradient by more than rounding.

    Called with weights and tokens, it gives metrics, float32 scalars:

    - "loss": what is differentiated,
    - "cross_entropy": without the balancing loss,
    - "balance": the mean of the balancing loss over layers with experts (if there are any), 1 when
      all experts are equally busy.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        mesh: Mesh,
        overlap: OverlapConfig | None = None,
        transport: Transport = "all_to_all",
        balance_weight: float = 0.0,
        remat: bool = False,
        kernels: KernelChoice = "auto",
    ):
        """Take what the loss is made of.

        Args:
            model: gives the structure; its weights are an argument of every call. They may be
                abstract.
            mesh: of the ranks (`make_mesh`), without tensor parallelism.
            overlap: micro-batches; default none.
            transport: of the expert exchange (`make_exchange`).
            balance_weight: of the routers' balancing loss.
            remat: see `run_layers`; the logits are computed anew too.
            kernels: of attention and experts, those of a backend of Pallas or XLA's own
                (`choose_training_kernels`).

        Raises:
            ValueError: mode "auto", strategy "expert_chunks", tensor parallelism, an unknown
                transport, or experts that do not divide over the ranks; or weights that are
                quantised, or kernels that the devices do not have.
        """
        self.overlap = OverlapConfig() if overlap is None else overlap
        if self.overlap.mode == "auto":
            raise ValueError(
                "USE_TBO=auto: the engine decides that when it warms up, training does not; "
                "expected 0 or 1"
            )
        if self.overlap.enabled and self.overlap.strategy == "expert_chunks":
            raise ValueError(
                "strategy 'expert_chunks' (USE_TBO=expert_chunks) is for decoding and prefill: "
                "training expects 'micro_batches' (USE_TBO=1), as nothing orders the backward pass "
                "of chunks"
            )
        if mesh.shape[TENSOR] > 1:
            raise ValueError(
                f"a mesh with {mesh.shape[TENSOR]}-way tensor parallelism: training expects 1"
            )
        self.config = model.config
        self.mesh = mesh
        self.transport = transport
        self.balance_weight = balance_weight
        self.remat = remat
        self._graph, state = nnx.split(model)
        for path, variable in nnx.to_flat_state(state):
            if isinstance(value := variable.get_raw_value(), QuantizedArray):
                raise ValueError(
                    f"{'.'.join(map(str, path))} is held as {value.format.kind}, which has no "
                    'gradient: expected a model loaded with quantize="none"'
                )
        specs = [
            parameter_spec(path, variable, mesh) for path, variable in nnx.to_flat_state(state)
        ]
        self.specs = jax.tree.unflatten(jax.tree.structure(state), specs)
        self._exchange = exchange_of(self.config, mesh, transport)
        self._kernels = choose_training_kernels(mesh.devices.flat[0], self.config, kernels)

    def micro_batches(self, sequences: int, length: int) -> int:
        """Into how many micro-batches each rank cuts its part of a step's sequences.

        Raises:
            ValueError: `sequences`, of `length` tokens each, do not divide so.
        """
        ranks = self.mesh.size
        count = self.overlap.micro_batches(sequences // ranks * length)
        if not sequences or sequences % (ranks * count):
            raise ValueError(
                f"{sequences} sequences a step do not divide over {ranks} device(s) with {count} "
                f"micro-batch(es) each: expected a multiple of {ranks * count}"
            )
        return count

    def compiler_options(self) -> Options:
        """What XLA should be told for a program that holds this loss."""
        strategy = Strategy(self.overlap.most_micro_batches)
        return compiler_options(self.mesh, strategy, self.transport, training=True)

    def __call__(self, weights: nnx.State, tokens: jax.Array) -> Metrics:
        """Weights, tokens [B, S + 1] int32 -> metrics.

        Raises:
            ValueError: another shape, or B does not divide (`micro_batches`).
        """

        def run(weights: nnx.State, tokens: jax.Array, micro_batches: int) -> Metrics:
            return jax.lax.psum(self._of_rank(weights, tokens, micro_batches)[1], RANKS)

        return self._sharded(run, PartitionSpec())(weights, tokens)

    def value_and_grad(self, weights: nnx.State, tokens: jax.Array) -> tuple[Metrics, nnx.State]:
        """Weights, tokens [B, S + 1] int32 -> metrics, and the gradient in the weights' structure.

        Raises:
            ValueError: another shape, or B does not divide (`micro_batches`).
        """

        def run(
            weights: nnx.State, tokens: jax.Array, micro_batches: int
        ) -> tuple[Metrics, nnx.State]:
            grad = jax.grad(self._of_rank, has_aux=True)
            gradient, metrics = grad(weights, tokens, micro_batches)
            # At the end, with the gradient that comes last: nothing is to be hidden there.
            metrics, _ = jax.lax.optimization_barrier((metrics, gradient["embed_tokens"]))
            metrics = jax.lax.psum(metrics, RANKS)
            # Those of experts have come from all ranks already, by the exchange's transpose.
            sum_up = partial(jax.lax.psum, axis_name=RANKS)
            gradient = jax.tree.map(
                lambda leaf, spec: leaf if DEVICES in spec else sum_up(leaf), gradient, self.specs
            )
            return metrics, gradient

        return self._sharded(run, (PartitionSpec(), self.specs))(weights, tokens)

    def _sharded(self, run: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        def checked(weights: nnx.State, tokens: jax.Array) -> Any:
            if tokens.ndim != 2 or tokens.shape[1] < 2:
                raise ValueError(f"tokens of shape {tokens.shape}: expected [B, S + 1], S >= 1")
            count = self.micro_batches(tokens.shape[0], tokens.shape[1] - 1)
            # Varying-axes checks would ask for casts in every loop that starts from zeros.
            sharded = jax.shard_map(
                partial(run, micro_batches=count),
                mesh=self.mesh,
                in_specs=(self.specs, PartitionSpec(RANKS)),
                out_specs=out_specs,
                check_vma=False,
            )
            with exact_products(self.config.dtype):
                return sharded(weights, tokens)

        return checked

    def _of_rank(
        self, weights: nnx.State, tokens: jax.Array, micro_batches: int
    ) -> tuple[jax.Array, Metrics]:
        """This rank's part of the loss and of the metrics: the sum over the ranks is the whole."""
        model = nnx.merge(self._graph, weights)
        config, length = self.config, tokens.shape[1] - 1
        parts = jnp.split(tokens, micro_batches)

        def sum_of_entropies(hidden: jax.Array, context: _Context) -> jax.Array:
            logits = model.logits(hidden)
            return optax.softmax_cross_entropy_with_integer_labels(logits, context.targets).sum()

        load = RouterLoad.zeros(config.num_layers, config.num_experts)
        entropies, load = run_layers(
            model.layers,
            [model.embed(part[:, :-1].reshape(-1)) for part in parts],
            [self._context(part) for part in parts],
            load if config.num_experts else None,
            head=sum_of_entropies,
            remat=self.remat,
        )
        total = tokens.shape[0] * length * self.mesh.size
        loss = sum(entropies) / total
        metrics = {"cross_entropy": loss}
        if config.num_experts:
            # Behind the heads: beside them, it would take the place of the last combine.
            after, counted = jax.lax.stop_gradient((entropies, load.choices))
            _, counted = jax.lax.optimization_barrier((after, counted))
            choices = jax.lax.psum(counted, RANKS)
            balance = load.balance_loss(total, choices).sum()
            sparse = sum(config.is_sparse(layer) for layer in range(config.num_layers))
            metrics["balance"] = balance / sparse
            loss = loss + self.balance_weight * balance
        return loss, jax.lax.stop_gradient(metrics | {"loss": loss})

    def _context(self, tokens: jax.Array) -> _Context:
        """Of a micro-batch [B, S + 1]."""
        sequences, length = tokens.shape[0], tokens.shape[1] - 1
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), sequences)
        return _Context(
            attention=DenseAttention(length, self._kernels.attention),
            exchange=self._exchange,
            experts=self._kernels.experts,
            rotary=rotary_table(self.config.rotary, positions),
            live=jnp.ones(positions.shape, bool),
            targets=tokens[:, 1:].reshape(-1),
        )


@dataclass(frozen=True, kw_only=True)
class _Context(LayerContext):
    targets: jax.Array  # [T] int32, the token after each
