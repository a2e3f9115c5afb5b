"""Measures against what they are made of, and on the shipped model, whose card says how well it does."""

import doctest

import pytest
import torch
from small import KINDS, randomise

from lens_gemma4 import HookedConfig, HookedModel, evals
from lens_gemma4.evals import (
    NAMES,
    IOIDataset,
    evaluate,
    evaluate_on_dataset,
    induction_loss,
    ioi_eval,
    make_data_loader,
    sanity_check,
)

FACTS = [
    "The capital of France is Paris.",
    "People in Egypt speak Arabic.",
    "The country of Kenya is in Africa.",
] * 8
NOISE = [" ".join(fact.split()[::-1]) for fact in FACTS]


@pytest.fixture(scope="module")
def untrained(tiny_model):
    """The same network and tokenizer with random weights."""
    model = HookedModel(tiny_model.cfg)
    randomise(model, seed=0)
    model.match_dtype()
    model.set_tokenizer(tiny_model.tokenizer)
    return model


# -- loss on text -------------------------------------------------------------------------------------


def test_the_loss_on_texts_is_the_mean_over_all_targets(tiny_model):
    loader = make_data_loader(FACTS, tiny_model.tokenizer, batch_size=4, max_length=20)
    rows = torch.cat([batch["tokens"] for batch in loader])
    assert rows.shape[1] == 20 and len(rows) % 4, "a last batch that is not full"
    log_probs = tiny_model(rows)[:, :-1].log_softmax(-1)
    want = -log_probs.gather(-1, rows[:, 1:, None]).mean().item()
    assert evaluate_on_dataset(tiny_model, loader) == pytest.approx(want, rel=1e-5)
    batches = [tiny_model(batch["tokens"], return_type="loss").item() for batch in loader]
    assert abs(sum(batches) / len(batches) - want) > 1e-4  # the mean of batch means
    first = evaluate_on_dataset(tiny_model, loader, truncate=1)
    assert first == pytest.approx(batches[0], rel=1e-5) and abs(first - want) > 1e-4


def test_padding_is_no_target(tiny_model):
    ids = tiny_model.to_tokens(FACTS[:3])
    mask = (ids != 0).long()
    assert bool((mask == 0).any())
    padded = evaluate_on_dataset(tiny_model, [{"tokens": ids, "attention_mask": mask}])
    alone = [
        tiny_model(text, return_type="loss", loss_per_token=True).flatten() for text in FACTS[:3]
    ]
    assert padded == pytest.approx(torch.cat(alone).mean().item(), rel=1e-4)
    with pytest.warns(UserWarning, match="pad token"):
        assert abs(evaluate_on_dataset(tiny_model, [{"tokens": ids}]) - padded) > 0.1
    tiny_model._warned.discard("pad")


def test_texts_it_was_trained_on_are_likelier(tiny_model, untrained):
    losses = evaluate(tiny_model, {"facts": FACTS, "noise": NOISE}, max_length=24)
    assert set(losses) == {"facts_loss", "noise_loss"}
    assert losses["facts_loss"] < 4.5 and losses["noise_loss"] > 8
    assert evaluate(tiny_model, FACTS, max_length=24)["text_loss"] == losses["facts_loss"]
    assert evaluate(untrained, FACTS, max_length=24)["text_loss"] > 5


def test_rows_of_a_table_are_texts_too(tiny_model):
    words = tiny_model.tokenizer
    rows = [{"content": text} for text in FACTS]
    (plain, *_), (named, *_) = (
        make_data_loader(FACTS, words, max_length=20),
        make_data_loader(rows, words, max_length=20, column_name="content"),
    )
    assert torch.equal(plain["tokens"], named["tokens"])


def test_the_sanity_check_is_a_loss(tiny_model, untrained):
    loss = sanity_check(tiny_model)
    assert loss.shape == () and 2 < loss < 30  # not its language
    assert torch.equal(loss, sanity_check(tiny_model)) and loss != sanity_check(untrained)


def test_nothing_to_evaluate_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="no batch"):
        evaluate_on_dataset(tiny_model, [])
    with pytest.raises(ValueError, match="truncate is 0"):
        evaluate_on_dataset(tiny_model, [], truncate=0)
    with pytest.raises(ValueError, match="max_length=1024"):
        evaluate(tiny_model, FACTS[:1])


# -- repeating ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, False])
def test_the_induction_loss_is_that_of_the_second_coming(tiny_model, bos):
    from lens_gemma4.heads import repeated_tokens

    got = induction_loss(tiny_model, batch_size=3, subseq_len=10, prepend_bos=bos, seed=4)
    tokens = repeated_tokens(tiny_model, 3, 10, prepend_bos=bos is None, seed=4)
    losses = tiny_model(tokens, return_type="loss", loss_per_token=True)
    torch.testing.assert_close(got, losses[:, -9:].mean(), atol=1e-5, rtol=1e-3)
    assert (losses[:, -10:].mean() - got).abs() > 0.3  # with the first, which cannot be known


def test_repeating_is_what_the_model_can_and_random_weights_cannot(tiny_model, untrained):
    assert induction_loss(tiny_model, batch_size=2, subseq_len=16) < 0.05
    assert induction_loss(untrained, batch_size=2, subseq_len=16) > 5


