"""Patching with any setter, one whole run for each cell of a table: the slow way, for what no sweep can do.

`patching` has TransformerLens's functions for the usual cells, many times as fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lens_gemma4 import names
from lens_gemma4.cache import ActivationCache
from lens_gemma4.errors import HookNameError
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import SQUARES

Setter = Callable[[Tensor, list[int], Tensor], Tensor]


@torch.no_grad()
def generic_activation_patch(
    model: HookedModel,
    corrupted_tokens: Any,
    clean_cache: Mapping[Any, Tensor],
    patching_metric: Callable[[Tensor], Any],
    patch_setter: Setter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    **inputs: Any,
) -> Any:
    """The metric under any patch, one whole run for each cell: the slow way, for setters of your own.

    Args:
        patching_metric: of logits `[batch pos d_vocab]`; a number, or one for each prompt, of which the mean is taken.
        patch_setter: `(corrupted_activation, index, clean_activation) -> patched`; it may write into the first.
        activation_name: TransformerLens's short name ("z", "resid_pre", "k"), or a hook point's after "blocks.3.". It is hooked
            as it is named: "k" is the projection, which on some blocks makes the values too.
        index_axis_names: axes to go over, "layer" first: "pos", "head" (or "head_index"), "src_pos", "dest_pos". Cells that
            a block does not have (fewer key/value heads, a borrower's keys) are nan.
        index_df: the cells themselves, a row each, in place of the names; the result is then flat.
    Raises:
        ValueError: both or neither of the two, another axis, or the first is not the layer.
        HookNameError: no such point, or it is not in the cache.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> clean, corrupted = (model.to_tokens(f"The capital of {one} is") for one in ("France", "Italy"))
    >>> _, cache = model.run_with_cache(clean)
    >>> metric = lambda logits: logits[:, -1, model.to_single_token(" Paris")].mean()
    >>> slow = generic_activation_patch(
    ...     model, corrupted, cache, metric, layer_head_vector_patch_setter, "z", ["layer", "head"]
    ... )
    >>> slow.shape == (model.cfg.n_layers, model.cfg.n_heads)
    True
    """
    tensors = model.prepare(corrupted_tokens, **inputs)
    shape = list(tensors["input_ids"].shape)
    if (index_df is None) == (index_axis_names is None):
        raise ValueError("give index_axis_names or index_df, one of the two")
    sizes: list[int] = []
    cells = index_df
    if cells is None:
        assert index_axis_names is not None
        sizes = _sizes(model, activation_name, index_axis_names, shape[1])
        cells = make_df_from_ranges(sizes, index_axis_names)
    elif list(cells.columns)[:1] != ["layer"]:
        raise ValueError(f"index_df begins with the layer, got columns {list(cells.columns)}")
    dtype = torch.promote_types(model.dtype, torch.float32)
    out = torch.full((len(cells),), torch.nan, dtype=dtype, device=model.device)
    rows = [[int(i) for i in row] for row in cells.itertuples(index=False)]
    clean: dict[str, Tensor] = {}
    for i, index in enumerate(tqdm(rows, desc="runs", disable=None)):
        if sizes and not _has(model, activation_name, index, list(cells.columns)):
            continue
        name = _point(activation_name, index[0])
        if name not in clean:
            model.hook_point(name)
            clean = clean_values(clean_cache, [name], shape)
        logits = model.run_with_hooks(
            **tensors, fwd_hooks=[(name, _hook(patch_setter, index, clean[name]))]
        )
        out[i] = torch.as_tensor(patching_metric(logits)).to(out).mean()
    found = out.view(sizes) if sizes else out
    return (found, cells) if return_index_df else found


def _point(activation: str, layer: int) -> str:
    if "." in activation or activation.startswith("hook_"):
        return f"blocks.{layer}.{activation}"
    return names.get_act_name(activation, layer)


def _hook(setter: Setter, index: list[int], clean: Tensor) -> Callable[..., Tensor]:
    return lambda value, hook: setter(value, index, clean.to(value))


def _sizes(model: HookedModel, activation: str, axes: Sequence[str], pos: int) -> list[int]:
    if list(axes)[:1] != ["layer"]:
        raise ValueError(f"index_axis_names begins with 'layer', got {list(axes)}")
    heads = max(_heads(model, activation, layer) for layer in range(model.cfg.n_layers))
    known = {"layer": model.cfg.n_layers, "head": heads, "head_index": heads}
    known |= dict.fromkeys(("pos", "src_pos", "dest_pos"), pos)
    unknown = [axis for axis in axes if axis not in known]
    if unknown:
        raise ValueError(f"there is no axis {unknown[0]!r}; known are {', '.join(known)}")
    return [known[axis] for axis in axes]


def _heads(model: HookedModel, activation: str, layer: int) -> int:
    """How many heads a block has at a point: 0, if it does not have the point."""
    row = names.row_of(_point(activation, layer))
    block = model.cfg.layer(layer)
    if row is not None and names.absent(row, model.cfg, block):
        return 0
    kv = row is not None and "kv_head" in row.axes.split()
    return block.n_key_value_heads if kv else block.n_heads


def _has(model: HookedModel, activation: str, index: Sequence[int], axes: Sequence[str]) -> bool:
    heads = _heads(model, activation, index[0])
    chosen = [i for i, axis in zip(index, axes, strict=True) if axis in ("head", "head_index")]
    return heads > 0 and all(head < heads for head in chosen)


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """Every combination of indices, the last column's running first.

    >>> make_df_from_ranges([2, 2], ["layer", "pos"]).values.tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    cells = list(itertools.product(*map(range, column_max_ranges)))
    import pandas as pd

    return pd.DataFrame(cells, columns=list(column_names))


# -- the clean run's values ---------------------------------------------------------------------------


def clean_values(
    cache: Mapping[Any, Tensor], hooks: Sequence[str], shape: Sequence[int]
) -> dict[str, Tensor]:
    """By hook point, with a batch axis; checked against the corrupted prompts' `[batch pos]`."""
    known = cache if isinstance(cache, ActivationCache) else _respelled(cache)
    missing = [hook for hook in hooks if hook not in known]
    if missing:
        globs = sorted({f"blocks.*.{hook.split('.', 2)[2]}" for hook in missing})
        raise HookNameError(
            f"clean_cache holds no {missing[0]!r}, one of {len(missing)} values that are missing: cache them, "
            f"run_with_cache(clean_tokens, names_filter={globs})"
        )
    return {hook: _fitting(known[hook], hook, shape) for hook in hooks}


def _respelled(cache: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """A plain mapping under our names: `("resid_pre", 3)`, "resid_pre3" and full names of either vocabulary are known."""
    return {
        names.canonical(names.get_act_name(*((key,) if isinstance(key, str) else key))): value
        for key, value in cache.items()
    }


def _fitting(value: Tensor, hook: str, shape: Sequence[int]) -> Tensor:
    row = names.row_of(hook)
    assert row is not None, hook  # units stand at known points
    value = value[None] if value.ndim == len(row.axes.split()) - 1 else value
    square = hook.endswith(SQUARES)
    batch, pos = value.shape[0], value.shape[2] if square else value.shape[1]
    if batch not in (1, shape[0]) or pos != shape[1] or (square and value.shape[3] != pos):
        raise ValueError(
            f"clean_cache[{hook!r}] is {list(value.shape)}, and the corrupted tokens are {list(shape)} [batch pos]: patching "
            "puts a position into the same position, so cache a run of clean prompts of the same shape (or of one)"
        )
    return value


# -- setters ------------------------------------------------------------------------------------------


def layer_pos_patch_setter(corrupted: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
    """`[layer, pos]` of what has positions second."""
    _, pos = index
    corrupted[:, pos] = clean[:, pos]
    return corrupted


def layer_pos_head_vector_patch_setter(
    corrupted: Tensor, index: Sequence[int], clean: Tensor
) -> Tensor:
    """`[layer, pos, head]` of what has positions second and heads third."""
    _, pos, head = index
    corrupted[:, pos, head] = clean[:, pos, head]
    return corrupted


def layer_head_vector_patch_setter(
    corrupted: Tensor, index: Sequence[int], clean: Tensor
) -> Tensor:
    """`[layer, head]` of what has heads third."""
    _, head = index
    corrupted[:, :, head] = clean[:, :, head]
    return corrupted


def layer_head_pattern_patch_setter(
    corrupted: Tensor, index: Sequence[int], clean: Tensor
) -> Tensor:
    """`[layer, head]` of scores and patterns."""
    _, head = index
    corrupted[:, head] = clean[:, head]
    return corrupted


def layer_head_pos_pattern_patch_setter(
    corrupted: Tensor, index: Sequence[int], clean: Tensor
) -> Tensor:
    """`[layer, head, dest_pos]` of scores and patterns."""
    _, head, to = index
    corrupted[:, head, to] = clean[:, head, to]
    return corrupted


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted: Tensor, index: Sequence[int], clean: Tensor
) -> Tensor:
    """`[layer, head, dest_pos, src_pos]` of scores and patterns."""
    _, head, to, source = index
    corrupted[:, head, to, source] = clean[:, head, to, source]
    return corrupted
