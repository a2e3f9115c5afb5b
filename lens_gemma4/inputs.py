"""Text and media to what the network takes, through transformers' tokenizer and processor.

One rule for every method that takes text: exactly one BOS at the front, never two, whatever the
tokenizer does itself. Ids are never touched. Tokenizer and processor objects are never changed.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig
from lens_gemma4.spans import Inputs, Size

if TYPE_CHECKING:
    import numpy

PaddingSide = Literal["left", "right"]
SAMPLE_RATE = 16_000  # the extractor cuts frames of 640 samples and does not ask for the rate
PCM_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of a sample in a WAV file


class TextInputs:
    """The part of `HookedModel` that speaks text; it needs `cfg`, `folder`, `device` and `W_U`."""

    cfg: HookedConfig
    folder: Path | None
    device: torch.device
    W_U: Tensor

    # -- tokenizer and processor ------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, loaded when first needed; None when the checkpoint has none."""
        if "_tokenizer" not in self.__dict__:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    @property
    def processor(self) -> Any:
        """transformers' processor of images, audio and video; None when the checkpoint has none."""
        if "_processor" not in self.__dict__:
            self._processor = load_processor(self.folder)
        return self._processor

    def set_tokenizer(
        self, tokenizer: Any, default_padding_side: PaddingSide | None = None
    ) -> None:
        """Use another tokenizer; the object is not changed.

        A processor brings a tokenizer of its own: to use images, audio or video with another, call
        `set_processor` with a processor that holds it.

        Args:
            default_padding_side: what `padding_side=None` means from now on; None is the
                tokenizer's own.

        Raises:
            ValueError: it has more words than the model.
        """
        _check_side(default_padding_side)
        # Added tokens are left aside: a placeholder needs no embedding.
        if tokenizer.vocab_size > self.cfg.d_vocab:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} words, the model {self.cfg.d_vocab}: "
                "it is another model's"
            )
        if tokenizer is not self.__dict__.get("_tokenizer"):
            self._processor, self._text_to_save = None, tokenizer
        self._tokenizer = tokenizer
        self._padding_side = default_padding_side

    def set_processor(self, processor: Any) -> None:
        """Use another processor, and the tokenizer in it; the object is not changed."""
        self.set_tokenizer(processor.tokenizer)
        self._processor = self._text_to_save = processor

    def save_text_files(self, folder: str | Path) -> None:
        """Write what was set, else the checkpoint's own files as they are."""
        from lens_gemma4.loading import copy_text_files

        if self.folder is not None:
            copy_text_files(self.folder, Path(folder))
        if "_text_to_save" in self.__dict__:
            self._text_to_save.save_pretrained(folder)

    def _tokenizer_or_error(self) -> Any:
        if self.tokenizer is None:
            where = (
                f"{self.folder} holds none"
                if self.folder
                else "this model was not loaded from a folder"
            )
            raise ValueError(
                f"text needs a tokenizer, and {where}: give ids, or call set_tokenizer(tokenizer)"
            )
        return self.tokenizer

    def _processor_or_error(self) -> Any:
        if self.processor is None:
            where = "it was loaded with none, or its tokenizer was replaced"
            raise ValueError(
                "images, audio and video beside text need a transformers processor, and this model "
                f"has none ({where}): call set_processor(processor), or give the tensors that a "
                "processor returns"
            )
        return self.processor

    @property
    def bos_token_id(self) -> int:
        """The tokenizer's BOS, else config.json's.

        Raises:
            ValueError: neither names one.
        """
        found = getattr(self.tokenizer, "bos_token_id", None)
        found = self.cfg.bos_token_id if found is None else found
        if found is None:
            raise ValueError(
                "neither the tokenizer nor config.json names a BOS token: pass prepend_bos=False"
            )
        return found

    @property
    def image_token(self) -> str:
        """The placeholder to write into a prompt for each image."""
        return self._placeholder("image_token")

    @property
    def audio_token(self) -> str:
        """The placeholder to write into a prompt for each clip of sound."""
        return self._placeholder("audio_token")

    @property
    def video_token(self) -> str:
        """The placeholder to write into a prompt for each video."""
        return self._placeholder("video_token")

    def _placeholder(self, name: str) -> str:
        found = getattr(self._processor_or_error(), name, None)
        if found is None:
            raise ValueError(
                f"this checkpoint's processor has no {name}: its tokenizer does not name one"
            )
        return found

    # -- text -------------------------------------------------------------------------------

    def encode(
        self,
        text: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        truncate: bool = False,
    ) -> dict[str, Tensor]:
        """Ids `[batch pos]` on the model's device, with an `attention_mask` when rows were padded.

        Args:
            prepend_bos: None and True give exactly one BOS; False adds none, and keeps one that the
                text spells out.
            padding_side: "left" or "right"; None is the tokenizer's own.
            truncate: cut what exceeds the model's positions, in place of an error.

        Raises:
            ValueError: no tokenizer; a text without any token; more tokens than positions.
        """
        rows = [self._ids_of(t, prepend_bos) for t in _texts(text)]
        if truncate:
            rows = [row[: self.cfg.n_ctx] for row in rows]
        return {
            key: value.to(self.device) for key, value in self._batch(rows, padding_side).items()
        }

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        move_to_device: bool = True,
        truncate: bool = False,
    ) -> Int[Tensor, "batch pos"]:
        """Text to ids.

        Several texts are padded to the longest: run them as text, or with the mask of `encode`.

        Args:
            prepend_bos, padding_side: as in `encode`.
            move_to_device: to the model's device, else the CPU.
            truncate: cut what exceeds the model's positions. TransformerLens does so unasked; here
                the default is an error.

        >>> model = HookedModel.from_pretrained("tiny")
        >>> model.to_tokens("The capital of France is").shape
        torch.Size([1, 6])
        """
        ids = self.encode(input, prepend_bos, padding_side, truncate)["input_ids"]
        return ids if move_to_device else ids.cpu()

    def to_string(self, tokens: Any) -> str | list[Any]:
        """Ids to text, special tokens shown: a string for `[pos]`, a list for `[batch pos]`."""
        ids = _nested(tokens)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [self.to_string(row) for row in ids]
        ids = ids if isinstance(ids, list) else [ids]
        return self._tokenizer_or_error().decode(ids, clean_up_tokenization_spaces=False)

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: PaddingSide | None = None
    ) -> list[str] | list[list[str]]:
        """Each token as a string, spaces kept.

        Args:
            input: a text, or ids `[pos]` or `[1 pos]`, gives a list; texts, or ids `[batch pos]`,
                give a list of lists, padding left out for texts.
            padding_side: of no effect, as nothing is padded; for TransformerLens's signature.

        >>> HookedModel.from_pretrained("tiny").to_str_tokens("The capital of France")
        ['<bos>', 'The', ' capital', ' of', ' France']
        """
        if isinstance(input, str):
            return self._words(self._ids_of(input, prepend_bos))
        rows = _nested(input)
        if rows and isinstance(rows, list) and isinstance(rows[0], str):
            return [self._words(self._ids_of(text, prepend_bos)) for text in rows]
        if not (rows and isinstance(rows, list) and isinstance(rows[0], list)):
            return self._words(rows if isinstance(rows, list) else [rows])
        return self._words(rows[0]) if len(rows) == 1 else [self._words(row) for row in rows]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token (" Paris", with its space).

        Raises:
            ValueError: it is none or several tokens; they are listed.
        """
        ids = self._ids_of(string, prepend_bos=False)
        if len(ids) != 1:
            raise ValueError(
                f"{string!r} is {len(ids)} tokens, {self._words(ids)}, where one is needed: "
                "mind the space in front, or give an id"
            )
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """One id as a string, its leading space kept.

        Raises:
            ValueError: there is no such token.
        """
        known = self.cfg.d_vocab
        if int_token >= known:  # placeholders may lie beyond; counting takes a while
            known = max(known, len(self._tokenizer_or_error()))
        if not 0 <= int_token < known:
            raise ValueError(f"{int_token} is no token: this vocabulary has 0 to {known - 1}")
        return str(self.to_string(int_token))

    def get_token_position(
        self,
        single_token: str | int,
        input: Any,
        mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
    ) -> int:
        """Where a token stands in a text (BOS counted) or in ids `[pos]` or `[1 pos]`.

        Args:
            padding_side: of no effect on one text; for TransformerLens's signature.

        Raises:
            ValueError: it does not occur, or `input` is several rows.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode is {mode!r}; use 'first' or 'last'")
        token = (
            self.to_single_token(single_token)
            if isinstance(single_token, str)
            else int(single_token)
        )
        ids = self._ids_of(input, prepend_bos) if isinstance(input, str) else _nested(input)
        if len(ids) == 1 and isinstance(ids[0], list):
            ids = ids[0]
        if any(not isinstance(i, int) for i in ids):
            raise ValueError(
                "a position is asked of one text or one row of ids [pos]; several were given"
            )
        if token not in ids:
            raise ValueError(
                f"{self.to_single_str_token(token)!r} ({token}) does not occur in "
                f"{self.to_string(ids)!r}"
            )
        return ids.index(token) if mode == "first" else len(ids) - 1 - ids[::-1].index(token)

    def tokens_to_residual_directions(
        self, tokens: str | int | Sequence[str] | Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*out d_model"]:
        """The columns of W_U: a step of the final norm's output along one moves its raw logit.

        Args:
            tokens: a single-token text, an id, a list of such texts, or ids of any shape.

        Returns:
            `[... d_model]` for ids `[...]`. One id, in whatever shape, gives `[d_model]`, as in
            TransformerLens.
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif not isinstance(tokens, (int, Tensor)):
            tokens = torch.tensor([self.to_single_token(text) for text in tokens])
        ids = torch.as_tensor(tokens, device=self.device)
        if bool(((ids < 0) | (ids >= self.cfg.d_vocab)).any()):
            raise ValueError(
                f"{ids.tolist()} holds an id that is none: this vocabulary has 0 to "
                f"{self.cfg.d_vocab - 1}"
            )
        return self.W_U.T[ids.reshape(()) if ids.numel() == 1 else ids]  # [... d_model]

    def _words(self, ids: Sequence[int]) -> list[str]:
        return [self.to_single_str_token(i) for i in ids]

    def _ids_of(self, text: str, prepend_bos: bool | None) -> list[int]:
        tokenizer = self._tokenizer_or_error()
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._with_bos(ids, text, prepend_bos)

    def _with_bos(self, ids: list[int], text: str, prepend_bos: bool | None) -> list[int]:
        """The BOS rule on a text's ids, where some tokenizers put a BOS whatever they are asked."""
        has_bos = (
            getattr(self.tokenizer, "bos_token_id", None) is not None
            or self.cfg.bos_token_id is not None
        )
        if prepend_bos is False and not has_bos:
            return ids
        bos = self.bos_token_id
        found = _count_leading(ids, [bos])
        if prepend_bos is not False:
            return [bos, *ids[found:]]
        spelled_out = _count_leading(text, self._tokenizer_or_error().convert_ids_to_tokens(bos))
        return ids[found - min(found, spelled_out) :]

    def _batch(self, rows: list[list[int]], padding_side: PaddingSide | None) -> dict[str, Tensor]:
        """Rows as one tensor, and a mask when any was padded."""
        _check_side(padding_side)
        if not all(rows):
            raise ValueError(
                f"text {rows.index([])} has no token, and prepend_bos is off: nothing to run"
            )
        width = max(map(len, rows))
        if width > self.cfg.n_ctx:
            raise ValueError(
                f"the text has {width} tokens; this model has {self.cfg.n_ctx} positions"
            )
        if all(len(row) == width for row in rows):
            return {"input_ids": torch.tensor(rows)}
        tokenizer = self._tokenizer_or_error()
        pad = self.cfg.pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        side = padding_side or self.__dict__.get("_padding_side") or tokenizer.padding_side
        masks = [[1] * len(row) for row in rows]
        return {
            "input_ids": torch.tensor(
                [_pad(row, width, side, pad or 0) for row in rows]
            ),  # masked: any id would do
            "attention_mask": torch.tensor([_pad(mask, width, side, 0) for mask in masks]),
        }

    # -- media ------------------------------------------------------------------------------

    def encode_inputs(
        self,
        text: str | Sequence[str],
        *,
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
    ) -> Inputs:
        """Text, with one placeholder for each image, video or clip, as the network's inputs.

        One item or a list, in the order of the placeholders over all texts.

        Args:
            images: PIL images, paths, or arrays and tensors with 3 channels, first or last: whole
                numbers 0 to 255 or floats in [0, 1].
            videos: frames `[frame height width channel]` or `[frame channel height width]`, a list
                of images, a path, or `(frames, frames per second)`, 24 when not said. The processor
                samples long ones (32 frames on the 12B); shorter ones go in whole.
            audio: one channel at 16 kHz as an array or tensor, `(array, rate)`, or a path. Whole
                numbers are PCM. WAV files are read as they are; of other files transformers mixes
                the channels and resamples.

        Raises:
            ValueError: placeholders and media differ in number; a clip of another rate or with
                several channels.
        """
        if images is None and videos is None and audio is None:
            return Inputs(self.encode(text, prepend_bos, padding_side), self.cfg)
        texts = _texts(text)
        out, sizes = self._processed(texts, images, videos, audio)
        # The network reads the token types off the ids, and padding is ours.
        ids, _, _ = (
            out.pop(key, None) for key in ("input_ids", "attention_mask", "mm_token_type_ids")
        )
        rows = [
            self._with_bos(list(row), t, prepend_bos) for t, row in zip(texts, ids, strict=True)
        ]
        tensors = self._batch(rows, padding_side)
        tensors |= {key: torch.as_tensor(value) for key, value in out.items()}
        on_device = {key: value.to(self.device) for key, value in tensors.items()}
        return Inputs(on_device, self.cfg, sizes)

    def _processed(
        self, texts: list[str], images: Any, videos: Any, audio: Any
    ) -> tuple[dict[str, Any], dict[str, list[Size | None]]]:
        """What the processor makes of it: text as lists of ids, no BOS, no padding; media. And their sizes in pixels."""
        processor = self._processor_or_error()
        media: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        sizes: dict[str, list[Size | None]] = {}
        if items := self._matched(texts, "image", _items(images, _never)):
            pictures = [_image(item) for item in items]
            sizes["image"] = [_size_of(picture) for picture in pictures]
            flat = iter(pictures)
            counts = [t.count(self.image_token) for t in texts]
            media["images"] = [[next(flat) for _ in range(n)] for n in counts]  # by row
        if items := self._matched(texts, "video", _items(videos, _is_video)):
            n_sampled = processor.video_processor.num_frames
            media["videos"], sampling = _videos_and_sampling(items, n_sampled)
            of_videos = [_size_of(video) for video in media["videos"]]
        if items := self._matched(texts, "audio", _items(audio, _is_clip)):
            media["audio"] = [_clip(item) for item in items]
        as_tensors = {"return_tensors": "pt"}
        out = processor(
            text=texts,
            **media,
            text_kwargs={"add_special_tokens": False, "padding": False},
            images_kwargs=as_tensors,
            videos_kwargs=as_tensors | sampling,
            audio_kwargs=as_tensors,
        )
        if "videos" in media:
            n_frames = _frames_per_video(out)
            sizes["frame"] = [
                size for size, n in zip(of_videos, n_frames, strict=True) for _ in range(n)
            ]
        return dict(out), sizes

    def _matched(self, texts: list[str], kind: str, items: list[Any]) -> list[Any]:
        """The items, when there are as many as placeholders."""
        token = getattr(self._processor_or_error(), f"{kind}_token", None)
        if items:
            token = self._placeholder(f"{kind}_token")
        n = sum(t.count(token) for t in texts) if token else 0
        if n != len(items):
            raise ValueError(
                f"the text holds {n} placeholders {token!r}, and {len(items)} of kind {kind} were "
                f"given: write one placeholder for each, as in '{token} What is this?'"
            )
        return items


def load_tokenizer(folder: Path | None) -> Any:
    """transformers' tokenizer in a folder, read without the network; None when there is none."""
    return _load(
        "AutoTokenizer", folder, ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    )


def load_processor(folder: Path | None) -> Any:
    """transformers' processor in a folder, read without the network; None when there is none."""
    return _load("AutoProcessor", folder, ("processor_config.json", "preprocessor_config.json"))


def _load(kind: str, folder: Path | None, files: Sequence[str]) -> Any:
    if folder is None or not any((folder / name).is_file() for name in files):
        return None
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    except ImportError as error:  # the image and video processors need pillow and torchvision
        raise ImportError(f"{folder}: {error}\n  pip install 'lens-gemma4[media]'") from error


def _texts(text: str | Sequence[str]) -> list[str]:
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(isinstance(t, str) for t in texts):
        raise TypeError(f"text is a string or a list of strings, got {text!r}")
    return texts


def _nested(values: Any) -> Any:
    """Ids as Python numbers in lists, from tensors, arrays, or lists of these."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_nested(value) for value in values] if isinstance(values, (list, tuple)) else values


def _count_leading(sequence: Sequence[Any], part: Sequence[Any]) -> int:
    """How many times `sequence` begins with `part`."""
    n, size = 0, len(part)
    while size and sequence[n * size : (n + 1) * size] == part:
        n += 1
    return n


def _pad(row: list[int], width: int, side: PaddingSide, value: int) -> list[int]:
    padding = [value] * (width - len(row))
    return padding + row if side == "left" else row + padding


def _check_side(side: Any) -> None:
    if side not in (None, "left", "right"):
        raise ValueError(f"padding_side is {side!r}; use 'left' or 'right'")


def _tensor(value: Any) -> Tensor:
    """A tensor as it is; of anything else a copy, since an array may be read-only."""
    import numpy as np

    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


# -- what media may look like ---------------------------------------------------------------


def _items(given: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """One or several media, or rows of several, as a flat list."""
    if given is None:
        return []
    if is_one(given) or not isinstance(given, (list, tuple)):
        return [given]
    return [item for inner in given for item in _items(inner, is_one)]


def _never(value: Any) -> bool:
    return False


def _with_rate(value: Any) -> bool:
    """`(array, rate)`, which is one item and no list of two."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))


def _is_clip(value: Any) -> bool:
    """`(array, rate)`, or samples in a list."""
    return _with_rate(value) or (_is_full_list(value) and isinstance(value[0], (int, float)))


def _is_video(value: Any) -> bool:
    """`(frames, rate)`, or frames in a list."""
    return _with_rate(value) or (_is_full_list(value) and _is_picture(value[0]))


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _is_picture(value: Any) -> bool:
    return _is_pil(value) or getattr(value, "ndim", None) == 3


def _is_pil(value: Any) -> bool:
    return hasattr(value, "convert")


def _image(value: Any) -> Any:
    """What the image processor takes; it divides by 255 and asks no question."""
    if isinstance(value, (str, Path)):
        path = _path(value)
        return path if _is_address(path) else _opened(path)
    return value if _is_pil(value) else _pixels(value, 3, "an image")


def _size_of(picture: Any) -> Size | None:
    """Width and height of what goes to the processor; None of what it will fetch or decode itself."""
    if isinstance(picture, str):
        return None
    if _is_pil(picture):
        return picture.size
    return picture.shape[-1], picture.shape[-2]


def _opened(path: str) -> Any:
    """A file's picture as viewers show it: a photograph may be stored on its side."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image)  # a copy, so the file may be closed


def _pixels(value: Any, ndim: int, what: str) -> Tensor:
    """Pixel values from 0 to 255, whole or not."""
    pixels = _tensor(value)
    if pixels.ndim != ndim or 3 not in (pixels.shape[-3], pixels.shape[-1]):
        axes = "height width 3] or [3 height width]"
        raise ValueError(
            f"{what} is {list(pixels.shape)}; needed is [{'frame ' * (ndim - 3)}{axes}. "
            "Other channels: PIL.Image.fromarray(array).convert('RGB')"
        )
    low, high = pixels.aminmax()
    top = 1 if pixels.is_floating_point() else 255
    if low < 0 or high > top:
        raise ValueError(
            f"{what} has values from {low.item():g} to {high.item():g} in {pixels.dtype}; "
            "floats are in [0, 1], whole numbers 0 to 255"
        )
    if (
        pixels.shape[-3] != 3
    ):  # channels first, since the processor guesses: 4 rows are channels to it
        pixels = pixels.movedim(-1, -3)
    return pixels.float() * 255 if pixels.is_floating_point() else pixels.to(torch.uint8)


def _videos_and_sampling(items: list[Any], n_sampled: int) -> tuple[list[Any], dict[str, Any]]:
    """The processor samples all videos of a call or none, and refuses to sample short ones."""
    pairs = [item if _with_rate(item) else (item, None) for item in items]
    files = [isinstance(video, (str, Path)) for video, _ in pairs]
    if all(files):
        return [_path(video) for video, _ in pairs], {}
    if any(files):
        raise ValueError(
            "videos are all files or all frames, the processor takes no mixture: read the files"
        )
    frames = [_frames(video) for video, _ in pairs]
    lengths = list(map(len, frames))
    if min(lengths) < n_sampled < max(lengths):
        raise ValueError(
            f"the videos have {lengths} frames: those above {n_sampled} are sampled down to it, "
            "shorter ones go in whole, and the processor does one or the other. "
            f"Cut the long ones: video[:{n_sampled}]"
        )
    metadata = [
        {"total_num_frames": n, "fps": rate, "frames_indices": list(range(n))}
        for n, (_, rate) in zip(lengths, pairs, strict=True)
    ]
    return frames, {"do_sample_frames": min(lengths) >= n_sampled, "video_metadata": metadata}


def _frames_per_video(out: Any) -> list[int]:
    """How many frames of each video the processor kept, as 5.24 says it and as 5.10.1 shows it."""
    if "num_frames_per_video" in out:
        return torch.as_tensor(out["num_frames_per_video"]).tolist()
    videos, frames = torch.as_tensor(out["pixel_values_videos"]).shape[:2]
    return [frames] * videos


def _frames(video: Any) -> Tensor:
    """Frames `[frame ...]`, from a tensor, an array, or a list of images."""
    if isinstance(video, (list, tuple)):
        import numpy as np

        video = np.stack([np.asarray(f.convert("RGB") if _is_pil(f) else f) for f in video])
    return _pixels(video, 4, "a video")


def _clip(value: Any) -> Any:
    """A clip for the feature extractor, which neither mixes channels nor resamples nor looks."""
    if isinstance(value, (str, Path)):
        value = _sound_of(_path(value))
    samples, rate = value if _with_rate(value) else (value, SAMPLE_RATE)
    samples = _tensor(samples).detach().cpu()
    if samples.ndim != 1 or not len(samples):
        raise ValueError(
            f"the clip is {list(samples.shape)}; needed is one channel [sample]: "
            "clip.mean(0) mixes [channel sample]"
        )
    if rate != SAMPLE_RATE:
        raise ValueError(
            f"the clip is at {rate} Hz; the model hears {SAMPLE_RATE} Hz: "
            f"torchaudio.functional.resample(clip, {rate}, {SAMPLE_RATE})"
        )
    if samples.is_floating_point():
        return samples.float().numpy()
    if samples.dtype == torch.uint8:  # PCM in one byte is the only one without a sign
        samples = (samples.to(torch.int16) - 128).to(torch.int8)
    return (samples / (torch.iinfo(samples.dtype).max + 1)).float().numpy()


def _sound_of(path: str) -> tuple[numpy.ndarray, int]:
    """A file's samples `[sample]` or `[sample channel]` and rate."""
    if _is_address(path) or Path(path).suffix.lower() != ".wav":
        return _decoded(path)
    try:
        with wave.open(path) as file:
            n_channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = bytearray(file.readframes(file.getnframes()))
    except (wave.Error, EOFError):  # floats in a WAV, for one
        return _decoded(path)
    if width not in PCM_BYTES:
        return _decoded(path)
    samples = torch.frombuffer(data, dtype=PCM_BYTES[width]) if data else torch.zeros(0)
    return (samples if n_channels == 1 else samples.view(-1, n_channels)).numpy(), rate


def _decoded(path: str) -> tuple[numpy.ndarray, int]:
    from transformers.audio_utils import load_audio

    return load_audio(path, sampling_rate=SAMPLE_RATE), SAMPLE_RATE


def _path(value: str | Path) -> str:
    """A path that exists, or an address: transformers takes any other text for base64."""
    text = str(value)
    if not _is_address(text) and not Path(text).is_file():
        raise FileNotFoundError(f"no file {text!r}")
    return text


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://", "data:"))
