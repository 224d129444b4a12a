"""The engine's process and its clients, on a tiny model; killed, and started anew."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tbo_jax.server import wire
from tbo_jax.server.remote import RemoteClient
from tests.golden_cases import Golden, with_tokenizer
from tests.server.engine_processes import (
    asked,
    collect,
    comparable,
    joined,
    random_asked,
    served,
    until,
)

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    with served(folder, cache=tmp_path_factory.mktemp("cache")) as one:
        yield one


async def check_empty(client):
    """Nothing is left of any request."""
    for _ in range(500):
        told = await client.statistics(check=True)
        if not told["running"] and not told["waiting"]:
            break
        await asyncio.sleep(0.02)
    assert (told["running"], told["waiting"], told["check"]) == (0, 0, None)
    assert told["free_pages"] == told["pages"]
    assert not client.num_unfinished


def test_text_is_that_of_the_model(engine):
    client = engine.client
    assert client.is_ready
    assert client.info.vocab_size == 160 and client.info.max_context == 120
    assert client.info.max_logprobs == 20
    assert client.info.takes_prompt_logprobs

    async def main():
        requests = [asked(prompt, max_new_tokens=8) for prompt in GOLDEN.prompts]
        quiet = [asked(prompt, max_new_tokens=8, tells_tokens=False) for prompt in GOLDEN.prompts]
        found = await asyncio.gather(*(collect(client, one) for one in requests))
        silent = [[update async for update in client.generate(one)] for one in quiet]
        for ids, (one,), (other,) in zip(GOLDEN.greedy, found, silent):
            assert one.token_ids == other.token_ids == ids[:8]
            assert one.text == other.text == " ".join(f"w{i}" for i in ids[:8])
            assert one.finish_reason == other.finish_reason == "length"
        samples = await collect(client, asked([5, 6], n=3, seed=9, temperature=1.0, logprobs=1))
        single = [
            await collect(client, asked([5, 6], seed=9 + i, temperature=1.0)) for i in range(3)
        ]
        assert [one.token_ids for one in samples] == [one.token_ids for (one,) in single]
        assert all(len(one.logprobs) == len(one.token_ids) for one in samples)
        (stopped,) = await collect(client, asked([5], stop_token_ids=list(range(160))))
        assert (stopped.token_ids, stopped.finish_reason) == ([], "stop")
        await check_empty(client)

    engine.run(main())


def test_what_cannot_run_is_refused(engine):
    async def refused(request, reason):
        with pytest.raises(ValueError, match=reason):
            await collect(engine.client, request)

    async def main():
        await refused(asked([]), "empty prompt; expected")
        await refused(asked([160]), "token id 160 is outside the vocabulary of 160")
        await refused(asked([1] * 120), "prompt of 120 tokens; expected at most 119")
        await refused(asked([1], n=2, logprobs=21), "logprobs")
        await refused(asked([1], regex="(", ignore_eos=False), "regex cannot be used")
        await refused(asked([1], priority=2**70), "priority is 1180591620717411303424: expected")
        await check_empty(engine.client)

    engine.run(main())


def test_who_leaves_ends_the_request(engine):
    client = engine.client

    async def main():
        async for _ in client.generate(asked([3], max_new_tokens=110)):
            break  # and nobody has the iteration any more
        assert not client.num_unfinished
        updates = client.generate(asked([3], n=3, max_new_tokens=110))
        await anext(updates)
        await updates.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(updates)
        regex = client.generate(asked([3], regex="w1( w2)*", ignore_eos=False))
        await regex.aclose()  # while its grammar is compiled, perhaps
        task = asyncio.create_task(collect(client, asked([3], max_new_tokens=110)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_empty(client)

    engine.run(main())


def test_two_clients_share_it_and_one_that_goes_disturbs_nobody(engine):
    async def main():
        other = RemoteClient(engine.supervisor.path)
        await other.wait_ready()
        requests = [
            asked([i, i + 1], max_new_tokens=30, seed=i, temperature=1.0) for i in range(12)
        ]
        expected = await asyncio.gather(*(collect(engine.client, one) for one in requests))
        mine = [asyncio.create_task(collect(engine.client, one)) for one in requests]
        its = [asyncio.create_task(collect(other, one)) for one in requests]
        assert await asyncio.gather(*its) == await asyncio.gather(*mine) == expected
        mine = [asyncio.create_task(collect(engine.client, one)) for one in requests]
        lost = [other.generate(asked([i], max_new_tokens=110)) for i in range(9)]
        await anext(lost[0])
        other._connection.transport.abort()  # as if its process died
        other._connecting.cancel()
        assert await asyncio.gather(*mine) == expected
        other.fail("the test is over")
        with pytest.raises(RuntimeError, match="the test is over"):
            async for _ in lost[5]:
                pass
        await check_empty(engine.client)

    engine.run(main())


def test_a_slow_reader_is_told_the_same_in_fewer_updates(engine):
    async def main():
        request = asked([7, 8], max_new_tokens=100)
        (expected,) = await collect(engine.client, request)
        updates = engine.client.generate(request)
        first = await anext(updates)
        await until(lambda: not engine.client.num_unfinished)
        rest = [update async for update in updates]
        assert len(rest) == 1 and joined([first, *rest]) == [expected]

    engine.run(main())


@pytest.mark.slow
def test_a_connection_that_does_not_read_keeps_no_more_than_the_tokens(engine):
    """Its updates are joined in the engine's process."""

    async def main():
        raw = socket.socket(socket.AF_UNIX)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(engine.supervisor.path)
        raw.sendall(wire.frame(wire.Hello(wire.PROTOCOL)))
        params = wire.packed_params(asked([1], max_new_tokens=110, logprobs=20).params)
        adds = [wire.Add(i, [i % 160], params) for i in range(96)]
        raw.sendall(wire.frame(adds))

        async def unfinished():
            told = await engine.client.statistics()
            return told["running"] + told["waiting"]

        while await unfinished() < 96:
            await asyncio.sleep(0.01)
        while await unfinished():
            await asyncio.sleep(0.05)
        assert (await collect(engine.client, asked([1])))[0].finish_reason == "length"
        frames, found, count = wire.Frames(), {}, 0
        while sum(one.finish_reason is not None for one in found.values()) < 96:
            for payload in frames.feed(await asyncio.to_thread(raw.recv, 1 << 20)):
                if not count:
                    wire.read_hello(payload)
                else:
                    for message in wire.read_to_client(payload):
                        for told in message.others:
                            found.setdefault(told.number, wire.Told(told.number)).join(told)
                count += 1
        raw.close()
        assert {len(one.token_ids) for one in found.values()} == {110}
        assert {len(one.logprobs) for one in found.values()} == {110}
        assert count < 96 * 110 / 4 / 2  # less than half the steps

    engine.run(main())


