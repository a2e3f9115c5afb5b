"""Which part wrote this logit: pure functions of tensors, exact on this architecture.

Held fixed: every norm that a contribution passes on its way (the block's post-norm, the final norm) keeps the
scale it had in the run. With them fixed the pre-softcap logit is a sum over block 0's input, heads and MLPs.

`values` are a run's, under our names (an `ActivationCache` or a dictionary); `weights` are an `ActivationCache`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


# What `direct_logit_attribution` reads: pass it to `run_with_cache` as names_filter.
NEEDED = (
    "blocks.0.hook_resid_pre",
    "blocks.*.attn.hook_z",
    "blocks.*.ln1_post.hook_scale",
    "blocks.*.hook_mlp_out",
    "ln_final.hook_scale",
    "ln_final.hook_out",
)


def residual_gain(
    layer_scalars: Sequence[Tensor] | Float[Tensor, " layer"],
) -> Float[Tensor, " layer"]:
    """Factor by which a vector written in each block reaches the final norm.

    A block ends with `resid_post = s_l * (resid_mid + mlp_out)`, so what block l writes is multiplied by
    `s_l * s_{l+1} * ... * s_{L-1}` on its way out. Float64: the products can be as small as 1e-13.

    Args:
        layer_scalars: `s_l` of each block, first block first; dimensionless.
    Raises:
        ValueError: there are no layers.
    Source: `layer_scalar` in transformers' `Gemma4UnifiedTextDecoderLayer.forward`.

    >>> residual_gain(torch.tensor([0.5, 2.0, 4.0]))
    tensor([4., 8., 4.], dtype=torch.float64)
    """
    if not len(layer_scalars):
        raise ValueError("there are no layers, so nothing is written")
    scalars = torch.stack([torch.as_tensor(s).reshape(()) for s in layer_scalars])
    return scalars.double().flip(0).cumprod(0).flip(0)


def widest(dtype: torch.dtype) -> torch.dtype:
    """Contributions are summed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def through_norm(
    vectors: Float[Tensor, "*#axes d_model"],
    scale: Float[Tensor, "*#axes 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "*out d_model"]:
    """What a norm makes of a part of its input, its scale held at the run's.

    Args:
        vectors: parts of the norm's input.
        scale: the norm's `hook_scale` in the run; broadcasts over the parts.
        gain: the norm's weight.
    """
    return vectors.to(widest(vectors.dtype)) / scale * gain


def head_contributions(
    z: Float[Tensor, "*axes head d_head"],
    w_o: Float[Tensor, "head d_head d_model"],
    scale: Float[Tensor, "*axes 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "head *axes d_model"]:
    """What each head adds to the stream: its o_proj output through the frozen post-norm.

    They sum to `hook_attn_out`. The post-norm's scale comes from all heads together and is held at the run's, so how
    it would answer to one head's absence is left out (ablation shows that).

    Args:
        z: `attn.hook_z`.
        w_o: `attn.W_O`.
        scale: `ln1_post.hook_scale`.
        gain: `ln1_post.weight`.
    """
    wide = widest(z.dtype)
    return through_norm(torch.einsum("...hd,hdm->h...m", z.to(wide), w_o.to(wide)), scale, gain)


@dataclass(frozen=True)
class LogitParts:
    """Contributions to one pre-softcap logit, or to any direction of the final norm's output.

    `start` [*axes] is block 0's input (embeddings, media rows included), `heads` [layer head *axes], `mlps`
    [layer *axes]; `total` [*axes] is what the run itself gave. The axes are the run's `batch pos`.
    """

    start: Float[Tensor, "*axes"]
    heads: Float[Tensor, "layer head *axes"]
    mlps: Float[Tensor, " layer *axes"]
    total: Float[Tensor, "*axes"]

    def sum(self) -> Float[Tensor, "*axes"]:
        """All parts together."""
        return self.start + self.heads.sum((0, 1)) + self.mlps.sum(0)

    @property
    def remainder(self) -> Float[Tensor, "*axes"]:
        """What the parts leave over: rounding, unless a hook edited the stream on the way."""
        return self.total - self.sum()


def direct_logit_attribution(
    values: Mapping[str, Tensor],
    weights: Mapping[str, Any],
    direction: Float[Tensor, "*rest d_model"],
    total: Float[Tensor, "*axes"] | None = None,
) -> LogitParts:
    """How much block 0's input, each head and each MLP wrote along `direction`, as the head reads it.

    Post-norms and the final norm keep the run's scales, and each part carries the layer scalars that it passes.
    The softcap comes after: parts of a logit add up before it, not behind it.

    Args:
        values: a run's values; `NEEDED` names them.
        weights: an `ActivationCache`'s `weights`.
        direction: in the final norm's output, e.g. `W_U[:, token]`, or `W_U[:, a] - W_U[:, b]` for a logit
            difference; it broadcasts over the run's `batch pos`.
        total: what the parts are to add up to (`hook_logits_raw` of the token, say); by default
            `ln_final.hook_out` along the direction.
    Raises:
        KeyError: a value is not there, because a filter left it out or because its block did not run.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> _, cache = model.run_with_cache("The capital of France is", names_filter=NEEDED)
    >>> parts = direct_logit_attribution(cache, cache.weights, model.tokens_to_residual_directions(" Paris"))
    >>> bool(parts.remainder.abs().max() < 1e-3)
    True
    """
    wide = widest(values["ln_final.hook_out"].dtype)
    direction = direction.to(wide)
    read = through_norm(
        direction, values["ln_final.hook_scale"], weights["ln_final"]
    )  # [*axes d_model]
    gains = residual_gain(weights["layer_scalar"]).tolist()
    heads, mlps = [], []
    for i, gain in enumerate(gains):
        block = f"blocks.{i}."
        written = head_contributions(
            values[block + "attn.hook_z"],
            weights["W_O"][i],
            values[block + "ln1_post.hook_scale"],
            weights["ln1_post"][i],
        )
        heads.append(gain * (written * read).sum(-1))  # [head *axes]
        mlps.append(gain * (values[block + "hook_mlp_out"].to(wide) * read).sum(-1))  # [*axes]
    start = gains[0] * (values["blocks.0.hook_resid_pre"].to(wide) * read).sum(-1)
    if total is None:
        total = (values["ln_final.hook_out"].to(wide) * direction).sum(-1)
    return LogitParts(start, torch.stack(heads), torch.stack(mlps), total.to(wide))
