"""Written text: transformers' own tokens, the same with and without a cache, hooked step by step, stopped, streamed, cached."""

from __future__ import annotations

import doctest
import gc
import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import small
import talking
import torch
from PIL import Image
from small import WINDOW, hooked, text_inputs
from torch import Tensor

from lens_gemma4 import (
    ActivationCache,
    HookedConfig,
    HookedModel,
    HookNameError,
    HookPoint,
    KVCache,
)
from lens_gemma4.check import load_reference
from lens_gemma4.generate import _check_options
from lens_gemma4.utils import lm_cross_entropy_loss

TINY = Path(__file__).parent.parent / "weights" / "tiny"
PROMPTS = [
    "The capital of France is",
    "When Mary and John went to the shop, John gave a drink to",
    "A",
    "Nina and Peter were at",
]
CLOSE = 1e-3  # logits nearer than this may change places with the order of rounding
CAUSAL = [kind for kind in small.KINDS if "all" not in kind]


# -- transformers' own tokens ---------------------------------------------------------------------------


class Theirs:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = load_reference(folder, torch.float32, "sdpa")

    def greedy(self, inputs: dict[str, Tensor], n: int, eos: Any = None) -> tuple[Tensor, Tensor]:
        """Ids with the prompt, and how far ahead the likeliest token was at each step."""
        self.model.generation_config.eos_token_id = eos
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own settings
            out = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=n,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        best = torch.stack(out.scores, 1).topk(2, -1).values
        return out.sequences, best[..., 0] - best[..., 1]


def n_equal(got: Tensor, want: Tensor, ahead: Tensor) -> int:
    """New tokens compared: those of each row up to its first narrow choice; all of them must be equal."""
    start = want.shape[1] - ahead.shape[1]
    compared = 0
    for row in range(len(want)):
        narrow = (ahead[row] < CLOSE).nonzero().flatten().tolist()
        end = start + (narrow[0] if narrow else ahead.shape[1])
        assert torch.equal(got[row, :end], want[row, :end]), f"row {row}"
        compared += end - start
    return compared


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    return Theirs(TINY)


@pytest.mark.parametrize("prompt", PROMPTS[1:3])
def test_64_greedy_tokens_of_the_shipped_checkpoint_are_transformers(tiny_model, theirs, prompt):
    ids = tiny_model.to_tokens(prompt)
    want, _ = theirs.greedy({"input_ids": ids}, 64)
    got = tiny_model.generate(prompt, 64, stop_at_eos=False, return_type="tokens")
    assert torch.equal(got, want) and got.shape[1] == ids.shape[1] + 64


def test_ragged_prompts_end_and_are_padded_as_there(tiny_model, theirs):
    tensors = tiny_model.prepare(PROMPTS, padding_side="left")
    assert not tensors["attention_mask"].all()
    stop = tiny_model.to_single_token(".")  # the checkpoint writes sentence after sentence
    want, _ = theirs.greedy(dict(tensors), 24, eos=stop)
    got = tiny_model.generate(PROMPTS, 24, return_type="tokens", stop=stop)
    assert torch.equal(got, want)
    ends = (got[:, tensors["input_ids"].shape[1] :] == stop).int().argmax(1)
    assert len(set(ends.tolist())) > 1  # rows ended at places of their own
    assert not torch.equal(
        got,
        tiny_model.generate(PROMPTS, 24, return_type="tokens", stop_at_eos=False)[
            :, : got.shape[1]
        ],
    )


