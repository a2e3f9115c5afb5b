"""Maps asked in ways that no example asks: drawn edits, odd inputs, interruptions, files; each answer beside a loop of hooks."""

import csv
import json
import os
import random
from dataclasses import replace

import pytest
import torch
from fixtures import input_kinds, random_config, random_inputs
from small import hooked, inputs_for, randomise

from lens_gemma4 import (
    HookedConfig,
    HookedModel,
    SweepResult,
    ablate,
    attribution_ablate,
    attribution_patch,
    edge_attribution,
    greedy,
    knockout,
    log_prob,
    logit,
    logit_difference,
    pair_effects,
    patch,
    path_patch,
    plans,
    top_k,
)
from lens_gemma4.__main__ import main
from lens_gemma4.interventions import (
    POINTS,
    SQUARES,
    Edit,
    Intervention,
    Place,
    position_mask,
    scaled,
    span,
    units_of,
)
from lens_gemma4.sweep import sweep

IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10], [2, 15, 16, 17, 18, 19, 11]])
OTHER = torch.tensor([[2, 25, 6, 27, 8, 29, 10], [2, 15, 36, 17, 38, 19, 11]])
ASK = logit_difference(7, 9)
EXACT = 1e-9


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def off(got, want):
    """The largest difference, beside the size of the answer."""
    return ((got - want).abs() / (1 + want.abs())).max().item()


# -- drawn edits ----------------------------------------------------------------------------------------


def drawn_model(rng, seed, kind=None):
    """A random architecture in float64 and inputs of one of its kinds."""
    config = random_config(rng) if kind is None else random_config(rng, wrapper=True, vision=True)
    model = HookedModel(HookedConfig.from_hf(config))
    randomise(model, seed)
    inputs = random_inputs(rng, config, kind or rng.choice(input_kinds(config)))
    inputs = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    return model.double(), inputs


def real_of(inputs):
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))


class Drawn:
    """Edits of any point, unit, positions and values of a model. Patterns and scores are scaled alone, so that no query comes
    to read what it does not see."""

    def __init__(self, rng, model, shape, seed):
        self.rng, self.cfg, (self.batch, self.pos) = rng, model.cfg, shape
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def mask(self):
        some = torch.rand(self.batch, self.pos, generator=self.generator)
        return some < self.rng.choice([0.1, 0.5])

    def place(self):
        block = self.cfg.layer(self.rng.randrange(self.cfg.n_layers))
        made = [p for p in POINTS if block.lender is None or p[-2:] not in ("_k", "_v")]
        point = self.rng.choice([*made, "attn.hook_rot_k"])
        if not point.startswith("attn."):
            some = self.rng.randrange(block.d_mlp) if self.rng.random() < 0.5 else None
            return Place(block.index, point, some if point == "mlp.hook_post" else None), block
        n = block.n_key_value_heads if point[-2:] in ("_k", "_v") else block.n_heads
        n = block.n_key_value_heads if "v_norm" in point else n
        units = [None, self.rng.randrange(n), slice(0, self.rng.randint(1, n))]
        return Place(block.index, point, self.rng.choice(units)), block

    def edit(self):
        place, block = self.place()
        at = self.mask() if self.rng.random() < 0.7 else None
        if place.point in SQUARES:
            keys = self.mask() if self.rng.random() < 0.6 else None
            return Edit(place, at, 0.5, sources=keys)
        width = block.d_head if place.point.startswith("attn.") else self.cfg.d_model
        width = block.d_mlp if place.point == "mlp.hook_post" else width
        last = [] if place.point == "mlp.hook_post" and place.unit is not None else [width]
        lead = [self.rng.choice([1, self.batch]), self.rng.choice([1, self.pos])]
        add = 0.5 * self.normal(*lead, *[1] * (place.ndim - 2 - len(last)), *last)
        within = span(self.normal(2, width)) if last and self.rng.random() < 0.3 else None
        return Edit(
            place,
            at,
            self.rng.choice([0.0, 1.0, 0.5, -2.0]),
            add if at is not None else None,
            within=within,
        )

    def several(self, n):
        counts = [self.rng.choice([1, 1, 2, 3]) for _ in range(n)]
        return [
            Intervention(f"{i}", tuple(self.edit() for _ in range(count)))
            for i, count in enumerate(counts)
        ]


