"""Images, videos and sound in every form that people have them in, as transformers' processor takes them.

The processor asks few questions: floats come out black, four rows are channels, stereo fails far below. So it is asked here.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lens_gemma4.spans import Size

if TYPE_CHECKING:
    import numpy

SAMPLE_RATE = 16_000  # the extractor cuts frames of 640 samples and does not ask for the rate
PCM_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of a sample in a WAV file
MOST_CHANNELS = 8  # of sound; what has more is no recording
BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image that the processor allows

IsOne = Callable[[Any], bool]


def items_of(given: Any, is_one: IsOne) -> list[Any]:
    """One or several media, or rows of several, as a flat list."""
    if given is None:
        return []
    if is_one(given) or not isinstance(given, (list, tuple)):
        return [given]
    return [item for inner in given for item in items_of(inner, is_one)]


def counts_by_text(given: Any, is_one: IsOne) -> list[int] | None:
    """How many are given for each text, where they are given so; None of one list for all."""
    if is_one(given) or not isinstance(given, (list, tuple)):
        return None
    if not any(
        one is None or (isinstance(one, (list, tuple)) and not is_one(one)) for one in given
    ):
        return None
    return [len(items_of(one, is_one)) for one in given]


def budget(image_tokens: int | None) -> dict[str, int]:
    """The processor's word for how many tokens an image may become.

    Raises:
        ValueError: a number that it does not allow.
    """
    if image_tokens is None:
        return {}
    if image_tokens not in BUDGETS:
        raise ValueError(
            f"image_tokens is {image_tokens}; the processor allows {', '.join(map(str, BUDGETS))}"
        )
    return {"max_soft_tokens": image_tokens}


@contextmanager
def processor_errors(sizes: Sequence[Size | None]) -> Iterator[None]:
    """The processor's failures in one line that says what it was given."""
    try:
        yield
    except (ArithmeticError, IndexError, OSError, RuntimeError, TypeError, ValueError) as error:
        given = f" (images of {list(sizes)} [width height])" if sizes else ""
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"transformers' processor takes no such media{given}: {first[0]}"
        ) from error


def never(value: Any) -> bool:
    return False


def _with_rate(value: Any) -> bool:
    """`(array, rate)`, which is one item and no list of two."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))


def is_clip(value: Any) -> bool:
    """`(array, rate)`, or samples in a list."""
    return _with_rate(value) or (_is_full_list(value) and isinstance(value[0], (int, float)))


def is_video(value: Any) -> bool:
    """`(frames, rate)`, or frames in a list."""
    return _with_rate(value) or (_is_full_list(value) and _is_picture(value[0]))


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _is_picture(value: Any) -> bool:
    return _is_pil(value) or getattr(value, "ndim", None) == 3


def _is_pil(value: Any) -> bool:
    return hasattr(value, "convert")


def image_of(value: Any) -> Any:
    """What the image processor takes; it divides by 255 and asks no question."""
    if isinstance(value, (str, Path)):
        path = _path(value)
        return path if _is_address(path) else _opened(path)
    if not _is_pil(value):
        return _pixels(value, 3, "an image")
    if not min(value.size):
        raise ValueError(f"an image is {list(value.size)} [width height]: it has no pixel")
    return value


def size_of(picture: Any) -> Size | None:
    """Width and height of what goes to the processor; None of what it will fetch or decode itself."""
    if isinstance(picture, str):
        return None
    if _is_pil(picture):
        return picture.size
    return picture.shape[-1], picture.shape[-2]


def _opened(path: str) -> Any:
    """A file's picture as viewers show it: a photograph may be stored on its side."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image)  # a copy, so the file may be closed
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{path}: {error} Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # SyntaxError: a broken PNG
        raise ValueError(f"{path} is no picture that can be read: {error}") from error


