"""Estimates against slopes: the engine's effect of a small share of the same change, by that share."""

import doctest

import pytest
import torch
from small import hooked, inputs_for

from lens_gemma4 import HookedModel, estimates, kl_to_clean, log_prob, logit_difference, rank
from lens_gemma4.changes import picture_units
from lens_gemma4.estimates import Estimate, attribution_ablate, attribution_patch, count_of
from lens_gemma4.gradients import two_runs
from lens_gemma4.interventions import UNITS, Edit, position_mask, replaced, scaled, units_of
from lens_gemma4.maps import ablate, patch
from lens_gemma4.sweep import sweep

SHARE = 1e-5  # of the way: errors of slopes from both sides are about its square
ASK = logit_difference(7, 9)
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10], [2, 15, 16, 17, 18, 19, 11]])
OTHER = torch.tensor([[2, 25, 6, 27, 8, 29, 10], [2, 15, 36, 17, 38, 19, 11]])
MASK = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])


def padded(ids):
    return {"input_ids": ids.masked_fill(MASK == 0, 0), "attention_mask": MASK}


def pictures(kind):
    """Two prompts that differ in an image and in words."""
    inputs = inputs_for(kind, torch.float64)
    other = dict(inputs, pixel_values=inputs["pixel_values"].flip(-1))
    other["input_ids"] = inputs["input_ids"].clone()
    other["input_ids"][0, 1] = other["input_ids"][1, 3] = 33
    return inputs, other


