"""Which pixels a token is of: painting a patch of the picture moves that patch's row, and no other.

Exactly so where the picture has its target size already. Elsewhere it is resampled, and a row also sees what lies within the
filter's reach around its box: two steps of the coarser of both grids, measured here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from PIL import Image
from seeing import IMAGE, PATCH, VIDEO
from torch import Tensor

from lens_gemma4 import HookedModel
from lens_gemma4.spans import Span

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # 5.10's own

REACH = 2  # of the bicubic filter, in pixels of the picture or of the target, whichever are larger


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HookedModel:
    folder = seeing.checkpoint(
        tmp_path_factory.mktemp("seeing"),
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )
    return HookedModel.from_pretrained(folder)


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def painted(image: Image.Image, box: tuple[float, ...]) -> Image.Image:
    """Every pixel that lies wholly in the box turned to its opposite, so that each of them changes."""
    left, top, right, bottom = box
    values = np.array(image)
    inside = values[
        int(np.ceil(top - 1e-9)) : int(bottom + 1e-9), int(np.ceil(left - 1e-9)) : int(right + 1e-9)
    ]
    assert inside.size
    inside[:] = 255 - inside
    return Image.fromarray(values)


def rows(model: HookedModel, text: Any, **media: Any) -> tuple[list[Span], dict[str, Tensor]]:
    """The spans, and for each of them what it holds along the way, by token."""
    inputs = model.prepare(text, **media)
    kind = "video" if "videos" in media else "vision"
    features = f"{kind}.hook_{'video' if kind == 'video' else 'image'}_features"
    names = [f"{kind}.hook_out", features, "blocks.0.hook_resid_pre"]
    _, cache = model.run_with_cache(**inputs, names_filter=names, stop_at_layer=1)
    pixels = inputs["pixel_values_videos" if kind == "video" else "pixel_values"].flatten(0, -3)
    return inputs.spans, {
        "pixels": pixels,
        "out": cache[names[0]],
        "features": cache[features],
        "stream": cache[names[2]],
    }


def of_span(kept: dict[str, Tensor], span: Span) -> dict[str, Tensor]:
    """A span's rows of each value, found in four ways."""
    return {
        "pixels": kept["pixels"][span.index][span.valid],
        "out": kept["out"][span.index][span.valid],
        "features": kept["features"][span.features],
        "stream": kept["stream"][span.row, span.positions],
    }


def moved(before: Any, after: Any) -> set[tuple[int, int]]:
    """(span, token) of every row that changed: the same ones in every value, and nothing else in the stream."""
    found = []
    stream = before[1]["stream"] != after[1]["stream"]  # [batch pos d_model]
    for name in ("pixels", "out", "features", "stream"):
        found.append(
            {
                (i, token)
                for i, span in enumerate(before[0])
                for token in (
                    (of_span(before[1], span)[name] != of_span(after[1], span)[name])
                    .any(-1)
                    .nonzero()[:, 0]
                    .tolist()
                )
            }
        )
    assert found[0] == found[1] == found[2] == found[3]
    assert int(stream.any(-1).sum()) == len(found[0])
    return found[0]


# -- pictures that are not resampled ------------------------------------------------------------------

EXACT = {70: [(10, 7), (7, 10), (14, 5), (70, 1)], 140: [(14, 10)], 280: [(14, 20), (56, 5)]}
EXACT_CASES = [(budget, shape) for budget, shapes in EXACT.items() for shape in shapes]


