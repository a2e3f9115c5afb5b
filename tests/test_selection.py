"""Circuits from maps against runs with hooks, in float64."""

import doctest
from dataclasses import replace

import pytest
import torch
from small import hooked, inputs_for

from lens_gemma4 import ablate, knockout, logit_difference, patch, selection
from lens_gemma4.selection import greedy, top_k

EXACT = 1e-9
IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10, 11, 12], [2, 15, 16, 17, 18, 19, 11, 13, 14]])
MASK = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])
ASK = logit_difference(7, 9)


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


@pytest.fixture(scope="module")
def heads(model):
    return ablate(model, IDS, ASK, attention_mask=MASK)


def number(logits):
    return logits[:, -1, 7] - logits[:, -1, 9]


def without(model, names, value=0.0, at=slice(None), ids=IDS, **inputs):
    """The metric with some heads' z at another value: a number, or by name."""

    def hook(name):
        def put(z, hook):
            z[:, at, int(name.split("H")[1])] = value[name] if isinstance(value, dict) else value

        return put

    hooks = [(f"blocks.{name[1:].split('H')[0]}.attn.hook_z", hook(name)) for name in names]
    inputs = inputs or {"attention_mask": MASK}
    return number(model.run_with_hooks(ids, fwd_hooks=hooks, **inputs))


def by_effect(found, key):
    """Names, strongest first, written out."""
    effect = dict(zip(found.names, found.mean().tolist(), strict=True))
    return sorted(found.names, key=lambda name: key(effect[name]))


# -- the strongest of a map ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "key"),
    [("any", lambda e: -abs(e)), ("decrease", lambda e: e), ("increase", lambda e: -e)],
)
def test_keeping_and_removing_the_strongest(model, heads, goal, key):
    ks, order = [0, 1, 5, 24], by_effect(heads, key)
    found = top_k(model, IDS, ASK, heads, ks, goal=goal, attention_mask=MASK)
    assert found.order == order and len(order) == 24
    base, empty = without(model, []), without(model, order)
    for i, k in enumerate(ks):
        kept, removed = without(model, order[k:]), without(model, order[:k])
        assert (found.kept[i] - kept).abs().max() < EXACT * base.abs().max()
        assert (found.removed[i] - removed).abs().max() < EXACT * base.abs().max()
        share = (kept - empty).mean() / (base - empty).mean()
        assert abs(found.share(found.kept)[i] - share) < 1e-9
    assert (
        found.kept[1] - found.removed[1]
    ).abs().max() > 1e-3  # the control: one is not the other
    assert (found.kept[2] - without(model, order[::-1][5:])).abs().max() > 1e-4
    assert torch.equal(found.kept[0], found.empty) and torch.equal(found.removed[0], found.baseline)
    assert torch.equal(found.kept[-1], found.baseline)
    assert (found.empty - empty).abs().max() < EXACT * base.abs().max()


def test_one_curve_alone_and_several_metrics(model, heads):
    both = top_k(model, IDS, ASK, heads, [2, 3], attention_mask=MASK)
    kept = top_k(model, IDS, ASK, heads, [2, 3], keep=True, attention_mask=MASK)
    removed = top_k(model, IDS, ASK, heads, [2, 3], keep=False, attention_mask=MASK)
    assert kept.removed is None and removed.kept is None
    close = EXACT * both.baseline.abs().max()
    assert (kept.kept - both.kept).abs().max() < close
    assert (removed.removed - both.removed).abs().max() < close
    two = top_k(
        model, IDS, {"a": ASK, "b": logit_difference(9, 7)}, heads, [2], attention_mask=MASK
    )
    assert (two["a"].kept + two["b"].kept).abs().max() < 1e-12
    frame = both.to_dataframe()
    assert list(frame["curve"]) == ["kept", "kept", "removed", "removed"]
    assert frame["value"][1] == pytest.approx(both.kept[1].mean().item())
    assert frame["share"][3] == pytest.approx(both.share(both.removed)[1].item())
    assert len(both.plot().to_dict()["data"]) == 2 and "k = 2, 3" in repr(both)


def test_units_are_changed_as_and_where_they_are_told(model, heads):
    order = by_effect(heads, lambda e: -abs(e))
    _, cache = model.run_with_cache(IDS, attention_mask=MASK)
    counted = MASK.bool() & (MASK.cumsum(1) > 1)
    means = {name: cache["z", int(name[1])][:, :, int(name[3])][counted].mean(0) for name in order}
    found = top_k(model, IDS, ASK, heads, [4], mode="mean", positions=[3, 8], attention_mask=MASK)
    want = without(model, order[4:], means, at=[3, 8])
    assert (found.kept[0] - want).abs().max() < EXACT * want.abs().max()
    for wrong in (without(model, order[4:], means), without(model, order[4:], at=[3, 8])):
        assert (found.kept[0] - wrong).abs().max() > 1e-4


def test_a_map_s_own_positions_are_taken(model):
    for positions, at in (("last", [-1]), ([2, 5], [2, 5]), (MASK.bool().flip(1), None)):
        heads = ablate(model, IDS, ASK, positions=positions)
        found = top_k(model, IDS, ASK, heads, [3])
        again = top_k(model, IDS, ASK, heads, [3], positions=positions)
        assert torch.equal(found.kept, again.kept)
        if at is not None:
            order = by_effect(heads, lambda e: -abs(e))
            want = without(model, order[3:], at=at, attention_mask=torch.ones_like(IDS))
            assert (found.kept[0] - want).abs().max() < EXACT * want.abs().max()
        everywhere = top_k(model, IDS, ASK, heads, [3], positions="all")
        assert (found.kept - everywhere.kept).abs().max() > 1e-4
    sliced = ablate(model, IDS, ASK, positions=slice(2, 4))
    with pytest.raises(ValueError, match="give them again"):
        top_k(model, IDS, ASK, sliced, [3])


