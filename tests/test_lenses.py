"""The lens ends at the model's own logits, to the bit; every other number is checked against a formula written out."""

import doctest
import inspect

import pytest
import torch
import torch.nn.functional as F
from small import KINDS, inputs_for, padded_inputs, randomise
from torch.utils._python_dispatch import TorchDispatchMode

from lens_gemma4 import HookedConfig, HookedModel, HookNameError, lenses, logit_lens
from lens_gemma4.attribution import residual_gain
from lens_gemma4.lenses import POINTS, Place, project

IDS = torch.tensor([[2, 5, 6, 7, 8, 9], [2, 15, 16, 17, 18, 19]])
V = KINDS["text"]["vocab_size"]
EXACT = {"atol": 1e-10, "rtol": 1e-10}
PROMPT = "The capital of France is"


def build(kind="text", dtype=torch.float64, **text):
    config = KINDS[kind] | text
    model = HookedModel(HookedConfig.from_hf(config))
    randomise(model, seed=3)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return build()


def in_order(lens, place=-1):
    """The logits of one place by token, of a lens that kept the whole vocabulary."""
    ids, logits = lens.top_ids[place], lens.top_logits[place]
    return torch.empty_like(logits).scatter_(-1, ids, logits)


def capped(model, raw):
    cap = model.cfg.output_logits_soft_cap
    return raw if cap is None else cap * torch.tanh(raw / cap)


def by_hand(model, stream):
    """Final norm, head, softcap, written out."""
    scale = (stream.pow(2).mean(-1, keepdim=True) + model.cfg.eps).sqrt()
    return capped(model, stream / scale * model.ln_final.weight @ model.W_U)


