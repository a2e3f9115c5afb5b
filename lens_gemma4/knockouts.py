"""Attention knockout: what a metric is when some positions cannot be read from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from lens_gemma4 import interventions, sweep
from lens_gemma4.changes import real_of, word
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Edit, Intervention, Place, Unit
from lens_gemma4.metrics import Metrics


def knockout(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    *,
    sources: Any = "each",
    queries: Any = "all",
    units: Literal["heads", "attn"] = "heads",
    layers: Any = None,
    window: int = 1,
    renormalise: bool = True,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> Any:
    """A metric when some positions cannot be read from others: attention knockout.

    Args:
        sources: positions that are not read: "each" (one at a time), "all", ints, a slice or a mask `[batch pos]`.
        queries: positions that cannot read them, likewise, or "last".
        units: "heads", each by itself, or "attn", every head of a block together.
        layers: blocks; all by default.
        window: so many blocks from each on are cut together ("attn" only).
        renormalise: what remains of the pattern sums to 1, as scores of minus infinity would have it; else the entries are set to
            zero, which takes away what was read there and leaves the rest as it was.
        model, prompts, metric, batch_size, save_to, inputs: as in `ablate`.
    Returns:
        A `SweepResult` with axes `layer`, `head`, and `source` or `pos` where these are taken one at a time. Where a query does not
        see a source, nothing is cut.
    Raises:
        ValueError: a query would see nothing at all (renormalised, it has no pattern), or a position is none.
    Source: attention knockout, Geva et al. 2023, arXiv 2304.14767.

    >>> from lens_gemma4 import HookedModel, logit
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit(model.to_single_token(" Paris"))
    >>> found = knockout(model, "The capital of France is", ask, sources=[4], queries="last", units="attn")
    >>> len(found.names) == model.cfg.n_layers
    True
    """
    if units not in ("heads", "attn"):
        raise ValueError(f"units is {units!r}; a knockout is of 'heads' or 'attn'")
    if window < 1 or (window > 1 and units == "heads"):
        raise ValueError(f"window is {window}; it is 1, or more with units='attn'")
    tensors = model.prepare(prompts, **inputs)
    real = real_of(tensors)
    cuts = _cuts(sources, queries, real)
    kinds = _sighted(model, tensors, cuts) if renormalise else {}
    chosen = _attention_units(model, units, layers, window)
    variants = [
        _cut(model, unit, i, kinds, cuts, renormalise) for unit in chosen for i in range(len(cuts))
    ]
    arguments = {
        "sources": word(sources),
        "queries": word(queries),
        "units": units,
        "layers": None if layers is None else list(layers),
        "window": window,
        "renormalise": renormalise,
    }
    return sweep.sweep(
        model,
        None,
        variants,
        metric,
        batch_size=batch_size,
        save_to=save_to,
        arguments=arguments,
        **tensors,
    )


class Cut(NamedTuple):
    """Queries that do not see sources."""

    queries: Bool[Tensor, "batch pos"] | None
    sources: Bool[Tensor, "batch kv_pos"] | None
    axes: dict[str, int]


def _cuts(sources: Any, queries: Any, real: Tensor) -> list[Cut]:
    found = []
    for query, at in _each_or(queries, real):
        for source, of in _each_or(sources, real):
            axes = {} if query is None else {"pos": query}
            found.append(Cut(at, of, axes | ({} if source is None else {"source": source})))
    return found


def _each_or(positions: Any, real: Tensor) -> Iterator[tuple[int | None, Tensor | None]]:
    if isinstance(positions, str) and positions == "each":
        for p in range(real.shape[1]):
            yield p, interventions.position_mask(p, real)
    else:
        yield None, interventions.position_mask(positions, real)


def _sighted(
    model: HookedModel, tensors: Mapping[str, Any], cuts: Sequence[Cut]
) -> dict[str, list[Cut]]:
    """Cuts that leave every query something to see, for each block type: a single source that is all that a query sees stays."""
    ids, real = tensors["input_ids"], real_of(tensors).bool()
    stream = torch.empty(*ids.shape, model.cfg.d_model, device=ids.device, dtype=model.dtype)
    known = ("attention_mask", "position_ids", "mm_token_type_ids")
    masks, _ = model.sight(stream, ids, *(tensors.get(name) for name in known))
    found: dict[str, list[Cut]] = {}
    for kind, mask in masks.items():
        seen = mask.seen()[:, 0]  # [rows pos kv_pos]
        for cut in cuts:
            cut_off = seen if cut.sources is None else seen & cut.sources[:, None]
            blind = real & (seen == cut_off).all(-1)
            asked = blind if cut.queries is None else blind & cut.queries
            if "source" not in cut.axes and bool(asked.any()):
                row, position = asked.nonzero()[0].tolist()
                raise ValueError(
                    f"position {position} of prompt {row} would see nothing in {kind} blocks: renormalised, it has no pattern. "
                    "Leave it out of queries, leave a source, or use renormalise=False"
                )
            queries = ~blind if cut.queries is None else cut.queries & ~blind
            found.setdefault(kind, []).append(cut._replace(queries=queries))
    return found


def _attention_units(
    model: HookedModel, units: str, layers: Any, window: int
) -> list[tuple[Unit, list[Place]]]:
    """What is cut together: a head, or the heads of some blocks."""
    found = []
    for unit in interventions.units_of(
        "patterns" if units == "heads" else "attn", model.cfg, layers
    ):
        layer = unit.axes["layer"]
        if units == "heads":
            name, blocks = f"L{layer}H{unit.axes['head']}", [layer]
        else:
            blocks = list(range(layer, min(layer + window, model.cfg.n_layers)))
            name = f"{layer}_attn" if len(blocks) == 1 else f"{layer}-{blocks[-1]}_attn"
        head = unit.places[0].unit if units == "heads" else None
        found.append(
            (Unit(name, (), unit.axes), [Place(b, "attn.hook_pattern", head) for b in blocks])
        )
    return found


def _cut(
    model: HookedModel,
    what: tuple[Unit, list[Place]],
    number: int,
    kinds: Mapping[str, Sequence[Cut]],
    cuts: Sequence[Cut],
    renormalise: bool,
) -> Intervention:
    (unit, places), axes = what, cuts[number].axes
    name = unit.name
    name += f" @ {axes['pos']}" if "pos" in axes else ""
    name += f" <- {axes['source']}" if "source" in axes else ""
    unseen = torch.tensor(torch.finfo(model.dtype).min)
    edits = []
    for place in places:
        cut = kinds[model.cfg.layer(place.layer).kind][number] if renormalise else cuts[number]
        point = "attn.hook_attn_scores" if renormalise else "attn.hook_pattern"
        add = unseen if renormalise else None
        edits.append(Edit(place._replace(point=point), cut.queries, 0.0, add, cut.sources))
    return Intervention(name, tuple(edits), unit.axes | axes)