def picture(seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (96, 144, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> tuple[HookedModel, Path]:
    """A random checkpoint that takes pictures; its window is 4, and it writes placeholders too."""
    folder = seeing.checkpoint(tmp_path_factory.mktemp("seeing"))
    return HookedModel.from_pretrained(folder), folder


def seen_by(model: HookedModel, pictured: bool) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A ragged batch: what a user gives, and the same as transformers takes it."""
    if pictured:
        given: Any = [
            f"a {model.image_token} b c what is",
            "the cat sat",
            f"{model.image_token} {model.image_token}",
        ]
        media = {"images": [picture(i) for i in range(3)]}
    else:
        given, media = ["a b c what is this the cat", "the cat sat", "on the mat a"], {}
    tensors = dict(model.prepare(given, padding_side="left", **media))
    if pictured:  # without them transformers takes images for text
        tensors["mm_token_type_ids"] = (tensors["input_ids"] == model.cfg.image_token_id).long()
    return given, media, tensors


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("pictured", [False, True])
def test_greedy_tokens_of_a_random_checkpoint_are_transformers(seer, pictured):
    model, folder = seer
    given, media, tensors = seen_by(model, pictured)
    want, ahead = Theirs(folder).greedy(tensors, 64)
    got = model.generate(given, 64, stop_at_eos=False, return_type="tokens", **media)
    assert n_equal(got, want, ahead) > 100
    new = want[:, -64:]
    assert all(len(row.unique()) > 5 for row in new)  # it is no single token again and again
    placeholders = [model.cfg.image_token_id, model.cfg.audio_token_id, model.cfg.video_token_id]
    if pictured:
        assert torch.isin(new, torch.tensor(placeholders)).any()  # written, and read as nothing


def test_a_layer_scalar_a_little_off_would_be_found(seer):
    model, folder = seer
    given, _, tensors = seen_by(model, False)
    want, ahead = Theirs(folder).greedy(tensors, 64)
    scalar = model.blocks[2].layer_scalar
    model.blocks[2].layer_scalar = scalar * 1.02
    try:
        with pytest.raises(AssertionError, match="row"):
            n_equal(model.generate(given, 64, stop_at_eos=False, return_type="tokens"), want, ahead)
    finally:
        model.blocks[2].layer_scalar = scalar


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_text_checkpoint_writes_what_it_writes_there(tmp_path, seed):
    folder = tmp_path / "text"
    model = HookedModel(HookedConfig.from_hf(small.KINDS["text"]))
    small.randomise(model, seed)
    model.save_pretrained(folder)
    ids = text_inputs(2, 2 * WINDOW + 1, seed)["input_ids"]
    want, ahead = Theirs(folder).greedy({"input_ids": ids}, 64)
    assert n_equal(model.generate(ids, 64, stop_at_eos=False), want, ahead) > 60


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 9, "temperature": 1.7}, {"top_p": 0.9, "repetition_penalty": 1.2}],
    ids=str,
)
def test_draws_with_a_seed_are_transformers_with_that_seed(tiny_model, theirs, settings):
    tensors = tiny_model.prepare(PROMPTS, padding_side="left")
    theirs.model.generation_config.eos_token_id = 1
    with torch.random.fork_rng():
        torch.manual_seed(11)
        want = theirs.model.generate(
            **tensors, do_sample=True, max_new_tokens=16, **({"top_k": 0} | settings)
        )
    got = tiny_model.generate(
        PROMPTS, 16, do_sample=True, seed=11, return_type="tokens", **settings
    )
    assert torch.equal(got, want)
    other = tiny_model.generate(
        PROMPTS, 16, do_sample=True, seed=12, return_type="tokens", **settings
    )
    assert not torch.equal(other[:, : want.shape[1]], want[:, : other.shape[1]])


# -- with and without a cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAUSAL)
def test_running_the_whole_text_in_every_step_writes_the_same(kind):
    model = hooked(kind)
    inputs = small.inputs_for(kind, torch.float64)
    want = model.generate(inputs, 3 * WINDOW, use_kv_cache=False, stop_at_eos=False)
    assert torch.equal(model.generate(inputs, 3 * WINDOW, stop_at_eos=False), want)
    inputs = small.text_inputs(2, 3)
    assert not torch.equal(model.generate(inputs, 3 * WINDOW, stop_at_eos=False), want)


def test_ragged_rows_write_what_each_writes_alone():
    model = hooked()
    rows = [text_inputs(1, n, seed=n)["input_ids"] for n in (3, 11, 7)]
    ids = torch.cat([torch.nn.functional.pad(row, (11 - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * 8 + [1] * 3, [1] * 11, [0] * 4 + [1] * 7])
    got = model.generate(ids, 20, attention_mask=mask, stop_at_eos=False)
    for row, alone in enumerate(rows):
        assert torch.equal(got[row, 11:], model.generate(alone, 20, stop_at_eos=False)[0, -20:])
    unmasked = model.generate(ids.clamp(min=3), 20, stop_at_eos=False)
    assert not torch.equal(unmasked[:, 11:], got[:, 11:])


def test_a_row_that_ended_leaves_the_others_alone():
    model = hooked()
    ids = text_inputs(3, 9)["input_ids"]
    free = model.generate(ids, 16, stop_at_eos=False)
    stop = int(free[1, 12])
    first = [(free[row, 9:] == stop).nonzero().flatten().tolist() for row in range(3)]
    ends = [found[0] + 1 if found else 16 for found in first]
    assert min(ends) < max(ends)
    got = model.generate(ids, 16, stop_at_eos=False, stop=stop)
    for row, end in enumerate(ends):
        assert torch.equal(got[row, : 9 + end], free[row, : 9 + end])
        assert (got[row, 9 + end :] == 0).all()  # the pad token
    assert got.shape[1] == 9 + max(ends)


def test_a_prefix_that_has_run_is_gone_on_from(tiny_model):
    want = tiny_model.generate("The capital of France is", 8)
    kv = KVCache(tiny_model.cfg)
    tiny_model("The capital of", kv_cache=kv)
    fork = kv.fork()
    assert tiny_model.generate(" France is", 8, kv_cache=kv) == want.removeprefix("The capital of")
    n_new = len(tiny_model.to_tokens(want, prepend_bos=True)[0]) - 6
    assert kv.length == 6 + n_new  # the last token has run, too: what follows may be more text
    assert fork.length == 4
    three = tiny_model.generate([" France is", " Italy is", " a"], 4, kv_cache=fork.fork([0, 0, 0]))
    assert three == [
        tiny_model.generate(f"The capital of{end}", 4).removeprefix("The capital of")
        for end in (" France is", " Italy is", " a")
    ]


def test_what_was_written_is_in_the_cache_for_the_next_call():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    kv = KVCache(model.cfg)
    first = model.generate(ids, 6, kv_cache=kv, stop_at_eos=False)
    assert kv.length == 15
    text = text_inputs(2, 3, 7)["input_ids"]
    want = model.generate(torch.cat((first, text), 1), 6, stop_at_eos=False)
    assert torch.equal(model.generate(text, 6, kv_cache=kv.fork(), stop_at_eos=False), want[:, 15:])
    kv.crop(14)  # to write on where it stopped
    more = model.generate(first[:, -1:], 6, kv_cache=kv, stop_at_eos=False)
    whole = model.generate(ids, 12, stop_at_eos=False)
    assert torch.equal(torch.cat((first, more[:, 1:]), 1), whole)
    # another token in its place writes something else
    assert not torch.equal(want[:, 18:], whole[:, 15:])


def test_a_row_that_ended_is_gone_on_from_where_its_pads_do_not_count():
    """Pads after its end are hidden; where a window would count them too, going on is refused."""
    ids = text_inputs(2, 9)["input_ids"]
    for window in (64, 4):
        model = hooked("text", sliding_window=window)
        free = model.generate(ids, 10, stop_at_eos=False)
        end = next(e for e in range(1, 9) if free[0, 9 + e - 1] not in free[1, 9:])
        stop = int(free[0, 9 + end - 1])
        end = 9 + free[0, 9:].tolist().index(stop) + 1
        kv = KVCache(model.cfg)
        written = model.generate(ids, 10, kv_cache=kv, stop=stop, stop_at_eos=False)
        assert kv.length == 19 and end < 19
        text = torch.tensor([[7], [7]])
        if window == 4:
            with pytest.raises(ValueError, match="padding between"):
                model(text, kv_cache=kv)
            assert kv.length == 19
            continue
        got = model(text, kv_cache=kv)[:, -1]
        alone = torch.cat((written[:1, :end], text[:1]), 1)
        assert (got[0] - model(alone)[0, -1]).abs().max() < 1e-10
        whole = torch.cat((written, text), 1)
        seen = model(whole, attention_mask=torch.ones_like(whole))[:, -1]
        assert (got[1] - seen[1]).abs().max() < 1e-10
        assert (got[0] - seen[0]).abs().max() > 1e-3


def test_embeddings_are_gone_on_from_and_only_new_tokens_returned():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    embeds = model.w_e[ids] * model.cfg.embed_scale
    want = model.generate(ids, 12, stop_at_eos=False)
    assert torch.equal(
        model.generate(inputs_embeds=embeds, max_new_tokens=12, stop_at_eos=False), want[:, 9:]
    )
    _, cache = model.generate(
        inputs_embeds=embeds, max_new_tokens=3, return_cache=True, stop_at_eos=False
    )
    assert cache["hook_embed"].shape == (2, 12, model.cfg.d_model) and "hook_tokens" not in cache
    with pytest.raises(ValueError, match="inputs_embeds have none"):
        model.generate(inputs_embeds=embeds, use_kv_cache=False)


# -- hooks ----------------------------------------------------------------------------------------------


def test_a_hook_is_told_which_positions_each_step_computes(tiny_model):
    told: list[Any] = []

    def listen(value: Tensor, hook: Any) -> None:
        told.append((hook.positions, value.shape[1]))

    point = "blocks.2.hook_resid_post"
    tiny_model.generate(PROMPTS[0], 3, fwd_hooks=[(point, listen)])
    assert told == [(range(6), 6), (range(6, 7), 1), (range(7, 8), 1)]
    told.clear()
    tiny_model.generate(PROMPTS[0], 3, prefill_hooks=[(point, listen)])
    assert told == [(range(6), 6)]
    told.clear()
    tiny_model.generate(PROMPTS[0], 3, decode_hooks=[(point, listen)])
    assert told == [(range(6, 7), 1), (range(7, 8), 1)]
    told.clear()
    tiny_model.generate(PROMPTS[0], 3, use_kv_cache=False, fwd_hooks=[(point, listen)])
    assert told == [(range(n), n) for n in (6, 7, 8)]


def push(strength: float, at: Any = None) -> Any:
    """Adds to the stream, at some absolute positions or at all."""

    def hook(resid: Tensor, hook: Any) -> Tensor:
        for i, position in enumerate(hook.positions):
            if at is None or position in at:
                resid[:, i] += strength * torch.linspace(-1, 1, resid.shape[-1], dtype=resid.dtype)
        return resid

    return hook


POINT = "blocks.1.hook_resid_post"


@pytest.mark.parametrize(
    "at", [None, range(9), range(9, 100), [3, 11, 12]], ids=["all", "prompt", "new", "some"]
)
def test_hooked_steps_write_what_a_hooked_whole_writes(at):
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    want = model.generate(
        ids, 14, use_kv_cache=False, fwd_hooks=[(POINT, push(9.0, at))], stop_at_eos=False
    )
    got = model.generate(ids, 14, fwd_hooks=[(POINT, push(9.0, at))], stop_at_eos=False)
    assert torch.equal(got, want)
    assert not torch.equal(got, model.generate(ids, 14, stop_at_eos=False))


def test_hooks_of_the_prefill_and_of_decoding_are_hooks_of_these_positions():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]

    def written(**hooks: Any) -> Tensor:
        return model.generate(ids, 14, stop_at_eos=False, **hooks)

    before, later = range(9), range(9, 100)
    prefill = written(prefill_hooks=[(POINT, push(2.0))])
    decode = written(decode_hooks=[(POINT, push(2.0))])
    assert torch.equal(prefill, written(fwd_hooks=[(POINT, push(2.0, before))]))
    assert torch.equal(decode, written(fwd_hooks=[(POINT, push(2.0, later))]))
    assert not torch.equal(prefill, decode)
    both = written(prefill_hooks=[(POINT, push(2.0))], decode_hooks=[(POINT, push(2.0))])
    assert torch.equal(both, written(fwd_hooks=[(POINT, push(2.0))]))


def test_contexts_and_permanent_hooks_act_while_it_writes():
    model = hooked()
    ids = text_inputs(1, 9)["input_ids"]
    plain = model.generate(ids, 10, stop_at_eos=False)
    want = model.generate(ids, 10, fwd_hooks=[(POINT, push(2.0))], stop_at_eos=False)
    assert not torch.equal(plain, want)
    with model.hooks(fwd_hooks=[(POINT, push(2.0))]):
        assert torch.equal(model.generate(ids, 10, stop_at_eos=False), want)
    vector = torch.linspace(-1, 1, model.cfg.d_model, dtype=model.dtype)
    with model.steer(1, vector, 2.0):
        assert torch.equal(model.generate(ids, 10, stop_at_eos=False), want)
    with model.steer(1, vector, 2.0, positions=[3, 11, 12]):
        steered = model.generate(ids, 10, return_cache=True, stop_at_eos=False)[1]
    some = [(POINT, push(2.0, [3, 11, 12]))]
    hooked_so = model.generate(ids, 10, fwd_hooks=some, return_cache=True, stop_at_eos=False)[1]
    assert torch.equal(steered["hook_logits"], hooked_so["hook_logits"])
    (handle,) = model.add_perma_hook(POINT, push(2.0))
    assert torch.equal(model.generate(ids, 10, stop_at_eos=False), want)
    model.hook_point(POINT).remove(handle)
    assert torch.equal(model.generate(ids, 10, stop_at_eos=False), plain)


def test_logits_that_a_hook_leaves_are_chosen_from():
    model = hooked()
    ids = text_inputs(1, 9)["input_ids"]
    shapes = []

    def only_42(logits: Tensor, hook: Any) -> Tensor:
        shapes.append(logits.shape[1])
        logits[..., 42] = 100.0
        return logits

    got = model.generate(ids, 4, fwd_hooks=[("hook_logits", only_42)], stop_at_eos=False)
    assert got[0, 9:].tolist() == [42] * 4
    assert shapes == [9, 1, 1, 1]  # a listener is shown those of the whole prompt


def test_pictures_may_be_hooked_in_the_prefill(seer):
    model, _ = seer
    text, fired = f"a {model.image_token} b c what is", []

    def darken(features: Tensor, hook: Any) -> Tensor:
        fired.append(hook.name)
        return torch.zeros_like(features)

    name = "vision.hook_image_features"
    want = model.generate(text, 8, images=picture(), fwd_hooks=[(name, darken)])
    assert fired == [name]
    assert model.generate(text, 8, images=picture(), prefill_hooks=[(name, darken)]) == want
    assert want != model.generate(text, 8, images=picture())
    with pytest.raises(HookNameError, match="media are read in the prefill alone"):
        model.generate(text, 8, images=picture(), decode_hooks=[(name, darken)])
    with pytest.raises(HookNameError, match="no image was given"):
        model.generate("a b", 8, fwd_hooks=[(name, darken)])
    assert not model.list_hooks()


def test_names_that_can_never_fire_are_refused():
    model = hooked("shared")
    ids = text_inputs(1, 9)["input_ids"]
    for option in ("fwd_hooks", "prefill_hooks", "decode_hooks"):
        with pytest.raises(HookNameError, match=r"Closest: 'blocks.1.hook_resid_post'"):
            model.generate(ids, 3, **{option: [("blocks.1.hook_resid_posd", push(1.0))]})
        with pytest.raises(HookNameError, match="borrows"):
            model.generate(ids, 3, **{option: [("blocks.3.attn.hook_k", push(1.0))]})
        with model.skip_layers(0, 0), pytest.raises(HookNameError, match="block 0 is skipped"):
            model.generate(ids, 3, **{option: [("blocks.0.hook_resid_post", push(1.0))]})
    with pytest.raises(HookNameError, match="the first new token comes from the prefill"):
        model.generate(ids, 1, decode_hooks=[(POINT, push(1.0))])
    model.generate(ids, 1, decode_hooks=[(POINT, push(1.0))], return_cache=True)  # it runs then
    with pytest.raises(ValueError, match="prefill and decoding are not apart"):
        model.generate(ids, 3, use_kv_cache=False, decode_hooks=[(POINT, push(1.0))])
    assert not model.list_hooks()


# -- the whole as one cache -----------------------------------------------------------------------------


def assert_is_one_run(
    cache: ActivationCache, one: ActivationCache, mask: Tensor | None = None
) -> None:
    """Every point's values are those of one run, at real positions and over the keys they see."""
    assert set(cache.keys()) == set(one.keys())
    for name, want in one.items():
        got = cache[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        if mask is not None and name.split(".")[0] not in ("vision", "video", "audio"):
            if name.endswith(("hook_pattern", "hook_attn_scores")):
                got, want = got.transpose(1, 2)[mask], want.transpose(1, 2)[mask]
            else:
                got, want = got[mask], want[mask]
        assert torch.allclose(got.double(), want.double(), rtol=0, atol=1e-9), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_the_cache_is_that_of_one_run_over_the_whole_text(kind, attention):
    model = hooked(kind)
    model.set_attn_implementation(attention)
    inputs = small.inputs_for(kind, torch.float64)
    ids, cache = model.generate(inputs, 2 * WINDOW, return_cache=True, stop_at_eos=False)
    whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    _, one = model.run_with_cache(**whole)
    assert_is_one_run(cache, one)
    assert list(cache["pattern", 0].shape[2:]) == [ids.shape[1]] * 2
    for derived in ("attention_mask", "input_size"):
        assert str(cache[derived]) == str(one[derived])
    assert torch.allclose(cache["next_token_probs"], one["next_token_probs"], rtol=0, atol=1e-6)
    _, other = model.run_with_cache(
        **{
            **whole,
            "input_ids": ids.flip(1)
            if not kind.startswith("wrapper")
            else torch.where(ids == ids[0, -2], 5, ids),
        }
    )
    with pytest.raises(AssertionError):
        assert_is_one_run(cache, other)


def test_hidden_scores_and_patterns_are_those_of_one_run():
    """Also where a window has moved on."""
    model = hooked()
    ids, cache = model.generate(
        text_inputs(1, 3)["input_ids"], 3 * WINDOW, return_cache=True, stop_at_eos=False
    )
    scores, pattern = cache["attn_scores", 0], cache["pattern", 0]
    q, k = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
    hidden = (k > q) | (k <= q - WINDOW)
    assert (scores[..., hidden] == torch.finfo(scores.dtype).min).all()
    assert (scores[..., ~hidden] > -1e6).all()
    assert (pattern[..., hidden] == 0).all() and (pattern[..., ~hidden] > 0).all()


def test_ragged_rows_and_ends_are_masked_in_the_cache():
    model = hooked()
    ids = text_inputs(3, 9)["input_ids"]
    mask = torch.ones_like(ids)
    mask[2, :4] = 0
    free = model.generate(ids, 12, attention_mask=mask, stop_at_eos=False)
    stop = int(free[1, 12])
    got, cache = model.generate(
        ids, 12, attention_mask=mask, stop=stop, stop_at_eos=False, return_cache=True
    )
    real = cache["attention_mask"].bool()
    assert not real[2, :4].any() and not real[1, 13:].any() and real[:, 9].all()
    assert cache["input_size"] == tuple(got.shape)
    _, one = model.run_with_cache(got, attention_mask=real, position_ids="mask")
    assert_is_one_run(cache, one, real)


def test_the_last_token_is_in_it_and_hooked_steps_are_kept_hooked():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    got, cache = model.generate(
        ids, 5, fwd_hooks=[(POINT, push(2.0, [3, 13]))], return_cache=True, stop_at_eos=False
    )
    with model.hooks(fwd_hooks=[(POINT, push(2.0, [3, 13]))]):
        _, one = model.run_with_cache(got)
    assert_is_one_run(cache, one)
    _, unhooked = model.run_with_cache(got)
    assert not torch.allclose(cache["resid_post", 1][:, 13], unhooked["resid_post", 1][:, 13])


def test_names_are_filtered_and_values_are_snapshots():
    model = hooked()
    kept: list[Tensor] = []
    ids = text_inputs(1, 9)["input_ids"]
    names = ["blocks.1.hook_resid_post", "layers.2.layer_output", "blocks.*.attn.hook_result"]
    options: dict[str, Any] = {
        "return_cache": True,
        "names_filter": names,
        "device": "cpu",
        "stop_at_eos": False,
    }
    _, cache = model.generate(
        ids, 5, fwd_hooks=[(POINT, lambda value, hook: kept.append(value))], **options
    )
    assert len(cache) == 2 + model.cfg.n_layers
    assert cache["result", 0].shape == (1, 14, 4, model.cfg.d_model)
    before = cache["resid_post", 1].clone()
    for value in kept:
        value.zero_()
    assert torch.equal(cache["resid_post", 1], before)
    with pytest.raises(HookNameError, match="was not kept"):
        cache["resid_post", 0]
    with pytest.raises(HookNameError, match="no image was given"):
        hooked("wrapper").generate(ids, 2, return_cache=True, names_filter="vision.hook_out")
    assert not model.list_hooks()


def test_a_run_that_a_hook_starts_is_not_kept():
    model = hooked()
    ids = text_inputs(1, 9)["input_ids"]

    begun = []

    def nested(value: Tensor, hook: Any) -> None:
        if len(begun) < 3:
            begun.append(hook.positions)
            model(ids[:, :3])

    _, cache = model.generate(
        ids, 3, fwd_hooks=[(POINT, nested)], return_cache=True, stop_at_eos=False
    )
    assert cache["resid_post", 2].shape[1] == 12


def test_without_a_kv_cache_the_activations_are_those_of_the_last_run():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    got, cache = model.generate(ids, 5, use_kv_cache=False, return_cache=True, stop_at_eos=False)
    _, one = model.run_with_cache(got)
    assert_is_one_run(cache, one)


def test_attribution_reads_it(tiny_model):
    """What a cache is for: a decomposition of the whole that adds up, with names of all tokens."""
    text, cache = tiny_model.generate(PROMPTS[0], 4, return_cache=True)
    assert "".join(cache["token_labels"][0][1:]) == text
    parts = cache.decompose_resid()
    assert (parts.sum(0) - cache["resid_post", -1]).abs().max() < 1e-4
    assert parts.shape[2] == len(cache["token_labels"][0])


def drawn(seed: int) -> tuple[HookedModel, dict[str, Any], dict[str, Any]]:
    """A model, prompts and settings, anyhow."""
    rng = random.Random(seed)
    kind = rng.choice(CAUSAL)
    model = hooked(kind)
    model.set_attn_implementation(rng.choice(["sdpa", "eager", "local"]))
    if kind.startswith("wrapper") and rng.random() < 0.5:
        inputs = small.media_inputs(dtype=torch.float64)
    else:
        inputs = text_inputs(rng.choice([1, 2, 3]), rng.randint(1, 3 * WINDOW), seed)
        if rng.random() < 0.6:
            mask = torch.ones_like(inputs["input_ids"])
            for row in mask[1:]:
                row[: rng.randrange(len(row))] = 0
            inputs["attention_mask"] = mask
    options: dict[str, Any] = {"repetition_penalty": rng.choice([0.8, 1.0, 1.3])}
    if rng.random() < 0.5:
        options |= {"do_sample": True, "seed": seed, "temperature": rng.choice([0.7, 2.0])}
        options |= {"top_k": rng.randint(1, 30), "top_p": rng.random()}
    if rng.random() < 0.6:
        options["stop"] = rng.sample(range(101), rng.randint(1, 20))
    if rng.random() < 0.5:
        at = rng.sample(range(30), rng.randint(1, 30))
        point = f"blocks.{rng.randrange(model.cfg.n_layers)}.hook_resid_post"
        options["fwd_hooks"] = [(point, push(2.0, at))]
    return model, inputs, options | {"max_new_tokens": rng.randint(0, 3 * WINDOW)}


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 200))]
)
def test_drawn_cases_are_the_same_with_a_cache_and_without(seed):
    """Tokens, and every value of every point."""
    model, inputs, options = drawn(seed)
    got, cache = model.generate(inputs, return_cache=True, **options)
    want, whole = model.generate(inputs, return_cache=True, use_kv_cache=False, **options)
    assert torch.equal(got, want)
    real = cache["attention_mask"].bool()
    assert torch.equal(real, whole["attention_mask"].bool())
    assert_is_one_run(cache, whole, real)
    assert not model.list_hooks()


