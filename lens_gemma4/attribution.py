"""Which part wrote this logit: pure functions of tensors, exact on this architecture.

Held fixed: every norm that a contribution passes on its way (the block's post-norm, the final norm) keeps the
scale it had in the run. With them fixed the pre-softcap logit is a sum over block 0's input, heads and MLPs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def residual_gain(layer_scalars: Sequence[Tensor] | Float[Tensor, " layer"]) -> Float[Tensor, " layer"]:
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
    scalars = torch.stack([torch.as_tensor(s).reshape(()) for s in layer_scalars]) if len(layer_scalars) else None
    if scalars is None:
        raise ValueError("there are no layers, so nothing is written")
    return scalars.double().flip(0).cumprod(0).flip(0)


def widest(dtype: torch.dtype) -> torch.dtype:
    """Contributions are summed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def through_norm(
    vectors: Float[Tensor, "*axes d_model"], scale: Float[Tensor, "*rest one"], gain: Float[Tensor, " d_model"]
) -> Float[Tensor, "*axes d_model"]:
    """What a norm makes of a part of its input, its scale held at the run's."""
    return vectors.to(widest(vectors.dtype)) / scale * gain


def head_contributions(
    z: Float[Tensor, "batch pos head d_head"],
    w_o: Float[Tensor, "head d_head d_model"],
    scale: Float[Tensor, "batch pos 1"],
    gain: Float[Tensor, " d_model"],
) -> Float[Tensor, "head batch pos d_model"]:
    """What each head adds to the stream: its o_proj output through the frozen post-norm."""
    wide = widest(z.dtype)
    return through_norm(torch.einsum("bphd,hdm->hbpm", z.to(wide), w_o.to(wide)), scale, gain)
