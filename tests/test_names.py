"""The table of names against the module tree, both vocabularies, short forms, and what messages say."""

import re

import pytest
from small import KINDS, build

from lens_gemma4 import names
from lens_gemma4.errors import HookNameError
from lens_gemma4.names import get_act_name

MODELS = {kind: build(kind) for kind in KINDS}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_table_and_module_tree_agree(kind):
    model = MODELS[kind]
    listed = [name for name, _ in names.points(model.cfg)]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(model.hook_dict)
    for name, row in names.points(model.cfg):
        assert model.hook_dict[name].name == name
        assert model.hook_dict[name].axes == row.axes
        assert model.get_submodule(name) is model.hook_dict[name]
    assert model.hook_points() == list(model.hook_dict.values())


@kinds
def test_every_standard_name_is_the_same_point(kind):
    model = MODELS[kind]
    seen = set()
    for name in model.hook_dict:
        for alias in names.aliases(name):
            assert alias not in seen
            seen.add(alias)
            assert model.hook_point(alias) is model.hook_dict[name]
            assert names.row_of(alias) is names.row_of(name)
    blocks = len({alias for alias in seen if alias.startswith("layers.3.")})
    assert blocks == sum(len(row.standard) for row in names.ROWS if row.in_block)


def test_the_contract_lists_these_standard_names():
    """Typed once more from the contract, so that a row that goes astray is seen."""
    expected = {
        "input_ids": "hook_tokens",
        "token_embeddings": "hook_embed",
        "layers.2.layer_input": "blocks.2.hook_resid_pre",
        "layers.2.attention_norm_output": "blocks.2.ln1.hook_out",
        "layers.2.self_attn.attention_queries": "blocks.2.attn.hook_rot_q",
        "layers.2.self_attn.attention_keys": "blocks.2.attn.hook_rot_k",
        "layers.2.self_attn.attention_values": "blocks.2.attn.v_norm.hook_out",
        "layers.2.self_attn.attention_scores": "blocks.2.attn.hook_attn_scores",
        "layers.2.self_attn.attention_probabilities": "blocks.2.attn.hook_pattern",
        "layers.2.self_attn.attention_head_outputs": "blocks.2.attn.hook_z",
        "layers.2.self_attn.attention_premix": "blocks.2.attn.hook_z",
        "layers.2.self_attn.attention_output": "blocks.2.hook_attn_out",
        "layers.2.layer_mid": "blocks.2.hook_resid_mid",
        "layers.2.mlp_norm_output": "blocks.2.ln2.hook_out",
        "layers.2.mlp_input": "blocks.2.ln2.hook_out",
        "layers.2.mlp.mlp_activation": "blocks.2.mlp.hook_act",
        "layers.2.mlp.mlp_neurons": "blocks.2.mlp.hook_post",
        "layers.2.mlp.mlp_output": "blocks.2.hook_mlp_out",
        "layers.2.layer_output": "blocks.2.hook_resid_post",
        "final_norm_output": "ln_final.hook_out",
        "lm_head_output": "hook_logits_raw",
        "logits": "hook_logits",
        "vision.patch_embeddings": "vision.hook_patch_embed",
        "vision.tower_output": "vision.hook_out",
        "projector.input": "vision.hook_out",
        "projector.output": "vision.projector.hook_out",
        "vision.image_features": "vision.hook_image_features",
    }
    assert {alias: names.canonical(alias) for alias in expected} == expected
    assert len(names.STANDARD) == len(expected)


def test_what_a_borrowing_block_lacks():
    model = MODELS["shared"]
    lacking = {"hook_k", "hook_v", "k_norm.hook_scale", "k_norm.hook_normalized", "k_norm.hook_out"}
    lacking |= {"v_norm.hook_scale", "v_norm.hook_normalized"}
    own = {
        n.removeprefix("blocks.1.attn.") for n in model.hook_dict if n.startswith("blocks.1.attn.")
    }
    for borrower, lender in ((3, 1), (4, 2), (5, 2)):
        prefix = f"blocks.{borrower}.attn."
        assert (
            own - {n.removeprefix(prefix) for n in model.hook_dict if n.startswith(prefix)}
            == lacking
        )
        for point in lacking:
            with pytest.raises(HookNameError, match=f"block {borrower} borrows .* block {lender}"):
                model.hook_point(prefix + point)
        for point in ("hook_rot_k", "v_norm.hook_out"):
            assert model.hook_point(prefix + point).layer() == borrower


