"""Make each kind of figure over a picture, as a page and as a PNG: `python notebooks/pictures.py -o FOLDER`, or `make pictures`.

On the checkpoint that ships with the package; on another with `--model`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from lens_gemma4 import HookedModel, ablate, logit_difference
from lens_gemma4.pictures import (
    ablation_over,
    attention_over,
    attribution_over,
    lens_grid,
    mask_picture,
    over_picture,
    save_png,
)
from lens_gemma4.spans import ImageFeatures


def drawn(width: int = 360, height: int = 240) -> Image.Image:
    """A house under a sun: nothing in it is the same upside down, or left to right."""
    picture = Image.new("RGB", (width, height), "#a8d8f0")
    draw = ImageDraw.Draw(picture)
    draw.rectangle([0, 0.7 * height, width, height], fill="#3f7030")
    draw.ellipse(
        [0.72 * width, 0.08 * height, 0.72 * width + 0.3 * height, 0.38 * height], fill="#f0a030"
    )
    draw.rectangle([0.15 * width, 0.45 * height, 0.5 * width, 0.85 * height], fill="#a04030")
    roof = [(0.1 * width, 0.45 * height), (0.325 * width, 0.15 * height)]
    draw.polygon([*roof, (0.55 * width, 0.45 * height)], fill="#5a2e20")
    draw.rectangle([0.2 * width, 0.6 * height, 0.28 * width, 0.85 * height], fill="#2f1b12")
    return picture


def figures(model: HookedModel, picture: Image.Image) -> Iterator[tuple[str, Any]]:
    """Each figure with its name."""
    prompt, media = f"{model.image_token} The capital of France is", {"images": [picture]}
    inputs = model.prepare(prompt, **media, image_tokens=70)
    (span,) = inputs.spans
    logits, cache = model.run_with_cache(inputs)
    answer, versus = logits[0, -1].topk(2).indices.tolist()

    left = span.boxes()[:, 0] + 2 * span.boxes()[:, 1]
    yield "left_and_top", over_picture(picture, span, left, unit="left + 2 top", centred=False)
    lens = model.logit_lens(inputs, positions=span.positions.tolist(), top_k=3)
    yield "lens", lens_grid(picture, span, lens)
    yield "lens_entropy", lens_grid(picture, span, lens, layer=2, k=2, value="entropy")
    yield "attention", attention_over(picture, span, cache)
    yield "attention_of_a_head", attention_over(picture, span, cache, layer=3, head=1)
    for by in ("source", "token"):
        positions = "last" if by == "source" else None
        found = model.attribute(inputs, answer, versus, by=by, positions=positions)
        yield f"attribution_by_{by}", attribution_over(picture, span, found)
    effects = ablate(model, inputs, logit_difference(answer, versus), units="patches")
    yield "ablation", ablation_over(picture, span, effects)
    # A corner of the picture: no whole one is shorter than this checkpoint's window.
    whole = model.embed_image(picture, image_tokens=70)
    corner = (whole.grid < torch.tensor([4, 3], device=whole.grid.device)).all(1)
    short = ImageFeatures(whole.features[corner], whole.grid[corner])
    few = model.prepare(prompt, image_features=short)
    for name, prepared in (("long", inputs), ("short", few)):
        for layer in (0, 3):
            yield f"mask_{name}_block_{layer}", mask_picture(model, prepared, layer)
    strip = picture.resize((900, 30))
    (thin,) = model.prepare(prompt, images=[strip], image_tokens=70).spans
    yield "strip", over_picture(strip, thin, torch.linspace(-1, 2, len(thin)), unit="left to right")
    yield "no_picture", over_picture(None, span, torch.linspace(-1, 2, len(span)), unit="in order")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("pictures"))
    parser.add_argument("--model", default="tiny")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    for name, figure in figures(HookedModel.from_pretrained(asked.model), drawn()):
        figure.write_html(asked.output / f"{name}.html")
        save_png(figure, asked.output / f"{name}.png")
        print(asked.output / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
