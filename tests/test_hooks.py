"""Every hook point: it fires, an edit there counts however it is made, reading changes nothing, gradients are right.

Then the rules of the hook system itself: names, promises to fire, snapshots, and what is left after a call.
"""

import copy
import itertools
import pickle

import jaxtyping
import pytest
import torch
from small import KINDS, WINDOW, build, few, inputs_for, media_inputs, padded_inputs, text_inputs
from torch import nn

from lens_gemma4 import names
from lens_gemma4.errors import HookNameError, HookShapeError
from lens_gemma4.hooks import HookedRootModule, HookPoint

kinds = pytest.mark.parametrize("kind", KINDS)
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
BLOCK = "blocks.1."


def float_points(model):
    return [name for name in model.hook_dict if name != "hook_tokens"]


def nothing(value, hook):
    return None


@pytest.fixture
def unchecked():
    """Annotations are not checked at run time: for sweeps over every point, and to meet what a user would."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def direction(value, seed=0):
    """A random direction of a value's shape, and where a value is masked none: nothing can be added to finfo.min."""
    drawn = torch.randn(
        value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.where(value.detach() > torch.finfo(value.dtype).min / 2, drawn.to(value.dtype), 0)


def edited(value):
    """One edit by value: other ids, or a scale and a shift (a norm undoes a scale alone, though not its sign)."""
    if not value.is_floating_point():
        return torch.where(value < 80, (value + 5) % 80, value)  # placeholders stay
    return value * (-0.5 if value.shape[-1] == 1 else 0.5) + direction(value)


def returned(value, hook):
    return edited(value)


def in_place(value, hook):
    value.copy_(edited(value))


def through_data(value, hook):
    value.data[:] = edited(value)


def through_numpy(value, hook):
    value.detach().numpy()[:] = edited(value).detach().numpy()


def in_other_strides(value, hook):
    """Returned with its last axis outermost in memory."""
    return edited(value).movedim(-1, 0).contiguous().movedim(0, -1)


# -- every point ----------------------------------------------------------------------------------------


@kinds
@implementations
def test_every_listed_point_fires_once_with_its_axes(kind, implementation):
    model = build(kind, attn_implementation=implementation)
    shapes = {}

    def note(value, hook):
        assert hook.name not in shapes
        shapes[hook.name] = value.shape

    model.run_with_hooks(**inputs_for(kind), fwd_hooks=[(name, note) for name in model.hook_dict])
    assert set(shapes) == {name for name, _ in names.points(model.cfg)}
    for name, row in names.points(model.cfg):
        words = row.axes.split()
        assert len(words) == len(shapes[name]), name
        sizes = _sizes(model, name, inputs_for(kind))
        for word, size in zip(words, shapes[name], strict=True):
            assert size == sizes.get(word, size), (name, word)


def _sizes(model, name, inputs):
    cfg, (batch, pos) = model.cfg, inputs["input_ids"].shape
    sizes = {
        "batch": batch,
        "pos": pos,
        "kv_pos": pos,
        "d_model": cfg.d_model,
        "d_vocab": cfg.d_vocab,
        "1": 1,
    }
    if (index := names.split(name)[1]) is not None:
        layer = cfg.layer(index)
        sizes |= {"head": layer.n_heads, "kv_head": layer.n_key_value_heads, "d_head": layer.d_head}
        sizes |= {"d_mlp": layer.d_mlp}
    return sizes | {
        "image": 2,
        "patch": 3 if name.startswith("video") else 8,
        "frame": 4 if "audio" in name else 2,
    }


@pytest.mark.parametrize(
    ("kind", "implementation", "dtype"),
    [
        ("wrapper", "sdpa", torch.float32),
        ("wrapper, shared", "eager", torch.float32),
        ("shared, own values", "sdpa", torch.float32),
        ("no softcap, untied", "eager", torch.float32),
        ("wrapper, shared", "sdpa", torch.bfloat16),
    ],
)
def test_an_edit_counts_and_means_the_same_returned_and_in_place(
    kind, implementation, dtype, unchecked
):
    model, inputs = build(kind, dtype, implementation), inputs_for(kind, dtype)
    clean = model(**inputs)
    for name in model.hook_dict:
        one, two = (
            model.run_with_hooks(**inputs, fwd_hooks=[(name, edit)])
            for edit in (returned, in_place)
        )
        assert (one - clean).abs().max() > 1e-3, name
        assert torch.equal(one, two), name


@pytest.mark.parametrize("edit", [through_data, through_numpy, in_other_strides])
@implementations
def test_an_edit_counts_however_it_is_made(edit, implementation, unchecked):
    model, inputs = build("wrapper", attn_implementation=implementation), media_inputs()
    for name in model.hook_dict:
        if names.split(name)[1] in (None, 1):
            one, two = (
                model.run_with_hooks(**inputs, fwd_hooks=[(name, how)]) for how in (returned, edit)
            )
            assert torch.equal(one, two), name


@pytest.mark.parametrize("kind", ["wrapper", "wrapper, all"])
def test_padded_rows_of_media_reach_nothing_and_valid_ones_do(kind, unchecked):
    model, inputs = build(kind), media_inputs()
    clean = model(**inputs)
    valid = {
        "vision": (inputs["image_position_ids"] != -1).all(-1),
        "video": (inputs["video_position_ids"] != -1).all(-1),
        "audio": inputs["input_features_mask"].bool(),
    }
    tried = 0
    for name, row in names.points(model.cfg):
        if row.media is None or row.axes.startswith("token"):
            continue
        rows = valid[row.media][..., None]

        def shift_padded(value, hook, rows=rows):
            return torch.where(rows, value, value * 2 + direction(value))

        def shift_valid(value, hook, rows=rows):
            return torch.where(rows, value * 2 + direction(value), value)

        logits = model.run_with_hooks(**inputs, fwd_hooks=[(name, shift_padded)])
        if (
            row.starred or "norm" in name
        ):  # the explicit form stands in for the fast one on every row
            torch.testing.assert_close(logits, clean, atol=1e-4, rtol=0)
        else:
            assert torch.equal(logits, clean), name
        moved = model.run_with_hooks(**inputs, fwd_hooks=[(name, shift_valid)])
        assert (moved - clean).abs().max() > 1e-3, name
        tried += 1
    assert tried == 2 * 17 + 4


@kinds
@implementations
@dtypes
def test_reading_changes_no_bit(kind, implementation, dtype, unchecked):
    model, inputs = build(kind, dtype, implementation), inputs_for(kind, dtype)
    clean = model(**inputs)
    assert torch.equal(
        model.run_with_hooks(**inputs, fwd_hooks=[(lambda name: True, nothing)]), clean
    )
    assert torch.equal(model.run_and_store(**inputs)[0], clean)
    assert torch.equal(model.run_and_store(**inputs, names_filter=list(model.hook_dict))[0], clean)
    moved = model.run_with_hooks(**inputs, fwd_hooks=[("blocks.0.hook_resid_pre", returned)])
    assert not torch.equal(moved, clean)


@pytest.mark.parametrize(
    ("kind", "implementation"), [("wrapper", "sdpa"), ("shared", "sdpa"), ("wrapper", "eager")]
)
def test_reading_each_point_alone_changes_no_bit(kind, implementation, unchecked):
    model, inputs = build(kind, attn_implementation=implementation), inputs_for(kind)
    clean = model(**inputs)
    for name in model.hook_dict:
        assert torch.equal(model.run_with_hooks(**inputs, fwd_hooks=[(name, nothing)]), clean), name


@pytest.mark.parametrize("side", ["left", "right"])
@implementations
@dtypes
def test_reading_changes_no_bit_of_padded_rows(side, implementation, dtype):
    model, inputs = build("wrapper", dtype, implementation), padded_inputs(side)
    clean = model(**inputs)
    assert torch.equal(model.run_with_hooks(**inputs, fwd_hooks=[("blocks.*", nothing)]), clean)


def test_reading_values_that_are_not_numbers_changes_nothing():
    """NaN differs from itself, which a comparison by content must not take for an edit."""
    model, inputs = build("text"), text_inputs()

    def spoil(value, hook):
        value[1, -1] = float("nan")

    spoilt = [("blocks.1.hook_resid_pre", spoil)]
    clean = model.run_with_hooks(**inputs, fwd_hooks=spoilt)
    read = model.run_with_hooks(**inputs, fwd_hooks=[*spoilt, ("blocks.*", nothing)])
    assert clean[0].isfinite().all() and clean[1].isnan().any()
    torch.testing.assert_close(read, clean, atol=0, rtol=0, equal_nan=True)


def test_scaling_masked_scores_leaves_no_nan_behind():
    """finfo.min times two is -inf, and a row of it would be NaN, which padding would spread to every row."""
    for implementation in ("sdpa", "eager"):
        model, inputs = build("text", attn_implementation=implementation), padded_inputs()
        scores = "blocks.*.attn.hook_attn_scores"
        logits = model.run_with_hooks(**inputs, fwd_hooks=[(scores, lambda value, hook: value * 2)])
        assert logits.isfinite().all()
        alone = model.run_with_hooks(
            input_ids=inputs["input_ids"][1:2, 3:],
            fwd_hooks=[(scores, lambda value, hook: value * 2)],
        )
        torch.testing.assert_close(logits[1:2, 3:], alone, atol=1e-3, rtol=0)
        assert (logits[1:2, 3:] - model(**inputs)[1:2, 3:]).abs().max() > 0.1


# -- gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "implementation"), [("wrapper", "sdpa"), ("shared", "eager")])
def test_backward_works_after_an_in_place_edit_at_every_point(kind, implementation, unchecked):
    model = build(kind, attn_implementation=implementation, **few(kind))
    inputs = inputs_for(kind)
    model.requires_grad_(True)

    def gradients(name, edit):
        model.zero_grad()
        model.run_with_hooks(**inputs, fwd_hooks=[(name, edit)]).pow(2).sum().backward()
        return {
            name: weight.grad.clone()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }

    clean = gradients("hook_embed", nothing)
    for name in model.hook_dict:
        got = gradients(name, in_place)
        assert all(grad.isfinite().all() for grad in got.values()), name
        assert not torch.equal(got["w_e"], clean["w_e"]), name
    one, two = (
        gradients(list(model.hook_dict), in_place),
        gradients(list(model.hook_dict), returned),
    )
    for name in one:  # the weights' gradients are summed over other strides, so to rounding
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("edit", ["returned", "in place"])
@pytest.mark.parametrize(
    "point", ["attn.hook_pattern", "attn.hook_attn_scores", "attn.hook_result", "ln2.hook_scale"]
)
def test_a_mask_of_ones_on_a_starred_point_gets_its_gradient(point, edit):
    """Its content changes nothing, so a comparison by content would miss it."""
    model, masks = build("text"), []

    def multiply(value, hook):
        masks.append(torch.ones_like(value, requires_grad=True))
        if edit == "in place":
            value *= masks[0]
        return value if edit == "in place" else value * masks[0]

    model.run_with_hooks(**text_inputs(), fwd_hooks=[(BLOCK + point, multiply)]).pow(
        2
    ).sum().backward()
    assert masks[0].grad.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        ("wrapper", "sdpa"),
        ("wrapper, shared", "eager"),
        ("shared, own values", "sdpa"),
        ("no softcap, untied", "eager"),
    ],
)
def test_gradients_agree_with_finite_differences_at_every_point(kind, implementation, unchecked):
    model, inputs = build(kind, torch.float64, implementation), inputs_for(kind, torch.float64)
    weights = direction(model(**inputs), seed=1)
    points, values, grads = float_points(model), {}, {}

    def keep_value(value, hook):
        values[hook.name] = value.detach()

    def keep_grad(grad, hook):
        grads[hook.name] = grad

    kept = {"fwd_hooks": [(points, keep_value)], "bwd_hooks": [(points, keep_grad)]}
    (model.run_with_hooks(**inputs, **kept) * weights).sum().backward()
    assert set(grads) == set(points)
    for name in points:
        aim, other = direction(values[name], 2), direction(values[name], 3)

        def loss(step, name=name, aim=aim):
            moved = [(name, lambda value, hook: value + step * aim)]
            return (model.run_with_hooks(**inputs, fwd_hooks=moved) * weights).sum().item()

        if name.endswith(
            "hook_scale"
        ):  # a norm further on undoes most of it: a small slope, measured to fourth order
            step = 1e-3
            measured = (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (
                12 * step
            )
        else:
            step = 1e-5
            measured = (loss(step) - loss(-step)) / (2 * step)
        claimed, wrong = ((grads[name] * aimed).sum().item() for aimed in (aim, other))
        tolerance = 1e-6 * max(abs(claimed), abs(wrong), 1e-3)
        assert abs(measured - claimed) < tolerance, (name, measured, claimed)
        assert abs(measured - wrong) > 10 * tolerance, name


@pytest.mark.parametrize("kind", ["wrapper", "shared"])
def test_backward_functions_fire_and_the_gradients_they_give_count(kind, unchecked):
    """A gradient doubled at a point changes what arrives before it, and nothing at the point or behind it."""
    model, inputs, got = build(kind, **few(kind)), inputs_for(kind), {}
    every, last = float_points(model), model.cfg.n_layers - 1
    points = [name for name in every if names.split(name)[1] in (None, last)]
    sources = {name for name in points if name.endswith(("patch_ln1.hook_scale", "hook_pos_embed"))}
    sources |= {"hook_embed", "audio.norm.hook_scale"} & set(points)

    def keep(grad, hook):
        got[hook.name] = grad.clone()

    def double(grad, hook):
        return 2 * grad

    def double_in_place(grad, hook):
        grad *= 2

    def run(*hooks):
        got.clear()
        model.run_with_hooks(**inputs, bwd_hooks=hooks).sum().backward()
        return dict(got)

    all_of_them = run((every, keep))
    assert set(all_of_them) == set(every) and all(
        grad.abs().max() > 0 for grad in all_of_them.values()
    )
    for name in points:
        readers = [*sources, name, "hook_logits"]
        clean, after = run((readers, keep)), run((readers, keep), (name, double))
        changed = {other for other in readers if not torch.equal(after[other], clean[other])}
        assert bool(changed) != (name in sources), name
        assert not changed & {name, "hook_logits"}, name
    one, two = (run((points, keep), (points, edit)) for edit in (double, double_in_place))
    assert all(grad.isfinite().all() and torch.equal(grad, two[name]) for name, grad in one.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"),
        ("blocks.1.ln1_post.hook_out", "blocks.1.hook_attn_out"),
        ("blocks.1.ln2_post.hook_out", "blocks.1.hook_mlp_out"),
        ("blocks.1.attn.hook_k", "blocks.1.attn.hook_v"),
        ("blocks.1.attn.v_norm.hook_normalized", "blocks.1.attn.v_norm.hook_out"),
        ("hook_logits_raw", "hook_logits"),
    ],
)
def test_points_that_hold_one_tensor_have_gradients_of_their_own(first, second):
    """What replaces the gradient at the later point reaches the earlier one, never the other way round."""
    model, inputs = build("text", final_logit_softcapping=None), text_inputs()
    got = {}

    def keep(grad, hook):
        got[hook.name] = grad.clone()

    def zero(grad, hook):
        return torch.zeros_like(grad)

    def run(*hooks):
        got.clear()
        model.run_with_hooks(**inputs, bwd_hooks=hooks).pow(2).sum().backward()
        return dict(got)

    for order in ([(first, keep), (second, keep)], [(second, keep), (first, keep)]):
        clean = run(*order)
        assert clean[first].abs().max() > 0 and clean[second].abs().max() > 0
    shared = not first.endswith("hook_k")  # a k=v block's key projection also feeds the keys
    assert torch.equal(clean[first], clean[second]) == shared
    later = run((first, keep), (second, keep), (second, zero))
    assert torch.equal(later[second], clean[second])
    assert later[first].abs().max() == 0 if shared else not torch.equal(later[first], clean[first])
    earlier = run((first, zero), (second, keep))
    assert torch.equal(earlier[second], clean[second])


