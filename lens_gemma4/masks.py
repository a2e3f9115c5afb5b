"""What each query sees: causal, sliding, both ways inside an image, or both ways everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

ImageMask = Literal["transformers", "windowed"]


@dataclass(frozen=True)
class Rule:
    """Which key a query sees in one type of block. Nothing here grows with the square of the length.

    Args:
        window: how far back a sliding block sees, itself included; None in a full block.
        both_ways: whether the future is seen too, everywhere.
        padding: True on real tokens; None means all are.
        images: number of the image each token is in, -1 outside; None where masks know no images.
        leaves_window: whether an image longer than the window is seen as a whole.
    """

    window: int | None
    both_ways: bool = False
    padding: Bool[Tensor, "batch kv_pos"] | None = None
    images: Int[Tensor, "batch kv_pos"] | None = None
    leaves_window: bool = True

    def visible(
        self, queries: Int[Tensor, " pos"], keys: Int[Tensor, " kv_pos"]
    ) -> Bool[Tensor, "rows 1 pos kv_pos"]:
        """Whether the query at a position sees the key at another, for all of both; one row where all rows are alike."""
        ahead = keys[None] - queries[:, None]  # how far the key lies ahead of the query
        if self.both_ways:
            seen = ahead.abs() <= (ahead.numel() if self.window is None else self.reach)
            seen = seen[None, None]
        else:
            seen = self._looking_back(ahead, queries, keys)
        return seen if self.padding is None else seen & self.padding[:, None, None, keys]

    @property
    def reach(self) -> int:
        """How far a sliding block that looks both ways sees on either side."""
        assert self.window is not None
        return self.window // 2 + 1

    def _looking_back(
        self, ahead: Int[Tensor, "pos kv_pos"], queries: Tensor, keys: Tensor
    ) -> Bool[Tensor, "rows 1 pos kv_pos"]:
        past = (ahead <= 0)[None, None]
        recent = None if self.window is None else (ahead > -self.window)[None, None]
        if self.images is None:
            return past if recent is None else past & recent
        image = self.images[:, queries][:, None, :, None]
        same = (image == self.images[:, keys][:, None, None]) & (image >= 0)
        if recent is None:
            return past | same
        return (past & recent) | same if self.leaves_window else (past | same) & recent


@dataclass
class Mask:
    """What the queries of a call see of its keys, spelled out when it is first asked for.

    Args:
        rule: of the block type.
        queries: positions of the queries.
        keys: positions of the keys, in the order in which they lie.
        rows: prompts in the batch.
        total: positions run so far, keys that have left a sliding block's cache included.
        passed: False where transformers passes no mask: there only the future is hidden, or nothing is.
    """

    rule: Rule
    queries: Int[Tensor, " pos"]
    keys: Int[Tensor, " kv_pos"]
    rows: int
    total: int
    passed: bool = True
    _visible: Tensor | None = field(default=None, repr=False)
    _additive: Tensor | None = field(default=None, repr=False)
    _fused: Tensor | None = field(default=None, repr=False)
    _blind: Tensor | None = field(default=None, repr=False)
    _has_blind: bool = False

    @property
    def causal(self) -> bool:
        return not self.rule.both_ways

    @property
    def keeps_all(self) -> bool:
        """Whether the keys are those of all positions."""
        return len(self.keys) == self.total

    @property
    def visible(self) -> Bool[Tensor, "batch 1 pos kv_pos"] | None:
        """What is passed to the fused attention; None where transformers passes no mask either."""
        if self._visible is None and self.passed:
            seen = self.seen()
            self._visible = seen.expand(self.rows, 1, *seen.shape[-2:])
        return self._visible

    def seen(self) -> Bool[Tensor, "rows 1 pos kv_pos"]:
        """The mask spelled out."""
        return (
            self.rule.visible(self.queries, self.keys) if self._visible is None else self._visible
        )

    def of_everything(self) -> Mask:
        """This one, of which it is known that it hides nothing."""
        if self.passed:
            shape = len(self.queries), len(self.keys)
            seen = torch.ones(1, 1, *shape, dtype=torch.bool, device=self.keys.device)
            self._visible = seen.expand(self.rows, 1, *shape)
        return self

    def additive(self, like: Tensor) -> Float[Tensor, "rows 1 pos kv_pos"] | None:
        """0 where visible, the dtype's lowest number elsewhere; None when nothing is hidden."""
        if not self.passed and not self.causal:
            return None
        if self._additive is None or self._additive.dtype != like.dtype:
            visible = self.seen() if self.visible is None else self.visible
            zero = torch.zeros((), dtype=like.dtype, device=like.device)
            self._additive = torch.where(visible, zero, torch.finfo(like.dtype).min)
        return self._additive

    def fused(self, like: Tensor) -> Float[Tensor, "batch 1 pos kv_pos"] | None:
        """`visible` as the fused attention turns it into numbers at every call: 0 where visible, else minus infinity."""
        if self._fused is None or self._fused.dtype != like.dtype:
            visible = self.visible
            if visible is None:
                return None
            alike = visible.stride(0) == 0  # one row stands for all
            zero = torch.zeros((), dtype=like.dtype, device=like.device)
            seen = torch.where(visible[:1] if alike else visible, zero, float("-inf"))
            self._fused = seen.expand(visible.shape)
        return self._fused

    def blind(self) -> Bool[Tensor, "batch 1 pos 1"] | None:
        """Queries that see no key, which only padding can do to them; None when there are none."""
        if self._blind is None and self.rule.padding is not None and self.passed:
            assert self.visible is not None
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
    places = torch.arange(pos, device=device)
    masks: dict[str, Mask] = {}
    for kind in {layer.kind for layer in cfg.layers}:
        rule = rule_of(cfg, kind, padding, types, image_mask)
        limit = None if rule.window is None else rule.reach if rule.both_ways else rule.window
        cut = limit is not None and pos >= limit
        masks[kind] = Mask(
            rule,
            places,
            places,
            batch,
            pos,
            passed=not whole or cut or knows_images(cfg, kind, image_mask),
        )
    return masks


def rule_of(
    cfg: HookedConfig,
    kind: str,
    padding: Bool[Tensor, "batch kv_pos"] | None,
    types: Int[Tensor, "batch kv_pos"] | None,
    image_mask: ImageMask,
) -> Rule:
    """What a block type's queries see, of keys with this padding and these token types."""
    return Rule(
        window=cfg.window_size if kind == "sliding" else None,
        both_ways=cfg.bidirectional == "all",
        padding=padding,
        images=block_ids(types)
        if types is not None and knows_images(cfg, kind, image_mask)
        else None,
        leaves_window=image_mask == "transformers",
    )


def knows_images(cfg: HookedConfig, kind: str, image_mask: ImageMask) -> bool:
    """Whether the masks of a block type look at token types; transformers always passes such a mask."""
    return (
        cfg.is_wrapper
        and cfg.bidirectional == "vision"
        and (image_mask == "transformers" or kind == "sliding")
    )
