"""What a report is asked: a prompt as it is run, and the logit at its end that everything is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lens_gemma4 import attribution, spans
from lens_gemma4.attribution import Target
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.metrics import Metric, logit, logit_difference
from lens_gemma4.visible import token_label

MAX_POSITIONS = 1200  # a picture at the largest budget and some text


@dataclass(frozen=True)
class Question:
    """A prompt as it is run, and the logit that is asked about at its last position.

    Args:
        target: "raw", so that parts add up to it.
        given: whether the answer was, rather than being the model's first choice.
    """

    model: HookedModel
    prompt: str
    tensors: spans.Inputs
    answer: int
    versus: int | None
    given: bool

    @property
    def target(self) -> Target:
        return Target(self.answer, self.versus)

    @property
    def asked(self) -> list[int]:
        return [self.answer] if self.versus is None else [self.answer, self.versus]

    @property
    def length(self) -> int:
        return int(self.tensors["input_ids"].shape[1])

    def label(self, token: int) -> str:
        return token_label(self.model.tokenizer, token)

    @property
    def words(self) -> str:
        """The asked number in words."""
        of = self.label(self.answer)
        return f"logit of {of}" + (
            "" if self.versus is None else f" minus {self.label(self.versus)}"
        )

    def metric(self) -> Metric:
        if self.versus is None:
            return logit(self.answer, raw=True)
        return logit_difference(self.answer, self.versus, raw=True)


# -- the question -------------------------------------------------------------------------------------


def check_prompt(prompt: str) -> None:
    """Raise for a prompt without text, or of what is no text.

    Raises:
        TypeError: it is not one string.
        ValueError: it is empty, or holds halves of characters, as the shell gives bytes that are not UTF-8.
    """
    if not isinstance(prompt, str):
        raise TypeError(
            f"a report is about one text, got a prompt of type {type(prompt).__name__}: give a string"
        )
    if not prompt:
        raise ValueError("the prompt is empty: give some text, e.g. 'The capital of France is'")
    if broken := next((letter for letter in prompt if "\ud800" <= letter <= "\udfff"), ""):
        raise ValueError(f"the prompt holds half a character, {broken!a}: write it as UTF-8 text")


@torch.no_grad()
def ask(
    model: HookedModel,
    prompt: str,
    answer: str | int | None = None,
    versus: str | int | None = None,
    *,
    image: Any = None,
    image_tokens: int | None = None,
) -> Question:
    """Prepare the prompt and fix the tokens, the model's first choice where no answer is given.

    Raises:
        ValueError: what cannot be asked; see `report`.
    """
    check_prompt(prompt)
    if hooks := model.list_hooks():
        raise ValueError(
            f"the model has hooks, on {hooks[0][0]!r} first: reset_hooks() before a report, which shows the model itself"
        )
    chosen = [None if one is None else _token(model, one) for one in (answer, versus)]
    if chosen[0] is not None and chosen[0] == chosen[1]:
        raise ValueError(f"answer and versus are both {answer!r}: give two tokens to compare")
    tensors = model.prepare(**_with_images(model, prompt, image, image_tokens))
    if image is None and model.cfg.vision is not None:
        _enough_images(int((tensors["input_ids"] == model.cfg.image_token_id).sum()), 0)
    length = tensors["input_ids"].shape[1]
    if length > MAX_POSITIONS:
        raise ValueError(
            f"the prompt is {length} tokens, and a report shows at most {MAX_POSITIONS}: shorten it, or give an image a smaller "
            "budget (image_tokens)"
        )
    given = chosen[0] is not None
    if not given:
        first = model(**tensors, logits_to_keep=1)[0, -1].topk(2).indices.tolist()
        chosen[0] = next(token for token in first if token != chosen[1])
    assert chosen[0] is not None
    return Question(model, prompt, tensors, chosen[0], chosen[1], given)


def _token(model: HookedModel, token: str | int) -> int:
    return (
        model.to_single_token(token)
        if isinstance(token, str)
        else int(attribution.token_ids(token, model.cfg.d_vocab))
    )


def _with_images(
    model: HookedModel, prompt: str, image: Any, image_tokens: int | None
) -> dict[str, Any]:
    """What `prepare` takes; placeholders that are missing stand in front."""
    if image is None:
        return {"input": prompt}
    if model.cfg.vision is None:
        raise ValueError(
            f"an image was given, and this checkpoint ({model.cfg.model_type}) has no vision embedder: leave it out, or take a "
            "checkpoint with one"
        )
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    held = prompt.count(model.image_token)
    _enough_images(held, len(images))
    text = model.image_token * (len(images) - held) + prompt
    return {"input": text, "images": images, "image_tokens": image_tokens}


def _enough_images(placeholders: int, images: int) -> None:
    if placeholders > images:
        raise ValueError(
            f"the prompt holds placeholders of images, {placeholders}, and {images} were given: give one for each (image=, or --image "
            "in the shell)"
        )
