"""Time what the host does in a decode step, with the device's work replaced by constants.

    python benchmarks/host.py [--ranks 8] [--rows 256] [--context 4096] [--speculate 4]

Every row decodes: nothing is admitted and nothing ends. Steps are not compiled and not run; in
their place stands a program that gives the same token for all rows, and says that all drafts stand.
All else is the engine's: it
plans, sends what the devices do not know to as many CPU devices as there are ranks, reads tokens,
books them and makes text and events of them. So the figures are those of the host alone, of one
core. Medians over the steps.

The next step cannot be dispatched before what is on the "critical path" is done. Text and events
are not: the device has its next step by then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from tbo_jax import Bucket, CacheConfig, ModelRunner, SamplingParams
from tbo_jax.checkpoint.load import read_config
from tbo_jax.engine.dispatch import DispatchedStep, Dispatcher
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.reading import Reader
from tbo_jax.engine.row_state import RowState, SampledStep, sampled_rows
from tbo_jax.engine.scheduling.scheduler import Scheduler
from tbo_jax.host.progress import progress_bar
from tbo_jax.parallel.sharding import RANKS, make_mesh
from tbo_jax.schedule.model_step import abstract_model
from tbo_jax.text import Tokenizer

MODEL = Path(__file__).resolve().parents[1] / "examples" / "kjv-moe"
PAGE_SIZE = 64  # tokens


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/host.py."""

    ranks: int = 8
    """Ranks that the process plans for, each a CPU device here."""
    rows: int = 256
    """Requests that decode on each rank."""
    context: int = 4096
    """Most tokens that a request has when the first step is timed, the fewest being a page less."""
    steps: int = 150
    """Steps that are timed."""
    stream: bool = True
    """Have an event, with its text, for each token; otherwise text is made at the end."""
    speculate: int = 0
    """Drafts of a request in a step, all of which stand."""
    look_ahead: bool = True
    """Dispatch a step before the tokens of the one before are read."""
    json: Path | None = None
    """Write the results there too."""


