"""What is kept without being made is, when it is read, what the run had; and nothing can change it unseen."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from small import KINDS, build, hooked, inputs_for, media_inputs, padded_inputs, text_inputs

from lens_gemma4 import HookedModel
from lens_gemma4.kept import Deferred, Kept, Store

ACT, PRE = "blocks.1.mlp.hook_act", "blocks.1.mlp.hook_pre"


def deferred(kept: Kept) -> set[str]:
    return {name for name, entry in kept._entries.items() if isinstance(entry, Deferred)}


def kinds(names: set[str]) -> set[str]:
    return {re.sub(r"\.\d+\.", ".i.", name) for name in names}


def what_hooks_see(model, inputs):
    """Every value as a user's own hook is shown it, one that nothing is deferred for."""
    seen: dict[str, torch.Tensor] = {}

    def look(value, hook):
        seen[hook.name] = value

    names = [name for name in model.hook_dict if not model.uncached(name)]
    model.run_with_hooks(**inputs, fwd_hooks=[(names.__contains__, look)])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_made_when_it_is_read_is_the_runs_to_the_bit(kind, dtype):
    model, inputs = build(kind, dtype=dtype), inputs_for(kind, dtype)
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    assert set(kept) == set(seen)
    waiting = deferred(kept)
    assert kinds(waiting) >= {
        *("blocks.i.attn.hook_pattern", "blocks.i.attn.hook_attn_scores", "blocks.i.mlp.hook_post"),
        *("blocks.i.hook_resid_mid", "blocks.i.ln2.hook_normalized", "blocks.i.ln2.hook_scale"),
        *(
            "blocks.i.attn.hook_rot_q",
            "blocks.i.hook_resid_sum",
            "ln_final.hook_scale",
            ACT.replace("1", "i", 1),
        ),
        *(f"blocks.i.{norm}.hook_out" for norm in "ln1 ln1_post ln2 ln2_post attn.q_norm".split()),
        *("blocks.i.hook_attn_out", "blocks.i.hook_mlp_out", "blocks.i.attn.hook_rot_k"),
        *("blocks.i.attn.v_norm.hook_out", "ln_final.hook_out", "hook_logits"),
    }
    for name in reversed(list(kept)):  # from the end: what others follow from is made on the way
        assert torch.equal(kept[name], seen[name]), name
        assert kept[name].stride() == seen[name].stride(), name
        assert kept[name] is kept[name]
    assert not deferred(kept)
    # the control: one bit of an input is seen by every value that follows from it
    _, other = model.run_and_store(**inputs)
    for name in sorted(waiting):
        way = other._entries[name]
        first, *rest = (seen[source] for source in way.inputs)
        assert not torch.equal(way.make(first + 0.5, *rest), seen[name]), name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_patterns_of_padded_rows(side, attn_implementation):
    model, inputs = build("text"), padded_inputs(side)
    model.set_attn_implementation(attn_implementation)
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    assert ("blocks.0.attn.hook_pattern" in deferred(kept)) == (attn_implementation == "sdpa")
    for name, value in kept.items():
        assert torch.equal(value, seen[name]), name


def test_nothing_is_held_that_is_not_kept_anyway():
    """A filter that leaves the inputs out gets values: holding the inputs would cost more than was asked for."""
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    for name in (
        "hook_pattern",
        "hook_normalized",
        "hook_act",
        "hook_post",
        "hook_logits",
        "hook_resid_mid",
        "ln1.hook_out",
        "hook_attn_out",
        "hook_rot_k",
        "v_norm.hook_out",
    ):
        _, kept = model.run_and_store(**inputs, names_filter=f"*{name}")
        assert kept and not deferred(kept), name
        assert all(torch.equal(kept[n], seen[n]) for n in kept)
    _, kept = model.run_and_store(**inputs, names_filter=[ACT, PRE])
    assert deferred(kept) == {ACT}


