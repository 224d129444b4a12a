"""Names that modules had before they became folders: importing one still gives that module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "batch": "overlap.batch",
    "buffers": "attention.buffers",
    "checkpoint.safetensors": "checkpoint.tensors",
    "compiler_options": "step.compiler_options",
    "config": "overlap.config",
    "engine.books": "engine.scheduling.books",
    "engine.decide": "engine.auto.decide",
    "engine.decision_store": "engine.auto.store",
    "engine.limits": "engine.scheduling.limits",
    "engine.pages": "engine.scheduling.pages",
    "engine.plan": "engine.scheduling.plan",
    "engine.rank": "engine.scheduling.rank",
    "engine.request": "engine.scheduling.request",
    "engine.scheduler": "engine.scheduling.scheduler",
    "engine.trial": "engine.auto.trial",
    "folders": "host.folders",
    "forward": "step.forward",
    "inputs": "step.inputs",
    "kernels": "step.kernels",
    "layers.tensor_parallel": "parallel.tensor_parallel",
    "loss": "training.loss",
    "moe.exchange": "parallel.exchange",
    "moe.message": "parallel.exchange.message",
    "moe.ragged_exchange": "parallel.exchange.ragged",
    "moe.two_level_exchange": "parallel.exchange.two_level",
    "order": "overlap.order",
    "processes": "parallel.processes",
    "progress": "host.progress",
    "runner": "step.runner",
    "sampling_params": "sampling.params",
    "shapes": "step.shapes",
    "sharding": "parallel.sharding",
    "split": "overlap.split",
    "stacked": "overlap.stacked",
    "stages": "overlap.stages",
}


class _Finder(MetaPathFinder, Loader):
    """Finds a moved module under its old name: one module, with two names in `sys.modules`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "tbo_jax" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _, _, name = module.__name__.partition(".")
        sys.modules[module.__name__] = importlib.import_module(f"tbo_jax.{MOVED[name]}")


def install() -> None:
    """Have Python find moved modules; behind all its own finders, so that it costs nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
