"""Train the model that ships with atom and write its folder.

A byte-level Qwen3.5 hybrid of under 2 M parameters learns from the text that comes with Python. One CPU core and three
quarters of an hour are enough::

    python scripts/train_shipped_model.py --minutes 45

A run that was stopped continues with ``--resume``. Without ``--minutes`` the run depends on nothing but its flags, the
interpreter's own text and the versions of torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from shipped_corpus import MIXTURE, Corpus, load_corpus, sample_windows, validation_windows
from shipped_layout import TrainingRecord, build_config, save_folder
from shipped_training import (
    build_model,
    build_optimizers,
    evaluate,
    install_fast_kernels,
    next_token_loss,
    schedule,
)
from tqdm import tqdm

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "atom" / "shipped_model"
VALIDATION_LENGTH = 512


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps of the whole run")
    parser.add_argument("--minutes", type=float, help="wall-clock cap; the schedule shrinks to end within it")
    parser.add_argument("--batch", type=int, default=8, help="windows a step at --seq-len")
    parser.add_argument("--seq-len", type=int, default=512, help="bytes a window, a multiple of 32")
    parser.add_argument("--long-seq-len", type=int, default=4096, help="bytes a window in the last part of the run")
    parser.add_argument("--long-share", type=float, default=0.13, help="share of the run at --long-seq-len")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak learning rate of Muon; 0 uses AdamW alone")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and conversations")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more than the free cores is far slower")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="matrix products in bf16")
    parser.add_argument("--eval-every", type=int, default=500, help="steps between validations")
    parser.add_argument("--save-minutes", type=float, default=3.0, help="minutes between checkpoints")
    parser.add_argument(
        "--export-early", action="store_true", help="write --out once at the first checkpoint, before the end"
    )
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "atom-shipped-model.pt",
        help="where the run's state is kept",
    )
    arguments = parser.parse_args(argv)
    for name in ("seq_len", "long_seq_len"):
        if getattr(arguments, name) % 32:
            parser.error(f"--{name.replace('_', '-')} must be a multiple of 32")
    return arguments


def command_line(arguments: argparse.Namespace) -> str:
    """The command that trains the same weights: every flag that matters to them and is not at its default."""
    words = ["python scripts/train_shipped_model.py"]
    defaults = vars(parse_arguments([]))
    for name, value in vars(arguments).items():
        # These say where a run keeps its files and how it is observed, not what it learns.
        if name in {"out", "checkpoint", "resume", "export_early", "save_minutes"} or value == defaults[name]:
            continue
        flag = "--" + name.replace("_", "-")
        words.append(f"{flag} {value:g}" if not isinstance(value, bool) else flag if value else f"--no-{flag[2:]}")
    return " ".join(words)


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))


class Run:
    """One training run: the model, what changes it, and how far it has come."""

    def __init__(self, arguments: argparse.Namespace, corpus: Corpus) -> None:
        self.arguments = arguments
        self.corpus = corpus
        self.progress = Progress()
        self.model = build_model(build_config(), arguments.seed)
        self.optimizers = build_optimizers(self.model, arguments.lr, arguments.muon_lr)
        self.validation = {
            name: validation_windows(stream, 64, VALIDATION_LENGTH) for name, stream in corpus.validation.items()
        }
        if arguments.resume:
            self._restore()
        self._started = time.monotonic() - self.progress.seconds
        self.model.train()

    def share(self) -> float:
        """The share of the run that is done: of its steps or of its minutes, whichever binds."""
        by_steps = self.progress.step / self.arguments.steps
        if not self.arguments.minutes:
            return by_steps
        return max(by_steps, self.progress.seconds / (60 * self.arguments.minutes))

    def train(self) -> None:
        """Learn until the steps or the minutes are used up."""
        arguments, progress = self.arguments, self.progress
        saved, exported = time.monotonic(), not arguments.export_early
        is_long = False
        self._compile_layers()
        bar = tqdm(total=arguments.steps, initial=progress.step, unit="step", mininterval=5)
        while (share := self.share()) < 1.0:
            if not is_long and share >= 1.0 - arguments.long_share:
                # Graphs unrolled over thousands of tokens take longer to compile than they save.
                torch.compiler.set_stance("force_eager")
                is_long = True
            loss = self._step(share, is_long)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", mean=f"{np.mean(progress.losses):.3f}", share=f"{share:.2f}")
            if progress.step % arguments.eval_every == 0:
                tqdm.write(f"step {progress.step}: {self._validate()}")
            if time.monotonic() - saved > 60 * arguments.save_minutes:
                self._save()
                if not exported:
                    self.export(finished=False)
                    exported = True
                saved = time.monotonic()
        bar.close()
        self._save()

    def export(self, finished: bool) -> None:
        """Write the published layout, model card included."""
        arguments, progress = self.arguments, self.progress
        record = TrainingRecord(
            finished=finished,
            command=command_line(arguments),
            steps=progress.step,
            tokens=progress.tokens,
            minutes=progress.seconds / 60,
            long_seq_len=arguments.long_seq_len,
            corpus={name: len(stream.tokens) for name, stream in self.corpus.train.items()},
            mixture=MIXTURE,
            train_loss=float(np.mean(progress.losses)),
            validation={f"validation, {name}": loss for name, loss in self._validate().items()},
        )
        save_folder(self.model, record, arguments.out)

    def _step(self, share: float, is_long: bool) -> float:
        arguments, progress = self.arguments, self.progress
        rows, length = arguments.batch, arguments.seq_len
        if is_long:
            rows, length = max(1, rows * length // arguments.long_seq_len), arguments.long_seq_len
        # Seeded by step, so that a resumed run sees what an uninterrupted one would have seen.
        rng = np.random.default_rng((arguments.seed, progress.step))
        tokens = torch.from_numpy(sample_windows(self.corpus.train, rows, length, rng))
        loss = next_token_loss(self.model, tokens, bf16=arguments.bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += rows * length
        progress.losses.append(loss.item())
        progress.seconds = time.monotonic() - self._started
        return progress.losses[-1]

    def _validate(self) -> dict[str, float]:
        return {name: round(evaluate(self.model, windows), 4) for name, windows in self.validation.items()}

    def _compile_layers(self) -> None:
        if self.arguments.compile:
            # Layer by layer: the six linear layers share one graph.
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile()

    def _save(self) -> None:
        path = self.arguments.checkpoint
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": {**vars(self.progress), "losses": list(self.progress.losses)},
        }
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def _restore(self) -> None:
        state = torch.load(self.arguments.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        saved = state["progress"]
        self.progress = Progress(saved["step"], saved["tokens"], saved["seconds"], deque(saved["losses"], maxlen=100))


def main(argv: list[str] | None = None) -> None:
    """Train, then write the folder."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(arguments.threads)
    difference = install_fast_kernels()
    print(f"training kernels within {difference:.1e} of the reference")
    corpus = load_corpus(arguments.seed)
    print("corpus:", {name: len(stream.tokens) for name, stream in corpus.train.items()})
    run = Run(arguments, corpus)
    run.train()
    run.export(finished=True)
    print(
        f"wrote {arguments.out}: {run.progress.step} steps, {run.progress.tokens} tokens, {run.progress.losses[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
