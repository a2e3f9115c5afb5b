"""config.json in every spelling, read as transformers reads it, and saved so that every release reads it alike."""

import copy
import json
import random
import re

import pytest
import transformers
from fixtures import F_CONFIG, VERSION, random_config

from lens_gemma4 import ConfigError, HookedConfig

S, A = "sliding_attention", "full_attention"
# What the released 12B's file says, in the Hub's dialect.
TWELVE_B = {
    "model_type": "gemma4_unified",
    "text_config": {
        "model_type": "gemma4_unified_text",
        "vocab_size": 262_144,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ([S] * 5 + [A]) * 8,
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": 0,
        # Present in the file, and at values at which they change nothing.
        "attention_bias": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size_per_layer_input": 262_144,
    },
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 16,
        "pooling_kernel_size": 3,
    },
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640},
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
SMALL = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 90,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": [S, A, S, A],
}
HUB = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
BY_BLOCK = {
    "01": {"head_dim": 16, "num_key_value_heads": 1},
    "3": {"head_dim": 16, "num_key_value_heads": 1},
}


def small(**fields):
    return HookedConfig.from_hf(SMALL | fields)


def sizes(cfg):
    return [(layer.d_head, layer.n_key_value_heads) for layer in cfg.layers]


# -- the 12B ------------------------------------------------------------------------------------------


def test_the_12b_has_its_published_numbers():
    cfg = HookedConfig.from_hf(TWELVE_B)
    root = (
        cfg.n_layers,
        cfg.d_model,
        cfg.n_heads,
        cfg.n_key_value_heads,
        cfg.d_head,
        cfg.d_vocab,
        cfg.d_mlp,
    )
    assert root == (48, 3840, 16, 8, 256, 262_144, 15_360)
    assert (cfg.n_ctx, cfg.window_size, cfg.eps, cfg.output_logits_soft_cap) == (
        262_144,
        1024,
        1e-6,
        30.0,
    )
    assert (cfg.act_fn, cfg.tied, cfg.bidirectional, cfg.dtype_name) == (
        "gelu_pytorch_tanh",
        True,
        "vision",
        "bfloat16",
    )
    assert [layer.index for layer in cfg.layers if layer.kind == "full"] == [
        5,
        11,
        17,
        23,
        29,
        35,
        41,
        47,
    ]
    sliding, full = cfg.layer(0), cfg.layer(5)
    assert (sliding.d_head, sliding.n_key_value_heads, sliding.window, sliding.k_eq_v) == (
        256,
        8,
        1024,
        False,
    )
    assert (full.d_head, full.n_key_value_heads, full.window, full.k_eq_v) == (512, 1, None, True)
    assert (sliding.rotary.theta, sliding.rotary.fraction) == (1e4, 1.0)
    assert (full.rotary.theta, full.rotary.fraction) == (1e6, 0.25)
    assert (cfg.vision.patch_size, cfg.vision.d_patch, cfg.vision.d_vision) == (48, 6912, 3840)
    assert (cfg.audio.d_audio, cfg.n_kv_shared) == (640, 0)
    assert cfg.embed_scale == 3840**0.5


def test_what_a_missing_field_means_is_the_class_default_and_not_the_12b():
    cfg = HookedConfig.from_hf({"model_type": "gemma4_unified_text"})
    theirs = transformers.models.gemma4_unified.Gemma4UnifiedTextConfig().to_dict()
    names = {
        "n_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "d_mlp": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_key_value_heads": "num_key_value_heads",
        "d_head": "head_dim",
        "d_vocab": "vocab_size",
        "eps": "rms_norm_eps",
        "window_size": "sliding_window",
        "output_logits_soft_cap": "final_logit_softcapping",
        "bidirectional": "use_bidirectional_attention",
        "pad_token_id": "pad_token_id",
        "bos_token_id": "bos_token_id",
        "tied": "tie_word_embeddings",
    }
    assert {ours: getattr(cfg, ours) for ours in names} == {
        ours: theirs[name] for ours, name in names.items()
    }
    assert [f"{layer.kind}_attention" for layer in cfg.layers] == theirs["layer_types"]
    assert cfg.d_model != HookedConfig.from_hf(TWELVE_B).d_model


@pytest.mark.parametrize("seed", range(40))
def test_transformers_reads_the_same_sizes(seed):
    """What its own object says block by block, for a random file in a random dialect."""
    config = random_config(random.Random(seed))
    cfg = HookedConfig.from_hf(config)
    text = copy.deepcopy(config.get("text_config", config))
    theirs = transformers.models.gemma4_unified.Gemma4UnifiedTextConfig(**text)
    assert [f"{layer.kind}_attention" for layer in cfg.layers] == theirs.layer_types
    if VERSION >= (5, 15):
        blocks = [(block.head_dim, block.num_key_value_heads) for block in theirs.per_layer_config]
        assert sizes(cfg) == blocks
        modes = [layer.lender is not None for layer in cfg.layers]
        assert modes == [mode == "reuse" for mode in theirs.kv_sharing_modes]
    else:
        assert {
            size[0]
            for size, layer in zip(sizes(cfg), cfg.layers, strict=True)
            if layer.kind == "full"
        } == {theirs.global_head_dim}


