"""Random checkpoints and inputs for comparisons with transformers, and the named fixture `F`.

A fresh transformers model has every norm gain and layer scalar at 1, which hides most mistakes: here all of them
are drawn away from it, and no size is a square or equal to another that it could be taken for.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lens_gemma4.check import Part, build_inputs
from lens_gemma4.config import HookedConfig

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# Sizes by block alone are younger than 5.10, which would silently read its defaults.
READS_PER_LAYER_CONFIG = VERSION >= (5, 15)
DIALECTS = ("hub", "per_layer", "both") if READS_PER_LAYER_CONFIG else ("hub", "both")

# -- F ------------------------------------------------------------------------------------------------

F_SCALARS = (0.1, 0.5, 0.9, 0.3, 1.7, 0.05)
F_CONFIG: dict[str, Any] = {
    "model_type": "gemma4_unified",
    "text_config": {
        "model_type": "gemma4_unified_text",
        "vocab_size": 300,
        "hidden_size": 60,  # sqrt is not exact, so a rounded embedding scale shows
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 2,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 32,
        "mm_posemb_size": 16,
        "output_proj_dims": 32,
    },
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 20},
    "image_token_id": 290,
    "audio_token_id": 291,
    "video_token_id": 292,
    "boi_token_id": 293,
    "eoi_token_id": 294,
    "boa_token_id": 295,
    "eoa_token_index": 296,
    "tie_word_embeddings": True,
}
P = [2, 5, 6, 7, 8, 9, 10, 11]
IMG = [2, 5, 293] + [290] * 6 + [294, 7, 8]


def make_f(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """The checkpoint `F`: six blocks, window 4, k=v full blocks, image and audio embedders."""
    return make_checkpoint(F_CONFIG, folder, dtype, seed, scalars=F_SCALARS)


def p_inputs() -> dict[str, Tensor]:
    """`P`: eight tokens, twice the window."""
    return {"input_ids": torch.tensor([P])}


def img_inputs(seed: int = 0) -> dict[str, Tensor]:
    """`IMG`: an image of 3 x 2 patches between text, longer than the window."""
    ids = torch.tensor([IMG])
    x, y = torch.arange(3).repeat(2), torch.arange(2).repeat_interleave(3)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 290).long(),
        "pixel_values": torch.rand(1, 6, 108, generator=torch.Generator().manual_seed(seed)),
        "image_position_ids": torch.stack((x, y), -1)[None],
    }


# -- random configurations ----------------------------------------------------------------------------


def random_config(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """A config.json of either model type and dialect; `fixed` overrides fields of the text config.

    `fixed` also takes `wrapper`, `vision`, `audio` (bool) and `dialect`.
    """
    dialect = fixed.pop("dialect", None) or rng.choice(DIALECTS)
    wrapper = fixed.pop("wrapper", rng.random() < 0.75)
    vision = fixed.pop("vision", rng.random() < 0.85)
    audio = fixed.pop("audio", rng.random() < 0.7)
    text, sizes = _random_text(rng, dialect, fixed)
    tied = text["tie_word_embeddings"]
    if not wrapper:
        return _spell(text, sizes, dialect)
    vocab = text["vocab_size"]
    config: dict[str, Any] = {
        "model_type": "gemma4_unified",
        "text_config": _spell(text, sizes, dialect),
        "tie_word_embeddings": tied,
        "image_token_id": vocab - 10,
        "audio_token_id": vocab - 9,
        "video_token_id": vocab - 8,
        "boi_token_id": vocab - 7,
        "eoi_token_id": vocab - 6,
        "boa_token_id": vocab - 5,
        "eoa_token_index": vocab - 4,
    }
    if vision:
        width = rng.choice([18, 28, 34])
        config["vision_config"] = {
            "model_type": "gemma4_unified_vision",
            "patch_size": rng.choice([1, 2]),
            "pooling_kernel_size": rng.choice([2, 3]),
            "mm_embed_dim": width,
            "output_proj_dims": width,
            "mm_posemb_size": rng.choice([9, 16]),
        }
    if audio:
        config["audio_config"] = {
            "model_type": "gemma4_unified_audio",
            "audio_embed_dim": rng.choice([10, 22]),
        }
    return config


def _random_text(
    rng: random.Random, dialect: str, fixed: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """A text config without the full blocks' sizes, and these."""
    n_layers = fixed.pop("num_hidden_layers", rng.randint(2, 7))
    heads = rng.choice([2, 4, 6])
    kv_choices = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
    k_eq_v = fixed.get("attention_k_eq_v", rng.random() < 0.6)
    kv, d_head = rng.choice(kv_choices), rng.choice([8, 12, 16])
    sizes = {"head_dim": rng.choice([d_head, 16, 24, 32]), "num_key_value_heads": kv}
    if k_eq_v or dialect == "per_layer":  # the Hub's dialect has words for it on k=v blocks only
        sizes["num_key_value_heads"] = rng.choice(kv_choices)
    layer_types = [
        rng.choice(["sliding_attention", "sliding_attention", "full_attention"])
        for _ in range(n_layers - 1)
    ]
    layer_types.append("full_attention")
    shared = 0
    if rng.random() < 0.35 and n_layers > 2:
        possible = [
            n for n in range(1, n_layers) if set(layer_types[: n_layers - n]) == set(layer_types)
        ]
        shared = rng.choice(possible) if possible else 0
    text = {
        "model_type": "gemma4_unified_text",
        "vocab_size": rng.choice([90, 131]),
        "hidden_size": rng.choice([44, 60, 78]),
        "intermediate_size": rng.choice([50, 96, 128]),
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": d_head,
        "attention_k_eq_v": k_eq_v,
        "layer_types": layer_types,
        "sliding_window": rng.choice([2, 3, 4, 6, 8]),
        "final_logit_softcapping": rng.choice([None, 5.0, 30.0]),
        "use_bidirectional_attention": rng.choice([None, "vision", "vision", "all"]),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": rng.random() < 0.5,
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.random() < 0.6,
        "pad_token_id": 0,
    }
    if rng.random() < 0.3:
        text["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
                "rope_theta": 70_000.0,
            },
        }
    return text | fixed, sizes


