#!/usr/bin/env python
"""Whether later prompts of a trace have room for the answers before them: the evidence for ``--answers echoed``."""

from __future__ import annotations

import sys
from pathlib import Path

from atom.replay.trace import TraceRequest
from atom.replay.traces import read_trace

NEAR = 64


def main(paths: list[str]) -> None:
    """Print, for each trace, what share of extending prompts grew by at least the answer, and by it within 64 tokens."""
    for path in paths:
        trace = read_trace(Path(path))
        following: dict[int, TraceRequest] = {}
        growths = []
        for request in reversed(trace.requests):
            later = following.get(request.blocks[-1]) if request.blocks else None
            if later is not None:
                growths.append(later.prompt_tokens - request.prompt_tokens - request.output_tokens)
            following.update(dict.fromkeys(request.blocks, request))
        enough = sum(growth >= 0 for growth in growths) / len(growths)
        near = sum(abs(growth) <= NEAR for growth in growths) / len(growths)
        print(
            f"{path}: {len(growths)} prompts extended; by the answer or more {enough:.1%}, within {NEAR} tokens {near:.1%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
