"""The network against the architecture written down once more, slowly and in float64; masks; identities; resuming.

transformers is no reference in float64 (it rounds norms, angles and softmaxes to float32 there), so the algebra is
checked against the loops below. Each test carries the mistakes that would be plausible, and sees them.
"""

import math

import jaxtyping
import pytest
import torch
from small import (
    IMAGE,
    KINDS,
    WINDOW,
    A,
    S,
    build,
    inputs_for,
    media_inputs,
    padded_inputs,
    text_inputs,
)

from lens_gemma4.errors import Unavailable
from lens_gemma4.masks import attention_masks, block_ids
from lens_gemma4.model import Gemma4, rotary_frequencies

F64 = torch.float64
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _unchecked():
    """Annotations are not checked at run time, which is slow; messages are those a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def stored(model, **inputs):
    """Logits, and the value of every point that fires."""
    return model.run_and_store(**inputs, names_filter="*")


def types_of(ids):
    return (ids == 90).long() + 2 * (ids == 92).long() + 3 * (ids == 91).long()


# -- the architecture once more -------------------------------------------------------------------------


def visible(cfg, kind, query, key, types, image_mask="transformers"):
    """Whether a query sees a key, padding aside. `types` is one row's token types."""
    window = cfg.window_size
    if cfg.bidirectional == "all":
        return kind == "full" or abs(query - key) <= window // 2 + 1
    past, recent = key <= query, key > query - window
    if not (cfg.is_wrapper and cfg.bidirectional == "vision"):
        return past and (recent or kind == "full")
    low, high = min(query, key), max(query, key)
    same = all(types[i] in (1, 2) for i in range(low, high + 1))
    if image_mask == "windowed":
        return past if kind == "full" else (past or same) and recent
    return (past and (recent or kind == "full")) or same


def rms(x, eps, gain=None):
    normalized = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normalized if gain is None else normalized * gain


