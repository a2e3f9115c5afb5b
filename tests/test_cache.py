"""One value under every spelling, decompositions that add up, and errors that say what was kept."""

import gc
import weakref

import pytest
import torch
from small import hooked, inputs_for

from lens_gemma4 import ActivationCache, HookNameError
from lens_gemma4.utils import Slice

EXACT = 1e-10
OFF = 0.01
IDS = torch.tensor([[2, 5, 6, 7, 8, 9], [2, 15, 16, 17, 18, 19]])


@pytest.fixture(scope="module")
def model():
    return hooked()


@pytest.fixture
def cache(model):
    return model.run_with_cache(IDS)[1]


# -- access -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("blocks.3.hook_resid_post", "blocks.3.hook_resid_post"),
        ("layers.3.layer_output", "blocks.3.hook_resid_post"),
        (("resid_post", 3), "blocks.3.hook_resid_post"),
        (("resid_post", -1), "blocks.3.hook_resid_post"),
        (("resid_post", -4), "blocks.0.hook_resid_post"),
        ("blocks.-2.hook_resid_pre", "blocks.2.hook_resid_pre"),
        (("pattern", 1), "blocks.1.attn.hook_pattern"),
        (("attn", 1), "blocks.1.attn.hook_pattern"),
        (("k", 0, "attn"), "blocks.0.attn.hook_k"),
        (("scale", 2, "ln1"), "blocks.2.ln1.hook_scale"),
        (("scale", 2, "ln1_post"), "blocks.2.ln1_post.hook_scale"),
        (("normalized", 2, "attn.q_norm"), "blocks.2.attn.q_norm.hook_normalized"),
        ("k1", "blocks.1.attn.hook_k"),
        ("scale2ln2", "blocks.2.ln2.hook_scale"),
        ("scale", "ln_final.hook_scale"),
        ("embed", "hook_embed"),
        ("token_embeddings", "hook_embed"),
        ("input_ids", "hook_tokens"),
        ("logits", "hook_logits"),
        ("lm_head_output", "hook_logits_raw"),
        ("final_norm_output", "ln_final.hook_out"),
    ],
)
def test_a_value_has_one_tensor_and_many_names(cache, key, name):
    assert cache[key] is cache.cache_dict[name]
    assert key in cache and cache.get(key) is cache.cache_dict[name]


def test_it_is_a_mapping_under_our_names(cache, model):
    assert (
        len(cache)
        == len(list(cache))
        == len(cache.keys())
        == len(cache.values())
        == len(cache.items())
    )
    assert set(cache) == {
        point.name for point in model.hook_points() if not point.name.endswith("hook_result")
    }
    assert all(cache[name] is value for name, value in cache.items())
    assert "blocks.3.attn.hook_result" not in cache
    assert cache.get("blocks.3.attn.hook_result") is None


def test_a_block_below_the_first_is_an_error_and_not_another_block(cache):
    with pytest.raises(HookNameError, match="blocks 0 to 3"):
        cache["resid_post", -5]
    with pytest.raises(HookNameError, match="blocks 0 to 3"):
        cache["resid_post", 4]


def test_a_missing_value_says_what_was_kept(model):
    _, some = model.run_with_cache(
        IDS, names_filter=["blocks.*.hook_resid_post", "blocks.1.attn.hook_pattern"]
    )
    with pytest.raises(HookNameError) as error:
        some["resid_pre", 2]
    said = str(error.value)
    assert "'blocks.2.hook_resid_post'" in said  # the closest
    assert (
        "blocks.{i}.hook_resid_post of 4 blocks" in said
        and "blocks.{i}.attn.hook_pattern of 1 blocks" in said
    )
    assert "names_filter" in said
    with pytest.raises(HookNameError, match="kept nothing"):
        ActivationCache({}, model.cfg)["resid_pre", 2]


