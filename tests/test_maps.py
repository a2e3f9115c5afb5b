"""Maps against one run with hooks for each variant; metrics against whole logits."""

import pytest
import torch
from small import KINDS, hooked, inputs_for

from lens_gemma4 import HookedConfig, sweep
from lens_gemma4.interventions import at_each_position, position_mask, replaced, scaled, units_of
from lens_gemma4.maps import ablate, patch
from lens_gemma4.metrics import (
    Logits,
    kl_to_clean,
    log_prob,
    logit_difference,
    prob,
    rank,
)

EXACT = 1e-9
CAP = HookedConfig.from_hf(KINDS["shared, own values"]).output_logits_soft_cap
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10], [2, 15, 16, 17, 18, 19, 11]])
OTHER = torch.tensor([[2, 25, 6, 27, 8, 29, 10], [2, 15, 36, 17, 38, 19, 11]])


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def by_hand(model, prompts, variants, number, **inputs):
    """`number` of whole logits, one run with hooks at a time."""
    runs = [model.run_with_hooks(prompts, fwd_hooks=one.hooks(), **inputs) for one in variants]
    return torch.stack([number(logits) for logits in runs])


def close(got, want):
    return (got - want).abs().max() < EXACT * want.abs().max()


METRICS = {
    "difference": (logit_difference(7, 9), lambda lg: lg[:, -1, 7] - lg[:, -1, 9]),
    "raw": (
        logit_difference(7, 9, raw=True),
        lambda lg: CAP * ((lg[:, -1, 7] / CAP).atanh() - (lg[:, -1, 9] / CAP).atanh()),
    ),
    "log-probability": (log_prob(7), lambda lg: lg[:, -1].log_softmax(-1)[:, 7]),
    "probability": (prob(7), lambda lg: lg[:, -1].softmax(-1)[:, 7]),
    "rank": (rank(7), lambda lg: (lg[:, -1] > lg[:, -1, 7:8]).sum(-1).double()),
    "by row": (
        logit_difference(torch.tensor([7, 8]), torch.tensor([9, 3])),
        lambda lg: torch.stack([lg[0, -1, 7] - lg[0, -1, 9], lg[1, -1, 8] - lg[1, -1, 3]]),
    ),
    "earlier": (logit_difference(7, 9, positions=3), lambda lg: lg[:, 3, 7] - lg[:, 3, 9]),
    "function": (lambda lg: lg[:, -1, 7] - lg[:, 2, 9], lambda lg: lg[:, -1, 7] - lg[:, 2, 9]),
}


@pytest.mark.parametrize("name", METRICS)
def test_ablating_heads_is_a_run_without_each(model, name):
    metric, number = METRICS[name]
    found = ablate(model, IDS, metric)
    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    assert found.names == [one.name for one in heads]
    want = by_hand(model, IDS, heads, number)
    assert close(found.values, want)
    assert close(found.baseline, number(model(IDS)))
    assert torch.equal(found.effect, found.values - found.baseline)
    if name != "rank":  # the control: neighbours differ
        assert not close(found.values.roll(1, 0), want)


def test_kl_to_clean(model):
    clean = model(IDS)[:, -1].log_softmax(-1)

    def number(logits):
        return (clean.exp() * (clean - logits[:, -1].log_softmax(-1))).sum(-1)

    found = ablate(model, IDS, kl_to_clean())
    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    assert close(found.values, by_hand(model, IDS, heads, number))
    assert found.baseline.abs().max() < 1e-12 and found.values.min() > 0


