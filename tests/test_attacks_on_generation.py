"""What users do to caches, writing, long prompts and recomputed blocks that no other test does."""

from __future__ import annotations

import random

import pytest
import torch
from small import hooked, media_inputs, text_inputs
from torch import Tensor

from lens_gemma4 import HookedModel, KVCache, Target, ablate, knockout, logit_difference
from lens_gemma4.attribution import by_source
from lens_gemma4.new_text import NewText, after

F64 = torch.float64


def off(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def ids(batch: int, pos: int, seed: int = 0) -> Tensor:
    return text_inputs(batch, pos, seed)["input_ids"]


# -- a key/value cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "shared"])
@pytest.mark.parametrize("seed", range(4))
def test_forks_of_forks_run_in_any_order_while_a_hook_edits_keys(kind, seed):
    draw, model = random.Random(seed), hooked(kind)
    tokens, mask = ids(3, 40, seed), torch.ones(3, 40, dtype=torch.long)
    mask[1, : draw.randint(1, 9)] = 0

    def by_place(k: Tensor, hook) -> Tensor:  # [batch pos kv_head d_head]
        return (
            k * torch.tensor([1 + 0.1 * (p % 3) for p in hook.positions], dtype=F64)[:, None, None]
        )

    compared, shifted = 0, 0.0
    with model.hooks(fwd_hooks=[("blocks.*.attn.hook_rot_k", by_place)]):
        want = model(tokens, attention_mask=mask, position_ids="mask")
        caches = [(KVCache(model.cfg), [0, 1, 2])]
        for _ in range(30):
            kv, rows = draw.choice(caches)
            begin, n = kv.length, draw.choice([1, 1, 2, 5])
            if kv.rows and draw.random() < 0.3:
                chosen = [draw.randrange(len(rows)) for _ in range(draw.randint(1, 3))]
                caches.append((kv.fork(chosen), [rows[i] for i in chosen]))
            elif begin + n < 40:
                here = slice(begin, begin + n)
                real = mask[rows][:, here]
                got = model(tokens[rows][:, here], kv_cache=kv, attention_mask=real)
                real = real.bool()
                if real.any():
                    assert off(got[real], want[rows][:, here][real]) < 1e-10
                    next_one = want[rows][:, begin + 1 : begin + n + 1][real]
                    shifted = max(shifted, off(got[real], next_one))
                    compared += 1
    assert compared > 5 and shifted > 1e-3


def test_a_hook_may_look_ahead_on_a_fork_of_the_cache_it_runs_in():
    model, tokens = hooked(), ids(1, 12)
    want, kv, seen = model(tokens), KVCache(model.cfg), []
    model(tokens[:, :6], kv_cache=kv)

    def look(resid: Tensor, hook) -> None:
        if not seen:
            seen.append(None)
            seen.append(model(tokens[:, 6:9], kv_cache=kv.fork()))

    got = model.run_with_hooks(
        tokens[:, 6:7], kv_cache=kv, fwd_hooks=[("blocks.2.hook_resid_post", look)]
    )
    assert off(seen[1], want[:, 6:9]) < 1e-10 and off(got, want[:, 6:7]) < 1e-10
    assert off(model(tokens[:, 7:], kv_cache=kv), want[:, 7:]) < 1e-10
    assert off(seen[1], want[:, 7:10]) > 1e-3


def test_an_image_comes_late_and_its_prompt_goes_on_in_rows_of_any_order():
    model, media = hooked("wrapper, shared"), media_inputs(dtype=F64)
    before, later = ids(2, 9, 8), ids(2, 6, 3)
    want = model(**media | {"input_ids": torch.cat((before, media["input_ids"], later), 1)})
    rows = [1, 0, 1]
    for how in ("sdpa", "local", "eager"):
        model.set_attn_implementation(how)
        kv = KVCache(model.cfg)
        model(before, kv_cache=kv)
        model(**media, kv_cache=kv)
        fork = kv.fork(rows)
        got = [model(later[rows][:, a:b], kv_cache=fork) for a, b in ((0, 1), (1, 4), (4, 6))]
        assert off(torch.cat(got, 1), want[rows, -6:]) < 1e-10
        assert off(torch.cat(got, 1), want[[0, 1, 0], -6:]) > 1e-3


# -- writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    ["blocks.*.attn.hook_k", "blocks.*.attn.hook_result", "ln_final.hook_scale", "hook_logits_raw"],
)
def test_a_ragged_batch_whose_rows_end_early_is_cached_as_one_hooked_run(point):
    model, tokens = hooked(), ids(3, 8)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, :3], mask[2, :6] = 0, 0

    def bend(value: Tensor, hook) -> Tensor:
        return value + 0.1 * torch.sin(3 * value)

    free = model.generate(tokens, 8, attention_mask=mask, stop_at_eos=False)
    out, cache = model.generate(
        tokens,
        8,
        attention_mask=mask,
        stop=[int(free[1, 9])],
        stop_at_eos=False,
        fwd_hooks=[(point, bend)],
        return_cache=True,
    )
    real = cache["attention_mask"].bool()
    again = {"attention_mask": real.long(), "position_ids": "mask"}
    with model.hooks(fwd_hooks=[(point, bend)]):
        _, want = model.run_with_cache(out, **again)
    _, plain = model.run_with_cache(out, **again)
    unlike = 0
    for name in want.keys():  # noqa: SIM118
        if not want[name].is_floating_point():
            continue
        at = model.hook_dict[name].axes.split().index("pos")
        a, b, c = (kept[name].transpose(at, 1)[real] for kept in (cache, want, plain))
        shown = b.abs() < 1e30  # not the scores of hidden keys
        assert torch.equal(a[~shown], b[~shown]) and off(a[shown], b[shown]) < 1e-9, name
        unlike += off(b[shown], c[shown]) > 1e-6
    assert unlike


