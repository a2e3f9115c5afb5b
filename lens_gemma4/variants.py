"""Many variants of one run at once: each from the block it touches, and only from the position it touches.

The clean run is kept: each block's stream, keys and values, and the values at the points that are touched. A variant
begins with the clean value of the first point it edits. On its way up its rows run together with those of other
variants, whichever block and position they began at: rows of all of them are one matrix everywhere but in attention.
Positions before its first are read from the clean run, as keys and values.

The network's own operations in an order of their own: results agree to rounding (in float64 to 1e-9), not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.interventions import POINTS, Edit, Intervention
from lens_gemma4.model import Block, Gemma4, gelu, rotate, softmax
from lens_gemma4.products import product

KeyValues = tuple[Tensor, Tensor]  # [variant batch pos kv_head d_head]
# Where a variant may begin inside a block: it needs nothing of what comes before but the streams.
ENTRIES = POINTS[POINTS.index("attn.hook_z") :]
_STREAM = {"attn.hook_z": "hook_resid_pre", "hook_attn_out": "hook_resid_pre"}
_STREAM |= {"mlp.hook_post": "hook_resid_mid", "hook_mlp_out": "hook_resid_mid"}


@dataclass
class Clean:
    """The run that variants depart from: a batch of prompts of one padded length.

    Args:
        values: under our names; every block's `hook_resid_pre`, `hook_rot_k`, `v_norm.hook_out` and the entries asked for.
        turns: cos and sin `[rows pos d_head]` of each block type, `rows` 1 or the batch.
        seen: which key each query sees, of each block type.
        final: the last stream.
    """

    values: Mapping[str, Tensor]
    turns: dict[str, tuple[Tensor, Tensor]]
    seen: dict[str, Bool[Tensor, "rows 1 pos kv_pos"]]
    final: Float[Tensor, "batch pos d_model"]

    @property
    def shape(self) -> tuple[int, int]:
        return self.final.shape[0], self.final.shape[1]

    def first_changed(self, position: int) -> int:
        """The first position that can change when `position` does: an earlier one where it is seen from there, as inside an
        image."""
        seen = torch.stack([kind.any(0)[0] for kind in self.seen.values()]).any(0)  # [pos kv_pos]
        while True:
            readers = seen[:position, position:].any(1).nonzero()
            if not len(readers):
                return position
            position = int(readers[0])


@torch.no_grad()
def clean_run(model: Gemma4, tensors: Mapping[str, Any], points: Sequence[str]) -> Clean:
    """Run the prompts once and keep what variants that edit `points` of any block depart from.

    Args:
        tensors: a prepared call's, `model.prepare(...)`.
    """
    entries = {point for point in points if point in ENTRIES}
    names = {"hook_resid_pre", "attn.hook_rot_k", "attn.v_norm.hook_out", *entries}
    names |= {_STREAM[point] for point in entries if point in _STREAM}
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    _, kept = model.run_and_store(
        **tensors,
        names_filter=[*(f"blocks.*.{name}" for name in sorted(names)), last],
        stop_at_layer=model.cfg.n_layers,  # nobody asked for all logits
    )
    stream = kept["blocks.0.hook_resid_pre"]
    masks, turns = model.sight(
        stream,
        tensors.get("input_ids"),
        tensors.get("attention_mask"),
        tensors.get("position_ids"),
        tensors.get("mm_token_type_ids"),
    )
    return Clean(kept, turns, {kind: mask.seen() for kind, mask in masks.items()}, kept[last])


@dataclass
class Group:
    """Variants that change nothing before position `start`; of each, these positions run.

    Args:
        tail: all positions from the start on, `[batch pos]`.
        read: those whose last stream is wanted, `[batch n]`: the last block runs there alone.
        variants: what is to run.
        n: how many of them have begun.
        lent: keys and values of lenders.
    """

    start: int
    tail: Int[Tensor, "batch tail"]
    read: Int[Tensor, "batch n"]
    variants: Sequence[Intervention]
    n: int = 0
    lent: dict[int, KeyValues] = field(default_factory=dict)

    def order(self) -> list[int]:
        """Variants in the order in which they begin."""
        return sorted(range(len(self.variants)), key=lambda i: self.variants[i].stage)


class Runner:
    """Runs groups of variants together, and gives their last streams.

    A value of all of them is flat: `[row ...]`, group after group, in each variant after variant, prompt after prompt, position
    after position.
    """

    def __init__(self, model: Gemma4, clean: Clean) -> None:
        self.model, self.clean = model, clean
        self.batch = clean.shape[0]
        self.lenders = {layer.lender for layer in model.cfg.layers if layer.lender is not None}

    def group(
        self,
        variants: Sequence[Intervention],
        start: int,
        read: Int[Tensor, "batch n"] | None = None,
    ) -> Group:
        """Variants that run from a position on; `read`, from there on too, is all of it by default."""
        pos = self.clean.shape[1]
        tail = torch.arange(start, pos, device=self.clean.final.device).expand(self.batch, -1)
        return Group(start, tail, tail if read is None else read, variants)

    @torch.no_grad()
    def run(self, groups: Sequence[Group]) -> list[Float[Tensor, "variant batch n d_model"]]:
        """Last streams at the read positions, in the order given."""
        self.groups = groups
        self.edits: dict[tuple[int, str], list[tuple[int, int, Edit]]] = {}
        begin: dict[tuple[int, str], list[tuple[int, Intervention]]] = {}
        for number, group in enumerate(groups):
            for i in group.order():
                layer, point = group.variants[i].stage
                begin.setdefault((layer, POINTS[point]), []).append((number, group.variants[i]))
        n_layers = self.model.cfg.n_layers
        stream = self.clean.final.new_empty(0, self.model.cfg.d_model)
        for layer in range(min(layer for layer, _ in begin), n_layers):
            self.layer, self.at_read = layer, False
            self.new = {point: ones for (at, point), ones in begin.items() if at == layer}
            stream = self._block(stream, last=layer == n_layers - 1)
        return [
            part[torch.tensor(group.order(), device=part.device).argsort()]
            for group, part in zip(groups, self._split(stream), strict=True)
        ]

    # -- flat values, and the groups' parts of them -----------------------------------------------------

    def _at(self, group: Group) -> Int[Tensor, "batch chosen"]:
        """The positions at which the flat values of the moment stand."""
        return group.read if self.at_read else group.tail

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Each group's part, `[variant batch chosen ...]`."""
        widths = [self._at(group).shape[1] for group in self.groups]
        sizes = [g.n * self.batch * width for g, width in zip(self.groups, widths, strict=True)]
        return [
            part.unflatten(0, (group.n, self.batch, width))
            for group, width, part in zip(self.groups, widths, flat.split(sizes), strict=True)
        ]

    @staticmethod
    def _joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten(0, 2) for part in parts])

    def _to_read(self, flat: Tensor) -> Tensor:
        """What stands at the tails, at the read positions alone."""
        rows = torch.arange(self.batch, device=flat.device)[:, None]
        return self._joined(
            [
                part[:, rows, group.read - group.start]
                for group, part in zip(self.groups, self._split(flat), strict=True)
            ]
        )

    # -- a block ----------------------------------------------------------------------------------------

    def _block(self, stream: Tensor, last: bool) -> Tensor:
        """Take rows through a block, and in those that begin in it; in the last, only the read positions are left."""
        block = self.model.blocks[self.layer]
        early = [one for point in POINTS if point not in ENTRIES for one in self.new.get(point, [])]
        stream = self._touch("hook_resid_pre", self._begin(early, ("hook_resid_pre", stream))[0])
        z = self._attention(block, stream, last)
        if last:
            stream = self._to_read(stream)
            self.at_read = True
        z, stream = self._enter("attn.hook_z", z, stream)
        attn = block.ln1_post.plain(product(z.flatten(-2), block.attn.w_o))
        attn, stream = self._enter("hook_attn_out", attn, stream)
        (mid,) = self._enter("hook_resid_mid", attn.add_(stream))
        x = block.ln2.plain(mid)
        post = gelu(product(x, block.mlp.w_gate)).mul_(product(x, block.mlp.w_in))
        post, mid = self._enter("mlp.hook_post", post, mid)
        mlp = block.ln2_post.plain(product(post, block.mlp.w_out))
        mlp, mid = self._enter("hook_mlp_out", mlp, mid)
        (out,) = self._enter("hook_resid_post", mlp.add_(mid).mul_(block.layer_scalar))
        return out

    def _enter(self, point: str, value: Tensor, stream: Tensor | None = None) -> list[Tensor]:
        """Rows that begin at a point are put to the others, with the stream beside it; then the edits there are made."""
        flat = [(point, value)] if stream is None else [(point, value), (_STREAM[point], stream)]
        value, *others = self._begin(self.new.get(point, []), *flat)
        return [self._touch(point, value), *others]

    def _begin(
        self, new: Sequence[tuple[int, Intervention]], *flat: tuple[str, Tensor]
    ) -> list[Tensor]:
        """Flat values of some points, with the clean run's for variants that begin here."""
        if not new:
            return [value for _, value in flat]
        by_group: dict[int, list[Intervention]] = {}
        for number, one in new:
            by_group.setdefault(number, []).append(one)
        parts = [self._split(value) for _, value in flat]
        for number, ones in by_group.items():
            group = self.groups[number]
            for (point, _), part in zip(flat, parts, strict=True):
                clean = self._of_clean(point, group).expand(
                    len(ones), *[-1] * (part[number].ndim - 1)
                )
                part[number] = torch.cat([part[number], clean]) if group.n else clean
            self._lend_clean(group, len(ones))
            for i, one in enumerate(ones, group.n):
                for edit in one.edits:
                    where = edit.where.layer, edit.where.point
                    self.edits.setdefault(where, []).append((number, i, edit))
            group.n += len(ones)
        return [self._joined(part) for part in parts]

    def _of_clean(self, point: str, group: Group) -> Float[Tensor, "batch chosen ..."]:
        return self._rows(self.clean.values[f"blocks.{self.layer}.{point}"], self._at(group))

    def _lend_clean(self, group: Group, times: int) -> None:
        """What lenders lend to rows that passed them unchanged."""
        for lender in self.lenders:
            if lender > self.layer:
                continue
            names = f"blocks.{lender}.attn.hook_rot_k", f"blocks.{lender}.attn.v_norm.hook_out"
            clean = [
                self.clean.values[name][:, group.start :].expand(times, -1, -1, -1, -1)
                for name in names
            ]
            old = group.lent.get(lender)
            k, v = (
                clean if old is None else (torch.cat(pair) for pair in zip(old, clean, strict=True))
            )
            group.lent[lender] = (k, v)

    def _touch(self, point: str, flat: Tensor) -> Tensor:
        """Make the edits of this block and point in a flat value."""
        if (self.layer, point) not in self.edits:
            return flat
        flat = flat.clone()
        for number, part in enumerate(self._split(flat)):
            self._edit(number, point, part)
        return flat

    def _edit(self, number: int, point: str, part: Tensor) -> None:
        """Make a group's edits of this block and point in its part, in place."""
        group = self.groups[number]
        for whose, i, edit in self.edits.get((self.layer, point), ()):
            if whose == number:
                part[i] = edit.apply(part[i], self._at(group))

    # -- attention --------------------------------------------------------------------------------------

    def _attention(
        self, block: Block, stream: Float[Tensor, "row d_model"], last: bool
    ) -> Float[Tensor, "chosen head d_head"]:
        attn, cfg = block.attn, block.cfg
        x = block.ln1.plain(stream)
        k, v = self._keys_values(block, x)
        if last:
            x = self._to_read(x)
        self.at_read = last
        q = product(x, attn.w_q).unflatten(-1, (-1, cfg.d_head))
        q = attn.q_norm.plain(self._touch("attn.hook_q", q))
        q = self._touch("attn.hook_rot_q", self._turned(q))
        parts = zip(self._split(q), k, v, strict=True)
        z = [self._mixed(number, *one) for number, one in enumerate(parts)]
        self.at_read = False
        return self._joined(z)

    def _keys_values(self, block: Block, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of each group, at its tail."""
        attn, cfg = block.attn, block.cfg
        if cfg.lender is None:
            k = product(x, attn.w_k).unflatten(-1, (-1, cfg.d_head))
            k = self._touch("attn.hook_k", k)
            v = k if cfg.k_eq_v else product(x, attn.w_v).unflatten(-1, (-1, cfg.d_head))
            v = attn.v_norm.plain(self._touch("attn.hook_v", v))
            k = self._turned(attn.k_norm.plain(k))
            ks, vs = self._split(k), self._split(v)
        else:
            empty = x.new_empty(0, self.batch, 0, 1, 1)
            lent = [group.lent.get(cfg.lender, (empty, empty)) for group in self.groups]
            ks, vs = [list(pair) for pair in zip(*lent, strict=True)]
        if self.layer in self.lenders:
            for group, lent_k, lent_v in zip(self.groups, ks, vs, strict=True):
                group.lent[self.layer] = (lent_k, lent_v)
        return self._own("attn.hook_rot_k", ks), self._own("attn.v_norm.hook_out", vs)

    def _own(self, point: str, parts: list[Tensor]) -> list[Tensor]:
        """Edits of this block's reading, which leave what is lent as it is."""
        touched = {number for number, _, _ in self.edits.get((self.layer, point), ())}
        parts = [part.clone() if i in touched else part for i, part in enumerate(parts)]
        for number in touched:
            self._edit(number, point, parts[number])
        return parts

    def _turned(self, flat: Float[Tensor, "row heads d_head"]) -> Float[Tensor, "row heads d_head"]:
        """Rotary positions."""
        turns = self.clean.turns[self._kind()]
        cos, sin = (
            self._joined(
                [
                    self._rows(turn, self._at(group)).expand(group.n, -1, -1, -1)
                    for group in self.groups
                ]
            )
            for turn in turns
        )
        return rotate(flat[None], cos[None], sin[None])[0]

    def _kind(self) -> str:
        return self.model.cfg.layer(self.layer).kind

    @staticmethod
    def _rows(value: Tensor, at: Int[Tensor, "batch pos"]) -> Tensor:
        """Positions `at` of a value `[1 or batch, pos, ...]`, a row for each prompt."""
        index = torch.arange(len(value), device=value.device) if len(value) > 1 else at.new_zeros(1)
        return value[index[:, None], at]

    def _mixed(
        self, number: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Float[Tensor, "variant batch chosen head d_head"]:
        """A group's values mixed by its pattern; keys and values before the tail are the clean run's, shared by all variants."""
        group = self.groups[number]
        if not group.n:
            return q
        kv_heads, name = k.shape[3], f"blocks.{self.layer}.attn."
        q = q.unflatten(3, (kv_heads, -1))  # [variant batch pos kv_head group d_head]
        scores = torch.einsum("nbtkgd,nbskd->nbkgts", q, k)
        if group.start:
            before = self.clean.values[name + "hook_rot_k"][:, : group.start]
            scores = torch.cat([torch.einsum("nbtkgd,bskd->nbkgts", q, before), scores], -1)
        seen = self._rows(
            self.clean.seen[self._kind()][:, 0], self._at(group)
        )  # [batch pos kv_pos]
        scores = scores.masked_fill_(~seen[:, None, None], torch.finfo(scores.dtype).min)
        by_head = scores.flatten(2, 3)
        self._edit(number, "attn.hook_attn_scores", by_head)
        pattern = softmax(by_head)
        if (
            self.model.attn_implementation == "sdpa"
        ):  # the fused operation leaves queries that see nothing at zero
            pattern = pattern.masked_fill_(~seen.any(-1)[:, None, :, None], 0)
        self._edit(number, "attn.hook_pattern", pattern)
        pattern = pattern.unflatten(2, (kv_heads, -1))
        z = torch.einsum("nbkgts,nbskd->nbtkgd", pattern[..., group.start :], v)
        if group.start:
            before = self.clean.values[name + "v_norm.hook_out"][:, : group.start]
            z = z + torch.einsum("nbkgts,bskd->nbtkgd", pattern[..., : group.start], before)
        return z.flatten(3, 4)
