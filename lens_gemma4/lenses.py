"""Lenses: what the head would say of a stream before the last block has written into it.

`logit_lens` reads any stream point of any blocks through the final norm, the head and the softcap, and keeps of each
place what one asks for: the likeliest tokens, the rank of chosen ones, entropy, the distance to the model's own
answer. `patchscope` puts one stream vector into another prompt's run and reads what comes out there.

Logits of all blocks at once would be far larger than the model's own (48 blocks x 262,144 tokens: 48 MB a position in
float32), so they are made a chunk at a time, in one buffer, and only what was asked of them stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.attribution import through_norm, widest
from lens_gemma4.cache import ActivationCache
from lens_gemma4.config import HookedConfig
from lens_gemma4.model import Gemma4, softcap
from lens_gemma4.utils import Slice

if TYPE_CHECKING:
    from lens_gemma4.hooked_model import HookedModel
else:
    HookedModel = Gemma4  # hooked_model imports this file

Norm = Literal["recomputed", "frozen"]
Translate = Callable[[Tensor, int], Tensor]

POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")  # as a block makes them
MAX_BYTES = 2**28  # of one chunk of logits: 256 positions of the 12B
# Rows of logits that are read together. On a CPU they stay in its caches while a dozen operations pass over them,
# which halves their cost; a GPU wants more work at a time.
TILE_BYTES = {"cpu": 2**21}
TILE_BYTES_ELSEWHERE = 2**26
SPAN = 512  # columns whose maximum stands for them all


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


# -- what is kept of logits ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Readings:
    """What logits say. `*axes` are those of `axes`; log-probabilities and entropies are in nats, float32 at least.

    `top_*` are the likeliest tokens, likeliest first. `token_*` are the tokens that were asked about, in the order of
    `token_ids`; a rank is the number of tokens with a larger logit, so 0 is the first choice.
    """

    top_ids: Int[Tensor, "*axes k"]
    top_logits: Float[Tensor, "*axes k"]
    top_logprobs: Float[Tensor, "*axes k"]
    token_ids: tuple[int, ...]
    token_ranks: Int[Tensor, "*axes token"]
    token_logits: Float[Tensor, "*axes token"]
    token_logprobs: Float[Tensor, "*axes token"]
    entropy: Float[Tensor, "*axes"] | None
    tokenizer: Any

    @property
    def top_probs(self) -> Float[Tensor, "*axes k"]:
        return self.top_logprobs.exp()

    @property
    def token_probs(self) -> Float[Tensor, "*axes token"]:
        return self.token_logprobs.exp()

    def name(self, token: int) -> str:
        """A token's text, its leading space kept; its number where there is no text."""
        text = ""
        if self.tokenizer is not None:
            text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return text or f"token {token}"

    def _entries(self, place: tuple[int, ...]) -> list[dict[str, Any]]:
        """The tokens of one place, likeliest first and then those asked about, as rows of a table."""
        asked = torch.tensor(self.token_ids, dtype=torch.long)
        top_ranks = torch.arange(self.top_ids.shape[-1])
        kinds = [
            ("top", self.top_ids[place], top_ranks, self.top_logits, self.top_logprobs),
            ("asked", asked, self.token_ranks[place], self.token_logits, self.token_logprobs),
        ]
        return [
            {
                "kind": kind,
                "rank": rank,
                "id": token,
                "token": self.name(token),
                "logit": logit,
                "logprob": logprob,
            }
            for kind, ids, ranks, logits, logprobs in kinds
            for token, rank, logit, logprob in zip(
                ids.tolist(),
                ranks.tolist(),
                logits[place].tolist(),
                logprobs[place].tolist(),
                strict=True,
            )
        ]


class Asked(NamedTuple):
    """What is to be kept of every row of logits."""

    top_k: int
    tokens: Int[Tensor, " token"]
    entropy: bool


class Final(NamedTuple):
    """The distribution that others are compared with, and its mean log-probability (its entropy, negated)."""

    probs: Float[Tensor, "row d_vocab"]
    mean_logprob: Float[Tensor, " row"]


