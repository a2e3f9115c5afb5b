"""Pictures of coloured shapes, one in each corner, and the questions about them."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from words import COLOURS, CORNERS, SEEING, SHAPES

SIDE = 384  # pixels: 8 x 8 patches, which the processor at its budget of 70 leaves as they are
CELL = SIDE // 2
PATCH = 48
BUDGET = 70  # soft tokens of the processor's setting; a picture of ours fills 64 of them
SMALLEST, LARGEST = 34, 46  # of a shape, in pixels: each lies within one patch


@dataclass(frozen=True)
class Drawn:
    """One shape: its colour and kind, and the box it fills, in pixels."""

    colour: str
    shape: str
    left: int
    top: int
    size: int


def is_held_out(colour: str, shape: str, corner: int) -> bool:
    """For each shape in each corner, one colour of the six."""
    return (list(COLOURS).index(colour) + SHAPES.index(shape) + corner) % len(COLOURS) == 0


def scene(rng: random.Random, held_out_corner: int | None = None) -> list[Drawn]:
    """A shape in each quarter, row by row, anywhere within any of the quarter's patches.

    Training scenes hold no shape that is held out; with `held_out_corner` the one there is.
    """
    return [drawn(rng, corner, corner == held_out_corner) for corner in range(len(CORNERS))]


def drawn(rng: random.Random, corner: int, held_out: bool) -> Drawn:
    while True:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if is_held_out(colour, shape, corner) == held_out:
            break
    size = rng.randint(SMALLEST, LARGEST)
    left, top = (
        PATCH * rng.randrange(CELL // PATCH) + rng.randint(0, PATCH - 1 - size) for _ in range(2)
    )
    return Drawn(colour, shape, left + CELL * (corner % 2), top + CELL * (corner // 2), size)


def picture(shapes: list[Drawn]) -> Image.Image:
    """The shapes on white."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    for one in shapes:
        left, top, right, bottom = one.left, one.top, one.left + one.size, one.top + one.size
        colour, third = COLOURS[one.colour], one.size // 3
        if one.shape == "circle":
            draw.ellipse([left, top, right, bottom], fill=colour)
        elif one.shape == "square":
            draw.rectangle([left, top, right, bottom], fill=colour)
        elif one.shape == "triangle":
            draw.polygon([(left, bottom), ((left + right) // 2, top), (right, bottom)], fill=colour)
        else:
            draw.rectangle([left + third, top, right - third, bottom], fill=colour)
            draw.rectangle([left, top + third, right, bottom - third], fill=colour)
    return image


def patches(image: Image.Image) -> Tensor:
    """What the processor makes of such a picture, `[patch 6912]` in 0 to 1, row by row, unpadded."""
    pixels = torch.from_numpy(np.asarray(image).copy()).float() * (
        1 / 255
    )  # [height width channel]
    across = SIDE // PATCH
    grid = pixels.reshape(across, PATCH, across, PATCH, 3).transpose(1, 2)
    return grid.reshape(across * across, PATCH * PATCH * 3)


def positions() -> Tensor:
    """Column and row of each patch, `[patch 2]`."""
    row, column = torch.meshgrid(*[torch.arange(SIDE // PATCH)] * 2, indexing="ij")
    return torch.stack([column, row], dim=-1).reshape(-1, 2)


def question(corner: int) -> str:
    """What follows the picture when the shape in this corner is asked for."""
    return SEEING.split(" {colour}")[0].format(place=CORNERS[corner])


def answers(shapes: list[Drawn], corners: list[int]) -> list[tuple[str, bool]]:
    """Questions and answers, as pieces (see `tasks`)."""
    pieces: list[tuple[str, bool]] = []
    for corner in corners:
        one = shapes[corner]
        pieces += [(question(corner), False), (f" {one.colour}", True), (f" {one.shape}", True)]
        pieces.append((".", False))
    return pieces
