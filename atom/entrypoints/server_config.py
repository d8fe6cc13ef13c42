"""Settings of the HTTP server itself; everything else is the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config import ConfigError, setting
from atom.utils.envs import LOG_LEVEL

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PORTS = range(2**16)


@dataclass
class ServerConfig:
    """Where to listen and what to log. Raises :class:`ConfigError` on a value that cannot be used."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: every network of this machine.", metavar="ADDRESS")
    port: int = setting(8000, "Port to listen on; 0: a free one.", metavar="N")
    log_level: str | None = setting(None, f"Least severe message to log; default: ${LOG_LEVEL.name}.", LOG_LEVELS)

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host", self.host, "use an address such as 127.0.0.1")
        if self.port not in PORTS:
            raise ConfigError("port", self.port, f"use 0 for a free port, or up to {PORTS[-1]}")
        self.log_level = read_log_level(self.log_level or LOG_LEVEL.get())


def read_log_level(text: str) -> str:
    """A level's name in capitals. Raises :class:`ConfigError` for anything that is no level."""
    level = text.upper()
    if level not in LOG_LEVELS:
        raise ConfigError("log_level", text, f"use one of {', '.join(LOG_LEVELS)}")
    return level
