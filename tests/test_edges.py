"""Path patching against runs in which hooks hold everything between; edge scores against small exact path patches."""

import doctest
import math
import random

import fixtures
import pytest
import torch
from small import hooked, inputs_for, randomise

from lens_gemma4 import HookedConfig, HookedModel, edges, kl_to_clean, logit_difference, paths, rank
from lens_gemma4.edges import edge_attribution, pull, push
from lens_gemma4.estimates import attribution_patch
from lens_gemma4.gradients import START
from lens_gemma4.interventions import position_mask
from lens_gemma4.metrics import Reading, prompts_of
from lens_gemma4.paths import WRITES, Paths, hooks_of, path_patch, receivers_of, senders_of

EXACT = 1e-9
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
def small():
    return hooked("shared, own values")


def close(got, want, tolerance=EXACT):
    return (got - want).abs().max() < tolerance * want.abs().max()


# -- path patching ------------------------------------------------------------------------------------


class Slowly:
    """Path patching by `run_with_hooks` alone."""

    def __init__(self, model, clean, corrupted):
        self.model, self.base = model, model.prepare(corrupted)
        _, self.own = model.run_with_cache(**self.base)
        _, self.other = model.run_with_cache(**model.prepare(clean))
        mask = self.base.get("attention_mask")
        real = torch.ones_like(self.base["input_ids"]) if mask is None else mask
        self.last = position_mask("last", real)

    def run(self, hooks):
        logits = self.model.run_with_hooks(**self.base, fwd_hooks=hooks)[self.last]
        return logits[:, 7] - logits[:, 9]

    def sent(self, sender):
        """A hook that takes the sender from the other run."""
        if sender.kind == "embed":
            return [(START, lambda value, hook: self.other[START])]
        if sender.kind == "mlp":
            name = f"blocks.{sender.layer}.hook_mlp_out"
            return [(name, lambda value, hook: self.other[name])]
        name = f"blocks.{sender.layer}.attn.hook_z"

        def one_head(value, hook):
            value[:, :, sender.number] = self.other[name][:, :, sender.number]

        return [(name, one_head)]

    def held(self, sender):
        """Hooks that hold what every other part writes."""
        own_write = {"head": "attn_out", "mlp": "mlp_out", "embed": ""}[sender.kind]
        names = [
            f"blocks.{n}.hook_{write}"
            for n in range(self.model.cfg.n_layers)
            for write in ("attn_out", "mlp_out")
            if (n, write) != (sender.layer, own_write) or not own_write
        ]
        return [(name, lambda value, hook: self.own[hook.name]) for name in names]

    def patched(self, sender, receivers, hold=True):
        """What the receivers make while all else is held, put into the base run."""
        seen = {}

        def see(value, hook):
            seen[hook.name] = value

        last = f"blocks.{self.model.cfg.n_layers - 1}.hook_resid_post"
        made = [last, *(self.made(r) for r in receivers if r.kind != "logits")]
        looks = [(name, see) for name in sorted(set(made))]
        self.run([*looks, *self.sent(sender), *(self.held(sender) if hold else [])])
        edits = []
        for r in receivers:
            edits += self.edit(r, receivers, seen)
        return self.run(edits)

    @staticmethod
    def made(r):
        return f"blocks.{r.layer}." + (
            "ln2_post.hook_out" if r.kind == "mlp" else f"attn.hook_{r.kind}"
        )

    def edit(self, r, receivers, seen):
        if r.kind == "logits":
            last = f"blocks.{r.layer - 1}.hook_resid_post"
            return [(last, lambda value, hook: value + seen[last] - self.own[last])]
        name = self.made(r)
        if r.kind == "mlp":
            return [(name, lambda value, hook: seen[name])]

        def one(values, number):
            def put(value, hook):
                value[:, :, number] = values[:, :, number]

            return put

        found = [(name, one(seen[name], r.number))]
        if r.kind == "k" and self.model.cfg.layer(r.layer).k_eq_v:
            both = any(o[1:] == ("v", r.layer, r.number) for o in receivers)
            v = f"blocks.{r.layer}.attn.hook_v"
            found += [] if both else [(v, one(self.own[v], r.number))]
        return found


