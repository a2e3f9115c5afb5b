"""What the plan for long prompts is made of is what networks, caches and runs really have."""

from __future__ import annotations

import sys

import long
import pytest
import small
import torch
from test_local import Asked, mask_of, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from lens_gemma4 import HookedConfig, KVCache
from lens_gemma4.local import local_attention
from lens_gemma4.masks import Rule

SMALL = long.SHAPE | {"sliding_window": 16, "hidden_size": 32, "intermediate_size": 96}
BORROWING = SMALL | {
    "layer_types": [small.S, small.A, small.S, small.A],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}


def test_weights_are_the_networks_own():
    for shape in (SMALL, SMALL | {"tie_word_embeddings": False}, BORROWING):
        model = long.build(shape)
        assert long.weight_numbers(model.cfg) == sum(w.numel() for _, w in model.named_weights())


@pytest.mark.parametrize("shape", [SMALL, BORROWING], ids=["own keys", "borrowed keys"])
@pytest.mark.parametrize("tokens", [16, 17, 50])  # under 16 it has room for 16
def test_keys_and_values_are_a_caches_own(shape, tokens):
    model = long.build(shape)
    kv = KVCache(model.cfg)
    model(long.prompt(model, tokens), kv_cache=kv)
    held = long.by_kind(model.cfg, lambda layer: long.held_numbers(layer, tokens))
    assert 4 * sum(held.values()) == kv.nbytes
    whole = long.by_kind(model.cfg, lambda layer: long.held_numbers(layer, tokens, windows=False))
    assert (whole["sliding"] > held["sliding"]) == (tokens > 24)


@pytest.mark.parametrize("window", [16, 48, None])
@pytest.mark.parametrize("tokens", [7, 16, 100, 640])
def test_pairs_are_those_that_are_computed(window, tokens, monkeypatch):
    asked = Asked(monkeypatch)
    local_attention(*tensors(1, tokens, tokens, 1, 1), mask_of(Rule(window), tokens))
    computed = 0
    for q, k, _, how in asked.calls:
        n = q.shape[2]
        computed += n * (n + 1) // 2 if how.get("is_causal") else q[..., 0].numel() * k.shape[2]
    assert long.pairs(window, tokens) == computed
    at_least = sum(min(i + 1, window or tokens) for i in range(tokens))
    assert at_least <= computed < 2.2 * at_least


class Products(TorchDispatchMode):
    """Multiplications and additions in products of matrices."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            a, b = args
            self.flops += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [SMALL, BORROWING], ids=["own keys", "borrowed keys"])
def test_products_are_those_of_a_run(shape):
    model = long.build(shape)
    with Products() as products:
        model(long.prompt(model, 30), stop_at_layer=model.cfg.n_layers)
    assert long.product_flops(model.cfg, 30) == products.flops


def test_attention_flops_are_two_products_of_every_pair():
    """By hand: 10 tokens that see 1, 2, ... 10 keys, 4 heads of 32."""
    full = long.build(SMALL).cfg.layer(5)
    assert long.attention_flops(full, 10) == 55 * 4 * 32 * 2 * 2


def test_what_lives_at_once_is_counted():
    old = torch.ones(1000)
    with long.Alive([old]) as alive:
        a = torch.ones(100)
        seen = a[10:]  # a view: no memory of its own
        del a
        assert alive.now == 400  # the view holds it
        b = torch.ones(50)
        assert alive.now == 600
        del seen
        assert alive.now == 200 and alive.peak == 600
        b.add_(1)
        old[5:].mul_(2)
        assert alive.now == 200
        c = torch.ones(3).double()
        assert alive.peak == 600 and alive.now == 224
    del b, c


def test_what_lives_at_once_goes_by_the_width():
    """The plan counts in a narrower network: half the widths hold half the bytes but for what knows heads only."""
    wide = SMALL | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 100}
    half = wide | {"hidden_size": 128, "intermediate_size": 512}
    for shape, head in ((wide, 64), (half, 32)):
        shape |= {"head_dim": head, "global_head_dim": 2 * head}
    found = [long.alive_per_token(shape, torch.bfloat16, (256, 512)) for shape in (wide, half)]
    assert found[0] == pytest.approx(2 * found[1], rel=0.05)
    kept_by_block = 2 * 2 * 2 * 64 * 6  # were keys and values of all blocks to stay
    assert found[0] < 3 * 2 * 1024 + 8 * 2 * 256 + kept_by_block


def test_narrower_means_every_width():
    cfg = HookedConfig.from_hf({"model_type": "gemma4_unified_text"} | long.TEXT_12B)
    narrow = long.build(long.narrowed(long.TEXT_12B)).cfg
    assert narrow.d_model * 64 == cfg.d_model and narrow.window_size * 64 == cfg.window_size
    for mine, its in zip(narrow.layers, cfg.layers, strict=True):
        assert (mine.d_mlp * 64, mine.d_head * 64) == (its.d_mlp, its.d_head)
        assert (mine.n_heads, mine.n_key_value_heads) == (its.n_heads, its.n_key_value_heads)


def test_a_line_is_told_from_a_curve():
    sizes = [1000, 2000, 4000]
    line = long.fitted(sizes, [50 + 0.25 * n for n in sizes])
    assert line == pytest.approx((50, 0.25, 0), abs=1e-9)

    def found(memory):
        return [long.Measured(n, n / 1e3, n / 1e2, memory(n)) for n in sizes]

    lines, held = long.table(found(lambda n: 50 + 0.25 * n), 0.25 * 2**20)
    assert held and "262144 bytes a token, off by 0.0% at most; bound 5%: ok" in lines[-2]
    lines, held = long.table(found(lambda n: 50 + 1e-4 * n * n), 0.0)
    assert not held and "ABOVE" in lines[-2]


def test_a_length_is_measured_in_a_process_of_its_own():
    one = long.in_a_process(2048, "local")
    assert one.tokens == 2048 and 0 < one.sliding < one.whole and one.memory > 1


def test_the_plan_says_what_fits(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["long.py", "--plan", "-o", str(tmp_path / "plan.txt")])
    assert long.main() == 0
    said = capsys.readouterr().out
    assert (tmp_path / "plan.txt").read_text() == said
    assert "weights of the text network     23.8 GB" in said  # 11.9 thousand million numbers
    fits = {line.strip().split("  ")[0]: line for line in said.splitlines() if " GiB" in line}
    assert fits["one call, all logits"].count("does NOT fit") == 2
    assert "NOT" not in fits["chunks on a kv_cache"]
