"""What is kept of logits: the likeliest tokens, the rank of chosen ones, entropy, the distance to other logits.

Logits are read a few rows at a time and then forgotten; nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4.attribution import widest
from lens_gemma4.config import HookedConfig
from lens_gemma4.spans import token_text

# Rows of logits that are read together. On a CPU they stay in its caches while a dozen operations pass over them,
# which halves their cost; a GPU wants more work at a time.
TILE_BYTES = {"cpu": 2**21}
TILE_BYTES_ELSEWHERE = 2**26
SPAN = 512  # columns whose maximum stands for them all


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
        text = "" if self.tokenizer is None else token_text(self.tokenizer, token)
        return text or f"token {token}"

    def grid(self, value: str, token: int | None = None) -> Float[Tensor, "*axes"]:
        """One number a place, for a map.

        Args:
            value: "probability" or "rank" of a token, or "entropy" ("kl", where there is one) of the place, in nats.
            token: one that was asked about, by its id; by default the first choice of each place.
        Raises:
            ValueError: a value that was not computed; a token that was not asked about.
        """
        sums = self._sums()
        if value in sums:
            found = sums[value]
            if found is None:
                raise ValueError(f"{value} was not computed: ask for it with {value}=True")
            return found
        if value not in ("probability", "rank"):
            known = ", ".join(map(repr, ("probability", "rank", *sums)))
            raise ValueError(f"value is {value!r}; use one of {known}")
        if token is None and value == "rank":
            raise ValueError("the first choice has rank 0 everywhere: say which token=")
        if token is None:
            return self.top_probs[..., 0]
        if token not in self.token_ids:
            raise ValueError(
                f"token {token} was not asked about (asked: {list(self.token_ids)}): name it in tokens=[...]"
            )
        chosen = self.token_probs if value == "probability" else self.token_ranks.float()
        return chosen[..., self.token_ids.index(token)]

    def _sums(self) -> dict[str, Tensor | None]:
        """What is one number a place, by name."""
        return {"entropy": self.entropy}

    def _numbers(self, place: tuple[int, ...]) -> dict[str, float]:
        return {
            name: value[place].item() for name, value in self._sums().items() if value is not None
        }

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


def asked_for(
    cfg: HookedConfig,
    to_token: Callable[[str], int],
    top_k: int,
    tokens: Any,
    entropy: bool,
    device: torch.device,
) -> Asked:
    """What a user wants kept, checked.

    Raises:
        ValueError: top_k or a token outside the vocabulary; a text that is not one token.
    """
    d_vocab = cfg.d_vocab
    if not 1 <= top_k <= d_vocab:
        raise ValueError(f"top_k is {top_k}; this vocabulary gives 1 to {d_vocab}")
    if isinstance(tokens, Tensor):
        tokens = tokens.flatten().tolist()
    elif isinstance(tokens, (str, int)):
        tokens = [tokens]
    ids = [to_token(token) if isinstance(token, str) else token for token in tokens or ()]
    if outside := [token for token in ids if not 0 <= token < d_vocab]:
        raise ValueError(f"{outside[0]} is no token: this vocabulary has 0 to {d_vocab - 1}")
    return Asked(top_k, torch.tensor(ids, dtype=torch.long, device=device), entropy)


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
    size = max(1, budget // row_bytes(logits.shape[-1], logits.dtype))
    return [slice(begin, begin + size) for begin in range(0, len(logits), size)]


def row_bytes(d_vocab: int, dtype: torch.dtype) -> int:
    """Of one row of logits in the dtype it is summed in."""
    return d_vocab * widest(dtype).itemsize