# -- text -----------------------------------------------------------------------------------------------


def test_text_in_text_out_ids_in_ids_out(tiny_model):
    one = tiny_model.generate(PROMPTS[0], 3)
    ids = tiny_model.to_tokens(PROMPTS[0])
    assert one.startswith(PROMPTS[0] + " Paris.") and not one.startswith(f"<bos>{PROMPTS[0]}")
    assert tiny_model.generate(PROMPTS[:1], 3) == [one]
    assert tiny_model.generate(input_ids=PROMPTS[0], max_new_tokens=3) == one
    many = tiny_model.generate(PROMPTS, 3)
    assert (
        many[0] == one
        and [text.startswith(p) for text, p in zip(many, PROMPTS, strict=True)] == [True] * 4
    )
    assert many == [tiny_model.generate(prompt, 3) for prompt in PROMPTS]
    tokens = tiny_model.generate(ids, 3)
    assert tokens.shape == (1, 9) and torch.equal(tokens[:, :6], ids)
    assert torch.equal(tiny_model.generate(ids[0], 3), tokens)
    assert torch.equal(tiny_model.generate(PROMPTS[0], 3, return_type="tokens"), tokens)
    assert tiny_model.generate(ids, 3, return_type="text") == [one]  # no BOS in front
    batch = tiny_model.prepare(PROMPTS, padding_side="left")
    assert tiny_model.generate(batch, 3, return_type="text") == many  # and no pads


