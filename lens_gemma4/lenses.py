"""Lenses: what the head would say of a stream before the last block has written into it.

`logit_lens` reads any stream point of any blocks through the final norm, the head and the softcap, and keeps of each
place what one asks for: the likeliest tokens, the rank of chosen ones, entropy, the distance to the model's own
answer.

Logits of all blocks at once would be far larger than the model's own (48 blocks x 262,144 tokens: 48 MB a position in
float32), so they are made a chunk at a time, in one buffer, and only what was asked of them stays. A chunk is some of
the positions of one block or, of short prompts, several whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.attribution import through_norm, widest
from lens_gemma4.cache import ActivationCache
from lens_gemma4.config import HookedConfig
from lens_gemma4.model import Gemma4, softcap
from lens_gemma4.readings import (
    Asked,
    Readings,
    asked_for,
    final_distribution,
    read,
    row_bytes,
)
from lens_gemma4.spans import Span, media_labels
from lens_gemma4.utils import Slice

if TYPE_CHECKING:
    from lens_gemma4.hooked_model import HookedModel
else:
    HookedModel = Gemma4  # hooked_model imports this file

Norm = Literal["recomputed", "frozen"]
Translate = Callable[[Tensor, int], Tensor]

POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")  # as a block makes them
MAX_BYTES = 2**28  # of one chunk of logits: 256 positions of the 12B


def project(
    model: HookedModel,
    stream: Float[Tensor, "*axes d_model"],
    scale: Float[Tensor, "*axes 1"] | None = None,
    out: Tensor | None = None,
) -> Float[Tensor, "*axes d_vocab"]:
    """Final norm, head and softcap of any stream; no hook fires. What `forward` does, to the bit.

    Args:
        scale: the final norm's scale when it is to be held at a run's (`ln_final.hook_scale`); else it is the stream's.
        out: where the logits go, when `stream` is `[row d_model]` and no gradient is needed.
    """
    if scale is None:
        read = model.ln_final.plain(stream)
    else:
        gain = cast(Tensor, model.ln_final.weight)
        read = through_norm(stream, scale, gain).to(stream.dtype)
    if out is None:
        raw = F.linear(read, model.unembedding)
    else:
        raw = torch.mm(read, model.unembedding.T, out=out)
    return softcap(raw, model.cfg.output_logits_soft_cap, own=True)


# -- the logit lens -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """A stream point of one block."""

    layer: int
    point: str

    @property
    def hook(self) -> str:
        return f"blocks.{self.layer}.hook_{self.point}"

    def __str__(self) -> str:
        return f"{self.layer} {self.point}"


@dataclass(frozen=True, repr=False, eq=False)
class Lens(Readings):
    """What the logit lens saw: `Readings` over `axes`, `place batch pos`.

    Args:
        kl: KL(final || lens) in nats: what is lost by taking the lens for the model's own answer there.
        places: block and point of each entry of the first axis, in the order in which a run makes them.
        positions: number of each position that was read.
        ids: the prompt's ids there; None when the run had none.
        mask: False on padding; None when nothing is.
        norm: "recomputed" or "frozen".
        media: names of image, video and sound tokens, by prompt and number of the position read: "image[0] (3, 2)".
    """

    kl: Float[Tensor, "place batch pos"] | None
    places: tuple[Place, ...]
    positions: tuple[int, ...]
    ids: Int[Tensor, "batch pos"] | None
    mask: Bool[Tensor, "batch pos"] | None
    norm: Norm
    axes: tuple[str, ...] = field(default=("place", "batch", "pos"), init=False)
    media: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{n} {axis}" for axis, n in zip(self.axes, self.top_ids.shape, strict=False)
        )
        return (
            f"Lens of {sizes} ({self.places[0]} to {self.places[-1]}), norm {self.norm}, "
            f"top {self.top_ids.shape[-1]}"
        )

    def at(self, layer: int, point: str | None = None) -> int:
        """Where a block stands on the first axis; negative layers count from the last one read.

        Raises:
            ValueError: it was not read.
        """
        layers = sorted({place.layer for place in self.places})
        number = layers[layer] if -len(layers) <= layer < 0 else layer
        for i, place in enumerate(self.places):
            if place.layer == number and point in (None, place.point):
                return i
        raise ValueError(
            f"{f'{point} of ' if point else ''}block {layer} was not read; read were: {', '.join(map(str, self.places))}"
        )

    def top(
        self, layer: int = -1, point: str | None = None, batch: int = 0, pos: int = -1
    ) -> list[tuple[str, float]]:
        """The likeliest tokens at one place with their probabilities; `pos` counts the positions read."""
        where = self.at(layer, point), batch, pos
        ids, probs = self.top_ids[where].tolist(), self.top_probs[where].tolist()
        return [(self.name(token), prob) for token, prob in zip(ids, probs, strict=True)]

    def at_position(self, batch: int = 0, pos: int = -1) -> str | None:
        """The prompt's token there, or the patch of an image, as text; None when the run had no ids. `pos` counts those read."""
        pos = range(len(self.positions))[pos]
        if (batch, pos) in self.media:
            return self.media[batch, pos]
        return None if self.ids is None else self.name(int(self.ids[batch, pos]))

    def to_dataframe(self) -> Any:
        """A row for each place, position and token, padding left out.

        Columns: `layer point batch position at` (the prompt's token there), `kind` ("top", or "asked"), `rank id
        token logit logprob` of the token, `entropy` and `kl` of the place, where they were computed.
        """
        import pandas

        rows = [
            {
                "layer": place.layer,
                "point": place.point,
                "batch": batch,
                "position": position,
                "at": self.at_position(batch, pos),
                **entry,
                **self._numbers((i, batch, pos)),
            }
            for i, place in enumerate(self.places)
            for batch in range(self.top_ids.shape[1])
            for pos, position in enumerate(self.positions)
            if self.mask is None or bool(self.mask[batch, pos])
            for entry in self._entries((i, batch, pos))
        ]
        return pandas.DataFrame(rows)

    def _sums(self) -> dict[str, Tensor | None]:
        return {**super()._sums(), "kl": self.kl}

    def plot(
        self,
        value: Literal["probability", "rank", "entropy", "kl"] = "probability",
        token: int | None = None,
        batch: int = 0,
    ) -> Any:
        """A map of places and positions as a plotly figure; each cell names the first choice there.

        Args:
            value, token: as in `grid`.
            batch: which row of the batch; its padding is left out.
        """
        from lens_gemma4 import plots

        every = range(len(self.positions))
        kept = [i for i in every if self.mask is None or bool(self.mask[batch, i])]
        grid = self.grid(value, token)[:, batch]
        first = self.top_ids[:, batch, :, 0]
        words = {i: self.at_position(batch, i) for i in kept}
        columns = [
            f"{self.positions[i]}" + ("" if words[i] is None else f" {words[i]}") for i in kept
        ]
        about = "" if token is None else f" of {self.name(token)!r}"
        return plots.heatmap(
            grid[:, kept].tolist(),
            [str(place) for place in self.places],
            columns,
            row_title="block",
            column_title="position",
            unit=value + about,
            centred=False,
            cells=[[self.name(int(row[i])) for i in kept] for row in first],
        )


