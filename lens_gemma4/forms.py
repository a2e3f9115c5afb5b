"""Images, videos and sound in every form that people have them in, as transformers' processor takes them.

The processor asks few questions: floats come out black, four rows are channels, stereo fails far below. So it is asked here.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import math
import numbers
import urllib.parse
import urllib.request
import warnings
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lens_gemma4.spans import ImageFeatures, Size

if TYPE_CHECKING:
    import PIL.Image

SAMPLE_RATE = 16_000  # the extractor cuts frames of 640 samples and does not ask for the rate
PCM_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of a sample in a WAV file
PCM = (torch.int8, torch.uint8, torch.int16, torch.int32)  # whose own range says how loud they are
WIDE = (torch.uint16, torch.uint32, torch.uint64)  # with which torch can do little
MOST_CHANNELS = 8  # of sound; what has more is no recording
LOUDEST = 2.0  # of floats, whose full scale is 1: resampling and mixing go beyond it by a little
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # modes of PIL with more than eight bits
PATIENCE = 60  # seconds that a server has to answer
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


def budget(image_tokens: Any) -> dict[str, int]:
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
    return {"max_soft_tokens": int(image_tokens)}  # NumPy's numbers are none to the processor


@contextmanager
def processor_errors(sizes: Sequence[Size | None]) -> Iterator[None]:
    """The processor's failures in one line that says what it was given."""
    try:
        yield
    except (
        *(ArithmeticError, AttributeError, IndexError, OSError, RuntimeError),
        *(TypeError, ValueError),
    ) as error:
        given = f" (images of {list(sizes)} [width height])" if sizes else ""
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"transformers' processor takes no such media{given}: {first[0]}"
        ) from error


def never(value: Any) -> bool:
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _with_rate(value: Any) -> bool:
    """`(array, rate)`, or the other way round, which is one item and no list of two."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    return _is_number(value[0]) != _is_number(value[1])


def _and_rate(value: Any) -> tuple[Any, Any]:
    """What is given, and its rate, None where none is."""
    if not _with_rate(value):
        return value, None
    medium, rate = reversed(value) if _is_number(value[0]) else value
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate is {rate}; it is a number above 0, in Hz")
    return medium, int(rate) if rate == int(rate) else float(rate)


def is_clip(value: Any) -> bool:
    """`(array, rate)`, or samples in a list."""
    return _with_rate(value) or (_is_full_list(value) and _is_number(value[0]))


def is_video(value: Any) -> bool:
    """`(frames, rate)`, or frames in a list."""
    return _with_rate(value) or (_is_full_list(value) and _is_picture(value[0]))


def _is_full_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0


def _is_picture(value: Any) -> bool:
    return _is_pil(value) or getattr(value, "ndim", None) == 3


def _is_pil(value: Any) -> bool:
    return hasattr(value, "convert")


# -- pictures -----------------------------------------------------------------------------------------


def image_of(value: Any) -> Any:
    """What the image processor takes, which divides by 255 and asks no question: a PIL image, or `[3 height width]`.

    What is transparent lies over white, whichever processor is installed; figures show the same.
    """
    if isinstance(value, (str, Path)):
        value = _opened(_path(value))
    if not _is_pil(value):
        return _levels(_channels_first(_tensor(value, "an image"), 3, "an image"), "an image")
    if not min(value.size):
        raise ValueError(f"an image is {list(value.size)} [width height]: it has no pixel")
    try:
        _check_depth(value)
        return _over_white(value)
    except (OSError, SyntaxError) as error:  # of a file that PIL reads only now
        raise ValueError(f"an image cannot be read: {error}") from error


def size_of(picture: Any) -> Size | None:
    """Width and height of what goes to the processor; None of a file that it will decode itself."""
    if isinstance(picture, str):
        return None
    if _is_pil(picture):
        return picture.size
    return picture.shape[-1], picture.shape[-2]


def _check_depth(image: PIL.Image.Image) -> None:
    """Pillow cuts at 255 what has more than eight bits, and takes floats for numbers up to 255.

    Raises:
        ValueError: floats, which may mean either.
    """
    if image.mode == "F":
        low, high = image.getextrema()
        raise ValueError(
            f"an image is of mode F, with values from {low:g} to {high:g}, and floats do not say what is white: "
            "image.convert('RGB') if that is 255, image.point(lambda v: v * 255).convert('RGB') if it is 1"
        )
    if image.mode in DEEP and image.getextrema()[1] > 255:  # type: ignore[operator]
        warnings.warn(
            f"an image of mode {image.mode} has values up to {image.getextrema()[1]}, and all above 255 are white to Pillow "
            "and transformers: scale it first, PIL.Image.fromarray((numpy.asarray(image) / 257).astype('uint8')) of 16 bits",
            stacklevel=2,
        )


def _over_white(image: PIL.Image.Image) -> PIL.Image.Image:
    """An image without transparency, as transformers makes one since 5.24; 5.10 showed what lies behind, often black."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    from PIL import Image

    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _opened(path: str) -> Any:
    """A picture in a file or at an address, as viewers show it: a photograph may be stored on its side."""
    from PIL import Image, ImageOps

    name = path if len(path) < 200 else f"{path[:60]}..."
    source = io.BytesIO(_fetched(path, name)) if _is_address(path) else path
    try:
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image)  # a copy, so the file may be closed
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{name}: {error} Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # SyntaxError: a broken PNG
        raise ValueError(f"{name} is no picture that can be read: {error}") from error


