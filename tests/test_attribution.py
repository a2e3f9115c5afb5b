"""Parts add up to the logit, in float64, on every shape of the family; the plausible wrong sums do not."""

import random
import re
import statistics

import fixtures
import numpy
import pytest
import torch
from small import KINDS, inputs_for, randomise

from lens_gemma4 import ActivationCache, HookedConfig, HookedModel
from lens_gemma4.attribution import (
    BY,
    Target,
    by_head,
    by_kv_head,
    by_neuron,
    by_part,
    by_source,
    by_token,
    head_contributions,
    needed,
    neuron_contributions,
    residual_gain,
    through_norm,
)
from lens_gemma4.utils import Slice

TOKEN, OTHER = 7, 11
IDS = torch.tensor([[2, 5, 6, 7, 8, 9]])
EXACT = 1e-10
OFF = 0.01  # what a wrong formula misses by, as a share of the right answer, at the least


@pytest.fixture(scope="module", params=KINDS)
def run(request):
    """A float64 model of each kind, its cache of what attribution reads, and all it kept."""
    model = HookedModel(HookedConfig.from_hf(KINDS[request.param]))
    randomise(model, seed=3)
    model.to(torch.float64)
    inputs = inputs_for(request.param, torch.float64)
    _, cache = model.run_with_cache(**inputs, names_filter=None)
    return model, cache


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


# -- the product of scalars ---------------------------------------------------------------------------


def test_residual_gain_is_the_product_from_the_block_on():
    scalars = torch.tensor([0.5, 2.0, 4.0])
    assert residual_gain(scalars).tolist() == [4.0, 8.0, 4.0]
    assert scalars.cumprod(0).tolist() != [4.0, 8.0, 4.0]  # the product from the front


def test_residual_gain_takes_the_buffers_of_the_blocks():
    buffers = [torch.tensor([0.5]), torch.tensor([2.0])]
    assert residual_gain(buffers).tolist() == [1.0, 2.0]


def test_residual_gain_does_not_lose_what_float16_cannot_hold():
    scalars = torch.full((48,), 0.5, dtype=torch.float16)
    assert residual_gain(scalars)[0] == 0.5**48
    assert scalars.flip(0).cumprod(0)[-1] == 0  # in the scalars' own dtype nothing is left


def test_no_layers_is_an_error():
    with pytest.raises(ValueError, match="no layers"):
        residual_gain([])


# -- parts --------------------------------------------------------------------------------------------


def test_the_kinds_cover_what_matters():
    layers = [layer for kind in KINDS.values() for layer in HookedConfig.from_hf(kind).layers]
    assert any(layer.k_eq_v for layer in layers)
    assert any(layer.kind == "full" and not layer.k_eq_v for layer in layers)
    assert any(layer.lender is not None for layer in layers)


def test_heads_add_up_to_what_the_attention_adds(run):
    model, cache = run
    for i, block in enumerate(model.blocks):
        parts = (
            cache["z", i],
            block.attn.W_O,
            cache["scale", i, "ln1_post"],
            block.ln1_post.weight,
        )
        heads = head_contributions(*parts)  # [head batch pos d_model]
        assert heads.shape == (model.cfg.n_heads, *cache["attn_out", i].shape)
        assert relative(heads.sum(0), cache["attn_out", i]) < EXACT
        without_post_norm = torch.einsum("bphd,hdm->bpm", *parts[:2])
        without_gain = (heads / block.ln1_post.weight).sum(0)
        for wrong in (without_post_norm, without_gain):
            assert relative(wrong, cache["attn_out", i]) > OFF


def test_each_head_is_its_own_result_through_the_frozen_norm(run):
    """Not only the sum: a head's part is what its own o_proj output becomes."""
    model, _ = run
    _, own = model.run_with_cache(IDS, names_filter=["*.hook_result", "*.hook_z", "*.ln1_post.*"])
    for i, block in enumerate(model.blocks):
        scale = own["scale", i, "ln1_post"]
        heads = head_contributions(own["z", i], block.attn.W_O, scale, block.ln1_post.weight)
        for head in range(model.cfg.n_heads):
            want = own["result", i][:, :, head] / scale * block.ln1_post.weight
            assert relative(heads[head], want) < EXACT
            assert relative(heads[head - 1], want) > OFF


