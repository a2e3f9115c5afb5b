"""Results as grids, tables, figures and files."""

import numpy as np
import pandas as pd
import pytest
import torch
from small import hooked, inputs_for

from lens_gemma4 import HookedModel, SweepResult, ablate, kl_to_clean, logit_difference, patch

IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10], [2, 15, 16, 17, 18, 19, 11]])
ASK = logit_difference(7, 9)


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def same(one, other):
    assert one.names == other.names and one.at == other.at and one.metric == other.metric
    assert torch.equal(one.values, other.values) and torch.equal(one.baseline, other.baseline)
    assert one.values.dtype == other.values.dtype
    assert one.tokens == other.tokens and one.plan == other.plan
    assert (one.source is None) == (other.source is None)
    assert one.source is None or torch.equal(one.source, other.source)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_saved_result_comes_back_whole(dtype, tmp_path):
    model = hooked("shared, own values", dtype)
    for i, found in enumerate(
        [
            ablate(model, IDS, ASK),
            ablate(model, IDS, ASK, units="kv_heads", positions="each", mode="mean"),
            patch(model, IDS, IDS.flip(0), ASK),
            ablate(model, IDS, ASK, units=["L0H1", ("L0H0", "2_mlp_out"), "1_block"]),
        ]
    ):
        path = tmp_path / f"{i}.parquet"
        found.save(path)
        same(SweepResult.load(path), found)
        first = path.read_bytes()
        found.save(path)
        assert path.read_bytes() == first  # the same bytes every time
    frame = pd.read_parquet(path)  # anybody's reader takes it
    assert list(frame["variant"].unique()) == found.names
    assert np.allclose(frame["effect"], frame["value"] - frame["baseline"])


def test_a_file_says_what_it_takes_to_do_it_again(tmp_path):
    model = HookedModel.from_pretrained("tiny")
    ids = [model.to_single_token(word) for word in (" Paris", " Rome")]
    found = ablate(
        model, "The capital of France is", logit_difference(*ids), mode="mean", per_position=False
    )
    found.save(tmp_path / "a.parquet")
    plan = SweepResult.load(tmp_path / "a.parquet").plan
    assert plan["checkpoint"] == model.cfg.model_name and len(plan["config"]) == 16
    assert plan["prompts"] == model.to_tokens("The capital of France is").tolist()
    assert plan["dtype"] == str(model.dtype).removeprefix("torch.")
    assert plan["versions"]["torch"] == torch.__version__
    assert plan["arguments"]["mode"] == "mean" and plan["arguments"]["units"] == "heads"
    (asked,) = plan["metrics"].values()
    assert asked["answer"], asked["versus"] == ids
    tokens = SweepResult.load(tmp_path / "a.parquet").tokens
    assert tokens == [model.to_str_tokens("The capital of France is")]


def test_another_parquet_file_is_refused(tmp_path):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="holds no sweep's result"):
        SweepResult.load(tmp_path / "other.parquet")


def test_maps_have_their_axes(model):
    found = ablate(model, IDS, ASK, positions="each")
    cfg = model.cfg
    assert {n: len(ticks) for n, ticks in found.axes.items()} == {
        "layer": cfg.n_layers,
        "head": cfg.n_heads,
        "pos": 7,
    }
    grid = found.grid()
    i = found.names.index("L2H1 @ 5")
    assert grid[2, 1, 5] == found.mean()[i]
    assert torch.equal(found.grid(found.values[:, 0])[2, 1, 5], found.values[i, 0])
    frame = found.to_dataframe()
    row = frame[
        (frame["layer"] == 2) & (frame["head"] == 1) & (frame["pos"] == 5) & (frame["prompt"] == 1)
    ]
    assert row["value"].item() == found.values[i, 1].item() and row["variant"].item() == "L2H1 @ 5"
    figure = found.plot().to_dict()["data"][0]
    assert len(figure["z"]) == cfg.n_layers * cfg.n_heads


def test_blocks_with_fewer_units_leave_cells_empty():
    model = hooked("shared")  # full blocks have one key/value head, sliding ones two
    grid = ablate(model, IDS, ASK, units="kv_heads").grid()
    sizes = [layer.n_key_value_heads for layer in model.cfg.layers]
    assert grid.isnan().sum().item() == sum(max(sizes) - size for size in sizes) > 0
    assert not grid[:, 0].isnan().any()


def test_how_much_of_the_way_a_patch_goes(model):
    one = patch(model, IDS[:1], IDS[1:], ASK, units="resid_pre", positions="all")
    assert one.recovered()[0].item() == pytest.approx(1.0, abs=1e-12)
    assert torch.allclose(one.source, ablate(model, IDS[:1], ASK).baseline)
    noise = patch(model, IDS[:1], IDS[1:], ASK, positions="all", direction="noise")
    assert noise.baseline.item() == pytest.approx(one.source.item())
    with pytest.raises(ValueError, match="only `patch`"):
        ablate(model, IDS, ASK).recovered()
    for pair in (
        (IDS[:1], IDS[:1]),
        (IDS, IDS.flip(0)),
    ):  # the same run; on average the same metric
        with pytest.raises(ValueError, match="nothing to recover"):
            patch(model, *pair, ASK).recovered()


def test_intervals_hold_the_mean_and_shrink_with_agreement(model):
    found = ablate(model, IDS, ASK)
    low, high = found.interval()
    assert (low <= found.mean() + 1e-12).all() and (found.mean() <= high + 1e-12).all()
    twice = ablate(model, IDS[:1].expand(3, -1), ASK)
    low, high = twice.interval()
    assert (high - low).abs().max() < 1e-9
    many = torch.randint(3, 80, (8, 7), generator=torch.Generator().manual_seed(0))
    found = ablate(model, many, ASK, units="mlp")
    low, high = found.interval(level=0.9, draws=4000)
    spread = found.effect.std(1, unbiased=False) / 8**0.5  # of a mean of eight, resampled
    assert ((high - low) / (2 * 1.645 * spread)).sub(1).abs().max() < 0.2
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match="a level lies"):
            found.interval(level=level)


def test_image_patches_are_named_by_where_they_are():
    model = hooked("wrapper")
    inputs = inputs_for("wrapper", torch.float64)
    found = ablate(model, None, ASK, units="patches", **inputs)
    assert found.names[0] == "image[0] (0, 0)" and {"image", "x", "y"} == set(found.axes)
    assert (inputs["input_ids"] == model.cfg.image_token_id).any()
    assert found.plot().to_dict()["data"]
    whole = ablate(model, None, [ASK, kl_to_clean()], units="images", **inputs)
    assert set(whole[ASK.name].axes) == {"image"}


def test_a_short_word_for_a_result(model):
    text = repr(ablate(model, IDS, ASK))
    assert "24 variants" in text and "2 prompt" in text and len(text) < 200