# -- the last block is the model ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_is_the_logits_to_the_bit(kind, dtype):
    model = build(kind, dtype)
    inputs = inputs_for(kind, dtype)
    _, cache = model.run_with_cache(**inputs, names_filter=["hook_logits", "hook_logits_raw"])
    lens = model.logit_lens(**inputs, top_k=V)
    assert torch.equal(in_order(lens), cache["hook_logits"].to(lens.top_logits.dtype))
    assert lens.kl[-1].abs().max() == 0 and lens.kl[:-1].max() > 0.1
    assert not torch.equal(in_order(lens, -2), in_order(lens))
    if model.cfg.output_logits_soft_cap is not None:
        assert not torch.equal(in_order(lens), cache["hook_logits_raw"].to(lens.top_logits.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_so_where_products_are_large(dtype):
    """Enough words and positions for the kernels that the 12B would get."""
    model = build(dtype=dtype, vocab_size=9001, hidden_size=60)
    ids = torch.randint(3, 80, (1, 37), generator=torch.Generator().manual_seed(0))
    logits = model(ids).to(torch.float32)
    lens = model.logit_lens(ids, top_k=20)
    assert torch.equal(lens.top_logits[-1], logits.topk(20).values)
    assert torch.equal(logits.gather(-1, lens.top_ids[-1]), lens.top_logits[-1])


def test_there_is_one_formula(model):
    stream = model(IDS, stop_at_layer=2)
    assert torch.equal(model.project_on_vocab(stream), project(model, stream))
    assert torch.equal(
        project(model, stream.flatten(0, 1), out=torch.empty(12, V, dtype=torch.float64)),
        project(model, stream).flatten(0, 1),
    )
    torch.testing.assert_close(project(model, stream), by_hand(model, stream), **EXACT)
    uncapped = model.ln_final.plain(stream) @ model.W_U
    assert (uncapped - project(model, stream)).abs().max() > 0.1
    without_gain = capped(
        model, F.rms_norm(stream, stream.shape[-1:], eps=model.cfg.eps) @ model.W_U
    )
    assert (without_gain - project(model, stream)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_hook_fires(dtype):
    model = build(dtype=dtype)
    model.add_hook("hook_logits", lambda logits, hook: logits * 0)
    model.add_hook("ln_final.hook_out", lambda out, hook: out * 0)
    stream = torch.randn(1, 2, model.cfg.d_model).to(dtype)
    assert model.project_on_vocab(stream).abs().max() > 0


# -- points -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_each_point_is_read_where_it_stands(model, point):
    _, cache = model.run_with_cache(IDS)
    lens = model.logit_lens(IDS, points=point, top_k=V)
    for layer in range(model.cfg.n_layers):
        wanted = by_hand(model, cache[point, layer])
        torch.testing.assert_close(in_order(lens, lens.at(layer)), wanted, **EXACT)
        other = by_hand(model, cache[point, (layer + 1) % model.cfg.n_layers])
        assert (other - wanted).abs().max() > 0.1


def test_several_points_come_in_the_order_of_a_run(model):
    lens = model.logit_lens(IDS, points=["resid_post", "attn_out"], layers=[2, 0])
    assert lens.places == (
        Place(0, "attn_out"),
        Place(0, "resid_post"),
        Place(2, "attn_out"),
        Place(2, "resid_post"),
    )
    alone = model.logit_lens(IDS, points="attn_out", layers=2)
    torch.testing.assert_close(lens.top_logits[2], alone.top_logits[0], **EXACT)
    assert not torch.allclose(lens.top_logits[3], alone.top_logits[0])


def test_layers_count_from_the_end_too(model):
    last, n = model.logit_lens(IDS, layers=-1), model.cfg.n_layers
    assert last.places == (Place(n - 1, "resid_post"),)
    torch.testing.assert_close(last.top_logits, model.logit_lens(IDS).top_logits[-1:], **EXACT)


def test_what_stands_nowhere_is_refused(model):
    lens = model.logit_lens(IDS, layers=[0, 2])
    assert lens.at(2) == lens.at(-1) == 1
    with pytest.raises(
        ValueError, match="block 1 was not read; read were: 0 resid_post, 2 resid_post"
    ):
        lens.at(1)
    with pytest.raises(ValueError, match="attn_out of block 2 was not read"):
        lens.at(2, "attn_out")


# -- the frozen norm ----------------------------------------------------------------------------------


def test_a_frozen_norm_has_the_length_of_the_last_stream(model):
    _, cache = model.run_with_cache(IDS)
    lens = model.logit_lens(IDS, norm="frozen", top_k=V)
    scale = cache["ln_final.hook_scale"]
    for layer in range(model.cfg.n_layers):
        read = cache["resid_post", layer] / scale * model.ln_final.weight
        torch.testing.assert_close(in_order(lens, layer), capped(model, read @ model.W_U), **EXACT)
    torch.testing.assert_close(in_order(lens), model(IDS), **EXACT)
    recomputed = model.logit_lens(IDS, top_k=V)
    assert (in_order(lens, 0) - in_order(recomputed, 0)).abs().max() > 0.1


def test_frozen_logits_of_parts_add_up_before_the_softcap():
    """Weighted by what the layer scalars leave of them; unweighted they do not."""
    model = build("no softcap, untied")
    points = {"points": ("resid_pre", "attn_out", "mlp_out"), "norm": "frozen", "top_k": V}
    lens = model.logit_lens(IDS, **points)
    gains = residual_gain([block.layer_scalar for block in model.blocks])
    parts = [
        (place.layer, in_order(lens, i))
        for i, place in enumerate(lens.places)
        if place.point != "resid_pre" or place.layer == 0
    ]
    logits = model(IDS)
    torch.testing.assert_close(sum(gains[layer] * part for layer, part in parts), logits, **EXACT)
    assert (sum(part for _, part in parts) - logits).abs().max() > 0.1
    recomputed = model.logit_lens(IDS, **points | {"norm": "recomputed"})
    assert (in_order(recomputed, 0) - parts[0][1]).abs().max() > 0.1


# -- numbers of a place -------------------------------------------------------------------------------


def test_the_divergence_is_from_the_final_distribution(model):
    final = model(IDS).log_softmax(-1)
    said = by_hand(model, model.run_with_cache(IDS)[1]["resid_post", 0]).log_softmax(-1)
    lens = model.logit_lens(IDS)
    torch.testing.assert_close(lens.kl[0], (final.exp() * (final - said)).sum(-1), **EXACT)
    assert (lens.kl[0] - (said.exp() * (said - final)).sum(-1)).abs().min() > 1e-3
    torch.testing.assert_close(lens.entropy[0], -(said.exp() * said).sum(-1), **EXACT)


def test_chosen_tokens_are_followed(model):
    logits = by_hand(model, model.run_with_cache(IDS)[1]["resid_post", 1])
    lens = model.logit_lens(IDS, tokens=torch.tensor([40, 7]))
    assert lens.token_ids == (40, 7)
    torch.testing.assert_close(lens.token_logits[1], logits[..., [40, 7]], **EXACT)
    torch.testing.assert_close(lens.token_probs[1], logits.softmax(-1)[..., [40, 7]], **EXACT)
    ranks = logits.argsort(-1, descending=True).argsort(-1)
    assert torch.equal(lens.token_ranks[1], ranks[..., [40, 7]])
    assert not torch.equal(lens.token_ranks[1], ranks[..., [7, 40]])


def test_what_is_not_asked_for_is_not_there(model):
    lens = model.logit_lens(IDS, entropy=False, kl=False, top_k=1)
    assert lens.entropy is None and lens.kl is None
    assert lens.top_ids.shape == (model.cfg.n_layers, 2, 6, 1)


# -- where it runs and what it costs ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 24, 1000])
def test_chunks_are_only_a_way_to_go(model, rows):
    whole = model.logit_lens(IDS, tokens=7, points=POINTS, norm="frozen")
    lens = model.logit_lens(IDS, tokens=7, points=POINTS, norm="frozen", max_bytes=rows * V * 8)
    for name in ("top_logits", "top_logprobs", "token_logprobs", "entropy", "kl"):
        torch.testing.assert_close(getattr(lens, name), getattr(whole, name), **EXACT)
    assert torch.equal(lens.top_ids, whole.top_ids)
    assert torch.equal(lens.token_ranks, whole.token_ranks)
    assert not torch.allclose(whole.kl[0], whole.kl[0].flip(1))  # places are told apart at all


def tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in numbers."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        for value in tensors(out):
            if value.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize(("rows", "kl"), [(3, True), (3, False), (20, True)])
def test_no_tensor_is_larger_than_a_chunk(rows, kl):
    model = build(dtype=torch.float32, vocab_size=5003)
    ids = torch.randint(3, 80, (2, 20), generator=torch.Generator().manual_seed(0))
    with Largest() as seen:
        model.logit_lens(ids, kl=kl, max_bytes=rows * 5003 * 4)
    assert seen.numel == rows * 5003
    with Largest() as seen:  # and the model's own logits are seen where they are made
        model(ids)
    assert seen.numel == ids.numel() * 5003


def test_short_prompts_share_a_product_and_the_last_block_stays_alone(model):
    """The head's matrix is read once for many blocks; the last one's product is the model's own."""
    places = [Place(i, "resid_post") for i in range(4)]
    assert lenses._groups(places, 2, 4) == [places[:2], places[2:3], places[3:]]
    assert lenses._groups(places[:3], 8, 4) == [places[:3]]
    ids = IDS[:1, :3]
    with Largest() as seen:
        model.logit_lens(ids, kl=False)
    assert seen.numel == (model.cfg.n_layers - 1) * 3 * V


def test_a_run_ends_where_nothing_more_is_read(model):
    ran = []
    model.add_hook("blocks.*.hook_resid_pre", lambda resid, hook: ran.append(hook.layer()))
    try:
        model.logit_lens(IDS, layers=[0, 1], kl=False)
        assert ran == [0, 1]
        ran.clear()
        model.logit_lens(IDS, layers=[0, 1])  # the divergence needs the last stream
        assert ran == list(range(model.cfg.n_layers))
        ran.clear()
        model.logit_lens(IDS, layers=0, kl=False, norm="frozen")  # and so does its length
        assert ran == list(range(model.cfg.n_layers))
    finally:
        model.reset_hooks()


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [(-1, [5]), ([4, 0], [4, 0]), (slice(1, 4), [1, 2, 3]), ((2, None), [2, 3, 4, 5])],
)
def test_positions_are_those_of_the_whole(model, positions, numbers):
    whole = model.logit_lens(IDS)
    lens = model.logit_lens(IDS, positions=positions)
    assert lens.positions == tuple(numbers)
    assert torch.equal(lens.ids, IDS[:, numbers])
    torch.testing.assert_close(lens.kl, whole.kl[:, :, numbers], **EXACT)
    torch.testing.assert_close(lens.top_logprobs, whole.top_logprobs[:, :, numbers], **EXACT)
    assert not torch.allclose(lens.kl, whole.kl[:, :, [(n + 1) % 6 for n in numbers]])


def test_hooks_are_at_work(model):
    vector = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0)).double()
    plain = model.logit_lens(IDS, top_k=V)
    with model.steer(1, vector, factor=3.0):
        steered = model.logit_lens(IDS, top_k=V)
        assert torch.equal(in_order(steered), model(IDS))
    assert torch.equal(in_order(steered, 0), in_order(plain, 0))  # before it was added
    assert (in_order(steered, 1) - in_order(plain, 1)).abs().max() > 0.1