def test_gradients_of_padded_batches_are_finite_and_the_unpadded_ones():
    for implementation in ("sdpa", "eager"):
        model, inputs = build("text", torch.float64, implementation), padded_inputs()
        got = {}

        def keep(grad, hook, got=got):
            got[hook.name] = grad

        points = [(name, keep) for name in float_points(model)]
        real = inputs["attention_mask"].bool()
        model.run_with_hooks(**inputs, bwd_hooks=points)[real].sum().backward()
        assert len(got) == len(points)
        for name, grad in got.items():
            assert grad.isfinite().all(), (implementation, name)
        padded = got["hook_embed"]
        model.run_with_hooks(
            input_ids=inputs["input_ids"][1:2, 3:], bwd_hooks=[("hook_embed", keep)]
        ).sum().backward()
        torch.testing.assert_close(padded[1:2, 3:], got["hook_embed"], atol=1e-10, rtol=1e-10)
        assert padded[1, :3].abs().max() == 0 and padded[2].abs().max() == 0


def test_gradients_of_the_cache_are_those_of_the_loss():
    model, inputs = build("wrapper", torch.float64), media_inputs(dtype=torch.float64)

    model.register_forward_hook(lambda module, args, out: out.pow(2).sum())
    _, kept = model.run_and_store(**inputs, incl_bwd=True)
    floats = [name for name in float_points(model) if not name.endswith("hook_result")]
    assert {f"{name}_grad" for name in floats} | set(floats) | {"hook_tokens"} == set(kept)
    torch.testing.assert_close(kept["hook_logits_grad"], 2 * kept["hook_logits"])
    for name in floats:
        assert kept[f"{name}_grad"].shape == kept[name].shape