def test_texts_are_padded_on_the_left_whatever_the_tokenizer_does(tiny_model):
    own = HookedModel.from_pretrained("tiny")
    own.set_tokenizer(own.tokenizer, default_padding_side="right")
    assert own.to_tokens(PROMPTS)[2, -1] == 0
    ids = own.generate(PROMPTS, 3, return_type="tokens")
    assert ids[2, 0] == 0
    assert torch.equal(ids, tiny_model.generate(PROMPTS, 3, return_type="tokens"))


def test_prompts_padded_on_the_right_are_refused(tiny_model):
    right = tiny_model.prepare(PROMPTS, padding_side="right")
    with pytest.raises(ValueError, match=r"prompt 0 ends with padding.*Pad on the left"):
        tiny_model.generate(right)
    with pytest.raises(ValueError, match="padded on the left"):
        tiny_model.generate(PROMPTS, padding_side="right")
    with pytest.raises(ValueError, match="hides tokens inside"):
        tiny_model.generate([[2, 5, 6]], attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(ValueError, match=r"attention_mask is \[1, 2\]; the prompts have 3"):
        tiny_model.generate([[2, 5, 6]], attention_mask=torch.tensor([[1, 1]]))


def test_a_repetition_penalty_counts_prompt_and_new_tokens():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    got = model.generate(ids, 40, repetition_penalty=1e6, stop_at_eos=False)
    assert all(len(set(row)) == len(row) for row in got[:, 9:].tolist())
    plain = model.generate(ids, 40, stop_at_eos=False)
    assert any(len(set(row)) < len(row) for row in plain[:, 9:].tolist())
    assert not any(set(row[:9]) & set(row[9:]) for row in got.tolist() if len(set(row)) < 60)


def test_a_repetition_penalty_does_not_count_padding():
    model = hooked()
    ids, mask = torch.tensor([[0, 0, 2, 9], [2, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1], [1] * 4])

    def prefers(token):
        def hook(logits, hook):
            logits[..., token] = 20.0

        new = model.generate(
            *(ids, 1),
            attention_mask=mask,
            repetition_penalty=1e6,
            stop_at_eos=False,
            fwd_hooks=[("hook_logits", hook)],
        )
        return new[:, -1].tolist()

    assert prefers(0) == [0, 0]  # the first row's pads are no text
    assert prefers(5)[0] == 5 and prefers(5)[1] != 5  # the control: the second row's text is


TEMPLATE = "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %} the{% endfor %}{% if add_generation_prompt %} what is{% endif %}"


def test_chat_messages_are_gone_on_from(seer):
    model, folder = seer
    own = HookedModel.from_pretrained(folder)
    own.processor.chat_template = TEMPLATE
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture()}, {"type": "text", "text": " a b"}],
        }
    ]
    text = own.generate(messages, 6)
    rendered = "<bos><turn>user\n<|image|> a b the what is"
    assert text.startswith(rendered) and len(text) > len(rendered)
    want = model.generate(rendered, 6, images=picture(), return_type="tokens")
    assert torch.equal(own.generate(messages, 6, return_type="tokens"), want)
    assert own.generate([messages, messages], 6) == [text, text]
    assert "".join(own.generate(messages, 6, stream=True)) == text.removeprefix(rendered)


