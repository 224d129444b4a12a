"""A request that kills each engine's process that it is sent to, beside others that do not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.suspects import MOST_TRIALS, SUSPECT_DEATHS
from tests.golden_cases import with_tokenizer
from tests.server.engine_processes import SMALL, asked, collect, comparable, served

POISON = 157
DEATHS = SUSPECT_DEATHS + MOST_TRIALS
# The engine's process; with such a request it ends as if the device's driver failed.
PROGRAM = f"""#!{sys.executable}
import os, signal, sys
from tbo_jax.server import engine_loop, engine_process

class Loop(engine_loop.EngineLoop):
    is_poisoned = False

    def _add(self, new):
        self.is_poisoned |= {POISON} in new.add.token_ids
        super()._add(new)

    def _step(self):
        if self.is_poisoned:
            os.kill(os.getpid(), signal.SIGSEGV)
        super()._step()

engine_process.EngineLoop = Loop
sys.argv[1:] = sys.argv[3:]  # without -m and the module
engine_process.main()
"""


@pytest.mark.slow
def test_it_is_refused_and_the_others_go_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    folder = with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))
    monkeypatch.setattr(sys, "executable", str(program))
    with served(folder, SMALL, cache=tmp_path_factory.mktemp("cache")) as engine:

        async def main() -> None:
            first, second = engine.client, RemoteClient(engine.supervisor.path)
            await second.wait_ready()
            requests = [
                asked([i, i + 1], max_new_tokens=60, seed=i, temperature=1.0) for i in range(10)
            ]
            calm = await asyncio.gather(*(collect(second, one) for one in requests))
            # More than there are rows, some before it and some after, of two API processes.
            poison = asked([3, POISON, 4], max_new_tokens=60)
            tasks = [asyncio.create_task(collect(second, one)) for one in requests[:5]]
            await asyncio.sleep(0.05)
            tried = asyncio.create_task(collect(first, poison))
            tasks += [asyncio.create_task(collect(first, one)) for one in requests[5:]]
            found = await asyncio.gather(*tasks)
            for one, other in zip(calm, found, strict=True):
                assert list(map(comparable, one)) == list(map(comparable, other))
            with pytest.raises(RuntimeError, match=f"died {DEATHS} times in a row"):
                await tried
            assert engine.supervisor.restarts == DEATHS
            (late,) = await collect(second, asked([5], max_new_tokens=4))
            assert late.finish_reason == "length"
            told = await first.statistics(check=True)
            assert told["check"] is None and told["free_pages"] == told["pages"]
            await second.close()

        engine.run(main(), 240)
