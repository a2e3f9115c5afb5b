"""Detectors give what the patterns say, and on the shipped model what they find is what the answer hangs on."""

import doctest
import inspect
import random

import pytest
import torch
from small import KINDS, randomise

from lens_gemma4 import HookedConfig, HookedModel, detect_head, heads
from lens_gemma4.evals import induction_loss
from lens_gemma4.heads import (
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
    get_supported_heads,
    induction_scores,
    repeated_tokens,
)

IDS = torch.tensor([[2, 5, 6, 7, 5, 6, 9, 7]])
TEXT = "The key sound world three lamp. The key sound"


@pytest.fixture(scope="module")
def model():
    made = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(made, seed=5)
    return made.to(torch.float64)


@pytest.fixture(scope="module")
def cache(model):
    return model.run_with_cache(IDS)[1]


# -- patterns -----------------------------------------------------------------------------------------


def test_the_three_patterns_spelt_out():
    ids = IDS[0].tolist()
    for make, wanted in [
        (get_previous_token_head_detection_pattern, lambda q, k: k == q - 1),
        (get_duplicate_token_head_detection_pattern, lambda q, k: k < q and ids[k] == ids[q]),
        (
            get_induction_head_detection_pattern,
            lambda q, k: 0 < k <= q and ids[k - 1] == ids[q] and k - 1 < q,
        ),
    ]:
        want = torch.tensor([[float(wanted(q, k)) for k in range(8)] for q in range(8)])
        assert torch.equal(make(IDS[0]), want) and want.sum() > 1
        assert torch.equal(make(IDS), want[None])
        assert bool((want.triu(1) == 0).all())


def test_names_are_listed():
    assert get_supported_heads() == [
        "previous_token_head",
        "duplicate_token_head",
        "induction_head",
    ]


# -- scores -------------------------------------------------------------------------------------------


def by_hand(attention, pattern, exclude_bos, exclude_current, measure):
    """One head's score in plain loops."""
    on = paid = off = 0.0
    n = len(pattern)
    for q in range(n):
        for k in range(n):
            if (exclude_bos and k == 0) or (exclude_current and k == q):
                continue
            on += float(attention[q, k] * pattern[q, k])
            paid += float(attention[q, k])
            off += abs(float(attention[q, k] - pattern[q, k]))
    return on / paid if measure == "mul" else 1 - off / n


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("exclude_bos", [False, True])
@pytest.mark.parametrize("exclude_current", [False, True])
def test_scores_are_those_computed_by_hand(model, cache, measure, exclude_bos, exclude_current):
    options = {
        "error_measure": measure,
        "exclude_bos": exclude_bos,
        "exclude_current_token": exclude_current,
    }
    kept = cache["pattern", 2].clone()
    for name in get_supported_heads():
        got = detect_head(model, IDS, name, **options)
        assert got.shape == (4, 4) and got.dtype == torch.float64
        assert torch.equal(detect_head(model, IDS, name, cache=cache, **options), got)
        pattern = {
            "previous_token_head": get_previous_token_head_detection_pattern,
            "duplicate_token_head": get_duplicate_token_head_detection_pattern,
            "induction_head": get_induction_head_detection_pattern,
        }[name](IDS[0])
        for layer, head in [(0, 1), (1, 3), (2, 0)]:
            attention = cache["pattern", layer][0, head]
            want = by_hand(attention, pattern, exclude_bos, exclude_current, measure)
            assert abs(got[layer, head].item() - want) < 1e-12
            other = by_hand(
                attention,
                pattern,
                exclude_bos,
                exclude_current,
                "abs" if measure == "mul" else "mul",
            )
            assert abs(got[layer, head].item() - other) > 1e-3
    assert torch.equal(cache["pattern", 2], kept)  # a given cache is not written into


def test_what_is_excluded_changes_the_score(model):
    plain = detect_head(model, IDS, "previous_token_head")
    for option in ("exclude_bos", "exclude_current_token"):
        assert not torch.allclose(
            detect_head(model, IDS, "previous_token_head", **{option: True}), plain
        )


