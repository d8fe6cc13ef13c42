#!/usr/bin/env python
"""Writes docs/configuration.md from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from atom.config import EngineConfig
from atom.entrypoints.arguments import default_text, flag_name, kind_of
from atom.entrypoints.server_config import ServerConfig
from atom.utils import envs

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

Written by `make docs` from the settings themselves; edits here are lost.

Every flag may be written with hyphens or underscores, and a switch that is on by default is turned off with `--no-` before
its name. In Python, `LLM(model, **settings)` takes the engine's settings by their names in snake case. A value that cannot
be used is refused with the flag, the value and one that works. `atom config` prints the settings as they would take
effect, and `atom serve` prints them when it starts.
"""


def render() -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            "## Engine",
            "",
            "For `atom serve`, `atom generate`, `atom demo`, `atom config`, and `LLM`.",
            "",
            *_settings(EngineConfig),
            "",
            "## Server",
            "",
            "For `atom serve`.",
            "",
            *_settings(ServerConfig),
            "",
            "## Environment",
            "",
            "A flag, where there is one, wins over its variable.",
            "",
            "| variable | default | what it does |",
            "|---|---|---|",
            *(f"| `{variable.name}` | `{variable.default}` | {_cell(variable.help)} |" for variable in envs.ALL),
            "",
        ]
    )


def _settings(settings: type) -> Iterator[str]:
    yield "| flag | default | what it does |"
    yield "|---|---|---|"
    for item in fields(settings):
        choices = item.metadata["choices"]
        value = "\\|".join(choices) if choices else item.metadata["metavar"]
        flag = f"--[no-]{flag_name(item.name)[2:]}" if kind_of(item) is bool else f"{flag_name(item.name)} {value}"
        default = default_text(item)
        shown = "" if default is None else default if item.name == "model" else f"`{default}`"
        yield f"| `{flag}` | {shown} | {_cell(item.metadata['help'])} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
