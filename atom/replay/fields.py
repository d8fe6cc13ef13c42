"""Fields of JSON objects that people write, checked as they are read."""

from __future__ import annotations

import reprlib
from typing import Any


def field(holder: dict[str, Any], name: str) -> Any:
    """The field ``name``. Raises ValueError naming it if it is missing, as all readers here do on what they refuse."""
    if name not in holder:
        raise ValueError(f"the field {name!r} is missing")
    return holder[name]


def whole(holder: dict[str, Any], name: str, low: int, high: int) -> int:
    """A whole number in ``low..high``."""
    value = field(holder, name)
    if type(value) is not int or not low <= value <= high:
        raise refused(name, value, f"a whole number from {low:,} to {high:,}")
    return value


def number(holder: dict[str, Any], name: str, low: float, high: float) -> float:
    """A number in ``low..high``, whole or not."""
    value = field(holder, name)
    if type(value) not in (int, float) or not low <= value <= high:
        raise refused(name, value, f"a number from {low:,} to {high:,}")
    return float(value)


def text(holder: dict[str, Any], name: str) -> str:
    """A text."""
    value = field(holder, name)
    if not isinstance(value, str):
        raise refused(name, value, "a text")
    return value


def items(holder: dict[str, Any], name: str, what: str, *kinds: type) -> list[Any]:
    """A list of values of ``kinds``, which ``what`` describes."""
    value = field(holder, name)
    if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
        raise refused(name, value, f"a list of {what}")
    return value


def one_line(error: Exception) -> str:
    """The text of an error of somebody else's, which may have several lines."""
    return " ".join(str(error).split())


def refused(name: str, value: object, what: str) -> ValueError:
    """The error that ``name`` holds ``value`` and should hold ``what``; one line, whatever the value is."""
    return ValueError(f"the field {name!r} is {reprlib.repr(value)}: use {what}")
