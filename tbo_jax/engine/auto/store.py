"""Decisions of `USE_TBO=auto` on disk, beside JAX's compilation cache: a readable file for each."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from tbo_jax.models import architecture
from tbo_jax.overlap.config import Strategy
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket

logger = logging.getLogger(__name__)

# A share. Overlapping takes more memory, and what is timed is not quite what will run: a gain
# within that is none.
MARGIN = 0.03


def decisions_folder() -> Path | None:
    """Where decisions are kept; None without a compilation cache, or with one on a remote store."""
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return None if not cache or "://" in cache else Path(cache) / "tbo_decisions"


def decision_key(runner: ModelRunner, bucket: Bucket) -> dict[str, Any]:
    """Everything that the times of a bucket's programs depend on, as plain JSON values."""
    device = runner.mesh.devices.flat[0]
    key = {
        "tbo_jax": _source(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.client.platform_version,
        "device_kind": device.device_kind,
        "devices": dict(runner.mesh.shape),
        "processes": jax.process_count(),
        "flags": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "model": asdict(runner.config),
        "cache": asdict(runner.cache),
        "bucket": asdict(bucket),
        "transport": runner.transport,
        "dispatch_dtype": runner.dispatch_dtype,
        "scanned": runner.scanned,
        "logits": runner.logits,
        "inputs": asdict(runner.inputs),
        "compiler_options": {
            str(strategy): runner.compiler_options(strategy)
            for strategy in runner.candidates(bucket)
        },
    }
    return json.loads(json.dumps(key, default=_plain))


def chosen(seconds: Mapping[Strategy, float]) -> Strategy:
    """The strategy to run: one that overlaps only where it takes `MARGIN` less time than the plain.

    Of those the fastest; at a tie the one that is first.
    """
    return min(seconds, key=lambda one: seconds[one] / (1 - MARGIN if one.overlaps else 1))


def read_decision(
    folder: Path, key: Mapping[str, Any], candidates: tuple[Strategy, ...]
) -> dict[Strategy, float] | None:
    """The seconds of each candidate that `write_decision` kept under `key`.

    None if there is no such file. One that cannot be read, or that says something else than a
    decision of this key, is passed over with a warning.
    """
    path = _path(folder, key)
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["key"] != key:
            raise ValueError("its key is another one")
        seconds = {one: float(stored["seconds"][str(one)]) for one in candidates}
        if not all(math.isfinite(value) and value > 0 for value in seconds.values()):
            raise ValueError(f"seconds {stored['seconds']} are not positive")
        if stored["strategy"] != str(chosen(seconds)):
            raise ValueError(f"strategy {stored['strategy']} does not follow from them")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a usable decision, the bucket is timed anew: %r", path, error)
        return None
    return seconds


def write_decision(folder: Path, key: Mapping[str, Any], seconds: Mapping[Strategy, float]) -> None:
    """Keep the seconds of each candidate under `key`; a warning if the file cannot be written."""
    path = _path(folder, key)
    times = {str(strategy): value for strategy, value in seconds.items()}
    content = {"strategy": str(chosen(seconds)), "seconds": times, "key": key}
    # Under another name first, so that no reader meets half a file.
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("the decision is not kept: %s", error)


def _path(folder: Path, key: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{name}.json"


def _source() -> str:
    """A digest of this package's source, its version included: commits share a version."""
    digest = hashlib.sha256()
    # In a checkout the models are in another folder.
    for root in (Path(__file__).parents[2], Path(architecture.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """What JSON has no notion of in a configuration: sets and dtypes."""
    return sorted(value) if isinstance(value, frozenset) else jnp.dtype(value).name