def test_the_model_is_left_as_it_was():
    model = build(dtype=torch.float32)
    model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lens = model.logit_lens(IDS, norm="frozen")
    assert not lens.top_logits.requires_grad
    assert not model.list_hooks()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


# -- inputs -------------------------------------------------------------------------------------------


def test_padding_is_told_and_left_out_of_the_table(model):
    inputs = padded_inputs("left")
    lens = model.logit_lens(**inputs, top_k=2)
    assert torch.equal(lens.mask, inputs["attention_mask"].bool())
    table = lens.to_dataframe()
    seen = table[table.batch == 1].position.unique().tolist()
    assert seen == inputs["attention_mask"][1].nonzero().flatten().tolist()
    assert 2 not in table.batch.unique()  # a row of padding alone
    everything = lens.top_ids.shape[:3].numel() * 2
    assert len(table) * 30 == everything * inputs["attention_mask"].sum()


def test_a_padded_row_reads_as_alone(model):
    inputs = padded_inputs("right")
    real = inputs["attention_mask"][1].bool()
    alone = model.logit_lens(inputs["input_ids"][1:2, real])
    together = model.logit_lens(**inputs)
    torch.testing.assert_close(together.kl[:, 1, real], alone.kl[:, 0], **EXACT)
    assert not torch.allclose(together.kl[:, 0, : real.sum()], alone.kl[:, 0])


