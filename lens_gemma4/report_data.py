"""The numbers of a report, as one dictionary of plain values and tensors; `gather` says what is where."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4 import attribution, names, pictures, spans
from lens_gemma4.attribution import Attribution, Target
from lens_gemma4.cache import ActivationCache
from lens_gemma4.config import LayerConfig
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.maps import ablate
from lens_gemma4.question import Question
from lens_gemma4.spans import Span
from lens_gemma4.version import __version__
from lens_gemma4.watching import DIRECT, PARTS, SQUARES, WIDE, Watch

# Values that stand under two names, just before and just after nothing happens to them.
SAME = {"hook_attn_out": "ln1_post.hook_out", "hook_mlp_out": "ln2_post.hook_out"}
NEXT = 10  # likeliest next tokens that are shown
MAX_PATTERN_VALUES = 12_000_000  # of all heads together: 24 MB of a page before it is packed
MAX_PLACES = 32_768  # parts times blocks times positions of which the head is asked
STEPS = 10_000  # in one, of a pattern's shares in a page


# -- the numbers --------------------------------------------------------------------------------------


@torch.no_grad()
def gather(
    question: Question,
    ablation: str | None = "zero",
    last_only: bool = False,
    max_pattern_values: int = MAX_PATTERN_VALUES,
) -> dict[str, Any]:
    """Run, look, and return every number.

    Returns:
        `tokens` and `next` (label, id, ...); `answer` and `versus`; `blocks`; `parts` with their names, shapes by block, and
        `norms` [part layer pos]; `direct` [part layer pos] of its own list of parts; `lens` of parts, [part layer place k]; `logit_lens`
        [place pos k]; `attribution` by part, head and source; `ablation` [layer head]; `patterns` [layer head query key] and who
        is `visible` to whom; `images`; `vocabulary`, labels by id.
    Raises:
        ValueError: a run whose logits are not finite.
    """
    model, tensors = question.model, question.tensors
    positions = list(range(question.length))
    room = max(1, MAX_PLACES // (len(WIDE) * model.cfg.n_layers))
    watch = Watch(model, _toward(question), question.asked, positions[-room:])
    with model.hooks(fwd_hooks=watch.hooks()):
        _, kept = model.run_with_cache(tensors, names_filter=_needed(model))
    assert isinstance(kept, ActivationCache)
    scale = kept["ln_final.hook_scale"][0, :, 0]
    logits = kept["hook_logits"][0, -1].float()
    _check_numbers(logits, model.dtype)
    data: dict[str, Any] = {
        "version": __version__,
        "model": _model(model),
        "prompt": question.prompt,
        "tokens": _tokens(question),
        "target": question.words,
        "answer_given": question.given,
        **_readout(question, logits),
        "blocks": _blocks(model),
        "parts": _parts(model, watch),
        "norms": watch.lengths(),
        "direct": {
            "parts": list(DIRECT),
            "values": watch.direct(scale, kept.weights["layer_scalar"]),
        },
        "lens": _lens_of_parts(watch),
        "logit_lens": _logit_lens(watch, question),
        "attribution": _attribution(kept, question.target),
        "patterns": _patterns(kept, question.length, max_pattern_values),
        "visible": _visible(question),
    }
    del kept
    data["ablation"] = _ablation(question, ablation, last_only)
    data["images"] = _images(question, ablation is not None)
    data["vocabulary"] = _vocabulary(question, data)
    return data


def _check_numbers(logits: Float[Tensor, " d_vocab"], dtype: torch.dtype) -> None:
    """Refuse a run that overflowed: no token has a rank among numbers that are none.

    Raises:
        ValueError: logits that are not finite.
    """
    if lost := int((~logits.isfinite()).sum()):
        raise ValueError(
            f"{lost} of {len(logits)} logits at the last position are not finite ({dtype}), so there is nothing to report: "
            "model(prompt, check_finite=True) names the first value that is not; float16 overflows where bfloat16 does not"
        )


def _toward(question: Question) -> Float[Tensor, " d_model"]:
    """Of the final norm's input, before its scale: columns of the unembedding times that norm's gain."""
    weights = question.model.attribution_weights()
    columns = [weights["W_U"][:, token].double() for token in question.asked]
    direction = columns[0] if len(columns) == 1 else columns[0] - columns[1]
    return direction * weights["ln_final"].double()


def _needed(model: HookedModel) -> list[str]:
    wanted = {
        name
        for by in ("part", "head", "source")
        for name in attribution.needed(by, model.cfg, model.dtype)
    }
    return sorted({*wanted, "hook_logits", "hook_logits_raw", "ln_final.hook_scale"})


def _model(model: HookedModel) -> dict[str, Any]:
    cfg = model.cfg
    return {
        "type": cfg.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "d_model": cfg.d_model,
        "d_vocab": cfg.d_vocab,
        "soft_cap": cfg.output_logits_soft_cap,
    }


def _tokens(question: Question) -> list[dict[str, Any]]:
    """Each position's id and label, patches of images by their places."""
    places = spans.media_labels(question.tensors.spans, 0)
    ids = question.tensors["input_ids"][0].tolist()
    return [
        {"id": token, "label": places.get(i) or question.label(token), "media": i in places}
        for i, token in enumerate(ids)
    ]


