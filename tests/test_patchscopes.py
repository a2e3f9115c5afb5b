"""A patched run is the run that one would write by hand with a hook, and wrong hooks give something else."""

import doctest
import inspect

import pytest
import torch
from small import KINDS, randomise

from lens_gemma4 import HookedConfig, HookedModel, patchscope, patchscopes
from lens_gemma4.lenses import project

SOURCE = torch.tensor([[2, 5, 6, 7, 8, 9]])
TARGET = torch.tensor([[2, 15, 16, 17]])
V = KINDS["text"]["vocab_size"]
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def build(kind="text", dtype=torch.float64):
    model = HookedModel(HookedConfig.from_hf(KINDS[kind]))
    randomise(model, seed=3)
    return model.to(dtype)


@pytest.fixture(scope="module", params=["text", "shared"])
def model(request):
    return build(request.param)


def by_hand(
    model,
    source_layer,
    target_layer,
    source_position=-1,
    target_position=-1,
    point="resid_post",
    **run,
):
    """One vector, one hook, one run."""
    name = f"blocks.{source_layer}.hook_{point}"
    _, cache = model.run_with_cache(SOURCE, names_filter=name, return_type=None)
    vector = cache[name][0, source_position]

    def write(resid, hook):
        resid[0, target_position] = vector

    return model.run_with_hooks(
        TARGET, fwd_hooks=[(f"blocks.{target_layer}.hook_{point}", write)], **run
    )


def in_order(scope, *pair):
    """Logits by token, of a scope that kept the whole vocabulary."""
    logits = scope.top_logits[pair]
    return torch.empty_like(logits).scatter_(-1, scope.top_ids[pair], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pair_is_the_run_by_hand_to_the_bit(dtype):
    model = build(dtype=dtype)
    given = {"source_layers": 1, "target_layers": 2, "top_k": V}
    scope = patchscope(model, SOURCE, TARGET, **given)
    stream = by_hand(model, 1, 2, stop_at_layer=model.cfg.n_layers)[:, -1]
    wanted = project(model, stream)[0].to(scope.top_logits.dtype)
    assert torch.equal(in_order(scope, 0, 0), wanted)
    for wrong in ((2, 2), (1, 1), (1, 3)):
        other = by_hand(model, *wrong, stop_at_layer=model.cfg.n_layers)[:, -1]
        assert not torch.equal(project(model, other)[0].to(wanted.dtype), wanted)


@pytest.mark.parametrize(
    ("point", "batch_size"), [("resid_pre", 16), ("resid_post", 1), ("resid_post", 3)]
)
def test_all_pairs_are_the_runs_by_hand(model, point, batch_size):
    places = {"source_position": 3, "target_position": 1}
    scope = patchscope(
        model, SOURCE, TARGET, point=point, batch_size=batch_size, top_k=V, tokens=7, **places
    )
    n = model.cfg.n_layers
    assert scope.top_ids.shape == (n, n, V) and scope.token_ranks.shape == (n, n, 1)
    for i, j in ((0, 0), (0, 2), (2, 0), (n - 1, 1)):
        wanted = by_hand(model, i, j, point=point, **places)[0, -1]
        torch.testing.assert_close(in_order(scope, i, j), wanted, **EXACT)
        assert (in_order(scope, j, i) - wanted).abs().max() > 1e-3 or i == j
    other = by_hand(model, 2, 0, point=point, source_position=2, target_position=1)[0, -1]
    assert (other - in_order(scope, 2, 0)).abs().max() > 1e-3


def test_leaving_a_block_is_entering_the_next(model):
    leaving = patchscope(model, SOURCE, TARGET, source_layers=[0, 1], target_layers=[0, 1])
    entering = patchscope(
        model, SOURCE, TARGET, source_layers=[1, 2], target_layers=[1, 2], point="resid_pre"
    )
    torch.testing.assert_close(leaving.top_logits, entering.top_logits, **EXACT)
    same_blocks = patchscope(
        model, SOURCE, TARGET, source_layers=[0, 1], target_layers=[0, 1], point="resid_pre"
    )
    assert not torch.allclose(leaving.top_logits, same_blocks.top_logits)


def test_above_the_last_lender_nothing_reaches_another_position():
    """Borrowers attend with keys and values of blocks that are behind them."""
    model = build("shared")  # blocks 3, 4 and 5 borrow
    scope = patchscope(model, SOURCE, TARGET, target_position=1, target_layers=[1, 2], top_k=V)
    clean = model(TARGET)[0, -1]
    torch.testing.assert_close(in_order(scope, 0, 1), clean, **EXACT)
    assert (in_order(scope, 0, 0) - clean).abs().max() > 1e-3


def test_a_prompts_own_vector_changes_nothing(model):
    scope = patchscope(model, TARGET, TARGET, top_k=V)
    logits = model(TARGET)[0, -1]
    for i in range(model.cfg.n_layers):
        torch.testing.assert_close(in_order(scope, i, i), logits, **EXACT)
    assert (in_order(scope, 0, 1) - logits).abs().max() > 1e-3


def test_the_last_block_says_what_the_source_says(model):
    scope = patchscope(model, SOURCE, TARGET, source_layers=-1, target_layers=-1, top_k=V)
    torch.testing.assert_close(in_order(scope, 0, 0), model(SOURCE)[0, -1], **EXACT)
    assert (in_order(scope, 0, 0) - model(TARGET)[0, -1]).abs().max() > 0.1


def test_rescaled_vectors_have_the_length_of_what_they_replace(model):
    kept = {}

    def keep(resid, hook):
        kept["out"] = resid.clone()

    given = {"source_layers": [0, 2], "target_layers": 1, "target_position": 1}
    _, source = model.run_with_cache(SOURCE)
    _, target = model.run_with_cache(TARGET)
    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", keep)]):
        patchscope(model, SOURCE, TARGET, rescale=True, **given)
    old = target["resid_post", 1][0, 1].norm()
    for row, layer in zip(kept["out"][:, 1], (0, 2), strict=True):
        torch.testing.assert_close(row.norm(), old, **EXACT)
        vector = source["resid_post", layer][0, -1]
        assert torch.cosine_similarity(row, vector, dim=0) > 1 - 1e-12
        assert (vector.norm() / old - 1).abs() > 0.01  # as it was it has another


def test_only_later_positions_answer(model):
    given = {"target_position": 2, "source_layers": 1, "target_layers": [0, 1], "top_k": V}
    clean = model(TARGET)[0]
    before = patchscope(model, SOURCE, TARGET, read_position=1, **given)
    assert not model.list_hooks()
    for j in range(2):
        torch.testing.assert_close(in_order(before, 0, j), clean[1], **EXACT)
    at = patchscope(model, SOURCE, TARGET, read_position=2, **given)
    assert (in_order(at, 0, 1) - clean[2]).abs().max() > 1e-3


def test_hooks_are_at_work():
    model = build()
    clean = patchscope(model, SOURCE, TARGET, source_layers=2, target_layers=1)
    with model.steer(0, torch.ones(model.cfg.d_model).double(), factor=3.0):
        steered = patchscope(model, SOURCE, TARGET, source_layers=2, target_layers=1)
    assert not torch.allclose(clean.top_logits, steered.top_logits)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"source_layers": 9}, IndexError, "blocks 0 to 3"),
        ({"target_layers": []}, ValueError, "no block is named"),
        ({"source_position": 6}, IndexError, "source_position is 6.*0 to 5"),
        ({"target_position": -5}, IndexError, "target_position is -5.*0 to 3"),
        ({"read_position": 4}, IndexError, "read_position is 4"),
        ({"batch_size": 0}, ValueError, "at least one row"),
        ({"top_k": 0}, ValueError, "1 to 101"),
        ({"source": SOURCE.repeat(2, 1)}, ValueError, "the source is 2 prompts"),
        ({"target": TARGET.repeat(3, 1)}, ValueError, "the target is 3 prompts"),
    ],
)
def test_what_cannot_be_run_is_refused(given, error, told):
    with pytest.raises(error, match=told):
        patchscope(build(), **{"source": SOURCE, "target": TARGET} | given)


