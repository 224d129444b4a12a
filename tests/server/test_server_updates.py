"""Updates on their way to a reader: joined while it is slow, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.server.interface import Update
from tbo_jax.server.updates import Pending


def test_a_slow_reader_gets_fewer():
    known = [TokenLogprobs(i, -1.0, 1, {}) for i in range(100)]

    async def main():
        pending, read = Pending(), []
        reader = pending.__aiter__()
        pending.put(Update(0, [0], "a", [known[0]]))
        read.append(await anext(reader))
        for i in range(1, 100):
            pending.put(Update(i % 2, [i], "ab"[i % 2], [known[i]]))
        pending.put(Update(1, finish_reason="stop", num_cached_tokens=3))
        pending.put(Update(0, finish_reason="length", num_cached_tokens=3))
        pending.end()
        read += [update async for update in reader]
        return read

    first, *rest = asyncio.run(main())
    assert first.token_ids == [0] and len(rest) == 2
    for update in rest:
        numbers = [i for i in range(1, 100) if i % 2 == update.sample]
        assert update.token_ids == numbers and update.text == "ab"[update.sample] * len(numbers)
        assert update.logprobs == [known[i] for i in numbers] and update.num_cached_tokens == 3
        assert update.finish_reason == ("length", "stop")[update.sample]


def test_what_comes_while_it_is_read_and_an_error():
    async def main():
        pending, read = Pending(), []

        async def write():
            for i in range(50):
                pending.put(Update(0, [i], "x"))
                if i % 3:
                    await asyncio.sleep(0)
            pending.end(RuntimeError("gone"))

        writing = asyncio.create_task(write())
        with pytest.raises(RuntimeError, match="gone"):
            async for update in pending:
                read += update.token_ids
                await asyncio.sleep(0)
        await writing
        return read

    assert asyncio.run(main()) == list(range(50))