def test_what_a_hook_writes_meanwhile_disturbs_neither_text():
    model, done = hooked(), []

    def write(resid: Tensor, hook) -> None:
        if not done:
            done.append(None)
            done.append(model.generate(ids(1, 5, 3), 4, stop_at_eos=False, return_cache=True))

    at = [("blocks.1.hook_resid_post", write)]
    both = [
        model.generate(ids(1, 6), 4, fwd_hooks=at, return_cache=True, stop_at_eos=False),
        done[1],
    ]
    for (got, kept), prompt in zip(both, (ids(1, 6), ids(1, 5, 3)), strict=True):
        want, alone = model.generate(prompt, 4, return_cache=True, stop_at_eos=False)
        assert torch.equal(got, want)
        assert all(torch.equal(kept[name], alone[name]) for name in alone.keys())  # noqa: SIM118


def test_attribution_of_a_ragged_text_that_was_written_adds_up():
    model, tokens = hooked(), ids(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    free = model.generate(tokens, 6, attention_mask=mask, stop_at_eos=False)
    _, cache = model.generate(
        tokens,
        6,
        attention_mask=mask,
        stop=int(free[0, 8]),
        stop_at_eos=False,
        return_cache=True,
    )
    found = by_source(cache, Target(5))
    assert found.remainder.abs().max() < 1e-10
    assert not found.values[..., 0, 0, :2].any()  # the first row's pads
    elsewhere = by_source(cache, Target(5), positions=-1)
    assert off(found.actual[0], elsewhere.actual[0]) > 1e-3  # "last" is where that row ended


def test_bytes_in_any_order_are_told_as_the_whole_text_tells_them(tiny_model):
    tokenizer, draw = tiny_model.tokenizer, random.Random(0)
    d_vocab = tiny_model.cfg.d_vocab
    names = [tokenizer.convert_ids_to_tokens(i) or "" for i in range(d_vocab)]
    bytes_ = [i for i, name in enumerate(names) if name.startswith("<0x")]
    spelt = [
        tokenizer.encode(s, add_special_tokens=False) for s in ("é", "日本", "😀", ". The", "\n")
    ]

    def shown(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    apart = 0
    for _ in range(300):
        before = [draw.choice(bytes_) for _ in range(draw.randint(0, 6))]
        new: list[int] = []
        for _ in range(12):
            kind = draw.random()
            new += (
                draw.choice(spelt)
                if kind < 0.5
                else [draw.choice(bytes_ if kind < 0.8 else range(d_vocab))]
            )
        text, pieces = NewText(tokenizer, before), ""
        for token in new:
            text.add(token)
            pieces += text.take()
        want = after(shown(before), shown(before + new))
        assert pieces + text.loose == text.whole() == want
        apart += "".join(shown([token]) for token in new) != want

        begin = draw.randrange(len(want))
        stop = want[begin : begin + draw.randint(1, 6)]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        other = NewText(tokenizer, before)
        ends = []
        for i, token in enumerate(new):
            other.add(token)
            ends += [i] if other.has([stop, "never there"]) else []
        told = [stop in after(shown(before), shown(before + new[: i + 1])) for i in range(len(new))]
        assert ends[:1] == [told.index(True)]
    assert apart > 100  # token by token it reads otherwise


# -- the ways in which blocks run -----------------------------------------------------------------------


def test_maps_and_attributions_are_the_same_however_blocks_run():
    model, tokens = hooked(), ids(2, 21)
    mask, metric = torch.ones_like(tokens), logit_difference(5, 9)
    mask[0, :4] = 0

    def found(model: HookedModel) -> list[Tensor]:
        padded = {"attention_mask": mask}
        maps = [
            ablate(model, tokens, metric, units=unit, **padded) for unit in ("heads", "keys", "mlp")
        ]
        maps.append(knockout(model, tokens, metric, sources=[5, 6], units="attn"))
        attributed = model.attribute(tokens, 5, by="source", **padded).values
        return [*(one.values for one in maps), attributed, model.logit_lens(tokens, **padded).kl]

    want = found(model)
    model.set_attn_implementation("local")
    ways = [found(model)]
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable()
    ways.append(found(model))
    assert all(off(a, b) < 1e-9 for way in ways for a, b in zip(way, want, strict=True))
    model.gradient_checkpointing_disable()
    with torch.no_grad():
        model.blocks[2].layer_scalar.mul_(1.01)
    assert all(off(a, b) > 1e-6 for a, b in zip(found(model), want, strict=True))


def test_gradients_through_dropped_values_twice_over_one_graph():
    model, tokens = hooked(), ids(1, 12)
    drop = torch.nn.functional.dropout

    def gradients(seed: int) -> list[Tensor]:
        kept: list[Tensor] = []
        torch.manual_seed(seed)
        logits = model.run_with_hooks(
            tokens,
            fwd_hooks=[
                ("blocks.*.hook_mlp_out", lambda x, hook: drop(x, 0.5)),
                ("blocks.2.attn.hook_pattern", lambda x, hook: drop(x, 0.3)),
            ],
            bwd_hooks=[
                (name, lambda grad, hook: kept.append(grad))
                for name in ("blocks.0.hook_resid_pre", "blocks.2.attn.hook_q")
            ],
        )
        state = torch.get_rng_state()
        logits[0, -1].sum().backward(retain_graph=True)
        logits[0, 3].sum().backward()
        assert torch.equal(state, torch.get_rng_state())
        return kept

    with torch.random.fork_rng():
        want, other = gradients(0), gradients(1)
        model.gradient_checkpointing_enable()
        got = gradients(0)
    assert len(got) == len(want) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert off(other[0], want[0]) > 1e-6


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_attention_are_those_of_a_hooked_run_in_any_precision(dtype):
    model, tokens = hooked("shared", dtype), ids(2, 14)
    hooks = [
        ("hook_tokens", lambda ids, hook: ids.flip(1)),
        ("blocks.*.attn.hook_rot_q", lambda q, hook: q * 2),
    ]
    with model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern")
        for layer in range(model.cfg.n_layers):
            rows = model.attention_rows(tokens, layer=layer, heads=[-1, 0], positions=[-1, 3])
            want = cache["pattern", layer]
            assert off(rows, want[:, [-1, 0]][:, :, [-1, 3]]) < 1e-12
    plain = model.attention_rows(tokens, layer=0, heads=[-1, 0], positions=[-1, 3])
    assert off(plain, cache["pattern", 0][:, [-1, 0]][:, :, [-1, 3]]) > 1e-3


# -- what a run keeps, and what outlives a run --------------------------------------------------------


@pytest.mark.parametrize(("before", "pos"), [(1, 272), (16, 272), (20, 268)])
def test_a_chunk_over_the_window_follows_a_short_beginning(before, pos):
    """What has left the window was never held, and there is room for it in memory that has yet to grow."""
    model, tokens = hooked(sliding_window=256, max_position_embeddings=1024), ids(1, 330)
    want, kv = model(tokens), KVCache(model.cfg)
    ends = [before, before + pos, *range(before + pos + 1, before + pos + 20)]
    parts = [model(tokens[:, a:b], kv_cache=kv) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert off(torch.cat(parts, 1), want[:, : ends[-1]]) < 1e-10
    assert off(model(tokens[:, before + 1 : ends[-1]])[:, -1], want[:, ends[-1] - 1]) > 1e-3


def test_a_part_that_a_hook_runs_leaves_the_values_that_follow_from_the_runs_own():
    model = hooked()

    def run_a_part(resid: Tensor, hook) -> None:
        model.blocks[1].mlp(2 * resid)

    _, want = model.run_with_cache(ids(2, 11))
    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", run_a_part)]):
        _, cache = model.run_with_cache(ids(2, 11))
    for name in ("ln2_post.hook_out", "hook_mlp_out", "hook_resid_sum", "hook_resid_post"):
        assert torch.equal(cache[f"blocks.1.{name}"], want[f"blocks.1.{name}"]), name
    assert not torch.equal(cache["mlp_out", 1], want["mlp_out", 2])


def test_a_gain_that_torch_computes_is_applied():
    class Twice(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model, want, plain = hooked(), hooked(), hooked()
    for norm in ("ln1", "ln2_post"):
        gain = getattr(want.blocks[1], norm).weight
        gain.data.mul_(2)
        part = getattr(model.blocks[1], norm)
        torch.nn.utils.parametrize.register_parametrization(part, "weight", Twice())
    assert torch.equal(model(ids(1, 9)), want(ids(1, 9)))
    (_, got), (_, kept) = model.run_with_cache(ids(1, 9)), want.run_with_cache(ids(1, 9))
    assert torch.equal(got["blocks.1.ln1.hook_out"], kept["blocks.1.ln1.hook_out"])
    assert off(plain(ids(1, 9)), want(ids(1, 9))) > 1e-3


def test_a_run_on_shapes_alone_leaves_no_trace():
    from torch._subclasses.fake_tensor import FakeTensorMode

    wide = {"hidden_size": 36, "head_dim": 22, "global_head_dim": 34}  # that no other test has run
    embeds = torch.randn(1, 5, 36, generator=torch.Generator().manual_seed(0))
    model, other = (hooked(dtype=torch.float32, **wide) for _ in range(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(inputs_embeds=embeds)
    got = model(inputs_embeds=embeds)
    want = hooked(**wide)(inputs_embeds=embeds.double())
    assert off(got, want) < 1e-4 and torch.equal(got, other(inputs_embeds=embeds))