@pytest.mark.parametrize("seed", range(12))
def test_drawn_interventions_are_their_loops(seed):
    rng = random.Random(seed)
    model, inputs = drawn_model(rng, seed)
    real = real_of(inputs)
    last = position_mask("last", real)
    variants = Drawn(rng, model, real.shape, seed).several(6)
    metrics = {
        "last": ASK,
        "mean": log_prob(5, positions=real.bool()),
        "function": lambda logits: (logits[..., 7] * real).sum(1),
    }
    found = sweep(model, None, variants, metrics, batch_size=rng.choice([None, 1, 4]), **inputs)
    missed = 0.0
    for i, one in enumerate(variants):
        logits = model.run_with_hooks(**inputs, fwd_hooks=one.hooks())
        chosen = (logits.log_softmax(-1)[..., 5] * real).sum(1) / real.sum(1)
        want = {
            "last": logits[last][:, 7] - logits[last][:, 9],
            "mean": chosen,
            "function": (logits[..., 7] * real).sum(1),
        }
        for name, number in want.items():
            assert off(found[name].values[i], number) < EXACT, (name, one.edits)
            missed = max(missed, off(found[name].baseline, number))
    assert missed > 1e-3  # the control: the variants do something


@pytest.mark.parametrize("kind", ["batch", "left", "right", "long image", "adjacent frames"])
def test_knockouts_are_loops_over_scores(kind):
    rng = random.Random(kind)
    model, inputs = drawn_model(rng, 1, kind)
    last = position_mask("last", real_of(inputs))
    found = knockout(model, None, ASK, queries="last", **inputs)
    unseen = torch.finfo(torch.float64).min

    def cut(at):
        def hook(scores, hook):
            scores = scores.clone()
            row = scores[:, at["head"]][last]  # [batch kv_pos]
            others = row > unseen / 2
            others[:, at["source"]] = False
            row[others.any(-1), at["source"]] = unseen  # what is all that a query sees stays
            scores[:, at["head"]][last] = row
            return scores

        return [(f"blocks.{at['layer']}.attn.hook_attn_scores", hook)]

    def number(logits):
        return logits[last][:, 7] - logits[last][:, 9]

    strongest = found.mean().abs().argsort(descending=True)[:4].tolist()
    for i in [*strongest, *rng.sample(range(len(found.names)), 4)]:
        want = number(model.run_with_hooks(**inputs, fwd_hooks=cut(found.at[i])))
        assert off(found.values[i], want) < EXACT
    assert off(found.values[strongest[0]], found.baseline) > 1e-4  # the control


@pytest.mark.parametrize("seed", range(4))
def test_equal_prompts_of_any_kind_give_nothing(seed):
    rng = random.Random(200 + seed)
    model, inputs = drawn_model(rng, seed)
    units = rng.choice(["heads", "keys", "values", "patterns", "blocks", "resid_pre"])
    null = patch(model, dict(inputs), dict(inputs), ASK, units=units)
    assert null.effect.abs().max() < 1e-11
    assert (
        attribution_patch(model, dict(inputs), dict(inputs), ASK, units=units).effect == 0
    ).all()
    zeroed = ablate(model, None, ASK, units=units, **inputs)
    assert zeroed.effect.abs().max() > 1e-6  # the control


# -- prompts ----------------------------------------------------------------------------------------------