@pytest.mark.parametrize(("budget", "shape"), EXACT_CASES)
def test_painting_a_patch_moves_its_row_alone(
    model: HookedModel, budget: int, shape: tuple[int, int]
) -> None:
    """All of a patch, and each of its outermost pixels by itself."""
    image = noise((shape[0] * PATCH, shape[1] * PATCH))
    before = rows(model, f"a {IMAGE} cat", images=image, image_tokens=budget)
    (span,) = before[0]
    assert span.shape == shape and span.size == image.size
    rng = random.Random(budget)
    for token in {0, len(span) - 1, *rng.sample(range(len(span)), 3)}:
        left, top, right, bottom = span.boxes()[token].tolist()
        x, y = span.grid[token].tolist()
        assert (left, top, right, bottom) == (x * 48, y * 48, x * 48 + 48, y * 48 + 48)
        corners = [(left, top, left + 1, top + 1), (right - 1, bottom - 1, right, bottom)]
        for box in [(left, top, right, bottom), *corners]:
            again = painted(image, box)
            after = rows(model, f"a {IMAGE} cat", images=again, image_tokens=budget)
            assert moved(before, after) == {(0, token)}
            assert span.tokens_in(box).nonzero()[:, 0].tolist() == [token]
            assert span.labels()[token] == f"image[0] ({x}, {y})"
    # The control: one pixel over the edge is the next patch's.
    outside = (0, 0, 48, 49) if shape[1] > 1 else (0, 0, 49, 48)
    after = rows(model, f"a {IMAGE} cat", images=painted(image, outside), image_tokens=budget)
    assert len(moved(before, after)) == 2 == int(span.tokens_in(outside).sum())


def test_a_row_holds_its_patch_channel_last(model: HookedModel) -> None:
    """48 x 48 pixels, row by row, red, green and blue of each together, from 0 to 1."""
    image = noise((480, 336))
    spans, kept = rows(model, IMAGE, images=image, image_tokens=70)
    pixels = of_span(kept, spans[0])["pixels"]
    for token, box in enumerate(spans[0].boxes().int().tolist()):
        patch = torch.tensor(np.array(image.crop(tuple(box)))) / 255  # [48 48 3]
        torch.testing.assert_close(pixels[token], patch.flatten(), atol=1e-7, rtol=0)
        channels_first = patch.permute(2, 0, 1).flatten()
        assert (pixels[token] - channels_first).abs().max() > 0.5
        assert (pixels[token] - patch.transpose(0, 1).flatten()).abs().max() > 0.5


# -- pictures that are ----------------------------------------------------------------------------------


