"""QK and OV against what runs really do, in float64: scores, what a head adds, and how heads compose."""

import copy
import doctest
import inspect
import random

import pytest
import torch
from fixtures import random_config
from small import KINDS, S, randomise

from lens_gemma4 import FactoredMatrix, HookedConfig, HookedModel, SVDInterpreter, circuits
from lens_gemma4.circuits import composition_table, ov_scales, qk_scales
from lens_gemma4.heads import detect_head, induction_scores, repeated_tokens

EXACT = 1e-10
OFF = 0.01
IDS = torch.randint(3, 80, (2, 11), generator=torch.Generator().manual_seed(3))
# sliding blocks, full ones whose values are their keys, and borrowers of both; and values of their own
CASES = ("shared", "shared, own values")
SINGLE_KEY_HEAD = "num_global_key_value_heads"


def make(kind, **text):
    model = HookedModel(HookedConfig.from_hf(KINDS[kind] | text))
    randomise(model, seed=5)
    return model.to(torch.float64)


@pytest.fixture(scope="module", params=CASES)
def run(request):
    """A model and a run of it; full blocks have two key/value heads."""
    two = {SINGLE_KEY_HEAD: 2} if request.param == "shared" else {}
    model = make(request.param, **two)
    return model, model.run_with_cache(IDS)[1]


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def source_of(model, layer):
    """The block whose input keys and values are made of."""
    lender = model.cfg.layer(layer).lender
    return layer if lender is None else lender


def pairs(model, layer):
    """Queries and keys of the second row that see each other, at several distances."""
    window = model.cfg.layer(layer).window or IDS.shape[1]
    return [(q, q - d) for d in (0, 1, 3, 8) if d < window for q in range(d, IDS.shape[1], 2)]


def scores_by_circuit(model, cache, layer, head, turned=True, circuit=None):
    """Each pair's score as `x_q @ QK @ x_k` with the run's scales."""
    x, y = cache["resid_pre", layer][1], cache["resid_pre", source_of(model, layer)][1]
    scales = qk_scales(cache, layer, head)[1]
    return torch.stack(
        [
            (x[q] @ (circuit or model).QK(layer, head, offset=(q - k) if turned else None))
            @ y[k]
            / scales[q, k]
            for q, k in pairs(model, layer)
        ]
    )


def scores_of_the_run(model, cache, layer, head):
    return torch.stack([cache["attn_scores", layer][1, head, q, k] for q, k in pairs(model, layer)])


# -- QK -----------------------------------------------------------------------------------------------


def test_the_cases_hold_every_sort_of_block(run):
    model, _ = run
    layers = model.cfg.layers
    assert {(layer.kind, layer.lender is None) for layer in layers} == {
        ("sliding", True),
        ("full", True),
        ("sliding", False),
        ("full", False),
    }
    assert all(layer.n_key_value_heads == 2 for layer in layers)
    assert len({layer.d_head for layer in layers}) == 2


def test_qk_is_the_score_of_the_run(run):
    model, cache = run
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            want = scores_of_the_run(model, cache, layer, head)
            assert relative(scores_by_circuit(model, cache, layer, head), want) < EXACT


@pytest.mark.parametrize("wrong", ["no rotary", "q_norm", "k_norm", "ln1", "other kv head"])
def test_what_qk_must_not_leave_out(run, wrong):
    model, cache = run
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            lender = block.cfg.lender
            if wrong == "ln1":
                block.ln1.weight.fill_(1)
            elif wrong == "q_norm":
                block.attn.q_norm.weight.fill_(1)
            elif lender is None and wrong == "k_norm":
                block.attn.k_norm.weight.fill_(1)
            elif lender is None and wrong == "other kv head":
                d_head = block.cfg.d_head
                block.attn.w_k.copy_(block.attn.w_k.roll(d_head, 0))
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            got = scores_by_circuit(
                model, cache, layer, head, turned=wrong != "no rotary", circuit=other
            )
            assert relative(got, scores_of_the_run(model, cache, layer, head)) > OFF


def test_a_borrower_reads_keys_of_its_lenders_input(run):
    """The negative control: its own input, or its own ln1, gives other scores."""
    model, cache = run
    layer, lender = 4, 2
    assert model.cfg.layer(layer).lender == lender
    x, y = cache["resid_pre", layer][1], cache["resid_pre", layer][1]
    scales = qk_scales(cache, layer, 0)[1]
    own = torch.stack(
        [
            (x[q] @ model.QK(layer, 0, offset=q - k)) @ y[k] / scales[q, k]
            for q, k in pairs(model, layer)
        ]
    )
    assert relative(own, scores_of_the_run(model, cache, layer, 0)) > OFF


