"""The steps that decode and train, for a model's shape: weights abstract, nothing allocated."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.attention import paged
from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.attention.kernel import AttentionLoad
from tbo_jax.attention.rounded import CacheDtype
from tbo_jax.host.json_files import parse_json_object, read_json_object
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.models import find_architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.experts import XlaExperts
from tbo_jax.moe.kernel import ExpertKernel, ExpertLoad
from tbo_jax.overlap.config import OFF, OverlapConfig, Strategy
from tbo_jax.parallel.exchange import TRANSPORTS, Transport, in_chunks, make_exchange
from tbo_jax.parallel.exchange.chunks import BlockChunks
from tbo_jax.parallel.exchange.ragged import expected_destinations
from tbo_jax.parallel.sharding import RANKS, TENSOR
from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.held_weights import (
    Weights,
    abstract_model,
    expert_weight_bits,
    parameter_bytes,
    product_work,
)
from tbo_jax.schedule.report import ScheduleReport, inspect
from tbo_jax.schedule.targets import Target
from tbo_jax.step.backends import KernelChoice
from tbo_jax.step.compiler_options import Options
from tbo_jax.step.kernels import (
    ATTENTION,
    EXPERTS,
    TRAINING_ATTENTION,
    TRAINING_EXPERTS,
    attention_shape,
    expert_shape,
    kernels_of,
)
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig
from tbo_jax.training.loss import NextTokenLoss
from tbo_jax.training.train_step import abstract_train_state, make_train_step

Phase = Literal["decode", "prefill", "train"]
PAGE_SIZE = 64  # tokens


def list_presets() -> list[str]:
    """Names of the public shapes that come with this package."""
    folder = resources.files("tbo_jax.schedule") / "presets"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith("json"))


def read_shape(name: str, num_layers: int | None = None) -> DecoderConfig:
    """The shape of a model.

    Args:
        name: a config.json, a folder that holds one, or one of `list_presets()`.
        num_layers: take only so many layers, the last ones: the first may be of another kind.

    Raises:
        ValueError: there is none of that name, it is not understood, or it has fewer layers.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        values = read_json_object(path)
    elif name in list_presets():
        preset = resources.files("tbo_jax.schedule") / "presets" / f"{name}.json"
        values = parse_json_object(preset.read_bytes(), name)
    else:
        raise ValueError(
            f"no model {name!r}: expected a config.json, a folder with one, or one of "
            f"{', '.join(list_presets())}"
        )
    architecture = find_architecture(values.get("model_type"))
    config = architecture.parse_config(HfConfig(values, name), jnp.bfloat16)
    if num_layers is None:
        return config
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(f"layers must be 1 to {config.num_layers} for {name}, got {num_layers}")
    return last_layers(config, num_layers)


