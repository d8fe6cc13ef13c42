"""atom: an inference engine that resumes a shared prefix of a hybrid model instead of recomputing it.

Importing this package loads no torch; ``LLM`` is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom.outputs import CompletionOutput, RequestMetrics, RequestOutput
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from atom.llm import LLM

        return LLM
    raise AttributeError(f"module 'atom' has no attribute {name!r}")