def test_eos_ids_are_read_from_the_generation_config(tmp_path):
    folder = talking.make(tmp_path / "talking")
    model = HookedModel.from_pretrained(folder)
    ids = torch.tensor([[2, 5, 6, 7]])
    free = model.generate(ids, 12, stop_at_eos=False)[0, 4:].tolist()
    eos = free[3]
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [98, eos], "pad_token_id": 3})
    )
    end = free.index(eos) + 1
    assert model.generate(ids, 12)[0, 4:].tolist() == free[:end]
    assert model.generate(ids, 12, stop_at_eos=False)[0, 4:].tolist() == free
    both = model.generate(torch.tensor([[2, 5, 6, 7], [2, 9, 8, 11]]), 12)
    if both.shape[1] > 4 + end:
        assert (both[0, 4 + end :] == 3).all()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [eos, 98]}))
    assert HookedModel.from_pretrained(folder).generate(ids, 12)[0, 4:].tolist() == free[:end]


# -- stops ----------------------------------------------------------------------------------------------


def test_each_sort_of_stop_ends_a_row(tiny_model):
    prompt = PROMPTS[0]
    long = tiny_model.generate(prompt, 12, stop_at_eos=False)
    new = tiny_model.generate(prompt, 12, stop_at_eos=False, return_type="tokens")[0, 6:].tolist()
    words = [tiny_model.to_string([token]) for token in new]
    over = words[3][-2:] + words[4][:2]  # a text over two tokens

    def written(stop: Any) -> int:
        return (
            tiny_model.generate(
                prompt, 12, stop_at_eos=False, stop=stop, return_type="tokens"
            ).shape[1]
            - 6
        )

    assert written(new[4]) == new.index(new[4]) + 1
    assert written(over) == 5 and over in long
    assert written([over, new[4], lambda ids: False]) == min(5, new.index(new[4]) + 1)
    assert written(lambda ids: len(ids) == 9) == 3
    assert written("no such text") == 12


