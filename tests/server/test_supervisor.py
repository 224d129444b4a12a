"""A supervisor and engines that do not load, hang, and die too often; and a storm of requests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tbo_jax.engine.config import EngineConfig
from tbo_jax.server.control import Beat, line
from tbo_jax.server.supervisor import EngineFailed, Supervisor
from tests.golden_cases import with_tokenizer
from tests.server.engine_processes import (
    SMALL,
    asked,
    collect,
    comparable,
    joined,
    random_asked,
    served,
    until,
)

NAME = "qwen3_moe"


@pytest.fixture
def folder(tmp_path_factory):
    return with_tokenizer(NAME, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "config, damage, reason, code",
    [
        (SMALL, "config.json", "config.json", 2),
        pytest.param(
            EngineConfig(devices=1, max_context=10**6), None, "max_context 1000000 is out of range", 2,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_model_that_does_not_load_is_told_in_one_line(folder, config, damage, reason, code):
    if damage:
        (folder / damage).unlink()

    async def main():
        supervisor = Supervisor(folder, config)
        with pytest.raises(EngineFailed, match=reason) as failed:
            await supervisor.start()
        assert "\n" not in str(failed.value) and failed.value.exit_code == code
        assert supervisor.restarts == 0 and supervisor.pid is None
        assert not Path(supervisor.path).parent.exists()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_a_death_while_it_loads_the_first_time_is_no_reason_to_try_again(folder):
    async def main():
        supervisor = Supervisor(folder, SMALL)
        starting = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.pid is not None)
        await asyncio.sleep(0.5)
        os.kill(supervisor.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="ended by SIGKILL while it loaded") as failed:
            await starting
        assert failed.value.exit_code == 1 and supervisor.restarts == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_numbers_that_cannot_be_are_refused():
    for options in (dict(step_timeout=0), dict(most_failures=0), dict(step_timeout=float("nan"))):
        with pytest.raises(ValueError, match="expected a number above 0"):
            Supervisor("model", **options)


def test_a_step_that_takes_too_long_is_found():
    async def main():
        supervisor, reader = Supervisor("model", step_timeout=3), asyncio.StreamReader()
        for beat in (Beat("loading"), Beat("ready"), Beat("ready", 5, 2.9), Beat("ready", 5, 3.1)):
            reader.feed_data(line(beat))
        last, reason, ready_at = await supervisor._watch(reader)
        await supervisor.stop()
        assert reason == "a step took more than 3 s" and last.tokens == 5 and ready_at

    asyncio.run(main())


@pytest.mark.slow
def test_one_that_hangs_is_killed_and_one_that_always_dies_is_given_up(folder, tmp_path):
    given_up = []
    with served(
        folder, cache=tmp_path, step_timeout=3, most_failures=2, on_failure=given_up.append
    ) as engine:
        client, supervisor = engine.client, engine.supervisor

        async def main():
            request = asked([3, 4], max_new_tokens=100)
            expected = await collect(client, request)
            os.kill(supervisor.pid, signal.SIGTERM)  # as a service manager sends it to all
            os.kill(supervisor.pid, signal.SIGINT)
            task = asyncio.create_task(collect(client, request))
            await asyncio.sleep(0.05)
            os.kill(supervisor.pid, signal.SIGSTOP)
            assert await task == expected
            assert supervisor.restarts == 1

            # From now on it does not load.
            shutil.move(folder / "config.json", folder / "gone")
            task = asyncio.create_task(collect(client, request))
            await asyncio.sleep(0.05)
            engine.kill()
            with pytest.raises(EngineFailed, match=r"after 2 failures in a row: .*config.json"):
                await supervisor.wait()
            (failed,) = given_up
            client.fail(str(failed))
            with pytest.raises(RuntimeError, match="the engine is given up after 2 failures"):
                await task

        engine.run(main(), 120)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(speculate=2)], ids=["look-ahead", "drafts"])
def test_a_storm_in_which_the_engine_is_killed_loses_nothing(folder, tmp_path, options):
    rng = random.Random(11)
    requests = [random_asked(rng, number) for number in range(200)]
    leaving = {number: rng.randint(0, 10) for number in range(200) if rng.random() < 0.2}
    config = dataclasses.replace(SMALL, **options)
    with served(folder, config, cache=tmp_path) as engine:
        client = engine.client

        async def one(number):
            updates = client.generate(requests[number])
            if number in leaving:
                for _ in range(leaving[number]):
                    await anext(updates, None)
                await updates.aclose()
            else:
                found = []
                async for update in updates:
                    found.append(update)
                return [comparable(each) for each in joined(found)]

        async def storm(kills):
            tasks = [asyncio.create_task(one(number)) for number in range(len(requests))]
            seconds = []
            for kill in range(kills):
                least = 20 + 50 * kill
                while sum(task.done() for task in tasks) < least:
                    await asyncio.sleep(0.005)
                start, restarts = time.monotonic(), engine.supervisor.restarts
                engine.kill()
                await until(lambda: not client.is_ready)
                assert engine.supervisor.restarts <= restarts + 1
                updates = client.generate(asked([1, 2], max_new_tokens=5, priority=-9))
                await anext(updates)
                await updates.aclose()
                seconds.append(round(time.monotonic() - start, 2))
            return await asyncio.gather(*tasks), seconds

        async def main():
            expected, _ = await storm(0)
            assert engine.supervisor.restarts == 0
            files = open_files(os.getpid())
            found, seconds = await storm(3)
            assert engine.supervisor.restarts == 3
            for number, (mine, theirs) in enumerate(zip(expected, found)):
                assert mine == theirs, requests[number]
            assert not client.num_unfinished
            for _ in range(200):
                told = await client.statistics(check=True)
                if not told["running"] and not told["waiting"]:
                    break
                await asyncio.sleep(0.02)
            assert told["check"] is None and told["free_pages"] == told["pages"]
            assert open_files(os.getpid()) == files
            print("seconds from a kill to the next first token:", seconds)

        engine.run(main(), 300)
