"""Edge attribution: what every sender writes and every receiver reads, scored to first order by one backward pass.

Senders and receivers are those of path patching (`paths`), which `verify` runs for the largest edges.
Sources: edge attribution patching, Syed et al. 2023, arXiv 2310.10348; gradients averaged on the way from one run to the
other, Hanna et al. 2024, arXiv 2403.17806.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import metrics, plots, sweep
from lens_gemma4.estimates import Estimate, largest
from lens_gemma4.gradients import (
    START,
    GradientRun,
    baselines,
    by_prompt,
    readings_of,
    shares,
    two_runs,
    wide,
)
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention
from lens_gemma4.metrics import Metrics, Reading
from lens_gemma4.model import Block
from lens_gemma4.norms import RMSNorm
from lens_gemma4.paths import WRITES, hooks_of, path_patched, receivers_of, senders_of
from lens_gemma4.results import SweepResult

# -- to first order, all edges ------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Edges:
    """A first-order score of every edge.

    Args:
        senders, receivers: names.
        scores: `[sender receiver batch]`, by how much the metric would change; nan where a sender writes after a receiver reads.
        baseline, source: `[batch]`, the metric in the run that is changed, and in the other.
        metric: its name.
    """

    senders: list[str]
    receivers: list[str]
    scores: Float[Tensor, "sender receiver batch"]
    baseline: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    metric: str
    _exact: Callable[[list[tuple[int, int]]], SweepResult] = field(repr=False)

    def mean(self) -> Float[Tensor, "sender receiver"]:
        """Scores averaged over prompts."""
        return self.scores.mean(-1)

    def top(self, k: int = 10) -> list[tuple[str, str, float]]:
        """The k largest mean scores, whichever their sign: sender, receiver, score."""
        mean = self.mean()
        return [(self.senders[s], self.receivers[r], float(mean[s, r])) for s, r in self._top(k)]

    def _top(self, k: int) -> list[tuple[int, int]]:
        mean = self.mean()
        there = (~mean.isnan()).nonzero()
        chosen = largest(mean[there[:, 0], there[:, 1]], k)
        return [(s, r) for s, r in there[chosen].tolist()]

    def to_dataframe(self) -> Any:
        """A pandas row for each edge and prompt: `sender receiver prompt score`."""
        import pandas as pd

        s, r = (~self.mean().isnan()).nonzero(as_tuple=True)
        batch = self.scores.shape[-1]
        return pd.DataFrame(
            {
                "sender": [self.senders[i] for i in s.tolist() for _ in range(batch)],
                "receiver": [self.receivers[i] for i in r.tolist() for _ in range(batch)],
                "prompt": list(range(batch)) * len(s),
                "score": self.scores[s, r].flatten().cpu().numpy(),
            }
        )

    def plot(self, k: int = 30) -> Any:
        """A plotly map of the senders and receivers that the k largest edges join."""
        pairs = self._top(k)
        rows, columns = sorted({s for s, _ in pairs}), sorted({r for _, r in pairs})
        return plots.heatmap(
            self.mean()[rows][:, columns].tolist(),
            [self.senders[s] for s in rows],
            [self.receivers[r] for r in columns],
            row_title="sender",
            column_title="receiver",
            unit=f"change of {self.metric}",
        )

    def verify(self, k: int = 50) -> Estimate:
        """The k largest edges, each patched exactly: an `Estimate` of all edges that says how well they were ranked.

        Raises:
            ValueError: k is none.
        """
        if k < 1:
            raise ValueError(f"k is {k}; one edge is the fewest")
        pairs, there = self._top(k), (~self.mean().isnan()).nonzero()
        exact = self._exact(pairs)
        place = {pair: i for i, pair in enumerate(map(tuple, there.tolist()))}
        return Estimate(
            [f"{self.senders[s]} -> {self.receivers[r]}" for s, r in place],
            [{} for _ in place],
            self.baseline + self.scores[there[:, 0], there[:, 1]],
            self.baseline,
            self.metric,
            self.source,
            exact.tokens,
            exact.plan,
            exact=exact,
            verified=tuple(place[pair] for pair in pairs),
        )

    def __repr__(self) -> str:
        best = ", ".join(f"{s} -> {r} {score:+.3g}" for s, r, score in self.top(3))
        n = int((~self.mean().isnan()).sum())
        return f"Edges: {n}, {self.scores.shape[-1]} prompt(s): {self.metric}; largest {best}"


@torch.inference_mode(False)
def edge_attribution(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metrics,
    *,
    direction: Literal["denoise", "noise"] = "denoise",
    steps: int = 1,
) -> Edges:
    """First-order score of every edge: what `path_patch` of it would do to the metric.

    A sender's write in the other run minus that in the base run (through the norm after the attention, to first order), times
    the layer scalars on the way, times the metric's gradient with respect to the stream as this receiver alone reads it. A
    sender's scores sum to what `attribution_patch` gives for it at all positions.

    Args:
        clean, corrupted, metric, direction, steps: as in `attribution_patch`; one metric.
    Returns:
        `Edges`; `verify(k)` patches the largest exactly. Equal prompts give exactly 0.
    Raises:
        ValueError: a metric without a gradient, or prompts that cannot be patched.
    Source: arXiv 2310.10348; with steps, arXiv 2403.17806.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit_difference(*(model.to_single_token(word) for word in (" Paris", " Rome")))
    >>> found = edge_attribution(model, "The capital of France is", "The capital of Italy is", ask)
    >>> found.senders[:2], found.receivers[-1], len(found.verify(5).exact.names)
    (['embed', 'L0H0'], 'logits', 5)
    """
    given, base = two_runs(model, clean, corrupted, direction)
    sweep.check(model, [Intervention("", ())])
    measured = metrics.named(metric)
    if len(measured) > 1:
        raise ValueError(f"edges are of one metric, got {list(measured)}")
    (name,) = measured
    own, writes = hooks_of(model.cfg, *_OWN), hooks_of(model.cfg, *WRITES)
    other = GradientRun(model, given, [START, *writes]).freed()
    run = GradientRun(model, base, sorted({*writes, *own}))
    reading = readings_of(model, base, run.final.detach(), measured, steps)[name]
    values = run.values
    differences = {hook: wide(other.values[hook]) - wide(values[hook]) for hook in other.values}

    def at(share: float) -> Tensor:
        way = run if steps == 1 else GradientRun(model, base, own, other.values[START], share)
        return _Scores(model, way, reading, differences).all()

    scores = torch.stack([at(share) for share in shares(steps)]).mean(0)
    senders, receivers = senders_of(model.cfg), receivers_of(model.cfg)

    def exact(pairs: list[tuple[int, int]]) -> SweepResult:
        chosen = [(senders[s], [receivers[r]]) for s, r in pairs]
        return path_patched(model, given, base, measured, chosen, None)[name]

    return Edges(
        [node.name for node in senders],
        [node.name for node in receivers],
        by_prompt(scores, reading).to(reading.dtype),
        reading.baseline[0],
        baselines(model, given, other, measured)[name],
        name,
        exact,
    )


# What the closed forms need of a run, beside its gradients.
_OWN = (
    *("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.k_norm.hook_out", "attn.hook_v"),
    *("attn.hook_out", "hook_resid_mid", "ln2.hook_out"),
)
_GRADIENTS = ("attn.hook_q", "attn.k_norm.hook_out", "attn.hook_v", "ln2.hook_out")


def push(
    norm: RMSNorm, x: Float[Tensor, "*axes d"], change: Float[Tensor, "*more d"]
) -> Float[Tensor, "*more d"]:
    """A norm's output changes by this much, to first order, when its input `x` changes."""
    x, scale = _of_norm(norm, x)
    along = (x * change).mean(-1, keepdim=True) / scale**2
    return _gained(norm, change - x * along) / scale