def test_one_token_is_a_prompt(model):
    one, other = torch.tensor([[2]]), torch.tensor([[5]])

    def number(logits):
        return logits[:, -1, 7] - logits[:, -1, 9]

    heads = [scaled(unit, 0.0) for unit in units_of("heads", model.cfg)]
    runs = [number(model.run_with_hooks(one, fwd_hooks=h.hooks())) for h in heads]
    for positions in ("all", "last", "each", 0, -1):
        found = ablate(model, one, ASK, positions=positions)
        assert off(found.values, torch.stack(runs)) < EXACT
    assert off(runs[0], runs[1]) > 1e-3  # the control
    whole = patch(model, one, other, ASK)
    assert off(whole.values[0], number(model(one))) < EXACT  # the whole of block 0's input
    cut = knockout(model, one, ASK)  # a token that sees itself alone keeps it
    assert cut.effect.abs().max() < 1e-12
    assert knockout(model, one, ASK, renormalise=False).effect.abs().max() > 1e-3
    guess = attribution_patch(model, one, other, ASK, verify=3)
    assert len(guess.exact.names) == 3
    edges = edge_attribution(model, one, other, ASK)
    assert edges.verify(2).exact.values.isfinite().all()
    assert path_patch(model, one, other, ASK, "heads", ["logits"]).values.isfinite().all()
    assert len(pair_effects(model, one, ASK, layers=[0]).together.names) == 6
    assert len(greedy(model, one, ASK, k=2).names) == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_masks_of_other_integers_are_the_same(model, side):
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, slice(0, 8) if side == "left" else slice(1, None)] = 0  # one token is left
    mask[2, slice(0, 2) if side == "left" else slice(7, None)] = 0
    ids = torch.randint(3, 80, (3, 9), generator=torch.Generator().manual_seed(1))
    calls = [
        lambda given: ablate(model, ids, ASK, attention_mask=given),
        lambda given: ablate(
            model, ids, ASK, mode="mean", skip_first=False, positions="last", attention_mask=given
        ),
        lambda given: knockout(model, ids, ASK, queries="last", units="attn", attention_mask=given),
        lambda given: attribution_ablate(model, ids, ASK, units="mlp", attention_mask=given),
    ]
    for call in calls:
        want = call(mask).values
        assert torch.equal(call(mask.to(torch.int32)).values, want)
        assert off(call(torch.ones_like(mask)).values, want) > 1e-3  # the control


# -- where and how a map is asked -------------------------------------------------------------------------


def test_trained_weights_and_modes_of_gradients_change_nothing(model):
    trained = hooked("shared, own values")
    trained.requires_grad_(True)
    calls = {
        "ablate": lambda net: ablate(net, IDS, ASK, mode="mean"),
        "patch": lambda net: patch(net, IDS, OTHER, ASK),
        "knockout": lambda net: knockout(net, IDS, ASK, queries="last", units="attn"),
        "attribution": lambda net: attribution_patch(net, IDS, OTHER, ASK, verify=2).exact,
    }
    for name, call in calls.items():
        want = call(model)
        for found in (
            call(trained),
            torch.no_grad()(call)(trained),
            torch.inference_mode()(call)(model),
        ):
            assert off(found.values, want.values) < 1e-12, name
            assert not found.values.requires_grad and not found.baseline.requires_grad, name
            assert len(found.to_dataframe()) == found.values.numel(), name
    assert all(weight.grad is None for weight in trained.parameters())


@pytest.mark.parametrize("permanent", [False, True])
def test_hooks_of_the_user_are_refused_by_every_map(permanent):
    model = hooked("shared, own values")
    model.blocks[1].hook_resid_mid.add_hook(
        lambda value, hook: value + 1, is_permanent=permanent, name="blocks.1.hook_resid_mid"
    )
    calls = [
        lambda: ablate(model, IDS, ASK),
        lambda: patch(model, IDS, OTHER, ASK),
        lambda: knockout(model, IDS, ASK),
        lambda: attribution_ablate(model, IDS, ASK),
        lambda: attribution_patch(model, IDS, OTHER, ASK),
        lambda: edge_attribution(model, IDS, OTHER, ASK),
        lambda: path_patch(model, IDS, OTHER, ASK, "heads", ["logits"]),
        lambda: greedy(model, IDS, ASK, k=1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"hooks on blocks\.1\.hook_resid_mid"):
            call()
    assert len(model.list_hooks()) == 1  # the user's own
    model.reset_hooks(including_permanent=True)
    assert ablate(model, IDS, ASK, units="mlp").values.isfinite().all()


def test_a_function_may_keep_what_it_was_given(model):
    kept = []

    def number(logits):
        kept.append(logits)
        return logits[:, -1, 7]

    found = ablate(model, IDS, number, units="mlp", batch_size=4)
    after = torch.stack([logits[:, -1, 7] for logits in kept[1:]])  # the first is the clean run's
    assert sorted(map(tuple, after.tolist())) == sorted(map(tuple, found.values.tolist()))
    assert off(kept[0][:, -1, 7], found.baseline) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_stopped_in_the_middle_leaves_nothing_and_goes_on(
    model, tmp_path, monkeypatch, error
):
    want = ablate(model, IDS, ASK, batch_size=3)
    write, written = plans._write, []

    def stopped(folder, name, content):
        written.append(name)
        if len(written) == 5:
            (folder / f"{name}.{os.getpid()}.partial").write_bytes(content[:9])
            raise error
        write(folder, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(plans, "_write", stopped)
        with pytest.raises(type(error)):
            ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path)
    assert not model.list_hooks() and len(list(tmp_path.glob("*.safetensors"))) == 2
    again = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path)
    assert torch.equal(again.values, want.values)
    assert not list(tmp_path.glob("*.partial"))


