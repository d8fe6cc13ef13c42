"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """``"1.5GiB"``, ``"800M"``, ``4096`` to bytes. Raises ValueError on anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write e.g. 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: int) -> str:
    """Bytes as ``"1.50 GiB"``, with the largest binary unit that leaves a number of at least 1."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
