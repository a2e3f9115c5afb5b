"""From logits to the next token: penalty, temperature and the filters of transformers, in its order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEVER = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest, or drawn from what the filters leave.

    Args:
        do_sample: draw; else the likeliest.
        temperature: divides the logits before the filters; over 1 flattens, under 1 sharpens.
        top_k: keep the k likeliest, and those equal to the last of them.
        top_p: then the fewest of the likeliest that together hold probability p.
        min_p: then those at least min_p times as likely as the likeliest.
        repetition_penalty: before everything, and without `do_sample` too: the logit of a token that the text holds is
            divided by it where positive, else multiplied.
    Raises:
        ValueError: a number out of its range; filters or a temperature that would do nothing without `do_sample`.
    Source: transformers' `LogitsProcessor`s, and the order in which its `generate` puts them.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k is not None and not hasattr(self.top_k, "__index__"):
            raise TypeError(f"top_k is {self.top_k!r}; it is a whole number of tokens, or None")
        for name, good, range_ in (
            (
                "temperature",
                self.temperature > 0,
                "over 0; for the likeliest token leave out do_sample",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more; None keeps all"),
            ("top_p", self.top_p is None or 0 <= self.top_p <= 1, "0 to 1; None keeps all"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "0 to 1; None keeps all"),
            (
                "repetition_penalty",
                self.repetition_penalty > 0,
                "over 0; 1 changes nothing, 1.2 is usual",
            ),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; use {range_}")
        idle = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        idle += ["temperature"] * (self.temperature != 1)
        if idle and not self.do_sample:
            raise ValueError(
                f"{' and '.join(idle)} would do nothing: the likeliest token is taken unless do_sample=True"
            )

    @property
    def remembers(self) -> bool:
        """Whether the tokens so far count."""
        return self.repetition_penalty != 1

    def scores(
        self, logits: Float[Tensor, "batch d_vocab"], seen: Bool[Tensor, "batch d_vocab"] | None
    ) -> Float[Tensor, "batch d_vocab"]:
        """What is chosen from: -inf where a filter hides a token.

        Args:
            seen: True for tokens that the row's text holds; read only when there is a penalty.
        """
        if self.remembers:
            assert seen is not None
            repeated = torch.where(
                logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty
            )
            logits = torch.where(seen, repeated, logits)
        if not self.do_sample:
            return logits
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k is not None:
            logits = _top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits = _top_p(logits, self.top_p)
        return logits if self.min_p is None else _min_p(logits, self.min_p)

    def choose(
        self,
        logits: Float[Tensor, "batch d_vocab"],
        seen: Bool[Tensor, "batch d_vocab"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, " batch"]:
        """One token for each row; a draw takes its randomness from `generator` alone.

        Raises:
            RuntimeError: NaN or inf among the logits, or nothing else than -inf.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = self.scores(logits, seen)
        if not scores.max(-1).values.isfinite().all():  # NaN is the largest there is
            raise RuntimeError(
                "the logits hold NaN or inf, or nothing but -inf, so no token can be chosen: a hook or a weight made it; "
                "check_finite=True names the first point that holds one"
            )
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def _top_k(logits: Float[Tensor, "batch d_vocab"], k: int) -> Float[Tensor, "batch d_vocab"]:
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, NEVER)


def _top_p(logits: Float[Tensor, "batch d_vocab"], p: float) -> Float[Tensor, "batch d_vocab"]:
    """Summed from the unlikeliest up, as transformers does: the other way round rounds unlike."""
    rising, order = logits.sort()
    hidden = rising.softmax(-1).cumsum(-1) <= 1 - p
    hidden[:, -1] = False  # the likeliest stays, however small p is
    return logits.masked_fill(hidden.scatter(1, order, hidden), NEVER)


def _min_p(logits: Float[Tensor, "batch d_vocab"], share: float) -> Float[Tensor, "batch d_vocab"]:
    probs = logits.softmax(-1)
    best, likeliest = probs.max(-1, keepdim=True)
    hidden = (probs < share * best).scatter(1, likeliest, False)
    return logits.masked_fill(hidden, NEVER)


def generator_of(seed: int | None, device: torch.device) -> torch.Generator:
    """Randomness of its own: the same seed draws the same, no seed draws anew, and torch's global one stays as it was."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
