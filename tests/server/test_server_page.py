"""The page at / in a real browser: a chat that streams and stops, and what the engine does."""

from __future__ import annotations

import shutil

import pytest
from browser import PROGRAM, browser
from fakes import MODEL, TEMPLATE, ScriptedClient, make_service
from serving import serving

from tests.engine.engines import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium"),
]


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    return tmp_path


SEND = "document.getElementById('text').value = 'Hello'; document.getElementById('send').click()"
REPLY = "document.querySelector('.assistant:last-child')?.textContent"


def test_a_chat(folder, tmp_path_factory):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    client = ScriptedClient(folder, "In the beginning God created", delay=0.02)
    with (
        serving(make_service(client, keys=("k",))) as (address, _),
        browser(tmp_path_factory.mktemp("browser")) as page,
    ):
        page.call("Page.navigate", url=address + "/")
        page.wait_for("document.getElementById('state')?.textContent.includes('API key')")
        page.run("document.getElementById('key').value = 'k'")
        page.wait_for("document.title == 'model'")
        page.errors.clear()  # those of the answers 401
        page.run(SEND)
        page.wait_for(f"{REPLY} == 'In the beginning God created'")
        page.wait_for("!document.getElementById('send').disabled")
        assert page.run("document.getElementById('cache-text').textContent") == "25 %"
        assert page.run("document.getElementById('hits').textContent") == "29 % of prompts"
        # The conversation goes on, and a stop ends the request.
        client.text = "x" * 1000
        page.run(SEND)
        page.wait_for("document.getElementById('messages').textContent.includes('xxx')")
        assert client.open
        page.run("document.getElementById('stop').click()")
        page.wait_for("!document.getElementById('send').disabled")
        wait_for(lambda: not client.open)
        assert not page.errors
        expected = "user: Hello\nassistant: In the beginning God created\nuser: Hello\n"
        prompt = client.asked[-1].prompt_token_ids
        tokenizer = make_service(client).prompts.tokenizer
        assert tokenizer.decode(prompt) == expected
        assert client.asked[-1].params.temperature == 0.7


def test_a_model_without_a_chat_template(folder, tmp_path_factory):
    client = ScriptedClient(folder, " in the land")
    with (
        serving(make_service(client)) as (address, _),
        browser(tmp_path_factory.mktemp("browser")) as page,
    ):
        page.call("Page.navigate", url=address + "/")
        page.wait_for("document.getElementById('text')?.placeholder.includes('no chat template')")
        page.run(SEND)
        page.wait_for(f"{REPLY} == 'Hello in the land'")
        assert not page.errors
