"""What a TransformerLens user types exists here, or docs/coming_from.md says why not."""

import inspect
from pathlib import Path

import pytest
import torch

from lens_gemma4 import (
    ActivationCache,
    FactoredMatrix,
    HookedModel,
    SVDInterpreter,
    detect_head,
    evals,
)
from lens_gemma4.hooks import HookedRootModule, HookPoint

PAGE = Path(__file__).parent.parent / "docs" / "coming_from.md"

MODEL = {
    "from_pretrained": ["name_or_path", "device", "dtype", "revision", "hf_model", "device_map"],
    "forward": ["input", "return_type", "loss_per_token", "start_at_layer", "stop_at_layer"],
    "run_with_cache": [
        "names_filter",
        "device",
        "remove_batch_dim",
        "incl_bwd",
        "pos_slice",
        "return_cache_object",
    ],
    "run_with_hooks": ["fwd_hooks", "bwd_hooks", "reset_hooks_end", "clear_contexts"],
    "hooks": ["fwd_hooks", "bwd_hooks", "reset_hooks_end", "clear_contexts"],
    "generate": [
        *("input", "max_new_tokens", "stop_at_eos", "do_sample", "top_k", "top_p", "temperature"),
        "return_type",
    ],
    "generate_stream": ["input", "max_new_tokens"],
    "add_hook": ["name", "hook", "dir", "is_permanent", "level", "prepend"],
    "add_perma_hook": ["name", "hook", "dir"],
    "reset_hooks": ["clear_contexts", "direction", "including_permanent", "level"],
    "remove_all_hook_fns": ["direction", "including_permanent", "level"],
    "clear_contexts": [],
    "list_hooks": [],
    "hook_points": [],
    "add_caching_hooks": ["names_filter", "incl_bwd", "device", "remove_batch_dim", "cache"],
    "get_caching_hooks": ["names_filter", "incl_bwd", "device", "remove_batch_dim", "cache"],
    "cache_all": ["cache"],
    "cache_some": ["cache", "names"],
    "to_tokens": ["prepend_bos", "padding_side", "truncate"],
    "to_string": ["tokens"],
    "to_str_tokens": ["prepend_bos"],
    "to_single_token": ["string"],
    "to_single_str_token": [],
    "get_token_position": ["single_token", "input", "mode", "prepend_bos"],
    "set_tokenizer": ["tokenizer"],
    "input_to_embed": ["input"],
    "loss_fn": ["logits", "tokens", "attention_mask", "per_token"],
    "tokens_to_residual_directions": ["tokens"],
    "accumulated_bias": ["layer", "mlp_input", "include_mlp_biases"],
    "all_head_labels": [],
    "QK": [],
    "OV": [],
    "QK_for_attn_layers": [],
    "OV_for_attn_layers": [],
    "all_composition_scores": ["mode"],
    "set_use_attn_result": ["use_attn_result"],
    "set_use_split_qkv_input": ["use_split_qkv_input"],
    "set_use_attn_in": ["use_attn_in"],
    "set_use_hook_mlp_in": ["use_hook_mlp_in"],
    "state_dict": [],
    "load_state_dict": [],
    "tl_parameters": [],
    "tl_named_parameters": [],
    "to": [],
    "cuda": [],
    "cpu": [],
    "train": [],
    "eval": [],
}
PROPERTIES = ["W_E", "W_U", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out", "n_params_total"]
POINT = {
    "add_hook": ["hook", "dir", "is_permanent", "level", "prepend"],
    "add_perma_hook": ["hook", "dir"],
    "remove_hooks": ["dir", "including_permanent", "level"],
    "has_hooks": ["dir", "including_permanent", "level"],
    "clear_context": [],
    "layer": [],
}
ROOT = {
    "setup": [],
    "check_and_add_hook": ["hook_point", "hook_point_name", "hook"],
    "check_hooks_to_add": ["hook_point", "hook_point_name", "hook"],
    "run_with_hooks": ["fwd_hooks"],
    "hooks": ["fwd_hooks"],
    "reset_hooks": [],
}
# All of TransformerLens's ActivationCache, arguments in its order.
CACHE = {
    "to": ["device"],
    "remove_batch_dim": ["batch_size"],
    "toggle_autodiff": ["mode"],
    "apply_slice_to_batch_dim": ["batch_slice"],
    "keys": [],
    "values": [],
    "items": [],
    "__getitem__": ["key"],
    "__iter__": [],
    "__len__": [],
    "accumulated_resid": [
        *("layer", "incl_mid", "apply_ln", "pos_slice", "mlp_input", "return_labels"),
    ],
    "decompose_resid": [
        *("layer", "mlp_input", "mode", "apply_ln", "pos_slice", "incl_embeds", "return_labels"),
    ],
    "logit_attrs": [
        *("residual_stack", "tokens", "incorrect_tokens", "pos_slice", "batch_slice"),
        "has_batch_dim",
    ],
    "compute_head_results": [],
    "stack_head_results": ["layer", "return_labels", "incl_remainder", "pos_slice", "apply_ln"],
    "stack_activation": ["activation_name", "layer", "sublayer_type"],
    "get_neuron_results": ["layer", "neuron_slice", "pos_slice", "project_output_onto"],
    "stack_neuron_results": [
        *("layer", "pos_slice", "neuron_slice", "return_labels", "incl_remainder", "apply_ln"),
        *("project_output_onto", "mlp_input"),
    ],
    "apply_ln_to_stack": [
        *("residual_stack", "layer", "mlp_input", "pos_slice", "batch_slice", "has_batch_dim"),
        "recompute_ln",
    ],
    "get_full_resid_decomposition": [
        *("layer", "mlp_input", "expand_neurons", "apply_ln", "pos_slice", "return_labels"),
        "project_output_onto",
    ],
}
ABSENT_CACHE = [
    *("cache.logit_lens", "ssm_layers", "compute_ssm_effective_attention", "compute_ssm_state"),
]
MATRIX = {
    "svd": [],
    "norm": [],
    "make_even": [],
    "get_corner": ["k"],
    "collapse_l": [],
    "collapse_r": [],
    "unsqueeze": ["k"],
}
MATRIX_PROPERTIES = (
    "A B AB BA T U S V Vh eigenvalues ndim shape pair ldim mdim rdim has_leading_dims".split()
)
EVALS = {
    "sanity_check": ["model"],
    "evaluate": ["model", "truncate", "batch_size", "tokenizer"],
    "evaluate_on_dataset": ["model", "data_loader", "truncate"],
    "induction_loss": ["model", "tokenizer", "batch_size", "subseq_len", "prepend_bos"],
    "ioi_eval": ["model", "dataset", "batch_size", "num_samples", "tokenizer", "symmetric"],
    "IOIDataset": [
        *("tokenizer", "templates", "names", "nouns", "num_samples", "symmetric", "prepend_bos"),
        "seed",
    ],
}
# Not here; the page's table gives the reason of each.
ABSENT_EVALS = [
    "make_pile_data_loader",
    "make_wiki_data_loader",
    "make_owt_data_loader",
    "make_code_data_loader",
    "make_mmlu_data_loader",
    "mmlu_eval",
]
ABSENT = [
    "boot_transformers",
    "from_pretrained_no_processing",
    "enable_compatibility_mode",
    "process_weights",
    "fold_layer_norm",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "load_and_process_state_dict",
    "set_ungroup_grouped_query_attention",
    "get_residual",
    "hf_generate",
    "prepare_multimodal_inputs",
]
# Arguments of methods that are here, and that these do not take.
ABSENT_ARGUMENTS = {
    "forward": ["past_kv_cache", "tokens="],
    "from_pretrained": ["fold_ln", "n_devices", "tokenizer=", "hf_config_overrides"],
    "generate": ["verbose", "use_past_kv_cache", "freq_penalty", "eos_token_id"],
}


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (owner, name, parameters)
        for owner, table in ((HookedModel, MODEL), (HookPoint, POINT), (HookedRootModule, ROOT))
        for name, parameters in table.items()
    ],
)
def test_the_method_exists_with_these_parameters(owner, name, parameters):
    have = list(inspect.signature(getattr(owner, name)).parameters)
    assert set(parameters) <= set(have), f"{owner.__name__}.{name} takes {have}"


