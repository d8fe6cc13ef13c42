"""Command-line flags made from dataclass fields, so that a setting is written down once."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from atom.config import SHIPPED_MODEL, ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Takes flags in full only, and refuses with one line and exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """End the program with ``message``."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End the program over words that nothing here understands, naming the flag that was probably meant."""
        word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        flags = re.findall(r"--[a-z][a-z-]*", self.format_usage())
        close = difflib.get_close_matches(word, flags, n=1)
        hint = f"did you mean {close[0]}?" if close else f"{self.prog} --help lists what it takes"
        self.error(f"{word} is not understood; {hint}")


def with_hyphens(words: Sequence[str]) -> list[str]:
    """Command-line words with every long flag in kebab case; values, and words after a bare ``--``, stay as they are."""
    result: list[str] = []
    for index, word in enumerate(words):
        if word == "--":
            return [*result, *words[index:]]
        name, equals, value = word.partition("=")
        result.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return result


def flag_name(name: str) -> str:
    """``block_size`` as ``--block-size``."""
    return "--" + name.replace("_", "-")


def kind_of(item: Field[Any]) -> type:
    """What a flag's text is read as: ``bool``, ``int``, or ``str``, which :class:`EngineConfig` may read further."""
    annotation = str(item.type)
    return next(kind for kind in (bool, str, int) if kind.__name__ in annotation)


def default_text(item: Field[Any]) -> str | None:
    """The default as help and docs show it; None where the help text itself says what happens without the flag."""
    if item.default == SHIPPED_MODEL:
        return "the shipped model"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return None if item.default is None else str(item.default)


def add_settings(parser: argparse.ArgumentParser, settings: type, title: str) -> None:
    """A flag for every field of the dataclass ``settings``; only flags that are given end up in the namespace."""
    group = parser.add_argument_group(title)
    for item in fields(settings):
        default, choices = default_text(item), item.metadata["choices"]
        text = item.metadata["help"] + (f" (default: {default})" if default is not None else "")
        how: dict[str, Any]
        if kind_of(item) is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            # The value stays a text for read_settings: argparse's own messages do not say which value works.
            how = {"metavar": "{" + ",".join(choices) + "}" if choices else item.metadata["metavar"]}
        action = group.add_argument(flag_name(item.name), dest=item.name, default=argparse.SUPPRESS, **how)
        # Set afterwards: some versions of BooleanOptionalAction append the suppressed default to it.
        action.help = text.replace("%", "%%")


def read_settings(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The given flags that are fields of ``settings``, by field name. Raises :class:`ConfigError`."""
    given = vars(args)
    return {item.name: _read(item, given[item.name]) for item in fields(settings) if item.name in given}


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command-line words that :func:`read_settings` reads back."""
    return [_as_flag(name, value) for name, value in settings.items()]


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_name(name) if value else flag_name(f"no_{name}")
    return f"{flag_name(name)}={value}"


def _read(item: Field[Any], value: Any) -> Any:
    if kind_of(item) is not int:
        return value
    try:
        return int(value)
    except ValueError:
        example = item.default if isinstance(item.default, int) else 64
        raise ConfigError(item.name, value, f"use a whole number, e.g. {example}") from None
