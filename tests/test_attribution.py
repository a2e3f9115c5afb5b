"""Parts add up to the logit, in float64, on every shape of the family; the plausible wrong sums do not."""

import pytest
import torch
from small import KINDS, inputs_for, randomise

from lens_gemma4 import HookedConfig, HookedModel
from lens_gemma4.attribution import (
    NEEDED,
    direct_logit_attribution,
    head_contributions,
    residual_gain,
    through_norm,
)

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


@pytest.mark.parametrize("question", ["logit", "difference"])
def test_parts_add_up_to_the_pre_softcap_logit(run, question):
    model, cache = run
    direction = model.W_U[:, TOKEN].clone()
    raw = cache["hook_logits_raw"][..., TOKEN].clone()
    if question == "difference":
        direction -= model.W_U[:, OTHER]
        raw -= cache["hook_logits_raw"][..., OTHER]
    parts = direct_logit_attribution(cache, cache.weights, direction, total=raw)
    n_layers = model.cfg.n_layers
    assert parts.heads.shape == (n_layers, model.cfg.n_heads, *raw.shape)
    assert parts.mlps.shape == (n_layers, *raw.shape) and parts.start.shape == raw.shape
    assert relative(parts.sum(), raw) < EXACT
    assert parts.remainder.norm() < EXACT * raw.norm()
    gains = residual_gain(cache.weights["layer_scalar"])
    unweighted = parts.start / gains[0] + (parts.heads.sum(1) + parts.mlps).flatten(1).div(
        gains[:, None]
    ).sum(0).view(raw.shape)
    one_late = parts.start + (
        (parts.heads.sum(1) + parts.mlps).flatten(1) / _scalars(cache)[:, None]
    ).sum(0).view(raw.shape)
    without_start = parts.sum() - parts.start
    for wrong in (unweighted, one_late, without_start):
        assert relative(wrong, raw) > OFF


def test_without_a_softcap_the_parts_are_the_logit_and_with_one_they_are_not(run):
    model, cache = run
    parts = direct_logit_attribution(cache, cache.weights, model.W_U[:, TOKEN])
    logits = cache["logits"][..., TOKEN]
    if model.cfg.output_logits_soft_cap is None:
        assert relative(parts.sum(), logits) < EXACT
    else:
        assert relative(parts.sum(), logits) > OFF


def test_ignoring_the_post_norm_or_the_final_gain_does_not_add_up(run):
    model, cache = run
    raw, direction = cache["hook_logits_raw"][..., TOKEN], model.W_U[:, TOKEN]
    ones = {
        "ln1_post": [torch.ones_like(gain) for gain in cache.weights["ln1_post"]],
        "ln_final": torch.ones_like(cache.weights["ln_final"]),
    }
    for name, value in ones.items():
        parts = direct_logit_attribution(cache, cache.weights | {name: value}, direction, total=raw)
        assert parts.remainder.norm() > OFF * raw.norm()


def test_the_total_is_the_runs_own_unless_given(run):
    model, cache = run
    direction = torch.randn(
        model.cfg.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    parts = direct_logit_attribution(cache, cache.weights, direction)
    assert relative(parts.total, cache["ln_final.hook_out"] @ direction) < EXACT
    assert parts.remainder.norm() < EXACT * parts.total.norm()


def test_a_direction_may_differ_by_row_and_position(run):
    model, cache = run
    tokens = torch.arange(cache["hook_tokens"].numel()).view(cache["hook_tokens"].shape) % 50
    parts = direct_logit_attribution(cache, cache.weights, model.W_U.T[tokens])
    raw = cache["hook_logits_raw"].gather(-1, tokens[..., None])[..., 0]
    assert relative(parts.sum(), raw) < EXACT


def test_needed_names_all_that_is_read(run):
    model, _ = run
    _, cache = model.run_with_cache(IDS, names_filter=NEEDED, pos_slice=[-1])
    parts = direct_logit_attribution(cache, cache.weights, model.W_U[:, TOKEN])
    assert parts.start.shape == (1, 1)
    assert parts.remainder.abs().max() < EXACT
    _, less = model.run_with_cache(IDS, names_filter=NEEDED[:-1])
    with pytest.raises(KeyError, match=r"ln_final\.hook_out"):
        direct_logit_attribution(less, less.weights, model.W_U[:, TOKEN])


def test_positions_dropped_and_batches_sliced_answer_alike(run):
    model, cache = run
    direction = model.W_U[:, TOKEN]
    whole = direct_logit_attribution(cache, cache.weights, direction)
    row = cache.apply_slice_to_batch_dim(0)
    parts = direct_logit_attribution(row, row.weights, direction)
    torch.testing.assert_close(parts.heads, whole.heads[:, :, 0])
    assert relative(whole.heads[:, :, 1], whole.heads[:, :, 0]) > OFF


def test_an_edited_run_leaves_the_edit_in_the_remainder(run):
    model, _ = run
    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", lambda value, hook: value + 1)]):
        _, edited = model.run_with_cache(IDS, names_filter=NEEDED)
    parts = direct_logit_attribution(edited, edited.weights, model.W_U[:, TOKEN])
    ones = through_norm(
        torch.ones(model.cfg.d_model, dtype=torch.float64),
        edited["ln_final.hook_scale"],
        model.ln_final.weight,
    )
    want = residual_gain(edited.weights["layer_scalar"])[1] * ones @ model.W_U[:, TOKEN]
    assert relative(parts.remainder, want) < 1e-8
    assert want.abs().max() > 1e-6


def test_parts_of_a_bfloat16_run_are_float32_and_miss_by_its_rounding():
    model = HookedModel(HookedConfig.from_hf(KINDS["text"]))
    randomise(model, seed=3)
    model.to(torch.bfloat16)
    raw, cache = model.run_with_cache(IDS)
    raw = cache["hook_logits_raw"][..., TOKEN]
    parts = direct_logit_attribution(cache, cache.weights, model.W_U[:, TOKEN], total=raw)
    assert parts.heads.dtype == parts.total.dtype == torch.float32
    assert 0 < parts.remainder.abs().max() < 0.2


def _scalars(cache):
    return torch.stack([scalar.reshape(()) for scalar in cache.weights["layer_scalar"]]).double()
