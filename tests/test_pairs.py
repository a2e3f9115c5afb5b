"""Pairs of units against runs with hooks that change both."""

import doctest

import pytest
import torch
from small import hooked

from lens_gemma4 import logit_difference, pairs
from lens_gemma4.interventions import scaled, units_of
from lens_gemma4.pairs import pair_effects

EXACT = 1e-9
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10, 11, 12], [2, 15, 16, 17, 18, 19, 11, 13, 14]])
MASK = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def without(model, heads):
    """Logit 7 - logit 9 at the end, with some heads' z at zero."""

    def hook(head):
        def zero(z, hook):
            z[:, :, head] = 0

        return zero

    hooks = [(f"blocks.{layer}.attn.hook_z", hook(head)) for layer, head in heads]
    logits = model.run_with_hooks(IDS, fwd_hooks=hooks, attention_mask=MASK)
    return logits[:, -1, 7] - logits[:, -1, 9]


def test_two_together_less_each_alone(model):
    heads = [(1, 0), (1, 3), (2, 1), (5, 2)]  # of one block, of two, of a borrower
    names = [f"L{layer}H{head}" for layer, head in heads]
    found = pair_effects(model, IDS, logit_difference(7, 9), units=names, attention_mask=MASK)
    base = without(model, [])
    assert found.together.names[:2] == ["L1H0 & L1H3", "L1H0 & L2H1"]
    grid = found.grid()
    assert grid.diagonal().isnan().all() and torch.equal(grid.nan_to_num(), grid.T.nan_to_num())
    place = 0
    for i, one in enumerate(heads):
        for j in range(i + 1, len(heads)):
            both, first, second = (
                without(model, some) - base for some in ([one, heads[j]], [one], [heads[j]])
            )
            want = both - first - second
            assert (found.interaction[place] - want).abs().max() < EXACT * base.abs().max()
            assert abs(grid[i, j] - want.mean()) < EXACT * base.abs().max()
            assert abs(both.mean() - want.mean()) > 1e-4  # the control: no plain effect
            place += 1
    assert place == len(found.together.names) == 6


def test_what_adds_up_does_not_interact(model):
    """A metric that is linear in the last stream, and two things that are added to it in the last block alone."""
    last = model.cfg.n_layers - 1
    names = [f"{last}_mlp_out", f"{last}_attn_out"]

    def linear(logits):
        return logits.stream[:, -1].sum(-1)

    found = pair_effects(model, IDS, linear, units=names, mode=0.5, layers=None)
    # the MLP reads the attention: halving both is no sum
    assert found.interaction.abs().min() > 1e-6
    scaled_twice = pair_effects(
        model, IDS, linear, units=[f"{last}_mlp_out", f"{last}_resid_post"], mode=1.0
    )
    assert scaled_twice.interaction.abs().max() < 1e-12


def test_tables_and_figures(model):
    found = pair_effects(model, IDS, logit_difference(7, 9), units="mlp", layers=[0, 1, 2])
    frame = found.to_dataframe()
    assert list(frame["first"]) == ["0_mlp_out", "0_mlp_out", "1_mlp_out"]
    rest = frame["effect"] - frame["effect_first"] - frame["effect_second"]
    assert (frame["interaction"] - rest).abs().max() < 1e-9
    name, value = found.top(1)[0]
    assert abs(value) == frame["interaction"].abs().max() and name in found.together.names
    assert "3 pairs" in repr(found) and found.plot().to_dict()["data"]


def test_pairs_of_units_and_of_interventions(model):
    heads = units_of("heads", model.cfg, [0])[:3]
    two = pairs.pairs(heads)
    assert [one.name for one in two] == ["L0H0 & L0H1", "L0H0 & L0H2", "L0H1 & L0H2"]
    assert two[1].places == (*heads[0].places, *heads[2].places)
    both = pairs.pairs([scaled(unit, 0.5) for unit in heads])[2]
    assert [edit.where for edit in both.edits] == [*heads[1].places, *heads[2].places]


def test_what_cannot_be_asked(model):
    ask = logit_difference(7, 9)
    with pytest.raises(ValueError, match="a pair takes two"):
        pair_effects(model, IDS, ask, units=["L0H0"])
    with pytest.raises(ValueError, match="one metric"):
        pair_effects(model, IDS, [ask, logit_difference(7, 8)])


def test_examples_run():
    found = doctest.testmod(pairs)
    assert found.attempted and not found.failed