def test_neurons_add_up_to_what_the_mlp_adds(run):
    model, cache = run
    for i, block in enumerate(model.blocks):
        parts = cache["post", i], block.mlp.W_out, cache["scale", i, "ln2_post"]
        neurons = neuron_contributions(*parts, block.ln2_post.weight)
        assert relative(neurons.sum(0), cache["mlp_out", i]) < EXACT
        without_gain = neuron_contributions(*parts, torch.ones_like(block.ln2_post.weight)).sum(0)
        assert relative(without_gain, cache["mlp_out", i]) > OFF


# -- every question, against the run ------------------------------------------------------------------


def targets(model):
    """Targets, and what the run says of each: a function of its cache."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(model.cfg.d_model, dtype=torch.float64, generator=generator)
    n_layers = model.cfg.n_layers

    def raw(cache, token):
        return cache["hook_logits_raw"][..., token].double()

    return {
        "logit": (Target(TOKEN), lambda c: raw(c, TOKEN)),
        "difference": (Target(TOKEN, OTHER), lambda c: raw(c, TOKEN) - raw(c, OTHER)),
        "direction": (
            Target(direction=direction),
            lambda c: c["ln_final.hook_out"].double() @ direction,
        ),
        **{
            f"stream {layer}": (
                Target(direction=direction, layer=layer),
                lambda c, layer=layer: (
                    c["resid_pre", layer].double() @ direction
                    if layer < n_layers
                    else c["resid_post", -1].double() @ direction
                ),
            )
            for layer in (0, 1, n_layers - 1, n_layers)
        },
    }


@pytest.mark.parametrize("by", BY)
def test_parts_add_up_to_the_runs_own_number(run, by):
    model, cache = run
    for name, (target, own) in targets(model).items():
        found = BY[by](cache, target, None)
        want = own(cache)
        assert found.total.shape == want.shape and relative(found.actual, want) < EXACT, name
        assert relative(found.sum(), want) < EXACT, name
        assert found.remainder.norm() < EXACT * want.norm(), name
        assert "rounding" not in found.others
        if found.axes != ("batch", "pos") and not name.endswith(" 0"):
            one_out = found.values.index_fill(
                0, torch.tensor([0]), 0.0
            )  # the control: a part is missing
            split = [i for i, axis in enumerate(found.axes) if axis not in ("batch", "pos")]
            missing = found.sum() - (found.values - one_out).sum(split)
            assert relative(missing, want) > 1e-6, name


def test_the_questions_agree_with_each_other(run):
    model, cache = run
    target = Target(TOKEN, OTHER)
    parts, heads = by_part(cache, target, None), by_head(cache, target, None)
    sources, groups = by_source(cache, target, None), by_kv_head(cache, target, None)
    neurons, token = by_neuron(cache, target, None, k=None), by_token(cache, target)
    assert relative(sources.values.sum(-1), heads.values) < EXACT
    assert relative(heads.values.sum(1), parts.values[1::2]) < EXACT
    assert relative(groups.values.sum(0), parts.values[1::2].sum(0)) < EXACT
    assert relative(neurons.values.sum(0), parts.values[2::2].sum(0)) < EXACT
    assert relative(token.values, parts.values[0]) < EXACT
    last = groups.labels["kv_head"].index(f"L{model.cfg.n_layers - 1}KV0")
    per_kv = model.cfg.layer(model.cfg.n_layers - 1).heads_per_kv
    assert relative(groups.values[last], heads.values[-1, :per_kv].sum(0)) < EXACT


def test_a_head_is_given_what_it_wrote_and_a_source_what_was_read_there(run):
    """Not only sums: against the vectors themselves."""
    model, cache = run
    target, gains = Target(TOKEN), residual_gain(cache.weights["layer_scalar"])
    heads, sources = by_head(cache, target, None), by_source(cache, target, None)
    read = model.W_U[:, TOKEN] * model.ln_final.weight / cache["ln_final.hook_scale"]
    for i, block in enumerate(model.blocks):
        scale = cache["scale", i, "ln1_post"]
        wrote = head_contributions(cache["z", i], block.attn.W_O, scale, block.ln1_post.weight)
        want = gains[i] * (wrote * read).sum(-1)
        assert relative(heads.values[i], want) < EXACT
        assert relative(heads.values[i].roll(1, 0), want) > OFF
        head, source = model.cfg.n_heads - 1, 1
        values = cache[f"blocks.{i}.attn.v_norm.hook_out"]
        kv = head // model.cfg.layer(i).heads_per_kv
        seen = cache["pattern", i][:, head, :, source, None] * values[:, source, None, kv]
        through = seen @ block.attn.W_O[head] / scale * block.ln1_post.weight
        assert (
            relative(sources.values[i, head, ..., source], gains[i] * (through * read).sum(-1))
            < EXACT
        )


def test_named_neurons_are_the_largest_and_the_rest_is_one_part(run):
    _, cache = run
    whole = by_neuron(cache, Target(TOKEN), None, k=None)
    few = by_neuron(cache, Target(TOKEN), None, k=3)
    size = whole.values.abs().amax((1, 2))
    assert {whole.labels["neuron"][i] for i in size.topk(3).indices.tolist()} == set(
        few.labels["neuron"]
    )
    for name, value in zip(few.labels["neuron"], few.values, strict=True):
        assert torch.equal(value, whole.values[whole.labels["neuron"].index(name)])
    assert relative(few.sum(), whole.sum()) < EXACT and "other neurons" not in whole.others


@pytest.mark.parametrize("of", ["logit", "logprob"])
@pytest.mark.parametrize("versus", [None, OTHER])
def test_first_order_targets_are_gradients(run, of, versus):
    """The parts of logit and log-probability are those of the gradient, by autograd; the run's number is told beside."""
    model, cache = run
    out = cache["ln_final.hook_out"].clone().requires_grad_(True)
    logits = model.unembed(out)
    number = logits if of == "logit" else logits.log_softmax(-1)
    number = number[..., TOKEN] - (0 if versus is None else number[..., versus])
    gradient = torch.autograd.grad(number.sum(), out)[0]
    found = by_part(cache, Target(TOKEN, versus, of=of), None)
    by_gradient = by_part(cache, Target(direction=gradient), None)
    assert relative(found.values, by_gradient.values) < EXACT
    assert relative(found.actual, number.detach()) < EXACT
    assert relative(found.sum(), found.total) < EXACT
    values = {name: value for name, value in cache.items() if name != "hook_logits_raw"}
    less = ActivationCache(values, cache.cfg, cache.weights, cache.derived)
    assert relative(by_part(less, Target(TOKEN, versus, of=of), None).values, found.values) < EXACT
    plain = by_part(cache, Target(TOKEN, versus), None)
    if model.cfg.output_logits_soft_cap is not None:
        assert relative(plain.values, found.values) > OFF