def test_a_backward_hook_where_no_gradient_can_be_is_an_error():
    model, inputs = build("text"), text_inputs()
    for off in (torch.no_grad, torch.inference_mode):
        with (
            off(),
            pytest.raises(RuntimeError, match=r"blocks\.1\.hook_resid_mid.*gradients are off"),
        ):
            model.run_with_hooks(**inputs, bwd_hooks=[("blocks.1.hook_resid_mid", nothing)])
    with pytest.raises(RuntimeError, match=r"hook_tokens.*int64"):
        model.run_with_hooks(**inputs, bwd_hooks=[("hook_tokens", nothing)])
    with pytest.raises(ValueError, match=r"one number; this run returned \[2, 11, 101\]"):
        model.run_and_store(**inputs, incl_bwd=True)
    assert model.list_hooks() == []


def test_a_run_under_inference_mode_leaves_later_gradients_alone():
    model, inputs = build("text"), text_inputs()
    with torch.inference_mode():
        logits = model.run_with_hooks(
            **inputs, fwd_hooks=[("*", nothing), ("blocks.1.hook_resid_pre", in_place)]
        )
    got = []
    model.run_with_hooks(
        **inputs, bwd_hooks=[("hook_embed", lambda grad, hook: got.append(grad))]
    ).sum().backward()
    assert got[0].abs().max() > 0
    assert torch.equal(
        logits, model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.hook_resid_pre", in_place)])
    )


