"""Progress bars on stderr for the long parts: loading and compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Update = Callable[[int, int], None]  # done, in all


@contextmanager
def progress_bar(description: str, enabled: bool) -> Iterator[Update]:
    """A bar on stderr; gives the function that moves it. Nothing is drawn unless `enabled`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not enabled) as bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update