def _fetched(address: str, name: str) -> bytes:
    if address.startswith("data:"):
        about, _, content = address.partition(",")
        try:
            return (
                base64.b64decode(content)
                if about.endswith("base64")
                else urllib.parse.unquote_to_bytes(content)
            )
        except binascii.Error as error:
            raise ValueError(f"{name} holds no base64: {error}") from error
    # Some servers answer nobody without a name.
    asked = urllib.request.Request(address, headers={"User-Agent": "lens-gemma4"})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{name} could not be fetched: {error}") from error


def _channels_first(pixels: Tensor, ndim: int, what: str) -> Tensor:
    """Channels before rows, since the processor guesses: 4 rows are channels to it."""
    if not pixels.numel():
        raise ValueError(f"{what} is {list(pixels.shape)}: it has no pixel")
    ends = [pixels.shape[-3], pixels.shape[-1]] if pixels.ndim == ndim else []
    if 3 not in ends:
        axes = f"[{'frame ' * (ndim - 3)}height width 3] or [{'frame ' * (ndim - 3)}3 height width]"
        several = pixels.ndim == ndim + 1 and 3 in (pixels.shape[-3], pixels.shape[-1])
        fix = (
            "Several: list(array)"
            if several
            else "Other channels: PIL.Image.fromarray(array).convert('RGB')"
        )
        raise ValueError(f"{what} is {list(pixels.shape)}; needed is {axes}. {fix}")
    if ends == [3, 3]:
        raise ValueError(
            f"{what} is {list(pixels.shape)}, and its channels may be the first or the last of these: give "
            "PIL.Image.fromarray(array), or a list of these for frames"
        )
    return pixels if ends[0] == 3 else pixels.movedim(-1, -3)


def _levels(pixels: Tensor, what: str) -> Tensor:
    """Pixel values from 0 to 255, whole or not."""
    _check_numbers(pixels, what)
    if pixels.dtype in WIDE:
        pixels = pixels.long()
    low, high = pixels.detach().aminmax()
    top = 1 if pixels.is_floating_point() else 255
    if not (low >= 0 and high <= top):  # so that NaN is no pixel
        raise ValueError(
            f"{what} has values from {low.item():g} to {high.item():g} in {pixels.dtype}; "
            "floats are in [0, 1], whole numbers 0 to 255"
        )
    return pixels.float() * 255 if pixels.is_floating_point() else pixels.to(torch.uint8)


def _check_numbers(values: Tensor, what: str) -> None:
    """True would come out as 1 of 255, which is black."""
    if values.dtype == torch.bool or values.is_complex():
        raise ValueError(f"{what} is {values.dtype}: give whole numbers or floats")


# -- films --------------------------------------------------------------------------------------------