def test_strangers_are_told_what_is_wrong(engine):
    async def answer(data):
        reader, writer = await asyncio.open_unix_connection(engine.supervisor.path)
        writer.write(data)
        told = await reader.read()
        writer.close()
        (payload,) = wire.Frames().feed(told)
        return payload

    async def main():
        with pytest.raises(wire.WireError, match="speaks version 99 .*: expected 2"):
            wire.read_hello(await answer(wire.frame(wire.Hello(99))))
        with pytest.raises(wire.WireError, match=r"a message has \d+ bytes: expected at most"):
            wire.read_hello(await answer(b"GET / HTTP/1.1\r\n\r\n"))

    engine.run(main())
    with pytest.raises(
        ValueError, match=r"a socket's path has at most 107 bytes, this one has 201"
    ):
        RemoteClient("/" + 200 * "x")


def test_a_death_changes_no_text(engine):
    async def main():
        rng = random.Random(4)
        requests = [random_asked(rng, number) for number in range(20)]
        requests.append(asked([9, 9], max_new_tokens=110))
        expected = await asyncio.gather(*(collect(engine.client, one) for one in requests))
        tasks = [asyncio.create_task(collect(engine.client, one)) for one in requests]
        late = asked([4, 4], max_new_tokens=20)
        while (await engine.client.statistics())["generated_tokens"] % 50 < 25:
            await asyncio.sleep(0)
        done = sum(task.done() for task in tasks)
        start = time.monotonic()
        engine.kill()
        await until(lambda: not engine.client.is_ready)
        during = asyncio.create_task(collect(engine.client, late))  # comes while there is no engine
        assert "generated_tokens" in await engine.client.statistics()
        (first,) = await during
        seconds = time.monotonic() - start
        found = await asyncio.gather(*tasks)
        assert done < len(tasks)
        for one, other in zip(expected, found):
            assert list(map(comparable, one)) == list(map(comparable, other))
        assert engine.supervisor.restarts == 1 and first.finish_reason == "length"
        await check_empty(engine.client)
        return seconds

    print("seconds until a request that came during the restart was over:", engine.run(main()))


def test_the_engine_does_not_outlive_its_supervisor(engine, tmp_path):
    """A supervisor that is killed while its engine loads."""
    code = (
        "import asyncio, os, sys\n"
        "from tbo_jax.server.supervisor import Supervisor\n"
        "async def main():\n"
        f"    supervisor = Supervisor({engine.supervisor._start.model!r}, path={str(tmp_path / 'e')!r})\n"
        "    task = asyncio.create_task(supervisor.start())\n"
        "    while supervisor.pid is None: await asyncio.sleep(0.01)\n"
        "    print(supervisor.pid, flush=True)\n"
        "    await asyncio.sleep(2.5)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(500):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            break
        if state == "Z":  # nobody reaps it here
            break
        time.sleep(0.01)
    else:
        pytest.fail("it is there still")
