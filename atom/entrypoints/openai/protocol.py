"""What clients may send. Fields that OpenAI or its servers know and that are not declared here are ignored.

Ignored are those without an effect on the answer (``user``, ``store``, ``metadata``, ``service_tier``,
``parallel_tool_calls`` ...). Fields that would change the answer and are not supported are declared in
:class:`Unsupported` and refused, so nobody gets an answer that looks as if they had been obeyed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from atom.entrypoints.openai.errors import bad_request
from atom.sampling_params import SamplingParams

# Integers cross to the engine core as 64-bit numbers.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, msgspec.Meta(min_length=1)]
T = TypeVar("T")


class StreamOptions(msgspec.Struct):
    """``include_usage``: send one more chunk with the usage before the stream ends."""

    include_usage: bool | None = None


class Unsupported(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and cannot be obeyed; see :data:`HARMLESS` for values that mean "off"."""

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    best_of: Any = None
    continue_final_message: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    logits_processors: Any = None
    modalities: Any = None
    priority: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tool_choice: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


HARMLESS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}


class GenerationRequest(Unsupported, kw_only=True):
    """What both endpoints share. A field that is null is as if it were not there."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's sampling fields
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    # Extensions that other servers of open models share
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Salt | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what cannot be obeyed. Raises :class:`ApiError` naming the field."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        best_of = self.best_of
        if best_of is not None and best_of != (self.n or 1):
            raise bad_request(f"best_of={best_of} is not supported; leave it out or make it equal to n", "best_of")
        for name in Unsupported.__struct_fields__:
            value = getattr(self, name)
            if value is not None and name != "best_of" and value not in HARMLESS.get(name, ()):
                raise bad_request(f"{name} is not supported by this server; leave it out", name, "unsupported")

    def sampling_params(self, vocab_size: int, **extra: Any) -> SamplingParams:
        """Settings for the engine; ``extra`` are those that the endpoints spell differently.

        Raises :class:`ApiError` naming the field and a value that works.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        try:
            params = SamplingParams(**given, **extra)
            params.check_vocabulary(vocab_size)
        except ValueError as error:
            match = re.match(r"\w+", str(error))
            raise bad_request(str(error), match.group() if match else None) from None
        return params


_SAMPLING_FIELDS = [name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__]


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``/v1/chat/completions``.

    ``tools`` reach the chat template; calls that the model writes stay in the answer's text.
    """

    messages: list[dict[str, Any]]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what cannot be obeyed. Raises :class:`ApiError` naming the field."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")

    def to_params(self, vocab_size: int) -> SamplingParams:
        """Settings for the engine. Raises :class:`ApiError`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(vocab_size, max_tokens=limit, logprobs=logprobs)


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``/v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: Int64 | None = 16
    logprobs: Int64 | None = None
    add_special_tokens: bool | None = None

    def to_params(self, vocab_size: int) -> SamplingParams:
        """Settings for the engine. Raises :class:`ApiError`."""
        return self.sampling_params(vocab_size, max_tokens=self.max_tokens, logprobs=self.logprobs)


def decode_body(data: bytes, kind: type[T]) -> T:
    """A request's body as ``kind``. Raises :class:`ApiError` (400) for anything else, NaN and lone surrogates too."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        place = re.search(r" - at `(?:key )?[^`]*?\$\.?([A-Za-z_]\w*)?", str(error))
        missing = re.search(r"missing required field `(\w+)`", str(error))
        found = missing or place
        raise bad_request(f"the request cannot be used: {error}", found.group(1) if found else None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise bad_request(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias") from None
