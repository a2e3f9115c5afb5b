"""`ActivationCache`: what a run left, under both vocabularies, with decompositions that add up.

It holds tensors, the config and references to the few weights that attribution needs; never the model.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    ValuesView,
)
from typing import Any

import torch
from torch import Tensor

from lens_gemma4 import names
from lens_gemma4.config import HookedConfig
from lens_gemma4.errors import HookNameError
from lens_gemma4.kept import Kept
from lens_gemma4.stacks import Stacks
from lens_gemma4.utils import Slice

GRAD = "_grad"  # what `incl_bwd` adds to a value's name
TOLD = 8  # kinds of values that an error lists


class ActivationCache(Stacks, Mapping[str, Any]):
    """A mapping from hook points to values, read under any spelling.

    `cache["blocks.3.hook_resid_post"]`, `cache["layers.3.layer_output"]` and `cache["resid_post", 3]` are the same
    tensor; `cache["scale", 3, "ln1"]` and `cache["pattern", -1]` work as in TransformerLens. Derived values
    (`attention_mask`, `input_size`, `next_token_probs`, `token_labels`, `vision.image_token_mask`) are read by key and
    are not among `keys()`. `token_labels` names each position that was kept, prompt by prompt: its token, or the patch
    of an image, "image[0] (3, 2)".

    Args:
        values: tensors under our names; with `incl_bwd`, gradients under `name + "_grad"`.
        cfg: the model's config.
        weights: references, no copies: `layer_scalar`, `W_O`, `ln1`, `ln1_post`, `ln2` by block; `ln_final`, `W_U`.
        derived: values that no hook point holds, with a batch axis where `has_batch_dim`; or functions that give them.
        has_batch_dim: whether values begin with a batch axis.
        to_token: the model's `to_single_token`, for texts in place of ids; held weakly, and not by a copy.

    >>> from lens_gemma4 import HookedModel
    >>> _, cache = HookedModel.from_pretrained("tiny").run_with_cache("The capital of France is")
    >>> cache["resid_post", 3] is cache["layers.3.layer_output"]
    True
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        cfg: HookedConfig,
        weights: Mapping[str, Any] | None = None,
        derived: Mapping[str, Any] | None = None,
        has_batch_dim: bool = True,
        to_token: Callable[[str], int] | None = None,
    ) -> None:
        self.cache_dict: MutableMapping[str, Tensor] = (
            values if isinstance(values, Kept) else dict(values)
        )
        self.cfg = cfg
        self.weights = dict(weights or {})
        self.derived = dict(derived or {})
        self.has_batch_dim = has_batch_dim
        self._to_token = None if to_token is None else weakref.WeakMethod(to_token)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_to_token": None}

    # -- access -----------------------------------------------------------------------------------------

    def _name(self, key: str | tuple[Any, ...]) -> str:
        """Our name of a key in any spelling."""
        if isinstance(key, tuple):
            key = names.get_act_name(*key)
        elif not isinstance(key, str):
            raise TypeError(
                f"a value is named by a string or a tuple such as ('resid_post', 3), got {key!r}"
            )
        elif "." not in key and key not in self.cache_dict:
            key = names.get_act_name(key)
        plain = key.removesuffix(GRAD)
        return names.canonical(plain, self.cfg.n_layers) + key[len(plain) :]

    def __getitem__(self, key: str | tuple[Any, ...]) -> Any:
        if isinstance(key, str) and key in names.DERIVED:
            if key not in self.derived:
                raise HookNameError(
                    f"{key!r} cannot be derived from this run: {_WHY_UNDERIVED[key]}."
                )
            if callable(self.derived[key]):  # names of tokens, which few runs are asked for
                self.derived[key] = self.derived[key]()
            return self.derived[key]
        name = self._name(key)
        if name not in self.cache_dict:
            raise HookNameError(self._missing(key, name))
        return self.cache_dict[name]

    def _missing(self, key: Any, name: str) -> str:
        """Why a value is not here: no such value, not on this model, or not kept."""
        plain = name.removesuffix(GRAD)
        row = names.row_of(plain)
        if row is None and plain in names.SHORT:
            return f"{key!r} is in every block: say which, cache[{plain!r}, 0] (-1 is the last)."
        _, index = names.split(plain)
        if index is not None and not 0 <= index < self.cfg.n_layers:
            return f"{key!r}: this model has blocks 0 to {self.cfg.n_layers - 1}."
        if row is None or names.absent(
            row, self.cfg, None if index is None else self.cfg.layer(index)
        ):
            return names.unknown(plain, [known for known, _ in names.points(self.cfg)], self.cfg)
        close = difflib.get_close_matches(name, self.cache_dict, n=1)
        return (
            f"{key!r} ({name}) was not kept. This run kept {self._kept()}"
            + (f"; the closest is {close[0]!r}" if close else "")
            + ". Add it to names_filter (without one everything is kept that ran, but hook_result)."
        )

    def _kept(self) -> str:
        """What there is, blocks folded."""
        blocks: dict[str, int] = {}
        for name in self.cache_dict:
            blocks[names.split(name)[0]] = blocks.get(names.split(name)[0], 0) + 1
        told = [
            f"{name} of {n} blocks" if "{i}" in name else name
            for name, n in list(blocks.items())[:TOLD]
        ]
        more = f" and {len(blocks) - TOLD} more" if len(blocks) > TOLD else ""
        return (", ".join(told) + more) or "nothing"

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def keys(self) -> KeysView[str]:
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.cache_dict.items()

    def __repr__(self) -> str:
        kept = self.cache_dict
        made = kept.in_memory() if isinstance(kept, Kept) else list(kept.values())
        size = (
            sum(
                {
                    v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in made
                }.values()
            )
            / 2**20
        )
        return f"ActivationCache of {len(self)} values, {size:.1f} MB: {self._kept()}"

    # -- changing the whole -----------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> ActivationCache:
        """Move every value to `device`, in this cache, which is returned. Weights stay where the model has them."""
        self.cache_dict = {name: value.to(device) for name, value in self.items()}
        self.derived = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.derived.items()
        }
        return self

    def remove_batch_dim(self, batch_size: int | None = None) -> ActivationCache:
        """Drop the batch axis of a single prompt, in this cache, which is returned.

        Args:
            batch_size: what it is taken to be; it is known here, and only compared.
        Raises:
            ValueError: there are several rows, or others than `batch_size`; nothing has changed then.
        """
        if batch_size not in (None, 1):
            raise ValueError(f"batch_size is {batch_size}: only a batch of 1 can lose its axis")
        if self.has_batch_dim:
            rows = {len(value) for name, value in self.items() if _is_batched(name)}
            if rows - {1}:
                raise ValueError(
                    f"the batch has {max(rows)} rows: only a batch of 1 can lose its axis"
                )
            one = self.apply_slice_to_batch_dim(0)
            self.cache_dict, self.derived, self.has_batch_dim = one.cache_dict, one.derived, False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> ActivationCache:
        """Another cache with some rows of the batch; an int drops the axis.

        Media values, which have no batch axis, stay as they are, and so does `input_size`.

        Raises:
            ValueError: the batch axis is gone already.
        """
        if not self.has_batch_dim:
            raise ValueError(
                "this cache has no batch axis: it was dropped by remove_batch_dim or a slice"
            )
        chosen = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        values = {
            name: chosen.apply(value) if _is_batched(name) else value
            for name, value in self.items()
        }
        derived = {
            name: chosen.apply(v) if isinstance(v, Tensor) else v
            for name, v in self.derived.items()
        }
        if "token_labels" in derived:
            rows = chosen.indices(self.derived["input_size"][0]).tolist()
            labels = [self["token_labels"][row] for row in rows]
            derived["token_labels"] = labels[0] if chosen.mode == "int" else labels
        sliced = ActivationCache(
            values, self.cfg, self.weights, derived, has_batch_dim=chosen.mode != "int"
        )
        sliced._to_token = self._to_token
        return sliced

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch autograd on or off for the whole process, as TransformerLens does."""
        torch.set_grad_enabled(mode)


_WHY_UNDERIVED = {
    "attention_mask": "it ran on a given stream",
    "input_size": "it ran on a given stream",
    "token_labels": "it ran on a given stream",
    "next_token_probs": "it ended before the logits, or they were not kept",
    "vision.image_token_mask": "it ran without ids, or this checkpoint has no vision embedder",
}


def _is_batched(name: str) -> bool:
    row = names.row_of(name.removesuffix(GRAD))
    return row is None or row.axes.startswith("batch")
