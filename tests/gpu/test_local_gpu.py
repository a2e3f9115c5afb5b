"""Attention by parts on a card: what the fused operation gives there under the whole mask, and less memory than a square."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lens_gemma4.local import local_attention
from lens_gemma4.masks import Mask, Rule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rule(window: int | None, pos: int, how: str, device: str) -> Rule:
    real = torch.ones(1, pos, dtype=torch.bool, device=device)
    images = torch.full((1, pos), -1, device=device)
    if how == "padded":
        real[:, : pos // 7] = False
    if how == "images":
        images[:, pos // 4 : pos // 2] = 0
        images[:, pos // 2 + 3 : pos // 2 + 40] = 1
    return Rule(window, padding=real, images=images)


def drawn(device: str, dtype: torch.dtype, pos: int, kv_heads: int, d_head: int):
    q = torch.randn(1, pos, 4, d_head, device=device).to(dtype).transpose(1, 2)
    k, v = (torch.randn(1, kv_heads, pos, d_head, device=device).to(dtype) for _ in range(2))
    return q * d_head**-0.5, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "padded", "images"])
@pytest.mark.parametrize(("window", "kv_heads", "d_head"), [(64, 2, 256), (None, 1, 512)])
def test_parts_are_the_whole(device, dtype, how, window, kv_heads, d_head):
    pos = 500
    q, k, v = drawn(device, dtype, pos, kv_heads, d_head)
    places = torch.arange(pos, device=device)
    mask = Mask(rule(window, pos, how, device), places, places, 1, pos)
    wide = [x.double().repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask.seen(), scale=1.0)
    got = local_attention(q, k, v, mask)
    assert (got.double() - exact).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
    shifted = Mask(Rule(window and window - 1), places[:-1], places[:-1], 1, pos - 1)
    moved = local_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], shifted)
    assert (moved.double() - exact[:, :, 1:]).abs().max() > 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "padded", "images"])
@pytest.mark.parametrize(("window", "kv_heads", "d_head"), [(1024, 2, 256), (None, 1, 512)])
def test_no_square_on_a_card(how, window, kv_heads, d_head):
    pos = 40 * 1024
    q, k, v = drawn("cuda", torch.bfloat16, pos, kv_heads, d_head)
    places = torch.arange(pos, device="cuda")
    mask = Mask(rule(window, pos, how, "cuda"), places, places, 1, pos)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    local_attention(q, k, v, mask)
    assert torch.cuda.max_memory_allocated() - before < pos * pos / 2