def test_fifty_random_configurations():
    """By block, head, neuron, and head and source: exact on all; three plausible sums miss in the median one."""
    missed = {"unweighted": [], "no post-norm gain": [], "next scalar": []}
    for seed in range(50):
        rng = random.Random(seed)
        config = fixtures.random_config(rng)
        model = HookedModel(HookedConfig.from_hf(config))
        randomise(model, seed=seed)
        model.to(torch.float64)
        inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in fixtures.random_inputs(rng, config).items()
        }
        _, cache = model.run_with_cache(**inputs)
        token = rng.randrange(model.cfg.d_vocab)
        layer = rng.randrange(model.cfg.n_layers + 1)
        direction = torch.randn(model.cfg.d_model, dtype=torch.float64)
        real = cache["attention_mask"].bool()
        for target in (Target(token), Target(direction=direction, layer=layer)):
            for by in ("part", "head", "neuron", "source"):
                found = BY[by](cache, target, None)
                assert relative(found.sum()[real], found.actual[real]) < EXACT, (
                    seed,
                    by,
                    str(target),
                )
        found = by_part(cache, Target(token), None)
        own = cache["hook_logits_raw"][..., token]
        assert relative(found.actual, own) < EXACT
        for name, wrong in wrong_sums(model, cache, token).items():
            missed[name].append(relative(wrong[real], own[real]))
    assert len(missed["unweighted"]) == 50
    for name, misses in missed.items():
        assert statistics.median(misses) > OFF, name