# -- what a hook may return -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda value: value[:, :2],
            r"returned \[2, 2, 20\] in place of \[2, 11, 20\]\n  \(batch pos d_model\)",
        ),
        (lambda value: value.double(), r"torch\.float64 on cpu in place of torch\.float32"),
        (lambda value: value.to("meta"), "on meta in place of"),
        (lambda value: value.tolist(), "returned list"),
        (lambda value: (value,), "returned tuple"),
        (lambda value: 0.0, "returned float"),
    ],
)
def test_a_returned_value_of_another_kind_is_an_error(wrong, said):
    model, inputs = build("text"), text_inputs()
    for asked in ("blocks.1.hook_resid_mid", "layers.1.layer_mid"):
        with pytest.raises(HookShapeError, match=said) as raised:
            model.run_with_hooks(**inputs, fwd_hooks=[(asked, lambda value, hook: wrong(value))])
        assert repr(asked) in str(raised.value)
    bwd = [("blocks.1.hook_resid_mid", lambda grad, hook: wrong(grad))]
    with pytest.raises(HookShapeError, match=said):
        model.run_with_hooks(**inputs, bwd_hooks=bwd).sum().backward()
    assert model.list_hooks() == []


def test_a_value_swapped_in_place_for_another_shape_is_an_error():
    def swap(value, hook):
        value.data = value.data[:, :3]

    with pytest.raises(HookShapeError, match="in place of"):
        build("text").run_with_hooks(**text_inputs(), fwd_hooks=[("blocks.1.hook_resid_mid", swap)])


# -- names inside a hook, contexts ----------------------------------------------------------------------