# -- the two dialects ---------------------------------------------------------------------------------


def test_both_dialects_say_the_same():
    hub, by_block, both = (
        small(**HUB),
        small(attention_k_eq_v=True, per_layer_config=BY_BLOCK),
        small(**HUB, per_layer_config=BY_BLOCK),
    )
    assert sizes(hub) == [(8, 2), (16, 1), (8, 2), (16, 1)] == sizes(by_block) == sizes(both)


def test_padded_keys_are_numbers():
    wide = {"num_hidden_layers": 12, "layer_types": None}
    override = {"head_dim": 16}
    padded = small(**wide, per_layer_config={"05": override, "11": override})
    assert sizes(padded) == sizes(small(**wide, per_layer_config={"5": override, "11": override}))
    assert sizes(padded) == sizes(small(**wide, per_layer_config={5: override, 11: override}))
    assert sizes(padded)[5] == (16, 2) != sizes(padded)[4]


@pytest.mark.parametrize("uniform", [{}, None])
def test_an_empty_table_by_block_means_uniform_sizes_and_not_512(uniform):
    assert sizes(small(per_layer_config=uniform)) == [(8, 2)] * 4
    assert sizes(small())[1] == (512, 2)  # the Hub's dialect's default, where no table is present


def test_what_an_entry_lacks_is_the_global_value():
    table = {i: {"num_key_value_heads": 1} for i in (1, 3)}
    assert sizes(small(per_layer_config=table, attention_k_eq_v=True))[1] == (8, 1)


def test_global_key_value_heads_count_only_where_keys_are_values():
    assert sizes(small(**HUB))[1] == (16, 1)
    assert sizes(small(**HUB | {"attention_k_eq_v": False}))[1] == (16, 2)
    assert sizes(small(**HUB | {"num_global_key_value_heads": None}))[1] == (16, 2)


def test_only_what_is_stated_can_contradict():
    table = {"per_layer_config": BY_BLOCK, "attention_k_eq_v": True}
    assert sizes(small(**table, num_global_key_value_heads=1)) == sizes(small(**HUB))
    assert sizes(small(**table, global_head_dim=16)) == sizes(small(**HUB))


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"global_head_dim": 24}, "global_head_dim is 24"),
        ({"num_global_key_value_heads": 4}, "num_global_key_value_heads is 4"),
    ],
)
def test_contradicting_dialects_are_refused_naming_both(stated, named):
    with pytest.raises(ConfigError, match="per_layer_config gives full blocks") as error:
        small(**HUB | stated, per_layer_config=BY_BLOCK)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"1": {"head_dim": 16, "sliding_window": 3}}, r"overrides \['sliding_window'\]"),
        ({"1": {"skip": ["mlp"]}}, r"overrides \['skip'\]"),
        ({"4": {"head_dim": 16}}, "blocks are 0 to 3"),
        ({"-1": {"head_dim": 16}}, "blocks are 0 to 3"),
        ({"full_attention": {"head_dim": 16}}, "blocks are 0 to 3"),
        ({"1": {"head_dim": 16}}, "full blocks unlike sizes"),
        ({"0": {"head_dim": 16}}, "sliding blocks unlike sizes"),
        ({"1": {"head_dim": 16}, "01": {"head_dim": 24}}, "names block 1 twice"),
        ({"1": {"head_dim": None}}, "head_dim is None"),
        ({"1": 16}, "not an object"),
        ([{"head_dim": 16}], "not an object"),
    ],
)
def test_a_table_by_block_that_makes_no_sense_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        small(per_layer_config=table)


# -- blocks -------------------------------------------------------------------------------------------


def test_missing_layer_types_mean_five_sliding_one_full_and_the_last_is_full():
    kinds = [layer.kind for layer in small(layer_types=None, num_hidden_layers=14).layers]
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [5, 11, 13]
    assert small(layer_types=[A, S, S, S]).layer(-1).kind == "full"


def test_values_are_keys_in_full_blocks_only():
    assert [layer.k_eq_v for layer in small(**HUB).layers] == [False, True, False, True]
    assert not any(layer.k_eq_v for layer in small().layers)


def test_borrowers_borrow_from_the_last_unshared_block_of_their_type():
    cfg = small(
        num_hidden_layers=7,
        layer_types=[S, A, S, S, A, S, A],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    )
    assert [layer.lender for layer in cfg.layers] == [None, None, None, None, 1, 3, 1]
    assert [layer.d_mlp for layer in cfg.layers] == [96] * 4 + [192] * 3
    assert cfg.n_kv_shared == 3 and cfg.lenders() == {1, 3}