def wrong_sums(model, cache, token):
    """What one might take for the sum of the parts."""
    found = by_part(cache, Target(token), None)
    gains = residual_gain(cache.weights["layer_scalar"])
    each = torch.cat([gains[:1], gains.repeat_interleave(2)])[:, None, None]
    late = torch.cat([gains[1:], torch.ones(1, dtype=torch.float64)])
    late = torch.cat([gains[:1], late.repeat_interleave(2)])[:, None, None]
    ones = cache.weights | {
        name: [torch.ones_like(gain) for gain in cache.weights[name]]
        for name in ("ln1_post", "ln2_post")
    }
    cache.weights, kept = ones, cache.weights
    heads, neurons = by_head(cache, Target(token), None), by_neuron(cache, Target(token), None, k=1)
    cache.weights = kept
    gainless = heads.values.sum((0, 1)) + heads.others["0_pre"]
    gainless = gainless + neurons.values.sum(0) + neurons.others["other neurons"]
    return {
        "unweighted": (found.values / each).sum(0),
        "no post-norm gain": gainless,
        "next scalar": (found.values / each * late).sum(0),
    }


# -- low precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["text", "wrapper, shared"])
def test_with_the_rounding_of_a_low_precision_run_the_sum_is_its_own_number(kind, dtype):
    model = HookedModel(HookedConfig.from_hf(KINDS[kind]))
    randomise(model, seed=3)
    model.to(dtype)
    _, cache = model.run_with_cache(**inputs_for(kind, dtype))
    for name, (target, own) in targets(model).items():
        for by in BY:
            found = BY[by](cache, target, None)
            assert found.values.dtype == torch.float32
            size = found.total.abs().max()
            assert (found.sum() - found.total).abs().max() < 2e-5 * size, (name, by)
            if name != "stream 0":
                rounding = found.others["rounding"]
                assert (found.sum() - rounding - found.total).abs().max() > 1e-4 * size, (name, by)
        assert relative(found.total.double(), own(cache).double()) < (
            0.02 if "stream" not in name else 1e-2
        )


@pytest.mark.parametrize("by", BY)
def test_rounding_does_not_hide_a_mistake(by):
    """With weights that are not the run's, or an edit on the way, the remainder says so in low precision too."""
    model = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(model, seed=3)
    model.to(torch.bfloat16)
    _, cache = model.run_with_cache(IDS)
    honest = BY[by](cache, Target(TOKEN), None)
    size = honest.total.abs().max()
    assert honest.remainder.abs().max() < 1e-4 * size
    inside = {"head": ["ln1_post"], "kv_head": ["ln1_post"], "source": ["ln1_post"]}
    for name in ("layer_scalar", *inside.get(by, []), *(["ln2_post"] if by == "neuron" else [])):
        wrong = {**cache.weights, name: [torch.ones_like(w) for w in cache.weights[name]]}
        other = ActivationCache(cache, cache.cfg, wrong, cache.derived)
        assert BY[by](other, Target(TOKEN), None).remainder.abs().max() > OFF * size, name
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_mid", lambda value, hook: value + 1)]):
        _, edited = model.run_with_cache(IDS)
    found = BY[by](edited, Target(TOKEN), None)
    assert found.remainder.abs().max() > OFF * found.total.abs().max()


# -- what they ask and what they say ------------------------------------------------------------------