def test_an_edit_on_the_way_is_in_what_follows():
    model, inputs = build("text"), text_inputs()
    for edited, reader in (
        (PRE, ACT),
        (ACT, "blocks.1.mlp.hook_post"),
        ("blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_pattern"),
        ("blocks.1.ln1.hook_normalized", "blocks.1.ln1.hook_out"),
        ("blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_out"),
        ("blocks.1.ln1_post.hook_out", "blocks.1.hook_attn_out"),
        ("blocks.1.attn.k_norm.hook_normalized", "blocks.1.attn.hook_rot_k"),
        ("blocks.1.attn.k_norm.hook_out", "blocks.1.attn.hook_rot_k"),
        ("blocks.1.attn.v_norm.hook_normalized", "blocks.1.attn.v_norm.hook_out"),
    ):
        with model.hooks(fwd_hooks=[(edited, lambda value, hook: value + 1)]):
            seen = what_hooks_see(model, inputs)
            _, kept = model.run_and_store(**inputs)
        assert torch.equal(kept[reader], seen[reader])
        assert not torch.equal(kept[reader], what_hooks_see(model, inputs)[reader])


def test_who_else_listens_gets_the_value():
    model, inputs, seen = build("text"), text_inputs(), []
    with model.hooks(fwd_hooks=[(ACT, lambda value, hook: seen.append(value))]):
        _, kept = model.run_and_store(**inputs)
    assert ACT not in deferred(kept) and torch.equal(seen[0], kept[ACT])
    model.requires_grad_(True)
    _, kept = model.run_and_store(**inputs, incl_bwd=False)
    assert not any(value.requires_grad for value in kept.values())


def test_weights_that_change_after_the_run_change_nothing():
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    for _, weight in model.named_weights():
        weight.data.zero_()  # no version counts this
    for name, value in kept.items():
        assert torch.equal(value, seen[name]), name


def test_a_write_into_what_it_follows_from_is_an_error_and_no_wrong_value():
    model, inputs = build("text"), text_inputs()
    _, kept = model.run_and_store(**inputs)
    early = kept["blocks.0.mlp.hook_act"]
    kept[PRE].mul_(2)
    with pytest.raises(RuntimeError, match=rf"{re.escape(ACT)}.*{re.escape(PRE)}.*written into"):
        kept[ACT]
    kept["blocks.0.mlp.hook_pre"].mul_(2)
    assert kept["blocks.0.mlp.hook_act"] is early  # it was made before
    # made values are no exception: the post follows from the act
    kept["blocks.2.mlp.hook_act"].mul_(2)
    with pytest.raises(RuntimeError, match="written into"):
        kept["blocks.2.mlp.hook_post"]
    # nor what follows by several steps
    kept["blocks.2.attn.hook_out"].mul_(2)
    with pytest.raises(RuntimeError, match=r"attn\.hook_out.*written into"):
        kept["blocks.2.hook_resid_mid"]


def test_replacing_or_removing_a_value_first_makes_what_follows_from_it():
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    kept[PRE] = torch.zeros_like(kept[PRE])
    del kept["blocks.0.mlp.hook_pre"], kept["blocks.0.mlp.hook_act"]
    for name in (ACT, "blocks.0.mlp.hook_post", "blocks.1.mlp.hook_post"):
        assert torch.equal(kept[name], seen[name]), name
    assert kept[PRE].eq(0).all() and "blocks.0.mlp.hook_pre" not in kept


def test_inference_mode():
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    with torch.inference_mode():  # its tensors do not tell when they are written into
        _, inside = model.run_and_store(**inputs)
        assert not deferred(inside)
    _, outside = model.run_and_store(**inputs)
    with torch.inference_mode():
        for name in seen:
            assert torch.equal(outside[name], seen[name]) and torch.equal(inside[name], seen[name])
    assert not outside[ACT].is_inference()
    outside[ACT].requires_grad_(True)