# -- indirect object ----------------------------------------------------------------------------------


def test_the_receiver_is_named(tiny_model, untrained):
    """The card: 96 % of pairs never seen together."""
    result = ioi_eval(tiny_model, num_samples=120)
    assert set(result) == {"Logit Difference", "Accuracy"}
    assert result["Accuracy"] > 0.9 and result["Logit Difference"] > 3
    chance = ioi_eval(untrained, num_samples=120)
    assert chance["Accuracy"] < 0.75 and abs(chance["Logit Difference"]) < 3


def test_the_measure_is_that_of_each_prompt_alone(tiny_model):
    data = IOIDataset(tiny_model.tokenizer, num_samples=9, seed=2, templates=[
        "When [A] and [B] went to the [PLACE], [B] gave a [OBJECT] to [A]",
        "[A] and [B] were at the [PLACE]. [B] showed a [OBJECT] to [A]",
    ])  # fmt: skip
    assert len({len(entry["prompt"]) for entry in data}) > 1  # so some are padded
    differences = []
    for sample in data.samples:
        prompt = sample["text"].removesuffix(sample["IO"])
        logits = tiny_model(prompt)[0, -1]
        io, s = (tiny_model.to_single_token(sample[key]) for key in ("IO", "S"))
        differences.append((logits[io] - logits[s]).item())
    result = ioi_eval(tiny_model, data, batch_size=4)
    assert result["Logit Difference"] == pytest.approx(sum(differences) / 9, abs=1e-3)
    assert result["Accuracy"] == pytest.approx(sum(d > 0 for d in differences) / 9)
    assert len(set(differences)) == 9


def test_samples_hold_what_they_say(tiny_model):
    words = tiny_model.tokenizer
    data = IOIDataset(words, num_samples=60, seed=0)
    assert len(data) == 60
    for sample, entry in zip(data.samples, data, strict=True):
        io, s = sample["IO"].strip(), sample["S"].strip()
        assert sample["text"].endswith(f" {io}") and io != s and {io, s} <= set(NAMES)
        assert sample["text"].count(s) == 2 and "[" not in sample["text"]
        assert entry["prompt"][0] == words.bos_token_id and entry["prompt"][-1:] == entry["IO"]
        assert words.decode(entry["S"]) == f" {s}"
    first = [sample["text"].split()[1] == sample["IO"].strip() for sample in data.samples]
    assert 0.2 < sum(first) / 60 < 0.8  # both orders
    assert data.samples == IOIDataset(words, num_samples=60, seed=0).samples
    assert data.samples != IOIDataset(words, num_samples=60, seed=1).samples
    assert len(IOIDataset(words, num_samples=3, prepend_bos=False)[0]["prompt"]) + 1 == len(
        IOIDataset(words, num_samples=3, templates=data.templates[:1])[0]["prompt"]
    )


def test_symmetric_samples_exchange_the_names(tiny_model):
    samples = IOIDataset(tiny_model.tokenizer, num_samples=8, symmetric=True, seed=0).samples
    assert len(samples) == 8
    for one, other in zip(samples[::2], samples[1::2], strict=True):
        assert (one["IO"], one["S"]) == (other["S"], other["IO"])
        swapped = (
            one["text"].replace(one["IO"].strip(), "?").replace(one["S"].strip(), one["IO"].strip())
        )
        assert swapped.replace("?", one["S"].strip()) == other["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["Mary", "Wolfgang"]}, r"one token behind a space.*\{'Wolfgang': "),
        ({"names": ["Mary", "Mary"]}, r"two names are needed.*\['Mary'\]"),
        ({"templates": ["[A] saw [B]"]}, "end with"),
        ({"templates": ["Then [A] gave a [OBJECT] to [A]"]}, r"must name \[A\] and \[B\]"),
        ({"templates": ["[B] and [A] saw a [BIRD]. [B] showed it to [A]"]}, "without nouns"),
        ({"num_samples": 3, "symmetric": True}, "come in pairs"),
    ],
)
def test_what_cannot_be_asked_is_refused(tiny_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        IOIDataset(tiny_model.tokenizer, **arguments)


def test_entries_of_anothers_dataset_are_checked(tiny_model):
    good = {
        "prompt": torch.tensor([2, 700, 701]),
        "IO": torch.tensor([701]),
        "S": torch.tensor([7]),
    }
    for bad in (
        {"IO": torch.tensor([701, 5])},
        {"S": torch.tensor([7, 8])},
        {"IO": torch.tensor([5])},
    ):
        with pytest.raises(ValueError, match="one token each"):
            ioi_eval(tiny_model, [good | bad])
    with pytest.raises(ValueError, match="empty"):
        ioi_eval(tiny_model, [])
    assert set(ioi_eval(tiny_model, [good])) == {"Logit Difference", "Accuracy"}


def test_a_model_without_a_tokenizer_can_repeat():
    model = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(model, seed=0)
    assert induction_loss(model, batch_size=1, subseq_len=6) > 1


def test_the_examples_run():
    ran = doctest.testmod(evals, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
