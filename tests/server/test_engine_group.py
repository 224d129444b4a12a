"""Two engine processes of one device each, with a supervisor each; one is killed or dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import socket
import sys
import time

import pytest

from tbo_jax.server.control import Hosts
from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.supervisor import Supervisor
from tbo_jax.server.suspects import MOST_TRIALS, SUSPECT_DEATHS
from tests.golden_cases import with_tokenizer
from tests.server.engine_processes import SMALL, asked, collect, comparable, random_asked

POISON = 157
DEATHS = SUSPECT_DEATHS + MOST_TRIALS
# The engine's processes; the one that follows ends with such a request as if its driver failed.
PROGRAM = f"""#!{sys.executable}
import os, signal, sys
from tbo_jax.server import engine_process, group

def add_to(engine, add, params, added=group.add_to):
    if {POISON} in add.token_ids:
        os.kill(os.getpid(), signal.SIGSEGV)
    return added(engine, add, params)

group.add_to = add_to
sys.argv[1:] = sys.argv[3:]  # without -m and the module
engine_process.main()
"""
CONFIG = dataclasses.replace(SMALL, devices=None, prompt_logprobs=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture
def folder(tmp_path_factory, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def group_of_two(folder):
    """The supervisors, and a client of the first one's engine."""
    coordinator = f"localhost:{free_port()}"
    supervisors = [Supervisor(folder, CONFIG, hosts=Hosts(coordinator, 2, i)) for i in range(2)]
    client = RemoteClient(supervisors[0].path)
    try:
        await asyncio.gather(*(one.start() for one in supervisors))
        await client.wait_ready()
        yield supervisors, client
    finally:
        await client.close()
        await asyncio.gather(*(one.stop() for one in supervisors))


@pytest.mark.slow
def test_a_request_that_kills_a_process_is_refused_and_others_go_on(folder, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def main():
        async with group_of_two(folder) as (supervisors, client):
            requests = [
                asked([i, i + 1], max_new_tokens=60, seed=i, temperature=1.0) for i in range(8)
            ]
            calm = await asyncio.gather(*(collect(client, one) for one in requests))
            tasks = [asyncio.create_task(collect(client, one)) for one in requests[:4]]
            await asyncio.sleep(0.05)
            tried = asyncio.create_task(collect(client, asked([3, POISON, 4], max_new_tokens=60)))
            tasks += [asyncio.create_task(collect(client, one)) for one in requests[4:]]
            for mine, theirs in zip(calm, await asyncio.gather(*tasks), strict=True):
                assert list(map(comparable, mine)) == list(map(comparable, theirs))
            with pytest.raises(RuntimeError, match=f"died {DEATHS} times in a row"):
                await tried
            assert [one.restarts for one in supervisors] == [DEATHS] * 2
            told = await client.statistics(check=True)
            assert told["check"] is None and told["free_pages"] == told["pages"]

    asyncio.run(asyncio.wait_for(main(), 280))


@pytest.mark.slow
def test_streams_go_on_whichever_process_dies(folder):
    rng = random.Random(5)
    requests = [random_asked(rng, number) for number in range(40)]
    requests = [one for one in requests if one.params.prompt_logprobs is None]

    async def main():
        async with group_of_two(folder) as (supervisors, client):
            expected = await asyncio.gather(*(collect(client, one) for one in requests))
            seconds = []
            for victim in (1, 0):
                tasks = [asyncio.create_task(collect(client, one)) for one in requests]
                while sum(task.done() for task in tasks) < 5:
                    await asyncio.sleep(0.005)
                start = time.monotonic()
                os.kill(supervisors[victim].pid, signal.SIGKILL)
                while client.is_ready:
                    await asyncio.sleep(0.005)
                await client.wait_ready()
                seconds.append(round(time.monotonic() - start, 1))
                for one, mine, theirs in zip(requests, expected, await asyncio.gather(*tasks)):
                    assert list(map(comparable, mine)) == list(map(comparable, theirs)), one
            told = await client.statistics(check=True)
            assert told["check"] is None and told["devices"] == 2
            assert all(one.restarts == 2 for one in supervisors)
            print("seconds from a kill until the group is ready:", seconds)

    asyncio.run(asyncio.wait_for(main(), 200))