def videos_and_sampling(items: list[Any], n_sampled: int) -> tuple[list[Any], dict[str, Any]]:
    """The processor samples all videos of a call or none, and refuses to sample short ones."""
    pairs = [_and_rate(item) for item in items]
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
    """Frames `[frame 3 height width]`, from a tensor, an array, or a list of images."""
    if not isinstance(video, (list, tuple)):
        return _levels(_channels_first(_tensor(video, "a video"), 4, "a video"), "a video")
    frames = [_frame(frame) for frame in video]
    sizes = sorted({size_of(frame) or (0, 0) for frame in frames})
    if len(sizes) > 1:
        raise ValueError(
            f"a video has frames of {len(sizes)} sizes, {sizes[:3]} [width height]: they must be of one"
        )
    if len(dtypes := {str(frame.dtype) for frame in frames}) > 1:
        raise ValueError(f"a video has frames in {' and '.join(sorted(dtypes))}: give one dtype")
    return _levels(torch.stack(frames), "a video")


def _frame(value: Any) -> Tensor:
    """`[3 height width]`"""
    import numpy as np

    if not _is_pil(value):
        return _channels_first(_tensor(value, "a frame"), 3, "a frame")
    return _tensor(np.asarray(image_of(value).convert("RGB")), "a frame").movedim(-1, 0)


# -- sound --------------------------------------------------------------------------------------------


def clip_of(value: Any) -> Any:
    """A clip for the feature extractor, which neither mixes channels nor resamples nor looks."""
    if isinstance(value, (str, Path)):
        name = _path(value)
        samples, rate = _sound_of(name)
        if samples.ndim > 1:
            raise ValueError(
                f"{name} has {samples.shape[1]} channels; the model hears one: clip, rate = soundfile.read({name!r}), then "
                "audio=(clip.mean(1), rate) mixes them"
            )
    else:
        name = "the clip"
        given, given_rate = _and_rate(value)
        rate = SAMPLE_RATE if given_rate is None else given_rate
        samples = _tensor(given, name).detach().cpu()
        _check_numbers(samples, name)
        _check_one_channel(samples, is_tensor=isinstance(given, Tensor))
        samples = _amplitudes(samples)
    if not samples.numel():
        raise ValueError(f"{name} is {list(samples.shape)}: it has no sample")
    if rate != SAMPLE_RATE:
        raise ValueError(
            f"{name} is at {rate} Hz; the model hears {SAMPLE_RATE} Hz: "
            f"torchaudio.functional.resample(clip, {rate}, {SAMPLE_RATE}), of a package of its own"
        )
    if not bool(samples.isfinite().all()):
        raise ValueError(f"{name} holds samples that are no finite numbers")
    if (peak := samples.abs().max()) > LOUDEST:
        raise ValueError(
            f"{name} reaches {peak.item():g}; floats are in [-1, 1], so that whole numbers made floats are divided by what "
            "is full scale: clip / 32768 of 16 bits"
        )
    return samples.float().numpy()


def _check_one_channel(samples: Tensor, is_tensor: bool) -> None:
    """Samples along one axis, or which axis to mix."""
    shape = list(samples.shape)
    if samples.ndim == 1:
        return
    if samples.ndim == 2 and min(shape) > MOST_CHANNELS:
        raise ValueError(
            f"the clip is {shape}, as mel features are: this model hears raw samples, one channel [sample] at {SAMPLE_RATE} Hz"
        )
    if not samples.numel():
        raise ValueError(f"the clip is {shape}: it has no sample")
    if samples.ndim != 2 or 1 in shape:
        raise ValueError(f"the clip is {shape}; needed is one channel [sample]: clip.reshape(-1)")
    axis, axes = (0, "channel sample") if shape[0] <= shape[1] else (1, "sample channel")
    mixed = f"clip{'.float()' if is_tensor else ''}.mean({axis})"
    if not samples.is_floating_point():  # their mean is no longer PCM
        middle = " - 128" if samples.dtype == torch.uint8 else ""
        full = _full_scale(samples.dtype)
        mixed = f"({mixed}{middle}) / {full}" if middle else f"{mixed} / {full}"
    raise ValueError(f"the clip is {shape}; needed is one channel [sample]: {mixed} mixes [{axes}]")


def _full_scale(dtype: torch.dtype) -> int:
    return 128 if dtype == torch.uint8 else torch.iinfo(dtype).max + 1


