"""`lens-gemma4 report`: what a model does on one prompt, as one page to read and as a dictionary of its numbers.

The page shows the next tokens; every part of every block with its names, length, lens and share of the asked logit;
the logit lens at every block and position; attribution by block, head and source token; what ablating each head
does; every attention pattern; and maps over pictures. `report_page/` holds the page, `report_data` fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lens_gemma4 import outputs, pages, question, report_data
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.report_data import MAX_PATTERN_VALUES, STEPS

FOLDER = Path(__file__).parent / "report_page"
SCRIPTS = (
    *("base.js", "colours.js", "tokens.js", "maps.js", "head.js", "diagram.js", "details.js"),
    *("lens.js", "attribution.js", "patterns.js", "images.js", "main.js"),
)
PROMPT = "The capital of France is"
PAGE = "report.html"


@dataclass(frozen=True, repr=False)
class Report:
    """What was found about one prompt.

    Args:
        data: nested dictionaries and lists of plain values; arrays are tensors on the CPU, in float32 at least. `report_data`
            says of each what it is.
    """

    data: dict[str, Any]

    def __repr__(self) -> str:
        data = self.data
        answer = data["answer"]
        return (
            f"Report on {data['prompt']!r}, {len(data['tokens'])} tokens: {answer['label']} has probability "
            f"{answer['probability']:.4f}, rank {answer['rank']}"
        )

    def html(self) -> str:
        """The page: one file without a request to anywhere. Write it as UTF-8."""
        title = f"{self.data['prompt']} · lens_gemma4"
        return pages.page(FOLDER, SCRIPTS, title, _for_the_page(self.data))

    def write_html(self, path: str | Path) -> Path:
        """Write the page, and say where it is. A page of ours is overwritten, another file is not.

        Raises:
            OSError: the path is a folder, another file, or cannot be written.
        """
        where = outputs.place(Path(path), PAGE)
        outputs.write(where, self.html())
        return where


def report(
    model: HookedModel,
    prompt: str,
    answer: str | int | None = None,
    versus: str | int | None = None,
    image: Any = None,
    *,
    image_tokens: int | None = None,
    ablation: Literal["zero", "mean"] | None = "zero",
    ablate_last_only: bool = False,
    name: str | None = None,
    max_pattern_values: int = MAX_PATTERN_VALUES,
) -> Report:
    """What a model does on a prompt, from a plain run, a run that is watched and, for the ablation map, a sweep.

    Args:
        model: it is left as it was.
        prompt: any text; the last token's prediction is asked about. Where an image is given and no placeholder says where it
            stands, it stands in front.
        answer: one token, with its leading space, or an id; by default the model's first choice.
        versus: a token to compare it with: numbers are then of the difference of the two logits.
        image: what `prepare(images=)` takes, one or a list.
        image_tokens: budget of each image: 70, 140, 280, 560 or 1120.
        ablation: what takes the place of a head's output z: "zero", or its "mean" over the prompt without the first token; None
            leaves the map out.
        ablate_last_only: change heads at the last position alone, which is quicker, rather than at all.
        name: of the checkpoint, as the page shows it.
        max_pattern_values: patterns are kept of as many of the last positions as this many numbers allow.
    Raises:
        ValueError: an empty prompt or one that is too long; an answer of several tokens (they are listed); one token twice; an image
            with a checkpoint that has no image embedder; more placeholders than images; hooks on the model.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> found = report(model, "The capital of France is", " Paris", " Rome", ablation=None)
    >>> found.data["answer"]["rank"]
    0
    """
    asked = question.ask(model, prompt, answer, versus, image=image, image_tokens=image_tokens)
    data = report_data.gather(asked, ablation, ablate_last_only, max_pattern_values)
    data["model"]["name"] = name or model.cfg.model_name or "a model without a name"
    return Report(data)


def run(
    prompt: str = PROMPT,
    answer: str | None = None,
    versus: str | None = None,
    model: str = "tiny",
    image: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    output: str | Path = PAGE,
    **options: Any,
) -> Path:
    """The command: load, look, write, and say where.

    Args:
        model: a Hub id, a folder, or "tiny".
        image: a file or an address, or several.
        device, dtype: by default the CPU and the checkpoint's own.
        output: the page; found out to be writable before the work.
        options: those of `report`.
    Raises:
        ValueError, OSError: a request that cannot be met.
    """
    where = outputs.place(Path(output), PAGE)
    question.check_prompt(prompt)
    loaded = HookedModel.from_pretrained(model, device=outputs.device(device), dtype=dtype)
    found = report(loaded, prompt, answer, versus, image, name=model, **options)
    print(found)
    found.write_html(where)
    print(f"{where}, {where.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return where


def _for_the_page(data: Mapping[str, Any]) -> dict[str, Any]:
    """Patterns in steps, block by block: a page unpacks those of one block when they are looked at."""
    patterns = data["patterns"]
    blocks = [(block.double() * STEPS).round().to(torch.uint16) for block in patterns["values"]]
    return {**data, "patterns": {**patterns, "values": blocks, "steps": STEPS}}
