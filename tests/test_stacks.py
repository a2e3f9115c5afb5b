"""TransformerLens's stacks, whose sums are the streams of the run; the sums that peers give are not."""

import gc

import pytest
import torch
from small import KINDS, hooked, inputs_for, relative

from lens_gemma4 import HookedModel, HookNameError
from lens_gemma4.utils import Slice

EXACT = 1e-10
OFF = 0.01
IDS = torch.tensor([[2, 5, 6, 7, 8, 9], [2, 15, 16, 17, 18, 19]])


@pytest.fixture(scope="module")
def model():
    return hooked()


@pytest.fixture
def cache(model):
    return model.run_with_cache(IDS)[1]


@pytest.fixture(scope="module", params=KINDS)
def any_run(request):
    model = hooked(request.param)
    inputs = inputs_for(request.param, torch.float64)
    return model, model.run_with_cache(**inputs)[1]


def test_stack_activation(cache):
    whole = cache.stack_activation("resid_post")
    assert whole.shape[0] == 4 and all(
        torch.equal(whole[i], cache["resid_post", i]) for i in range(4)
    )
    assert cache.stack_activation("pattern", layer=2).shape == (2, 2, 4, 6, 6)
    assert torch.equal(
        cache.stack_activation("scale", 1, "ln1_post")[0], cache["scale", 0, "ln1_post"]
    )
    assert cache.stack_activation("pre", sublayer_type="mlp").shape[0] == 4


def test_a_ragged_stack_says_which_blocks_differ(cache):
    with pytest.raises(ValueError, match=r"\[2, 6, 4, 6\] in block 0, \[2, 6, 4, 16\] in block 1"):
        cache.stack_activation("z")
    assert cache.stack_activation("z", layer=1).shape == (1, 2, 6, 4, 6)


@pytest.mark.parametrize("layer", [5, -2, 99])
def test_a_layer_that_is_not_there_is_an_error(cache, layer):
    for stack in (
        lambda: cache.stack_activation("resid_pre", layer),
        lambda: cache.decompose_resid(layer),
    ):
        with pytest.raises(ValueError, match=f"layer is {layer}; .* 0 to 4"):
            stack()


def test_a_stack_of_nothing_is_an_error(cache):
    with pytest.raises(ValueError, match="first 0 blocks"):
        cache.stack_activation("resid_pre", 0)


def test_accumulated_resid(cache):
    stack, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [
        "0_pre",
        "0_mid",
        "1_pre",
        "1_mid",
        "2_pre",
        "2_mid",
        "3_pre",
        "3_mid",
        "final_post",
    ]
    names = [("resid_pre", 0), ("resid_mid", 0), ("resid_pre", 1)]
    assert all(torch.equal(stack[i], cache[name]) for i, name in enumerate(names))
    assert torch.equal(stack[-1], cache["resid_post", -1])
    early, labels = cache.accumulated_resid(2, return_labels=True)
    assert labels == ["0_pre", "1_pre", "2_pre"] and torch.equal(early[-1], cache["resid_pre", 2])
    assert torch.equal(cache.accumulated_resid(pos_slice=-1), cache.accumulated_resid()[:, :, -1])


def test_parts_add_up_to_the_last_stream_only_when_weighted(any_run):
    _, cache = any_run
    final = cache["resid_post", -1]
    assert relative(cache.decompose_resid().sum(0), final) < EXACT
    plain = (
        cache["resid_pre", 0]
        + cache.stack_activation("attn_out").sum(0)
        + cache.stack_activation("mlp_out").sum(0)
    )
    assert relative(plain, final) > 0.1
    before_post_norms = cache["resid_pre", 0] + sum(
        cache["out", i, part] for i in range(4) for part in ("attn", "mlp")
    )
    assert relative(before_post_norms, final) > 0.1


def test_parts_add_up_to_the_stream_at_every_layer(any_run):
    model, cache = any_run
    for layer in range(model.cfg.n_layers):
        assert relative(cache.decompose_resid(layer).sum(0), cache["resid_pre", layer]) < EXACT
        assert (
            relative(cache.decompose_resid(layer, mlp_input=True).sum(0), cache["resid_mid", layer])
            < EXACT
        )
        scalar = cache.weights["layer_scalar"][layer].item()
        too_far = (
            cache.decompose_resid(layer, mlp_input=True).sum(0) * scalar
        )  # it comes after the MLP
        assert relative(too_far, cache["resid_mid", layer]) == pytest.approx(abs(scalar - 1))


