"""Attention by parts gives what the fused operation gives under the whole mask, and makes nothing of the whole's size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import small
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lens_gemma4 import KVCache, local
from lens_gemma4.local import local_attention, parts_of, prompts
from lens_gemma4.masks import Mask, Rule, block_ids

WINDOW = 20  # blocks of 16, so that neither divides the other


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The fused operation under the mask spelled out."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.seen(), scale=1.0)


def tensors(batch, pos, kv_pos, kv_heads, per_kv, d_head=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = drawn(batch, pos, kv_heads * per_kv, d_head).transpose(1, 2)  # as the network has them
    return q, *(drawn(batch, kv_heads, kv_pos, d_head) for _ in range(2))


def mask_of(rule: Rule, pos: int, batch: int = 1, past: int = 0) -> Mask:
    """The last `pos - past` of `pos` positions ask; a sliding block holds its window before them."""
    held = 0 if rule.window is None else max(0, past - rule.window + 1)
    return Mask(rule, torch.arange(past, pos), torch.arange(held, pos), batch, pos)


def off(rule: Rule, pos: int, batch=1, kv_heads=1, per_kv=2, past=0, wrong=None) -> float:
    """How far the parts are from the whole; with `wrong`, from the whole under another rule."""
    mask = mask_of(rule, pos, batch, past)
    q, k, v = tensors(batch, pos - past, len(mask.keys), kv_heads, per_kv)
    got = local_attention(q, k, v, mask)
    assert got.shape == q.shape and got.isfinite().all()
    want = dense(q, k, v, mask if wrong is None else replace(mask, rule=wrong))
    return (got - want).abs().max().item()


PADDING = {
    "none": [],
    "left": [(0, 7)],
    "left, beyond the window": [(0, 31)],
    "right": [(-9, None)],
    "right, beyond the window": [(-50, None)],
    "both": [(0, 5), (-6, None)],
    "between": [(0, 3), (11, 14), (40, 42)],
    "all": [(0, None)],
}
IMAGES = {
    "none": [],
    "inside a window": [(6, 12)],
    "longer than the window": [(9, 58)],
    "adjacent": [(8, 20), (20, 41)],
    "at both ends": [(0, 26), (-24, None)],
    "many": [(2, 5), (6, 9), (23, 47), (60, 61), (70, 75)],
}


def padding_of(spans, pos):
    real = torch.ones(1, pos, dtype=torch.bool)
    for a, b in spans:
        real[:, a:b] = False
    return real


def images_of(spans, pos):
    types = torch.zeros(1, pos, dtype=torch.long)
    for number, (a, b) in enumerate(spans):
        types[:, a:b] = 1 + number % 2
    return block_ids(types)


def rules(pos, window):
    """Every way to pad with every way to lay out images, in both sorts of image mask."""
    for padding, images in itertools.product(PADDING.values(), IMAGES.values()):
        for leaves_window in (True, False) if images else (True,):
            yield Rule(
                window,
                padding=padding_of(padding, pos),
                images=images_of(images, pos),
                leaves_window=leaves_window,
            )


# -- the same numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [WINDOW, None], ids=["sliding", "full"])
@pytest.mark.parametrize("pos", [1, 13, WINDOW, 37, 61, 5 * WINDOW])
@pytest.mark.parametrize(("kv_heads", "per_kv"), [(1, 3), (2, 1), (2, 2)])
def test_every_rule_gives_what_the_whole_mask_gives(window, pos, kv_heads, per_kv):
    for rule in rules(pos, window):
        assert off(rule, pos, kv_heads=kv_heads, per_kv=per_kv) <= 1e-12


@pytest.mark.parametrize("window", [WINDOW, 21, None])
@pytest.mark.parametrize("padding", PADDING)
def test_both_ways(window, padding):
    pos = 5 * WINDOW
    rule = Rule(window, both_ways=True, padding=padding_of(PADDING[padding], pos))
    assert off(rule, pos) <= 1e-12
    if padding == "none":
        assert off(rule, pos, wrong=replace(rule, both_ways=False)) > 1e-3


@pytest.mark.parametrize("window", [WINDOW, None])
def test_prompts_that_differ_in_one_batch(window):
    """Padding and images of their own; equal ones share a call, and the order stays."""
    pos = 83
    padding = torch.cat(
        [padding_of(PADDING[name], pos) for name in ("left", "none", "none", "left")]
    )
    spans = [(9, 58)], [(3, 6)], [(3, 6)], [(9, 58)]
    images = torch.cat([images_of(one, pos) for one in spans])
    rule = Rule(window, padding=padding, images=images)
    assert len(set(prompts(mask_of(rule, pos, 4), 4))) == 2
    assert off(rule, pos, batch=4) <= 1e-12
    swapped = replace(rule, padding=padding[[1, 0, 2, 3]], images=images[[1, 0, 2, 3]])
    assert off(rule, pos, batch=4, wrong=swapped) > 1e-3


@st.composite
def cases(draw):
    window = draw(st.sampled_from([None, 1, 3, 16, 17, 64]))
    pos, batch = draw(st.integers(1, 5 * (window or 30))), draw(st.integers(1, 3))
    past = draw(st.integers(0, pos - 1)) if draw(st.booleans()) else 0
    spans = st.lists(st.tuples(st.integers(0, pos), st.integers(0, pos)), max_size=3)
    padding = torch.cat([padding_of(draw(spans), pos) for _ in range(batch)])
    shown = [[(max(a, past), b) for a, b in draw(spans)] for _ in range(batch)]
    images = torch.cat([images_of(one, pos) for one in shown])
    rule = Rule(
        window,
        padding=padding if draw(st.booleans()) else None,
        images=images if draw(st.booleans()) else None,
        leaves_window=draw(st.booleans()),
    )
    if not past and draw(st.integers(0, 4)) == 0:
        rule = replace(rule, both_ways=True)
    return rule, pos, batch, past


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from([(1, 1), (1, 3), (2, 2)]))
def test_drawn_cases(case, heads):
    rule, pos, batch, past = case
    assert off(rule, pos, batch, *heads, past=past) <= 1e-12


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_query_is_in_one_part_with_all_it_sees(case):
    rule, pos, batch, past = case
    mask = mask_of(rule, pos, batch, past)
    held = int(mask.keys[0])
    seen = rule.visible(mask.queries, mask.keys)[:, 0]
    for row, prompt in enumerate(prompts(mask, batch)):
        visible = seen[row if len(seen) > 1 else 0]  # [pos kv_pos]
        at = past - held
        for part in parts_of(rule, prompt, past - held, pos - held):
            assert part.start == at < part.stop
            at = part.stop
            mine = visible[part.start - (past - held) : part.stop - (past - held)]
            assert not mine[:, : part.low].any() and not mine[:, part.high :].any()
            assert part.how != "everything" or mine[:, part.low : part.high].all()
        assert at == pos - held


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (Rule(WINDOW), Rule(WINDOW + 1)),
        (Rule(WINDOW), Rule(WINDOW - 1)),
        (Rule(WINDOW), Rule(None)),
        (Rule(None), Rule(WINDOW)),
        (Rule(WINDOW, both_ways=True), Rule(WINDOW + 2, both_ways=True)),
        (Rule(WINDOW, padding=padding_of([(0, 7)], 83)), Rule(WINDOW)),
        (Rule(None, padding=padding_of([(0, 7)], 83)), Rule(None)),
        (Rule(WINDOW, images=images_of([(9, 58)], 83)), Rule(WINDOW)),
        (Rule(None, images=images_of([(9, 58)], 83)), Rule(None)),
        (
            Rule(WINDOW, images=images_of([(9, 58)], 83)),
            Rule(WINDOW, images=images_of([(9, 58)], 83), leaves_window=False),
        ),
        (
            Rule(None, images=images_of([(8, 20), (20, 41)], 83)),  # one block of the two
            Rule(None, images=images_of([(8, 20), (21, 41)], 83)),
        ),
    ],
)
def test_another_rule_is_told_apart(rule, wrong):
    assert off(rule, 83) <= 1e-12
    assert off(rule, 83, wrong=wrong) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [WINDOW, None])
def test_no_further_from_float64_than_the_whole(dtype, window):
    mask = mask_of(Rule(window, images=images_of([(30, 60)], 100)), 100)
    q, k, v = tensors(1, 100, 100, 2, 2, dtype=dtype)
    exact = dense(q.double(), k.double(), v.double(), mask)
    got, whole = (
        (fn(q, k, v, mask).double() - exact).abs().max() for fn in (local_attention, dense)
    )
    assert local_attention(q, k, v, mask).dtype == dtype
    assert got <= 2 * whole and whole > 0


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("padding", ["none", "left", "between"])
def test_gradients_are_the_whole_ones(window, padding):
    pos = 90
    mask = mask_of(
        Rule(window, padding=padding_of(PADDING[padding], pos), images=images_of([(50, 80)], pos)),
        pos,
    )
    inputs = [x.requires_grad_() for x in tensors(1, pos, pos, 2, 2)]
    before = [x.detach().clone() for x in inputs]
    weights = torch.randn(1, 4, pos, 4, dtype=torch.float64, generator=torch.Generator())
    got, want = (
        torch.autograd.grad((fn(*inputs, mask) * weights).sum(), inputs)
        for fn in (local_attention, dense)
    )
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 and theirs.abs().max() > 1e-2
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient():
    pos = 60
    mask = mask_of(Rule(WINDOW, padding=padding_of([(0, 40), (41, 43)], pos)), pos)
    q, k, v = (x.requires_grad_() for x in tensors(1, pos, pos, 1, 2))
    z = local_attention(q, k, v, mask)
    assert not z[:, :, :40].any() and z[:, :, 40:].any()
    z.sum().backward()
    assert q.grad.isfinite().all() and not q.grad[:, :, :40].any()


@pytest.mark.parametrize("window", [WINDOW, None])
def test_kernels_that_make_nan_of_a_query_that_sees_nothing_do_no_harm(window, monkeypatch):
    def plain(q, k, v, attn_mask=None, scale=1.0, is_causal=False):
        scores = q @ k.mT
        if is_causal:
            attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(-1) @ v

    pos = 60
    mask = mask_of(Rule(window, padding=padding_of([(0, 40), (41, 43)], pos)), pos)
    q, k, v = tensors(1, pos, pos, 1, 2)
    want = dense(q, k, v, mask)
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    assert plain(q, k, v, attn_mask=mask.seen()).isnan().any()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    z = local_attention(*inputs, mask)
    assert (z - want).abs().max() <= 1e-12
    z.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


# -- nothing of the whole's size --------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers that a tensor made in the meantime has memory for."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                held = one.untyped_storage().nbytes() // max(1, one.element_size())
                self.numel = max(self.numel, held)
        return out


@pytest.mark.parametrize("window", [16, None])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("padding", ["none", "left", "right", "between"])
@pytest.mark.parametrize("images", ["none", "many"])
def test_no_tensor_of_the_square_is_made(window, both_ways, padding, images, monkeypatch):
    """40 windows, forward and backward."""
    monkeypatch.setattr(local, "FULL_BLOCK", 16)
    pos = 640
    rule = Rule(
        window, both_ways, padding_of(PADDING[padding], pos), images_of(IMAGES[images], pos)
    )
    mask = mask_of(rule, pos)
    inputs = [x.requires_grad_() for x in tensors(1, pos, pos, 1, 2)]
    with Largest() as largest:
        local_attention(*inputs, mask).sum().backward()
    assert largest.numel < pos * pos / 10
    if window is None:
        return
    with Largest() as largest:
        dense(*inputs, mask)
    assert largest.numel >= pos * pos


class Asked:
    """What the fused operation is called with."""

    def __init__(self, monkeypatch):
        self.pairs, self.calls = 0, []
        fused = F.scaled_dot_product_attention

        def count(q, k, v, **how):
            self.calls.append((q, k, v, how))
            self.pairs += q[..., 0].numel() * k.shape[2]
            return fused(q, k, v, **how)

        monkeypatch.setattr(F, "scaled_dot_product_attention", count)


@pytest.mark.parametrize("window", [16, 64, 256])
def test_pairs_grow_with_the_window_times_the_length(window, monkeypatch):
    asked, found = Asked(monkeypatch), []
    for windows in (10, 20, 40):
        pos, asked.pairs = windows * window, 0
        local_attention(*tensors(1, pos, pos, 1, 2), mask_of(Rule(window), pos))
        found.append(asked.pairs / 2 / pos)
        assert found[-1] < window + local.block_size(window) + 8
    assert found[2] == pytest.approx(found[0], rel=0.1)


def test_a_long_sliding_prompt_is_two_calls_on_the_keys_themselves(monkeypatch):
    """Its first window, which is causal, and all the rest; keys are not copied, values neither."""
    asked = Asked(monkeypatch)
    q, k, v = tensors(2, 100 * 64, 100 * 64, 2, 3)
    local_attention(q, k, v, mask_of(Rule(64), 100 * 64, 2))
    assert len(asked.calls) == 2
    for _, keys, values, _ in asked.calls:
        assert keys.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert values.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


@pytest.mark.parametrize("images", ["none", "many"])
def test_a_full_block_without_holes_needs_no_mask(images, monkeypatch):
    asked, pos = Asked(monkeypatch), 300
    rule = Rule(None, padding=padding_of([(0, 9)], pos), images=images_of(IMAGES[images], pos))
    assert off(rule, pos) <= 1e-12
    ours = [how for *_, how in asked.calls[:-1]]  # the last is the whole it is compared with
    assert ours and all(how["attn_mask"] is None for how in ours)
    assert [how["is_causal"] for how in ours].count(True) == 1


def test_rows_of_the_mask_come_in_eights():
    for window in range(1, 300):
        for both_ways in (False, True):
            rule = Rule(window, both_ways)
            back, ahead = local.widened(rule)
            assert (back + local.block_size(window) + ahead) % 8 == 0
            assert 0 <= back - local.reach(rule)[0] < 8


def test_keys_that_are_no_stretch_are_refused():
    q, k, v = tensors(1, 4, 4, 1, 1)
    for keys in ([0, 1, 2, 4], [1, 2, 3, 4]):
        mask = Mask(Rule(3), torch.arange(4), torch.tensor(keys), 1, 5)
        with pytest.raises(ValueError, match=r"queries 0 to 3 \(4\) read keys"):
            local_attention(q, k, v, mask)


# -- in the network -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", small.KINDS)
def test_the_network_says_the_same(kind):
    model = small.hooked(kind)
    for inputs in (
        small.inputs_for(kind, torch.float64),
        small.padded_inputs("left"),
        small.padded_inputs("right"),
        small.text_inputs(2, 20 * small.WINDOW),
    ):
        model.set_attn_implementation("sdpa")
        want = model(inputs)
        model.set_attn_implementation("local")
        assert (model(inputs) - want).abs().max() <= 1e-10
    assert not torch.equal(model(inputs), want)  # another way of computing


@pytest.mark.parametrize("chunk", [1, 7, small.WINDOW + 1, 50])
@pytest.mark.parametrize("kind", ["text", "shared", "wrapper"])
def test_chunks_on_a_cache_say_the_same(kind, chunk):
    model = small.hooked(kind)
    ids = small.text_inputs(2, 60)["input_ids"]
    real = torch.ones_like(ids)
    real[1, :13] = 0
    want = model(ids, attention_mask=real, position_ids="mask")
    model.set_attn_implementation("local")
    kv, found = KVCache(model.cfg), []
    for part, mask in zip(ids.split(chunk, 1), real.split(chunk, 1), strict=True):
        found.append(model(part, attention_mask=mask, kv_cache=kv))
    apart = (torch.cat(found, 1) - want).abs().amax(-1)
    assert apart[real.bool()].max() <= 1e-10


def test_the_network_makes_no_square():
    model = small.hooked("text")
    model.set_attn_implementation("local")
    ids = small.text_inputs(1, 800)["input_ids"]
    with Largest() as largest:
        model(ids, stop_at_layer=4)
    assert largest.numel < 800 * 800 / 10
    model.set_attn_implementation("sdpa")
    with Largest() as largest:
        model(ids, stop_at_layer=4)
    assert largest.numel >= 800 * 800
