"""Every number of the architecture, read from `config.json` itself.

transformers' own config object is not used: from 5.15 on it raises when a size that differs between
blocks is read, and two spellings of those sizes exist in published files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MODEL_TYPES = ("gemma4_unified", "gemma4_unified_text")

# Class defaults of transformers' Gemma4UnifiedTextConfig (5.24): what a missing field means. Not the 12B's values.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 1024,
    "layer_types": None,
    "rope_parameters": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
ROPE_DEFAULTS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
VISION_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
}
AUDIO_DEFAULTS: dict[str, Any] = {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}
TOKEN_DEFAULTS = {
    "image_token_id": 258_880,
    "audio_token_id": 258_881,
    "video_token_id": 258_884,
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "boa_token_id": 256_000,
    "eoa_token_index": 258_883,
}

# Fields that would change the computation, with the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "enable_moe_block": (False, None),
    "num_experts": (0, None),
    "top_k_experts": (0, None),
    "moe_intermediate_size": (0, None),
    "hidden_size_per_layer_input": (0, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "hidden_act": ("gelu_pytorch_tanh", None),
    "rope_scaling": (None,),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "mlp_bias": (False, None),
    "use_clipped_linears": (False, None),
    "standardize": (False, None),
}
PER_LAYER_FIELDS = ("head_dim", "num_key_value_heads")
# Parts of a wrapper and the model_type each must have: another family's would be read with wrong meaning.
PARTS = {
    "text_config": "gemma4_unified_text",
    "vision_config": "gemma4_unified_vision",
    "audio_config": "gemma4_unified_audio",
}


class ConfigError(ValueError):
    """A config.json that asks for something this network does not compute, or contradicts itself."""


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions of one block type: base, and the share of the head that turns."""

    theta: float
    fraction: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of one block. `lender` is the block whose keys and values a borrower attends with."""

    index: int
    kind: Literal["sliding", "full"]
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_mlp: int
    window: int | None
    k_eq_v: bool
    rotary: RotaryConfig
    lender: int | None = None

    @property
    def heads_per_kv(self) -> int:
        return self.n_heads // self.n_key_value_heads


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the image (and video frame) embedder; `patch_size` in pixels, after merging."""

    patch_size: int
    d_vision: int
    n_positions: int
    eps: float

    @property
    def d_patch(self) -> int:
        return self.patch_size**2 * 3


@dataclass(frozen=True)
class AudioConfig:
    """`d_audio` samples at 16 kHz make one frame, which is one token."""

    d_audio: int
    eps: float