def test_a_misspelt_name_says_what_it_is_close_to(model):
    _, some = model.run_with_cache(IDS, names_filter="ln_final.hook_out")
    with pytest.raises(HookNameError, match=r"Closest: 'blocks\.1\.hook_resid_post'"):
        some["blocks.1.hook_resid_posst"]
    with pytest.raises(HookNameError, match="no hook point"):
        some["resid_posst", 1]


def test_a_short_word_without_its_block_says_so(cache):
    with pytest.raises(HookNameError, match=r"say which, cache\['resid_post', 0\]"):
        cache["resid_post"]


def test_a_value_this_model_has_not_says_why():
    model = hooked("shared")
    _, cache = model.run_with_cache(IDS)
    borrower = next(layer for layer in model.cfg.layers if layer.lender is not None)
    with pytest.raises(HookNameError, match=f"from block {borrower.lender}"):
        cache["k", borrower.index]
    with pytest.raises(HookNameError, match="no vision embedder"):
        cache["vision.image_features"]


@pytest.mark.parametrize("key", [3, None, ("resid_post", 1, None, 7), 1.5])
def test_a_key_that_is_no_name_is_a_type_error(cache, key):
    with pytest.raises(TypeError):
        cache[key]
    assert key not in cache


def test_gradients_are_read_under_both_vocabularies():
    model = hooked(dtype=torch.float32)
    _, cache = model.run_with_cache(
        IDS, names_filter="blocks.1.hook_resid_post", incl_bwd=True, return_type="loss"
    )
    grad = cache["blocks.1.hook_resid_post_grad"]
    assert cache["layers.1.layer_output_grad"] is grad and grad.abs().sum() > 0
    with pytest.raises(HookNameError, match=r"closest is 'blocks\.1\.hook_resid_post_grad'"):
        cache["blocks.2.hook_resid_post_grad"]


def test_it_prints_what_it_holds(model):
    _, some = model.run_with_cache(IDS, names_filter="blocks.*.hook_resid_post")
    assert "4 values" in repr(some) and "hook_resid_post" in repr(some)


