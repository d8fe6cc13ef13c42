"""Token ids to text, a few tokens at a time, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 trailing bytes, or tokens, can still become one.
_MAX_INCOMPLETE = 3
# Tokens kept as left context of the next decode, and the window sizes at which to shorten it.
_KEEP = 4
_TRIM_ABOVE = 12
_FORCE_ABOVE = 48


class TextDecoder(Protocol):
    """What detokenizing needs of a tokenizer."""

    vocab_size: int
    special_token_ids: Collection[int]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Text of a growing token list, handed out as it becomes final.

    The joined results of :meth:`feed` and :meth:`flush` are the text of all tokens decoded at once. A step decodes a
    window of bounded length, so it costs what its new tokens cost. An incomplete character waits for its remaining
    bytes.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._dropped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._text = ""  # of the window
        self._emitted = 0  # characters of it already handed out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that no later token can change and that was not returned before."""
        vocab_size = self._tokenizer.vocab_size
        # Tokens without text would fill the window and leave no context in it.
        visible = [token for token in token_ids if token < vocab_size and token not in self._dropped]
        if not visible:
            return ""
        self._window += visible
        self._text = self._decode(self._window)
        final = self._final_text()
        delta = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        # Broken bytes look like an incomplete character; a long run of them must not grow the window.
        complete = not self._text.endswith(_REPLACEMENT)
        if len(self._window) > (_TRIM_ABOVE if complete else _FORCE_ABOVE):
            self._trim()
        return delta

    def flush(self) -> str:
        """Return what was held back, as the text ends here."""
        delta = self._text[self._emitted :]
        self._emitted = len(self._text)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _final_text(self) -> str:
        """What no later token can change in the window's text: all but an incomplete character at the end.

        A byte-level decoder shows that as one U+FFFD. A byte-fallback decoder shows one for each byte of the whole run
        of bytes, complete characters before it included; without the last bytes it shows them right.
        """
        settled = self._text.rstrip(_REPLACEMENT)
        if len(settled) == len(self._text):
            return settled
        for incomplete in range(1, _MAX_INCOMPLETE + 1):
            text = self._decode(self._window[:-incomplete])
            if not text.endswith(_REPLACEMENT):
                return max(settled, text, key=len)
        return max(settled, self._text[:-_MAX_INCOMPLETE], key=len)

    def _trim(self) -> None:
        """Shorten the window at a token border that is a character border, so that later texts stay the same."""
        last = len(self._window) - _KEEP
        for cut in range(last, last - _MAX_INCOMPLETE - 1, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            # Inside a character the halves decode to more text than the whole. Between words a decoder may put a
            # space that neither half has.
            between = len(self._text) - len(head) - len(tail)
            fits = between == 0 or (between == 1 and self._text[len(head)] == " ")
            emitted = self._emitted - len(head) - between
            if fits and emitted >= 0 and self._text.startswith(head) and self._text.endswith(tail):
                self._window, self._text, self._emitted = self._window[cut:], tail, emitted
                return
        if len(self._window) > _FORCE_ABOVE:
            tail = self._decode(self._window[last:])
            emitted = max(0, self._emitted - len(self._text) + len(tail))
            self._window, self._text, self._emitted = self._window[last:], tail, emitted


@dataclass(frozen=True, slots=True)
class StopResult:
    """``text`` may be shown now; ``matched`` is the stop string that ended the text, or None."""

    text: str
    matched: str | None = None


class StopChecker:
    """Finds stop strings in text that arrives in pieces, wherever the borders of the pieces are.

    The stop string that is complete first wins; of two complete at the same character, the longer. Text that may be
    the start of a stop string is held back until it is known not to be: exactly the longest such suffix.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include_stop_str_in_output
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Append text; after a match, the rest of ``text`` is dropped and nothing more may be fed."""
        text = self._held + text
        self._held = ""
        end, matched = min(
            ((at + len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0),
            key=lambda found: found[0],
            default=(0, None),
        )
        if matched is not None:
            return StopResult(text[: end if self._include else end - len(matched)], matched)
        held = self._start_of_stop(text)
        self._held = text[len(text) - held :]
        return StopResult(text[: len(text) - held])

    def flush(self) -> str:
        """Return what was held back, as the text ends here without a match."""
        held, self._held = self._held, ""
        return held

    def _start_of_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that a stop string starts with."""
        longest = min(len(text), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
