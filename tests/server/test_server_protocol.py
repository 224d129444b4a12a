"""The API over a scripted engine: forms of answers, streams, errors, and who may ask."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from fakes import MODEL, TEMPLATE, ScriptedClient, ask, asking, events_of, make_service, raw

from tbo_jax.server import completions

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def client(folder):
    return ScriptedClient(folder)


@pytest.fixture
def service(client):
    return make_service(client)


def refusal(service, path, body, status=400, **options):
    answer = ask(service, path, body, **options)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Chat


def test_chat(service, client):
    answer = ask(service, CHAT, {"model": "model", "messages": HELLO, "n": 2})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion" and body["model"] == "model"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"] == {
            "role": "assistant", "content": "In the beginning", "refusal": None,
        }  # fmt: skip
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    (asked,) = client.asked
    expected = service.prompts.tokenizer.encode("user: Hello\n", False)
    assert asked.prompt_token_ids == expected
    assert body["usage"] == {
        "prompt_tokens": len(expected),
        "completion_tokens": 32,
        "total_tokens": len(expected) + 32,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert asked.params.max_new_tokens == 1024 - len(expected)
    assert asked.params.temperature == 1.0 and asked.params.seed is not None
    assert not asked.tells_tokens and not client.open and not service.queue.tokens


def test_chat_stream(service, client):
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = ask(service, CHAT, body | {"max_completion_tokens": 5})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events_of(answer.text)
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *middle, end = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in middle) == "In th"
    assert end["delta"] == {} and end["finish_reason"] == "length"
    assert client.asked[0].tells_tokens and not client.open and not service.queue.tokens


def test_chat_logprobs(service):
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    content = ask(service, CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[0]["logprob"] == -0.5 and len(content[0]["top_logprobs"]) == 2
    token = service.texts.text(ord("I"))
    assert content[0]["token"] == token and bytes(content[0]["bytes"]).decode() == token
    chunks = events_of(ask(service, CHAT, body | {"stream": True}).text)[:-1]
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for one in told for entry in one["content"]] == content


def test_messages_have_parts_and_roles(service, client):
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    assert ask(service, CHAT, {"messages": messages}).status_code == 200
    text = service.prompts.tokenizer.decode(client.asked[0].prompt_token_ids, False)
    assert text == "system: ab\nassistant: \ntool: 7\n"


def test_all_options_reach_the_engine(service, client):
    options = dict(
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"5": -100}, seed=7,
        stop=["x", "y"], temperature=0.3, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1,
        min_tokens=2, stop_token_ids=[3], ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, allowed_token_ids=[1, 2, 5], bad_words=["z"], n=2,
    )  # fmt: skip
    body = {"messages": HELLO, "max_tokens": 9, "priority": 3, "user": "u", **options}
    assert ask(service, CHAT, body).status_code == 200
    (asked,) = client.asked
    assert asked.priority == 3 and asked.params.max_new_tokens == 9
    expected = options | {
        "stop": ("x", "y"), "stop_token_ids": (3,), "bad_words": ("z",),
        "allowed_token_ids": (1, 2, 5), "logit_bias": ((5, -100.0),),
    }  # fmt: skip
    assert {name: getattr(asked.params, name) for name in options} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}}},
            ("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, ("choice", ("a", "b"))),
        ({"guided_json": {"type": "object"}}, ("json_schema", '{"type": "object"}')),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ],
)  # fmt: skip
def test_structured_output(service, client, given, expected):
    assert ask(service, CHAT, {"messages": HELLO, **given}).status_code == 200
    assert client.asked[0].params.structure == expected


# Completions


def test_completion_of_several_prompts(service, client):
    ids = service.prompts.tokenizer.encode("And God said")
    body = {"prompt": ["In the", "And"], "n": 2, "max_tokens": 4}
    answer = ask(service, TEXT, body).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"In t"}
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert ask(service, TEXT, {"prompt": ids}).json()["choices"][0]["text"] == client.text
    assert client.asked[-1].prompt_token_ids == ids and client.asked[-1].params.max_new_tokens == 16
    assert len(ask(service, TEXT, {"prompt": [ids, ids]}).json()["choices"]) == 2
    events = events_of(ask(service, TEXT, body | {"stream": True}).text)
    texts = dict.fromkeys(range(4), "")
    for chunk in events[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"In t"} and not client.open


def test_offsets_count_a_character_of_several_tokens_once(service):
    prompt = "\N{WOMAN} \N{CJK UNIFIED IDEOGRAPH-65E5} God"
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = ask(service, TEXT, body).json()["choices"]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert tokens[0].startswith("bytes:") and len(tokens) > len(prompt)
    assert offsets == sorted(offsets) and offsets[-2:] == [len(prompt), len(prompt) + 1]
    assert offsets[tokens.index(" God")] == prompt.index(" God")


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_too_many_completions_are_refused_before_they_are_made(service, path, monkeypatch):
    monkeypatch.setattr(completions, "_Choice", None)
    body = {"prompt": "a"} if path == TEXT else {"messages": HELLO}
    error = refusal(service, path, body | {"n": 10**6, "max_tokens": 1})
    assert error["param"] == "n" and "at most 128" in error["message"]


def test_echo_and_logprobs(service, client):
    prompt = "In the beginning God"
    ids = service.prompts.tokenizer.encode(prompt)
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = ask(service, TEXT, body).json()["choices"]
    assert choice["text"] == prompt + "In"
    form = choice["logprobs"]
    assert {len(values) for values in form.values()} == {len(ids) + 2}
    assert form["token_logprobs"] == [None, *[-2.0] * (len(ids) - 1), -0.5, -0.5]
    assert form["top_logprobs"][0] is None and len(form["top_logprobs"][-1]) == 2
    assert "".join(form["tokens"][: len(ids)]) == prompt
    assert form["text_offset"][0] == 0 and form["text_offset"][len(ids)] == len(prompt)
    (choice,) = ask(service, TEXT, body | {"max_tokens": 0}).json()["choices"]
    assert choice["text"] == prompt and len(choice["logprobs"]["tokens"]) == len(ids)
    body = {"prompt": ids, "max_tokens": 2, "echo": True, "stream": True}
    chunks = events_of(ask(service, TEXT, body).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt + "In"
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    assert "no stream" in refusal(service, TEXT, body | {"stream": True})["message"]
    client.info = type(client.info)(client.info.folder, 1024, 2048, 20, False)
    assert "--prompt-logprobs" in refusal(service, TEXT, body)["message"]


# Responses


def test_responses(service, client):
    body = {
        "input": "Hello",
        "instructions": "Be kind",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
    }
    answer = ask(service, "/v1/responses", body).json()
    assert answer["object"] == "response" and answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "In th"
    assert answer["usage"]["output_tokens"] == 5 and answer["metadata"] == {"a": "b"}
    text = service.prompts.tokenizer.decode(client.asked[0].prompt_token_ids)
    assert text == "system: Be kind\nuser: Hello\n"
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    events = events_of(ask(service, "/v1/responses", {"input": items, "stream": True}).text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events if e["type"] != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in events if "delta" in e) == client.text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == client.text
    for name, value in {"store": True, "previous_response_id": "x", "include": ["x"]}.items():
        error = refusal(service, "/v1/responses", {"input": "x", name: value})
        assert error["param"] == name and error["code"] == "unsupported_parameter"


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": HELLO, "banana": 1}, "banana", "not a field"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y", "not a field"),
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (CHAT, {"messages": [{"role": "boss", "content": ""}]}, "messages[0].role", "boss"),
        (CHAT, {"messages": HELLO, "n": "x"}, "n", "int"),
        (CHAT, {"messages": HELLO, "n": 0}, "n", "1 or more"),
        (CHAT, {"messages": HELLO, "n": 10**9}, "n", "at most 128"),
        (CHAT, {"messages": HELLO, "n": 10**30}, "n", ""),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature", "0 or more"),
        (CHAT, {"messages": HELLO, "top_p": 7}, "top_p", "(0, 1]"),
        (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias", "token id"),
        (CHAT, {"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias", "-100"),
        (CHAT, {"messages": HELLO, "logit_bias": {str(i): 1 for i in range(9999)}}, "logit_bias", "at most"),
        (CHAT, {"messages": HELLO, "stop": ["x"] * 100}, "stop", "at most"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "1 or more"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, "audio", "not supported"),
        (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities[0]", "audio"),
        (CHAT, {"messages": HELLO, "store": True}, "store", "nothing is stored"),
        (CHAT, {"messages": HELLO, "stream_options": {}}, "stream_options", "needs stream"),
        (TEXT, {"prompt": "x", "stream_options": {}}, "stream_options", "needs stream"),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 0}, "prompt_logprobs", "echo"),
        (CHAT, {"messages": HELLO, "guided_regex": "a" * 300_000}, "regex", "at most 262144"),
        (CHAT, {"messages": HELLO, "cache_salt": "x"}, "cache_salt", "API key"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_json": {}}, None, "exclude"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]", "image_url"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "messages", "already"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (TEXT, {"prompt": "x", "best_of": 3}, "best_of", "same as n"),
        (TEXT, {"prompt": []}, "prompt", "from 1"),
        (TEXT, {"prompt": [1, "x"]}, "prompt", "among"),
        (TEXT, {"prompt": ""}, None, "no tokens"),
        (TEXT, {"prompt": [1] * 1024}, None, "less than the context"),
        (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens", "0 or more"),
        (TEXT, b"{", None, "no JSON"),
        (TEXT, b"[]", None, "object"),
        (TEXT, b'{"prompt": "\xff"}', None, "UTF-8"),
        (TEXT, b'{"prompt": "\\ud800"}', None, "no JSON"),
        (CHAT, b'{"messages": [], "metadata": {"a":' + b"[" * 100_000, None, "deep"),
        ("/tokenize", {}, "prompt", "one of them"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "vocabulary of 2048"),
        ("/detokenize", {"tokens": [0, 2048]}, "tokens", "vocabulary of 2048"),
    ],
)  # fmt: skip
def test_refused_by_name(service, client, path, body, param, said):
    error = refusal(service, path, body)
    assert said in error["message"] and len(error["message"]) < 700
    assert error["type"] == "invalid_request_error"
    if param is not None and error["param"] is not None:
        assert error["param"] == param
    else:
        assert param is None or path == CHAT
    assert not client.asked and not service.queue.tokens


def test_other_statuses(service, client):
    error = refusal(service, CHAT, {"messages": HELLO, "model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found" and "gpt-9" in error["message"]
    refusal(service, "/v1/nothing", {}, 404)
    refusal(service, "/health", {}, 405)
    assert ask(service, CHAT).status_code == 405
    refusal(service, CHAT, {"messages": HELLO}, 415, headers={"content-type": "text/csv"})
    refusal(service, CHAT, {"messages": HELLO}, 415, headers={"content-encoding": "gzip"})
    client.refuse = ValueError("SamplingParams.logprobs is 30; expected at most 20")
    assert refusal(service, CHAT, {"messages": HELLO, "stream": True})["param"] == "logprobs"
    client.refuse = RuntimeError("gone")
    refusal(service, CHAT, {"messages": HELLO}, 503)
    service.draining = True
    refusal(service, CHAT, {"messages": HELLO}, 503)
    refusal(service, "/ready", None, 503)
    assert ask(service, "/health").status_code == 200


def test_a_stream_that_fails_ends_with_an_error(service, client):
    client.fails_after = 3
    *chunks, error, done = events_of(ask(service, CHAT, {"messages": HELLO, "stream": True}).text)
    assert done == "[DONE]" and "gone" in error["error"]["message"]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(texts) == "In t" and not client.open and not service.queue.tokens
    events = events_of(ask(service, "/v1/responses", {"input": "x", "stream": True}).text)
    assert events[-1]["type"] == "response.failed"


# Bounds


def test_the_queue_is_bounded(client):
    client.delay = 0.01
    service = make_service(client)
    service.queue.most = 200
    prompt = {"prompt": "In the", "max_tokens": 90}

    async def main():
        async with asking(service) as http:
            answers = await asyncio.gather(*(http.post(TEXT, json=prompt) for _ in range(4)))
        return answers

    answers = asyncio.run(main())
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 429, 429]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert not service.queue.tokens
    # One that is alone is taken, however much it needs.
    assert ask(service, TEXT, {"prompt": "In", "n": 9, "max_tokens": 90}).status_code == 200


def test_bodies_are_bounded(client):
    from tbo_jax.server.settings import Limits

    service = make_service(client, limits=Limits(max_body_bytes=1000))
    assert refusal(service, TEXT, {"prompt": "x" * 2000}, 413)["code"] == "request_too_large"

    async def chunked():
        async def parts():
            for _ in range(100):
                yield b"x" * 100

        async with asking(service) as http:
            return await http.post(TEXT, content=parts())

    assert asyncio.run(chunked()).status_code == 413


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_ends_its_request(service, client, stream, path):
    client.delay = 0.01
    body = {"messages": HELLO} if path == CHAT else {"prompt": ["a", "b"]}

    async def main():
        async def leave_soon():
            await asyncio.sleep(0.05)
            assert client.open
            return True

        if stream:
            await raw(service, path, body | {"stream": True}, lambda m: "body" in m)
        else:
            import fakes

            waiting = asyncio.create_task(_leave(fakes, service, path, body))
            await leave_soon()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert not client.open and not service.queue.tokens

    asyncio.run(asyncio.wait_for(main(), 30))
    assert client.asked


async def _leave(fakes, service, path, body):
    await fakes.raw(service, path, body, lambda m: False)


def test_a_slow_reader_is_not_read_for(service, client):
    """What an engine gives is asked for only as fast as it is sent."""
    client.text = "x" * 500
    sent = []

    async def main():
        async def slow(message):
            sent.append(message)
            if len(sent) > 5:
                await asyncio.sleep(0.05)
                return len(sent) > 8
            return False

        await raw(service, TEXT, {"prompt": "a", "stream": True, "max_tokens": 400}, slow)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert len(sent) < 20 and not client.open


# Who may ask


def test_keys(client):
    service = make_service(client, keys=("alpha", "beta"))
    error = refusal(service, CHAT, {"messages": HELLO}, 401)
    assert error["code"] == "invalid_api_key"
    for wrong in ("Bearer gamma", "Basic alpha", "alpha", "Bearer ", "Bearer alphaé"):
        headers = {"authorization": wrong.encode("latin-1")}
        refusal(service, CHAT, {"messages": HELLO}, 401, headers=headers)
        refusal(service, "/stats", None, 401, headers=headers)
    for path in ("/health", "/ready", "/version", "/metrics", "/", "/docs", "/openapi.json"):
        assert ask(service, path).status_code == 200
    for key in ("alpha", "beta", "alpha"):
        headers = {"authorization": f"Bearer {key}"}
        assert ask(service, CHAT, {"messages": HELLO}, headers=headers).status_code == 200
    first, second, third = [asked.cache_salt for asked in client.asked]
    assert first == third != second and first and "alpha" not in first


def test_origins(client):
    options = {"origin": "https://a.org", "access-control-request-method": "POST"}

    async def preflight(service):
        async with asking(service) as http:
            return await http.options(CHAT, headers=options)

    answer = asyncio.run(preflight(make_service(client, keys=("k",))))
    assert "access-control-allow-origin" not in answer.headers
    allowed = make_service(client, keys=("k",), allowed_origins=(("https://a.org",),))
    answer = asyncio.run(preflight(allowed))
    assert answer.headers["access-control-allow-origin"] == "https://a.org"


def test_request_ids_and_logs(service, client, caplog):
    secret = "a-word-of-a-prompt"
    with caplog.at_level("DEBUG"):
        answer = ask(service, TEXT, {"prompt": secret}, headers={"x-request-id": "my-id.1"})
        assert answer.headers["x-request-id"] == "my-id.1"
        answer = ask(service, TEXT, {"prompt": secret, "n": 0}, headers={"x-request-id": "a b"})
        assert answer.headers["x-request-id"] not in ("", "a b")
    assert client.asked[0].request_id.startswith("my-id.1-")
    assert "my-id.1 POST /v1/completions 200" in caplog.text and secret not in caplog.text


# What needs no engine


def test_models_tokens_and_pages(service):
    models = ask(service, "/v1/models").json()
    assert [card["id"] for card in models["data"]] == ["model"]
    assert ask(service, "/v1/models/model").json()["max_model_len"] == 1024
    assert ask(service, "/v1/models/x").status_code == 404
    told = ask(service, "/tokenize", {"prompt": "In the", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert ask(service, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "In the"}
    chat = ask(service, "/tokenize", {"messages": HELLO}).json()["tokens"]
    assert ask(service, "/detokenize", {"tokens": chat}).json() == {"prompt": "user: Hello\n"}
    assert ask(service, "/version").json()["version"]
    spec = ask(service, "/openapi.json").json()
    assert "messages" in spec["components"]["schemas"]["ChatRequest"]["properties"]
    for path in ("/", "/docs"):
        page = ask(service, path)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http" not in page.text.replace("http://www.w3.org", "").replace("http-equiv", "")
    stats = ask(service, "/stats").json()
    assert stats["cache_usage"] == 0.25 and stats["running"] == 0 and stats["has_chat_template"]


def test_metrics(service):
    ask(service, TEXT, {"prompt": "In", "stream": True, "max_tokens": 3})
    page = ask(service, "/metrics").text
    label = 'model_name="model"'
    for line in (
        f"vllm:time_to_first_token_seconds_count{{{label}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{label}}} 2.0",
        f"vllm:num_requests_running{{{label}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{label}}} 0.25",
        f"vllm:prefix_cache_hits_total{{{label}}} 2.0",
        f"vllm:generation_tokens_total{{{label}}} 5.0",
        f'vllm:request_success_total{{finished_reason="length",{label}}} 1.0',
        f'tbo:steps_total{{{label},strategy="split"}} 1.0',
        f'tbo:steps_total{{{label},strategy="expert_chunks"}} 1.0',
        f'tbo:steps_total{{{label},strategy="whole"}} 1.0',
        f"tbo:device_wait_seconds_total{{{label}}} 0.25",
        'tbo:http_responses_total{path="/v1/completions",status="200"} 1.0',
    ):
        assert line in page, page
