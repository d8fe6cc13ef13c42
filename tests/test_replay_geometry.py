"""Bytes of pages and images: published figures and the JSON file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atom.replay.geometry import read_geometry


def test_kimi_k3():
    """The published figures: 56,171,520 bytes an image on 8 ranks, 27,648 a token of bf16 latent KV."""
    geometry = read_geometry("kimi-k3")
    assert (geometry.image_bytes, geometry.token_bytes) == (56_171_520, 27_648)
    assert [geometry.pages_per_image(block) for block in (16, 32, 64, 128)] == [127, 64, 32, 16]
    assert read_geometry("kimi-k3", 1).image_bytes == 449_372_160
    assert read_geometry("kimi-k3", 16).image_bytes == 28_085_760
    assert read_geometry("kimi-k3", 1).token_bytes == 27_648


def test_deepseek_v4_flash():
    """The published figures: a page of 256 tokens and an image, both bf16 with a byte-wide indexer."""
    geometry = read_geometry("deepseek-v4-flash")
    assert geometry.page_bytes(256) == 1_594_624
    assert geometry.image_bytes == 7_487_488
    assert geometry.pages_per_image(256) == 5
    assert [geometry.block_size_for(n) for n in (16, 64, 128, 512)] == [128, 128, 128, 512]


def test_qwen():
    """By hand: 12 layers of 2 x 2 heads of 256, and 36 of 3 x 8192 conv values and 32 matrices of 128 x 128."""
    geometry = read_geometry("qwen3-next")
    assert geometry.token_bytes == 12 * 2 * 2 * 256 * 2 == 24_576
    assert geometry.image_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4) == 77_266_944
    assert geometry.pages_per_image(64) == 50
    # On 4 ranks each has one of the two KV heads, shared by pairs of ranks, and a quarter of the state.
    assert read_geometry("qwen3-next", 4).token_bytes == 12_288
    assert read_geometry("qwen3-next", 4).image_bytes * 4 == geometry.image_bytes
    dense = read_geometry("qwen3.5-27b")
    assert dense.token_bytes == 16 * 2 * 4 * 256 * 2 == 65_536
    assert dense.image_bytes == 48 * (3 * 10_240 * 2 + 48 * 128 * 128 * 4) == 153_944_064


def test_a_file(tmp_path: Path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"token_bytes": 100, "image_bytes": 6500}))
    geometry = read_geometry(str(path))
    assert (geometry.name, geometry.page_bytes(64), geometry.pages_per_image(64)) == ("mine", 6400, 2)
    path.write_text(json.dumps({"token_bytes": 100, "image_bytes": 0}))
    assert read_geometry(str(path)).pages_per_image(64) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "use an object of token_bytes, image_bytes, block_grid"),
        ("[" * 100_000, "recursion"),
        ("{}", "the field 'token_bytes' is missing"),
        ('{"token_bytes": 0, "image_bytes": 1}', "the field 'token_bytes' is 0: use a number from 1"),
        ('{"token_bytes": 0.001, "image_bytes": 1}', "the field 'token_bytes' is 0.001: use a number from 1"),
        ('{"token_bytes": 1e308, "image_bytes": 1}', "the field 'token_bytes' is 1e+308: use a number from 1"),
        ('{"token_bytes": NaN, "image_bytes": 1}', "the field 'token_bytes' is nan: use a number from 1"),
        ('{"token_bytes": "9", "image_bytes": 1}', "the field 'token_bytes' is '9': use a number from 1"),
        ('{"token_bytes": 1, "image_bytes": -1}', "the field 'image_bytes' is -1: use a whole number from 0"),
        ('{"token_bytes": 1, "image_bytes": 1.9}', "the field 'image_bytes' is 1.9: use a whole number from 0"),
        ('{"token_bytes": 1, "image_bytes": 1, "block_grid": 1.9}', "the field 'block_grid' is 1.9: use a whole"),
        ('{"token_bytes": 1, "image_bytes": 1, "grid": 1}', "use an object of token_bytes, image_bytes, block_grid"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json: not a geometry: .*{re.escape(message)}"):
        read_geometry(str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json in "),
        ([], "use a JSON object with architectures, a list of names"),
        ({"architectures": 5}, "use a JSON object with architectures, a list of names"),
        ({"architectures": ["None"]}, "unsupported architecture: None"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "cannot parse "),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 0}, "keeps no KV"),
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, config: object, message: str):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_geometry(str(tmp_path))
    assert str(refused.value).startswith(f"--model-geometry={tmp_path}: ")
    assert len(str(refused.value).splitlines()) == 1


def test_other_names_and_ranks_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="use one of kimi-k3"):
        read_geometry("kimi-k9")
    with pytest.raises(ValueError, match="--ranks=3: use 1, 2, 4, 8 or 16"):
        read_geometry("kimi-k3", 3)
    (tmp_path / "g.json").write_text('{"token_bytes": 1, "image_bytes": 1}')
    with pytest.raises(ValueError, match="one rank already"):
        read_geometry(str(tmp_path / "g.json"), 2)


def test_the_shipped_model():
    from atom.config import SHIPPED_MODEL
    from atom.model_loader.loader import load_config

    if not (Path(SHIPPED_MODEL) / "config.json").exists():
        pytest.skip("no model is shipped here")
    geometry = read_geometry(SHIPPED_MODEL)
    assert geometry.token_bytes > 0
    assert (geometry.image_bytes > 0) == any("linear" in kind for kind in load_config(SHIPPED_MODEL).layer_types)
