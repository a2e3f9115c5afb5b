"""TransformerLens's patching functions, by name: a clean run's values put into a corrupted run, one place at a time.

The `get_act_patch_*` functions are sweeps (`sweep`), so the metric is given `metrics.Logits`, a tensor that computes what
it is asked for. `generic_activation_patch` runs any setter, one whole run for each place: the slow way.

Where this family asks for something else than TransformerLens does:

- queries and keys are patched after their norm and rotation and values after theirs (`hook_rot_q`, `hook_rot_k`,
  `v_norm.hook_out`): the same effect at the same position, and keys apart from values where one projection makes both.
- blocks may have unlike numbers of key/value heads: what a block does not have is nan.
- a number for each prompt is as good a metric as one for the batch: the mean over prompts is what is returned.

>>> from lens_gemma4 import HookedModel
>>> model = HookedModel.from_pretrained("tiny")
>>> clean, corrupted = (model.to_tokens(f"The capital of {one} is") for one in ("France", "Italy"))
>>> _, cache = model.run_with_cache(clean)
>>> answers = [model.to_single_token(word) for word in (" Paris", " Rome")]
>>> metric = lambda logits: (logits[:, -1, answers[0]] - logits[:, -1, answers[1]]).mean()
>>> found = get_act_patch_resid_pre(model, corrupted, cache, metric)  # [layer pos]
>>> found.shape == (model.cfg.n_layers, corrupted.shape[1])
True
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import interventions, sweep
from lens_gemma4.errors import Unavailable
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Edit, Intervention
from lens_gemma4.metrics import Measure
from lens_gemma4.patch_loop import (
    clean_values,
    generic_activation_patch,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
    make_df_from_ranges,
)
from lens_gemma4.results import SweepResult

__all__ = [
    "generic_activation_patch",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "make_df_from_ranges",
]

Metrics = Measure | Mapping[str, Measure]


class _Map(NamedTuple):
    """What is patched, and the axes of the table, in TransformerLens's order and words."""

    units: str
    axes: tuple[str, ...]


_BLOCK, _HEAD, _AT = ("layer", "pos"), ("layer", "head"), ("layer", "pos", "head")
_TO = ("layer", "head", "dest_pos")


def _run(
    model: HookedModel,
    corrupted_tokens: Any,
    clean_cache: Mapping[Any, Tensor],
    patching_metric: Metrics,
    maps: Sequence[_Map],
    batch_size: int | None,
    inputs: Mapping[str, Any],
) -> list[dict[str, SweepResult]]:
    """Each map's results by metric, all maps in one sweep."""
    tensors = model.prepare(corrupted_tokens, **inputs)
    variants = [_variants(model, tensors, clean_cache, one) for one in maps]
    found = sweep.sweep(
        model,
        None,
        [one for part in variants for one in part],
        patching_metric,
        batch_size=batch_size,
        arguments={"patched": [list(one) for one in maps]},
        **tensors,
    )
    by_metric = found if isinstance(found, dict) else {"": found}
    ends = list(itertools.accumulate((len(part) for part in variants), initial=0))
    return [
        {name: one.part(slice(first, last)) for name, one in by_metric.items()}
        for first, last in itertools.pairwise(ends)
    ]


def _variants(
    model: HookedModel, tensors: Mapping[str, Any], cache: Mapping[Any, Tensor], what: _Map
) -> list[Intervention]:
    """A variant for each cell."""
    units, ids = interventions.units_of(what.units, model.cfg), tensors["input_ids"]
    hooks = [place.hook for unit in units for place in unit.places]
    values = clean_values(cache, list(dict.fromkeys(hooks)), ids.shape)
    every = [interventions.replaced(unit, values) for unit in units]
    if len(what.axes) == 2 and "head" in what.axes:
        return every
    each = interventions.at_each_position(every, len(ids), ids.shape[1], ids.device)
    return _each_source(each, values, ids) if "src_pos" in what.axes else each


def _each_source(
    each: Sequence[Intervention], values: Mapping[str, Tensor], ids: Tensor
) -> list[Intervention]:
    """Patterns' rows, entry by entry."""
    masks = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    later = {hook: value.any(0).any(0).tolist() for hook, value in values.items()}
    found = []
    for one in each:
        (edit,), to = one.edits, one.axes["pos"]
        for source, mask in enumerate(masks):
            edits: tuple[Edit, ...] = (
                replace(edit, sources=mask.expand(len(ids), len(masks)).contiguous()),
            )
            if source > to and later[edit.where.hook][to][source]:
                # Seen where the clean run has an image and the corrupted one may have none: then the engine would
                # begin at the source, so an edit that changes nothing says that the row changes.
                edits += (replace(edit, scale=1.0, add=None),)
            name = f"{one.name} <- {source}"
            found.append(Intervention(name, edits, one.axes | {"source": source}))
    return found


