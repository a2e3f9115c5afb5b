"""Networks small enough to test every hook point, built straight from `Gemma4(cfg)` with random weights.

No size is a square or equals another, no gain and no layer scalar is near 1, and prompts are longer than two windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_gemma4.config import HookedConfig
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.masks import ImageMask
from lens_gemma4.model import AttnImplementation, Gemma4

WINDOW = 4
IMAGE, AUDIO, VIDEO = 90, 91, 92
S, A = "sliding_attention", "full_attention"

TEXT: dict[str, Any] = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 101,
    "hidden_size": 20,  # its root is not exact, so a rounded embedding scale shows
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": [S, A, S, A],
    "sliding_window": WINDOW,
    "final_logit_softcapping": 4.0,
    "use_bidirectional_attention": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# Blocks 3, 4 and 5 borrow from 1, 2 and 2: the last of their own type, not the first and not a neighbour.
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": [S, S, A, S, A, A],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
MEDIA = {
    "vision_config": {
        "patch_size": 1,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 14,
        "output_proj_dims": 14,
        "mm_posemb_size": 5,
    },
    "audio_config": {"audio_embed_dim": 10},
    "image_token_id": IMAGE,
    "audio_token_id": AUDIO,
    "video_token_id": VIDEO,
}


def _wrapper(tied: bool = False, **text: Any) -> dict[str, Any]:
    inner = TEXT | {"use_bidirectional_attention": "vision"} | text
    return {
        "model_type": "gemma4_unified",
        "text_config": inner,
        "tie_word_embeddings": tied,
        **MEDIA,
    }


KINDS: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "wrapper": _wrapper(),
    "shared": TEXT | SHARED,  # keys that are values, lent
    "shared, own values": TEXT
    | SHARED
    | {"attention_k_eq_v": False, "num_global_key_value_heads": None},
    "no softcap, untied": TEXT
    | {
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "all": TEXT | {"use_bidirectional_attention": "all"},
    "wrapper, all": _wrapper(tied=True, use_bidirectional_attention="all"),
    "wrapper, shared": _wrapper(tied=True, num_kv_shared_layers=2, use_double_wide_mlp=True),
}


def config_of(kind: str, **text: Any) -> dict[str, Any]:
    config = dict(KINDS[kind])
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | text}
    return config | text


def build(
    kind: str = "text",
    dtype: torch.dtype = torch.float32,
    attn_implementation: AttnImplementation = "sdpa",
    image_mask: ImageMask = "transformers",
    seed: int = 0,
    **text: Any,
) -> Gemma4:
    """A network of `KINDS` with random weights; keywords override fields of its text config."""
    config = HookedConfig.from_hf(config_of(kind, **text))
    model = Gemma4(config, attn_implementation, image_mask)
    randomise(model, seed)
    return model.to(dtype)


def hooked(kind: str = "text", dtype: torch.dtype = torch.float64, **text: Any) -> HookedModel:
    """The user's model of a kind, in float64, where sums can be exact; keywords override fields of its text config."""
    model = HookedModel(HookedConfig.from_hf(config_of(kind, **text)))
    randomise(model, seed=5)
    return model.to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    """Length of the difference as a share of the right answer's."""
    return ((got - want).norm() / want.norm()).item()


def randomise(model: Gemma4, seed: int) -> None:
    """Activations stay near RMS 1; gains, biases and scalars are drawn away from what hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_weights():
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("layer_scalar"):
                drawn = 0.4 + 1.3 * torch.rand(1, generator=generator)
            elif name.endswith((".bias", "b_patch", "w_pos")) or name == "w_e":
                drawn = 0.5 * drawn
            elif weight.ndim == 1:
                drawn = 0.7 + 0.3 * drawn
            else:
                drawn = 1.3 * drawn / weight.shape[-1] ** 0.5
            weight.copy_(drawn)


def text_inputs(batch: int = 2, pos: int = 11, seed: int = 0) -> dict[str, Tensor]:
    """Ids that hold neither placeholder nor pad token."""
    return {
        "input_ids": torch.randint(
            3, 80, (batch, pos), generator=torch.Generator().manual_seed(seed)
        )
    }


def padded_inputs(side: str = "left", seed: int = 0) -> dict[str, Tensor]:
    """Three rows: whole, padded by three, and padding only."""
    ids = text_inputs(3, 10, seed)["input_ids"]
    mask = torch.ones_like(ids)
    pads = slice(0, 3) if side == "left" else slice(7, None)
    mask[1, pads], mask[2] = 0, 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def media_inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Two rows with an image longer than the window, a second one, audio and a video; each medium has padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [2, 5, *[IMAGE] * 6, 7, *[AUDIO] * 2, 8, *[VIDEO] * 2, 9, *[VIDEO] * 2, 11, 12],
        [2, *[IMAGE] * 2, 6, 7, 13, *[AUDIO] * 3, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23],
    ]
    grid = [(x, y) for y in range(2) for x in range(3)]
    images = [[*grid, (-1, -1), (-1, -1)], [(0, 0), (0, 1), *[(-1, -1)] * 6]]
    frames = [[(0, 0), (1, 0), (-1, -1)], [(0, 0), (0, 1), (-1, -1)]]
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "pixel_values": torch.rand(2, 8, 12, generator=generator).to(dtype),
        "image_position_ids": torch.tensor(images),
        "pixel_values_videos": torch.rand(2, 3, 12, generator=generator).to(dtype),
        "video_position_ids": torch.tensor(frames),
        "input_features": torch.randn(2, 4, 10, generator=generator).to(dtype),
        "input_features_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    }


def few(kind: str) -> dict[str, Any]:
    """Overrides that leave the fewest blocks with one of each sort, for sweeps over every point."""
    if "shared" in kind:
        return {"num_hidden_layers": 3, "layer_types": [S, A, A], "num_kv_shared_layers": 1}
    return {"num_hidden_layers": 2, "layer_types": [S, A]}


def inputs_for(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs in which every hook point of this kind fires."""
    return media_inputs(dtype=dtype) if kind.startswith("wrapper") else text_inputs()
