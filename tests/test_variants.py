"""The engine against its slow reference: one run with hooks for each variant, in float64."""

import random

import fixtures
import pytest
import torch
from small import KINDS, inputs_for, randomise

from lens_gemma4 import HookedConfig, HookedModel
from lens_gemma4.interventions import (
    UNITS,
    Edit,
    Intervention,
    Place,
    Unit,
    added,
    at_each_position,
    position_mask,
    replaced,
    scaled,
    unit_named,
    units_of,
)
from lens_gemma4.variants import Runner, clean_run

EXACT = 1e-9
OFF = 1e-4


def make(config, seed=5):
    model = HookedModel(HookedConfig.from_hf(config))
    randomise(model, seed=seed)
    return model.to(torch.float64)


# Borrowers, values of their own, images that are seen both ways, everything seen both ways, padding, no softcap.
CASES = ("shared, own values", "wrapper, shared", "wrapper, all", "no softcap, untied")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    model = make(KINDS[request.param])
    return model, model.prepare(**inputs_for(request.param, torch.float64))


def real_of(tensors):
    ids = tensors["input_ids"]
    mask = tensors.get("attention_mask")
    return torch.ones_like(ids) if mask is None else mask


def slow(model, tensors, intervention):
    """The last stream of a whole run with hooks."""
    return model.run_with_hooks(
        **tensors, fwd_hooks=intervention.hooks(), stop_at_layer=model.cfg.n_layers
    )


def fast(model, tensors, interventions, read=None):
    points = [edit.where.point for one in interventions for edit in one.edits]
    clean = clean_run(model, tensors, points)
    start = clean.first_changed(min(one.first_position() for one in interventions))
    runner = Runner(model, clean)
    return runner.run([runner.group(interventions, start, read)])[0], start


def check(model, tensors, interventions, read=None):
    """Largest difference over real positions, as a share of the largest number."""
    found, start = fast(model, tensors, interventions, read)
    real, rows = real_of(tensors).bool(), torch.arange(len(tensors["input_ids"]))[:, None]
    untouched = slow(model, tensors, Intervention("", ()))
    for one, got in zip(interventions, found, strict=True):
        want = slow(model, tensors, one)
        before = (want - untouched)[:, :start]  # an edited pattern makes the run explicit: rounding
        assert before.numel() == 0 or before.abs().max() < EXACT * untouched.abs().max(), one.name
        want, ok = (
            (want[:, start:], real[:, start:])
            if read is None
            else (want[rows, read], real[rows, read])
        )
        size = want.abs().max().clamp(min=1e-6)
        assert ((got - want)[ok]).abs().max() < EXACT * size, one.name


