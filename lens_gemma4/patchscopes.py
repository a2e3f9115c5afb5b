"""Patchscopes: what a stream vector says when another prompt's run goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4.cache import ActivationCache
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.lenses import project
from lens_gemma4.readings import Readings, asked_for, read

Point = Literal["resid_pre", "resid_post"]


@dataclass(frozen=True, repr=False, eq=False)
class Patchscope(Readings):
    """What the patched runs say: `Readings` over `axes`, `source target`.

    Args:
        source_layers: block from which the vector of each entry of the first axis was taken.
        target_layers: block at which it was put in, on the second axis.
        point: "resid_post", leaving these blocks, or "resid_pre", entering them.
    """

    source_layers: tuple[int, ...]
    target_layers: tuple[int, ...]
    point: Point
    axes: tuple[str, ...] = field(default=("source", "target"), init=False)

    def __repr__(self) -> str:
        return (
            f"Patchscope of {self.point}: blocks {list(self.source_layers)} read at blocks "
            f"{list(self.target_layers)}, top {self.top_ids.shape[-1]}"
        )

    def top(self, source_layer: int, target_layer: int) -> list[tuple[str, float]]:
        """The likeliest tokens of one pair of blocks with their probabilities.

        Raises:
            ValueError: this pair was not run.
        """
        if source_layer not in self.source_layers or target_layer not in self.target_layers:
            raise ValueError(f"block {source_layer} at block {target_layer} was not run: {self!r}")
        where = self.source_layers.index(source_layer), self.target_layers.index(target_layer)
        ids, probs = self.top_ids[where].tolist(), self.top_probs[where].tolist()
        return [(self.name(token), prob) for token, prob in zip(ids, probs, strict=True)]

    def to_dataframe(self) -> Any:
        """A row for each pair of blocks and token.

        Columns: `source_layer target_layer`, `kind` ("top", or "asked"), `rank id token logit logprob` of the token,
        `entropy` of the pair, where it was computed.
        """
        import pandas

        rows = [
            {
                "source_layer": source,
                "target_layer": target,
                **entry,
                **self._numbers((i, j)),
            }
            for i, source in enumerate(self.source_layers)
            for j, target in enumerate(self.target_layers)
            for entry in self._entries((i, j))
        ]
        return pandas.DataFrame(rows)

    def plot(
        self,
        value: Literal["probability", "rank", "entropy"] = "probability",
        token: int | None = None,
    ) -> Any:
        """A map of source and target blocks as a plotly figure; each cell names the first choice there.

        Args:
            value, token: as in `grid`.
        """
        from lens_gemma4 import plots

        about = "" if token is None else f" of {self.name(token)!r}"
        return plots.heatmap(
            self.grid(value, token).tolist(),
            [str(layer) for layer in self.source_layers],
            [str(layer) for layer in self.target_layers],
            row_title="from block",
            column_title="at block",
            unit=value + about,
            centred=False,
            cells=[[self.name(int(token)) for token in row] for row in self.top_ids[..., 0]],
        )


@torch.no_grad()
def patchscope(
    model: HookedModel,
    source: Any,
    target: Any,
    *,
    source_layers: int | Sequence[int] | None = None,
    target_layers: int | Sequence[int] | None = None,
    source_position: int = -1,
    target_position: int = -1,
    read_position: int = -1,
    point: Point = "resid_post",
    rescale: bool = False,
    top_k: int = 10,
    tokens: Any = (),
    entropy: bool = True,
    batch_size: int = 16,
) -> Patchscope:
    """Put one stream vector of a source prompt into a target prompt's run, and read what comes out.

    Every source block is paired with every target block; source blocks share a run, as rows of a batch. Hooks on the
    model are at work in both prompts, but those behind the last block.

    Args:
        source: text or ids of one prompt, or a processor's output for one.
        target: text or ids of one prompt.
        source_layers, target_layers: blocks, by default all; negative ones count from the end.
        source_position, target_position: where the vector is taken, and where it takes another's place; negative ones
            count from the end.
        read_position: of the target, where its answer is read. Below `target_position` nothing can change, nor can
            anything elsewhere when all later blocks borrow their keys and values (`num_kv_shared_layers`).
        point: "resid_post": the stream leaving a block, after `layer_scalar`, takes the place of the stream leaving
            the target block. "resid_pre": entering instead of leaving.
        rescale: give the vector the length of the one it replaces. Streams of different blocks differ in length by the
            product of the layer scalars between them, and with it in what later writes weigh beside them.
        top_k, tokens, entropy: as in `logit_lens`.
        batch_size: source blocks run together.
    Raises:
        ValueError: several prompts in one; an unknown point; a target with media; top_k or a token that cannot be.
        IndexError: no such block or position.
    Source: Ghandeharioun et al., "Patchscopes" (2024), arXiv 2401.06102.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> scope = patchscope(model, "The capital of France is", "The language of Spain is", target_layers=2, rescale=True)
    >>> scope.top(source_layer=7, target_layer=2)[0][0]
    ' Paris'
    """
    if point not in ("resid_pre", "resid_post"):
        raise ValueError(f"point is {point!r}; use 'resid_pre' or 'resid_post'")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least one row is run")
    sources, targets = _layers(model, source_layers), _layers(model, target_layers)
    asked = asked_for(model.cfg, model.to_single_token, top_k, tokens, entropy, model.device)
    vectors = _vectors(model, source, sources, source_position, point)
    prompt = _prompt(model, target)
    n_pos = prompt["input_ids"].shape[1]
    where = _position("target_position", target_position, n_pos)
    look = _position("read_position", read_position, n_pos)
    columns = []
    for layer in targets:
        parts = []
        for some in vectors.split(batch_size):
            write = partial(_write, some, where, rescale)
            rows: dict[str, Any] = {k: v.expand(len(some), -1) for k, v in prompt.items()}
            stream = model.run_with_hooks(
                fwd_hooks=[(f"blocks.{layer}.hook_{point}", write)],
                stop_at_layer=model.cfg.n_layers,  # other positions need no logits
                **rows,
            )
            parts.append(read(project(model, stream[:, look]), asked))
        columns.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    found: dict[str, Any] = {"entropy": None}
    found |= {name: torch.stack([c[name] for c in columns], dim=1) for name in columns[0]}
    return Patchscope(
        **found,
        token_ids=tuple(asked.tokens.tolist()),
        tokenizer=model.tokenizer,
        source_layers=sources,
        target_layers=targets,
        point=point,
    )


def _layers(model: HookedModel, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    if layers is None:
        layers = range(model.cfg.n_layers)
    numbers = [layers] if isinstance(layers, int) else list(layers)
    if not numbers:
        raise ValueError("no block is named: give a number, several, or None for all")
    return tuple(model.cfg.layer(number).index for number in numbers)


def _vectors(
    model: HookedModel, source: Any, layers: Sequence[int], position: int, point: Point
) -> Float[Tensor, "source d_model"]:
    tensors = model.prepare(source)
    n_pos = _one_prompt("source", tensors).shape[1]
    names = [f"blocks.{layer}.hook_{point}" for layer in layers]
    _, cache = model.run_with_cache(
        names_filter=list(dict.fromkeys(names)),
        pos_slice=_position("source_position", position, n_pos),
        return_type=None,
        stop_at_layer=max(layers) + 1,
        **tensors,
    )
    return torch.stack([cast(ActivationCache, cache)[name][0, 0] for name in names])


def _prompt(model: HookedModel, target: Any) -> dict[str, Tensor]:
    tensors = {name: value for name, value in model.prepare(target).items() if value is not None}
    _one_prompt("target", tensors)
    if media := sorted(set(tensors) - {"input_ids", "attention_mask"}):
        raise ValueError(f"the target holds {media}: it is text or ids alone")
    return tensors


def _one_prompt(what: str, tensors: dict[str, Any]) -> Tensor:
    ids = tensors["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"the {what} is {len(ids)} prompts; give one")
    return ids


def _position(what: str, position: int, n_pos: int) -> int:
    if not -n_pos <= position < n_pos:
        raise IndexError(f"{what} is {position}; the prompt has positions 0 to {n_pos - 1}")
    return position % n_pos


def _write(
    vectors: Float[Tensor, "batch d_model"], where: int, rescale: bool, resid: Tensor, hook: Any
) -> None:
    if rescale:
        length, old = (value.norm(dim=-1, keepdim=True) for value in (vectors, resid[:, where]))
        vectors = vectors * (old / length)
    resid[:, where] = vectors
