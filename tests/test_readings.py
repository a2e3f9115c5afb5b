"""What is kept of logits is right: against float64, sorting, and the plausible wrong formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from small import KINDS

from lens_gemma4 import HookedConfig, readings
from lens_gemma4.attribution import widest
from lens_gemma4.readings import (
    SPAN,
    Asked,
    Readings,
    asked_for,
    final_distribution,
    read,
    top_tokens,
)

V = 20 * SPAN + 37  # more spans than tokens are asked for, and some columns beyond the last one
CPU = torch.device("cpu")


def drawn(rows=5, d_vocab=V, seed=0, spread=3.0):
    return spread * torch.randn(rows, d_vocab, generator=torch.Generator().manual_seed(seed))


def ask(top_k=10, tokens=(3, V - 1), entropy=True):
    return Asked(top_k, torch.tensor(tokens, dtype=torch.long), entropy)


def final(logits):
    return final_distribution(logits.clone(), torch.empty_like(logits, dtype=widest(logits.dtype)))


# -- the largest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_vocab", [7, SPAN, 10 * SPAN, 11 * SPAN, V])
@pytest.mark.parametrize("k", [1, 5, 7])
def test_the_largest_are_those_of_a_sort(d_vocab, k):
    logits = drawn(d_vocab=d_vocab)
    values, ids = top_tokens(logits, k)
    assert torch.equal(values, logits.sort(-1, descending=True).values[:, :k])
    assert torch.equal(ids, logits.topk(k).indices)


def test_ties_are_different_tokens_of_that_value():
    logits = drawn().round()  # few values, each many times
    values, ids = top_tokens(logits, 10)
    assert torch.equal(values, logits.topk(10).values)
    assert torch.equal(logits.gather(-1, ids), values)
    assert all(len(row.unique()) == 10 for row in ids)


def test_the_largest_may_all_lie_in_one_span_or_beyond_the_last():
    logits = drawn()
    logits[0, 100:110] += 100
    logits[1, -10:] += 100
    ids = top_tokens(logits, 10)[1]
    assert sorted(ids[0].tolist()) == list(range(100, 110))
    assert sorted(ids[1].tolist()) == list(range(V - 10, V))
    one_of_each_span = logits[:, : 20 * SPAN].unflatten(-1, (20, SPAN)).amax(-1).topk(10).values
    assert not torch.equal(one_of_each_span[0], logits.topk(10).values[0])


# -- sums over the vocabulary -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_readings_are_those_of_float64(dtype):
    logits, others = drawn().to(dtype), drawn(seed=1).to(dtype)
    found = read(logits.clone(), ask(), final(others))
    logprobs, final_logprobs = logits.double().log_softmax(-1), others.double().log_softmax(-1)
    near = {"atol": 1e-12 if dtype == torch.float64 else 3e-5, "rtol": 0, "check_dtype": False}
    assert torch.equal(found["top_logits"], logits.topk(10).values.to(found["top_logits"].dtype))
    torch.testing.assert_close(found["top_logprobs"], logprobs.gather(-1, found["top_ids"]), **near)
    torch.testing.assert_close(found["token_logprobs"], logprobs[:, [3, V - 1]], **near)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(found["entropy"], entropy, **near)
    assert (entropy / math.log(2) - entropy).abs().min() > 1  # bits
    kl = (final_logprobs.exp() * (final_logprobs - logprobs)).sum(-1)
    torch.testing.assert_close(found["kl"], kl, **near)
    other_way = (logprobs.exp() * (logprobs - final_logprobs)).sum(-1)
    assert (other_way - kl).abs().min() > 1e-3
    assert {
        value.dtype for name, value in found.items() if "id" not in name and "rank" not in name
    } == {torch.promote_types(dtype, torch.float32)}


def test_sums_run_over_the_whole_vocabulary():
    logits = drawn(spread=1.0)
    found = read(logits.clone(), ask())
    among_the_top = logits.topk(10).values.log_softmax(-1)
    assert (found["top_logprobs"] - among_the_top).abs().min() > 1


def test_a_rank_counts_larger_logits():
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, -2.0]])
    found = read(logits.clone(), ask(2, (0, 1, 2, 3, 4)))
    assert found["token_ranks"].tolist() == [[3, 0, 1, 1, 4]]  # not by place, which parts 2 and 3


def test_without_tokens_entropy_and_final_there_is_nothing_of_them():
    found = read(drawn(), ask(tokens=(), entropy=False))
    assert set(found).isdisjoint({"entropy", "kl"})
    assert found["token_ranks"].shape == found["token_logprobs"].shape == (5, 0)


def test_the_divergence_from_itself_is_nothing_at_all():
    logits = drawn()
    assert read(logits.clone(), ask(), final(logits))["kl"].tolist() == [0.0] * 5
    nudged = logits.clone()
    nudged[:, 0] += 5
    assert (read(nudged, ask(), final(logits))["kl"] > 0).all()


def test_near_certainty_keeps_its_small_numbers():
    """The entropy is far below what sums around 20 resolve in float32."""
    logits = torch.zeros(1, V)
    logits[0, 5] = 20.0
    wanted = F.softmax(logits.double(), -1)
    entropy = -(wanted * wanted.log()).sum()
    found = read(logits.clone(), ask())["entropy"][0]
    assert found.item() == pytest.approx(entropy.item(), rel=1e-3)
    naive = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    assert naive.item() != pytest.approx(entropy.item(), rel=3e-3)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_tiles_are_only_a_way_to_go(monkeypatch, rows):
    logits, others = drawn(), drawn(seed=1)
    whole = read(logits.clone(), ask(), final(others))
    monkeypatch.setitem(readings.TILE_BYTES, "cpu", rows * V * 4)
    tiled = read(logits.clone(), ask(), final(others))
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, atol=1e-5, rtol=1e-5)
    other_final = read(logits.clone(), ask(), final(others.flip(0)))  # rows of another place
    assert not torch.allclose(other_final["kl"], whole["kl"])


# -- what is asked for --------------------------------------------------------------------------------


def asked(**given):
    cfg = HookedConfig.from_hf(KINDS["text"])
    words = {" Paris": 7}
    return asked_for(
        cfg, words.__getitem__, **{"top_k": 3, "tokens": (), "entropy": True, "device": CPU} | given
    )


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (5, [5]),
        (" Paris", [7]),
        ([" Paris", 2], [7, 2]),
        (torch.tensor([[4, 5]]), [4, 5]),
        (None, []),
        ((), []),
    ],
)
def test_tokens_are_ids_or_texts(tokens, ids):
    assert asked(tokens=tokens).tokens.tolist() == ids


@pytest.mark.parametrize("given", [{"top_k": 0}, {"top_k": 102}, {"tokens": 101}, {"tokens": [-1]}])
def test_what_the_vocabulary_has_not_is_refused(given):
    with pytest.raises(ValueError, match="this vocabulary"):
        asked(**given)
    asked(top_k=101, tokens=100)


# -- names and maps -----------------------------------------------------------------------------------


def some_readings(entropy=None, tokenizer=None):
    found = read(drawn(rows=4), ask(entropy=False))
    shaped = {name: value.unflatten(0, (2, 2)) for name, value in found.items()}
    return Readings(**shaped, entropy=entropy, token_ids=(3, V - 1), tokenizer=tokenizer)


def test_maps_are_of_the_right_token():
    some = some_readings()
    assert torch.equal(some.grid("probability"), some.top_logprobs[..., 0].exp())
    assert torch.equal(some.grid("probability", V - 1), some.token_logprobs[..., 1].exp())
    assert torch.equal(some.grid("rank", 3), some.token_ranks[..., 0].float())
    assert not torch.equal(some.grid("rank", 3), some.grid("rank", V - 1))


@pytest.mark.parametrize(
    ("value", "token", "told"),
    [
        ("rank", None, "say which token"),
        ("rank", 4, "was not asked about"),
        ("entropy", None, "entropy=True"),
        ("logits", None, "use one of"),
        ("kl", None, "use one of"),
    ],
)
def test_a_map_that_cannot_be_says_why(value, token, told):
    with pytest.raises(ValueError, match=told):
        some_readings().grid(value, token)


def test_a_token_without_text_is_named_by_its_number():
    class Silent:
        def decode(self, ids, clean_up_tokenization_spaces):
            return "" if ids == [3] else "word"

    assert some_readings(tokenizer=Silent()).name(3) == "token 3"
    assert some_readings(tokenizer=Silent()).name(4) == "word"
    assert some_readings().name(4) == "token 4"