def test_scales_divide_and_their_axes_come_first(run):
    model, cache = run
    all_scales = qk_scales(cache, 1)  # [batch head pos kv_pos]
    assert all_scales.shape == (2, 4, 11, 11)
    torch.testing.assert_close(all_scales[:, 2], qk_scales(cache, 1, 2))
    torch.testing.assert_close(
        qk_scales(cache.apply_slice_to_batch_dim(1), 1, -1), all_scales[1, 3]
    )
    q, k = 5, 3
    by_head = model.QK(1, offset=q - k, scales=all_scales[1, :, q, k])
    assert by_head.shape == (4, 20, 20)
    x = cache["resid_pre", 1][1]
    want = cache["attn_scores", 1][1, :, q, k]
    assert relative((by_head @ x[k]) @ x[q], want) < EXACT
    assert relative((model.QK(1, offset=q - k) @ x[k]) @ x[q], want) > OFF
    one = model.QK(1, 2, offset=q - k, scales=all_scales[1, 2, q, k])
    torch.testing.assert_close(by_head[2].AB, one.AB)
    pair_axes = model.QK(1, 2, scales=all_scales[1, 2])
    assert pair_axes.shape == (11, 11, 20, 20)


def test_only_the_part_of_a_full_head_that_turns_is_turned(run):
    model, _ = run
    layer = next(layer.index for layer in model.cfg.layers if layer.kind == "full")
    block = model.blocks[layer]
    moved = (model.QK(layer, 0, offset=5).A - model.QK(layer, 0).A).abs().amax(0)
    half, turning = block.cfg.d_head // 2, int(block.cfg.d_head // 2 * block.cfg.rotary.fraction)
    assert (
        turning
        and bool((moved[:turning] > 0).all())
        and bool((moved[half : half + turning] > 0).all())
    )
    assert bool((moved[turning:half] == 0).all()) and bool((moved[half + turning :] == 0).all())
    torch.testing.assert_close(model.QK(layer, 0, offset=0).AB, model.QK(layer, 0).AB)


# -- OV -----------------------------------------------------------------------------------------------


def added_by_a_head_alone(model, cache, layer, head, unit, source, destination):
    """What `hook_attn_out` gains from a unit source when this head alone attends, there, with norms frozen.

    The stream entering the block whose values are read is the unit vector at the source; every scale is the clean run's.
    """
    reads = source_of(model, layer)

    def put_unit(resid, hook):
        resid[:, source] = unit

    def look_there(pattern, hook):
        pattern[:, head] = 0
        pattern[:, head, :, source] = 1

    def alone(z, hook):
        kept = z[:, :, head].clone()
        z.zero_()
        z[:, :, head] = kept

    def freeze(scale, hook):
        return cache[hook.name].clone()

    frozen = [
        f"blocks.{reads}.ln1.hook_scale",
        f"blocks.{reads}.attn.v_norm.hook_scale",
        f"blocks.{layer}.ln1_post.hook_scale",
    ]
    hooks = [
        (f"blocks.{reads}.hook_resid_pre", put_unit),
        (f"blocks.{layer}.attn.hook_pattern", look_there),
        (f"blocks.{layer}.attn.hook_z", alone),
        *((name, freeze) for name in frozen),
    ]
    with model.hooks(fwd_hooks=hooks):
        _, edited = model.run_with_cache(IDS, names_filter=f"blocks.{layer}.hook_attn_out")
    return edited["attn_out", layer][1, destination]


def test_ov_on_a_unit_source_is_what_a_run_adds(run):
    model, cache = run
    source, destination = 4, 7  # the pattern is edited, so neither window nor order matter
    unit = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit /= unit.norm()
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            got = added_by_a_head_alone(model, cache, layer, head, unit, source, destination)
            scales = ov_scales(cache, layer, head)[1, destination, source]
            circuit = model.OV(layer, head, scales=scales)
            assert relative(unit @ circuit, got) < EXACT
            # without the post-norm's gain; with another key/value head's values; with one scale left out
            flat = FactoredMatrix(circuit.A, circuit.B / model.blocks[layer].ln1_post.weight)
            assert relative(unit @ flat, got) > OFF
            swapped = model.OV(layer, (head + 2) % 4, scales=scales)
            assert relative(unit @ FactoredMatrix(swapped.A, circuit.B), got) > OFF
            assert relative(unit @ model.OV(layer, head), got) > OFF


