"""What each query sees: causal, sliding, both ways inside an image, or both ways everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

ImageMask = Literal["transformers", "windowed"]


@dataclass
class Mask:
    """What each query sees. `visible` is None where transformers passes no mask either: then only the
    future is hidden (`causal`) or nothing is."""

    pos: int
    causal: bool
    visible: Bool[Tensor, "batch 1 pos kv_pos"] | None = None
    _additive: Tensor | None = None
    _blind: Tensor | None = None
    _has_blind: bool = False

    def additive(self, like: Tensor) -> Float[Tensor, "rows 1 pos kv_pos"] | None:
        """0 where visible, the dtype's lowest number elsewhere; None when nothing is hidden."""
        if self.visible is None and not self.causal:
            return None
        if self._additive is None or self._additive.dtype != like.dtype:
            visible = self.seen(like.device)
            zero = torch.zeros((), dtype=like.dtype, device=like.device)
            self._additive = torch.where(visible, zero, torch.finfo(like.dtype).min)
        return self._additive

    def seen(self, device: torch.device) -> Bool[Tensor, "rows 1 pos kv_pos"]:
        """The mask spelled out."""
        if self.visible is not None:
            return self.visible
        all_seen = torch.ones(1, 1, self.pos, self.pos, dtype=torch.bool, device=device)
        return all_seen.tril() if self.causal else all_seen

    def blind(self) -> Bool[Tensor, "batch 1 pos 1"] | None:
        """Queries that see no key, which only padding can do to them; None when there are none."""
        if self._blind is None and self.visible is not None:
            self._blind = ~self.visible.any(-1, keepdim=True)
            self._has_blind = bool(self._blind.any())
        return self._blind if self._has_blind else None


def block_ids(types: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Number of the contiguous run of image or video tokens (types 1 and 2) each token is in, else -1."""
    media = (types == 1) | (types == 2)
    before = torch.roll(media, 1, dims=-1)
    before[..., 0] = False
    return torch.where(media, (media & ~before).int().cumsum(-1) - 1, -1)


def attention_masks(
    cfg: HookedConfig,
    batch: int,
    pos: int,
    device: torch.device,
    padding: Bool[Tensor, "batch pos"] | None = None,
    types: Int[Tensor, "batch pos"] | None = None,
    image_mask: ImageMask = "transformers",
) -> dict[str, Mask]:
    """The mask of each block type present.

    Args:
        padding: True on real tokens; None means all are.
        types: 1 image, 2 video, 3 audio, 0 text; only 1 and 2 make blocks that see both ways.
        image_mask: "transformers" is its `forward` (5.10 to 5.24): images see both ways in every block and may
            leave the window. "windowed" is 5.24's static-cache generation: full blocks are causal, sliding
            ones see both ways inside an image but never further back than the window.
    """
    whole = padding is None or bool(padding.all())
    blocks = _same_block(cfg, batch, pos, device, types)
    masks: dict[str, Mask] = {}
    for kind in {layer.kind for layer in cfg.layers}:
        visible = _visible(cfg, kind, pos, device, whole, blocks, image_mask)
        if visible is not None:
            if padding is not None:
                visible = visible & padding[:, None, None, :]
            visible = visible.expand(batch, 1, pos, pos)
        masks[kind] = Mask(pos, cfg.bidirectional != "all", visible)
    return masks


def _same_block(
    cfg: HookedConfig, batch: int, pos: int, device: torch.device, types: Tensor | None
) -> Bool[Tensor, "batch 1 pos kv_pos"] | None:
    """True where query and key are of one image; None on models whose masks know no images."""
    if not (cfg.is_wrapper and cfg.bidirectional == "vision"):
        return None
    if types is None:
        return torch.zeros(1, 1, pos, pos, dtype=torch.bool, device=device)
    ids = block_ids(types)
    return ((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] >= 0))[:, None]


def _visible(
    cfg: HookedConfig,
    kind: str,
    pos: int,
    device: torch.device,
    whole: bool,
    blocks: Tensor | None,
    image_mask: ImageMask,
) -> Bool[Tensor, "rows 1 pos kv_pos"] | None:
    """A block type's rule before padding, or None where transformers passes no mask."""
    sliding = kind == "sliding"
    query = torch.arange(pos, device=device)[:, None]
    key = torch.arange(pos, device=device)[None, :]
    if cfg.bidirectional == "all":
        reach = cfg.window_size // 2 + 1
        if whole and not (sliding and pos >= reach):
            return None
        near = (query - key).abs() <= reach if sliding else torch.ones_like(query >= key)
        return near[None, None]
    past = key <= query
    recent = key > query - cfg.window_size
    if blocks is None or (image_mask == "windowed" and not sliding):
        if whole and not (sliding and pos >= cfg.window_size):
            return None
        return (past & recent if sliding else past)[None, None]
    if image_mask == "windowed":
        return (past | blocks) & recent
    return (past & recent if sliding else past) | blocks
