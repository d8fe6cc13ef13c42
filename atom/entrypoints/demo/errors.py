"""What ends a demo."""

from __future__ import annotations


class DemoError(RuntimeError):
    """Something went wrong; the text says what, for a person."""
