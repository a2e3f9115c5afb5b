"""The two norms of the family, each with its hook points, and where their arithmetic is done."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lens_gemma4.hooks import HookPoint, Part
from lens_gemma4.kept import Made, Make

LAYER_NORM_EPS = 1e-5  # torch's default, which the image embedder's three LayerNorms use


def empty(*shape: int) -> nn.Parameter:
    """A frozen weight to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def wide(x: Tensor) -> Tensor:
    """The dtype norms, angles and softmaxes are computed in: float32, or float64 in a float64 model."""
    return x if x.dtype == torch.float64 else x.float()


@lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> Float[Tensor, ""]:
    """A number as a tensor, made once: torch makes one of a Python number at every operation, which takes longer than
    the operation itself on a short prompt."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _mean_square(x: Float[Tensor, "*axes d"], eps: float) -> Float[Tensor, "*axes 1"]:
    return wide(x).pow(2).mean(-1, keepdim=True).add_(eps)


def _scale(x: Float[Tensor, "*axes d"], eps: float) -> Float[Tensor, "*axes 1"]:
    return _mean_square(x, eps).sqrt()


def _normalized(x: Float[Tensor, "*axes d"], eps: float) -> Float[Tensor, "*axes d"]:
    x = wide(x)  # once: of long prompts in bfloat16 this is the largest tensor there is
    # Tensors of another class have a mode of their own (shapes alone, tracing), whose numbers must not outlive it.
    if x.requires_grad or not x.is_cpu or type(x) is not Tensor:
        return x * _mean_square(x, eps).pow_(-0.5)
    # What the line above is made of on a CPU, to the bit (the mean is a sum that is divided, the power a root); on a GPU
    # the mean is another kernel, and on the way back the power rounds otherwise.
    square = (x * x).sum(-1, keepdim=True)
    square.div_(_number(float(x.shape[-1]), x.dtype)).add_(_number(eps, x.dtype))
    return x * square.rsqrt_()


def _norm(
    x: Float[Tensor, "*axes d"], eps: float, weight: Float[Tensor, " d"] | None
) -> Float[Tensor, "*axes d"]:
    normalized = _normalized(x, eps)
    if weight is not None:
        normalized.mul_(wide(weight))
    return normalized if normalized.dtype == x.dtype else normalized.to(x.dtype)


class RMSNorm(Part):
    """`x * (mean(x^2) + eps) ** -0.5 * weight`, in float32, then cast. The gain is the weight itself."""

    def __init__(self, eps: float, d_gain: int | None = None) -> None:
        super().__init__()
        self.eps = eps
        # Not methods: whoever keeps the way to a value keeps no module with it.
        self._scale, self._normalized = partial(_scale, eps=eps), partial(_normalized, eps=eps)
        self._without_gain = partial(_norm, eps=eps, weight=None)
        self.weight = None if d_gain is None else empty(d_gain)
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        if not (self.hook_scale.live or self.hook_normalized.live or self.hook_out.live):
            return self.plain(x)
        return self.hook_out.again(*self.normalise(x))

    def plain(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        """The norm without hook points."""
        return _norm(x, self.eps, self._gain())

    def normalise(self, x: Float[Tensor, "*axes d"]) -> Made:
        """Everything before `hook_out`."""
        watched = self.hook_scale.live or self.hook_normalized.live
        if not watched or (
            self.hook_scale.defer(self._scale, x)
            and self.hook_normalized.defer(self._normalized, x)
        ):
            return Made(self.plain(x), self._way(), x)
        scale, explicit = self.hook_scale.watch(self._scale(x))
        normalized = self.hook_normalized(wide(x) / scale if explicit else self._normalized(x))
        if self.weight is not None:
            normalized = normalized * self.weight.to(normalized.dtype)
        return Made(normalized.to(x.dtype), None, x)

    def _gain(self) -> Float[Tensor, " d"] | None:
        """The weight, also where torch computes it of others (`parametrize`, `prune`)."""
        weight = self._parameters.get("weight")  # nn.Module's own look-up is a call
        return self.weight if weight is None else weight

    def _way(self) -> Make:
        """`plain` with the gain as it is now: what is done to weights after a run does not change what it keeps."""
        weight = self._gain()
        if weight is None:
            return self._without_gain
        return partial(_norm, eps=self.eps, weight=weight.detach().clone())


class LayerNorm(nn.Module):
    """torch's LayerNorm; its scale and normalised form are computed beside it while somebody listens."""

    def __init__(self, d: int, has_weights: bool) -> None:
        super().__init__()
        if has_weights:
            self.weight, self.bias = empty(d), empty(d)
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, x: Float[Tensor, "*axes d"], weights: LayerNorm) -> Float[Tensor, "*axes d"]:
        out = (
            self._explicit(x, weights)
            if self.hook_scale.live or self.hook_normalized.live
            else None
        )
        if out is None:
            out = F.layer_norm(x, x.shape[-1:], weights.weight, weights.bias, LAYER_NORM_EPS)
        return self.hook_out(out)

    def _explicit(self, x: Tensor, weights: LayerNorm) -> Tensor | None:
        """The long form, or None when nobody changed anything."""
        centred = wide(x) - wide(x).mean(-1, keepdim=True)
        scale, by_scale = self.hook_scale.watch(
            (centred.pow(2).mean(-1, keepdim=True) + LAYER_NORM_EPS).sqrt()
        )
        normalized, by_value = self.hook_normalized.watch(centred / scale)
        if not (by_scale or by_value):
            return None
        return (normalized * wide(weights.weight) + wide(weights.bias)).to(x.dtype)


class Shown(nn.Module):
    """A value of another block, shown here under the name it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_out = HookPoint()