@pytest.mark.parametrize(
    "heads", [[(1, 2), (3, 0), (-1, -1)], {1: [2], 3: [0, 3]}], ids=["pairs", "by block"]
)
def test_heads_that_are_not_asked_for_are_minus_one(model, heads):
    every = detect_head(model, IDS, "previous_token_head")
    some = detect_head(model, IDS, "previous_token_head", heads=heads)
    wanted = torch.zeros(4, 4, dtype=torch.bool)
    wanted[[1, 3, 3], [2, 0, 3]] = True
    assert torch.equal(some[wanted], every[wanted]) and bool((some[~wanted] == -1).all())
    assert bool((every != -1).all())


def test_a_pattern_of_ones_own(model, cache):
    attention = cache["pattern", 1][0, 2]
    likeness = detect_head(model, IDS, attention, error_measure="abs")
    assert likeness[1, 2].item() == pytest.approx(1)
    likeness[1, 2] = -1
    assert likeness.max() < 0.99
    everything = torch.ones(8, 8).tril()
    torch.testing.assert_close(
        detect_head(model, IDS, everything), torch.ones(4, 4, dtype=torch.float64)
    )
    nothing = detect_head(model, IDS, torch.zeros(8, 8))
    assert torch.equal(nothing, torch.zeros(4, 4, dtype=torch.float64))


def test_a_head_whose_attention_is_all_left_out_scores_0(model):
    def bos_only(pattern, hook):
        pattern.zero_()
        pattern[..., 0] = 1

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", bos_only)]):
        scores = detect_head(model, IDS, "previous_token_head", exclude_bos=True)
    assert torch.equal(scores[1], torch.zeros(4, dtype=torch.float64)) and bool(scores[2].any())


def test_several_texts_are_averaged_each_by_itself(tiny_model):
    texts = [TEXT, "The capital of France is Paris."]
    each = torch.stack([detect_head(tiny_model, text, "previous_token_head") for text in texts])
    together = detect_head(tiny_model, texts, "previous_token_head")
    torch.testing.assert_close(together, each.mean(0))
    assert not torch.allclose(each[0], each[1], atol=1e-3)
    ids = tiny_model.to_tokens(TEXT)
    assert torch.equal(detect_head(tiny_model, ids, "previous_token_head"), each[0])
    assert torch.equal(detect_head(tiny_model, ids[0], "previous_token_head"), each[0])
    one = tiny_model.run_with_cache(TEXT, remove_batch_dim=True)[1]
    torch.testing.assert_close(
        detect_head(tiny_model, TEXT, "previous_token_head", cache=one), each[0]
    )


def test_nothing_is_left_behind_and_no_block_above_the_last_asked_runs(model):
    ran = []
    with model.hooks(
        fwd_hooks=[("blocks.*.hook_resid_pre", lambda x, hook: ran.append(hook.layer()))]
    ):
        detect_head(model, IDS, "previous_token_head", heads=[(1, 0)])
    assert ran == [0, 1]
    assert not any(point.has_hooks() for point in model.hook_dict.values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"detection_pattern": "copy_head"}, ValueError, "'copy_head'; known are 'previous_token"),
        ({"detection_pattern": torch.ones(7, 7)}, ValueError, r"\[7, 7\]; the text has 8 tokens"),
        ({"detection_pattern": torch.ones(8, 8)}, ValueError, "looks ahead"),
        ({"heads": [(0, 4)]}, IndexError, "heads 0 to 3"),
        ({"heads": [(4, 0)]}, IndexError, "blocks 0 to 3"),
        ({"heads": []}, ValueError, "heads is empty"),
        ({"seq": IDS[:, :1]}, ValueError, "one token"),
        ({"seq": IDS.repeat(2, 1), "cache": True}, ValueError, "seq holds 2 texts"),
        ({"seq": IDS[:, :5], "cache": True}, ValueError, r"patterns \[8, 8\].*text of 5"),
    ],
)
def test_errors_say_what_is_needed(model, cache, arguments, error, message):
    asked = {"seq": IDS, "detection_pattern": "previous_token_head"} | arguments
    if asked.pop("cache", False):
        asked["cache"] = cache
    with pytest.raises(error, match=message):
        detect_head(model, **asked)


def test_an_unknown_measure_is_refused(model):
    with pytest.raises(ValueError, match="error_measure is 'square'"):
        inspect.unwrap(detect_head)(model, IDS, "previous_token_head", error_measure="square")


# -- on the shipped model -----------------------------------------------------------------------------


def best(scores, n):
    return [divmod(i, scores.shape[1]) for i in scores.flatten().topk(n).indices.tolist()]


