"""Pieces of new text join to it, no character is cut in two, and a text stops where it should."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lens_gemma4.new_text import CONTEXT, NewText, Stops, after

WORDS = ["▁the", "▁cat", "▁sat", "s", "▁", "\N{REPLACEMENT CHARACTER}"]


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Gemma's: words with a mark for spaces, and a token for each byte that no word spells."""
    names = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *WORDS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    words = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast(words)


def byte_level() -> PreTrainedTokenizerFast:
    """Another sort: every token is bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *alphabet]
    words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return fast(words)


def stripped() -> PreTrainedTokenizerFast:
    """A third: the space in front of a whole text is dropped."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace(prepend_scheme="always")
    return fast(words)


def fast(words: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


TOKENIZERS = {"byte fallback": byte_fallback(), "byte level": byte_level(), "stripped": stripped()}


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def pieces(text: NewText, ids: list[int]) -> list[str]:
    found = []
    for token in ids:
        text.add(token)
        found.append(text.take())
    return [*found, text.loose]


def spelt(tokenizer: PreTrainedTokenizerFast, word: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in word.encode()]


def drawn(rng: random.Random, tokenizer: PreTrainedTokenizerFast, n: int) -> list[int]:
    """Ids anyhow, so that most runs of bytes are no character; with some whole ones between."""
    ids: list[int] = []
    while len(ids) < n:
        if len(tokenizer) > 200 and rng.random() < 0.4:
            word = rng.choice("é€😀ž日")
            ids += (
                spelt(tokenizer, word)
                if tokenizer is TOKENIZERS["byte fallback"]
                else tokenizer(word, add_special_tokens=False)["input_ids"]
            )
        else:
            ids.append(rng.randrange(1, len(tokenizer)))
    return ids[:n]


@pytest.mark.parametrize("sort", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.integers(0, 12), new=st.integers(0, 2 * CONTEXT))
def test_pieces_join_to_the_text_of_the_new_tokens(sort, seed, before, new):
    tokenizer, rng = TOKENIZERS[sort], random.Random(seed)
    ids = [2, *drawn(rng, tokenizer, before + new)]
    prompt, rest = ids[: 1 + before], ids[1 + before :]
    found = pieces(NewText(tokenizer, prompt), rest)
    want = after(decode(tokenizer, prompt), decode(tokenizer, ids))
    assert "".join(found) == want


def test_tokens_shown_one_by_one_would_not_join():
    """The control of the test above."""
    tokenizer = TOKENIZERS["byte fallback"]
    ids = spelt(tokenizer, "€")
    assert "".join(decode(tokenizer, [token]) for token in ids) != "€" == decode(tokenizer, ids)
    words = TOKENIZERS["stripped"]
    ids = words.convert_tokens_to_ids(["▁the", "▁cat"])
    assert "".join(decode(words, [token]) for token in ids) == "thecat" != decode(words, ids)
    assert "".join(pieces(NewText(words, ids[:1]), ids[1:])) == " cat"


@pytest.mark.parametrize("sort", ["byte fallback", "byte level"])
def test_no_piece_holds_half_a_character(sort):
    tokenizer = TOKENIZERS[sort]
    word = "é€😀"
    ids = (
        [*spelt(tokenizer, word), tokenizer.convert_tokens_to_ids("▁cat")]
        if sort == "byte fallback"
        else tokenizer(word + " cat", add_special_tokens=False)["input_ids"]
    )
    found = pieces(NewText(tokenizer, [2]), ids)
    assert "".join(found) == "é€😀 cat"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)
    assert len(ids) > len([piece for piece in found if piece])  # some tokens gave none


def test_a_character_that_the_prompt_began_is_new_when_it_is_whole():
    tokenizer = TOKENIZERS["byte fallback"]
    euro = spelt(tokenizer, "€")
    assert pieces(NewText(tokenizer, [2, *euro[:2]]), euro[2:])[-1] == "€"
    tokenizer = TOKENIZERS["byte level"]
    euro = tokenizer("€", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(NewText(tokenizer, [2, *euro[:2]]), euro[2:])) == "€"


def test_what_never_becomes_a_character_comes_at_the_end():
    tokenizer = TOKENIZERS["byte fallback"]
    cat = tokenizer.convert_tokens_to_ids("▁cat")
    found = pieces(NewText(tokenizer, [2]), [cat, *spelt(tokenizer, "€")[:2]])
    assert found == [" cat", "", "", 2 * "\N{REPLACEMENT CHARACTER}"]


