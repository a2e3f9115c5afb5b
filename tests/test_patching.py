"""TransformerLens's patching functions against a hand-written loop of runs with hooks, in float64."""

import doctest
from functools import partial

import einops
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, jaxtyped
from small import hooked, inputs_for
from torch import Tensor

from lens_gemma4 import HookNameError, Unavailable, logit_difference, patch_loop, patching
from lens_gemma4.metrics import Logits

EXACT = 1e-9
CASES = ("shared", "shared, own values", "wrapper, shared", "text")

# By hand: the hook point, and the index of a cell in its value.
PLACES = {
    "resid_pre": ("hook_resid_pre", lambda pos: (slice(None), pos)),
    "resid_mid": ("hook_resid_mid", lambda pos: (slice(None), pos)),
    "attn_out": ("hook_attn_out", lambda pos: (slice(None), pos)),
    "mlp_out": ("hook_mlp_out", lambda pos: (slice(None), pos)),
    "attn_head_out_by_pos": ("attn.hook_z", lambda pos, head: (slice(None), pos, head)),
    "attn_head_q_by_pos": ("attn.hook_rot_q", lambda pos, head: (slice(None), pos, head)),
    "attn_head_k_by_pos": ("attn.hook_rot_k", lambda pos, head: (slice(None), pos, head)),
    "attn_head_v_by_pos": ("attn.v_norm.hook_out", lambda pos, head: (slice(None), pos, head)),
    "attn_head_pattern_by_pos": ("attn.hook_pattern", lambda head, to: (slice(None), head, to)),
    "attn_head_pattern_dest_src_pos": (
        "attn.hook_pattern",
        lambda head, to, source: (slice(None), head, to, source),
    ),
    "attn_head_out_all_pos": ("attn.hook_z", lambda head: (slice(None), slice(None), head)),
    "attn_head_q_all_pos": ("attn.hook_rot_q", lambda head: (slice(None), slice(None), head)),
    "attn_head_k_all_pos": ("attn.hook_rot_k", lambda head: (slice(None), slice(None), head)),
    "attn_head_v_all_pos": ("attn.v_norm.hook_out", lambda head: (slice(None), slice(None), head)),
    "attn_head_pattern_all_pos": ("attn.hook_pattern", lambda head: (slice(None), head)),
}


class Case:
    """A model, a corrupted call of two rows, and the cache of a clean one of the same shape."""

    def __init__(self, kind):
        self.model = hooked(kind)
        given = inputs_for(kind, torch.float64)
        if kind == "text":  # padded on the left, and longer than two windows
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            given["attention_mask"][1, :3] = 0
        self.ids = given.pop("input_ids")
        self.inputs = given
        text = self.ids < 80
        self.clean = torch.where(text, (self.ids * 7 + 3) % 77 + 3, self.ids)
        _, self.cache = self.model.run_with_cache(self.clean, **given)

    def by_hand(self, name, index, metric):
        """One cell of a table, written out."""
        point, at = PLACES[name]
        hook = f"blocks.{index[0]}.{point}"
        new = self.cache[hook]

        def put(value, hook):
            value[at(*index[1:])] = new[at(*index[1:])]
            return value

        return metric(self.model.run_with_hooks(self.ids, fwd_hooks=[(hook, put)], **self.inputs))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def plain():
    return Case("shared, own values")


@pytest.fixture(scope="module")
def ragged():
    """Its full blocks have one key/value head, the sliding ones two."""
    return Case("shared")


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 9]).mean()


def function(name):
    return getattr(patching, f"get_act_patch_{name}")


