"""`FactoredMatrix`: a matrix of low rank as a product of two, with its algebra done on the factors.

A head's circuits are `[d_model d_model]` and of rank `d_head`: 3840 x 3840 made of two 3840 x 256 on the 12B.
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor


class FactoredMatrix:
    """The matrix `A @ B`, `[*lead l r]`, kept as `A [*lead l m]` and `B [*lead m r]`.

    The product itself is made by `AB` and by nothing else. Leading axes of A and B broadcast. Decompositions are
    computed in float32 at least and once: they do not follow later writes into A or B.

    Raises:
        ValueError: the inner sizes differ, or the leading axes do not broadcast.
        TypeError: two dtypes.
    Source: TransformerLens's FactoredMatrix, for names and meanings.

    >>> M = FactoredMatrix(torch.ones(5, 2), torch.ones(2, 4))
    >>> M.shape, M.norm()
    (torch.Size([5, 4]), tensor(8.9443))
    """

    def __init__(self, A: Float[Tensor, "*a"], B: Float[Tensor, "*b"]) -> None:
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise ValueError(
                f"A is {list(A.shape)} and B is {list(B.shape)}; needed are [... l m] and [... m r] with the same m"
            )
        if A.dtype != B.dtype:
            raise TypeError(f"A is {A.dtype} and B is {B.dtype}: convert one of them")
        try:
            lead = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError as error:
            raise ValueError(
                f"the leading axes of A {list(A.shape)} and B {list(B.shape)} do not broadcast: "
                f"{list(A.shape[:-2])} and {list(B.shape[:-2])}"
            ) from error
        self.A, self.B = A.expand(*lead, *A.shape[-2:]), B.expand(*lead, *B.shape[-2:])
        self.ldim, self.mdim, self.rdim = A.shape[-2], A.shape[-1], B.shape[-1]
        self.shape = torch.Size((*lead, self.ldim, self.rdim))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def has_leading_dims(self) -> bool:
        return self.ndim > 2

    @property
    def pair(self) -> tuple[Float[Tensor, "*lead l m"], Float[Tensor, "*lead m r"]]:
        return self.A, self.B

    @property
    def AB(self) -> Float[Tensor, "*lead l r"]:
        """The product, written out."""
        return self.A @ self.B

    @property
    def BA(self) -> Float[Tensor, "*lead m m"]:
        """The factors the other way round, which has the same eigenvalues but for zeros.

        Raises:
            ValueError: the matrix is not square.
        """
        self._check_square("BA")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __repr__(self) -> str:
        return f"FactoredMatrix({list(self.shape)}, through {self.mdim}, {self.A.dtype})"

    def _check_square(self, what: str) -> None:
        if self.ldim != self.rdim:
            raise ValueError(f"{what} is of square matrices; this one is {list(self.shape)}")

    # -- products ---------------------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        """With a vector `[r]` a vector `[*lead l]`; with a matrix, factored or not, a FactoredMatrix."""
        shape = _shape(other)
        if shape is None:
            return NotImplemented
        if shape[-1 if len(shape) == 1 else -2] != self.rdim:
            raise ValueError(
                f"{list(self.shape)} @ {list(shape)}: {self.rdim} columns do not meet "
                f"{shape[-1 if len(shape) == 1 else -2]} rows"
            )
        if isinstance(other, FactoredMatrix):
            middle = self.B @ other.A  # [*lead m m]
            if self.mdim <= other.mdim:  # the smaller inner size is kept
                return FactoredMatrix(self.A, middle @ other.B)
            return FactoredMatrix(self.A @ middle, other.B)
        if other.ndim == 1:
            return (self.A @ (self.B @ other)[..., None])[..., 0]  # [*lead l]
        return FactoredMatrix(self.A, self.B @ other)

    def __rmatmul__(self, other: Any) -> Any:
        """As `@` from the right: a vector `[l]` gives `[*lead r]`."""
        shape = _shape(other)
        if shape is None:
            return NotImplemented
        if shape[-1] != self.ldim:
            raise ValueError(
                f"{list(shape)} @ {list(self.shape)}: {shape[-1]} columns do not meet {self.ldim} rows"
            )
        if other.ndim == 1:
            return (other @ self.A)[..., None, :].matmul(self.B)[..., 0, :]  # [*lead r]
        return FactoredMatrix(other @ self.A, self.B)

    def __mul__(self, scalar: int | float | Float[Tensor, "*one"]) -> FactoredMatrix:
        """Times a number, or a tensor of one."""
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(
                f"* takes a number, got {list(scalar.shape)}: use @ for products of matrices"
            )
        number = scalar.reshape(()).to(self.A) if isinstance(scalar, Tensor) else scalar
        return FactoredMatrix(self.A * number, self.B)

    __rmul__ = __mul__

    # -- decompositions ---------------------------------------------------------------------------------

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        left, left_core = torch.linalg.qr(_wide(self.A))  # [*lead l k] [*lead k m]
        right, right_core = torch.linalg.qr(_wide(self.B.mT))
        inner = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
        return left @ inner.U, inner.S, right @ inner.Vh.mT

    def svd(
        self,
    ) -> tuple[
        Float[Tensor, "*lead l rank"], Float[Tensor, "*lead rank"], Float[Tensor, "*lead r rank"]
    ]:
        """(U, S, V) with `U @ diag(S) @ V.mT` the matrix, largest first; rank is min(l, m, r)."""
        return self._svd

    @property
    def U(self) -> Float[Tensor, "*lead l rank"]:
        return self._svd[0]

    @property
    def S(self) -> Float[Tensor, "*lead rank"]:
        return self._svd[1]

    @property
    def V(self) -> Float[Tensor, "*lead r rank"]:
        """Right singular vectors, in columns."""
        return self._svd[2]

    @property
    def Vh(self) -> Float[Tensor, "*lead r rank"]:
        """`V` under TransformerLens's older name: **not** transposed, whatever the name says."""
        return self.V

    @cached_property
    def eigenvalues(self) -> Complex[Tensor, "*lead rank"]:
        """Those that can differ from 0, min(l, m) of them, largest magnitude first.

        Raises:
            ValueError: the matrix is not square.
        """
        self._check_square("eigenvalues")
        # ABv = kv gives BA(Bv) = k(Bv): the smaller of the two products has them all.
        A, B = _wide(self.A), _wide(self.B)
        values = torch.linalg.eigvals(B @ A if self.mdim <= self.ldim else A @ B)
        return values.gather(-1, values.abs().argsort(dim=-1, descending=True, stable=True))

    def norm(self) -> Float[Tensor, "*lead"]:
        """Frobenius norm."""
        return torch.linalg.matrix_norm(self.reduce_l())

    def reduce_l(self) -> Float[Tensor, "*lead k r"]:
        """The matrix without an orthogonal factor on its left, k = min(l, m): a product with it from the left has
        the same norms and singular values. `collapse_l` up to a rotation, and cheaper."""
        return torch.linalg.qr(_wide(self.A), mode="r").R @ _wide(self.B)

    def reduce_r(self) -> Float[Tensor, "*lead l k"]:
        """The same on the right, k = min(m, r)."""
        return self.T.reduce_l().mT

    def collapse_l(self) -> Float[Tensor, "*lead rank r"]:
        """`diag(S) @ V.mT`: the matrix without U."""
        return self.S[..., :, None] * self.V.mT

    def collapse_r(self) -> Float[Tensor, "*lead l rank"]:
        """`U @ diag(S)`: the matrix without V."""
        return self.U * self.S[..., None, :]

    def make_even(self) -> FactoredMatrix:
        """The same matrix with factors of equal singular values, each with orthogonal columns or rows."""
        root = self.S.sqrt()
        return FactoredMatrix(self.U * root[..., None, :], root[..., :, None] * self.V.mT)

    # -- parts ------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Parts of the matrix, still factored: `M[head]`, `M[..., :3, 5]`.

        Leading axes are indexed as a tensor's. A number keeps the row or column axis, with one entry.

        Raises:
            IndexError: too many indices, a place outside, or None (use `unsqueeze`).
        """
        lead, row, column = self._split(index if isinstance(index, tuple) else (index,))
        return FactoredMatrix(
            self.A[lead][..., _kept(row, self.ldim, "row"), :],
            self.B[lead][..., :, _kept(column, self.rdim, "column")],
        )

    def _split(self, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Any]:
        """Index of the leading axes, of rows and of columns, one entry for each axis."""
        dots = [place for place, item in enumerate(index) if item is Ellipsis]
        missing = self.ndim - (len(index) - len(dots))
        if missing < 0 or len(dots) > 1 or any(item is None for item in index):
            raise IndexError(
                f"{index} does not index a matrix of {list(self.shape)}: give at most {self.ndim} places, one '...' "
                "and no None (use unsqueeze)"
            )
        at = dots[0] if dots else len(index)
        whole = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        return whole[:-2], whole[-2], whole[-1]

    def get_corner(self, k: int = 3) -> Float[Tensor, "*corner"]:
        """The first k entries of every axis, written out."""
        index = (slice(k),) * self.ndim
        return self[index].AB

    def unsqueeze(self, k: int) -> FactoredMatrix:
        """With one more leading axis, before axis `k`."""
        if not 0 <= k <= self.ndim - 2:
            raise IndexError(
                f"unsqueeze({k}): a matrix of {list(self.shape)} takes leading axes at 0 to {self.ndim - 2}"
            )
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))


def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "*scores"]:
    """How much of what `left` writes `right` reads: `|left @ right| / (|left| |right|)`, Frobenius norms.

    0 when nothing that leaves `left` is read, 1 at most (both of rank one and aligned). A scale on either side changes
    nothing. No `[l r]` product is made.

    Args:
        broadcast_dims: every pair, left's leading axes first; else leading axes go side by side.
    Raises:
        ValueError: the sizes do not meet.
    Source: Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    >>> e = torch.eye(3)
    >>> a, b = FactoredMatrix(e[:, :1], e[:1]), FactoredMatrix(e[:, 1:], e[1:])
    >>> composition_scores(a, a).item(), composition_scores(a, b).item()
    (1.0, 0.0)
    """
    if left.rdim != right.ldim:
        raise ValueError(
            f"left is {list(left.shape)} and right {list(right.shape)}: {left.rdim} columns do not meet {right.ldim} rows"
        )
    a, b = left.reduce_l(), right.reduce_r()
    norms_a, norms_b = torch.linalg.matrix_norm(a), torch.linalg.matrix_norm(b)
    if not broadcast_dims:
        return torch.linalg.matrix_norm(a @ b) / (norms_a * norms_b)
    by_left = norms_a.reshape((*norms_a.shape, *[1] * norms_b.ndim))
    return product_norms(a, b) / (by_left * norms_b)


def product_norms(
    left: Float[Tensor, "*left k d"], right: Float[Tensor, "*right d j"]
) -> Float[Tensor, "*both"]:
    """Frobenius norm of every product of one of `left` with one of `right`, `[*left *right]`."""
    columns = right.movedim(-2, 0).flatten(1)  # [d right*j]
    rows = [
        (one @ columns).view(len(one), *right.shape[:-2], -1).pow(2).sum((0, -1))
        for one in left.reshape(
            -1, *left.shape[-2:]
        )  # one at a time: [k right*j] is what stands in memory
    ]
    return torch.stack(rows).sqrt().view((*left.shape[:-2], *right.shape[:-2]))


def _shape(other: Any) -> torch.Size | None:
    """Shape of what can be multiplied with a matrix; None of anything else."""
    if isinstance(other, FactoredMatrix):
        return other.shape
    return other.shape if isinstance(other, Tensor) and other.ndim else None


def _kept(place: Any, size: int, what: str) -> Any:
    """A number as a slice of one; anything else as it is."""
    try:
        number = operator.index(place)
    except TypeError:
        return place
    if not -size <= number < size:
        raise IndexError(f"no {what} {number}: there are {size}")
    return slice(number % size, number % size + 1)


def _wide(x: Tensor) -> Tensor:
    """torch.linalg has no 16-bit kernels."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


__all__ = ["FactoredMatrix", "composition_scores", "product_norms"]
