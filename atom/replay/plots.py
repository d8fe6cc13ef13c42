"""Drawings of a replay; needs matplotlib (``pip install atom-engine[plot]``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.model_engine.placement import RungKind
from atom.replay.report import tokens_text
from atom.replay.results import Replay

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises ValueError where nothing could be drawn to ``path``: no such folder, another kind of file, no matplotlib."""
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        raise ValueError(f"--plot={path}: use the name of a file that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot={path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot={path}: may not be written; use another file or folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"--plot={path}: needs matplotlib: pip install 'atom-engine[plot]'") from None


def write(path: Path, replays: Sequence[Replay], results: Sequence[dict[str, Any]]) -> None:
    """Draw hit rate against pool size for each policy and, for the last replay of each, its pool over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = {replay.policy: replay for replay in replays}
    figure, axes = pyplot.subplots(
        1 + len(last), 1, figsize=(9, 4 * (1 + len(last))), squeeze=False, layout="constrained"
    )
    _draw_rates(axes[0][0], results)
    for axis, replay in zip(axes[1:, 0], last.values(), strict=True):
        _draw_pool(axis, replay)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_rates(axis: Any, results: Sequence[dict[str, Any]]) -> None:
    for policy in dict.fromkeys(result["policy"] for result in results):
        points = [(r["pool_tokens"] / 1e6, r["hit_rate"] * 100) for r in results if r["policy"] == policy]
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=policy)
    axis.axhline(results[0]["ideal_hit_rate"] * 100, linestyle="--", color="grey", label="ideal")
    axis.set(xlabel="pool, tokens of KV", ylabel="hit rate, % of prompt tokens", title=results[0]["trace"])
    pools = sorted({result["pool_tokens"] for result in results})
    if len(pools) > 1:
        axis.set_xscale("log", base=2)
        axis.set_xticks([pool / 1e6 for pool in pools], [tokens_text(pool) for pool in pools])
    axis.legend()


def _draw_pool(axis: Any, replay: Replay) -> None:
    hours = [sample.time / 3600 for sample in replay.samples]
    layers = {"KV live": [s.live for s in replay.samples], "KV cached": [s.cached for s in replay.samples]}
    layers |= {f"images, {kind.value}": [s.images[kind] for s in replay.samples] for kind in RungKind}
    scale = replay.block_size / 1e6
    axis.stackplot(hours, [[pages * scale for pages in values] for values in layers.values()], labels=list(layers))
    axis.set(xlabel="hours", ylabel="pool, million tokens of KV", title=f"{replay.policy}: who holds the pool")
    axis.legend(loc="lower right")