def _spell(text: dict[str, Any], sizes: dict[str, int], dialect: str) -> dict[str, Any]:
    """The full blocks' sizes in the Hub's words, as overrides by block, or both."""
    text = dict(text)
    if dialect != "per_layer":
        text["global_head_dim"] = sizes["head_dim"]
        text["num_global_key_value_heads"] = sizes["num_key_value_heads"]
    if dialect != "hub":
        full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
        text["per_layer_config"] = {str(i): dict(sizes) for i in full}
    return text


def dialect_of(config: dict[str, Any]) -> str:
    """Which spelling of the full blocks' sizes a config uses."""
    text = config.get("text_config", config)
    if "per_layer_config" not in text:
        return "hub"
    return "both" if "global_head_dim" in text else "per_layer"


# -- checkpoints --------------------------------------------------------------------------------------


def make_checkpoint(
    config: dict[str, Any],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scalars: tuple[float, ...] | None = None,
) -> Path:
    """A random checkpoint that transformers saved, with this config.json beside it."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    given = json.dumps(config, indent=2)
    (folder / "config.json").write_text(given)
    model = _build(folder, "text_config" in config)
    randomise(model, seed, scalars)
    model.to(dtype).save_pretrained(folder)
    if dialect_of(config) != "per_layer":
        # transformers writes sizes by block; where it wrote them itself its own spelling (zero-padded keys) stays.
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"dtype": saved["dtype"]}, indent=2)
        )
    return folder


def _build(folder: Path, wrapper: bool) -> nn.Module:
    from transformers.models.gemma4_unified import Gemma4UnifiedConfig, Gemma4UnifiedTextConfig
    from transformers.models.gemma4_unified.modeling_gemma4_unified import (
        Gemma4UnifiedForCausalLM,
        Gemma4UnifiedForConditionalGeneration,
    )

    if wrapper:
        return Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig.from_pretrained(folder))
    return Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig.from_pretrained(folder))


def randomise(model: nn.Module, seed: int, scalars: tuple[float, ...] | None = None) -> None:
    """Draw every weight so that no gain, bias, position or scalar stands at a value that hides a mistake.

    Linear weights keep activations near RMS 1, embeddings near 2.3, so logits stay well inside a softcap of 30.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.3 * normal(weight.shape))
            elif "pos_embedding" in name:
                weight.copy_(0.5 * normal(weight.shape))
            elif weight.ndim == 1:
                weight.copy_(1 + 0.3 * normal(weight.shape))
            else:
                weight.copy_(normal(weight.shape) / weight.shape[-1] ** 0.5)
        layers = [
            module for name, module in model.named_modules() if hasattr(module, "layer_scalar")
        ]
        for index, layer in enumerate(layers):
            low, high = torch.tensor([0.05, 1.7]).log()
            drawn = (low + (high - low) * torch.rand(1, generator=generator)).exp()
            layer.layer_scalar.copy_(drawn if scalars is None else torch.tensor([scalars[index]]))