def test_a_hook_is_told_the_name_it_was_asked_for_by():
    model, seen = build("text"), []

    def note(value, hook):
        hook.ctx["count"] = hook.ctx.get("count", 0) + 1
        seen.append((hook.name, hook.layer(), hook.ctx["count"], hook.axes))

    asked = ["layers.1.layer_mid", "blocks.1.hook_resid_mid", "blocks.-3.hook_resid_mid"]
    stream = "batch pos d_model"
    model.run_with_hooks(**text_inputs(), fwd_hooks=[(name, note) for name in asked])
    assert seen == [(name, 1, count, stream) for count, name in enumerate(asked, 1)]
    assert model.blocks[1].hook_resid_mid.ctx == {"count": 3}
    model.run_with_hooks(**text_inputs(), fwd_hooks=[("*resid_mid", note)], clear_contexts=True)
    assert [name for name, *_ in seen[3:]] == [f"blocks.{i}.hook_resid_mid" for i in range(4)]
    assert model.blocks[1].hook_resid_mid.ctx == {}
    model.run_with_hooks(
        **text_inputs(),
        fwd_hooks=[("layers.1.layer_mid", lambda v, hook: setattr(hook, "ctx", {"own": 1}))],
    )
    assert model.blocks[1].hook_resid_mid.ctx == {"own": 1}
    with pytest.raises(ValueError, match="in no block"):
        model.hook_logits.layer()
    got = []
    run = model.run_with_hooks(
        **text_inputs(),
        bwd_hooks=[
            ("layers.1.layer_mid", lambda grad, hook: got.append((hook.name, hook.layer())))
        ],
    )
    run.sum().backward()
    assert got == [("layers.1.layer_mid", 1)]


def test_peers_hook_names_inside_a_hook_are_not_canonical_ones():
    """TransformerLens answers `blocks.1.hook_out` to whoever asked for `hook_resid_post`."""
    seen = []
    asked = ["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out", "blocks.2.ln2_post.hook_out"]
    build("text").run_with_hooks(
        **text_inputs(),
        fwd_hooks=[(name, lambda value, hook: seen.append(hook.name)) for name in asked],
    )
    assert sorted(seen) == sorted(asked)


# -- promises to fire -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "call", "said"),
    [
        ("wrapper", "vision.hook_out", {}, "no image was given"),
        ("wrapper", "projector.output", {}, "no image was given"),
        ("wrapper", "video.hook_video_features", {}, "no video was given"),
        ("wrapper", "audio.norm.hook_scale", {}, "no audio was given"),
        (
            "text",
            "blocks.2.hook_resid_pre",
            {"stop_at_layer": 2},
            "block 2, and this call runs blocks 0 to 1",
        ),
        ("text", "layers.0.layer_input", {"stop_at_layer": 0}, "this call runs no block"),
        ("text", "hook_logits", {"stop_at_layer": 2}, "stop_at_layer=2 ends before"),
        ("text", "ln_final.hook_scale", {"stop_at_layer": 4}, "stop_at_layer=4 ends before"),
        (
            "text",
            "blocks.1.hook_resid_pre",
            {"start_at_layer": 2},
            "block 1, and this call runs blocks 2 to 3",
        ),
        ("text", "hook_embed", {"start_at_layer": 0}, "start_at_layer runs on a given stream"),
        ("text", "hook_tokens", {"inputs_embeds": None}, "inputs_embeds were given"),
    ],
)
def test_a_literal_name_that_cannot_fire_is_an_error_before_anything_is_computed(
    kind, name, call, said
):
    model, inputs = build(kind), text_inputs()
    stream = model(**inputs, stop_at_layer=0)
    if "start_at_layer" in call:
        inputs = {"resid": stream}
    if "inputs_embeds" in call:
        inputs, call = {"inputs_embeds": stream}, {}
    computed = []
    for point in model.hook_points():
        point.add_perma_hook(lambda value, hook: computed.append(hook.name))
    with pytest.raises(HookNameError, match=said) as raised:
        model.run_with_hooks(**inputs, **call, fwd_hooks=[(name, nothing)])
    assert repr(name) in str(raised.value)
    with pytest.raises(HookNameError, match=said):
        model.run_and_store(**inputs, **call, names_filter=["blocks.*", name])
    assert computed == []
    with pytest.raises(HookNameError, match=said), model.hooks(fwd_hooks=[(name, nothing)]):
        model(**inputs, **call)
    assert computed != []


def test_patterns_and_functions_stay_silent():
    model, inputs = build("wrapper"), text_inputs()
    for silent in (
        "vision.*",
        lambda name: name.startswith("vision"),
        ["vision.*", "blocks.3.hook_*"],
    ):
        model.run_with_hooks(**inputs, stop_at_layer=2, fwd_hooks=[(silent, nothing)])
    _, kept = model.run_and_store(**inputs, stop_at_layer=1)
    assert kept and all(name.startswith(("blocks.0", "hook_tokens", "hook_embed")) for name in kept)


def test_a_block_with_hooks_and_without_a_run_promises_nothing():
    model = build("wrapper")
    with model.hooks(fwd_hooks=[("vision.hook_out", nothing)]):
        pass
    fired = []
    with model.hooks(fwd_hooks=[("vision.hook_out", lambda value, hook: fired.append(hook.name))]):
        model(**text_inputs())
        model(**media_inputs())  # one run of several is enough
    assert fired == ["vision.hook_out"]