def _readout(question: Question, logits: Float[Tensor, " d_vocab"]) -> dict[str, Any]:
    """The answer, what it is compared with, and the likeliest tokens, at the last position."""
    probs = logits.softmax(-1)

    def told(token: int) -> dict[str, Any]:
        return {
            "id": token,
            "label": question.label(token),
            "logit": logits[token].item(),
            "probability": probs[token].item(),
            "rank": int((logits > logits[token]).sum()),
        }

    likeliest = logits.topk(min(NEXT, len(logits))).indices.tolist()
    return {
        "answer": told(question.answer),
        "versus": None if question.versus is None else told(question.versus),
        "next": [told(token) for token in likeliest],
    }


def _blocks(model: HookedModel) -> list[dict[str, Any]]:
    scalars = [float(scalar) for scalar in model.attribution_weights()["layer_scalar"]]
    gains = attribution.residual_gain([torch.tensor(s) for s in scalars]).tolist()
    return [
        {**_sizes(layer), "layer_scalar": scalar, "gain": gain}
        for layer, scalar, gain in zip(model.cfg.layers, scalars, gains, strict=True)
    ]


def _sizes(layer: LayerConfig) -> dict[str, Any]:
    words = "kind window n_heads n_key_value_heads d_head d_mlp k_eq_v lender".split()
    return {word: getattr(layer, word) for word in words}


def _parts(model: HookedModel, watch: Watch) -> list[dict[str, Any]]:
    """Each part's names, what it is, and its shape in each block, or why it is not there."""
    found = []
    for part in PARTS:
        row = names.BY_NAME[f"blocks.{{i}}.{part}"]
        twin = names.BY_NAME[f"blocks.{{i}}.{SAME[part]}"] if part in SAME else None
        why = [names.absent(row, model.cfg, layer) for layer in model.cfg.layers]
        found.append(
            {
                "part": part,
                "name": row.name,
                "same": [] if twin is None else [twin.name],
                "standard": list(row.standard),
                "transformers": row.hf or (twin.hf if twin else ""),
                "axes": row.axes,
                "meaning": row.meaning,
                "shapes": [_shape(model, watch, part, layer) for layer in model.cfg.layers],
                "absent": why,
            }
        )
    return found


def _shape(model: HookedModel, watch: Watch, part: str, layer: LayerConfig) -> list[int] | None:
    if part in SQUARES:
        pos = watch.shapes[f"blocks.{layer.index}.hook_resid_pre"][1]
        return [1, layer.n_heads, pos, pos]
    return watch.shapes.get(f"blocks.{layer.index}.{part}")


def _lens_of_parts(watch: Watch) -> dict[str, Any]:
    return {
        "parts": list(WIDE),
        "positions": list(watch.positions),
        "ids": watch.said("top_ids"),
        "logits": watch.said("top_logits"),
        "probabilities": watch.said("top_logprobs").exp(),
        "answer_ranks": watch.said("token_ranks")[..., 0],
    }


def _logit_lens(watch: Watch, question: Question) -> dict[str, Any]:
    return {
        "places": ["input", *map(str, range(question.model.cfg.n_layers))],
        "ids": watch.lens("top_ids"),
        "logits": watch.lens("top_logits"),
        "probabilities": watch.lens("top_logprobs").exp(),
        "asked": question.asked,
        "ranks": watch.lens("token_ranks"),  # [place pos token]
        "asked_logits": watch.lens("token_logits"),
        "asked_probabilities": watch.lens("token_logprobs").exp(),
    }