def test_autocast_defers_nothing():
    model, inputs = build("text"), text_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = what_hooks_see(model, inputs)
        _, kept = model.run_and_store(**inputs)
    assert not deferred(kept)
    assert all(torch.equal(kept[name], seen[name]) for name in kept)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda kept: pickle.loads(pickle.dumps(kept))]
)
def test_copies_and_files_hold_values_alone(again):
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    other = again(model.run_and_store(**inputs)[1])
    assert not deferred(other)
    assert all(torch.equal(other[name], seen[name]) for name in seen)


def test_without_the_batch_axis():
    model = build("wrapper")
    inputs = inputs_for("wrapper")
    inputs = {name: value for name, value in inputs.items() if name in ("input_ids",)}
    ids = text_inputs(batch=1)["input_ids"]
    seen = what_hooks_see(model, {"input_ids": ids})
    _, kept = model.run_and_store(input_ids=ids, remove_batch_dim=True)
    assert deferred(kept)
    for name, value in kept.items():
        assert torch.equal(value, seen[name][0]), name


def test_slices_and_other_devices_are_made_at_once():
    model, inputs = build("text"), text_inputs()
    assert not deferred(model.run_and_store(**inputs, device="cpu")[1])
    assert not deferred(model.run_and_store(**inputs, pos_slice=lambda value, axes: value)[1])


def test_a_tensor_that_is_gone_is_not_mistaken_for_one_with_its_number():
    store = Store(Kept())
    value = torch.zeros(2)
    store.save("first", "batch", value)
    assert store.defer("second", "batch", None, torch.neg, (value,))
    number, other = id(value), torch.ones(2)
    store._names[id(other)] = store._names[number]
    assert not store.defer("third", "batch", None, torch.neg, (other,))


def test_a_cache_reads_and_counts_without_making_everything():
    model = HookedModel.from_pretrained("tiny")
    _, cache = model.run_with_cache("The capital of France is")
    waiting = deferred(cache.cache_dict)
    assert len(waiting) > len(cache) / 3
    assert "MB" in repr(cache) and list(cache.keys()) and "pattern" not in waiting
    assert deferred(cache.cache_dict) == waiting
    before = float(repr(cache).split(" MB")[0].split()[-1])
    assert cache["pattern", 0] is cache["blocks.0.attn.hook_pattern"]
    assert float(repr(cache).split(" MB")[0].split()[-1]) >= before
    plain = model.run_with_cache("The capital of France is", return_cache_object=False)[1]
    assert type(plain) is dict and torch.equal(
        plain["blocks.0.attn.hook_pattern"], cache["pattern", 0]
    )


# -- what may change between the run and the reading --------------------------------------------------


def test_reading_under_autocast_gives_what_the_run_had():
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(kept[name], seen[name]) for name in seen)
        q, k = (kept[f"blocks.0.attn.hook_rot_{x}"].transpose(1, 2) for x in "qk")
        assert (q @ k[:, [0, 0, 1, 1]].mT).dtype == torch.bfloat16  # the control: it would round


def test_settings_of_the_model_that_change_after_the_run_change_nothing():
    model, inputs = build("text"), padded_inputs("left")
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs)
    model.set_attn_implementation("eager")  # which fills rows that see nothing otherwise
    name = "blocks.0.attn.hook_pattern"
    assert torch.equal(kept[name], seen[name])
    assert not torch.equal(what_hooks_see(model, inputs)[name], seen[name])


def test_what_waits_holds_no_module_and_no_weight():
    model, inputs = build("text"), text_inputs()
    _, kept = model.run_and_store(**inputs)
    block = model.blocks[0]
    gone = [weakref.ref(x) for x in (block, block.attn, block.attn.w_q, block.ln1, block.mlp)]
    assert deferred(kept)
    del model, block
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert kept["blocks.0.attn.hook_pattern"].shape[1] == 4


