"""The HTTP server that speaks OpenAI's completion protocol."""

from atom.entrypoints.openai.app import build_app
from atom.entrypoints.openai.server import serve

__all__ = ["build_app", "serve"]
