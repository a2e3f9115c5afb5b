"""Text with pictures, sound and films, through our own call and through transformers' processor and model: no bit differs.

A hundred pictures of odd sizes, ratios and kinds, at every budget of tokens, in batches whose longest prompt has 0 to 40 pads
on its left. Every value that transformers shows is compared. A few of them run by default, all with `-m slow`.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fixtures
import numpy as np
import pytest
import seeing
import torch
from PIL import Image, ImageOps
from seeing import AUDIO, BUDGETS, IMAGE, VIDEO
from test_parity import unchecked_annotations  # noqa: F401
from torch import Tensor

from lens_gemma4 import HookedModel
from lens_gemma4.check import (
    compare,
    difference_of_values,
    load_reference,
    run_reference,
    shown_points,
)

pytestmark = [
    pytest.mark.usefixtures("unchecked_annotations"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # 5.10's own
    pytest.mark.filterwarnings(
        "ignore:an image of mode I:UserWarning"
    ),  # it is cut at 255, by both
]
NEW = fixtures.VERSION >= (5, 24)
N_PICTURES = 100
TURNED = 0x0112  # the EXIF tag of how a picture is to be turned, 1 to 8

# -- pictures -----------------------------------------------------------------------------------------

SIZES = [  # width, height
    (1, 1),
    (3, 900),
    (4000, 50),
    (900, 3),
    (50, 4000),
    (1, 70),
    (2000, 1),
    (47, 49),
    (480, 336),  # its own size at the budget of 70
    (2000, 2000),
    (97, 31),
]
KINDS = [  # the mode of the picture, and how it is given
    ("RGB", "object"),
    ("L", "object"),
    ("P", "object"),
    ("RGBA", "object"),
    ("I;16", "object"),
    ("RGB", "turned png"),
    ("RGB", "array"),
    ("LA", "object"),
    ("1", "object"),
    ("P with a clear colour", "object"),
    ("RGB", "turned jpeg"),
    ("CMYK", "object"),
    ("RGBA", "png"),
    ("I;16", "png"),
    ("YCbCr", "object"),
    ("HSV", "object"),
    ("I", "object"),
    ("L", "png"),
    ("RGB", "turned object"),
    ("RGB", "channels first"),
    ("L", "turned jpeg"),
    ("P", "gif"),
    ("RGB", "webp"),
    ("CMYK", "turned tiff"),
    ("RGB", "bmp"),
    ("RGB", "turned png"),
]


class Plan(NamedTuple):
    mode: str
    form: str
    size: tuple[int, int]
    turn: int  # the orientation in the file


class Picture(NamedTuple):
    """A picture as it is given to us, and as transformers' processor gets it."""

    ours: Any
    theirs: Any


