"""A model's tokenizer and chat template, read from its folder and never from a network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SENTENCEPIECE_SPACE = "\u2581"
_TOOL_CALL = re.compile("tool[_\u2581]call|python_tag", re.IGNORECASE)


def check_unicode(name: str, text: str) -> None:
    """Raise ``ValueError`` if ``text`` holds a lone surrogate, which no encoding of Unicode text can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(f"{name} has a lone surrogate \\u{code:04x} at character {error.start}") from None


class Tokenizer:
    """Text to token ids and back. Encoding and decoding may run in several threads at once.

    ``vocab_size`` counts the tokenizer's own tokens; the model's embedding may have more rows.
    ``eos_token_ids`` end a text; ``special_token_ids`` are the ones that ``skip_special_tokens`` leaves out;
    ``tool_call_token_ids`` are those that an answer has only around a tool call.
    Raises ``ValueError`` if the folder holds no tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"no usable tokenizer in {folder}: it is not a folder")
        from transformers import AutoTokenizer

        try:
            self._hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no usable tokenizer in {folder}: {error}") from error
        # The engine checks lengths against the context; the tokenizer's own limit would only warn.
        self._hf.model_max_length = 10**30
        # The first call switches off a truncation stored with the tokenizer. Later calls only read, so threads may
        # share the tokenizer.
        self._hf.encode("")
        self.vocab_size: int = len(self._hf)
        self.special_token_ids = frozenset(
            token for token, added in self._hf.added_tokens_decoder.items() if added.special
        )
        self.eos_token_ids: list[int] = self._read_eos_token_ids()
        self.tool_call_token_ids: list[int] = [
            token
            for token, added in self._hf.added_tokens_decoder.items()
            if _TOOL_CALL.search(added.content) is not None
        ]
        self._token_texts: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in it become single ids.

        add_special_tokens: also add what the model puts around plain text, such as a leading BOS. Raises
        ``ValueError`` on a lone surrogate.
        """
        check_unicode("the text", text)
        return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. Bytes that form no character become U+FFFD, unknown ids become nothing."""
        known = [token for token in token_ids if 0 <= token < self.vocab_size]
        if self._hf.is_fast:
            return self._hf.backend_tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text, special tokens included."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            piece = self._hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None
            if piece is not None and piece.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
                text = " " + text
            self._token_texts[token_id] = text
        return text

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. Keywords beyond ``tools`` reach the template as variables.

        Raises ``ValueError`` if the model has no chat template or the template refuses the messages.
        """
        if not self._hf.chat_template and "chat_template" not in kwargs:
            raise ValueError("the model has no chat template; send a plain prompt instead of messages")
        try:
            text = self._hf.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except Exception as error:  # a template is a program of the model's and may fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        check_unicode("the conversation", text)
        return self._hf.encode(text, add_special_tokens=False)

    def _read_eos_token_ids(self) -> list[int]:
        generation = self._read_json("generation_config.json").get("eos_token_id")
        if generation is not None:
            return _as_list(generation)
        config = self._read_json("config.json")
        config_eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        return list(dict.fromkeys(_as_list(self._hf.eos_token_id) + _as_list(config_eos)))

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
