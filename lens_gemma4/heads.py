"""Which heads look where: detectors of previous-token, duplicate-token and induction heads, or of a pattern of yours.

A sliding block's head sees only the last `window` positions, its own included: what a pattern asks for further back it cannot
attend to, and its score says so. Use prompts whose repeats lie within the window to compare sliding and full blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from lens_gemma4.cache import ActivationCache
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.hooks import HookPoint, NamedPoint

HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
ErrorMeasure = Literal["abs", "mul"]
Heads = Sequence[tuple[int, int]] | Mapping[int, Sequence[int]]
Score = Callable[[Float[Tensor, "batch head pos kv_pos"]], Float[Tensor, " head"]]

# -- patterns -----------------------------------------------------------------------------------------


def get_previous_token_head_detection_pattern(
    tokens: Int[Tensor, "*batch pos"],
) -> Float[Tensor, "*batch pos kv_pos"]:
    """1 where each position looks at the one before it.

    >>> get_previous_token_head_detection_pattern(torch.tensor([5, 6, 5]))
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    pos = tokens.shape[-1]
    pattern = torch.eye(pos, device=tokens.device).roll(-1, dims=1).tril(-1)
    return pattern.expand(*tokens.shape, pos)


def get_duplicate_token_head_detection_pattern(
    tokens: Int[Tensor, "*batch pos"],
) -> Float[Tensor, "*batch pos kv_pos"]:
    """1 where a position looks at an earlier one of the same token.

    >>> get_duplicate_token_head_detection_pattern(torch.tensor([5, 6, 5]))
    tensor([[0., 0., 0.],
            [0., 0., 0.],
            [1., 0., 0.]])
    """
    return (tokens[..., :, None] == tokens[..., None, :]).float().tril(-1)


def get_induction_head_detection_pattern(
    tokens: Int[Tensor, "*batch pos"],
) -> Float[Tensor, "*batch pos kv_pos"]:
    """1 where a position looks at what followed an earlier one of the same token.

    >>> get_induction_head_detection_pattern(torch.tensor([5, 6, 5]))
    tensor([[0., 0., 0.],
            [0., 0., 0.],
            [0., 1., 0.]])
    """
    duplicates = get_duplicate_token_head_detection_pattern(tokens)
    return torch.cat((torch.zeros_like(duplicates[..., :1]), duplicates[..., :-1]), dim=-1)


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "previous_token_head": get_previous_token_head_detection_pattern,
    "duplicate_token_head": get_duplicate_token_head_detection_pattern,
    "induction_head": get_induction_head_detection_pattern,
}


def get_supported_heads() -> list[str]:
    """Names that `detect_head` knows. (TransformerLens prints them.)"""
    return list(PATTERNS)


# -- detection ----------------------------------------------------------------------------------------


def detect_head(
    model: HookedModel,
    seq: str | Sequence[str] | Int[Tensor, "*batch pos"],
    detection_pattern: HeadName | str | Float[Tensor, "query key"],
    heads: Heads | None = None,
    cache: ActivationCache | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: ErrorMeasure = "mul",
) -> Float[Tensor, "layer head"]:
    """How closely each head attends as a pattern says, averaged over the texts.

    Args:
        seq: a text, texts (each run by itself), or ids.
        detection_pattern: a name of `get_supported_heads()`, or weights `[pos kv_pos]` for texts of that many tokens.
        heads: those to score, as `[(layer, head)]` or `{layer: [head]}`; all by default. Numbers from the end count too.
        cache: of a run of `seq`, to save running it again. It is not changed.
        exclude_bos: leave out what is paid to the first position.
        exclude_current_token: leave out what each position pays to itself.
        error_measure: "mul": the share of all attention that lies on the pattern, 0 to 1 for patterns of 0 and 1 (0 for a
            head all of whose attention is left out). Positions for which the pattern asks nothing count with all
            they pay, so an induction head stays near 0.5 on a text that is there twice. "abs": 1 minus the absolute
            difference summed over keys and averaged over positions, -1 to 1, for patterns that say where all attention goes.
    Returns:
        `[layer head]`, float32 at least, -1 where a head was not asked for.
    Raises:
        ValueError: an unknown pattern or measure; a pattern or cache of other sizes; a pattern that looks ahead on a
            causal model; a cache with several texts; a text of one token.
        IndexError: no such block or head.
    Source: TransformerLens's head_detector, whose "abs" rounds to three places and this does not.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> scores = detect_head(model, "The capital of France is", "previous_token_head")
    >>> scores.shape
    torch.Size([8, 4])
    """
    if error_measure not in get_args(ErrorMeasure):
        raise ValueError(f'error_measure is {error_measure!r}; use "abs" or "mul"')
    rows = _rows(model, seq)
    if cache is not None and len(rows) > 1:
        raise ValueError(f"a cache is of one run, and seq holds {len(rows)} texts: leave cache out")
    asked = _asked(model, heads)
    totals = []
    for tokens in tqdm(rows, desc="detecting heads", delay=2, leave=False):
        pattern = _pattern(model, tokens, detection_pattern)
        counted = torch.ones_like(pattern, dtype=torch.bool)
        if exclude_bos:
            counted[..., 0] = False
        if exclude_current_token:
            counted.diagonal(dim1=-2, dim2=-1).fill_(False)
        score = _score(pattern, counted, error_measure)
        totals.append(_by_head(model, tokens, asked, score, cache))
    return torch.stack(totals).mean(0)


