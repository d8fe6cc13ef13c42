"""What an engine would be with given settings, found out without loading weights or taking memory."""

from __future__ import annotations

from typing import Any

import psutil

from atom.config import FREE_MEMORY_SHARE, EngineConfig
from atom.model_engine.cache_layout import CacheGeometry, CacheLayout
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.null_runner import NullRunner
from atom.model_engine.sizing import size_arenas


class PlannedRunner(NullRunner):
    """Has the geometry of the model in ``config.model`` and none of its weights."""

    def __init__(self, config: EngineConfig) -> None:
        import torch

        from atom.model_loader.loader import DTYPES, load_config
        from atom.models.registry import model_class

        model = load_config(config.model)
        dtype = DTYPES[config.dtype] if config.dtype != "auto" else model.dtype or torch.float32
        layout = CacheLayout.of(model_class(model.architectures).cache_spec(model, dtype), config.block_size)
        budget = int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
        sizing = size_arenas(config, layout, model.max_position_embeddings, budget)
        super().__init__(config.block_size, sizing.num_blocks, sizing.num_slots, sizing.max_model_len, model.vocab_size)
        self.dtype = str(dtype).removeprefix("torch.")
        self.geometry, self.sizing = CacheGeometry.of(layout), sizing


def planned_info(config: EngineConfig) -> dict[str, Any]:
    """What the engine would say of itself. Raises ``ValueError`` where it would refuse to start for its settings.

    On a GPU the default memory budget depends on the device's free memory; the host's stands in for it here.
    """
    return EngineCore(config, PlannedRunner(config)).info()