# Lent keys and values; lent keys that are values, padded; images that are seen both ways.
CASES = {
    "shared, own values": lambda: (IDS, OTHER),
    "shared": lambda: (padded(IDS), padded(OTHER)),
    "wrapper, shared": lambda: pictures("wrapper, shared"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return hooked(request.param), *CASES[request.param]()


@pytest.fixture(scope="module")
def lent():
    return hooked("shared")


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def close(got, want, tolerance=1e-9):
    return (got - want).abs().max() <= tolerance * want.abs().max()


def slopes(model, base, variants, metric=ASK):
    """Effects of interventions and of their opposites, by `SHARE`."""
    ends = [
        sweep(model, None, [make(share) for make in variants], metric, **base).effect
        for share in (SHARE, -SHARE)
    ]
    return (ends[0] - ends[1]) / (2 * SHARE)


def toward(unit, own, other, at):
    """A unit moved a share of the way from its value in one run to that in another."""
    return lambda share: replaced(
        unit,
        {p.hook: own[p.hook] + share * (other[p.hook] - own[p.hook]) for p in unit.places},
        at,
    )


def runs(model, clean, corrupted, chosen):
    hooks = sorted({place.hook for unit in chosen for place in unit.places})
    base = model.prepare(corrupted)
    _, own = model.run_with_cache(**base, names_filter=hooks)
    _, other = model.run_with_cache(**model.prepare(clean), names_filter=hooks)
    return base, own, other


def some(names, n=6):
    """Numbers of some of them, from all over, those of one unit in unlike places."""
    return list(range(3 % len(names), len(names), max(1, len(names) // n)))


# -- patching -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", UNITS)
def test_an_estimate_is_the_slope_of_the_patch(case, units):
    model, clean, corrupted = case
    found = attribution_patch(model, clean, corrupted, ASK, units=units)
    map_of = patch(model, clean, corrupted, ASK, units=units, layers=[0, -1])
    ends = [i for i, at in enumerate(found.at) if at["layer"] in (0, model.cfg.n_layers - 1)]
    assert [found.names[i] for i in ends] == map_of.names
    assert [found.at[i] for i in ends] == map_of.at
    wanted = some(found.names)
    every = units_of(units, model.cfg)
    pos = len(found.names) // len(every)
    chosen = [every[i // pos] for i in wanted]
    base, own, other = runs(model, clean, corrupted, chosen)
    batch = len(base["input_ids"])
    masks = torch.eye(pos, dtype=torch.bool)[:, None].expand(pos, batch, pos)
    makes = [
        toward(unit, own, other, masks[i % pos]) for unit, i in zip(chosen, wanted, strict=True)
    ]
    want = slopes(model, base, makes)
    got = found.effect[wanted]
    size = found.effect.abs().max()
    assert (got - want).abs().max() < 1e-6 * size
    big = want.abs() > 1e-3 * size
    assert big.any() and ((got - want).abs() / want.abs())[big].max() < 1e-5
    # controls: the other run's gradient, and the other sign
    elsewhere = attribution_patch(model, corrupted, clean, ASK, units=units)
    assert not close(-elsewhere.effect[wanted], want, 1e-2)
    assert not close(-got, want, 1e-2)


@pytest.mark.parametrize("positions", ["all", "last", [1, -2], slice(2, 4)])
def test_positions_are_summed_where_they_are_changed_together(case, positions):
    model, clean, corrupted = case
    for units in ("heads", "mlp"):
        each = attribution_patch(model, clean, corrupted, ASK, units=units)
        found = attribution_patch(model, clean, corrupted, ASK, units=units, positions=positions)
        base = model.prepare(corrupted)
        real = base.get("attention_mask", torch.ones_like(base["input_ids"]))
        at = position_mask(positions, real)
        kept = torch.ones_like(real).bool() if at is None else at
        by_position = each.effect.unflatten(0, (-1, real.shape[1]))  # [unit pos batch]
        assert close(found.effect, (by_position * kept.T).sum(1))
        assert not close(found.effect, (by_position * kept.T.roll(1, 0)).sum(1), 1e-3) or at is None
        names = patch(model, clean, corrupted, ASK, units=units, positions=positions).names
        assert found.names == names


def test_metrics_of_a_few_kinds_and_several_at_once(model):
    def jump(logits):
        return logits[:, -1, 7] - logits[:, 2, 9]

    asked = {"log": log_prob(7), "early": logit_difference(7, 9, positions=3), "own": jump}
    found = attribution_patch(model, IDS, OTHER, asked, units="attn", verify=5)
    assert list(found) == list(asked)
    units = units_of("attn", model.cfg)
    base, own, other = runs(model, IDS, OTHER, units)
    wanted = some(found["log"].names, 8)
    masks = torch.eye(7, dtype=torch.bool)[:, None].expand(7, 2, 7)
    for name, metric in asked.items():
        makes = [toward(units[i // 7], own, other, masks[i % 7]) for i in wanted]
        want = slopes(model, base, makes, metric)
        assert close(found[name].effect[wanted], want, 1e-5), name
        assert found[name].exact.metric == name
        source = sweep(model, IDS, [replaced(units[0], own)], {name: metric})[name].baseline
        assert close(found[name].source, source)


def test_one_number_for_all_prompts_is_moved_by_each(model):
    def mean(logits):
        return (logits[:, -1, 7] - logits[:, -1, 9]).mean()

    found = attribution_patch(model, IDS, OTHER, mean, units="mlp")
    by_row = attribution_patch(model, IDS, OTHER, ASK, units="mlp")
    assert close(found.effect, by_row.effect.mean(1, keepdim=True).expand(-1, 2))


def test_the_other_direction_is_the_prompts_exchanged(model):
    there = attribution_patch(model, IDS, OTHER, ASK, direction="noise")
    back = attribution_patch(model, OTHER, IDS, ASK)
    assert torch.equal(there.values, back.values) and torch.equal(there.source, back.source)
    assert not close(attribution_patch(model, IDS, OTHER, ASK).effect, back.effect, 1e-2)


def test_directions_alone(model):
    basis = torch.randn(2, 20, dtype=torch.float64)
    whole = attribution_patch(model, IDS, OTHER, ASK, units="mlp")
    part = attribution_patch(model, IDS, OTHER, ASK, units="mlp", within=basis)
    rest = torch.linalg.svd(basis)[2][2:]  # what is at right angles
    other = attribution_patch(model, IDS, OTHER, ASK, units="mlp", within=rest)
    assert close(part.effect + other.effect, whole.effect)
    assert not close(part.effect, whole.effect, 1e-2)
    assert attribution_patch(model, IDS, OTHER, ASK, units="mlp", within=basis, verify=3).exact


@pytest.mark.parametrize("units", UNITS)
def test_equal_prompts_give_exactly_nothing(lent, units):
    clean = padded(IDS)
    assert attribution_patch(lent, clean, clean, ASK, units=units).effect.abs().max() == 0


# -- averaged gradients -------------------------------------------------------------------------------


def nearly(kind, share=0.1):
    """Two prompts whose pictures differ by little: the way from one to the other is short and smooth."""
    inputs = inputs_for(kind, torch.float64)
    pixels = inputs["pixel_values"]
    return inputs, dict(inputs, pixel_values=pixels + share * (pixels.flip(-1) - pixels))


def test_averaged_gradients_add_up_to_the_whole_way():
    """At block 0's input the difference of the runs' metrics is the integral of the gradient along the way."""
    model, (clean, corrupted) = hooked("wrapper, shared"), nearly("wrapper, shared")

    def missed(steps):
        found = attribution_patch(
            *(model, clean, corrupted, ASK),
            units="resid_pre",
            layers=[0],
            positions="all",
            steps=steps,
        )
        way = found.source - found.baseline
        return ((found.effect[0] - way).abs() / way.abs()).max()

    assert missed(1) > 0.01  # the base run's gradient alone
    assert missed(4) < 1e-3 and missed(16) < missed(4) / 14  # midpoints: by the square of 4


def test_averaged_gradients_are_means_of_runs_between(model):
    found = attribution_patch(model, IDS, OTHER, ASK, units="mlp", steps=3)
    hook = "blocks.0.hook_resid_pre"
    names = [f"blocks.{n}.hook_mlp_out" for n in range(model.cfg.n_layers)]
    _, own = model.run_with_cache(OTHER, names_filter=[hook, *names])
    _, other = model.run_with_cache(IDS, names_filter=[hook, *names])
    gradients = {name: [] for name in names}

    def between(share):
        def move(value, hook):
            return own[hook.name] + share * (other[hook.name] - own[hook.name])

        def keep(grad, hook):
            gradients[hook.name].append(grad)

        model.reset_hooks()
        model.add_hook(hook, move)
        for name in names:
            model.add_hook(name, keep, "bwd")
        logits = model(OTHER)[:, -1]
        (logits[:, 7] - logits[:, 9]).sum().backward()
        model.reset_hooks()

    for share in (1 / 6, 3 / 6, 5 / 6):
        between(share)
    want = [
        (torch.stack(gradients[name]).mean(0) * (other[name] - own[name])).sum(-1) for name in names
    ]
    assert close(found.effect, torch.cat([w.T for w in want]))
    assert not close(
        attribution_patch(model, IDS, OTHER, ASK, units="mlp").effect, found.effect, 1e-2
    )


def test_a_divergence_has_no_slope_in_its_own_run_but_has_on_the_way(model):
    with pytest.raises(ValueError, match="at its minimum"):
        attribution_patch(model, IDS, OTHER, kl_to_clean())
    model, (clean, corrupted) = hooked("wrapper, shared"), nearly("wrapper, shared")
    found = attribution_patch(
        *(model, clean, corrupted, kl_to_clean()),
        units="resid_pre",
        layers=[0],
        positions="all",
        steps=4,
    )
    logs = [model(**inputs)[:, -1].log_softmax(-1) for inputs in (corrupted, clean)]
    want = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    assert close(found.effect[0], want, 0.01) and found.baseline.abs().max() < 1e-12


# -- ablation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("mode", ["zero", "mean", 0.3])
def test_an_estimate_is_the_slope_of_the_ablation(lent, units, mode):
    model, prompts = lent, padded(OTHER)
    per_position = mode == "mean" and units == "patterns"
    found = attribution_ablate(
        model, prompts, ASK, units=units, mode=mode, per_position=per_position
    )
    wanted = some(found.names, 6)
    exact = ablate(
        model,
        prompts,
        ASK,
        units=[found.names[i] for i in wanted],
        mode=mode,
        per_position=per_position,
    )
    assert exact.names == [found.names[i] for i in wanted]
    base = model.prepare(prompts)
    made = variants_of(model, base, exact.names, mode, per_position)
    makes = [
        lambda share, one=one: one if share is None else part_of(one, base, model, share, mode)
        for one in made
    ]
    want = slopes(model, base, makes)
    size = found.effect.abs().max()
    assert (found.effect[wanted] - want).abs().max() < 1e-6 * size
    assert not (found.effect[wanted] + want).abs().max() < 1e-2 * want.abs().max()


def variants_of(model, base, names, mode, per_position):
    """The interventions that `ablate` makes."""
    made = []

    def catch(model, prompts, variants, *args, **kwargs):
        made.extend(variants)
        raise StopIteration

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimates.sweep, "sweep", catch)
        with pytest.raises(StopIteration):
            ablate(model, None, ASK, units=names, mode=mode, per_position=per_position, **base)
    return made


def part_of(one, base, model, share, mode):
    """A share of an ablation: values given once and for all, or a multiple of what is there."""
    _, own = model.run_with_cache(**base, names_filter=sorted({e.where.hook for e in one.edits}))
    edits = []
    for edit in one.edits:
        if mode == 0.3:
            edits.append(Edit(edit.where, scale=1 + share * (0.3 - 1)))
            continue
        value = edit.where.of(own[edit.where.hook])
        target = 0.0 if edit.add is None else edit.add
        edits.append(Edit(edit.where, add=value + share * (target - value)))
    return type(one)(one.name, tuple(edits), one.axes)


def test_patches_of_a_picture():
    model = hooked("wrapper, shared")
    prompts, _ = pictures("wrapper, shared")
    found = attribution_ablate(model, prompts, ASK, units="patches", verify=2)
    base = model.prepare(prompts)
    chosen = list(picture_units(model, base, "patches"))
    assert (
        found.names
        == [c.unit.name for c in chosen]
        == ablate(model, prompts, ASK, units="patches").names
    )
    makes = [lambda share, c=c: scaled(c.unit, 1 - share, c.where) for c in chosen]
    lacks = torch.stack([~c.where.any(1) for c in chosen])
    assert (
        lacks.any() and torch.equal(found.lacks, lacks) and torch.equal(found.values.isnan(), lacks)
    )
    assert close(found.effect.masked_fill(lacks, 0), slopes(model, base, makes), 1e-5)


# -- what it costs and what it leaves -----------------------------------------------------------------


def test_a_map_costs_a_run_of_each_prompt(model, monkeypatch):
    runs = []
    forward = HookedModel.forward
    monkeypatch.setattr(
        HookedModel,
        "forward",
        lambda self, *a, **k: (runs.append(k["stop_at_layer"]), forward(self, *a, **k))[1],
    )
    found = attribution_patch(model, IDS, OTHER, ASK, units="heads")
    assert len(found.names) == 6 * 4 * 7
    assert runs == [model.cfg.n_layers] * 2  # and nobody asked for all logits
    attribution_ablate(model, IDS, ASK)
    assert len(runs) == 3
    attribution_patch(model, IDS, OTHER, ASK, steps=4)
    assert len(runs) == 3 + 2 + 4


def test_nothing_is_left_behind(model, monkeypatch):
    flags = [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        quiet = attribution_patch(model, IDS, OTHER, ASK)
    with torch.inference_mode():
        inner = attribution_patch(model, IDS, OTHER, ASK)
    assert torch.equal(quiet.values, attribution_patch(model, IDS, OTHER, ASK).values)
    assert torch.equal(inner.values, quiet.values) and not quiet.values.requires_grad
    with pytest.raises(ValueError, match="rank has no gradient"):
        attribution_patch(model, IDS, OTHER, rank(7))

    def fails(logits):
        raise RuntimeError("metric")

    with pytest.raises(RuntimeError, match="metric"):
        attribution_patch(model, IDS, OTHER, fails)
    assert not model.list_hooks() and flags == [p.requires_grad for p in model.parameters()]
    model.requires_grad_(True)
    try:
        trained = attribution_patch(model, IDS, OTHER, ASK)
        assert close(trained.effect, quiet.effect) and all(
            p.grad is None for p in model.parameters()
        )
    finally:
        model.requires_grad_(False)


def test_float32_and_no_gradients_from_outside():
    model = hooked("text", torch.float32)
    found = attribution_patch(model, IDS, OTHER, ASK)
    exact = attribution_patch(hooked("text"), IDS, OTHER, ASK)
    assert found.values.dtype == torch.float32
    assert (found.effect - exact.effect).abs().max() < 1e-3 * exact.effect.abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify": "top"}, "verify is 'top'"),
        ({"verify": "best 5"}, "verify is 'best 5'"),
        ({"verify": "top 0"}, "verify is 'top 0'"),
        ({"verify": 0}, "verify is 0"),
        ({"verify": True}, "verify is True"),
        ({"steps": 0}, "steps is 0"),
        ({"units": "head"}, "units is 'head'"),
        ({"positions": 99}, "positions is 99"),
        ({"metric": lambda lg: 3.0}, "has no gradient"),
    ],
)
def test_what_cannot_be_asked(model, arguments, message):
    arguments = {"metric": ASK, **arguments}
    metric = arguments.pop("metric")
    with pytest.raises(ValueError, match=message):
        attribution_patch(model, IDS, OTHER, metric, **arguments)


def test_what_an_ablation_cannot_estimate(model):
    with pytest.raises(ValueError, match="mode is 'resample'"):
        attribution_ablate(model, IDS, ASK, mode="resample")
    edit = ("blocks.1.hook_resid_mid", lambda value, hook: value + 1)
    with model.hooks(fwd_hooks=[edit]), pytest.raises(ValueError, match="hooks on"):
        attribution_ablate(model, IDS, ASK)
    with pytest.raises(ValueError, match="same shape"):
        attribution_patch(model, IDS, OTHER[:, :5], ASK)
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        two_runs(model, IDS, OTHER, "sideways")


# -- verified -----------------------------------------------------------------------------------------


def test_the_largest_are_run_exactly(model):
    found = attribution_patch(model, IDS, OTHER, ASK, verify="top 12")
    whole = patch(model, IDS, OTHER, ASK, units="heads")
    largest = [name for name, _ in found.top(12)]
    assert [found.names[i] for i in found.verified] == largest == found.exact.names
    assert close(found.exact.values, whole.values[list(found.verified)])
    assert close(found.exact.source, whole.source) and close(found.source, whole.source)
    assert close(found.baseline, whole.baseline)
    assert found.at == whole.at and found.axes == whole.axes
    estimated, exact = found.mean()[list(found.verified)], found.exact.mean()
    together = torch.corrcoef(torch.stack([estimated, exact]))[0, 1].item()
    ranks = [v.argsort().argsort().double() for v in (estimated, exact)]
    assert found.pearson == pytest.approx(together)
    assert found.spearman == pytest.approx(torch.corrcoef(torch.stack(ranks))[0, 1].item())
    top = [set(v.abs().topk(6).indices.tolist()) for v in (estimated, exact)]
    assert found.overlap == len(top[0] & top[1]) / 6
    assert "12 of 168" in found.report() and f"{found.spearman:.2f}" in found.report()
    assert repr(found).startswith("Estimate of 168 variants") and "12 run exactly" in repr(found)
    assert found.recovered().shape == (168,) and len(found.to_dataframe()) == 336
    all_of_them = attribution_patch(
        model, IDS, OTHER, ASK, units="mlp", positions="last", verify=99
    )
    assert len(all_of_them.exact.names) == 6


def test_ablations_are_verified_with_their_own_values(model):
    for mode in ("zero", "mean", 0.5):
        for positions in ("all", "each"):
            found = attribution_ablate(model, IDS, ASK, mode=mode, positions=positions, verify=4)
            whole = ablate(model, IDS, ASK, mode=mode, positions=positions)
            assert found.names == whole.names and found.at == whole.at
            assert close(found.exact.values, whole.values[list(found.verified)])


def test_ranks_share_what_is_equal():
    def estimate(estimated, exact):
        n = len(estimated)
        sets = [torch.tensor(v, dtype=torch.float64)[:, None] for v in (estimated, exact)]
        names, at, zero = (
            [str(i) for i in range(n)],
            [{} for _ in range(n)],
            torch.zeros(1).double(),
        )
        result = estimates.SweepResult(names, at, sets[1], zero, "m")
        return Estimate(names, at, sets[0], zero, "m", exact=result, verified=tuple(range(n)))

    assert estimate([1, 2, 3, 4], [10, 20, 30, 400]).spearman == pytest.approx(1)
    assert estimate([1, 2, 3, 4], [4, 3, 2, 1]).spearman == pytest.approx(-1)
    # ranks 1.5 1.5 3 against 1 2 3
    assert estimate([1, 1, 3], [1, 2, 3]).spearman == pytest.approx(3**0.5 / 2)
    assert estimate([9, -8, 1, 0], [1, 9, -8, 0]).overlap == 0.5
    flat = estimate([1, 1, 1], [1, 2, 3])
    assert flat.spearman != flat.spearman and "nan" in flat.report()
    assert count_of("top 50") == count_of(50) == 50
    with pytest.raises(ValueError, match="nothing was run exactly"):
        Estimate(["a"], [{}], torch.zeros(1, 1), torch.zeros(1), "m").report()


def test_examples():
    ran = doctest.testmod(estimates, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