@dataclass(frozen=True)
class HookedConfig:
    """Every number of the architecture, in TransformerLens's words.

    Root sizes (`n_key_value_heads`, `d_head`, `d_mlp`) are the sliding blocks'; each block's own are in
    `layer(i)`.

    >>> HookedConfig.from_hf({"model_type": "gemma4_unified_text", "hidden_size": 60}).d_model
    60
    """

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    eps: float
    window_size: int
    output_logits_soft_cap: float | None
    bidirectional: Literal["vision", "all"] | None
    tied: bool
    layers: tuple[LayerConfig, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None = None
    audio_token_id: int | None = None
    video_token_id: int | None = None
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    model_name: str = "gemma4"
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    embed_scale: float = 1.0
    act_fn: str = "gelu_pytorch_tanh"
    normalization_type: str = "RMS"
    positional_embedding_type: str = "rotary"

    @property
    def is_wrapper(self) -> bool:
        """The multimodal wrapper (`gemma4_unified`), rather than the text-only model."""
        return self.model_type == "gemma4_unified"

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab

    @property
    def n_kv_shared(self) -> int:
        return sum(layer.lender is not None for layer in self.layers)

    @property
    def dtype_name(self) -> str | None:
        """The dtype the file names, e.g. "bfloat16", or None."""
        text = self.raw.get("text_config") or {}
        for source in (self.raw, text):
            if name := source.get("dtype", source.get("torch_dtype")):
                return str(name).removeprefix("torch.")
        return None

    def layer(self, index: int) -> LayerConfig:
        """Sizes of block `index`; negative counts from the end."""
        if not hasattr(index, "__index__"):
            raise TypeError(f"a block is a whole number, got {index!r}")
        if not -self.n_layers <= index < self.n_layers:
            raise IndexError(f"no block {index}: this model has blocks 0 to {self.n_layers - 1}")
        return self.layers[index]

    def lenders(self) -> frozenset[int]:
        """Blocks whose keys and values later blocks borrow."""
        return frozenset(layer.lender for layer in self.layers if layer.lender is not None)

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> HookedConfig:
        """Read a config.json: a folder that holds one, its path, or its content.

        Raises:
            FileNotFoundError: no config.json there.
            ConfigError: another model_type, a field whose value this network does not compute, or two
                spellings of the block sizes that disagree.
        Source: `Gemma4UnifiedTextConfig.__post_init__` in transformers 5.10 to 5.24.
        """
        raw, name = _read(source)
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type is {model_type!r}; this package computes {' and '.join(map(repr, MODEL_TYPES))} only"
            )
        wrapper = model_type == "gemma4_unified"
        given = _parts(raw)["text_config"] if wrapper else raw
        _refuse_unknown_computation(raw, "")
        _refuse_unknown_computation(given, "text_config." if wrapper else "")
        text = {**TEXT_DEFAULTS, **given}
        layers = _layers(text)
        # A table by block may move the sliding blocks off the file's global sizes.
        usual = next((layer for layer in layers if layer.kind == "sliding"), None)
        tokens = {**TOKEN_DEFAULTS, **raw} if wrapper else {}
        # In a wrapper the top level decides, whatever text_config says.
        tied = raw.get("tie_word_embeddings", True) if wrapper else text["tie_word_embeddings"]
        if not isinstance(tied, bool):
            raise ConfigError(f"tie_word_embeddings is {tied!r}; it must be true or false")
        eos = text["eos_token_id"]
        return cls(
            model_type=model_type,
            n_layers=text["num_hidden_layers"],
            d_model=text["hidden_size"],
            n_heads=text["num_attention_heads"],
            n_key_value_heads=usual.n_key_value_heads if usual else text["num_key_value_heads"],
            d_head=usual.d_head if usual else text["head_dim"],
            d_mlp=text["intermediate_size"],
            d_vocab=text["vocab_size"],
            n_ctx=text["max_position_embeddings"],
            eps=text["rms_norm_eps"],
            window_size=text["sliding_window"],
            output_logits_soft_cap=text["final_logit_softcapping"],
            bidirectional=text["use_bidirectional_attention"],
            tied=tied,
            layers=layers,
            pad_token_id=text["pad_token_id"],
            bos_token_id=text["bos_token_id"],
            eos_token_ids=tuple(eos)
            if isinstance(eos, (list, tuple))
            else ()
            if eos is None
            else (eos,),
            image_token_id=tokens.get("image_token_id"),
            audio_token_id=tokens.get("audio_token_id"),
            video_token_id=tokens.get("video_token_id"),
            vision=_vision(raw.get("vision_config")) if wrapper else None,
            audio=_audio(raw.get("audio_config")) if wrapper else None,
            model_name=name,
            raw=raw,
            # Exact here; a loaded model rounds it to its weights' dtype, as transformers does.
            embed_scale=text["hidden_size"] ** 0.5,
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json to save: what was read, with every field that was not understood passed on.

        The full blocks' sizes are in the Hub's words, which every release reads. A table by block beside them
        would stop 5.14, which takes tables but not from this family, and one alone would stop 5.10 to 5.14; it
        is written only where the Hub has no words: full blocks with key/value heads and values of their own.
        """
        raw = copy.deepcopy(self.raw)
        text = raw["text_config"] if self.is_wrapper else raw
        for name in ("global_head_dim", "num_global_key_value_heads", "per_layer_config"):
            text.pop(name, None)
        text["head_dim"], text["num_key_value_heads"] = self.d_head, self.n_key_value_heads
        full = self.layers[-1]
        sizes = {"head_dim": full.d_head, "num_key_value_heads": full.n_key_value_heads}
        if full.k_eq_v or full.n_key_value_heads == self.n_key_value_heads:
            text["global_head_dim"] = full.d_head
            text["num_global_key_value_heads"] = full.n_key_value_heads
        else:
            text["per_layer_config"] = {
                str(layer.index): dict(sizes) for layer in self.layers if layer.kind == "full"
            }
        text["layer_types"] = [f"{layer.kind}_attention" for layer in self.layers]
        if self.vision is not None:  # transformers would take its own default of 3840
            raw["vision_config"]["output_proj_dims"] = self.vision.d_vision
        return raw


def _read(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), _folder_name(
            Path(source.get("_name_or_path") or "gemma4")
        )
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no config.json at {path}: give a folder that holds a checkpoint")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not an object")
    return raw, _folder_name(path.absolute().parent)


def _folder_name(folder: Path) -> str:
    """The folder's name; in huggingface_hub's cache (`models--owner--name/snapshots/<commit>`) the model's."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.split("--")[-1]
    return folder.name or "gemma4"


def _parts(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The wrapper, after a look at what its parts say they are."""
    if raw.get("text_config") is None:
        raise ConfigError("a gemma4_unified config.json needs a text_config; this one has none")
    for name, model_type in PARTS.items():
        part = raw.get(name)
        if part is not None and not isinstance(part, Mapping):
            raise ConfigError(f"{name} is a {type(part).__name__}, not an object")
        if part is not None and part.get("model_type", model_type) != model_type:
            raise ConfigError(
                f"{name} is of model_type {part['model_type']!r}; computed is {model_type!r} only"
            )
    return raw


def _refuse_unknown_computation(given: Mapping[str, Any], prefix: str) -> None:
    for name, neutral in NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise ConfigError(
                f"{prefix}{name} is {given[name]!r}; this network computes {neutral[0]!r} only, "
                "so its results would be wrong"
            )


def _layers(text: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    n_layers = _positive(text, "num_hidden_layers")
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "sliding_window",
    ):
        _positive(text, name)
    _above_zero(text, "rms_norm_eps")
    if text["final_logit_softcapping"] is not None:
        _above_zero(text, "final_logit_softcapping")
    _direction(text)
    kinds = _kinds(text, n_layers)
    sizes = _block_sizes(text, kinds)
    rotary = {kind: _rotary(text, kind) for kind in sorted(set(kinds))}
    lenders = _lenders(kinds, text["num_kv_shared_layers"])
    layers = []
    for index, kind in enumerate(kinds):
        wide = text["use_double_wide_mlp"] and lenders[index] is not None
        layer = LayerConfig(
            index=index,
            kind=kind,
            n_heads=text["num_attention_heads"],
            n_key_value_heads=sizes[index]["num_key_value_heads"],
            d_head=sizes[index]["head_dim"],
            d_mlp=text["intermediate_size"] * (2 if wide else 1),
            window=text["sliding_window"] if kind == "sliding" else None,
            k_eq_v=bool(text["attention_k_eq_v"]) and kind == "full",
            rotary=rotary[kind],
            lender=lenders[index],
        )
        if layer.n_heads % layer.n_key_value_heads or layer.d_head % 2:
            raise ConfigError(
                f"block {index} has {layer.n_heads} heads of {layer.d_head} over {layer.n_key_value_heads} key/value "
                "heads: heads must divide evenly and be of even size"
            )
        layers.append(layer)
    return tuple(layers)


def _positive(text: Mapping[str, Any], name: str) -> int:
    value = text[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a positive whole number")
    return value


def _above_zero(given: Mapping[str, Any], name: str) -> float:
    value = given[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)


def _direction(text: Mapping[str, Any]) -> None:
    """Which way tokens see: transformers also keeps it as `is_causal`, which decides if a file holds it."""
    way, causal = text["use_bidirectional_attention"], text.get("is_causal")
    if way not in (None, "vision", "all"):
        raise ConfigError(
            f"use_bidirectional_attention is {way!r}; known are null, 'vision' and 'all'"
        )
    if causal is not None and causal is not (way != "all"):
        raise ConfigError(
            f"is_causal is {causal!r}, but use_bidirectional_attention {way!r} says otherwise: remove one"
        )


def _kinds(text: Mapping[str, Any], n_layers: int) -> list[Literal["sliding", "full"]]:
    """Block types; missing ones mean five sliding, one full. The last block is always full."""
    types = text["layer_types"]
    if types is None:
        types = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n_layers)
        ]
    if len(types) != n_layers:
        raise ConfigError(
            f"layer_types names {len(types)} blocks, num_hidden_layers says {n_layers}"
        )
    if unknown := sorted(set(types) - set(ROPE_DEFAULTS)):
        raise ConfigError(
            f"layer_types holds {unknown}; known are sliding_attention and full_attention"
        )
    kinds: list[Literal["sliding", "full"]] = [
        "full" if t == "full_attention" else "sliding" for t in types
    ]
    kinds[-1] = "full"
    return kinds


def _block_sizes(
    text: Mapping[str, Any], kinds: list[Literal["sliding", "full"]]
) -> list[dict[str, int]]:
    """Head size and key/value heads of each block, from either dialect."""
    usual = {name: _positive(text, name) for name in PER_LAYER_FIELDS}
    hub = dict(usual, head_dim=text.get("global_head_dim", 512) or usual["head_dim"])
    if text["attention_k_eq_v"] and text.get("num_global_key_value_heads") is not None:
        hub["num_key_value_heads"] = _positive(text, "num_global_key_value_heads")
    if "per_layer_config" not in text:
        return [hub if kind == "full" else usual for kind in kinds]
    overrides = _overrides(text["per_layer_config"], len(kinds))
    sizes = [usual | overrides.get(index, {}) for index in range(len(kinds))]
    for kind in ("sliding", "full"):
        of_kind = [size for size, k in zip(sizes, kinds, strict=True) if k == kind]
        if any(size != of_kind[0] for size in of_kind):
            raise ConfigError(
                f"per_layer_config gives {kind} blocks unlike sizes; blocks of one type share theirs"
            )
    for name, hub_name in (
        ("head_dim", "global_head_dim"),
        ("num_key_value_heads", "num_global_key_value_heads"),
    ):
        if text.get(hub_name) is not None and sizes[-1][name] != hub[name]:
            raise ConfigError(
                f"per_layer_config gives full blocks a {name} of {sizes[-1][name]}, but {hub_name} is {text[hub_name]}, "
                f"which means {hub[name]}: remove the wrong one from config.json"
            )
    return sizes


def _overrides(given: Any, n_layers: int) -> dict[int, dict[str, int]]:
    """`per_layer_config` by block; null and {} both say that all blocks are alike."""
    if not isinstance(given or {}, Mapping):
        raise ConfigError(f"per_layer_config is a {type(given).__name__}, not an object")
    overrides: dict[int, dict[str, int]] = {}
    for key, entry in (given or {}).items():
        # Keys are padded with zeros: "05" beside "47".
        if not (str(key).isdecimal() and int(key) < n_layers):
            raise ConfigError(f"per_layer_config has key {key!r}; blocks are 0 to {n_layers - 1}")
        if int(key) in overrides:
            raise ConfigError(f"per_layer_config names block {int(key)} twice")
        if not isinstance(entry, Mapping):
            raise ConfigError(f"per_layer_config[{key!r}] is {entry!r}, not an object")
        if unknown := sorted(set(entry) - set(PER_LAYER_FIELDS)):
            raise ConfigError(
                f"per_layer_config[{key!r}] overrides {unknown}; only {list(PER_LAYER_FIELDS)} may differ"
            )
        overrides[int(key)] = {name: _positive(entry, name) for name in entry}
    return overrides


def _rotary(text: Mapping[str, Any], kind: str) -> RotaryConfig:
    given = ROPE_DEFAULTS if text["rope_parameters"] is None else text["rope_parameters"]
    rope: Any = given.get(f"{kind}_attention") if isinstance(given, Mapping) else None
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        raise ConfigError(
            f"rope_parameters has no rope_theta for {kind}_attention, which this model's blocks need"
        )
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ("default", "proportional"):
        raise ConfigError(
            f"rope_type of {kind}_attention is {rope_type!r}; computed are 'default' and 'proportional'"
        )
    if rope.get("factor", 1.0) not in (1, None):
        raise ConfigError(
            f"the rope factor of {kind}_attention is {rope['factor']!r}; computed is 1 only"
        )
    fraction: Any = rope.get("partial_rotary_factor", 1.0) if rope_type == "proportional" else 1.0
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ConfigError(
            f"partial_rotary_factor of {kind}_attention is {fraction!r}; it is a share of the head, 0 to 1"
        )
    return RotaryConfig(theta=_above_zero(rope, "rope_theta"), fraction=float(fraction))


def _lenders(kinds: list[Literal["sliding", "full"]], n_shared: Any) -> list[int | None]:
    """The last `n_shared` blocks borrow from the last unshared block of their own type."""
    if (
        not isinstance(n_shared, int)
        or isinstance(n_shared, bool)
        or not 0 <= n_shared < len(kinds)
    ):
        raise ConfigError(
            f"num_kv_shared_layers is {n_shared}; it must be at least 0 and below the {len(kinds)} blocks"
        )
    first = len(kinds) - n_shared
    own = {kind: index for index, kind in enumerate(kinds[:first])}
    if n_shared and (missing := set(kinds) - set(own)):
        raise ConfigError(
            f"num_kv_shared_layers is {n_shared}, which leaves no unshared {' or '.join(sorted(missing))} block to borrow from"
        )
    return [own[kind] if index >= first else None for index, kind in enumerate(kinds)]


def _vision(given: Mapping[str, Any] | None) -> VisionConfig | None:
    if given is None:
        return None
    _refuse_unknown_computation(given, "vision_config.")
    vision = {**VISION_DEFAULTS, **given}
    for name in ("patch_size", "pooling_kernel_size", "mm_embed_dim", "mm_posemb_size"):
        _positive(vision, name)
    patch = vision["patch_size"] * vision["pooling_kernel_size"]
    # transformers' default output size is the 12B's; the projector reads d_vision values whatever the file says.
    if given.get("output_proj_dims", vision["mm_embed_dim"]) != vision["mm_embed_dim"]:
        raise ConfigError(
            f"vision_config.output_proj_dims is {given['output_proj_dims']} and mm_embed_dim {vision['mm_embed_dim']}: "
            "the projector reads what the embedder writes, so they must be equal"
        )
    if given.get("model_patch_size", patch) != patch:
        raise ConfigError(
            f"vision_config.model_patch_size is {given['model_patch_size']}, but patch_size x pooling_kernel_size is {patch}"
        )
    return VisionConfig(
        patch, vision["mm_embed_dim"], vision["mm_posemb_size"], _above_zero(vision, "rms_norm_eps")
    )


def _audio(given: Mapping[str, Any] | None) -> AudioConfig | None:
    if given is None:
        return None
    _refuse_unknown_computation(given, "audio_config.")
    # transformers keeps one number under four names.
    names = ("audio_embed_dim", "hidden_size", "output_proj_dims", "audio_samples_per_token")
    stated = {name: given[name] for name in names if name in given} or {
        "audio_embed_dim": AUDIO_DEFAULTS["audio_embed_dim"]
    }
    if len(set(stated.values())) > 1:
        raise ConfigError(
            f"audio_config states one frame size under several names, and they differ: {stated}"
        )
    size = _positive(stated, next(iter(stated)))
    return AudioConfig(size, _above_zero({**AUDIO_DEFAULTS, **given}, "rms_norm_eps"))
