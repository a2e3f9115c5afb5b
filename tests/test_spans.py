"""Where media stand in the prompts: spans, names of tokens, images embedded once, regions and swaps."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from PIL import Image

from lens_gemma4 import HookedModel, ablate, logit
from lens_gemma4.changes import region, swapped
from lens_gemma4.spans import ImageFeatures, Inputs, spans_of, token_labels
from lens_gemma4.sweep import sweep

IMAGE, AUDIO, VIDEO = seeing.IMAGE, seeing.AUDIO, seeing.VIDEO
SMALL = {"image_tokens": 70}
TEXTS = [f"a {IMAGE} what {IMAGE}", "the cat", f"{IMAGE} is this"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return seeing.checkpoint(
        tmp_path_factory.mktemp("seeing"),
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )


@pytest.fixture(scope="module")
def model(folder) -> HookedModel:
    return HookedModel.from_pretrained(folder)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


PICTURES = [picture(200, 90), picture(100, 130, 1), picture(48, 48, 2)]


@pytest.fixture(scope="module", params=["left", "right"])
def batch(request, model) -> Inputs:
    return model.prepare(TEXTS, images=PICTURES, padding_side=request.param, **SMALL)


# -- spans --------------------------------------------------------------------------------------------


def test_a_span_holds_the_rows_that_its_image_was_scattered_to(model, batch):
    names = ["blocks.0.hook_resid_pre", "vision.hook_image_features", "vision.projector.hook_out"]
    _, cache = model.run_with_cache(batch, names_filter=names, stop_at_layer=1)
    features, padded = cache[names[1]], cache[names[2]]
    assert [(s.row, s.number, s.index, s.size) for s in batch.spans] == [
        (0, 0, 0, (200, 90)),
        (0, 1, 1, (100, 130)),
        (2, 0, 2, (48, 48)),
    ]
    for span in batch.spans:
        assert len(span) > 40 and span.positions.diff().eq(1).all()
        stream = cache[names[0]][span.row, span.positions]
        assert torch.equal(stream, features[span.features])
        assert torch.equal(stream, padded[span.index, span.valid])
        assert not torch.equal(stream, features[: len(span)]) or span.offset == 0  # the control
        assert torch.equal(batch["image_position_ids"][span.index, span.valid], span.grid)
    every = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for span in batch.spans:
        every[span.row, span.positions] = True
    assert torch.equal(every, batch["input_ids"] == model.cfg.image_token_id)


def test_frames_and_clips_have_spans_too(model):
    film = np.random.default_rng(0).integers(0, 256, (2, 60, 80, 3), dtype=np.uint8)
    text = f"{VIDEO} a {AUDIO} {IMAGE} what {AUDIO}"
    sounds = [np.zeros(641, np.float32), np.ones(100, np.float32)]
    given = {"videos": film, "audio": sounds, "images": PICTURES[0], **SMALL}
    inputs = model.prepare(["the", text, f"{AUDIO}"], **given | {"audio": [*sounds, sounds[0]]})
    assert [(s.name, s.row, s.index) for s in inputs.spans] == [
        *[("frame[0]", 1, 0), ("frame[1]", 1, 1), ("audio[0]", 1, 0), ("image[0]", 1, 0)],
        *[("audio[1]", 1, 1), ("audio[0]", 2, 2)],
    ]
    frame, clip = inputs.spans[1], inputs.spans[2]
    assert frame.size == (80, 60) and frame.labels()[1] == "frame[1] (1, 0)"
    assert clip.labels() == ["audio[0] 0", "audio[0] 1"] and clip.valid.tolist() == [True, True]
    assert inputs.spans[4].valid.tolist() == [True, False]
    names = ["blocks.0.hook_resid_pre", "video.hook_video_features", "audio.hook_audio_features"]
    _, cache = model.run_with_cache(inputs, names_filter=names, stop_at_layer=1)
    for span in inputs.spans:
        if span.kind != "image":
            features = cache[names[1 if span.kind == "frame" else 2]][span.features]
            assert torch.equal(cache[names[0]][span.row, span.positions], features), span.name
    with pytest.raises(ValueError, match=r"audio\[0\] is sound: it has no patches"):
        clip.boxes()


def test_frames_of_both_spellings_are_counted_alike(model):
    film = np.random.default_rng(0).integers(0, 256, (4, 60, 80, 3), dtype=np.uint8)
    inputs = model.prepare(f"{VIDEO} a {VIDEO}", videos=[film[:2], film[2:]])
    flat = {k: inputs[k].flatten(0, -3) for k in ("pixel_values_videos", "video_position_ids")}
    by_video = {k: v.unflatten(0, (2, 2)) for k, v in flat.items()}
    for spelt in (flat, by_video):
        spans = spans_of(model, {**inputs, **spelt})
        assert [(s.number, s.index) for s in spans] == [(i, i) for i in range(4)]
        assert all(
            torch.equal(a.positions, b.positions) for a, b in zip(spans, inputs.spans, strict=True)
        )


def test_text_has_none(model):
    assert model.prepare(["the cat", "a"]).spans == [] == model.spans("a")


def test_patches_tile_the_picture_row_by_row(model):
    (span,) = model.spans(IMAGE, images=PICTURES[0], **SMALL)
    columns, rows = span.shape
    boxes = span.boxes()
    assert boxes[0, :2].tolist() == [0, 0] and boxes[-1, 2:].tolist() == [200, 90]
    assert len(boxes) == columns * rows and columns > rows
    width, height = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
    torch.testing.assert_close(width, torch.full_like(width, 200 / columns))
    torch.testing.assert_close(height, torch.full_like(height, 90 / rows))
    assert span.labels()[:2] == ["image[0] (0, 0)", "image[0] (1, 0)"]
    assert span.labels()[columns] == "image[0] (0, 1)"
    below = boxes[columns]
    assert below[0] == 0 and below[1] == boxes[0, 3]


def test_a_box_touches_the_patches_it_overlaps(model):
    (span,) = model.spans(IMAGE, images=PICTURES[0], **SMALL)
    boxes = span.boxes()
    for i in (0, 7, len(span) - 1):
        assert span.tokens_in(boxes[i].tolist()).nonzero().tolist() == [[i]]  # edges do not count
        x, y = boxes[i].view(2, 2).mean(0).tolist()
        assert span.tokens_in((x, y, x + 0.1, y + 0.1)).nonzero().tolist() == [[i]]
    assert span.tokens_in((-5, -5, 500, 500)).all()
    assert span.tokens_in((0, 0, 200, 1)).sum() == span.shape[0]
    for wrong in ((10, 10, 10, 20), (20, 10, 10, 20), (200, 0, 210, 9), (0, -9, 9, 0)):
        with pytest.raises(
            ValueError, match=r"touches no patch of image\[0\], which is \(200, 90\)"
        ):
            span.tokens_in(wrong)


def test_a_size_is_known_of_pictures_and_not_of_patches(model, tmp_path):
    array = np.asarray(PICTURES[0])
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    PICTURES[0].save(tmp_path / "lying.png", exif=exif)
    forms = {
        "PIL": (PICTURES[0], (200, 90)),
        "path": (tmp_path / "lying.png", (90, 200)),
        "array": (array, (200, 90)),
        "channels first": (torch.tensor(array).permute(2, 0, 1), (200, 90)),
        "few rows": (array[:4], (200, 4)),
        "floats": (array / 255, (200, 90)),
    }
    for name, (form, size) in forms.items():
        (span,) = model.spans(IMAGE, images=form, **SMALL)
        assert span.size == size, name
        assert (span.shape[0] > span.shape[1]) == (size[0] > size[1]), name
    known = model.prepare(IMAGE, images=PICTURES[0], **SMALL)
    (span,) = spans_of(model, dict(known))  # tensors alone, as a processor returns
    with pytest.raises(ValueError, match=r"size of image\[0\] in pixels is not known"):
        span.boxes()
    assert torch.equal(span.boxes((200, 90)), known.spans[0].boxes())
    assert torch.equal(
        span.tokens_in((0, 0, 5, 5), (200, 90)), known.spans[0].tokens_in((0, 0, 5, 5))
    )


def test_sizes_survive_a_second_preparation_copies_and_files(model, batch):
    sizes = [span.size for span in batch.spans]
    for same in (model.prepare(batch), copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert [span.size for span in same.spans] == sizes
    assert batch.spans[0] is batch.spans[0]  # computed once
    changed = copy.copy(batch)
    changed["image_position_ids"] = batch["image_position_ids"].clone()
    changed["image_position_ids"][0, :2] += 1
    assert changed.spans[0].grid[0].tolist() == [1, 1] != batch.spans[0].grid[0].tolist()


def test_placeholders_and_features_that_differ_in_number_are_refused(model, batch):
    ids = batch["input_ids"]
    fewer = {**batch, "input_ids": torch.where(ids == ids[0, batch.spans[0].positions[0]], 5, ids)}
    n = sum(map(len, batch.spans))
    with pytest.raises(ValueError, match=f"hold 0 image placeholder tokens, the input gives {n}"):
        spans_of(model, fewer)
    moved = {**batch, "input_ids": ids.flip(0)}
    with pytest.raises(ValueError, match=r"image 1 stand in prompts \[0, 2\]"):
        spans_of(model, moved)
    alone = {name: value for name, value in batch.items() if name != "input_ids"}
    with pytest.raises(ValueError, match="give input_ids or mm_token_type_ids"):
        spans_of(model, alone)
    types = (ids == model.cfg.image_token_id).long()
    by_types = spans_of(model, {**alone, "mm_token_type_ids": types})
    assert [len(s) for s in by_types] == [len(s) for s in batch.spans]


# -- names of tokens ----------------------------------------------------------------------------------


def test_patches_stand_in_place_of_placeholders(model, batch):
    plain = model.to_str_tokens(batch["input_ids"])
    labels = token_labels(model, batch)
    assert labels[1] == plain[1] and "<pad>" in labels[1]  # text stays as it is
    differ = [
        [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
        for one, two in zip(labels, plain, strict=True)
    ]
    spans = batch.spans
    assert differ[0] == spans[0].positions.tolist() + spans[1].positions.tolist()
    assert labels[2][int(spans[2].positions[9])] == "image[0] (1, 1)"
    assert labels[0][int(spans[1].positions[0])] == "image[1] (0, 0)"


def test_without_text_positions_are_numbers(model, batch, monkeypatch):
    embeds = model.input_to_embed(batch)
    types = (batch["input_ids"] == model.cfg.image_token_id).long()
    prepared = model.prepare(inputs_embeds=embeds, mm_token_type_ids=types)
    assert token_labels(model, prepared)[0] == [str(i) for i in range(embeds.shape[1])]
    monkeypatch.setattr(model, "_tokenizer", None)
    labels = token_labels(model, batch)[2]
    first = int(batch.spans[2].positions[0])
    assert labels[first - 1 : first + 1] == [str(first - 1), "image[0] (0, 0)"]


def test_a_cache_names_the_positions_it_keeps(model, batch):
    labels = token_labels(model, batch)
    kept = {"names_filter": "hook_tokens"}
    _, cache = model.run_with_cache(batch, **kept)
    assert cache["token_labels"] == labels and "token_labels" not in list(cache)
    assert cache.apply_slice_to_batch_dim(2)["token_labels"] == labels[2]
    assert cache.apply_slice_to_batch_dim([2, 0])["token_labels"] == [labels[2], labels[0]]
    for pos in (3, [5, 1], slice(2, 9), -1):
        _, cache = model.run_with_cache(batch, pos_slice=pos, **kept)
        chosen = [pos] if isinstance(pos, int) else pos
        wanted = [list(np.array(row)[chosen]) for row in labels]
        assert cache["token_labels"] == wanted
    one = model.prepare(TEXTS[2], images=PICTURES[2], **SMALL)
    _, cache = model.run_with_cache(one, remove_batch_dim=True, **kept)
    assert cache["token_labels"] == token_labels(model, one)[0]
    again = pickle.loads(pickle.dumps(cache))
    assert again["token_labels"] == cache["token_labels"]


def test_lenses_attributions_and_sweeps_name_patches(model):
    inputs = model.prepare(TEXTS[2], images=PICTURES[2], **SMALL)
    labels = token_labels(model, inputs)[0]
    lens = model.logit_lens(inputs, positions=[4, 1])
    assert [lens.at_position(0, i) for i in (0, 1)] == [labels[4], labels[1]]
    assert lens.at_position() == labels[1]
    assert set(model.logit_lens(inputs).to_dataframe()["at"]) == set(labels)
    _, cache = model.run_with_cache(inputs)
    assert model.logit_lens(cache, positions=[4, -1]).at_position(0, 0) == labels[4]
    assert "4 image[0] (2, 0)" in str(lens.plot()) and labels[4] == "image[0] (2, 0)"
    found = model.attribute(inputs, 5, by="source")
    assert found.labels["source"][3:5] == ["3 image[0] (1, 0)", "4 image[0] (2, 0)"]
    assert found.labels["source"][0] == "0 '<bos>'"
    result = ablate(model, inputs, logit(5), units="attn", layers=[0])
    assert result.tokens == [labels]


# -- an image embedded once ---------------------------------------------------------------------------


def test_features_run_as_their_pixels_do_to_the_bit(model):
    embedded = model.embed_image(PICTURES, **SMALL)
    _, cache = model.run_with_cache(
        TEXTS, images=PICTURES, names_filter="vision.hook_image_features", **SMALL
    )
    assert torch.equal(
        torch.cat([one.features for one in embedded]), cache["vision.hook_image_features"]
    )
    for side in ("left", "right"):
        pixels = model(TEXTS, images=PICTURES, padding_side=side, **SMALL)
        assert torch.equal(model(TEXTS, image_features=embedded, padding_side=side), pixels)
        other = model(TEXTS, image_features=embedded[::-1], padding_side=side)
        assert other.shape != pixels.shape or not torch.equal(other, pixels)
    inputs = model.prepare(TEXTS, image_features=embedded)
    wanted = model.prepare(TEXTS, images=PICTURES, **SMALL)
    assert token_labels(model, inputs) == token_labels(model, wanted)
    assert [s.size for s in inputs.spans] == [s.size for s in wanted.spans]
    assert torch.equal(model(**inputs), model(inputs)) and "pixel_values" not in inputs
    one = model.embed_image(PICTURES[0], **SMALL)
    assert isinstance(one, ImageFeatures) and len(one) == len(embedded[0])
    assert torch.equal(
        model(TEXTS[2], image_features=one), model(TEXTS[2], images=PICTURES[0], **SMALL)
    )
    given = model.prepare(TEXTS[2], images=PICTURES[0], **SMALL)
    with_ids = model.prepare(given["input_ids"], image_features=one)
    assert torch.equal(model(with_ids), model(given)) and with_ids.spans[0].size == (200, 90)


def test_features_may_be_changed_and_hooked(model):
    one = model.embed_image(PICTURES[2], **SMALL)
    before = one.features.clone()
    plain = model(TEXTS[2], image_features=one)
    halved = dataclasses.replace(one, features=one.features / 2)

    def halve(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value /= 2  # in place: what was given must not change
        return value

    hooked = model.run_with_hooks(
        TEXTS[2], image_features=one, fwd_hooks=[("vision.hook_image_features", halve)]
    )
    assert torch.equal(hooked, model(TEXTS[2], image_features=halved))
    assert not torch.equal(hooked, plain) and torch.equal(one.features, before)
    with pytest.raises(KeyError, match="image_features were given, so no pixels are embedded"):
        model.run_with_hooks(TEXTS[2], image_features=one, fwd_hooks=[("vision.hook_out", halve)])


def test_maps_of_features_are_those_of_pixels(model):
    one = model.embed_image(PICTURES[2], **SMALL)
    by_pixels = ablate(model, TEXTS[2], logit(5), units="patches", images=PICTURES[2], **SMALL)
    by_features = ablate(model, TEXTS[2], logit(5), units="patches", image_features=one)
    assert by_features.names == by_pixels.names
    assert torch.equal(by_features.values, by_pixels.values)


def test_features_that_do_not_fit_are_refused(model):
    one = model.embed_image(PICTURES[2], **SMALL)
    with pytest.raises(ValueError, match=r"holds 2 placeholders .* and 1 of kind image"):
        model(f"{IMAGE} {IMAGE}", image_features=one)
    with pytest.raises(ValueError, match="image_features and images were given"):
        model(IMAGE, image_features=one, images=PICTURES[2])
    with pytest.raises(TypeError, match="takes what embed_image returns, got Tensor"):
        model(IMAGE, image_features=[one.features])
    inputs = model.prepare(IMAGE, images=PICTURES[2], **SMALL)
    with pytest.raises(ValueError, match="are the same images: give one"):
        model(**inputs, image_features=one.features)
    with pytest.raises(ValueError, match=r"image_features is \[\d+, 7\]; needed is \[token 60\]"):
        model(inputs["input_ids"], image_features=one.features[:, :7])
    with pytest.raises(ValueError, match=r"holds \d+ image placeholder tokens .* gives 3 features"):
        model(inputs["input_ids"], image_features=one.features[:3])


def test_a_stream_with_features_in_place_runs_without_pixels(model, batch):
    """As transformers' own: `inputs_embeds` are taken as they are."""
    stream = model.input_to_embed(batch)
    types = (batch["input_ids"] == model.cfg.image_token_id).long()
    about = {"mm_token_type_ids": types, "attention_mask": batch.get("attention_mask")}
    logits = model(batch)
    assert torch.equal(model(inputs_embeds=stream, **about), logits)
    causal = about | {"mm_token_type_ids": torch.zeros_like(types)}
    assert not torch.equal(model(inputs_embeds=stream, **causal), logits)  # the control