def test_parts_are_labelled(cache):
    parts, labels = cache.decompose_resid(2, return_labels=True)
    assert (
        labels == ["0_pre", "0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]
        and len(parts) == 5
    )
    s = [scalar.item() for scalar in cache.weights["layer_scalar"]]
    assert torch.equal(parts[1], cache["attn_out", 0] * (s[1] * s[0]))
    assert torch.equal(parts[4], cache["mlp_out", 1] * s[1])
    assert cache.decompose_resid(1, mlp_input=True, return_labels=True)[1] == labels[:4]
    assert cache.decompose_resid(2, mode="attn", return_labels=True)[1] == [
        "0_pre",
        "0_attn_out",
        "1_attn_out",
    ]
    assert cache.decompose_resid(2, mode="mlp", incl_embeds=False, return_labels=True)[1] == [
        "0_mlp_out",
        "1_mlp_out",
    ]
    attn, mlp = (
        cache.decompose_resid(mode=mode, incl_embeds=False).sum(0) for mode in ("attn", "mlp")
    )
    start = cache.decompose_resid()[0]
    assert relative(start + attn + mlp, cache["resid_post", -1]) < EXACT


def test_parts_at_positions_and_without_a_batch_axis(cache):
    whole = cache.decompose_resid()
    assert torch.equal(cache.decompose_resid(pos_slice=-1), whole[:, :, -1])
    assert torch.equal(cache.decompose_resid(pos_slice=(1, 3)), whole[:, :, 1:3])
    row = cache.apply_slice_to_batch_dim(1)
    assert torch.equal(row.decompose_resid(), whole[:, 1])
    assert torch.equal(
        row.decompose_resid(apply_ln=True), cache.decompose_resid(apply_ln=True)[:, 1]
    )


def test_through_the_norm_that_reads_them_parts_add_up_to_its_output(any_run):
    model, cache = any_run
    assert relative(cache.decompose_resid(apply_ln=True).sum(0), cache["ln_final.hook_out"]) < EXACT
    for layer in range(model.cfg.n_layers):
        for mid, norm in ((False, "ln1"), (True, "ln2")):
            read = cache.decompose_resid(layer, mlp_input=mid, apply_ln=True).sum(0)
            assert relative(read, cache[f"blocks.{layer}.{norm}.hook_out"]) < EXACT
            plain = cache.decompose_resid(layer, mlp_input=mid).sum(0) / cache["scale", layer, norm]
            assert (
                relative(plain, cache[f"blocks.{layer}.{norm}.hook_out"]) > OFF
            )  # without the gain
    at = cache.decompose_resid(apply_ln=True, pos_slice=-1).sum(0)
    assert relative(at, cache["ln_final.hook_out"][:, -1]) < EXACT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "heads"}, "mode is 'heads'"),
        ({"mlp_input": True}, "whose MLP reads the stream: 0 to 3"),
        ({"layer": 0, "incl_embeds": False}, "nothing is written before block 0"),
    ],
)
def test_questions_without_an_answer(cache, arguments, said):
    with pytest.raises(ValueError, match=said):
        cache.decompose_resid(**arguments)


def test_parts_that_were_not_kept_are_named(model):
    _, some = model.run_with_cache(IDS, names_filter="blocks.*.hook_resid_pre")
    with pytest.raises(HookNameError, match=r"blocks\.0\.hook_attn_out"):
        some.decompose_resid()


# -- heads and neurons --------------------------------------------------------------------------------


def streams(model, cache):
    """Every place where a stream is taken: (layer, mlp_input), and the run's own there."""
    n_layers = model.cfg.n_layers
    for layer in range(n_layers):
        yield layer, False, cache["resid_pre", layer]
        yield layer, True, cache["resid_mid", layer]
    yield -1, False, cache["resid_post", -1]


def test_the_full_decomposition_is_every_stream(any_run):
    model, cache = any_run
    for layer, mid, stream in streams(model, cache):
        for neurons in (True, False):
            stack, labels = cache.get_full_resid_decomposition(
                layer, mid, neurons, return_labels=True
            )
            assert len(labels) == len(stack) and labels[-1] == "0_pre"
            assert relative(stack.sum(0), stream) < EXACT
    gainless = cache.weights | {"ln2_post": [torch.ones_like(g) for g in cache.weights["ln2_post"]]}
    cache.weights, kept = gainless, cache.weights
    assert relative(cache.get_full_resid_decomposition().sum(0), cache["resid_post", -1]) > OFF
    cache.weights = kept


