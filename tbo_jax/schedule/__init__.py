"""What a step's schedule hides, read from the program that XLA compiled for it.

`python -m tbo_jax.schedule --help` for the runner's own step, `inspect` for any jitted function.
"""

from tbo_jax.schedule.audit import Finding
from tbo_jax.schedule.compare import Change, compare
from tbo_jax.schedule.report import CollectiveReport, ScheduleReport, inspect
from tbo_jax.schedule.targets import Rates, Target, find_target, list_targets

__all__ = [
    "Change",
    "CollectiveReport",
    "Finding",
    "Rates",
    "ScheduleReport",
    "Target",
    "compare",
    "find_target",
    "inspect",
    "list_targets",
]
