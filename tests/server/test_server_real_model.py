"""The official client and `tbo-jax serve` with SmolLM2-135M-Instruct, in float32.

    TBO_REAL_MODEL=FOLDER pytest -m real_model tests/server

Greedy text is compared with that of transformers, which is also that of `LLM`
(tests/test_real_model.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.server.serve_command import served

pytestmark = pytest.mark.real_model
EXPECTED = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2_135m_instruct.json").read_text("utf-8")
)
OPTIONS = (
    *("--dtype", "float32", "--devices", "1", "--max-context", "1024", "--max-sequences", "8"),
    *("--max-batched-tokens", "64", "--served-model-name", "smol", "--tool-call-parser", "hermes"),
)
GREEDY = dict(model="smol", temperature=0, max_tokens=64)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = os.environ.get("TBO_REAL_MODEL")
    if not model:
        pytest.skip("TBO_REAL_MODEL is not set")
    log = tmp_path_factory.mktemp("server") / "log"
    with served(model, log, *OPTIONS) as (_, address):
        base = f"{address}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=300) as client:
            yield client


def of_kind(kind: str):
    return [row for row in EXPECTED if row["kind"] == kind]


def test_completions(client):
    rows = of_kind("plain")
    done = client.completions.create(prompt=[row["prompt"] for row in rows], **GREEDY)
    assert [choice.text for choice in done.choices] == [row["text"] for row in rows]
    assert [one.finish_reason for one in done.choices] == [row["finish_reason"] for row in rows]
    assert done.usage.completion_tokens == sum(len(row["token_ids"]) for row in rows)
    ids = [row["prompt_token_ids"] for row in rows]
    texts = dict.fromkeys(range(len(rows)), "")
    for chunk in client.completions.create(prompt=ids, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [row["text"] for row in rows]


def test_chat(client):
    for row in of_kind("chat"):
        done = client.chat.completions.create(messages=row["prompt"], **GREEDY)
        (choice,) = done.choices
        assert choice.message.content == row["text"]
        assert choice.finish_reason == row["finish_reason"]
        assert done.usage.prompt_tokens == len(row["prompt_token_ids"])
        stream = client.chat.completions.create(messages=row["prompt"], stream=True, **GREEDY)
        deltas = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(deltas) == row["text"] and len(deltas) > 2
        if all(isinstance(one["content"], str) for one in row["prompt"]):
            answer = client.responses.create(
                model="smol", input=row["prompt"], temperature=0, max_output_tokens=64
            )
            assert answer.output_text == row["text"]


def test_tools(client):
    function = {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}
    asked = dict(
        messages=[{"role": "user", "content": "What is the weather in Paris in Celsius?"}],
        tools=[{"type": "function", "function": function}],
        **GREEDY,
    )
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        done = client.chat.completions.create(tool_choice=choice, **asked).choices[0]
        (call,) = done.message.tool_calls
        assert (done.finish_reason, call.function.name) == ("tool_calls", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "C"}
        with client.chat.completions.stream(tool_choice=choice, **asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments


def test_structured_output(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER, "strict": True}}
    messages = [{"role": "user", "content": "Where is it warm? Answer in JSON."}]
    done = client.chat.completions.create(messages=messages, response_format=form, **GREEDY)
    assert done.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(done.choices[0].message.content), WEATHER)
    done = client.completions.create(
        prompt="The capital of France is", extra_body={"guided_choice": ["Rome", "Paris"]}, **GREEDY
    )
    assert done.choices[0].text == "Paris"
