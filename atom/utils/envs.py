"""Every ATOM_* environment variable, in one table. A flag, where there is one, wins over its variable."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: its default as text and what it does."""

    name: str
    default: str
    help: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)


LOG_LEVEL = EnvVar("ATOM_LOG_LEVEL", "INFO", "Level of atom's log: DEBUG, INFO, WARNING or ERROR.")
STATE_CHECKPOINT_DEMAND = EnvVar(
    "ATOM_STATE_CHECKPOINT_DEMAND", "1", "0: demand rungs are measured and not placed. --state-checkpoint-demand wins."
)
ALL = (LOG_LEVEL, STATE_CHECKPOINT_DEMAND)
