"""The settings as they took effect, for people and for programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from atom.config import EngineConfig


def effective_settings(config: EngineConfig, info: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by name. ``info``, what the engine says of itself, wins over what was asked for."""
    return asdict(config) | dict(info)


def settings_table(settings: Mapping[str, Any], given: Collection[str]) -> Table:
    """Settings as a table; those whose flag was ``given`` are marked."""
    table = Table(title="Settings in effect", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("set by", no_wrap=True)
    for name, value in settings.items():
        table.add_row(name, "-" if value is None else str(value), "flag" if name in given else "")
    return table
