"""The bodies of requests. A field that is not here is refused by name.

Those of OpenAI's API come first in each, then those that vLLM has beside them. What can only have
one value here is typed so that the decoder refuses the others; `unsupported` names the fields that
are known and cannot be had, so that their error says more than that of an unknown one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Seed = int | None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class StreamOptions(_Body, kw_only=True):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM
    include_obfuscation: bool = False  # nothing is padded here


class JsonSchemaFormat(_Body, kw_only=True):
    """The schema of a `response_format`."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(_Body, kw_only=True):
    """Which texts are allowed."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Body, kw_only=True):
    """vLLM's form of the same, one of them at most."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Sampling(_Body, kw_only=True):
    """What all bodies that generate have."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: Seed = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None  # says nothing here
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known, and refused.
    cache_salt: Any = None
    prompt_logprobs: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None


class CompletionRequest(_Sampling, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]  # a text, token ids, or a list of either
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    add_special_tokens: bool = True  # vLLM
    suffix: str | None = None  # refused


class FunctionCall(_Body, kw_only=True):
    """A call that the model made: its arguments are JSON text."""

    name: str
    arguments: str = ""


class ToolCall(_Body, kw_only=True):
    """A call in a message of an assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ContentPart(_Body, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None


class ChatMessage(_Body, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What the official client gives back of an assistant's message, and nobody needs.
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None


class FunctionTool(_Body, kw_only=True):
    """What a function is called, for what, and with which arguments (JSON schema)."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body, kw_only=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(_Body, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(_Body, kw_only=True):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(_Sampling, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # They say nothing here.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    # vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    echo: bool | None = None
    include_reasoning: bool = True
    # Known, and refused.
    store: Any = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    prompt_cache_retention: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None


class TokenizeRequest(_Body, kw_only=True):
    """`/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Body, kw_only=True):
    """`/detokenize`: token ids."""

    model: str | None = None
    tokens: list[int]


class ResponseText(_Body, kw_only=True):
    """The `format` of `text` in `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseTextOptions(_Body, kw_only=True):
    """The `text` of `/v1/responses`."""

    format: ResponseText | None = None
    verbosity: Any = None


class InputPart(_Body, kw_only=True):
    """A part of an input message; only text is understood."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    refusal: str | None = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None


class ResponseTool(_Body, kw_only=True):
    """A tool of `/v1/responses`; functions are the only kind."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseNamedTool(_Body, kw_only=True):
    """The tool that is to be called."""

    type: Literal["function"]
    name: str


class ResponseReasoning(_Body, kw_only=True):
    """How much the model is to think, if its template knows that."""

    effort: str | None = None
    summary: Any = None


class InputItem(_Body, kw_only=True):
    """An item of the input: a message, a call of a function, what that gave, or a thought."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    # Of calls, and of what they gave.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    # Of thoughts, whose text is the content.
    summary: list[Any] | None = None
    encrypted_content: None = None


class ResponsesRequest(_Body, kw_only=True):
    """`/v1/responses`."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: ResponseTextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: int | None = None
    tools: list[ResponseTool] | None = None
    reasoning: ResponseReasoning | None = None
    include: list[str] | None = None
    # Known, and refused.
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    prompt_cache_retention: Any = None
    context_management: Any = None


# Of each body, what is known and cannot be had, and why.
UNSUPPORTED: dict[type[msgspec.Struct], dict[str, str]] = {
    CompletionRequest: {"suffix": "models here continue a text, and fill no gap in one"},
    ChatRequest: {
        "store": "nothing is stored",
        "audio": "only text is understood and generated",
        "prediction": "",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "web_search_options": "",
        "verbosity": "",
        "prompt_cache_retention": "the prefix cache keeps what there is room for",
        "chat_template": "a server has one, see --chat-template",
        "continue_final_message": "",
        "documents": "",
        "mm_processor_kwargs": "only text is understood",
        "echo": "",
    },
    ResponsesRequest: {
        "store": "nothing is stored",
        "background": "nothing is stored",
        "conversation": "nothing is stored: give the messages in input",
        "previous_response_id": "nothing is stored: give the messages in input",
        "prompt": "nothing is stored: give the text in input",
        "max_tool_calls": "",
        "prompt_cache_retention": "the prefix cache keeps what there is room for",
        "context_management": "",
        "include": "",
        "top_logprobs": "use /v1/chat/completions",
    },
}
OF_ALL = {
    "cache_salt": "the server sets it, one for each API key",
    "prompt_logprobs": "use echo with logprobs of /v1/completions",
    "spaces_between_special_tokens": "",
    "truncate_prompt_tokens": "a prompt that is too long is refused",
    "use_beam_search": "",
    "length_penalty": "there is no beam search",
    "logits_processors": "",
}