def test_double_wide_is_the_borrowers_alone():
    assert {layer.d_mlp for layer in small(use_double_wide_mlp=True).layers} == {96}


@pytest.mark.parametrize("shared", [3, 4, 5, -1, 1.5, None])
def test_sharing_that_leaves_nothing_to_borrow_is_refused(shared):
    with pytest.raises(ConfigError, match="num_kv_shared_layers is"):
        small(num_kv_shared_layers=shared)
    assert small(num_kv_shared_layers=2).n_kv_shared == 2


def test_a_block_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="blocks 0 to 3"):
        small().layer(4)
    assert small().layer(-1).index == 3


# -- what is refused, by name -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("enable_moe_block", True),
        ("hidden_size_per_layer_input", 256),
        ("hidden_activation", "silu"),
        ("rope_scaling", {"factor": 8}),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("num_experts", 8),
        ("quantization_config", {"quant_method": "gptq"}),
        ("use_bidirectional_attention", "audio"),
        ("num_hidden_layers", 0),
        ("hidden_size", "60"),
        ("vocab_size", True),
        ("sliding_window", None),
        ("rms_norm_eps", 0),
        ("final_logit_softcapping", 0.0),
        ("num_attention_heads", 3),
        ("tie_word_embeddings", None),
        ("is_causal", False),
    ],
)
@pytest.mark.parametrize("wrapper", [False, True])
def test_a_field_that_changes_the_computation_is_refused_by_name(field, value, wrapper):
    text = SMALL | {field: value}
    config = {"model_type": "gemma4_unified", "text_config": text} if wrapper else text
    if wrapper and field == "tie_word_embeddings":
        config["tie_word_embeddings"] = value
    named = {"num_attention_heads": "block 0 has 3 heads"}.get(field, field)
    with pytest.raises(ConfigError, match=named):
        HookedConfig.from_hf(config)


def test_the_same_fields_at_their_neutral_values_are_accepted():
    neutral = {
        "attention_bias": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "is_causal": True,
    }
    assert small(**neutral).layers == small().layers
    assert small(use_bidirectional_attention="all", is_causal=False).bidirectional == "all"


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({S: {"rope_theta": 1e4}}, "no rope_theta for full_attention"),
        ({A: {"rope_type": "proportional"}}, "no rope_theta for full_attention"),
        ({A: {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type of full_attention is 'yarn'"),
        (
            {A: {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0}},
            "rope factor of full_attention is 8.0",
        ),
        (
            {A: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 2}},
            "share of the head",
        ),
        ({A: {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({}, "no rope_theta"),
    ],
)
def test_another_rotary_is_refused(rope, message):
    usual = {S: {"rope_type": "default", "rope_theta": 1e4}} if A in rope else {}
    with pytest.raises(ConfigError, match=message):
        small(rope_parameters=usual | rope)


def test_a_fraction_counts_for_proportional_positions_only():
    def full(**rope):
        return (
            small(rope_parameters={S: {"rope_theta": 1e4}, A: {"rope_theta": 5e5, **rope}})
            .layer(1)
            .rotary
        )

    assert full(rope_type="proportional", partial_rotary_factor=0.5).fraction == 0.5
    assert full(rope_type="default", partial_rotary_factor=0.5).fraction == 1.0
    assert (
        full(rope_type="proportional").fraction == 1.0
    )  # the class default of 0.25 is for a missing table only
    assert small().layer(1).rotary.fraction == 0.25


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "llama", None, "gemma4_unified_vision"])
def test_another_model_type_is_refused_by_name(model_type):
    with pytest.raises(ConfigError, match=re.escape(repr(model_type))):
        HookedConfig.from_hf(SMALL | {"model_type": model_type})


@pytest.mark.parametrize("part", ["text_config", "vision_config", "audio_config"])
def test_a_part_of_another_family_is_refused_by_name(part):
    config = copy.deepcopy(F_CONFIG)
    config[part]["model_type"] = "gemma4_other"
    with pytest.raises(ConfigError, match=f"{part} is of model_type 'gemma4_other'"):
        HookedConfig.from_hf(config)


def test_media_sizes_that_contradict_themselves_are_refused():
    for part, fields, message in (
        ("vision_config", {"output_proj_dims": 31}, "output_proj_dims is 31"),
        ("vision_config", {"model_patch_size": 7}, "model_patch_size is 7"),
        ("vision_config", {"patch_size": 0}, "patch_size is 0"),
        ("audio_config", {"audio_samples_per_token": 21}, "audio_samples_per_token"),
    ):
        config = copy.deepcopy(F_CONFIG)
        config[part] |= fields
        with pytest.raises(ConfigError, match=message):
            HookedConfig.from_hf(config)


def test_a_wrapper_needs_its_text_config():
    with pytest.raises(ConfigError, match="needs a text_config"):
        HookedConfig.from_hf({"model_type": "gemma4_unified"})


def test_in_a_wrapper_the_top_level_says_whether_the_head_is_tied():
    inner = SMALL | {"tie_word_embeddings": False}
    assert HookedConfig.from_hf({"model_type": "gemma4_unified", "text_config": inner}).tied
    outer = {"model_type": "gemma4_unified", "text_config": SMALL, "tie_word_embeddings": False}
    assert not HookedConfig.from_hf(outer).tied
    assert not HookedConfig.from_hf(inner).tied


# -- files --------------------------------------------------------------------------------------------


def test_a_folder_a_file_and_its_content_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(F_CONFIG))
    assert (
        HookedConfig.from_hf(tmp_path).layers
        == HookedConfig.from_hf(tmp_path / "config.json").layers
    )
    assert HookedConfig.from_hf(tmp_path).layers == HookedConfig.from_hf(F_CONFIG).layers
    assert HookedConfig.from_hf(tmp_path).model_name == tmp_path.name