def test_all_sources_and_heads_add_up_to_what_the_run_adds(run):
    """`pattern x source x OV`, summed, is `hook_attn_out`."""
    model, cache = run
    for layer in range(model.cfg.n_layers):
        x = cache["resid_pre", source_of(model, layer)]  # [batch kv_pos d_model]
        weights = cache["pattern", layer] / ov_scales(cache, layer)  # [batch head pos kv_pos]
        A, B = model.OV(layer).pair
        total = torch.einsum("bhqk,bkd,hdm,hme->bqe", weights, x, A, B)
        assert relative(total, cache["attn_out", layer]) < EXACT
        unscaled = torch.einsum("bhqk,bkd,hdm,hme->bqe", cache["pattern", layer], x, A, B)
        assert relative(unscaled, cache["attn_out", layer]) > OFF


def test_ov_does_not_hold_the_layer_scalar(run):
    model, _ = run
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.layer_scalar.mul_(3)
    for layer in range(model.cfg.n_layers):
        torch.testing.assert_close(other.OV(layer).AB, model.OV(layer).AB)


@pytest.mark.parametrize("seed", range(12))
def test_any_configuration(seed):
    """Both identities over all heads, sources and pairs; half of them share keys and values."""
    rng = random.Random(seed)
    config = random_config(rng, wrapper=False)
    while (config["num_kv_shared_layers"] == 0) != (seed % 2 == 0):
        config = random_config(rng, wrapper=False)
    model = HookedModel(HookedConfig.from_hf(config))
    randomise(model, seed)
    model.to(torch.float64)
    _, cache = model.run_with_cache(IDS[:1])
    for layer in range(model.cfg.n_layers):
        x, y = cache["resid_pre", layer][0], cache["resid_pre", source_of(model, layer)][0]
        scores = cache["attn_scores", layer][0]  # [head pos kv_pos]
        scales = qk_scales(cache, layer)[0]
        for offset in (-1, 0, 2):
            A, B = model.QK(layer, offset=offset).pair
            got = (x @ A) @ (B @ y.T) / scales
            seen = (scores.diagonal(-offset, 1, 2) > -1e30).flatten()
            want = scores.diagonal(-offset, 1, 2).flatten()[seen]
            if len(want):  # a causal model sees nothing ahead
                assert relative(got.diagonal(-offset, 1, 2).flatten()[seen], want) < EXACT
                wrong = (x @ model.QK(layer).A) @ (B @ y.T) / scales
                wrong = wrong.diagonal(-offset, 1, 2).flatten()[seen]
                assert offset == 0 or relative(wrong, want) > 1e-4
        weights = cache["pattern", layer][0] / ov_scales(cache, layer)[0]
        A, B = model.OV(layer).pair
        total = torch.einsum("hqk,kd,hdm,hme->qe", weights, y, A, B)
        assert relative(total, cache["attn_out", layer][0]) < EXACT


# -- both ---------------------------------------------------------------------------------------------


def test_dtype_is_float32_at_least():
    model = make("text")
    for dtype, wide in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        model.to(dtype)
        assert model.QK(1, 0, offset=2).A.dtype == model.OV(1).B.dtype == wide
    low = make("text").to(torch.bfloat16)
    again = copy.deepcopy(low).to(torch.float64)
    assert relative(low.OV(1, 2).AB.double(), again.OV(1, 2).AB) < 1e-6


def test_a_block_or_head_that_is_not_there(run):
    model, _ = run
    torch.testing.assert_close(model.OV(-1, -1).AB, model.OV(5, 3).AB)
    for circuit in (model.QK, model.OV):
        with pytest.raises(IndexError, match="block 1 has heads 0 to 3"):
            circuit(1, 4)
        with pytest.raises(IndexError, match="blocks 0 to 5"):
            circuit(6, 0)


def test_scales_of_a_run_that_did_not_keep_them(run):
    model, _ = run
    _, cache = model.run_with_cache(IDS, names_filter="blocks.*.hook_resid_pre")
    for scales in (qk_scales, ov_scales):
        with pytest.raises(KeyError, match=r"hook_scale\) was not kept"):
            scales(cache, 0, 0)