def test_a_token_costs_the_decoding_of_few():
    """However long the text is."""

    class Counting:
        longest = 0

        def decode(self, ids, **kwargs):
            self.longest = max(self.longest, len(ids))
            return "x" * len(ids)

        def convert_ids_to_tokens(self, token):
            return "x"

    tokenizer = Counting()
    text = NewText(tokenizer, [5] * 1000)
    for token in range(1000):
        text.add(token)
        text.has(["xyz"])
    assert text.whole() == "x" * 1000
    assert tokenizer.longest <= CONTEXT + 1


# -- where a text ends --------------------------------------------------------------------------------


def row() -> torch.Tensor:
    raise AssertionError("nobody asked for the row")


def stopped_at(stops: Stops, words: list[str], prompt: str = "<bos>") -> int | None:
    """After how many of the words the text ends."""
    tokenizer = TOKENIZERS["byte fallback"]
    text = NewText(tokenizer, [tokenizer.convert_tokens_to_ids(prompt)])
    for n, word in enumerate(words, 1):
        token = tokenizer.convert_tokens_to_ids(word)
        text.add(token)
        if stops.ended(token, text, row):
            return n
    return None


@pytest.mark.parametrize(
    ("stop", "after_words"),
    [
        (" cat", 2),
        ("cats", 3),  # over two tokens
        ("the cat", 2),
        (" cats sat", 4),  # over three
        (["sat", "cat"], 2),
        ("ats", 3),  # inside both
        ("dog", None),
        ("cat the", None),
        (5, 2),  # an id
        ([" sat", 5], 2),
    ],
)
def test_a_text_ends_where_a_stop_is_in_it(stop, after_words):
    words = ["▁the", "▁cat", "s", "▁sat"]
    assert stopped_at(Stops(stop, (), 300), words) == after_words


def test_a_stop_of_several_bytes_is_found_when_they_are_whole():
    words = ["▁the", *(f"<0x{byte:02X}>" for byte in "€".encode()), "▁cat"]
    assert stopped_at(Stops("€", (), 300), words) == 4


def test_the_prompt_does_not_stop_it():
    assert stopped_at(Stops("cats", (), 300), ["s", "▁sat"], prompt="▁cat") is None


def test_a_stop_far_back_was_found_then():
    """Only the end is searched, and nothing is missed or found twice."""
    stops = Stops("scat", (), 300)
    words = ["▁the"] * 100 + ["s", "▁cat"] + ["▁the"] * 100 + ["s", "c", "at"]
    assert stopped_at(stops, words) is None
    assert stopped_at(Stops("the cats", (), 300), ["▁the"] * 100 + ["▁cat", "s"]) == 102


def test_functions_see_the_row_and_are_asked_in_turn():
    asked = []
    stops = Stops([lambda ids: asked.append(ids.tolist()), lambda ids: ids[-1] == 6], (), 300)
    assert not stops.ended(5, None, lambda: torch.tensor([2, 5]))
    assert stops.ended(6, None, lambda: torch.tensor([2, 5, 6]))
    assert asked == [[2, 5], [2, 5, 6]]


def test_an_eos_ends_it_before_a_function_is_asked():
    assert Stops(lambda ids: 1 / 0, (9,), 300).ended(9, None, row)


def test_ids_may_be_numbers_of_any_sort():
    assert Stops(torch.tensor([4, 5]), (), 300).ids == {4, 5}
    assert Stops(torch.tensor(4), (), 300).ids == {4}
    assert Stops({4, 7}, (9,), 300).ids == {4, 7, 9}


@pytest.mark.parametrize(
    ("stop", "error", "match"),
    [
        ("", ValueError, "empty text"),
        (True, TypeError, "stop holds True"),
        (1.5, TypeError, "stop holds 1.5"),
        ([["a"]], TypeError, "use ids, texts, functions"),
        (300, ValueError, "300, which is no token: this vocabulary has 0 to 299"),
        (-1, ValueError, "-1, which is no token"),
    ],
)
def test_other_stops_are_refused(stop, error, match):
    with pytest.raises(error, match=match):
        Stops(stop, (), 300)
