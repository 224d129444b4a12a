"""Calls of tools and what models think: each family's form, whole, streamed, and cut anywhere."""

from __future__ import annotations

import json
import shutil

import openai
import pytest
from fakes import MODEL, TEMPLATE, ScriptedClient, ask, events_of, make_service
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import serving

from tbo_jax.server.deltas import Delta, Message, joined
from tbo_jax.server.forced_calls import ForcedCall, ForcedCalls
from tbo_jax.server.harmony import HarmonyParser
from tbo_jax.server.tags import CALL_FORMS, TagParser

ARGUMENTS = {"city": 'Ur {of} "the" <b>', "days": [1, {"x": None}]}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})
JSON = json.dumps(ARGUMENTS)
SCHEMAS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
TEXTS = {
    "hermes": f"<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
    "ernie": f"<think>Hm.</think><response>\nLet me see.\n</response>\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
    "deepseek": "<think>Hm.</think>Let me see.<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<think>Hm.</think>Let me see.<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.weather:{i}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        for i in range(2)
    )
    + "<|tool_calls_section_end|>",
    "glm": "<think>Hm.</think>\nLet me see.\n"
    + 2 * (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{ARGUMENTS['city']}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>{json.dumps(ARGUMENTS['days'])}</arg_value>\n</tool_call>\n"
    ),
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Let me see."
    + 2 * (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{JSON}"
    )
    + "<|call|>",
}  # fmt: skip


def parser_of(name, **options):
    if name == "harmony":
        return HarmonyParser(True)
    return TagParser(thinks=True, form=CALL_FORMS[name], schemas=SCHEMAS, **options)


def parsed(parser, pieces) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


def message_of(deltas):
    message = Message()
    for delta in deltas:
        message.add(delta, "id")
    return message.form()


@pytest.mark.parametrize("name", TEXTS)
def test_families(name):
    message = message_of(parsed(parser_of(name), [TEXTS[name]]))
    assert message["reasoning_content"] == "Hm." and message["content"] == "Let me see."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["weather"] * 2
    assert [json.loads(function["arguments"]) for function in functions] == [ARGUMENTS] * 2
    if name == "kimi":
        assert [c["id"] for c in message["tool_calls"]] == [
            "functions.weather:0",
            "functions.weather:1",
        ]