def paths_of(model):
    """A sender of each kind to receivers of each kind, near and far, alone and together."""
    last = model.cfg.n_layers - 1
    alone = [
        ("embed", "L0H1.q"),
        ("embed", "L1KV0.k"),
        ("L0H1", "0_mlp"),
        ("L0H1", "L1KV0.k"),
        ("0_mlp", "L1KV0.v"),
        ("L0H2", f"L{last}H3.q"),
        ("0_mlp", "1_mlp"),
        ("L1H0", "logits"),
        ("1_mlp", f"{last}_mlp"),
    ]
    full = next(b.index for b in model.cfg.layers if b.kind == "full" and b.lender is None)
    together = [
        ("L0H1", ("L1KV0.k", "L1KV0.v", "1_mlp", f"L{last}H0.q", "logits")),
        ("embed", (f"L{full}KV0.v", f"L{full}KV0.k")),  # keys that are values, in either order
    ]
    return [*((sender, (to,)) for sender, to in alone), *together]


def test_path_patches_are_runs_with_all_else_held(case):
    model, clean, corrupted = case
    slow = Slowly(model, clean, corrupted)
    sends = {n.name: n for n in senders_of(model.cfg)}
    reads = {n.name: n for n in receivers_of(model.cfg)}
    unheld = 0
    for sender, to in paths_of(model):
        found = path_patch(model, clean, corrupted, ASK, [sender], list(to))
        receivers = [reads[name] for name in to]
        want = slow.patched(sends[sender], receivers)
        assert close(found.values[0], want), (sender, to)
        assert close(found.baseline, slow.run([])) and not torch.equal(
            found.values[0], found.baseline
        )
        unheld += not close(
            found.values[0], slow.patched(sends[sender], receivers, hold=False), 1e-4
        )
    assert (
        unheld > 4
    )  # the control: without holding what is between, most paths give something else


def test_senders_by_kind_and_their_names(small):
    heads = path_patch(small, IDS, OTHER, ASK, "heads", "L2H1.q")
    assert heads.names == [f"L{n}H{i} -> L2H1.q" for n in (0, 1) for i in range(4)]
    assert heads.axes == {"layer": [0, 1], "head": [0, 1, 2, 3]}
    two = path_patch(small, IDS, OTHER, ASK, ["0_mlp", "embed"], ["L2H1.q", "L3H0.q"])
    assert two.names == ["0_mlp -> L2H1.q + L3H0.q", "embed -> L2H1.q + L3H0.q"]
    source = small(IDS)[:, -1]
    assert close(heads.source, source[:, 7] - source[:, 9])
    swapped = path_patch(small, OTHER, IDS, ASK, "heads", "L2H1.q", direction="noise")
    assert torch.equal(swapped.values, heads.values)
    both = path_patch(small, IDS, OTHER, {"a": ASK, "b": rank(7)}, "mlp", "logits")
    assert set(both) == {"a", "b"} and both["a"].names == [f"{n}_mlp -> logits" for n in range(6)]


@pytest.mark.parametrize(
    ("senders", "receivers", "message"),
    [
        (["L9H0"], "logits", "no sender 'L9H0'"),
        ("heads", "L5KV0.k", "no receiver 'L5KV0.k'.*lender"),  # block 5 borrows
        ([], "logits", "the list is empty"),
        (["L3H0"], "L2H1.q", "L3H0 writes after L2H1.q reads"),
        (["L2H0"], "L2H1.q", "writes after"),  # heads of one block do not read each other
        ("heads", "L0H1.q", "writes after"),
    ],
)
def test_paths_that_are_none(small, senders, receivers, message):
    with pytest.raises(ValueError, match=message):
        path_patch(small, IDS, OTHER, ASK, senders, receivers)


# -- edges --------------------------------------------------------------------------------------------


