"""Placement rules by name."""

from __future__ import annotations

from atom.config import EngineConfig
from atom.model_engine.placement import Placement, snap_interval

DEFAULT = "prompt+answer+demand+interval"
ALIASES = {"default": DEFAULT, "anchor": "prompt+answer", "none": ""}
RULES = ("prompt", "answer", "demand", "interval")


def parse_placement(text: str, block_size: int) -> Placement:
    """Rules joined by ``+``, of prompt, answer, demand, interval (the engine's default step) and interval=N in tokens.

    ``default`` is all four, ``anchor`` prompt and answer, ``none`` nothing. States are read out inside chunks on the grid
    of blocks, as the engine's models give them out. Raises ValueError on anything else.
    """
    names = ALIASES.get(text, text)
    rules: dict[str, str] = {}
    for part in names.split("+") if names else ():
        name, _, value = part.partition("=")
        if name not in RULES or (value and (name != "interval" or not value.isdigit())):
            raise ValueError(f"--placement={text}: use default, anchor, none or some of {'+'.join(RULES)}, interval=N")
        rules[name] = value
    interval = None
    if "interval" in rules:
        interval = snap_interval(int(rules["interval"] or EngineConfig.state_checkpoint_interval_tokens), block_size)
    return Placement(
        block_size,
        interval,
        interior_grid=block_size,
        demand="demand" in rules,
        prompts="prompt" in rules,
        answers="answer" in rules,
        enabled=bool(rules),
    )
