"""How an answer ended reaches the eviction policy and the recording."""

from __future__ import annotations

import json

import pytest

from atom.config import EngineConfig
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.eviction import Ending
from atom.model_engine.messages import EngineRequest
from atom.sampling_params import SamplingParams
from tests.recording import RecordingRunner, cold_output, prompt_of

PROMPT = prompt_of(10, 1)
ANSWER = cold_output(PROMPT, 8)
FRESH = next(index for index, token in enumerate(ANSWER) if index > 2 and token not in ANSWER[:index])
"""Where the answer has a token that it has not before."""


@pytest.mark.parametrize(
    ("stop", "tool_calls", "ending"),
    [
        (ANSWER[FRESH], [], Ending.END_TURN),
        (ANSWER[FRESH], [ANSWER[1]], Ending.TOOL_CALL),
        (ANSWER[FRESH], [PROMPT[0]] if PROMPT[0] not in ANSWER else [], Ending.END_TURN),
        (None, [], None),
        (None, [ANSWER[1]], Ending.TOOL_CALL),
    ],
)
def test_what_the_tokens_say_of_the_ending(tmp_path, monkeypatch, stop, tool_calls, ending) -> None:
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(model="recording", block_size=4, record_trace=str(path), cache_stats_interval=0)
    core = EngineCore(config, RecordingRunner(4, 40, 36, 96, None))
    seen = []
    policy = core.block_manager.pool.policy
    add_blocks = policy.add_blocks
    monkeypatch.setattr(policy, "add_blocks", lambda blocks, how: (seen.append(how), add_blocks(blocks, how)))
    params = SamplingParams(max_tokens=len(ANSWER), temperature=0, ignore_eos=stop is None)
    stops = [] if stop is None else [stop]
    core.add_request(EngineRequest("r", PROMPT, params, eos_token_ids=stops, tool_call_token_ids=tool_calls))
    while core.has_unfinished():
        core.step()
    core.shutdown()
    assert seen == [ending]
    line = json.loads(path.read_text().splitlines()[1])
    assert line["stop"] == (ending.value if ending is not None else "length")


def test_an_answer_that_is_broken_off_has_no_ending() -> None:
    core = EngineCore(
        EngineConfig(model="recording", block_size=4, cache_stats_interval=0), RecordingRunner(4, 40, 36, 96, None)
    )
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    core.add_request(EngineRequest("r", PROMPT, params, tool_call_token_ids=ANSWER))
    for _ in range(3):
        core.step()
    (seq,) = core.scheduler.running
    assert seq.num_output_tokens and seq.ending is None
