"""One request: its tokens, its block keys, and the pages and slots it holds."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from atom.model_engine.eviction import Ending
from atom.model_engine.ids import BlockId, BlockKey, SlotId
from atom.model_engine.state_cache import Checkpoint
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.model_engine.block_manager import Hit


class Sequence:
    """Tokens of prompt and answer, and how far they are computed.

    Tokens ``[0, num_computed_tokens)`` are in the pages and in the state. ``block_table[i]`` is the page of block i.
    ``state_slots[0]`` holds the committed state. ``block_keys[i]`` names block i; ``num_published_blocks`` of them were
    offered to the prefix index. ``num_cached_tokens`` is what the first admission resumed, None before it.
    ``counted``: whether statistics count its prompt. ``reading``: the checkpoint whose slot the next forward reads in place of ``state_slots[0]``. ``last_anchor``: the
    latest anchor on this path; ``answer_anchor``: the one kept for the answer so far. ``hit``: what the first
    admission found. ``demand``: the boundary that the
    request was refused at and keeps for the next one. ``ending``: how its answer ended. ``tool_call_ids``: tokens that only an answer with a tool call has.
    """

    __slots__ = (
        "_ending",
        "_finished",
        "answer_anchor",
        "block_keys",
        "block_table",
        "counted",
        "demand",
        "hit",
        "key_root",
        "last_anchor",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "reading",
        "request_id",
        "state_slots",
        "stop_ids",
        "token_ids",
        "tool_call_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        max_model_len: int,
        eos_token_ids: SequenceOf[int] = (),
        key_root: BlockKey = b"",
        counted: bool = True,
        tool_call_ids: SequenceOf[int] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        answer = max_model_len if params.max_tokens is None else params.max_tokens
        # Tokens of prompt and answer at which the request ends.
        self.max_tokens = min(self.num_prompt_tokens + answer, max_model_len)
        self.stop_ids = frozenset(
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        )
        self.key_root = key_root
        self.counted = counted
        self.block_keys: list[BlockKey] = []
        self.block_table: list[BlockId] = []
        self.state_slots: list[SlotId] = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.num_cached_tokens: int | None = None
        self.reading: Checkpoint | None = None
        self.last_anchor: Checkpoint | None = None
        self.answer_anchor: Checkpoint | None = None
        self.demand: int | None = None
        self.tool_call_ids = frozenset(tool_call_ids)
        self._ending: Ending | None = None
        self._finished: bool | None = None
        self.hit: Hit | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ending(self) -> Ending | None:
        """As it was set, else a tool call or the end of a turn, as the tokens say; None for an answer that goes on or was cut
        short. O(answer)."""
        if not self.is_finished:
            return None
        if self._ending is not None:
            return self._ending
        if not self.tool_call_ids.isdisjoint(self.output_token_ids):
            return Ending.TOOL_CALL
        return Ending.END_TURN if self.token_ids[-1] in self.stop_ids else None

    @ending.setter
    def ending(self, ending: Ending | None) -> None:
        self._ending = ending

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete: as it was set, else as its tokens say."""
        if self._finished is not None:
            return self._finished
        if self.num_tokens >= self.max_tokens:
            return True
        return self.num_output_tokens > self.params.min_tokens and self.token_ids[-1] in self.stop_ids

    @is_finished.setter
    def is_finished(self, finished: bool) -> None:
        self._finished = finished