def test_heads_are_the_attention_part(any_run):
    model, cache = any_run
    for layer, mid, stream in streams(model, cache):
        if layer == 0 and not mid:
            continue
        heads, labels = cache.stack_head_results(layer, True, mlp_input=mid)
        whole = cache.decompose_resid(layer, mid, mode="attn", incl_embeds=False)
        assert labels[:2] == ["L0H0", "L0H1"] and len(heads) == len(whole) * model.cfg.n_heads
        assert relative(heads.unflatten(0, (len(whole), -1)).sum(1), whole) < EXACT
        raw = torch.cat(
            [cache["z", i].flatten(2) @ model.blocks[i].attn.w_o.T for i in range(len(whole))]
        )
        assert (
            relative(raw.view_as(whole).sum(0), whole.sum(0)) > OFF
        )  # before post-norm and scalars
        with_rest, labels = cache.stack_head_results(layer, True, True, mlp_input=mid)
        assert labels[-1] == "remainder" and relative(with_rest.sum(0), stream) < EXACT


def test_compute_head_results_are_the_hook_point(model):
    _, cache = model.run_with_cache(IDS)
    _, own = model.run_with_cache(IDS, names_filter="*.hook_result")
    assert "blocks.0.attn.hook_result" not in cache
    cache.compute_head_results()
    for name in own:
        assert relative(cache[name], own[name]) < EXACT
    low = hooked(dtype=torch.bfloat16).run_with_cache(IDS)[1]
    low.compute_head_results()
    assert low["result", 1].dtype == torch.bfloat16  # as the hook point's own


def test_neurons_of_a_block_are_its_mlp(any_run):
    model, cache = any_run
    for i in range(model.cfg.n_layers):
        neurons = cache.get_neuron_results(i)
        assert neurons.shape == (*cache["post", i].shape, model.cfg.d_model)
        assert relative(neurons.sum(-2), cache["mlp_out", i]) < EXACT
        raw = cache["post", i][..., None] * model.blocks[i].mlp.W_out
        assert relative(raw.sum(-2), cache["mlp_out", i]) > OFF
        direction = model.W_U[:, 7]
        assert (
            relative(
                cache.get_neuron_results(i, project_output_onto=direction), neurons @ direction
            )
            < EXACT
        )
        some = cache.get_neuron_results(i, [3, 1], -1, model.W_U[:, :5])
        assert relative(some, neurons[:, -1, [3, 1]] @ model.W_U[:, :5]) < EXACT


@pytest.mark.parametrize("onto", [None, "one", "several"])
@pytest.mark.parametrize("apply_ln", [False, True])
def test_projected_is_projecting(any_run, onto, apply_ln):
    model, cache = any_run
    w = {None: None, "one": model.W_U[:, 7], "several": model.W_U[:, :3]}[onto]
    for layer, mid in ((-1, False), (1, True), (2, False)):
        plain = cache.stack_neuron_results(layer, apply_ln=False, mlp_input=mid)
        want = cache.apply_ln_to_stack(plain, layer, mid) if apply_ln else plain
        want = want if w is None else want @ w
        got, labels = cache.stack_neuron_results(
            layer, None, None, True, False, apply_ln, w, mlp_input=mid
        )
        assert relative(got, want) < EXACT and len(labels) == len(got)
        full = cache.get_full_resid_decomposition(layer, mid, True, apply_ln, project_output_onto=w)
        stream = (
            cache["resid_post", -1]
            if layer == -1
            else cache["resid_mid" if mid else "resid_pre", layer]
        )
        read = cache.apply_ln_to_stack(stream[None], layer, mid)[0] if apply_ln else stream
        assert relative(full.sum(0), read if w is None else read @ w) < EXACT
        rest = cache.stack_neuron_results(layer, None, [0], False, True, apply_ln, w, mlp_input=mid)
        assert relative(rest.sum(0), read if w is None else read @ w) < EXACT


def test_labels_of_neurons(cache):
    _, labels = cache.stack_neuron_results(2, -1, [5, 2], True)
    assert labels == ["L0N5", "L0N2", "L1N5", "L1N2"]
    assert cache.stack_neuron_results(2, -1, 5, True)[1] == ["L0N5", "L1N5"]
    empty, labels = cache.stack_neuron_results(0, -1, None, True)
    assert empty.shape == (0, 2, 20) and labels == []
    assert cache.stack_head_results(0).shape == (0, *IDS.shape, 20)


