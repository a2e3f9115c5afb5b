"""A run's streams and its contributions in stacks, under TransformerLens's names; sums come out right here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4 import attribution
from lens_gemma4.attribution import widened
from lens_gemma4.config import HookedConfig
from lens_gemma4.utils import Slice

# No names for the axes between: slices change them.
Stack = Float[Tensor, "component ... d_model"]
Ids = Int[Tensor, "..."]
Attrs = Float[Tensor, "component ..."]


class Stacks:
    """What `ActivationCache` makes of its values.

    Every contribution carries the layer scalars that it passes up to the asked layer, and what is inside a block
    (heads, neurons) its post-norm, whose scale is the run's. Float32 at least. In runs below float32, sums that are
    meant to be whole have a part "rounding", computed at each addition and product of the run.
    """

    cfg: HookedConfig
    weights: Mapping[str, Any]
    has_batch_dim: bool
    cache_dict: MutableMapping[str, Tensor]
    _to_token: Callable[[], Callable[[str], int] | None] | None  # a weak reference
    __getitem__: Callable[..., Any]

    def _up_to(self, layer: int | None, mlp_input: bool = False) -> int:
        n_layers = self.cfg.n_layers
        if (layer is None or layer in (-1, n_layers)) and mlp_input:
            raise ValueError(
                f"mlp_input needs the layer whose MLP reads the stream: 0 to {n_layers - 1}"
            )
        if layer is None or layer == -1:
            return n_layers
        if not 0 <= layer <= n_layers:
            raise ValueError(
                f"layer is {layer}; the stream can be taken at 0 to {n_layers} (-1 or None: after the last)"
            )
        return layer

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Float[Tensor, " layer *axes"]:
        """One value of the first `layer` blocks (-1: all) in a stack.

        Args:
            activation_name: a short name: "resid_post", "pattern", "scale" with sublayer_type "ln1", ...
        Raises:
            ValueError: its shape differs between blocks, as everything by head of full and sliding blocks does.
        """
        end = self._up_to(layer)
        if end == 0:
            raise ValueError("layer is 0, and the first 0 blocks hold nothing to stack")
        values = [self[activation_name, i, sublayer_type] for i in range(end)]
        shapes = {tuple(value.shape): i for i, value in reversed(list(enumerate(values)))}
        if len(shapes) > 1:
            told = ", ".join(
                f"{list(shape)} in block {i}"
                for shape, i in sorted(shapes.items(), key=lambda item: item[1])
            )
            raise ValueError(
                f"{activation_name!r} cannot be stacked, its shape differs between blocks: {told}. Read it block by "
                f"block, cache[{activation_name!r}, i]."
            )
        return torch.stack(values)

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack | tuple[Stack, list[str]]:
        """The stream at each block's entry (and middle) up to `layer`, and last the stream there.

        Args:
            layer: where the last one is taken: entering that block, or (None, -1) after the last block.
            incl_mid: also between attention and MLP.
            apply_ln: each as the norm that reads the stream there would pass it on, its scale computed anew for each when
                that is the final norm, else held at the run's.
            pos_slice: positions: a `Slice` or what makes one; an int drops the axis.
            mlp_input: end between block `layer`'s attention and MLP.
            return_labels: also "0_pre", "0_mid", ..., "final_post".
        """
        end = self._up_to(layer, mlp_input)
        places = [
            (word, i) for i in range(end) for word in ("pre", "mid") if word == "pre" or incl_mid
        ]
        places += [("pre", end)] if end < self.cfg.n_layers else [("post", end - 1)]
        places += [("mid", end)] if mlp_input else []
        labels = ["final_post" if word == "post" else f"{i}_{word}" for word, i in places]
        keep = _positions(pos_slice)
        stack = torch.stack([keep(self[f"resid_{word}", i]) for word, i in places])
        if apply_ln:
            at_end = end == self.cfg.n_layers
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice, recompute_ln=at_end)
        return (stack, labels) if return_labels else stack

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
        *,
        incl_rounding: bool | None = None,
    ) -> Stack | tuple[Stack, list[str]]:
        """What block 0's input and each block's attention and MLP contribute to the stream at `layer`.

        Each carries the product of the layer scalars that it passes on its way, so `.sum(0)` of everything is the
        stream there, to rounding.

        Args:
            layer: the stream entering that block, or (None, -1) the last stream.
            mlp_input: take it between the block's attention and MLP instead.
            mode: "all", or only "attn" or "mlp" (beside block 0's input).
            apply_ln: show them as the norm that reads this stream passes them on, its scale held at the run's
                (`apply_ln_to_stack`).
            pos_slice: positions: a `Slice` or what makes one; an int drops the axis.
            incl_embeds: begin with block 0's input, media rows included.
            return_labels: also "0_pre", "0_attn_out", "0_mlp_out", ...
            incl_rounding: end with what the run's own rounding added; by default below float32, when everything is asked.

        >>> from lens_gemma4 import HookedModel
        >>> _, cache = HookedModel.from_pretrained("tiny").run_with_cache("The capital of France is")
        >>> bool(torch.allclose(cache.decompose_resid().sum(0), cache["resid_post", -1], atol=1e-4))
        True
        """
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"mode is {mode!r}; use 'all', 'attn' or 'mlp'")
        end = self._up_to(layer, mlp_input)
        gains = self._gains(end)
        parts = [("0_pre", "resid_pre", 0, gains[0])] if incl_embeds else []
        for i in range(end + mlp_input):
            # The block at which the stream is taken has added its attention only, and its scalar comes later.
            words = ("attn",) if i == end else ("attn", "mlp")
            parts += [
                (f"{i}_{w}_out", f"{w}_out", i, gains[i]) for w in words if mode in ("all", w)
            ]
        if not parts:
            raise ValueError(
                f"nothing is written before block {end} in mode {mode!r}, and incl_embeds is off"
            )
        keep = _positions(pos_slice)
        weighted = [widened(keep(self[word, i])) * gain for _, word, i, gain in parts]
        labels = [part[0] for part in parts]
        if self._rounds(incl_rounding, mode == "all" and incl_embeds):
            weighted.append(self._rounding(end, mlp_input, keep))
            labels.append("rounding")
        stack = torch.stack(weighted)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        return (stack, labels) if return_labels else stack

    def compute_head_results(self) -> None:
        """Put every block's `attn.hook_result` [batch pos head d_model] into the cache: each head's own o_proj output, before
        the post-norm. `stack_head_results` does not need it."""
        for i in range(self.cfg.n_layers):
            z = widened(self["z", i])
            result = torch.einsum("...hd,hdm->...hm", z, self.weights["W_O"][i].to(z))
            self.cache_dict[f"blocks.{i}.attn.hook_result"] = result.to(self["z", i].dtype)

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
        *,
        mlp_input: bool = False,
    ) -> Stack | tuple[Stack, list[str]]:
        """What each head of each block contributes to the stream at `layer`, through its post-norm.

        Args:
            layer, mlp_input, apply_ln, pos_slice: as in `decompose_resid`.
            incl_remainder: end with everything else that is in the stream there.
            return_labels: also "L0H0", "L0H1", ..., "remainder".
        """
        end = self._up_to(layer, mlp_input)
        keep, gains = _positions(pos_slice), self._gains(end)
        heads = [self._heads(i, gains[i], pos_slice) for i in range(end + mlp_input)]
        stack = torch.cat(heads) if heads else self._none(keep)
        labels = [f"L{i}H{j}" for i, block in enumerate(heads) for j in range(len(block))]
        if incl_remainder:
            stack = torch.cat(
                [stack, (widened(keep(self._stream(end, mlp_input))) - stack.sum(0))[None]]
            )
            labels.append("remainder")
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        return (stack, labels) if return_labels else stack

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Any = None,
        pos_slice: Any = None,
        project_output_onto: Tensor | None = None,
    ) -> Float[Tensor, "*axes neuron out"] | Float[Tensor, "*axes neuron"]:
        """What single neurons of a block add to the stream, through its post-norm: `[batch pos neuron d_model]`. All of them
        together are `hook_mlp_out`.

        Args:
            neuron_slice, pos_slice: which neurons and positions.
            project_output_onto: one direction `[d_model]` (the last axis goes) or several `[d_model out]`, such as columns of
                `W_U`: far smaller than the vectors.
        """
        chosen = Slice.unwrap(neuron_slice)
        post = widened(chosen.apply(_positions(pos_slice)(self["post", layer]), dim=-1))
        w_out = chosen.apply(self.weights["W_out"][layer], dim=0).to(post)
        w_out = w_out * self.weights["ln2_post"][layer].to(post)
        scale = _positions(pos_slice)(self["scale", layer, "ln2_post"]).to(post)
        if project_output_onto is None:
            return (post / scale)[..., None] * w_out
        written = w_out @ project_output_onto.to(post)  # [neuron] or [neuron out]
        post = post / scale
        return post * written if written.ndim == 1 else post[..., None] * written

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
        mlp_input: bool = False,
    ) -> Tensor | tuple[Tensor, list[str]]:
        """What each neuron of each block contributes to the stream at `layer`, through its post-norm.

        All neurons of a large model as vectors fill any memory: ask for few positions, some neurons, or a projection.

        Args:
            neuron_slice: the same neurons of every block.
            incl_remainder: end with everything else that is in the stream there.
            project_output_onto: as in `get_neuron_results`; with `apply_ln`, read behind the norm.
            layer, mlp_input, apply_ln, pos_slice: as in `decompose_resid`.
            return_labels: also "L0N0", ..., "remainder".
        """
        end = self._up_to(layer, mlp_input)
        keep, gains = _positions(pos_slice), self._gains(end)
        # The norm that reads the stream is a gain, which goes into the projection, and a scale a position.
        scale, gain = self._norm(end, mlp_input) if apply_ln else (None, None)
        onto = project_output_onto
        if onto is not None and gain is not None:
            onto = widened(onto) * gain.to(widened(onto)).reshape(-1, *[1] * (onto.ndim - 1))
        blocks, labels = [], []
        for i in range(end):
            found = gains[i] * self.get_neuron_results(i, neuron_slice, pos_slice, onto)
            axis = -1 if onto is not None and onto.ndim == 1 else -2
            blocks.append(found.movedim(axis, 0))
            numbers = Slice.unwrap(neuron_slice).apply(torch.arange(self.cfg.layer(i).d_mlp))
            labels += [f"L{i}N{j}" for j in numbers.tolist()]
        none = self._none(keep)
        stack = torch.cat(blocks) if blocks else none if onto is None else none @ onto.to(none)
        if incl_remainder:
            stream = widened(keep(self._stream(end, mlp_input)))
            stream = stream if onto is None else stream @ onto.to(stream)
            stack = torch.cat([stack, (stream - stack.sum(0))[None]])
            labels.append("remainder")
        if scale is not None and gain is not None:
            scale = keep(scale).to(stack)
            if onto is None:
                stack = attribution.through_norm(stack, scale, gain)
            else:
                stack = stack / (scale[..., 0] if onto.ndim == 1 else scale)
        return (stack, labels) if return_labels else stack

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[str]]:
        """The stream at `layer` as heads, neurons (or whole MLPs) and block 0's input: everything, so it sums to the stream.

        Args:
            expand_neurons: split the MLPs into neurons.
            project_output_onto: as in `get_neuron_results`; with `apply_ln`, read behind the norm.
            layer, mlp_input, apply_ln, pos_slice: as in `decompose_resid`.
            return_labels: also "L0H0", ..., "L0N0" or "0_mlp_out", ..., "0_pre", and below float32 "rounding".
        """
        end, keep = self._up_to(layer, mlp_input), _positions(pos_slice)
        heads, names = self.stack_head_results(end, True, pos_slice=pos_slice, mlp_input=mlp_input)
        gains = self._gains(end)
        parts: list[Tensor] = [heads]
        if not expand_neurons:
            parts += [(widened(keep(self["mlp_out", i])) * gains[i])[None] for i in range(end)]
            names = names + [f"{i}_mlp_out" for i in range(end)]
        rest = [widened(keep(self["resid_pre", 0]))[None] * gains[0]]
        rest_names = ["0_pre"]
        if self._rounds(None, True):
            rest.append(self._full_rounding(end, mlp_input, expand_neurons, pos_slice)[None])
            rest_names.append("rounding")
        stack = torch.cat([*parts, *rest])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input, pos_slice)
        if project_output_onto is not None:
            stack = stack @ project_output_onto.to(stack)
        if expand_neurons:
            neurons, neuron_names = self.stack_neuron_results(
                end, pos_slice, None, True, False, apply_ln, project_output_onto, mlp_input
            )
            stack = torch.cat([stack[: len(names)], neurons, stack[len(names) :]])
            names = names + neuron_names
        return (stack, names + rest_names) if return_labels else stack

    def apply_ln_to_stack(
        self,
        residual_stack: Stack,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Stack:
        """Parts of the stream as the norm that reads it passes them on: over the run's scale, times the gain.

        Args:
            residual_stack: parts, already at the positions of `pos_slice`.
            layer: the norm is block `layer`'s ln1 (ln2 with `mlp_input`), or (None, -1) the final norm.
            batch_slice: rows of the batch to take, of the parts and of the scale.
            has_batch_dim: whether the parts have a batch axis.
            recompute_ln: each part by its own scale instead: for streams, not for parts of one.
        """
        rows = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        if has_batch_dim and self.has_batch_dim:
            residual_stack = rows.apply(residual_stack, dim=1)
        scale, gain = self._norm(self._up_to(layer, mlp_input), mlp_input)
        if recompute_ln:
            wide = widened(residual_stack)
            scale = (wide.pow(2).mean(-1, keepdim=True) + self.cfg.eps).sqrt()
        else:
            scale = _positions(pos_slice)(rows.apply(scale) if self.has_batch_dim else scale)
            if self.has_batch_dim and not has_batch_dim and rows.mode != "int" and len(scale) == 1:
                scale = scale[0]
            if not attribution.fits(scale.shape, residual_stack.shape[1:]):
                raise ValueError(
                    f"the parts are {list(residual_stack.shape)} and the norm's scale {list(scale.shape)}, after pos_slice "
                    "and batch_slice: give the parts at these positions and rows, and say has_batch_dim=False where they "
                    "have none"
                )
        return attribution.through_norm(residual_stack, scale, gain)

    def logit_attrs(
        self,
        residual_stack: Stack,
        tokens: str | int | Ids,
        incorrect_tokens: str | int | Ids | None = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Attrs:
        """What each part of the last stream gives to a logit before the softcap, the final norm held at the run's scale.

        Args:
            residual_stack: parts of the last stream, already at the positions of `pos_slice`.
            tokens: a text that is one token, an id, ids `[batch]` or `[batch pos]`.
            incorrect_tokens: of the same shape: their logit is subtracted.
            batch_slice, has_batch_dim: as in `apply_ln_to_stack`.
        Raises:
            ValueError: shapes that differ; a text, when the model that tokenizes it is gone.
        """
        ids = [self._ids(t) for t in (tokens, incorrect_tokens) if t is not None]
        if len({tuple(i.shape) for i in ids}) > 1:
            raise ValueError(
                f"tokens are {list(ids[0].shape)} and incorrect_tokens {list(ids[1].shape)}: they must have the same shape"
            )
        read = self.apply_ln_to_stack(
            residual_stack, -1, False, pos_slice, batch_slice, has_batch_dim
        )
        w_u = self.weights["W_U"].T
        direction = w_u[ids[0].to(w_u.device)].to(read)
        if len(ids) > 1:
            direction = direction - w_u[ids[1].to(w_u.device)].to(read)
        if has_batch_dim and direction.ndim == 2 and read.ndim == 4:
            direction = direction[:, None]  # [batch 1 d_model]
        if not attribution.fits(direction.shape, read.shape[1:]):
            raise ValueError(
                f"tokens are {list(ids[0].shape)}; the parts are at {list(read.shape[1:-1])} [batch pos] (after pos_slice and "
                "batch_slice): give one id, [batch] or [batch pos] of those"
            )
        return (read * direction).sum(-1)

    def _ids(self, tokens: str | int | Tensor) -> Ids:
        if isinstance(tokens, str):
            to_token = self._to_token() if self._to_token is not None else None
            if to_token is None:
                raise ValueError(
                    f"this cache no longer knows the tokenizer of {tokens!r}: give ids, model.to_single_token({tokens!r})"
                )
            tokens = to_token(tokens)
        return attribution.token_ids(tokens, self.weights["W_U"].shape[1])

    # -- what they are made of --------------------------------------------------------------------------

    def _gains(self, end: int) -> list[float]:
        return attribution.gains_at(self.weights["layer_scalar"], end)

    def _norm(self, end: int, mlp_input: bool) -> tuple[Tensor, Tensor]:
        """Scale in the run and gain of the norm that reads the stream there."""
        if end == self.cfg.n_layers:
            return self["ln_final.hook_scale"], self.weights["ln_final"]
        norm = "ln2" if mlp_input else "ln1"
        return self["scale", end, norm], self.weights[norm][end]

    def _stream(self, end: int, mlp_input: bool) -> Tensor:
        if mlp_input:
            return self["resid_mid", end]
        return self["resid_post", -1] if end == self.cfg.n_layers else self["resid_pre", end]

    def _heads(self, i: int, gain: float, pos_slice: Any) -> Float[Tensor, "head *axes d_model"]:
        z = _positions(pos_slice, dim=-3)(self["z", i])
        scale = _positions(pos_slice)(self["scale", i, "ln1_post"])
        weights = self.weights["W_O"][i], self.weights["ln1_post"][i]
        return gain * attribution.head_contributions(z, weights[0], scale, weights[1])

    def _none(self, keep: Callable[[Tensor], Tensor]) -> Stack:
        like = widened(keep(self["resid_pre", 0]))
        return like.new_zeros(0, *like.shape)

    def _rounds(self, asked: bool | None, whole: bool) -> bool:
        """Whether a stack has a part for rounding."""
        return (whole and self["resid_pre", 0].dtype.itemsize < 4) if asked is None else asked

    def _rounding(
        self, end: int, mlp_input: bool, keep: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*axes d_model"]:
        found = keep(attribution.stream_rounding(self, end, mlp_input))  # type: ignore[arg-type]
        return found.to(attribution.widest(self["resid_pre", 0].dtype))

    def _full_rounding(
        self, end: int, mlp_input: bool, expand_neurons: bool, pos_slice: Any
    ) -> Float[Tensor, "*axes d_model"]:
        """Along the stream, and between what heads (and neurons) write and what their block added."""
        keep, gains = _positions(pos_slice), self._gains(end)
        total = self._rounding(end, mlp_input, keep)
        for i in range(end + mlp_input):
            z = _positions(pos_slice, dim=-3)(self["z", i]).flatten(-2)
            total = total + gains[i] * self._written(i, keep, z, "attn_out", "W_O", "ln1_post")
            if expand_neurons and i < end:
                post = keep(self["post", i])
                total = total + gains[i] * self._written(
                    i, keep, post, "mlp_out", "W_out", "ln2_post"
                )
        return total

    def _written(
        self, i: int, keep: Callable[[Tensor], Tensor], x: Tensor, out: str, matrix: str, norm: str
    ) -> Float[Tensor, "*axes d_model"]:
        x, dtype = widened(x), self["resid_pre", 0].dtype
        w, gain = self.weights[matrix][i].to(x).flatten(0, -2), self.weights[norm][i].to(x)
        got, scale = widened(keep(self[out, i])), keep(self["scale", i, norm])
        return attribution.write_rounding(x, w, scale, gain, got, dtype)


def _positions(pos_slice: Any, dim: int = -2) -> Callable[[Tensor], Tensor]:
    """Takes positions of a tensor `[... pos d]`, or along another axis."""
    chosen = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
    return lambda value: chosen.apply(value, dim=dim)