def test_previous_token_heads_are_found(tiny_model):
    tokens = repeated_tokens(tiny_model, 4, 12, seed=0)
    scores = detect_head(tiny_model, tokens, "previous_token_head")
    found = scores > 0.8
    assert 2 <= found.sum() <= 6 and bool(
        (scores[~found] < 0.5).all()
    )  # some are, the rest are far
    assert not found[3:].any()  # in front of the first full block, whose induction heads read them


def test_induction_scores_count_only_where_there_is_something_to_find(tiny_model):
    scores = induction_scores(tiny_model, 2, 12)
    tokens = repeated_tokens(tiny_model, 2, 12, seed=0)
    _, cache = tiny_model.run_with_cache(tokens)
    q = torch.arange(13, 25)  # second coming; what followed the first is 11 back
    found = best(scores, 2)
    for layer, head in [*found, *best(-scores, 2)]:
        want = cache["pattern", layer][:, head, q, q - 11].mean()
        torch.testing.assert_close(scores[layer, head], want)
        # The control: the same word's first coming itself is not what an induction head looks at.
        beside = cache["pattern", layer][:, head, q, q - 12].mean()
        assert (layer, head) not in found or want > beside + 0.5
    halved = detect_head(tiny_model, tokens, "induction_head")
    torch.testing.assert_close(halved[3, 0], scores[3, 0] * 12 / 25)
    some = induction_scores(tiny_model, 2, 12, heads=[(3, 0)])
    assert some[3, 0] == scores[3, 0] and bool((some.flatten()[:12] == -1).all())


def test_a_window_hides_from_sliding_heads_what_full_ones_see(tiny_model):
    """The window is 16: what followed the first coming is 15 back at 16 tokens and 19 back at 20."""
    sliding = [0, 1, 2, 4, 5, 6]
    near, far = induction_scores(tiny_model, 2, 16), induction_scores(tiny_model, 2, 20)
    assert near[sliding].max() > 0.2 and bool((far[sliding] == 0).all())
    assert bool((far[[3, 7]] > 0.7).all()) and bool((near[[3, 7]] > 0.7).all())


def test_ablating_the_induction_heads_breaks_repeating_and_others_do_not(tiny_model):
    period = 24
    scores = induction_scores(tiny_model, 2, period)
    order = best(scores, 32)

    def loss_without(heads):
        def ablate(z, hook):  # [batch pos head d_head]
            z[:, :, [head for layer, head in heads if layer == hook.layer()]] = 0

        points = {f"blocks.{layer}.attn.hook_z" for layer, _ in heads}
        with tiny_model.hooks(fwd_hooks=[(point, ablate) for point in points]):
            return induction_loss(tiny_model, batch_size=2, subseq_len=period, seed=1).item()

    clean = induction_loss(tiny_model, batch_size=2, subseq_len=period, seed=1).item()
    rng = random.Random(0)
    others = [loss_without(rng.sample(order[8:], 4)) for _ in range(5)]
    # Four heads at random may be the previous-token heads that induction reads: that costs a little.
    assert clean < 0.05 and max(others) < 0.5
    assert loss_without(order[:4]) > 3 * max(others) + 1


def test_random_tokens_come_twice_and_are_ordinary(tiny_model, model):
    tokens = repeated_tokens(tiny_model, 3, 700, seed=0)
    assert tokens.shape == (3, 1401) and bool((tokens[:, 0] == tiny_model.bos_token_id).all())
    assert torch.equal(tokens[:, 1:701], tokens[:, 701:])
    special = set(tiny_model.tokenizer.all_special_ids)
    assert {4, 5, 6} <= special  # the placeholders, which do not run without media
    for row in tokens[:, 1:701]:
        assert len(set(row.tolist())) == 700 and not special & set(row.tolist())
    assert torch.equal(tokens, repeated_tokens(tiny_model, 3, 700, seed=0))
    assert not torch.equal(tokens, repeated_tokens(tiny_model, 3, 700, seed=1))
    assert not torch.equal(tokens[0], tokens[1])
    assert repeated_tokens(model, 2, 5, prepend_bos=False).shape == (2, 10)  # without a tokenizer
    with pytest.raises(ValueError, match="there are 98 ordinary ones"):
        repeated_tokens(model, 1, 99)


def test_the_examples_run():
    ran = doctest.testmod(heads, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