@pytest.mark.parametrize(
    "name", ["blocks.1.hook_resid_prr", "blocks.9.hook_resid_pre", "vision.hook_out"]
)
def test_a_name_that_does_not_exist_adds_nothing(name):
    model, inputs = build("text"), text_inputs()
    pairs = [("blocks.1.hook_resid_pre", nothing), (name, nothing)]
    for call in (
        lambda: model.run_with_hooks(**inputs, fwd_hooks=pairs),
        lambda: model.run_with_hooks(**inputs, bwd_hooks=pairs),
        lambda: model.run_and_store(**inputs, names_filter=[n for n, _ in pairs]),
        lambda: model.hooks(fwd_hooks=pairs).__enter__(),
        lambda: model.add_hook([n for n, _ in pairs], nothing),
        lambda: model.add_caching_hooks([n for n, _ in pairs]),
    ):
        with pytest.raises(HookNameError):
            call()
        assert model.list_hooks() == []


def test_pairs_and_functions_are_checked(unchecked):
    model, inputs = build("text"), text_inputs()
    for pairs in (
        ["blocks.1.hook_resid_pre"],
        [("blocks.1.hook_resid_pre",)],
        [(nothing, "blocks.1.hook_resid_pre")],
    ):
        with pytest.raises(TypeError):
            model.run_with_hooks(**inputs, fwd_hooks=pairs)
    with pytest.raises(TypeError):
        model.hook_embed.add_hook(None)
    with pytest.raises(ValueError, match="sideways"):
        model.add_hook("hook_embed", nothing, dir="sideways")
    assert model.list_hooks() == []


# -- adding and removing --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_exception(error):
    model, inputs = build("text"), text_inputs()
    clean = model(**inputs)

    def stop(value, hook):
        raise error

    pairs = [("blocks.0.hook_resid_pre", in_place), ("layers.2.layer_mid", stop), ("*", nothing)]
    for call in (
        lambda: model.run_with_hooks(**inputs, fwd_hooks=pairs),
        lambda: model.run_with_hooks(
            **inputs, fwd_hooks=pairs, bwd_hooks=[("hook_embed", nothing)]
        ),
        lambda: model.run_and_store(
            **inputs, incl_bwd=True, pos_slice=lambda value, axes: stop(value, None)
        ),
    ):
        with pytest.raises(error):
            call()
        assert model.list_hooks() == [] and not any(point.live for point in model.hook_points())
    with pytest.raises(error), model.hooks(fwd_hooks=pairs):
        model(**inputs)
    assert model.list_hooks() == []
    with pytest.raises(error), model.hooks(fwd_hooks=pairs[:1]):
        raise error
    assert model.list_hooks() == [] and model._awaited == []
    assert torch.equal(model(**inputs), clean)


def test_only_the_hooks_a_call_added_are_removed():
    model, inputs = build("text"), text_inputs()
    name, ran = "blocks.1.hook_resid_mid", []

    def note(word):
        return lambda value, hook: ran.append(word)

    same = note("mine")
    model.add_hook(name, same)
    model.add_perma_hook(name, note("permanent"))
    model.run_with_hooks(**inputs, fwd_hooks=[(name, same), (name, note("call"))])
    assert ran == ["mine", "permanent", "mine", "call"]
    assert [handle.fn for _, _, handle in model.list_hooks()].count(same) == 1
    with model.hooks(fwd_hooks=[(name, note("outer"))]):
        with model.hooks(fwd_hooks=[(name, note("inner"))]):
            model.run_and_store(**inputs, names_filter=name)
            assert ran[4:] == ["mine", "permanent", "outer", "inner"]
        ran.clear()
        model(**inputs)
        assert ran == ["mine", "permanent", "outer"]
    ran.clear()
    model.reset_hooks()
    model(**inputs)
    assert ran == ["permanent"]
    model.reset_hooks(including_permanent=True)
    assert model.list_hooks() == [] and not model.hook_point(name).live


def test_contexts_may_end_in_any_order():
    """Each removes its own, whichever was entered first."""
    for order in itertools.permutations(range(3)):
        model = build("text")
        contexts = [model.hooks(fwd_hooks=[("hook_embed", nothing)]) for _ in range(3)]
        for context in contexts:
            context.__enter__()
        assert len(model.list_hooks()) == 3
        for left, index in zip((2, 1, 0), order, strict=True):
            contexts[index].__exit__(None, None, None)
            assert len(model.list_hooks()) == left
        assert not model.hook_embed.live


def test_a_reset_inside_a_context_is_no_error():
    model = build("text")
    with model.hooks(fwd_hooks=[("hook_embed", nothing)]):
        model.reset_hooks()
        assert model.list_hooks() == []
    assert model.list_hooks() == []


def test_removing_by_direction_level_and_permanence(unchecked):
    point = HookPoint()
    point.name = "x"
    for level in (None, 1, 2):
        point.add_hook(nothing, level=level)
        point.add_hook(nothing, "bwd", level=level)
    point.add_perma_hook(nothing)
    assert point.has_hooks(level=1) and point.has_hooks("bwd") and not point.has_hooks(level=3)
    point.remove_hooks("fwd", level=1)
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (3, 3)
    point.remove_hooks("both")
    assert (len(point.fwd_hooks), len(point.bwd_hooks), point.live) == (1, 0, True)
    assert point.has_hooks() and not point.has_hooks(including_permanent=False)
    point.remove_hooks("fwd", including_permanent=True)
    assert not point.live
    with pytest.raises(ValueError, match="'up'"):
        point.remove_hooks("up")