# -- edits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["vision.hook_out", "vision.projector.hook_out", "vision.hook_image_features"]
)
def test_an_edit_of_one_image_moves_the_logits_of_its_prompt(model, batch, point):
    span = batch.spans[2]

    def shift(value: torch.Tensor, hook: Any) -> torch.Tensor:
        rows = span.features if value.ndim == 2 else (span.index, span.valid)
        noise = torch.Generator().manual_seed(0)
        value[rows] += torch.randn(value[rows].shape, generator=noise)
        return value

    def padding(value: torch.Tensor, hook: Any) -> torch.Tensor:
        if value.ndim == 3:
            value[span.index, ~span.valid] += 9
        return value

    plain = model(batch)
    moved = model.run_with_hooks(batch, fwd_hooks=[(point, shift)])
    assert (moved - plain)[2, -5:].abs().max() > 1e-3
    assert torch.equal(moved[:2], plain[:2])
    assert torch.equal(model.run_with_hooks(batch, fwd_hooks=[(point, padding)]), plain)


def test_images_that_are_swapped_are_images_in_another_order(model):
    texts = [f"a {IMAGE} what {IMAGE} is", "the cat", f"{IMAGE} {IMAGE}"]
    pictures = [picture(96, 96, seed) for seed in range(4)]
    inputs = model.prepare(texts, images=pictures, **SMALL)
    change = swapped(model, inputs)
    got = model.run_with_hooks(inputs, fwd_hooks=change.hooks())
    order = [pictures[i] for i in (1, 0, 3, 2)]
    wanted = model(texts, images=order, **SMALL)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    assert (got - model(inputs))[[0, 2]].abs().amax((1, 2)).min() > 1e-3  # the control
    assert torch.equal(got[1], model(inputs)[1])
    result = sweep(model, inputs, [change], logit(5))
    torch.testing.assert_close(result.values[0], got[:, -1, 5], atol=1e-4, rtol=0)


