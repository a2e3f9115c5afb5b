"""Where images, video frames and clips of sound stand in the prompts, and what each of their tokens is of.

A picture has no tower: each patch is one row of the stream, and a `Span` says which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

if TYPE_CHECKING:
    from lens_gemma4.hooked_model import HookedModel

Kind = Literal["image", "frame", "audio"]
Size = tuple[int, int]  # width and height in pixels
Box = Sequence[float | int]  # left, top, right, bottom in pixels


@dataclass(frozen=True, eq=False, repr=False)
class Span:
    """One image, video frame or clip of sound in a prompt.

    Args:
        kind: "image", "frame" (of a video) or "audio".
        row: the prompt of the batch that it stands in.
        number: which of its kind in this prompt, from 0; frames are counted through all videos of the prompt.
        positions: of its tokens in the padded row.
        grid: x and y of each token's patch, in patches; None for sound.
        size: width and height of the original picture in pixels, turned upright as EXIF says; None when only the
            processor's patches were given, which do not tell.
        valid: which rows of the embedder's padded output (`vision.hook_out[index]`) are real patches.
        index: which row of `pixel_values`, of all frames or of `input_features` it is.
        offset: its first token's row in `vision.hook_image_features` (`video.hook_video_features`,
            `audio.hook_audio_features`).
    """

    kind: Kind
    row: int
    number: int
    positions: Int[Tensor, " token"]
    grid: Int[Tensor, "token 2"] | None
    size: Size | None
    valid: Bool[Tensor, " patch"]
    index: int
    offset: int = 0

    def __len__(self) -> int:
        """Tokens."""
        return len(self.positions)

    def __repr__(self) -> str:
        first, last = int(self.positions[0]), int(self.positions[-1])
        shape = "" if self.grid is None else f", {self.shape[0]} x {self.shape[1]} patches"
        size = "" if self.size is None else f" of {self.size[0]} x {self.size[1]} pixels"
        return f"Span({self.name} of prompt {self.row}: positions {first} to {last}{shape}{size})"

    @property
    def name(self) -> str:
        """ "image[0]", as in labels."""
        return f"{self.kind}[{self.number}]"

    @property
    def features(self) -> slice:
        """Its rows of the features as they are scattered, of all prompts one after another."""
        return slice(self.offset, self.offset + len(self))

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows of the grid.

        Raises:
            ValueError: sound has none.
        """
        columns, rows = (self._grid().amax(0) + 1).tolist()
        return columns, rows

    def boxes(self, size: Size | None = None) -> Float[Tensor, "token 4"]:
        """Left, top, right and bottom of every patch in the original picture's pixels, not rounded.

        The processor stretches the whole picture to whole patches, so these divide it evenly.

        Args:
            size: width and height of the picture, where the span does not know them.
        Raises:
            ValueError: a size that is not known, or another one than it knows; sound.
        """
        grid = self._grid().cpu().double()
        known = torch.tensor(self._size(size), dtype=torch.float64)
        step = known / torch.tensor(self.shape, dtype=torch.float64)
        return torch.cat([grid * step, (grid + 1) * step], 1)

    def tokens_in(self, box: Box, size: Size | None = None) -> Bool[Tensor, " token"]:
        """Tokens whose patches a box of the original picture (left, top, right, bottom in pixels) touches.

        Raises:
            ValueError: a box without area or outside the picture; a size that is not known; sound.
        """
        if len(box) != 4:
            raise ValueError(
                f"a box is left, top, right, bottom in pixels of the picture, got {len(box)} numbers: {tuple(box)}"
            )
        left, top, right, bottom = (float(side) for side in box)
        l, t, r, b = self.boxes(size).unbind(1)  # noqa: E741
        inside = (l < right) & (r > left) & (t < bottom) & (b > top)
        if not (left < right and top < bottom and bool(inside.any())):
            raise ValueError(
                f"the box {tuple(box)} touches no patch of {self.name}, which is {self._size(size)} [width height]: "
                "a box is left, top, right, bottom in pixels of the picture"
            )
        return inside.to(self.positions.device)

    def labels(self) -> list[str]:
        """A name for each token: "image[0] (3, 2)" is the patch at x 3, y 2, "audio[0] 17" a frame of sound."""
        if self.grid is None:
            return [f"{self.name} {i}" for i in range(len(self))]
        return [f"{self.name} ({x}, {y})" for x, y in self.grid.tolist()]

    def _grid(self) -> Int[Tensor, "token 2"]:
        if self.grid is None:
            raise ValueError(f"{self.name} is sound: it has no patches")
        return self.grid

    def _size(self, given: Size | None) -> Size:
        known = self.size if given is None else (given[0], given[1])
        if self.size is not None and known != self.size:
            raise ValueError(
                f"{self.name} is {self.size} [width height] and not {known}: leave size out, since it is known"
            )
        if known is None:
            raise ValueError(
                f"the size of {self.name} in pixels is not known, as a processor's output holds patches only: give the "
                "picture itself (images=), or its size=(width, height)"
            )
        return known