@pytest.mark.parametrize("units", ["heads", "values", "mlp", "resid_mid"])
@pytest.mark.parametrize("positions", ["last", "each", [1, 2]])
def test_units_and_positions(model, units, positions):
    metric, number = METRICS["difference"]
    found = ablate(model, IDS, metric, units=units, positions=positions, mode=0.5, batch_size=7)
    at = None if positions == "each" else position_mask(positions, torch.ones_like(IDS))
    every = [scaled(unit, 0.5, at) for unit in units_of(units, model.cfg)]
    if positions == "each":
        every = at_each_position(every, 2, 7, IDS.device)
    picked = range(0, len(every), max(1, len(every) // 12))
    want = by_hand(model, IDS, [every[i] for i in picked], number)
    assert found.names == [one.name for one in every]
    assert close(found.values[list(picked)], want)


def test_means_are_over_real_tokens_but_the_first(model):
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    found = ablate(
        model, IDS, logit_difference(7, 9), units="mlp", mode="mean", attention_mask=mask
    )
    _, cache = model.run_with_cache(IDS, attention_mask=mask)
    chosen = mask.bool() & (torch.arange(7) > 0)
    last = position_mask("last", mask)

    def number(logits):
        return logits[last][:, 7] - logits[last][:, 9]

    for wrong, keep in ((False, chosen), (True, torch.ones_like(chosen))):
        means = [
            replaced(unit, cache[unit.places[0].hook][keep].mean(0)[None, None])
            for unit in units_of("mlp", model.cfg)
        ]
        want = by_hand(model, IDS, means, number, attention_mask=mask)
        assert close(found.values, want) != wrong
    elsewhere = ablate(
        model, IDS, logit_difference(7, 9), units="mlp", mode="mean", reference=OTHER
    )
    assert not close(elsewhere.values, found.values)


@pytest.mark.parametrize(
    ("units", "positions"), [("resid_pre", "each"), ("heads", "all"), ("attn", "last")]
)
def test_patching_puts_the_clean_run_in(model, units, positions):
    metric, number = METRICS["difference"]
    found = patch(model, IDS, OTHER, metric, units=units, positions=positions)
    _, cache = model.run_with_cache(IDS)
    at = None if positions == "each" else position_mask(positions, torch.ones_like(IDS))
    every = [replaced(unit, cache, at) for unit in units_of(units, model.cfg)]
    if positions == "each":
        every = at_each_position(every, 2, 7, IDS.device)
    assert close(found.values, by_hand(model, OTHER, every, number))
    assert close(found.baseline, number(model(OTHER)))
    if (
        units == "resid_pre"
    ):  # block 0 at the one position where the prompts differ most: its own clean answer comes back
        whole = patch(model, IDS, OTHER, metric, units="resid_pre", positions="all")
        assert close(whole.values[0], number(model(IDS)))
    nothing = patch(model, IDS, IDS, metric, units=units, positions=positions)
    assert nothing.effect.abs().max() < 1e-12


def test_images_and_padding():
    model = hooked("wrapper, shared")
    inputs = inputs_for("wrapper, shared", torch.float64)
    last = position_mask("last", inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])))
    found = ablate(model, None, logit_difference(7, 9), positions="last", **inputs)
    heads = [scaled(unit, 0.0, last) for unit in units_of("heads", model.cfg)]
    want = by_hand(model, None, heads, lambda lg: lg[last][:, 7] - lg[last][:, 9], **inputs)
    assert close(found.values, want)


def test_logits_are_computed_where_they_are_indexed(model):
    stream = model(IDS, stop_at_layer=model.cfg.n_layers)
    whole, view = model(IDS), Logits(model, stream)
    assert view.shape == whole.shape
    rows = torch.arange(2)
    for key in (
        (slice(None), -1, 7),
        (0, 2, [3, 5]),
        (rows, -1, torch.tensor([4, 6])),
        (slice(None), slice(1, 3), slice(2, 9, 2)),
        (rows, torch.tensor([1, 2])),
        1,
        (Ellipsis, 3),
        (slice(None), [0, 3], torch.tensor([4, 6])),
    ):
        got, want = view[key], whole[key]
        assert got.shape == want.shape and (got - want).abs().max() < 1e-12, key


def test_running_out_of_memory_halves_the_batch(model, monkeypatch):
    whole = ablate(model, IDS, logit_difference(7, 9))
    run, sizes = sweep.Runner.run, []

    def small(self, groups):
        sizes.append(sum(len(group.variants) for group in groups))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("too many")
        return run(self, groups)

    monkeypatch.setattr(sweep.Runner, "run", small)
    assert close(ablate(model, IDS, logit_difference(7, 9)).values, whole.values)
    assert max(sizes) > 3 >= sizes[-1]