def test_circuits_of_all_blocks(run):
    model, _ = run
    for by_block, circuit in (
        (model.QK_for_attn_layers(), model.QK),
        (model.OV_for_attn_layers(), model.OV),
    ):
        layers, matrices = by_block
        assert layers == list(range(6)) and len(matrices) == 6
        torch.testing.assert_close(matrices[2][1].AB, circuit(2, 1).AB)


# -- composition --------------------------------------------------------------------------------------


def dense(model, layer, head, gains=True):
    """QK and OV of a head written out from the stored weights."""
    block = model.blocks[layer]
    source = model.blocks[source_of(model, layer)]
    d, kv = block.cfg.d_head, head // (4 // block.cfg.n_key_value_heads)
    rows = slice(kv * d, (kv + 1) * d)
    mine = slice(head * d, (head + 1) * d)

    def gain(weight):
        return torch.diag(weight if gains else torch.ones_like(weight))

    queries = (
        gain(block.attn.q_norm.weight) @ block.attn.w_q[mine] @ gain(block.ln1.weight)
    )  # [d_head d_model]
    keys = gain(source.attn.k_norm.weight) @ source.attn.w_k[rows] @ gain(source.ln1.weight)
    stored = source.attn.w_k if source.cfg.k_eq_v else source.attn.w_v
    values = stored[rows] @ gain(source.ln1.weight)
    written = gain(block.ln1_post.weight) @ block.attn.w_o[:, mine]
    return queries.T @ keys, (written @ values).T


def dense_scores(model, mode, gains=True):
    n, heads = model.cfg.n_layers, model.cfg.n_heads
    scores = torch.zeros(n, heads, n, heads, dtype=torch.float64)
    norm = torch.linalg.matrix_norm
    for later in range(n):
        read_at = later if mode == "Q" else source_of(model, later)
        for later_head in range(heads):
            looks, moves = dense(model, later, later_head, gains)
            reader = {"Q": looks, "K": looks.T, "V": moves}[mode]
            for earlier in range(read_at):
                for head in range(heads):
                    left = dense(model, earlier, head, gains)[1]
                    scores[earlier, head, later, later_head] = norm(left @ reader) / (
                        norm(left) * norm(reader)
                    )
    return scores


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_is_the_dense_one(run, mode):
    model, _ = run
    got = model.all_composition_scores(mode)
    assert got.shape == (6, 4, 6, 4)
    assert relative(got, dense_scores(model, mode)) < EXACT
    assert relative(got, dense_scores(model, mode, gains=False)) > OFF
    for other in {"Q", "K", "V"} - {mode}:
        assert relative(got, dense_scores(model, other)) > OFF


def test_a_borrower_composes_below_its_lender_only(run):
    """Keys and values of blocks 4 and 5 are block 2's: what blocks 2 to 4 write does not reach them, and a run says so."""
    model, _ = run
    queries, keys = model.all_composition_scores("Q"), model.all_composition_scores("K")
    assert bool((keys[2:, :, 4:] == 0).all()) and bool((keys[:2, :, 4:] > 0).all())
    assert bool((queries[:5, :, 5] > 0).all()) and bool((queries[4:, :, 4] == 0).all())

    def shift(attn_out, hook):
        attn_out += torch.arange(20, dtype=torch.float64)

    names = ["blocks.5.attn.hook_rot_k", "blocks.5.attn.hook_rot_q"]
    _, clean = model.run_with_cache(IDS, names_filter=names)
    for layer, reached in ((1, True), (2, False), (3, False), (4, False)):
        with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_attn_out", shift)]):
            _, moved = model.run_with_cache(IDS, names_filter=names)
        assert torch.equal(moved[names[0]], clean[names[0]]) != reached
        assert not torch.equal(moved[names[1]], clean[names[1]])


def test_composition_does_not_see_scales_but_sees_the_turn(run):
    model, _ = run
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            block.layer_scalar.mul_(3)
            block.ln1_post.weight.mul_(5)
            block.ln1.weight.mul_(-2)
    for mode in ("Q", "K", "V"):
        clean = model.all_composition_scores(mode)
        assert relative(other.all_composition_scores(mode), clean) < EXACT
        turned = relative(model.all_composition_scores(mode, offset=3), clean)
        assert turned == 0 if mode == "V" else turned > 1e-4


