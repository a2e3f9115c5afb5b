"""Pictures asked about in ways that no example asks; each answer beside transformers or a computation by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from PIL import Image
from transformers import Gemma4UnifiedForConditionalGeneration

from lens_gemma4 import HookedModel, ablate, logit
from lens_gemma4.changes import region

# 5.10's own
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGE = seeing.IMAGE
SMALL = {"image_tokens": 70}
ASK = logit(12)
TEMPLATE = """{% for turn in messages %}a {% if turn.content is string %}{{ turn.content }}{% else %}\
{% for part in turn.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type }}|>{% endif %}\
{% endfor %}{% endif %} b {% endfor %}{% if add_generation_prompt %}cat{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return seeing.checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def model(folder) -> HookedModel:
    return HookedModel.from_pretrained(folder)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("after", [1, 3, 40])
def test_a_window_that_begins_inside_an_image_or_behind_it_is_transformers_own(
    folder, model, after
):
    theirs = Gemma4UnifiedForConditionalGeneration.from_pretrained(folder).eval()
    text = f"{IMAGE}" + " a" * after
    given = model.processor(
        text=[text, "the cat"],
        images=[[picture(200, 90)], []],
        images_kwargs={"max_soft_tokens": 70},
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    real = given["attention_mask"].bool()
    with torch.no_grad():
        wanted = theirs(**given).logits
    got = model([text, "the cat"], images=picture(200, 90), padding_side="left", **SMALL)
    assert torch.equal(got[real], wanted[real])
    assert torch.equal(model(**given)[real], wanted[real])
    other = HookedModel.from_pretrained(folder, image_mask="windowed")  # the control
    assert not torch.equal(other(**given)[real], wanted[real])


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def test_pictures_in_turns_of_every_role_are_transformers_own(folder):
    model = HookedModel.from_pretrained(folder)
    model.tokenizer.chat_template = model.processor.chat_template = TEMPLATE
    one, two, three = ({"type": "image", "image": picture(96, 60, seed)} for seed in range(3))
    said = {"type": "text", "text": "the cat"}
    talk = [turn("system", said, one), turn("user", two, said), turn("assistant", said, three)]
    talk.append(turn("user", said))
    wanted = model.processor.apply_chat_template(
        talk, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    )
    got = model.prepare(talk)
    assert torch.equal(got["input_ids"], wanted["input_ids"])
    assert torch.equal(got["pixel_values"], wanted["pixel_values"])
    assert [span.name for span in got.spans] == ["image[0]", "image[1]", "image[2]"]
    exchanged = [turn("system", said, two), turn("user", one, said), *talk[2:]]  # the control
    assert not torch.equal(model.prepare(exchanged)["pixel_values"], wanted["pixel_values"])


def test_gradients_reach_the_pixels_of_one_patch_alone(model):
    pixels = torch.rand(3, 288, 480, generator=torch.Generator().manual_seed(0))  # 10 x 6 patches
    pixels.requires_grad_(True)
    inputs = model.prepare(f"a {IMAGE} b", images=pixels, **SMALL)
    (span,) = inputs.spans
    assert span.shape == (10, 6)  # nothing is resampled
    which = span.labels().index("image[0] (7, 2)")
    row = model(inputs, stop_at_layer=0)[0, span.positions[which]]
    (row * torch.arange(len(row))).sum().backward()
    left, top, right, bottom = (round(side) for side in span.boxes()[which].tolist())
    moved = pixels.grad.abs().sum(0) > 0
    inside = moved[top:bottom, left:right]
    assert inside.float().mean() > 0.99 and moved.sum() == inside.sum()


def test_images_of_two_budgets_stand_in_one_prompt(model):
    shown = picture(300, 200)
    few, many = (model.embed_image(shown, image_tokens=budget) for budget in (70, 280))
    inputs = model.prepare(f"{IMAGE} a {IMAGE}", image_features=[few, many])
    stream = model(inputs, stop_at_layer=0)[0]
    for span, budget in zip(inputs.spans, (70, 280), strict=True):
        alone = model.prepare(IMAGE, images=shown, image_tokens=budget)
        wanted = model(alone, stop_at_layer=0)[0, alone.spans[0].positions]
        assert span.size == (300, 200) and 0.8 * budget < len(span) <= budget
        assert torch.equal(stream[span.positions], wanted)
    assert len(few) < len(many)


def test_a_map_is_not_taken_up_with_another_picture(folder, model, tmp_path):
    text, first, second = f"{IMAGE} a b c", picture(96, 96), picture(96, 96, 1)
    pixels = [model.prepare(text, images=one, **SMALL) for one in (first, second)]
    embedded = model.embed_image(first, **SMALL)
    features = [
        model.prepare(text, image_features=one)
        for one in (embedded, dataclasses.replace(embedded, features=-embedded.features))
    ]
    sizes = [embedded, dataclasses.replace(embedded, size=(960, 960))]  # a box is elsewhere in it
    resized = [model.prepare(text, image_features=one) for one in sizes]
    box = (0, 0, 40, 40)
    assert [str(region(model, one, box)) for one in resized] == ["image[0] in (0, 0, 40, 40)"] * 2
    for name, (one, other), units in (
        ("pixels", pixels, [["image[0]"]] * 2),
        ("features", features, [["image[0]"]] * 2),
        ("region", resized, [[region(model, given, box)] for given in resized]),
    ):
        kept = ablate(model, one, ASK, units=units[0], save_to=tmp_path / name)
        again = ablate(model, one, ASK, units=units[0], save_to=tmp_path / name)  # the control
        assert torch.equal(kept.values, again.values)
        with pytest.raises(ValueError, match="another sweep"):
            ablate(model, other, ASK, units=units[1], save_to=tmp_path / name)
    windowed = HookedModel.from_pretrained(folder, image_mask="windowed")
    with pytest.raises(ValueError, match="another sweep: its attention is"):
        ablate(windowed, pixels[0], ASK, units=["image[0]"], save_to=tmp_path / "pixels")


def test_a_region_is_each_prompts_own_pictures(model):
    inputs = model.prepare(
        [f"{IMAGE} a", f"a b {IMAGE}"],
        images=[picture(96, 96), picture(200, 50)],
        padding_side="left",
        **SMALL,
    )
    where = region(model, inputs, (0, 0, 90, 5)).where
    for span in inputs.spans:
        columns, _ = span.shape
        across = 90 * columns / span.size[0]  # patches that 90 pixels are
        wanted = {(x, 0) for x in range(columns) if x < across}
        held = where[span.row, span.positions]
        assert {tuple(place) for place in span.grid[held].tolist()} == wanted
        assert where[span.row].sum() == len(wanted)  # and nothing else of the prompt


def test_a_hook_in_place_leaves_what_was_embedded(model):
    embedded = model.embed_image(picture(96, 60), **SMALL)
    before, inputs = embedded.features.clone(), model.prepare(IMAGE, image_features=embedded)

    def emptied(features, hook):
        features.zero_()

    hooks = [("vision.hook_image_features", emptied)]
    moved = model.run_with_hooks(inputs, fwd_hooks=hooks)
    assert torch.equal(embedded.features, before)
    assert torch.equal(inputs["image_features"], before)
    assert not torch.equal(moved, model(inputs))