def test_another_point_is_refused_without_annotations_too():
    with pytest.raises(ValueError, match="'resid_pre' or 'resid_post'"):
        inspect.unwrap(patchscope)(build(), SOURCE, TARGET, point="resid_mid")


def test_a_picture_may_be_the_source_and_not_the_target():
    model = build("wrapper", torch.float32)
    image = {
        "input_ids": torch.tensor([[2, 90, 90, 5]]),
        "pixel_values": torch.rand(1, 2, 12),
        "image_position_ids": torch.tensor([[[0, 0], [1, 0]]]),
    }
    given = {"source_layers": 0, "target_layers": 1}
    scopes = [patchscope(model, image, TARGET, source_position=p, **given) for p in (1, 2)]
    assert not torch.equal(scopes[0].top_logits, scopes[1].top_logits)
    with pytest.raises(ValueError, match=r"the target holds.*pixel_values"):
        patchscope(model, SOURCE, image, **given)


def test_tables_and_plots(tiny_model):
    scope = patchscope(
        tiny_model,
        "The capital of France is",
        "The language of Spain is",
        source_layers=[0, 7],
        target_layers=[2, 3, 7],
        tokens=" Paris",
        top_k=4,
        rescale=True,
    )
    table = scope.to_dataframe()
    assert len(table) == 2 * 3 * 5
    one = table[(table.source_layer == 7) & (table.target_layer == 3)]
    assert one[one.kind == "top"].logprob.tolist() == scope.top_logprobs[1, 1].tolist()
    assert one[one.kind == "asked"]["rank"].item() == scope.token_ranks[1, 1, 0]
    assert set(one.entropy) == {scope.entropy[1, 1].item()}
    trace = scope.plot("probability", scope.token_ids[0]).data[0]
    assert trace.z[1][2] == pytest.approx(scope.token_probs[1, 2, 0].item())
    assert trace.text[1][2] == " Paris" and trace.z[1][2] > 0.9 > trace.z[0][2]
    assert "from block 7, at block 3" in trace.customdata[1][1]
    assert scope.top(7, 7)[0][0] == " Paris"
    with pytest.raises(ValueError, match="block 1 at block 2 was not run"):
        scope.top(1, 2)


def test_the_examples_run():
    ran = doctest.testmod(patchscopes, extraglobs={"torch": torch, "HookedModel": HookedModel})
    assert ran.attempted and not ran.failed
