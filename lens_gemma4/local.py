"""Attention over long prompts: sliding blocks cost window x length, and no mask or pattern of the whole is made.

The queries of a prompt are cut into parts that need as little of a mask as can be:

    nothing      padding that sees no key: zeros
    everything   all see the same stretch of keys, as an image's tokens do in a full block: no mask
    causal       a stretch of queries sees itself up to itself: the fused operation's own causal form
    windows      equal blocks of queries, each before its own stretch of keys: one call, one small mask for all
    masked       whatever is left, such as images and the edges of padding: a small mask for a block of queries

On a GPU these are the fused operation's kernels too; a part never makes a tensor of queries x keys beyond its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lens_gemma4.masks import Mask, Rule

# Queries in a masked block of a full layer: 256 x 262,144 keys are 64 MiB of mask.
FULL_BLOCK = 256


class Prompt(NamedTuple):
    """What the mask of a prompt depends on beside its rule. Places count from the call's first key.

    Args:
        first, stop: the first real key, and the one after the last.
        images: where each image or video frame begins and ends.
        alone: number of a prompt with padding between real tokens, whose masks are no other's; else None.
    """

    first: int
    stop: int
    images: tuple[tuple[int, int], ...] = ()
    alone: int | None = None


class Part(NamedTuple):
    """Queries `start` to `stop` see some or all of the keys `low` to `high`, all of them places among the keys."""

    how: Literal["nothing", "everything", "causal", "windows", "masked"]
    start: int
    stop: int
    low: int = 0
    high: int = 0


def local_attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head kv_pos d_head"],
    v: Float[Tensor, "batch kv_head kv_pos d_head"],
    mask: Mask,
) -> Float[Tensor, "batch head pos d_head"]:
    """The fused attention with scale 1 under a mask, by parts: the same numbers up to rounding.

    Queries that see no key give zeros.

    Raises:
        ValueError: keys that are not a stretch of positions which ends with the queries' own.
    """
    shift = _places_before(mask, k.shape[2])
    alike: dict[Prompt, list[int]] = {}
    for row, prompt in enumerate(prompts(mask, k.shape[0])):
        alike.setdefault(prompt, []).append(row)
    if len(alike) == 1:
        (prompt,) = alike
        return _mixed(q, k, v, mask, prompt, 0, shift)
    z = [_mixed(q[r], k[r], v[r], mask, prompt, r[0], shift) for prompt, r in alike.items()]
    order = [row for rows in alike.values() for row in rows]
    return torch.cat(z)[torch.tensor(order, device=q.device).argsort()]


def _places_before(mask: Mask, n_keys: int) -> int:
    """Keys before the first query's own."""
    pos = len(mask.queries)
    ends = torch.stack((mask.keys[0], mask.keys[-1], mask.queries[0], mask.queries[-1]))
    first, last, query, last_query = ends.tolist()
    if last != last_query or last - first + 1 != n_keys or last_query - query + 1 != pos:
        raise ValueError(
            f"queries {query} to {last_query} ({pos}) read keys {first} to {last} ({n_keys}): local attention reads an unbroken "
            "stretch of keys that ends with the queries' own"
        )
    return int(query - first)


# -- what is known of a prompt ------------------------------------------------------------------------


def prompts(mask: Mask, batch: int) -> list[Prompt]:
    """Where padding and images of each prompt are."""
    n = len(mask.keys)
    images = _images(mask, batch)
    padding = mask.rule.padding
    if padding is None:
        return [Prompt(0, n, found) for found in images]
    real = padding[:, mask.keys]
    back = real.flip(-1)
    found = torch.stack((real.int().argmax(-1), n - back.int().argmax(-1), real.sum(-1)), -1)
    known = []
    for row, (first, stop, count) in enumerate(found.tolist()):
        if not count:
            first, stop = n, n
        torn = any(a < edge < b for a, b in images[row] for edge in (first, stop))
        alone = row if count < stop - first or torn else None
        known.append(Prompt(first, stop, images[row], alone))
    return known


def _images(mask: Mask, batch: int) -> list[tuple[tuple[int, int], ...]]:
    """Places among the keys at which each image of each prompt begins and ends."""
    if mask.rule.images is None or mask.rule.both_ways:
        return [()] * batch
    number = F.pad(mask.rule.images[:, mask.keys], (1, 1), value=-1)
    new = number[:, 1:] != number[:, :-1]
    begins = (new & (number[:, 1:] >= 0)).nonzero().tolist()
    ends = (new & (number[:, :-1] >= 0)).nonzero().tolist()
    found: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    for (row, begin), (_, end) in zip(begins, ends, strict=True):
        found[row].append((begin, end))
    return [tuple(one) for one in found]


