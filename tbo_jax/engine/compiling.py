"""Programs that are compiled beside the requests that others serve already."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax

from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.step.shapes import Bucket

logger = logging.getLogger(__name__)

EXIT_SECONDS = 10.0  # that an interpreter which exits waits for the program that is compiled


def check_serves_early(overlap: OverlapConfig) -> None:
    """Check that steps may take larger shapes while those of their size are compiled.

    Raises:
        ValueError: `USE_TBO=auto` has to time all programs while nothing else runs; or there are
            several processes, which would have to agree in every step on what is there.
    """
    if overlap.mode == "auto":
        raise ValueError(
            "serve_early=True with USE_TBO=auto: expected one of them, as programs are timed while "
            "no request runs"
        )
    if (count := jax.process_count()) > 1:
        raise ValueError(
            f"serve_early=True in {count} processes: expected one process, as all have to run the "
            "same program in each step"
        )


def serves_early(asked: bool | None, served: bool, overlap: OverlapConfig, platform: str) -> bool:
    """Whether an engine takes requests before all its programs are compiled.

    Args:
        asked: what its options say; None: where it is `served` and nothing speaks against it. XLA
            tries kernels out on a GPU while it compiles, which needs memory and a device that does
            nothing else, so there all is compiled first.
        served: by a server, whose users wait for it.
        overlap: of its steps.
        platform: of its devices.

    Raises:
        ValueError: it is asked for, and cannot be (`check_serves_early`).
    """
    if asked:
        check_serves_early(overlap)
        return True
    alone = jax.process_count() == 1 and overlap.mode != "auto"
    return asked is None and served and alone and platform in ("cpu", "tpu")


class Compiling:
    """A thread that compiles one bucket after another.

    It takes one at a time: the other cores serve requests. A bucket that fails is told of and left
    out, as a larger one serves its steps.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        compile_one: Callable[[Bucket], None],
        booked: Callable[[float], None],
    ) -> None:
        """Start it.

        Args:
            buckets: in this order.
            compile_one: compiles all programs of a bucket.
            booked: called with the seconds that each took.
        """
        self._stop = threading.Event()
        work = partial(_compile, list(buckets), compile_one, booked, self._stop)
        self._thread = threading.Thread(target=work, name="tbo_jax compiler", daemon=True)
        self._at_exit = partial(_stop_at_exit, self._stop, self._thread)
        atexit.register(self._at_exit)
        self._thread.start()

    def stop_soon(self) -> None:
        """Compile no bucket after the one under way."""
        self._stop.set()

    def stop(self) -> None:
        """Do as `stop_soon`, and wait for the one under way."""
        self.stop_soon()
        self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of it, or so many seconds; whether it is over."""
        self._thread.join(seconds)
        over = not self._thread.is_alive()
        if over:
            atexit.unregister(self._at_exit)
        return over


def _compile(
    buckets: Sequence[Bucket],
    compile_one: Callable[[Bucket], None],
    booked: Callable[[float], None],
    stop: threading.Event,
) -> None:
    start, failed = time.perf_counter(), 0
    for bucket in buckets:
        if stop.is_set():
            return
        begun = time.perf_counter()
        try:
            compile_one(bucket)
        except Exception:
            failed += 1
            logger.exception("%s does not compile: larger steps are run in its place", bucket)
        booked(time.perf_counter() - begun)
    logger.info(
        "%d further shapes of steps are compiled, %.1f s after the first ones",
        len(buckets) - failed,
        time.perf_counter() - start,
    )


def _stop_at_exit(stop: threading.Event, thread: threading.Thread) -> None:
    """Have the thread end before the interpreter: in the midst of XLA it might crash."""
    stop.set()
    thread.join(EXIT_SECONDS)