# -- TransformerLens's functions ----------------------------------------------------------------------


def _returned(
    found: Mapping[str, SweepResult],
    patching_metric: Metrics,
    make: Callable[[SweepResult], Any],
) -> Any:
    """One thing, or that of each metric."""
    made = {name: make(one) for name, one in found.items()}
    return made if isinstance(patching_metric, Mapping) else made[""]


def _table(found: SweepResult, axes: Sequence[str]) -> Float[Tensor, "*axes"]:
    """The metric, averaged over prompts, on a map's axes."""
    grid = found.grid(found.values.mean(1))  # [layer head pos source], as far as there are such
    return grid.transpose(1, 2) if tuple(axes) == _AT else grid


def _function(name: str, what: _Map, of: str) -> Callable[..., Any]:
    """The function of a map."""

    def get_act_patch(
        model: HookedModel,
        corrupted_tokens: Any,
        clean_cache: Mapping[Any, Tensor],
        patching_metric: Metrics,
        return_index_df: bool = False,
        *,
        reduce: str = "scalar",
        baseline: bool = False,
        batch_size: int | None = None,
        **inputs: Any,
    ) -> Any:
        _check_reduce(reduce)
        (found,) = _run(
            *(model, corrupted_tokens, clean_cache, patching_metric, [what], batch_size, inputs)
        )
        if reduce == "none" or baseline:
            return _returned(found, patching_metric, lambda one: one)
        table = _returned(found, patching_metric, lambda one: _table(one, what.axes))
        if not return_index_df:
            return table
        sizes = next(iter(table.values())) if isinstance(table, dict) else table
        return table, make_df_from_ranges(list(sizes.shape), what.axes)

    get_act_patch.__name__ = get_act_patch.__qualname__ = f"get_act_patch_{name}"
    get_act_patch.__doc__ = f"""The metric of the corrupted run with {of} from the clean run, `[{" ".join(what.axes)}]`.

    Args:
        corrupted_tokens: ids `[batch pos]`, or whatever else `forward` takes; `inputs` go with them (`attention_mask`, ...).
        clean_cache: of `model.run_with_cache(clean_tokens)`, as many positions; or a mapping under TransformerLens's names.
        patching_metric: of logits `[batch pos d_vocab]`, a number, or one for each prompt, of which the mean is taken; a
            `Metric`; or several by name, each with a table.
        return_index_df: give the cells' indices too, a pandas row each.
        reduce, baseline: "none", or True, gives a `SweepResult` in place of the table: each prompt's values, the corrupted run's.
        batch_size: variants that run together; by default what fits.
    Raises:
        HookNameError: the cache lacks a point.
        ValueError: the clean run has another shape.
    Source: `transformer_lens.patching.get_act_patch_{name}`, TransformerLens 4.3.
    """
    return get_act_patch


def _check_reduce(reduce: str) -> None:
    if reduce not in ("scalar", "mean", "none"):
        raise ValueError(f"reduce is {reduce!r}; use 'scalar' or 'mean' (the same here), or 'none'")


get_act_patch_resid_pre = _function(
    "resid_pre", _Map("resid_pre", _BLOCK), "the stream that enters a block, at a position,"
)
get_act_patch_resid_mid = _function(
    "resid_mid", _Map("resid_mid", _BLOCK), "the stream between attention and MLP, at a position,"
)
get_act_patch_attn_out = _function(
    "attn_out", _Map("attn", _BLOCK), "what an attention adds to the stream, at a position,"
)
get_act_patch_mlp_out = _function(
    "mlp_out", _Map("mlp", _BLOCK), "what an MLP adds to the stream, at a position,"
)
get_act_patch_attn_head_out_by_pos = _function(
    "attn_head_out_by_pos", _Map("heads", _AT), "a head's z, at a position,"
)
get_act_patch_attn_head_q_by_pos = _function(
    "attn_head_q_by_pos", _Map("queries", _AT), "a head's query, at a position,"
)
get_act_patch_attn_head_k_by_pos = _function(
    "attn_head_k_by_pos", _Map("keys", _AT), "a key/value head's key, at a position,"
)
get_act_patch_attn_head_v_by_pos = _function(
    "attn_head_v_by_pos", _Map("values", _AT), "a key/value head's value, at a position,"
)
get_act_patch_attn_head_pattern_by_pos = _function(
    "attn_head_pattern_by_pos", _Map("patterns", _TO), "a head's pattern, of one query,"
)
get_act_patch_attn_head_pattern_dest_src_pos = _function(
    "attn_head_pattern_dest_src_pos",
    _Map("patterns", (*_TO, "src_pos")),
    "one entry of a head's pattern",
)
get_act_patch_attn_head_out_all_pos = _function(
    "attn_head_out_all_pos", _Map("heads", _HEAD), "a head's z"
)
get_act_patch_attn_head_q_all_pos = _function(
    "attn_head_q_all_pos", _Map("queries", _HEAD), "a head's queries"
)
get_act_patch_attn_head_k_all_pos = _function(
    "attn_head_k_all_pos", _Map("keys", _HEAD), "a key/value head's keys"
)
get_act_patch_attn_head_v_all_pos = _function(
    "attn_head_v_all_pos", _Map("values", _HEAD), "a key/value head's values"
)
get_act_patch_attn_head_pattern_all_pos = _function(
    "attn_head_pattern_all_pos", _Map("patterns", _HEAD), "a head's pattern"
)