def _pixels(value: Any, ndim: int, what: str) -> Tensor:
    """Pixel values from 0 to 255, whole or not."""
    pixels = _tensor(value)
    if pixels.ndim != ndim or 3 not in (pixels.shape[-3], pixels.shape[-1]):
        axes = "height width 3] or [3 height width]"
        raise ValueError(
            f"{what} is {list(pixels.shape)}; needed is [{'frame ' * (ndim - 3)}{axes}. "
            "Other channels: PIL.Image.fromarray(array).convert('RGB')"
        )
    if not pixels.numel():
        raise ValueError(f"{what} is {list(pixels.shape)}: it has no pixel")
    _check_numbers(pixels, what)
    low, high = pixels.aminmax()
    top = 1 if pixels.is_floating_point() else 255
    if not (low >= 0 and high <= top):  # so that NaN is no pixel
        raise ValueError(
            f"{what} has values from {low.item():g} to {high.item():g} in {pixels.dtype}; "
            "floats are in [0, 1], whole numbers 0 to 255"
        )
    if (
        pixels.shape[-3] != 3
    ):  # channels first, since the processor guesses: 4 rows are channels to it
        pixels = pixels.movedim(-1, -3)
    return pixels.float() * 255 if pixels.is_floating_point() else pixels.to(torch.uint8)


def _check_numbers(values: Tensor, what: str) -> None:
    """True would come out as 1 of 255, which is black."""
    if values.dtype == torch.bool or values.is_complex():
        raise ValueError(f"{what} is {values.dtype}: give whole numbers or floats")


def videos_and_sampling(items: list[Any], n_sampled: int) -> tuple[list[Any], dict[str, Any]]:
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


def frames_per_video(out: Any) -> list[int]:
    """How many frames of each video the processor kept, as 5.24 says it and as 5.10.1 shows it."""
    if "num_frames_per_video" in out:
        return torch.as_tensor(out["num_frames_per_video"]).tolist()
    videos, frames = torch.as_tensor(out["pixel_values_videos"]).shape[:2]
    return [frames] * videos


def _frames(video: Any) -> Tensor:
    """Frames `[frame ...]`, from a tensor, an array, or a list of images."""
    if isinstance(video, (list, tuple)):
        import numpy as np

        frames = [np.asarray(f.convert("RGB") if _is_pil(f) else f) for f in video]
        if len(shapes := {frame.shape for frame in frames}) > 1:
            raise ValueError(
                f"a video has frames of {len(shapes)} shapes, {sorted(shapes)[:3]}: they must be of one"
            )
        video = np.stack(frames)
    return _pixels(video, 4, "a video")


def clip_of(value: Any) -> Any:
    """A clip for the feature extractor, which neither mixes channels nor resamples nor looks."""
    if isinstance(value, (str, Path)):
        value = _sound_of(_path(value))
    samples, rate = value if _with_rate(value) else (value, SAMPLE_RATE)
    samples = _tensor(samples).detach().cpu()
    if samples.ndim == 2 and min(samples.shape) > MOST_CHANNELS:
        raise ValueError(
            f"the clip is {list(samples.shape)}, as mel features are: this model hears raw samples, one channel [sample] at "
            f"{SAMPLE_RATE} Hz"
        )
    if not samples.numel():
        raise ValueError(f"the clip is {list(samples.shape)}: it has no sample")
    if samples.ndim != 1:
        raise ValueError(
            f"the clip is {list(samples.shape)}; needed is one channel [sample]: "
            "clip.mean(0) mixes [channel sample]"
        )
    _check_numbers(samples, "the clip")
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

    try:
        return load_audio(path, sampling_rate=SAMPLE_RATE), SAMPLE_RATE
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no sound that can be read: {error}") from error


def _path(value: str | Path) -> str:
    """A path that exists, or an address: transformers takes any other text for base64."""
    text = str(value)
    if not _is_address(text) and not Path(text).is_file():
        raise FileNotFoundError(f"no file {text!r}")
    return text


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://", "data:"))


def _tensor(value: Any) -> Tensor:
    """A tensor as it is; of anything else a copy, since an array may be read-only."""
    import numpy as np

    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
