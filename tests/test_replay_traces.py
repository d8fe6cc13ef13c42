"""Readers of traces: every format, plain and gzipped, and lines that are refused."""

from __future__ import annotations

import gzip
import json
import random
from array import array

import pytest

from atom.model_engine.eviction import Ending
from atom.model_engine.prefix_hash import PrefixHasher
from atom.replay.trace import keep_sessions, prepare
from atom.replay.traces import TraceError, read_trace
from tests.replay_traces import SHARED

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 9, 2]}


def write(path, *lines, zipped=False):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def agent_request(time, tokens, ids, **more):
    return {"t": time, "type": "n", "in": tokens, "out": 5, "hash_ids": ids} | more


def agent_session(*requests, **more):
    return {"block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | more


@pytest.mark.parametrize("zipped", [False, True])
def test_mooncake(tmp_path, zipped):
    later = {"timestamp": 2500, "input_length": 1024, "output_length": 0, "hash_ids": [4, 9]}
    trace = read_trace(write(tmp_path / "t", later, MOONCAKE, zipped=zipped))
    first, second = trace.requests
    assert (trace.block_size, trace.timed, trace.name) == (512, True, "t")
    assert (first.time, second.time, first.index, second.index) == (0.0, 1.0, 0, 1)
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (1030, 7, 1)
    # The partial third block is no block; equal ids are equal blocks.
    assert first.blocks == second.blocks and len(first.blocks) == 2


def test_sessions_with_subagents(tmp_path):
    nested = {"type": "subagent", "t": 5.0, "requests": [agent_request(1.0, 70, [8], stop="end_turn")]}
    session = agent_session(
        agent_request(0.0, 128, [1, 2], stop="tool_use"), nested, agent_request(2.0, 130, [1, 2, 3])
    )
    trace = read_trace(write(tmp_path / "t", session, session))
    assert [(r.session, r.time, len(r.blocks)) for r in trace.requests[:3]] == [(0, 0.0, 2), (0, 2.0, 2), (0, 6.0, 1)]
    assert [r.ending for r in trace.requests[:3]] == [Ending.TOOL_CALL, None, Ending.END_TURN]
    # Ids of one session mean nothing in another.
    assert not set(trace.requests[0].blocks) & set(trace.requests[3].blocks)
    assert not trace.timed and [len(s) for s in trace.sessions] == [3, 3]


def test_text(tmp_path):
    lines = [
        {"timestamp": 3_000_000, "session_id": "x", "input": "a" * 130, "output": "b" * 9},
        {"timestamp": 1_000_000, "session_id": "y", "input": "c" * 64, "output": ""},
        {"timestamp": 1_000_000, "session_id": "x", "input": "a" * 64, "output": "b"},
    ]
    trace = read_trace(write(tmp_path / "t", *lines), lambda: lambda text: list(text.encode()))
    assert [(r.session, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 64, 1),
        (0, 130, 9),
        (1, 64, 1),
    ]
    assert trace.requests[0].blocks[0] == trace.requests[1].blocks[0]
    with pytest.raises(TraceError, match=r"t:1: .*name a tokenizer"):
        read_trace(tmp_path / "t")


def test_plain_tokens_and_texts(tmp_path):
    lines = [{"tokens": [1, 2, 3, 4, 5], "t": 2.0, "out": 3}, {"text": "ab", "t": 1.0}]
    trace = read_trace(write(tmp_path / "t", *lines), lambda: lambda text: list(text.encode()), block_size=2)
    assert trace.timed
    assert [(r.time, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0.0, 2, 1), (1.0, 5, 3)]
    keys: list[bytes] = []
    hasher = PrefixHasher(("trace",), 2)
    hasher.extend(keys, hasher.root(), [1, 2, 3, 4, 5], 2)
    assert [trace.keys[number] for number in trace.requests[1].blocks] == keys


def test_plain_lines_without_times_are_sessions(tmp_path):
    apart = read_trace(write(tmp_path / "t", {"tokens": [1]}, {"tokens": [2]}))
    assert not apart.timed and [r.session for r in apart.requests] == [0, 1]
    lines = [{"tokens": [1], "session": "s", "t": 4}, {"tokens": [2], "session": "s", "t": 5}]
    together = read_trace(write(tmp_path / "t", *lines))
    assert not together.timed and [r.session for r in together.requests] == [0, 0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([MOONCAKE, "{"], r"t:2: not JSON"),
        ([MOONCAKE, "[]"], r"t:2: a line must be a JSON object"),
        ([MOONCAKE, "", {"timestamp": 1}], r"t:3: the field 'hash_ids' is missing"),
        ([MOONCAKE | {"hash_ids": [1]}], r"t:1: 1 block ids, and 1030 tokens have 2 full blocks"),
        ([MOONCAKE | {"input_length": 0}], r"t:1: a request of 0 prompt"),
        ([MOONCAKE | {"input_length": "9"}], r"t:1: "),
        ([MOONCAKE | {"timestamp": float("nan")}], r"t:1: a time of nan"),
        ([MOONCAKE | {"hash_ids": 3}], r"t:1: "),
        (
            [agent_session(agent_request(0, 64, [1])), agent_session(block_size=32)],
            r"t:2: a block size of 32 after one",
        ),
        ([agent_session({"type": "subagent", "t": 1})], r"t:1: the field 'requests' is missing"),
        ([{"what": 1}], r"t:1: of no known format"),
        ([{"tokens": ["a"]}], r"t:1: tokens must be a list of token ids"),
        ([{"tokens": [1], "t": float("inf")}], r"t:1: a time of inf"),
        ([{"tokens": [-1]}], r"t:1: tokens must be a list of token ids"),
        ([], r"t: holds no request"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t", *lines))


def test_a_cut_gzip_file_is_refused(tmp_path):
    path = write(tmp_path / "t", *[MOONCAKE | {"timestamp": random.random()} for _ in range(500)], zipped=True)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(TraceError, match=r"t:\d+: "):
        read_trace(path)


def test_sessions_are_shuffled_by_a_seed_and_cut(tmp_path):
    path = write(tmp_path / "t", *[agent_session(agent_request(0, 64 * n, list(range(n)))) for n in range(1, 9)])

    def order(seed, count=None):
        trace = read_trace(path)
        keep_sessions(trace, count, None if seed is None else random.Random(seed))
        assert [r.index for r in trace.requests] == list(range(len(trace.requests)))
        return [r.prompt_tokens // 64 for r in trace.requests]

    assert order(None) == list(range(1, 9)) and order(None, 3) == [1, 2, 3]
    assert order(5) == order(5) != order(None) and sorted(order(5)) == order(None)


SHARED_FILES = [
    ("claude_code_160.jsonl.gz", 9386, 1057.2, 0.961, 64),
    ("mooncake_conversation.jsonl.gz", 12031, 144.8, 0.373, 512),
    ("mooncake_synthetic.jsonl.gz", 3993, 61.2, 0.650, 512),
]


@pytest.mark.parametrize(("name", "requests", "million_tokens", "ideal", "block"), SHARED_FILES)
def test_the_shared_traces(name, requests, million_tokens, ideal, block):
    if not (SHARED / name).exists():
        pytest.skip("the shared traces are not here")
    trace = read_trace(SHARED / name)
    prepare(trace, "none")
    assert (len(trace.requests), trace.block_size) == (requests, block)
    assert trace.prompt_tokens / 1e6 == pytest.approx(million_tokens, abs=0.1)
    hit = sum(r.ideal for r in trace.requests) * block / trace.prompt_tokens
    assert hit == pytest.approx(ideal, abs=1e-3)
    assert all(isinstance(r.blocks, array) for r in trace.requests)


def test_the_shared_texts():
    path = SHARED / "coding_agent_text_4.jsonl.gz"
    if not path.exists():
        pytest.skip("the shared traces are not here")
    trace = read_trace(path, lambda: lambda text: list(text.encode()), block_size=256)
    prepare(trace, "none")
    assert (len(trace.requests), len(trace.sessions)) == (103, 4)
    assert sum(r.ideal for r in trace.requests) * 256 / trace.prompt_tokens == pytest.approx(0.93, abs=0.01)