def few(units, cfg):
    found = units_of(units, cfg)
    return found[:: max(1, len(found) // 4)]


@pytest.mark.parametrize("units", UNITS)
def test_every_unit_mode_and_position(case, units):
    model, tensors = case
    real, generator = real_of(tensors), torch.Generator().manual_seed(0)
    _, other = model.run_with_cache(**tensors)
    pos = real.shape[1]
    chosen_units = few(units, model.cfg)
    for where in ("all", "last", [pos // 2, -2]):
        at = position_mask(where, real)
        shift = torch.randn(1, dtype=torch.float64, generator=generator)
        chosen = [scaled(unit, 0.0, at) for unit in chosen_units]
        chosen.append(scaled(chosen_units[0], 0.5, at))
        if units != "patterns":
            chosen.append(added(chosen_units[-1], shift, at))
        # patched in from another run, here the row below
        values = {place.hook: other[place.hook].roll(1, 0) for place in chosen_units[1].places}
        chosen.append(replaced(chosen_units[1], values, at))
        chosen.append(chosen[0] & chosen[-1])
        last = (real.bool() * torch.arange(pos)).argmax(-1)[:, None]
        check(model, tensors, chosen, last if where == "last" else None)


def test_random_configurations():
    for seed in range(8):
        rng = random.Random(seed)
        config = fixtures.random_config(rng)
        model = make(config, seed)
        inputs = fixtures.random_inputs(rng, config)
        tensors = model.prepare(
            **{n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
        )
        real = real_of(tensors)
        chosen = []
        for units in UNITS:
            every = units_of(units, model.cfg)
            for unit in rng.sample(every, min(3, len(every))):
                at = position_mask(rng.choice(["all", "last", rng.randrange(real.shape[1])]), real)
                chosen.append(rng.choice([scaled(unit, 0.0, at), added(unit, torch.ones(1), at)]))
        check(model, tensors, chosen)


def test_pairs_in_unlike_blocks_and_both_orders(case):
    model, tensors = case
    heads = units_of("heads", model.cfg)
    low, high = scaled(heads[0], 0.0), scaled(heads[-1], 0.0)
    mid = scaled(units_of("resid_mid", model.cfg)[1], 0.5)
    check(model, tensors, [high & low, low & mid & high, mid & high, high, low])


def test_edits_of_the_projection_reach_both_keys_and_values(case):
    model, tensors = case
    chosen = []
    for layer in model.cfg.layers:
        if layer.lender is None:
            for point in ("attn.hook_k", "attn.hook_v", "attn.hook_q"):
                chosen.append(
                    added(
                        Unit(f"{layer.index} {point}", (Place(layer.index, point, 0),), {}),
                        torch.ones(1),
                    )
                )
    check(model, tensors, chosen)


def test_one_position_at_a_time():
    model, tensors = make(KINDS["text"]), {"input_ids": torch.arange(5, 16)[None]}
    tensors = model.prepare(**tensors)
    streams = [scaled(unit, 0.0) for unit in units_of("resid_pre", model.cfg)]
    each = at_each_position(streams, 1, 11, torch.device("cpu"))
    assert len(each) == 11 * len(streams) and each[3].name == "0_resid_pre @ 3"
    check(model, tensors, each[::3])
    found, start = fast(model, tensors, each[5:6])
    assert start == 5 and found.shape[2] == 6  # nothing before it is run


def test_inside_an_image_earlier_positions_change_too():
    model = make(KINDS["wrapper"])
    tensors = model.prepare(**inputs_for("wrapper", torch.float64))
    clean = clean_run(model, tensors, [])
    ids = tensors["input_ids"]
    image = (ids == model.cfg.image_token_id).any(0).nonzero()[:, 0]
    assert clean.first_changed(int(image[1])) <= int(image[0]) < int(image[1])
    assert clean.first_changed(ids.shape[1] - 1) == ids.shape[1] - 1


def test_a_wrong_edit_is_seen(case):
    """The control: what the engine is compared with moves when one head is another."""
    model, tensors = case
    heads = units_of("heads", model.cfg)
    found, _ = fast(model, tensors, [scaled(heads[0], 0.0)])
    other = slow(model, tensors, scaled(heads[1], 0.0))
    real = real_of(tensors).bool()
    assert (found[0] - other)[real].abs().max() > OFF * other.abs().max()


def test_the_order_asked_for_is_the_order_given(case):
    model, tensors = case
    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    forward, _ = fast(model, tensors, heads)
    backward, _ = fast(model, tensors, heads[::-1])
    assert (forward - backward.flip(0)).abs().max() < EXACT * forward.abs().max()


# -- edits and positions ------------------------------------------------------------------------------


def test_an_edit_scales_and_adds_where_it_is_told():
    value = torch.arange(12.0).view(1, 3, 4)
    at = torch.tensor([[False, True, False]])
    place = Place(0, "mlp.hook_post", 2)
    edited = Edit(place, at, scale=2.0, add=torch.tensor(1.0)).apply(value)
    want = value.clone()
    want[0, 1, 2] = 2 * want[0, 1, 2] + 1
    assert torch.equal(edited, want) and value[0, 1, 2] == 6
    tail = Edit(place, at, scale=2.0).apply(value[:, 1:], torch.tensor([[1, 2]]))
    assert torch.equal(tail[0, 0, 2], value[0, 1, 2] * 2) and torch.equal(tail[0, 1], value[0, 2])


def test_positions_in_words_and_numbers():
    real = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert position_mask("all", real) is None and position_mask(None, real) is None
    assert position_mask("last", real).tolist() == [[False, True, False], [False, False, True]]
    assert position_mask(-1, real).tolist() == [[False, False, True]] * 2
    assert position_mask([0, 1], real).tolist() == [[True, True, False]] * 2
    assert position_mask(slice(1, None), real).tolist() == [[False, True, True]] * 2
    for wrong in ("first", 3, [0, 9]):
        with pytest.raises(ValueError, match="positions is"):
            position_mask(wrong, real)


def test_units_are_named_by_block_and_number(case):
    model, _ = case
    for kind in UNITS:
        every = units_of(kind, model.cfg)
        assert len({unit.name for unit in every}) == len(every)
        assert all(unit_named(unit.name, model.cfg) == unit for unit in every)
    assert units_of("heads", model.cfg)[1] == Unit(
        "L0H1", (Place(0, "attn.hook_z", 1),), {"layer": 0, "head": 1}
    )
    assert units_of("blocks", model.cfg, layers=[-1])[0].name == f"{model.cfg.n_layers - 1}_block"
    group = units_of("kv_heads", model.cfg)[1].places[0].unit
    size = model.cfg.n_heads // model.cfg.layer(0).n_key_value_heads
    assert group == slice(size, 2 * size)
    both = unit_named("L0H1 & 2_mlp_out", model.cfg)
    assert both.places == (Place(0, "attn.hook_z", 1), Place(2, "hook_mlp_out"))
    for wrong in ("L0H99", "L99H0", "0_resid", "H3", "L0H1 &"):
        with pytest.raises(ValueError, match="there is no unit"):
            unit_named(wrong, model.cfg)
    with pytest.raises(ValueError, match="units is 'head'"):
        units_of("head", model.cfg)
