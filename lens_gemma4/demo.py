"""The main job, `lens-gemma4 demo`: why a model goes on with one token rather than another.

On a prompt: the next tokens, the logit lens block by block, which head and MLP wrote the difference between two
tokens' logits, and what ablating each head does to it; printed, and as one page.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4 import attribution, outputs, plots
from lens_gemma4.attribution import Target
from lens_gemma4.cache import ActivationCache
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.maps import ablate
from lens_gemma4.metrics import logit_difference
from lens_gemma4.plots import Section, Table

PROMPT = "The capital of France is"
PAGE = "demo.html"
WIDTH = 100  # of printed text
SHOWN = 10  # rows of a table that could be long


@dataclass(frozen=True)
class Question:
    """Why `answer` rather than `versus` after the prompt? Both are token ids."""

    tokens: Int[Tensor, "1 pos"]
    answer: int
    versus: int
    answer_name: str
    versus_name: str

    @property
    def difference(self) -> str:
        return f"{self.answer_name} minus {self.versus_name}"


def run(
    prompt: str = PROMPT,
    answer: str | None = None,
    versus: str | None = None,
    model: str = "tiny",
    device: str | None = None,
    dtype: str | None = None,
    output: str | Path = PAGE,
) -> Path:
    """Answer the question on a model, print what was found, and write the page.

    Args:
        prompt: any text.
        answer, versus: each one token, its leading space included (" Paris"); by default the model's first choices.
        model: a Hub id, a folder, or "tiny", the checkpoint that ships with the package.
        device, dtype: by default the CPU and the checkpoint's own.
        output: the page. A page that this command wrote is overwritten, another file is not.
    Returns:
        Where the page is.
    Raises:
        ValueError: an empty prompt, a text of several tokens, a device that cannot be used.
        OSError: no such model; no place for the page.
        ImportError: plotly is missing.
    """
    plots.require()
    place = outputs.place(Path(output), PAGE)
    if not prompt:
        raise ValueError(
            "the prompt is empty: give some text, e.g. --prompt 'The capital of France is'"
        )
    loaded = HookedModel.from_pretrained(model, device=outputs.device(device), dtype=dtype)
    with torch.no_grad():
        question, cache = ask(loaded, prompt, answer, versus)
        sections = [
            next_tokens(loaded, question, cache),
            lens(loaded, question, cache),
            written_by(loaded, question, cache),
            ablations(loaded, question),
        ]
    title = f"{prompt!r}: why {question.answer_name} rather than {question.versus_name}?"
    intro = f"{model}, {str(loaded.dtype).removeprefix('torch.')} on {loaded.device}; {question.tokens.shape[1]} tokens, the last one asked."
    print(f"{title}\n{intro}")
    for section in sections:
        tell(section)
    outputs.write(place, plots.page(title, sections, intro))
    print(f"\nThe same with plots: {place}")
    return place


def tell(section: Section) -> None:
    """Print a section: its words and its tables."""
    text = textwrap.fill(section.text, WIDTH, break_long_words=False)
    print(f"\n{section.heading}\n{'-' * len(section.heading)}\n{text}")
    for item in section.content:
        if isinstance(item, Table):
            print(f"\n{item.text()}")


# -- the question -------------------------------------------------------------------------------------


def ask(
    model: HookedModel, prompt: str, answer: str | None = None, versus: str | None = None
) -> tuple[Question, ActivationCache]:
    """Fix the two tokens, and run the prompt once, keeping what the sections read at the last position.

    Raises:
        ValueError: a text that is not one token, or one token twice.
    """
    chosen = [None if text is None else model.to_single_token(text) for text in (answer, versus)]
    if chosen[0] is not None and chosen[0] == chosen[1]:
        raise ValueError(f"answer and versus are both {answer!r}: give two tokens to compare")
    tokens = model.to_tokens(prompt)
    kept = {"blocks.*.hook_resid_post", "hook_logits_raw", "hook_logits"}
    kept |= {
        name for by in ("part", "head") for name in attribution.needed(by, model.cfg, model.dtype)
    }
    _, cache = model.run_with_cache(tokens, names_filter=sorted(kept), pos_slice=[-1])
    assert isinstance(cache, ActivationCache)
    likeliest = iter(i for i in cache["logits"][0, -1].topk(4).indices.tolist() if i not in chosen)
    answer_id, versus_id = (next(likeliest) if token is None else token for token in chosen)
    return Question(
        tokens, answer_id, versus_id, named(model, answer_id), named(model, versus_id)
    ), cache


def named(model: HookedModel, token: int) -> str:
    """A token in quotes, its space seen; a place in the vocabulary that no text fills by its number."""
    text = model.to_single_str_token(token)
    return repr(text) if text else f"token {token}"


# -- what the page shows ------------------------------------------------------------------------------


def next_tokens(model: HookedModel, question: Question, cache: ActivationCache) -> Section:
    """The likeliest next tokens, and where the two of the question stand."""
    logits = cache["logits"][0, -1].float()
    probs = logits.softmax(-1)
    likeliest = logits.topk(min(SHOWN, len(logits))).indices.tolist()
    ids = list(dict.fromkeys([*likeliest, question.answer, question.versus]))
    rows = Table(
        {
            "token": [named(model, i) for i in ids],
            "id": ids,
            "rank": [rank_of(logits, i) for i in ids],
            "logit": logits[ids].tolist(),
            "probability": probs[ids].tolist(),
        }
    )
    return Section(
        "Next token", "What the model would go on with; rank 0 is its first choice.", [rows]
    )


def rank_of(logits: Float[Tensor, " d_vocab"], token: int) -> int:
    """How many tokens are likelier."""
    return int((logits > logits[token]).sum())


def lens(model: HookedModel, question: Question, cache: ActivationCache) -> Section:
    """The logit lens: what the head would say of the stream after each block."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "after",
            "first choice",
            "its probability",
            "rank of answer",
            "P(answer)",
            "P(versus)",
            "difference",
        )
    }
    chosen: dict[str, Any] = {"top_k": 1, "tokens": [question.answer, question.versus], "kl": False}
    before = model.logit_lens(cache, points="resid_pre", layers=0, **chosen)
    for seen in (before, model.logit_lens(cache, **chosen)):
        for i, place in enumerate(seen.places):
            here = i, 0, -1
            answer, versus = seen.token_logits[here].tolist()
            row = (
                "input" if seen is before else f"block {place.layer}",
                named(model, int(seen.top_ids[here][0])),
                seen.top_probs[here][0].item(),
                int(seen.token_ranks[here][0]),
                *seen.token_probs[here].tolist(),
                answer - versus,
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    figure = plots.bars(
        columns["difference"],
        columns["after"],
        title="after",
        unit=f"logit of {question.difference}",
    )
    text = (
        "The stream at the last position after each block, through the final norm (recomputed there), the head and "
        f"the softcap. The difference is the logit of {question.difference}."
    )
    return Section("Logit lens", text, [Table(columns), figure])


def written_by(model: HookedModel, question: Question, cache: ActivationCache) -> Section:
    """Direct logit attribution of the difference, with the remainder."""
    target = Target(question.answer, question.versus)
    by_head = attribution.by_head(cache, target, positions=-1)
    by_part = attribution.by_part(cache, target, positions=-1)
    heads = by_head.values[..., 0, -1]  # [layer head]
    mlps = by_part.values[2::2, 0, -1]  # [layer]: after the input, attentions and MLPs take turns
    sums = {
        "input (embeddings)": by_head.others["0_pre"],
        "all heads": heads.sum(),
        "all MLPs": by_head.others["mlps"],
        **({"rounding": by_head.others["rounding"]} if "rounding" in by_head.others else {}),
        "sum of the parts": by_head.sum(),
        "the model's own": by_head.actual,
        "remainder": by_head.remainder,
    }
    summary = Table({"part": list(sums), "contribution": [value.item() for value in sums.values()]})
    every = head_names(heads) | {f"MLP {i}": value for i, value in enumerate(mlps.tolist())}
    text = (
        f"What each part wrote along {question.difference}, in logits before the softcap. The post-norms and the final "
        "norm are held at this run's scales, and what a block wrote is counted times every layer_scalar it passed, so "
        "the parts add up; the remainder is rounding (below float32, the run's own rounding is a part of its own)."
    )
    start = {"input": sums["input (embeddings)"].item()} | {
        f"MLP {i}": value for i, value in enumerate(mlps.tolist())
    }
    return Section(
        "Who wrote the difference",
        text,
        [
            summary,
            largest(every, "contribution"),
            head_map(heads, "logit"),
            plots.bars(list(start.values()), list(start), unit="logit"),
        ],
        numbers=Table({"part": list(every), "contribution": list(every.values())}),
    )


def ablations(model: HookedModel, question: Question) -> Section:
    """What the difference loses or gains without each head."""
    clean, effects = ablate_heads(model, question)
    every = head_names(effects)
    text = (
        f"How the pre-softcap logit of {question.difference}, {clean:.4f}, changes when one head's output (z) is zeroed "
        "at every position: below zero, the head spoke for the answer. All later blocks answer to the change, and the "
        "block's post-norm rescales its other heads, so effects need not add up."
    )
    return Section(
        "Without each head",
        text,
        [largest(every, "change"), head_map(effects, "change")],
        numbers=Table({"head": list(every), "change": list(every.values())}),
    )


def ablate_heads(
    model: HookedModel, question: Question
) -> tuple[float, Float[Tensor, "layer head"]]:
    """The clean pre-softcap logit difference at the last position, and its change without each head."""
    metric = logit_difference(question.answer, question.versus, raw=True)
    found = ablate(model, question.tokens, metric)
    return found.baseline.item(), found.effect[:, 0].view(model.cfg.n_layers, -1)


# -- by head ------------------------------------------------------------------------------------------


def head_names(values: Float[Tensor, "layer head"]) -> dict[str, float]:
    """Values by "L3H1"."""
    return {
        f"L{i}H{j}": value for i, row in enumerate(values.tolist()) for j, value in enumerate(row)
    }


def head_map(values: Float[Tensor, "layer head"], unit: str) -> Any:
    rows, columns = ([str(i) for i in range(n)] for n in values.shape)
    return plots.heatmap(
        values.tolist(), rows, columns, row_title="block", column_title="head", unit=unit
    )


def largest(values: dict[str, float], unit: str) -> Table:
    """The entries furthest from zero."""
    ordered = sorted(values.items(), key=lambda item: -abs(item[1]))[:SHOWN]
    return Table(
        {
            f"largest {len(ordered)}": [name for name, _ in ordered],
            unit: [value for _, value in ordered],
        }
    )
