"""What always holds of pictures, sound and film in the stream, from text and pictures to the blocks."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from PIL import Image
from seeing import AUDIO, BUDGETS, IMAGE, VIDEO
from torch import Tensor

from lens_gemma4 import HookedModel, ablate
from lens_gemma4.metrics import logit_difference

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # 5.10's own

TWO_BLOCKS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.checkpoint(tmp_path_factory.mktemp("seeing"), **TWO_BLOCKS)


@pytest.fixture(scope="module")
def model(folder: Path) -> HookedModel:
    return HookedModel.from_pretrained(folder, dtype=torch.float64)


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def sound(n: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) / 4).astype(np.float32)


# -- how many tokens ------------------------------------------------------------------------------------

GRIDS = {  # width, height: columns, rows, at the 12B's own budget of 280
    (224, 224): (16, 16),
    (2000, 2000): (16, 16),
    (1024, 768): (19, 14),
    (640, 480): (19, 14),
    (480, 640): (14, 19),
    (96, 48): (23, 11),
    (900, 3): (280, 1),
    (3, 900): (1, 280),
    (4000, 50): (149, 1),
    (1, 1): (16, 16),
}
SQUARES = dict(zip(BUDGETS, (8, 11, 16, 23, 33), strict=True))  # sides of a square picture's grid


def grid_of(
    model: HookedModel, size: tuple[int, int], budget: int | None = None
) -> tuple[int, int]:
    """Columns and rows, when ids, patches and what stands around them agree."""
    inputs = model.prepare(f"a {IMAGE} cat", images=noise(size), image_tokens=budget)
    (span,) = inputs.spans
    columns, rows = span.shape
    ids = inputs["input_ids"][0]
    assert int((ids == model.cfg.image_token_id).sum()) == columns * rows == len(span)
    first, last = int(span.positions[0]), int(span.positions[-1])
    around = model.tokenizer.convert_ids_to_tokens([int(ids[first - 1]), int(ids[last + 1])])
    assert around == [seeing.MEDIA["boi_token"], seeing.MEDIA["eoi_token"]]
    assert inputs["pixel_values"].shape == (1, budget or 280, 6912)
    return columns, rows


def expected(size: tuple[int, int], budget: int, whole: Any = math.floor) -> tuple[int, int]:
    """The largest whole grid of the picture's ratio that fits the budget; a strip fills it."""
    width, height = size
    step = math.sqrt(budget / (width * height))
    columns, rows = whole(width * step), whole(height * step)
    if rows == 0:
        return min(width // height, budget), 1
    if columns == 0:
        return 1, min(height // width, budget)
    return columns, rows


@pytest.mark.parametrize("size", GRIDS)
def test_the_table_of_grids(model: HookedModel, size: tuple[int, int]) -> None:
    assert grid_of(model, size) == GRIDS[size]


@pytest.mark.parametrize("size", [(224, 224), (1024, 768), (96, 48), (900, 3)])
def test_the_shipped_checkpoint_has_the_12bs_processor(tiny_model: Any, size: Any) -> None:
    (span,) = tiny_model.prepare(tiny_model.image_token, images=noise(size)).spans
    assert span.shape == GRIDS[size]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_is_filled_as_far_as_the_ratio_lets(model: HookedModel, budget: int) -> None:
    assert grid_of(model, (224, 224), budget) == (SQUARES[budget], SQUARES[budget])
    rng = random.Random(budget)
    beyond = False
    for _ in range(6):
        size = rng.randint(1, 500), rng.randint(1, 500)
        columns, rows = grid_of(model, size, budget)
        assert (columns, rows) == expected(size, budget)
        assert columns * rows <= budget
        rounded = expected(size, budget, round)
        beyond |= rounded[0] * rounded[1] > budget
    assert beyond  # the control: rounding to the nearest would exceed it


# -- features and the stream ----------------------------------------------------------------------------

TEXTS = [f"{VIDEO} the {IMAGE} b {AUDIO} is", "what is this", f"a {IMAGE}{IMAGE} {AUDIO}"]
PICTURES = [noise((640, 480), 1), noise((31, 90), 2), noise((500, 500), 3)]
ALL_MEDIA = {
    "images": PICTURES,
    "audio": [sound(641, 1), sound(2000, 2)],
    "videos": np.stack([np.array(noise((90, 60), i)) for i in range(3)]),
    "padding_side": "left",
}
FEATURES = {
    "image": ("vision.hook_image_features", "vision.projector.hook_out"),
    "frame": ("video.hook_video_features", "video.projector.hook_out"),
    "audio": ("audio.hook_audio_features", "audio.hook_out"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_blocks_rows_are_the_features(folder: Path, dtype: torch.dtype) -> None:
    model = HookedModel.from_pretrained(folder, dtype=dtype)
    inputs = model.prepare(TEXTS, **ALL_MEDIA)
    _, cache = model.run_with_cache(**inputs)
    spans = inputs.spans
    assert [(s.row, s.name) for s in spans] == [
        *((0, f"frame[{i}]") for i in range(3)),
        (0, "image[0]"),
        (0, "audio[0]"),
        (2, "image[0]"),
        (2, "image[1]"),
        (2, "audio[0]"),
    ]
    stream = cache["blocks.0.hook_resid_pre"]
    covered = torch.zeros(stream.shape[:2], dtype=torch.bool)
    for span in spans:
        flat, padded = (cache[name] for name in FEATURES[span.kind])
        rows = stream[span.row, span.positions]
        assert torch.equal(rows, flat[span.features])
        assert torch.equal(rows, padded[span.index][span.valid])
        # The controls: text rows are scaled, these are not; the reading order counts.
        assert not torch.equal(rows, flat[span.features] * model.cfg.embed_scale)
        assert not torch.equal(rows, flat[span.features].flip(0))
        covered[span.row, span.positions] = True
    assert not torch.equal(stream, cache["hook_embed"])
    assert torch.equal(stream[~covered], cache["hook_embed"][~covered])
    # Placeholders are embedded as the pad token, and nothing of that is left.
    pad = model.W_E[model.cfg.pad_token_id] * torch.tensor(model.cfg.embed_scale, dtype=dtype)
    assert torch.equal(cache["hook_embed"][covered], pad.expand(int(covered.sum()), -1))
    assert not torch.equal(cache["hook_embed"][~covered], pad.expand(int((~covered).sum()), -1))


def test_padded_rows_of_the_embedders_reach_nothing(model: HookedModel) -> None:
    inputs = model.prepare(TEXTS, **ALL_MEDIA)
    clean = model(**inputs)
    for kind, name in (
        ("image", "vision.hook_out"),
        ("frame", "video.hook_out"),
        ("audio", "audio.hook_out"),
    ):
        spans = [span for span in inputs.spans if span.kind == kind]
        valid = torch.stack([span.valid for span in sorted(spans, key=lambda span: span.index)])
        assert not valid.all()

        def write(value: Tensor, hook: Any, where: Tensor) -> Tensor:
            return torch.where(where[..., None], 3 * value + 1, value)

        padded = model.run_with_hooks(
            **inputs, fwd_hooks=[(name, lambda v, hook, valid=valid: write(v, hook, ~valid))]
        )
        assert torch.equal(padded, clean), name
        one = torch.zeros_like(valid)
        one[0, 0] = True  # the control
        moved = model.run_with_hooks(
            **inputs, fwd_hooks=[(name, lambda v, hook, one=one: write(v, hook, one))]
        )
        assert (moved - clean).abs().max() > 1e-6, name


def test_an_edit_of_an_image_stays_in_its_prompt(model: HookedModel) -> None:
    inputs = model.prepare(TEXTS, **ALL_MEDIA)
    clean = model(**inputs)
    for span in inputs.spans:

        def write(value: Tensor, hook: Any, rows: slice = span.features) -> Tensor:
            value = value.clone()
            value[rows] += 1
            return value

        logits = model.run_with_hooks(**inputs, fwd_hooks=[(FEATURES[span.kind][0], write)])
        moved = (logits != clean).any(-1)  # [batch pos]
        assert moved[span.row].any() and not moved[torch.arange(3) != span.row].any()
        first = int(span.positions[0])
        assert not moved[span.row, :first].any() and moved[span.row, first]


# -- which tokens see which -----------------------------------------------------------------------------


def seen(model: HookedModel, inputs: Any, layer: int) -> Tensor:
    """Which keys are not hidden from which queries, in the first prompt's scores."""
    name = f"blocks.{layer}.attn.hook_attn_scores"
    _, cache = model.run_with_cache(**inputs, names_filter=name)
    return cache[name][0, 0] > -1e30  # [pos kv_pos]


def test_adjacent_images_are_one_block(model: HookedModel) -> None:
    """The processor puts two tokens between images; ids that leave them out make one block of two images."""
    inputs = model.prepare(
        IMAGE * 2, images=[noise((90, 60), 1), noise((60, 90), 2)], image_tokens=70
    )
    first, second = inputs.spans
    apart = seen(model, inputs, 1)  # the full block
    a, b = first.positions, second.positions
    assert int(b[0]) - int(a[-1]) == 3
    ids = inputs["input_ids"][0]
    rest = {key: inputs[key] for key in ("pixel_values", "image_position_ids")}
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[int(a[-1]) + 1 : int(b[0])] = False
    together = model.prepare(input_ids=ids[keep][None], **rest)
    first, second = together.spans  # still two: the patches say so
    assert (len(first), len(second)) == (len(a), len(b)) and first.number != second.number
    merged = seen(model, together, 1)
    assert merged[first.positions[:, None], second.positions].all()
    assert not apart[a[:, None], b].any()
    for span, mask in ((first, merged), (second, merged)):
        assert mask[span.positions[:, None], span.positions].all()
    keep[int(a[-1]) + 1] = True  # one token of text between them is enough
    between = model.prepare(input_ids=ids[keep][None], **rest)
    first, second = between.spans
    assert not seen(model, between, 1)[first.positions[:, None], second.positions].any()


@pytest.mark.parametrize("image_mask", ["transformers", "windowed"])
def test_an_image_longer_than_the_12bs_window(image_mask: Any, tmp_path: Path) -> None:
    """1,089 tokens where a sliding block sees 1,024 positions."""
    window = 1024
    folder = seeing.checkpoint(
        tmp_path,
        **TWO_BLOCKS,
        sliding_window=window,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = HookedModel.from_pretrained(folder, image_mask=image_mask)
    inputs = model.prepare(f"a {IMAGE} cat", images=noise((300, 300)), image_tokens=1120)
    (span,) = inputs.spans
    assert len(span) == 1089
    mask = seen(model, inputs, 0)
    inside = mask[span.positions[:, None], span.positions]  # [token token]
    q, k = torch.arange(1089)[:, None], torch.arange(1089)
    hidden = (q - k >= window) & torch.tensor(image_mask == "windowed")
    assert torch.equal(inside, ~hidden)
    assert int((~inside).sum()) == (65 * 66 // 2 if image_mask == "windowed" else 0)
    assert bool(inside[0, -1])  # forwards, no window bounds either rule
    after = int(span.positions[-1]) + 2  # text behind it
    assert mask[after].sum() == window and not mask[after, : after - window + 1].any()
    full = seen(model, inputs, 1)[span.positions[:, None], span.positions]
    assert torch.equal(full, (k <= q) | torch.tensor(image_mask == "transformers"))


# -- sound and film -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 639, 640, 641, 1281])
def test_sound_is_frames_of_640_samples_normalised_and_projected(
    model: HookedModel, n: int
) -> None:
    clip = sound(n)
    inputs = model.prepare(AUDIO, audio=clip)
    (span,) = inputs.spans
    assert len(span) == math.ceil(n / 640) and span.grid is None
    _, cache = model.run_with_cache(**inputs, names_filter="audio.*")
    frames = torch.zeros(len(span), 640, dtype=torch.float64)
    frames.view(-1)[:n] = torch.tensor(clip)
    scale = (frames.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = frames / scale @ model.audio.w_out.T
    torch.testing.assert_close(cache["audio.hook_audio_features"], wanted, atol=1e-12, rtol=0)
    if n % 640:  # the control: the mean goes over the whole frame, its padding included
        used = frames[-1, : n % 640]
        alone = frames[-1] / (used.square().mean() + 1e-6).sqrt() @ model.audio.w_out.T
        assert (alone - wanted[-1]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.* positions are .* windows:UserWarning")
def test_a_film_is_seventy_tokens_a_frame_with_its_time_before_each(tiny_model: Any) -> None:
    token = tiny_model.video_token
    frames = np.stack([np.array(noise((480, 336), i)) for i in range(3)])
    inputs = tiny_model.prepare(token, videos=[(frames, 0.05)])  # a frame every twenty seconds
    assert [len(span) for span in inputs.spans] == [70] * 3
    ids = inputs["input_ids"][0]
    ends = [0, *(int(span.positions[-1]) + 1 for span in inputs.spans)]
    for span, end, time in zip(inputs.spans, ends, ("00:00", "00:20", "00:40"), strict=False):
        assert time in tiny_model.to_string(ids[end : int(span.positions[0])])
    many = np.zeros((40, 20, 20, 3), np.uint8)
    assert len(tiny_model.prepare(token, videos=many).spans) == 32  # sampled down to it


def test_a_frame_is_a_picture_at_seventy_tokens(model: HookedModel) -> None:
    """One embedder, one set of weights."""
    image = noise((480, 336), 4)
    _, seen_as = model.run_with_cache(IMAGE, images=image, image_tokens=70, names_filter="vision.*")
    _, film = model.run_with_cache(
        VIDEO, videos=np.stack([np.array(image)] * 2), names_filter="video.*"
    )
    features = seen_as["vision.hook_image_features"]
    frames = film["video.hook_video_features"].view(2, 70, -1)
    torch.testing.assert_close(frames, features.expand_as(frames), atol=1e-5, rtol=0)
    assert (frames[0] - features.roll(1, 0)).abs().max() > 1e-2  # the control


# -- ablation of patches --------------------------------------------------------------------------------

ASKED = [f"{IMAGE} a {IMAGE} b what", "what is this cat", f"the cat sat on {IMAGE} mat is"]
METRIC = logit_difference(12, 15)
EXACT = 1e-9


def flat_rows(inputs: Any, counts: list[int], number: int, patch: Any) -> list[int]:
    """Rows of the features of a patch (or of a whole image) of each prompt's image of this number, counted out by hand."""
    grids = inputs["image_position_ids"].tolist()
    found, row_of_features, images = [], 0, iter(grids)
    for count in counts:
        for i in range(count):
            for x, y in next(images):
                if (x, y) == (-1, -1):
                    continue
                if i == number and patch in (None, (x, y)):
                    found.append(row_of_features)
                row_of_features += 1
    return found


def by_hand(model: HookedModel, inputs: Any, rows: list[int], value: Tensor) -> Tensor:
    """The metric of each prompt when these rows of the features are something else."""

    def write(features: Tensor, hook: Any) -> Tensor:
        features = features.clone()
        features[rows] = value
        return features

    logits = model.run_with_hooks(**inputs, fwd_hooks=[("vision.hook_image_features", write)])
    mask = inputs["attention_mask"]
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    own = logits[torch.arange(len(mask)), last]
    return own[:, 12] - own[:, 15]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["zero", "mean", "another reference"])
@pytest.mark.parametrize("units", ["patches", "images"])
def test_ablated_patches_are_features_written_by_hand(
    model: HookedModel, units: str, mode: str, side: str
) -> None:
    inputs = model.prepare(ASKED, images=PICTURES, padding_side=side, image_tokens=70)
    counts = [text.count(IMAGE) for text in ASKED]
    assert counts == [2, 0, 1] and not inputs["attention_mask"].all()
    reference = inputs
    if mode == "another reference":
        reference = model.prepare(
            [f"what {IMAGE}", "a b c"],
            images=noise((99, 50), 9),
            image_tokens=70,
            padding_side=side,
        )
    features = "vision.hook_image_features"
    _, cache = model.run_with_cache(**reference, names_filter=features)
    value = torch.zeros(60).double() if mode == "zero" else cache[features].mean(0)
    arguments = {"mode": "zero"} if mode == "zero" else {"mode": "mean", "reference": reference}
    found = ablate(model, inputs, METRIC, units=units, **arguments)
    shapes = [span.shape for span in inputs.spans]
    names = {
        f"image[{number}] ({x}, {y})": (number, (x, y))
        for number, rows in enumerate(([shapes[0], shapes[2]], [shapes[1]]))
        for x in range(max(shape[0] for shape in rows))
        for y in range(max(shape[1] for shape in rows))
        if any(x < shape[0] and y < shape[1] for shape in rows)
    }
    if units == "images":
        names = {"image[0]": (0, None), "image[1]": (1, None)}
    assert set(found.names) == set(names) and len(found.names) == len(names)
    rng = random.Random(side + mode)
    chosen = list(range(len(names))) if units == "images" else rng.sample(range(len(names)), 5)
    largest = found.values.nan_to_num().abs().max()
    for i in chosen:
        rows = flat_rows(inputs, counts, *names[found.names[i]])
        want = by_hand(model, inputs, rows, value)
        has = ~found.lacks[i]
        assert (found.values[i] - want)[has].abs().max() < EXACT * max(1.0, largest)
        assert (want - found.baseline)[~has].abs().max() < EXACT  # what lacks it is not touched
    assert found.lacks[:, 1].all()  # the prompt without an image
    if units == "images":
        assert found.lacks.tolist() == [[False, True, False], [False, True, True]]
    if units == "patches":  # the control: a neighbour is another number
        i = found.names.index("image[0] (3, 2)")
        near = by_hand(model, inputs, flat_rows(inputs, counts, 0, (4, 2)), value)
        assert (found.values[i] - near).abs()[~found.lacks[i]].max() > 1e-6
