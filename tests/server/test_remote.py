"""`RemoteClient` with an engine that is none, and dies as often as a test wants."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import uvloop

from tbo_jax import SamplingParams
from tbo_jax.server import wire
from tbo_jax.server.interface import Generate, ModelInfo
from tbo_jax.server.remote import RemoteClient
from tbo_jax.server.suspects import MOST_TRIALS, SUSPECT_DEATHS
from tests.server.engine_processes import collect, joined

INFO = ModelInfo("/models/m", 1000, 1000, None, False)
POISON = 666
DEATHS = SUSPECT_DEATHS + MOST_TRIALS


def expected_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    return [(sum(prompt) * 31 + seed * 7 + place * 13) % 600 for place in range(count)]


def expected_text(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


class FakeEngine:
    """Tells a token of each request in a step. One with `POISON` in its prompt kills it."""

    def __init__(self, path: str, *, rows: int = 8, poison_at: int = 0) -> None:
        self.path = path
        self.rows = rows
        self.poison_at = poison_at  # tokens that a poisonous one has before
        self.deaths = 0
        self.steps = 0
        self.added: list[wire.Add] = []
        self.dropped: list[int] = []
        self._runs = itertools.count()
        self._tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        self.run = f"run {next(self._runs)}"
        self.turns: list[asyncio.StreamWriter] = []
        self.connections: list[tuple[asyncio.StreamWriter, dict[int, list]]] = []
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        self.stepping = asyncio.create_task(self._steps())

    async def die(self) -> None:
        self.deaths += 1
        self.server.close()
        self.stepping.cancel()
        for writer, _ in self.connections:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._obey(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames, running, greeted = wire.Frames(), {}, False
        while data := await reader.read(1 << 16):
            for payload in frames.feed(data):
                if not greeted:
                    writer.write(wire.frame(wire.Hello(wire.PROTOCOL, self.run, INFO)))
                    self.connections.append((writer, running))
                    greeted = True
                    continue
                for message in wire.read_to_engine(payload):
                    if isinstance(message, wire.Add):
                        params = wire.unpacked_params(message.params)
                        tokens = expected_tokens(
                            message.token_ids, params.seed, params.max_new_tokens
                        )
                        assert message.generated == tokens[: len(message.generated)]
                        assert len(message.generated) < len(tokens)
                        self.added.append(message)
                        running[message.number] = [message, tokens, len(message.generated)]
                    elif isinstance(message, wire.Abort):
                        self.dropped.append(message.number)
                        running.pop(message.number, None)
                    elif isinstance(message, wire.Turn):
                        self._take_turns(writer, message.wanted)
                    else:
                        writer.write(wire.frame([wire.Statistics({"run": self.run})]))

    def _take_turns(self, writer: asyncio.StreamWriter, wanted: bool) -> None:
        before = self.turns[:1]
        if wanted:
            self.turns.append(writer)
        else:
            self.turns.remove(writer)
        if self.turns[:1] not in ([], before):
            self.turns[0].write(wire.frame([wire.YourTurn()]))

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(0.0005)
            self.steps += 1
            for writer, running in self.connections:
                step = wire.Step()
                for number, one in list(running.items())[: self.rows]:
                    add, tokens, place = one
                    if POISON in add.token_ids and place >= self.poison_at:
                        self._tasks.append(asyncio.create_task(self._be_born_again()))
                        return
                    one[2] += 1
                    text = expected_text(tokens[place : place + 1])
                    if one[2] < len(tokens):
                        step.numbers.append(number)
                        step.token_ids.append(tokens[place])
                        step.texts.append(text)
                    else:
                        step.others.append(
                            wire.Told(number, [tokens[place]], text, finish_reason="length")
                        )
                        del running[number]
                if step.numbers or step.others:
                    writer.write(wire.frame([step]))

    async def _be_born_again(self) -> None:
        await self.die()
        await self.start()


def asked(
    prompt: list[int], count: int = 20, seed: int | None = 1, n: int = 1, **options
) -> Generate:
    params = SamplingParams(max_new_tokens=count, seed=seed, n=n)
    return Generate("r", prompt, params, **options)


def check(request: Generate, updates: list) -> None:
    for sample, update in enumerate(updates):
        tokens = expected_tokens(
            request.prompt_token_ids, request.params.seed + sample, request.params.max_new_tokens
        )
        assert (update.token_ids, update.text) == (tokens, expected_text(tokens))
        assert update.finish_reason == "length"
    assert len(updates) == request.params.n


def run(path: str, main, loop_factory=None, **options) -> None:
    """With an engine and a client at it."""

    async def whole() -> None:
        engine, client = FakeEngine(path, **options), RemoteClient(path)
        await engine.start()
        try:
            assert await client.wait_ready() == INFO
            await main(engine, client)
            assert not client.num_unfinished and not client._suspects
        finally:
            await client.close()
            await engine.die()
            await asyncio.sleep(0.02)  # what it served sees its end

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(whole(), 60))


@pytest.fixture
def path(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("s") / "engine")


def test_a_token_id_that_cannot_be_sent_is_refused_and_takes_no_other_request_along(path):
    async def main(engine, client):
        good = asked([5], 3)
        for wide in (2**64, -(2**63) - 1, 10**30):
            updates = client.generate(asked([1, wide, 2]))
            (told,) = await asyncio.gather(collect(client, good))
            check(good, told)
            with pytest.raises(ValueError, match=f"prompt token id {wide}: expected at most"):
                await anext(updates)

    run(path, main)


@pytest.mark.parametrize("seed, loop_factory", [(0, None), (1, None), (2, uvloop.new_event_loop)])
def test_however_often_it_dies_nothing_is_lost_or_told_twice(path, seed, loop_factory):
    rng = random.Random(seed)

    async def one(client, number):
        await asyncio.sleep(rng.random() * 0.5)
        request = asked(
            [number % 500, 1],
            rng.randint(1, 60),
            number,
            rng.choice([1, 1, 3]),
            tells_tokens=rng.random() < 0.8,
        )
        updates = client.generate(request)
        if rng.random() < 0.2:
            leave_after = rng.randint(0, 5)
            for _ in range(leave_after):
                await anext(updates, None)
            await updates.aclose()
            return
        check(request, joined([update async for update in updates]))

    async def main(engine, client):
        tasks = [asyncio.create_task(one(client, number)) for number in range(300)]
        for _ in range(6):
            # Not after a time: on a busy machine a request might get no token in many runs.
            while not client.is_ready:
                await asyncio.sleep(0.001)
            enough = engine.steps + 60
            while engine.steps < enough:
                await asyncio.sleep(0.001)
            await engine.die()
            await asyncio.sleep(0.02 * rng.random())
            await engine.start()
        await asyncio.gather(*tasks)
        assert client.num_connections >= 6

    run(path, main, loop_factory, rows=200)


@pytest.mark.parametrize(("poison_at", "samples"), [(0, 1), (7, 1), (0, 3)])
def test_a_request_that_kills_the_engine_is_given_up_and_the_others_go_on(path, poison_at, samples):
    async def main(engine, client):
        requests = [asked([i, 1], 40) for i in range(30)]
        tasks = [asyncio.create_task(collect(client, one)) for one in requests[:15]]
        poison = asyncio.create_task(collect(client, asked([POISON], 40, n=samples)))
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(collect(client, one)) for one in requests[15:]]
        for request, updates in zip(requests, await asyncio.gather(*tasks)):
            check(request, updates)
        with pytest.raises(RuntimeError, match=f"died {DEATHS} times in a row when it was to run"):
            await poison
        assert engine.deaths == DEATHS + (poison_at > 0)
        late = asked([3], 5)
        check(late, await collect(client, late))

    run(path, main, rows=100, poison_at=poison_at)


def test_no_client_blames_its_own_requests_for_those_of_another(path):
    """The engine dies before it steps for the second client, each time."""

    async def main(engine, client):
        other = RemoteClient(path)
        await other.wait_ready()
        poison = asyncio.create_task(collect(client, asked([POISON], 40)))
        requests = [asked([i, 1], 40) for i in range(12)]
        tasks = [asyncio.create_task(collect(other, one)) for one in requests]
        for request, updates in zip(requests, await asyncio.gather(*tasks)):
            check(request, updates)
        with pytest.raises(RuntimeError, match=f"died {DEATHS} times in a row when it was to run"):
            await poison
        assert engine.deaths == DEATHS and not engine.turns
        await other.close()

    run(path, main, rows=100)


def test_a_request_that_is_left_is_ended_there(path):
    async def main(engine, client):
        updates = client.generate(asked([1], 500, n=2))
        await anext(updates)
        del updates
        iteration = client.generate(asked([2], 500))
        waiting = asyncio.create_task(anext(iteration))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await iteration.aclose()
        await asyncio.sleep(0.05)
        assert sorted(engine.dropped) == [0, 1, 2]
        assert await client.statistics() == {"run": "run 0", "connections": 1}

    run(path, main)


def test_the_same_run_that_lost_the_connection_is_no_death(path):
    async def main(engine, client):
        request = asked([4], 300)
        task = asyncio.create_task(collect(client, request))
        for _ in range(DEATHS + 2):
            await asyncio.sleep(0.01)
            for writer, _ in engine.connections:
                writer.transport.abort()
            engine.connections.clear()
        check(request, await task)
        assert client.num_connections > 2

    run(path, main)


def test_close_lets_requests_end_in_time_and_aborts_the_others(path):
    async def main(engine, client):
        short, long = asked([4], 10), asked([5], 400)
        tasks = [asyncio.create_task(collect(client, one)) for one in (short, long)]
        await asyncio.sleep(0.01)
        await client.close(seconds=0.2)
        done, (cut,) = await asyncio.gather(*tasks)
        check(short, done)
        assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 400
        assert not client.is_ready
        with pytest.raises(RuntimeError, match="shutting down"):
            await collect(client, short)

    run(path, main)


def test_who_waits_is_told_that_no_engine_comes(path):
    async def main():
        client = RemoteClient(path)
        assert not client.is_ready
        with pytest.raises(RuntimeError, match="not there yet"):
            _ = client.info
        waiting = asyncio.create_task(client.wait_ready())
        request = asyncio.create_task(collect(client, asked([1])))
        await asyncio.sleep(0.1)
        assert await client.statistics() == {"connections": 0}
        client.fail("it is given up")
        for task in (waiting, request):
            with pytest.raises(RuntimeError, match="it is given up"):
                await task
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_of_another_version_is_told_of_once(path, caplog):
    async def other(reader, writer):
        writer.write(wire.frame(wire.Hello(wire.PROTOCOL + 1)))
        await reader.read()
        writer.close()

    async def main():
        async with await asyncio.start_unix_server(other, path):
            client = RemoteClient(path)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.wait_ready(), 0.3)
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    (record,) = caplog.records
    assert "speaks version 3 of the engine's protocol: expected 2" in record.getMessage()