def test_the_given_dictionary_is_not_changed():
    given = copy.deepcopy(F_CONFIG)
    cfg = HookedConfig.from_hf(given)
    cfg.to_hf()["text_config"]["hidden_size"] = 1
    cfg.raw["text_config"]["hidden_size"] = 1
    assert given == F_CONFIG


def test_in_the_hubs_cache_the_name_is_the_models(tmp_path):
    """There config.json is a link into a folder of blobs."""
    cache = tmp_path / "models--google--gemma-4-12B"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "77").write_text(json.dumps(F_CONFIG))
    (snapshot / "config.json").symlink_to(cache / "blobs" / "77")
    assert HookedConfig.from_hf(snapshot).model_name == "gemma-4-12B"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "holds a list"), ("\xff", "is not JSON")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        HookedConfig.from_hf(tmp_path)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json at"):
        HookedConfig.from_hf(tmp_path)


# -- saving -------------------------------------------------------------------------------------------


def test_fields_that_are_not_understood_are_passed_on():
    config = copy.deepcopy(F_CONFIG) | {"initializer_range": 0.7, "my_note": {"a": [1]}}
    config["text_config"]["vocab_size_per_layer_input"] = 12
    saved = HookedConfig.from_hf(config).to_hf()
    assert saved["initializer_range"] == 0.7 and saved["my_note"] == {"a": [1]}
    assert saved["text_config"]["vocab_size_per_layer_input"] == 12
    assert saved["eoa_token_index"] == config["eoa_token_index"]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_saved_reads_as_what_was_read(seed):
    cfg = HookedConfig.from_hf(random_config(random.Random(seed)))
    again = HookedConfig.from_hf(json.loads(json.dumps(cfg.to_hf())))
    assert again == cfg
    assert again.to_hf() == cfg.to_hf()


def test_sizes_are_saved_in_the_hubs_words_which_every_release_reads():
    """A table by block beside them stops transformers 5.14."""
    text = small(attention_k_eq_v=True, per_layer_config=BY_BLOCK).to_hf()
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (16, 1)
    assert "per_layer_config" not in text
    uniform = small(per_layer_config={}).to_hf()
    assert (uniform["global_head_dim"], sizes(HookedConfig.from_hf(uniform))) == (8, [(8, 2)] * 4)


def test_what_the_hub_has_no_words_for_is_saved_by_block():
    table = {i: {"head_dim": 16, "num_key_value_heads": 1} for i in (1, 3)}
    text = small(per_layer_config=table).to_hf()
    assert text["per_layer_config"] == {str(i): entry for i, entry in table.items()}
    assert "global_head_dim" not in text
    assert sizes(HookedConfig.from_hf(text)) == [(8, 2), (16, 1)] * 2


def test_a_table_may_move_the_sliding_blocks_and_root_sizes_are_theirs():
    cfg = small(per_layer_config={i: {"head_dim": 12} for i in (0, 2)})
    assert sizes(cfg) == [(12, 2), (8, 2)] * 2
    assert (cfg.d_head, cfg.to_hf()["head_dim"], cfg.to_hf()["global_head_dim"]) == (12, 12, 8)
    assert HookedConfig.from_hf(cfg.to_hf()) == cfg


def test_the_window_of_a_model_that_sees_both_ways_is_saved_as_it_was_read():
    """transformers 5.10 saves half of it, and halves it again when it reads that."""
    assert small(use_bidirectional_attention="all", sliding_window=9).to_hf()["sliding_window"] == 9


def test_the_config_is_frozen():
    with pytest.raises(AttributeError):
        small().n_layers = 3
