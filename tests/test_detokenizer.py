import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.detokenizer import IncrementalDetokenizer, StopChecker
from atom.tokenizer import Tokenizer
from tests.tiny_tokenizer import VOCAB_SIZE, save_byte_fallback_tokenizer, save_tokenizer

# A few windows; without a bound on the window it would be thousands.
MAX_DECODED_A_TOKEN = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return Tokenizer(save_byte_fallback_tokenizer(tmp_path_factory.mktemp("sentencepiece")))


class CountingTokenizer:
    """Counts the ids that a tokenizer is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.vocab_size, self.special_token_ids = tokenizer.vocab_size, tokenizer.special_token_ids
        self.decoded = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens)


def pieces_of(tokenizer, token_ids, sizes=None, skip=True):
    """What is handed out step by step and at the end; ``sizes`` in tokens a step, by default 1, the rest in one."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces, at = [], 0
    for size in [1] * len(token_ids) if sizes is None else sizes:
        if at >= len(token_ids):
            break
        pieces.append(detokenizer.feed(token_ids[at : at + size]))
        at += size
    pieces.append(detokenizer.feed(token_ids[at:]))
    pieces.append(detokenizer.flush())
    return pieces


any_ids = st.lists(st.integers(0, VOCAB_SIZE + 9), max_size=80)
step_sizes = st.lists(st.integers(1, 5), max_size=80)


@settings(max_examples=500)
@given(ids=any_ids, sizes=step_sizes, skip=st.booleans())
def test_joined_pieces_are_the_whole_text_for_any_tokens(tokenizer, ids, sizes, skip):
    assert "".join(pieces_of(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=300)
@given(text=st.text(max_size=60), sizes=step_sizes, noise=st.sampled_from([[], [257], [VOCAB_SIZE + 1]]))
def test_valid_text_never_shows_a_replacement_character(tokenizer, text, sizes, noise):
    ids = [token for byte in tokenizer.encode(text) for token in (byte, *noise)]
    whole = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, ids, sizes)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("text", ["😀", "👩‍👩‍👧", "日本語", "é"])
def test_a_split_character_appears_with_its_last_byte(tokenizer, text):
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    assert pieces == [*expected, "", ""]


def test_an_incomplete_end_is_shown_at_the_flush_alone(tokenizer):
    ids = tokenizer.encode("a😀")[:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "", "\ufffd"]


@settings(max_examples=300)
@given(
    words=st.lists(st.sampled_from(["\u2581hello", "ly", "b", "\u2581a", "\u2581", "é", "日", "😀"]), max_size=60),
    sizes=step_sizes,
)
def test_words_with_leading_spaces_and_byte_fallback(sentencepiece, words, sizes):
    convert = sentencepiece._hf.convert_tokens_to_ids
    ids = []
    for word in words:
        byte_pieces = [f"<0x{byte:02X}>" for byte in word.encode()]
        ids += convert(byte_pieces) if word in ("é", "日", "😀") else [convert(word)]
    pieces = pieces_of(sentencepiece, ids, sizes)
    assert "".join(pieces) == sentencepiece.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "pattern",
    ["plain words ", "日本語", "\ufffd"],
    ids=["ascii", "cjk", "replacement"],
)
def test_a_step_costs_no_more_after_a_long_text(tokenizer, pattern):
    ids = tokenizer.encode(pattern * 3000)[:9000]
    counting = CountingTokenizer(tokenizer)
    assert "".join(pieces_of(counting, ids)) == tokenizer.decode(ids)
    assert counting.decoded < MAX_DECODED_A_TOKEN * len(ids)


def test_a_long_run_of_broken_bytes_is_neither_kept_nor_slow(tokenizer):
    continuation_byte = tokenizer.encode("é")[1]
    counting = CountingTokenizer(tokenizer)
    detokenizer = IncrementalDetokenizer(counting)
    shown = sum(len(detokenizer.feed([continuation_byte])) for _ in range(3000))
    assert 3000 - shown <= 3
    assert shown + len(detokenizer.flush()) == 3000
    assert counting.decoded < MAX_DECODED_A_TOKEN * 3000


def first_match(text, stops):
    """End and string of the match that is complete first when ``text`` is read character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


stop_lists = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=1000)
@given(pieces=st.lists(st.text("ab<", max_size=5), max_size=12), stops=stop_lists, include=st.booleans())
def test_stop_strings_do_not_depend_on_the_borders_of_pieces(pieces, stops, include):
    checker = StopChecker(stops, include)
    match = first_match("".join(pieces), stops)
    shown, fed, matched = "", "", None
    for piece in pieces:
        fed += piece
        result = checker.feed(piece)
        shown, matched = shown + result.text, result.matched
        if matched is not None:
            break
        # Exactly the longest suffix that a stop string starts with is not shown.
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((start for start in starts if fed.endswith(start)), key=len)
        assert shown == fed[: len(fed) - len(held)]
    if match is None:
        assert matched is None
        assert shown + checker.flush() == "".join(pieces)
    else:
        end, stop = match
        assert matched == stop
        assert shown == "".join(pieces)[: end if include else end - len(stop)]


def test_a_stop_string_over_three_pieces():
    checker = StopChecker(["</answer>", "never"])
    assert checker.feed("yes</an").text == "yes"
    assert checker.feed("sw").text == ""
    result = checker.feed("er> more")
    assert (result.text, result.matched) == ("", "</answer>")


def test_a_start_that_comes_to_nothing_is_shown():
    checker = StopChecker(["</answer>"])
    assert checker.feed("a</an").text == "a"
    assert checker.feed("other").text == "</another"
