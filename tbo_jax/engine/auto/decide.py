"""`USE_TBO=auto`: how each bucket overlaps, decided at warm-up from times taken on the device.

Whether and how overlapping pays depends on the model, the bucket, the machine and the compiler. So
the programs of a bucket are timed and the fastest is kept; a tie keeps the plain one. Where
overlapping cannot pay, nothing is timed and no other program is even compiled.
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
from tbo_jax.overlap.config import OFF, Strategy
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, Program

logger = logging.getLogger(__name__)

# An array [...] of this process -> those of all processes [processes, ...], equal on all of them
Gather = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Decision:
    """How the steps of a bucket overlap, and why."""

    strategy: Strategy
    reason: str
    seconds: Mapping[Strategy, float]  # of a step, by strategy; empty if none was timed

    def to_json(self) -> dict[str, Any]:
        """Plain values, for statistics; `gains`: the plain step's seconds over each one's."""
        seconds = {str(strategy): value for strategy, value in self.seconds.items()}
        gains = {
            str(strategy): self.seconds[OFF] / value
            for strategy, value in self.seconds.items()
            if strategy != OFF
        }
        return {
            "strategy": str(self.strategy),
            "micro_batches": self.strategy.micro_batches,
            "expert_chunks": self.strategy.expert_chunks,
            "seconds": seconds,
            "gains": gains,
            "reason": self.reason,
        }


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
        jax.errors.JaxRuntimeError: a plain program does not compile or run. Another one that fails
            is not chosen.
    """
    if runner.overlap.mode != "auto":
        raise ValueError(f"nothing to decide with mode {runner.overlap.mode!r}: expected 'auto'")
    folder = decisions_folder()
    decisions: dict[Bucket, Decision] = {}
    for bucket in buckets:
        reason = reason_against(runner, bucket, on_cpu=timer is not None)
        if reason is not None:
            decisions[bucket] = Decision(OFF, reason, {})
    unknown = [bucket for bucket in buckets if bucket not in decisions]
    stored = {} if folder is None else _read_all(runner, unknown, folder)
    decisions |= _compare(runner, unknown, stored, gather, "at an earlier start")

    trying = {b: runner.candidates(b) for b in buckets if b not in decisions}
    programs = [(bucket, decision.strategy) for bucket, decision in decisions.items()]
    failed: dict[Program, Any] = dict(
        runner.compile_programs([*programs, *_programs(trying)], progress)
    )
    for (_, strategy), error in failed.items():
        if strategy == OFF:
            raise error
    known = {bucket: (OFF, strategy) for bucket, strategy in programs if strategy != OFF}
    left, reasons = _without_failed(known | trying, failed, gather)
    for bucket, strategies in left.items():
        if bucket in known and strategies == (OFF,):
            decisions[bucket] = Decision(OFF, reasons[bucket], {})

    buffers = runner.allocate()
    trying = {bucket: left[bucket] for bucket in trying}
    failed = {key: error for key in _programs(trying) if (error := _too_large(runner, *key))}
    trying, more = _without_failed(trying, failed, gather)
    reasons |= more

    trials: dict[Bucket, Trial] = {}
    for bucket, strategies in trying.items():
        if len(strategies) > 1:
            trials[bucket], buffers = time_programs(
                runner, bucket, strategies, buffers, timer or wall_clock
            )
    failed = {(b, one): error for b, of in trials.items() for one, error in of.errors.items()}
    trying, more = _without_failed(trying, failed, gather)
    reasons |= more
    timed = [bucket for bucket, strategies in trying.items() if len(strategies) > 1]
    clear = {bucket: _clear(trials[bucket]) for bucket in timed}
    measured = _compare(runner, timed, clear, gather, "now", whole=False)
    for bucket in trying:
        if bucket in measured:
            decisions[bucket] = measured[bucket]
        else:
            doubt = _doubt(trials[bucket]) if bucket in trials else None
            reason = reasons.get(bucket) or doubt or "the first process's times are in doubt"
            decisions[bucket] = Decision(OFF, reason, {})

    for bucket, decision in decisions.items():
        logger.debug("%s: %s: %s", bucket, decision.strategy, decision.reason)
        runner.choose(bucket, decision.strategy)
        # What is in doubt, or failed, is not kept: the next start times it anew.
        whole = set(decision.seconds) == set(runner.candidates(bucket))
        if bucket in measured and whole and folder is not None and jax.process_index() == 0:
            write_decision(folder, decision_key(runner, bucket), decision.seconds)
    runner.compile_all(buckets)  # a stored decision whose program failed has become another one
    return {bucket: decisions[bucket] for bucket in buckets}, buffers


def reason_against(runner: ModelRunner, bucket: Bucket, *, on_cpu: bool = False) -> str | None:
    """Why overlapping in this bucket cannot pay, from what is known without timing; None if it may.

    Args:
        runner: knows the mesh and what is communicated.
        bucket: one of its buckets.
        on_cpu: consider it on CPU too.
    """
    if len(runner.candidates(bucket)) == 1:
        return f"it has fewer tokens a device than min_tokens, {runner.overlap.min_tokens}"
    if not runner.communicates:
        return "there is no communication between devices to overlap with"
    if runner.mesh.devices.flat[0].platform == "cpu" and not on_cpu:
        return "XLA:CPU runs collectives in line with compute, so nothing overlaps"
    return None


