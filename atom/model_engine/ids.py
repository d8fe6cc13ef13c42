"""Ids of things that live in arenas; distinct types, so that a page is never taken for a slot."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
BlockKey = bytes
