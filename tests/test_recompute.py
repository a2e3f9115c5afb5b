"""Gradients with blocks computed once more on the way back: the same to the bit, with any hooks, and next to no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import build, hooked, inputs_for, text_inputs
from torch import Tensor

F64 = torch.float64
KINDS = ["text", "wrapper", "shared", "wrapper, shared"]


def gradients(
    model: Any, hooks: list[tuple[str, Any]], points: list[str], **inputs: Tensor
) -> dict:
    """Gradients of the last logits at some points, asked for after the hooks are gone."""
    found: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: Any) -> None:
        found[hook.name] = grad.clone()

    logits = model.run_with_hooks(
        **inputs, fwd_hooks=hooks, bwd_hooks=[(point, keep) for point in points]
    )
    logits[:, -1].pow(2).sum().backward()
    return found | {"logits": logits.detach()}


def edits(model: Any) -> list[tuple[str, Any]]:
    """Edits inside blocks, in place and returned, and one that only looks."""
    seen: list[Tensor] = []

    def shift(value: Tensor, hook: Any) -> Tensor:
        return value + torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)

    def double(value: Tensor, hook: Any) -> None:
        value[:, 1::2] *= 2

    def look(value: Tensor, hook: Any) -> None:
        seen.append(value)

    last = model.cfg.n_layers - 1
    return [
        ("blocks.1.attn.hook_q", shift),
        ("blocks.1.hook_resid_mid", double),
        (f"blocks.{last}.attn.hook_pattern", double),
        (f"blocks.{last}.mlp.hook_pre", shift),
        ("blocks.0.ln1.hook_scale", look),
        ("blocks.0.attn.hook_pattern", look),
    ]


@pytest.mark.parametrize("hooked_points", ["none", "edits"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind, hooked_points):
    model, inputs = build(kind, F64, seed=4), inputs_for(kind, F64)
    points = [
        "hook_embed",
        *(
            f"blocks.{i}.{p}"
            for i in range(model.cfg.n_layers)
            for p in ("hook_resid_pre", "attn.hook_z", "mlp.hook_post", "attn.hook_rot_q")
        ),
    ]
    hooks = edits(model) if hooked_points == "edits" else []
    want = gradients(model, hooks, points, **inputs)
    model.gradient_checkpointing_enable()
    got = gradients(model, hooks, points, **inputs)
    assert sorted(got) == sorted(want) and len(want) == len(points) + 1
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        assert value.abs().max() > 0
    model.gradient_checkpointing_disable()
    if hooks:
        plain = gradients(model, [], points, **inputs)
        assert not torch.equal(plain["hook_embed"], want["hook_embed"])


def test_a_cache_with_gradients_is_the_same_and_is_not_written_into_on_the_way_back():
    model, ids = hooked("shared"), text_inputs(2, 11)["input_ids"]
    _, want = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter=None)
    model.gradient_checkpointing_enable()
    _, got = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter=None)
    assert set(got.keys()) == set(want.keys())
    for name in want:
        assert torch.equal(got[name], want[name]), name
    model.requires_grad_(True)
    loss, cache = model.run_with_cache(ids, return_type="loss")
    resid = cache["blocks.1.hook_resid_mid"]
    pattern = cache["blocks.1.attn.hook_pattern"].clone()
    resid.zero_()
    loss.backward()
    assert not resid.any()
    assert torch.equal(cache["blocks.1.attn.hook_pattern"], pattern)


def test_hooks_that_come_or_go_before_the_way_back_change_nothing():
    model, ids = build("text", F64), text_inputs()["input_ids"]
    points = ["hook_embed"]
    want = gradients(model, edits(model), points, input_ids=ids)
    model.gradient_checkpointing_enable()
    found: list[Tensor] = []
    logits = model.run_with_hooks(
        ids,
        fwd_hooks=edits(model),
        bwd_hooks=[("hook_embed", lambda grad, hook: found.append(grad.clone()))],
    )
    called: list[str] = []

    def late(value: Tensor, hook: Any) -> Tensor:
        called.append(hook.name)
        return value * 0

    with model.hooks(fwd_hooks=[("blocks.*.hook_attn_out", late)]):
        model(ids)
        called.clear()
        logits[:, -1].pow(2).sum().backward()
    assert called == []
    assert torch.equal(found[0], want["hook_embed"])
    assert model.list_hooks() == []


def test_a_hook_that_edits_is_told_the_same_positions_again():
    model, ids = build("text", F64), text_inputs()["input_ids"]
    model.gradient_checkpointing_enable()
    told = []

    def edit(value: Tensor, hook: Any) -> Tensor:
        told.append(hook.positions)
        return value + 1

    model.run_with_hooks(
        ids,
        fwd_hooks=[("blocks.0.attn.hook_z", edit)],
        bwd_hooks=[("hook_embed", lambda g, hook: None)],
    ).sum().backward()
    assert told == [range(11), range(11)]


def kept_for_the_way_back(model: Any, ids: Tensor) -> int:
    """Numbers that autograd keeps."""
    kept: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model.run_with_hooks(ids, bwd_hooks=[("hook_embed", lambda grad, hook: None)])
    weights = {w.data_ptr() for _, w in model.named_weights()}
    return sum(v.numel() for at, v in kept.items() if at not in weights)


def test_only_what_enters_a_block_is_kept():
    model = build("text", seed=1)
    ids = text_inputs(1, 60)["input_ids"]
    plain = kept_for_the_way_back(model, ids)
    model.gradient_checkpointing_enable()
    head = 60 * 101 + 60 * 20  # of the head and its norm
    assert kept_for_the_way_back(model, ids) - head < (plain - head) / 15


def test_frozen_weights_get_no_gradient():
    model, ids = hooked("wrapper"), text_inputs()["input_ids"]
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.run_with_hooks(
            ids, return_type="loss", bwd_hooks=[("hook_embed", lambda grad, hook: None)]
        ).backward()
        assert all(weight.grad is None for _, weight in model.named_weights())
    model.requires_grad_(True)
    model(ids, return_type="loss").backward()
    assert all(w.grad is not None for n, w in model.named_parameters() if n.startswith("blocks"))


def test_a_run_that_a_hook_starts_is_not_kept_the_second_time_either():
    model = hooked("text")
    ids, other = text_inputs(1, 9)["input_ids"], text_inputs(1, 9, 5)["input_ids"]

    def run_another(value, hook):
        model(other, stop_at_layer=1)

    model.gradient_checkpointing_enable()
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", run_another)]):
        _, cache = model.run_with_cache(ids, return_type="loss", incl_bwd=True)
    _, want = model.run_with_cache(ids)
    for layer in range(2):
        assert (cache["resid_post", layer] - want["resid_post", layer]).abs().max() < 1e-10
