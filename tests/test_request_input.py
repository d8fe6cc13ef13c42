import pytest

from atom.model_engine.request_input import prepare_request
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

IM_END = 258
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def prepare(tokenizer):
    def prepare(prompt, request_id="r", **params):
        return prepare_request(
            request_id,
            prompt,
            SamplingParams(**params),
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )

    return prepare


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, -1], "token id -1 .* from 0 to 319"),
        ([1, VOCAB_SIZE], "token id 320 "),
        ([2**70], "token id"),
        (["a"], "token ids"),
        (7, "token ids"),
        ([1] * MAX_MODEL_LEN, "64 tokens; at most 63 "),
        ("a\ud800", r"\\ud800 at character 1"),
        ({"text": "a"}, "no .'text'"),
        ({"prompt": None}, "must have"),
        ({"prompt": 5}, "text, not int"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be text"),
        ({"prompt": "a", "cache_salt": "\udfff"}, "cache_salt has a lone surrogate"),
    ],
)
def test_prompts_that_cannot_be_used(prepare, prompt, message):
    with pytest.raises(ValueError, match=message):
        prepare(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids=320"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
        ({"stop": ["\ud800"]}, r"stop has a lone surrogate \\ud800"),
        ({"seed": 2**70}, "sampling parameters"),
        ({"max_tokens": 5.5}, "sampling parameters.*max_tokens"),
        ({"stop": [5]}, "sampling parameters.*stop"),
    ],
)
def test_parameters_that_cannot_be_used(prepare, params, message):
    with pytest.raises(ValueError, match=message):
        prepare("abc", **params)


def test_the_forms_of_a_prompt(prepare, tokenizer):
    ids = tokenizer.encode("abc")
    for prompt in ("abc", ids, tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}):
        assert prepare(prompt).prompt_token_ids == ids
    both = prepare({"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "tenant"})
    assert (both.prompt, both.prompt_token_ids, both.cache_salt) == ("shown", ids, "tenant")


def test_max_tokens_is_cut_to_the_context(prepare):
    assert prepare([1] * 60).params.max_tokens == 4
    assert prepare([1] * 60, max_tokens=3).params.max_tokens == 3
    assert prepare([1] * 63, max_tokens=None).params.max_tokens == 1
    assert prepare([1] * 60, max_tokens=None, min_tokens=50).params.min_tokens == 4


def test_continuations_know_the_tokens_of_tool_calls(prepare, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "tool_call_token_ids", [7])
    assert [child.tool_call_token_ids for child in prepare([1], n=2).children()] == [[7], [7]]


def test_continuations_differ_by_id_and_seed(prepare):
    children = prepare([1], n=3, seed=2**63 - 2, stop=["x"]).children()
    assert [child.request_id for child in children] == ["r#0", "r#1", "r#2"]
    assert [child.params.seed for child in children] == [2**63 - 2, 2**63 - 1, 0]
    assert all(child.params.n == 1 and child.eos_token_ids == [IM_END] for child in children)
    assert [child.params.seed for child in prepare([1], n=2).children()] == [None, None]
    assert [child.request_id for child in prepare([1]).children()] == ["r"]