def test_embeddings_and_streams_go_in_as_in_forward(model):
    whole = model.logit_lens(IDS)
    embeds = model.input_to_embed(IDS)
    lens = model.logit_lens(inputs_embeds=embeds)
    torch.testing.assert_close(lens.kl, whole.kl, **EXACT)
    assert lens.ids is None
    later = model.logit_lens(model(IDS, stop_at_layer=2), start_at_layer=2, layers=[2, 3])
    torch.testing.assert_close(later.kl, whole.kl[2:], **EXACT)


def test_a_caches_streams_are_read_as_the_runs(model):
    wanted = model.logit_lens(IDS, tokens=7, norm="frozen", points=("attn_out", "resid_post"))
    _, cache = model.run_with_cache(IDS)
    lens = logit_lens(model, cache, tokens=7, norm="frozen", points=("attn_out", "resid_post"))
    assert torch.equal(lens.ids, IDS)
    for name in ("top_ids", "top_logprobs", "token_ranks", "entropy", "kl"):
        assert torch.equal(getattr(lens, name), getattr(wanted, name)), name
    some = logit_lens(model, cache, positions=[1, -1])
    torch.testing.assert_close(some.kl, model.logit_lens(IDS).kl[:, :, [1, -1]], **EXACT)
    assert some.positions == (1, 5)


def test_a_cache_without_a_batch_axis_is_a_batch_of_one(model):
    _, cache = model.run_with_cache(IDS[:1], remove_batch_dim=True)
    assert torch.equal(logit_lens(model, cache).kl, model.logit_lens(IDS[:1]).kl)


def test_a_cache_that_lacks_something_says_what(model):
    _, cache = model.run_with_cache(IDS, names_filter="blocks.1.hook_resid_post")
    with pytest.raises(HookNameError, match=r"blocks.3.hook_resid_post.*not kept"):
        logit_lens(model, cache, layers=1)
    with pytest.raises(HookNameError, match=r"ln_final.hook_scale.*not kept"):
        logit_lens(model, cache, layers=1, kl=False, norm="frozen")
    lens = logit_lens(model, cache, layers=1, kl=False)
    assert lens.ids is None
    with pytest.raises(TypeError, match="attention_mask"):
        logit_lens(model, cache, layers=1, kl=False, attention_mask=torch.ones(2, 6))


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"points": "resid"}, ValueError, "no stream point 'resid'; known are resid_pre"),
        ({"points": []}, ValueError, "nothing to read"),
        ({"layers": []}, ValueError, "nothing to read"),
        ({"layers": 9}, IndexError, "blocks 0 to 3"),
        ({"top_k": 0}, ValueError, "1 to 101"),
        ({"tokens": 101}, ValueError, "0 to 100"),
        ({"positions": []}, ValueError, "nothing to read"),
        ({"positions": [7]}, IndexError, "axis of 6"),
        ({"tuned": lambda s, i: s, "points": "attn_out"}, ValueError, "resid_post alone"),
        ({"stop_at_layer": 2}, TypeError, "stop_at_layer"),
    ],
)
def test_what_cannot_be_read_is_refused(model, given, error, told):
    with pytest.raises(error, match=told):
        model.logit_lens(IDS, **given)


