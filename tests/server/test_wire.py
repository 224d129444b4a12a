"""Messages between API and engine: what is sent is what is read."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax import SamplingParams
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.server import wire
from tbo_jax.server.interface import ModelInfo

INFO = ModelInfo("/models/m", 100, 160, 5, False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
FLOATS = st.floats(allow_nan=False, width=32)
LOGPROBS = st.builds(
    TokenLogprobs, st.integers(0, 2**31 - 1), FLOATS, st.integers(1, 2**31 - 1),
    st.dictionaries(st.integers(0, 2**31 - 1), FLOATS, max_size=3),
)  # fmt: skip
TOLD = st.builds(
    wire.Told, st.integers(0, 2**40), IDS, st.text(), st.none() | st.lists(LOGPROBS, max_size=3),
    st.sampled_from([None, "stop", "length", "abort", "error"]), st.none() | st.text(),
    st.none() | st.text(), st.integers(0, 2**31),
    st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
)  # fmt: skip
STEPS = st.builds(wire.Step, IDS, IDS, st.lists(st.text()), st.lists(TOLD, max_size=3))
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(5, 1000),
    temperature=st.floats(0, 3),
    top_k=st.integers(-1, 50),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3),
    logit_bias=st.dictionaries(
        st.integers(0, 1000), FLOATS.filter(lambda x: abs(x) < 1e30), max_size=3
    ),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1),
    bad_words=st.lists(st.text(min_size=1), max_size=2),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, 1000), max_size=3),
    skip_special_tokens=st.booleans(),
    json_schema=st.none() | st.just({"type": "object"}),
)


def as_lists(packed):
    """What is read has lists in place of tuples."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed))


ADDS = st.builds(
    wire.Add, st.integers(0, 2**40), IDS, PARAMS.map(wire.packed_params).map(as_lists), st.text(), st.integers(-5, 5),
    st.booleans(), IDS,
)  # fmt: skip


@given(PARAMS)
def test_params_come_back(params):
    assert wire.unpacked_params(as_lists(wire.packed_params(params))) == params


def test_params_that_are_default_take_no_room():
    assert wire.packed_params(SamplingParams()) == {}
    assert wire.packed_params(SamplingParams(seed=3)) == {"seed": 3}
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(wire._DEFAULTS) == names  # each has a default
    with pytest.raises(ValueError, match=r"SamplingParams: .*'tail'"):
        wire.unpacked_params({"tail": 1})
    with pytest.raises(ValueError, match=r"SamplingParams.top_k is 9223372036854775808: expected"):
        wire.packed_params(SamplingParams(top_k=2**63))


@settings(max_examples=60)
@given(
    st.lists(st.lists(STEPS, max_size=2), max_size=3),
    st.lists(st.lists(ADDS | st.builds(wire.Abort, st.integers(0, 2**40)) | st.builds(wire.Ask), max_size=3), max_size=3),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_messages_come_back_however_the_bytes_are_cut(steps, asked, random):
    for lists, read in ((steps, wire.read_to_client), (asked, wire.read_to_engine)):
        data = b"".join(map(wire.frame, lists))
        frames, found, start = wire.Frames(), [], 0
        while start < len(data):
            end = start + random.choice([1, 3, 17, 1000])
            found += [read(payload) for payload in frames.feed(data[start:end])]
            start = end
        assert found == lists


@given(TOLD, TOLD)
def test_what_came_later_is_joined(first, later):
    tokens, text = first.token_ids + later.token_ids, first.text + later.text
    kept = list(later.token_ids)
    first.join(later)
    assert (first.token_ids, first.text, first.finish_reason) == (tokens, text, later.finish_reason)
    assert later.token_ids == kept


def payload(message):
    (one,) = wire.Frames().feed(wire.frame(message))
    return one


def test_a_handshake_tells_what_does_not_fit():
    hello = wire.Hello(wire.PROTOCOL, "r1", INFO)
    assert wire.read_hello(payload(hello)) == hello
    with pytest.raises(wire.WireError, match=f"version 7 .*: expected {wire.PROTOCOL}"):
        wire.read_hello(payload(wire.Hello(7)))
    with pytest.raises(wire.WireError, match="not you"):
        wire.read_hello(payload(wire.Hello(wire.PROTOCOL, refused="not you")))
    for read, bytes_ in (
        (wire.read_hello, b"GET / HTTP/1.1"),
        (wire.read_to_engine, payload([wire.Step()])),
        (wire.read_to_client, b""),
    ):
        with pytest.raises(wire.WireError, match="none of ours"):
            read(bytes_)
    with pytest.raises(wire.WireError, match=r"a message has \d+ bytes: expected"):
        list(wire.Frames().feed(b"/STTP"))