# -- which parts --------------------------------------------------------------------------------------


def block_size(window: int) -> int:
    """Queries in a block of a sliding layer: the fewer, the less is computed in vain; the more, the better the products' shape.

    A quarter of the window was quickest or within a tenth of it at windows of 16 to 1,024 and heads of 16 to 256
    (float32, float64 and bfloat16, one thread and two), down to 16.
    """
    return max(16, window // 32 * 8)


def reach(rule: Rule) -> tuple[int, int]:
    """How many keys before its own and after it a query of a sliding block sees, images aside."""
    assert rule.window is not None
    return (rule.reach, rule.reach) if rule.both_ways else (rule.window - 1, 0)


def widened(rule: Rule) -> tuple[int, int]:
    """`reach` with a few more keys, which the mask hides: kernels on a GPU want rows of masks in eights."""
    back, ahead = reach(rule)
    assert rule.window is not None
    return back + -(block_size(rule.window) + back + ahead) % 8, ahead


def parts_of(rule: Rule, prompt: Prompt, begin: int, end: int) -> list[Part]:
    """The queries from place `begin` to `end` in parts."""
    if rule.window is None:
        return _full_parts(rule, prompt, begin, end)
    return _sliding_parts(rule, prompt, begin, end)


def _sliding_parts(rule: Rule, prompt: Prompt, begin: int, end: int) -> list[Part]:
    assert rule.window is not None
    size = block_size(rule.window)
    start = min(max(begin, prompt.first), end)
    # Up to its window a prompt is causal.
    stop = start
    if start == prompt.first and prompt.alone is None and not rule.both_ways:
        first_image = next((a for a, b in prompt.images if b > start), end)
        stop = max(start, min(start + rule.window, prompt.stop, first_image))
    parts = [_sliding_part(rule, prompt, *block) for block in _blocks(begin, start, size)]
    if stop > start:
        parts.append(Part("causal", start, stop, start, stop))
    parts += [_sliding_part(rule, prompt, *block) for block in _blocks(stop, end, size)]
    return _joined(parts)


def _sliding_part(rule: Rule, prompt: Prompt, start: int, stop: int) -> Part:
    back, ahead = reach(rule)
    low, high = start - back, stop + ahead
    seen = _between(prompt.images, start, stop)
    if seen:
        low = min(low, seen[0][0]) if rule.leaves_window else low
        high = max(high, seen[-1][1])
    wide = stop + ahead - start + widened(rule)[0]  # keys of a whole block
    whole = prompt.alone is None and high - wide >= prompt.first and high <= prompt.stop
    if whole and not seen and rule.window is not None and stop - start == block_size(rule.window):
        return Part("windows", start, stop, high - wide, high)
    low, high = max(low, prompt.first), min(high, prompt.stop)
    return Part("masked", start, stop, low, high) if low < high else Part("nothing", start, stop)


def _full_parts(rule: Rule, prompt: Prompt, begin: int, end: int) -> list[Part]:
    first, last = prompt.first, prompt.stop
    if first == last:
        return [Part("nothing", begin, end)]
    if prompt.alone is not None:
        return [Part("masked", *block, first, last) for block in _blocks(begin, end, FULL_BLOCK)]
    if rule.both_ways:
        return [Part("everything", begin, end, first, last)]
    start, stop = min(max(begin, first), end), max(begin, min(end, last))
    parts = [Part("nothing", begin, start)] if begin < start else []
    at = start
    for a, b in [*_between(prompt.images, start, stop), (stop, stop)]:
        if at < a and start == first:
            parts.append(Part("causal", at, a, first, stop))
        elif at < a:  # on a cache: earlier keys come first
            parts += [Part("masked", x, y, first, y) for x, y in _blocks(at, a, FULL_BLOCK)]
        if a < b:
            parts.append(Part("everything", a, b, first, b))
        at = b
    return parts + ([Part("everything", stop, end, first, last)] if stop < end else [])


def _between(images: Sequence[tuple[int, int]], start: int, stop: int) -> Sequence[tuple[int, int]]:
    """The images with a token at a place from `start` to `stop`."""
    return images[
        bisect_right(images, start, key=lambda image: image[1]) : bisect_left(
            images, stop, key=lambda image: image[0]
        )
    ]


def _blocks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, end)) for a in range(begin, end, size)]


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours that one call answers as one."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.how == joined[-1].how and part.how in ("nothing", "windows"):
            joined[-1] = joined[-1]._replace(stop=part.stop, high=part.high)
        else:
            joined.append(part)
    return joined