# -- attribution, ablation ----------------------------------------------------------------------------


def _attribution(cache: ActivationCache, target: Target) -> dict[str, Any]:
    """At the last position: by part, by head, and by head and source."""
    part, head, source = (
        attribution.BY[by](cache, target, "last") for by in ("part", "head", "source")
    )
    return {
        "unit": "logit before the softcap",
        "parts": {"names": part.labels["part"], "values": part.values[:, 0, 0].cpu()} | _sums(part),
        "heads": {"values": head.values[:, :, 0, 0].cpu()} | _sums(head),
        "sources": {"values": source.values[:, :, 0, 0].cpu()} | _sums(source),
    }


def _sums(found: Attribution) -> dict[str, Any]:
    return {
        "others": {name: value.item() for name, value in found.others.items()},
        "sum": found.sum().item(),
        "own": found.actual.item(),
        "remainder": found.remainder.item(),
    }


def _ablation(question: Question, mode: str | None, last_only: bool) -> dict[str, Any] | None:
    if mode is None:
        return None
    model, where = question.model, "last" if last_only else "all"
    found = ablate(
        model, question.tensors, question.metric(), units="heads", mode=mode, positions=where
    )
    return {
        "mode": mode,
        "positions": where,
        "metric": found.metric,
        "baseline": found.baseline.item(),
        "effects": found.effect[:, 0].view(model.cfg.n_layers, -1).cpu(),
    }


# -- patterns and pictures ----------------------------------------------------------------------------


def _patterns(cache: ActivationCache, length: int, room: int) -> dict[str, Any]:
    """The patterns of as many of the last queries as there is room for, moved block by block."""
    cfg = cache.cfg
    kept = max(1, min(length, room // (cfg.n_layers * cfg.n_heads * length)))
    values = torch.stack(
        [cache["pattern", i][0, :, length - kept :].float().cpu() for i in range(cfg.n_layers)]
    )
    return {"queries": list(range(length - kept, length)), "values": values}


def _visible(question: Question) -> dict[str, Tensor]:
    """Which key each query sees, by kind of block."""
    model = question.model
    kinds = sorted({layer.kind for layer in model.cfg.layers})
    return {
        kind: pictures.visible(model, question.tensors, kind, model.image_mask)[0] for kind in kinds
    }


def _images(question: Question, with_ablation: bool) -> list[dict[str, Any]]:
    found = [span for span in question.tensors.spans if span.kind == "image"]
    if not found:
        return []
    effects = _without_patches(question) if with_ablation else {}
    return [
        {
            "name": span.name,
            "positions": span.positions.tolist(),
            "grid": span.grid.tolist(),
            "columns": span.shape[0],
            "rows": span.shape[1],
            "size": span.size,
            "picture": _address(question, span),
            "ablation": effects.get(span.number),
        }
        for span in found
        if span.grid is not None
    ]


def _without_patches(question: Question) -> dict[int, list[float]]:
    """By image, what each patch's zeroing does to the asked number, in the order of its tokens."""
    result = ablate(question.model, question.tensors, question.metric(), units="patches")
    at = {(one["image"], one["x"], one["y"]): i for i, one in enumerate(result.at)}
    effect = result.effect[:, 0].tolist()
    return {
        span.number: [effect[at[span.number, x, y]] for x, y in span.grid.tolist()]
        for span in question.tensors.spans
        if span.kind == "image" and span.grid is not None
    }


def _address(question: Question, span: Span) -> str:
    """The picture as the model got it, inside its own address."""
    file = io.BytesIO()
    pictures.as_seen(question.tensors, span).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# -- words --------------------------------------------------------------------------------------------


def _vocabulary(question: Question, data: Mapping[str, Any]) -> dict[int, str]:
    """Labels of every id that the page names."""
    named: Iterable[Int[Tensor, "*axes"]] = (data["lens"]["ids"], data["logit_lens"]["ids"])
    ids = torch.cat([one.flatten().long() for one in named]).unique().tolist()
    return {token: question.label(token) for token in {*ids, *question.asked}}
