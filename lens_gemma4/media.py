"""Images, video frames and sound to rows of the stream. There is no tower: a few small modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lens_gemma4.config import VisionConfig
from lens_gemma4.errors import Unavailable
from lens_gemma4.hooks import HookPoint
from lens_gemma4.norms import LayerNorm, RMSNorm, empty


class Projector(nn.Module):
    """RMS norm without gain, then a linear map into the stream."""

    def __init__(self, d_in: int, d_model: int, eps: float, has_weights: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(eps)
        if has_weights:
            self.w_out = empty(d_model, d_in)
        self.hook_out = HookPoint()

    def forward(
        self, x: Float[Tensor, "*axes d_in"], weights: Projector
    ) -> Float[Tensor, "*axes d_model"]:
        return self.hook_out(F.linear(self.norm(x.to(weights.w_out.dtype)), weights.w_out))


class PixelEmbedder(nn.Module):
    """Patches of pixels to rows of the stream. There is no tower: a dense layer, positions, three norms.

    The frames of a video run through the same weights (`weights_of`) with hook points of their own.
    """

    num_layers = 0
    image_size = "varies"

    def __init__(
        self, cfg: VisionConfig, d_model: int, weights_of: PixelEmbedder | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        own = weights_of is None
        self._weights_of = (
            () if weights_of is None else (weights_of,)
        )  # in a tuple, so that they are not registered twice
        if own:
            self.w_patch, self.b_patch = empty(cfg.d_vision, cfg.d_patch), empty(cfg.d_vision)
            self.w_pos = empty(cfg.n_positions, 2, cfg.d_vision)
        self.patch_ln1, self.patch_ln2 = LayerNorm(cfg.d_patch, own), LayerNorm(cfg.d_vision, own)
        self.pos_norm = LayerNorm(cfg.d_vision, own)
        self.projector = Projector(cfg.d_vision, d_model, cfg.eps, own)
        self.hook_patch_embed, self.hook_pos_embed, self.hook_pos_sum = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        self.hook_out = HookPoint()
        self.add_module("hook_image_features" if own else "hook_video_features", HookPoint())

    def forward(
        self, pixels: Float[Tensor, "image patch d_patch"], positions: Int[Tensor, "image patch 2"]
    ) -> Float[Tensor, "token d_model"]:
        """Features of the valid patches, image after image; padded ones are at (-1, -1).

        Args:
            pixels: values in [0, 1], channel last within a patch.
            positions: x and y of each patch, in patches.
        """
        weights = self._weights_of[0] if self._weights_of else self
        if positions.numel() and int(positions.max()) >= self.cfg.n_positions:
            raise ValueError(
                f"a patch is at {int(positions.max())}; this model knows positions 0 to {self.cfg.n_positions - 1} "
                "on each axis: make the image smaller"
            )
        patches = self.patch_ln1(pixels.to(weights.w_patch.dtype), weights.patch_ln1)
        patches = self.hook_patch_embed(F.linear(patches, weights.w_patch, weights.b_patch))
        patches = self.patch_ln2(patches, weights.patch_ln2)
        summed = self.hook_pos_sum(
            patches + self.hook_pos_embed(_positions(weights.w_pos, positions))
        )
        out = self.hook_out(self.pos_norm(summed, weights.pos_norm))
        features = self.projector(out, weights.projector)[(positions != -1).all(-1)]
        return (self.hook_video_features if self._weights_of else self.hook_image_features)(
            features
        )

    @property
    def vision_hidden_size(self) -> int:
        return self.cfg.d_vision

    hidden_size = vision_hidden_size

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.cfg.patch_size

    def __getattr__(self, name: str) -> Any:
        if name in ("num_heads", "head_dim", "intermediate_size"):
            raise Unavailable(
                f"the vision embedder has no {name}: it holds no attention and no MLP"
            )
        return super().__getattr__(name)


def _positions(
    table: Float[Tensor, "size 2 d_vision"], positions: Int[Tensor, "image patch 2"]
) -> Float[Tensor, "image patch d_vision"]:
    """Embeddings of x plus y; an axis at -1 adds nothing."""
    valid = (positions != -1).to(table.dtype).unsqueeze(-1)
    axes = torch.arange(2, device=positions.device)
    return (table[positions.clamp(min=0).long(), axes] * valid).sum(-2)


class AudioEmbedder(nn.Module):
    """Frames of raw samples, normalised and projected into the stream."""

    def __init__(self, d_audio: int, d_model: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(eps)
        self.w_out = empty(d_model, d_audio)
        self.hook_out, self.hook_audio_features = HookPoint(), HookPoint()

    def forward(
        self, frames: Float[Tensor, "audio frame sample"], valid: Bool[Tensor, "audio frame"]
    ) -> Float[Tensor, "token d_model"]:
        """Features of the valid frames, clip after clip."""
        out = self.hook_out(F.linear(self.norm(frames.to(self.w_out.dtype)), self.w_out))
        return self.hook_audio_features(out[valid])


def pixels_and_places(
    name: str, pixels: Tensor | None, position_name: str, positions: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Patches and their places, with a video's axis folded into the frames'."""
    if pixels is None and positions is None:
        return None
    if pixels is None or positions is None:
        missing, present = (name, position_name) if pixels is None else (position_name, name)
        raise ValueError(
            f"{present} was given without {missing}: pass everything the processor returned"
        )
    if pixels.shape[:-1] != positions.shape[:-1] or positions.shape[-1] != 2:
        raise ValueError(
            f"{name} is {list(pixels.shape)} and {position_name} {list(positions.shape)}; needed are "
            "[image patch values] and [image patch 2]"
        )
    return pixels.flatten(0, -3), positions.flatten(0, -3)


def frames_and_mask(features: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if features is None and mask is None:
        return None
    if features is None or mask is None:
        raise ValueError(
            "audio needs both input_features and input_features_mask, which says which frames are real: "
            "pass everything the feature extractor returned"
        )
    return features, mask.bool()
