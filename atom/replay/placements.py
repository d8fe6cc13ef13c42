"""Placement rules by name."""

from __future__ import annotations

import re

from atom.config import EngineConfig
from atom.model_engine.placement import Placement, snap_interval

DEFAULT = "prompt+answer+demand+interval"
ALIASES = {"default": DEFAULT, "anchor": "prompt+answer", "none": ""}
RULES = ("prompt", "answer", "demand", "interval")
_RULE = re.compile(rf"(?P<name>{'|'.join(RULES)})(?:(?<=interval)=(?P<step>[0-9]{{1,12}}))?")


def parse_placement(text: str, block_size: int) -> Placement:
    """Rules joined by ``+``, of prompt, answer, demand, interval (the engine's default step) and interval=N in tokens.

    ``default`` is all four, ``anchor`` prompt and answer, ``none`` nothing. An interval is snapped down to the grid of
    blocks of ``block_size`` tokens, and the ladder of ``default`` goes, as in the server, where its step is less than a
    block. States are read out inside chunks on that grid, as the engine's models give them out. Raises ValueError on
    anything else, on a rule that is there twice and on an interval of less than a block.
    """
    names = ALIASES.get(text, text)
    rules: dict[str, int] = {}
    for part in names.split("+") if text != "none" else ():
        match = _RULE.fullmatch(part)
        if match is None:
            raise ValueError(f"--placement={text}: use default, anchor, none or some of {'+'.join(RULES)}, interval=N")
        name = match["name"]
        if name in rules:
            raise ValueError(f"--placement={text}: {name} is there twice; use it once")
        rules[name] = int(match["step"] or EngineConfig.state_checkpoint_interval_tokens)
    interval = None
    if "interval" in rules:
        interval = snap_interval(rules["interval"], block_size)
        if interval is None and text not in ALIASES:
            step = rules["interval"]
            raise ValueError(
                f"--placement={text}: {step} tokens are less than a block; use interval={block_size} or more"
            )
    return Placement(
        block_size,
        interval,
        interior_grid=block_size,
        demand="demand" in rules,
        prompts="prompt" in rules,
        answers="answer" in rules,
        enabled=bool(rules),
    )