def test_a_swap_is_refused_with_both_counts(model, batch):
    with pytest.raises(
        ValueError, match=r"image\[0\] is in prompts \[0, 2\] and image\[1\] in \[0\]"
    ):
        swapped(model, batch)
    one = model.prepare(TEXTS[0], images=PICTURES[:2], **SMALL)
    counts = [len(span) for span in one.spans]
    assert counts[0] != counts[1]
    message = rf"image\[0\] of prompt 0 has {counts[0]} tokens and image\[1\] {counts[1]}"
    with pytest.raises(ValueError, match=message):
        swapped(model, one)
    with pytest.raises(ValueError, match=r"no image\[2\]: the prompts hold 2 images at most"):
        swapped(model, one, 0, 2)


def test_a_region_is_ablated_as_its_rows_are_by_hand(folder):
    model = HookedModel.from_pretrained(folder, dtype=torch.float64)
    inputs = model.prepare(TEXTS, images=PICTURES, **SMALL)
    box = (10, 10, 40, 30)
    unit = region(model, inputs, box)
    inside = {
        span.row: span.positions[span.tokens_in(box)] for span in inputs.spans if not span.number
    }
    assert set(inside) == {0, 2} and all(1 < len(p) < 40 for p in inside.values())
    stream = model.input_to_embed(inputs)
    images = inputs["input_ids"] == model.cfg.image_token_id
    for mode, value in (("zero", 0.0), ("mean", stream[images].mean(0))):

        def put(resid: torch.Tensor, hook: Any, value: Any = value) -> torch.Tensor:
            for row, positions in inside.items():
                resid[row, positions] = value
            return resid

        wanted = model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.hook_resid_pre", put)])
        found = ablate(model, inputs, logit(5), units=[unit], mode=mode)
        assert found.names == ["image[0] in (10, 10, 40, 30)"]
        has = [0, 2]  # the second prompt holds no picture
        torch.testing.assert_close(found.values[0, has], wanted[has, -1, 5], atol=1e-9, rtol=0)
        assert found.values[0, 1].isnan() and found.lacks.tolist() == [[False, True, False]]
        beside = ablate(
            model, inputs, logit(5), units=[region(model, inputs, (10, 40, 40, 48))], mode=mode
        )
        assert (beside.values - found.values)[:, [0, 2]].abs().max() > 1e-6  # the control
    torch.testing.assert_close(found.mean()[0], found.effect[0, has].mean())


