"""Metrics against whole logits of whole runs; the view that computes only what is indexed."""

import einops
import pytest
import torch
from small import hooked

from lens_gemma4 import ablate
from lens_gemma4.interventions import position_mask, scaled, units_of
from lens_gemma4.metrics import (
    Logits,
    Metric,
    identity,
    kl_to_clean,
    log_prob,
    logit,
    logit_difference,
    loss,
    named,
    prob,
    rank,
)

EXACT = 1e-9
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10, 3, 4], [2, 15, 16, 17, 18, 19, 11, 12, 13]])
MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def loop(model, number, at):
    """`number(logits, clean)` under zero ablation of every head at `at`, one run with hooks each."""
    clean = model(IDS, attention_mask=MASK)
    runs = []
    for unit in units_of("heads", model.cfg):
        one = scaled(unit, 0.0, at)
        logits = model.run_with_hooks(IDS, attention_mask=MASK, fwd_hooks=one.hooks())
        runs.append(number(logits, clean))
    return torch.stack(runs)


def kl(logits, clean):
    own, base = logits.log_softmax(-1), clean.log_softmax(-1)
    return (base.exp() * (base - own)).sum(-1)


def losses(logits):
    """Next-token losses [batch pos-1], and whether each counts."""
    found = -logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    return found, MASK[:, 1:].bool()


LAST = position_mask("last", MASK)
BY_HAND = {
    "logit": (logit(7), lambda lg, clean: lg[LAST][:, 7]),
    "log": (log_prob(7), lambda lg, clean: lg[LAST].log_softmax(-1)[:, 7]),
    "prob": (prob(torch.tensor([7, 8])), lambda lg, clean: lg[LAST].softmax(-1)[[0, 1], [7, 8]]),
    "rank": (rank(7), lambda lg, clean: (lg[LAST] > lg[LAST][:, 7:8]).sum(-1).double()),
    "kl": (kl_to_clean(), lambda lg, clean: kl(lg, clean)[LAST]),
    "kl all": (
        kl_to_clean(positions="all"),
        lambda lg, clean: (kl(lg, clean) * MASK).sum(1) / MASK.sum(1),
    ),
    "two places": (
        logit_difference(7, 9, positions=[1, 4]),
        lambda lg, clean: (lg[:, [1, 4], 7] - lg[:, [1, 4], 9]).mean(1),
    ),
    "loss": (
        loss(),
        lambda lg, clean: (losses(lg)[0] * losses(lg)[1]).sum(1) / losses(lg)[1].sum(1),
    ),
    "function": (lambda lg: lg[:, 3, 7] * 2, lambda lg, clean: lg[:, 3, 7] * 2),
    "whole": (
        lambda lg: lg.softmax(-1)[:, 5].max(-1).values,
        lambda lg, clean: lg[:, 5].softmax(-1).max(-1).values,
    ),
}


@pytest.mark.parametrize("where", [None, 4, 7, "last"])
def test_several_metrics_at_once_are_each_as_by_hand(model, where):
    """Read before, at and after the first change: what is read before it is the clean run's own."""
    at = position_mask(where, MASK)
    found = ablate(
        model,
        IDS,
        {n: m for n, (m, _) in BY_HAND.items()},
        positions="all" if where is None else where,
        attention_mask=MASK,
    )
    assert list(found) == list(BY_HAND)
    for name, (metric, number) in BY_HAND.items():
        want = loop(model, number, at)
        got = found[name]
        assert (got.values - want).abs().max() < EXACT * want.abs().max().clamp(min=1), name
        base = number(model(IDS, attention_mask=MASK), model(IDS, attention_mask=MASK))
        assert (got.baseline - base).abs().max() < 1e-12
        alone = ablate(
            model, IDS, metric, positions="all" if where is None else where, attention_mask=MASK
        )
        assert (alone.values - got.values).abs().max() < 1e-12
    if (
        where is None
    ):  # the control: an average over pads, or of the wrong targets, is another number
        wrong = loop(model, lambda lg, clean: kl(lg, clean).mean(1), at)
        assert (found["kl all"].values - wrong).abs().max() > 1e-3 * wrong.abs().max()
        shifted = loop(model, lambda lg, clean: losses(lg)[0].mean(1), at)
        assert (found["loss"].values - shifted).abs().max() > 1e-3


