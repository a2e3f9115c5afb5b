"""Some rows of a block's attention over a long prompt, without the square of its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4.masks import Mask
from lens_gemma4.model import Gemma4, masked_scores, softmax
from lens_gemma4.utils import Slice

if TYPE_CHECKING:
    from lens_gemma4.hooked_model import HookedModel
else:
    HookedModel = Gemma4  # hooked_model imports this file


def attention_rows(
    model: HookedModel,
    input: Any = None,
    *,
    layer: int,
    heads: Any = None,
    positions: Any = None,
    scores: bool = False,
    **inputs: Any,
) -> Float[Tensor, "batch head query kv_pos"]:
    """What chosen heads read from at chosen positions: rows of `hook_pattern`, or of `hook_attn_scores`.

    The model runs up to this block, and of the block's squares only these rows are made: of a prompt of 65,536 tokens the
    pattern of one head is 17 GB in float32, a row of it 256 KB. Hooks that are set are in force, except on the two points
    themselves: an edit there does not show.

    Args:
        input, inputs: whatever `forward` takes, save a `kv_cache` or a given stream.
        layer: negative counts from the end.
        heads, positions: which, and of which queries: what makes a `Slice`, such as an int, a list or `(start, stop)`; None is all.
        scores: masked scores (score + finfo.min) instead of probabilities.
    Returns:
        Over every key of the prompt, also those that a sliding block's window leaves out, at 0. Heads and positions keep
        their axes, with one entry each for an int.
    Raises:
        IndexError: no such block, head or position.
        ValueError: a `kv_cache`, or `start_at_layer`.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> attention_rows(model, "The capital of France is", layer=3, heads=[0, 2], positions=-1).shape
    torch.Size([1, 2, 1, 6])
    """
    for name in ("kv_cache", "start_at_layer", "stop_at_layer"):
        if inputs.get(name) is not None:
            raise ValueError(
                f"attention_rows runs the whole prompt up to block {layer}, and takes no {name}"
            )
    block = model.cfg.layer(layer)
    chosen = _places("head", heads, block.n_heads).to(model.device)
    tensors = model.prepare(input, **inputs)
    kept: dict[str, Tensor] = {}

    def keep_queries(q: Tensor, hook: Any) -> None:
        kept["rows"] = _places("position", positions, q.shape[1]).to(q.device)
        kept["q"] = q[:, kept["rows"]][:, :, chosen]

    def keep_keys(k: Tensor, hook: Any) -> None:
        kept["k"] = k[:, :, chosen // block.heads_per_kv]

    at = f"blocks.{block.index}.attn"
    stream = model.run_with_hooks(
        tensors,
        stop_at_layer=block.index + 1,
        fwd_hooks=[(f"{at}.hook_rot_q", keep_queries), (f"{at}.hook_rot_k", keep_keys)],
    )
    mask = _mask_of_rows(model, block.kind, stream, tensors, kept["rows"])
    found = masked_scores(kept["q"], kept["k"], mask, per_kv=1)
    if scores:
        return found
    # As the run's own pattern: the fused operation gives nothing to a query that sees no key.
    blind = None if model.attn_implementation == "eager" else mask.blind()
    pattern = softmax(found)
    return pattern if blind is None else pattern.masked_fill(blind, 0)


def _places(what: str, chosen: Any, size: int) -> Int[Tensor, " place"]:
    try:
        return Slice.unwrap(chosen).apply(torch.arange(size)) % size
    except IndexError:
        raise IndexError(f"no {what} {chosen!r}: there are {what}s 0 to {size - 1}") from None


def _mask_of_rows(
    model: HookedModel,
    kind: str,
    stream: Float[Tensor, "batch pos d_model"],
    tensors: Mapping[str, Any],
    rows: Int[Tensor, " query"],
) -> Mask:
    sees = ("attention_mask", "position_ids", "mm_token_type_ids")
    masks, _ = model.sight(
        stream, tensors.get("input_ids"), **{name: tensors.get(name) for name in sees}
    )
    mask = masks[kind]
    return Mask(mask.rule, rows, mask.keys, mask.rows, mask.total)
