"""Time the kernels and the decode step on one GPU, against what its memory and cores can do.

    python benchmarks/gpu.py [--json FILE] [--resume] [--quick] [--skip PART ...]

Parts, each on its own (one that fails is reported, and the others still run):

    rates         what the card copies a second, and multiplies (dense bfloat16)
    attention     the paged attention kernels, decode rows, in bytes a second against the copy
    experts       the expert kernels, many rows against the dense product, few against the copy
    others        whether the other kernels are right: quantised weights, keys and values in 8 bits,
                  products with one of a stack, gradients of attention and experts
    decode        the whole step of a model with random weights against the time its bytes need,
                  with USE_TBO 0 and 1: what splitting costs when there is nothing to hide
    transformers  a small model on the same weights, if PyTorch with CUDA is installed

Every kernel, of each backend of Pallas that card and JAX have, is compared with plain XLA before it
is timed. "x modelled" is its time over that of the schedule report's prices for the card.
Medians over several runs; compiling and the first run do not count. Parts that would begin after
--minutes are left out, and --resume takes up what is missing or failed in the file of an earlier
run.

`--platform cpu --quick` checks this script on a machine without a GPU: tiny sizes, kernels in
interpret mode. Its numbers mean nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import gpu_checks
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from tbo_jax import OverlapConfig
from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.attention.cache import LayerCache, page_shapes
from tbo_jax.attention.kernel import AttentionLoad, AttentionShape
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.attention.work import AttentionWork, plan_attention
from tbo_jax.checkpoint.random_weights import random_model
from tbo_jax.checkpoint.save import save_model
from tbo_jax.engine.auto.trial import full_batch
from tbo_jax.host.progress import Update, progress_bar
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.models import find_architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.kernel import ExpertLoad, ExpertShape
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.schedule.model_step import abstract_model, last_layers, read_shape
from tbo_jax.schedule.targets import Rates, find_target
from tbo_jax.step.backends import Backend, missing
from tbo_jax.step.kernels import ATTENTION, EXPERTS, attention_shape, expert_shape
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig

Part = Literal["rates", "attention", "experts", "others", "decode", "transformers"]
Row = dict[str, Any]
TOLERANCE = 2e-2  # bfloat16, of the largest element
DTYPE = jnp.bfloat16
SMALL_DENSE = dict(
    model_type="qwen3", hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=True,
    attention_bias=False, head_dim=128, vocab_size=151936, hidden_size=1024, rope_theta=1e6,
    intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    max_position_embeddings=40960, use_sliding_window=False,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/gpu.py."""

    model: str = "qwen3-30b-a3b"
    """Shape of the model: a preset's name, or a config.json."""
    layers: int | None = None
    """Layers of the decode step; default as many as memory and time allow."""
    skip: tuple[Part, ...] = ()
    """Parts to leave out."""
    minutes: float = 9.0
    """Begin nothing after so many minutes."""
    quick: bool = False
    """Fewer sizes and runs."""
    platform: Literal["gpu", "cpu"] = "gpu"
    """cpu: check this script, with --quick."""
    json: Path | None = None
    """Write the results there too, after each part."""
    resume: bool = False
    """Keep the parts that --json has of an earlier run on this card, and do the others."""
    progress: bool = True
    """Show a progress bar on stderr."""


class Skipped(Exception):
    """A part that cannot run here, and why."""