@pytest.mark.parametrize("by", BY)
def test_needed_names_all_that_is_read_and_nothing_else(run, by):
    model, _ = run
    for target in (Target(TOKEN), Target(direction=torch.ones(model.cfg.d_model), layer=2)):
        names = needed(by, model.cfg, model.dtype, target)
        _, cache = model.run_with_cache(IDS, names_filter=names)
        assert BY[by](cache, target).remainder.abs().max() < 1e-9
        for name in names:
            fewer = [other for other in names if other != name]
            _, less = model.run_with_cache(IDS, names_filter=fewer)
            with pytest.raises(KeyError):
                BY[by](less, target)


def test_what_low_precision_needs():
    model = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(model, seed=3)
    model.to(torch.bfloat16)
    for by in BY:
        _, cache = model.run_with_cache(IDS, names_filter=needed(by, model.cfg, model.dtype))
        assert "rounding" in BY[by](cache, Target(TOKEN)).others
        _, cache = model.run_with_cache(IDS, names_filter=needed(by, model.cfg))
        with pytest.raises(KeyError, match=r"resid|attn_out"):
            BY[by](cache, Target(TOKEN))


def test_positions(run):
    _, cache = run
    whole = by_head(cache, Target(TOKEN), None)
    for chosen, index in (([0, -2], [0, -2]), (slice(1, 3), [1, 2]), (-1, [-1]), (2, [2])):
        some = by_head(cache, Target(TOKEN), chosen)
        assert relative(some.values, whole.values[..., index]) < EXACT
    mask = cache["attention_mask"]
    last = by_head(cache, Target(TOKEN))
    for row in range(len(mask)):
        place = int(mask[row].nonzero().max())
        assert relative(last.values[:, :, row, 0], whole.values[:, :, row, place]) < EXACT
    with pytest.raises(ValueError, match="positions is 'first'"):
        by_head(cache, Target(TOKEN), "first")


def test_the_last_position_of_right_padded_rows():
    model = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(model, seed=3)
    model.to(torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    _, cache = model.run_with_cache(IDS.expand(2, -1), attention_mask=mask)
    last, whole = by_part(cache, Target(TOKEN)), by_part(cache, Target(TOKEN), None)
    assert relative(last.values[:, 0, 0], whole.values[:, 0, 3]) < EXACT
    assert relative(last.values[:, 1, 0], whole.values[:, 1, 5]) < EXACT
    assert relative(last.values[:, 0, 0], whole.values[:, 0, 5]) > OFF


def test_tokens_and_directions_by_row_and_position(run):
    model, cache = run
    tokens = torch.arange(cache["hook_tokens"].numel()).view(cache["hook_tokens"].shape) % 50
    found = by_part(cache, Target(tokens), None)
    assert (
        relative(found.sum(), cache["hook_logits_raw"].gather(-1, tokens[..., None])[..., 0])
        < EXACT
    )
    assert (
        relative(by_part(cache, Target(direction=model.W_U.T[tokens]), None).values, found.values)
        < EXACT
    )
    rows = tokens[:, 0]
    found = by_part(cache, Target(rows), None)
    want = torch.stack([cache["hook_logits_raw"][i, :, t] for i, t in enumerate(rows)])
    assert relative(found.sum(), want) < EXACT


def test_a_cache_without_a_batch_axis_answers_alike(run):
    _, cache = run
    whole = by_source(cache, Target(TOKEN), None)
    row = cache.apply_slice_to_batch_dim(0)
    assert (
        relative(by_source(row, Target(TOKEN), None).values[:, :, 0], whole.values[:, :, 0]) < EXACT
    )


def test_an_edited_run_leaves_the_edit_in_the_remainder(run):
    model, _ = run
    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", lambda value, hook: value + 1)]):
        _, edited = model.run_with_cache(IDS)
    found = by_head(edited, Target(TOKEN), None)
    ones = through_norm(
        torch.ones(model.cfg.d_model, dtype=torch.float64),
        edited["ln_final.hook_scale"],
        model.ln_final.weight,
    )
    want = residual_gain(edited.weights["layer_scalar"])[1] * ones @ model.W_U[:, TOKEN]
    assert relative(found.remainder, want) < 1e-8
    assert want.abs().max() > 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a token or a direction"),
        ({"token": 1, "direction": torch.ones(3)}, "a token or a direction"),
        ({"token": 1, "layer": 2}, "along a direction"),
        ({"token": 1, "of": "probability"}, "of is 'probability'"),
        ({"direction": torch.ones(3), "of": "logit"}, "belong to a token"),
        ({"direction": torch.ones(3), "versus": 1}, "belong to a token"),
    ],
)
def test_a_target_that_means_nothing_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        Target(**arguments)