MARKS = sorted({
    *(mark for form in CALL_FORMS.values() for mark in (form.begin, form.end, *form.around)),
    "<think>", "</think>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "<|call|>",
    "to=functions.f", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", '{"name": "f", "arguments": {"a": 1}}', " ", "</tool_call",
    '{"name": "f", "arguments": {"a":', "function", "```json\n", "functions.f:0", "\n", "x", "<", "<|", "\\",
    '"', "[", "{", "}", "]", ",", ":",
})  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TEXTS)),
    st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    st.integers(0, 10**9),
    st.booleans(),
    st.data(),
)
def test_any_cut_gives_the_same(name, noise, at, thinking, data):
    text = TEXTS[name]
    at %= len(text) + 1
    text = text[:at] + noise + text[at:]
    options = {} if name == "harmony" else {"starts_thinking": thinking}
    whole = parsed(parser_of(name, **options), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parsed(parser_of(name, **options), pieces) == whole
    assert parsed(parser_of(name, **options), list(text)) == whole


STREAMED = sorted(set(TEXTS) - {"glm"})  # whose arguments are JSON in the text


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_are_told_as_they_come(name):
    """Letter by letter, but for what may be the mark that ends the call."""
    parser, told = parser_of(name), ""
    text = TEXTS[name]
    begin = text.index('"city"') - 1
    assert begin == text.index("{", begin)  # where the arguments begin
    deltas = [delta for letter in text[: begin + 40] for delta in parser.push(letter)]
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["weather"]
    told = "".join(delta.text for delta in deltas if delta.kind == "arguments")
    assert 40 - 30 < len(told) <= 40 and text[begin:].startswith(told)


def test_a_call_that_breaks_off_is_told_as_far_as_it_goes():
    for end in ("", "</tool_call>"):
        deltas = parsed(parser_of("hermes"), [f"<tool_call>{CALL[:60]}{end}"])
        assert deltas[0] == Delta("call", "weather")
        assert deltas[1:] == [Delta("arguments", CALL[:60][CALL.index('{"city') :])]
    # What is after the arguments is none of theirs; brackets in a text are no brackets.
    call = '{"name": "f", "arguments": {"a": "}\\"}"}, "x": {}}'
    deltas = parsed(parser_of("hermes"), [f"<tool_call>{call}</tool_call>"])
    assert deltas == [Delta("call", "f"), Delta("arguments", '{"a": "}\\"}"}')]
    # In another order it is read when it is whole.
    parser = parser_of("hermes")
    assert parser.push('<tool_call>{"arguments": {"a": 1}, "name": "f"}') == []
    assert parser.push("</tool_call>") == [Delta("call", "f"), Delta("arguments", '{"a": 1}')]


def test_what_is_no_call_is_content():
    parser = parser_of("hermes", starts_thinking=True)
    deltas = parsed(parser, ["Hm.</think> a <tool_call>{x}</tool_call> b <tool_call>{"])
    assert deltas[0] == Delta("reasoning", "Hm.")
    assert "".join(delta.text for delta in deltas[1:]) == "a<tool_call>{x}</tool_call>b<tool_call>{"
    plain = "no marks, but < and <tool and  spaces \n"
    assert parsed(parser_of("hermes"), list(plain)) == [Delta("content", plain)]
    assert parsed(HarmonyParser(True), list("plain text")) == [Delta("content", "plain text")]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_forced_calls(data):
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
    arguments = data.draw(st.lists(st.dictionaries(st.text(), value), min_size=1, max_size=3))
    calls = [{"name": f'f"{i}', "arguments": one} for i, one in enumerate(arguments)]
    text = json.dumps(
        calls, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    functions = [
        call["function"] for call in message_of(parsed(ForcedCalls(), pieces))["tool_calls"]
    ]
    assert [f["name"] for f in functions] == [call["name"] for call in calls]
    assert [json.loads(f["arguments"]) for f in functions] == arguments
    assert parsed(ForcedCall("f"), ["", "{", "}"]) == [Delta("call", "f"), Delta("arguments", "{}")]


# Through the API

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
BODY = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
PATH = "/v1/chat/completions"


@pytest.fixture
def client(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson if tools }}" + TEMPLATE)
    return ScriptedClient(tmp_path)


def test_calls_through_the_api(client):
    client.text = TEXTS["hermes"]
    service = make_service(client)
    (choice,) = ask(service, PATH, BODY).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    assert len(choice["message"]["tool_calls"]) == 2
    assert all(call["id"].startswith("call-") for call in choice["message"]["tool_calls"])
    prompt = service.prompts.tokenizer.decode(client.asked[0].prompt_token_ids)
    assert '"name": "weather"' in prompt
    events = events_of(ask(service, PATH, BODY | {"stream": True}).text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    indices = [call["index"] for call in calls]
    assert indices == sorted(indices) and set(indices) == {0, 1} and len(indices) > 10
    for index in (0, 1):
        parts = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(parts)) == ARGUMENTS
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # Without tools, or told to call none, it is text.
    (choice,) = ask(service, PATH, BODY | {"tool_choice": "none"}).json()["choices"]
    assert choice["finish_reason"] == "stop" and "<tool_call>" in choice["message"]["content"]
    assert '"name"' not in service.prompts.tokenizer.decode(client.asked[-1].prompt_token_ids)


def test_forced_calls_through_the_api(client):
    client.text = '[{"name":"weather","arguments":{"x":3}}]'
    service = make_service(client)
    for body in (BODY, BODY | {"stream": True}):
        answer = ask(service, PATH, body | {"tool_choice": "required"})
        assert answer.status_code == 200
        kind, schema = client.asked[-1].params.structure
        assert kind == "json_schema" and json.loads(schema)["minItems"] == 1
    events = events_of(answer.text)[:-1]
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"x":3}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    client.text = '{"x":3}'
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(service, PATH, BODY | {"tool_choice": named}).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"x":3}'}
    assert json.loads(client.asked[-1].params.structure[1]) == TOOLS[0]["function"]["parameters"]