def test_order_of_functions():
    model, ran = build("text"), []
    model.hook_embed.add_hook(lambda value, hook: ran.append("first"))
    model.hook_embed.add_hook(lambda value, hook: ran.append("before"), prepend=True)
    model(**text_inputs())
    assert ran == ["before", "first"]


def test_hooks_that_stay_until_reset():
    model, inputs = build("text"), text_inputs()
    clean = model(**inputs)
    model.run_with_hooks(
        **inputs, fwd_hooks=[("blocks.1.hook_resid_mid", in_place)], reset_hooks_end=False
    )
    assert not torch.equal(model(**inputs), clean)
    model.reset_hooks()
    assert torch.equal(model(**inputs), clean)


def test_a_model_call_inside_a_hook_owes_nothing_to_the_outer_call():
    model, inputs = build("wrapper"), media_inputs()
    other = text_inputs(2, 19, seed=5)

    def patch(value, hook):
        plain = model(**other, stop_at_layer=2)
        _, kept = model.run_and_store(
            **other, names_filter="blocks.0.hook_resid_post", stop_at_layer=1
        )
        assert plain.shape == value.shape
        return kept["blocks.0.hook_resid_post"]

    fired = []
    pairs = [
        ("blocks.2.hook_resid_post", patch),
        ("vision.hook_out", lambda value, hook: fired.append(hook.name)),
        ("hook_logits", lambda value, hook: fired.append(hook.name)),
    ]
    _, kept = model.run_and_store(**other, names_filter="blocks.0.hook_resid_post", stop_at_layer=1)
    logits = model.run_with_hooks(**inputs, fwd_hooks=pairs)
    assert fired == ["vision.hook_out", "hook_logits"]
    expected = model.run_with_hooks(
        **inputs, fwd_hooks=[(pairs[0][0], lambda value, hook: kept["blocks.0.hook_resid_post"])]
    )
    assert torch.equal(logits, expected)


# -- caches ---------------------------------------------------------------------------------------------


def test_a_cache_sees_the_edits_made_before_it_and_keeps_what_it_saw():
    model, inputs, name = build("text"), text_inputs(), "blocks.1.hook_resid_mid"
    _, clean = model.run_and_store(**inputs)
    with model.hooks(fwd_hooks=[(name, in_place)]):
        logits, kept = model.run_and_store(**inputs)
    torch.testing.assert_close(kept[name], edited(clean[name]), atol=0, rtol=0)
    assert torch.equal(kept["hook_logits"], logits)
    _, forward, _ = model.get_caching_hooks(name, cache=(first := {}))
    model.run_with_hooks(**inputs, fwd_hooks=[*forward, (name, in_place)])
    assert torch.equal(first[name], clean[name])
    manual = []
    model.run_with_hooks(
        **inputs, fwd_hooks=[(name, lambda value, hook: manual.append(value)), (name, in_place)]
    )
    assert torch.equal(manual[0], clean[name])


def test_a_snapshot_is_not_changed_by_what_the_caller_does_afterwards():
    model, inputs = build("no softcap, untied"), text_inputs()
    ids = inputs["input_ids"].clone()
    logits, kept = model.run_and_store(input_ids=ids)
    before = dict(model.run_and_store(input_ids=ids.clone())[1].items())
    ids.zero_()
    logits.zero_()
    stream = model(**inputs, stop_at_layer=1)
    out, above = model.run_and_store(resid=stream, start_at_layer=1, stop_at_layer=3)
    _, above_before = model.run_and_store(resid=stream.clone(), start_at_layer=1, stop_at_layer=3)
    before |= {f"above {name}": value for name, value in above_before.items()}
    stream.zero_()
    out.zero_()
    _, embedded = model.run_and_store(
        inputs_embeds=(embeds := model(**inputs, stop_at_layer=0)), names_filter="hook_embed"
    )
    assert embeds.abs().max() > 0
    embeds.zero_()
    assert embedded["hook_embed"].abs().max() > 0
    after = dict(kept.items()) | {f"above {name}": value for name, value in above.items()}
    assert set(after) == set(before)
    for name, value in after.items():
        assert torch.equal(value, before[name]), name


def test_a_buffer_that_a_hook_hands_out_again_and_again_is_copied():
    model, inputs, name = build("text"), text_inputs(), "blocks.1.hook_resid_mid"
    buffer, caches = torch.zeros(2, 11, 20), []
    for number in (1.0, 2.0):
        buffer.fill_(number)
        with model.hooks(fwd_hooks=[(name, lambda value, hook: buffer)]):
            caches.append(model.run_and_store(**inputs, names_filter=name)[1][name])
    assert caches[0].eq(1).all() and caches[1].eq(2).all()


