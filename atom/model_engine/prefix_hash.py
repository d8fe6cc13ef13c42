"""Chained block keys: key i names the tokens of blocks 0..i, and in what model, adapter and tenancy they were read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

import xxhash

from atom.model_engine.ids import BlockKey

_TOKEN_BYTES = 4


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASHES: dict[str, Callable[[bytes], bytes]] = {"xxh3_128": xxhash.xxh3_128_digest, "sha256": _sha256}


class PrefixHasher:
    """Computes block keys of ``block_size`` tokens each.

    ``namespace`` names everything that makes equal tokens mean equal bytes: model, revision, dtype, layout. Keys are 16
    bytes with xxh3_128 (enough where nobody crafts collisions) and 32 with sha256.
    """

    def __init__(self, namespace: Sequence[str], block_size: int, algorithm: str = "xxh3_128") -> None:
        self.block_size = block_size
        self._hash = HASHES[algorithm]
        self._namespace = tuple(namespace)

    def root(self, cache_salt: str | None = None, adapter: str | None = None) -> BlockKey:
        """The parent of block 0's key. Each part is length-prefixed, so no salt can look like an adapter."""
        parts = bytearray()
        for part in (*self._namespace, cache_salt, adapter):
            # None and "" differ: an absent part is marked, not empty.
            data = b"" if part is None else part.encode("utf-8", "surrogatepass")
            parts += (b"-" if part is None else b"+") + len(data).to_bytes(8, "little") + data
        return self._hash(bytes(parts))

    def extend(self, keys: list[BlockKey], root: BlockKey, token_ids: Sequence[int], num_blocks: int) -> None:
        """Append to ``keys`` what it lacks of the keys of the first ``num_blocks`` blocks. O(new tokens)."""
        size = self.block_size
        done = len(keys)
        if done >= num_blocks:
            return
        data = array("I", token_ids[done * size : num_blocks * size]).tobytes()
        digest, step = self._hash, size * _TOKEN_BYTES
        parent = keys[-1] if keys else root
        append = keys.append
        for start in range(0, len(data), step):
            parent = digest(parent + data[start : start + step])
            append(parent)