@torch.no_grad()
def logit_lens(
    model: HookedModel,
    input: Any = None,
    *,
    points: str | Sequence[str] = "resid_post",
    layers: int | Sequence[int] | None = None,
    positions: Any = None,
    norm: Norm = "recomputed",
    top_k: int = 10,
    tokens: Any = (),
    entropy: bool = True,
    kl: bool = True,
    tuned: Translate | None = None,
    max_bytes: int = MAX_BYTES,
    **inputs: Any,
) -> Lens:
    """Read stream points through the final norm, the head and the softcap.

    At the last block's `resid_post` these are the model's logits: to the bit when all positions are read and their
    logits fit into one chunk, else to rounding. The final distribution is what the head makes of that stream; the
    model's own logits are not computed again, and without `kl` the run ends at the last block asked for.

    Args:
        input: text, texts, ids, a processor's output, or an `ActivationCache` that kept the points (and the last
            `resid_post` for `kl`, `ln_final.hook_scale` for a frozen norm); of a cache every position counts, padding
            included. Hooks on the model are at work.
        points: some of "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post". `attn_out` and `mlp_out` are
            what a block adds, read as it is written: what reaches the end of it is `residual_gain` times as long.
        layers: blocks, by default all; negative ones count from the end.
        positions: as in `run_with_cache(pos_slice=)`; an int keeps its axis.
        norm: "recomputed": each stream by its own length, as if the model ended there. "frozen": by the scale of the
            run's last norm, for attribution: before the softcap such logits are linear in the stream.
        top_k: how many of the likeliest tokens are kept.
        tokens: ids, or texts of one token, whose rank, logit and log-probability are kept everywhere.
        entropy: whether it is computed (nats).
        kl: whether KL(final || lens) is (nats); it needs a second chunk.
        tuned: a `TunedLens`, through whose maps `resid_post` goes first.
        max_bytes: of one chunk of logits, counted in float32; peak memory is about two chunks and a half, or one and
            a half without `kl`.
        inputs: as in `forward`.
    Raises:
        ValueError: an unknown point, token or norm; top_k outside the vocabulary; no position or block.
        IndexError: no such block.
        HookNameError: the cache holds no such point.
    Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    >>> from lens_gemma4 import HookedModel
    >>> lens = HookedModel.from_pretrained("tiny").logit_lens("The capital of France is", tokens=" Paris")
    >>> lens.top(-1)[0][0], lens.token_ranks[-1, 0, -1].tolist()
    (' Paris', [0])
    """
    places = _places(model.cfg, points, layers)
    if norm not in ("recomputed", "frozen"):
        raise ValueError(f"norm is {norm!r}; use 'recomputed' or 'frozen'")
    if tuned is not None and {place.point for place in places} != {"resid_post"}:
        raise ValueError("a tuned lens reads resid_post alone: its maps were trained there")
    asked = asked_for(model.cfg, model.to_single_token, top_k, tokens, entropy, model.device)
    run = _run(model, input, places, positions, norm == "frozen", kl, inputs)
    found: dict[str, Any] = {"entropy": None, "kl": None}
    found |= _read_places(model, run, asked, tuned, max_bytes)
    return Lens(
        **found,
        token_ids=tuple(asked.tokens.tolist()),
        tokenizer=model.tokenizer,
        places=places,
        positions=run.positions,
        ids=run.ids,
        mask=run.mask,
        norm=norm,
        media=run.media,
    )


