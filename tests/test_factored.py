"""Everything a FactoredMatrix says of itself, against the product written out, in float64."""

import doctest

import pytest
import torch

from lens_gemma4 import FactoredMatrix, HookedModel, factored
from lens_gemma4.factored import composition_scores

CLOSE = {"atol": 1e-10, "rtol": 1e-10}
# (lead of A, lead of B, l, m, r): thin, wide inside, more inside than out, no two sizes alike, broadcast leads
SHAPES = [
    ((), (), 7, 3, 5),
    ((4,), (4,), 7, 3, 5),
    ((4, 1), (2,), 3, 6, 5),
    ((2,), (), 5, 9, 3),
]


def drawn(*shape, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def make(lead_a=(), lead_b=(), l=7, m=3, r=5, seed=0):  # noqa: E741
    return FactoredMatrix(drawn(*lead_a, l, m, seed=seed), drawn(*lead_b, m, r, seed=seed + 1))


@pytest.fixture(params=SHAPES, ids=str)
def matrix(request):
    return make(*request.param)


def same(got, want):
    torch.testing.assert_close(got, want, **CLOSE)


def test_it_is_the_product_of_its_factors(matrix):
    dense = matrix.A @ matrix.B
    assert matrix.shape == dense.shape and matrix.ndim == dense.ndim
    assert matrix.has_leading_dims == (dense.ndim > 2)
    assert (matrix.ldim, matrix.rdim) == dense.shape[-2:] and matrix.mdim == matrix.A.shape[-1]
    same(matrix.AB, dense)
    same(matrix.T.AB, dense.mT)
    assert matrix.pair == (matrix.A, matrix.B)
    assert matrix.A.shape[:-2] == matrix.B.shape[:-2] == dense.shape[:-2]
    assert "through" in repr(matrix)


def test_the_decomposition_gives_the_matrix_back(matrix):
    U, S, V = matrix.svd()
    rank = min(matrix.ldim, matrix.mdim, matrix.rdim)
    assert S.shape == (*matrix.shape[:-2], rank)
    same(U * S[..., None, :] @ V.mT, matrix.AB)
    same(S, torch.linalg.svdvals(matrix.AB)[..., :rank])
    same(U.mT @ U, torch.eye(rank, dtype=U.dtype).expand(*matrix.shape[:-2], -1, -1))
    same(V.mT @ V, torch.eye(rank, dtype=U.dtype).expand(*matrix.shape[:-2], -1, -1))
    assert matrix.U is U and matrix.S is S and matrix.V is V and matrix.Vh is V
    with pytest.raises(AssertionError):  # the singular values of one factor are not the product's
        same(S, torch.linalg.svdvals(matrix.A)[..., :rank])


def test_norms_and_collapsed_forms(matrix):
    dense = matrix.AB
    same(matrix.norm(), torch.linalg.matrix_norm(dense))
    assert not torch.allclose(
        matrix.norm(), torch.linalg.matrix_norm(matrix.A) * torch.linalg.matrix_norm(matrix.B)
    )
    same(matrix.collapse_r() @ matrix.V.mT, dense)
    same(matrix.U @ matrix.collapse_l(), dense)
    # without an orthogonal factor, products have the same singular values
    same(matrix.reduce_l().mT @ matrix.reduce_l(), dense.mT @ dense)
    same(matrix.reduce_r() @ matrix.reduce_r().mT, dense @ dense.mT)
    assert matrix.reduce_l().shape[-2] == min(matrix.ldim, matrix.mdim)
    assert matrix.reduce_r().shape[-1] == min(matrix.mdim, matrix.rdim)


def test_even_factors(matrix):
    even = matrix.make_even()
    same(even.AB, matrix.AB)
    same(torch.linalg.svdvals(even.A), torch.linalg.svdvals(even.B))
    same(torch.linalg.svdvals(even.A)[..., : matrix.S.shape[-1]], matrix.S.sqrt())
    plain = torch.linalg.svdvals(matrix.A)[..., :3]
    assert not torch.allclose(plain, torch.linalg.svdvals(matrix.B)[..., :3])


@pytest.mark.parametrize(
    ("lead", "l", "m"), [((), 6, 3), ((2,), 6, 3), ((), 3, 6)], ids=["thin", "lead", "wide"]
)
def test_eigenvalues_are_those_of_the_product(lead, l, m):  # noqa: E741
    matrix = make(lead, (), l, m, l)
    count = min(l, m)
    dense = torch.linalg.eigvals(matrix.AB)
    dense = dense.gather(-1, dense.abs().argsort(dim=-1, descending=True, stable=True))
    assert matrix.eigenvalues.shape == (*lead, count)
    same(matrix.eigenvalues.abs(), dense.abs()[..., :count])  # conjugates tie
    same(matrix.eigenvalues.sum(-1).real, matrix.AB.diagonal(dim1=-2, dim2=-1).sum(-1))
    same(matrix.BA, matrix.B @ matrix.A)
    assert not torch.allclose(matrix.eigenvalues.abs()[..., :count], matrix.S[..., :count])


def test_only_square_matrices_have_eigenvalues():
    for what in ("BA", "eigenvalues"):
        with pytest.raises(ValueError, match=rf"{what} is of square matrices.*\[7, 5\]"):
            getattr(make(), what)


def test_products(matrix):
    dense = matrix.AB
    right, left = drawn(matrix.rdim, 4), drawn(4, matrix.ldim)
    assert isinstance(matrix @ right, FactoredMatrix) and isinstance(left @ matrix, FactoredMatrix)
    same((matrix @ right).AB, dense @ right)
    same((left @ matrix).AB, left @ dense)
    same(matrix @ right[:, 0], dense @ right[:, 0])
    same(left[0] @ matrix, left[0] @ dense)
    assert (matrix @ right[:, 0]).shape == matrix.shape[:-1]
    for times in (2, -0.5, torch.tensor(3.0), torch.tensor([3.0])):
        same((matrix * times).AB, dense * float(times))
        same((times * matrix).AB, dense * float(times))


@pytest.mark.parametrize("inner", [2, 8])
def test_a_product_of_two_keeps_the_smaller_inner_size(matrix, inner):
    other = make(r=6, l=matrix.rdim, m=inner, seed=3)
    product = matrix @ other
    same(product.AB, matrix.AB @ other.AB)
    assert product.mdim == min(matrix.mdim, inner)
    assert product.shape == (*matrix.shape[:-1], 6)


@pytest.mark.parametrize(
    "index",
    [
        1,
        -1,
        slice(1, 3),
        [0, 2],
        torch.tensor([2, 0]),
        (1, slice(2, 5)),
        (slice(None), slice(2, 5), slice(None, None, 2)),
        (1, [0, 6], [1, 2, 4]),
        (..., slice(2)),
        (..., 3),
        (1, ...),
        (..., slice(1, 2), slice(3)),
        (torch.tensor([True, False, True, False]), [1, 2]),
        ...,
        (),
    ],
    ids=str,
)
def test_an_index_takes_what_it_takes_of_the_product(index):
    matrix = make((4,), (4,))
    whole = index if isinstance(index, tuple) else (index,)
    dense = matrix.AB
    # written out: a number keeps rows and columns, and lists take a grid
    if Ellipsis in [item for item in whole if not isinstance(item, torch.Tensor)]:
        at = [item is Ellipsis for item in whole].index(True)
        whole = (*whole[:at], *[slice(None)] * (4 - len(whole)), *whole[at + 1 :])
    whole = (*whole, *[slice(None)] * (3 - len(whole)))
    keep = [[item] if isinstance(item, int) else item for item in whole[1:]]
    same(matrix[index].AB, dense[whole[0]][..., keep[0], :][..., keep[1]])
    assert matrix[index].mdim == matrix.mdim


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 1, 2, 3), "at most 3 places"),
        ((..., ...), "one '...'"),
        ((None,), "use unsqueeze"),
        ((0, 7), "no row 7: there are 7"),
        ((0, 0, -6), "no column -6: there are 5"),
    ],
)
def test_an_index_that_does_not_fit_says_so(index, message):
    with pytest.raises(IndexError, match=message):
        make((4,), (4,))[index]


