"""The engine's own scheduler and block manager, put together for a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.eviction import EvictionPolicy
from atom.model_engine.ids import BlockKey
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointCoordinator
from atom.model_engine.placement import Placement, RungKind
from atom.model_engine.prefix_hash import PrefixHasher
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import Sequence as Request
from atom.model_engine.sizing import INTERIOR_SLOTS
from atom.model_engine.state_cache import Checkpoint, CheckpointStatus
from atom.model_engine.state_pool import StateSlotPool
from atom.model_engine.state_runtime import StateRuntime
from atom.replay.trace import Trace, TraceRequest
from atom.sampling_params import SamplingParams

UNLIMITED = 1 << 40


class TraceKeys(PrefixHasher):
    """Names the blocks of answers: by the trace where it knows them, else by a key that nothing else has.

    A sequence's ``key_root`` names its request. Prompts bring their keys along.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        super().__init__(("replay",), block_size)
        self._keys = trace.keys
        self._stride = block_size // trace.block_size
        # Blocks of the prompt, and the keys of those behind.
        self._answers: dict[BlockKey, tuple[int, list[BlockKey]]] = {}

    def keys_of(self, request: TraceRequest) -> list[BlockKey]:
        """Keys of the prompt's blocks."""
        return list(map(self._keys.__getitem__, request.blocks[self._stride - 1 :: self._stride]))

    def sequence(self, request: TraceRequest) -> Request:
        """A sequence as long as ``request``, which names its blocks and holds no real tokens.

        Its tokens are all alike, so that answers behind prompts that differ only in their last part of a block are taken
        for answers behind one prompt.
        """
        root = request.index.to_bytes(4, "big")
        seq = Request(str(request.index), (), SamplingParams(ignore_eos=True), UNLIMITED, key_root=root)
        # One byte a token.
        seq.token_ids = bytearray(request.prompt_tokens)  # type: ignore[assignment]
        seq.num_prompt_tokens = request.prompt_tokens
        seq.max_tokens = request.prompt_tokens + request.output_tokens
        seq.block_keys = self.keys_of(request)
        seq.ending, seq.counted = request.ending, request.counted
        if not request.complete:
            seq.is_finished = False
        if request.answer:
            named, prompt = [*request.blocks, *request.answer][self._stride - 1 :: self._stride], len(seq.block_keys)
            self._answers[root] = prompt, [self._keys[number] for number in named[prompt:]]
        return seq

    def forget(self, request: TraceRequest) -> None:
        """The request is over."""
        self._answers.pop(request.index.to_bytes(4, "big"), None)

    def extend(self, keys: list[BlockKey], root: BlockKey, token_ids: Sequence[int], num_blocks: int) -> None:
        prompt, named = self._answers.get(root, (0, ()))
        for index in range(len(keys), num_blocks):
            # A private key is longer than the 8 bytes of a numbered one and shorter than any hash.
            known = index - prompt < len(named)
            keys.append(named[index - prompt] if known else b"a" + root + index.to_bytes(4, "big"))


class WatchedImages(PagedStateCheckpointCoordinator):
    """Remembers which boundaries ever had a checkpoint, to tell what was lost to eviction from what was never kept.

    ``kept``, ``used``: checkpoints by the kind they were kept as, and those of them that were resumed from at least once.
    An answer's that moved on does not count.
    """

    def __init__(self, pool: BlockPool, pages_per_image: int) -> None:
        super().__init__(pool, pages_per_image)
        self.ever_kept: set[BlockKey] = set()
        self.kept = dict.fromkeys(RungKind, 0)
        self.used = dict.fromkeys(RungKind, 0)
        self._unused: dict[Checkpoint, RungKind] = {}

    def reserve(self, key: BlockKey, kind: RungKind, replace: Checkpoint | None = None) -> Checkpoint | None:
        replaceable = replace is not None and replace.status is CheckpointStatus.READY
        place = super().reserve(key, kind, replace)
        if replace is not None and replaceable and replace.status is CheckpointStatus.GONE:
            # An answer's checkpoint that moved on was not lost: it is kept at one place, the last one.
            self.ever_kept.discard(replace.key)
            moved = self._unused.pop(replace, None)
            if moved is not None:
                self.kept[moved] -= 1
        return place

    def publish(self, checkpoint: Checkpoint) -> None:
        super().publish(checkpoint)
        self.ever_kept.add(checkpoint.key)
        self.kept[checkpoint.kind] += 1
        self._unused[checkpoint] = checkpoint.kind

    def pin(self, checkpoint: Checkpoint) -> None:
        super().pin(checkpoint)
        self._use(checkpoint)

    def use_up(self, checkpoint: Checkpoint) -> None:
        super().use_up(checkpoint)
        self._use(checkpoint)

    def _use(self, checkpoint: Checkpoint) -> None:
        kind = self._unused.pop(checkpoint, None)
        if kind is not None:
            self.used[kind] += 1


@dataclass(frozen=True, slots=True)
class Engine:
    """What a replay drives."""

    manager: BlockManager
    scheduler: Scheduler
    keys: TraceKeys
    images: WatchedImages | None


def assemble(
    trace: Trace,
    placement: Placement,
    policy: EvictionPolicy,
    clock: Callable[[], float],
    pool_blocks: int,
    pages_per_image: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Engine:
    """An idle engine of ``pool_blocks`` pages; ``pages_per_image`` 0: a model without per-request state."""
    keys = TraceKeys(trace, placement.block_size)
    pool = BlockPool(pool_blocks, policy=policy, clock=clock)
    images = states = None
    if pages_per_image:
        images = WatchedImages(pool, pages_per_image)
        slots = StateSlotPool(max_num_seqs + INTERIOR_SLOTS)
        states = StateRuntime(slots, images, scratch=INTERIOR_SLOTS)
    manager = BlockManager(pool, states, keys, placement)
    return Engine(manager, Scheduler(manager, max_num_seqs, max_num_batched_tokens), keys, images)