def slopes(model, clean, corrupted, pairs, eps):
    """Change of the metric for a small share of each sender's difference, by that share, from both sides."""
    base = model.prepare(corrupted)
    names = hooks_of(
        model.cfg, *WRITES, "hook_resid_pre", "hook_attn_out", "hook_resid_mid", "attn.hook_v"
    )
    _, own = model.run_with_cache(**base, names_filter=names)
    _, other = model.run_with_cache(**model.prepare(clean), names_filter=names)
    own, other = dict(own.items()), dict(other.items())
    final = model(**base, stop_at_layer=model.cfg.n_layers)
    reading = Reading(model, {"ask": ASK}, final, prompts_of(model, base))
    whole = torch.arange(final.shape[1]).expand(len(final), -1)
    found = []
    for sender, receiver in pairs:
        ends = []
        for share in (eps, -eps):
            given = {name: own[name] + share * (other[name] - own[name]) for name in names}
            edits = Paths(model, own, given).patched(sender, [receiver]).hooks()
            stream = model.run_with_hooks(**base, fwd_hooks=edits, stop_at_layer=model.cfg.n_layers)
            ends.append(reading.measure(stream[None], whole)[0, 0])
        found.append((ends[0] - ends[1]) / (2 * eps))
    return torch.stack(found)