def test_tokens_outside_the_vocabulary_layers_outside_the_model(run):
    model, cache = run
    for token in (-1, model.cfg.d_vocab, torch.tensor(1.5), torch.zeros(0, dtype=torch.long)):
        with pytest.raises(ValueError, match="a token is an id from 0 to"):
            by_part(cache, Target(token))
    with pytest.raises(ValueError, match=r"tokens are \[7\]"):
        by_part(cache, Target(torch.arange(7)), [0])
    with pytest.raises(ValueError, match="the stream can be read at 0 to"):
        by_part(cache, Target(direction=torch.ones(model.cfg.d_model), layer=99))


# -- what comes back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", BY)
def test_results_as_tables_and_figures(run, by):
    _, cache = run
    found = BY[by](cache, Target(TOKEN), [0, -1])
    assert set(found.labels) >= {"batch", "pos"}
    for axis, size in zip(found.axes, found.values.shape, strict=True):
        assert len(found.labels[axis]) == size
    frame = found.to_dataframe()
    assert list(frame.columns) == ["part", "batch", "pos", "value"]
    total = frame.groupby(["batch", "pos"])["value"].sum()
    names = found.labels["pos"]
    for row in range(found.total.shape[0]):
        for i, pos in enumerate(names):
            assert total[str(row), pos] == pytest.approx(found.total[row, i].item(), abs=1e-9)
    name, value = found.top(1)[0]
    here = frame[(frame["batch"] == "0") & (frame["pos"] == names[-1])]
    assert abs(value) == pytest.approx(here["value"].abs().max())
    assert here[here["part"] == name]["value"].tolist() == [pytest.approx(value)]
    assert found.plot().to_dict()["data"]
    renamed = found.relabel(pos=["first", "last"])
    assert set(renamed.to_dataframe()["pos"]) == {"first", "last"}
    with pytest.raises(ValueError, match="names for axis"):
        found.relabel(pos=["one"])
    assert "token 7" in found.target


# -- asked of a model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return HookedModel.from_pretrained("tiny")


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("of", ["raw", "logit", "logprob"])
def test_a_model_is_asked_in_words(tiny, by, of):
    prompt = "The capital of France is"
    found = tiny.attribute(prompt, " Paris", versus=" Rome", by=by, of=of)
    logits = tiny(prompt)[0, -1]
    raw = tiny.run_with_cache(prompt, names_filter="hook_logits_raw")[1]["hook_logits_raw"][0, -1]
    ids = [tiny.to_single_token(text) for text in (" Paris", " Rome")]
    own = (raw if of == "raw" else logits)[ids]
    assert found.actual.item() == pytest.approx((own[0] - own[1]).item(), abs=1e-4)
    assert abs(found.remainder.item()) < 1e-4
    assert found.labels["pos"] == ["5 ' is'"]
    if by == "source":
        assert found.labels["source"][4] == "4 ' France'"
        assert any("France" in name for name, _ in found.top(5))


def test_the_sum_of_a_log_probability_is_first_order(tiny):
    found = tiny.attribute("The capital of France is", " Paris", of="logprob", by="part")
    own = tiny("The capital of France is")[0, -1].log_softmax(-1)[tiny.to_single_token(" Paris")]
    assert found.actual.item() == pytest.approx(own.item(), abs=1e-5)
    assert abs(found.total.item() - found.actual.item()) > 1e-6
    assert abs(found.remainder.item()) < 1e-4