def read(
    logits: Float[Tensor, "row d_vocab"], asked: Asked, final: Final | None = None
) -> dict[str, Tensor]:
    """The fields of `Readings` by name, and "kl" when a final distribution is given; overwrites the logits."""
    tiles = []
    for rows in _tiles(logits):
        wide = logits[rows].to(widest(logits.dtype))
        tile = _choices(wide, asked)
        shifted, weights, total = _softmax(wide, tile["top_logits"][:, :1])
        tile["top_logprobs"] -= total.log()[:, None]
        tile["token_logprobs"] -= total.log()[:, None]
        if asked.entropy:
            tile["entropy"] = total.log() - torch.linalg.vecdot(weights, shifted) / total
        if final is not None:
            mean = torch.linalg.vecdot(final.probs[rows], shifted) - total.log()
            tile["kl"] = (final.mean_logprob[rows] - mean).clamp(min=0)  # below zero is rounding
        tiles.append(tile)
    return {name: torch.cat([tile[name] for tile in tiles]) for name in tiles[0]}


def _choices(wide: Float[Tensor, "row d_vocab"], asked: Asked) -> dict[str, Tensor]:
    """Everything but the sums over the vocabulary; log-probabilities without their normaliser yet."""
    values, ids = top_tokens(wide, asked.top_k)
    chosen = wide[:, asked.tokens]  # [row token]
    ranks = torch.zeros_like(chosen, dtype=torch.long)
    for i, value in enumerate(chosen.unbind(-1)):
        ranks[:, i] = (wide > value[:, None]).sum(-1)
    largest = values[:, :1]
    return {
        "top_ids": ids,
        "top_logits": values,
        "top_logprobs": values - largest,
        "token_ranks": ranks,
        "token_logits": chosen,
        "token_logprobs": chosen - largest,
    }


def final_distribution(
    logits: Float[Tensor, "row d_vocab"], out: Float[Tensor, "row d_vocab"]
) -> Final:
    """Probabilities of logits, written into `out`; overwrites the logits."""
    means = []
    for rows in _tiles(logits):
        wide = logits[rows].to(widest(logits.dtype))
        shifted, weights, total = _softmax(wide, wide.amax(-1, keepdim=True), out[rows])
        weights /= total[:, None]
        means.append(torch.linalg.vecdot(weights, shifted) - total.log())
    return Final(out, torch.cat(means))


def _softmax(
    wide: Float[Tensor, "row d_vocab"],
    largest: Float[Tensor, "row 1"],
    out: Float[Tensor, "row d_vocab"] | None = None,
) -> tuple[Tensor, Tensor, Float[Tensor, " row"]]:
    """Logits less their largest (in place), their exponentials, and the sum of these."""
    shifted = wide.sub_(largest)
    weights = torch.exp(shifted, out=out)
    return shifted, weights, weights.sum(-1)


def top_tokens(
    logits: Float[Tensor, "row d_vocab"], k: int
) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
    """The k largest and their ids, as `torch.topk` gives them, without sorting through the whole row.

    The k largest lie in the k spans with the largest maxima: whatever lies outside has k values as large above it.
    """
    whole = logits.shape[-1] // SPAN
    if whole <= k:
        return tuple(logits.topk(k))  # type: ignore[return-value]
    spans = logits[:, : whole * SPAN].unflatten(-1, (whole, SPAN))
    best = spans.amax(-1).topk(k).indices  # [row span]
    columns = torch.arange(SPAN, device=logits.device)
    candidates = spans.gather(1, best[..., None].expand(-1, -1, SPAN)).flatten(1)
    ids = (best[..., None] * SPAN + columns).flatten(1)
    rest = torch.arange(whole * SPAN, logits.shape[-1], device=logits.device)
    candidates = torch.cat((candidates, logits[:, whole * SPAN :]), -1)
    ids = torch.cat((ids, rest.expand(len(ids), -1)), -1)
    values, at = candidates.topk(k)
    return values, ids.gather(-1, at)