# -- what each part computes --------------------------------------------------------------------------


def _mixed(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head kv_pos d_head"],
    v: Float[Tensor, "batch kv_head kv_pos d_head"],
    mask: Mask,
    prompt: Prompt,
    row: int,
    shift: int,
) -> Float[Tensor, "batch head pos d_head"]:
    """Values mixed for prompts that are alike; `row` is the first of them."""
    rule = _rule_of_row(mask, prompt, row)
    z: list[Tensor] = []  # each [batch pos head d_head]
    causal: dict[tuple[int, int], Tensor] = {}
    for part in parts_of(rule, prompt, shift, shift + q.shape[2]):
        queries = slice(part.start - shift, part.stop - shift)
        keys = slice(part.low, part.high)
        if part.how == "nothing":
            z.append(torch.zeros_like(q[:, :, queries]).transpose(1, 2))
        elif part.how == "windows":
            z.append(_windows(q[:, :, queries], k[:, :, keys], v[:, :, keys], rule))
        elif part.how == "causal":
            if (part.low, part.high) not in causal:
                all_of_them = slice(part.low - shift, part.high - shift)
                causal[part.low, part.high] = _fused(
                    q[:, :, all_of_them], k[:, :, keys], v[:, :, keys], causal=True
                )
            z.append(causal[part.low, part.high][:, part.start - part.low : part.stop - part.low])
        else:
            seen = None
            if part.how == "masked":
                seen = rule.visible(mask.queries[queries], mask.keys[keys])
            z.append(
                _fused(
                    q[:, :, queries],
                    k[:, :, keys],
                    v[:, :, keys],
                    seen,
                    some_blind=rule.padding is not None,
                )
            )
    return (z[0] if len(z) == 1 else torch.cat(z, 1)).transpose(1, 2)


def _rule_of_row(mask: Mask, prompt: Prompt, row: int) -> Rule:
    """The rule of one prompt, rid of padding and images where it has none."""
    rule, padded = mask.rule, prompt[:2] != (0, len(mask.keys)) or prompt.alone is not None
    return replace(
        rule,
        padding=rule.padding[row : row + 1] if rule.padding is not None and padded else None,
        images=rule.images[row : row + 1] if rule.images is not None and prompt.images else None,
    )


def _fused(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head kv_pos d_head"],
    v: Float[Tensor, "batch kv_head kv_pos d_head"],
    seen: Bool[Tensor, "1 1 pos kv_pos"] | None = None,
    causal: bool = False,
    some_blind: bool = False,
) -> Float[Tensor, "batch pos head d_head"]:
    """One call of the fused operation, in which a key/value head and its query heads are a row: nothing is repeated."""
    batch, kv_heads = k.shape[:2]
    q = q.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # [(batch kv_head) per_kv pos d_head]
    k, v = (x.flatten(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    blind = None
    if seen is not None and some_blind:
        # Kernels differ in what they make of a query that sees no key: it sees all, and is then emptied.
        blind = ~seen.any(-1, keepdim=True)
        seen = seen | blind
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, is_causal=causal)
    z = z if blind is None else z.masked_fill(blind, 0)
    return z.unflatten(0, (batch, kv_heads)).flatten(1, 2).transpose(1, 2)


def _windows(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head kv_pos d_head"],
    v: Float[Tensor, "batch kv_head kv_pos d_head"],
    rule: Rule,
) -> Float[Tensor, "batch pos head d_head"]:
    """Whole blocks of queries, each before its own keys, in one call: overlapping views of the keys, and one mask."""
    assert rule.window is not None
    batch, kv_heads = k.shape[:2]
    size, (back, ahead) = block_size(rule.window), widened(rule)
    span = back + size + ahead
    place = torch.arange(span, device=q.device)
    seen = Rule(rule.window, rule.both_ways).visible(place[back : back + size], place)[0, 0]
    q = q.unflatten(2, (-1, size)).unflatten(1, (kv_heads, -1))
    per_kv = q.shape[2]
    q = q.permute(3, 0, 1, 2, 4, 5).flatten(3, 4).flatten(1, 2)
    # [block (batch kv_head) (per_kv query) d_head]: query heads of one key/value head read the same keys
    k, v = (x.flatten(0, 1).unfold(1, span, size).permute(1, 0, 3, 2) for x in (k, v))
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.repeat(per_kv, 1), scale=1.0)
    z = z.unflatten(2, (per_kv, size)).unflatten(1, (batch, kv_heads))
    return z.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
