"""The text the shipped model is trained on: what comes with Python itself, as streams of byte tokens.

Four streams: ``python`` (library sources), ``tests`` (Python's own test suite), ``english`` (docstrings, pydoc topics,
licence) and ``chat`` (conversations put together from the same material). A window is a stretch of one stream.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from shipped_chat import Item, conversations, encode_conversation
from shipped_layout import END_OF_TEXT

MIXTURE = {"python": 0.50, "tests": 0.07, "english": 0.15, "chat": 0.28}
"""The share of windows drawn from each stream."""

_SKIPPED_DIRECTORIES = {"site-packages", "__pycache__", "pydoc_data", "cjkencodings", "data"}
_TEST_DIRECTORIES = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Stream:
    """Documents, one after the other, as token ids; ``starts`` are the positions where one begins."""

    tokens: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of(documents: list[list[int] | bytes]) -> Stream:
        """Join ``documents``, each closed by ``<|endoftext|>``."""
        parts, starts, position = [], [], 0
        for document in documents:
            ids = np.frombuffer(document, np.uint8) if isinstance(document, bytes) else np.array(document)
            parts.append(np.append(ids.astype(np.int16), np.int16(END_OF_TEXT)))
            starts.append(position)
            position += len(parts[-1])
        return Stream(np.concatenate(parts), np.array(starts))


@dataclass(frozen=True)
class Corpus:
    """Streams to learn from and streams held out."""

    train: dict[str, Stream]
    validation: dict[str, Stream]


def load_corpus(seed: int) -> Corpus:
    """Read Python's own text and build every stream; the same interpreter and seed give the same corpus."""
    sources: dict[str, list[str]] = {"python": [], "tests": [], "held_out": []}
    items: dict[bool, list[Item]] = {True: [], False: []}
    prose = _topics() + _licence()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _source_files(root):
        text = path.read_text(encoding="utf-8", errors="ignore")
        relative = path.relative_to(root)
        is_test = bool(_TEST_DIRECTORIES & set(relative.parts))
        held_out = not is_test and _is_held_out(relative)
        sources["tests" if is_test else "held_out" if held_out else "python"].append(text)
        if not is_test:
            found = _items(relative, text)
            items[held_out] += found
            if not held_out:
                prose += [item.documentation for item in found if len(item.documentation) > 120]
    rng = random.Random(seed)
    for documents in (*sources.values(), prose):
        rng.shuffle(documents)
    topics = [(name, text.decode()) for name, text in _named_topics()]
    python, tests, unseen = ([text.encode() for text in documents] for documents in sources.values())
    train = {
        "python": Stream.of(python),
        "tests": Stream.of(tests),
        "english": Stream.of([text.encode() for text in prose]),
        "chat": Stream.of([encode_conversation(c) for c in conversations(items[False], topics, rng, rounds=3)]),
    }
    validation = {
        "python": Stream.of(unseen),
        "chat": Stream.of([encode_conversation(c) for c in conversations(items[True], [], rng, rounds=1)]),
    }
    return Corpus(train, validation)


def sample_windows(streams: dict[str, Stream], rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``rows`` windows of ``length + 1`` tokens, their streams drawn by ``MIXTURE``: ``[rows, length + 1]``.

    Half of the windows begin where a document begins, as a prompt does.
    """
    names = list(streams)
    weights = np.array([MIXTURE[name] for name in names])
    windows = np.empty((rows, length + 1), np.int64)
    for row in range(rows):
        stream = streams[names[rng.choice(len(names), p=weights / weights.sum())]]
        last = len(stream.tokens) - length - 1
        begin = int(rng.choice(stream.starts) if rng.random() < 0.5 else rng.integers(last + 1))
        begin = min(begin, last)
        windows[row] = stream.tokens[begin : begin + length + 1]
    return windows


def validation_windows(stream: Stream, rows: int, length: int) -> np.ndarray:
    """Up to ``rows`` windows spread evenly over a held-out stream: ``[<= rows, length + 1]``."""
    last = len(stream.tokens) - length - 1
    begins = np.unique(np.linspace(0, last, rows).astype(np.int64))
    return np.stack([stream.tokens[begin : begin + length + 1] for begin in begins]).astype(np.int64)


def _source_files(root: Path) -> list[Path]:
    """Python files of the library, without generated tables and data."""
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_DIRECTORIES & set(relative.parts) or relative.name.startswith(("bad", "_sysconfigdata")):
            continue
        # The code pages are thousands of lines of hexadecimal numbers.
        if relative.parts[0] == "encodings" and path.stat().st_size > 8_000:
            continue
        if 200 <= path.stat().st_size <= 300_000:
            files.append(path)
    return files


def _is_held_out(relative: Path) -> bool:
    return int(hashlib.sha256(relative.as_posix().encode()).hexdigest(), 16) % 40 == 7


def _named_topics() -> list[tuple[str, bytes]]:
    from pydoc_data.topics import topics

    return [(name, text.strip().encode()) for name, text in sorted(topics.items())]


def _topics() -> list[str]:
    return [text.decode() for _, text in _named_topics()]


def _licence() -> list[str]:
    candidates = [
        Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt",
        Path(sysconfig.get_paths()["data"]) / "LICENSE.txt",
    ]
    return [path.read_text(encoding="utf-8") for path in candidates if path.exists()]


def _items(relative: Path, text: str) -> list[Item]:
    """The module, its functions, classes and methods, each with its documentation and source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
    parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
    module = ".".join(parts)
    lines = text.splitlines()
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    found = [Item("module", module, module, ast.get_docstring(tree) or "", "", "", 0, tuple(names))]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                source = _dedent(lines[first : node.end_lineno])
                documentation = ast.get_docstring(node) or ""
                before = "\n".join(lines[max(0, first - 30) : first]).strip("\n")
                found.append(Item(kind, module, prefix + node.name, documentation, source, before, node.col_offset))
                if isinstance(node, ast.ClassDef):
                    visit(node.body, prefix + node.name + ".")

    visit(tree.body, "")
    return found


def _dedent(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)
