"""Maps on random configurations against loops of hooks that are written out here, and share no code with the engine.

Every kind of unit, mode and choice of positions, with padding on either side and images, sliding windows shorter than the
prompts, borrowed keys, keys that are values; in float64, to 1e-9 of the largest number of the table.
"""

import random

import fixtures
import pytest
import torch
from small import randomise

from lens_gemma4 import HookedConfig, HookedModel, ablate, knockout, patch
from lens_gemma4.metrics import kl_to_clean, log_prob, logit_difference

EXACT = 1e-9
POINTS = {
    "heads": ("attn.hook_z", "n_heads"),
    "kv_heads": ("attn.hook_z", "n_key_value_heads"),
    "queries": ("attn.hook_rot_q", "n_heads"),
    "keys": ("attn.hook_rot_k", "n_key_value_heads"),
    "values": ("attn.v_norm.hook_out", "n_key_value_heads"),
    "patterns": ("attn.hook_pattern", "n_heads"),
    "neurons": ("mlp.hook_post", "d_mlp"),
    "attn": ("hook_attn_out", None),
    "mlp": ("hook_mlp_out", None),
    "resid_pre": ("hook_resid_pre", None),
    "resid_mid": ("hook_resid_mid", None),
    "resid_post": ("hook_resid_post", None),
}
MODES = ("zero", "mean", "by position", "resample", "scale", "tensor", "within", "patch", "noise")
POSITIONS = ("all", "last", "each", "some")
BY_ROW = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")
KINDS = ("left", "right", "two images", "long image", "text")


def build(seed, wanted):
    """A random model in float64 whose inputs can be of the kind wanted, and two such inputs of one shape."""
    rng = random.Random(seed)
    while True:
        config = fixtures.random_config(rng, vision=True, wrapper=True)
        if wanted in fixtures.input_kinds(config):
            break
    model = HookedModel(HookedConfig.from_hf(config))
    randomise(model, seed=seed)
    model = model.to(torch.float64)
    given = fixtures.random_inputs(rng, config, wanted)
    base = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    # Two prompts more of the same shape, with other words, and other pixels where there are any.
    words = base["input_ids"] < model.cfg.d_vocab - 10
    real = base.get("attention_mask", torch.ones_like(base["input_ids"])).bool()
    other = dict(base)
    other["input_ids"] = torch.where(
        words & real, (base["input_ids"] + 3) % (model.cfg.d_vocab - 12) + 1, base["input_ids"]
    )
    if "pixel_values" in base:
        other["pixel_values"] = base["pixel_values"].flip(-1)
    return model, base, other, rng


def real_of(inputs):
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def last_of(real):
    return (real * torch.arange(real.shape[1])).argmax(1)


def units(model, kind):
    """(name, layer, index) of every unit."""
    if kind == "blocks":
        return [(f"{i}_block", i, None) for i in range(model.cfg.n_layers)]
    size = POINTS[kind][1]
    letter = dict(zip(POINTS, ("H", "KV", "Q", "K", "V", "P", "N"), strict=False))
    whole = {"attn": "attn_out", "mlp": "mlp_out"}
    found = []
    for i in range(model.cfg.n_layers):
        if size is None:
            found.append((f"{i}_{whole.get(kind, kind)}", i, None))
        else:
            for j in range(getattr(model.cfg.layer(i), size)):
                found.append((f"L{i}{letter[kind]}{j}", i, j))
    return found


def take(model, kind, layer, index, value):
    """A unit of a whole point's value."""
    if kind in ("attn", "mlp", "blocks", "resid_pre", "resid_mid", "resid_post"):
        return value
    if kind == "patterns":
        return value[:, index]  # [batch pos kv_pos]
    if kind == "kv_heads":
        group = model.cfg.layer(layer).n_heads // model.cfg.layer(layer).n_key_value_heads
        return value[:, :, index * group : (index + 1) * group]
    return value[:, :, index]


def hooks(model, kind, layer, index, mask, change):
    """Hooks that put `change(name, unit's value)` where `mask` [batch pos] is True."""
    points = ["hook_attn_out", "hook_mlp_out"] if kind == "blocks" else [POINTS[kind][0]]

    def edit(value, hook):
        value = value.clone()
        part = take(model, kind, layer, index, value)
        new = change(hook.name, part.clone())
        for b, p in mask.nonzero().tolist():
            part[b, p] = new[b, p]  # a view: it writes into the copy
        return value

    return [(f"blocks.{layer}.{point}", edit) for point in points]


