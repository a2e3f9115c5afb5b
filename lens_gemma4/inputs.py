"""Text and media to what the network takes, through transformers' tokenizer and processor.

One rule for every method that takes text: exactly one BOS at the front, never two, whatever the tokenizer does
itself. Ids are never touched. Tokenizer and processor objects are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

if TYPE_CHECKING:
    PaddingSide = Literal["left", "right"]
else:
    PaddingSide = str

SAMPLE_RATE = 16_000
FEWEST_SAMPLED_FRAMES = 32  # the video processor samples this many and refuses fewer


class TextInputs:
    """The part of `HookedModel` that speaks text: it needs `cfg`, `folder`, `device` and `W_U`."""

    cfg: HookedConfig
    folder: Path | None
    device: torch.device
    W_U: Tensor

    # -- tokenizer and processor ------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint, loaded when first needed; None when it has none."""
        if "_tokenizer" not in self.__dict__:
            has_one = self.folder is not None and (self.folder / "tokenizer_config.json").is_file()
            self.__dict__["_tokenizer"] = _load("AutoTokenizer", self.folder) if has_one else None
        return self.__dict__["_tokenizer"]

    @property
    def processor(self) -> Any:
        """transformers' processor of the checkpoint, for images, audio and video; None when it has none."""
        if "_processor" not in self.__dict__:
            files = ("processor_config.json", "preprocessor_config.json")
            has_one = self.folder is not None and any((self.folder / name).is_file() for name in files)
            self.__dict__["_processor"] = _load("AutoProcessor", self.folder) if has_one else None
        return self.__dict__["_processor"]

    def set_tokenizer(self, tokenizer: Any, default_padding_side: PaddingSide | None = None) -> None:
        """Use another tokenizer; the object is not changed.

        Raises:
            ValueError: it has more words than the model.
        """
        if len(tokenizer) > self.cfg.d_vocab:
            raise ValueError(f"the tokenizer has {len(tokenizer)} words, the model {self.cfg.d_vocab}: it is another model's")
        self.__dict__["_tokenizer"] = tokenizer
        self.__dict__["_padding_side"] = default_padding_side

    def _tokenizer_or_error(self) -> Any:
        if self.tokenizer is None:
            where = f"{self.folder} holds no tokenizer" if self.folder else "this model was not loaded from a folder"
            raise ValueError(f"text needs a tokenizer, and {where}: give ids, or call set_tokenizer(tokenizer)")
        return self.tokenizer

    @property
    def bos_token_id(self) -> int:
        found = getattr(self.tokenizer, "bos_token_id", None)
        found = self.cfg.bos_token_id if found is None else found
        if found is None:
            raise ValueError("neither the tokenizer nor config.json names a BOS token: pass prepend_bos=False")
        return found

    @property
    def image_token(self) -> str:
        """The placeholder to write into a prompt for each image."""
        return self._media_token("image_token")

    @property
    def audio_token(self) -> str:
        return self._media_token("audio_token")

    @property
    def video_token(self) -> str:
        return self._media_token("video_token")

    def _media_token(self, name: str) -> str:
        return getattr(self._processor_or_error(), name)

    def _processor_or_error(self) -> Any:
        if self.processor is None:
            raise ValueError(
                "images, audio and video in text need the checkpoint's processor, and there is none: "
                "give the tensors that a transformers processor returns"
            )
        return self.processor

    # -- text -------------------------------------------------------------------------------------------

    def encode(
        self, text: str | Sequence[str], prepend_bos: bool | None = None, padding_side: PaddingSide | None = None
    ) -> dict[str, Tensor]:
        """Ids `[batch pos]`, with an `attention_mask` when rows were padded.

        Args:
            prepend_bos: None and True give exactly one BOS; False adds none.
            padding_side: "left" or "right"; None is the tokenizer's own.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(t, str) for t in texts):
            raise TypeError(f"text is a string or a list of strings, got {text!r}")
        rows = [self._ids_of(t, prepend_bos) for t in texts]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"text {empty[0]} is empty and prepend_bos is off: there is no token to run")
        width = max(map(len, rows))
        if width > self.cfg.n_ctx:
            raise ValueError(f"the text has {width} tokens; this model has {self.cfg.n_ctx} positions")
        ids = torch.tensor([self._pad(row, width - len(row), padding_side) for row in rows], device=self.device)
        if all(len(row) == width for row in rows):
            return {"input_ids": ids}
        ones = [self._pad([1] * len(row), width - len(row), padding_side, 0) for row in rows]
        return {"input_ids": ids, "attention_mask": torch.tensor(ones, device=self.device)}

    def _ids_of(self, text: str, prepend_bos: bool | None) -> list[int]:
        ids = list(self._tokenizer_or_error()(text, add_special_tokens=False)["input_ids"])
        if prepend_bos is False:
            return ids
        bos = self.bos_token_id
        while ids and ids[0] == bos:  # written out in the text
            ids.pop(0)
        return [bos, *ids]

    def _pad(self, row: list[int], n: int, side: PaddingSide | None, value: int | None = None) -> list[int]:
        if side not in (None, "left", "right"):
            raise ValueError(f"padding_side is {side!r}; use 'left' or 'right'")
        tokenizer = self._tokenizer_or_error()
        if value is None:
            value = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.cfg.pad_token_id or 0
        side = side or self.__dict__.get("_padding_side") or tokenizer.padding_side
        return [value] * n + row if side == "left" else row + [value] * n

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        move_to_device: bool = True,
        truncate: bool = False,
    ) -> Int[Tensor, "batch pos"]:
        """Text to ids. A ragged batch is padded: run it as text, or take `encode`, which also gives the mask.

        Args:
            truncate: cut to the model's positions in place of an error.
        """
        if truncate:
            rows = [self._ids_of(t, prepend_bos)[: self.cfg.n_ctx] for t in ([input] if isinstance(input, str) else input)]
            width = max(map(len, rows))
            ids = torch.tensor([self._pad(row, width - len(row), padding_side) for row in rows])
            return ids.to(self.device) if move_to_device else ids
        ids = self.encode(input, prepend_bos, padding_side)["input_ids"]
        return ids if move_to_device else ids.cpu()

    def to_string(self, tokens: Tensor | Sequence[int] | int) -> str | list[str]:
        """Ids to text: a string for `[pos]`, a list for `[batch pos]`. Special tokens are shown."""
        ids = torch.as_tensor(tokens)
        if ids.ndim > 1:
            return [str(self.to_string(row)) for row in ids]
        return self._tokenizer_or_error().decode(ids.reshape(-1).tolist(), clean_up_tokenization_spaces=False)

    def to_str_tokens(
        self,
        input: str | Sequence[str] | Tensor | Sequence[int],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
    ) -> list[str] | list[list[str]]:
        """Each token as a string: a list for one text or `[pos]` (or `[1 pos]`) ids, a list of lists for several."""
        if isinstance(input, str):
            return [self.to_single_str_token(i) for i in self._ids_of(input, prepend_bos)]
        if not isinstance(input, Tensor) and len(input) and isinstance(input[0], str):
            return [[self.to_single_str_token(i) for i in self._ids_of(str(t), prepend_bos)] for t in input]
        ids = torch.as_tensor(input)
        if ids.ndim == 2 and len(ids) > 1:
            return [[self.to_single_str_token(int(i)) for i in row] for row in ids]
        return [self.to_single_str_token(int(i)) for i in ids.reshape(-1)]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token (" Paris", with its space).

        Raises:
            ValueError: it is several tokens; they are listed.
        """
        ids = self._ids_of(string, prepend_bos=False)
        if len(ids) != 1:
            parts = [self.to_single_str_token(i) for i in ids]
            raise ValueError(f"{string!r} is {len(ids)} tokens, {parts}: give one (mind the space in front)")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """One id as a string, its leading space kept."""
        if not 0 <= int_token < self.cfg.d_vocab:
            raise ValueError(f"{int_token} is no token: this vocabulary has 0 to {self.cfg.d_vocab - 1}")
        return str(self.to_string([int_token]))

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor | Sequence[int],
        mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
    ) -> int:
        """Where a token stands in a text (BOS counted) or in ids `[pos]`."""
        if mode not in ("first", "last"):
            raise ValueError(f"mode is {mode!r}; use 'first' or 'last'")
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        ids = self._ids_of(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input).reshape(-1).tolist()
        if token not in ids:
            raise ValueError(f"{self.to_single_str_token(token)!r} ({token}) does not occur in {self.to_string(ids)!r}")
        return ids.index(token) if mode == "first" else len(ids) - 1 - ids[::-1].index(token)

    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "*axes"]
    ) -> Float[Tensor, "*axes d_model"]:
        """The columns of W_U: moving the last norm's output along one moves that token's raw logit."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        return self.W_U.T[torch.as_tensor(tokens, device=self.device)]

    def save_text_files(self, folder: str | Path) -> None:
        """Write tokenizer and processor: the checkpoint's own files as they are, else what was set."""
        from lens_gemma4.loading import copy_text_files

        if self.folder is not None:
            copy_text_files(self.folder, Path(folder))
        elif self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    # -- media ------------------------------------------------------------------------------------------

    def encode_inputs(
        self,
        text: str | Sequence[str],
        *,
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
    ) -> dict[str, Any]:
        """Text, with one placeholder for each image, video or clip, as the network's inputs.

        Args:
            images: PIL images, paths, arrays or tensors; one, or a list in the order of the placeholders.
            videos: arrays or tensors `[frame height width channel]`, or paths.
            audio: mono arrays at 16 kHz, `(array, 16000)`, or paths.
        """
        if images is None and videos is None and audio is None:
            return dict(self.encode(text, prepend_bos, padding_side))
        texts = [text] if isinstance(text, str) else list(text)
        processor = self._processor_or_error()
        media: dict[str, Any] = {}
        for name, token, given in (
            ("images", self.image_token, images),
            ("videos", self.video_token, videos),
            ("audio", self.audio_token, audio),
        ):
            counts = [t.count(token) for t in texts]
            items = [] if given is None else list(given) if isinstance(given, (list, tuple)) and not _is_clip(given) else [given]
            if sum(counts) != len(items):
                raise ValueError(
                    f"the text holds {sum(counts)} placeholders {token!r} and {len(items)} {name} were given: write one "
                    f"placeholder for each, e.g. '{token} What is this?'"
                )
            if items:
                media[name] = items
        if "images" in media:  # the processor wants them row by row
            flat = iter(media["images"])
            media["images"] = [[next(flat) for _ in range(t.count(self.image_token))] for t in texts]
        if "audio" in media:
            media["audio"] = [_clip(item) for item in media["audio"]]
        if "videos" in media and any(_frames(v) < FEWEST_SAMPLED_FRAMES for v in media["videos"]):
            media["do_sample_frames"] = False
        if padding_side is not None:
            media["padding_side"] = padding_side
        # BOS is written into the text, so that the tokenizer's own habits do not matter.
        bos = "" if prepend_bos is False else self._tokenizer_or_error().bos_token
        bare = [t if prepend_bos is False else _without_prefix(t, bos) for t in texts]
        out = processor(text=[bos + t for t in bare], return_tensors="pt", add_special_tokens=False, **media)
        if bool(out["attention_mask"].all()):
            out.pop("attention_mask")
        from lens_gemma4.model import INPUT_KEYS

        return {key: value for key, value in out.items() if key in INPUT_KEYS}


def _load(kind: str, folder: Path | None) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, local_files_only=True)


def _without_prefix(text: str, prefix: str) -> str:
    while prefix and text.startswith(prefix):
        text = text[len(prefix) :]
    return text


def _is_clip(value: Any) -> bool:
    """`(array, rate)`, which is one clip and no list of two."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int)


def _clip(value: Any) -> Any:
    """A clip the feature extractor takes: it neither mixes channels nor resamples."""
    if isinstance(value, (str, Path)):
        return str(value)
    samples, rate = value if _is_clip(value) else (value, SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise ValueError(
            f"the clip is at {rate} Hz; the model hears {SAMPLE_RATE} Hz: "
            f"torchaudio.functional.resample(clip, {rate}, {SAMPLE_RATE})"
        )
    samples = torch.as_tensor(samples)
    if samples.ndim != 1:
        raise ValueError(f"the clip is {list(samples.shape)}; needed is one channel [sample]: clip.mean(axis of channels)")
    return samples.numpy()


def _frames(video: Any) -> int:
    """Number of frames; a path is left to the processor."""
    return FEWEST_SAMPLED_FRAMES if isinstance(video, (str, Path)) else len(video)