def test_accumulated_streams_at_the_mlp_and_through_the_norm(cache):
    stack, labels = cache.accumulated_resid(2, mlp_input=True, return_labels=True)
    assert labels == ["0_pre", "1_pre", "2_pre", "2_mid"]
    assert torch.equal(stack[-1], cache["resid_mid", 2])
    read = cache.accumulated_resid(apply_ln=True)
    assert relative(read[-1], cache["ln_final.hook_out"]) < EXACT
    size = (read / cache.weights["ln_final"]).pow(2).mean(-1)
    assert (size - 1).abs().max() < 0.01  # each by a scale of its own
    at_block = cache.accumulated_resid(2, apply_ln=True)
    assert relative(at_block[-1], cache["blocks.2.ln1.hook_out"]) < EXACT
    assert relative(at_block[0], cache["blocks.0.ln1.hook_out"]) > OFF
    held = cache["resid_pre", 0] / cache["scale", 2, "ln1"] * cache.weights["ln1"][2]
    assert relative(at_block[0], held) < EXACT


# -- logits -------------------------------------------------------------------------------------------


def test_logit_attrs_are_logits_before_the_softcap(any_run):
    model, cache = any_run
    raw = cache["hook_logits_raw"]
    parts = cache.decompose_resid()
    assert relative(cache.logit_attrs(parts, 7).sum(0), raw[..., 7]) < EXACT
    assert relative(cache.logit_attrs(parts, 7, 9).sum(0), raw[..., 7] - raw[..., 9]) < EXACT
    assert relative((parts @ model.W_U[:, 7]).sum(0), raw[..., 7]) > OFF  # without the norm
    last = cache.decompose_resid(pos_slice=-1)
    assert relative(cache.logit_attrs(last, 7, pos_slice=-1).sum(0), raw[:, -1, 7]) < EXACT
    rows = torch.arange(len(raw)) + 3
    want = torch.stack([raw[i, :, t] for i, t in enumerate(rows)])
    assert relative(cache.logit_attrs(parts, rows).sum(0), want) < EXACT
    assert relative(cache.logit_attrs(last, rows, pos_slice=-1).sum(0), want[:, -1]) < EXACT
    every = torch.arange(raw[..., 0].numel()).view(raw.shape[:2]) % 40
    assert (
        relative(cache.logit_attrs(parts, every).sum(0), raw.gather(-1, every[..., None])[..., 0])
        < EXACT
    )
    one = cache.logit_attrs(parts, 7, batch_slice=0)
    assert relative(one.sum(0), raw[0, :, 7]) < EXACT


def test_logit_attrs_of_texts():
    model = HookedModel.from_pretrained("tiny")
    _, cache = model.run_with_cache("The capital of France is")
    parts = cache.decompose_resid(pos_slice=-1)
    ids = [model.to_single_token(text) for text in (" Paris", " Rome")]
    texts = cache.logit_attrs(parts, " Paris", " Rome", pos_slice=-1)
    assert torch.equal(texts, cache.logit_attrs(parts, *ids, pos_slice=-1))
    assert texts.sum() > 1
    row = cache.apply_slice_to_batch_dim(0)
    assert torch.allclose(
        row.logit_attrs(parts[:, 0], " Paris", pos_slice=-1, has_batch_dim=False),
        cache.logit_attrs(parts, " Paris", pos_slice=-1)[:, 0],
    )
    del model
    gc.collect()
    with pytest.raises(ValueError, match="give ids"):
        cache.logit_attrs(parts, " Paris", pos_slice=-1)


def test_logit_attrs_of_unlike_shapes(cache):
    with pytest.raises(ValueError, match=r"tokens are \[2\] and incorrect_tokens \[\]"):
        cache.logit_attrs(cache.decompose_resid(), torch.tensor([1, 2]), 3)


def test_apply_ln_to_rows_of_the_batch(cache):
    parts = cache.decompose_resid()
    whole = cache.apply_ln_to_stack(parts)
    assert torch.equal(cache.apply_ln_to_stack(parts, batch_slice=1), whole[:, 1])
    assert torch.equal(cache.apply_ln_to_stack(parts, batch_slice=Slice([1])), whole[:, [1]])
    assert torch.equal(cache.apply_ln_to_stack(parts[:, :, -1], pos_slice=-1), whole[:, :, -1])
    own = cache.apply_ln_to_stack(parts, recompute_ln=True)
    assert relative(own.sum(0), whole.sum(0)) > OFF


# -- low precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_rounding_of_a_bfloat16_run_is_a_part(kind):
    model = hooked(kind, torch.bfloat16)
    _, cache = model.run_with_cache(**inputs_for(kind, torch.bfloat16))
    for layer, mid, stream in streams(model, cache):
        stream, size = stream.float(), stream.float().abs().max()
        stacks = [
            cache.decompose_resid(layer, mid, return_labels=True),
            cache.get_full_resid_decomposition(layer, mid, True, return_labels=True),
            cache.get_full_resid_decomposition(layer, mid, False, return_labels=True),
        ]
        for stack, labels in stacks:
            assert stack.dtype == torch.float32 and labels.count("rounding") == 1
            assert (stack.sum(0) - stream).abs().max() < 1e-5 * size, (layer, mid)
            if layer or mid:
                without = stack.sum(0) - stack[labels.index("rounding")]
                assert (without - stream).abs().max() > 5e-5 * size, (layer, mid)
    assert "rounding" not in cache.decompose_resid(mode="mlp", return_labels=True)[1]
    plain, labels = cache.decompose_resid(return_labels=True, incl_rounding=False)
    assert "rounding" not in labels and len(plain) == 1 + 2 * model.cfg.n_layers


