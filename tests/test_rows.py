"""Rows of a pattern are those of the whole one, and the whole one is not made."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import small
import torch
from test_local import Largest

from lens_gemma4 import HookNameError, rows
from lens_gemma4.masks import Mask
from lens_gemma4.rows import attention_rows

HEADS, POSITIONS = [3, 0], [2, -1, 5]


def off(model, inputs, scores=False, **asked):
    """How far chosen rows of every block are from those of a run that keeps all."""
    _, cache = model.run_with_cache(inputs)
    name = "attn_scores" if scores else "pattern"
    found = [
        attention_rows(
            model, inputs, layer=i, heads=HEADS, positions=POSITIONS, scores=scores, **asked
        )
        - cache[name, i][:, HEADS][:, :, POSITIONS]
        for i in range(model.cfg.n_layers)
    ]
    return max(one.abs().max().item() for one in found)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "local"])
@pytest.mark.parametrize("kind", small.KINDS)
def test_rows_are_those_of_the_whole(kind, implementation, scores):
    model = small.hooked(kind)
    model.set_attn_implementation(implementation)
    assert off(model, small.inputs_for(kind, torch.float64), scores) <= 1e-12


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_under_padding(side, implementation):
    """Rows that see no key are as the run has them: empty, or in eager spread over all."""
    model = small.hooked("text")
    model.set_attn_implementation(implementation)
    assert off(model, small.padded_inputs(side)) <= 1e-12


@pytest.mark.parametrize(
    ("without", "inputs"),
    [
        ({"window": None}, small.text_inputs()),
        ({"window": small.WINDOW + 1}, small.text_inputs()),
        ({"padding": None}, small.padded_inputs("left")),
        ({"images": None}, small.media_inputs(dtype=torch.float64)),
    ],
    ids=["window", "window off by one", "padding", "images"],
)
def test_rows_under_another_rule_are_not(without, inputs, monkeypatch):
    model = small.hooked("wrapper" if "pixel_values" in inputs else "text")
    assert off(model, inputs) <= 1e-12

    def other(*args):
        mask = rows_of(*args)
        return Mask(replace(mask.rule, **without), mask.queries, mask.keys, mask.rows, mask.total)

    rows_of = rows._mask_of_rows
    monkeypatch.setattr(rows, "_mask_of_rows", other)
    assert off(model, inputs) > 1e-3


def test_what_is_asked_keeps_its_axes():
    model, inputs = small.hooked("text"), small.text_inputs(2, 11)
    _, cache = model.run_with_cache(inputs)
    for heads, positions, shape in (
        (None, None, [2, 4, 11, 11]),
        (-1, -1, [2, 1, 1, 11]),
        ([1, 1], (2, 5), [2, 2, 3, 11]),
        (torch.tensor([2]), slice(None, None, 5), [2, 1, 3, 11]),
        (0, [], [2, 1, 0, 11]),
    ):
        found = attention_rows(model, inputs, layer=-1, heads=heads, positions=positions)
        assert list(found.shape) == shape
    torch.testing.assert_close(found, cache["pattern", 3][:, :1, :0], atol=1e-12, rtol=0)
    whole = attention_rows(model, inputs, layer=-1)
    torch.testing.assert_close(whole, cache["pattern", 3], atol=1e-12, rtol=0)


def test_text_goes_in_as_everywhere(tiny_model):
    _, cache = tiny_model.run_with_cache("The capital of France is")
    found = attention_rows(tiny_model, "The capital of France is", layer=2, positions=-1)
    torch.testing.assert_close(found, cache["pattern", 2][:, :, -1:], atol=1e-6, rtol=0)


def test_hooks_that_are_set_are_in_force_and_stay():
    model, inputs = small.hooked("text"), small.text_inputs()
    plain = attention_rows(model, inputs, layer=2)
    edits = [("blocks.2.attn.hook_rot_q", lambda q, hook: q.roll(1, 1))]
    with model.hooks(fwd_hooks=edits):
        assert off(model, inputs) <= 1e-12
        assert (attention_rows(model, inputs, layer=2) - plain).abs().max() > 1e-3
        before = model.list_hooks()
        attention_rows(model, inputs, layer=2)
        assert model.list_hooks() == before
    assert torch.equal(attention_rows(model, inputs, layer=2), plain)
    assert not model.list_hooks()


def test_an_edit_of_keys_stays_in_the_lender():
    """Block 5 borrows from block 2: its rows show its own keys."""
    model, inputs = small.hooked("shared"), small.text_inputs()
    edits = [("blocks.2.attn.hook_rot_k", lambda k, hook: k.roll(1, 1))]
    with model.hooks(fwd_hooks=edits):
        assert off(model, inputs) <= 1e-12


def test_no_square_is_made():
    model, inputs = small.hooked("text"), small.text_inputs(1, 800)
    model.set_attn_implementation("local")
    with Largest() as largest:
        attention_rows(model, inputs, layer=3, heads=[0, 1], positions=[5, 799])
    assert largest.numel < 800 * 800 / 10


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"layer": 4}, IndexError, "no block 4"),
        ({"layer": 0, "heads": 4}, IndexError, "no head 4: there are heads 0 to 3"),
        ({"layer": 0, "heads": [0, -5]}, IndexError, "no head"),
        ({"layer": 0, "positions": 11}, IndexError, "no position 11: there are positions 0 to 10"),
        ({"layer": 0, "kv_cache": object()}, ValueError, "takes no kv_cache"),
        ({"layer": 0, "start_at_layer": 1}, ValueError, "takes no start_at_layer"),
        ({"layer": 0, "posiitons": 1}, TypeError, "posiitons"),
    ],
)
def test_what_cannot_be_asked(asked, error, says):
    model = small.hooked("text")
    with pytest.raises(error, match=says):
        attention_rows(model, small.text_inputs(), **asked)
    assert not model.list_hooks()


def test_a_skipped_block_has_no_rows():
    model = small.hooked("text")
    with model.skip_layers(1, 1), pytest.raises(HookNameError, match="block 1 is skipped"):
        attention_rows(model, small.text_inputs(), layer=1)


def test_the_examples_run():
    ran = doctest.testmod(rows)
    assert ran.attempted and not ran.failed
