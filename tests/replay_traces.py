"""Small traces for tests of the replay, and where the shared ones are."""

from __future__ import annotations

from array import array
from pathlib import Path

from atom.model_engine.placement import Placement
from atom.replay.cost_model import CostModel
from atom.replay.geometry import Geometry
from atom.replay.simulate import ReplaySettings
from atom.replay.trace import Trace, TraceRequest, number_keys, prepare

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
BLOCK = 4
TINY = Geometry("tiny", token_bytes=1, image_bytes=8)
"""An image takes two blocks of four tokens."""

Line = tuple[int, float, str, int, int]
"""Session, time in seconds, a character a block of the prompt, tokens beyond the blocks, tokens of the answer."""


def make_trace(lines: list[Line], timed: bool = False, answers: str = "private") -> Trace:
    """A prepared trace; equal prefixes of characters are equal prefixes of blocks, in every session."""
    numbers: dict[str, int] = {}
    requests = []
    for index, (session, time, prompt, beyond, output) in enumerate(lines):
        blocks = [numbers.setdefault(prompt[:end], len(numbers)) for end in range(1, len(prompt) + 1)]
        tokens = len(prompt) * BLOCK + beyond
        requests.append(TraceRequest(index, session, time, tokens, output, array("I", blocks)))
    trace = Trace("made", BLOCK, timed, number_keys(len(numbers)), requests)
    prepare(trace, answers)
    return trace


def tiny_settings(pool_blocks: int = 1000, policy: str = "default", placement: Placement | None = None, **changes):
    """Settings of a tiny engine; ``placement`` None: the prompt's end, the answer's end and demand."""
    settings = {
        "geometry": TINY,
        "pool_tokens": pool_blocks * BLOCK,
        "seats": 2,
        "policy": policy,
        "placement": placement or Placement(BLOCK, interior_grid=BLOCK),
        "cost": CostModel(prefill_rate=1000.0, decode_step=0.01),
        "max_num_batched_tokens": 32,
    }
    return ReplaySettings(**(settings | changes))
