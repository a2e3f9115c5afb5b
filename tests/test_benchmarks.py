"""The measurements measure: they see what they should find, and refuse what they should refuse."""

from __future__ import annotations

import io
import itertools
import json

import common
import forward
import lens
import loading
import pytest
import sweep as sweep_benchmark
import torch


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


def test_memory_that_was_given_back_is_still_seen():
    out, rise = lens.rise_mb(lambda: torch.ones(20 * 2**20).sum().item())
    assert out == 20 * 2**20 and 75 < rise < 120
    assert lens.rise_mb(lambda: torch.ones(1))[1] < 20


def test_the_ways_of_the_lens_benchmark_answer_alike():
    shape = lens.SHAPES["small"]
    ours, others = (lens.our_way(way, shape)() for way in ("ours", "one-shot"))
    assert ours.shape == (shape["num_hidden_layers"], lens.POSITIONS, lens.TOP)
    assert (ours[..., 0] == others[..., 0]).double().mean() > 0.995
    last = lens.our_way("ours, last", shape)()
    assert torch.equal(last[:, 0, 0], ours[:, -1, 0])


class Told:
    """A worker of which nothing but its answers is there."""

    def __init__(self, way, top, rise=1.0):
        self.way, self.first = way, {"top": top, "rise": rise}


def test_ways_that_answer_otherwise_are_not_compared():
    top = torch.arange(12).view(3, 4).tolist()
    lens.agree([Told("ours", top), Told("nnterp", top), Told("nnterp, last", [[3], [7], [11]])])
    with pytest.raises(AssertionError, match="nnterp agrees"):
        lens.agree([Told("ours", top), Told("nnterp", top[::-1])])


def test_the_lens_bound_is_on_nnterps_own_way():
    running = [Told("ours", []), Told("nnterp", [], 4.0), Told("nnterp, lean", [], 2.0)]
    times = {"ours": [1.0, 1.2, 3.0], "nnterp": [2.0, 2.0, 2.0], "nnterp, lean": [1.0, 1.0, 1.0]}
    lines, held = lens.ratios(times, running)
    assert held and len(lines) == 2
    assert "time 0.600 (rounds 0.500 to 1.500), memory 0.250; bound 0.7: ok" in lines[0]
    times["ours"] = [1.0, 1.5, 3.0]
    lines, held = lens.ratios(times, running)
    assert not held and "ABOVE" in lines[0]


def test_a_worker_measures_once_and_times_when_told(monkeypatch, capsys):
    monkeypatch.setattr(lens.sys, "stdin", io.StringIO("\n\n"))
    lens.work("ours", "small", "process")
    first, *times = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(first) == {"rise", "top", "versions"}
    assert len(times) == 2 and all(seconds > 0 for seconds in times)


@torch.no_grad()
def test_the_sweep_benchmark_compares_what_is_equal():
    _, model = common.text_pair(common.TEXT_SMALL)
    found = sweep_benchmark.measure(model, 6, rounds=1)
    assert set(found) == set(sweep_benchmark.BOUNDS)
    for variants, low, middle, _, off in found.values():
        assert variants >= 24 and 0 < low <= middle and off < 1e-2
