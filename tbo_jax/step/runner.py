"""The model runner: one jitted step over all ranks, with the attention buffers donated to it."""

from __future__ import annotations

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.attention.buffers import (
    BUFFER_SPECS,
    AttentionBuffers,
    allocate_attention_buffers,
    kv_bytes_per_page,
)
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.layers.exchange import exchange_of
from tbo_jax.layers.precision import exact_products
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.overlap.config import OverlapConfig, Strategy
from tbo_jax.overlap.stages import StackedLayers
from tbo_jax.parallel.exchange import Exchange, LocalExchange, Transport, in_chunks
from tbo_jax.parallel.exchange.message import DispatchDtype
from tbo_jax.parallel.processes import over_ranks
from tbo_jax.parallel.sharding import RANKS, TENSOR, bytes_on_device, leaf_specs, num_ranks
from tbo_jax.parallel.tensor_parallel import TensorParallel
from tbo_jax.quantized import gpu_product
from tbo_jax.step.backends import KernelChoice
from tbo_jax.step.compiler_options import Options, compiler_options
from tbo_jax.step.deterministic import check_deterministic
from tbo_jax.step.forward import EachToken, LogitRows, forward
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.kernels import choose_kernels
from tbo_jax.step.program import LogitsProgram, StepProgram
from tbo_jax.step.shapes import Bucket, CacheConfig, Program, program_name

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done, in all

MOST_COMPILERS = 8  # at a time: each holds its program in the host's memory


def compilers() -> int:
    """How many programs XLA compiles at a time: one for each core, within limits."""
    return min(max(2, os.cpu_count() or 1), MOST_COMPILERS)


