"""Block keys: what they distinguish, that they chain, and that they do not depend on the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.model_engine.prefix_hash import HASHES, PrefixHasher

HASHER = PrefixHasher(("model", "float32", "layout"), 4)


def keys_of(tokens: list[int], hasher: PrefixHasher = HASHER, **root) -> list[bytes]:
    keys: list[bytes] = []
    hasher.extend(keys, hasher.root(**root), tokens, len(tokens) // hasher.block_size)
    return keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_equal_exactly_where_the_whole_prefix_is_equal(a: list[int], b: list[int]) -> None:
    for i, (left, right) in enumerate(zip(keys_of(a), keys_of(b), strict=False)):
        assert (left == right) == (a[: 4 * i + 4] == b[: 4 * i + 4])


@given(st.lists(st.integers(0, 300), max_size=60), st.data())
def test_extending_in_pieces_gives_the_same_keys(tokens: list[int], data) -> None:
    keys: list[bytes] = []
    for count in sorted(data.draw(st.lists(st.integers(0, len(tokens) // 4), max_size=5))):
        HASHER.extend(keys, HASHER.root(), tokens, count)
        assert len(keys) == count
    assert keys == keys_of(tokens)[: len(keys)]


TEXT = st.text(max_size=4) | st.none()


@given(TEXT, TEXT, TEXT, TEXT)
def test_root_tells_salt_from_adapter(salt, adapter, other_salt, other_adapter) -> None:
    same = (salt, adapter) == (other_salt, other_adapter)
    assert (HASHER.root(salt, adapter) == HASHER.root(other_salt, other_adapter)) == same


def test_namespace_parts_do_not_run_together() -> None:
    roots = {PrefixHasher(parts, 4).root() for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""))}
    assert len(roots) == 4


@pytest.mark.parametrize(("algorithm", "length"), [("xxh3_128", 16), ("sha256", 32)])
def test_algorithms(algorithm: str, length: int) -> None:
    assert set(HASHES) == {"xxh3_128", "sha256"}
    keys = keys_of(list(range(8)), PrefixHasher(("m",), 4, algorithm))
    assert [len(key) for key in keys] == [length, length] and keys[0] != keys[1]


def test_keys_do_not_depend_on_the_process() -> None:
    """Two processes with different PYTHONHASHSEED compute equal keys."""
    code = (
        "from atom.model_engine.prefix_hash import PrefixHasher as P; h = P(('m',), 4); k = [];"
        "h.extend(k, h.root('salt', 'adapter'), list(range(9)), 2); print(k)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "b'" in outputs.pop()
