"""Text and media to what the network takes, through transformers' tokenizer and processor.

One rule for every method that takes text: exactly one BOS at the front, never two, whatever the
tokenizer does itself. Ids are never touched. Tokenizer and processor objects are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4 import chat, forms
from lens_gemma4.config import HookedConfig
from lens_gemma4.spans import ImageFeatures, Inputs, Size, together, token_text

PaddingSide = Literal["left", "right"]


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
        if self.cfg.vision is None and self.cfg.audio is None:
            raise ValueError(
                f"this checkpoint ({self.cfg.model_type}) is of text alone: it takes no images, audio and video"
            )
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
        """Each token as a string, spaces kept; a single byte as the vocabulary spells it ("<0xE2>").

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
        """One id as a string, its leading space kept; a single byte as the vocabulary spells it ("<0xE2>").

        Raises:
            ValueError: there is no such token.
        """
        known = self.cfg.d_vocab
        if int_token >= known:  # placeholders may lie beyond; counting takes a while
            known = max(known, len(self._tokenizer_or_error()))
        if not 0 <= int_token < known:
            raise ValueError(f"{int_token} is no token: this vocabulary has 0 to {known - 1}")
        return token_text(self._tokenizer_or_error(), int_token)

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
        text: Any,
        *,
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        image_tokens: int | None = None,
        image_features: Any = None,
    ) -> Inputs:
        """Text, with one placeholder for each image, video or clip, as the network's inputs.

        Media are one item or a list, in the order of the placeholders over all texts, or a list for each text.

        Args:
            text: a text, texts, chat messages (`[{"role": "user", "content": ...}]`, contents as text or parts) where the
                checkpoint has a chat template, or several such lists.
            images: PIL images as they are, paths and addresses (turned upright as EXIF says), or arrays and tensors with 3
                channels, first or last: whole numbers 0 to 255 or floats in [0, 1]. What is transparent lies over white.
                Floats, as the processor resamples them, are not cut at 0 and 1 and not rounded: where a picture is
                resampled, `pixels / 255` differs from `pixels` by up to 0.2. Gradients reach the tensor given.
            videos: frames `[frame height width channel]` or `[frame channel height width]`, a list
                of images, a path, or `(frames, frames per second)`, 24 when not said. The processor
                samples long ones (32 frames on the 12B); shorter ones go in whole.
            audio: one channel at 16 kHz as an array or tensor, `(array, rate)`, or a path. Floats are in [-1, 1]; whole
                numbers are PCM of their dtype: int16, int32, uint8, int8. WAV files are read as they are; of other files
                transformers mixes the channels and resamples. No gradient reaches the samples: for one,
                differentiate `input_features`.
            image_tokens: the most tokens that an image may become: 70, 140, 280, 560 or 1120; None is the processor's own.
            image_features: in place of images, what `embed_image` returned, one for each placeholder.

        Raises:
            ValueError: placeholders and media differ in number; a file that cannot be read; an image without pixels, or whose
                channels may be several axes; a clip of another rate, with several channels, of features in place of
                samples, or whose numbers do not say how loud it is; another budget; messages for a checkpoint
                without a template; media that this checkpoint does not take.
        """
        media = {"images": images, "videos": videos, "audio": audio}
        if chat.is_chat(text):
            text, said = chat.rendered(text, self._tokenizer_or_error(), self.processor)
            media |= _once(said, media)
        texts = _texts(text)
        media = {keyword: self._taken(keyword, given) for keyword, given in media.items()}
        if image_tokens is not None and media["images"] is None:
            raise ValueError(
                "image_tokens is how many tokens an image becomes: give images with it"
            )
        if image_features is not None:
            return self._with_features(texts, image_features, media, prepend_bos, padding_side)
        if all(given is None for given in media.values()):
            return Inputs(self.encode(texts, prepend_bos, padding_side), self.cfg)
        out, sizes = self._processed(texts, **media, image_tokens=image_tokens)
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
        self, texts: list[str], images: Any, videos: Any, audio: Any, image_tokens: int | None
    ) -> tuple[dict[str, Any], dict[str, list[Size | None]]]:
        """What the processor makes of it: text as lists of ids, no BOS, no padding; media. And their sizes in pixels."""
        processor = self._processor_or_error()
        media: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        sizes: dict[str, list[Size | None]] = {}
        if items := self._matched(texts, "image", images, forms.never):
            pictures = [forms.image_of(item) for item in items]
            sizes["image"] = [forms.size_of(picture) for picture in pictures]
            flat = iter(pictures)
            counts = [t.count(self.image_token) for t in texts]
            media["images"] = [[next(flat) for _ in range(n)] for n in counts]  # by row
        if items := self._matched(texts, "video", videos, forms.is_video):
            n_sampled = processor.video_processor.num_frames
            media["videos"], sampling = forms.videos_and_sampling(items, n_sampled)
            of_videos = [forms.size_of(video) for video in media["videos"]]
        if items := self._matched(texts, "audio", audio, forms.is_clip):
            media["audio"] = [forms.clip_of(item) for item in items]
        as_tensors = {"return_tensors": "pt"}
        budget = forms.budget(image_tokens)
        with forms.processor_errors(sizes.get("image", [])):
            out = processor(
                text=texts,
                **media,
                text_kwargs={"add_special_tokens": False, "padding": False},
                images_kwargs=as_tensors | budget,
                videos_kwargs=as_tensors | sampling,
                audio_kwargs=as_tensors,
            )
        if "videos" in media:
            n_frames = forms.frames_per_video(out)
            sizes["frame"] = [
                size for size, n in zip(of_videos, n_frames, strict=True) for _ in range(n)
            ]
        return dict(out), sizes

    def _taken(self, keyword: str, given: Any) -> Any:
        """Media as they are given; an empty list is none.

        Raises:
            ValueError: this checkpoint has no embedder for them.
        """
        if not forms.items_of(given, forms.never):
            return None
        embedder = "audio" if keyword == "audio" else "vision"
        if getattr(self.cfg, embedder) is None:
            raise ValueError(
                f"{keyword} were given, and this checkpoint ({self.cfg.model_type}) has no {embedder} embedder: it takes none"
            )
        return given

    def _matched(self, texts: list[str], kind: str, given: Any, is_one: forms.IsOne) -> list[Any]:
        """Media of a kind one after another, when there are as many as placeholders."""
        items = forms.items_of(given, is_one)
        token = getattr(self._processor_or_error(), f"{kind}_token", None)
        if items:
            token = self._placeholder(f"{kind}_token")
        counts = [t.count(token) if token else 0 for t in texts]
        if sum(counts) != len(items):
            raise ValueError(
                f"the text holds {sum(counts)} placeholders {token!r}, and {len(items)} of kind {kind} were "
                f"given: write one placeholder for each, as in '{token} What is this?'"
            )
        by_text = forms.counts_by_text(given, is_one)
        if by_text not in (None, counts):
            raise ValueError(
                f"the texts hold {counts} placeholders {token!r}, and {by_text} of kind {kind} were given, text by "
                "text: give as many for each, or all in one list"
            )
        return items

    def _with_features(
        self,
        texts: list[str],
        given: Any,
        media: dict[str, Any],
        prepend_bos: bool | None,
        padding_side: PaddingSide | None,
    ) -> Inputs:
        """Text with as many image tokens for each placeholder as its features have."""
        if others := [keyword for keyword, items in media.items() if items is not None]:
            raise ValueError(
                f"image_features and {', '.join(others)} were given: features stand for images, and go with text alone"
            )
        items: list[ImageFeatures] = self._matched(texts, "image", given, forms.never)
        processor, rest = self._processor_or_error(), iter(items)

        def written_out(text: str) -> str:
            first, *others = text.split(self.image_token)
            spans = [
                f"{processor.boi_token}{self.image_token * len(next(rest))}{processor.eoi_token}"
                for _ in others
            ]
            return first + "".join(span + other for span, other in zip(spans, others, strict=True))

        encoded = self.encode([written_out(text) for text in texts], prepend_bos, padding_side)
        return Inputs(
            encoded | together(items, self.device),
            self.cfg,
            {"image": [item.size for item in items]},
        )


def _once(said: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Media from messages, which may not be given a second time."""
    if twice := [keyword for keyword in said if given[keyword] is not None]:
        raise ValueError(
            f"{', '.join(twice)} are in the messages and given beside them: give them once"
        )
    return said


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
