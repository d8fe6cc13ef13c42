"""How compute threads wait for work."""

from __future__ import annotations

import os


def yield_idle_cores() -> None:
    """Let compute threads sleep while they wait for work; a user's own choice stands. Takes effect before torch loads.

    By default they spin, and where anything else runs on the machine a forward then takes several times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
