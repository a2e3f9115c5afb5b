"""Figures over pictures: every number lies over the patch that it is of, and is the run's."""

from __future__ import annotations

import base64
import doctest
import importlib
import io
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from test_plots import Page
from torch import Tensor

from lens_gemma4 import (
    HookedModel,
    ablate,
    attribution_ablate,
    logit_difference,
    plots,
)
from lens_gemma4.attribution import Target, by_source, by_token
from lens_gemma4.pictures import (
    ablation_over,
    as_seen,
    attention_over,
    attribution_over,
    lens_grid,
    mask_picture,
    over_picture,
    save_png,
)

SIZE = (480, 288)  # of 10 x 6 patches to the pixel at a budget of 70: nothing is resampled
COLUMNS, ROWS = 10, 6


def noise(size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(values)


PICTURE = noise()


def seen(model: HookedModel, *texts: str, images: list[Image.Image], **more):
    """A prepared call; `#` in a text stands for an image."""
    prompts = [text.replace("#", model.image_token) for text in texts]
    return model.prepare(prompts, images=images, image_tokens=70, **more)


@pytest.fixture(scope="module")
def run(tiny_model):
    """One picture before some text: inputs, span, logits, cache."""
    inputs = seen(tiny_model, "# The capital of France is", images=[PICTURE])
    (span,) = inputs.spans
    logits, cache = tiny_model.run_with_cache(inputs)
    return inputs, span, logits, cache


@pytest.fixture(scope="module")
def batch(tiny_model):
    """Two prompts, the first with two pictures, the second padded on the left."""
    pictures = [PICTURE, noise((200, 300), 1), noise((96, 48), 2)]
    inputs = seen(tiny_model, "The # capital # of", "# is", images=pictures)
    _, cache = tiny_model.run_with_cache(inputs)
    return pictures, inputs, cache


def field(figure, layer: int = -1) -> np.ndarray:
    """A figure's numbers, `[row column]`."""
    return np.array([list(row) for row in figure.data[layer].z], dtype=float)


def by_patch(figure, span, layer: int = -1) -> Tensor:
    """A figure's numbers, in the tokens' order."""
    x, y = span.grid.unbind(1)
    return torch.from_numpy(field(figure, layer))[y, x]


def ground(figure) -> Image.Image:
    """The picture inside a figure."""
    (image,) = figure.layout.images
    return Image.open(io.BytesIO(base64.b64decode(image.source.split(",")[1])))


# -- where a number lies ------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "y"), [(0, 0), (9, 0), (0, 5), (7, 2)])
def test_the_patch_that_was_painted_is_where_the_figure_says(tiny_model, x, y):
    """What the embedder makes of two pictures that differ in one patch differs in that patch's field, over the painted pixels."""
    values = np.array(PICTURE)
    values[48 * y : 48 * y + 48, 48 * x : 48 * x + 48] = 0
    painted = Image.fromarray(values)
    features = []
    for picture in (PICTURE, painted):
        inputs = seen(tiny_model, "#", images=[picture])
        _, cache = tiny_model.run_with_cache(inputs, names_filter="vision.hook_image_features")
        features.append(cache["vision.image_features"])
    (span,) = inputs.spans
    moved = (features[0] - features[1]).norm(dim=1)
    figure = over_picture(painted, span, moved, centred=False)
    assert field(figure).shape == (ROWS, COLUMNS)
    assert [tuple(place) for place in np.argwhere(field(figure))] == [(y, x)]
    (trace,) = figure.data
    left, right, top, bottom = *trace.x[x : x + 2], *trace.y[y : y + 2]
    assert (left, right, top, bottom) == (48 * x, 48 * x + 48, 48 * y, 48 * y + 48)
    difference = np.array(PICTURE).astype(int) - np.array(painted)
    rows, columns = np.nonzero(difference.any(-1))
    assert (columns.min(), columns.max() + 1) == (left, right)
    assert (rows.min(), rows.max() + 1) == (top, bottom)
    assert f"({x}, {y})" in trace.customdata[y][x]
    assert f"pixels {left:g} to {right:g}, {top:g} to {bottom:g}" in trace.customdata[y][x]


def test_the_picture_fills_the_axes_first_row_on_top(run):
    span = run[1]
    figure = over_picture(PICTURE, span, torch.arange(60.0), grey=False)
    assert tuple(figure.layout.yaxis.range) == (288, 0) and tuple(figure.layout.xaxis.range) == (
        *(0, 480),
    )
    (image,) = figure.layout.images
    assert (image.x, image.y, image.sizex, image.sizey) == (0, 0, 480, 288)
    assert image.sizing == "stretch" and image.layer == "below" and image.xref == "x"
    assert np.array_equal(np.array(ground(figure)), np.array(PICTURE))
    grey = np.array(ground(over_picture(PICTURE, span, torch.arange(60.0))))
    assert grey.ndim == 2 and grey.min() >= 90  # pale, so that colours show over it
    assert field(figure)[0].tolist() == list(range(10))  # tokens go along rows, from the top
    wide = over_picture(PICTURE.resize((4800, 2880)), unsized(span), torch.arange(60.0))
    assert ground(wide).size == (1024, 614)  # a figure keeps no more
    assert wide.data[0].x[-1] == 4800 and wide.layout.images[0].sizey == 2880


def unsized(span):
    """The span as of a processor's output, which knows no picture."""
    from dataclasses import replace

    return replace(span, size=None)


def test_edges_divide_a_picture_that_was_resampled(tiny_model):
    picture = noise((131, 77))
    (span,) = seen(tiny_model, "#", images=[picture]).spans
    figure = over_picture(picture, span, torch.zeros(len(span)))
    columns, rows = span.shape
    assert figure.data[0].x == pytest.approx(np.linspace(0, 131, columns + 1))
    assert figure.data[0].y == pytest.approx(np.linspace(0, 77, rows + 1))


@pytest.mark.skipif(
    not any(map(shutil.which, plots.BROWSERS)), reason="needs a browser that can draw"
)
def test_a_browser_draws_it_that_way_up(run, tmp_path):
    """Black above and left of the middle; blue where the value is high: the first patch, at the left of the first row."""
    values = np.full((288, 480, 3), 255, dtype=np.uint8)
    values[:144, :240] = 0
    high = torch.full((60,), torch.nan)
    high[0], high[-1] = 1.0, -1.0
    figure = over_picture(Image.fromarray(values), run[1], high, grey=False)
    save_png(figure, tmp_path / "figure.png", scale=1.0)
    shot = Image.open(tmp_path / "figure.png").convert("RGB")
    assert shot.size == (figure.layout.width, figure.layout.height)
    left, top = figure.layout.margin.l, figure.layout.margin.t
    wide, high = shot.width - left - figure.layout.margin.r, 0.6 * 560

    def at(x, y):  # of a place in the picture, as shares of its sides
        return shot.getpixel((int(left + x * wide), int(top + y * high)))

    assert max(at(0.25, 0.25)) < 30 and min(at(0.75, 0.25)) > 225 and min(at(0.25, 0.75)) > 225
    red, _, blue = at(0.05, 0.08)  # over black
    assert blue > red + 30
    red, _, blue = at(0.95, 0.92)  # the last patch, over white
    assert red > blue + 30
    assert at(0.05, 0.92) == at(0.25, 0.75) and at(0.95, 0.08) == at(0.75, 0.25)


def test_the_picture_as_the_model_got_it(tiny_model, run):
    inputs, span, _, _ = run
    assert np.array_equal(np.array(as_seen(inputs, span)), np.array(PICTURE))
    assert not np.array_equal(np.array(as_seen(inputs, span))[::-1], np.array(PICTURE))
    frames = np.stack([np.array(noise(seed=i)) for i in range(2)])
    video = tiny_model.prepare(f"{tiny_model.video_token} is", videos=[frames])
    first, second = video.spans
    assert (first.kind, second.number) == ("frame", 1)
    for span, frame in zip(video.spans, frames, strict=True):
        assert np.array_equal(np.array(as_seen(video, span)), frame)
    figure = over_picture(frames[1], second, torch.arange(60.0))
    assert figure.data[0].customdata[2][3].startswith("frame[1] (3, 2)")
    with pytest.raises(ValueError, match="no pixel_values"):
        as_seen({"input_ids": inputs["input_ids"]}, run[1])


def test_several_layers_have_a_slider_and_one_is_in_front(run):
    span = run[1]
    values = {name: torch.arange(60.0) * i for i, name in enumerate(["none", "<b>", "twice"])}
    figure = over_picture(PICTURE, span, values, step="times", cells=["<i>"] * 60)
    assert [trace.visible for trace in figure.data] == [True, False, False]
    (slider,) = figure.layout.sliders
    assert [step.label for step in slider.steps] == ["none", "&lt;b&gt;", "twice"]
    for i, step in enumerate(slider.steps):
        assert step.method == "update"
        assert step.args[0]["visible"] == [other == i for other in range(3)]
    assert {(trace.zmin, trace.zmax) for trace in figure.data} == {(-118.0, 118.0)}
    assert figure.data[0].text[0][0] == "&lt;i&gt;"
    assert not over_picture(PICTURE, span, torch.arange(60.0)).layout.sliders


def test_a_page_of_it_needs_nothing_else(run, tmp_path):
    figure = over_picture(PICTURE, run[1], torch.arange(60.0), title="<script src='x.js'>")
    figure.write_html(tmp_path / "figure.html")
    text = (tmp_path / "figure.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in text and not Page(text).outside()


# -- the numbers are the run's ------------------------------------------------------------------------


def test_the_lens_writes_what_the_head_reads_at_each_patch(tiny_model, run):
    inputs, span, logits, cache = run
    lens = tiny_model.logit_lens(inputs, positions=span.positions.tolist(), top_k=3)
    figure = lens_grid(PICTURE, span, lens)
    assert [step.label for step in figure.layout.sliders[0].steps] == [str(i) for i in range(8)]
    assert [trace.visible for trace in figure.data] == [False] * 7 + [True]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, 1)
    for layer in (2, 7):
        stream = cache["resid_post", layer][0, span.positions]
        said = tiny_model.project_on_vocab(stream).softmax(-1)
        probs, ids = said.max(-1)
        torch.testing.assert_close(by_patch(figure, span, layer).float(), probs, atol=1e-5, rtol=0)
        for i, (x, y) in enumerate(span.grid.tolist()):
            word = tiny_model.to_single_str_token(int(ids[i])).strip()
            if word.isalpha() and word.isascii():
                assert figure.data[layer].text[y][x] == word
            assert f"{probs[i]:.3f}" in figure.data[layer].customdata[y][x]
    assert not torch.equal(by_patch(figure, span, 2), by_patch(figure, span, 7))
    one = lens_grid(PICTURE, span, lens, layer=2, k=2, value="entropy")
    assert len(one.data) == 1 and one.data[0].text[0][0].count("<br>") == 1
    torch.testing.assert_close(by_patch(one, span).float(), lens.entropy[2, 0])
    # The same from a lens that read every position, and as another token's rank.
    token = logits[0, -1].argmax().item()
    whole = tiny_model.logit_lens(inputs, tokens=[token], points=["resid_mid", "resid_post"])
    rank = lens_grid(PICTURE, span, whole, value="rank", token=token)
    assert [step.label for step in rank.layout.sliders[0].steps][:2] == [
        *("0 resid_mid", "0 resid_post"),
    ]
    assert torch.equal(by_patch(rank, span), whole.token_ranks[-1, 0, span.positions, 0].double())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_attention_is_the_pattern_of_the_spans_own_prompt(batch, which):
    pictures, inputs, cache = batch
    span = inputs.spans[which]
    assert (span.row, span.number) == [(0, 0), (0, 1), (1, 0)][which]
    for layer, head in ((3, 2), (7, None)):  # full blocks: the window of others ends before
        figure = attention_over(pictures[which], span, cache, layer, head)
        pattern = cache["pattern", layer][span.row, :, -1, span.positions]
        wanted = pattern.mean(0) if head is None else pattern[head]
        assert torch.equal(by_patch(figure, span).float(), wanted)
        share = float(re.search(r"gives ([\d.]+)%", figure.layout.title.text)[1])
        assert share == pytest.approx(100 * wanted.sum().item(), abs=0.06)
        other = cache["pattern", layer][1 - span.row, :, -1, span.positions]
        assert not torch.equal(wanted, other.mean(0) if head is None else other[head])
    position = int(span.positions[-1])
    figure = attention_over(pictures[which], span, cache, 7, 1, position)
    wanted = cache["pattern", 7][span.row, 1, position, span.positions]
    assert torch.equal(by_patch(figure, span).float(), wanted) and wanted.sum() > 0
    every = attention_over(pictures[which], span, cache)
    assert len(every.data) == 8 and torch.equal(
        by_patch(every, span, 7), by_patch(attention_over(pictures[which], span, cache, 7), span)
    )


def test_the_last_position_is_the_last_real_token(tiny_model):
    texts, pictures = ("# The capital of", "#"), [PICTURE, PICTURE]
    for side in ("left", "right"):
        inputs = seen(tiny_model, *texts, images=pictures, padding_side=side)
        _, cache = tiny_model.run_with_cache(inputs, names_filter="*pattern")
        span = inputs.spans[1]
        last = int(inputs["attention_mask"][1].nonzero().max())
        assert (last == inputs["input_ids"].shape[1] - 1) == (side == "left")
        figure = attention_over(PICTURE, span, cache, 3)
        wanted = cache["pattern", 3][1, :, last, span.positions].mean(0)
        assert torch.equal(by_patch(figure, span).float(), wanted)
        assert f"position {last} " in figure.layout.title.text
    (span,) = seen(tiny_model, texts[0], images=pictures[:1]).spans
    _, alone = tiny_model.run_with_cache(
        seen(tiny_model, texts[0], images=pictures[:1]), remove_batch_dim=True
    )
    figure = attention_over(PICTURE, span, alone, 3, 0)
    assert torch.equal(by_patch(figure, span).float(), alone["pattern", 3][0, -1, span.positions])


def test_attribution_is_what_was_read_from_each_patch(tiny_model, batch):
    pictures, inputs, cache = batch
    target = Target(7, 9)
    found = by_source(cache, target)
    for picture, span in zip(pictures, inputs.spans, strict=True):
        read = found.values[:, :, span.row, -1][..., span.positions]  # [layer head token]
        figure = attribution_over(picture, span, found)
        torch.testing.assert_close(by_patch(figure, span).float(), read.sum((0, 1)))
        torch.testing.assert_close(
            by_patch(attribution_over(picture, span, found, layer=3, head=1), span).float(),
            read[3, 1],
        )
        assert figure.data[0].zmin == -figure.data[0].zmax
        own = by_token(cache, target, None)
        torch.testing.assert_close(
            by_patch(attribution_over(picture, span, own), span).float(),
            own.values[span.row, span.positions],
        )
    asked = tiny_model.attribute(inputs, 7, 9, by="source", positions=[-2, -1])
    span = inputs.spans[1]
    torch.testing.assert_close(
        by_patch(attribution_over(pictures[1], span, asked, pos=-2), span).float(),
        asked.values[:, :, 0, 0][..., span.positions].sum((0, 1)),
    )


def test_labels_of_a_single_prompt_do_not_disturb_attribution(tiny_model, run):
    inputs, span, _, cache = run
    for by, positions, plain in (
        ("token", None, by_token(cache, Target(7))),
        ("source", "last", by_source(cache, Target(7))),
    ):
        found = tiny_model.attribute(inputs, 7, by=by, positions=positions)
        values = by_patch(attribution_over(PICTURE, span, found), span)
        assert torch.equal(values, by_patch(attribution_over(PICTURE, span, plain), span))


def test_ablation_is_what_zeroing_the_row_does(tiny_model, batch):
    pictures, inputs, _ = batch
    metric = logit_difference(7, 9)
    result = ablate(tiny_model, inputs, metric, units="patches")
    clean = tiny_model(inputs)[:, -1]
    clean = clean[:, 7] - clean[:, 9]
    for which, token in ((0, 13), (1, 5), (2, 40)):
        span = inputs.spans[which]
        figure = ablation_over(pictures[which], span, result)

        def without(stream, hook, span=span, token=token):
            stream[span.row, span.positions[token]] = 0

        logits = tiny_model.run_with_hooks(
            **inputs, fwd_hooks=[("blocks.0.hook_resid_pre", without)]
        )[span.row, -1]
        wanted = (logits[7] - logits[9] - clean[span.row]).item()
        values = by_patch(figure, span)
        assert values[token].item() == pytest.approx(wanted, abs=1e-4)
        assert abs(values[token + 1].item() - wanted) > 1e-3  # the control: its neighbour
    estimate = attribution_ablate(tiny_model, inputs, metric, units="patches")
    assert not np.isnan(field(ablation_over(pictures[0], inputs.spans[0], estimate))).any()
    few = result.part(slice(0, 3))
    known = field(ablation_over(pictures[0], inputs.spans[0], few))
    assert (~np.isnan(known)).sum() == 3 and not np.isnan(known[0, :3]).any()


@pytest.mark.parametrize("layer", [0, 3])
def test_a_mask_picture_shows_what_the_scores_show(tiny_model, layer):
    pictures = [noise((900, 30)), noise((300, 200), 1)]
    texts = ("The capital # of France is", "#")
    inputs = seen(tiny_model, *texts, images=pictures)
    other = HookedModel.from_pretrained("tiny", image_mask="windowed")
    seen_by = {}
    for row in (0, 1):
        figure = mask_picture(tiny_model, inputs, layer, row=row)
        for number, model in enumerate((tiny_model, other)):
            point = f"blocks.{layer}.attn.hook_attn_scores"
            _, cache = model.run_with_cache(inputs, names_filter=point)
            visible = (cache[point][row, 0] > torch.finfo(torch.float32).min / 2).numpy()
            kinds = field(figure, number).astype(int)
            assert np.array_equal(kinds > 0, visible)
            pos = len(kinds)
            ahead = np.triu(np.ones((pos, pos), dtype=bool), 1)
            assert np.array_equal(kinds == 2, visible & ahead)
            far = np.tril(np.ones((pos, pos), dtype=bool), -16) & (layer == 0)
            assert np.array_equal(kinds == 3, visible & far)
            seen_by[row, number] = [(kinds == kind).sum() for kind in (2, 3)]
    # What the rules change: a full block sees ahead or not; a sliding one reaches beyond its window or not.
    if layer == 3:
        assert seen_by[0, 0][0] > 0 == seen_by[0, 1][0]
    else:
        assert seen_by[0, 0][0] == seen_by[0, 1][0] > 0
        assert seen_by[0, 0][1] > 0 == seen_by[0, 1][1]
    heading = figure.layout.xaxis.title.text.replace("<br>", " ")
    assert "'transformers' (this model's)" in heading and f"{seen_by[1, 0][0]:,} pairs" in heading
    assert tuple(figure.layout.yaxis.range) == (pos - 0.5, -0.5)
    assert "image[0]" in figure.layout.xaxis.ticktext
    assert "(this model's)" not in figure.layout.xaxis2.title.text
    first = mask_picture(tiny_model, inputs, layer, row=0)
    padded = int((inputs["attention_mask"][0] == 0).sum())
    assert padded > 0 and not any("pad" in name for name in first.layout.xaxis.ticktext)
    assert first.layout.xaxis.ticktext[0] == f"{padded} &lt;bos&gt;"
    assert first.data[0].x[padded] == first.layout.xaxis.tickvals[0]


def test_a_mask_picture_of_text_is_causal(tiny_model):
    figure = mask_picture(tiny_model, "The capital of France is", 3)
    for number in (0, 1):
        assert np.array_equal(field(figure, number), np.tril(np.ones((6, 6))))
    assert (
        list(figure.data[0].x)
        == list(figure.data[0].y)
        == [
            *("0 <bos>".replace("<", "&lt;").replace(">", "&gt;"), "1 The", "2  capital"),
            *("3  of", "4  France", "5  is"),
        ]
    )
    assert [trace.name for trace in figure.data[2:]] == ["hidden", "seen, as in text"]
    with pytest.raises(ValueError, match=r"row is 1; there are prompts 0 to 0"):
        mask_picture(tiny_model, "The capital", 3, row=1)


# -- errors -------------------------------------------------------------------------------------------


def test_a_picture_of_another_size_is_refused_and_an_unknown_size_is_the_pictures(run):
    span, values = run[1], torch.arange(60.0)
    with pytest.raises(ValueError, match=r"was \[480, 288\] .*this picture is \[480, 287\]"):
        over_picture(noise((480, 287)), span, values)
    figure = over_picture(noise((240, 144)), unsized(span), values)
    assert figure.data[0].x[-1] == 240 and figure.layout.xaxis.title.text == "x, pixels"
    alone = over_picture(None, span, values)
    assert not alone.layout.images and alone.data[0].x[-1] == 480 and alone.data[0].opacity == 1
    patches = over_picture(None, unsized(span), values)
    assert list(patches.data[0].x) == list(range(11))
    assert patches.layout.yaxis.title.text == "y, patches"


def test_every_form_of_a_picture_is_taken(run, tmp_path):
    span, values, pixels = run[1], torch.arange(60.0), np.array(PICTURE)
    PICTURE.save(tmp_path / "picture.png")
    turned = Image.fromarray(np.rot90(pixels))  # stored on its side, as a camera does
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    forms = [
        *(tmp_path / "picture.png", str(tmp_path / "turned.png"), pixels),
        *(torch.from_numpy(pixels).permute(2, 0, 1), pixels / 255),
    ]
    for form in forms:
        figure = over_picture(form, span, values, grey=False)
        assert np.array_equal(np.array(ground(figure)), pixels), type(form)
    with pytest.raises(FileNotFoundError):
        over_picture(tmp_path / "none.png", span, values)


def test_numbers_and_cells_must_be_as_many_as_tokens(run):
    span = run[1]
    with pytest.raises(ValueError, match=r"values are \[59\]; image\[0\] has 60 tokens"):
        over_picture(PICTURE, span, torch.zeros(59))
    with pytest.raises(ValueError, match="are 3; it has 60 tokens"):
        over_picture(PICTURE, span, torch.zeros(60), cells=["a"] * 3)


def test_sound_has_no_picture(tiny_model):
    inputs = tiny_model.prepare(f"{tiny_model.audio_token} is", audio=[torch.zeros(1600)])
    (span,) = inputs.spans
    _, cache = tiny_model.run_with_cache(inputs)
    lens = tiny_model.logit_lens(inputs)
    for draw in (
        lambda: over_picture(PICTURE, span, torch.zeros(len(span))),
        lambda: over_picture(None, span, torch.zeros(len(span))),
        lambda: lens_grid(PICTURE, span, lens),
        lambda: attention_over(PICTURE, span, cache),
        lambda: as_seen(inputs, span),
    ):
        with pytest.raises(ValueError, match=r"audio\[0\] is sound"):
            draw()


def test_what_a_figure_needs_is_asked_for(tiny_model, run, batch):
    inputs, span, _, cache = run
    lens = tiny_model.logit_lens(inputs, positions=[-1], top_k=2)
    with pytest.raises(ValueError, match=r"did not read all: ask logit_lens"):
        lens_grid(PICTURE, span, lens)
    with pytest.raises(ValueError, match=r"k is 3; this lens kept the 2 likeliest"):
        lens_grid(PICTURE, span, lens, k=3)
    _, few = tiny_model.run_with_cache(inputs, names_filter="*resid_post")
    with pytest.raises(ValueError, match="holds no pattern"):
        attention_over(PICTURE, span, few)
    _, cut = tiny_model.run_with_cache(inputs, names_filter="*pattern", pos_slice=-1)
    with pytest.raises(ValueError, match=r"67 positions and 1 were kept|and 1 were kept"):
        attention_over(PICTURE, span, cut, 3)
    with pytest.raises(ValueError, match="head is 4; block 3 has heads 0 to 3"):
        attention_over(PICTURE, span, cache, 3, 4)
    with pytest.raises(ValueError, match="position is 999; the prompt has positions 0 to"):
        attention_over(PICTURE, span, cache, 3, 0, 999)
    with pytest.raises(ValueError, match="position is 'first'; use 'last'"):
        attention_over(PICTURE, span, cache, 3, 0, "first")
    pictures, others, _ = batch
    with pytest.raises(ValueError, match=r"image\[0\] is in prompt 1; the cache holds 1"):
        attention_over(pictures[2], others.spans[2], cache, 3)
    with pytest.raises(ValueError, match="this span is of another call"):
        attention_over(pictures[1], others.spans[1], cache, 3)


def test_other_attributions_and_other_units_are_refused(tiny_model, run):
    inputs, span, _, cache = run
    for found in (
        tiny_model.attribute(inputs, 7, by="head"),
        tiny_model.attribute(inputs, 7, by="part"),
    ):
        with pytest.raises(ValueError, match="does not tell patches apart"):
            attribution_over(PICTURE, span, found)
    one_off = by_token(cache, Target(7), list(range(1, inputs["input_ids"].shape[1])))
    with pytest.raises(ValueError, match="positions=None"):
        attribution_over(PICTURE, span, one_off)
    with pytest.raises(ValueError, match="does not tell patches apart"):
        attribution_over(PICTURE, span, by_token(cache, Target(7)), layer=3)
    images = ablate(tiny_model, inputs, logit_difference(7, 9), units="images")
    heads = ablate(tiny_model, inputs, logit_difference(7, 9), layers=[0])
    for result in (images, heads):
        with pytest.raises(ValueError, match=r"no variant is a patch of image\[0\]"):
            ablation_over(PICTURE, span, result)


def test_a_png_without_a_browser_says_what_to_do(run, tmp_path, monkeypatch):
    figure = over_picture(PICTURE, run[1], torch.zeros(60))
    with pytest.raises(RuntimeError, match=r"no program 'no-such-browser'.*write_html"):
        save_png(figure, tmp_path / "x.png", browser="no-such-browser")
    with pytest.raises(RuntimeError, match="wrote no picture"):
        save_png(figure, tmp_path / "x.png", browser="true")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="none of chromium"):
        save_png(figure, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_the_examples_run():
    ran = doctest.testmod(importlib.import_module("lens_gemma4.pictures"))
    assert ran.attempted > 30 and not ran.failed