def test_a_function_sees_the_row_without_pads(tiny_model):
    rows: list[list[int]] = []
    tiny_model.generate(PROMPTS[:3], 2, stop=lambda ids: rows.append(ids.tolist()))
    assert rows[2] == tiny_model.to_tokens(PROMPTS[2])[0].tolist() + rows[2][-1:]
    assert len(rows) == 6

    def vandal(ids: Tensor) -> bool:
        ids.zero_()
        return False

    assert tiny_model.generate(PROMPTS[:3], 4, stop=vandal) == tiny_model.generate(PROMPTS[:3], 4)


# -- streams --------------------------------------------------------------------------------------------


def test_pieces_join_to_the_new_text(tiny_model):
    text = tiny_model.generate(PROMPTS[2], 14)
    pieces = list(tiny_model.generate_stream(PROMPTS[2], 14))
    n_prompt = tiny_model.to_tokens(PROMPTS[2]).shape[1]
    assert PROMPTS[2] + "".join(pieces) == text and len(pieces) > 6 and all(pieces)
    ids = tiny_model.generate(PROMPTS[2], 14, return_type="tokens")[0].tolist()
    assert (
        list(tiny_model.generate(PROMPTS[2], 14, stream=True, return_type="tokens"))
        == ids[n_prompt:]
    )
    drawn = tiny_model.generate(PROMPTS[2], 14, do_sample=True, seed=3)
    assert (
        PROMPTS[2] + "".join(tiny_model.generate_stream(PROMPTS[2], 14, do_sample=True, seed=3))
        == drawn
    )
    assert "".join(tiny_model.generate_stream(PROMPTS[0], 9, stop=".")) == " Paris."


