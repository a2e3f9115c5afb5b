"""What a head looks for and what it moves, as matrices on the stream: QK and OV, their composition, their vectors.

    score[q, k] = x_q @ QK @ x_k          x are vectors of the stream (hook_resid_pre)
    added[q]   += pattern[q, k] * x_k @ OV

Between the stream and these products stand norms, and a norm is a gain times a vector over the vector's own scale. The
gains are folded in. The scales depend on the input: they are frozen, at 1 or at a run's own (`qk_scales`,
`ov_scales`), with which the products are the run's own numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from lens_gemma4.cache import ActivationCache
from lens_gemma4.config import HookedConfig, LayerConfig
from lens_gemma4.factored import FactoredMatrix, product_norms
from lens_gemma4.model import Block, Gemma4, rotary_frequencies, rotate, turns_of
from lens_gemma4.norms import RMSNorm, wide

if TYPE_CHECKING:
    import pandas

Mode = Literal["Q", "K", "V"]
VectorType = Literal["OV", "w_in", "w_gate", "w_out"]
Scales = int | float | Float[Tensor, "*axes"]

# -- the two circuits ---------------------------------------------------------------------------------


def qk(
    model: Gemma4,
    layer: int,
    head: int | None = None,
    *,
    offset: int | None = None,
    scales: Scales = 1.0,
) -> FactoredMatrix:
    """What a head looks for: `x_q @ QK @ x_k` is its attention score, `[d_model d_model]`, query side first.

    Folded in: the gains of ln1, q_norm and k_norm, the projections, the rotary turn at `offset`. Scores are not
    divided by anything in this family. Frozen: the scales of ln1 at query and key, of q_norm and of k_norm, whose
    product divides the score.

    Query heads share key heads: head h reads key/value head `h // heads_per_kv`. A block that borrows its keys reads
    them from the **lender's** input, through the lender's ln1, projection and k_norm: there `x_k` is the stream entering
    the lender.

    Args:
        layer, head: negative counts from the end; without a head, all of the block, `[head d_model d_model]`.
        offset: query position minus key position, in tokens. On full blocks only the part of a head that turns does.
            None leaves the rotary out, which is offset 0.
        scales: divides the matrix: 1, or `qk_scales(cache, layer, head)[0, q, k]`. Axes of a tensor come before the
            matrix's own; without a head its last one is head.
    Returns:
        Float32 at least; float64 of a float64 model.
    Raises:
        IndexError: no such block or head.

    >>> from lens_gemma4 import HookedModel
    >>> qk(HookedModel.from_pretrained("tiny"), 3, 0, offset=1)
    FactoredMatrix([96, 96], through 64, torch.float32)
    """
    block, source = _blocks(model, layer)
    chosen = _heads(block.cfg, head)
    queries = _folded(block.attn.W_Q[chosen], _gain(block.ln1), _gain(block.attn.q_norm))
    if offset is not None:
        queries = _turned(queries, block.cfg, offset)
    keys = source.attn.W_K[chosen // block.cfg.heads_per_kv]
    keys = _folded(keys, _gain(source.ln1), _gain(source.attn.k_norm))
    return _matrix(queries, keys.mT, head, scales)


def ov(
    model: Gemma4, layer: int, head: int | None = None, *, scales: Scales = 1.0
) -> FactoredMatrix:
    """What a head moves: attending to a source whose stream is `x`, it adds `x @ OV` to its own, `[d_model d_model]`.

    Folded in: the gain of ln1, the value projection (the keys' own on k=v blocks), the head's rows of W_O, the gain of
    ln1_post. Frozen: the scales of ln1 and v_norm at the source and of ln1_post at the destination, whose product
    divides what is added. That last one is shared: it is the RMS of all heads' sum, so a head that is ablated changes
    what the others add. Added means at `hook_attn_out`: the block's `layer_scalar`, which multiplies the
    whole stream after the MLP, comes later and is not in here.

    A block that borrows its values reads them from the **lender's** input: `x` is the stream entering the lender.

    Args:
        layer, head: negative counts from the end; without a head, all of the block, `[head d_model d_model]`.
        scales: divides the matrix: 1, or `ov_scales(cache, layer, head)[0, destination, source]`; see `qk`.
    Returns:
        Float32 at least; float64 of a float64 model.
    Raises:
        IndexError: no such block or head.

    >>> from lens_gemma4 import HookedModel
    >>> ov(HookedModel.from_pretrained("tiny"), 3, 0).S.shape
    torch.Size([64])
    """
    block, source = _blocks(model, layer)
    chosen = _heads(block.cfg, head)
    values = wide(source.attn.W_V[chosen // block.cfg.heads_per_kv])
    values = values * _gain(source.ln1)[:, None]
    written = wide(block.attn.W_O[chosen]) * _gain(block.ln1_post)
    return _matrix(values, written, head, scales)


def qk_scales(
    cache: ActivationCache, layer: int, head: int | None = None
) -> Float[Tensor, "*axes pos kv_pos"]:
    """The product of scales that divides each score of a run, `[batch pos kv_pos]`; without a head,
    `[batch head pos kv_pos]`.

    Raises:
        HookNameError: the run did not keep the `hook_scale` of ln1, q_norm and k_norm.
    """
    own, source = _layers(cache.cfg, layer)
    queries = cache["scale", own.index, "ln1"] * cache["scale", own.index, "attn.q_norm"][..., 0]
    keys = cache["scale", source, "ln1"] * cache["scale", source, "attn.k_norm"][..., 0]
    return _by_pair(queries, keys, own, head)


def ov_scales(
    cache: ActivationCache, layer: int, head: int | None = None
) -> Float[Tensor, "*axes pos kv_pos"]:
    """The product of scales that divides what a source adds to a destination, `[batch pos kv_pos]`, destination
    first; without a head, `[batch head pos kv_pos]`.

    Raises:
        HookNameError: the run did not keep the `hook_scale` of ln1, v_norm and ln1_post.
    """
    own, source = _layers(cache.cfg, layer)
    added = cache["scale", own.index, "ln1_post"]
    added = added.expand(*added.shape[:-1], own.n_heads)  # [*batch pos head]: all heads share it
    values = cache["scale", source, "ln1"] * cache["scale", source, "attn.v_norm"][..., 0]
    return _by_pair(added, values, own, head)


def _layers(cfg: HookedConfig, layer: int) -> tuple[LayerConfig, int]:
    """A block's sizes, and the block whose input its keys and values are made of."""
    own = cfg.layer(layer)
    return own, own.index if own.lender is None else own.lender


def _blocks(model: Gemma4, layer: int) -> tuple[Block, Block]:
    own, source = _layers(model.cfg, layer)
    return model.blocks[own.index], model.blocks[source]


def _heads(layer: LayerConfig, head: int | None) -> Tensor:
    """The chosen heads' numbers, `[head]`."""
    if head is None:
        return torch.arange(layer.n_heads)
    if not -layer.n_heads <= head < layer.n_heads:
        raise IndexError(f"no head {head}: block {layer.index} has heads 0 to {layer.n_heads - 1}")
    return torch.tensor([head % layer.n_heads])


def _folded(
    weight: Float[Tensor, "head d_model d_head"],
    before: Float[Tensor, " d_model"],
    after: Float[Tensor, " d_head"],
) -> Float[Tensor, "head d_model d_head"]:
    """A projection between the gains of the two norms around it."""
    return wide(weight) * before[:, None] * after


def _gain(norm: RMSNorm) -> Float[Tensor, " d"]:
    if norm.weight is None:
        raise ValueError("this norm has no gain")
    return wide(norm.weight)


def _turned(
    queries: Float[Tensor, "head d_model d_head"], layer: LayerConfig, offset: int
) -> Float[Tensor, "head d_model d_head"]:
    """Queries turned by `offset` positions. Turning both by their own positions leaves the difference."""
    frequencies = rotary_frequencies(layer.rotary, layer.d_head, queries.dtype)
    angles = (offset * frequencies).to(queries.device).expand(1, queries.shape[1], -1)
    return rotate(queries[:, :, None], *turns_of(angles))[:, :, 0]  # [head d_model d_head]


def _matrix(A: Tensor, B: Tensor, head: int | None, scales: Scales) -> FactoredMatrix:
    """Both sides over the scales, without the head axis when one head was asked for."""
    if head is not None:
        A, B = A[0], B[0]
    if isinstance(scales, Tensor):
        scales = scales.to(A)[..., None, None]
    return FactoredMatrix(A / scales, B)


def _by_pair(
    queries: Float[Tensor, "*batch pos head"],
    keys: Float[Tensor, "*batch kv_pos kv_head"],
    layer: LayerConfig,
    head: int | None,
) -> Float[Tensor, "*axes pos kv_pos"]:
    chosen = _heads(layer, head).to(queries.device)
    rows = queries[..., chosen].mT[..., :, None]  # [*batch head pos 1]
    columns = keys[..., chosen // layer.heads_per_kv].mT[..., None, :]  # [*batch head 1 kv_pos]
    both = rows * columns
    return both if head is None else both[..., 0, :, :]


# -- composition --------------------------------------------------------------------------------------


def all_composition_scores(
    model: Gemma4, mode: Mode, *, offset: int | None = None
) -> Float[Tensor, "earlier head later later_head"]:
    """How much each later head reads of what each earlier head writes, `[L1 H1 L2 H2]`.

    `|OV1 @ M| / (|OV1| |M|)` with M the later head's QK (mode "Q": its queries read), its transpose ("K": its keys
    read) or its OV ("V": its values read), all with gains folded in. Scales that norms freeze and layer scalars cancel.
    0 where the earlier block is not below the one whose input is read: the later block itself, or for keys and values of
    a block that borrows them, its lender.

    Args:
        offset: rotary between query and key of the later head; see `qk`.
    Raises:
        ValueError: another mode.

    No `[d_model d_model]` product is made. On the 12B a mode takes 100 T multiplications and 3.5 GB beside the weights: a
    minute on a card, many on a CPU; a bar shows.

    >>> from lens_gemma4 import HookedModel
    >>> all_composition_scores(HookedModel.from_pretrained("tiny"), "K").shape
    torch.Size([8, 4, 8, 4])
    """
    if mode not in ("Q", "K", "V"):
        raise ValueError(f'mode is {mode!r}; use "Q", "K" or "V": what the later head reads with')
    n = model.cfg.n_layers
    lefts = [_unit(ov(model, layer).reduce_l()) for layer in range(n)]
    heads = model.cfg.n_heads
    scores = torch.zeros(n, heads, n, heads, dtype=lefts[0].dtype, device=lefts[0].device)
    for later in tqdm(range(n), desc=f"{mode} composition", delay=2, leave=False):
        right = _unit(_reader(model, later, mode, offset).reduce_r())
        for earlier in range(_read_at(model.cfg, later, mode)):
            scores[earlier, :, later] = product_norms(lefts[earlier], right)
    return scores


def _reader(model: Gemma4, layer: int, mode: Mode, offset: int | None) -> FactoredMatrix:
    """All heads of a block, with the side that reads the stream first."""
    if mode == "V":
        return ov(model, layer)
    circuit = qk(model, layer, offset=offset)
    return circuit if mode == "Q" else circuit.T


def _read_at(cfg: HookedConfig, layer: int, mode: Mode) -> int:
    own, source = _layers(cfg, layer)
    return own.index if mode == "Q" else source


def _unit(x: Float[Tensor, "head k j"]) -> Float[Tensor, "head k j"]:
    """Each over its Frobenius norm."""
    return x / torch.linalg.matrix_norm(x, keepdim=True)


def composition_table(
    scores: Float[Tensor, "earlier head later later_head"], top: int | None = None
) -> pandas.DataFrame:
    """Composition scores as rows, highest first: columns `earlier` and `later` ("L3H1") and `score`.

    Args:
        scores: of `all_composition_scores`; pairs that cannot compose (0) are left out.
        top: this many rows.
    """
    import pandas as pd

    places = scores.nonzero()
    values = scores[tuple(places.T)]
    order = values.argsort(descending=True, stable=True)[:top]
    rows = [
        (f"L{l1}H{h1}", f"L{l2}H{h2}", value)
        for (l1, h1, l2, h2), value in zip(
            places[order].tolist(), values[order].tolist(), strict=True
        )
    ]
    return pd.DataFrame(rows, columns=["earlier", "later", "score"])


# -- singular vectors as tokens -----------------------------------------------------------------------


class SVDInterpreter:
    """The directions that a weight matrix writes or reads most strongly, seen through the unembedding.

    Source: Millidge and Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly
    Interpretable" (2022); TransformerLens's class of this name.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> vectors = SVDInterpreter(model).get_singular_vectors("OV", 3, num_vectors=2, head_index=0)
    >>> words = [model.to_single_str_token(int(i)) for i in vectors[:, 0, 0].topk(5).indices]
    """

    def __init__(self, model: Gemma4) -> None:
        self.model = model
        self.cfg = model.cfg

    @torch.no_grad()
    def get_singular_vectors(
        self,
        vector_type: VectorType,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Float[Tensor, "d_vocab 1 vector"]:
        """The first singular vectors on the stream's side as logits, before the softcap.

        Args:
            vector_type: "OV" (what a head writes), "w_out" (what the MLP writes), "w_in" or "w_gate" (what its two
                projections read). Gains of the norms beside them and of the final norm are folded in, all scales at 1.
            head_index: of "OV", and only there.
        Returns:
            `[d_vocab 1 vector]`, strongest first. A singular vector has no sign: here its largest logit by magnitude is
            positive.
        Raises:
            ValueError: another type, a head where there is none or the reverse, more vectors than there are.
            IndexError: no such block or head.
        """
        directions = self._directions(vector_type, layer_index, head_index)  # [vector d_model]
        if not 0 < num_vectors <= len(directions):
            raise ValueError(
                f"num_vectors is {num_vectors}; {vector_type} of block {layer_index} has 1 to {len(directions)}"
            )
        through = directions[:num_vectors] * _gain(self.model.ln_final)
        logits = through.to(self.model.dtype) @ self.model.unembedding.T  # [vector d_vocab]
        largest = logits.gather(1, logits.abs().argmax(1, keepdim=True))
        return (logits * largest.sign()).T[:, None]

    def _directions(
        self, vector_type: VectorType, layer: int, head: int | None
    ) -> Float[Tensor, "vector d_model"]:
        if vector_type not in ("OV", "w_in", "w_gate", "w_out"):
            raise ValueError(
                f'vector_type is {vector_type!r}; use "OV", "w_in", "w_gate" or "w_out"'
            )
        if (vector_type == "OV") != (head is not None):
            raise ValueError(
                f'vector_type is {vector_type!r} and head_index {head}: "OV" needs a head, an MLP has none'
            )
        if vector_type == "OV":
            return ov(self.model, layer, head).V.T
        block = self.model.blocks[self.cfg.layer(layer).index]
        norm = block.ln2_post if vector_type == "w_out" else block.ln2
        stored: Any = getattr(block.mlp, vector_type)
        weight = stored.T if vector_type == "w_out" else stored  # [d_mlp d_model]
        # Only the stream's side is wanted, so the tall matrix is brought to a square one first.
        core = torch.linalg.qr(wide(weight) * _gain(norm), mode="r").R
        return torch.linalg.svd(core, full_matrices=False).Vh


__all__ = [
    "SVDInterpreter",
    "all_composition_scores",
    "composition_table",
    "ov",
    "ov_scales",
    "qk",
    "qk_scales",
]