def test_how_far_the_filter_reaches(model: HookedModel) -> None:
    """One white pixel on grey: how far from it anything moves, in steps of the coarser grid."""
    found = {}
    for size in [(640, 480), (90, 60), (2000, 1500), (3000, 300), (97, 401)]:
        grey = np.full((size[1], size[0], 3), 128, np.uint8)
        at = np.array([size[0] // 2, size[1] // 2])
        white = grey.copy()
        white[at[1], at[0]] = 255
        prepared = [model.prepare(IMAGE, images=Image.fromarray(a)) for a in (grey, white)]
        (span,) = prepared[0].spans
        columns, lines = span.shape
        target = [
            t["pixel_values"][0, span.valid]
            .view(lines, columns, PATCH, PATCH, 3)
            .transpose(1, 2)
            .reshape(lines * PATCH, columns * PATCH, 3)
            for t in prepared
        ]
        differs = (target[0] != target[1]).any(-1).nonzero().double()  # [pixel (y, x)]
        scale = torch.tensor(size).double() / torch.tensor([columns, lines]) / PATCH
        centres = (differs.flip(1) + 0.5) * scale  # x, y in pixels of the picture
        distance = (centres - torch.tensor(at + 0.5)).abs().amax(0) / scale.clamp(min=1)
        found[size] = distance.amax().item()
    assert all(1 < far <= REACH for far in found.values()), found
    assert max(found.values()) > 1.7  # as far as eight bits show of a weight that falls to nothing


SIZES = [(640, 480), (2000, 1500), (97, 31), (31, 97), (900, 30), (333, 1000), (60, 60)]


def widened(span: Span, box: tuple[float, ...], reach: float) -> list[float]:
    """A box with what the filter sees around it, on each axis by that axis's own step."""
    steps = [
        max(1.0, original / (patches * PATCH))
        for original, patches in zip(span.size, span.shape, strict=True)
    ] * 2
    signs = (-1, -1, 1, 1)
    return [
        side + sign * (reach * step - 0.5)
        for side, sign, step in zip(box, signs, steps, strict=True)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_painting_a_patch_of_a_resampled_picture_stays_within_the_filters_reach(
    model: HookedModel, size: tuple[int, int]
) -> None:
    image = noise(size, 1)
    before = rows(model, f"a {IMAGE} cat", images=image)
    (span,) = before[0]
    assert span.size == size and len(span) <= 280
    rng = random.Random(size[0])
    beyond_the_box = 0
    for token in {0, len(span) - 1, *rng.sample(range(len(span)), 3)}:
        # Pixels are whole and boxes are not: what lies wholly in the box is painted.
        left, top, right, bottom = span.boxes()[token].tolist()
        box = (np.ceil(left), np.ceil(top), np.floor(right), np.floor(bottom))
        after = rows(model, f"a {IMAGE} cat", images=painted(image, box))
        changed = {t for _, t in moved(before, after)}
        allowed = set(span.tokens_in(widened(span, box, REACH)).nonzero()[:, 0].tolist())
        assert span.tokens_in(box).nonzero()[:, 0].tolist() == [token]
        assert token in changed and changed <= allowed
        assert len(allowed) < len(span) or size[1] < 2 * REACH + 2
        beyond_the_box += len(changed) - 1
        change = (of_span(after[1], span)["pixels"] - of_span(before[1], span)["pixels"]).abs()
        assert int(change.mean(1).argmax()) == token
    assert beyond_the_box > 0  # the control: the box alone would not do


@pytest.mark.parametrize("size", [(1, 1), (3, 900), (4000, 50), *SIZES])
def test_boxes_tile_the_picture(model: HookedModel, size: tuple[int, int]) -> None:
    (span,) = model.prepare(IMAGE, images=noise(size)).spans
    boxes = span.boxes()
    assert boxes.amin(0)[:2].tolist() == [0, 0]
    torch.testing.assert_close(boxes.amax(0)[2:], torch.tensor(size).double())
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    torch.testing.assert_close(areas.sum(), torch.tensor(float(size[0] * size[1])).double())
    assert len({tuple(box) for box in boxes.tolist()}) == len(span)
    # Row by row, left to right: a token's neighbour is on its right.
    columns, lines = span.shape
    assert len(span) == columns * lines
    assert span.grid.tolist() == [[x, y] for y in range(lines) for x in range(columns)]


def test_rows_turned_into_columns_would_be_seen(model: HookedModel) -> None:
    """The control of it all: boxes with x and y taken for one another name another patch."""
    image = noise((480, 336))
    before = rows(model, IMAGE, images=image, image_tokens=70)
    (span,) = before[0]
    left, top, right, bottom = span.boxes()[3].tolist()  # (3, 0)
    after = rows(model, IMAGE, images=painted(image, (top, left, bottom, right)), image_tokens=70)
    assert moved(before, after) == {(0, 30)}  # (0, 3), in the fourth row of ten


# -- files, batches, films ------------------------------------------------------------------------------

TURNS = Image.Transpose
STORED = {  # the orientation in a file: how the upright picture lies in it
    1: None,
    2: TURNS.FLIP_LEFT_RIGHT,
    3: TURNS.ROTATE_180,
    4: TURNS.FLIP_TOP_BOTTOM,
    5: TURNS.TRANSPOSE,
    6: TURNS.ROTATE_90,
    7: TURNS.TRANSVERSE,
    8: TURNS.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
def test_boxes_of_a_file_are_of_the_picture_as_it_is_seen(
    model: HookedModel, orientation: int, tmp_path: Path
) -> None:
    def stored(upright: Image.Image, name: str) -> Path:
        turn, exif = STORED[orientation], Image.Exif()
        exif[0x0112] = orientation
        lying = upright if turn is None else upright.transpose(turn)
        lying.save(tmp_path / name, exif=exif)
        return tmp_path / name

    upright = noise((480, 336))
    before = rows(model, IMAGE, images=stored(upright, "before.png"), image_tokens=70)
    (span,) = before[0]
    assert span.size == (480, 336) and span.shape == (10, 7)
    for token in (0, 9, 34, 69):
        box = tuple(span.boxes()[token].tolist())
        again = stored(painted(upright, box), "after.png")
        after = rows(model, IMAGE, images=again, image_tokens=70)
        assert moved(before, after) == {(0, token)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_pictures_in_a_padded_batch(model: HookedModel, side: str) -> None:
    texts = [
        f"{IMAGE} a {IMAGE} b",
        "what is this",
        f"the cat sat on {IMAGE} mat",
        f"{IMAGE}{IMAGE}",
    ]
    shapes = [(10, 7), (7, 10), (5, 14), (14, 5), (10, 7)]
    images = [noise((w * PATCH, h * PATCH), i) for i, (w, h) in enumerate(shapes)]
    call = {"padding_side": side, "image_tokens": 70}
    before = rows(model, texts, images=images, **call)
    assert [(s.row, s.number, s.shape, s.index) for s in before[0]] == [
        (0, 0, (10, 7), 0),
        (0, 1, (7, 10), 1),
        (2, 0, (5, 14), 2),
        (3, 0, (14, 5), 3),
        (3, 1, (10, 7), 4),
    ]
    pads = (model.prepare(texts, images=images, **call)["attention_mask"] == 0).sum(1)
    assert pads.amax() > 100 and pads.amin() == 0
    for i, span in enumerate(before[0]):
        for token in (0, 33, 69):
            box = tuple(span.boxes()[token].tolist())
            again = [painted(one, box) if j == i else one for j, one in enumerate(images)]
            assert moved(before, rows(model, texts, images=again, **call)) == {(i, token)}


def test_several_pictures_of_unlike_sizes_that_are_resampled(model: HookedModel) -> None:
    """Padded rows of the embedder, padded rows of the batch, and another grid for each picture."""
    texts = [f"{IMAGE} a {IMAGE} b", "what is this", f"the cat {IMAGE}"]
    images = [noise(size, i) for i, size in enumerate([(1000, 100), (640, 480), (500, 1500)])]
    before = rows(model, texts, images=images, padding_side="left")
    assert len({len(span) for span in before[0]}) == 3
    for i, span in enumerate(before[0]):
        token = len(span) // 2
        left, top, right, bottom = span.boxes()[token].tolist()
        box = (np.ceil(left), np.ceil(top), np.floor(right), np.floor(bottom))
        again = [painted(one, box) if j == i else one for j, one in enumerate(images)]
        changed = moved(before, rows(model, texts, images=again, padding_side="left"))
        allowed = span.tokens_in(widened(span, box, REACH)).nonzero()[:, 0].tolist()
        assert (i, token) in changed and changed <= {(i, t) for t in allowed}


def test_frames_of_a_film(model: HookedModel) -> None:
    frames = np.stack([np.array(noise((480, 336), i)) for i in range(3)])
    text = ["what", f"a {VIDEO} cat"]
    before = rows(model, text, videos=frames, padding_side="left")
    assert [(s.name, s.row, s.shape, s.size, s.index) for s in before[0]] == [
        (f"frame[{i}]", 1, (10, 7), (480, 336), i) for i in range(3)
    ]
    for i, span in enumerate(before[0]):
        box = tuple(span.boxes()[41].tolist())
        again = frames.copy()
        again[i] = np.array(painted(Image.fromarray(frames[i]), box))
        assert moved(before, rows(model, text, videos=again, padding_side="left")) == {(i, 41)}