def test_the_mean_of_losses_is_the_models_own(model):
    found = ablate(model, IDS[:1], loss())
    want = model(IDS[:1], return_type="loss")
    assert abs(found.baseline.item() - want.item()) < 1e-6


def test_rows_of_logits_in_small_parts_are_the_same(model, monkeypatch):
    one = IDS[:1]
    whole = ablate(model, one, [kl_to_clean("all"), loss()])
    monkeypatch.setattr("lens_gemma4.metrics.MAX_BYTES", 1)
    for name, again in ablate(model, one, [kl_to_clean("all"), loss()]).items():
        assert (again.values - whole[name].values).abs().max() < 1e-12


def test_the_view_is_a_tensor_to_whoever_uses_it_as_one(model):
    stream = model(IDS, stop_at_layer=model.cfg.n_layers)
    whole, view = model(IDS), Logits(model, stream)
    rows = torch.arange(2)
    for use in (
        lambda lg: lg[:, -1, 7],
        lambda lg: lg[:, -1, :],
        lambda lg: lg[..., [3, 4]],
        lambda lg: lg[rows, -1, torch.tensor([4, 6])],
        lambda lg: lg[rows, -1].gather(-1, torch.tensor([[4], [6]])),
        lambda lg: lg.log_softmax(-1)[:, 2, 3],
        lambda lg: torch.softmax(lg, -1),
        lambda lg: torch.stack([lg, lg]).mean(),
        lambda lg: einops.rearrange(
            torch.as_tensor(lg.whole if isinstance(lg, Logits) else lg), "b p v -> b v p"
        ),
        lambda lg: 2 * lg - lg / 3,
        lambda lg: -lg,
        lambda lg: (lg > 0).double().mean(),
        lambda lg: lg.mean() + torch.tensor(lg.size(1) + len(lg) + lg.ndim + len(lg.shape)),
        lambda lg: torch.einsum("bpv,v->bp", lg, torch.ones(lg.shape[-1], dtype=lg.dtype)),
        lambda lg: torch.nn.functional.cross_entropy(lg[0], IDS[0]),
    ):
        got, want = use(view), use(whole)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-12
    with pytest.raises(AttributeError):
        view.no_such_thing


def test_only_what_is_indexed_is_computed(model):
    stream = model(IDS, stop_at_layer=model.cfg.n_layers)
    view = Logits(model, stream)
    view[:, -1, 7], view[0, 2], view[:, 1:3, [4, 5]]
    assert "whole" not in view.__dict__
    view.mean()
    assert "whole" in view.__dict__


def test_a_metric_that_cannot_be_measured_says_why(model):
    cases = [
        (logit_difference(7, 101), "an id below 101"),
        (log_prob(-1), "an id below 101"),
        (log_prob(torch.tensor([1, 2, 3, 4]).view(2, 2)), "a token is an id"),
        ([log_prob(3), log_prob(4)], "names that differ"),
        ({}, "no metric"),
        (log_prob(3, positions=99), "positions is 99"),
        (
            log_prob(3, positions=torch.zeros(2, 9, dtype=torch.bool)),
            "none of the 9 positions",
        ),
        (
            log_prob(3, positions=torch.tensor([[1] * 9, [0] * 9]).bool()),
            r"nowhere in prompts \[1\]",
        ),
        (log_prob(3, positions=torch.ones(2, 4, dtype=torch.bool)), "a mask of positions"),
    ]
    for metric, message in cases:
        with pytest.raises(ValueError, match=message):
            ablate(model, IDS, metric, attention_mask=MASK)
    with pytest.raises(ValueError, match="there are 2 ids of tokens and 3 prompts"):
        ablate(model, IDS[:1].expand(3, -1), log_prob(torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="nowhere"):
        ablate(model, IDS[:, :1], loss())


def test_metrics_are_known_by_what_they_ask():
    assert identity(log_prob(7)) != identity(log_prob(8))
    assert identity(logit_difference(7, 9)) != identity(logit_difference(7, 9, raw=True))
    first, second = (lambda lg: lg[:, -1, 7]), (lambda lg: lg[:, -1, 8])
    assert identity(first) == identity(first)
    assert identity(eval("lambda lg: lg[0]")) != identity(eval("lambda lg: lg[1]"))
    assert list(named([log_prob(3), second])) == ["log-probability (nats)", "<lambda>"]
    assert isinstance(named(Metric("mine", lambda read: read.logits(3)))["mine"], Metric)