def test_maps_over_positions_and_of_another_run(model):
    """Units of a patching map, at one position each: kept as they are, the others at zero."""
    found = patch(model, IDS, IDS.flip(0), ASK, units="mlp", positions="each")
    order = by_effect(found, lambda e: -abs(e))
    curves = top_k(model, IDS, ASK, found, [6], keep=True)
    assert curves.order == order

    def zero(name):
        def hook(value, hook):
            value[:, int(name.split(" @ ")[1])] = 0

        return (f"blocks.{name[0]}.hook_mlp_out", hook)

    hooks = [zero(name) for name in order[6:]]
    want = number(model.run_with_hooks(IDS, fwd_hooks=hooks))
    assert (curves.kept[0] - want).abs().max() < EXACT * want.abs().max()


def test_maps_of_picture_patches():
    model = hooked("wrapper, shared")
    given = inputs_for("wrapper, shared", torch.float64)
    found = ablate(model, None, ASK, units="patches", **given)
    order = by_effect(found, lambda e: -abs(e))
    curves = top_k(model, None, ASK, found, [1], **given)
    assert curves.order == order
    # the first row's image has six patches in reading order from position 2 on, the second's two from position 1
    where = {}
    for row, (at, cells) in enumerate(
        [(2, [(x, y) for y in range(2) for x in range(3)]), (1, [(0, 0), (0, 1)])]
    ):
        for i, (x, y) in enumerate(cells):
            where.setdefault(f"image[0] ({x}, {y})", []).append((row, at + i))

    def zero(value, hook):
        for row, position in where[order[0]]:
            value[row, position] = 0

    want = number(model.run_with_hooks(**given, fwd_hooks=[("blocks.0.hook_resid_pre", zero)]))
    assert (curves.removed[0] - want).abs().max() < EXACT * want.abs().max()
    assert (curves.kept[0] - want).abs().max() > 1e-4


def test_what_has_no_curve_is_refused(model, heads):
    for ks in ([], [-1], [25]):
        with pytest.raises(ValueError, match="from 0 to 24"):
            top_k(model, IDS, ASK, heads, ks)
    for ask in (
        lambda: top_k(model, IDS, ASK, heads, [1], goal="most"),
        lambda: greedy(model, IDS, ASK, goal="most"),
    ):
        with pytest.raises(ValueError, match="goal is 'most'"):
            ask()
    cut = knockout(model, IDS, ASK, queries="last", sources="each", units="attn")
    with pytest.raises(ValueError, match="what attention reads"):
        top_k(model, IDS, ASK, cut, [1])
    broken = replace(heads, values=heads.values * torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        top_k(model, IDS, ASK, broken, [1])


def test_nothing_to_recover(model):
    alike = ablate(model, IDS, ASK, units="mlp", mode=1.0)
    found = top_k(model, IDS, lambda lg: torch.zeros(2), alike, [1])
    with pytest.raises(ValueError, match="nothing to recover"):
        found.share(found.kept)


# -- one after another --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "best"),
    [("any", lambda v: abs(v)), ("decrease", lambda v: -v), ("increase", lambda v: v)],
)
def test_greedy_takes_the_furthest_at_each_step(model, goal, best):
    layers = [1, 2, 5]
    found = greedy(model, IDS, ASK, layers=layers, k=3, goal=goal, attention_mask=MASK)
    base = without(model, [])
    rest, chosen = [f"L{layer}H{head}" for layer in layers for head in range(4)], []
    for step in range(3):
        runs = {name: without(model, [*chosen, name]) for name in rest}
        name = max(rest, key=lambda n: best((runs[n] - base).mean().item()))
        assert found.names[step] == name
        assert (found.values[step] - runs[name]).abs().max() < EXACT * base.abs().max()
        rest.remove(name)
        chosen.append(name)
        assert len(found.maps[step].names) == len(rest) + 1
    assert (found.baseline - base).abs().max() < EXACT * base.abs().max()
    if goal != "any":
        alone = ablate(model, IDS, ASK, units=chosen, attention_mask=MASK)
        assert (alone.values[2] - found.values[2]).abs().max() > 1e-4  # the control: not by itself


def test_equals_are_taken_in_order_and_steps_are_resumed(model, tmp_path):
    found = greedy(model, IDS, lambda lg: torch.zeros(2), units="mlp", k=6)
    assert found.names == [f"{layer}_mlp_out" for layer in range(6)]  # all of them
    given = {"units": "mlp", "k": 2, "save_to": tmp_path / "steps"}
    once, again = (greedy(model, IDS, ASK, **given) for _ in range(2))
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["000", "001"]
    assert once.names == again.names and torch.equal(once.values, again.values)


def test_steps_as_tables_and_figures(model):
    found = greedy(model, IDS, ASK, units="attn", k=2, positions="each", layers=[0, 3])
    assert all(" @ " in name for name in found.names)
    frame = found.to_dataframe()
    assert list(frame["unit"]) == found.names
    assert frame["gain"].sum() == pytest.approx(frame["effect"].iloc[-1])
    assert found.plot().to_dict()["data"] and found.names[0] in repr(found)


def test_greedy_says_what_is_wrong(model):
    for k in (0, 25):
        with pytest.raises(ValueError, match="from 1 to 24"):
            greedy(model, IDS, ASK, k=k)
    with pytest.raises(ValueError, match="one metric"):
        greedy(model, IDS, {"a": ASK})


def test_examples_run():
    found = doctest.testmod(selection)
    assert found.attempted and not found.failed
