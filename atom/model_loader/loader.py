"""Loads a model from a local folder in the Hugging Face layout: config.json and safetensors files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from atom.model_ops.weights import WeightTarget, published_weights
from atom.models.causal_lm import CausalLM
from atom.models.registry import model_class

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
# Published weights that text generation does not use: multi-token prediction, vision, rotary tables.
UNUSED = re.compile(r"^mtp\.|^model\.visual\.|^visual\.|\.rotary_emb\.inv_freq$")
# Multimodal checkpoints publish the language model under a prefix of its own.
TEXT_PREFIX = re.compile(r"^model\.language_model\.|^language_model\.model\.")


def fingerprint(folder: str | Path) -> str:
    """Hex digest of a model's config.json and of the header of every weight file: names, types, shapes, places.

    Tells revisions apart that differ in shape, type or settings; two trainings of one layout look the same to it.
    """
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            length = file.read(8)
            digest.update(path.name.encode() + length + file.read(int.from_bytes(length, "little")))
    return digest.hexdigest()[:16]


def load_config(folder: str | Path) -> Any:
    """The text configuration of a model folder, with ``architectures`` and ``dtype`` as published.

    ValueError when the folder or its config.json is missing or unreadable, or the architecture is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model folder not found: {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {folder}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    names = raw.get("architectures") if isinstance(raw, dict) else 0
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"cannot read {path}: use a JSON object with architectures, a list of names")
    model_class(names)
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"cannot parse {path}: {error}") from error
    config = whole.get_text_config()
    if config is not whole:
        config.architectures = whole.architectures
        config.tie_word_embeddings = whole.tie_word_embeddings
        config.dtype = config.dtype or whole.dtype
    return config


def load_model(folder: str | Path, dtype: str = "auto", device: torch.device | str = "cpu") -> CausalLM:
    """The model with its weights.

    ``dtype``: "auto" (the configuration's), "float32", "bfloat16" or "float16". ValueError names what is wrong with the
    folder: missing, unknown, misshapen or duplicate weights, an unreadable file, an unsupported architecture.
    """
    folder = Path(folder)
    config = load_config(folder)
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
        config.dtype = DTYPES[dtype]
    config.dtype = config.dtype or torch.float32
    if config.dtype not in DTYPES.values():
        raise ValueError(f"config.json asks for {config.dtype}; supported: {', '.join(DTYPES)}")
    files = weight_files(folder)
    with torch.device(device):
        model = model_class(config.architectures)(config)
    load_weights(model, files)
    model.settle()
    return model.eval()


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those its index names, else all. ValueError when there are none or one misses."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"cannot read {index}: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{index} names files that do not exist: {', '.join(missing)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors file in {folder}")
    return files


def load_weights(model: CausalLM, files: list[Path]) -> None:
    """Copy every published weight to its place. ValueError unless each is there exactly once, in its shape."""
    stored = _stored_names(files)
    wanted = published_weights(model, stored)
    unused = {name for name in stored if UNUSED.search(name) or (model.tied and name == "lm_head.weight")}
    unknown = sorted(stored.keys() - wanted.keys() - unused)
    missing = sorted(wanted.keys() - stored.keys())
    if unknown or missing:
        problems = [_listing("unknown weights", unknown), _listing("missing weights", missing)]
        raise ValueError("checkpoint does not fit the model: " + "; ".join(filter(None, problems)))
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, stored_name) in stored.items():
        if name in wanted:
            by_file.setdefault(file, []).append((name, stored_name))
    for file, names in by_file.items():
        _load_file(file, names, wanted)


@torch.inference_mode()
def _load_file(file: Path, names: list[tuple[str, str]], targets: dict[str, WeightTarget]) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name, stored_name in names:
            try:
                targets[name].load(tensors.get_tensor(stored_name))
            except ValueError as error:
                raise ValueError(f"{stored_name} in {file} {error}") from error


def _stored_names(files: list[Path]) -> dict[str, tuple[Path, str]]:
    """Name without multimodal prefix, to the file and the name there."""
    stored: dict[str, tuple[Path, str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {file}, it may be truncated: {error}") from error
        for stored_name in names:
            name = TEXT_PREFIX.sub("model.", stored_name)
            if name in stored:
                raise ValueError(f"weight {stored_name} is stored twice: in {stored[name][0]} and {file}")
            stored[name] = (file, stored_name)
    return stored


def _listing(title: str, names: list[str], limit: int = 20) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{title}: {', '.join(names[:limit])}{more}"
