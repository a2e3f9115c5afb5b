"""Pictures asked about in ways that no example asks; each answer beside transformers or a computation by hand."""

from __future__ import annotations

import base64
import copy
import dataclasses
import io
import urllib.error
import urllib.request
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from PIL import Image
from transformers import Gemma4UnifiedForConditionalGeneration

from lens_gemma4 import (
    HookedModel,
    SweepResult,
    ablate,
    attribution_ablate,
    attribution_patch,
    forms,
    logit,
    pair_effects,
    patch,
    plots,
    top_k,
)
from lens_gemma4.changes import region
from lens_gemma4.pictures import (
    ablation_over,
    as_seen,
    attention_over,
    attribution_over,
    lens_grid,
    over_picture,
)

# 5.10's own
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGE, AUDIO = seeing.IMAGE, seeing.AUDIO
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


# -- sound --------------------------------------------------------------------------------------------


def heard(model: HookedModel, clip: Any) -> torch.Tensor:
    """The samples that the model gets, as many as there are."""
    return model.prepare(AUDIO, audio=clip)["input_features"].flatten()


WAVE = np.sin(np.arange(6400) / 9) / 2  # of ten frames
BITS = (WAVE * 32768).round().astype(np.int16)


def test_whole_numbers_are_heard_as_loud_as_they_were_written(model):
    wanted = torch.tensor(BITS / 32768).float()
    assert torch.equal(heard(model, BITS), wanted) and wanted.abs().max() > 0.4
    for same in (
        torch.tensor(BITS),
        BITS.astype(">i2"),
        (BITS.astype(np.int32) << 16),
        (BITS.astype(np.float64) / 32768),
        [np.float32(v) for v in BITS / 32768],
    ):
        assert torch.equal(heard(model, same), wanted)
    unclear = [BITS.astype(np.int64), torch.tensor(BITS).long(), BITS.tolist()]
    for wrong in (*unclear, BITS.view(np.uint16), BITS.astype(np.uint32)):
        with pytest.raises(ValueError, match="does not say how loud it is: whole numbers are PCM"):
            heard(model, wrong)
    with pytest.raises(ValueError, match=r"in int32 and reaches \d+ of .* given as int16"):
        heard(model, BITS.astype(np.int32))
    with pytest.raises(ValueError, match=r"reaches 16384; floats are in \[-1, 1\]"):
        heard(model, BITS.astype(np.float32))
    assert torch.equal(heard(model, np.zeros(640, np.int32)), torch.zeros(640))  # silence is
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="no finite numbers"):
            heard(model, np.where(np.arange(640) == 9, wrong, 0.1))


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint8, np.int32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", [np.asarray, torch.tensor])
def test_the_fix_that_stereo_is_told_gives_its_channels_mean(model, dtype, axis, form):
    both = np.stack([WAVE, WAVE[::-1]], axis)
    full = {np.float32: 1, np.int16: 2**15, np.uint8: 128, np.int32: 2**31}[dtype]
    clip = form((both * full + (128 if dtype == np.uint8 else 0)).astype(dtype))
    with pytest.raises(ValueError, match="needed is one channel") as error:
        heard(model, clip)
    fix = str(error.value).split("[sample]: ")[1].split(" mixes")[0]
    mixed = heard(model, eval(fix, {"clip": clip}))
    wanted = torch.tensor(both.mean(axis)).float()
    torch.testing.assert_close(mixed, wanted, atol=1 / 100, rtol=0)
    assert (
        len(mixed) == 6400 and wanted.abs().max() > 0.2
    )  # the control: not another axis, not silence


def wav(path: Path, samples: bytes, width: int, channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, 16_000, 0, "NONE", ""))
        file.writeframes(samples)
    return path