def masks(rule, real):
    """What stands behind the unit's name, and where it is changed."""
    batch, pos = real.shape
    if rule == "all":
        return [("", torch.ones_like(real))]
    if rule == "last":
        return [("", torch.nn.functional.one_hot(last_of(real), pos).bool())]
    if rule == "each":
        return [(f" @ {p}", (torch.arange(pos) == p).expand(batch, pos)) for p in range(pos)]
    return [("", (torch.arange(pos) % 3 == 1).expand(batch, pos))]


def metric_of(kind):
    made = {"difference": logit_difference(7, 9), "log": log_prob(7), "kl": kl_to_clean()}
    return made[kind]


def by_hand(kind, logits, clean, real):
    rows = torch.arange(len(real))
    own, base = logits[rows, last_of(real)], clean[rows, last_of(real)]
    if kind == "difference":
        return own[:, 7] - own[:, 9]
    if kind == "log":
        return own.log_softmax(-1)[:, 7]
    return (base.softmax(-1) * (base.log_softmax(-1) - own.log_softmax(-1))).sum(-1)


def changes(model, kind, mode, base, other):
    """Arguments for `ablate` or `patch`, and the change by hand: from a hook's name and a unit's value to another."""
    real = real_of(base)
    _, foreign = model.run_with_cache(**other, names_filter="blocks.*", lazy=False)

    def unit_of(cache, name, layer, index):
        return take(model, kind, layer, index, cache[name])

    def averaged(name, layer, index, by_position):
        value = unit_of(foreign, name, layer, index)
        counted = real if by_position else real & (real.cumsum(1) > 1)
        if by_position:
            rows = [value[counted[:, p], p].mean(0) for p in range(value.shape[1])]
            return torch.stack(rows)[None].expand_as(value)
        return value[counted].mean(0).expand_as(value)

    directions = torch.randn(
        2, model.cfg.d_model, generator=torch.Generator().manual_seed(1)
    ).double()
    basis = torch.linalg.svd(directions, full_matrices=False)[2]
    return {
        "zero": ({"mode": "zero"}, lambda n, v, i, j: 0 * v),
        "mean": ({"mode": "mean", "reference": other}, lambda n, v, i, j: averaged(n, i, j, False)),
        "by position": (
            {"mode": "mean", "per_position": True, "reference": other},
            lambda n, v, i, j: averaged(n, i, j, True),
        ),
        "resample": (
            {
                "mode": "resample",
                "reference": {k: v[:1] if k in BY_ROW else v for k, v in other.items()},
            },
            lambda n, v, i, j: unit_of(foreign, n, i, j)[:1].expand_as(v),
        ),
        "scale": ({"mode": -0.5}, lambda n, v, i, j: -0.5 * v),
        "tensor": (
            {"mode": torch.tensor([0.3], dtype=torch.float64)},
            lambda n, v, i, j: 0 * v + 0.3,
        ),
        "within": (
            {"mode": "zero", "within": directions},
            lambda n, v, i, j: v - torch.einsum("bpd,kd,ke->bpe", v, basis, basis),
        ),
        "patch": ({"direction": "denoise"}, lambda n, v, i, j: unit_of(foreign, n, i, j)),
        "noise": ({"direction": "noise"}, lambda n, v, i, j: unit_of(foreign, n, i, j)),
    }[mode]