def test_corner_and_unsqueeze():
    matrix = make((4,), (4,))
    same(matrix.get_corner(2), matrix.AB[:2, :2, :2])
    same(matrix.get_corner(), matrix.AB[:3, :3, :3])
    for k in range(2):
        same(matrix.unsqueeze(k).AB, matrix.AB.unsqueeze(k))
    for k in (2, -1):
        with pytest.raises(IndexError, match="leading axes at 0 to 1"):
            matrix.unsqueeze(k)


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (
            lambda: FactoredMatrix(drawn(4, 3), drawn(4, 3)),
            ValueError,
            r"\[4, 3\] and B is \[4, 3\]",
        ),
        (lambda: FactoredMatrix(drawn(4), drawn(4, 3)), ValueError, "same m"),
        (
            lambda: FactoredMatrix(drawn(2, 4, 3), drawn(5, 3, 4)),
            ValueError,
            r"do not broadcast: \[2\] and \[5\]",
        ),
        (
            lambda: FactoredMatrix(drawn(4, 3), drawn(3, 4).float()),
            TypeError,
            "float64 and B is torch.float32",
        ),
        (lambda: make() @ drawn(7), ValueError, r"\[7, 5\] @ \[7\]: 5 columns do not meet 7 rows"),
        (
            lambda: drawn(2, 5) @ make(),
            ValueError,
            r"\[2, 5\] @ \[7, 5\]: 5 columns do not meet 7 rows",
        ),
        (lambda: make() * drawn(2), ValueError, "use @ for products"),
        (lambda: make() @ 3, TypeError, "unsupported operand"),
        (
            lambda: composition_scores(make(), make()),
            ValueError,
            "5 columns do not meet 7 rows",
        ),
    ],
)
def test_errors_name_the_shapes(make_it, error, message):
    with pytest.raises(error, match=message):
        make_it()