@pytest.mark.parametrize("wrong", ["layer_scalar", "ln1_post", "ln2_post"])
def test_rounding_is_not_what_is_left_over(wrong):
    """With weights that are not the run's the parts miss, and the part for rounding does not hide it."""
    model = hooked(dtype=torch.bfloat16)
    _, cache = model.run_with_cache(IDS)
    final = cache["resid_post", -1].float()
    honest = cache.get_full_resid_decomposition().sum(0)
    assert relative(honest, final) < 1e-5
    cache.weights = {**cache.weights, wrong: [torch.ones_like(w) for w in cache.weights[wrong]]}
    assert relative(cache.get_full_resid_decomposition().sum(0), final) > OFF


def test_an_edit_is_not_taken_for_rounding():
    model = hooked(dtype=torch.bfloat16)
    for name in ("blocks.1.hook_resid_mid", "blocks.1.hook_attn_out", "blocks.2.hook_resid_post"):
        with model.hooks(fwd_hooks=[(name, lambda value, hook: value + 1)]):
            _, cache = model.run_with_cache(IDS)
        stack = cache.get_full_resid_decomposition()
        assert relative(stack.sum(0), cache["resid_post", -1].float()) > 1e-3, name


def test_rounding_may_be_asked_of_any_run(cache):
    stack, labels = cache.decompose_resid(return_labels=True, incl_rounding=True)
    assert labels[-1] == "rounding" and stack[-1].abs().max() < 1e-12 * stack.abs().max()


# -- what must not be spread or guessed ---------------------------------------------------------------


def test_parts_and_tokens_that_do_not_belong_together_are_errors(cache):
    parts = cache.decompose_resid()
    two = torch.tensor([5, 6])
    with pytest.raises(ValueError, match=r"tokens are \[2\]; the parts are at \[1, 6\]"):
        cache.logit_attrs(parts, two, batch_slice=[1])
    with pytest.raises(ValueError, match=r"tokens are \[2\]; the parts are at \[6\]"):
        cache.logit_attrs(parts, two, batch_slice=1)
    last = cache.decompose_resid(pos_slice=-1)[:2]
    with pytest.raises(ValueError, match=r"tokens are \[2, 1\]; the parts are at \[2\]"):
        cache.logit_attrs(last, two[:, None], pos_slice=-1)  # two parts are not two rows
    with pytest.raises(ValueError, match=r"the parts are \[2, 6, 20\] and the norm's scale \[2, 6"):
        cache.apply_ln_to_stack(parts[:2, 0], has_batch_dim=False)
    row = cache.apply_ln_to_stack(parts[:2, 1], batch_slice=1, has_batch_dim=False)
    assert torch.equal(row, cache.apply_ln_to_stack(parts)[:2, 1])
    for token in (-1, 101, True):
        with pytest.raises(ValueError, match="a token is an id from 0 to 100"):
            cache.logit_attrs(parts, token)


def test_parts_of_a_single_row_need_no_batch_axis(model):
    _, cache = model.run_with_cache(IDS[:1])
    parts = cache.decompose_resid()
    whole = cache.logit_attrs(parts, 7)
    assert torch.equal(cache.logit_attrs(parts[:, 0], 7, has_batch_dim=False), whole[:, 0])


def test_every_stack_is_where_the_cache_is(model):
    """A cache on another device than the weights, as `run_with_cache(device="cpu")` gives on a GPU."""
    _, cache = model.run_with_cache(IDS)
    cache.to("meta")
    end = {"apply_ln": True}
    stacks = [
        cache.decompose_resid(**end, incl_rounding=True),
        cache.accumulated_resid(**end),
        cache.stack_head_results(**end, incl_remainder=True),
        cache.stack_neuron_results(-1, **end, incl_remainder=True),
        cache.get_full_resid_decomposition(**end, project_output_onto=model.W_U[:, 7]),
        cache.logit_attrs(cache.decompose_resid(), 7, 9),
    ]
    assert all(stack.is_meta for stack in stacks)
    cache.compute_head_results()
    assert cache["result", 0].is_meta