def some_cells(table, few):
    cells = (~table.isnan()).nonzero().tolist()
    return cells[:: max(1, len(cells) // few)]


@pytest.mark.parametrize("name", [name for name in PLACES if "dest_src" not in name])
def test_each_is_a_run_with_hooks_for_each_cell(case, name):
    table = function(name)(case.model, case.ids, case.cache, metric, **case.inputs)
    cells = some_cells(table, 14)
    want = torch.stack([case.by_hand(name, cell, metric) for cell in cells])
    got = torch.stack([table[tuple(cell)] for cell in cells])
    largest = want.abs().max()
    assert (got - want).abs().max() < EXACT * largest
    assert (got - want.roll(1)).abs().max() > 1e-4 * largest  # the control: neighbours differ


def test_shapes_are_transformer_lens_s(ragged):
    case = ragged
    model, (batch, pos) = case.model, case.ids.shape
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    kv = [layer.n_key_value_heads for layer in model.cfg.layers]
    assert batch > 1 and len(set(kv)) > 1
    for name in PLACES:
        if "dest_src" in name:
            continue
        table = function(name)(case.model, case.ids, case.cache, metric, **case.inputs)
        width = max(kv) if "_k_" in name or "_v_" in name else heads
        axes = [layers, pos] if "head" not in name else [layers, pos, width]
        axes = [layers, width, pos] if name == "attn_head_pattern_by_pos" else axes
        axes = [layers, width] if "all_pos" in name else axes
        assert list(table.shape) == axes, name
        if width == max(kv):  # a block with fewer key/value heads has nan beyond them
            by_head = table if "all_pos" in name else table[:, 0]
            assert (~by_head.isnan()).sum(1).tolist() == kv


def test_every_entry_of_a_pattern():
    """Every cell, on few blocks and positions."""
    case = Case("text")
    case.ids, case.clean, case.inputs = case.ids[:, :6], case.clean[:, :6], {}
    _, case.cache = case.model.run_with_cache(case.clean)
    name = "attn_head_pattern_dest_src_pos"
    table = function(name)(case.model, case.ids, case.cache, metric)
    assert table.shape == (4, 4, 6, 6)
    cells = [[1, head, to, source] for head in (0, 3) for to in (2, 5) for source in (0, 2, 4)]
    cells += [[3, 1, 5, 1], [0, 2, 4, 3]]
    want = torch.stack([case.by_hand(name, cell, metric) for cell in cells])
    got = torch.stack([table[tuple(cell)] for cell in cells])
    assert (got - want).abs().max() < EXACT * want.abs().max()
    assert (table.transpose(2, 3) - table).abs().max() > 1e-4  # the control: rows are queries


def test_an_entry_that_only_the_clean_run_sees():
    """The clean prompt has an image, whose tokens see later ones; the corrupted one has text there."""
    model = hooked("wrapper")
    clean = torch.tensor([[2, 5, 90, 90, 90, 90, 6, 7]])
    grid = torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])
    pixels = torch.rand(1, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, cache = model.run_with_cache(clean, pixel_values=pixels, image_position_ids=grid)
    corrupted = torch.tensor([[2, 5, 11, 12, 13, 14, 6, 7]])
    table = patching.get_act_patch_attn_head_pattern_dest_src_pos(model, corrupted, cache, metric)
    value = cache["pattern", 1]
    assert value[0, :, 3, 5].abs().max() > 1e-6

    def put(pattern, hook):
        pattern[:, 2, 3, 5] = value[:, 2, 3, 5]
        return pattern

    hook = ("blocks.1.attn.hook_pattern", put)
    want = metric(model.run_with_hooks(corrupted, fwd_hooks=[hook]))
    assert abs(table[1, 2, 3, 5] - want) < EXACT * table.abs().max()
    assert abs(want - metric(model(corrupted))) > 1e-6  # it does reach the end


def test_stacks_are_the_tables_together(ragged):
    case = ragged
    given = (case.model, case.ids[:, :7], case.model.run_with_cache(case.clean[:, :7])[1], metric)
    heads = case.model.cfg.n_heads
    for every, names, order in (
        ("block_every", ["resid_pre", "attn_out", "mlp_out"], None),
        ("attn_head_all_pos_every", "out q k v pattern".split(), "all_pos"),
        ("attn_head_by_pos_every", "out q k v pattern".split(), "by_pos"),
    ):
        stack = function(every)(*given, **case.inputs)
        assert len(stack) == len(names)
        for name, part in zip(names, stack, strict=True):
            one = name if order is None else f"attn_head_{name}_{order}"
            table = function(one)(*given, **case.inputs)
            if one == "attn_head_pattern_by_pos":
                table = table.transpose(1, 2)
            if order is not None:
                assert part.shape[-1] == heads and part[..., table.shape[-1] :].isnan().all()
                part = part[..., : table.shape[-1]]
            assert torch.equal(part.isnan(), table.isnan())
            difference = (part - table).nan_to_num().abs().max()
            assert difference < EXACT * table.nan_to_num().abs().max()


def test_queries_and_keys_before_and_after_their_rotation_are_the_same(plain):
    """TransformerLens patches the projections: on blocks with values of their own the effect is one and the same."""
    model = plain.model
    for short, name in (("q", "attn_head_q_by_pos"), ("k", "attn_head_k_by_pos")):
        fast = function(name)(model, plain.ids, plain.cache, metric)
        cells = patching.make_df_from_ranges([2, 3, 2], ["layer", "pos", "head"])
        setter = patching.layer_pos_head_vector_patch_setter
        slow = patching.generic_activation_patch(
            model, plain.ids, plain.cache, metric, setter, short, index_df=cells
        )
        want = fast[:2, :3, :2].flatten()
        assert (slow - want).abs().max() < EXACT * want.abs().max()


# -- metrics ------------------------------------------------------------------------------------------

ANSWERS = torch.tensor([4, 6])


@jaxtyped(typechecker=beartype)
def typed(logits: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, ""]:
    return logits[:, -1, 7].mean()


def recovery(logits, clean, corrupted):
    return (metric(logits) - corrupted) / (clean - corrupted)


METRICS = {
    "last row": lambda lg: lg[:, -1, :].log_softmax(-1)[:, 7].mean(),
    "answers": lambda lg: lg[torch.arange(len(lg)), -1, ANSWERS].mean(),
    "each prompt": lambda lg: lg[torch.arange(2), -1, ANSWERS] - lg[:, -1, 3],
    "some words": lambda lg: lg[..., [3, 4]].mean(),
    "gathered": lambda lg: lg[:, -1].gather(-1, ANSWERS[:, None]).mean(),
    "log-probabilities": lambda lg: lg.log_softmax(-1)[:, -2, 7].mean(),
    "softmax": lambda lg: torch.softmax(lg, dim=-1)[:, -1, 7].mean(),
    "sizes": lambda lg: lg[:, lg.size(1) - 1, 7].mean() * (len(lg.shape) == 3) + lg.shape[-1],
    "einops": lambda lg: einops.reduce(lg, "batch pos d_vocab -> batch d_vocab", "mean")[0, 7],
    "einsum": lambda lg: einops.einsum(lg, lg, "b p v, b p v -> b").mean(),
    "arithmetic": lambda lg: (2 * lg - lg / 3 + 1).mean(),
    "loss": lambda lg: torch.nn.functional.cross_entropy(lg[:, 2], ANSWERS),
    "squeezed": lambda lg: lg[0:1].squeeze(0)[-1, 7],
    "a float": lambda lg: lg[0, -1, 7].item(),
    "typed": typed,
    "partial": partial(recovery, clean=0.7, corrupted=0.2),
    "position in a tensor": lambda lg: lg[:, torch.tensor(3), torch.tensor([4, 6])].sum(),
    "mask": lambda lg: lg[torch.eye(2, lg.shape[1], dtype=torch.bool), 7].mean(),
    "both sides of a slice": lambda lg: lg[torch.arange(2), 1:3, ANSWERS][0, 1],
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_as_notebooks_write_them(plain, name):
    table = patching.get_act_patch_attn_out(plain.model, plain.ids, plain.cache, METRICS[name])
    cells = some_cells(table, 5)

    def whole(logits):
        assert type(logits) is Tensor
        return torch.as_tensor(METRICS[name](logits)).double().mean()

    want = torch.stack([plain.by_hand("attn_out", cell, whole) for cell in cells])
    got = torch.stack([table[tuple(cell)] for cell in cells])
    assert (got - want).abs().max() < EXACT * want.abs().max()
    assert len(set(got.tolist())) > 1  # the control: it is not one and the same number


def test_the_view_computes_no_more_than_it_is_asked_for(plain):
    seen = []

    def watched(logits):
        value = logits[:, -1, 7] - logits[torch.arange(2), logits.size(1) - 1, ANSWERS]
        seen.append("whole" in logits.__dict__)
        assert isinstance(logits, Tensor) and isinstance(logits, Logits) and logits.ndim == 3
        return value

    patching.get_act_patch_mlp_out(plain.model, plain.ids, plain.cache, watched)
    assert seen and not any(seen)
    view = Logits(plain.model, plain.model(plain.ids, stop_at_layer=plain.model.cfg.n_layers))
    view.log_softmax(-1)
    assert "whole" in view.__dict__  # the control: this one needs all of it


def test_several_metrics_indices_and_results(plain):
    given = (plain.model, plain.ids, plain.cache)
    alone = patching.get_act_patch_resid_pre(*given, metric)
    two = patching.get_act_patch_resid_pre(*given, {"mine": metric, "ours": logit_difference(7, 9)})
    assert torch.equal(two["mine"], alone)
    assert (two["ours"] - alone).abs().max() < EXACT * alone.abs().max()
    table, cells = patching.get_act_patch_resid_pre(*given, metric, return_index_df=True)
    assert len(cells) == table.numel() and list(cells.columns) == ["layer", "pos"]
    by_prompt = lambda lg: lg[:, -1, 7] - lg[:, -1, 9]  # noqa: E731
    found = patching.get_act_patch_resid_pre(*given, by_prompt, reduce="none")
    assert found.values.shape == (table.numel(), 2)
    assert (found.values.mean(1).view_as(table) - table).abs().max() < EXACT * table.abs().max()
    assert abs(found.baseline.mean() - metric(plain.model(plain.ids))) < EXACT
    assert found.values[:, 0].sub(found.values[:, 1]).abs().max() > 1e-3
    stacked = patching.get_act_patch_block_every(*given, by_prompt, baseline=True)
    assert list(stacked) == ["resid_pre", "attn_out", "mlp_out"]
    assert stacked["resid_pre"].names == found.names
    with pytest.raises(ValueError, match="reduce is 'sum'"):
        patching.get_act_patch_resid_pre(*given, metric, reduce="sum")


# -- caches -------------------------------------------------------------------------------------------


def test_caches_under_transformer_lens_s_names_and_without_a_batch(plain):
    model, ids = plain.model, plain.ids[:1]
    _, cache = model.run_with_cache(plain.clean[:1])
    want = patching.get_act_patch_mlp_out(model, ids, cache, metric)
    layers = range(model.cfg.n_layers)
    for other in (
        {("mlp_out", layer): cache["mlp_out", layer] for layer in layers},
        {f"mlp_out{layer}": cache["mlp_out", layer] for layer in layers},
        {f"blocks.{layer}.hook_mlp_out": cache["mlp_out", layer][0] for layer in layers},
        {f"layers.{layer}.mlp.mlp_output": cache["mlp_out", layer] for layer in layers},
        model.run_with_cache(plain.clean[:1])[1].remove_batch_dim(),
    ):
        assert torch.equal(patching.get_act_patch_mlp_out(model, ids, other, metric), want)
    # one clean prompt for several corrupted ones, as assignment broadcasts it
    both = patching.get_act_patch_mlp_out(model, plain.ids, cache, lambda lg: lg[0, -1, 7])
    alone = patching.get_act_patch_mlp_out(model, ids, cache, lambda lg: lg[0, -1, 7])
    assert (both - alone).abs().max() < EXACT * alone.abs().max()


def test_what_a_cache_lacks_is_named(plain):
    model = plain.model
    _, cache = model.run_with_cache(plain.clean, names_filter=["blocks.*.attn.hook_q"])
    with pytest.raises(HookNameError, match=r"names_filter=\['blocks\.\*\.attn\.hook_rot_q'\]"):
        patching.get_act_patch_attn_head_q_all_pos(model, plain.ids, cache, metric)
    with pytest.raises(HookNameError, match=r"holds no 'blocks\.0\.hook_resid_pre'"):
        patching.get_act_patch_resid_pre(model, plain.ids, {}, metric)
    for wrong in (plain.ids[:, :5], plain.ids.repeat(2, 1)[:3]):
        with pytest.raises(ValueError, match="same position"):
            patching.get_act_patch_attn_head_pattern_all_pos(model, wrong, plain.cache, metric)


def test_paths_are_pointed_elsewhere():
    for name in ("get_act_patch_direct_path", "get_act_patch_direct_path_all_sources"):
        with pytest.raises(Unavailable, match=r"paths\.path_patch"):
            getattr(patching, name)
    with pytest.raises(AttributeError, match="has no attribute 'get_act_patch_nothing'"):
        patching.get_act_patch_nothing


# -- the loop -----------------------------------------------------------------------------------------


def test_the_loop_takes_any_setter(plain):
    model = plain.model

    def half(corrupted, index, clean):
        _, pos = index
        corrupted = corrupted.clone()
        corrupted[:, pos] = (corrupted[:, pos] + clean[:, pos]) / 2
        return corrupted

    given = (model, plain.ids, plain.cache, lambda lg: lg[:, -1, 7])
    table, cells = patching.generic_activation_patch(
        *given, half, "attn_out", ("layer", "pos"), return_index_df=True
    )
    assert table.shape == (model.cfg.n_layers, plain.ids.shape[1]) and len(cells) == table.numel()

    def put(value, hook):
        return half(value, (2, 4), plain.cache["attn_out", 2])

    hook = ("blocks.2.hook_attn_out", put)
    want = model.run_with_hooks(plain.ids, fwd_hooks=[hook])[:, -1, 7].mean()
    assert abs(table[2, 4] - want) < EXACT * table.abs().max()
    whole = patching.generic_activation_patch(
        *given, patching.layer_pos_patch_setter, "attn_out", ("layer", "pos")
    )
    assert (whole - table).abs().max() > 1e-4  # the control: half is not all


SETTERS = {
    "attn_head_out_by_pos": (patching.layer_pos_head_vector_patch_setter, "z"),
    "attn_head_v_all_pos": (patching.layer_head_vector_patch_setter, "attn.v_norm.hook_out"),
    "attn_head_pattern_all_pos": (patching.layer_head_pattern_patch_setter, "pattern"),
    "attn_head_pattern_by_pos": (patching.layer_head_pos_pattern_patch_setter, "pattern"),
    "attn_head_pattern_dest_src_pos": (
        patching.layer_head_dest_src_pos_pattern_patch_setter,
        "pattern",
    ),
}


@pytest.mark.parametrize("name", SETTERS)
def test_the_loop_with_each_setter_is_its_fast_function(plain, name):
    setter, activation = SETTERS[name]
    ids, clean = plain.ids[:1, :3], plain.clean[:1, :3]
    _, cache = plain.model.run_with_cache(clean)
    axes = {
        "attn_head_out_by_pos": ("layer", "pos", "head"),
        "attn_head_pattern_by_pos": ("layer", "head_index", "dest_pos"),
        "attn_head_pattern_dest_src_pos": ("layer", "head_index", "dest_pos", "src_pos"),
    }.get(name, ("layer", "head"))
    fast = function(name)(plain.model, ids, cache, metric)
    slow = patching.generic_activation_patch(
        plain.model, ids, cache, metric, setter, activation, axes
    )
    assert torch.equal(fast.isnan(), slow.isnan())
    assert (fast - slow).nan_to_num().abs().max() < EXACT * slow.nan_to_num().abs().max()


def test_the_loop_leaves_out_what_a_block_does_not_have(plain):
    slow = patching.generic_activation_patch(
        *(plain.model, plain.ids[:, :4]),
        plain.model.run_with_cache(plain.clean[:, :4])[1],
        *(metric, patching.layer_head_vector_patch_setter, "k", ("layer", "head")),
    )
    borrowers = [layer.lender is not None for layer in plain.model.cfg.layers]
    assert any(borrowers) and slow.isnan().all(1).tolist() == borrowers


def test_the_loop_says_what_is_wrong(plain):
    given = (plain.model, plain.ids, plain.cache, metric, patching.layer_pos_patch_setter)
    cells = patching.make_df_from_ranges([1, 1], ["pos", "layer"])
    with pytest.raises(ValueError, match="one of the two"):
        patching.generic_activation_patch(*given, "attn_out")
    with pytest.raises(ValueError, match="begins with 'layer'"):
        patching.generic_activation_patch(*given, "attn_out", ("pos", "layer"))
    with pytest.raises(ValueError, match="begins with the layer"):
        patching.generic_activation_patch(*given, "attn_out", index_df=cells)
    with pytest.raises(ValueError, match="no axis 'position'"):
        patching.generic_activation_patch(*given, "attn_out", ("layer", "position"))
    with pytest.raises(HookNameError):
        patching.generic_activation_patch(*given, "attn_ot", ("layer", "pos"))


@pytest.mark.parametrize("module", [patching, patch_loop])
def test_examples_run(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
