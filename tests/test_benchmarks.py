"""The measurements measure: they see what they should find, and refuse what they should refuse."""

from __future__ import annotations

import itertools

import common
import forward
import loading
import pytest


def test_ratios_are_of_one_round_each():
    """A clock that slows down by a half each round moves no ratio."""
    costs = {"base": 2.0, "twice": 4.0}
    now, speed, count = 0.0, 1.0, itertools.count()

    def call(name):
        def run():
            nonlocal now, speed
            now += costs[name] * speed
            if next(count) % 4 == 3:  # both calls of both kinds are behind: a round
                speed *= 1.5

        return run

    calls = {name: call(name) for name in costs}
    found = common.ratios(calls, "base", rounds=6, clock=lambda: now)
    assert found["base"] == (1, 1, 1)
    assert found["twice"] == pytest.approx((2, 2, 2))


def test_a_bound_holds_in_two_of_three_runs():
    case = ("small", 32)
    bound = forward.BOUNDS[case]["forward"]

    def runs(*medians):
        return [{"forward": common.Spread(0, median, 2)} for median in medians]

    assert forward.table(case, runs(bound, bound, bound + 1))[1]
    assert not forward.table(case, runs(bound, bound + 0.01, bound + 1))[1]


def test_the_forward_benchmark_times_every_call():
    pair = common.text_pair(common.TEXT_SMALL)
    found = forward.measure(*pair, 8, rounds=1, clock=forward.CLOCKS["process"])
    assert set(found) >= set(forward.BOUNDS["mid", 1024])
    assert all(spread.median > 0 for spread in found.values())


def test_the_forward_benchmark_refuses_unlike_models():
    hf_model, model = common.text_pair(common.TEXT_SMALL)
    model.blocks[0].layer_scalar = model.blocks[0].layer_scalar * 1.01
    with pytest.raises(AssertionError, match="differ"):
        forward.measure(hf_model, model, 8, rounds=1, clock=forward.CLOCKS["process"])


def test_squares_are_left_out_and_nothing_else():
    _, model = common.text_pair(common.TEXT_SMALL)
    kept = forward.all_but_squares(model)
    left_out = {name.split(".")[-1] for name in model.hook_dict if not kept(name)}
    assert left_out == {"hook_attn_scores", "hook_pattern", "hook_result"}


def test_mapped_weights_add_little_memory(tmp_path):
    """Under 5 % of the file; a load in another dtype has to copy, and is seen to."""
    size = loading.write_checkpoint(loading.SHAPE_SMALL, tmp_path)
    assert loading.in_a_process("ours", tmp_path)["peak anonymous"] < loading.ALLOWED_SHARE * size
    assert loading.in_a_process("ours, widened", tmp_path)["peak anonymous"] > size