def test_a_batch_of_texts_is_asked_at_its_last_tokens(tiny):
    texts = [
        "The capital of France is",
        "When Mary and John went to the shop, John gave a drink to",
    ]
    answers = torch.tensor([tiny.to_single_token(" Paris"), tiny.to_single_token(" Mary")])
    for side in ("left", "right"):
        both = tiny.attribute(texts, answers, padding_side=side)
        for row, text in enumerate(texts):
            one = tiny.attribute(text, int(answers[row]))
            assert both.actual[row].item() == pytest.approx(one.actual.item(), abs=1e-3)


def test_what_a_model_cannot_be_asked(tiny):
    with pytest.raises(ValueError, match="by is 'layer'; use one of 'part'"):
        tiny.attribute("The capital", " of", by="layer")
    with pytest.raises(ValueError, match="a token or a direction"):
        tiny.attribute("The capital")


# -- what else may be given ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "index"),
    [
        (2, [2]),
        (numpy.int64(2), [2]),
        (torch.tensor(-2), [4]),
        (numpy.array([1, -1]), [1, 5]),
        (torch.tensor([True, False, False, False, True, False]), [0, 4]),
        (range(1, 3), [1, 2]),
        ((1, 3), [1, 2]),
        (slice(4, None), [4, 5]),
        (Slice([3, 0]), [3, 0]),
    ],
)
def test_positions_are_what_makes_a_slice(run, positions, index):
    model, _ = run
    _, cache = model.run_with_cache(IDS)
    found = by_part(cache, Target(TOKEN), positions)
    assert torch.equal(found.values, by_part(cache, Target(TOKEN), None).values[:, :, index])
    assert found.labels["pos"] == [str(i) for i in index]


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([], ValueError, "none of the 6 positions"),
        (6, IndexError, "from -6 to 5"),
        ([-7], IndexError, "from -6 to 5"),
        (torch.tensor([[0, 1]]), TypeError, "in one row"),
        (1.5, TypeError, "a slice is an int"),
        (True, TypeError, "a slice is an int"),
    ],
)
@pytest.mark.parametrize("by", ["part", "neuron"])
def test_positions_that_are_none_are_errors(run, by, positions, error, message):
    model, _ = run
    _, cache = model.run_with_cache(IDS)
    with pytest.raises(error, match=message):
        BY[by](cache, Target(TOKEN), positions)


@pytest.mark.parametrize("dtype", [numpy.int32, numpy.uint8, numpy.int64])
def test_tokens_of_any_whole_numbers(run, dtype):
    _, cache = run
    rows = [TOKEN, OTHER][: len(cache["hook_logits_raw"])]
    found = by_part(cache, Target(numpy.array(rows, dtype=dtype)), None)
    for row, token in enumerate(rows):
        want = by_part(cache, Target(token), None).values[:, row]
        assert torch.equal(found.values[:, row], want)
    for token in (True, torch.tensor([True, False])):  # as an index, a mask
        with pytest.raises(ValueError, match="a token is an id"):
            by_part(cache, Target(token), None)


def test_directions_of_other_shapes_are_errors(run):
    model, cache = run
    d_model = model.cfg.d_model
    for shape in ([d_model + 1], [1], [7, d_model], [1, 1, 1, d_model]):
        for layer in (None, 1):
            with pytest.raises(ValueError, match=re.escape(f"direction is {shape}")):
                by_part(cache, Target(direction=torch.ones(shape), layer=layer))


def test_of_a_cache_that_kept_some_positions_the_last_is_not_known(run):
    model, _ = run
    _, cut = model.run_with_cache(IDS, pos_slice=[0, 2])
    with pytest.raises(ValueError, match="6 positions and 2 were kept"):
        by_part(cut, Target(TOKEN))
    assert relative(by_part(cut, Target(TOKEN), -1).sum(), cut["logits_raw"][:, -1:, TOKEN]) < EXACT
    _, one = model.run_with_cache(IDS, pos_slice=-1)
    for some in (cut, one):  # one position would spread over all sources
        with pytest.raises(ValueError, match="had 6 positions and"):
            by_source(some, Target(TOKEN), None)