def test_a_stream_says_what_is_wrong_before_it_begins(tiny_model):
    with pytest.raises(ValueError, match="a stream is one text, and 2 prompts"):
        tiny_model.generate_stream(PROMPTS[:2])
    with pytest.raises(ValueError, match="temperature would do nothing"):
        tiny_model.generate_stream(PROMPTS[0], temperature=0.5)
    with pytest.raises(ValueError, match="return_cache=True goes without it"):
        tiny_model.generate(PROMPTS[0], stream=True, return_cache=True)


def test_between_two_pieces_nothing_is_hooked_and_gradients_are_as_they_were(tiny_model):
    ids = tiny_model.to_tokens(PROMPTS[1])
    plain = tiny_model(ids)
    hooks = [("blocks.2.hook_resid_post", push(3.0))]
    pieces = []
    for piece in tiny_model.generate_stream(PROMPTS[0], 5, fwd_hooks=hooks):
        pieces.append(piece)
        assert not tiny_model.list_hooks() and torch.is_grad_enabled()
        assert torch.equal(tiny_model(ids), plain)
    assert len(pieces) > 1


def test_a_stream_of_inference_mode_may_be_read_outside_and_the_other_way_round(tiny_model):
    want = list(tiny_model.generate_stream(PROMPTS[2], 5))
    with torch.inference_mode():
        stream, pieces = tiny_model.generate_stream(PROMPTS[2], 5), []
        pieces.append(next(stream))
    assert pieces + list(stream) == want
    stream = tiny_model.generate_stream(PROMPTS[2], 5)
    pieces = [next(stream)]
    with torch.inference_mode():
        pieces += list(stream)
        assert torch.is_inference_mode_enabled()
    assert pieces == want


@pytest.mark.parametrize("end", ["closed", "collected", "error", "interrupt"])
def test_a_stream_may_be_left_at_any_piece(tiny_model, end):
    def run() -> None:
        stream = tiny_model.generate_stream(
            PROMPTS[2], 20, fwd_hooks=[("blocks.2.hook_resid_post", push(0.1))]
        )
        next(stream), next(stream)
        if end == "closed":
            stream.close()
        elif end == "error":
            with pytest.raises(ZeroDivisionError):
                for _ in stream:
                    1 / 0
        elif end == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                stream.throw(KeyboardInterrupt)

    run()
    assert not tiny_model.list_hooks() and torch.is_grad_enabled()


# -- however it ends ------------------------------------------------------------------------------------


def when_run(n: int, error: type[BaseException]) -> Any:
    """Raises in the nth run that it is part of."""
    runs = itertools.count(1)

    def hook(value: Tensor, hook: Any) -> None:
        if next(runs) == n:
            raise error

    return hook


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_no_hook_is_left_after_an_interrupt(error, n):
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    kv = KVCache(model.cfg)
    with pytest.raises(error):
        model.generate(
            ids,
            20,
            fwd_hooks=[("blocks.2.attn.hook_z", when_run(n, error)), (POINT, push(1.0))],
            return_cache=True,
            kv_cache=kv,
            stop_at_eos=False,
        )
    assert not model.list_hooks() and not any(point.live for point in model.hook_points())
    assert torch.is_grad_enabled() and not model.place.depth
    assert kv.length == (0 if n == 1 else 9 + n - 2)  # whole steps, and no half of one
    model.generate(ids, 3)  # and it goes on working


@pytest.mark.parametrize("nth", [1, 2, 7])
def test_an_interrupt_while_hooks_are_taken_off_leaves_none(monkeypatch, nth):
    model = hooked()
    remove, calls = HookPoint.remove, itertools.count(1)

    def interrupted(point: HookPoint, handle: Any) -> None:
        if next(calls) == nth:
            raise KeyboardInterrupt
        remove(point, handle)

    monkeypatch.setattr(HookPoint, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(text_inputs(1, 9), 5, fwd_hooks=[("blocks.*.hook_resid_post", push(1.0))])
    assert not model.list_hooks()


def test_what_was_written_before_an_interrupt_can_be_gone_on_from():
    model = hooked()
    ids = text_inputs(2, 9)["input_ids"]
    want = model.generate(ids, 12, stop_at_eos=False)
    kv = KVCache(model.cfg)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            ids,
            12,
            fwd_hooks=[("blocks.2.attn.hook_z", when_run(5, KeyboardInterrupt))],
            kv_cache=kv,
            stop_at_eos=False,
        )
    held = kv.length
    got = model.generate(
        want[:, held : held + 1], 12 - (held + 1 - 9), kv_cache=kv, stop_at_eos=False
    )
    assert torch.equal(got, want[:, held:])


@pytest.mark.parametrize("option", ["stop", "names_filter"])
def test_an_error_in_a_users_function_leaves_nothing_behind(option):
    model = hooked()
    given: dict[str, Any] = {option: lambda _: 1 / 0}
    with pytest.raises(ZeroDivisionError):
        model.generate(
            text_inputs(1, 9), 5, return_cache=True, fwd_hooks=[(POINT, push(1.0))], **given
        )
    assert not model.list_hooks() and torch.is_grad_enabled()