def compare(model, base, other, rng, kind, mode, rule, metric):
    """One table against its loop; some of its variants when there are many."""
    real = real_of(base)
    rule = "all" if rule == "some" and real.shape[1] < 2 else rule  # there is no position 1
    arguments, change = changes(model, kind, mode, base, other)
    positions = [p for p in range(real.shape[1]) if p % 3 == 1] if rule == "some" else rule
    arguments |= {"units": kind, "positions": positions}
    if mode in ("patch", "noise"):
        pair = (other, base) if mode == "patch" else (base, other)
        found = patch(model, *pair, metric_of(metric), **arguments)
    else:
        found = ablate(model, base, metric_of(metric), **arguments)
    wanted = [
        (name + behind, layer, index, mask)
        for name, layer, index in units(model, kind)
        for behind, mask in masks(rule, real)
    ]
    assert found.names == [name for name, *_ in wanted]
    clean = model(**base)
    assert (found.baseline - by_hand(metric, clean, clean, real)).abs().max() < EXACT * 10
    size = max(1.0, found.values.abs().max().item())
    for i in sorted(rng.sample(range(len(wanted)), min(5, len(wanted)))):
        name, layer, index, mask = wanted[i]
        edit = hooks(model, kind, layer, index, mask, lambda n, v: change(n, v, layer, index))  # noqa: B023
        want = by_hand(metric, model.run_with_hooks(**base, fwd_hooks=edit), clean, real)
        assert (found.values[i] - want).abs().max() < EXACT * size, (kind, mode, rule, name)
    return found


KIND_NAMES = [*POINTS, "blocks"]
WITHIN = ("attn", "mlp", "blocks", "resid_pre", "resid_mid", "resid_post")


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("inputs", KINDS)
def test_tables_equal_their_loops(kind, inputs):
    """Each kind of unit with each kind of input; modes and positions take turns so that all of them meet all kinds of unit."""
    start = KIND_NAMES.index(kind) + 2 * KINDS.index(inputs)
    for turn in range(4):
        model, base, other, rng = build(1000 * start + turn, inputs)
        modes = [m for m in MODES if m != "within" or kind in WITHIN]
        if "attention_mask" in base and not bool(base["attention_mask"][0].all()):
            modes.remove("resample")  # the first prompt has pads where others have none
        if inputs == "two images" or (len(base["input_ids"]) == 1 and "pixel_values" in base):
            modes = [m for m in modes if m != "resample"]  # pictures belong to rows
        mode = modes[(start + turn) % len(modes)]
        rule = POSITIONS[(start + turn) % len(POSITIONS)]
        if kind == "patterns":  # a mean over positions would read what comes later
            mode = {"mean": "by position"}.get(mode, mode)
        metric = ("difference", "log", "kl")[turn % 3]
        compare(model, base, other, rng, kind, mode, rule, metric)


def test_the_loop_tells_units_apart():
    """The control: a neighbour's effect is another number."""
    model, base, other, rng = build(3, "right")
    found = compare(model, base, other, rng, "heads", "zero", "all", "difference")
    assert (found.values - found.values.roll(1, 0)).abs().max() > 1e-3 * found.values.abs().max()


@pytest.mark.parametrize("inputs", KINDS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_knockouts_equal_their_loops(inputs, renormalise):
    model, base, _, rng = build(77 + KINDS.index(inputs), inputs)
    real = real_of(base)
    pos = real.shape[1]
    clean = model(**base)
    first = (
        real.long().argmax(1).max().item()
    )  # a place that every last token sees something beside
    cases = [("each", "all", True)]
    if first < last_of(real).min():
        cases.append(([first], "last", False))
    for sources, queries, each in cases:
        found = knockout(
            model,
            base,
            logit_difference(7, 9),
            sources=sources,
            queries=queries,
            renormalise=renormalise,
        )
        chosen = rng.sample(range(len(found.names)), 4)
        for i in chosen:
            at = found.at[i]
            source = (
                torch.arange(pos) == at["source"] if each else torch.zeros(pos, dtype=torch.bool)
            )
            if not each:
                source[first] = True
            query = torch.ones_like(real) if each else masks("last", real)[0][1]

            def cut(pattern, hook, at=at, source=source, query=query):
                pattern = pattern.clone()
                here = pattern[:, at["head"]]
                left = torch.where(source, 0.0, here)
                if renormalise:
                    total = left.sum(-1, keepdim=True)
                    left = torch.where(total > 0, left / total.clamp(min=1e-300), here)
                pattern[:, at["head"]] = torch.where(query[..., None], left, here)
                return pattern

            edit = [(f"blocks.{at['layer']}.attn.hook_pattern", cut)]
            want = by_hand("difference", model.run_with_hooks(**base, fwd_hooks=edit), clean, real)
            assert (found.values[i] - want).abs().max() < EXACT * 100, found.names[i]
        assert found.effect.abs().max() > 1e-6