def test_what_annotations_forbid_is_refused_without_them_too(run):
    with pytest.raises(ValueError, match=r"mode is 'X'; use \"Q\", \"K\" or \"V\""):
        inspect.unwrap(circuits.all_composition_scores)(run[0], "X")
    with pytest.raises(ValueError, match="vector_type is 'w_e'; use \"OV\""):
        inspect.unwrap(SVDInterpreter._directions)(SVDInterpreter(run[0]), "w_e", 0, None)


def test_composition_as_a_table(run):
    scores = run[0].all_composition_scores("K")
    table = composition_table(scores)
    assert list(table.columns) == ["earlier", "later", "score"]
    assert len(table) == int((scores > 0).sum()) and table.score.is_monotonic_decreasing
    for _, row in table.iloc[[0, 7, -1]].iterrows():
        (l1, h1), (l2, h2) = (map(int, row[side][1:].split("H")) for side in ("earlier", "later"))
        assert scores[l1, h1, l2, h2] == row.score and l1 < l2
    assert len(composition_table(scores, top=5)) == 5


def test_blocks_of_one_kind_only():
    model = make("text", num_hidden_layers=2, layer_types=[S, "full_attention"])
    assert relative(model.all_composition_scores("V"), dense_scores(model, "V")) < EXACT


# -- singular vectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vector_type", ["OV", "w_in", "w_gate", "w_out"])
@pytest.mark.parametrize("layer", [0, 3])
def test_singular_vectors_are_the_dense_ones_through_the_unembedding(run, vector_type, layer):
    model, _ = run
    block = model.blocks[layer]
    head = 1 if vector_type == "OV" else None
    got = SVDInterpreter(model).get_singular_vectors(vector_type, layer, 3, head)
    assert got.shape == (101, 1, 3)
    matrix = {
        "OV": lambda: dense(model, layer, 1)[1],
        "w_in": lambda: block.mlp.w_in @ torch.diag(block.ln2.weight),
        "w_gate": lambda: block.mlp.w_gate @ torch.diag(block.ln2.weight),
        "w_out": lambda: block.mlp.w_out.T @ torch.diag(block.ln2_post.weight),
    }[vector_type]()
    vectors = torch.linalg.svd(matrix).Vh[:3]

    def as_logits(vectors, gain):
        logits = (vectors * gain) @ model.unembedding.T
        return (logits * logits.gather(1, logits.abs().argmax(1, keepdim=True)).sign()).T

    assert relative(got[:, 0], as_logits(vectors, model.ln_final.weight)) < 1e-8
    assert relative(got[:, 0], as_logits(vectors, 1)) > OFF
    plain = torch.linalg.svd(matrix / matrix.norm(dim=0)).Vh[:3]  # without the gains beside it
    assert relative(got[:, 0], as_logits(plain, model.ln_final.weight)) > OFF
    assert bool((got.amax(0) == got.abs().amax(0)).all())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("OV", 0), ValueError, '"OV" needs a head'),
        (("w_in", 0, 3, 1), ValueError, "an MLP has none"),
        (("OV", 0, 7, 1), ValueError, "OV of block 0 has 1 to 6"),
        (("w_out", 0, 0), ValueError, "has 1 to 20"),
        (("OV", 0, 1, 4), IndexError, "heads 0 to 3"),
        (("w_in", 6), IndexError, "blocks 0 to 5"),
    ],
)
def test_singular_vectors_that_are_not_there(run, arguments, error, message):
    with pytest.raises(error, match=message):
        SVDInterpreter(run[0]).get_singular_vectors(*arguments)


def test_the_shipped_model_composes_a_previous_token_head_with_the_heads_that_copy(tiny_model):
    """Keys of heads that repeat what followed read what heads that look one back wrote."""
    tokens = repeated_tokens(tiny_model, 4, 12, seed=0)
    previous = detect_head(tiny_model, tokens, "previous_token_head") > 0.8
    repeating = induction_scores(tiny_model, 4, 12) > 0.5
    best = composition_table(tiny_model.all_composition_scores("K"), top=4)
    for names, found in ((best.earlier, previous), (best.later, repeating)):
        assert all(bool(found[int(name[1]), int(name[3])]) for name in names)
        assert found.float().mean() < 0.5  # the control: most heads are none


def test_the_examples_run():
    ran = doctest.testmod(circuits, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
