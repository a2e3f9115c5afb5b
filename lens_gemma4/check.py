"""The user's own proof: one checkpoint here and in transformers, compared value by value.

transformers runs first and its values go to disk; it is freed, this package runs the same prompts and every
value is compared as it is computed. One model is in memory at a time, and no change is left in transformers.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm.auto import tqdm

from lens_gemma4 import loading, names
from lens_gemma4.config import HookedConfig

Inputs = Mapping[str, Tensor]
Keep = Callable[[str, Tensor], None]

# -- what transformers shows --------------------------------------------------------------------------

# Our name of a value in a block: the module of a transformers decoder layer that it enters or leaves.
BLOCK_POINTS = {
    "hook_resid_pre": ("input_layernorm", "in"),
    "ln1.hook_out": ("input_layernorm", "out"),
    "attn.hook_q": ("self_attn.q_norm", "in"),
    "attn.q_norm.hook_out": ("self_attn.q_norm", "out"),
    "attn.hook_k": ("self_attn.k_norm", "in"),
    "attn.k_norm.hook_out": ("self_attn.k_norm", "out"),
    "attn.hook_v": ("self_attn.v_norm", "in"),
    "attn.hook_out": ("self_attn.o_proj", "out"),
    "ln1_post.hook_out": ("post_attention_layernorm", "out"),
    "hook_attn_out": ("post_attention_layernorm", "out"),
    "hook_resid_mid": ("pre_feedforward_layernorm", "in"),
    "ln2.hook_out": ("pre_feedforward_layernorm", "out"),
    "mlp.hook_pre": ("mlp.gate_proj", "out"),
    "mlp.hook_act": ("mlp.act_fn", "out"),
    "mlp.hook_pre_linear": ("mlp.up_proj", "out"),
    "mlp.hook_post": ("mlp.down_proj", "in"),
    "mlp.hook_out": ("mlp.down_proj", "out"),
    "ln2_post.hook_out": ("post_feedforward_layernorm", "out"),
    "hook_mlp_out": ("post_feedforward_layernorm", "out"),
    "hook_resid_post": ("", "out"),
}
# The same for the image embedder, which runs on images and on video frames, and for the audio embedder.
PIXEL_POINTS = {
    "patch_ln1.hook_out": ("patch_ln1", "out"),
    "hook_patch_embed": ("patch_dense", "out"),
    "patch_ln2.hook_out": ("patch_ln2", "out"),
    "hook_pos_sum": ("pos_norm", "in"),
    "pos_norm.hook_out": ("pos_norm", "out"),
    "hook_out": ("pos_norm", "out"),
    "projector.norm.hook_out": ("multimodal_embedder.embedding_pre_projection_norm", "out"),
    "projector.hook_out": ("multimodal_embedder.embedding_projection", "out"),
}
AUDIO_POINTS = {
    "norm.hook_out": ("embedding_pre_projection_norm", "out"),
    "hook_out": ("embedding_projection", "out"),
}
# transformers computes these nowhere, or only inside a norm.
NOT_SHOWN = re.compile(r"(^|\.)(hook_result|hook_scale|hook_normalized)$")
EAGER_ONLY = re.compile(r"\.(hook_attn_scores|hook_pattern)$")

_SUMS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_PRODUCTS = (Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul)
_SOFTMAXES = (F.softmax, Tensor.softmax, torch.softmax)
_SCATTERS = (Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_scatter)


class _Recorder(TorchFunctionMode):
    """Watches one forward of a transformers model and keeps its values under our names.

    Most values enter or leave a module. The rest are recognised by the operation they take part in: what a
    `layer_scalar` multiplies, what a softmax reads, what is scattered among the embeddings.
    """

    def __init__(self, model: Any, inputs: Inputs, keep: Keep) -> None:
        super().__init__()
        self.inputs = inputs
        self.keep_function = keep
        self.kept: set[str] = set()
        wrapper = hasattr(model.model, "language_model")
        self.text: Any = model.model.language_model if wrapper else model.model
        self.embedders: Any = model.model if wrapper else None
        self.head = model.lm_head
        self.config = model.config
        self.layer_of = {id(layer.self_attn): i for i, layer in enumerate(self.text.layers)}
        self.layer_of_scalar = {
            id(layer.layer_scalar): i for i, layer in enumerate(self.text.layers)
        }
        self.attending: int | None = None
        self.pixel_root = "vision"
        self.patches: Tensor | None = None
        ids = inputs["input_ids"]
        self.blind = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)  # [batch pos]

    def keep(self, name: str, value: Tensor) -> None:
        if name in self.kept:
            raise RuntimeError(
                f"{name} was computed twice in one forward: this transformers is built in another way"
            )
        self.kept.add(name)
        # At once: transformers multiplies the stream in place a few lines further on.
        self.keep_function(name, value.detach().clone(memory_format=torch.contiguous_format))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything installed for one forward, and removed however it ends."""
        with ExitStack() as stack:
            for handle in self._module_hooks():
                stack.callback(handle.remove)
            stack.enter_context(self._attention())
            stack.enter_context(self)
            yield

    def _module_hooks(self) -> Iterator[Any]:
        yield from self._listen(self.text.embed_tokens, "out", lambda: "hook_embed")
        for i, layer in enumerate(self.text.layers):
            for name, (path, side) in BLOCK_POINTS.items():
                if (module := _submodule(layer, path)) is not None:
                    yield from self._listen(module, side, f"blocks.{i}.{name}".__str__)
        yield from self._listen(self.text.norm, "out", lambda: "ln_final.hook_out")
        yield from self._listen(self.head, "out", lambda: "hook_logits_raw")
        if (pixels := getattr(self.embedders, "embed_vision", None)) is not None:
            yield pixels.register_forward_pre_hook(self._choose_root, with_kwargs=True)
            yield pixels.patch_ln2.register_forward_hook(self._remember_patches)
            for name, (path, side) in PIXEL_POINTS.items():
                yield from self._listen(
                    _submodule(pixels, path), side, partial(self._pixel_name, name)
                )
        if (audio := getattr(self.embedders, "embed_audio", None)) is not None:
            for name, (path, side) in AUDIO_POINTS.items():
                yield from self._listen(_submodule(audio, path), side, f"audio.{name}".__str__)

    def _listen(
        self, module: nn.Module | None, side: str, name: Callable[[], str]
    ) -> Iterator[Any]:
        if module is None:
            raise RuntimeError(f"{name()}: this transformers has no such module")
        if side == "in":
            yield module.register_forward_pre_hook(lambda _, args: self.keep(name(), args[0]))
        else:
            yield module.register_forward_hook(lambda _, __, out: self.keep(name(), out))

    def _pixel_name(self, name: str) -> str:
        return f"{self.pixel_root}.{name}"

    def _choose_root(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """One module embeds images and frames: whose pixels are these?"""
        pixels = args[0] if args else kwargs["pixel_values"]
        images = self.inputs.get("pixel_values")
        same = images is not None and images.data_ptr() == pixels.data_ptr()
        self.pixel_root = "vision" if same else "video"

    def _remember_patches(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.patches = out

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The attention function of the model's choice, watched: it gets rotated heads and returns z."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        functions: Any = ALL_ATTENTION_FUNCTIONS
        chosen = self.text.config._attn_implementation
        modeling = sys.modules[type(self.text).__module__]
        function = functions.get_interface(chosen, modeling.eager_attention_forward)
        override = functions._local_mapping.get(chosen)
        functions[chosen] = partial(self._attend, function)
        try:
            yield
        finally:
            del functions[chosen]
            if override is not None:
                functions[chosen] = override

    def _attend(
        self,
        function: Any,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> Any:
        layer = self.layer_of.get(id(module))
        if layer is None:  # another model that runs at the same time
            return function(module, q, k, v, mask, **kwargs)
        attn = f"blocks.{layer}.attn."
        self.keep(attn + "hook_rot_q", q.transpose(1, 2))  # [batch pos head d_head]
        self.keep(attn + "hook_rot_k", k.transpose(1, 2))
        self.keep(attn + "v_norm.hook_out", v.transpose(1, 2))
        if mask is not None:
            seen = mask if mask.dtype == torch.bool else mask == 0
            self.blind |= ~seen.any(-1).any(1)  # [batch pos]
        self.attending = layer
        try:
            z, pattern = function(module, q, k, v, mask, **kwargs)
        finally:
            self.attending = None
        if pattern is not None:
            self.keep(attn + "hook_pattern", pattern)
        self.keep(attn + "hook_z", z)  # [batch pos head d_head]
        return z, pattern

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and (layer := self._scaled_layer(args)) is not None:
            self.keep(f"blocks.{layer}.hook_resid_sum", args[0])
        elif func in _SOFTMAXES and self.attending is not None:
            self.keep(f"blocks.{self.attending}.attn.hook_attn_scores", args[0])
        elif func in _SUMS and self.patches is not None and args[0] is self.patches:
            self.keep(f"{self.pixel_root}.hook_pos_embed", args[1])
        elif func in _SCATTERS:
            self._keep_scattered(*args)
        return func(*args, **(kwargs or {}))

    def _scaled_layer(self, args: Any) -> int | None:
        return self.layer_of_scalar.get(id(args[1])) if len(args) > 1 else None

    def _keep_scattered(self, stream: Tensor, where: Tensor, features: Tensor) -> None:
        """Image, video and audio features are scattered alike: the token ids there say which these are."""
        tokens = self.inputs["input_ids"][where[..., 0]]
        if tokens.numel():
            points = {
                self.config.image_token_id: "vision.hook_image_features",
                self.config.video_token_id: "video.hook_video_features",
                self.config.audio_token_id: "audio.hook_audio_features",
            }
            self.keep(points[tokens[0].item()], features.reshape(-1, stream.shape[-1]))


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split(".") if path else ():
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module


def run_reference(hf_model: Any, inputs: Inputs, keep: Keep) -> Bool[Tensor, "batch pos"]:
    """Run a loaded transformers model once, in its default way, and hand each value to `keep(name, value)`.

    Values come under our hook names, in our axes, as fresh tensors, in order of computation. Hooks and watchers are
    removed afterwards, however it ends.

    Args:
        hf_model: `Gemma4UnifiedForConditionalGeneration` or `Gemma4UnifiedForCausalLM`; scores and patterns exist
            only with `attn_implementation="eager"`.
        inputs: a processor's output, with `mm_token_type_ids` where there are images (transformers takes them for
            causal text otherwise).
        keep: called with our hook name and the value.
    Returns:
        Which queries see no key in some block: rows of padding, whose values have no meaning.
    """
    recorder = _Recorder(hf_model, inputs, keep)
    recorder.keep("hook_tokens", inputs["input_ids"])
    with torch.no_grad(), recorder.watching():
        logits = hf_model(**for_transformers(inputs)).logits
    recorder.keep("hook_logits", logits)
    return recorder.blind


def reference_values(hf_model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Every value of the table of hook points that transformers exposes, from one default forward.

    See `run_reference`; here the values are collected in memory.

    >>> values = reference_values(hf_model, {"input_ids": ids})       # doctest: +SKIP
    >>> values["blocks.3.hook_resid_post"].shape                      # doctest: +SKIP
    torch.Size([1, 24, 3840])
    """
    values: dict[str, Tensor] = {}
    run_reference(hf_model, inputs, values.__setitem__)
    return values


def for_transformers(inputs: Inputs) -> dict[str, Tensor]:
    """The same inputs as the installed transformers wants its video.

    5.24 takes all frames along one axis and `num_frames_per_video`; 5.10 takes `[video frame patch dim]` and no counts.
    """
    from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedModel

    given = dict(inputs)
    flat_frames = (
        "num_frames_per_video"
        in inspect.signature(Gemma4UnifiedModel.get_video_features).parameters
    )
    by_frame = "pixel_values_videos" in given and given["pixel_values_videos"].ndim == 3
    if by_frame and not flat_frames:
        given.pop("num_frames_per_video")
        for name in ("pixel_values_videos", "video_position_ids"):
            given[name] = given[name][
                None
            ]  # flattened again inside, so one video of all frames is the same
    return given


def shown_points(cfg: HookedConfig, inputs: Inputs, attn_implementation: str) -> list[str]:
    """The hook points that `run_reference` shows for these inputs, in the table's order."""
    given = {"vision": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
    return [
        name
        for name, row in names.points(cfg)
        if not NOT_SHOWN.search(name)
        and (attn_implementation == "eager" or not EAGER_ONLY.search(name))
        and (row.media is None or given[row.media] in inputs)
    ]


# -- comparing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One value here beside transformers': `differing` of `size` numbers, by at most `largest`.

    `note` says what no number can: another shape or dtype, a padding row that is not finite.
    """

    attn: str
    prompt: str
    name: str
    largest: float
    differing: int
    size: int
    note: str = ""

    @property
    def equal(self) -> bool:
        return self.differing == 0 and not self.note


def compare(
    name: str,
    ours: Tensor,
    theirs: Tensor,
    blind: Bool[Tensor, "batch pos"],
    attn: str = "",
    prompt: str = "",
) -> Difference:
    """Compare one value, but for the rows of queries that see no key: these must only be finite."""
    report = partial(Difference, attn, prompt, name)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        note = f"{ours.dtype} {list(ours.shape)} here, {theirs.dtype} {list(theirs.shape)} in transformers"
        return report(float("inf"), theirs.numel(), theirs.numel(), note)
    note = ""
    row = names.row_of(name)
    axes = "" if row is None else row.axes
    if axes == names.SQUARE:
        ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)  # [batch pos head kv_pos]
    if axes.startswith("batch") and blind.any():
        # A float16 mask may overflow to -inf where no key is seen: scores are the one value allowed to.
        if not EAGER_ONLY.search(name) and not ours[blind].isfinite().all():
            note = "not finite in a row of padding"
        ours, theirs = ours[~blind], theirs[~blind]
    unequal = ours != theirs
    if not unequal.any():
        return report(0.0, 0, ours.numel(), note)
    gap = (ours[unequal].double() - theirs[unequal].double()).abs().max().item()
    return report(gap, int(unequal.sum()), ours.numel(), note)


def difference_of_values(
    cache: Mapping[str, Tensor], reference: Mapping[str, Tensor], blind: Bool[Tensor, "batch pos"]
) -> Difference | None:
    """The first value, in order of computation, that is not equal to the last bit; None when all are."""
    for name, theirs in reference.items():
        difference = compare(name, cache[name], theirs, blind)
        if not difference.equal:
            return difference
    return None


# -- prompts ------------------------------------------------------------------------------------------

# A row of a prompt is a list of parts: ("text", tokens), ("image", (columns, rows)), ("video", [(columns, rows), ...]),
# ("audio", frames). Rows of unlike length are padded.
Part = tuple[str, Any]
TYPES = {"text": 0, "image": 1, "video": 2, "audio": 3}


def build_inputs(
    rows: Sequence[Sequence[Part]],
    cfg: HookedConfig,
    generator: torch.Generator,
    padding_side: str = "right",
    text_between_frames: bool = True,
) -> dict[str, Tensor]:
    """Random inputs of the shapes a transformers processor returns: ids, mask, token types, pixels, samples.

    Args:
        rows: the prompts of the batch; see `Part`.
        padding_side: "left" or "right", where rows are of unlike length.
        text_between_frames: one text token before each frame, as the processor's "mm:ss" is; without, frames touch.
    """
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    types_of_rows = []
    for row in rows:
        types: list[int] = []
        for kind, size in row:
            if kind == "video":
                for columns, lines in size:
                    types += [0] * text_between_frames + [2] * (columns * lines)
            else:
                count = size[0] * size[1] if kind == "image" else size
                types += [TYPES[kind]] * count
            if kind != "text":
                media[kind].append(size)
        types_of_rows.append(types)
    inputs = _ids_and_mask(types_of_rows, cfg, generator, padding_side)
    if cfg.is_wrapper:
        inputs |= _media(media, cfg, generator)
    else:
        del inputs["mm_token_type_ids"]
    return inputs


def _ids_and_mask(
    types_of_rows: list[list[int]], cfg: HookedConfig, generator: torch.Generator, padding_side: str
) -> dict[str, Tensor]:
    longest = max(map(len, types_of_rows))
    pads = [longest - len(types) for types in types_of_rows]
    left = padding_side == "left"
    padded = [
        [0] * n + types if left else types + [0] * n
        for types, n in zip(types_of_rows, pads, strict=True)
    ]
    types = torch.tensor(padded)  # [batch pos]
    positions = torch.arange(longest)
    mask = torch.stack([positions >= n if left else positions < longest - n for n in pads])
    special = [cfg.image_token_id, cfg.video_token_id, cfg.audio_token_id]
    words = _text_ids(types.shape, [*special, cfg.pad_token_id], cfg.d_vocab, generator)
    ids = words.where(mask, torch.tensor(cfg.pad_token_id or 0))
    for kind, token in enumerate(special, 1):
        if token is not None:
            ids = ids.masked_fill(types == kind, token)
    inputs = {"input_ids": ids, "mm_token_type_ids": types}
    return inputs | ({"attention_mask": mask.long()} if any(pads) else {})


def _text_ids(
    shape: Sequence[int], special: Sequence[int | None], d_vocab: int, generator: torch.Generator
) -> Int[Tensor, "batch pos"]:
    ids = torch.randint(0, d_vocab, tuple(shape), generator=generator)
    taken = torch.tensor([token for token in special if token is not None])
    while (bad := torch.isin(ids, taken)).any():
        ids = ids.where(~bad, torch.randint(0, d_vocab, tuple(shape), generator=generator))
    return ids


def _media(
    media: dict[str, list[Any]], cfg: HookedConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    if grids := media["image"]:
        inputs["pixel_values"], inputs["image_position_ids"] = _pixels(grids, cfg, generator)
    if videos := media["video"]:
        frames = [grid for video in videos for grid in video]
        inputs["pixel_values_videos"], inputs["video_position_ids"] = _pixels(
            frames, cfg, generator
        )
        inputs["num_frames_per_video"] = torch.tensor([len(video) for video in videos])
    if clips := media["audio"]:
        assert cfg.audio is not None
        counts = torch.tensor(clips)[:, None]
        mask = torch.arange(max(clips))[None] < counts  # [audio frame]
        samples = torch.randn(*mask.shape, cfg.audio.d_audio, generator=generator) * 0.3
        inputs |= {"input_features": samples * mask[..., None], "input_features_mask": mask}
    return inputs


def _pixels(
    grids: Sequence[tuple[int, int]], cfg: HookedConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Patches of images of these sizes (columns, rows), padded to the largest; padded rows stand at (-1, -1)."""
    assert cfg.vision is not None
    most = max(columns * lines for columns, lines in grids)
    positions = torch.full((len(grids), most, 2), -1)
    for index, (columns, lines) in enumerate(grids):
        x = torch.arange(columns).repeat(lines)
        y = torch.arange(lines).repeat_interleave(columns)
        positions[index, : columns * lines] = torch.stack((x, y), -1)
    pixels = torch.rand(len(grids), most, cfg.vision.d_patch, generator=generator)
    return pixels * (positions[..., :1] >= 0), positions


@dataclass(frozen=True)
class Prompt:
    """Inputs to compare on. `stream_only` keeps long prompts off the disk: logits and the stream's parts alone."""

    label: str
    inputs: dict[str, Tensor]
    stream_only: bool = False

    def wants(self, name: str) -> bool:
        return not self.stream_only or bool(
            re.search(r"hook_(embed|attn_out|mlp_out|resid_post|logits)$", name)
        )


def prompts(cfg: HookedConfig, folder: Path, seed: int = 0) -> list[Prompt]:
    """What `check` runs: text, padded batches, and each medium the checkpoint takes."""
    build = partial(build_inputs, cfg=cfg, generator=torch.Generator().manual_seed(seed))
    longer_than_window = min(cfg.window_size + cfg.window_size // 4 + 3, cfg.n_ctx)
    ragged = [[("text", 21)], [("text", 5)], [("text", 13)]]
    found = [
        Prompt("text", build([[("text", 24)]])),
        Prompt("one token", build([[("text", 1)]])),
        Prompt(
            "longer than the window",
            build([[("text", longer_than_window)]]),
            longer_than_window > 256,
        ),
        Prompt("batch, padded left", build(ragged, padding_side="left")),
        Prompt("batch, padded right", build(ragged)),
    ]
    if (sentence := _sentence(folder)) is not None:
        found.insert(0, Prompt("a sentence", {"input_ids": sentence}))
    text: Part = ("text", 4)
    if cfg.vision is not None:
        size = cfg.vision.n_positions
        small, large = (min(3, size), 2), (min(5, size), min(4, size))
        found += [
            Prompt("image", build([[text, ("image", large), text]])),
            Prompt(
                "images, padded left",
                build(
                    [
                        [text, ("image", small), ("text", 1), ("image", large)],
                        [text],
                        [("image", small), text],
                    ],
                    padding_side="left",
                ),
            ),
            Prompt("video", build([[text, ("video", [small, small, small]), text]])),
        ]
    if cfg.audio is not None:
        found.append(
            Prompt("audio, padded right", build([[text, ("audio", 7), text], [("audio", 3), text]]))
        )
    if cfg.vision is not None and cfg.audio is not None:
        everything = [
            [text, ("image", small), text, ("audio", 4), ("video", [small, large])],
            [text, ("image", large)],
        ]
        found.append(Prompt("image, audio and video", build(everything, padding_side="left")))
    return found


def _sentence(folder: Path) -> Int[Tensor, "1 pos"] | None:
    """A real sentence in the checkpoint's own tokens, where it has a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "When Mary and John went to the shop, John gave a bottle of milk to"
    return torch.tensor([tokenizer(text)["input_ids"]])


# -- the check ----------------------------------------------------------------------------------------


def check(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: Sequence[str] = ("sdpa", "eager"),
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: bool = True,
) -> list[Difference]:
    """Compare a checkpoint here and in transformers: every value that transformers shows, on every prompt.

    Args:
        folder: a checkpoint that both load, or "tiny", the one that ships.
        dtype: of both; the checkpoint's own when None.
        attn_implementation: one or more of "sdpa", "eager".
        device: where both run, one after the other.
        seed: of the random prompts.
        progress: show progress bars.
    Returns:
        One row per attention, prompt and hook point, in order of computation.
    Raises:
        RuntimeError: the installed transformers is built in a way that this comparison does not know.

    >>> rows = check("path/to/gemma-4-12B")          # doctest: +SKIP
    >>> all(row.equal for row in rows)               # doctest: +SKIP
    True
    """
    folder = loading.resolve(folder)
    cfg = HookedConfig.from_hf(folder)
    dtype = dtype or getattr(torch, cfg.dtype_name or "float32")
    todo = prompts(cfg, folder, seed)
    rows: list[Difference] = []
    for attn in attn_implementation:
        with tempfile.TemporaryDirectory(prefix="lens_gemma4_check_") as store:
            runs = [
                _Run(prompt, Path(store) / str(i), cfg, attn, device)
                for i, prompt in enumerate(todo)
            ]
            _run_transformers(folder, runs, dtype, attn, device, progress)
            rows += _run_ours(folder, runs, dtype, attn, device, progress)
    return rows


def load_reference(
    folder: str | Path,
    dtype: torch.dtype,
    attn_implementation: str,
    device: str | torch.device = "cpu",
) -> Any:
    """The checkpoint in transformers.

    The dtype is given at loading: a later cast would round the rotary frequencies.
    """
    from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

    wrapper = HookedConfig.from_hf(folder).is_wrapper
    kind: Any = (
        modeling.Gemma4UnifiedForConditionalGeneration
        if wrapper
        else modeling.Gemma4UnifiedForCausalLM
    )
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval()


def _run_transformers(
    folder: Path, runs: list[_Run], dtype: torch.dtype, attn: str, device: Any, progress: bool
) -> None:
    model = load_reference(folder, dtype, attn, device)
    for run in tqdm(runs, desc=f"transformers, {attn}", disable=not progress):
        run.write_reference(model)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run_ours(
    folder: Path, runs: list[_Run], dtype: torch.dtype, attn: Any, device: Any, progress: bool
) -> list[Difference]:
    from lens_gemma4.hooked_model import HookedModel

    model = HookedModel.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn, device=device
    )
    rows: list[Difference] = []
    for run in tqdm(runs, desc=f"lens_gemma4, {attn}", disable=not progress):
        rows += run.compare_with(model)
    return rows


@dataclass(frozen=True)
class _Run:
    """One prompt in both models, its values kept in a folder between."""

    prompt: Prompt
    store: Path
    cfg: HookedConfig
    attn: str
    device: str | torch.device

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {name: value.to(self.device) for name, value in self.prompt.inputs.items()}

    def write_reference(self, hf_model: Any) -> None:
        self.store.mkdir()
        shown: set[str] = set()

        def write(name: str, value: Tensor) -> None:
            shown.add(name)
            if self.prompt.wants(name):
                self._write(name, value)

        self._write("blind", run_reference(hf_model, self.inputs, write))
        if missing := [
            name
            for name in shown_points(self.cfg, self.prompt.inputs, self.attn)
            if name not in shown
        ]:
            raise RuntimeError(
                f"this transformers did not compute {missing[0]} (and {len(missing) - 1} more values) where it is "
                "looked for: this comparison does not know the installed version"
            )

    def compare_with(self, model: Any) -> list[Difference]:
        blind = self._take("blind")
        rows: list[Difference] = []

        def compare_now(value: Tensor, hook: Any) -> None:
            theirs = self._take(hook.name)
            rows.append(
                compare(
                    hook.name, value.detach().cpu(), theirs, blind, self.attn, self.prompt.label
                )
            )

        wanted = [
            name
            for name in shown_points(self.cfg, self.prompt.inputs, self.attn)
            if self.prompt.wants(name)
        ]
        with torch.no_grad():
            model.run_with_hooks(**self.inputs, fwd_hooks=[(name, compare_now) for name in wanted])
        return rows

    def _write(self, name: str, value: Tensor) -> None:
        save_file({"value": value.cpu()}, self.store / f"{name}.safetensors")

    def _take(self, name: str) -> Tensor:
        """Read a value and free its place on the disk."""
        file = self.store / f"{name}.safetensors"
        value = load_file(file)["value"]
        file.unlink()
        return value


# -- the command --------------------------------------------------------------------------------------


def table(rows: Sequence[Difference]) -> str:
    """Per hook point, over blocks, prompts and attentions: the largest difference and how many numbers differ."""
    points: dict[str, list[Difference]] = {}
    order = list(names.BY_NAME)
    for row in sorted(rows, key=lambda row: order.index(names.split(row.name)[0])):
        points.setdefault(names.split(row.name)[0], []).append(row)
    width = max(map(len, points), default=0)
    lines = [f"{'hook point':<{width}}  largest difference  differing numbers"]
    for point, found in points.items():
        largest = max((row.largest for row in found), key=lambda gap: (gap != gap, gap))
        differing, size = sum(row.differing for row in found), sum(row.size for row in found)
        lines.append(f"{point:<{width}}  {largest:<18.6g}  {differing:,} of {size:,}")
    return "\n".join(lines)


def verdict(rows: Sequence[Difference]) -> str:
    """One sentence: all equal, or where the first difference is."""
    values, prompts_run = len(rows), len({(row.attn, row.prompt) for row in rows})
    wrong = [row for row in rows if not row.equal]
    if not wrong:
        return f"Equal to the last bit: {values:,} values in {prompts_run} runs."
    first = wrong[0]
    told = f" ({first.note})" if first.note else ""
    return (
        f"DIFFERENT: {len(wrong):,} of {values:,} values in {prompts_run} runs. The first is {first.name}, "
        f"{first.attn}, prompt {first.prompt!r}: {first.differing:,} of {first.size:,} numbers, by at most "
        f"{first.largest:.6g}{told}."
    )


def run(
    folder: str | Path,
    dtype: str | None = None,
    attn: str = "sdpa,eager",
    device: str = "cpu",
    seed: int = 0,
    progress: bool = True,
) -> int:
    """`lens-gemma4 check FOLDER`: compare, print, and return 1 when anything is not equal to the last bit.

    Args:
        folder: a checkpoint as downloaded, or "tiny", the one that ships.
        dtype: "float32", "bfloat16" or "float16"; the checkpoint's own when None.
        attn: "sdpa", "eager", or both with a comma.
    """
    import transformers

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(known)}")
    implementations = [part.strip() for part in attn.split(",")]
    if unknown := set(implementations) - {"sdpa", "eager"}:
        raise ValueError(f"attn is {attn!r}: {sorted(unknown)[0]!r} is neither 'sdpa' nor 'eager'")
    print(
        f"{folder}: lens_gemma4 beside transformers {transformers.__version__}, torch {torch.__version__}, {device}"
    )
    rows = check(
        folder,
        dtype=known[dtype] if dtype else None,
        attn_implementation=implementations,
        device=device,
        seed=seed,
        progress=progress,
    )
    print(table(rows))
    print(verdict(rows))
    return int(not rows or any(not row.equal for row in rows))
