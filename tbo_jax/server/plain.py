"""What needs no engine: names of models, token ids and their text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tbo_jax.server.conversation import template_messages, template_tools
from tbo_jax.server.errors import json_response, refused
from tbo_jax.server.protocol import DetokenizeRequest, TokenizeRequest
from tbo_jax.server.service import Service


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tbo_jax",
        "root": service.names[0],
        "max_model_len": service.client.info.max_context,
    }


async def models(service: Service, request: Request) -> Response:
    """The names of the model."""
    data = [_card(service, name) for name in service.names]
    return json_response({"object": "list", "data": data})


async def model(service: Service, request: Request) -> Response:
    """One of them."""
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


async def tokenize(service: Service, body: TokenizeRequest) -> Response:
    """Token ids of a text or a conversation, in vLLM's form."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "or messages: expected one of them")
    if body.messages is not None:
        ids = await service.prompts.encode_chat(
            template_messages(body.messages),
            template_tools(body.tools),
            body.chat_template_kwargs,
            body.add_generation_prompt,
        )
    else:
        special = body.add_special_tokens is not False
        ids = await service.prompts.encode(body.prompt or "", special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.client.info.max_context,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.prompts.tokenizer.token(i, False) for i in ids]
    return json_response(answer)


async def detokenize(service: Service, body: DetokenizeRequest) -> Response:
    """Text of token ids, in vLLM's form."""
    service.check_model(body.model)
    vocabulary = service.client.info.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocabulary:
            raise refused("tokens", f"has {token!r:.80}: outside the vocabulary of {vocabulary}")
    return json_response({"prompt": await service.prompts.decode(body.tokens)})
