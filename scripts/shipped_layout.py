"""What the shipped model's folder holds: configuration, byte tokenizer, chat template, weights, model card."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

END_OF_TEXT, IM_START, IM_END, PAD = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- elif message['content'] %}
        {%- for part in message['content'] %}
            {{- part['text'] if part['type'] == 'text' else '' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TrainingRecord:
    """What the model card says about a run."""

    finished: bool
    command: str
    steps: int
    tokens: int
    minutes: float
    long_seq_len: int
    corpus: dict[str, int]
    mixture: dict[str, float]
    train_loss: float
    validation: dict[str, float]


def build_config() -> Qwen3_5TextConfig:
    """The model's shape: 8 layers, three of four with a gated delta rule."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        dtype="float32",
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    return config


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids in byte order, then the special tokens."""
    # ByteLevel writes a printable byte as itself and the others, in order, as code points from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Without the regular expression: there are no words to find, and a split costs time.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=65536,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_folder(model: Qwen3_5ForCausalLM, record: TrainingRecord, folder: Path) -> None:
    """Write the published layout into ``folder``, file by file, each appearing whole; equal files stay untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".shipped-") as temporary:
        staging = Path(temporary)
        model.generation_config = GenerationConfig(eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=PAD)
        model.save_pretrained(staging)
        build_tokenizer().save_pretrained(staging)
        weight_bytes = (staging / "model.safetensors").stat().st_size
        (staging / "README.md").write_text(model_card(model, record, weight_bytes), encoding="utf-8")
        for file in sorted(staging.iterdir()):
            target = folder / file.name
            if not target.exists() or target.read_bytes() != file.read_bytes():
                os.chmod(file, 0o644)
                os.replace(file, target)


def model_card(model: Qwen3_5ForCausalLM, record: TrainingRecord, weight_bytes: int) -> str:
    """The README of the folder."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    nats_to_bits = 1.4426950408889634
    losses = "\n".join(
        f"| {name} | {loss:.4f} | {loss * nats_to_bits:.4f} |"
        for name, loss in [("training, last 100 steps", record.train_loss), *record.validation.items()]
    )
    corpus = "\n".join(
        f"| {name} | {size / 1e6:.2f} | {record.mixture[name]:.0%} |" for name, size in record.corpus.items()
    )
    linear = config.layer_types.count("linear_attention")
    full = config.layer_types.count("full_attention")
    sizes = "\n".join(
        f"| {name} | {value} |" for name, value in _sizes(config, parameters, weight_bytes, record).items()
    )
    state = "" if record.finished else "\n**This is an interim state of a run that has not finished.**\n"
    return f"""---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [byte-level, gated-deltanet, hybrid, python]
---
# A byte-level hybrid of {parameters / 1e6:.2f} M parameters
{state}
A `qwen3_5_text` model that is small enough to ship with a program and to run anywhere:
{config.num_hidden_layers} layers, {linear} of them Gated DeltaNet and {full} full attention.
It reads and writes bytes. It exists so that an inference engine for hybrid models has something
true to serve in a demonstration, a test or a benchmark without a download. It knows what Python
source looks like and little else.

## Sizes

| | |
|---|---|
{sizes}

## Training

Text of the standard library of CPython {platform.python_version()} and nothing else. Every window is drawn from
one of these streams:

| stream | MB | share of windows |
|---|---|---|
{corpus}

*python* are library modules, *tests* modules of its test suite, *english* docstrings, the `pydoc`
topics and the licence, *chat* conversations in ChatML that are put together from functions,
docstrings and topics. About one library file in forty is held out of all of them and makes the
validation set.

```
{record.command}
```

{record.steps:,} steps, {record.tokens:,} bytes seen, {record.minutes:.0f} minutes on one CPU core with
torch {torch.__version__}. Muon for the matrices, AdamW for the rest, warm-up and cosine decay,
products in bf16, weights and recurrence in fp32.

| | nats per byte | bits per byte |
|---|---|---|
{losses}

The validation figures are computed in fp32 on windows of 512 bytes.

## Limits

It is a fixture, not an assistant. Answers have the form of an answer and are mostly wrong;
identifiers are invented; greedy decoding falls into loops, after prompts of thousands of bytes
sometimes into a run of nothing but spaces. It saw no text but Python's own. Beyond
{record.long_seq_len:,} bytes of context it is untrained, though it keeps producing text. Use it to see an
engine work, never for what it says.

## Licence

The weights are released under Apache-2.0. The training text is part of CPython, copyright Python
Software Foundation and others, under the PSF License Version 2.
"""


def _sizes(config: Qwen3_5TextConfig, parameters: int, weight_bytes: int, record: TrainingRecord) -> dict[str, str]:
    """The rows of the card's table of sizes."""
    special = ", ".join(f"`{token}` {number}" for number, token in enumerate(SPECIAL_TOKENS, 256))
    linear_heads = f"{config.linear_num_key_heads} key heads, {config.linear_num_value_heads} value heads"
    full_heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} of keys and values"
    return {
        "parameters": f"{parameters:,} ({weight_bytes:,} bytes of fp32 safetensors, embeddings tied)",
        "vocabulary": f"{config.vocab_size}: the 256 bytes in order, {special}",
        "layers": f"{config.num_hidden_layers}, pattern 3 linear : 1 full",
        "width": f"{config.hidden_size}, MLP {config.intermediate_size}",
        "linear attention": f"{linear_heads} of {config.linear_value_head_dim}",
        "convolution": f"over {config.linear_conv_kernel_dim} positions",
        "full attention": f"{full_heads}, {config.head_dim} wide, rotary on a quarter",
        "positions": f"{config.max_position_embeddings:,} allowed, trained on up to {record.long_seq_len:,}",
    }