def tensors_alive() -> int:
    """Bytes of all tensors that Python holds, each memory once."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("how", ["plain", "cached", "stream", "left"])
def test_50_generations_leave_memory_flat(how):
    """Without the collector of cycles: what is done with is freed at once."""
    model = HookedModel(HookedConfig.from_hf(small.KINDS["text"] | small.few("text")))
    small.randomise(model, seed=5)
    ids = text_inputs(2, 2 * WINDOW)["input_ids"]

    def once(i: int) -> Any:
        hooks = [(POINT, push(0.5))]
        if how == "cached":
            return model.generate(ids, 4, fwd_hooks=hooks, return_cache=True)[0]
        if how == "plain":
            return model.generate(
                ids, 4, do_sample=True, top_k=5, seed=i, repetition_penalty=1.1, fwd_hooks=hooks
            )
        stream = model.generate(ids[:1], 4, stream=True, return_type="tokens", fwd_hooks=hooks)
        return next(stream) if how == "left" else list(stream)

    once(0)
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for i in range(50):
            once(i)
        assert tensors_alive() <= before
        kept = [model.generate(ids, 4, return_cache=True) for _ in range(2)]  # the control
        assert tensors_alive() > before + 5_000 and kept
    finally:
        gc.enable()


# -- ends of ranges, and what is refused ----------------------------------------------------------------


def test_no_new_tokens_run_the_prompt_alone():
    model = hooked()
    ids, fired = text_inputs(2, 9)["input_ids"], []
    kv = KVCache(model.cfg)
    got, cache = model.generate(
        ids,
        0,
        kv_cache=kv,
        return_cache=True,
        fwd_hooks=[(POINT, lambda value, hook: fired.append(1))],
    )
    assert torch.equal(got, ids) and fired == [1] and kv.length == 9
    assert_is_one_run(cache, model.run_with_cache(ids)[1])


def test_a_prompt_may_reach_the_last_position():
    model = hooked()
    n_ctx = model.cfg.n_ctx
    ids = text_inputs(1, n_ctx)["input_ids"]
    assert model.generate(ids, 1).shape == (
        1,
        n_ctx + 1,
    )  # what follows the last position does not run
    assert model.generate(ids[:, :-3], 4, stop_at_eos=False).shape == (1, n_ctx + 1)
    told = f"has {n_ctx - 3} tokens; this model has {n_ctx} positions, and 4 more.*may be 4 at most"
    with pytest.raises(ValueError, match=told):
        model.generate(ids[:, :-3], 5)
    with pytest.raises(ValueError, match="may be 0 at most"):
        model.generate(ids, 1, return_cache=True)
    with pytest.raises(ValueError, match=f"{n_ctx + 1} tokens; this model has {n_ctx} positions$"):
        model.generate(text_inputs(1, n_ctx + 1), 1)
    kv = KVCache(model.cfg)
    model(ids[:, :-2], kv_cache=kv)
    with pytest.raises(ValueError, match="may be 0 at most"):
        model.generate(ids[:, :2], 2, kv_cache=kv)


def test_a_model_that_looks_both_ways_writes_nothing():
    for use in (True, False):
        with pytest.raises(ValueError, match="attends both ways everywhere"):
            hooked("all").generate(text_inputs(), 3, use_kv_cache=use)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"verbose": False}, TypeError, "no 'verbose': nothing is printed"),
        ({"use_past_kv_cache": True}, TypeError, "here it is use_kv_cache="),
        ({"freq_penalty": 1.0}, TypeError, "repetition_penalty="),
        ({"eos_token_id": 1}, TypeError, "stop= adds ids"),
        ({"num_beams": 2}, TypeError, "no beam search"),
        ({"bwd_hooks": []}, TypeError, "runs without gradients"),
        ({"start_at_layer": 1}, TypeError, "logits of a whole run"),
        ({"position_ids": None}, TypeError, "positions count the real tokens"),
        ({"max_tokens": 3}, TypeError, "unknown keyword 'max_tokens'"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens is -1; it is 0 or more"),
        ({"names_filter": "hook_logits"}, ValueError, "return_cache=True keeps"),
        ({"device": "cpu"}, ValueError, "return_cache=True keeps"),
        ({"top_k": 3}, ValueError, "top_k would do nothing"),
        ({"seed": 3}, ValueError, "seed would do nothing.*do_sample=True"),
        (
            {"kv_cache": None, "use_kv_cache": False, "prefill_hooks": [("hook_embed", print)]},
            ValueError,
            "not apart",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_take_says_what_to_do(tiny_model, options, error, match):
    with pytest.raises(error, match=match):
        tiny_model.generate(PROMPTS[0], **options)
    assert not tiny_model.list_hooks()


def test_another_return_type_is_refused():
    with pytest.raises(ValueError, match='"input", "text" or "tokens"'):
        _check_options(3, "logits", False, False, None, None)
    _check_options(3, "tokens", False, False, None, None)


def test_the_examples_run():
    ran = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(
        HookedModel.generate, globs={"HookedModel": HookedModel}
    ):
        ran.run(example)
    assert ran.tries >= 3 and not ran.failures


def test_a_cache_and_no_cache_are_not_both_wanted(tiny_model):
    with pytest.raises(ValueError, match="give one of them"):
        tiny_model.generate(PROMPTS[0], kv_cache=KVCache(tiny_model.cfg), use_kv_cache=False)


def test_a_written_pad_token_is_no_reason_to_warn():
    """As it is where a prompt holds one."""
    model = hooked()

    def pad(logits: Tensor, hook: Any) -> Tensor:
        logits[..., 0] = 100.0
        return logits

    assert (
        model.generate(text_inputs(1, 9), 4, fwd_hooks=[("hook_logits", pad)], stop_at_eos=False)[
            0, 9:
        ].tolist()
        == [0] * 4
    )
    with pytest.warns(UserWarning, match="hold the pad token"):
        model.generate(torch.tensor([[0, 5]]), 1)


def test_values_that_are_not_finite_are_found_when_asked(tiny_model):
    def spoil(resid: Tensor, hook: Any) -> Tensor:
        return resid / 0

    with pytest.raises(FloatingPointError, match=r"blocks\.2\.hook_resid_post"):
        tiny_model.generate(
            PROMPTS[0], 3, check_finite=True, fwd_hooks=[("blocks.2.hook_resid_post", spoil)]
        )
    assert not tiny_model.list_hooks()


def test_weights_that_are_trained_write_without_gradients():
    model = hooked().requires_grad_(True)
    ids = text_inputs(1, 9)["input_ids"]
    got, cache = model.generate(ids, 3, return_cache=True, stop_at_eos=False)
    assert not any(value.requires_grad for value in cache.values())
    assert torch.equal(got, model.requires_grad_(False).generate(ids, 3, stop_at_eos=False))


def test_the_likeliest_continuation_has_the_smaller_loss(tiny_model):
    """A check from outside: what it writes is what it finds likely."""
    ids = tiny_model.generate(PROMPTS[2], 20, return_type="tokens")
    drawn = tiny_model.generate(
        PROMPTS[2],
        20,
        return_type="tokens",
        do_sample=True,
        temperature=3.0,
        seed=0,
        stop_at_eos=False,
    )
    losses = [lm_cross_entropy_loss(tiny_model(one), one) for one in (ids, drawn)]
    assert losses[0] < losses[1] - 0.5
