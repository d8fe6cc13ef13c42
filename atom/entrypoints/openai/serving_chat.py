"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from atom.entrypoints.openai.chat_messages import check_template_kwargs, normalize_messages
from atom.entrypoints.openai.generation import Generation, collect
from atom.entrypoints.openai.logprobs import chat_logprobs
from atom.entrypoints.openai.protocol import ChatRequest
from atom.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
)
from atom.entrypoints.openai.serving import Serving
from atom.entrypoints.openai.streaming import DONE, event


class ChatServing(Serving[ChatRequest]):
    """A conversation's next message, ``n`` times."""

    body_type = ChatRequest
    id_prefix = "chatcmpl"
    prompt_field = "messages"

    def tokenize(self, body: ChatRequest) -> list[list[int]]:
        """The conversation as the chat template writes it; tools are left out when ``tool_choice`` is ``none``."""
        messages = normalize_messages(body.messages)
        kwargs = check_template_kwargs(body.chat_template_kwargs)
        tools = body.tools if body.tools and body.tool_choice != "none" else None
        add_prompt = body.add_generation_prompt is not False
        return [self.engine.tokenizer.apply_chat_template(messages, add_prompt, tools, **kwargs)]

    async def answer(self, generation: Generation, body: ChatRequest) -> ChatCompletion:
        """The whole response."""
        head = self.head(generation)
        choices = [
            ChatChoice(
                index=output.index,
                message=ChatMessage(output.text),
                logprobs=chat_logprobs(output, body.top_logprobs or 0),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in await collect(generation)
        ]
        return ChatCompletion(**head, choices=choices, usage=generation.usage())

    async def chunks(self, generation: Generation, body: ChatRequest) -> AsyncGenerator[bytes, None]:
        """The response as events: each choice's role, its text as it comes, perhaps the usage, ``[DONE]``."""
        head = self.head(generation)
        no_usage = None if body.include_usage else UNSET
        encode = msgspec.json.Encoder().encode

        def chunk(choice: ChatChunkChoice) -> bytes:
            return event(encode(ChatChunk(**head, choices=[choice], usage=no_usage)))

        waiting = [
            chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))
            for index in range(generation.job.num_choices)
        ]
        async with aclosing(generation.steps()) as steps:
            async for step in steps:
                for index, part in step:
                    if not part.text and part.finish_reason is None and part.logprobs is None:
                        continue
                    choice = ChatChunkChoice(index, Delta(content=part.text))
                    if part.logprobs:
                        choice.logprobs = chat_logprobs(part, body.top_logprobs or 0)
                    if part.finish_reason is not None:
                        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                    waiting.append(chunk(choice))
                if waiting:
                    yield b"".join(waiting)
                    waiting.clear()
        if body.include_usage:
            waiting.append(event(encode(ChatChunk(**head, choices=[], usage=generation.usage()))))
        yield b"".join([*waiting, DONE])