def test_a_model_that_is_trained_is_asked_without_gradient(run):
    model, _ = run
    model.requires_grad_(True)
    try:
        _, cache = model.run_with_cache(IDS)
        for by in BY:
            found = BY[by](cache, Target(TOKEN, OTHER, of="logprob"))
            assert not (found.values.requires_grad or found.total.requires_grad), by
        assert not cache.get_full_resid_decomposition(apply_ln=True).requires_grad
    finally:
        model.requires_grad_(False)


def test_a_number_of_neurons_below_none(run):
    _, cache = run
    none = by_neuron(cache, Target(TOKEN), k=0)
    assert len(none.values) == 0 and none.remainder.norm() < EXACT * none.total.norm()
    with pytest.raises(ValueError, match="k is -1"):
        by_neuron(cache, Target(TOKEN), k=-1)


def test_key_value_heads_are_labelled_by_nothing_else(run):
    _, cache = run
    found = by_kv_head(cache, Target(TOKEN))
    assert set(found.labels) == set(found.axes)


def test_answers_by_row_may_be_texts(tiny):
    texts = ["The capital of France is", "The capital of Italy is"]
    found = tiny.attribute(texts, [" Paris", " Rome"], versus=[" Rome", " Paris"])
    ids = torch.tensor([tiny.to_single_token(text) for text in (" Paris", " Rome")])
    want = tiny.attribute(texts, ids, versus=ids.flip(0))
    assert torch.equal(found.values, want.values)
    assert not torch.allclose(found.values, tiny.attribute(texts, " Paris", versus=" Rome").values)


def test_positions_and_sources_are_named_by_their_numbers(run):
    model, _ = run
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    _, cache = model.run_with_cache(IDS.expand(2, -1), attention_mask=mask)
    target = Target(TOKEN)
    assert by_part(cache, target).labels["pos"] == ["last"]  # another number in each row
    assert by_part(cache, target, -2).labels["pos"] == ["4"]
    found = by_source(cache, target, [0, 3])
    assert found.labels["pos"] == ["0", "3"] and found.labels["source"] == list("012345")
    padding = found.values[:, :, 1, 1, 4:]  # which the second row does not see
    assert padding.abs().max() == 0 and found.values[:, :, 1, 1, :4].abs().amax((0, 1)).min() > 0
    best = next(name for name, _ in found.top(10**6, batch=1, pos=1) if "<-" in name)
    layer, head, source = map(int, re.findall(r"\d+", best))
    here = found.values[:, :, 1, 1].abs()
    assert here[layer, head, source] == here.max()


def test_a_question_keeps_what_it_needs_and_no_more(run, monkeypatch):
    model, _ = run
    kept = []

    def spy(*args, **kwargs):
        out, cache = HookedModel.run_with_cache(model, *args, **kwargs)
        kept.append(set(cache))
        return out, cache

    monkeypatch.setattr(model, "run_with_cache", spy)
    direction = torch.ones(model.cfg.d_model, dtype=torch.float64)
    n_layers = model.cfg.n_layers
    for layer in (-1, -2, None):  # -1: after the last block, -2: entering it
        found = model.attribute(IDS, by="head", direction=direction, layer=layer, positions=None)
        assert relative(found.sum(), found.actual) < EXACT
        assert not any("mlp.hook_post" in name or "pattern" in name for name in kept[-1])
    assert f"blocks.{n_layers - 1}.hook_resid_post" in kept[0]
    assert f"blocks.{n_layers - 1}.hook_resid_pre" in kept[1]


def test_titles_spell_tokens(tiny_model):
    found = tiny_model.attribute("The capital of France is", " Paris", versus=" Rome", by="part")
    assert found.target == "logit before softcap of ' Paris' minus ' Rome'"
    rows = tiny_model.attribute(["The capital of France is"] * 2, [" Paris", " Rome"], by="part")
    assert rows.target == "logit before softcap of a token a row"