def test_what_does_not_go_together(client):
    service = make_service(client, tool_call_parser="none")
    named = {"type": "function", "function": {"name": "other"}}
    for more, param in (
        ({}, "tools"),
        ({"tool_choice": named}, "tool_choice.function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ):
        answer = ask(service, PATH, BODY | more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    with pytest.raises(ValueError, match="--tool-call-parser is 'x': expected one of hermes"):
        make_service(client, tool_call_parser="x")


def test_a_prompt_may_begin_the_thought(client, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + "<think>\n")
    client.text = "Hm.</think>Yes"
    (choice,) = ask(make_service(client), PATH, {"messages": BODY["messages"]}).json()["choices"]
    assert choice["message"]["content"] == "Yes" and choice["message"]["reasoning_content"] == "Hm."
    body = {"messages": BODY["messages"], "include_reasoning": False}
    (choice,) = ask(make_service(client), PATH, body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Yes", "refusal": None}


@pytest.mark.parametrize("parser", ["think", "harmony"])
def test_thoughts_of_responses_are_items(client, parser):
    client.text = TEXTS["harmony"] if parser == "harmony" else "<think>Hm.</think>Let me see."
    service = make_service(client, reasoning_parser=parser)
    answer = ask(service, "/v1/responses", {"input": "x"}).json()
    thought, message = answer["output"][:2]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Hm.")
    assert message["content"][0]["text"].startswith("Let me see.")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert client.asked[0].params.skip_special_tokens == (parser == "think")
    events = events_of(ask(service, "/v1/responses", {"input": "x", "stream": True}).text)
    texts = {
        kind: "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    }
    assert texts["reasoning_text"] == "Hm." and texts["output_text"].startswith("Let me see.")


FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMAS["weather"]}


def test_calls_of_responses_with_the_official_client(client, tmp_path):
    """Whole and streamed, and the items go back as they came, with what the calls gave."""
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson if tools }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    client.text = TEXTS["hermes"]
    service = make_service(client, reasoning_parser="think", tool_call_parser="hermes")
    with (
        serving(service) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official,
    ):
        asked = dict(model="model", input="Where?", tools=[FUNCTION])
        whole = official.responses.create(**asked)
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert [json.loads(item.arguments) for item in whole.output[2:]] == [ARGUMENTS] * 2
        assert (whole.status, whole.output_text) == ("completed", "Let me see.")
        assert whole.tools[0].name == "weather"
        with official.responses.stream(**asked) as stream:
            events = list(stream)
        assert [e.sequence_number for e in events] == list(range(len(events)))
        for kind in ("response.output_item.added", "response.output_item.done"):
            assert [e.output_index for e in events if e.type == kind] == [0, 1, 2, 3]
        told = [e for e in events if e.type == "response.function_call_arguments.delta"]
        for index in (2, 3):
            text = "".join(e.delta for e in told if e.output_index == index)
            assert json.loads(text) == ARGUMENTS
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert [json.loads(e.arguments) for e in done] == [ARGUMENTS] * 2
        last = stream.get_final_response()
        assert [item.type for item in last.output] == kinds
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in last.output[2:]
        ]
        asked["input"] = [{"role": "user", "content": "Where?"}, *last.output, *results]
        official.responses.create(**asked)
        text = service.prompts.tokenizer.decode(client.asked[-1].prompt_token_ids)
        messages = [json.loads(line) for line in text.splitlines()[:4]]
        assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["reasoning_content"] == "Hm."
        assert messages[1]["content"] == "Let me see."
        calls = messages[1]["tool_calls"]
        assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS] * 2
        assert [one["tool_call_id"] for one in messages[2:]] == [call["id"] for call in calls]
        # Told to call one.
        client.text = '{"city":"Ur"}'
        choice = {"type": "function", "name": "weather"}
        (call,) = official.responses.create(**asked, tool_choice=choice).output
        assert (call.name, call.arguments) == ("weather", client.text)
        with pytest.raises(openai.BadRequestError, match="'other': no tool"):
            official.responses.create(**asked, tool_choice=choice | {"name": "other"})
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].call_id is missing"):
            official.responses.create(model="model", input=[{"type": "function_call_output"}])