def test_bfloat16_is_decomposed_in_float32():
    matrix = make()
    low = FactoredMatrix(matrix.A.bfloat16(), matrix.B.bfloat16())
    assert low.AB.dtype == torch.bfloat16 and low.S.dtype == torch.float32
    wide = FactoredMatrix(low.A.double(), low.B.double())
    torch.testing.assert_close(low.S.double(), wide.S, atol=1e-5, rtol=1e-5)


def test_the_product_is_made_by_nothing_but_ab(monkeypatch):
    matrix = make(l=40, m=2, r=40)

    def refuse(self):
        raise AssertionError("the product was written out")

    monkeypatch.setattr(FactoredMatrix, "AB", property(refuse))
    matrix.svd(), matrix.norm(), matrix.eigenvalues, matrix.make_even(), matrix[3], repr(matrix)
    composition_scores(matrix, matrix)
    assert all(
        max(t.shape) < 40 or min(t.shape) <= 2
        for t in (*(matrix @ matrix).pair, *matrix.T.pair, matrix.reduce_l(), matrix.reduce_r())
    )


# -- composition --------------------------------------------------------------------------------------


def dense_score(left, right):
    norm = torch.linalg.matrix_norm
    return norm(left @ right) / (norm(left) * norm(right))


def test_composition_of_every_pair_is_the_dense_one():
    left, right = make((4,), (4,)), make((2, 3), (3,), 5, 8, 6, seed=5)
    got = composition_scores(left, right)
    assert got.shape == (4, 2, 3)
    want = dense_score(left.AB[:, None, None], right.AB[None])
    same(got, want)
    same(composition_scores(left * 7, right * -0.1), got)
    with pytest.raises(AssertionError):  # without the norms
        same(got, torch.linalg.matrix_norm(left.AB[:, None, None] @ right.AB[None]))
    with pytest.raises(AssertionError):  # the other side read
        same(got, dense_score(left.AB[:, None, None], right.AB.flip(-2)[None]))


def test_composition_side_by_side():
    left, right = make((4,), (4,)), make((4,), (), 5, 2, 6, seed=5)
    same(
        composition_scores(left, right, broadcast_dims=False),
        composition_scores(left, right).diagonal(),
    )
    one = composition_scores(left[0], right[0])
    assert one.shape == () and 0 < one < 1


def test_the_examples_run():
    ran = doctest.testmod(factored, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