def _tiles(logits: Float[Tensor, "row d_vocab"]) -> list[slice]:
    budget = TILE_BYTES.get(logits.device.type, TILE_BYTES_ELSEWHERE)
    size = max(1, budget // _row_bytes(logits.shape[-1], logits.dtype))
    return [slice(begin, begin + size) for begin in range(0, len(logits), size)]


def _row_bytes(d_vocab: int, dtype: torch.dtype) -> int:
    """Of one row of logits in the dtype it is summed in."""
    return d_vocab * widest(dtype).itemsize


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
    """

    kl: Float[Tensor, "place batch pos"] | None
    places: tuple[Place, ...]
    positions: tuple[int, ...]
    ids: Int[Tensor, "batch pos"] | None
    mask: Bool[Tensor, "batch pos"] | None
    norm: Norm
    axes: tuple[str, ...] = field(default=("place", "batch", "pos"), init=False)

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
            f"{point or 'no point'} of block {layer} was not read; read were: {', '.join(map(str, self.places))}"
        )

    def top(
        self, layer: int = -1, point: str | None = None, batch: int = 0, pos: int = -1
    ) -> list[tuple[str, float]]:
        """The likeliest tokens at one place with their probabilities; `pos` counts the positions read."""
        where = self.at(layer, point), batch, pos
        ids, probs = self.top_ids[where].tolist(), self.top_probs[where].tolist()
        return [(self.name(token), prob) for token, prob in zip(ids, probs, strict=True)]

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
                "at": None if self.ids is None else self.name(int(self.ids[batch, pos])),
                **entry,
                **self._of_place((i, batch, pos)),
            }
            for i, place in enumerate(self.places)
            for batch in range(self.top_ids.shape[1])
            for pos, position in enumerate(self.positions)
            if self.mask is None or bool(self.mask[batch, pos])
            for entry in self._entries((i, batch, pos))
        ]
        return pandas.DataFrame(rows)

    def _of_place(self, where: tuple[int, int, int]) -> dict[str, float]:
        sums = {"entropy": self.entropy, "kl": self.kl}
        return {name: value[where].item() for name, value in sums.items() if value is not None}

    def plot(
        self,
        value: Literal["probability", "rank", "entropy", "kl"] = "probability",
        token: int | None = None,
        batch: int = 0,
    ) -> Any:
        """A map of places and positions as a plotly figure; each cell names the first choice there.

        Args:
            value: of the first choice ("probability"), of the token asked about ("probability" or "rank"), or of the
                whole distribution ("entropy" and "kl", nats).
            token: which of `token_ids`, by its id; by default the first choice.
            batch: which row of the batch.
        Raises:
            ValueError: a token that was not asked about; a value that was not computed.
        """
        from lens_gemma4 import plots

        kept = range(len(self.positions))
        if self.mask is not None:
            kept = [i for i in kept if bool(self.mask[batch, i])]  # type: ignore[assignment]
        grid = self._grid(value, token)[:, batch]
        first = self.top_ids[:, batch, :, 0]
        columns = [
            f"{self.positions[i]}"
            + ("" if self.ids is None else f" {self.name(int(self.ids[batch, i]))}")
            for i in kept
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

    def _grid(self, value: str, token: int | None) -> Float[Tensor, "place batch pos"]:
        if value in ("entropy", "kl"):
            sums = self.entropy if value == "entropy" else self.kl
            if sums is None:
                raise ValueError(
                    f"{value} was not computed: call logit_lens with {value}=True to plot it"
                )
            return sums
        if value not in ("probability", "rank"):
            raise ValueError(f"value is {value!r}; use 'probability', 'rank', 'entropy' or 'kl'")
        if token is None:
            if value == "rank":
                raise ValueError("the first choice has rank 0 everywhere: say which token=")
            return self.top_probs[..., 0]
        if token not in self.token_ids:
            raise ValueError(
                f"token {token} was not asked about (asked: {list(self.token_ids)}): give it to logit_lens, tokens=[...]"
            )
        which = self.token_ids.index(token)
        return (self.token_probs if value == "probability" else self.token_ranks.float())[
            ..., which
        ]


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
    asked = _asked(model, top_k, tokens, entropy)
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


def _asked(model: HookedModel, top_k: int, tokens: Any, entropy: bool) -> Asked:
    d_vocab = model.cfg.d_vocab
    if not 1 <= top_k <= d_vocab:
        raise ValueError(f"top_k is {top_k}; this vocabulary gives 1 to {d_vocab}")
    if isinstance(tokens, Tensor):
        tokens = tokens.flatten().tolist()
    elif isinstance(tokens, (str, int)):
        tokens = [tokens]
    ids = [
        model.to_single_token(token) if isinstance(token, str) else token for token in tokens or ()
    ]
    if outside := [token for token in ids if not 0 <= token < d_vocab]:
        raise ValueError(f"{outside[0]} is no token: this vocabulary has 0 to {d_vocab - 1}")
    return Asked(top_k, torch.tensor(ids, dtype=torch.long, device=model.device), entropy)


class Run(NamedTuple):
    """Streams to be read, and where they come from."""

    streams: Mapping[Place, Float[Tensor, "batch pos d_model"]]
    last: Float[Tensor, "batch pos d_model"] | None  # the last stream, for the final distribution
    scale: Float[Tensor, "batch pos 1"] | None  # the last norm's, when it is frozen
    positions: tuple[int, ...]
    ids: Int[Tensor, "batch pos"] | None
    mask: Bool[Tensor, "batch pos"] | None


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
    return _streams(cache, places, last, scale, Slice())._replace(
        positions=tuple(chosen.indices(given.shape[1]).tolist()),
        ids=None if ids is None else chosen.apply(ids, dim=-1),
        mask=None if mask is None else chosen.apply(mask, dim=-1).bool(),
    )


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
    return Run(
        streams,
        None if last is None else value(last),
        None if scale is None else value(scale),
        tuple(chosen.indices(n_pos).tolist()),
        value("hook_tokens", dim=-1) if "hook_tokens" in cache else None,
        None,
    )


def _read_places(
    model: HookedModel, run: Run, asked: Asked, tuned: Translate | None, max_bytes: int
) -> dict[str, Tensor]:
    """The fields of `Lens` that are tensors over `place batch pos`, a chunk of positions at a time."""
    some = next(iter(run.streams.values()))
    batch, pos, _ = some.shape
    n_rows, d_vocab = batch * pos, model.cfg.d_vocab
    if not n_rows:
        raise ValueError("positions chooses none of the prompt's positions: nothing to read")
    size = min(n_rows, max(1, max_bytes // _row_bytes(d_vocab, some.dtype)))
    buffer = torch.empty(size, d_vocab, dtype=some.dtype, device=model.device)
    probs = None
    if run.last is not None:
        probs = torch.empty_like(buffer, dtype=widest(some.dtype))
    found: list[list[dict[str, Tensor]]] = [[] for _ in run.streams]
    for begin in range(0, n_rows, size):
        chunk = slice(begin, begin + size)
        out = buffer[: min(size, n_rows - begin)]
        scale = None if run.scale is None else _rows(run.scale, chunk, model)
        final = None
        if run.last is not None and probs is not None:
            logits = project(model, _rows(run.last, chunk, model), scale, out)
            final = final_distribution(logits, probs[: len(out)])
        for i, (place, stream) in enumerate(run.streams.items()):
            rows = _rows(stream, chunk, model)
            if tuned is not None:
                rows = tuned(rows, place.layer)
            found[i].append(read(project(model, rows, scale, out), asked, final))
    return {
        name: torch.stack([torch.cat([part[name] for part in parts]) for parts in found]).unflatten(
            1, (batch, pos)
        )
        for name in found[0][0]
    }


def _rows(value: Float[Tensor, "batch pos d"], chunk: slice, model: HookedModel) -> Tensor:
    return value.flatten(0, 1)[chunk].to(model.device)  # a cache may lie elsewhere