def _read_all(
    runner: ModelRunner, buckets: Sequence[Bucket], folder: Path
) -> dict[Bucket, dict[Strategy, float]]:
    """The seconds on disk, of those buckets that have them; only process 0 looks."""
    if jax.process_index() != 0:
        return {}
    found = {}
    for bucket in buckets:
        key = decision_key(runner, bucket)
        seconds = read_decision(folder, key, runner.candidates(bucket))
        if seconds is not None:
            found[bucket] = seconds
    return found


def _programs(strategies: Mapping[Bucket, tuple[Strategy, ...]]) -> list[Program]:
    return [(bucket, strategy) for bucket, of in strategies.items() for strategy in of]


def _without_failed(
    strategies: Mapping[Bucket, tuple[Strategy, ...]],
    failed: Mapping[Program, jax.errors.JaxRuntimeError | str],
    gather: Gather,
) -> tuple[dict[Bucket, tuple[Strategy, ...]], dict[Bucket, str]]:
    """What is left of `strategies` where those are taken out that failed on any process.

    Also why, for those buckets of which something was taken out.
    """
    programs = [key for key in _programs(strategies) if key[1] != OFF]
    if not programs:
        return dict(strategies), {}
    flags = gather(np.array([key in failed for key in programs], np.float64))
    out = {key for key, of in zip(programs, flags.T, strict=True) if of.any()}
    reasons: dict[Bucket, str] = {}
    for bucket, strategy in programs:
        if (bucket, strategy) in out:
            error = failed.get((bucket, strategy), "on another process")
            text = f"the program {strategy} failed: {str(error).partition(chr(10))[0]}"
            reasons[bucket] = f"{reasons[bucket]}; {text}" if bucket in reasons else text
    left = {b: tuple(s for s in of if (b, s) not in out) for b, of in strategies.items()}
    return left, reasons


def _too_large(runner: ModelRunner, bucket: Bucket, strategy: Strategy) -> str | None:
    """Why there is no memory for a program that overlaps, as far as its device tells.

    Asked before it runs: where it failed on one process only, the others would wait in it.
    """
    free = free_memory(runner.mesh)
    if free is None or strategy == OFF:
        return None
    analysis = runner.compile(bucket, strategy).memory_analysis()
    if analysis is None or analysis.temp_size_in_bytes <= free:
        return None
    return f"it needs {analysis.temp_size_in_bytes} bytes, and {free} are free"


def _noisy(trial: Trial) -> list[Strategy]:
    """Strategies whose gain is in doubt, as they did not win nearly all rounds; the best first."""
    plain = trial.seconds[OFF]
    faster = [s for s in trial.seconds if s != OFF and trial.seconds[s] < (1 - MARGIN) * plain]
    noisy = [strategy for strategy in faster if trial.wins[strategy] < ROUNDS - 1]
    return sorted(noisy, key=lambda strategy: trial.seconds[strategy])


def _taken(trial: Trial) -> bool:
    return all(math.isfinite(value) and value > 0 for value in trial.seconds.values())


def _clear(trial: Trial) -> dict[Strategy, float]:
    """The seconds of a trial without those that decide nothing."""
    if not _taken(trial):
        return {}
    noisy = _noisy(trial)
    clear = {one: value for one, value in trial.seconds.items() if one not in noisy}
    return clear if len(clear) > 1 else {}


def _doubt(trial: Trial) -> str | None:
    """Why the times of a trial decide nothing; None if they do."""
    if not _taken(trial):
        return "no time could be taken"
    for strategy in _noisy(trial)[:1]:
        return f"noise: {strategy} was faster in {trial.wins[strategy]} of {ROUNDS} rounds only"
    return None


def _compare(
    runner: ModelRunner,
    buckets: Sequence[Bucket],
    seconds: Mapping[Bucket, Mapping[Strategy, float]],
    gather: Gather,
    when: str,
    whole: bool = True,
) -> dict[Bucket, Decision]:
    """Decisions from the seconds of process 0, for those of `buckets` that it has.

    With `whole` it must have those of all candidates, else those of two, the plain step among them.
    """
    if not buckets:
        return {}
    candidates = {bucket: runner.candidates(bucket) for bucket in buckets}
    most = max(len(of) for of in candidates.values())
    mine = np.full((len(buckets), most), np.nan)
    for row, bucket in zip(mine, buckets, strict=True):
        of = [seconds.get(bucket, {}).get(strategy, np.nan) for strategy in candidates[bucket]]
        row[: len(of)] = of
    decisions = {}
    for bucket, values in zip(buckets, gather(mine)[0].tolist(), strict=True):
        found = zip(candidates[bucket], values, strict=False)
        times = {one: value for one, value in found if math.isfinite(value) and value > 0}
        enough = len(times) == len(candidates[bucket]) if whole else len(times) > 1
        if enough and OFF in times:
            decisions[bucket] = Decision(chosen(times), _explain(times, when), times)
    return decisions


def _explain(seconds: Mapping[Strategy, float], when: str) -> str:
    """By how much the candidates differ, in words."""
    plain = seconds[OFF]
    parts = []
    for strategy, value in seconds.items():
        if strategy == OFF:
            continue
        change = value / plain - 1
        differs = f"{abs(change):.1%} {'less' if change < 0 else 'more'}"
        differs = differs if change else "the same time"
        if -MARGIN <= change < 0:
            differs += f", within the margin of {MARGIN:.0%}"
        parts.append(f"{strategy} takes {value * 1e3:.3f} ms ({differs})")
    return f"measured {when}: off takes {plain * 1e3:.3f} ms, {', '.join(parts)}"
