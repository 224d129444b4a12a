"""The official client against a server with a tiny model: its text is that of `LLM`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import time

import httpx
import jsonschema
import openai
import pytest
from serving import serving

from tbo_jax import SamplingParams
from tbo_jax.server.local import LocalClient
from tbo_jax.server.service import Service
from tbo_jax.server.settings import ServerSettings
from tests.engine.engines import small_llm, wait_for
from tests.engine.structured.letters import with_letters

PROMPTS = ["and the", "in the end", "yes or no", "abc 123"]
CHAT = [{"role": "user", "content": "the name"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_letters("qwen3_moe", tmp_path_factory.mktemp("model"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    llm = small_llm(folder, max_sequences=2, num_pages=96)
    # Options are those of requests here, not of the folder.
    llm.default_sampling = dataclasses.replace(llm.default_sampling, values={})
    return llm


@pytest.fixture(scope="module")
def address(llm):
    client = LocalClient(llm)
    settings = ServerSettings(served_model_name=(("tiny",),))
    with serving(Service(client, str(llm.folder), settings, ("secret",))) as (address, _):
        yield address
    llm.engine.check()
    assert not llm.engine.has_work and not client.is_ready


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
        yield client


def texts_of(llm, prompts, **options):
    return [done.text for done in llm.generate(prompts, SamplingParams(**options))]


def test_completions(llm, client):
    expected = texts_of(llm, PROMPTS, max_new_tokens=8, ignore_eos=True)
    extra = {"ignore_eos": True}
    options = dict(model="tiny", max_tokens=8, temperature=0, extra_body=extra)
    done = client.completions.create(prompt=PROMPTS, **options)
    assert [choice.text for choice in done.choices] == expected
    assert done.usage.completion_tokens == 8 * len(PROMPTS)
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    ids = llm.tokenizer.encode(PROMPTS[0])
    done = client.completions.create(prompt=ids, **options)
    assert done.choices[0].text == expected[0]
    texts = dict.fromkeys(range(len(PROMPTS)), "")
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == expected


def test_chat(llm, client):
    (expected,) = llm.chat(CHAT, SamplingParams(max_new_tokens=6, logprobs=2))
    options = dict(model="tiny", messages=CHAT, temperature=0, logprobs=True, top_logprobs=2)
    done = client.chat.completions.create(max_completion_tokens=6, **options)
    (choice,) = done.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    told = [entry.logprob for entry in choice.logprobs.content]
    assert told == pytest.approx([known.logprob for known in expected.logprobs])
    stream = client.chat.completions.create(
        max_completion_tokens=6, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == expected.text
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_seeds_and_samples(llm, client):
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=5, n=2, ignore_eos=True)
    (first,) = llm.generate(PROMPTS[0], params)
    done = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=6, seed=5, n=2, extra_body={"ignore_eos": True}
    )
    assert [c.text for c in done.choices] == [first.text, first.others[0].text]


def test_stop_strings(llm, client):
    (text,) = texts_of(llm, PROMPTS[:1], max_new_tokens=8, ignore_eos=True)
    word = text[4:6]
    done = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=8, temperature=0, stop=[word]
    )
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].text == text[: text.index(word)]


def test_structured_output(client):
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(
            model="tiny",
            prompt="the",
            extra_body={"structured_outputs": {"regex": "(a{1000}){1000}"}},
        )
    assert told.value.status_code == 400
    schema = {
        "type": "object",
        "properties": {"end": {"type": "boolean"}, "in": {"enum": [12, None]}},
        "required": ["end", "in"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=60, seed=1, response_format=form
    )
    (choice,) = done.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)


def test_responses(llm, client):
    (expected,) = llm.chat(CHAT, SamplingParams(max_new_tokens=6))
    options = dict(model="tiny", input="the name", temperature=0, max_output_tokens=6)
    assert client.responses.create(**options).output_text == expected.text
    with client.responses.stream(**options) as stream:
        first, *_, last = list(stream)
    assert (first.type, last.type) == ("response.created", "response.incomplete")
    assert last.response.output_text == expected.text


def test_errors(client, address):
    with pytest.raises(openai.NotFoundError) as told:
        client.chat.completions.create(model="other", messages=CHAT)
    assert told.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"banana": 1})
    assert told.value.param == "banana"
    with pytest.raises(openai.BadRequestError, match="logprobs is 21"):
        client.completions.create(model="tiny", prompt="the", logprobs=21)
    other = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        other.models.list()
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_many_at_a_time_and_some_leave(llm, client, address):
    expected = texts_of(llm, PROMPTS, max_new_tokens=12, ignore_eos=True)

    def one(number):
        prompt = PROMPTS[number % len(PROMPTS)]
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        if number % 3 == 0:
            next(iter(stream))
            stream.close()
            return None
        return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(24)))
    assert texts == [
        None if number % 3 == 0 else expected[number % len(PROMPTS)] for number in range(24)
    ]
    wait_for(lambda: not llm.engine.has_work)
    metrics = httpx.get(f"{address}/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in metrics
    stats = httpx.get(f"{address}/stats", headers={"authorization": "Bearer secret"}).json()
    assert stats["running"] == stats["waiting"] == stats["queued_tokens"] == 0


def test_live_statistics(client, address):
    """They come while the engine runs, as often as otherwise."""
    headers = {"authorization": "Bearer secret"}
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    with httpx.stream("GET", f"{address}/stats?stream=1", headers=headers, timeout=30) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert 0.4 < second["time"] - first["time"] < 5 and second["steps_by_bucket"]
    stream.close()


def test_the_engine_ends_after_the_requests(llm):
    """The end of a server waits for what is under way, and refuses what comes then."""
    service = Service(LocalClient(llm), "m", ServerSettings())
    with serving(service) as (address, server):
        body = {"prompt": "the", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{address}/health")
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert not llm.engine.has_work and not service.client.is_ready
