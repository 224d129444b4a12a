"""Time what an engine's process and a client of it carry, with the device's work as constants.

    python benchmarks/engine_process.py [--rows 256] [--seconds 10] [--json FILE]

The engine's process is that of a server, but for its program: a step gives the same token for all
rows (as in benchmarks/host.py). One `RemoteClient` in this process has a task for each row, which
takes each update as it comes. An update is a token with its text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import host
import jax
import tyro

from tbo_jax import SamplingParams
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.sharing import Calls
from tbo_jax.server.engine_loop import EngineLoop
from tbo_jax.server.engine_server import EngineServer
from tbo_jax.server.event_loop import new_event_loop
from tbo_jax.server.interface import Generate, ModelInfo
from tbo_jax.server.remote import RemoteClient


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of benchmarks/engine_process.py."""

    rows: int = 256
    """Requests that decode at a time."""
    seconds: float = 10.0
    """How long updates are counted."""
    tells_tokens: bool = True
    """Have an update for each token; otherwise tokens are sent 64 at a time."""
    json: Path | None = None
    """Write the results there too."""
    engine_at: str | None = None
    """Be the engine's process, and listen there (the benchmark starts it)."""


def _cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def run_engine(args: Arguments) -> None:
    """Serve until the parent is gone."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    arguments = host.Arguments(ranks=1, rows=args.rows, context=4096)
    engine = host.make_engine(arguments, host.Stopwatch())
    llm = SimpleNamespace(engine=engine, calls=Calls(), statistics={})

    class Loop(EngineLoop):
        def _statistics(self, check: bool) -> dict[str, Any]:
            return {"cpu_seconds": _cpu_seconds(), "steps": engine.statistics.steps}

    loop = Loop(cast(LLM, llm))
    info = ModelInfo(
        str(host.MODEL), engine.max_context, engine.runner.config.vocab_size, None, False
    )

    async def serve() -> None:
        assert args.engine_at is not None
        listening = await EngineServer(loop, engine, info, "run").listen(args.engine_at)
        threading.Thread(target=loop.run, daemon=True).start()
        async with listening:
            parent = os.getppid()
            while os.getppid() == parent:
                await asyncio.sleep(0.5)
        os._exit(0)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve())


async def measure(path: str, args: Arguments) -> dict[str, Any]:
    """Updates a second, and seconds of each processor that a second took."""
    client = RemoteClient(path)
    await client.wait_ready()
    counts = {"updates": 0, "tokens": 0}
    params = SamplingParams(max_new_tokens=3500, ignore_eos=True, seed=0)

    async def read(number: int) -> None:
        while True:  # one request after the other
            request = Generate("r", [number % 250 + 5], params, tells_tokens=args.tells_tokens)
            async for update in client.generate(request):
                counts["updates"] += 1
                counts["tokens"] += len(update.token_ids)

    tasks = [asyncio.create_task(read(number)) for number in range(args.rows)]
    await asyncio.sleep(2.0)
    before, told, mine = dict(counts), await client.statistics(), _cpu_seconds()
    start = time.perf_counter()
    await asyncio.sleep(args.seconds)
    after = await client.statistics()
    spent = time.perf_counter() - start
    found = {name: (counts[name] - before[name]) / spent for name in counts}
    found["client_processor"] = (_cpu_seconds() - mine) / spent
    found["engine_processor"] = (after["cpu_seconds"] - told["cpu_seconds"]) / spent
    found["steps"] = (after["steps"] - told["steps"]) / spent
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    return found


def print_figures(load: str, found: dict[str, float], path: Path | None) -> None:
    """Print what a load gave a second, and write it to a file if there is one."""
    print(
        f"{load}, {os.cpu_count()} cores of {platform.machine()}, Python "
        f"{platform.python_version()}; the device's work is replaced by constants"
    )
    for name, value in found.items():
        print(f"{name.replace('_', ' ')} a second: {value:,.2f}")
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main(args: Arguments) -> None:
    """Print the figures."""
    if args.engine_at is not None:
        run_engine(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/engine"
        command = [sys.executable, __file__, "--rows", str(args.rows), "--engine-at", path]
        engine = subprocess.Popen(command)
        try:
            found = asyncio.run(measure(path, args))
        finally:
            engine.kill()
            engine.wait()
    print_figures(f"{args.rows} requests", found, args.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