def planned(index: int) -> Plan:
    rng = random.Random(index)
    mode, form = KINDS[index % len(KINDS)]
    size = (round(2 ** rng.uniform(0, 10)), round(2 ** rng.uniform(0, 10)))
    size = SIZES[index % len(SIZES)] if index < 3 * len(SIZES) else size
    if form in ("array", "channels first") and min(size) < 5:
        size = (size[0] + 5, size[1] + 5)  # where channels are is a question of its own, see below
    return Plan(mode, form, size, 1 + (index + index // len(KINDS)) % 8)


def drawn(mode: str, size: tuple[int, int], seed: int) -> Image.Image:
    """Noise over a slope, so that no two patches are alike, in any of the modes."""
    rng = np.random.default_rng(seed)
    width, height = size
    slope = np.add.outer(np.arange(height) / height, np.arange(width) / width)[..., None] * 90
    values = slope + rng.integers(0, 75, (height, width, 4))
    rgb = Image.fromarray(values[..., :3].astype(np.uint8))
    if mode == "RGBA" or mode == "LA":
        picture = rgb.convert(mode)
        picture.putalpha(Image.fromarray(values[..., 3].astype(np.uint8)))
        return picture
    if mode.startswith("P"):
        picture = rgb.quantize(16)
        if mode != "P":
            picture.info["transparency"] = 3
        return picture
    if mode == "I;16":  # both below and above what eight bits hold
        return Image.fromarray((values[..., 0] * 3).astype(np.uint16))
    return rgb.convert(mode)


def over_white(image: Image.Image) -> Image.Image:
    """As 5.24's processor shows what is transparent; 5.10's shows what lies behind, so it is given the picture shown."""
    if NEW or not ("A" in image.getbands() or "transparency" in image.info):
        return image
    clear = image.convert("RGBA")
    shown = Image.new("RGBA", image.size, "white")
    shown.alpha_composite(clear)
    return shown.convert("RGB")


def picture(index: int, folder: Path) -> Picture:
    mode, form, size, turn = planned(index)
    image = drawn(mode, size, index)
    if form == "object":
        return Picture(image, over_white(image))
    if form == "array":
        return Picture(np.asarray(image), image)
    if form == "channels first":
        return Picture(torch.tensor(np.asarray(image)).permute(2, 0, 1), image)
    exif = Image.Exif()
    exif[TURNED] = turn if "turned" in form else 1
    if form == "turned object":  # an object is taken as it is, by both
        file = io.BytesIO()
        image.save(file, "png", exif=exif)
        opened = Image.open(file)
        return Picture(opened, opened.copy())
    path = folder / f"{index}.{form.split()[-1]}"
    image.save(path, exif=exif)
    with Image.open(path) as stored:
        return Picture(path, over_white(ImageOps.exif_transpose(stored)))


def test_the_pictures_are_of_every_kind() -> None:
    """A generated set proves nothing about what it does not hold."""
    plans = [planned(i) for i in range(N_PICTURES)]
    assert {(p.mode, p.form) for p in plans} == set(KINDS)
    assert set(SIZES) <= {p.size for p in plans}
    ratios = [p.size[0] / p.size[1] for p in plans]
    assert min(ratios) < 1 / 70 and max(ratios) > 70
    assert {p.turn for p in plans if p.form.startswith("turned")} == set(range(1, 9))


# -- the two ways -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks, so that values of prompts of 2,000 tokens fit; the window is shorter than any picture."""
    return seeing.checkpoint(tmp_path_factory.mktemp("seeing"), **SMALL)


SMALL = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WAYS = [(dtype, attn) for dtype in (torch.float32, torch.bfloat16) for attn in ("sdpa", "eager")]


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Iterator[dict[Any, tuple[Any, HookedModel]]]:
    """transformers and ours, each loaded once for each dtype and attention."""
    yield {
        (dtype, attn): (
            load_reference(folder, dtype, attn),
            HookedModel.from_pretrained(folder, dtype=dtype, attn_implementation=attn),
        )
        for dtype, attn in WAYS
    }


def filled(processor: Any, texts: list[str], n_pads: int, **media: Any) -> list[str]:
    """One prompt of words more, so long that the longest of the others gets `n_pads` pads."""
    longest = max(
        map(len, processor(text=texts, **media, text_kwargs={"padding": False})["input_ids"])
    )
    return [*texts, " ".join(["cat"] * (longest + n_pads - 1))]  # and a BOS


def assert_same(
    pair: tuple[Any, HookedModel],
    ours: dict[str, Any],
    theirs: dict[str, Tensor],
    n_pads: int | None = None,
) -> dict[str, Tensor]:
    """Every value of our own call on text and media beside transformers' on what its processor made."""
    hf, model = pair
    theirs = {
        k: v for k, v in theirs.items() if not k.startswith(("num_soft_tokens", "video_meta"))
    }
    given = model.prepare(**ours)
    for name, value in theirs.items():
        if name in given:
            assert torch.equal(given[name], torch.as_tensor(value)), name
    assert set(theirs) - set(given) <= {"attention_mask", "mm_token_type_ids"}
    assert "attention_mask" in given or bool(theirs["attention_mask"].all())
    if n_pads is not None:
        assert (1 - theirs["attention_mask"]).sum(1).sort().values[1] == n_pads
    values: dict[str, Tensor] = {}
    blind = run_reference(hf, theirs, values.__setitem__)
    assert set(values) == set(shown_points(model.cfg, theirs, model.attn_implementation))
    logits, cache = model.run_with_cache(**ours)
    first = difference_of_values(cache, values, blind)
    assert first is None, f"first difference, in order of computation: {first}"
    assert compare("hook_logits", logits, values["hook_logits"], blind).equal
    assert compare("hook_logits", model(**ours), values["hook_logits"], blind).equal
    assert compare("hook_logits", model(**theirs), values["hook_logits"], blind).equal
    return values


LAYOUTS = [(1,), (2, 0), (1, 0, 2), (0, 1, 1), (1, 1)]  # pictures in each prompt
PER_ROUND = sum(map(sum, LAYOUTS))
N_BATCHES = N_PICTURES // PER_ROUND * len(LAYOUTS)


def batch_of(index: int, folder: Path) -> tuple[list[str], list[Picture]]:
    """Prompts with pictures in some of them; the batches go through all pictures."""
    turn, place = divmod(index, len(LAYOUTS))
    first = turn * PER_ROUND + sum(map(sum, LAYOUTS[:place]))
    taken = [picture(first + i, folder) for i in range(sum(LAYOUTS[place]))]
    words = iter(["what is", "a cat", "the mat"])
    return [f"{next(words)} {f'{IMAGE} b ' * n}c" for n in LAYOUTS[place]], taken


def check_batch(index: int, budget: int, pair: tuple[Any, HookedModel], folder: Path) -> None:
    texts, taken = batch_of(index, folder)
    processor, n_pads = pair[1].processor, index % 41
    chosen = {"images_kwargs": {"max_soft_tokens": budget}}
    queue = iter([p.theirs for p in taken])
    rows = [[next(queue) for _ in range(text.count(IMAGE))] for text in texts]
    texts = filled(processor, texts, n_pads, images=rows, **chosen)
    theirs = processor(text=texts, images=[*rows, []], return_tensors="pt", **chosen)
    ours = {"input": texts, "images": [p.ours for p in taken], "image_tokens": budget}
    values = assert_same(pair, ours, theirs, n_pads)
    n_tokens = int((theirs["image_position_ids"] != -1).all(-1).sum())
    assert len(values["vision.hook_image_features"]) == n_tokens <= len(taken) * budget


def test_the_batches_go_through_every_picture_and_every_number_of_pads() -> None:
    assert N_BATCHES // len(LAYOUTS) * PER_ROUND == N_PICTURES
    assert {i % 41 for i in range(N_BATCHES)} == set(range(41))


# The first two rounds hold the odd sizes; the budgets and the ways take turns.
@pytest.mark.parametrize("index", range(2 * len(LAYOUTS)))
def test_pictures_are_equal(index: int, pairs: Any, tmp_path: Path) -> None:
    budget, way = BUDGETS[index % 4], WAYS[index % len(WAYS)]
    check_batch(index, budget, pairs[way], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*sliding blocks then compute mostly what nobody sees:UserWarning"
)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("index", range(N_BATCHES))
def test_every_picture_is_equal(index: int, budget: int, pairs: Any, tmp_path: Path) -> None:
    """Each picture at each budget, and each budget in each dtype and attention."""
    way = WAYS[(index + BUDGETS.index(budget)) % len(WAYS)]
    check_batch(index, budget, pairs[way], tmp_path)


def test_the_largest_budget_is_longer_than_the_12bs_window(tmp_path: Path) -> None:
    """33 x 33 patches where sliding blocks see 1,024 positions: forward lets the image leave its window."""
    folder = seeing.checkpoint(tmp_path, **SMALL, sliding_window=1024)
    pair = load_reference(folder, torch.float32, "sdpa"), HookedModel.from_pretrained(folder)
    image = drawn("RGB", (300, 300), 1)
    chosen = {"images_kwargs": {"max_soft_tokens": 1120}}
    theirs = pair[1].processor(
        text=[f"a {IMAGE} cat"], images=[[image]], return_tensors="pt", **chosen
    )
    ours = {"input": f"a {IMAGE} cat", "images": image, "image_tokens": 1120}
    assert len(assert_same(pair, ours, theirs)["vision.hook_image_features"]) == 33 * 33
    windowed = HookedModel.from_pretrained(folder, image_mask="windowed")
    assert (windowed(**ours) - pair[1](**ours)).abs().max() > 1e-3  # the control: the rule counts


def test_one_bit_of_one_pixel_is_found(pairs: Any) -> None:
    """The control: what the comparison would say of a picture that is a grey level off in one place."""
    hf, model = pairs[torch.float32, "sdpa"]
    image = drawn("RGB", (480, 336), 1)
    other = image.copy()
    red, green, blue = image.getpixel((100, 200))
    other.putpixel((100, 200), (red, green, blue ^ 1))
    theirs = dict(
        model.processor(
            text=[IMAGE],
            images=[[image]],
            return_tensors="pt",
            images_kwargs={"max_soft_tokens": 70},
        )
    )
    values: dict[str, Tensor] = {}
    blind = run_reference(hf, theirs, values.__setitem__)
    found = []
    for given in (image, other):
        _, cache = model.run_with_cache(IMAGE, images=given, image_tokens=70)
        found.append(difference_of_values(cache, values, blind))
    assert found[0] is None
    assert found[1] is not None and found[1].name == "vision.patch_ln1.hook_out"


# -- files, as the processor reads them itself --------------------------------------------------------

FILES = {  # a file: why transformers' processor, given its path, has other pixels than given the picture; None: the same
    "rgb.png": None,
    "grey.png": None,
    "palette.png": None,
    "rgb.jpeg": None,
    "grey.jpeg": None,
    "rgb.webp": None,
    "palette.gif": None,
    "alpha.png": "what lies behind: the path drops the alpha, the picture goes on white",
    "deep.png": "16 bits are divided by 255 as 8 are, so that values reach 257",
    "turned.png": None if NEW else "the orientation is not asked for",
    "rgb.bmp": "not decoded",
    "rgb.tiff": "not decoded",
}
MODES = {"grey": "L", "palette": "P", "alpha": "RGBA", "deep": "I;16"}


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_pictures_are(name: str, pairs: Any, tmp_path: Path) -> None:
    """A path is the picture that viewers show; where the processor's own reading is another, the table says why."""
    model, path = pairs[torch.float32, "sdpa"][1], tmp_path / name
    exif = Image.Exif()
    exif[TURNED] = 6 if name.startswith("turned") else 1
    drawn(MODES.get(name.split(".")[0], "RGB"), (90, 60), 0).save(path, exif=exif)
    with Image.open(path) as stored:
        upright = ImageOps.exif_transpose(stored)
    ours = model.encode_inputs(IMAGE, images=path)["pixel_values"]
    assert torch.equal(ours, model.encode_inputs(IMAGE, images=upright)["pixel_values"])
    assert ours.min() >= 0 and ours.max() <= 1
    if FILES[name] == "not decoded":
        with pytest.raises(RuntimeError, match="decode"):
            model.processor(text=[IMAGE], images=[[str(path)]], return_tensors="pt")
        return
    theirs = model.processor(text=[IMAGE], images=[[str(path)]], return_tensors="pt")
    assert torch.equal(ours, theirs["pixel_values"]) == (FILES[name] is None)
    # Whatever it made of the file, its output is run as it is.
    assert torch.equal(model(**theirs), pairs[torch.float32, "sdpa"][0](**theirs).logits)


# -- what the processor refuses -------------------------------------------------------------------------


def cut_short(path: Path) -> Path:
    drawn("RGB", (90, 60), 0).save(path)
    path.write_bytes(path.read_bytes()[:800])
    return path


def frames_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]


REFUSED = {  # what is given, from a folder to put files in; what our error names
    "a picture without a pixel": ("images", lambda f: [Image.new("RGB", (0, 5))], r"\[0, 5\]"),
    "an array without a pixel": (
        "images",
        lambda f: [np.zeros((5, 0, 3), np.uint8)],
        r"\[5, 0, 3\]",
    ),
    "a mode that does not become RGB": ("images", lambda f: [Image.new("La", (9, 8))], "La"),
    "a PNG cut short": ("images", lambda f: [cut_short(f / "a.png")], r"a\.png.*truncated"),
    "a JPEG cut short": ("images", lambda f: [cut_short(f / "a.jpg")], r"a\.jpg.*truncated"),
    "an open file cut short": (
        "images",
        lambda f: [Image.open(io.BytesIO(cut_short(f / "a.png").read_bytes()))],
        "truncated",
    ),
    "a file without a byte": ("images", lambda f: [empty(f / "a.png")], r"a\.png"),
    "no picture at all": ("images", lambda f: [3], "image"),
    "a film without a frame": ("videos", lambda f: frames_of((0, 3, 20, 20)), r"\[0, 3, 20, 20\]"),
    "frames without a pixel": ("videos", lambda f: frames_of((2, 3, 0, 9)), r"\[2, 3, 0, 9\]"),
    "frames of four channels": ("videos", lambda f: frames_of((2, 4, 9, 9)), r"\[2, 4, 9, 9\]"),
    "frames of unlike sizes": (
        "videos",
        lambda f: [[*map(noisy_frame, (20, 30))]],
        r"2 sizes, \[\(20, 20\), \(20, 30\)\]",
    ),
    "stereo": ("audio", lambda f: [np.zeros((2, 700), np.float32)], r"\[2, 700\].*mean"),
    "mel features": ("audio", lambda f: [np.zeros((128, 300), np.float32)], r"\[128, 300\]"),
}
if not NEW:
    REFUSED["films of unlike lengths"] = (
        "videos",
        lambda f: frames_of((1, 3, 20, 20), (3, 3, 20, 20)),
        "processor",
    )


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def noisy_frame(height: int) -> np.ndarray:
    return np.asarray(drawn("RGB", (20, height), height))


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_the_processor_refuses_is_an_error_that_says_what(
    what: str, pairs: Any, tmp_path: Path
) -> None:
    """The processor fails with whatever was first; ours is one line that names what was given."""
    kind, make, message = REFUSED[what]
    model, given = pairs[torch.float32, "sdpa"][1], make(tmp_path)
    text = {"images": IMAGE, "videos": VIDEO, "audio": AUDIO}[kind] * len(given)
    theirs: Any = [str(one) if isinstance(one, Path) else one for one in given]
    more = {"videos_kwargs": {"do_sample_frames": False}} if kind == "videos" else {}
    with pytest.raises(Exception):  # noqa: B017 - of many kinds: see the docstring
        model.processor(
            text=[text],
            **{kind: [theirs] if kind == "images" else theirs},
            return_tensors="pt",
            **more,
        )
    with pytest.raises(ValueError, match=message) as caught:
        model(text, **{kind: given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [bool, np.complex64])
def test_values_that_are_no_amounts_are_refused(dtype: Any, pairs: Any) -> None:
    """transformers' processor takes True for 1 of 255."""
    model = pairs[torch.float32, "sdpa"][1]
    for text, given in (
        (IMAGE, {"images": np.ones((9, 9, 3), dtype)}),
        (VIDEO, {"videos": np.ones((2, 9, 9, 3), dtype)}),
        (AUDIO, {"audio": np.ones(700, dtype)}),
    ):
        with pytest.raises(ValueError, match=r"bool|complex"):
            model(text, **given)


# -- sound --------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 639, 640, 641, 1279, 1280, 1281, 6_400, 15_999, 16_000, 16_001)
CLIPS = [(a, b) for i, a in enumerate(LENGTHS) for b in (LENGTHS[-1 - i], LENGTHS[(i + 5) % 12])]
CLIPS.append((480_641, 1))  # half a minute and more: the processor's 750 tokens are no bound


def sound(n_samples: int) -> np.ndarray:
    return (np.random.default_rng(n_samples).standard_normal(n_samples) / 4).astype(np.float32)


def check_clips(index: int, pair: tuple[Any, HookedModel]) -> None:
    """Two clips in one prompt or in two, of unlike lengths, and a prompt of words."""
    clips = [sound(n) for n in CLIPS[index]]
    texts = [[f"a {AUDIO} b {AUDIO} c"], [f"a {AUDIO} b", f"{AUDIO} what is this"]][index % 2]
    processor, n_pads = pair[1].processor, (index * 7) % 41
    texts = filled(processor, texts, n_pads, audio=clips)
    theirs = processor(text=texts, audio=clips, return_tensors="pt")
    values = assert_same(pair, {"input": texts, "audio": clips}, theirs, n_pads)
    frames = sum(-(-n // 640) for n in CLIPS[index])
    assert len(values["audio.hook_audio_features"]) == frames


@pytest.mark.parametrize("index", range(0, 24, 2))
def test_sound_is_equal(index: int, pairs: Any) -> None:
    check_clips(index + index // 2 % 2, pairs[WAYS[index // 2 % len(WAYS)]])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", range(len(CLIPS)))
def test_every_clip_is_equal(index: int, way: Any, pairs: Any) -> None:
    check_clips(index, pairs[way])


# -- films --------------------------------------------------------------------------------------------

FILM_SIZES = [(1, 1), (90, 60), (31, 97), (336, 240), (5, 700), (64, 64), (640, 48), (123, 45)]


def film(n_frames: int) -> np.ndarray:
    width, height = FILM_SIZES[n_frames - 1]
    return np.random.default_rng(n_frames).integers(0, 256, (n_frames, height, width, 3), np.uint8)


def check_films(lengths: list[int], n_pads: int, pair: tuple[Any, HookedModel]) -> None:
    films = [torch.tensor(film(n)).permute(0, 3, 1, 2) for n in lengths]  # or few rows are channels
    texts = [f"a {VIDEO} b {VIDEO} c"] if len(films) == 2 else [f"what is {VIDEO} this"]
    processor = pair[1].processor
    one_way = {"do_sample_frames": False}
    texts = filled(processor, texts, n_pads, videos=films, videos_kwargs=one_way)
    theirs = processor(text=texts, videos=films, return_tensors="pt", videos_kwargs=one_way)
    ours = {"input": texts, "videos": list(films)}
    values = assert_same(pair, ours, theirs, n_pads)
    assert len(values["video.hook_video_features"]) <= 70 * sum(lengths)


@pytest.mark.parametrize("n_frames", range(1, 9))
def test_films_are_equal(n_frames: int, pairs: Any) -> None:
    """Each in one of the ways; two films in a prompt where the frames are few, of one size as 5.10 wants it."""
    lengths = [n_frames] * (2 if n_frames in (1, 3) else 1)
    check_films(lengths, n_frames * 5, pairs[WAYS[n_frames % len(WAYS)]])


needs_ragged_films = pytest.mark.skipif(
    not NEW,
    reason="this processor stacks the films of a call, so all need as many frames: see REFUSED",
)


@needs_ragged_films
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_frames", range(1, 9))
def test_films_of_unlike_lengths_are_equal(n_frames: int, way: Any, pairs: Any) -> None:
    check_films([n_frames, 9 - n_frames], n_frames * 4, pairs[way])


@pytest.mark.parametrize("way", WAYS)
def test_pictures_sound_and_film_together_are_equal(way: Any, pairs: Any) -> None:
    pair = pairs[way]
    texts = [f"{VIDEO} the {IMAGE} b {AUDIO} is", "what", f"a {IMAGE} {AUDIO}"]
    pictures = [drawn("RGBA", (31, 90), 1), drawn("P", (640, 480), 2)]
    clips, frames = [sound(641), sound(1)], torch.tensor(film(2)).permute(0, 3, 1, 2)
    rows = [[over_white(pictures[0])], [], [pictures[1]]]
    media = {"images": rows, "audio": clips, "videos": [frames]}
    one_way = {"do_sample_frames": False}
    theirs = pair[1].processor(text=texts, **media, return_tensors="pt", videos_kwargs=one_way)
    assert_same(
        pair, {"input": texts, "images": pictures, "audio": clips, "videos": frames}, theirs
    )