def test_scores_are_slopes_of_exact_path_patches(case):
    model, clean, corrupted = case
    found = edge_attribution(model, clean, corrupted, ASK)
    senders, receivers = senders_of(model.cfg), receivers_of(model.cfg)
    there = [
        (s, r)
        for s, sender in enumerate(senders)
        for r, receiver in enumerate(receivers)
        if sender.written <= receiver.read
    ]
    nothing = found.scores.isnan()
    assert int((~nothing).all(-1).sum()) == len(there)
    sorts = {}
    for s, r in there:
        sorts.setdefault((senders[s].kind, receivers[r].kind), []).append((s, r))
    assert len(sorts) == 3 * 5  # each sort of sender to each sort of receiver
    chosen = [pair for pairs in sorts.values() for pair in pairs[:: max(1, len(pairs) // 4)]]
    want = slopes(model, clean, corrupted, [(senders[s], receivers[r]) for s, r in chosen], 1e-5)
    got = torch.stack([found.scores[s, r] for s, r in chosen])
    size = want.abs().max()
    assert (got - want).abs().max() < 1e-6 * size
    big = want.abs() > 1e-3 * size
    assert ((got - want).abs() / want.abs())[big].max() < 1e-5
    # the control: without the layer scalars on the way
    scalars = torch.stack([block.layer_scalar[0] for block in model.blocks])
    gains = [scalars[senders[s].layer : receivers[r].layer].prod() for s, r in chosen]
    assert not close(got / torch.stack(gains)[:, None], want, 1e-2)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_senders_edges_sum_to_its_own_estimate(case, steps):
    model, clean, corrupted = case
    found = edge_attribution(model, clean, corrupted, ASK, steps=steps)
    for units, kind in (("heads", "head"), ("mlp", "mlp"), ("resid_pre", "embed")):
        whole = attribution_patch(
            model, clean, corrupted, ASK, units=units, positions="all", steps=steps
        ).effect
        rows = [s for s, node in enumerate(senders_of(model.cfg)) if node.kind == kind]
        sums = found.scores[rows].nansum(1)
        assert close(sums, whole[: len(rows)])
        mlps = torch.tensor([node.kind == "mlp" for node in receivers_of(model.cfg)])
        assert not close(found.scores[rows][:, ~mlps].nansum(1), whole[: len(rows)], 1e-3)


def test_random_configurations():
    for seed in range(6):
        rng = random.Random(seed)
        config = fixtures.random_config(rng)
        model = HookedModel(HookedConfig.from_hf(config))
        randomise(model, seed)
        model = model.to(torch.float64)
        clean = fixtures.random_inputs(rng, config)
        clean = {n: v.double() if v.is_floating_point() else v for n, v in clean.items()}
        corrupted = {n: v + 0.1 * v.sin() if v.is_floating_point() else v for n, v in clean.items()}
        ids = clean["input_ids"]
        words = (ids > 2) & (ids < 80)
        corrupted["input_ids"] = ids.where(~words, 3 + (ids * 7) % 75)
        found = edge_attribution(model, clean, corrupted, ASK)
        heads = attribution_patch(model, clean, corrupted, ASK, positions="all").effect
        senders, reads = senders_of(model.cfg), receivers_of(model.cfg)
        rows = [s for s, node in enumerate(senders) if node.kind == "head"]
        assert close(found.scores[rows].nansum(1), heads), seed
        slow = Slowly(model, clean, corrupted)
        for _ in range(3):
            sender = rng.choice(senders)
            to = rng.sample([r for r in reads if sender.written <= r.read], 1)
            got = path_patch(model, clean, corrupted, ASK, sender.name, [r.name for r in to])
            want, base = slow.patched(sender, to), slow.run([])
            assert (got.values[0] - want).abs().max() < EXACT * base.abs().max(), (seed, sender, to)


def test_norms_are_pushed_and_pulled_as_autograd_does(small):
    norm = small.blocks[0].ln1_post
    x, change, gradient = torch.randn(3, 2, 5, 20, dtype=torch.float64).unbind()
    x.requires_grad_()
    (want,) = torch.autograd.grad(norm.plain(x), x, gradient)
    assert close(pull(norm, x.detach(), gradient), want)
    assert not close(norm.plain(gradient), want, 1e-2)
    pushed = push(norm, x.detach(), change)
    assert close((pushed * gradient).sum(), (change * want).sum())  # one is the other's transpose


def test_equal_prompts_give_exactly_nothing(case):
    model, clean, _ = case
    found = edge_attribution(model, clean, clean, ASK)
    assert found.scores.nan_to_num().abs().max() == 0
    assert path_patch(model, clean, clean, ASK, "heads", "logits").effect.abs().max() < 1e-12


def test_edges_are_named_listed_drawn_and_verified(small):
    found = edge_attribution(small, IDS, OTHER, ASK)
    assert found.senders[:2] == ["embed", "L0H0"] and found.receivers[-1] == "logits"
    sender, receiver, score = found.top(3)[0]
    mean = found.mean()
    assert score == mean[found.senders.index(sender), found.receivers.index(receiver)]
    assert abs(score) == mean.nan_to_num().abs().max()
    frame = found.to_dataframe()
    assert len(frame) == int((~found.scores.isnan()).sum())
    row = frame[(frame["sender"] == sender) & (frame["receiver"] == receiver)]
    assert math.isclose(row["score"].mean(), score)
    assert found.plot(8).to_dict()["data"] and "Edges: " in repr(found)
    checked = found.verify(8)
    names = [f"{s} -> {r}" for s, r, _ in found.top(8)]
    assert names == checked.exact.names == [checked.names[i] for i in checked.verified]
    assert len(checked.names) * 2 == len(frame)
    exact = path_patch(small, IDS, OTHER, ASK, [sender], [receiver])
    assert close(checked.exact.values[0], exact.values[0])
    assert checked.mean()[checked.verified[0]].item() == pytest.approx(score)
    assert -1 <= checked.spearman <= 1 and f"8 of {len(checked.names)}" in checked.report()
    assert not small.list_hooks()


def test_weights_that_are_trained_and_modes_without_gradients_change_nothing(small):
    quiet = edge_attribution(small, IDS, OTHER, ASK)
    with torch.inference_mode():
        inner = edge_attribution(small, IDS, OTHER, ASK)
    assert torch.equal(inner.scores.nan_to_num(), quiet.scores.nan_to_num())
    small.requires_grad_(True)
    try:
        trained = edge_attribution(small, IDS, OTHER, ASK)
        assert torch.equal(trained.scores.nan_to_num(), quiet.scores.nan_to_num())
        assert not trained.scores.requires_grad and not trained.verify(2).exact.values.requires_grad
        assert all(p.grad is None for p in small.parameters())
    finally:
        small.requires_grad_(False)


def test_what_has_no_edges(small):
    with pytest.raises(ValueError, match="rank has no gradient"):
        edge_attribution(small, IDS, OTHER, rank(7))
    with pytest.raises(ValueError, match="at its minimum"):
        edge_attribution(small, IDS, OTHER, kl_to_clean())
    with pytest.raises(ValueError, match="one metric"):
        edge_attribution(small, IDS, OTHER, [ASK, rank(7)])
    with pytest.raises(ValueError, match="k is 0"):
        edge_attribution(small, IDS, OTHER, ASK).verify(0)
    with small.skip_layers(1, 1), pytest.raises(ValueError, match="skipped"):
        edge_attribution(small, IDS, OTHER, ASK)


@pytest.mark.parametrize("module", [edges, paths])
def test_examples(module):
    ran = doctest.testmod(module, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