def test_results_as_grids_tables_and_figures(model):
    found = ablate(model, IDS, logit_difference(7, 9))
    grid = found.grid()
    assert grid.shape == (model.cfg.n_layers, model.cfg.n_heads)
    assert grid[2, 1].item() == pytest.approx(found.mean()[found.names.index("L2H1")].item())
    frame = found.to_dataframe()
    assert len(frame) == found.values.numel() and set(frame["head"]) == set(
        range(model.cfg.n_heads)
    )
    name, value = found.top(1)[0]
    assert abs(value) == found.mean().abs().max().item() and name in found.names
    low, high = found.interval()
    assert (low <= found.mean()).all() and (found.mean() <= high).all()
    assert found.plot().to_dict()["data"]
    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    ragged = sweep.sweep(model, IDS, heads[:5], logit_difference(7, 9))
    assert ragged.axes == {"layer": [0, 1], "head": [0, 1, 2, 3]}
    assert ragged.grid()[1].isnan().tolist() == [False, True, True, True]
    pairs = sweep.sweep(model, IDS, [heads[0] & heads[1], heads[0]], logit_difference(7, 9))
    with pytest.raises(ValueError, match="no grid"):
        pairs.grid()
    assert ragged.plot().to_dict()["data"] and pairs.plot().to_dict()["data"]
    with pytest.raises(ValueError, match="there is one"):
        ablate(model, IDS[:1], logit_difference(7, 9), units="mlp").interval()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": "head"}, "units is 'head'"),
        ({"mode": "median"}, "mode is 'median'"),
        ({"positions": "first"}, "positions is 'first'"),
        ({"positions": 99}, "positions is 99"),
        ({"metric": lambda lg: lg[:, -1]}, "a metric gives a number"),
        ({"metric": logit_difference(7, 200)}, "an id below 101"),
        ({"metric": []}, "no metric"),
        ({"metric": logit_difference(0.5, 9)}, "a token is an id"),
    ],
)
def test_what_cannot_be_asked(model, arguments, message):
    arguments = {"metric": logit_difference(7, 9), **arguments}
    with pytest.raises(ValueError, match=message):
        ablate(model, IDS, arguments.pop("metric"), **arguments)


def test_prompts_of_unlike_lengths_cannot_be_patched(model):
    with pytest.raises(ValueError, match="same shape"):
        patch(model, IDS, OTHER[:, :5], logit_difference(7, 9))


def test_no_hook_is_left_and_none_is_needed(model):
    ablate(model, IDS, logit_difference(7, 9))
    assert not model.list_hooks()
    with pytest.raises(ValueError, match="no variants"):
        sweep.sweep(model, IDS, [], logit_difference(7, 9))


def test_a_low_precision_sweep_is_near_the_loop():
    model = hooked("text", torch.float32)
    found = ablate(model, IDS, logit_difference(7, 9))
    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    want = by_hand(model, IDS, heads, lambda lg: lg[:, -1, 7] - lg[:, -1, 9])
    assert (found.values - want).abs().max() < 1e-3 * want.abs().max()


def test_hooks_and_skipped_blocks_are_refused_not_half_applied(model):
    ask = logit_difference(7, 9)
    edit = ("blocks.1.hook_resid_mid", lambda value, hook: value + 1)
    refused = pytest.raises(ValueError, match=r"hooks on blocks\.1\.hook_resid_mid")
    with model.hooks(fwd_hooks=[edit], reset_hooks_end=True), refused:
        ablate(model, IDS, ask)
    with model.skip_layers(1, 1), pytest.raises(ValueError, match=r"blocks \[1\] skipped"):
        ablate(model, IDS, ask, units="mlp")
    assert ablate(model, IDS, ask, units="mlp").values.shape == (model.cfg.n_layers, 2)


def test_resampling_among_the_prompts_takes_another_prompts_value(model):
    ids = torch.cat([IDS, OTHER])
    found = ablate(model, ids, logit_difference(7, 9), units=["1_mlp_out"], mode="resample")
    value = model.run_with_cache(ids, names_filter="blocks.1.hook_mlp_out")[1]["mlp_out", 1]
    for row in range(4):
        donors = {}
        for donor in range(4):
            edit = [("blocks.1.hook_mlp_out", lambda v, hook, d=donor: value[d : d + 1])]
            logits = model.run_with_hooks(ids[row : row + 1], fwd_hooks=edit)
            donors[donor] = (logits[0, -1, 7] - logits[0, -1, 9]).item()
        near = min(donors, key=lambda d: abs(donors[d] - found.values[0, row].item()))
        assert abs(donors[near] - found.values[0, row].item()) < 1e-9 and near != row


def test_resampling_onto_padding_is_refused(model):
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with pytest.raises(ValueError, match="have padding"):
        ablate(model, IDS, logit_difference(7, 9), mode="resample", attention_mask=mask)