def induction_scores(
    model: HookedModel,
    batch_size: int = 4,
    subseq_len: int = 384,
    *,
    heads: Heads | None = None,
    seed: int = 0,
) -> Float[Tensor, "layer head"]:
    """How much attention each head pays, on random tokens that come twice, from their second coming to what followed
    the first: 1 for a perfect induction head, `[layer head]`, -1 where a head was not asked for.

    Unlike `detect_head(..., "induction_head")` only positions that have such a place count. One that lies `subseq_len - 1` back is
    out of sight of sliding blocks whose window is shorter. Row by row, so that memory stays small.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> scores = induction_scores(model, subseq_len=12)
    >>> divmod(int(scores.argmax()), 4)[0]
    3
    """
    asked = _asked(model, heads)
    tokens = repeated_tokens(model, batch_size, subseq_len, seed=seed)
    totals = []
    for row in tqdm(tokens.split(1), desc="induction scores", delay=2, leave=False):
        pattern = get_induction_head_detection_pattern(row)

        def score(attention: Tensor, pattern: Tensor = pattern) -> Tensor:
            return _mean_on(attention, pattern)

        totals.append(_by_head(model, row, asked, score))
    return torch.stack(totals).mean(0)


def repeated_tokens(
    model: HookedModel,
    batch_size: int,
    subseq_len: int,
    *,
    prepend_bos: bool = True,
    seed: int | None = None,
) -> Int[Tensor, "batch pos"]:
    """Random tokens twice over, `[batch 2*subseq_len]` and one more with the BOS in front.

    All tokens of a row differ, so what follows each is certain the second time. Special tokens and placeholders of
    media are not among them.

    Raises:
        ValueError: fewer ordinary tokens than asked for.
    """
    ordinary = _ordinary(model)
    if not 0 < subseq_len <= len(ordinary):
        raise ValueError(
            f"subseq_len is {subseq_len}; tokens of a row differ, and there are {len(ordinary)} ordinary ones"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    drawn = [
        ordinary[torch.randperm(len(ordinary), generator=generator)[:subseq_len]]
        for _ in range(batch_size)
    ]
    once = torch.stack(drawn)  # [batch subseq_len]
    parts = [once, once]
    if prepend_bos:
        parts = [torch.full((batch_size, 1), model.bos_token_id), *parts]
    return torch.cat(parts, dim=1).to(model.device)


def _ordinary(model: HookedModel) -> Int[Tensor, " token"]:
    """Ids that stand for text."""
    cfg = model.cfg
    special = {cfg.pad_token_id, cfg.bos_token_id, *cfg.eos_token_ids}
    special |= {cfg.image_token_id, cfg.video_token_id, cfg.audio_token_id}
    special |= set(getattr(model.tokenizer, "all_special_ids", ()))
    special_ids = [token for token in special if token is not None and token < cfg.d_vocab]
    ordinary = torch.ones(cfg.d_vocab, dtype=torch.bool)
    ordinary[special_ids] = False
    return ordinary.nonzero()[:, 0]


def _rows(model: HookedModel, seq: Any) -> list[Int[Tensor, "1 pos"]]:
    """Each text's ids, by itself: padding would change what heads see."""
    if isinstance(seq, Tensor):
        rows = list(seq.to(model.device).reshape(-1, seq.shape[-1]).split(1))
    else:
        texts = [seq] if isinstance(seq, str) else list(seq)
        rows = [model.to_tokens(text) for text in texts]
    for row in rows:
        if row.shape[1] < 2:
            raise ValueError("a text of one token has nothing to look at: give two tokens or more")
    if not rows:
        raise ValueError("seq holds no text")
    return rows


def _asked(model: HookedModel, heads: Heads | None) -> dict[int, list[int]]:
    """Heads by block, counted from the start."""
    if heads is None:
        return {layer.index: list(range(layer.n_heads)) for layer in model.cfg.layers}
    if isinstance(heads, Mapping):
        heads = [(layer, head) for layer, some in heads.items() for head in some]
    asked: dict[int, list[int]] = {}
    for index, head in heads:
        layer = model.cfg.layer(index)
        if not -layer.n_heads <= head < layer.n_heads:
            raise IndexError(
                f"no head {head}: block {layer.index} has heads 0 to {layer.n_heads - 1}"
            )
        asked.setdefault(layer.index, []).append(head % layer.n_heads)
    if not asked:
        raise ValueError("heads is empty: give (layer, head) pairs, or None for all")
    return asked


def _pattern(
    model: HookedModel, tokens: Int[Tensor, "1 pos"], given: Any
) -> Float[Tensor, "1 pos kv_pos"]:
    if isinstance(given, str):
        if given not in PATTERNS:
            raise ValueError(
                f"detection_pattern is {given!r}; known are {', '.join(map(repr, PATTERNS))}, or give weights [pos kv_pos]"
            )
        return PATTERNS[given](tokens)
    pos = tokens.shape[1]
    if given.shape != (pos, pos):
        raise ValueError(
            f"the detection pattern is {list(given.shape)}; the text has {pos} tokens, so needed is [{pos}, {pos}] "
            "[pos kv_pos]"
        )
    if model.cfg.bidirectional != "all" and bool(given.triu(1).any()):
        raise ValueError(
            "the detection pattern looks ahead (it is not lower triangular), and this model cannot"
        )
    return given[None].to(tokens.device)


def _score(
    pattern: Float[Tensor, "1 pos kv_pos"],
    counted: Bool[Tensor, "1 pos kv_pos"],
    measure: ErrorMeasure,
) -> Score:
    if measure == "mul":
        return lambda attention: _share(attention * counted[:, None], pattern)
    return lambda attention: _likeness(attention, pattern, counted)


def _share(
    attention: Float[Tensor, "batch head pos kv_pos"], pattern: Float[Tensor, "batch pos kv_pos"]
) -> Float[Tensor, " head"]:
    on, paid = (attention * pattern[:, None]).sum((0, 2, 3)), attention.sum((0, 2, 3))
    return torch.where(paid > 0, on / paid.clamp(min=torch.finfo(paid.dtype).tiny), 0)


def _likeness(
    attention: Float[Tensor, "batch head pos kv_pos"],
    pattern: Float[Tensor, "batch pos kv_pos"],
    counted: Bool[Tensor, "batch pos kv_pos"],
) -> Float[Tensor, " head"]:
    off = (attention - pattern[:, None]).abs() * counted[:, None]
    return 1 - off.sum(-1).mean((0, 2))


def _mean_on(
    attention: Float[Tensor, "batch head pos kv_pos"], pattern: Float[Tensor, "batch pos kv_pos"]
) -> Float[Tensor, " head"]:
    """Attention on the pattern, averaged over the positions for which it asks something."""
    return (attention * pattern[:, None]).sum((0, 2, 3)) / pattern.amax(-1).sum()


def _by_head(
    model: HookedModel,
    tokens: Int[Tensor, "1 pos"],
    asked: Mapping[int, Sequence[int]],
    score: Score,
    cache: ActivationCache | None = None,
) -> Float[Tensor, "layer head"]:
    """The score of each head asked for, from a run that ends at the last of them and keeps no pattern."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    scores = torch.full((model.cfg.n_layers, model.cfg.n_heads), -1.0, dtype=dtype)

    def see(attention: Tensor, layer: int) -> None:
        rows, _, pos, kv_pos = attention.shape
        if (rows, pos, kv_pos) != (1, tokens.shape[1], tokens.shape[1]):
            raise ValueError(
                f"the cache holds {rows} rows of patterns {[pos, kv_pos]} [pos kv_pos]; seq is one text of "
                f"{tokens.shape[1]} tokens"
            )
        heads = list(asked[layer])
        scores[layer, heads] = score(attention[:, heads].to(dtype)).cpu()

    if cache is not None:
        for layer in asked:
            kept = cache["pattern", layer]
            see(kept if cache.has_batch_dim else kept[None], layer)
        return scores

    def watch(attention: Tensor, hook: HookPoint | NamedPoint) -> None:
        see(attention, hook.layer())

    hooks = [(f"blocks.{layer}.attn.hook_pattern", watch) for layer in asked]
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks, stop_at_layer=max(asked) + 1)
    return scores


__all__ = [
    "detect_head",
    "get_duplicate_token_head_detection_pattern",
    "get_induction_head_detection_pattern",
    "get_previous_token_head_detection_pattern",
    "get_supported_heads",
    "induction_scores",
    "repeated_tokens",
]