# -- random inputs ------------------------------------------------------------------------------------

TEXT_KINDS = ("text", "one token", "batch", "left", "right", "positions")
VISION_KINDS = (
    "short image",
    "long image",
    "two images",
    "adjacent images",
    "image batch",
    "video",
    "adjacent frames",
)
AUDIO_KINDS = ("audio", "audio batch")


def input_kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of `random_inputs` that a config's model takes."""
    kinds = TEXT_KINDS
    if config.get("vision_config"):
        kinds += VISION_KINDS
    if config.get("audio_config"):
        kinds += AUDIO_KINDS
    if config.get("vision_config") and config.get("audio_config"):
        kinds += ("everything",)
    return kinds


def random_inputs(
    rng: random.Random, config: dict[str, Any], kind: str | None = None
) -> dict[str, Tensor]:
    """Processor-shaped inputs: text of one token to five windows, padding, images, audio, video; see `input_kinds`."""
    kind = kind or rng.choice(input_kinds(config))
    cfg = HookedConfig.from_hf(copy.deepcopy(config))
    rows = _rows(rng, cfg.window_size)
    if kind not in rows:
        raise ValueError(f"no inputs of kind {kind!r}; known are {input_kinds(config)}")
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    side = kind if kind in ("left", "right") else rng.choice(["left", "right"])
    inputs = build_inputs(
        rows[kind](),
        cfg,
        generator,
        padding_side=side,
        text_between_frames=kind != "adjacent frames",
    )
    if kind == "positions":
        jumps = torch.randint(1, 4, inputs["input_ids"].shape, generator=generator)
        inputs["position_ids"] = jumps.cumsum(-1) - 1
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs


def _rows(rng: random.Random, window: int) -> dict[str, Callable[[], list[list[Part]]]]:
    """Each kind's prompts, drawn when called; see `Part` for the parts of a row."""

    def some() -> Part:
        return ("text", rng.randint(1, 4))

    def long() -> Part:
        return ("text", rng.randint(1, 5 * window))

    def image(least: int = 1) -> Part:
        return ("image", (rng.randint(least, 4), rng.randint(1, 3)))

    def frames(most: int = 4) -> list[tuple[int, int]]:
        return [(rng.randint(1, 3), rng.randint(1, 3)) for _ in range(rng.randint(1, most))]

    def ragged() -> list[list[Part]]:
        lengths = [rng.randint(1, window), rng.randint(window, 3 * window), 5 * window]
        return [[("text", n)] for n in rng.sample(lengths, 3)]

    def video() -> list[list[Part]]:
        two = [[("video", frames(1)), some(), ("video", frames(2))]] if rng.random() < 0.5 else []
        return [[some(), ("video", frames()), some()], *two]

    return {
        "text": lambda: [[long()]],
        "one token": lambda: [[("text", 1)]],
        "batch": lambda: [[long()]] * rng.randint(2, 3),
        "left": ragged,
        "right": ragged,
        "positions": lambda: [[("text", rng.randint(2, 5 * window))]] * 2,
        "short image": lambda: [
            [long(), ("image", (1, 1)), some()]
        ],  # one patch: never longer than a window
        "long image": lambda: [[some(), ("image", (4, window // 4 + 2)), some()]],
        "two images": lambda: [[some(), image(), some(), image(2), some()]],
        "adjacent images": lambda: [[some(), image(), image(2), some()]],
        "image batch": lambda: [[image(), some(), image(2)], [long()], [some(), image(), some()]],
        "video": video,
        "adjacent frames": video,
        "audio": lambda: [[long(), ("audio", rng.randint(1, 7)), some()]],
        "audio batch": lambda: [
            [some(), ("audio", 5), some(), ("audio", 2)],
            [long()],
            [("audio", 3)],
        ],
        "everything": lambda: [
            [some(), image(), ("audio", 3), some(), ("video", frames(2))],
            [image(2), long(), ("audio", 1)],
        ],
    }