def pull(
    norm: RMSNorm, x: Float[Tensor, "*axes d"], gradient: Float[Tensor, "*more d"]
) -> Float[Tensor, "*more d"]:
    """The gradient with respect to a norm's input `x`, from that with respect to its output."""
    x, scale = _of_norm(norm, x)
    gradient = _gained(norm, gradient)
    along = (x * gradient).mean(-1, keepdim=True) / scale**2
    return (gradient - x * along) / scale


def _of_norm(norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    x = wide(x)
    return x, (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()


def _gained(norm: RMSNorm, value: Tensor) -> Tensor:
    return wide(value) if norm.weight is None else wide(value) * wide(norm.weight)


class _Scores:
    """Every edge's score in one run.

    Args:
        differences: by how much each sender's value differs between the two runs, under its hook name.
    """

    def __init__(
        self,
        model: HookedModel,
        run: GradientRun,
        reading: Reading,
        differences: Mapping[str, Tensor],
    ) -> None:
        self.model, self.values, self.differences = model, run.values, differences
        self.gradients, self.final = run.gradients(reading, hooks_of(model.cfg, *_GRADIENTS))

    @torch.no_grad()
    def all(self) -> Float[Tensor, "sender receiver batch"]:
        """Writes are carried up the stream, so that at each reading place they stand as they are read."""
        senders, receivers = len(senders_of(self.model.cfg)), len(receivers_of(self.model.cfg))
        start = self.differences[START]
        self.writes = start.new_zeros(senders, *start.shape)
        self.scores = start.new_full((senders, receivers, len(start)), torch.nan)
        self.sent = self.received = 0
        self._send(start[None])
        for block in self.model.blocks:
            self._receive(self._by_attention(block))
            self._send(self._of_heads(block))
            self._receive(self._by_mlp(block))
            self._send(self._difference(block, "hook_mlp_out")[None])
            self.writes[: self.sent] *= wide(block.layer_scalar)
        self._receive(wide(self.final)[None])
        return self.scores

    def _send(self, writes: Float[Tensor, "node batch pos d_model"]) -> None:
        self.writes[self.sent : self.sent + len(writes)] = writes
        self.sent += len(writes)

    def _receive(self, gradients: Float[Tensor, "node batch pos d_model"]) -> None:
        columns = slice(self.received, self.received + len(gradients))
        self.scores[: self.sent, columns] = torch.einsum(
            "sbpm,rbpm->srb", self.writes[: self.sent], gradients
        )
        self.received += len(gradients)

    def _difference(self, block: Block, point: str) -> Tensor:
        return self.differences[f"blocks.{block.cfg.index}.{point}"]

    def _value(self, block: Block, point: str) -> Tensor:
        return self.values[f"blocks.{block.cfg.index}.{point}"]

    def _gradient(self, block: Block, point: str) -> Tensor:
        return wide(self.gradients[f"blocks.{block.cfg.index}.{point}"])

    def _of_heads(self, block: Block) -> Float[Tensor, "head batch pos d_model"]:
        """What each head's difference adds to the stream: the norm after the attention sees all heads together."""
        z = self._difference(block, "attn.hook_z")
        before = torch.einsum("bphd,hdm->hbpm", z, wide(block.attn.W_O))
        return push(block.ln1_post, self._value(block, "attn.hook_out"), before)

    def _by_attention(self, block: Block) -> Float[Tensor, "node batch pos d_model"]:
        """Gradients with respect to the stream as each head's queries, keys and values read it."""
        attn = block.attn
        found = [(self._gradient(block, "attn.hook_q"), attn.W_Q)]
        if block.cfg.lender is None:
            keys = self._gradient(
                block, "attn.k_norm.hook_out"
            )  # of keys alone, also where they are values too
            found.append((pull(attn.k_norm, self._value(block, "attn.hook_k"), keys), attn.W_K))
            found.append((self._gradient(block, "attn.hook_v"), attn.W_V))
        by_head = [torch.einsum("bphd,hmd->hbpm", g, wide(w)) for g, w in found]
        return pull(block.ln1, self._value(block, "hook_resid_pre"), torch.cat(by_head))

    def _by_mlp(self, block: Block) -> Float[Tensor, "node batch pos d_model"]:
        read = self._gradient(block, "ln2.hook_out")
        return pull(block.ln2, self._value(block, "hook_resid_mid"), read)[None]
