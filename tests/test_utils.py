"""The small helpers: what they compute, beside the plausible wrong answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lens_gemma4 import names, utils
from lens_gemma4.utils import (
    Slice,
    lm_accuracy,
    lm_cross_entropy_loss,
    logits_to_df,
    remove_batch_dim,
    sample_logits,
    test_prompt,
    to_numpy,
    tokenize_and_concatenate,
)

# -- Slice ---------------------------------------------------------------------------------------

AXIS = torch.arange(24).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, AXIS),
        (1, AXIS[:, 1]),
        (-1, AXIS[:, -1]),
        ((2,), AXIS[:, :2]),
        ((1, 3), AXIS[:, 1:3]),
        ((0, 4, 2), AXIS[:, ::2]),
        ((-2, None), AXIS[:, -2:]),
        (slice(1, None), AXIS[:, 1:]),
        ([3, 0], AXIS[:, [3, 0]]),
        ([2], AXIS[:, 2:3]),
        ([], AXIS[:, :0]),
        (torch.tensor([3, -1]), AXIS[:, [3, 3]]),
        (np.array([1, 2]), AXIS[:, 1:3]),
        ([True, False, False, True], AXIS[:, [0, 3]]),
    ],
)
def test_a_slice_takes_places_of_one_axis(given, wanted):
    for dim in (1, -2):
        got = Slice(given).apply(AXIS, dim=dim)
        assert got.shape == wanted.shape and torch.equal(got, wanted)
    places = np.atleast_1d(wanted.reshape(2, -1, 3)[0, :, 0] // 3)
    assert Slice(given).indices(4).tolist() in (places.tolist(), [given])


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2), np.array(2)])
def test_a_number_of_numpy_or_torch_is_an_int(number):
    assert Slice(number).apply(AXIS, dim=1).shape == (2, 3)
    assert torch.equal(Slice.unwrap(number).apply(AXIS, dim=1), AXIS[:, [2]])
    assert torch.equal(Slice(range(1, 3)).apply(AXIS, dim=1), AXIS[:, 1:3])
    for wrong in (np.float64(2), torch.tensor(True)):
        with pytest.raises(TypeError, match="slice"):
            Slice(wrong)


def test_an_int_keeps_its_axis_when_unwrapped():
    assert Slice.unwrap(-1).apply(AXIS, dim=1).shape == (2, 1, 3)
    assert Slice(-1).apply(AXIS, dim=1).shape == (2, 3)
    chosen = Slice((1, 2))
    assert Slice.unwrap(chosen) is chosen
    assert Slice.unwrap(None).apply(AXIS).shape == AXIS.shape


def test_positions_are_cut_as_in_transformerlens(tiny_model):
    _, whole = tiny_model.run_with_cache("The capital of France is")
    for cut, kept in ((-1, [-1]), ((1, 3), [1, 2]), ([0, 2], [0, 2])):
        _, cache = tiny_model.run_with_cache("The capital of France is", pos_slice=cut)
        assert torch.equal(cache["resid_post", 0], whole["resid_post", 0][:, kept])
        assert torch.equal(cache["pattern", 0], whole["pattern", 0][:, :, kept])


@pytest.mark.parametrize("wrong", [4, -5, [0, 4], torch.tensor([-5]), [True] * 3])
def test_a_place_outside_the_axis_is_an_error(wrong):
    with pytest.raises(IndexError, match="does not fit an axis of 4"):
        Slice(wrong).apply(AXIS, dim=1)


@pytest.mark.parametrize("wrong", ["1", 1.5, True, [0.5], [[0, 1]]])
def test_what_is_no_slice_is_refused(wrong):
    with pytest.raises(TypeError, match="slice"):
        Slice(wrong)


def test_indices_of_an_unknown_axis_need_its_size():
    assert Slice(3).indices().tolist() == [3]
    with pytest.raises(ValueError, match="max_ctx"):
        Slice((1, 2)).indices()


# -- arrays --------------------------------------------------------------------------------------


def test_to_numpy_of_everything():
    half = torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    assert to_numpy(half).dtype == np.float32 and to_numpy(half).tolist() == [1.5, 2.0]
    assert to_numpy(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    assert to_numpy(torch.tensor([1, 2])).dtype == np.int64
    assert to_numpy([1, 2]).tolist() == [1, 2] and to_numpy(3).shape == ()
    assert to_numpy(np.ones(2)).tolist() == [1, 1]


def test_remove_batch_dim_only_of_one():
    assert remove_batch_dim(torch.ones(1, 2, 3)).shape == (2, 3)
    assert remove_batch_dim(torch.ones(2, 1, 3)).shape == (2, 1, 3)
    assert remove_batch_dim(torch.tensor([True])).shape == ()


def test_get_act_name_is_the_tables():
    assert utils.get_act_name is names.get_act_name


# -- losses --------------------------------------------------------------------------------------


def random_logits(rows: int = 2, pos: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, pos, 7, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 7, (rows, pos), generator=generator)


def by_hand(logits: torch.Tensor, tokens: torch.Tensor, row: int, target: int) -> float:
    """-log p of the token at `target`, read from the position before it."""
    at = [math.exp(value) for value in logits[row, target - 1].tolist()]
    return -math.log(at[int(tokens[row, target])] / sum(at))


def test_the_loss_is_of_the_next_token():
    logits, tokens = random_logits()
    wanted = torch.tensor([[by_hand(logits, tokens, r, t) for t in range(1, 5)] for r in (0, 1)])
    wanted = wanted.double()
    got = lm_cross_entropy_loss(logits, tokens, per_token=True)
    torch.testing.assert_close(got, wanted, atol=1e-7, rtol=0)
    torch.testing.assert_close(
        lm_cross_entropy_loss(logits, tokens), wanted.mean(), atol=1e-7, rtol=0
    )
    same = -logits.log_softmax(-1).gather(-1, tokens[..., None])[:, 1:, 0]  # the wrong formula
    assert (got - same).abs().max() > 0.1


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1, 1], [1] * 5], [[1, 1, 1, 0, 0], [1] * 5]])
def test_nothing_read_from_or_at_padding_counts(mask):
    logits, tokens = random_logits()
    mask = torch.tensor(mask)
    alone = lm_cross_entropy_loss(
        logits[:1, mask[0].bool()], tokens[:1, mask[0].bool()], per_token=True
    )
    other = lm_cross_entropy_loss(logits[1:], tokens[1:], per_token=True)
    wanted = torch.cat([alone[0], other[0]]).mean()
    torch.testing.assert_close(lm_cross_entropy_loss(logits, tokens, mask), wanted)
    by_target = lm_cross_entropy_loss(logits, tokens, targets=mask.bool())
    if mask[0, 0] == 0:  # the control: looking at targets alone takes in one read from padding
        assert (by_target - wanted).abs() > 1e-3
    kept = lm_cross_entropy_loss(logits, tokens, mask, per_token=True)
    assert torch.count_nonzero(kept[0]) == 2 and torch.count_nonzero(kept[1]) == 4


def test_other_tokens_can_be_left_out_as_targets_and_still_be_read_from():
    logits, tokens = random_logits(rows=1)
    words = torch.tensor([[True, True, False, True, True]])
    losses = lm_cross_entropy_loss(logits, tokens, targets=words, per_token=True)
    assert (losses[0] != 0).tolist() == [True, False, True, True]
    wanted = sum(by_hand(logits, tokens, 0, t) for t in (1, 3, 4)) / 3
    assert math.isclose(
        float(lm_cross_entropy_loss(logits, tokens, targets=words)), wanted, rel_tol=1e-9
    )


def test_the_loss_is_wide_and_finite_at_what_is_left_out():
    logits, tokens = random_logits()
    low = logits.bfloat16()
    loss = lm_cross_entropy_loss(low, tokens)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, lm_cross_entropy_loss(low.float(), tokens), atol=0, rtol=0)
    narrow = -low.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    assert (narrow - loss).abs() > 1e-5  # the control: bfloat16 shows
    logits[0, 0] = float("nan")
    mask = torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    assert torch.isfinite(lm_cross_entropy_loss(logits, tokens, mask))


def test_a_mean_over_no_target_is_an_error():
    logits, tokens = random_logits(pos=1)
    with pytest.raises(ValueError, match="no token of"):
        lm_cross_entropy_loss(logits, tokens)
    logits, tokens = random_logits()
    with pytest.raises(ValueError, match="no token of"):
        lm_cross_entropy_loss(logits, tokens, torch.zeros_like(tokens))
    assert (
        lm_cross_entropy_loss(logits, tokens, torch.zeros_like(tokens), per_token=True).sum() == 0
    )


def test_accuracy_is_of_the_next_token():
    tokens = torch.tensor([[1, 2, 3, 4]])
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 3, 0, 6]]), 7).double()
    assert lm_accuracy(logits, tokens, per_token=True).tolist() == [[True, True, False]]
    assert math.isclose(float(lm_accuracy(logits, tokens)), 2 / 3, rel_tol=1e-6)
    assert lm_accuracy(torch.nn.functional.one_hot(tokens, 7).double(), tokens) == 0  # not its own


# -- sampling ------------------------------------------------------------------------------------

PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05])


def drawn(n: int = 4000, probs: torch.Tensor = PROBS, **how) -> torch.Tensor:
    """How often each token came, `[d_vocab]`."""
    rows = probs.log().expand(n, -1)
    return torch.bincount(sample_logits(rows, seed=0, **how), minlength=len(probs)) / n


def test_draws_follow_the_probabilities_and_the_temperature():
    assert (drawn() - PROBS).abs().max() < 0.03
    half = PROBS.sqrt() / PROBS.sqrt().sum()
    assert (drawn(temperature=2.0) - half).abs().max() < 0.03
    assert (drawn(temperature=2.0) - PROBS).abs().max() > 0.1
    assert drawn(temperature=0.0).tolist() == [1, 0, 0, 0]


def test_top_k_and_top_p_keep_the_likeliest_and_share_the_rest():
    two = torch.tensor([0.5, 0.3, 0, 0]) / 0.8
    assert (drawn(top_k=2) - two).abs().max() < 0.03
    assert (drawn(top_k=4) - PROBS).abs().max() < 0.03
    assert (drawn(top_p=0.7) - two).abs().max() < 0.03  # 0.5 alone is too little
    assert drawn(top_p=0.45).tolist() == drawn(top_p=1e-9).tolist() == [1, 0, 0, 0]
    assert (drawn(top_p=1.0) - PROBS).abs().max() < 0.03
    shuffled = PROBS[[2, 0, 3, 1]]
    kept = drawn(probs=shuffled, top_p=0.7)
    assert (kept > 0).tolist() == [False, True, False, True]
    assert drawn(top_k=3, top_p=0.55)[2] == 0 and drawn(top_k=3, top_p=0.55)[1] > 0
    exact = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert (drawn(probs=exact, top_p=0.75) > 0).tolist() == [True, True, False, False]


def test_a_penalty_counts_each_time():
    rows = PROBS.log().expand(3, -1)
    tokens = torch.tensor([[0, 0, 1], [3, 3, 3], [2, 2, 2]])
    n = 3000
    got = sample_logits(
        rows.repeat(n, 1), freq_penalty=1.5, tokens=tokens.repeat(n, 1), seed=1
    ).view(n, 3)
    for row in range(3):
        counts = torch.bincount(tokens[row], minlength=4)
        wanted = (PROBS.log() - 1.5 * counts).softmax(-1)
        once = (PROBS.log() - 1.5 * (counts > 0)).softmax(-1)  # the wrong formula
        share = torch.bincount(got[:, row], minlength=4) / n
        assert (share - wanted).abs().max() < 0.04
        if row != 1:
            assert (share - once).abs().max() > 0.04
    with pytest.raises(ValueError, match="tokens="):
        sample_logits(rows, freq_penalty=1.0)


def test_a_draw_can_be_repeated():
    rows = torch.zeros(64, 50)
    assert torch.equal(sample_logits(rows, seed=3), sample_logits(rows, seed=3))
    assert not torch.equal(sample_logits(rows, seed=3), sample_logits(rows, seed=4))
    given = sample_logits(rows, generator=torch.Generator().manual_seed(3))
    assert torch.equal(given, sample_logits(rows, seed=3))
    before = torch.random.get_rng_state()
    sample_logits(rows, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(ValueError, match="seed and generator"):
        sample_logits(rows, seed=3, generator=torch.Generator())


@pytest.mark.parametrize(
    "how", [{"temperature": -1.0}, {"top_k": 0}, {"top_k": 5}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_a_value_out_of_range_is_an_error(how):
    with pytest.raises(ValueError, match=f"{next(iter(how))} is"):
        sample_logits(PROBS.log()[None], **how)


def test_sampling_leaves_the_logits_alone_and_takes_low_precision():
    rows = PROBS.log()[None].bfloat16()
    kept = rows.clone()
    sample_logits(rows, top_k=2, top_p=0.9, freq_penalty=1.0, tokens=torch.tensor([[0]]), seed=0)
    assert torch.equal(rows, kept)


# -- tables and prompts --------------------------------------------------------------------------


def test_logits_as_a_table(tiny_model):
    logits = tiny_model("The capital of France is")[0, -1]
    table = logits_to_df(logits, tiny_model, top_k=3)
    assert list(table.columns) == [
        "token_index",
        "token_string",
        "logit",
        "log_prob",
        "probability",
    ]
    assert len(table) == 3 and table["logit"].is_monotonic_decreasing
    assert table["token_index"][0] == int(logits.argmax())
    assert table["token_string"].tolist() == [tiny_model.to_string(i) for i in table["token_index"]]
    whole = logits_to_df(logits)
    assert len(whole) == len(logits) and "token_string" not in whole
    assert math.isclose(whole["probability"].sum(), 1, rel_tol=1e-5)
    assert math.isclose(whole["log_prob"][0], float(logits.log_softmax(-1).max()), rel_tol=1e-5)
    by_tokenizer = logits_to_df(logits, tiny_model.tokenizer, top_k=3)
    assert by_tokenizer["token_string"].tolist() == table["token_string"].tolist()


def test_a_prompt_and_its_answers(tiny_model):
    lines = []
    prompt = "The capital of France is"
    ranks = test_prompt(prompt, ["Paris", " Rome"], tiny_model, printer=lines.append)
    logits = tiny_model(prompt)[0, -1]
    order = logits.argsort(descending=True).tolist()
    assert ranks == [[order.index(tiny_model.to_single_token(w))] for w in (" Paris", " Rome")]
    assert ranks[0] == [0] and ranks[1] != [0]
    said = "\n".join(lines)
    assert "'<bos>'" in said and "' Paris': rank 0" in said and f"{logits.max():.2f}" in said


def test_each_token_of_an_answer_is_asked_for_after_those_before_it(tiny_model):
    prompt, answer = "The capital of France", " is Paris"
    (ranks,) = test_prompt(prompt, answer, tiny_model, print_details=False)
    wanted = []
    for so_far, word in ((prompt, " is"), (f"{prompt} is", " Paris")):
        logits = tiny_model(so_far)[0, -1]
        wanted.append(int((logits > logits[tiny_model.to_single_token(word)]).sum()))
    assert ranks == wanted
    assert test_prompt(prompt, "is", tiny_model, False, print_details=False) != [ranks[:1]]


def test_nothing_is_printed_unless_asked(tiny_model, capsys):
    test_prompt("The capital of France is", "Paris", tiny_model, print_details=False)
    assert capsys.readouterr().out == ""
    test_prompt("The capital of France is", "Paris", tiny_model, top_k=2)
    assert "' Paris'" in capsys.readouterr().out


# -- rows of texts -------------------------------------------------------------------------------


def test_texts_are_joined_and_cut_into_rows(tiny_model):
    tokenizer = tiny_model.tokenizer
    texts = ["The capital of France is", "<bos>The cat", "Paris is the capital"]
    rows = tokenize_and_concatenate([{"text": text} for text in texts], tokenizer, max_length=6)
    plain = [tokenizer(text.removeprefix("<bos>"), add_special_tokens=False) for text in texts]
    stream = [i for ids in plain for i in [*ids["input_ids"], tokenizer.eos_token_id]]
    n = len(stream) // 5
    assert len(stream) % 5  # so that something is left over
    assert rows["tokens"].shape == (n, 6) and len(rows) == n
    assert (rows["tokens"][:, 0] == tokenizer.bos_token_id).all()
    assert rows["tokens"][:, 1:].flatten().tolist() == stream[: 5 * n]
    bare = tokenize_and_concatenate(texts[:1], tokenizer, max_length=3, add_bos_token=False)
    assert bare["tokens"].tolist() == [stream[:3], stream[3:6]]
    batch = next(iter(DataLoader(rows, batch_size=2)))
    assert torch.equal(batch["tokens"], rows["tokens"][:2])
    assert torch.equal(rows[1]["tokens"], rows["tokens"][1])
    named = [{"story": text} for text in texts]
    again = tokenize_and_concatenate(named, tokenizer, max_length=6, column_name="story")
    assert torch.equal(again["tokens"], rows["tokens"])


def test_too_little_text_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="a row of max_length=50 takes 49"):
        tokenize_and_concatenate(["The cat"], tiny_model.tokenizer, max_length=50)
    with pytest.raises(ValueError, match="max_length=1 takes 0"):
        tokenize_and_concatenate(["The cat"], tiny_model.tokenizer, max_length=1)


def test_a_tokenizer_without_an_end_token_is_refused(tiny_model):
    class Endless:
        bos_token_id, eos_token_id = 2, None

    with pytest.raises(ValueError, match="end token is None"):
        tokenize_and_concatenate(["The cat"], Endless())