class ModelRunner:
    """Compiles and runs the step of a model: R ranks, each with its own batch and its own pages.

    The step is `(buffers, batch) -> (logits, buffers)`; its buffers are donated. Attention is
    data-parallel over the ranks, tensor-parallel over the devices of a rank, and experts are
    sharded over all devices, in one SPMD program: every device issues the same collectives whatever
    its batch holds, an empty batch included.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheConfig,
        *,
        mesh: Mesh,
        overlap: OverlapConfig | None = None,
        transport: Transport = "all_to_all",
        dispatch_dtype: DispatchDtype | None = None,
        logits: LogitRows = "last",
        inputs: Inputs | None = None,
        deterministic: bool = False,
        kernels: KernelChoice = "auto",
    ):
        """Take the model's weights and choose its kernels; nothing is compiled yet.

        Args:
            model: with its weights on the devices of `mesh`, as `load_model` leaves them.
            cache: size of the key/value cache.
            mesh: of `make_mesh`.
            overlap: how steps overlap; default not at all.
            transport, dispatch_dtype: of the expert exchange (`make_exchange`).
            logits: of the last token of each sequence [R, B, V], or of all tokens [R, T, V]; steps
                that verify drafts always give those of all tokens.
            inputs: what every batch holds beside tokens; default nothing.
            deterministic: no bit of a token depends on the tokens of other sequences in the step,
                on its place in it, or on where its sequence was cut.
            kernels: of which backend of Pallas, or XLA's own (`choose_kernels`).

        Raises:
            ValueError: the experts do not divide over the devices, or the heads over those of a
                rank, or an unknown transport or dispatch_dtype, or inputs that the model does not
                read; or `deterministic` where that is not known (`check_deterministic`); or
                `kernels` that the devices do not have; or
                expert chunks of a model without experts, or more of them than a device has experts.
        """
        self.config = model.config
        self.cache = cache
        self.mesh = mesh
        self.overlap = OverlapConfig() if overlap is None else overlap
        self.transport = transport
        self.dispatch_dtype = dispatch_dtype
        self.logits = logits
        self.inputs = Inputs() if inputs is None else inputs
        self.deterministic = deterministic
        if deterministic:
            check_deterministic(mesh, self.overlap)
        self.inputs.check_model(self.config)
        self.scanned = isinstance(model.layers, StackedLayers)
        # Split once: a jitted step that took the module would walk its object graph in every call.
        self._graph, state = nnx.split(model)
        flat = nnx.to_flat_state(state)
        self._specs = [spec for path, variable in flat for spec in leaf_specs(path, variable, mesh)]
        self._weights, self._structure = jax.tree.flatten(state)
        self.tensor = TensorParallel(mesh.shape[TENSOR])
        self._on_device = model.config.of_device(self.tensor.size)
        self.kernels = choose_kernels(
            mesh.devices.flat[0],
            self._on_device,
            self.inputs.mask_offsets > 0,
            deterministic,
            kernels,
            cache.dtype,
        )
        self._compiled: dict[Program, jax.stages.Compiled] = {}
        self._chosen: dict[Bucket, Strategy] = {}
        self.program: StepProgram = LogitsProgram(self.inputs, cache, self.config, num_ranks(mesh))
        self._exchange = exchange_of(self.config, mesh, transport, dispatch_dtype)
        self._check_strategy()

    def _check_strategy(self) -> None:
        """Refuse expert chunks where they are asked for and cannot be; warn of what gains nothing.

        Raises:
            ValueError: the model has no experts, or a device fewer than chunks.
        """
        if self.overlap.mode == "off":
            return
        wanted = self.overlap.strategy or ("micro_batches" if self.overlap.mode == "on" else None)
        if wanted == "expert_chunks":
            if not self._num_sparse:
                raise ValueError(
                    f"strategy 'expert_chunks' is for experts, and this {self.config.model_type} "
                    "model has none: expected 'micro_batches'"
                )
            self._exchange_in(self.overlap.num_expert_chunks)
        if self.overlap.mode == "on" and not self.communicates:
            value, happens = ("1", "steps are split, and there")
            if wanted == "expert_chunks":
                value, happens = (wanted, "there")
            logger.warning(
                "USE_TBO=%s: %s on %d device(s) has no communication between devices; %s is "
                "nothing to overlap",
                value,
                self.config.model_type,
                self.mesh.size,
                happens,
            )

    def _exchange_in(self, chunks: int) -> Exchange:
        """The expert exchange in so many chunks; ValueError if a device has fewer experts."""
        config = self.config
        if not config.num_experts:
            return self._exchange
        return in_chunks(self._exchange, chunks, config.num_experts, config.num_experts_per_token)

    def with_program(self, program: StepProgram) -> ModelRunner:
        """A runner of the same model whose steps take and give what another program does."""
        other = copy.copy(self)
        other.program = program
        other._compiled, other._chosen = {}, {}
        return other

    @property
    def num_compiled(self) -> int:
        """Steps compiled so far."""
        return len(self._compiled)

    def strategy(self, bucket: Bucket) -> Strategy:
        """How a step of this bucket overlaps."""
        chosen = self._chosen.get(bucket)
        return self.overlap.chosen(bucket.tokens) if chosen is None else chosen

    def candidates(self, bucket: Bucket) -> tuple[Strategy, ...]:
        """Those of `OverlapConfig.candidates` that the model and its devices can have."""
        here = self.config.num_experts // self.mesh.size if self._num_sparse else 0
        return tuple(
            strategy
            for strategy in self.overlap.candidates(bucket.tokens)
            if strategy.expert_chunks == 1 or here >= strategy.expert_chunks
        )

    def choose(self, bucket: Bucket, strategy: Strategy) -> None:
        """Run steps of this bucket so from here on, and drop its other compiled programs.

        Raises ValueError for a strategy that the configuration of the overlap does not allow.
        """
        allowed = self.candidates(bucket)
        if strategy not in allowed:
            known = ", ".join(str(one) for one in allowed)
            raise ValueError(f"strategy {strategy} for {bucket}: expected one of {known}")
        self._chosen[bucket] = strategy
        for program in [p for p in self._compiled if p[0] == bucket and p[1] != strategy]:
            del self._compiled[program]

    @property
    def communicates(self) -> bool:
        """Whether the layers send anything from device to device."""
        exchanged = self._num_sparse > 0 and not isinstance(self._exchange, LocalExchange)
        return exchanged or self.tensor.size > 1

    @property
    def _num_sparse(self) -> int:
        return sum(self.config.is_sparse(layer) for layer in range(self.config.num_layers))

    def link_bytes(self, bucket: Bucket) -> int:
        """Bytes that a device sends to others in a step; with a ragged transport the most."""
        strategy, config = self.strategy(bucket), self.config
        count = strategy.micro_batches
        whole = count == 1 or self.inputs.cuts_anywhere(bucket)
        tokens = bucket.tokens if whole else -(-bucket.tokens // count)  # of a micro-batch, padded
        part = -(-tokens // self.tensor.size)
        exchange = self._exchange_in(strategy.expert_chunks)
        sparse = exchange.link_bytes(part, config.hidden_size, config.dtype)
        # In rings: scattering sends all parts but one, and so does gathering; reducing does both.
        away = (self.tensor.size - 1) * part * config.hidden_size * jnp.dtype(config.dtype).itemsize
        dense = 4 * away  # reduced twice
        num_dense = config.num_layers - self._num_sparse
        return count * (self._num_sparse * (sparse + 2 * away) + num_dense * dense)

    def allocate(self) -> AttentionBuffers:
        """The buffers that every step takes and returns."""
        config, cache = self.config, self.cache
        return allocate_attention_buffers(
            num_layers=config.num_layers,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            num_kv_heads=self._on_device.num_kv_heads,
            head_dim=config.head_dim,
            dtype=config.dtype,
            max_tokens=cache.max_tokens,
            num_micro_batches=self.overlap.most_micro_batches,
            stacked=self.scanned,
            layout=self.kernels.attention.layout,
            cache_dtype=cache.dtype,
            mesh=self.mesh,
        )

    @functools.cached_property
    def _buffer_shapes(self) -> AttentionBuffers:
        """Shapes of `allocate()`; nothing is allocated."""
        return jax.eval_shape(self.allocate)

    @property
    def largest_weight(self) -> int:
        """Bytes of the largest array of the weights on one device."""
        return max(bytes_on_device(leaf, leaf.sharding) for leaf in self._weights)

    def memory(self) -> dict[str, Any]:
        """Bytes of a device.

        `weight_bytes`, `cache_bytes`: weights, and pages of keys and values. `work_bytes`:
        attention work metadata, a set for each micro-batch. `temporary_bytes`: what XLA holds while
        a step runs, for each compiled program (`program_name`); without those of which XLA does not
        tell.
        """
        work = jax.tree.leaves(self._buffer_shapes.work)
        of_page = kv_bytes_per_page(self._on_device, self.cache.page_size, self.cache.dtype)
        compiled = list(self._compiled.items())  # at once: another thread may be compiling
        held = {program_name(*key): program.memory_analysis() for key, program in compiled}
        return {
            "weight_bytes": sum(bytes_on_device(leaf, leaf.sharding) for leaf in self._weights),
            "cache_bytes": self.cache.num_pages * of_page,
            "work_bytes": sum(a.size * a.dtype.itemsize for a in work) // num_ranks(self.mesh),
            "temporary_bytes": {
                name: analysis.temp_size_in_bytes
                for name, analysis in held.items()
                if analysis is not None
            },
        }

    def step(
        self,
        bucket: Bucket,
        buffers: AttentionBuffers,
        batch: ForwardBatch,
        strategy: Strategy | None = None,
    ) -> tuple[Any, AttentionBuffers]:
        """Run one step; compiles first if the bucket is new.

        Args:
            bucket: shape of `batch`.
            buffers: donated; use the returned ones from here on.
            batch: leaves [R, ...] (`stack_batches`), with the fields that `inputs` names. Arrays of
                numpy are copied, so that they may be overwritten at once.
            strategy: how to overlap; default that of the bucket.

        Returns:
            Logits float32 [R, B, V] ([R, T, V] with `logits="all"` or drafts; rows of padding are
            undefined), or what another `program` gives; and the buffers.

        Raises:
            ValueError: the batch has other fields, or other shapes than the bucket.
        """
        inputs = self.program.from_batch(bucket, batch)
        return self.run(bucket, buffers, *inputs, strategy=strategy)

    def run(
        self,
        bucket: Bucket,
        buffers: AttentionBuffers,
        *inputs: Any,
        strategy: Strategy | None = None,
    ) -> tuple[Any, AttentionBuffers]:
        """Run one step with the inputs of `program`, and overlap as `step` does.

        A program reads numpy arrays after this returns, on CPU where they are (jax#37830): they
        must not be written any more.
        """
        placed = over_ranks(inputs, self.mesh)
        return self.compile(bucket, strategy)(self._weights, buffers, *placed)

    def compile(self, bucket: Bucket, strategy: Strategy | None = None) -> jax.stages.Compiled:
        """The compiled step of a bucket, from the cache of this runner if it is there."""
        strategy = self.strategy(bucket) if strategy is None else strategy
        if (bucket, strategy) not in self._compiled:
            for error in self.compile_programs([(bucket, strategy)]).values():
                raise error
        return self._compiled[bucket, strategy]

    def compile_all(self, buckets: Sequence[Bucket], progress: Progress | None = None) -> None:
        """Compile the steps of several buckets; see `compile_programs`."""
        programs = [(bucket, self.strategy(bucket)) for bucket in buckets]
        for error in self.compile_programs(programs, progress).values():
            raise error

    def compile_programs(
        self, programs: Sequence[Program], progress: Progress | None = None
    ) -> dict[Program, jax.errors.JaxRuntimeError]:
        """Compile several programs, XLA working on some while the next is traced.

        Args:
            programs: those that are compiled already cost nothing.
            progress: called with (compiled, in all).

        Returns:
            Those that XLA failed on, with its error.
        """
        missing = [key for key in dict.fromkeys(programs) if key not in self._compiled]
        done = len(programs) - len(missing)
        failed: dict[Program, jax.errors.JaxRuntimeError] = {}
        with ThreadPoolExecutor(max_workers=compilers()) as pool:
            futures = {
                pool.submit(self.lower(*key).compile, self.compiler_options(key[1])): key
                for key in missing
            }
            for future in as_completed(futures):
                try:
                    self._compiled[futures[future]] = future.result()
                except jax.errors.JaxRuntimeError as error:
                    failed[futures[future]] = error
                done += 1
                if progress is not None:
                    progress(done, len(programs))
        return failed

    def compiler_options(self, strategy: Strategy) -> Options:
        """What XLA is told for the programs of this runner."""
        return compiler_options(self.mesh, strategy, self.transport)

    def lower(self, bucket: Bucket, strategy: Strategy | None = None) -> jax.stages.Lowered:
        """The step of a bucket, traced and lowered for the mesh; nothing is allocated."""
        strategy = self.strategy(bucket) if strategy is None else strategy
        placed = functools.partial(NamedSharding, self.mesh)

        def abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        weights = [
            abstract(leaf, placed(spec))
            for leaf, spec in zip(self._weights, self._specs, strict=True)
        ]
        buffers = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda leaf: abstract(leaf, placed(spec)), part),
            BUFFER_SPECS,
            self._buffer_shapes,
        )
        ranks = placed(PartitionSpec(RANKS))
        inputs = jax.tree.map(lambda leaf: abstract(leaf, ranks), self.program.shapes(bucket))
        with warnings.catch_warnings():
            # A buffer that cannot be updated in place would be copied whole in every step.
            warnings.filterwarnings("error", message="Some donated buffers were not usable")
            return self._jitted(bucket, strategy).lower(weights, buffers, *inputs)

    def _jitted(self, bucket: Bucket, strategy: Strategy) -> Any:
        ranks = PartitionSpec(RANKS)
        exchange = self._exchange_in(strategy.expert_chunks)

        def step(weights: list[jax.Array], buffers: AttentionBuffers, *inputs: Any):
            model = nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))

            def run(
                batch: ForwardBatch,
                slots: jax.Array | None = None,
                each: EachToken | None = None,
            ) -> tuple[Any, AttentionBuffers]:
                products = gpu_product.enabled(self.kernels.products)
                with exact_products(self.config.dtype), products:
                    return forward(
                        model,
                        buffers,
                        batch,
                        bucket=bucket,
                        micro_batches=strategy.micro_batches,
                        kernels=self.kernels,
                        exchange=exchange,
                        tensor=self.tensor,
                        logits="all" if bucket.drafts else self.logits,
                        inputs=self.inputs,
                        slots=slots,
                        each=each,
                    )

            mine = jax.tree.map(lambda leaf: leaf[0], inputs)
            outputs, after = self.program.trace(bucket, run, *mine)
            return jax.tree.map(lambda leaf: leaf[None], outputs), after

        # Varying-axes checks would ask for casts in every loop that starts from zeros.
        sharded = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(self._specs, BUFFER_SPECS, *[ranks] * len(self.program.shapes(bucket))),
            out_specs=(ranks, BUFFER_SPECS),
            check_vma=False,
        )
        # Explicit: inferred shardings of axes of size one get lost, and the next step would copy.
        placed = functools.partial(NamedSharding, self.mesh)
        whole = PartitionSpec() if jax.process_count() > 1 else ranks
        outputs = self.program.placed(bucket, placed(ranks), placed(whole))
        shardings = outputs, jax.tree.map(placed, BUFFER_SPECS)
        return jax.jit(sharded, donate_argnums=1, out_shardings=shardings)
