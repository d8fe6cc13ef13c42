"""How to sample a continuation: every knob of one request, validated when it is made."""

from __future__ import annotations

import math

import msgspec

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, kw_only=True):
    """Sampling settings of one request. Raises ``ValueError`` naming the field, its value and one that works.

    temperature: 0 is greedy. top_k: 0 (or -1) keeps every token. min_p: share of the best token's probability.
    presence/frequency_penalty: subtracted per token already *generated*; repetition_penalty: multiplies or divides
    logits of tokens in prompt or output. stop: strings that end the text and are not part of it. logprobs: number of
    alternatives a position (0: the sampled token alone). max_tokens None: up to the context's end. seed: makes a
    sampled request repeatable whatever runs beside it. n: continuations of the prompt.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # None means "as usual" to people, whatever a field's type.
        for name, usual in _USUAL.items():
            if getattr(self, name) is None:
                setattr(self, name, type(usual)(usual))
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        _require(1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 for all tokens, or a count")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, name, value, "from -2 to 2")
        value = self.repetition_penalty
        _require(_finite(value) and value > 0, "repetition_penalty", value, "above 0; 1 is off")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most {self.max_tokens}")
        value = self.logprobs
        _require(value is None or 0 <= value <= MAX_LOGPROBS, "logprobs", value, f"from 0 to {MAX_LOGPROBS}")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        for token, bias in self.logit_bias.items():
            _require(_finite(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "from -100 to 100")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside ``[0, vocab_size)`` in ``stop_token_ids`` and ``logit_bias``."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                _require(0 <= token < vocab_size, name, token, f"a token id from 0 to {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


_USUAL: dict[str, float | list | dict] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "logit_bias": {},
}
"""Fields that have no None of their own."""


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(condition: bool, name: str, value: object, works: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} cannot be used; it must be {works}")
