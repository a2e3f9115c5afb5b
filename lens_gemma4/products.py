"""Products with a weight, spelled as a CPU computes them quickest; they round otherwise than `F.linear`.

For runs that are equal to transformers' to rounding anyway: variants of a sweep, and decoding on a key/value cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# A product of one row is cut into so many, which one call computes as a batch.
PIECES = 8
# Numbers of a weight from which its reading is what a product costs: below, nothing is gained.
MANY = 2**16
# Rows of a product up to which decoding spells it otherwise. From four on `F.linear` sums in blocks: over thousands of inputs it
# is half as far from the exact sum, and as quick.
FEW = 3


def product(x: Float[Tensor, "*rows i"], w: Float[Tensor, "o i"]) -> Float[Tensor, "*rows o"]:
    """`x @ w.T`. On a CPU the weight stands on the left: 30 to 300 rows run 1.4 times as fast so."""
    if x.is_cuda or not x.numel():
        return F.linear(x, w)
    return (w @ x.flatten(0, -2).T).T.unflatten(0, x.shape[:-1])


def product_of_few(
    x: Float[Tensor, "*rows i"], w: Float[Tensor, "o i"]
) -> Float[Tensor, "*rows o"]:
    """`x @ w.T` for the few rows of a decoding step.

    In float32 on a CPU a product of one row is slower than reading its weight must be (10 GB/s of 25 here, for 512
    inputs): as a batch of pieces it runs up to 2.4 times as fast, and two or three rows do with the weight on the left.
    """
    rows = x.shape[:-1].numel()
    if x.is_cuda or x.dtype != torch.float32 or not 0 < rows <= FEW or w.numel() < MANY:
        return F.linear(x, w)
    out = w.shape[0]
    if rows > 1 or out % PIECES:
        return product(x, w)
    pieces = w.unflatten(0, (PIECES, -1))  # [piece o i]
    # A transposed row, not a column: by the strides of an axis of one MKL picks a kernel six times as fast.
    column = x.reshape(1, -1).T.expand(PIECES, -1, 1)
    return torch.bmm(pieces, column).reshape(*x.shape[:-1], out)
