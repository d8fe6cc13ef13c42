"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from atom.entrypoints.openai.errors import bad_request
from atom.entrypoints.openai.generation import Generation, collect
from atom.entrypoints.openai.logprobs import completion_logprobs
from atom.entrypoints.openai.protocol import CompletionRequest
from atom.entrypoints.openai.responses import Completion, CompletionChoice
from atom.entrypoints.openai.serving import Serving
from atom.entrypoints.openai.streaming import DONE, event
from atom.outputs import CompletionOutput


class CompletionServing(Serving[CompletionRequest]):
    """Continuations of one or several prompts, each ``n`` times."""

    body_type = CompletionRequest
    id_prefix = "cmpl"
    prompt_field = "prompt"

    def tokenize(self, body: CompletionRequest) -> list[list[int]]:
        """Prompts as ids; texts get what the model puts around plain text unless ``add_special_tokens`` is false."""
        special = body.add_special_tokens is not False
        return [
            self.engine.tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in split_prompts(body.prompt)
        ]

    async def answer(self, generation: Generation, body: CompletionRequest) -> Completion:
        """The whole response."""
        head = self.head(generation)
        choices = [_choice(output.index, output, 0)[0] for output in await collect(generation)]
        return Completion(**head, choices=choices, usage=generation.usage())

    async def chunks(self, generation: Generation, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
        """The response as events: text as it comes, perhaps the usage, ``[DONE]``."""
        head = self.head(generation)
        no_usage = None if body.include_usage else UNSET
        encode = msgspec.json.Encoder().encode
        offsets = [0] * generation.job.num_choices
        waiting: list[bytes] = []
        async with aclosing(generation.steps()) as steps:
            async for step in steps:
                for index, part in step:
                    if not part.text and part.finish_reason is None and part.logprobs is None:
                        continue
                    choice, offsets[index] = _choice(index, part, offsets[index])
                    waiting.append(event(encode(Completion(**head, choices=[choice], usage=no_usage))))
                if waiting:
                    yield b"".join(waiting)
                    waiting.clear()
        if body.include_usage:
            waiting.append(event(encode(Completion(**head, choices=[], usage=generation.usage()))))
        yield b"".join([*waiting, DONE])


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A body's ``prompt`` as a list of texts or of token ids. Raises :class:`ApiError` for any other shape."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("the prompt is empty; it must have at least one token", "prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    for item in prompt:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise bad_request("prompt must be a text, a list of token ids, or a list of either", "prompt")
    return prompt


def _choice(index: int, output: CompletionOutput, offset: int) -> tuple[CompletionChoice, int]:
    logprobs, offset = completion_logprobs(output, offset)
    return CompletionChoice(index, output.text, logprobs, output.finish_reason, output.stop_reason), offset