def test_the_tools_beside_the_model_take_what_they_take_there():
    for owner, table in ((FactoredMatrix, MATRIX), (evals, EVALS)):
        for name, parameters in table.items():
            have = list(inspect.signature(getattr(owner, name)).parameters)
            assert set(parameters) <= set(have), f"{name} takes {have}"
    matrix = FactoredMatrix(torch.ones(3, 2), torch.ones(2, 3))
    assert all(hasattr(matrix, name) for name in MATRIX_PROPERTIES)
    detect = list(inspect.signature(detect_head).parameters)
    assert detect == [
        *("model", "seq", "detection_pattern", "heads", "cache"),
        *("exclude_bos", "exclude_current_token", "error_measure"),
    ]
    singular = list(inspect.signature(SVDInterpreter.get_singular_vectors).parameters)
    assert singular[1:] == ["vector_type", "layer_index", "num_vectors", "head_index"]


def test_run_with_cache_documents_what_it_adds_to_the_generic_one():
    assert "names_filter" in inspect.signature(HookedRootModule.run_and_store).parameters


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_weight_exists(tiny_model, name):
    assert getattr(tiny_model, name) is not None


@pytest.mark.parametrize(
    "name", ["b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "W_pos", "W_E_pos", "b_U"]
)
def test_what_the_family_lacks_says_so(tiny_model, name):
    with pytest.raises(AttributeError, match="no biases in its blocks and no position matrix"):
        getattr(tiny_model, name)


@pytest.mark.parametrize("name", CACHE)
def test_the_cache_takes_what_it_takes_there(name):
    have = list(inspect.signature(getattr(ActivationCache, name)).parameters)[1:]
    assert have[: len(CACHE[name])] == CACHE[name], f"ActivationCache.{name} takes {have}"


@pytest.mark.parametrize("name", [*ABSENT, *ABSENT_EVALS, *ABSENT_CACHE])
def test_an_absent_method_is_on_the_page_with_its_reason(name):
    assert not hasattr(HookedModel, name), f"{name} exists now: move it to MODEL"
    assert not hasattr(evals, name), f"{name} exists now: move it to EVALS"
    assert not hasattr(ActivationCache, name.removeprefix("cache.")), f"{name} exists: to CACHE"
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and f"`{name}`" in line
    ]
    assert rows, f"the page does not say why there is no {name}"
    assert len(rows[0].split("|")[2].strip()) > 20, "a reason, not a dash"


@pytest.mark.parametrize("method", ABSENT_ARGUMENTS)
def test_an_absent_argument_is_on_the_page_and_an_error(method, tiny_model):
    rows = [line for line in PAGE.read_text().splitlines() if f"in `{method}`" in line]
    for name in ABSENT_ARGUMENTS[method]:
        assert any(f"`{name}`" in row for row in rows), (
            f"the page does not say why {method} has no {name}"
        )
        calls = {"forward": tiny_model, "generate": tiny_model.generate}
        call = calls.get(method, HookedModel.from_pretrained)
        with pytest.raises(TypeError, match=name.rstrip("=")):
            call("tiny", **{name.rstrip("="): 1})


def test_an_empty_list_says_so(tiny_model):
    with pytest.raises(ValueError, match="empty"):
        tiny_model([])


def test_saved_weights_can_be_read_by_whom_other_files_can(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path / "saved")
    (tmp_path / "plain").touch()
    weights = tmp_path / "saved" / "model.safetensors"
    assert weights.stat().st_mode == (tmp_path / "plain").stat().st_mode