def test_wav_files_of_every_width_and_what_is_wrong_with_them(model, tmp_path):
    deep = (BITS.astype(np.int32) << 8) | 77  # of 24 bits
    three = deep.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    found = heard(model, wav(tmp_path / "deep.wav", three, 3))
    torch.testing.assert_close(found, torch.tensor(deep / 2**23).float())
    quiet = wav(tmp_path / "quiet.wav", BITS.astype(np.int32).tobytes(), 4)
    assert 0 < heard(model, quiet).abs().max() < 1e-4  # a file says how many bits it has
    for channels in (2, 9):
        path = wav(tmp_path / "several.wav", BITS[: 90 * channels].tobytes(), 2, channels)
        with pytest.raises(ValueError, match=rf"several\.wav has {channels} channels; .*mean\(1\)"):
            heard(model, path)
    whole = wav(tmp_path / "whole.wav", BITS.tobytes(), 2).read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[:-333])
    with pytest.raises(ValueError, match=r"cut\.wav is cut short: it promises 6400 samples"):
        heard(model, tmp_path / "cut.wav")
    (tmp_path / "no.wav").write_bytes(b"RIFF")
    with pytest.raises((ImportError, ValueError), match=r"no\.wav"):
        heard(model, tmp_path / "no.wav")


def test_a_clip_and_its_rate_are_one_in_every_form(model):
    wanted = heard(model, BITS)
    for rate in (16_000, np.int64(16_000), 16_000.0, np.float32(16_000)):
        for pair in ((BITS, rate), [BITS, rate], (rate, BITS)):
            assert torch.equal(heard(model, pair), wanted)
    two = model.prepare(AUDIO * 2, audio=[(BITS, 16_000), BITS])["input_features"]
    assert torch.equal(two[0], two[1])
    for rate in (0, -16_000, float("nan")):
        with pytest.raises(ValueError, match=r"a rate is .* a number above 0"):
            heard(model, (BITS, rate))
        with pytest.raises(ValueError, match=r"a rate is .* a number above 0"):
            model.prepare(seeing.VIDEO, videos=(np.zeros((2, 9, 9, 3), np.uint8), rate))


# -- what is seen through -----------------------------------------------------------------------------


def clear(mode: str) -> Image.Image:
    """Black and clear on the left, grey on the right."""
    image = Image.new("RGBA", (480, 336), (0, 0, 0, 0))
    image.paste((90, 90, 90, 255), (240, 0, 480, 336))
    if mode in ("RGBA", "LA"):
        return image.convert(mode)
    solid = image.convert("RGB")
    solid = solid.quantize(4) if mode == "P" else solid.convert(mode)
    black = solid.getpixel((0, 0))
    solid.info["transparency"] = black
    return solid


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_white_to_the_model_and_in_figures(model, mode, tmp_path):
    image = clear(mode)
    image.save(tmp_path / "clear.png", **({} if mode in ("RGBA", "LA") else image.info))
    wanted = Image.new("RGB", image.size, "white")
    wanted.paste((90, 90, 90), (240, 0, 480, 336))
    for form in (image, tmp_path / "clear.png"):
        inputs = model.prepare(IMAGE, images=form, **SMALL)
        (span,) = inputs.spans
        assert np.array_equal(np.array(as_seen(inputs, span)), np.array(wanted))
        figure = over_picture(form, span, torch.zeros(len(span)), grey=False)
        shown = figure.layout.images[0].source.split(",")[1]
        shown = Image.open(io.BytesIO(base64.b64decode(shown)))
        assert np.array_equal(np.array(shown), np.array(wanted))
    film = model.prepare(seeing.VIDEO, videos=[image, image])
    assert np.array_equal(np.array(as_seen(film, film.spans[0])), np.array(wanted))


