"""Bytes a token of KV and bytes an image, on one rank, from published model configs. The arithmetic is in docs/replay.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atom.replay import fields

BF16, FP32 = 2, 4
MOST_BYTES = 10**15
"""Of a token or an image in a file."""
LARGEST_GRID = 1_000_000
"""Tokens."""
_FILE_FIELDS = ("token_bytes", "image_bytes", "block_grid")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one rank keeps.

    ``token_bytes``: paged bytes of one token over all layers. ``image_bytes``: bytes of one checkpoint; 0 for a model
    without per-request state. ``block_grid``: a block must be a multiple of this many tokens.
    """

    name: str
    token_bytes: float
    image_bytes: int
    block_grid: int = 1

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a block of ``block_size`` tokens."""
        return round(self.token_bytes * block_size)

    def pages_per_image(self, block_size: int) -> int:
        """Pages that an image takes; 0 for a model without per-request state."""
        return -(-self.image_bytes // self.page_bytes(block_size))

    def block_size_for(self, wanted: int) -> int:
        """The smallest multiple of ``wanted`` tokens that may be a block."""
        return math.lcm(wanted, self.block_grid)


def delta_net_bytes(layers: int, key_heads: int, value_heads: int, head_dim: int, conv: int, ranks: int) -> int:
    """State of gated-delta layers: ``conv - 1`` bf16 columns of the q, k and v channels, and a fp32 matrix a value head."""
    channels = (2 * key_heads + value_heads) * head_dim // ranks
    return layers * ((conv - 1) * channels * BF16 + value_heads // ranks * head_dim * head_dim * FP32)


def attention_bytes(layers: int, kv_heads: int, head_dim: int, ranks: int) -> int:
    """bf16 keys and values of a token; a rank has at least one head."""
    return layers * 2 * max(1, kv_heads // ranks) * head_dim * BF16


def _kimi_k3(ranks: int) -> Geometry:
    # The latent KV is the same on every rank: 24 layers of 512 + 64 values.
    return Geometry("kimi-k3", 24 * 576 * BF16, delta_net_bytes(69, 96, 96, 128, 4, ranks))


def _qwen3_next(ranks: int) -> Geometry:
    return Geometry("qwen3-next", attention_bytes(12, 2, 256, ranks), delta_net_bytes(36, 16, 32, 128, 4, ranks))


def _qwen35_27b(ranks: int) -> Geometry:
    return Geometry("qwen3.5-27b", attention_bytes(16, 4, 256, ranks), delta_net_bytes(48, 16, 48, 128, 4, ranks))


def _deepseek_v4_flash(ranks: int) -> Geometry:
    # One KV head, the same on every rank. 21 layers keep a row per 4 tokens and an indexer's entry of 132 bytes beside
    # it, 20 a row per 128; the state is 44 windows of 128 rows (43 layers and the draft layer) and 21 overlap rings.
    row = 512 * BF16
    token = (21 / 4 + 20 / 128) * row + 21 / 4 * 132
    ring = 2 * 8 * (1024 + 256) * FP32
    return Geometry("deepseek-v4-flash", token, 44 * 128 * row + 21 * ring, block_grid=128)


GEOMETRIES: dict[str, tuple[int, Callable[[int], Geometry]]] = {
    "kimi-k3": (8, _kimi_k3),
    "qwen3-next": (1, _qwen3_next),
    "qwen3.5-27b": (1, _qwen35_27b),
    "deepseek-v4-flash": (8, _deepseek_v4_flash),
}
"""Name: the ranks it is usually split over, and what makes its geometry for a number of ranks."""


def read_geometry(name: str, ranks: int | None = None) -> Geometry:
    """A known geometry, one from a JSON file, or that of a model's folder; ``ranks`` None: its usual number.

    The file holds ``{"token_bytes": ..., "image_bytes": ..., "block_grid": 1}``, of one rank, in bytes and tokens.
    ValueError on what cannot be used, OSError where a file cannot be read.
    """
    if name in GEOMETRIES:
        usual, make = GEOMETRIES[name]
        count = usual if ranks is None else ranks
        if count < 1 or 16 % count:
            raise ValueError(f"--ranks={count}: use 1, 2, 4, 8 or 16")
        return make(count)
    path = Path(name)
    if ranks is not None:
        raise ValueError(f"--ranks={ranks}: {name} is the geometry of one rank already; leave --ranks out")
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".json" and path.is_file():
        return _of_file(path)
    raise ValueError(f"--model-geometry={name}: use one of {', '.join(GEOMETRIES)}, a FILE.json or a model's folder")


def _of_file(path: Path) -> Geometry:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not given.keys() <= set(_FILE_FIELDS):
            raise ValueError(f"use an object of {', '.join(_FILE_FIELDS)}")
        # From a byte a token on, a block of any size has bytes.
        token_bytes = fields.number(given, "token_bytes", 1, MOST_BYTES)
        image_bytes = fields.whole(given, "image_bytes", 0, MOST_BYTES)
        grid = fields.whole({"block_grid": 1} | given, "block_grid", 1, LARGEST_GRID)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a geometry: {error}") from error
    return Geometry(path.stem, token_bytes, image_bytes, grid)


def _of_folder(folder: Path) -> Geometry:
    import torch

    from atom.model_engine.cache_layout import CacheLayout
    from atom.model_loader.loader import load_config
    from atom.models.registry import model_class

    block = 64
    try:
        config = load_config(str(folder))
        spec = model_class(config.architectures).cache_spec(config, config.dtype or torch.float32)
        layout = CacheLayout.of(spec, block)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"--model-geometry={folder}: {fields.one_line(error)}") from error
    if layout.page_bytes < block:
        raise ValueError(f"--model-geometry={folder}: this model keeps no KV; use one with attention layers")
    return Geometry(folder.resolve().name, layout.page_bytes / block, layout.slot_bytes)