def turn(x, position, layer, mistake):
    """One head of one position, turned."""
    size, out = len(x), x.clone()
    turning = int(layer.rotary.fraction * size // 2)
    for i in range(turning):
        exponent = (
            2 * i / (2 * turning if mistake == "rotary exponents over the turning part" else size)
        )
        angle = position * layer.rotary.theta**-exponent
        first, second = (
            (2 * i, 2 * i + 1) if mistake == "neighbouring rotary pairs" else (i, i + size // 2)
        )
        out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return out


def attend(model, layer, a, types, lent, mistake):
    """One row's attention, before its post-norm: loops over heads, queries and keys."""
    cfg, attn, eps = model.cfg, model.blocks[layer.index].attn, model.cfg.eps
    heads, size = layer.n_heads, layer.d_head
    pos, per_kv = len(a), heads // layer.n_key_value_heads
    q = rms((a @ attn.w_q.T).view(pos, heads, size), eps, attn.q_norm.weight)
    if layer.lender is None:
        raw_k = (a @ attn.w_k.T).view(pos, -1, size)
        raw_v = raw_k if layer.k_eq_v else (a @ attn.w_v.T).view(pos, -1, size)
        k = rms(raw_k, eps, attn.k_norm.weight)
        v = rms(k if mistake == "values after the key norm" and layer.k_eq_v else raw_v, eps)
        if mistake == "values without their norm":
            v = raw_v
        k = torch.stack(
            [torch.stack([turn(h, p, layer, mistake) for h in k[p]]) for p in range(pos)]
        )
        lent[layer.index] = k, v
    lender = layer.index if layer.lender is None else layer.lender
    if mistake == "the first block of a type lends" and layer.lender is not None:
        lender = next(i for i in range(lender + 1) if cfg.layer(i).kind == layer.kind)
    k, v = lent[lender]
    z = torch.zeros(pos, heads, size, dtype=F64)
    for head in range(heads):
        group = head % len(k[0]) if mistake == "heads dealt out to key heads" else head // per_kv
        for query in range(pos):
            turned = turn(q[query, head], query, layer, mistake)
            far = WINDOW if mistake == "a window one wider" else None
            keys = [
                key
                for key in range(pos)
                if visible(cfg, layer.kind, query, key, types) or (far and query - key == far)
            ]
            scores = torch.stack([turned @ k[key, group] for key in keys])
            if mistake == "scores over the root of the head size":
                scores = scores / size**0.5
            weights = (
                scores.float().softmax(0).double()
                if mistake == "float32 softmax"
                else scores.softmax(0)
            )
            z[query, head] = weights @ v[keys, group]
    return z.flatten(1) @ attn.w_o.T


def slow_logits(model, ids, types, stream=None, mistake=None):
    """Logits of one row, from the page on the architecture."""
    cfg, eps, lent = model.cfg, model.cfg.eps, {}
    x = model.w_e[ids] * (1.0 if mistake == "embeddings unscaled" else cfg.d_model**0.5)
    x = x if stream is None else stream
    plus = 1 if mistake == "gains of one plus weight" else 0
    for layer in cfg.layers:
        block = model.blocks[layer.index]
        wrote = attend(model, layer, rms(x, eps, plus + block.ln1.weight), types, lent, mistake)
        wrote = (
            wrote
            if mistake == "no norm after the attention"
            else rms(wrote, eps, plus + block.ln1_post.weight)
        )
        mid = x + wrote
        inner = rms(mid, eps, plus + block.ln2.weight)
        gate = torch.nn.functional.gelu(
            inner @ block.mlp.w_gate.T, approximate="none" if mistake == "exact GELU" else "tanh"
        )
        mlp = rms(
            (gate * (inner @ block.mlp.w_in.T)) @ block.mlp.w_out.T,
            eps,
            plus + block.ln2_post.weight,
        )
        scalar = 1.0 if mistake == "no layer scalar" else block.layer_scalar
        x = mid + mlp * scalar if mistake == "the scalar on the MLP alone" else (mid + mlp) * scalar
    raw = rms(x, eps, plus + model.ln_final.weight) @ model.unembedding.T
    cap = cfg.output_logits_soft_cap
    return raw if cap is None or mistake == "no softcap" else cap * torch.tanh(raw / cap)


def slow_rows(model, inputs, mistake=None):
    ids = inputs["input_ids"]
    types = types_of(ids).tolist()
    streams = model(**inputs, stop_at_layer=0) if model.cfg.vision else [None] * len(ids)
    return torch.stack(
        [slow_logits(model, *row, mistake) for row in zip(ids, types, streams, strict=True)]
    )


@kinds
@implementations
def test_a_float64_model_is_the_architecture_to_float64_rounding(kind, implementation):
    model, inputs = build(kind, F64, implementation), inputs_for(kind, F64)
    inputs = {name: value[:1] for name, value in inputs.items()} if kind == "text" else inputs
    logits = model(**inputs)
    torch.testing.assert_close(logits, slow_rows(model, inputs), atol=1e-11, rtol=0)


MISTAKES = {
    "no layer scalar": "text",
    "the scalar on the MLP alone": "text",
    "gains of one plus weight": "text",
    "embeddings unscaled": "text",
    "no softcap": "text",
    "values after the key norm": "text",
    "values without their norm": "text",
    "rotary exponents over the turning part": "text",
    "neighbouring rotary pairs": "text",
    "scores over the root of the head size": "text",
    "a window one wider": "text",
    "heads dealt out to key heads": "text",
    "no norm after the attention": "text",
    "exact GELU": "text",
    "the first block of a type lends": "shared",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_plausible_mistake_would_be_seen(mistake):
    model, inputs = build(MISTAKES[mistake], F64), text_inputs(1)
    assert (model(**inputs) - slow_rows(model, inputs, mistake)).abs().max() > 1e-3


def test_float32_inside_a_float64_model_would_be_seen():
    model, inputs = build("text", F64), text_inputs(1)
    logits = model(**inputs)
    assert (logits - slow_rows(model, inputs, "float32 softmax")).abs().max() > 1e-9
    assert (logits - build("text")(**inputs)).abs().max() > 1e-9


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_norms_and_angles_keep_their_width(narrow):
    """Float32 in narrow models, float64 in a float64 one; buffers of angles survive a change of dtype."""
    model = build("text", F64).to(torch.bfloat16).to(narrow)
    assert model(**text_inputs()).dtype == narrow
    layer = model.cfg.layer(0)
    exact = rotary_frequencies(layer.rotary, layer.d_head, F64)
    kept = {key[1]: value for key, value in model._frequencies.items() if key[0] == "sliding"}
    torch.testing.assert_close(kept[torch.float32].double(), exact, atol=0, rtol=5e-7)
    assert not torch.equal(exact.to(torch.bfloat16).double(), exact)
    norm, x = model.blocks[0].ln1, torch.randn(3, 20, dtype=narrow)
    wide = (
        x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.float()
    ).to(narrow)
    torch.testing.assert_close(norm.plain(x), wide, atol=0, rtol=2 * torch.finfo(narrow).eps)
    _, kept = stored(model, **text_inputs())
    assert kept["blocks.0.ln1.hook_scale"].dtype == torch.float32
    _, kept = stored(build("text", F64), **text_inputs())
    assert {value.dtype for name, value in kept.items() if name != "hook_tokens"} == {F64}


def test_the_embedding_scale_is_rounded_to_the_weights_dtype():
    """sqrt(20) is 4.4721 in float32 and 4.46875 in bfloat16; it follows `.to` there and back."""
    model, inputs = build("text", torch.bfloat16), text_inputs()
    rounded = torch.tensor(20**0.5).bfloat16()
    assert model.cfg.embed_scale == rounded.item() != 20**0.5
    _, kept = stored(model, **inputs)
    words = model.w_e[inputs["input_ids"]]
    assert torch.equal(kept["hook_embed"], words * rounded)
    assert not torch.equal(kept["hook_embed"], (words.float() * 20**0.5).bfloat16())
    assert model.to(F64).cfg.embed_scale == 20**0.5


def test_image_rows_are_not_scaled_and_other_rows_are():
    model, inputs = build("wrapper"), media_inputs()
    _, kept = stored(model, **inputs)
    stream, where = kept["blocks.0.hook_resid_pre"], inputs["input_ids"] == IMAGE
    assert torch.equal(stream[where], kept["vision.hook_image_features"])
    assert torch.equal(stream[inputs["input_ids"] == 91], kept["audio.hook_audio_features"])
    assert torch.equal(stream[inputs["input_ids"] == 92], kept["video.hook_video_features"])
    text = inputs["input_ids"] < 90
    assert torch.equal(stream[text], kept["hook_embed"][text])
    assert not torch.equal(stream[where], kept["hook_embed"][where])
    pad = model.w_e[0] * model.cfg.embed_scale
    assert torch.equal(kept["hook_embed"][where], pad.expand(where.sum(), -1))


def test_the_pixel_embedder_is_the_page_on_it():
    model, inputs = build("wrapper", F64), media_inputs(dtype=F64)
    vision, pixels, places = model.vision, inputs["pixel_values"], inputs["image_position_ids"]

    def slow(axes=(0, 1), eps=1e-5):
        def norm(x, weights):
            centred = x - x.mean(-1, keepdim=True)
            return (
                centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights.weight
                + weights.bias
            )

        rows = []
        for image in range(2):
            for patch in range(8):
                x, y = places[image, patch].tolist()
                if (x, y) == (-1, -1):
                    continue
                h = norm(
                    norm(pixels[image, patch], vision.patch_ln1) @ vision.w_patch.T
                    + vision.b_patch,
                    vision.patch_ln2,
                )
                h = norm(h + vision.w_pos[x, axes[0]] + vision.w_pos[y, axes[1]], vision.pos_norm)
                rows.append(rms(h, 1e-6) @ vision.projector.w_out.T)
        return torch.stack(rows)

    _, kept = stored(model, **inputs)
    features = kept["vision.hook_image_features"]
    torch.testing.assert_close(features, slow(), atol=1e-12, rtol=0)
    for wrong in (slow(axes=(1, 0)), slow(eps=1e-6)):
        assert (features - wrong).abs().max() > 1e-7
    frames = inputs["input_features"][inputs["input_features_mask"].bool()]
    audio = rms(frames, 1e-6) @ model.audio.w_out.T
    torch.testing.assert_close(kept["audio.hook_audio_features"], audio, atol=1e-12, rtol=0)
    assert (kept["audio.hook_audio_features"] - frames @ model.audio.w_out.T).abs().max() > 1e-2


def test_an_axis_at_minus_one_adds_nothing():
    model, inputs = build("wrapper"), media_inputs()
    _, kept = stored(model, **inputs)
    padded = (inputs["image_position_ids"] == -1).all(-1)
    assert kept["vision.hook_pos_embed"][padded].abs().max() == 0
    one = torch.tensor([[[2, -1]]])
    from lens_gemma4.media import _positions

    assert torch.equal(_positions(model.vision.w_pos, one)[0, 0], model.vision.w_pos[2, 0])


# -- masks ----------------------------------------------------------------------------------------------

ROWS = {
    "text": [0] * 13,
    "an image longer than the window": [0, 0, *[1] * 7, 0, 0, 0],
    "adjacent images are one block": [0, *[1] * 3, *[1] * 3, 0, 0, 0, 0, 0],
    "an image beside a video frame": [1, 1, 1, 2, 2, 2, 0, 0, 0, 0],
    "frames apart": [0, 2, 2, 0, 2, 2, 0, 1, 1, 1, 1, 1],
    "audio is causal": [0, 3, 3, 3, 3, 3, 3, 0, 1, 1, 3, 3],
    "at both ends": [1, 1, 0, 0, 0, 0, 0, 0, 1, 1],
    "one token": [0],
    "a window": [0] * WINDOW,
    "a window and one": [0] * (WINDOW + 1),
}
PADS = {"none": (0, 0), "left": (3, 0), "right": (0, 2), "both": (2, 1)}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("image_mask", ["transformers", "windowed"])
@kinds
def test_masks_are_the_rules_spelled_out(kind, row, image_mask):
    cfg = build(kind).cfg
    for left, right in PADS.values():
        types = [0] * left + ROWS[row] + [0] * right
        pos = len(types)
        real = [left <= i < pos - right for i in range(pos)]
        padding = None if all(real) else torch.tensor([real, [True] * pos])
        rows = 1 if padding is None else 2
        masks = attention_masks(
            cfg, rows, pos, torch.device("cpu"), padding, torch.tensor([types] * rows), image_mask
        )
        assert set(masks) == {"sliding", "full"}
        for kind_of_block, mask in masks.items():
            got = mask.seen().expand(rows, 1, pos, pos)[:, 0].tolist()
            for index in range(rows):
                expected = [
                    [
                        visible(cfg, kind_of_block, q, k, types, image_mask)
                        and (index == 1 or real[k])
                        for k in range(pos)
                    ]
                    for q in range(pos)
                ]
                assert got[index] == expected, (kind_of_block, left, right)
    other = "windowed" if image_mask == "transformers" else "transformers"
    differ = any(
        visible(cfg, kind, q, k, ROWS[row], image_mask)
        != visible(cfg, kind, q, k, ROWS[row], other)
        for kind in ("sliding", "full")
        for q in range(len(ROWS[row]))
        for k in range(len(ROWS[row]))
    )
    has_image = any(
        t in (1, 2) and ROWS[row][i : i + 2] in ([1, 1], [2, 2]) for i, t in enumerate(ROWS[row])
    )
    assert differ == (has_image and cfg.is_wrapper and cfg.bidirectional == "vision")


def test_blocks_of_images():
    types = torch.tensor([[1, 1, 0, 2, 1, 3, 1, 0], [0, 0, 3, 0, 0, 0, 0, 2]])
    assert block_ids(types).tolist() == [
        [0, 0, -1, 1, 1, -1, 2, -1],
        [-1, -1, -1, -1, -1, -1, -1, 0],
    ]


@pytest.mark.parametrize("image_mask", ["transformers", "windowed"])
@pytest.mark.parametrize("kind", ["text", "wrapper", "wrapper, all"])
@implementations
def test_the_pattern_is_zero_exactly_where_the_rules_hide_a_key(kind, implementation, image_mask):
    """Whatever the kernel was told, this is what ran."""
    model = build(kind, F64, implementation, image_mask, seed=2)
    inputs = inputs_for(kind, F64)
    _, kept = stored(model, **inputs)
    types = types_of(inputs["input_ids"]).tolist()
    for layer in model.cfg.layers:
        pattern = kept[f"blocks.{layer.index}.attn.hook_pattern"]
        for row, heads in enumerate(pattern):
            expected = [
                [
                    visible(model.cfg, layer.kind, q, k, types[row], image_mask)
                    for k in range(len(types[row]))
                ]
                for q in range(len(types[row]))
            ]
            seen = torch.tensor(expected)
            assert (heads[:, ~seen] == 0).all()
            assert (heads.sum(0)[seen] > 0).all()


def test_the_two_image_rules_give_other_logits_on_images_and_the_same_on_text():
    one, two = build("wrapper"), build("wrapper", image_mask="windowed")
    assert (one(**media_inputs()) - two(**media_inputs())).abs().max() > 1e-2
    assert torch.equal(one(**text_inputs()), two(**text_inputs()))


def test_token_types_are_derived_from_the_ids():
    """transformers silently treats images as causal without them."""
    model, inputs = build("wrapper"), media_inputs()
    logits = model(**inputs)
    types = types_of(inputs["input_ids"])
    assert torch.equal(model(**inputs, mm_token_type_ids=types), logits)
    causal = model(**inputs, mm_token_type_ids=torch.zeros_like(types))
    assert (causal - logits).abs().max() > 1e-2
    audio_too = model(**inputs, mm_token_type_ids=torch.where(types == 3, 1, types))
    assert (audio_too - logits).abs().max() > 1e-3


# -- padding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "shared", "all", "wrapper"])
@implementations
def test_a_padded_row_is_the_unpadded_row_to_float64_rounding(kind, implementation):
    model = build(kind, F64, implementation)
    ids = text_inputs(1, 10)["input_ids"]
    alone = model(input_ids=ids)
    for left, right in ((3, 0), (0, 4), (2, 5), (WINDOW + 5, 0)):
        pads = [torch.zeros(1, n, dtype=torch.long) for n in (left, right)]
        padded = torch.cat((pads[0], ids, pads[1]), 1)
        mask = torch.cat((pads[0], torch.ones_like(ids), pads[1]), 1)
        batch = {
            "input_ids": torch.cat((padded, text_inputs(1, padded.shape[1], 7)["input_ids"])),
            "attention_mask": torch.cat((mask, torch.ones_like(mask))),
        }
        here = slice(left, left + 10)
        for position_ids in (None, "mask"):  # rotary positions are relative: both agree
            logits = model(**batch, position_ids=position_ids)
            torch.testing.assert_close(logits[:1, here], alone, atol=1e-10, rtol=0)
            assert logits.isfinite().all()
        assert (model(input_ids=padded)[:, here] - alone).abs().max() > 1e-3 or (
            not left and kind != "all"
        )


def test_a_padded_image_row_is_the_unpadded_row():
    for implementation in ("sdpa", "eager"):
        model, inputs = build("wrapper", F64, implementation), media_inputs(dtype=F64)
        alone = model(**inputs)
        pads = torch.zeros(2, 5, dtype=torch.long)
        padded = inputs | {"input_ids": torch.cat((pads, inputs["input_ids"]), 1)}
        mask = torch.cat((pads, torch.ones_like(inputs["input_ids"])), 1)
        logits = model(**padded, attention_mask=mask, position_ids="mask")
        torch.testing.assert_close(logits[:, 5:], alone, atol=1e-10, rtol=0)
        assert (model(**padded)[:, 5:] - alone).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["text", "wrapper", "all", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
@implementations
def test_nothing_is_nan_for_any_pad_length(kind, dtype, implementation):
    model = build(kind, dtype, implementation)
    ids = text_inputs(1, 7)["input_ids"]
    for pads in range(8):
        for side in ("left", "right"):
            mask = torch.ones_like(ids)
            mask[0, slice(0, pads) if side == "left" else slice(7 - pads, None)] = 0
            logits, kept = model.run_and_store(
                input_ids=torch.cat((ids, ids)),
                attention_mask=torch.cat((mask, torch.ones_like(mask))),
                names_filter=["blocks.*.attn.hook_pattern", "*.hook_resid_post"],
            )
            assert logits.isfinite().all(), (pads, side)
            assert all(value.isfinite().all() for value in kept.values())


def test_what_a_query_without_keys_sees_is_what_ran():
    inputs = padded_inputs("left")
    _, eager = stored(build("text", attn_implementation="eager"), **inputs)
    _, sdpa = stored(build("text"), **inputs)
    name = "blocks.1.attn.hook_pattern"
    torch.testing.assert_close(eager[name][2], torch.full((4, 10, 10), 0.1))
    assert sdpa[name][2].abs().max() == 0 and sdpa["blocks.1.attn.hook_z"][2].abs().max() == 0
    torch.testing.assert_close(sdpa[name][0].sum(-1), torch.ones(4, 10))


def test_position_ids():
    model, inputs = build("text", F64), padded_inputs("left")
    mask = inputs["attention_mask"]
    _, kept = stored(model, **inputs, position_ids="mask")
    counted = torch.stack(
        [torch.arange(10), torch.tensor([0, 0, 0, *range(7)]), torch.zeros(10, dtype=torch.long)]
    )
    _, given = stored(model, **inputs, position_ids=counted)
    name = "blocks.0.attn.hook_rot_k"
    assert torch.equal(kept[name], given[name])
    _, plain = stored(model, **inputs)
    assert torch.equal(plain[name][0], kept[name][0])
    assert (plain[name][1] - kept[name][1]).abs().max() > 1e-2
    assert mask.sum() == 17
    with pytest.raises(ValueError, match="use a tensor"):
        model(**inputs, position_ids="masked")
    with pytest.raises(ValueError, match="10 positions"):
        model(**inputs, position_ids=torch.arange(9))


def test_positions_that_jump_turn_the_rotary_and_never_change_the_mask():
    """transformers' wrapper reads packed documents out of them; an all-ones mask stops it, and so here nothing moves."""
    for kind in ("text", "wrapper"):
        model, inputs = build(kind), text_inputs(1, 12)
        jumping = torch.tensor([[*range(6), *range(6)]])
        logits = model(**inputs, position_ids=jumping)
        ones = torch.ones_like(inputs["input_ids"])
        assert torch.equal(model(**inputs, position_ids=jumping, attention_mask=ones), logits)
        assert (model(**inputs) - logits).abs().max() > 1e-3
        _, kept = stored(model, **inputs, position_ids=jumping)
        full = kept["blocks.1.attn.hook_pattern"]
        assert (full[0, :, 7, :6].sum(-1) > 0).any()  # the second part sees the first


# -- identities -----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_what_a_block_adds_times_its_scalar_is_what_it_passes_on(kind, dtype):
    model, inputs = build(kind, dtype), inputs_for(kind, dtype)
    logits, kept = stored(model, **inputs)
    for index, block in enumerate(model.blocks):
        at = {
            name: kept[f"blocks.{index}.hook_{name}"]
            for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        }
        total = at["resid_pre"] + at["attn_out"] + at["mlp_out"]
        assert torch.equal(total * block.layer_scalar, at["resid_post"])
        assert torch.equal(total, kept[f"blocks.{index}.hook_resid_sum"])
        assert (total - at["resid_post"]).abs().max() > 1e-2  # the scalar counts
        before_norms = (
            at["resid_pre"]
            + kept[f"blocks.{index}.attn.hook_out"]
            + kept[f"blocks.{index}.mlp.hook_out"]
        )
        assert (before_norms * block.layer_scalar - at["resid_post"]).abs().max() > 1e-2
        assert torch.equal(kept[f"blocks.{index}.ln1_post.hook_out"], at["attn_out"])
        if index:
            assert torch.equal(kept[f"blocks.{index - 1}.hook_resid_post"], at["resid_pre"])
    assert torch.equal(kept["hook_logits"], logits)


@kinds
@implementations
def test_scores_pattern_values_heads_and_output_are_one_chain(kind, implementation):
    model, inputs = build(kind, F64, implementation), inputs_for(kind, F64)
    _, kept = stored(model, **inputs)
    for layer in model.cfg.layers:
        at = {
            n.split(".attn.")[1]: v
            for n, v in kept.items()
            if n.startswith(f"blocks.{layer.index}.attn.")
        }
        repeat = layer.n_heads // layer.n_key_value_heads
        keys, values = (
            at[n].repeat_interleave(repeat, 2) for n in ("hook_rot_k", "v_norm.hook_out")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", at["hook_rot_q"], keys)
        shown = at["hook_attn_scores"] > torch.finfo(F64).min / 2
        torch.testing.assert_close(
            at["hook_attn_scores"][shown], scores[shown], atol=1e-12, rtol=1e-12
        )
        torch.testing.assert_close(
            at["hook_attn_scores"].softmax(-1), at["hook_pattern"], atol=1e-14, rtol=0
        )
        torch.testing.assert_close(
            at["hook_pattern"].sum(-1), torch.ones(scores.shape[:-1], dtype=F64)
        )
        z = torch.einsum("bhqk,bkhd->bqhd", at["hook_pattern"], values)
        torch.testing.assert_close(z, at["hook_z"], atol=1e-12, rtol=0)
        torch.testing.assert_close(at["hook_result"].sum(2), at["hook_out"], atol=1e-12, rtol=0)
        result = torch.einsum("bphd,hdm->bphm", at["hook_z"], model.blocks[layer.index].attn.W_O)
        torch.testing.assert_close(result, at["hook_result"], atol=1e-12, rtol=0)
        unit = at["v_norm.hook_out"].pow(2).mean(-1)
        torch.testing.assert_close(unit, torch.ones_like(unit), atol=1e-3, rtol=0)
        # The plausible wrong ones: raw projections, heads dealt out to groups, the contribution, the pattern twice.
        assert (scores[shown].softmax(-1) - at["hook_pattern"][shown]).abs().max() > 1e-2
        if repeat > 1 and layer.n_key_value_heads > 1:
            dealt = at["v_norm.hook_out"].repeat(1, 1, repeat, 1)
            assert (
                torch.einsum("bhqk,bkhd->bqhd", at["hook_pattern"], dealt) - at["hook_z"]
            ).abs().max() > 1e-2
        assert (
            at["hook_result"].sum(2) - kept[f"blocks.{layer.index}.hook_attn_out"]
        ).abs().max() > 1e-2
        if layer.lender is None:
            raw = torch.einsum(
                "bhqk,bkhd->bqhd", at["hook_pattern"], at["hook_v"].repeat_interleave(repeat, 2)
            )
            assert (raw - at["hook_z"]).abs().max() > 1e-2
            assert (at["hook_v"].pow(2).mean(-1) - 1).abs().max() > 1e-1


def test_every_value_head_has_rms_one_up_to_eps_and_rounding():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (F64, 1e-14)):
        model = build("text", dtype, rms_norm_eps=1e-30 if dtype == F64 else 1e-9)
        _, kept = stored(model, **text_inputs())
        for index in range(4):
            values = kept[f"blocks.{index}.attn.v_norm.hook_out"].double()
            unit = values.pow(2).mean(-1).sqrt()
            torch.testing.assert_close(unit, torch.ones_like(unit), atol=tolerance, rtol=0)
            keys = kept[f"blocks.{index}.attn.k_norm.hook_out"].double()
            assert (keys.pow(2).mean(-1).sqrt() - 1).abs().max() > 0.02  # keys have a gain


def test_norm_points_are_their_definition():
    model, inputs = build("wrapper", F64), media_inputs(dtype=F64)
    _, kept = stored(model, **inputs)
    reads = {
        "blocks.1.ln1": kept["blocks.1.hook_resid_pre"],
        "blocks.1.ln1_post": kept["blocks.1.attn.hook_out"],
        "blocks.1.ln2": kept["blocks.1.hook_resid_mid"],
        "blocks.1.ln2_post": kept["blocks.1.mlp.hook_out"],
        "blocks.1.attn.q_norm": kept["blocks.1.attn.hook_q"],
        "blocks.1.attn.k_norm": kept["blocks.1.attn.hook_k"],
        "blocks.1.attn.v_norm": kept["blocks.1.attn.hook_v"],
        "ln_final": kept["blocks.3.hook_resid_post"],
        "vision.projector.norm": kept["vision.hook_out"],
        "audio.norm": inputs["input_features"],
        "vision.patch_ln1": inputs["pixel_values"],
        "vision.patch_ln2": kept["vision.hook_patch_embed"],
        "vision.pos_norm": kept["vision.hook_pos_sum"],
        "video.pos_norm": kept["video.hook_pos_sum"],
    }
    for name, x in reads.items():
        layer_norm = name.split(".")[-1] in ("patch_ln1", "patch_ln2", "pos_norm")
        centred = x - x.mean(-1, keepdim=True) if layer_norm else x
        eps = 1e-5 if layer_norm else 1e-6
        scale = (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        module = model.get_submodule(name.replace("video", "vision"))
        gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        out = centred / scale
        torch.testing.assert_close(kept[f"{name}.hook_scale"], scale, atol=1e-13, rtol=1e-13)
        torch.testing.assert_close(kept[f"{name}.hook_normalized"], out, atol=1e-12, rtol=1e-12)
        out = (out if gain is None else out * gain) + (0 if bias is None else bias)
        torch.testing.assert_close(kept[f"{name}.hook_out"], out, atol=1e-12, rtol=1e-12)
        assert (kept[f"{name}.hook_scale"] - x.norm(dim=-1, keepdim=True)).abs().max() > 1e-2


def test_features_are_the_projection_without_the_padding():
    for dtype in (torch.float32, torch.bfloat16):
        model, inputs = build("wrapper", dtype), media_inputs(dtype=dtype)
        _, kept = stored(model, **inputs)
        for medium, places, features in (
            ("vision", "image_position_ids", "hook_image_features"),
            ("video", "video_position_ids", "hook_video_features"),
        ):
            valid = (inputs[places] != -1).all(-1)
            projected = kept[f"{medium}.projector.hook_out"]
            assert torch.equal(projected[valid], kept[f"{medium}.{features}"])
            assert projected[~valid].abs().max() > 0  # padded rows are there, and dropped
        valid = inputs["input_features_mask"].bool()
        assert torch.equal(kept["audio.hook_out"][valid], kept["audio.hook_audio_features"])


# -- what an edit reaches -------------------------------------------------------------------------------


def changed(model, inputs, name, edit):
    """Names of the values that an edit changes."""
    _, clean = stored(model, **inputs)
    with model.hooks(fwd_hooks=[(name, edit)]):
        _, after = stored(model, **inputs)
    return {other for other in clean if not torch.equal(clean[other], after[other])}, clean, after


def shift(value, hook):
    return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(value)


@pytest.mark.parametrize("how", ["returned", "in place"])
def test_an_edit_of_the_middle_stream_reaches_the_skip_path_and_the_mlp(how):
    """In TransformerLens a returned one reaches the MLP only."""

    def edit(value, hook):
        if how == "in place":
            value += 1
            return None
        return value + 1

    model, inputs = build("text", F64), text_inputs()
    _, clean, after = changed(model, inputs, "blocks.1.hook_resid_mid", edit)
    moved = after["blocks.1.hook_resid_post"] - clean["blocks.1.hook_resid_post"]
    mlp = after["blocks.1.hook_mlp_out"] - clean["blocks.1.hook_mlp_out"]
    torch.testing.assert_close(moved, (1 + mlp) * model.blocks[1].layer_scalar, atol=1e-12, rtol=0)
    assert (moved - mlp * model.blocks[1].layer_scalar).abs().max() > 0.1


@pytest.mark.parametrize("point", ["hook_rot_k", "v_norm.hook_out"])
@implementations
def test_an_edit_of_one_key_value_head_moves_exactly_its_group(point, implementation):
    model, inputs = build("text", attn_implementation=implementation), text_inputs()

    def edit(value, hook):
        value[:, :, 1] = shift(value[:, :, 1], hook)

    _, clean, after = changed(model, inputs, f"blocks.0.attn.{point}", edit)
    moved = (clean["blocks.0.attn.hook_z"] - after["blocks.0.attn.hook_z"]).abs().amax((0, 1, 3))
    assert (moved[:2] == 0).all() and (moved[2:] > 1e-3).all()


def test_on_a_block_whose_values_are_its_keys():
    model, inputs, attn = build("text"), text_inputs(), "blocks.1.attn."
    keys, values = {attn + "hook_rot_k"}, {attn + "v_norm.hook_out"}
    for point, moves, stays in (
        ("hook_k", keys | values | {attn + "hook_v"}, set()),
        ("hook_v", values, keys | {attn + "hook_k"}),
        ("k_norm.hook_out", keys, values),
        ("hook_rot_k", keys, values | {attn + "k_norm.hook_out"}),
        ("v_norm.hook_normalized", values, keys),
    ):
        names, _, _ = changed(model, inputs, attn + point, shift)
        assert moves <= names and not stays & names, point
    own = build("no softcap, untied")
    names, _, _ = changed(own, inputs, attn + "hook_k", shift)
    assert keys <= names and not (values | {attn + "hook_v"}) & names


@pytest.mark.parametrize("kind", ["shared", "shared, own values"])
def test_what_a_lender_lends(kind):
    """Block 2 lends to 4 and 5. What is lent is taken before the lender's last two hooks."""
    model, inputs = build(kind), text_inputs()
    read = [f"blocks.{i}.attn.{p}" for i in (4, 5) for p in ("hook_rot_k", "v_norm.hook_out")]
    keys, values = read[::2], read[1::2]
    for point, moves in (
        ("hook_k", read if kind == "shared" else keys),
        ("k_norm.hook_scale", keys),
        ("k_norm.hook_out", keys),
        ("hook_v", values),
        ("v_norm.hook_scale", values),
        ("v_norm.hook_normalized", values),
        ("hook_rot_k", []),
        ("v_norm.hook_out", []),
    ):
        names, _, _ = changed(model, inputs, f"blocks.2.attn.{point}", shift)
        assert {"blocks.2.attn.hook_z", "hook_logits"} <= names
        assert names & set(read) == set(moves), point
    for point in ("hook_rot_k", "v_norm.hook_out"):
        names, _, _ = changed(model, inputs, f"blocks.4.attn.{point}", shift)
        assert "blocks.4.attn.hook_z" in names
        assert names & set(read) == {f"blocks.4.attn.{point}"}
        assert f"blocks.2.attn.{point}" not in names
    _, kept = stored(model, **inputs)
    assert torch.equal(kept["blocks.2.attn.hook_rot_k"], kept["blocks.5.attn.hook_rot_k"])
    assert not torch.equal(kept["blocks.2.attn.hook_rot_q"], kept["blocks.5.attn.hook_rot_q"])


def test_only_borrowers_have_double_wide_mlps():
    model = build("shared")
    assert [block.mlp.w_in.shape[0] for block in model.blocks] == [28, 28, 28, 56, 56, 56]
    assert [hasattr(block.attn, "w_k") for block in model.blocks] == [True] * 3 + [False] * 3
    with pytest.raises(
        Unavailable, match=r"block 4 has no W_K: it borrows .* block 2; read blocks\[2\]\.attn\.W_K"
    ):
        model.blocks[4].attn.W_K
    with pytest.raises(Unavailable, match="hook_k"):
        model.blocks[4].attn.hook_k


@pytest.mark.parametrize("point", ["attn.hook_attn_scores", "attn.hook_pattern"])
def test_writes_to_scores_and_pattern_count(point):
    """In TransformerLens they are inert, and its scores are the pattern."""
    model, inputs = build("text"), text_inputs()
    names, clean, _ = changed(model, inputs, f"blocks.1.{point}", lambda value, hook: value * 0.3)
    assert {"blocks.1.attn.hook_z", "hook_logits"} <= names
    assert (clean["blocks.1.attn.hook_attn_scores"].sum(-1) - 1).abs().max() > 1


def test_token_edits_run_other_ids():
    model, inputs = build("text"), text_inputs()
    other = text_inputs(seed=9)["input_ids"]
    logits = model.run_with_hooks(**inputs, fwd_hooks=[("input_ids", lambda value, hook: other)])
    assert torch.equal(logits, model(input_ids=other))
    with pytest.raises(ValueError, match="holds 101; this vocabulary has 0 to 100"):
        model.run_with_hooks(
            **inputs, fwd_hooks=[("input_ids", lambda value, hook: value * 0 + 101)]
        )


def test_an_edit_of_embeddings_stops_at_the_scatter():
    model, inputs = build("wrapper"), media_inputs()
    where = (inputs["input_ids"] >= 90)[..., None]
    clean = model(**inputs)
    under = model.run_with_hooks(
        **inputs, fwd_hooks=[("hook_embed", lambda v, hook: torch.where(where, v + 1, v))]
    )
    beside = model.run_with_hooks(
        **inputs, fwd_hooks=[("hook_embed", lambda v, hook: torch.where(where, v, v + 1))]
    )
    assert torch.equal(under, clean) and not torch.equal(beside, clean)


def test_without_a_softcap_logits_still_have_their_point():
    model, inputs = build("no softcap, untied"), text_inputs()
    logits, kept = stored(model, **inputs)
    assert torch.equal(kept["hook_logits_raw"], logits) and torch.equal(kept["hook_logits"], logits)
    doubled = model.run_with_hooks(**inputs, fwd_hooks=[("logits", lambda value, hook: value * 2)])
    assert torch.equal(doubled, logits * 2)
    capped = build("text", final_logit_softcapping=4.0)
    logits, kept = stored(capped, **inputs)
    assert torch.equal(logits, torch.tanh(kept["hook_logits_raw"] / 4) * 4)
    assert (logits - kept["hook_logits_raw"]).abs().max() > 0.5


# -- parts of a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "wrapper", "no softcap, untied", "all"])
@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_in_two_parts_is_the_whole_run(kind, implementation, dtype):
    model, inputs = build(kind, dtype, implementation), inputs_for(kind, dtype)
    whole, kept = stored(model, **inputs)
    types = {"mm_token_type_ids": types_of(inputs["input_ids"])} if model.cfg.is_wrapper else {}
    for cut in range(model.cfg.n_layers + 1):
        stream = model(**inputs, stop_at_layer=cut)
        if cut < model.cfg.n_layers:
            assert torch.equal(stream, kept[f"blocks.{cut}.hook_resid_pre"])
        assert torch.equal(model(resid=stream, start_at_layer=cut, **types), whole)
        for end in range(cut, model.cfg.n_layers):
            part = model(resid=stream, start_at_layer=cut, stop_at_layer=end, **types)
            assert torch.equal(part, kept[f"blocks.{end}.hook_resid_pre"])
    assert torch.equal(model(**inputs, stop_at_layer=-1), kept["blocks.3.hook_resid_pre"])
    assert torch.equal(
        model(resid=kept["blocks.2.hook_resid_pre"], start_at_layer=-2, **types), whole
    )
    if kind == "wrapper":
        by_ids = model(
            resid=model(**inputs, stop_at_layer=2), start_at_layer=2, input_ids=inputs["input_ids"]
        )
        assert torch.equal(by_ids, whole)
        assert not torch.equal(
            model(resid=model(**inputs, stop_at_layer=2), start_at_layer=2), whole
        )


def test_a_padded_run_in_two_parts():
    model, inputs = build("text"), padded_inputs()
    stream = model(**inputs, stop_at_layer=2, position_ids="mask")
    rest = {"attention_mask": inputs["attention_mask"], "position_ids": "mask"}
    assert torch.equal(
        model(resid=stream, start_at_layer=2, **rest), model(**inputs, position_ids="mask")
    )
    assert not torch.equal(
        model(resid=stream, start_at_layer=2), model(**inputs, position_ids="mask")
    )


def test_starting_above_a_lender_is_an_error_where_its_borrower_runs():
    model, inputs = build("shared"), text_inputs()
    whole = model(**inputs)
    for cut in (0, 1):
        stream = model(**inputs, stop_at_layer=cut)
        assert torch.equal(model(resid=stream, start_at_layer=cut), whole)
    stream = model(**inputs, stop_at_layer=2)
    with pytest.raises(ValueError, match=r"block 3 borrows .* block 1"):
        model(resid=stream, start_at_layer=2)
    assert model(resid=stream, start_at_layer=2, stop_at_layer=3).shape == stream.shape
    with pytest.raises(ValueError, match=r"block 4 borrows .* block 2"):
        model(resid=stream, start_at_layer=4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"start_at_layer": 1}, "give both or neither"),
        ({"start_at_layer": 5, "resid": True}, "blocks 0 to 3"),
        ({"stop_at_layer": 5}, "blocks 0 to 3"),
        ({"stop_at_layer": -5}, "blocks 0 to 3"),
        ({"start_at_layer": 3, "stop_at_layer": 1, "resid": True}, "nothing would run"),
        ({"input_ids": None}, "nothing to run"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "no token to run"),
        ({"input_ids": torch.rand(2, 3)}, "whole numbers"),
        ({"input_ids": torch.tensor([[2, 101]])}, "holds 101"),
        ({"input_ids": torch.tensor([[2, -1]])}, "holds -1"),
        (
            {"attention_mask": torch.ones(2, 3)},
            r"attention_mask is \[2, 3\]; the prompt is \[2, 11\]",
        ),
        (
            {"inputs_embeds": torch.ones(2, 3, 7)},
            r"inputs_embeds is torch.float32 \[2, 3, 7\]; needed",
        ),
        ({"inputs_embeds": torch.ones(2, 3, 20).double()}, "needed is torch.float32"),
    ],
)
def test_calls_that_cannot_be(call, said):
    model = build("text")
    call = dict(call)
    if call.pop("resid", None):
        call |= {"resid": torch.ones(2, 3, 20), "input_ids": None}
    with pytest.raises(ValueError, match=said):
        model(**(text_inputs() | call))


def test_media_and_placeholders_must_match():
    model, inputs = build("wrapper"), media_inputs()
    without = {
        name: value
        for name, value in inputs.items()
        if not name.startswith(("pixel_values_", "video"))
    }
    with pytest.raises(
        ValueError, match=r"4 video placeholder tokens \(id 92\), the input gives 0"
    ):
        model(**without)
    fewer = inputs | {"image_position_ids": inputs["image_position_ids"].clone()}
    fewer["image_position_ids"][0, 0] = -1
    with pytest.raises(
        ValueError, match=r"8 image placeholder tokens \(id 90\), the input gives 7"
    ):
        model(**fewer)
    outside = inputs | {"image_position_ids": inputs["image_position_ids"].clone()}
    outside["image_position_ids"][0, 0, 1] = 5
    with pytest.raises(ValueError, match="a patch is at 5; this model knows positions 0 to 4"):
        model(**outside)
    with pytest.raises(ValueError, match="input_features_mask"):
        model(**{name: value for name, value in inputs.items() if name != "input_features_mask"})
    with pytest.raises(ValueError, match="image_position_ids"):
        model(**{name: value for name, value in inputs.items() if name != "image_position_ids"})
    with pytest.raises(ValueError, match="mm_token_type_ids is"):
        model(**inputs, mm_token_type_ids=torch.zeros(2, 3, dtype=torch.long))
    pixels = {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    with pytest.raises(ValueError, match="nothing else says where they go"):
        model(inputs_embeds=torch.ones(2, 19, 20), **pixels)
    with pytest.raises(Unavailable, match="no vision embedder"):
        build("text")(**text_inputs(), **pixels)
    for name in ("vision", "video", "audio"):
        with pytest.raises(Unavailable, match=r"no (vision|audio) embedder"):
            getattr(build("text"), name)
        assert not hasattr(build("text"), name) and hasattr(model, name)
    with pytest.raises(Unavailable, match="no attention"):
        model.vision.num_heads


def test_embeddings_in_place_of_ids():
    model, inputs = build("wrapper"), media_inputs()
    embeds = model.w_e[inputs["input_ids"].clamp(max=89)] * model.cfg.embed_scale
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    logits = model(inputs_embeds=embeds, mm_token_type_ids=types_of(inputs["input_ids"]), **rest)
    assert torch.equal(logits, model(**inputs))


def test_videos_with_and_without_an_axis_of_their_own():
    """5.24 gives [frame patch dim], 5.10 [video frame patch dim]."""
    model, inputs = build("wrapper"), media_inputs()
    old = dict(inputs)
    for name in ("pixel_values_videos", "video_position_ids"):
        old[name] = inputs[name][None]
    logits = model(**inputs, num_frames_per_video=torch.tensor([2]))
    assert torch.equal(model(**old), logits)
    swapped = inputs | {"pixel_values_videos": inputs["pixel_values_videos"].flip(0)}
    assert not torch.equal(model(**swapped), logits)


# -- weights --------------------------------------------------------------------------------------------


@kinds
def test_a_state_dict_holds_the_scalars_and_each_weight_once(kind):
    model, inputs = build(kind), inputs_for(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert {f"blocks.{i}.layer_scalar" for i in range(model.cfg.n_layers)} <= set(state)
    assert not any(name.startswith("video.") for name in state)
    assert set(state) == {name for name, _ in model.named_weights()}
    assert ("w_u" in state) != model.cfg.tied
    other = Gemma4(model.cfg)
    other.load_state_dict(build(kind, seed=1).state_dict())
    assert not torch.equal(other(**inputs), model(**inputs))
    other.load_state_dict(state)
    assert torch.equal(other(**inputs), model(**inputs))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.layer_scalar"):
        other.load_state_dict(
            {name: value for name, value in state.items() if "layer_scalar" not in name}
        )


def test_weight_views_are_the_projections():
    for kind in ("text", "no softcap, untied"):
        model, inputs = build(kind, F64), text_inputs()
        _, kept = stored(model, **inputs)
        for index, block in enumerate(model.blocks):
            a, attn = kept[f"blocks.{index}.ln1.hook_out"], block.attn
            for letter in "QKV":
                view = getattr(attn, f"W_{letter}")  # [head d_model d_head]
                got = torch.einsum("bpm,hmd->bphd", a, view)
                hook = kept[f"blocks.{index}.attn.hook_{letter.lower()}"]
                torch.testing.assert_close(got, hook, atol=1e-12, rtol=0)
            inner, mlp = kept[f"blocks.{index}.ln2.hook_out"], block.mlp
            torch.testing.assert_close(
                inner @ mlp.W_gate, kept[f"blocks.{index}.mlp.hook_pre"], atol=1e-12, rtol=0
            )
            torch.testing.assert_close(
                inner @ mlp.W_in, kept[f"blocks.{index}.mlp.hook_pre_linear"], atol=1e-12, rtol=0
            )
            post = kept[f"blocks.{index}.mlp.hook_post"]
            torch.testing.assert_close(
                post @ mlp.W_out, kept[f"blocks.{index}.mlp.hook_out"], atol=1e-12, rtol=0
            )
            assert (attn.W_V.data_ptr() == attn.W_K.data_ptr()) == attn.cfg.k_eq_v


def test_options_are_checked():
    for wrong in ({"attn_implementation": "flash"}, {"image_mask": "full"}):
        with pytest.raises(ValueError, match="known are"):
            build("text", **wrong)


def test_both_implementations_agree_to_rounding_and_switch():
    for kind in ("text", "wrapper", "shared"):
        model, inputs = build(kind, F64), inputs_for(kind, F64)
        sdpa = model(**inputs)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(**inputs), sdpa, atol=1e-11, rtol=0)


def test_block_types_follow_the_config():
    model = build("text", layer_types=[A, S, S, A])
    assert [layer.kind for layer in model.cfg.layers] == ["full", "sliding", "sliding", "full"]
    torch.testing.assert_close(
        model.to(F64)(**text_inputs(1)), slow_rows(model, text_inputs(1)), atol=1e-11, rtol=0
    )


# -- local attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("image_mask", ["transformers", "windowed"])
@kinds
def test_local_attention_is_the_fused_one_up_to_rounding(kind, image_mask):
    model = build(kind, F64, image_mask=image_mask, seed=2)
    cases = [text_inputs(2, 5 * WINDOW + 1), padded_inputs("left"), padded_inputs("right")]
    if kind.startswith("wrapper"):
        cases.append(media_inputs(dtype=F64))
    for inputs in cases:
        model.set_attn_implementation("sdpa")
        want = model(**inputs)
        model.set_attn_implementation("local")
        got = model(**inputs)
        assert (got - want).abs().max() < 1e-10
        # hooks see and edit the same
        name = "blocks.1.attn.hook_pattern"
        _, kept = stored(model, **inputs)
        model.set_attn_implementation("sdpa")
        _, plain = stored(model, **inputs)
        assert (kept[name] - plain[name]).abs().max() < 1e-10
