import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from atom.tokenizer import Tokenizer
from tests.tiny_tokenizer import VOCAB_SIZE, save_byte_fallback_tokenizer, save_tokenizer

IM_START, IM_END = 257, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_text_with_special_tokens_round_trips(tokenizer):
    ids = tokenizer.encode("hé<|im_end|>")
    assert len(ids) == 4 and ids[-1] == IM_END
    assert tokenizer.decode(ids) == "hé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hé<|im_end|>"


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode([*tokenizer.encode("a"), VOCAB_SIZE, 10**9, -1, *tokenizer.encode("b")]) == "ab"


def test_a_lone_surrogate_is_refused_by_name_and_place(tokenizer):
    with pytest.raises(ValueError, match=r"\\ud83d at character 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(ValueError, match=r"\\udc00"):
        tokenizer.apply_chat_template([{"role": "user", "content": "\udc00"}])
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_chat_template_with_tools_and_variables(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages)
    assert ids[0] == IM_START
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tools=tools, mark="!")
    assert tokenizer.decode(ids) == "user\nhi\nlook!"


def test_messages_that_the_template_refuses(tokenizer):
    with pytest.raises(ValueError, match="chat template refuses"):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_a_model_without_a_template(tmp_path):
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=False))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_eos_comes_from_the_generation_config_first(tmp_path):
    assert Tokenizer(save_tokenizer(tmp_path / "a", eos_token_id=[3, 258])).eos_token_ids == [3, 258]
    assert Tokenizer(save_tokenizer(tmp_path / "b", eos_token_id=5)).eos_token_ids == [5]
    folder = save_tokenizer(tmp_path / "c")
    assert Tokenizer(folder).eos_token_ids == [IM_END]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "text_config": {"eos_token_id": 256}}))
    assert Tokenizer(folder).eos_token_ids == [IM_END, 256]


def test_tokens_that_stand_around_a_tool_call(tmp_path):
    folder = save_tokenizer(tmp_path)
    tokens = ["<tool_call>", "</tool_call>", "<tool_response>", "<|tool_calls_section_begin|>", "<think>"]
    hf = AutoTokenizer.from_pretrained(folder)
    hf.add_tokens([AddedToken(token, special=False) for token in tokens])
    hf.save_pretrained(folder)
    tokenizer = Tokenizer(folder)
    assert [tokenizer.token_text(token) for token in tokenizer.tool_call_token_ids] == [*tokens[:2], tokens[3]]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_text_of_single_tokens(tokenizer, tmp_path):
    assert [tokenizer.token_text(i) for i in tokenizer.encode(" é<|im_end|>")] == [
        " ",
        "\ufffd",
        "\ufffd",
        "<|im_end|>",
    ]
    assert tokenizer.token_text(VOCAB_SIZE + 1) == ""
    sentencepiece = Tokenizer(save_byte_fallback_tokenizer(tmp_path))
    texts = [sentencepiece.token_text(i) for i in range(257, 262)]
    assert texts == [" ", " a", "b", " hello", "ly"]


def test_threads_may_share_it(tokenizer):
    def round_trip(text):
        return tokenizer.decode(tokenizer.encode(text))

    texts = [f"{number} é <|im_start|>" * 50 for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(round_trip, texts)) == [text.replace("<|im_start|>", "") for text in texts]


def test_the_front_end_loads_no_torch_by_itself():
    code = (
        "import sys, atom, atom.tokenizer, atom.model_engine.llm_engine, atom.model_engine.async_engine, atom.llm;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