def _stacked(name: str, parts: Mapping[str, _Map], of: str) -> Callable[..., Any]:
    """The function of several maps at once."""
    axes = next(iter(parts.values())).axes

    def get_act_patch(
        model: HookedModel,
        corrupted_tokens: Any,
        clean_cache: Mapping[Any, Tensor],
        metric: Metrics,
        *,
        reduce: str = "scalar",
        baseline: bool = False,
        batch_size: int | None = None,
        **inputs: Any,
    ) -> Any:
        _check_reduce(reduce)
        maps = list(parts.values())
        each = _run(model, corrupted_tokens, clean_cache, metric, maps, batch_size, inputs)
        if reduce == "none" or baseline:
            return {
                part: _returned(found, metric, lambda one: one)
                for part, found in zip(parts, each, strict=True)
            }
        width = model.cfg.n_heads
        stacks = {
            name: torch.stack(
                [_wide(found[name], one.axes, width) for one, found in zip(maps, each, strict=True)]
            )
            for name in each[0]
        }
        return stacks if isinstance(metric, Mapping) else stacks[""]

    get_act_patch.__name__ = get_act_patch.__qualname__ = f"get_act_patch_{name}"
    get_act_patch.__doc__ = f"""{of}, in one sweep: `[patch_type {" ".join(axes)}]`, patch types {", ".join(parts)}.

    Arguments as of `get_act_patch_{"attn_head_out_all_pos" if "head" in axes else "resid_pre"}`. Keys and values stand under the number of
    their key/value head; beyond those is nan (TransformerLens has zeros). With reduce="none" or baseline=True, a dictionary
    of `SweepResult`s by patch type.
    Source: `transformer_lens.patching.get_act_patch_{name}`, TransformerLens 4.3.
    """
    return get_act_patch


def _wide(found: SweepResult, axes: Sequence[str], n_heads: int) -> Tensor:
    """A table of heads as wide as there are query heads, its axes as of the others."""
    table = _table(found, axes)
    if tuple(axes) == _TO:
        return table.transpose(1, 2)
    return (
        F.pad(table, (0, n_heads - table.shape[-1]), value=torch.nan) if "head" in axes else table
    )


get_act_patch_block_every = _stacked(
    "block_every",
    {
        "resid_pre": _Map("resid_pre", _BLOCK),
        "attn_out": _Map("attn", _BLOCK),
        "mlp_out": _Map("mlp", _BLOCK),
    },
    "Patching by block and position",
)
_HEAD_UNITS = {"out": "heads", "q": "queries", "k": "keys", "v": "values"}
get_act_patch_attn_head_all_pos_every = _stacked(
    "attn_head_all_pos_every",
    {name: _Map(units, _HEAD) for name, units in (_HEAD_UNITS | {"pattern": "patterns"}).items()},
    "Patching by head",
)
get_act_patch_attn_head_by_pos_every = _stacked(
    "attn_head_by_pos_every",
    {name: _Map(units, _AT) for name, units in _HEAD_UNITS.items()}
    | {"pattern": _Map("patterns", _TO)},
    "Patching by head and position",
)


def __getattr__(name: str) -> NoReturn:
    if name in ("get_act_patch_direct_path", "get_act_patch_direct_path_all_sources"):
        raise Unavailable(
            f"{name} adds a head's own write to one reader's input, and here a norm over all heads stands between (TransformerLens "
            "refuses such models too): `paths.path_patch(model, clean, corrupted, metric, senders, receivers)` patches the path"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