def test_it_holds_no_model():
    model = hooked()
    _, cache = model.run_with_cache(IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert cache.decompose_resid().shape[0] == 9  # and works without one


def test_its_weights_are_references(model, cache):
    assert cache.weights["W_U"].data_ptr() == model.w_e.data_ptr()
    assert cache.weights["layer_scalar"][2] is model.blocks[2].layer_scalar


# -- derived ------------------------------------------------------------------------------------------


def test_derived_values_are_read_by_key_and_are_not_keys(model):
    logits, cache = model.run_with_cache(IDS)
    assert cache["input_size"] == (2, 6)
    assert torch.equal(cache["attention_mask"], torch.ones(2, 6, dtype=torch.long))
    assert torch.equal(cache["next_token_probs"], logits[:, -1].float().softmax(-1))
    assert not torch.allclose(
        cache["next_token_probs"], cache["lm_head_output"][:, -1].float().softmax(-1)
    )
    assert "next_token_probs" in cache and "next_token_probs" not in set(cache)
    assert "vision.image_token_mask" not in cache
    with pytest.raises(HookNameError, match="no vision embedder"):
        cache["vision.image_token_mask"]


def test_the_mask_that_was_given_is_the_mask():
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    _, cache = hooked().run_with_cache(IDS, attention_mask=mask)
    assert torch.equal(cache["attention_mask"], mask)


def test_the_image_token_mask_finds_the_features():
    model = hooked("wrapper")
    _, cache = model.run_with_cache(**inputs_for("wrapper", torch.float64))
    where = cache["vision.image_token_mask"]
    assert where.any() and torch.equal(cache["resid_pre", 0][where], cache["vision.image_features"])
    assert not torch.equal(cache["hook_embed"][where], cache["vision.image_features"])


@pytest.mark.parametrize(
    "cut", [{}, {"remove_batch_dim": True}, {"pos_slice": -1}, {"pos_slice": [0, 2]}]
)
@pytest.mark.parametrize("return_type", ["logits", "both", "loss"])
def test_next_token_probs_are_the_last_positions_whatever_is_kept(model, return_type, cut):
    """With a loss alone the logits come from what was kept, which cut positions may not be."""
    ids = IDS[:1]
    probs = model(ids)[0, -1].float().softmax(-1)
    _, cache = model.run_with_cache(ids, return_type=return_type, **cut)
    if return_type == "loss" and "pos_slice" in cut:
        with pytest.raises(HookNameError, match="they were not kept"):
            cache["next_token_probs"]
        return
    have = cache["next_token_probs"]
    assert torch.equal(have if "remove_batch_dim" in cut else have[0], probs)


def test_a_run_that_stops_early_has_no_next_token(model):
    _, cache = model.run_with_cache(IDS, stop_at_layer=2)
    assert cache["input_size"] == (2, 6)
    with pytest.raises(HookNameError, match="ended before the logits"):
        cache["next_token_probs"]


def test_a_stream_has_no_mask(model, cache):
    _, later = model.run_with_cache(cache["resid_pre", 2], start_at_layer=2)
    with pytest.raises(HookNameError, match="ran on a given stream"):
        later["attention_mask"]


# -- changing the whole -------------------------------------------------------------------------------


def test_to_moves_values_and_derived_and_returns_the_cache(cache):
    assert cache.to("meta") is cache
    assert cache["resid_post", 0].is_meta and cache["next_token_probs"].is_meta
    assert not cache.weights["W_U"].is_meta


def test_remove_batch_dim_drops_it_here(model):
    _, cache = model.run_with_cache(IDS[:1])
    before = cache["resid_post", 1]
    assert cache.remove_batch_dim() is cache and not cache.has_batch_dim
    assert torch.equal(cache["resid_post", 1], before[0])
    assert cache["pattern", 1].shape == (4, 6, 6) and cache["next_token_probs"].ndim == 1
    assert cache.remove_batch_dim() is cache and cache["resid_post", 1].ndim == 2  # once is enough
    _, alike = model.run_with_cache(IDS[:1], remove_batch_dim=True)
    assert not alike.has_batch_dim
    assert all(torch.equal(alike[name], value) for name, value in cache.items())
    assert alike["attention_mask"].shape == (6,)


def test_remove_batch_dim_of_several_rows_changes_nothing(cache):
    with pytest.raises(ValueError, match="has 2 rows"):
        cache.remove_batch_dim()
    with pytest.raises(ValueError, match="batch_size is 2"):
        cache.remove_batch_dim(2)
    assert cache.has_batch_dim and cache["resid_post", 1].shape[0] == 2


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (1, 1),
        (-1, 1),
        ((0, 1), slice(0, 1)),
        ([1, 0], [1, 0]),
        (Slice(1), 1),
        (slice(1, None), slice(1, 2)),
    ],
)
def test_rows_of_the_batch(cache, rows, index):
    some = cache.apply_slice_to_batch_dim(rows)
    assert torch.equal(some["resid_post", 1], cache["resid_post", 1][index])
    assert torch.equal(some["next_token_probs"], cache["next_token_probs"][index])
    assert some.has_batch_dim == (not isinstance(index, int))
    assert cache["resid_post", 1].shape[0] == 2  # this one is as it was


def test_media_have_no_batch_axis_to_lose():
    _, cache = hooked("wrapper").run_with_cache(**inputs_for("wrapper", torch.float64))
    row = cache.apply_slice_to_batch_dim(0)
    assert torch.equal(row["vision.image_features"], cache["vision.image_features"])
    assert torch.equal(row["resid_pre", 0], cache["resid_pre", 0][0])


def test_a_batch_axis_that_is_gone_cannot_be_sliced(cache):
    with pytest.raises(ValueError, match="no batch axis"):
        cache.apply_slice_to_batch_dim(0).apply_slice_to_batch_dim(0)


def test_toggle_autodiff(cache):
    try:
        cache.toggle_autodiff()
        assert not torch.is_grad_enabled()
        cache.toggle_autodiff(True)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
