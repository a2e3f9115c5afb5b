"""What a token is chosen from is what transformers' own processors leave, in its order; draws have randomness of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lens_gemma4.sampling import Sampling, generator_of

D_VOCAB = 47
PROMPTS = torch.tensor([[0, 0, 5, 6, 5], [7, 40, 46, 3, 7]])  # the first is padded by two
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

# Every filter alone, all together, some pairs, and the ends of the ranges.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"top_k": 9, "top_p": 0.8},
    {"top_p": 0.8, "min_p": 0.2},
    {
        "temperature": 1.9,
        "top_k": 12,
        "top_p": 0.85,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
    },
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """Any model of transformers': its `generate` makes the processors."""
    config = LlamaConfig(
        vocab_size=D_VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config)


def processors(reference: Any, **settings: Any) -> Any:
    config = GenerationConfig(do_sample=True, **({"top_k": 0} | settings))
    return reference._get_logits_processor(
        config, input_ids_seq_length=PROMPTS.shape[1], model_kwargs={"attention_mask": MASK}
    )


def logits(seed: int = 0, scale: float = 4.0) -> Tensor:
    return scale * torch.randn(2, D_VOCAB, generator=torch.Generator().manual_seed(seed))


def seen() -> Tensor:
    """Tokens of the prompts, padding left out."""
    found = torch.zeros(2, D_VOCAB, dtype=torch.bool)
    found[0, [5, 6]] = found[1, [7, 40, 46, 3]] = True
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_scores_are_those_of_transformers_processors(reference, settings):
    theirs = processors(reference, **settings)
    for seed in range(20):
        given = logits(seed, scale=1.0 + seed % 5)
        want = theirs(PROMPTS, given.clone())
        got = Sampling(do_sample=True, **settings).scores(given, seen())
        assert torch.equal(got, want)
    if settings and settings not in ({"top_k": 100}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert not torch.equal(got, given)  # it did something


def test_ties_are_kept_or_dropped_as_there(reference):
    """Equal logits, in rows of few different values, as low precision leaves them."""
    for seed, settings in itertools.product(range(20), SETTINGS):
        given = logits(seed).round()
        want = processors(reference, **settings)(PROMPTS, given.clone())
        assert torch.equal(Sampling(do_sample=True, **settings).scores(given, seen()), want)


def test_another_order_would_differ(reference):
    """The control: what the comparison above is able to see."""
    both = Sampling(do_sample=True, temperature=2.5, top_p=0.7)
    hot, narrow = Sampling(True, temperature=2.5), Sampling(True, top_p=0.7)
    given = logits()
    other = hot.scores(narrow.scores(given, None), None)
    assert not torch.equal(both.scores(given, None) == -torch.inf, other == -torch.inf)
    penal = Sampling(True, temperature=2.5, repetition_penalty=1.5, min_p=0.2)
    pads_count = seen()
    pads_count[0, 0] = True
    given[0, 0] = given[0].max() + 1
    assert not torch.equal(penal.scores(given, seen()), penal.scores(given, pads_count))
    want = processors(reference, temperature=2.5, repetition_penalty=1.5, min_p=0.2)
    assert torch.equal(penal.scores(given, seen()), want(PROMPTS, given.clone()))


def test_the_logits_that_were_given_stay():
    given = logits()
    before = given.clone()
    for settings in SETTINGS:
        Sampling(do_sample=True, **settings).choose(given, seen(), generator_of(0, given.device))
    assert torch.equal(given, before)


def test_without_do_sample_the_likeliest_is_taken_after_the_penalty():
    given = torch.tensor([[5.0, 4.0, -1.0]])
    held = torch.tensor([[True, False, False]])
    assert Sampling().choose(given).tolist() == [0]
    assert Sampling(repetition_penalty=2.0).choose(given, held).tolist() == [1]
    negative = torch.tensor([[-4.0, -5.0, -9.0]])  # divided, a negative logit would rise
    assert Sampling(repetition_penalty=2.0).choose(negative, held).tolist() == [1]


def test_low_precision_is_widened_first():
    given = logits().bfloat16()
    got = [
        Sampling(do_sample=True, top_p=0.6).choose(x, None, generator_of(3, x.device)).tolist()
        for x in (given, given.float())
    ]
    assert got[0] == got[1]


def draws(n: int, seed: int, **settings: Any) -> Tensor:
    """How often each token was drawn."""
    given = logits(1, scale=1.5)[:1].expand(n, D_VOCAB)
    drawn = Sampling(do_sample=True, **settings).choose(
        given, None, generator_of(seed, given.device)
    )
    return torch.bincount(drawn, minlength=D_VOCAB)


def strangeness(counts: Tensor, probs: Tensor) -> float:
    """Chi-squared over its degrees of freedom: near 1 when the counts follow the probabilities."""
    expected = probs * counts.sum()
    often = expected >= 5
    return float(((counts - expected) ** 2 / expected)[often].sum() / (often.sum() - 1))


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.5}, {"top_k": 10, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(settings):
    counts = draws(20_000, seed=0, **settings)
    given = logits(1, scale=1.5)[:1]
    probs = Sampling(do_sample=True, **settings).scores(given, None).softmax(-1)[0]
    assert counts[probs == 0].sum() == 0
    assert strangeness(counts, probs) < 1.7
    other = (given / 1.1).softmax(-1)[0]  # the control: a temperature a tenth off
    assert strangeness(counts, other) > 2.5


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("at", [3, slice(None)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_nothing_is_chosen_from_numbers_that_are_none(do_sample, at, number):
    given = logits()
    given[0, at] = number
    if number == -torch.inf and at == 3:
        assert Sampling(do_sample=do_sample).choose(given)[0] != 3
        return
    with pytest.raises(RuntimeError, match=r"NaN.*check_finite"):
        Sampling(do_sample=do_sample).choose(given)


def test_the_same_seed_draws_the_same_and_no_seed_draws_anew():
    assert torch.equal(draws(50, seed=7), draws(50, seed=7))
    assert not torch.equal(draws(50, seed=7), draws(50, seed=8))
    device = torch.device("cpu")
    assert generator_of(None, device).initial_seed() != generator_of(None, device).initial_seed()


def test_the_global_randomness_stays_as_it_was():
    before = torch.get_rng_state()
    draws(10, seed=1)
    Sampling(do_sample=True).choose(logits(), None, generator_of(None, torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"temperature": 0.0}, "leave out do_sample"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": 0}, "top_k is 0; use 1 or more"),
        ({"top_p": 1.2}, "top_p is 1.2; use 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; use 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Sampling(do_sample=True, **settings)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_settings_that_would_do_nothing_are_refused(settings):
    with pytest.raises(
        ValueError, match=f"{next(iter(settings))} would do nothing.*do_sample=True"
    ):
        Sampling(**settings)


def test_ties_at_the_edge_of_top_p_are_cut_as_transformers_cuts_them(reference):
    """Four tokens alike hold a quarter each: half of the probability is two of them."""
    given = torch.full((2, D_VOCAB), -100.0)
    given[:, [3, 9, 20, 31]] = 0.0
    for p in (0.25, 0.5, 0.75):
        want = processors(reference, top_p=p)(PROMPTS, given.clone())
        got = Sampling(do_sample=True, top_p=p).scores(given.clone(), seen())
        assert torch.equal(got, want)
        assert got.isfinite().sum(-1).tolist() == [round(4 * p)] * 2