def test_addresses_are_read_as_files_are(model, tmp_path, monkeypatch):
    site = "https://example.org"

    def served(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        name = request.full_url.removeprefix(f"{site}/")
        if not (tmp_path / name).is_file():
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", {}, io.BytesIO())
        return io.BytesIO((tmp_path / name).read_bytes())

    monkeypatch.setattr(urllib.request, "urlopen", served)
    exif = Image.Exif()
    exif[0x0112] = 6
    clear("RGBA").resize((60, 40)).save(tmp_path / "a.png", exif=exif)
    content = (tmp_path / "a.png").read_bytes()
    wanted = model.prepare(IMAGE, images=tmp_path / "a.png", **SMALL)
    inside = "data:image/png;base64," + base64.b64encode(content).decode()
    for address in (inside, f"{site}/a.png"):
        given = model.prepare(IMAGE, images=address, **SMALL)
        assert torch.equal(given["pixel_values"], wanted["pixel_values"])
        assert given.spans[0].size == (40, 60)  # turned upright
    with pytest.raises(ValueError, match=r"/none could not be fetched: .*404"):
        model.prepare(IMAGE, images=f"{site}/none")
    with pytest.raises(ValueError, match="no picture that can be read"):
        model.prepare(IMAGE, images="data:image/png;base64,aGVsbG8=")


def test_more_than_eight_bits_are_said_to_be_cut(model):
    deep = Image.fromarray(np.full((96, 96), 30_000, np.uint16))
    with pytest.warns(UserWarning, match="up to 30000, and all above 255 are white"):
        assert model.prepare(IMAGE, images=deep)["pixel_values"].max() == 1
    scaled = Image.fromarray((np.asarray(deep) / 257).astype("uint8"))  # as the warning says
    assert model.prepare(IMAGE, images=scaled)["pixel_values"].max() < 0.5
    model.prepare(IMAGE, images=Image.fromarray(np.full((96, 96), 200, np.uint16)))  # none
    for white, fix in (
        (255.0, lambda image: image.convert("RGB")),
        (1.0, lambda image: image.point(lambda v: v * 255).convert("RGB")),
    ):
        image = Image.new("F", (96, 96), white)
        with pytest.raises(ValueError, match=rf"mode F, with values from {white:g} to {white:g}"):
            model.prepare(IMAGE, images=image)
        assert model.prepare(IMAGE, images=fix(image))["pixel_values"].max() == 1


def test_channels_that_may_be_either_axis_are_asked_for(model):
    array = np.random.default_rng(0).integers(0, 256, (3, 40, 3), dtype=np.uint8)
    for wrong, given in ((array, "images"), (np.stack([array, array]), "videos")):
        text = IMAGE if given == "images" else seeing.VIDEO
        with pytest.raises(ValueError, match=r"channels may be the first or the last of these"):
            model.prepare(text, **{given: wrong})
    image = Image.fromarray(array)
    assert model.prepare(IMAGE, images=image).spans[0].size == (40, 3)
    assert model.prepare(seeing.VIDEO, videos=[image]).spans[0].size == (40, 3)
    with pytest.raises(ValueError, match=r"Several: list\(array\)"):
        model.prepare(IMAGE, images=np.zeros((2, 9, 8, 3), np.uint8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (io.BytesIO(b"x"), r"an image is BytesIO, .*PIL\.Image\.open"),
        (b"x", "an image is bytes"),
        ({}, "an image is dict"),
        ({1, 2}, "an image is set"),
        ((i for i in range(3)), "an image is generator"),
        (np.array([None, "a"]), "an image is ndarray, which is no array of numbers"),
        (np.full((8, 8, 3), 300, np.uint16), "values from 0|values from 300 to 300"),
    ],
)
def test_what_is_no_picture_is_named(model, given, message):
    with pytest.raises(ValueError, match=message):
        model.prepare(IMAGE, images=given)


def test_arrays_and_frames_of_every_kind_are_the_same_picture(model):
    array = np.asarray(picture(60, 40))
    wanted = model.prepare(IMAGE, images=array, **SMALL)["pixel_values"]
    for same in (array.astype(np.uint16), array.astype(">i4"), array.astype(np.uint32)):
        assert torch.equal(model.prepare(IMAGE, images=same, **SMALL)["pixel_values"], wanted)
    for budget in (np.int64(70), 70.0):
        (tokens,) = forms.budget(budget).values()
        assert tokens == 70 and type(tokens) is int
    frames = torch.tensor(np.stack([array, array])).float() / 255
    whole = model.prepare(seeing.VIDEO, videos=frames.clone())["pixel_values_videos"]
    listed = [frame.clone().requires_grad_(True) for frame in frames]
    for form in (listed, tuple(listed)):
        found = model.prepare(seeing.VIDEO, videos=form)["pixel_values_videos"]
        assert torch.equal(found.detach(), whole)
    half = model.prepare(seeing.VIDEO, videos=list(frames.bfloat16()))["pixel_values_videos"]
    assert (half - whole).abs().max() < 0.01
    with pytest.raises(ValueError, match=r"frames in torch.float32 and torch.uint8: give one"):
        model.prepare(seeing.VIDEO, videos=[frames[0], array])


def test_chat_parts_that_are_none_are_named(folder):
    model = HookedModel.from_pretrained(folder)
    model.tokenizer.chat_template = model.processor.chat_template = TEMPLATE
    for content, message in (
        (["the cat"], r"got 'the cat' \(str\)"),
        ({"type": "text", "text": "a"}, r"\(dict\)"),
    ):
        with pytest.raises(
            ValueError, match=f"a content is a text or a list of parts, .*{message}"
        ):
            model.prepare([{"role": "user", "content": content}])
    file = io.BytesIO()
    picture(60, 40).save(file, "png")
    part = {"type": "image", "base64": base64.b64encode(file.getvalue()).decode()}
    given = model.prepare([turn("user", part)])
    wanted = model.prepare([turn("user", {"type": "image", "image": picture(60, 40)})])
    assert torch.equal(given["pixel_values"], wanted["pixel_values"])
    with pytest.raises(ValueError, match="is ImageFeatures: give it by image_features="):
        part = {"type": "image", "image": model.embed_image(picture(60, 40))}
        model.prepare([turn("user", part)])
    with pytest.raises(ValueError, match=r"is one message: a conversation is a list of them"):
        model.prepare(turn("user", part))


def test_a_checkpoint_of_text_says_that_it_takes_no_media(tmp_path):
    import talking

    model = HookedModel.from_pretrained(talking.make(tmp_path))
    assert model("a cat", images=[]).shape == model("a cat").shape
    for given in ({"images": picture(9, 9)}, {"audio": WAVE}, {"videos": [picture(9, 9)]}):
        with pytest.raises(ValueError, match=r"has no (vision|audio) embedder: it takes none"):
            model("a cat", **given)
    with pytest.raises(ValueError, match="is of text alone"):
        _ = model.image_token


# -- maps ---------------------------------------------------------------------------------------------


def test_a_mean_is_of_its_own_unit_whatever_stands_beside_it(model):
    inputs = model.prepare(f"the cat {IMAGE} sat on a", images=picture(96, 60), **SMALL)
    box = region(model, inputs, (0, 0, 40, 40))
    for call in (ablate, attribution_ablate):
        head, image, part = (
            call(model, inputs, ASK, units=[one], mode="mean").values
            for one in ("L2H1", "image[0]", box)
        )
        for beside in (["L2H1", "image[0]", box], [box, "L2H1", "image[0]"]):
            found = call(model, inputs, ASK, units=beside, mode="mean")
            values = dict(zip(found.names, found.values, strict=True))
            wanted = {"L2H1": head, "image[0]": image, str(box): part}
            for name, value in wanted.items():
                torch.testing.assert_close(values[name], value[0], atol=1e-4, rtol=0)
        assert (image - part).abs().min() > 1e-3
    z = model.run_with_cache(inputs, names_filter="*.2.attn.hook_z")[1]["z", 2][0, :, 1]
    seen = inputs["input_ids"][0] == model.cfg.image_token_id

    def with_mean(mean: torch.Tensor) -> torch.Tensor:
        def put(value: torch.Tensor, hook: Any) -> torch.Tensor:
            value[:, :, 1] = mean
            return value

        return model.run_with_hooks(inputs, fwd_hooks=[("blocks.2.attn.hook_z", put)])[0, -1, 12]

    found = ablate(model, inputs, ASK, units=["L2H1", "image[0]"], mode="mean").values[0, 0]
    torch.testing.assert_close(found, with_mean(z[1:].mean(0)), atol=1e-4, rtol=0)
    assert (found - with_mean(z[seen].mean(0))).abs() > 1e-3  # the control: that of images


def test_prompts_without_a_picture_do_not_count(model, tmp_path):
    texts = [f"{IMAGE} a", "the cat sat", f"{IMAGE} {IMAGE} b"]
    images = [picture(96, 96, seed) for seed in range(3)]
    inputs = model.prepare(texts, images=images, padding_side="left", **SMALL)
    found = ablate(model, inputs, ASK, units=["image[0]", "image[1]", "L1H0"])
    assert found.values.isnan().tolist() == [
        [False, True, False],
        [True, True, False],
        [False, False, False],
    ]
    mean = found.mean()
    torch.testing.assert_close(mean[0], found.effect[0, [0, 2]].mean())
    torch.testing.assert_close(mean[1], found.effect[1, 2])
    torch.testing.assert_close(mean[2], found.effect[2].mean())
    assert (mean[0] - found.effect[0, [0, 2]].sum() / 3).abs() > 1e-3  # the control
    assert dict(found.top())["image[1]"] == mean[1].item()
    low, high = found.interval()
    assert low[0] <= mean[0] <= high[0] and low[0] < high[0]
    assert low[1].isnan() and not low[2].isnan()
    assert (
        low[0] >= found.effect[0, [0, 2]].min() - 1e-6
    )  # 0 is no effect of a prompt that lacks it
    found.save(tmp_path / "a.parquet")
    again = SweepResult.load(tmp_path / "a.parquet")
    assert torch.equal(again.lacks, found.lacks) and torch.equal(again.mean(), mean)
    assert torch.equal(again.values.isnan(), found.lacks)
    estimate = attribution_ablate(model, inputs, ASK, units=["image[1]", "L1H0"], verify=2)
    assert torch.equal(estimate.lacks, found.lacks[1:])
    for name, value in zip(estimate.exact.names, estimate.exact.mean(), strict=True):
        torch.testing.assert_close(value, mean[found.names.index(name)], atol=1e-4, rtol=0)
    together = pair_effects(model, inputs, ASK, units=["image[0]", "image[1]", "L1H0"])
    torch.testing.assert_close(together.alone.mean(), mean, atol=1e-4, rtol=0)
    assert together.interaction.isnan().sum(1).tolist() == [2, 1, 2]  # both pictures in one prompt
    torch.testing.assert_close(together.mean()[0], together.interaction[0, 2])
    torch.testing.assert_close(together.grid()[0, 2], together.interaction[1, [0, 2]].mean())
    assert (together.grid()[0, 2] - together.interaction[1, [0, 2]].sum() / 3).abs() > 1e-4
    patches = ablate(model, inputs, ASK, units="patches")
    assert not patches.grid().isnan().all() and patches.part(slice(0, 2)).lacks.shape == (2, 3)
    broken = dataclasses.replace(found, values=found.values.clone())
    broken.values[2, 0] = torch.nan  # of a run, which is no lack
    assert broken.mean()[2].isnan()


def test_patching_puts_no_patch_where_another_stands(model):
    wide, high = (picture(*size) for size in ((1100, 500), (500, 1100)))
    texts = [f"a {IMAGE} b", f"a {IMAGE} b"]
    ones, others = (model.prepare(texts[0], images=one, **SMALL) for one in (wide, high))
    assert ones["input_ids"].shape == others["input_ids"].shape
    assert ones.spans[0].shape == others.spans[0].shape[::-1]
    for call in (patch, attribution_patch):
        with pytest.raises(ValueError, match=r"image\[0\] \(.* in place of image\[0\] \("):
            call(model, ones, others, ASK, units="patches")
        assert call(model, ones, others, ASK, units="images").values.shape == (1, 1)  # as a whole
    same = model.prepare(texts[0], images=picture(1100, 500, 1), **SMALL)
    for call in (patch, attribution_patch):
        found = call(model, same, ones, ASK, units="patches")  # by default, where they stand
        assert len(found.names) == len(ones.spans[0]) and found.names[0] == "image[0] (0, 0)"
    third = patch(model, same, ones, ASK, units=["image[0] (3, 1)"]).values
    spot = ones.spans[0].positions[ones.spans[0].labels().index("image[0] (3, 1)")]
    stream = model(same, stop_at_layer=0)

    def put(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, spot] = stream[:, spot]
        return value

    wanted = model.run_with_hooks(ones, fwd_hooks=[("blocks.0.hook_resid_pre", put)])[:, -1, 12]
    torch.testing.assert_close(third[0], wanted, atol=1e-3, rtol=0)
    assert (third[0] - model(ones)[:, -1, 12]).abs().max() > 1e-2
    batch = model.prepare(texts, images=[wide, high], **SMALL)
    shifted = model.prepare(f"a a {IMAGE}", images=wide, **SMALL)
    for how in (
        {"mode": "resample"},
        {"mode": "mean", "per_position": True},
    ):
        with pytest.raises(ValueError, match="in place of image"):
            ablate(model, batch, ASK, units="patches", **how)
        with pytest.raises(ValueError, match="in place of image"):
            ablate(model, ones, ASK, units="patches", reference=shifted, **how)
        found = ablate(model, ones, ASK, units="patches", reference=same, **how)
        assert torch.equal(found.values, patch(model, same, ones, ASK, units="patches").values)
    with pytest.raises(ValueError, match="goes over image tokens, and the reference holds none"):
        ablate(model, ones, ASK, units="images", mode="mean", reference="the cat")


def test_a_region_of_another_call_is_refused(model):
    inputs = model.prepare(f"a {IMAGE} b c", images=picture(96, 96), **SMALL)
    box = (0, 0, 40, 40)
    unit = region(model, inputs, box)
    for other in (
        model.prepare(f"a b {IMAGE} c", images=picture(96, 96), **SMALL),  # of equal length
        model.prepare(f"a {IMAGE} b", images=picture(96, 96), **SMALL),
        model.prepare(f"a {IMAGE} b c", images=picture(192, 192), **SMALL),  # the same places
        model.prepare("a b c"),
    ):
        with pytest.raises(ValueError, match="was made for another call"):
            ablate(model, other, ASK, units=[unit])
    again = model.prepare(f"a {IMAGE} b c", images=picture(96, 96, 1), **SMALL)
    ablate(model, again, ASK, units=[unit])  # another picture in the same places


def test_a_region_of_a_processors_output_takes_the_size(model):
    known = model.prepare(f"a {IMAGE} b", images=picture(96, 60), **SMALL)
    bare = model.prepare(**dict(known))
    with pytest.raises(ValueError, match=r"or its size=\(width, height\)"):
        region(model, bare, (0, 0, 40, 20))
    unit = region(model, bare, (0, 0, 40, 20), size=(96, 60))
    assert torch.equal(unit.where, region(model, known, (0, 0, 40, 20)).where)
    ablate(model, bare, ASK, units=[unit])
    (span,) = known.spans
    with pytest.raises(ValueError, match=r"is \(96, 60\) \[width height\] and not \(960, 600\)"):
        span.boxes((960, 600))
    with pytest.raises(ValueError, match="got 3 numbers"):
        span.tokens_in((0, 0, 9))


def test_patches_go_by_names_joined_and_beside_other_units(model):
    inputs = model.prepare(f"a {IMAGE} b", images=picture(96, 60), **SMALL)
    one, two = "image[0] (0, 0)", "image[0] (1, 0)"
    alone = ablate(model, inputs, ASK, units=[one, two])
    joined = ablate(model, inputs, ASK, units=[f"{one} & {two}", [two, one]])
    assert joined.names == [f"{one} & {two}", f"{two} & {one}"]
    spots = inputs.spans[0].positions[:2]

    def put(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, spots] = 0
        return value

    wanted = model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.hook_resid_pre", put)])[0, -1, 12]
    torch.testing.assert_close(joined.values[:, 0], wanted.expand(2), atol=1e-4, rtol=0)
    assert (alone.values - wanted).abs().min() > 1e-4
    named = ablate(model, inputs, ASK, units="image[0]")
    assert torch.equal(named.values, ablate(model, inputs, ASK, units="images").values)
    with pytest.raises(ValueError, match=r"the prompts hold no image\[1\]"):
        ablate(model, inputs, ASK, units="image[1]")
    with pytest.raises(ValueError, match="of two kinds"):
        ablate(model, inputs, ASK, units=[f"{one} & L0H0"])
    mixed = {"units": ["L1H0", one], "positions": "each"}
    pos = inputs["input_ids"].shape[1]
    for found in (
        ablate(model, inputs, ASK, **mixed),
        attribution_ablate(model, inputs, ASK, **mixed),
    ):
        assert found.names == [*(f"L1H0 @ {p}" for p in range(pos)), one]
    torch.testing.assert_close(
        ablate(model, inputs, ASK, **mixed).values[-1], alone.values[0], atol=1e-4, rtol=0
    )
    estimates = attribution_ablate(model, inputs, ASK, units=["L1H0", one]).values
    by_place = attribution_ablate(model, inputs, ASK, **mixed)
    torch.testing.assert_close(estimates[1], by_place.values[-1])  # at its own place alone
    torch.testing.assert_close(estimates[0] - by_place.baseline, by_place.effect[:-1].sum(0))
    torch.testing.assert_close(
        estimates[1], attribution_ablate(model, inputs, ASK, units=[one]).values[0]
    )
    curves = top_k(model, inputs, ASK, ablate(model, inputs, ASK, **mixed), [0, 2])
    assert torch.equal(curves.kept[0], curves.empty)


# -- what is kept of a call ---------------------------------------------------------------------------


def test_spans_follow_ids_that_are_written_into(model):
    inputs = model.prepare(f"a b {IMAGE}", images=picture(96, 60), **SMALL)
    (before,) = inputs.spans
    assert inputs.spans[0] is before
    ids = inputs["input_ids"]
    ids[0, 1:] = ids[0, 1:].roll(-1)
    (after,) = inputs.spans
    assert torch.equal(after.positions, before.positions - 1)


def test_no_image_has_no_features(model):
    for none in (None, []):
        with pytest.raises(ValueError, match="there is no image to embed"):
            model.embed_image(none)


def test_features_without_places_are_refused(model):
    embedded = model.embed_image(picture(96, 60), **SMALL)
    cut = copy.copy(embedded)
    object.__setattr__(cut, "features", embedded.features[:-1])  # past the types' checker
    with pytest.raises(ValueError, match=r"has \d+ features and \d+ places in its grid"):
        model.prepare(IMAGE, image_features=cut)


# -- figures ------------------------------------------------------------------------------------------


def test_figures_refuse_a_run_that_is_not_the_spans(model):
    shown = picture(96, 96)
    texts = [f"a {IMAGE} b", f"a {IMAGE} c"]
    batch = model.prepare(texts, images=[shown, shown], **SMALL)
    span = batch.spans[0]
    _, cache = model.run_with_cache(batch, names_filter="*pattern")
    attention_over(shown, span, cache, 3)
    with pytest.raises(ValueError, match="2 prompts and this cache holds 1 of them"):
        attention_over(shown, span, cache.apply_slice_to_batch_dim(1), 3)
    others = [
        model.prepare("a " * 100),
        model.prepare(f"a a {IMAGE} b", images=shown, **SMALL),
        model.prepare(f"a {IMAGE} b", images=picture(400, 96), **SMALL),
    ]
    for other in others:
        _, run = model.run_with_cache(other, names_filter="*pattern")
        lens = model.logit_lens(other)
        calls = [
            lambda run=run: attention_over(shown, span, run, 3),
            lambda lens=lens: lens_grid(shown, span, lens),
        ]
        for by, positions in (("source", "last"), ("token", None)):
            found = model.attribute(other, 5, by=by, positions=positions)
            calls.append(lambda found=found: attribution_over(shown, span, found))
        for call in calls:
            with pytest.raises(ValueError, match="this span is of another call"):
                call()
    result = ablate(model, others[1], ASK, units="patches")
    with pytest.raises(ValueError, match="this span is of another call"):
        ablation_over(shown, span, result)
    ablation_over(shown, others[1].spans[0], result)  # the control


def test_what_a_figure_is_asked_for_is_checked(model):
    shown = picture(96, 60)
    inputs = model.prepare(f"a {IMAGE} b", images=shown, **SMALL)
    (span,) = inputs.spans
    _, cache = model.run_with_cache(inputs, names_filter="*pattern")
    lens = model.logit_lens(inputs)
    found = model.attribute(inputs, 5, by="source")
    three = np.int64(3)
    assert attention_over(shown, span, cache, three, np.int64(1), np.int64(2)).data
    assert attribution_over(shown, span, found, layer=three, head=np.int64(1)).data
    assert lens_grid(shown, span, lens, layer=three).data
    empty: list[int] = []
    results = ablate(model, inputs, {"one": ASK, "two": logit(5)}, units="patches")
    for call, message in (
        (lambda: attention_over(shown, span, cache, empty), "layer is empty"),
        (lambda: over_picture(shown, span, {}), "values is empty"),
        (lambda: over_picture(shown, span, torch.full((len(span),), torch.inf)), "are infinite"),
        (
            lambda: attribution_over(shown, span, found, head=9),
            r"head is 9; there are heads 0 to \d",
        ),
        (lambda: attribution_over(shown, span, found, layer=99), "layer is 99; there are blocks"),
        (lambda: attribution_over(shown, span, found, pos=7), "pos is 7; it was asked"),
        (lambda: lens_grid(shown, span, lens, layer=99), "^block 99 was not read"),
        (lambda: ablation_over(shown, span, results), r"results of 2 metrics: .*result\['one'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_maps_of_pictures_are_drawn_as_pictures_are(model):
    inputs = model.prepare(f"a {IMAGE} b", images=picture(200, 90), **SMALL)
    (span,) = inputs.spans
    columns, rows = span.shape
    found = ablate(model, inputs, ASK, units="patches")
    drawn = np.array([list(row) for row in found.plot().data[0].z])
    assert drawn.shape == (rows, columns) and columns > rows
    x, y = span.grid.unbind(1)
    assert np.array_equal(drawn[y, x], found.mean().numpy())
    assert found.grid().shape == (1, columns, rows)  # by its axes, as ever
    each = ablate(model, inputs, ASK, units="resid_pre", layers=[2], positions="each")
    for figure in (each.plot(), model.logit_lens(inputs).plot()):
        ticks = figure.layout.xaxis
        assert len(ticks.tickvals) == len(ticks.ticktext) <= 640 / 17 < len(figure.data[0].z[0])
    assert len(plots.heatmap([[0.0] * 9], [""], ["image[0] (0, 0)"] * 9).layout.xaxis.tickvals) == 9
    told = [label for label, _ in each.top(len(each.names))]
    spot = int(span.positions[7])
    assert f"2_resid_pre @ {spot} image[0] (7, 0)" in told and "2_resid_pre @ 0" in told
    frame = each.to_dataframe()
    assert frame["token"][frame["pos"] == spot].tolist() == ["image[0] (7, 0)"]
    assert each.top(1)[0][0] in repr(each)


def test_what_is_shown_of_a_call_says_what_it_is(model):
    shown = picture(96, 60)
    inputs = model.prepare(f"a {IMAGE} b", images=shown, **SMALL)
    (span,) = inputs.spans
    first, last = span.positions[0], span.positions[-1]
    assert repr(span) == (
        f"Span(image[0] of prompt 0: positions {first} to {last}, {span.shape[0]} x {span.shape[1]} patches of 96 x 60 pixels)"
    )
    embedded = model.embed_image(shown, **SMALL)
    assert repr(embedded) == f"ImageFeatures({len(span)} patches of 96 x 60 pixels)"
    _, cache = model.run_with_cache(inputs, names_filter="*.3.attn.hook_pattern")
    end = inputs["input_ids"].shape[1] - 1
    title = attention_over(shown, span, cache).layout.title.text.replace("<br>", " ")
    assert f"position {end} (' b') gives" in title
    film = model.prepare(seeing.VIDEO, videos=[shown, shown])
    with pytest.raises(
        ValueError, match=r"frames and sound are no units .* positions=span\.positions"
    ):
        ablate(model, film, ASK, units="patches")
    frame = film.spans[1]
    found = ablate(
        model, film, ASK, units="resid_pre", layers=0, positions=frame.positions.tolist()
    )  # as it says
    assert found.effect.abs().max() > 1e-3