@dataclass(frozen=True, eq=False, repr=False)
class ImageFeatures:
    """An image as the embedder leaves it, to be used in place of the image: `model(text, image_features=...)`.

    Args:
        features: one row of the stream for each patch.
        grid: x and y of each patch, in patches.
        size: width and height of the original picture in pixels.
    """

    features: Float[Tensor, "token d_model"]
    grid: Int[Tensor, "token 2"]
    size: Size | None = None

    def __len__(self) -> int:
        """Tokens."""
        return len(self.features)

    def __repr__(self) -> str:
        size = "" if self.size is None else f" of {self.size[0]} x {self.size[1]} pixels"
        return f"ImageFeatures({len(self)} patches{size})"


def together(items: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
    """Images' features and places as the network takes them: those of all images one after another, and by image.

    Raises:
        TypeError: something else than features.
        ValueError: another number of features than of places.
    """
    if wrong := [item for item in items if not isinstance(item, ImageFeatures)]:
        raise TypeError(
            f"image_features takes what embed_image returns, got {type(wrong[0]).__name__}: to change the numbers in one, "
            "dataclasses.replace(it, features=...)"
        )
    for item in items:
        if len(item.features) != len(item.grid):
            raise ValueError(
                f"an ImageFeatures has {len(item.features)} features and {len(item.grid)} places in its grid: each patch has both"
            )
    grids = torch.nn.utils.rnn.pad_sequence([i.grid for i in items], True, -1)
    features = torch.cat([item.features for item in items])
    return {"image_features": features.to(device), "image_position_ids": grids.to(device)}


class Medium(NamedTuple):
    """How a kind of medium is spelled in a prepared call."""

    kind: Kind
    token: str  # of the config
    type: int  # in mm_token_type_ids
    places: str  # the tensor that says which rows of the embedder's output are real


MEDIA = (
    Medium("image", "image_token_id", 1, "image_position_ids"),
    Medium("frame", "video_token_id", 2, "video_position_ids"),
    Medium("audio", "audio_token_id", 3, "input_features_mask"),
)


class Inputs(dict[str, Any]):
    """A prepared call: the tensors that the network runs on, and where media stand in them.

    Args:
        tensors: by name.
        cfg: the model's config, which names the placeholders.
        sizes: width and height in pixels of each image and each frame, by kind, where they are known.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        cfg: HookedConfig,
        sizes: Mapping[str, Sequence[Size | None]] | None = None,
    ) -> None:
        super().__init__(tensors)
        self.cfg, self.sizes = cfg, dict(sizes or {})
        self._found: tuple[list[Any], list[Span]] | None = None

    @property
    def spans(self) -> list[Span]:
        """Every image, video frame and clip of the prompts, prompt after prompt and as they stand in them.

        >>> from lens_gemma4 import HookedModel
        >>> HookedModel.from_pretrained("tiny").prepare("The capital").spans
        []
        """
        made_of = [self.get(name) for name in _READ]
        if self._found is None or not all(map(_same, self._found[0], made_of)):
            kept = [value.clone() if isinstance(value, Tensor) else value for value in made_of]
            self._found = kept, _spans(self.cfg, self, self.sizes)
        return list(self._found[1])


_READ = ("input_ids", "mm_token_type_ids", *(medium.places for medium in MEDIA))


def _same(one: Any, other: Any) -> bool:
    """By their numbers, since tensors may be written into."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    return one is other


def spans_of(model: HookedModel, tensors: Mapping[str, Any]) -> list[Span]:
    """Every image, video frame and clip of a prepared call, prompt after prompt; none for text.

    Raises:
        ValueError: placeholder tokens and features differ in number.
    """
    return tensors.spans if isinstance(tensors, Inputs) else _spans(model.cfg, tensors, {})


def _spans(
    cfg: HookedConfig, tensors: Mapping[str, Any], sizes: Mapping[str, Sequence[Size | None]]
) -> list[Span]:
    found = [
        span
        for medium in MEDIA
        if tensors.get(medium.places) is not None
        for span in _of_medium(cfg, tensors, medium, sizes.get(medium.kind, ()))
    ]
    return sorted(found, key=lambda span: (span.row, int(span.positions[0])))


def _of_medium(
    cfg: HookedConfig, tensors: Mapping[str, Any], medium: Medium, sizes: Sequence[Size | None]
) -> list[Span]:
    """Placeholder tokens shared out, in order, among the media."""
    places = tensors[medium.places]
    grids = None if medium.kind == "audio" else places.flatten(0, -3)  # [image patch 2]
    valid = places.bool() if grids is None else (grids != -1).all(-1)  # [image patch]
    counts = valid.sum(1).tolist()
    at = _placeholders(cfg, tensors, medium).nonzero()  # [token (row, position)]
    if len(at) != sum(counts):
        raise ValueError(
            f"the prompts hold {len(at)} {medium.kind} placeholder tokens, the input gives {sum(counts)} features: they must "
            "be equal, so prepare prompt and media together with the processor"
        )
    spans: list[Span] = []
    number: dict[int, int] = {}
    first = 0
    for index, count in enumerate(counts):
        rows, positions = at[first : first + count].unbind(1)
        if count:
            row = int(rows[0])
            if bool((rows != row).any()):
                raise ValueError(
                    f"the {count} tokens of {medium.kind} {index} stand in prompts {rows.unique().tolist()}: each prompt needs as "
                    "many placeholder tokens as its own media have features"
                )
            number[row] = number.get(row, -1) + 1
            grid = None if grids is None else grids[index, valid[index]]
            size = sizes[index] if index < len(sizes) else None
            spans.append(
                Span(
                    medium.kind, row, number[row], positions, grid, size, valid[index], index, first
                )
            )
        first += count
    return spans


def _placeholders(
    cfg: HookedConfig, tensors: Mapping[str, Any], medium: Medium
) -> Bool[Tensor, "batch pos"]:
    """Where the network puts features of a kind."""
    ids, types = tensors.get("input_ids"), tensors.get("mm_token_type_ids")
    token = getattr(cfg, medium.token)
    if ids is not None and token is not None:
        return cast(Tensor, ids == token)
    if ids is None and types is not None:
        return cast(Tensor, types == medium.type)
    raise ValueError(
        f"nothing says where the {medium.kind} tokens stand: give input_ids or mm_token_type_ids with them"
    )


# -- names of tokens ----------------------------------------------------------------------------------


def media_labels(spans: Sequence[Span], row: int) -> dict[int, str]:
    """By position, the names of a prompt's media tokens."""
    return {
        position: label
        for span in spans
        if span.row == row
        for position, label in zip(span.positions.tolist(), span.labels(), strict=True)
    }


def token_labels(model: HookedModel, tensors: Mapping[str, Any]) -> list[list[str]]:
    """Each prompt's tokens as text, position by position, with "image[0] (3, 2)" in place of placeholders.

    Without a tokenizer, or without ids, text tokens are their positions: "0", "1".

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> token_labels(model, model.prepare("The capital"))
    [['<bos>', 'The', ' capital']]
    """
    return labels_of(model.tokenizer, tensors, spans_of(model, tensors))()


def token_text(tokenizer: Any, token: int) -> str:
    """One token as text, its leading space kept; a byte, which alone is no text, as the vocabulary spells it ("<0xE2>").

    Args:
        tokenizer: transformers', or a model.
    """
    if hasattr(tokenizer, "to_single_str_token"):
        return tokenizer.to_single_str_token(token)
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text


def labels_of(
    tokenizer: Any, tensors: Mapping[str, Any], spans: Sequence[Span]
) -> Callable[[], list[list[str]]]:
    """`token_labels`, for later: it keeps of the call no more than ids and spans, and nothing of the model."""
    given = (tensors.get(name) for name in ("input_ids", "inputs_embeds", "resid"))
    batch, pos = next(one for one in given if one is not None).shape[:2]
    return functools.partial(_labels, tokenizer, tensors.get("input_ids"), batch, pos, list(spans))


def _labels(
    tokenizer: Any, ids: Tensor | None, batch: int, pos: int, spans: Sequence[Span]
) -> list[list[str]]:
    words = [[str(i) for i in range(pos)] for _ in range(batch)]
    if ids is not None and tokenizer is not None:
        known = {token: token_text(tokenizer, token) for token in ids.unique().tolist()}
        words = [[known[token] for token in row] for row in ids.tolist()]
    for row, labels in enumerate(words):
        for position, label in media_labels(spans, row).items():
            labels[position] = label
    return words
