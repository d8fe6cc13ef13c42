"""Chat messages as clients send them, made into what chat templates read."""

from __future__ import annotations

from typing import Any

import msgspec

from atom.entrypoints.openai.errors import ApiError, bad_request

# These belong to the server's own call of the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "conversation", "tools", "add_generation_prompt", "chat_template", "tokenize", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "continue_final_message", "padding", "truncation", "max_length"}
    | {"documents", "tokenizer_kwargs"}
)


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text as content. Raises :class:`ApiError` naming the message at fault.

    Text parts are joined with line breaks; role ``developer`` is what older models know as ``system``; arguments of
    earlier tool calls become objects, as templates expect them. Other keys stay as they are.
    """
    if not messages:
        raise bad_request("messages is empty; send at least one message", "messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The template's extra variables. Raises :class:`ApiError` for names that the server sets itself."""
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & set(kwargs or {}))
    if reserved:
        raise bad_request(f"chat_template_kwargs may not have {', '.join(reserved)}", "chat_template_kwargs")
    return kwargs or {}


def _normalize(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where} must have a role, such as 'user'")
    result = dict(message)
    if role == "developer":
        result["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = _tool_calls(calls, where)
    elif calls is not None:
        del result["tool_calls"]
    content = message.get("content")
    if content is None:
        if not calls:
            raise _wrong(f"{where} must have content")
        result["content"] = ""
    elif isinstance(content, list):
        result["content"] = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise _wrong(f"{where}.content must be text or a list of text parts")
    return result


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _wrong(f"{where} has type {kind!r}; this model reads text parts only")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where} must have text")
    return part["text"]


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls must be a list")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(f"{where}.tool_calls[{index}] must have a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, RecursionError):
                raise _wrong(f"{where}.tool_calls[{index}].function.arguments is not valid JSON") from None
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _wrong(message: str) -> ApiError:
    return bad_request(message, "messages")