@dataclasses.dataclass
class Bench:
    """What the parts share."""

    args: Arguments
    device: jax.Device
    config: DecoderConfig
    deadline: float
    update: Update = lambda done, total: None
    rates: Rates | None = None  # the report's prices of the card, if it has them
    notes: list[str] = dataclasses.field(default_factory=list)  # of the part that runs
    copy_rate: float | None = None  # bytes a second, read and written
    dense_rate: float | None = None  # floating-point operations a second

    @property
    def interpret(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def size(self, full: Any, tiny: Any) -> Any:
        """`full`, or `tiny` where the numbers mean nothing."""
        return tiny if self.interpret else full

    def loop(
        self, body: Callable[..., Any], start: jax.Array, *operands: Any, chain: bool = False
    ) -> float:
        """Seconds of one `body(number, start, *operands)`; many of them in one program.

        The number of turns is static: XLA:GPU asks the host in every turn of another loop. With
        `chain` a turn takes what the last one gave, else the barrier alone keeps them in order:
        numbers that become zero on the way would need less power, and run at a higher clock.
        """
        turns = self.size(64, 2)

        @jax.jit
        def many(start: jax.Array, operands: Any) -> jax.Array:
            def turn(number: Any, last: jax.Array) -> jax.Array:
                first, last = jax.lax.optimization_barrier((start, last))
                return body(number, last if chain else first, *operands)

            made = jax.eval_shape(body, 0, start, *operands)
            before = start if chain else jnp.zeros(made.shape, made.dtype)
            return jax.lax.fori_loop(0, turns, turn, before)

        return self.median(lambda: many(start, operands)) / turns

    def median(self, run: Callable[[], Any]) -> float:
        """Seconds of `run`, compiled and warm."""
        jax.block_until_ready(run())
        seconds = []
        for _ in range(3 if self.args.quick else 7):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def random(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal numbers, made on the device."""

        @jax.jit
        def make() -> jax.Array:
            return jax.random.normal(jax.random.key(math.prod(shape)), shape, DTYPE) * scale

        return make()

    def kernels(
        self, table: Mapping[str, Mapping[Backend, Any]], shape: AttentionShape | ExpertShape
    ) -> dict[str, Any]:
        """The kernels of a table that take a shape here, by the name of their backend.

        Interpreted are those of Triton alone. Why others do not is noted.
        """
        if self.interpret:
            return {"triton": table["gpu"]["triton"](shape, interpret=True)}
        found = {}
        for backend, kernel in table["gpu"].items():
            reason = missing(backend, self.device) or kernel.unsupported(shape, self.device)
            if reason is not None:
                note = f"{backend} is left out: {reason}"
                self.notes += [note] if note not in self.notes else []
            elif isinstance(shape, ExpertShape):
                found[backend] = kernel.for_device(shape, self.device)
            else:
                found[backend] = kernel(shape)
        return found

    def modelled(self, work: dict[str, tuple[float, float]]) -> float | None:
        """Seconds of kernels by the report's prices; None for a card that it does not know."""
        if self.rates is None:
            return None
        flops, memory = self.rates.matmul_flops, self.rates.memory_bandwidth
        each = (max(count / flops, moved / memory) for count, moved in work.values())
        return sum(each) + len(work) * self.rates.launch_seconds


def prices_of(device: jax.Device) -> Rates | None:
    """The report's prices of a card, such as "NVIDIA H200", if it has them."""
    for word in device.device_kind.lower().split():
        with contextlib.suppress(ValueError):
            return find_target(f"{word}x1").rates
    return None


def share(value: float, best: float | None) -> float | None:
    """`value` as a part of `best`, if that was measured."""
    return None if best is None else value / best


def check(found: jax.Array, expected: jax.Array) -> float:
    """The largest difference as a part of the largest element; raises if it is no rounding."""
    a, b = (np.asarray(x, np.float32) for x in (found, expected))
    error = float(np.abs(a - b).max() / np.abs(b).max())
    if not error <= TOLERANCE:
        raise AssertionError(f"the kernel differs from XLA by {error:.1e}, at most {TOLERANCE}")
    return error


def rates(bench: Bench) -> list[Row]:
    """Copy bandwidth, and the rate of a dense product."""
    elements = bench.size(2**29, 2**12)  # 1 GiB
    one = jnp.ones((), DTYPE)
    seconds = bench.loop(lambda i, x: x + one, jnp.zeros(elements, DTYPE), chain=True)
    bench.copy_rate = 2 * elements * DTYPE.dtype.itemsize / seconds
    bench.update(1, 2)
    side = bench.size(8192, 128)
    matrix = bench.random(side, side, scale=side**-0.5)
    seconds = bench.loop(lambda i, x, w: x @ w, bench.random(side, side), matrix, chain=True)
    bench.dense_rate = 2 * side**3 / seconds
    return [
        {"what": f"copy of {elements * 2 / 2**20:.0f} MiB", "GB/s": bench.copy_rate / 1e9},
        {"what": f"dense product, {side} each side", "TFLOP/s": bench.dense_rate / 1e12},
    ]


def attention(bench: Bench) -> list[Row]:
    """Decode rows of equal context, pages shuffled, layers in turn so that no cache holds them."""
    config, found = bench.config, []
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    scale, page_size = size**-0.5, bench.size(64, 16)
    shapes = [(r, c) for c in bench.size((1024, 4096), (48,)) for r in bench.size((32, 256), (4,))]
    for number, (rows, context) in enumerate(shapes):
        pages = rows * (context // page_size + 1) + 1
        shape = CacheConfig(pages, page_size, 2 * context // page_size, rows)
        batch = full_batch(Bucket(rows, rows, decode=True), shape, config.vocab_size, 1)
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batch)
        shuffled = np.random.default_rng(0).permutation(pages - 1) + 1
        table = jnp.asarray(np.append(0, shuffled).astype(np.int32))[batch.page_table]
        batch = dataclasses.replace(batch, page_table=table)
        work = jax.jit(plan_attention, static_argnums=1)(batch, 1, AttentionWork.zeros(1, rows))
        read = rows * (context + 1) * config.cached_elements * DTYPE.dtype.itemsize
        layers = max(2, math.ceil(bench.size(2**30, 0) / read))
        layout = "separate" if config.latent is None else "latent"
        of_page = page_shapes(layout, page_size, kv_heads, size)
        cache = tuple(bench.random(layers * pages, *shape) for shape in of_page)

        def attend(i, queries, cache, batch, work, kernel, pages=pages, layers=layers):
            view = LayerCache(cache, (i % layers) * pages)
            return kernel(queries, view, batch, work, query_block=1, scale=scale)

        wanted = attention_shape(config)
        queries = bench.random(rows, heads, size)
        expected = jax.jit(functools.partial(attend, kernel=XlaAttention(wanted)))(
            1, queries, cache, batch, work
        )
        load = AttentionLoad(rows, context + 1, context + 1, decode=True)
        for backend, ours in bench.kernels(ATTENTION, wanted).items():
            timed = functools.partial(attend, kernel=ours)
            error = check(jax.jit(timed)(1, queries, cache, batch, work), expected)
            seconds = bench.loop(timed, queries, cache, batch, work)
            moved = read + queries.nbytes + expected.nbytes
            found.append(
                {
                    "kernel": backend, "rows": rows, "context": context, "us": seconds * 1e6,
                    "GB/s": moved / seconds / 1e9,
                    "of copy": share(moved / seconds, bench.copy_rate),
                    "x modelled": share(seconds, bench.modelled(ours.expected_work(load))),
                    "error": error,
                }
            )  # fmt: skip
        bench.update(number + 1, len(shapes))
    return found


def expert_kernels(bench: Bench) -> list[Row]:
    """Rows with random experts; with many rows the products count, with few the weights."""
    config, found = bench.config, []
    hidden, width = config.hidden_size, config.expert_intermediate_size
    every, chosen = config.num_experts, config.num_experts_per_token
    shapes = bench.size(
        [(4096, 1, 16), (1, chosen, every), (32, chosen, every), (256, chosen, every)],
        [(24, chosen, every)],
    )
    for number, (rows, top_k, count) in enumerate(shapes):
        rng = np.random.default_rng(0)
        ids = np.argsort(rng.random((rows, count)))[:, :top_k].astype(np.int32)
        weights = jnp.full((rows, top_k), 1 / top_k, DTYPE)
        gate_up = bench.random(count, hidden, 2 * width, scale=hidden**-0.5)
        down = bench.random(count, width, hidden, scale=2 * width**-0.5)
        operands = jnp.asarray(ids), weights, ExpertWeights(gate_up, down)
        x = bench.random(rows, hidden)
        expected = jax.jit(apply_experts)(x, *operands)
        used = len(np.unique(ids))
        flops = 6 * rows * top_k * hidden * width
        moved = DTYPE.dtype.itemsize * (3 * used * hidden * width + 2 * rows * hidden)
        load = ExpertLoad(rows, top_k, rows * top_k, used)
        for backend, ours in bench.kernels(EXPERTS, expert_shape(config)).items():
            error = check(jax.jit(ours)(x, *operands), expected)
            seconds = bench.loop(lambda i, x, *rest, ours=ours: ours(x, *rest), x, *operands)
            found.append(
                {
                    "kernel": backend, "rows": rows, "experts": count, "of them": top_k,
                    "us": seconds * 1e6, "TFLOP/s": flops / seconds / 1e12,
                    "of dense": share(flops / seconds, bench.dense_rate),
                    "GB/s": moved / seconds / 1e9,
                    "of copy": share(moved / seconds, bench.copy_rate),
                    "x modelled": share(seconds, bench.modelled(ours.expected_work(load))),
                    "error": error,
                }
            )  # fmt: skip
        bench.update(number + 1, len(shapes))
    return found


def others(bench: Bench) -> list[Row]:
    """The kernels that are not timed: whether they are right."""
    return gpu_checks.others(bench.interpret, check, bench.update)


def decode(bench: Bench) -> list[Row]:
    """The runner's own step, as many layers as memory and time allow."""
    contexts, rows = bench.size((1024, 4096), (32,)), bench.size((256, 32, 1), (4,))
    layers, why = choose_layers(bench, max(rows), max(contexts), 2 * len(rows) - 1)
    bench.notes.append(f"{layers} of {bench.config.num_layers} layers ({why})")
    config = last_layers(bench.config, layers)
    model = random_model(config, make_mesh(devices=[bench.device]))
    found: list[Row] = []
    total = len(contexts) * sum(1 + (count > 1) for count in rows)
    for count in rows:
        runner = make_runner(model, bench.device, count, max(contexts))
        for strategy in runner.overlap.candidates(count):
            micro_batches = strategy.micro_batches
            for context in contexts:
                if bench.late:
                    bench.notes.append("out of time: sizes were left out; see --minutes")
                    return found
                seconds = time_step(bench, runner, count, context, micro_batches)
                moved = bytes_of_step(config, model, count, context)
                needed = None if bench.copy_rate is None else moved / bench.copy_rate
                found.append(
                    {
                        "rows": count, "context": context, "USE_TBO": micro_batches - 1,
                        "ms": seconds * 1e3, "bytes, GB": moved / 1e9,
                        "x its bytes": share(seconds, needed),
                        "tokens/s": count / seconds, "layers": layers,
                    }
                )  # fmt: skip
                bench.update(len(found), total)
    return found


def choose_layers(bench: Bench, rows: int, context: int, programs: int) -> tuple[int, str]:
    """How many layers the decode step has, and why so many."""
    config = bench.config
    if bench.args.layers is not None:
        if not 1 <= bench.args.layers <= config.num_layers:
            raise ValueError(f"--layers {bench.args.layers}: expected 1 to {config.num_layers}")
        return bench.args.layers, "as asked"
    if bench.interpret or bench.args.quick:
        return min(config.num_layers, bench.size(4, 1)), "--quick"

    def weights(layers: int) -> int:
        shape = last_layers(config, layers)
        leaves = jax.tree.leaves(nnx.state(abstract_model(shape, False)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    layer = weights(2) - weights(1)
    cache = rows * context * kv_bytes_per_page(dataclasses.replace(config, num_layers=1), 1)
    memory = bench.device.memory_stats() or {}
    free = 0.9 * (memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0))
    fit = int((free - weights(1)) // (layer + 1.1 * cache))
    if fit < 1:
        raise Skipped(f"{free / 2**30:.0f} GiB of free memory hold no layer with its cache")
    # The time of compiling grows with the layers: two of them tell how long one takes.
    model = abstract_model(last_layers(config, 2), False)
    start = time.monotonic()
    make_runner(model, bench.device, rows, context).compile(Bucket(rows, rows, True), Strategy(2))
    each = (time.monotonic() - start) / 2
    in_time = int(0.5 * (bench.deadline - time.monotonic()) / (each * programs))
    layers = max(1, min(fit, in_time, config.num_layers))
    why = {config.num_layers: "all", fit: "memory"}.get(layers, "time to compile")
    return layers, why


def make_runner(model: CausalLM, device: jax.Device, rows: int, context: int) -> ModelRunner:
    """A runner with room for `rows` rows of `context` tokens and one more."""
    page_size = 64
    # `full_batch` fills half of what a page table holds.
    columns = -(-2 * context // page_size)
    pages = rows * (context // page_size + 1) + 1
    cache = CacheConfig(pages, page_size, columns, rows)
    return ModelRunner(
        model,
        cache,
        mesh=make_mesh(devices=[device]),
        overlap=OverlapConfig("auto", strategy="micro_batches"),
    )


def bytes_of_step(config: DecoderConfig, model: CausalLM, rows: int, context: int) -> float:
    """Bytes that a decode step must read: weights that it touches, keys and values.

    Of the experts those that rows with evenly random choices are expected to touch.
    """
    total = float(rows * context * kv_bytes_per_page(config, 1))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        size = float(math.prod(variable.shape) * variable.dtype.itemsize)
        shard = variable.get_metadata().get("shard")
        if shard is not None and shard.axis == "experts":
            missed = 1 - config.num_experts_per_token / config.num_experts
            size *= 1 - missed**rows
        if "embed_tokens" in path and not config.tie_word_embeddings:
            size = rows * config.hidden_size * variable.dtype.itemsize
        total += size
    return total


def time_step(
    bench: Bench, runner: ModelRunner, rows: int, context: int, micro_batches: int
) -> float:
    """Seconds of one step; several are dispatched together, as an engine does."""
    bucket = Bucket(rows, rows, decode=True)
    pages = dataclasses.replace(
        runner.cache, pages_per_sequence=-(-2 * context // runner.cache.page_size)
    )
    batch = full_batch(bucket, pages, runner.config.vocab_size, 1)
    spare = runner.cache.pages_per_sequence - pages.pages_per_sequence
    table = np.pad(batch.page_table, ((0, 0), (0, 0), (0, spare)))
    batch = dataclasses.replace(batch, page_table=table)
    buffers = runner.allocate()

    def run() -> jax.Array:
        nonlocal buffers
        for _ in range(4):
            logits, buffers = runner.step(bucket, buffers, batch, Strategy(micro_batches))
        return logits

    if not bool(jnp.isfinite(run()).all()):
        raise AssertionError("the logits are not finite")
    return bench.median(run) / 4


def transformers(bench: Bench) -> list[Row]:
    """A dense model on the same weights: a decode step here and there."""
    cuda = "cpu" if bench.interpret else "cuda"
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error
    if cuda == "cuda" and not torch.cuda.is_available():
        raise Skipped("PyTorch finds no CUDA")
    tiny = dict(num_hidden_layers=2, vocab_size=512, hidden_size=128, intermediate_size=128)
    shape = SMALL_DENSE | bench.size({}, tiny)
    architecture = find_architecture("qwen3")
    config = architecture.parse_config(HfConfig(shape, "benchmark"), DTYPE)
    model = random_model(config, make_mesh(devices=[bench.device]))
    rows, context = bench.size((32, 1024), (4, 32))
    runner = make_runner(model, bench.device, rows, context)
    ours = time_step(bench, runner, rows, context, 1)
    bench.update(1, 2)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, shape, Path(folder), ml_dtypes.bfloat16)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(cuda).eval()
    ids = torch.randint(0, shape["vocab_size"], (rows, context), device=cuda)
    state = other(ids, use_cache=True, logits_to_keep=1).past_key_values

    def step() -> None:
        other(ids[:, :1], past_key_values=state, use_cache=True)  # the context grows by one
        if cuda == "cuda":
            torch.cuda.synchronize()

    theirs = bench.median(step)
    common = {"rows": rows, "context": context, "layers": config.num_layers}
    return [
        {"what": name, **common, "ms": seconds * 1e3, "tokens/s": rows / seconds}
        for name, seconds in (("tbo_jax, USE_TBO=0", ours), ("transformers", theirs))
    ]


PARTS: dict[Part, Callable[[Bench], list[Row]]] = {
    "rates": rates,
    "attention": attention,
    "experts": expert_kernels,
    "others": others,
    "decode": decode,
    "transformers": transformers,
}
assert tuple(PARTS) == get_args(Part)


def run_part(bench: Bench, part: Part) -> dict[str, Any]:
    """Its rows, or why there are none."""
    if part in bench.args.skip:
        return {"skipped": "--skip"}
    if bench.late:
        return {"skipped": f"out of time: --minutes {bench.args.minutes:g}"}
    start, bench.notes = time.monotonic(), []
    try:
        with progress_bar(part, bench.args.progress) as bench.update:
            rows = PARTS[part](bench)
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # whatever it is, the other parts run
        first = (str(error).strip() or "no message").splitlines()[0]
        return {"failed": f"{type(error).__name__}: {first}"}
    return {"rows": rows, "notes": bench.notes, "seconds": time.monotonic() - start}


def show(console: Console, part: str, result: dict[str, Any]) -> None:
    """Print a part as a table."""
    for why in ("skipped", "failed"):
        if why in result:
            console.print(f"{part}: {why}: {result[why]}")
    rows = result.get("rows", [])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=part)

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    for row in rows:
        table.add_row(*(text(row.get(key)) for key in columns))
    if rows:
        console.print(table)
    for note in result.get("notes", []):
        console.print(f"{part}: {note}")


def parts_of_earlier_run(args: Arguments, result: dict[str, Any]) -> dict[str, Any]:
    """The parts with rows that the file of --json has, if --resume asks for them.

    Raises:
        RuntimeError: they are of another card or JAX.
    """
    if not args.resume or args.json is None or not args.json.exists():
        return {}
    earlier = json.loads(args.json.read_text())
    for key in ("card", "jax"):
        if earlier[key] != result[key]:
            raise RuntimeError(
                f"--resume: {args.json} is of {key} {earlier[key]!r}, here is {result[key]!r}"
            )
    return {name: part for name, part in earlier["parts"].items() if "rows" in part}


def benchmark(args: Arguments, console: Console) -> dict[str, Any]:
    """All parts; raises RuntimeError where there is no such device."""
    deadline = time.monotonic() + 60 * args.minutes
    device = jax.devices(args.platform)[0]
    config = read_shape(args.model)
    if args.platform == "cpu":
        config = dataclasses.replace(
            last_layers(config, 2), vocab_size=512, hidden_size=128, num_heads=4, num_experts=8,
            num_kv_heads=2 if config.latent is None else 1, expert_intermediate_size=128,
            router=config.router and dataclasses.replace(config.router, top_k=2),
        )  # fmt: skip
    result: dict[str, Any] = {
        "card": device.device_kind,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "jax": jax.__version__,
        "is_measurement": args.platform == "gpu",
        "parts": {},
    }
    console.print(f"{args.model} on {result['card']}, jax {result['jax']}, {result['date']}")
    if not result["is_measurement"]:
        console.print("A check of this script on CPU, kernels interpreted: no measurement.")
    done = parts_of_earlier_run(args, result)
    bench = Bench(args, device, config, deadline, rates=prices_of(device))
    if "rates" in done:
        first, second = done["rates"]["rows"]
        bench.copy_rate, bench.dense_rate = 1e9 * first["GB/s"], 1e12 * second["TFLOP/s"]
    with jax.default_device(device):
        for part in PARTS:
            found = done.get(part) or run_part(bench, part)
            result["parts"][part] = found
            show(console, part, found)
            if args.json is not None:  # now: what comes may crash the process
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(args: Arguments) -> int:
    """Returns the exit status: 1 if a part failed, 2 if nothing could run."""
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    if args.platform == "cpu" and not args.quick:
        print("--platform cpu checks this script: give --quick with it", file=sys.stderr)
        return 2
    # Before the first use of a device. PyTorch gets the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    try:
        result = benchmark(args, Console())
    except RuntimeError as error:
        print(f"nothing was run: {error}", file=sys.stderr)
        return 2
    return int(any("failed" in part for part in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