def _amplitudes(samples: Tensor) -> Tensor:
    """Samples with full scale at 1.

    Raises:
        ValueError: whole numbers that do not say what full scale is.
    """
    if samples.is_floating_point():
        return samples
    if samples.dtype not in PCM:
        raise ValueError(
            f"the clip is in {samples.dtype}, which does not say how loud it is: whole numbers are PCM, as int16, int32 or "
            "uint8 (16-bit samples in a list: numpy.array(clip, 'int16')), all else is floats in [-1, 1]"
        )
    if samples.dtype == torch.int32 and samples.numel():
        peak = int(samples.long().abs().max())
        if 0 < peak < 2**16:
            raise ValueError(
                f"the clip is in int32 and reaches {peak} of {2**31}, which nobody hears: 16-bit samples are given as int16"
            )
    return _pcm(samples)


def _pcm(samples: Tensor) -> Tensor:
    middle = 128 if samples.dtype == torch.uint8 else 0  # the only one without a sign
    return (samples.double() - middle) / _full_scale(samples.dtype)


def _sound_of(path: str) -> tuple[Tensor, int]:
    """A file's samples `[sample]` or `[sample channel]`, full scale at 1, and its rate."""
    if _is_address(path) or Path(path).suffix.lower() != ".wav":
        return _decoded(path)
    try:
        with wave.open(path) as file:
            n_channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            n_frames = file.getnframes()
            data = bytearray(file.readframes(n_frames))
    except (wave.Error, EOFError):  # floats in a WAV, for one
        return _decoded(path)
    if len(data) != n_frames * n_channels * width:
        raise ValueError(
            f"{path} is cut short: it promises {n_frames} samples and holds {len(data) // (n_channels * width)}"
        )
    if width == 3:  # the high three bytes of four
        three = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0)
        four = torch.zeros(len(data) // 3, 4, dtype=torch.uint8)
        four[:, 1:] = three.view(-1, 3)
        data, width = bytearray(four.numpy().tobytes()), 4
    if width not in PCM_BYTES:
        return _decoded(path)
    samples = torch.frombuffer(data, dtype=PCM_BYTES[width]) if data else torch.zeros(0)
    samples = _pcm(samples) if data else samples
    return (samples if n_channels == 1 else samples.view(-1, n_channels)), rate


def _decoded(path: str) -> tuple[Tensor, int]:
    from transformers.audio_utils import load_audio

    try:
        return _tensor(load_audio(path, sampling_rate=SAMPLE_RATE), path), SAMPLE_RATE
    except ImportError as error:
        first = str(error).strip().splitlines()[0]
        raise ImportError(
            f"{path} is no WAV of whole numbers, and to decode it: {first}"
        ) from error
    except Exception as error:  # of whichever library decodes
        raise ValueError(f"{path} is no sound that can be read: {error}") from error


# -- all of them --------------------------------------------------------------------------------------


def _path(value: str | Path) -> str:
    """A path that exists, or an address: transformers takes any other text for base64."""
    text = str(value)
    if not _is_address(text) and not Path(text).is_file():
        raise FileNotFoundError(f"no file {text[:200]!r}")
    return text


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://", "data:"))


def _tensor(value: Any, what: str) -> Tensor:
    """A tensor as it is; of anything else a copy, since an array may be read-only or of another byte order.

    Raises:
        ValueError: no numbers.
    """
    import numpy as np

    if isinstance(value, ImageFeatures):
        raise ValueError(f"{what} is ImageFeatures: give it by image_features=, with text alone")
    if not isinstance(value, Tensor):
        try:
            array = np.array(value)
        except (RuntimeError, TypeError, ValueError):  # rows of unlike lengths, for one
            array = np.empty(0, object)
        if array.dtype.kind not in "biufc":
            raise ValueError(
                f"{what} is {type(value).__name__}, which is no array of numbers: give a path, an array, a tensor, or a list of "
                "these; pictures in open files and bytes by PIL.Image.open"
            )
        wide = array.dtype.kind == "f" and array.dtype.itemsize > 8
        value = torch.from_numpy(
            array.astype(np.float64 if wide else array.dtype.newbyteorder("="))
        )
    return value