def _places(
    cfg: HookedConfig, points: str | Sequence[str], layers: int | Sequence[int] | None
) -> tuple[Place, ...]:
    wanted = [points] if isinstance(points, str) else list(points)
    if unknown := [point for point in wanted if point not in POINTS]:
        raise ValueError(f"no stream point {unknown[0]!r}; known are {', '.join(POINTS)}")
    if layers is None:
        layers = range(cfg.n_layers)
    numbers = [layers] if isinstance(layers, int) else list(layers)
    chosen = sorted({cfg.layer(layer).index for layer in numbers})
    if not wanted or not chosen:
        raise ValueError(f"nothing to read: points is {wanted}, layers is {numbers}")
    return tuple(Place(layer, point) for layer in chosen for point in POINTS if point in wanted)


class Run(NamedTuple):
    """Streams to be read, and where they come from."""

    streams: Mapping[Place, Float[Tensor, "batch pos d_model"]]
    last: Float[Tensor, "batch pos d_model"] | None  # the last stream, for the final distribution
    scale: Float[Tensor, "batch pos 1"] | None  # the last norm's, when it is frozen
    positions: tuple[int, ...]
    ids: Int[Tensor, "batch pos"] | None
    mask: Bool[Tensor, "batch pos"] | None
    media: Mapping[tuple[int, int], str] = MappingProxyType({})


def _run(
    model: HookedModel,
    input: Any,
    places: Sequence[Place],
    positions: Any,
    frozen: bool,
    kl: bool,
    inputs: dict[str, Any],
) -> Run:
    """Run the model as far as needed, keeping only what is read, or take it from a cache."""
    last = Place(model.cfg.n_layers - 1, "resid_post").hook if kl else None
    scale = "ln_final.hook_scale" if frozen else None
    chosen = Slice.unwrap(positions)
    if isinstance(input, ActivationCache):
        if inputs:
            raise TypeError(f"a cache has been run already: {sorted(inputs)} cannot change it")
        return _streams(input, places, last, scale, chosen)
    tensors = model.prepare(input, **inputs)
    ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
    stream, start = tensors.pop("resid", None), inputs.get("start_at_layer")
    given = next(x for x in (stream, ids, tensors.get("inputs_embeds")) if x is not None)
    names = [name for name in (*(place.hook for place in places), last, scale) if name is not None]
    _, kept = model.run_with_cache(
        stream,
        names_filter=list(dict.fromkeys(names)),
        pos_slice=chosen,
        return_type=None,
        start_at_layer=start,
        stop_at_layer=None if kl or frozen else max(place.layer for place in places) + 1,
        **tensors,
    )
    # The cache knows neither ids nor mask at its positions: they are cut as its values were.
    cache = cast(ActivationCache, kept)
    read = chosen.indices(given.shape[1]).tolist()
    return _streams(cache, places, last, scale, Slice())._replace(
        positions=tuple(read),
        media=_media(tensors.spans, read, len(given)),
        ids=None if ids is None else chosen.apply(ids, dim=-1),
        mask=None if mask is None else chosen.apply(mask, dim=-1).bool(),
    )


def _media(spans: Sequence[Span], read: Sequence[int], batch: int) -> dict[tuple[int, int], str]:
    """Names of media tokens by prompt and number of the position read."""
    return {
        (row, i): labels[position]
        for row, labels in enumerate(media_labels(spans, row) for row in range(batch))
        for i, position in enumerate(read)
        if position in labels
    }