@pytest.mark.parametrize(
    "name", ["vision.hook_out", "projector.output", "video.hook_pos_sum", "audio.norm.hook_scale"]
)
def test_media_points_of_a_text_only_model_say_so(name):
    with pytest.raises(HookNameError, match=r"gemma4_unified_text.*no (vision|audio) embedder"):
        MODELS["text"].hook_point(name)
    assert MODELS["wrapper"].hook_point(name)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("blocks.3.hook_resid_prr", "'blocks.3.hook_resid_pre'"),
        ("layers.3.layer_outptu", "'layers.3.layer_output'"),
        (
            "layers.2.self_attn.attention_probabilites",
            "'layers.2.self_attn.attention_probabilities'",
        ),
        ("final_norm_outptu", "'final_norm_output'"),
        ("hook_logit", "'hook_logits'"),
        ("blocks.4.hook_resid_pre", "blocks 0 to 3"),
        ("blocks.-5.hook_resid_pre", "blocks 0 to 3"),
        ("layers.17.layer_output", "blocks 0 to 3"),
        ("next_token_probs", "derived"),
        ("input_size", "derived"),
        ("", "no hook point ''"),
        ("blocks.1", "no hook point 'blocks.1'"),
        ("qqqqqqqq", "lens-gemma4 names"),
    ],
)
def test_messages(wrong, said):
    with pytest.raises(HookNameError) as raised:
        MODELS["text"].hook_point(wrong)
    assert said in str(raised.value)
    assert isinstance(raised.value, KeyError)


def test_negative_blocks_count_from_the_end():
    model = MODELS["text"]
    assert model.hook_point("blocks.-1.hook_resid_post") is model.blocks[3].hook_resid_post
    assert model.hook_point("layers.-4.layer_output") is model.blocks[0].hook_resid_post


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("resid_post", 5), "blocks.5.hook_resid_post"),
        (("resid_sum", 5), "blocks.5.hook_resid_sum"),
        (("pattern", 3), "blocks.3.attn.hook_pattern"),
        (("attn", 3), "blocks.3.attn.hook_pattern"),
        (("attn", 3, "attn"), "blocks.3.attn.hook_pattern"),
        (("attn_logits", 3), "blocks.3.attn.hook_attn_scores"),
        (("attn_scores", 3), "blocks.3.attn.hook_attn_scores"),
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("query", 6), "blocks.6.attn.hook_q"),
        (("key", 6), "blocks.6.attn.hook_k"),
        (("value", 6), "blocks.6.attn.hook_v"),
        (("rot_k", 6), "blocks.6.attn.hook_rot_k"),
        (("result", 6), "blocks.6.attn.hook_result"),
        (("pre", 2), "blocks.2.mlp.hook_pre"),
        (("mlp_pre", 2), "blocks.2.mlp.hook_pre"),
        (("mlp_post", 2), "blocks.2.mlp.hook_post"),
        (("pre_linear", 2), "blocks.2.mlp.hook_pre_linear"),
        (("mlp_out", 2), "blocks.2.hook_mlp_out"),
        (("attn_out", 2), "blocks.2.hook_attn_out"),
        (("out", 2, "attn"), "blocks.2.attn.hook_out"),
        (("out", 2, "mlp"), "blocks.2.mlp.hook_out"),
        (("scale", 4, "ln1"), "blocks.4.ln1.hook_scale"),
        (("normalized", 7, "ln2_post"), "blocks.7.ln2_post.hook_normalized"),
        (("scale", 4, "attn.q_norm"), "blocks.4.attn.q_norm.hook_scale"),
        (("embed",), "hook_embed"),
        (("tokens",), "hook_tokens"),
        (("logits",), "hook_logits"),
        (("scale",), "ln_final.hook_scale"),
        (("normalized",), "ln_final.hook_normalized"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("k6a",), "blocks.6.attn.hook_k"),
        (("pre5",), "blocks.5.mlp.hook_pre"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("blocks.1.hook_resid_mid",), "blocks.1.hook_resid_mid"),
        (("hook_embed",), "hook_embed"),
    ],
)
def test_short_forms(words, name):
    assert get_act_name(*words) == name
    template, _ = names.split(name)
    assert template in names.BY_NAME


