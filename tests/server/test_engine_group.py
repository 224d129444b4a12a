"""Two engine processes of one device each, with a supervisor each; one is killed amid streams."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import socket
import time

import pytest

from tbo_jax.server.control import Hosts
from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.supervisor import Supervisor
from tests.golden_cases import with_tokenizer
from tests.server.engine_processes import SMALL, collect, comparable, random_asked

CONFIG = dataclasses.replace(SMALL, devices=None, prompt_logprobs=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_streams_go_on_whichever_process_dies(tmp_path_factory, monkeypatch, tmp_path):
    folder = with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    coordinator = f"localhost:{free_port()}"
    rng = random.Random(5)
    requests = [random_asked(rng, number) for number in range(40)]
    requests = [one for one in requests if one.params.prompt_logprobs is None]

    async def main():
        supervisors = [Supervisor(folder, CONFIG, hosts=Hosts(coordinator, 2, i)) for i in range(2)]
        client = RemoteClient(supervisors[0].path)
        try:
            await asyncio.gather(*(one.start() for one in supervisors))
            await client.wait_ready()
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
        finally:
            await client.close()
            await asyncio.gather(*(one.stop() for one in supervisors))

    asyncio.run(asyncio.wait_for(main(), 200))
