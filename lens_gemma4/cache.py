"""`ActivationCache`: what a run left, under both vocabularies, with decompositions that add up.

It holds tensors, the config and references to the few weights that attribution needs; never the model.
"""

from __future__ import annotations

import difflib
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import attribution, names
from lens_gemma4.config import HookedConfig
from lens_gemma4.errors import HookNameError


class ActivationCache(Mapping[str, Any]):
    """A mapping from hook points to values, read under any spelling.

    `cache["blocks.3.hook_resid_post"]`, `cache["layers.3.layer_output"]` and `cache["resid_post", 3]` are the same
    tensor. `cache["scale", 3, "ln1"]`, `cache["pattern", -1]` work as in TransformerLens. Derived values
    (`attention_mask`, `input_size`, `next_token_probs`, `vision.image_token_mask`) are read by key and are not among
    `keys()`.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        cfg: HookedConfig,
        weights: Mapping[str, Any] | None = None,
        derived: Mapping[str, Any] | None = None,
        has_batch_dim: bool = True,
    ) -> None:
        self.cache_dict = dict(values)
        self.cfg = cfg
        self.weights = dict(weights or {})
        self.derived = dict(derived or {})
        self.has_batch_dim = has_batch_dim

    # -- access -----------------------------------------------------------------------------------------

    def _name(self, key: str | tuple[Any, ...]) -> str:
        if isinstance(key, tuple):
            word, layer, *place = key
            if isinstance(layer, int) and layer < 0:
                layer += self.cfg.n_layers
            key = names.get_act_name(word, layer, place[0] if place else None)
        elif "." not in key and key not in self.cache_dict:
            key = names.get_act_name(key)
        return names.canonical(key, self.cfg.n_layers)

    def __getitem__(self, key: str | tuple[Any, ...]) -> Any:
        if isinstance(key, str) and key in names.DERIVED:
            return self._derived_value(key)
        name = self._name(key)
        if name in self.cache_dict:
            return self.cache_dict[name]
        raise HookNameError(self._missing(key, name))

    def _derived_value(self, key: str) -> Any:
        if key == "next_token_probs" and key not in self.derived and "hook_logits" in self.cache_dict:
            return self.cache_dict["hook_logits"][..., -1, :].float().softmax(-1)
        if key not in self.derived:
            raise HookNameError(f"{key!r} cannot be derived from this run: it needs ids, and for probabilities the logits")
        return self.derived[key]

    def _missing(self, key: Any, name: str) -> str:
        row = names.row_of(name)
        if row is None:
            return names.unknown(str(key), self.cache_dict, self.cfg)
        _, index = names.split(name)
        if index is not None and not 0 <= index < self.cfg.n_layers:
            return f"{key!r}: this model has blocks 0 to {self.cfg.n_layers - 1}."
        if reason := names.absent(row, self.cfg, None if index is None else self.cfg.layer(index)):
            return f"{key!r} does not exist: {reason}."
        close = difflib.get_close_matches(name, self.cache_dict, n=3)
        return (
            f"{key!r} ({name}) was not kept in this run, which kept {len(self)} values"
            + (f", the closest {', '.join(map(repr, close))}" if close else "")
            + ". Add it to names_filter, or run without one (hook_result is only kept when named)."
        )

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
        size = sum(v.numel() * v.element_size() for v in self.cache_dict.values()) / 2**20
        return f"ActivationCache of {len(self)} values, {size:.1f} MB if each were alone"

    # -- changing the whole -----------------------------------------------------------------------------

    def _with(self, values: Mapping[str, Tensor], has_batch_dim: bool | None = None) -> ActivationCache:
        batch = self.has_batch_dim if has_batch_dim is None else has_batch_dim
        return ActivationCache(values, self.cfg, self.weights, self.derived, batch)

    def to(self, device: torch.device | str) -> ActivationCache:
        """A cache with every value on `device`."""
        return self._with({name: value.to(device) for name, value in self.items()})

    def remove_batch_dim(self) -> ActivationCache:
        """A cache of a single prompt without the batch axis."""
        if not self.has_batch_dim:
            return self
        values = {}
        for name, value in self.items():
            row = names.row_of(name.removesuffix("_grad"))
            batched = row is None or row.axes.startswith("batch")
            if batched and value.shape[0] != 1:
                raise ValueError(f"{name!r} has {value.shape[0]} rows: only a batch of 1 can lose its axis")
            values[name] = value[0] if batched else value
        return self._with(values, has_batch_dim=False)

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> ActivationCache:
        """Some rows of the batch; an int drops the axis. Media values, which have no batch axis, stay."""
        if not self.has_batch_dim:
            raise ValueError("this cache has no batch axis left")
        values = {}
        for name, value in self.items():
            row = names.row_of(name.removesuffix("_grad"))
            values[name] = value if row is not None and not row.axes.startswith("batch") else value[batch_slice]
        return self._with(values, has_batch_dim=not isinstance(batch_slice, int))

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Switch autograd on or off for the whole process, as TransformerLens does."""
        torch.set_grad_enabled(mode)

    # -- stacks -----------------------------------------------------------------------------------------

    def _up_to(self, layer: int | None) -> int:
        if layer is None or layer == -1:
            return self.cfg.n_layers
        if not 0 <= layer <= self.cfg.n_layers:
            raise ValueError(f"layer is {layer}; the stream can be taken at 0 to {self.cfg.n_layers} (-1: after the last)")
        return layer

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, "layer *axes"]:
        """One value of the first `layer` blocks (-1: all) in a stack.

        Raises:
            ValueError: its shape differs between blocks (heads of full and sliding blocks do).
        """
        values = [self[activation_name, i, sublayer_type] for i in range(self._up_to(layer))]
        if len({value.shape for value in values}) > 1:
            shapes = {i: list(value.shape) for i, value in enumerate(values)}
            raise ValueError(f"{activation_name!r} has unlike shapes and cannot be stacked: {shapes}")
        return torch.stack(values)

    def accumulated_resid(
        self, layer: int | None = None, incl_mid: bool = False, return_labels: bool = False
    ) -> Float[Tensor, "component *axes d_model"] | tuple[Tensor, list[str]]:
        """The stream at each block's entry (and middle) up to `layer`, and last the stream there."""
        end = self._up_to(layer)
        streams, labels = [], []
        for i in range(end):
            streams.append(self["resid_pre", i])
            labels.append(f"{i}_pre")
            if incl_mid:
                streams.append(self["resid_mid", i])
                labels.append(f"{i}_mid")
        streams.append(self["resid_post", -1] if end == self.cfg.n_layers else self["resid_pre", end])
        labels.append("final_post" if end == self.cfg.n_layers else f"{end}_pre")
        return (torch.stack(streams), labels) if return_labels else torch.stack(streams)

    def decompose_resid(
        self,
        layer: int | None = None,
        mode: Literal["all", "attn", "mlp"] = "all",
        return_labels: bool = False,
    ) -> Float[Tensor, "component *axes d_model"] | tuple[Tensor, list[str]]:
        """What block 0's input and each block's attention and MLP contribute to the stream at `layer`.

        Each carries the product of the layer scalars it passes on its way, so `.sum(0)` of mode "all" is the
        stream entering block `layer` (None or -1: the last stream), to rounding. The first part is block 0's
        input, media rows included. Float32 at least.
        """
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"mode is {mode!r}; use 'all', 'attn' or 'mlp'")
        end = self._up_to(layer)
        wide = attribution.widest(self["resid_pre", 0].dtype)
        if end == 0:
            gains = torch.ones(1, dtype=torch.float64)
        else:
            gains = attribution.residual_gain(self.weights["layer_scalar"][:end]).cpu()
        parts, labels = [self["resid_pre", 0].to(wide) * gains[0].item()], ["resid_pre_0"]
        for i in range(end):
            for name in ("attn", "mlp"):
                if mode in ("all", name):
                    parts.append(self[f"{name}_out", i].to(wide) * gains[i].item())
                    labels.append(f"{i}_{name}_out")
        return (torch.stack(parts), labels) if return_labels else torch.stack(parts)