def last_layers(config: DecoderConfig, count: int) -> DecoderConfig:
    """The model with nothing but its last `count` layers."""
    first = config.num_layers - count

    def last(layers: frozenset[int]) -> frozenset[int]:
        return frozenset(layer - first for layer in layers if layer >= first)

    return dataclasses.replace(
        config,
        num_layers=count,
        dense_layers=last(config.dense_layers),
        full_attention_layers=last(config.full_attention_layers),
    )


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The step to look at: `tokens` tokens a device, sequences of `context` tokens.

    `remat` is for training, see `NextTokenLoss`, and `cache_dtype` for the others (`CacheConfig`).
    """

    phase: Phase
    tokens: int
    context: int
    remat: bool = False
    cache_dtype: CacheDtype | None = None

    @property
    def bucket(self) -> Bucket:
        """Decode: a token of each of `tokens` sequences. Prefill: whole sequences."""
        if self.phase == "decode":
            return Bucket(self.tokens, self.tokens, decode=True)
        return Bucket(self.tokens, -(-self.tokens // self.context))

    @property
    def cache(self) -> CacheConfig:
        """A cache that holds all sequences of the step."""
        pages = -(-self.context // PAGE_SIZE)
        return CacheConfig(
            self.bucket.sequences * pages + 1, PAGE_SIZE, pages, self.tokens, self.cache_dtype
        )

    def check(self, micro_batches: int) -> None:
        """Raise ValueError unless the step exists and can be cut into so many micro-batches."""
        for name, value in {"tokens": self.tokens, "context": self.context}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if micro_batches < 1 or micro_batches > self.tokens:
            raise ValueError(
                f"{self.tokens} tokens do not divide into {micro_batches} micro-batches"
            )
        if self.phase != "train":
            if self.remat:
                raise ValueError(f"remat is for training: {self.phase} has no backward pass")
        elif self.cache_dtype is not None:
            raise ValueError(f"cache_dtype is {self.cache_dtype!r}: training has no cache")
        elif self.tokens % (micro_batches * self.context):
            raise ValueError(
                f"{self.tokens} tokens a device are not {micro_batches} micro-batch(es) of whole "
                f"sequences: expected a multiple of {micro_batches} x {self.context}, the context"
            )


def inspect_model(
    config: DecoderConfig,
    target: Target,
    shape: StepShape,
    *,
    micro_batches: int = 1,
    expert_chunks: int = 1,
    scanned: bool = False,
    transport: Any = "all_to_all",
    tensor: int = 1,
    weights: Weights = "bf16",
    kernels: KernelChoice = "auto",
) -> ScheduleReport:
    """The schedule of the runner's step, compiled for `target`; `tensor` devices share a rank.

    Raises:
        ValueError: the shape does not fit the model or the target, training with quantised
            `weights` (`abstract_model`), or `kernels` that the target does not have.
    """
    shape.check(micro_batches)
    if scanned and any(
        config.is_sparse(i) != config.is_sparse(0) for i in range(config.num_layers)
    ):
        raise ValueError("layers of different kinds cannot be scanned: use the unrolled loop")
    model, mesh = abstract_model(config, scanned, weights), target.mesh(tensor)
    strategy = Strategy(micro_batches, expert_chunks)
    if micro_batches > 1:
        overlap = OverlapConfig("on", num_micro_batches=micro_batches)
    elif expert_chunks > 1:
        overlap = OverlapConfig("on", strategy="expert_chunks", num_expert_chunks=expert_chunks)
    else:
        overlap = OverlapConfig()
    if shape.phase == "train":
        lowered, options = _lower_training(model, mesh, shape, overlap, transport, kernels)
    else:
        lowered, options = _lower_decoding(model, mesh, shape, overlap, transport, kernels)
    costs = expected_costs(
        config, target.num_devices, shape, strategy, tensor, transport, model=model, mesh=mesh
    )
    report = inspect(
        lowered, target, micro_batches=micro_batches, expert_chunks=expert_chunks,
        options=options, **costs,
    )  # fmt: skip
    return dataclasses.replace(
        report,
        layer_bytes=layer_bytes(config, mesh, shape, weights),
        weight_bytes=strategy.micro_batches * _weight_bytes(config, mesh, weights),
    )


def expected_costs(
    config: DecoderConfig,
    devices: int,
    shape: StepShape,
    strategy: Strategy = OFF,
    tensor: int = 1,
    transport: Transport = "all_to_all",
    *,
    model: CausalLM | None = None,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """What XLA's text does not tell of a step, as `inspect` takes it; tokens are routed evenly.

    Of the experts it is what a micro-batch or a chunk takes on average. `model`, abstract, tells
    how weights are held; without it they are of the model's dtype.
    """
    # Of a micro-batch, and of it what one device of the rank routes.
    tokens = -(-shape.tokens // strategy.micro_batches)
    routed = -(-tokens // tensor)
    ragged_rows, load = None, None
    if config.num_experts:
        chunks = strategy.expert_chunks if devices > 1 else 1
        load = _expert_load(config, devices, routed, chunks, transport)
        ragged_rows = routed * expected_destinations(
            devices, config.num_experts, config.num_experts_per_token, chunks
        )
    bits, products = None, {}
    if model is not None and mesh is not None:
        bits = expert_weight_bits(model)
        rows = {tokens, routed, shape.tokens, shape.bucket.sequences}
        found = product_work(model, mesh, rows)
        products = {name: Work(flops, moved, 1) for name, (flops, moved) in found.items()}
    return {
        "trip_counts": expected_turns(config, load, shape),
        "kernels": attention_work(config.of_device(tensor), tokens, shape)
        | expert_work(config, load, bits)
        | products,
        "ragged_rows": ragged_rows,
    }


def layer_bytes(config: DecoderConfig, mesh: Mesh, shape: StepShape, held: Weights = "bf16") -> int:
    """Bytes of a device that one more layer, such as the last one, takes while a step runs.

    Decoding that is its weights and its part of the cache; in training its weights, and two moments
    of AdamW for each.
    """
    one = last_layers(config, 1)
    weights = _weight_bytes(one, mesh, held)
    if shape.phase == "train":
        return 3 * weights
    on_device = one.of_device(mesh.shape[TENSOR])
    return weights + shape.cache.num_pages * kv_bytes_per_page(
        on_device, PAGE_SIZE, shape.cache_dtype
    )


def _weight_bytes(config: DecoderConfig, mesh: Mesh, held: Weights) -> int:
    """Bytes of the layers' weights on a device."""
    state = nnx.to_flat_state(nnx.state(abstract_model(config, False, held)))
    return sum(parameter_bytes(path, leaf, mesh) for path, leaf in state if path[0] == "layers")


