"""The model that ships with atom: its folder, its tokenizer, and that it writes something like Python."""

from __future__ import annotations

import json
import math
import re
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

FOLDER = Path(__file__).resolve().parents[1] / "atom" / "shipped_model"
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<|pad|>": 259}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def read_json(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_folder_holds_the_published_layout_in_8_megabytes() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    wanted = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json README.md"
    assert {*wanted.split(), "chat_template.jinja"} <= names
    assert not any(name.endswith(".py") for name in names)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_config_is_a_three_to_one_hybrid() -> None:
    config = read_json("config.json")
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["dtype"] == "float32"
    pattern = ["linear_attention"] * 3 + ["full_attention"]
    assert config["layer_types"] == pattern * (config["num_hidden_layers"] // 4)
    assert config["rope_parameters"]["rope_theta"] >= 1e6
    assert config["max_position_embeddings"] >= 65536
    assert read_json("generation_config.json")["eos_token_id"] == [258, 256]


def test_weights_are_one_to_two_million_fp32_numbers() -> None:
    with open(FOLDER / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {entry["dtype"] for entry in tensors} == {"F32"}
    assert 1_000_000 <= sum(math.prod(entry["shape"]) for entry in tensors) <= 2_000_000


@given(text=st.text(max_size=200))
def test_any_text_round_trips_byte_by_byte(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    if not any(token in text for token in SPECIAL):
        assert ids == list(text.encode())


def test_ids_are_bytes_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    alphabet = "".join(map(chr, range(128))) + "é漢🙂\u200d👩‍💻 ,  ."
    assert tokenizer.encode(alphabet, add_special_tokens=False) == list(alphabet.encode())
    assert tokenizer.decode(list(alphabet.encode())) == alphabet
    # Every byte decodes by itself too; those that are no character become a replacement character.
    for byte in range(256):
        assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


def test_special_tokens_have_their_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    for token, number in SPECIAL.items():
        assert tokenizer.convert_tokens_to_ids(token) == number
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False) == [97, number, 98]
    assert tokenizer.decode([257, 97, 258], skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (258, 259, 260)
    assert read_json("config.json")["vocab_size"] == 260


def test_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ids.count(257), ids.count(258)) == (4, 3)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_long_prompt_is_tokenized_quickly(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "    return self.value  # 漢\n" * 1500
    tokenizer.encode(text, add_special_tokens=False)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        tokenizer.encode(text[:40_000], add_special_tokens=False)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1


def test_greedy_text_looks_like_python(tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    inputs = tokenizer("import os\n\ndef ", return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(output, skip_special_tokens=True)
    assert text.isascii()
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert len(set(text)) >= 10
    known = {"def", "self", "return", "if", "not", "None", "in", "is", "for", "raise", "class", "import", "name"}
    assert len(known & set(re.findall(r"[A-Za-z]+", text))) >= 2, text