def test_each_short_word_is_a_point_of_every_block():
    for word, point in names.SHORT.items():
        assert f"blocks.{{i}}.{point}" in names.BY_NAME, word


def test_short_forms_are_taken_as_names():
    model = MODELS["text"]
    assert list(model.matches(("pattern", -1))) == ["blocks.-1.attn.hook_pattern"]
    found = model.matches([("resid_post", 2), ("scale", 1, "ln1")])
    assert list(found) == ["blocks.2.hook_resid_post", "blocks.1.ln1.hook_scale"]
    with pytest.raises(HookNameError):
        model.matches(("resid_poost", 2))


@pytest.mark.parametrize(
    "pattern",
    [
        "blocks.*.hook_resid_post",
        "layers.*.layer_output",
        re.compile(r"\d\.hook_resid_post"),
        re.compile("layer_output$"),
    ],
)
def test_patterns_in_either_vocabulary(pattern):
    model = MODELS["text"]
    assert [point.name for point, _ in model.matches(pattern).values()] == [
        f"blocks.{i}.hook_resid_post" for i in range(4)
    ]


def test_no_filter_is_every_point_but_the_products_by_head():
    model = MODELS["wrapper"]
    left_out = set(model.hook_dict) - set(model.matches(None))
    assert left_out == {f"blocks.{i}.attn.hook_result" for i in range(4)}


@pytest.mark.parametrize(
    "filter",
    [
        "blocks.*.hook_resid_pots",
        re.compile("nothing"),
        lambda name: False,
        [],
        (),
        ["*resid_post", "*.nix"],
    ],
)
def test_a_filter_that_matches_nothing_is_an_error(filter):
    with pytest.raises(HookNameError, match="matches"):
        MODELS["text"].matches(filter)


@pytest.mark.parametrize("filter", [3, [3], 1.5, [None, 3]])
def test_a_filter_of_another_type_is_an_error(filter):
    with pytest.raises(TypeError):
        MODELS["text"].matches(filter)


def test_two_spellings_of_a_point_are_one_point_and_keep_the_promise_to_fire():
    model = MODELS["text"]
    spelt = [
        "blocks.*.hook_resid_pre",
        "layers.0.layer_input",
        "blocks.0.hook_resid_pre",
        "blocks.-4.hook_resid_pre",
        "*.hook_resid_pre",
    ]
    found = model.matches(spelt)
    assert [point.layer() for point, _ in found.values()] == [0, 1, 2, 3]
    assert [literal for _, literal in found.values()] == [True, False, False, False]


def test_a_hook_point_names_itself():
    model, other = MODELS["text"], MODELS["all"]
    point = model.blocks[1].hook_resid_mid
    assert model.matches(point) == {"blocks.1.hook_resid_mid": (point, True)}
    with pytest.raises(HookNameError, match="not one of this model's"):
        other.matches(point)


@kinds
def test_the_tree_shows_every_row_once_for_each_sort_of_block(kind):
    model = MODELS[kind]
    text = names.tree(model.cfg, "title")
    assert text.startswith("title\n")
    for row in names.ROWS:
        if not row.in_block and names.absent(row, model.cfg) is None:
            assert re.search(rf"^  {re.escape(row.name)}\*? ", text, re.M), row.name
    sorts = {names._sizes(layer) for layer in model.cfg.layers}
    assert text.count("    hook_resid_pre ") == len(sorts)