def _lower_decoding(
    model: CausalLM,
    mesh: Mesh,
    shape: StepShape,
    overlap: OverlapConfig,
    transport: Any,
    kernels: KernelChoice,
) -> tuple[jax.stages.Lowered, Options]:
    """The runner's step, and what XLA is told for it."""
    runner = ModelRunner(
        model, shape.cache, mesh=mesh, overlap=overlap, transport=transport, kernels=kernels
    )
    strategy = runner.strategy(shape.bucket)
    return runner.lower(shape.bucket, strategy), runner.compiler_options(strategy)


def _lower_training(
    model: CausalLM,
    mesh: Mesh,
    shape: StepShape,
    overlap: OverlapConfig,
    transport: Any,
    kernels: KernelChoice,
) -> tuple[jax.stages.Lowered, Options]:
    """The step of training with AdamW, and what XLA is told for it."""
    loss = NextTokenLoss(
        model, mesh=mesh, overlap=overlap, transport=transport, balance_weight=0.001,
        remat=shape.remat, kernels=kernels,
    )  # fmt: skip
    optimizer = optax.adamw(1e-4)
    tokens = jax.ShapeDtypeStruct(
        (shape.tokens // shape.context * mesh.size, shape.context + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(RANKS)),
    )
    state = abstract_train_state(model, optimizer, loss)
    return make_train_step(loss, optimizer).lower(state, tokens), loss.compiler_options()


def expected_turns(
    config: DecoderConfig, load: ExpertLoad | None, shape: StepShape
) -> dict[str, float]:
    """Turns of the loops that depend on data, for contexts of `shape` and a load of the experts."""
    turns = paged.expected_turns(shape.context, PAGE_SIZE)
    if load is not None:
        kernels: list[type[ExpertKernel]] = [XlaExperts, *kernels_of(EXPERTS)]
        for kernel in kernels:
            turns |= kernel(expert_shape(config)).expected_turns(load)
    return turns


def _context_read(config: DecoderConfig, shape: StepShape) -> int:
    """The context that costs a kernel that skips what a window hides as much, mean over layers."""
    window = config.sliding_window
    if window is None:
        return shape.context
    # Without a window the queries of a prompt see half of its keys on average.
    reach = min(shape.context, window if shape.phase == "decode" else 2 * window)
    full = len(config.full_attention_layers)
    return (full * shape.context + (config.num_layers - full) * reach) // config.num_layers


def _expert_load(
    config: DecoderConfig, num_devices: int, tokens: int, chunks: int, transport: Transport
) -> ExpertLoad:
    """What an even routing of `tokens` tokens of each device asks of the experts of one.

    In one of several chunks: a share of the choices and of the experts. Behind a transport of
    blocks the rows are those that have arrived so far.
    """
    top_k, num_experts = config.num_experts_per_token, config.num_experts
    here = num_experts // num_devices
    rows: float = tokens
    if chunks > 1 and not TRANSPORTS[transport].sizes_are_data:
        exchange = make_exchange(
            transport, axis=("", ""), num_devices=num_devices, num_experts=num_experts, top_k=top_k
        )
        chunked = in_chunks(exchange, chunks, num_experts, top_k)
        assert isinstance(chunked, BlockChunks)
        rows = sum(chunked.ends(tokens)) / chunks
    choices = tokens * top_k / chunks
    return ExpertLoad(round(rows * num_devices), top_k, choices, max(1, here // chunks))


def attention_work(config: DecoderConfig, tokens: int, shape: StepShape) -> dict[str, Work]:
    """Work of the attention kernels, which XLA's text does not tell, for `tokens` tokens.

    Of those of all platforms and backends: a program has its own, and no name is in two. The heads
    of `config` are those of a device.
    """
    load = AttentionLoad(
        tokens, shape.context, _context_read(config, shape), shape.phase == "decode"
    )
    work: dict[str, tuple[float, float]] = {}
    of_device = attention_shape(config, cache_dtype=shape.cache_dtype)
    for kernel in kernels_of(ATTENTION):
        work |= kernel(of_device).expected_work(load)
    for with_gradient in kernels_of(TRAINING_ATTENTION):
        work |= with_gradient(of_device).expected_work(load)
    return {name: Work(flops, moved, 1) for name, (flops, moved) in work.items()}


def expert_work(
    config: DecoderConfig, load: ExpertLoad | None, weight_bits: float | None = None
) -> dict[str, Work]:
    """Work of the expert kernels; see `attention_work` and `expected_turns`."""
    if load is None:
        return {}
    work: dict[str, tuple[float, float]] = {}
    for kernel in (*kernels_of(EXPERTS), *kernels_of(TRAINING_EXPERTS)):
        work |= kernel(expert_shape(config, weight_bits)).expected_work(load)
    return {name: Work(flops, moved, 1) for name, (flops, moved) in work.items()}