def test_what_a_users_hook_holds_is_not_what_is_kept():
    model, inputs, held = build("text"), text_inputs(), []
    name = "blocks.1.hook_resid_pre"
    before = model.run_and_store(**inputs)[1][name]
    with model.hooks(fwd_hooks=[(name, lambda value, hook: held.append(value))]):
        _, kept = model.run_and_store(**inputs)
    held[0].zero_()
    assert before.abs().sum() > 0 and torch.equal(kept[name], before)
    assert kept["blocks.1.ln1.hook_scale"].min() > 0.1  # nor what follows from it


@pytest.mark.parametrize("keeps", [False, True])
def test_a_run_inside_a_hook_is_not_what_the_run_around_it_keeps(keeps):
    model, inputs, inner = build("text"), text_inputs(), []
    other = text_inputs(batch=1, pos=5, seed=1)
    _, clean = model.run_and_store(**inputs)
    _, alone = model.run_and_store(**other)

    def run_another(value, hook):
        if not inner:  # it listens to the inner run too
            inner.append(None)
            inner.append(model.run_and_store(**other)[1] if keeps else model(**other))

    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", run_another)]):
        _, kept = model.run_and_store(**inputs)
    assert set(kept) == set(clean) and len(inner) == 2
    assert all(torch.equal(kept[name], clean[name]) for name in clean)
    assert not keeps or all(torch.equal(inner[1][name], alone[name]) for name in alone)

    def fail(value, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.hooks(fwd_hooks=[("hook_embed", fail)]):
        model.run_and_store(**inputs)
    _, kept = model.run_and_store(**inputs)  # and it still listens
    assert set(kept) == set(clean) and not model.list_hooks()


@pytest.mark.parametrize("backward", [False, True])
def test_parts_run_inside_a_hook_are_not_what_the_run_around_them_keeps(backward):
    """The final norm, which this run comes to later or not at all, and an MLP that it has been through."""
    model, ids, seen = hooked(dtype=torch.float32), torch.tensor([[2, 5, 6, 7, 8, 9]]), []
    model.ln_final.hook_out.add_hook(lambda value, hook: seen.append(hook.name))

    def parts(value, hook):
        with torch.no_grad():
            model.ln_final(value)
            model.blocks[0].mlp(value)

    ends = {"return_type": "loss", "incl_bwd": True} if backward else {"stop_at_layer": 2}
    _, clean = model.run_with_cache(ids, **ends)
    assert any(name.endswith("_grad") for name in clean) == backward
    seen.clear()
    listens = [("blocks.1.hook_resid_mid", parts)]
    with model.hooks(fwd_hooks=listens, bwd_hooks=listens if backward else []):
        _, kept = model.run_with_cache(ids, **ends)
    assert set(kept) == set(clean)
    assert all(torch.equal(kept[name], clean[name]) for name in clean)
    assert len(seen) == (3 if backward else 1)  # a user's own hooks see parts too
    assert not model.place.depth


def test_media_values_have_no_batch_axis_to_lose():
    model, inputs = build("wrapper"), media_inputs()
    image = {name: inputs[name][1:] for name in ("pixel_values", "image_position_ids")}
    audio = {name: inputs[name][1:] for name in ("input_features", "input_features_mask")}
    inputs = {"input_ids": inputs["input_ids"][1:], **image, **audio}
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs, remove_batch_dim=True)
    waiting = deferred(kept)
    assert any(name.startswith("vision.") for name in waiting)
    for name, value in kept.items():
        batched = model.hook_dict[name].axes.startswith("batch")
        assert torch.equal(value, seen[name][0] if batched else seen[name]), name


def test_everything_at_once_when_asked():
    model, inputs = build("text"), text_inputs()
    seen = what_hooks_see(model, inputs)
    _, kept = model.run_and_store(**inputs, lazy=False)
    assert not deferred(kept)
    assert all(torch.equal(kept[name], seen[name]) for name in seen)
    tiny = HookedModel.from_pretrained("tiny")
    _, cache = tiny.run_with_cache("The capital of France is", lazy=False)
    assert not deferred(cache.cache_dict)