def test_what_is_kept_where_and_how():
    model, inputs = build("wrapper"), media_inputs()
    _, whole = model.run_and_store(**inputs)
    _, meta = model.run_and_store(**inputs, device="meta")
    assert all(
        value.device.type == "meta" and value.shape == whole[name].shape
        for name, value in meta.items()
    )

    def last(value, axes):
        words = axes.split()
        return value.select(words.index("pos"), -1) if "pos" in words else value

    _, sliced = model.run_and_store(**inputs, pos_slice=last)
    for name, value in sliced.items():
        words = names.row_of(name).axes.split()
        expected = whole[name].select(words.index("pos"), -1) if "pos" in words else whole[name]
        assert torch.equal(value, expected), name
    with pytest.raises(ValueError, match="this run has 2 rows"):
        model.run_and_store(**inputs, remove_batch_dim=True)
    one = text_inputs(1)
    _, kept = model.run_and_store(**one)
    _, without = model.run_and_store(**one, remove_batch_dim=True, pos_slice=last)
    for name, value in without.items():
        assert torch.equal(value, last(kept[name], names.row_of(name).axes)[0]), name
    assert not any(value.requires_grad for value in kept.values())


def test_caching_hooks_stay_and_keep_the_latest_run():
    model = build("text")
    kept = model.add_caching_hooks("*resid_post")
    some = model.cache_some({}, ["layers.1.layer_mid"])
    every = model.cache_all({})
    for seed in (1, 2):
        model(**text_inputs(seed=seed))
    _, expected = model.run_and_store(**text_inputs(seed=2))
    assert set(kept) == {f"blocks.{i}.hook_resid_post" for i in range(4)}
    assert set(some) == {"blocks.1.hook_resid_mid"} and set(every) == set(model.matches(None))
    for name, value in (kept | some | every).items():
        assert torch.equal(value, expected[name])
    model.reset_hooks()
    assert model.list_hooks() == []


def test_both_spellings_are_kept_once_under_our_name():
    model = build("text")
    _, kept = model.run_and_store(
        **text_inputs(), names_filter=["layers.1.layer_mid", "blocks.-3.hook_resid_mid"]
    )
    assert set(kept) == {"blocks.1.hook_resid_mid"}


# -- copies of a model, and models of other kinds -------------------------------------------------------


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copied_model_is_whole_and_its_own(how):
    model, inputs = build("wrapper, shared"), media_inputs()
    model.add_hook("layers.1.layer_mid", in_place)  # by an alias, which a copy must carry as well
    hooked = model(**inputs)
    twin = how(model)
    assert torch.equal(twin(**inputs), hooked)
    assert [name for name, _, _ in twin.list_hooks()] == ["layers.1.layer_mid"]
    twin.reset_hooks()
    model.reset_hooks()
    clean = model(**inputs)
    assert torch.equal(twin(**inputs), clean) and not torch.equal(clean, hooked)
    for name, point in twin.hook_dict.items():
        assert twin.get_submodule(name) is point and model.hook_dict[name] is not point
    with torch.no_grad():
        twin.vision.w_patch.mul_(3)
        twin.blocks[0].layer_scalar.mul_(3)
    _, kept = twin.run_and_store(
        **inputs, names_filter=["video.hook_patch_embed", "blocks.0.hook_resid_sum"]
    )
    _, old = model.run_and_store(
        **inputs, names_filter=["video.hook_patch_embed", "blocks.0.hook_resid_sum"]
    )
    assert not torch.equal(
        kept["video.hook_patch_embed"], old["video.hook_patch_embed"]
    )  # shares the copy's weights
    assert torch.equal(model(**inputs), clean)


class Doubler(HookedRootModule):
    """Any module can be hooked."""

    def __init__(self):
        super().__init__()
        self.linear, self.hook_in, self.hook_out = nn.Linear(3, 3), HookPoint("row d"), HookPoint()
        self.setup()

    def forward(self, x):
        return self.hook_out(self.linear(self.hook_in(x)))


def test_any_module_can_be_hooked():
    model, x = Doubler(), torch.randn(2, 3)
    assert set(model.hook_dict) == {"hook_in", "hook_out"} and set(model.mod_dict) == {
        *model.hook_dict,
        "linear",
    }
    out, kept = model.run_and_store(x)
    assert torch.equal(kept["hook_in"], x) and torch.equal(kept["hook_out"], out)
    assert torch.equal(
        model.run_with_hooks(x, fwd_hooks=[("hook_out", lambda value, hook: value * 2)]), out * 2
    )
    with pytest.raises(HookNameError, match="Closest: 'hook_in'"):
        model.add_hook("hook_im", nothing)
    with pytest.raises(TypeError, match="is no name"):
        model.add_hook(("resid_post", 3), nothing)
    model.check_hooks_to_add(model.hook_in, "hook_in", nothing)
    model.check_and_add_hook(model.hook_in, "hook_in", nothing)
    assert len(model.list_hooks()) == 1
    with pytest.raises(HookNameError, match="not this point"):
        model.check_and_add_hook(model.hook_in, "hook_out", nothing)


class Forgetful(Doubler):
    """Lists a point that never fires."""

    def forward(self, x):
        return self.linear(self.hook_in(x))


def test_a_listed_point_that_never_fires_is_an_error():
    model, x = Forgetful(), torch.randn(2, 3)
    for call in (
        lambda: model.run_with_hooks(x, fwd_hooks=[("hook_out", nothing)]),
        lambda: model.run_and_store(x, names_filter="hook_out"),
    ):
        with pytest.raises(HookNameError, match="'hook_out' did not fire"):
            call()
    assert set(model.run_and_store(x)[1]) == {"hook_in"}


def test_windows_are_shorter_than_the_prompts_here():
    assert (
        min(text_inputs()["input_ids"].shape[1], media_inputs()["input_ids"].shape[1]) > 2 * WINDOW
    )