# -- results and files ------------------------------------------------------------------------------------


def results(model):
    media = hooked("wrapper, shared")
    inputs = inputs_for("wrapper, shared", torch.float64)
    yield ablate(model, IDS, ASK, units=["L0H0"])  # one variant
    yield knockout(model, IDS, ASK, queries="each", layers=[0])  # [layer head pos source]
    yield knockout(model, IDS, ASK, queries="last", sources=[5], units="attn")
    yield path_patch(model, IDS, OTHER, ASK, "all", ["logits"])  # "embed" has no axes
    yield path_patch(model, IDS, OTHER, ASK, ["embed"], ["logits"])
    yield ablate(media, None, ASK, units="patches", **inputs)  # [image x y]
    yield attribution_patch(model, IDS, OTHER, ASK, units="blocks")
    yield edge_attribution(model, IDS, OTHER, ASK).verify(2)
    nothing = ablate(model, IDS, lambda logits: logits[:, -1, 7] * torch.nan, units="mlp")
    yield replace(nothing, metric='of "nothing", <i>µ</i>\n')


def test_every_kind_of_result_is_drawn_tabled_and_filed(model, tmp_path):
    pytest.importorskip("pyarrow")
    for i, found in enumerate(results(model)):
        path = tmp_path / f"ü {i}.parquet"
        found.save(path)
        back = SweepResult.load(path)
        assert (
            back.names == list(found.names) and back.at == found.at and back.metric == found.metric
        )
        assert torch.equal(back.values.nan_to_num(7.0), found.values.nan_to_num(7.0))
        assert (back.source is None) == (found.source is None)
        assert back.to_dataframe().equals(found.to_dataframe())
        assert len(found.to_dataframe()) == found.values.numel()
        assert found.plot().to_json() == back.plot().to_json()
        assert len(found.top(10**6)) == len(found.names) and repr(found)


