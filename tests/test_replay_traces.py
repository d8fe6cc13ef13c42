"""Readers of traces: every format, plain and gzipped, and lines that are refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from array import array

import pytest

from atom.model_engine.eviction import Ending
from atom.model_engine.prefix_hash import PrefixHasher
from atom.replay.trace import keep_sessions, prepare
from atom.replay.traces import TraceError, read_trace
from tests.replay_traces import SHARED

PLAIN = {"tokens": [1]}
HEADER = {"atom_trace": 1, "block_size": 64}
RECORDED = {"t": 0.0, "in": 64, "out": 64, "keys": ["ab", "cd"]}
MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 9, 2]}


def write(path, *lines, zipped=False):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def agent_request(time, tokens, ids, **more):
    return {"t": time, "in": tokens, "out": 5, "hash_ids": ids} | more


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
        ([PLAIN, '{"tokens": [' + "9" * 5000 + "]}"], r"t:2: a number has too many digits"),
        ([PLAIN, '{"tokens": ' + "[" * 100_000], r"t:2: objects or lists are nested too deeply"),
        ([MOONCAKE, "", {"timestamp": 1}], r"t:3: the field 'hash_ids' is missing"),
        ([MOONCAKE | {"hash_ids": [1]}], r"t:1: 1 block ids, and 1030 tokens have 2 full blocks"),
        ([MOONCAKE | {"hash_ids": 3}], r"t:1: the field 'hash_ids' is 3: use a list of ids"),
        ([MOONCAKE | {"hash_ids": "abc"}], r"t:1: the field 'hash_ids' is 'abc': use a list of ids"),
        ([MOONCAKE | {"hash_ids": [1, [2]]}], r"t:1: the field 'hash_ids' is \[1, \[2\]\]: use a list of ids"),
        ([MOONCAKE | {"hash_ids": [1, 1]}], r"t:1: block 1 comes after another one elsewhere"),
        ([MOONCAKE, MOONCAKE | {"hash_ids": [7, 9]}], r"t:2: block 2 comes after another one elsewhere"),
        ([MOONCAKE | {"input_length": 0}], r"t:1: the field 'input_length' is 0: use a whole number from 1"),
        ([MOONCAKE | {"input_length": "9"}], r"t:1: the field 'input_length' is '9': use a whole number from 1"),
        ([MOONCAKE | {"output_length": 2.5}], r"t:1: the field 'output_length' is 2.5: use a whole number from 0"),
        ([MOONCAKE | {"output_length": 10**12}], r"t:1: the field 'output_length' is 1000000000000: use a whole"),
        ([MOONCAKE | {"timestamp": float("nan")}], r"t:1: the field 'timestamp' is nan: use a number from 0 to"),
        ([MOONCAKE | {"timestamp": 10**400}], r"t:1: the field 'timestamp' is 10*\.\.\.0*: use a number from 0 to"),
        ([agent_session(agent_request(0, 64, [1]), block_size=0)], r"t:1: the field 'block_size' is 0: use a whole"),
        (
            [agent_session(agent_request(0, 64, [1]), block_size=-64)],
            r"t:1: the field 'block_size' is -64: use a whole",
        ),
        ([agent_session(agent_request(0, 64, [1]), hash_id_scope="Local")], r"is 'Local': use local or global"),
        ([agent_session(agent_request(0, 64, [1], out=2.5))], r"t:1: the field 'out' is 2.5: use a whole number"),
        ([agent_session(agent_request(0, 64, [1], out=True))], r"t:1: the field 'out' is True: use a whole number"),
        ([agent_session(agent_request(0, 64, [1], stop=3))], r"t:1: the field 'stop' is 3: use a text"),
        ([agent_session(agent_request("0", 64, [1]))], r"t:1: the field 't' is '0': use a number"),
        ([agent_session(3)], r"t:1: the field 'requests' is \[3\]: use a list of objects"),
        ([agent_session(), agent_session()], r"t: the trace holds no requests"),
        (
            [agent_session(agent_request(0, 64, [1])), agent_session(block_size=32)],
            r"t:2: a block size of 32 after one",
        ),
        ([agent_session({"type": "subagent", "t": 1})], r"t:1: the field 'requests' is missing"),
        (["", {"what": 1}], r"t:2: of no known format"),
        ([{"tokens": ["a"]}], r"t:1: the field 'tokens' is \['a'\]: use a list of token ids"),
        ([{"tokens": []}], r"t:1: a prompt without tokens"),
        ([{"tokens": [-1]}], r"t:1: the field 'tokens' is \[-1\]: use token ids from 0"),
        ([PLAIN | {"t": float("inf")}], r"t:1: the field 't' is inf: use a number from 0"),
        ([PLAIN | {"t": 1.8e12}], r"t:1: the field 't' is 1800000000000.0: use a number from 0"),
        ([PLAIN | {"session": [1]}], r"t:1: the field 'session' is \[1\]: use a text or a number"),
        ([{"text": 5}], r"t:1: the field 'text' is 5: use a text"),
        ([HEADER], r"t: the trace holds no requests"),
        ([HEADER | {"block_size": 0}, RECORDED], r"t:1: the field 'block_size' is 0: use a whole number"),
        ([HEADER | {"atom_trace": 2}, RECORDED], r"t:1: the field 'atom_trace' is 2: use 1"),
        ([HEADER, RECORDED, HEADER | {"block_size": 32}], r"t:3: a block size of 32 after one of 64"),
        ([HEADER, RECORDED | {"keys": "abcd"}], r"t:2: the field 'keys' is 'abcd': use a list of texts"),
        ([HEADER, RECORDED | {"keys": ["xy"]}], r"t:2: the field 'keys' is \['xy'\]: use hex digits"),
        ([HEADER, RECORDED | {"keys": ["ab", "cd", "ef"]}], r"t:2: 3 keys, and 64 \+ 64 tokens have 1 to 2 full"),
        ([], r"t: the trace holds no requests"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t", *lines))


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    path = write(tmp_path / "t", *[PLAIN] * 9)
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n')
    with pytest.raises(TraceError, match=r"t:10: not JSON: "):
        read_trace(path)


@pytest.mark.parametrize("damage", [lambda data: data[:-50], lambda data: data + data[:10] + b"\xff" * 50])
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    path = write(tmp_path / "t", *[MOONCAKE | {"timestamp": random.random()} for _ in range(500)], zipped=True)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=r"t:\d+: not a whole gzip file: "):
        read_trace(path)


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(json.dumps(MOONCAKE).encode()),))
    writer.start()
    assert len(read_trace(path).requests) == 1
    writer.join()


def test_sessions_are_shuffled_by_a_seed_and_cut(tmp_path):
    path = write(tmp_path / "t", *[agent_session(agent_request(0, 64 * n, list(range(n)))) for n in range(1, 9)])

    def order(seed, count=None):
        trace = read_trace(path)
        keep_sessions(trace, count, None if seed is None else random.Random(seed))
        assert [r.index for r in trace.requests] == list(range(len(trace.requests)))
        return [r.prompt_tokens // 64 for r in trace.requests]

    assert order(None) == list(range(1, 9)) and order(None, 3) == [1, 2, 3]
    assert order(5) == order(5) != order(None) and sorted(order(5)) == order(None)


def test_a_timed_trace_is_one_session(tmp_path):
    """A shuffle of sessions leaves its requests in the order of time."""
    trace = read_trace(write(tmp_path / "t", *[PLAIN | {"t": time} for time in range(20)]))
    keep_sessions(trace, 1, random.Random(1))
    assert [request.time for request in trace.requests] == list(range(20))


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