def _streams(
    cache: ActivationCache,
    places: Sequence[Place],
    last: str | None,
    scale: str | None,
    chosen: Slice,
) -> Run:
    """What a cache kept, at the chosen ones of its positions."""

    def value(name: str, dim: int = -2) -> Tensor:
        kept = cache[name] if cache.has_batch_dim else cache[name][None]
        return chosen.apply(kept, dim=dim)

    streams = {place: value(place.hook) for place in places}
    n_pos = cache[places[0].hook].shape[-2]
    read = chosen.indices(n_pos).tolist()
    ids = value("hook_tokens", dim=-1) if "hook_tokens" in cache else None
    return Run(
        streams,
        None if last is None else value(last),
        None if scale is None else value(scale),
        tuple(read),
        ids,
        None,
        {} if ids is None else _media_of_cache(cache, ids, read),
    )


def _media_of_cache(
    cache: ActivationCache, ids: Int[Tensor, "batch pos"], read: Sequence[int]
) -> dict[tuple[int, int], str]:
    """As `_media`, from the names that a cache keeps."""
    if "token_labels" not in cache:
        return {}
    labels = cache["token_labels"] if cache.has_batch_dim else [cache["token_labels"]]
    cfg = cache.cfg
    placeholders = (cfg.image_token_id, cfg.video_token_id, cfg.audio_token_id)
    return {
        (row, i): labels[row][read[i]]
        for row, tokens in enumerate(ids.tolist())
        for i, token in enumerate(tokens)
        if token in placeholders
    }


def _read_places(
    model: HookedModel, run: Run, asked: Asked, tuned: Translate | None, max_bytes: int
) -> dict[str, Tensor]:
    """The fields of `Lens` that are tensors over `place batch pos`, a chunk of logits at a time."""
    some = next(iter(run.streams.values()))
    batch, pos, _ = some.shape
    n_rows, d_vocab = batch * pos, model.cfg.d_vocab
    if not n_rows:
        raise ValueError("positions chooses none of the prompt's positions: nothing to read")
    size = max(1, max_bytes // row_bytes(d_vocab, some.dtype))
    here = min(size, n_rows)  # rows of one place in a chunk
    groups = _groups(list(run.streams), size // here, model.cfg.n_layers)
    buffer = torch.empty(
        here * max(map(len, groups)), d_vocab, dtype=some.dtype, device=model.device
    )
    probs = None if run.last is None else torch.empty_like(buffer[:here], dtype=widest(some.dtype))
    found: dict[Place, list[dict[str, Tensor]]] = {place: [] for place in run.streams}
    for begin in range(0, n_rows, here):
        chunk = slice(begin, begin + here)
        scale = None if run.scale is None else _rows(run.scale, chunk, model)
        final = None
        if run.last is not None and probs is not None:
            rows = _rows(run.last, chunk, model)
            logits = project(model, rows, scale, buffer[: len(rows)])
            final = final_distribution(logits, probs[: len(rows)])
        for group in groups:
            parts = [_translated(run, place, chunk, model, tuned) for place in group]
            rows = torch.cat(parts)
            scales = None if scale is None else scale.repeat(len(group), 1)
            logits = project(model, rows, scales, buffer[: len(rows)])
            for place, part in zip(group, logits.split(len(parts[0])), strict=True):
                found[place].append(read(part, asked, final))
    return {
        name: torch.stack(
            [torch.cat([part[name] for part in parts]) for parts in found.values()]
        ).unflatten(1, (batch, pos))
        for name in found[next(iter(found))][0]
    }


def _groups(places: list[Place], at_once: int, n_layers: int) -> list[list[Place]]:
    """Places whose logits are made together: the head's matrix is then read once for all of them.

    The last stream stays alone, as in `forward`: more rows in a product may round otherwise.
    """
    alone = [place for place in places if place == Place(n_layers - 1, "resid_post")]
    others = places[: len(places) - len(alone)]
    groups = [others[i : i + at_once] for i in range(0, len(others), at_once)]
    return groups + ([alone] if alone else [])


def _translated(
    run: Run, place: Place, chunk: slice, model: HookedModel, tuned: Translate | None
) -> Float[Tensor, "row d_model"]:
    rows = _rows(run.streams[place], chunk, model)
    return rows if tuned is None else tuned(rows, place.layer)


def _rows(value: Float[Tensor, "batch pos d"], chunk: slice, model: HookedModel) -> Tensor:
    return value.flatten(0, 1)[chunk].to(model.device)  # a cache may lie elsewhere