def test_prompts_of_any_characters_come_through_files(tmp_path):
    pytest.importorskip("pyarrow")
    model = HookedModel.from_pretrained("tiny")
    # Line and page separators are no ends of lines in JSON, nor quoted line feeds in CSV.
    texts = ['The "capital", of\nFrance 日本 is', "a\u2028b\x85c\x0cd, e", "tabs\tand  spaces "]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "answer"], *([text, " Paris"] for text in texts)])
    lines = [json.dumps({"prompt": text, "answer": " Paris"}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    want = ablate(model, texts, logit(model.to_single_token(" Paris")), units="mlp")
    for name in ("a.csv", "a.jsonl"):
        out = tmp_path / f"{name}.parquet"
        asked = ["--units", "mlp", "--metric", "logit", "-o", str(out)]
        assert main(["ablate", str(tmp_path / name), *asked]) == 0
        found = SweepResult.load(out)
        assert torch.equal(found.values, want.values) and found.tokens == want.tokens


# -- what was taken silently for something else ---------------------------------------------------------


def test_positions_that_mean_nothing_or_something_else_are_refused(model):
    mask = torch.ones_like(IDS)
    for wrong in (
        mask,
        [[3], [5]],
        [1.5],
        [],
        slice(100, 200),
        torch.zeros(2, 7, dtype=torch.bool),
    ):
        for call in (
            lambda at: ablate(model, IDS, ASK, units="mlp", positions=at),
            lambda at: knockout(model, IDS, ASK, sources=at, queries="last", renormalise=False),
        ):
            with pytest.raises(ValueError, match="positions is"):
                call(wrong)


def test_prompts_whose_tokens_stand_elsewhere_are_not_patched(model):
    mask = torch.tensor([[1] * 6 + [0], [1] * 7])
    one, other = (
        {"input_ids": IDS, "attention_mask": mask},
        {"input_ids": IDS, "attention_mask": mask.flip(0)},
    )
    for call in (patch, attribution_patch, edge_attribution):
        with pytest.raises(ValueError, match="prompt 0 has 6 tokens in one and 7 in the other"):
            call(model, one, other, ASK)


def test_a_query_that_sees_nothing_stays_as_the_model_has_it(model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    found = ablate(model, IDS, lambda lg: lg[:, 0, 7], units="mlp", mode=1.0, attention_mask=mask)
    assert found.effect.abs().max() < 1e-12


def test_values_of_another_shape_and_directions_of_another_width(model):
    d = model.cfg.d_model
    for mode in (torch.zeros(1, 9, d), torch.zeros(d + 1), [1.0], None):
        with pytest.raises(ValueError, match="mode is"):
            ablate(model, IDS, ASK, units="resid_pre", mode=mode)
    by_position = torch.randn(7, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ablate(model, IDS, ASK, units="resid_mid", mode=by_position)
    wide = ablate(model, IDS, ASK, units="resid_mid", mode=by_position[None].expand(2, -1, -1))
    assert torch.equal(found.values, wide.values)
    whole = torch.zeros(1, d, dtype=torch.long)
    whole[0, :2] = 1
    halves = ablate(model, IDS, ASK, units="mlp", within=whole)
    assert halves.effect.abs().max() > 1e-6
    assert (
        halves.values - ablate(model, IDS, ASK, units="mlp", within=whole.double()).values
    ).abs().max() == 0
    for within in (torch.zeros(0, d), torch.ones(1, d + 1)):
        with pytest.raises(ValueError, match="directions"):
            ablate(model, IDS, ASK, units="mlp", within=within)


def test_what_would_be_changed_twice_is_refused(model):
    for units in (["L0H0 & L0H0"], ["L0H0 & L0KV0"], ["L0H0", "L0H0"], [[]]):
        with pytest.raises(ValueError, match=r"twice|empty list"):
            ablate(model, IDS, ASK, units=units)
    with pytest.raises(ValueError, match="of what attention reads"):
        cut = knockout(model, IDS, ASK, sources=[1, 2], queries="last", renormalise=False)
        top_k(model, IDS, ASK, cut, [1])


def test_numbers_that_are_none_come_last(model):
    found = ablate(model, IDS, ASK)
    values = found.values.clone()
    values[3] = torch.nan
    holed = replace(found, values=values)
    assert holed.names[3] not in [name for name, _ in holed.top(len(values) - 1)]
    with pytest.raises(ValueError, match="k is -1"):
        holed.top(-1)


def test_an_added_weight_on_what_is_not_seen_reaches_earlier_queries(model):
    """A source's entry is written for queries before it too."""
    sources = torch.zeros(2, 7, dtype=torch.bool)
    sources[:, 5] = True
    place = Place(1, "attn.hook_pattern", 2)
    edit = Edit(place, None, 1.0, torch.tensor(0.3, dtype=torch.float64), sources)
    one = Intervention("more", (edit,))
    found = sweep(model, IDS, [one], lambda lg: lg[:, 2, 7]).values[0]
    want = model.run_with_hooks(IDS, fwd_hooks=one.hooks())[:, 2, 7]
    assert (found - want).abs().max() < 1e-12


def test_one_row_of_positions_for_all_prompts(model, monkeypatch):
    given = {"position_ids": torch.arange(7)[None] * 2, "attention_mask": torch.ones_like(IDS)}
    want = ablate(model, IDS, ASK, mode="mean", **given)
    monkeypatch.setattr("lens_gemma4.sweep.room", lambda device: 1)
    assert (ablate(model, IDS, ASK, mode="mean", **given).values - want.values).abs().max() < 1e-12