def test_regions_stand_beside_other_units_and_as_one(model):
    inputs = model.prepare(TEXTS[2], images=PICTURES[2], **SMALL)
    left, right = region(model, inputs, (0, 0, 9, 48)), region(model, inputs, (40, 0, 48, 48))
    found = ablate(model, inputs, logit(5), units=[left, "L0H0", [left, right]])
    assert found.names == [str(left), "L0H0", f"{left} & {right}"]
    both = ablate(model, inputs, logit(5), units=[left & right])
    torch.testing.assert_close(both.values[0], found.values[2], atol=1e-4, rtol=0)
    assert (found.values[2] - found.values[0]).abs().min() > 1e-3  # the control
    assert found.plan["arguments"]["units"][0] == "image[0] in (0, 0, 9, 48)"
    alone = ablate(model, inputs, logit(5), units=left)
    torch.testing.assert_close(alone.values[0], found.values[0])
    with pytest.raises(ValueError, match="stands at positions of its own: leave out positions"):
        ablate(model, inputs, logit(5), units=[left], positions="last")
    with pytest.raises(ValueError, match="of two kinds"):
        ablate(model, inputs, logit(5), units=[[left, "L0H0"]])
    with pytest.raises(ValueError, match=r"no image\[1\]: the prompts hold 1 images"):
        region(model, inputs, (0, 0, 9, 9), image=1)
    with pytest.raises(ValueError, match="touches no patch"):
        region(model, inputs, (60, 0, 70, 9))