def test_a_norm_of_another_kind_is_refused_without_annotations_too(model):
    with pytest.raises(ValueError, match="'recomputed' or 'frozen'"):
        inspect.unwrap(logit_lens)(model, IDS, norm="last")


def test_maps_are_applied_before_the_norm(model):
    def doubled_at_block_1(stream, layer):
        return stream.roll(1, -1) if layer == 1 else stream

    plain = model.logit_lens(IDS)
    lens = model.logit_lens(IDS, tuned=doubled_at_block_1)
    assert torch.equal(lens.kl[[0, 2, 3]], plain.kl[[0, 2, 3]])
    stream = model(IDS, stop_at_layer=2).roll(1, -1)
    torch.testing.assert_close(lens.top_logits[1], by_hand(model, stream).topk(10).values, **EXACT)


# -- tables and plots ---------------------------------------------------------------------------------


def test_the_table_holds_every_number(tiny_model):
    lens = tiny_model.logit_lens(PROMPT, tokens=[" Paris", " Rome"], top_k=3)
    table = lens.to_dataframe()
    assert len(table) == lens.top_ids.shape[:3].numel() * (3 + 2)
    one = table[(table.layer == 6) & (table.position == 5)]
    assert one.token.tolist()[:3] == [lens.name(i) for i in lens.top_ids[6, 0, 5].tolist()]
    assert one[one.kind == "asked"].token.tolist() == [" Paris", " Rome"]
    assert one[one.kind == "asked"]["rank"].tolist() == lens.token_ranks[6, 0, 5].tolist()
    assert one[one.kind == "top"].logprob.tolist() == lens.top_logprobs[6, 0, 5].tolist()
    assert one[one.kind == "top"]["rank"].tolist() == [0, 1, 2]
    assert set(one.kl) == {lens.kl[6, 0, 5].item()} and set(one.entropy) == {
        lens.entropy[6, 0, 5].item()
    }
    assert set(one["at"]) == {" is"}
    assert table[table.layer == 5].kl.iloc[0] != one.kl.iloc[0]
    lean = tiny_model.logit_lens(PROMPT, kl=False, entropy=False).to_dataframe()
    assert not {"kl", "entropy"} & set(lean.columns)


def test_the_plot_shows_places_by_positions(tiny_model):
    lens = tiny_model.logit_lens(PROMPT, tokens=" Paris")
    trace = lens.plot().data[0]
    assert len(trace.z) == 8 and len(trace.z[0]) == 6
    assert trace.z[7][5] == pytest.approx(lens.top_probs[7, 0, 5, 0].item())
    assert trace.text[7][5] == " Paris" and "position 5  is:  Paris" in trace.customdata[7][5]
    paris = lens.token_ids[0]
    assert lens.plot("rank", paris).data[0].z[3][5] == lens.token_ranks[3, 0, 5, 0]
    assert lens.plot("kl").data[0].z[3][5] == pytest.approx(lens.kl[3, 0, 5].item())
    with pytest.raises(ValueError, match="was not asked about"):
        lens.plot("rank", 5)


def test_the_plot_leaves_padding_out(tiny_model):
    lens = tiny_model.logit_lens([PROMPT, "Hello"])
    long, short = lens.plot(batch=0).data[0], lens.plot(batch=1).data[0]
    assert len(long.z[0]) == 6 and len(short.z[0]) == int(lens.mask[1].sum()) < 6


def test_without_a_tokenizer_tokens_are_numbers(model):
    lens = model.logit_lens(IDS)
    assert lens.top()[0][0] == f"token {lens.top_ids[-1, 0, -1, 0]}"
    assert lens.plot().data[0].text[0][0].startswith("token ")
    with pytest.raises(ValueError, match="tokenizer"):
        model.logit_lens(IDS, tokens=" Paris")


def test_a_lens_says_what_it_is(tiny_model):
    assert repr(tiny_model.logit_lens(PROMPT)) == (
        "Lens of 8 place, 1 batch, 6 pos (0 resid_post to 7 resid_post), norm recomputed, top 10"
    )


def test_the_shipped_model_knows_the_capital_at_its_last_block(tiny_model):
    lens = tiny_model.logit_lens(PROMPT, tokens=" Paris")
    token, prob = lens.top()[0]
    assert token == " Paris" and prob > 0.9
    assert lens.token_ranks[-1, 0, -1, 0] == 0 and lens.token_ranks[0, 0, -1, 0] > 0


def test_the_examples_run():
    ran = doctest.testmod(lenses, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
