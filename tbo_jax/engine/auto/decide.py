"""`USE_TBO=auto`: which buckets are split, decided at warm-up from times taken on the device.

Whether splitting pays depends on the model, the bucket, the machine and the compiler. So both
programs of a bucket are timed and the faster one is kept. Where splitting cannot pay, nothing is
timed and the split program is not even compiled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.engine.auto.store import (
    MARGIN,
    chosen,
    decision_key,
    decisions_folder,
    read_decision,
    write_decision,
)
from tbo_jax.engine.auto.trial import ROUNDS, Timer, Trial, time_programs, wall_clock
from tbo_jax.engine.devices import free_memory
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket

logger = logging.getLogger(__name__)

# An array [...] of this process -> those of all processes [processes, ...], equal on all of them
Gather = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Decision:
    """Into how many micro-batches the steps of a bucket are cut, and why."""

    micro_batches: int
    reason: str
    seconds: Mapping[int, float]  # of a step, by number of micro-batches; empty if none was timed

    def to_json(self) -> dict[str, Any]:
        """Plain values, for statistics."""
        seconds = {str(count): value for count, value in self.seconds.items()}
        return {"micro_batches": self.micro_batches, "seconds": seconds, "reason": self.reason}


def gather_processes(values: np.ndarray) -> np.ndarray:
    """The arrays of all processes, in float32 where there are several."""
    if jax.process_count() == 1:
        return values[None]
    return multihost_utils.process_allgather(values.astype(np.float32))


def decide(
    runner: ModelRunner,
    buckets: Sequence[Bucket],
    *,
    timer: Timer | None = None,
    gather: Gather = gather_processes,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[Bucket, Decision], AttentionBuffers]:
    """Decide for each bucket, have the runner choose accordingly, and compile what it needs.

    All processes call this with equal arguments. They decide from the numbers of process 0, read
    from its disk or measured by it, and a failure on one is a failure on all: otherwise they would
    run different programs, and wait for each other in the collectives for ever.

    Args:
        runner: with a configuration of mode "auto".
        buckets: all that will be used.
        timer: takes the time of a step; default the wall clock. One that is given is used on CPU
            too, where otherwise nothing is timed.
        gather: brings the numbers of the processes together.
        progress: called with (programs compiled, in all).

    Returns:
        The decisions, and new buffers. They are allocated when all is compiled: XLA:GPU tries
        kernels out while it compiles, and needs memory for that.

    Raises:
        ValueError: the mode is another one.
        jax.errors.JaxRuntimeError: a program that is not split does not compile or run. A split one
            that fails is a reason not to split.
    """
    if runner.overlap.mode != "auto":
        raise ValueError(f"nothing to decide with mode {runner.overlap.mode!r}: expected 'auto'")
    folder = decisions_folder()
    decisions: dict[Bucket, Decision] = {}
    for bucket in buckets:
        reason = reason_against(runner, bucket, on_cpu=timer is not None)
        if reason is not None:
            decisions[bucket] = Decision(1, reason, {})
    unknown = [bucket for bucket in buckets if bucket not in decisions]
    stored = {} if folder is None else _read_all(runner, unknown, folder)
    decisions |= _compare(runner, unknown, stored, gather, "at an earlier start")

    timed = [bucket for bucket in buckets if bucket not in decisions]
    programs = [(bucket, decision.micro_batches) for bucket, decision in decisions.items()]
    programs += [(b, count) for b in timed for count in runner.overlap.candidates(b.tokens)]
    failed = runner.compile_programs(programs, progress)
    errors: dict[Bucket, Any]
    errors = {bucket: error for (bucket, count), error in failed.items() if count > 1}
    for (_, count), error in failed.items():
        if count == 1:
            raise error
    decisions |= _not_split([b for b, count in programs if count > 1], errors, gather)

    buffers = runner.allocate()
    timed = [bucket for bucket in timed if bucket not in decisions]
    errors = {bucket: error for bucket in timed if (error := _too_large(runner, bucket))}
    decisions |= _not_split(timed, errors, gather)

    timed = [bucket for bucket in timed if bucket not in decisions]
    trials: dict[Bucket, Trial] = {}
    for bucket in timed:
        trials[bucket], buffers = time_programs(runner, bucket, buffers, timer or wall_clock)
    errors = {bucket: trial.error for bucket, trial in trials.items() if trial.error is not None}
    decisions |= _not_split(timed, errors, gather)
    timed = [bucket for bucket in timed if bucket not in decisions]
    # What is in doubt is not kept: the next start times it anew.
    seconds = {b: trials[b].seconds for b in timed if _doubt(trials[b]) is None}
    measured = _compare(runner, timed, seconds, gather, "now")
    decisions |= measured
    for bucket in timed:
        if bucket not in measured:
            reason = _doubt(trials[bucket]) or "the first process's times are in doubt"
            decisions[bucket] = Decision(1, reason, {})

    for bucket, decision in decisions.items():
        logger.debug("%s: %d micro-batch(es): %s", bucket, decision.micro_batches, decision.reason)
        runner.choose(bucket, decision.micro_batches)
        if bucket in measured and folder is not None and jax.process_index() == 0:
            write_decision(folder, decision_key(runner, bucket), decision.seconds)
    runner.compile_all(buckets)  # a stored decision whose program failed has become another one
    return {bucket: decisions[bucket] for bucket in buckets}, buffers


def reason_against(runner: ModelRunner, bucket: Bucket, *, on_cpu: bool = False) -> str | None:
    """Why splitting this bucket cannot pay, from what is known without timing; None if it may.

    Args:
        runner: knows the mesh and what is communicated.
        bucket: one of its buckets.
        on_cpu: consider it on CPU too.
    """
    if len(runner.overlap.candidates(bucket.tokens)) == 1:
        return f"it has fewer tokens a device than min_tokens, {runner.overlap.min_tokens}"
    if not runner.communicates:
        return "there is no communication between devices to overlap with"
    if runner.mesh.devices.flat[0].platform == "cpu" and not on_cpu:
        return "XLA:CPU runs collectives in line with compute, so nothing overlaps"
    return None


def _read_all(
    runner: ModelRunner, buckets: Sequence[Bucket], folder: Path
) -> dict[Bucket, dict[int, float]]:
    """The seconds on disk, of those buckets that have them; only process 0 looks."""
    if jax.process_index() != 0:
        return {}
    found = {}
    for bucket in buckets:
        candidates = runner.overlap.candidates(bucket.tokens)
        seconds = read_decision(folder, decision_key(runner, bucket), candidates)
        if seconds is not None:
            found[bucket] = seconds
    return found


def _too_large(runner: ModelRunner, bucket: Bucket) -> str | None:
    """Why there is no memory for the split program of a bucket, as far as its device tells.

    Asked before it runs: where it failed on one process only, the others would wait in it.
    """
    free = free_memory(runner.mesh)
    if free is None:
        return None
    split = runner.compile(bucket, max(runner.overlap.candidates(bucket.tokens)))
    analysis = split.memory_analysis()
    if analysis is None or analysis.temp_size_in_bytes <= free:
        return None
    return f"it needs {analysis.temp_size_in_bytes} bytes, and {free} are free"


def _doubt(trial: Trial) -> str | None:
    """Why the times of a trial decide nothing; None if they do."""
    if not all(math.isfinite(value) and value > 0 for value in trial.seconds.values()):
        return "no time could be taken"
    if chosen(trial.seconds) > 1 and trial.wins < ROUNDS - 1:
        return f"noise: splitting was faster in {trial.wins} of {ROUNDS} rounds only"
    return None


def _compare(
    runner: ModelRunner,
    buckets: Sequence[Bucket],
    seconds: Mapping[Bucket, Mapping[int, float]],
    gather: Gather,
    when: str,
) -> dict[Bucket, Decision]:
    """Decisions from the seconds of process 0, for those of `buckets` that it has all of."""
    if not buckets:
        return {}
    counts = {bucket: runner.overlap.candidates(bucket.tokens) for bucket in buckets}
    mine = [[seconds.get(b, {}).get(count, np.nan) for count in counts[b]] for b in buckets]
    rows = gather(np.array(mine, np.float64))[0].tolist()
    decisions = {}
    for bucket, row in zip(buckets, rows, strict=True):
        if all(math.isfinite(value) and value > 0 for value in row):
            times = dict(zip(counts[bucket], row, strict=True))
            decisions[bucket] = Decision(chosen(times), _explain(times, when), times)
    return decisions


def _not_split(
    buckets: Sequence[Bucket],
    errors: Mapping[Bucket, jax.errors.JaxRuntimeError | str],
    gather: Gather,
) -> dict[Bucket, Decision]:
    """Decisions not to split those of `buckets` whose split program failed on any process."""
    if not buckets:
        return {}
    flags = gather(np.array([bucket in errors for bucket in buckets], np.float64))
    decisions = {}
    for bucket, failed in zip(buckets, flags.T, strict=True):
        if failed.any():
            error = str(errors.get(bucket, "on another process")).partition("\n")[0]
            decisions[bucket] = Decision(1, f"the split program failed: {error}", {})
    return decisions


def _explain(seconds: Mapping[int, float], when: str) -> str:
    """By how much the candidates differ, in words."""
    (_, whole), (count, split) = sorted(seconds.items())
    change = split / whole - 1
    differs = f"{abs(change):.1%} {'less' if change < 0 else 'more'}" if change else "the same time"
    if -MARGIN <= change < 0:
        differs += f", within the margin of {MARGIN:.0%}"
    return (
        f"measured {when}: {count} micro-batches take {split * 1e3:.3f} ms, "
        f"one takes {whole * 1e3:.3f} ms ({differs})"
    )