class Stopwatch:
    """Sums of seconds and bytes by part, of one step at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes = 0
        self._inner = 0.0  # of the parts that ran within the part that runs

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of the block, without that of parts in it."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent

    def watch(self, owner: Any, method: str, name: str) -> Callable[[], None]:
        """Count calls of a method or function as a part; gives back what undoes it."""
        original = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return original(*args, **options)

        setattr(owner, method, timed)
        return lambda: setattr(owner, method, original)


def make_engine(args: Arguments, watch: Stopwatch) -> Engine:
    """An engine whose programs are constants."""
    config, _ = read_config(MODEL, np.float32)
    # Experts would have to divide over the ranks; the host does the same without them.
    config = dataclasses.replace(config, num_experts=0)
    pages = -(-(args.context + (args.steps + PAGE_SIZE) * (1 + args.speculate)) // PAGE_SIZE)
    cache = CacheConfig(
        num_pages=args.rows * pages + 1, page_size=PAGE_SIZE, pages_per_sequence=pages,
        max_tokens=args.rows * args.context,  # all prompts are computed in one step
    )  # fmt: skip
    runner = ModelRunner(abstract_model(config, False), cache, mesh=make_mesh(args.ranks))
    engine = Engine(
        runner, Tokenizer.from_folder(MODEL), frozenset(), max_sequences=args.rows,
        max_context=pages * PAGE_SIZE, look_ahead=args.look_ahead, speculate=args.speculate,
    )  # fmt: skip

    place = NamedSharding(runner.mesh, PartitionSpec(RANKS))
    tokens = np.full((args.ranks, args.rows * (1 + args.speculate)), 300, np.int32)
    last = jax.device_put(tokens[:, : args.rows], place)
    # Of a prompt one token, of a decode all drafts and one more.
    stand = [np.full((args.ranks, args.rows), n, np.int32) for n in (1, 1 + args.speculate)]
    stand = [jax.device_put(counts, place) for counts in stand]
    readable = {
        bucket: jax.device_put(tokens[:, : sampled_rows(bucket)], place)
        for bucket in engine.buckets
    }

    def run(
        bucket: Bucket, weights: Any, buffers: Any, state: RowState, inputs: Any
    ) -> tuple[SampledStep, Any]:
        counts = stand[bucket.decode] if bucket.drafts else None
        given = SampledStep(None, last, readable[bucket], state, counts)
        for leaf in jax.tree.leaves(inputs):  # as the call of a program does
            if isinstance(leaf, np.ndarray):
                watch.bytes += leaf.nbytes
                with watch.part("send"):
                    jax.device_put(leaf, place)
        return given, buffers

    engine.runner.compile = (  # type: ignore[method-assign]
        lambda bucket, micro_batches=None: functools.partial(run, bucket)  # type: ignore[return-value]
    )
    engine._dispatcher._buffers = lambda: None  # type: ignore[method-assign, assignment]
    return engine


OFF_THE_PATH = "text and events"
PARTS: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "advance", "advance"),
    (Scheduler, "commit", "commit"),
    (Dispatcher, "_inputs", "inputs"),
    (DispatchedStep, "read", "read"),
    (Reader, "_tell", OFF_THE_PATH),
]


def measure(args: Arguments, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Medians over the steps: seconds of all and of each part, and bytes sent to the devices."""
    watch = Stopwatch()
    engine = make_engine(args, watch)
    rng = np.random.default_rng(0)
    new = (args.steps + PAGE_SIZE) * (1 + args.speculate)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for number in range(args.ranks * args.rows):
        # As many rows get a page in each step.
        length = max(1, args.context - number // args.ranks % PAGE_SIZE)
        engine.add(rng.integers(5, 300, length).tolist(), sampling, stream=args.stream)
    for _ in range(3):
        engine.step()  # prompts, then decodes only
    undo = [watch.watch(*part) for part in PARTS]
    steps: list[dict[str, float]] = []
    try:
        for number in range(args.steps):
            watch.seconds, watch.bytes = {}, 0
            start = time.perf_counter()
            events = engine.step()
            spent = time.perf_counter() - start
            tokens = args.ranks * args.rows * (1 + args.speculate)
            assert len(events) == tokens * args.stream
            rest = spent - sum(watch.seconds.values())
            critical = spent - watch.seconds.get(OFF_THE_PATH, 0.0)
            steps.append(
                {**watch.seconds, "other": rest, "critical path": critical, "step": spent}
                | {"bytes": watch.bytes}
            )
            progress(number + 1, args.steps)
    finally:
        for restore in undo:
            restore()
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    return found | {"bytes": statistics.fmean(step["bytes"] for step in steps)}


def main(args: Arguments) -> None:
    """Print the table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.ranks)
    with progress_bar("steps", sys.stderr.isatty()) as update:
        found = measure(args, update)
    rows = args.ranks * args.rows
    table = Table("part", "ms a step", "us a row", box=None)
    for name, seconds in found.items():
        if name != "bytes":
            table.add_row(name, f"{seconds * 1e3:.2f}", f"{seconds / rows * 1e6:.2f}")
    console = Console(highlight=False)
    console.print(
        f"{args.ranks} ranks x {args.rows} rows, context {args.context}, one core of "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, jax "
        f"{jax.__version__}; the device's work is replaced by constants"
    )
    console.print(table)
    console.print(f"sent: {found['bytes'] / rows:.0f} bytes a row and step")
    if args.json is not None:
        values = {
            "ranks": args.ranks, "rows": args.rows, "context": args.context,
            "look_ahead": args.look_ahead, "stream": args.stream, "speculate": args.speculate,
            "device": "replaced by constants",
            "python": platform.python_version(), "jax": jax.__version__,
            "seconds": {name: value for name, value in found.items() if name != "bytes"},
            "microseconds_a_row": found["step"] / rows * 1e6,
            "critical_microseconds_a_row": found["critical path"] / rows * 1e6,
            "bytes_a_row": found["bytes"] / rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
