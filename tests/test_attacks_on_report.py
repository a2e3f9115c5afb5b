"""Reports and scores that are asked for in ways that no example asks."""

from __future__ import annotations

import pytest
import torch

from lens_gemma4 import HookedModel, ground_truth, outputs
from lens_gemma4.report import report, run

PROMPT = "The capital of France is"


# -- the report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("answer", [None, " Paris"])
def test_a_run_that_overflowed_has_no_ranks(bad, answer):
    """No number is larger than nan, so that every token would be told to be the first."""
    model = HookedModel.from_pretrained("tiny")
    with torch.no_grad():
        model.blocks[4].mlp.w_out[0, 0] = bad
    logits = model(PROMPT)[0, -1]
    assert logits.isnan().all() and int((logits > logits[0]).sum()) == 0
    with pytest.raises(ValueError, match=r"1544 of 1544 logits .* are not finite .*check_finite"):
        report(model, PROMPT, answer)
    with pytest.raises(FloatingPointError, match=r"blocks\.4\.mlp"):  # as the error advises
        model(PROMPT, check_finite=True)


def test_half_a_character_is_refused_before_the_work(tiny_model, tmp_path):
    """What Python makes of an argument that is not UTF-8."""
    typed = b"a\xff is".decode(errors="surrogateescape")
    for call in (
        lambda: report(tiny_model, typed),
        lambda: run(typed, output=tmp_path / "page.html"),
    ):
        with pytest.raises(ValueError, match=r"half a character, '\\udcff'"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_several_prompts_are_refused(tiny_model):
    with pytest.raises(TypeError):
        report(tiny_model, [PROMPT, PROMPT])


def test_the_error_names_the_hooked_point_alone(tiny_model):
    with (
        tiny_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda value, hook: None)]),
        pytest.raises(ValueError, match=r"has hooks, on 'blocks\.0\.hook_resid_pre' first"),
    ):
        report(tiny_model, PROMPT)


def test_the_page_says_which_mean_it_took(tiny_model):
    """That of `test_the_ablation_map_is_a_run_without_each_head`."""
    page = report(tiny_model, PROMPT, ablation="mean").html()
    assert "its mean over the prompt (without the first token)" in page


def test_writing_a_page_touches_no_other_file(tmp_path):
    other = tmp_path / "page.html.part"
    other.write_text("somebody's own")
    outputs.write(tmp_path / "page.html", "<html>")
    assert other.read_text() == "somebody's own"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["page.html", "page.html.part"]


def test_an_interrupted_write_leaves_the_old_page_alone(tmp_path):
    page = tmp_path / "page.html"
    outputs.write(page, "old")
    with pytest.raises(UnicodeEncodeError):
        outputs.write(page, "new \ud800")
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


# -- scores against the ground truth ------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth() -> ground_truth.GroundTruth:
    return ground_truth.load("tiny")


def test_a_map_of_equals_scores_what_luck_does(truth):
    """Not what the order of the blocks does, which favours tasks that early blocks solve."""
    by_order = []
    for task in truth.values():
        mask = task.truth()
        for value in (0.0, 1.0):
            got = ground_truth.score(torch.full_like(mask, value), task)
            assert got.auc == 0.5
            assert got.precision == pytest.approx(got.chance)
        counted = mask[~mask.isnan()]
        by_order.append(counted[: got.k].mean().item() - got.chance)
    assert max(map(abs, by_order)) > 0.2


def test_equals_at_the_end_of_the_first_count_by_luck(truth):
    """One head that matters is found, all others are equal."""
    task = truth["code"]
    mask = task.truth()
    found = torch.zeros_like(mask)
    found[task.heads[0].layer, task.heads[0].head] = -1
    got = ground_truth.score(found, task)
    n_yes, n_no = int((mask == 1).sum()), int((mask == 0).sum())
    luck = (n_yes - 1) * (n_yes - 1) / (n_yes - 1 + n_no)
    assert got.precision == pytest.approx((1 + luck) / n_yes)
    assert ground_truth.score(mask.nan_to_num(), task).precision == 1  # a clear cut is as before


def test_the_tasks_own_heads_can_be_scored(truth):
    for task in truth.values():
        assert ground_truth.score(task.heads, task).precision == 1.0
        assert ground_truth.score([head.name for head in task.heads], task).precision == 1.0


@pytest.mark.parametrize("found", [[(3.7, 2.2)], [[0.1, 0.9]], [("3", "2")], ["L3"], "L3H2"])
def test_heads_are_whole_numbers(truth, found):
    with pytest.raises(ValueError, match="a head is"):
        ground_truth.score(found, truth["code"])


@pytest.mark.parametrize("count", [0, -1])
def test_some_prompts_are_at_least_one(truth, count):
    """-1 left the last prompt out."""
    with pytest.raises(ValueError, match="asks for no prompt; code has 48"):
        truth["code"].some(count)
    assert len(truth["code"].some(100).prompts) == 48
