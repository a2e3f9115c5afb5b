"""Checkpoints in every spelling to the network and back; what does not fit is said, all of it, and nothing is guessed."""

import copy
import json
import random
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fixtures import F_CONFIG, F_SCALARS, make_checkpoint, make_f, p_inputs, random_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lens_gemma4 import CheckpointError, HookedConfig, HookedModel, loading
from lens_gemma4.model import Gemma4

ROOT = Path(__file__).parent.parent
TEXT_CONFIG = F_CONFIG["text_config"]
UNTIED = copy.deepcopy(F_CONFIG) | {"tie_word_embeddings": False}
BIDIRECTIONAL = copy.deepcopy(F_CONFIG)
BIDIRECTIONAL["text_config"] |= {"use_bidirectional_attention": "all", "sliding_window": 4}
EMBEDDING = "model.language_model.embed_tokens.weight"
SCALAR = "model.language_model.layers.2.layer_scalar"
CONFIGS = {
    "wrapper": F_CONFIG,
    "untied wrapper": UNTIED,
    "wrapper without media": {
        k: v for k, v in F_CONFIG.items() if k not in ("vision_config", "audio_config")
    },
    "wrapper, audio alone": {k: v for k, v in F_CONFIG.items() if k != "vision_config"},
    "text": TEXT_CONFIG,
    "untied text": TEXT_CONFIG | {"tie_word_embeddings": False},
    "values of their own": TEXT_CONFIG
    | {"attention_k_eq_v": False, "num_global_key_value_heads": None},
    "lent keys": TEXT_CONFIG | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One folder for each of `CONFIGS`, written by transformers; tests copy before they change."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(config, root / name, scalars=F_SCALARS)
        for name, config in CONFIGS.items()
    }


@pytest.fixture
def f(checkpoints, tmp_path):
    """A copy of the wrapper that a test may damage."""
    return Path(shutil.copytree(checkpoints["wrapper"], tmp_path / "f"))


def load(folder, **settings) -> Gemma4:
    cfg = HookedConfig.from_hf(folder)
    network = loading.on_meta(cfg)
    loading.read_checkpoint(Path(folder), cfg, network, **settings)
    network.match_dtype()
    return network


def in_transformers(folder, **settings):
    wrapper = "text_config" in json.loads((Path(folder) / "config.json").read_text())
    auto = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM
    return auto.from_pretrained(folder, **settings).eval()


def tensors(folder) -> dict[str, torch.Tensor]:
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def rewrite(folder, change) -> None:
    """The tensors as `change` leaves them, in one file."""
    stored = {key: value.clone() for key, value in tensors(folder).items()}
    change(stored)
    for file in Path(folder).glob("model*.safetensors*"):
        file.unlink()
    save_file(stored, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, change) -> None:
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@torch.no_grad()
def same_logits(ours, theirs) -> bool:
    inputs = p_inputs()
    return torch.equal(ours(**inputs), theirs(**inputs).logits)


# -- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_manifest_is_what_transformers_writes(checkpoints, name):
    written = {key: list(value.shape) for key, value in tensors(checkpoints[name]).items()}
    assert loading.manifest(HookedConfig.from_hf(checkpoints[name])) == written


@pytest.mark.parametrize("seed", range(12))
def test_the_manifest_is_what_transformers_writes_for_random_sizes(seed, tmp_path):
    config = random_config(random.Random(seed))
    make_checkpoint(config, tmp_path)
    written = {key: list(value.shape) for key, value in tensors(tmp_path).items()}
    assert loading.manifest(HookedConfig.from_hf(config)) == written


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_checkpoint_gives_transformers_logits(checkpoints, name):
    ours, theirs = load(checkpoints[name]), in_transformers(checkpoints[name])
    assert same_logits(ours, theirs)
    with torch.no_grad():
        ours.blocks[2].layer_scalar.mul_(1.01)
    assert not same_logits(ours, theirs)


def test_the_scalars_are_loaded(f):
    assert [block.layer_scalar.item() for block in load(f).blocks] == pytest.approx(F_SCALARS)


def in_memory_names(stored):
    """As transformers' modules are called, which some exporters write."""
    for key in list(stored):
        name = key.replace("model.vision_embedder.", "model.embed_vision.")
        name = name.replace(
            "model.embed_vision.embedding_projection",
            "model.embed_vision.multimodal_embedder.embedding_projection",
        )
        stored[name] = stored.pop(key)


def short_prefix(stored):
    for key in list(stored):
        stored[key.replace("model.language_model.", "model.")] = stored.pop(key)


def headless(stored):
    for key in list(stored):
        stored[key.removeprefix("model.")] = stored.pop(key)


def head_beside(stored):
    stored["lm_head.weight"] = stored[EMBEDDING].clone()


@pytest.mark.parametrize("change", [in_memory_names, short_prefix, headless, head_beside])
def test_other_spellings_of_the_names_are_read(checkpoints, f, change):
    rewrite(f, change)
    assert tensors(f).keys() != tensors(checkpoints["wrapper"]).keys()
    assert_same_weights(load(f), load(checkpoints["wrapper"]))


def test_a_text_only_config_reads_a_wrappers_text(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints["text"], tmp_path / "text"))
    before = load(folder)

    def lengthen(stored):
        for key in list(stored):
            stored[key.replace("model.", "model.language_model.", 1)] = stored.pop(key)

    rewrite(folder, lengthen)
    assert_same_weights(load(folder), before)


def assert_same_weights(ours, theirs):
    expected = dict(theirs.named_weights())
    assert dict(ours.named_weights()).keys() == expected.keys()
    for name, weight in ours.named_weights():
        assert torch.equal(weight, expected[name]), name


def test_sharded_files_are_read(checkpoints, tmp_path):
    theirs = in_transformers(checkpoints["wrapper"])
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    shutil.copy(checkpoints["wrapper"] / "config.json", tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(load(tmp_path), load(checkpoints["wrapper"]))


def test_one_whole_file_goes_before_an_index_as_in_transformers(f):
    (f / loading.INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "old.safetensors"}}))
    assert same_logits(load(f), in_transformers(f))


# -- the 12B's manifest -------------------------------------------------------------------------------


def test_the_12bs_manifest_is_generated_and_counts_its_parameters():
    script = runpy.run_path(str(ROOT / "weights" / "manifest.py"))
    assert script["FILE"].read_text() == script["text"](), "run python weights/manifest.py"
    listed = json.loads(script["FILE"].read_text())
    assert len(listed) == 677
    sizes = {name: torch.Size(entry["shape"]).numel() for name, entry in listed.items()}
    scalars = [name for name in sizes if name.endswith("layer_scalar")]
    assert len(scalars) == 48
    assert sum(sizes.values()) - len(scalars) == 11_959_730_176
    assert not any(
        "v_proj" in name for name in listed if ".layers.5." in name
    )  # keys are values there
    assert any("v_proj" in name for name in listed if ".layers.4." in name)


def test_the_12bs_manifest_fits_the_modules_that_transformers_builds():
    from transformers.models.gemma4_unified import Gemma4UnifiedConfig, modeling_gemma4_unified

    config = runpy.run_path(str(ROOT / "weights" / "manifest.py"))["CONFIG"]
    network = loading.on_meta(HookedConfig.from_hf(config))
    with torch.device("meta"):
        theirs = modeling_gemma4_unified.Gemma4UnifiedForConditionalGeneration(
            Gemma4UnifiedConfig(**copy.deepcopy(config))
        )
    shapes = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert len(loading.match(shapes, network)) == 677
    shapes["model.language_model.layers.5.self_attn.q_proj.weight"] = (4096, 3840)
    with pytest.raises(CheckpointError, match="1 of another shape"):
        loading.match(shapes, network)


# -- memory, dtype, device ----------------------------------------------------------------------------


def test_weights_are_frozen_and_tied_ones_exist_once(checkpoints):
    tied, untied = load(checkpoints["wrapper"]), load(checkpoints["untied wrapper"])
    assert not any(
        weight.requires_grad for network in (tied, untied) for weight in network.parameters()
    )
    assert tied.unembedding is tied.w_e and "w_u" not in tied.state_dict()
    assert untied.unembedding is untied.w_u and untied.w_u.data_ptr() != untied.w_e.data_ptr()
    assert not tied.training


def test_the_dtype_is_the_files_unless_another_is_asked_for(tmp_path):
    make_f(tmp_path, torch.bfloat16)
    assert load(tmp_path).dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float64).dtype == torch.float64
    edit_config(tmp_path, lambda config: config.update(dtype="float32"))
    assert (
        load(tmp_path).dtype == torch.float32
    )  # what config.json names goes before what is stored
    edit_config(tmp_path, lambda config: config.pop("dtype"))
    assert load(tmp_path).dtype == torch.bfloat16
    edit_config(tmp_path, lambda config: config.update(torch_dtype="torch.float32"))
    assert load(tmp_path).dtype == torch.float32
    assert {weight.dtype for _, weight in load(tmp_path).named_weights()} == {torch.float32}


def test_a_dtype_that_is_not_computed_with_is_refused(f):
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        load(f, dtype=torch.int8)
    edit_config(f, lambda config: config.update(dtype="float8_e4m3fn"))
    with pytest.raises(CheckpointError, match=r"'float8_e4m3fn'.*choose one with dtype="):
        load(f)
    assert load(f, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_is_transformers_cast(f, dtype):
    assert same_logits(load(f, dtype=dtype), in_transformers(f, dtype=dtype))


def test_float16_is_never_silent(tmp_path):
    make_f(tmp_path, torch.float16)
    with pytest.warns(UserWarning, match="float16 overflows"):
        HookedModel.from_pretrained(tmp_path)
    assert HookedModel.from_pretrained(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_writing_into_a_mapped_weight_does_not_reach_the_file(f):
    network = load(f)
    before = tensors(f)[EMBEDDING].clone()
    with torch.no_grad():
        network.w_e.add_(1)
    assert torch.equal(tensors(f)[EMBEDDING], before)
    assert not torch.equal(network.w_e, before)


MEASURE = """
    import json, sys
    from pathlib import Path
    import torch
    from lens_gemma4 import HookedConfig, loading

    def anonymous():
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    torch.set_num_threads(1)
    cfg = HookedConfig.from_hf(folder)
    network = loading.on_meta(cfg)
    before = anonymous()
    loading.read_checkpoint(folder, cfg, network, dtype=dtype)
    total = sum(float(weight[0].float().sum()) + float(weight[-1].float().sum()) for _, weight in network.named_weights())
    read = [weight.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).max() for weight in network.parameters()]
    print(json.dumps(anonymous() - before))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc"
)
def test_mapped_weights_take_no_memory_of_their_own(tmp_path):
    """Bound: 5 % of a 200 MB file. The control, a cast, needs a copy and takes more than the file."""
    config = TEXT_CONFIG | {
        "hidden_size": 384,
        "vocab_size": 200_000,
        "intermediate_size": 3072,
        "dtype": "bfloat16",
    }
    network = loading.on_meta(HookedConfig.from_hf(config))
    for name, weight in list(network.named_weights()):
        loading.put(network, name, torch.ones(weight.shape, dtype=torch.bfloat16))
    loading.save(network, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 180e6
    added = {}
    for dtype in ("bfloat16", "float32"):
        command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        added[dtype] = json.loads(done.stdout)
    assert added["bfloat16"] < 0.05 * size
    assert added["float32"] > size


ALONE = """
    import sys

    def refuse(event, arguments):
        if event.startswith("socket."):
            raise AssertionError(event)

    sys.addaudithook(refuse)
    from lens_gemma4 import HookedModel
    import torch

    model = HookedModel.from_pretrained(sys.argv[1])
    model(torch.tensor([[2, 5, 6]]))
    loaded = [name for name in sys.modules if name.split(".")[0] in ("huggingface_hub", "transformers")]
    assert not loaded, loaded
    model.save_pretrained(sys.argv[2])
    assert "huggingface_hub" not in sys.modules
"""


def test_a_folder_needs_no_socket_no_hub_client_and_no_transformers(checkpoints, tmp_path):
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(ALONE),
        str(checkpoints["wrapper"]),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# -- what does not fit --------------------------------------------------------------------------------


def refusal(folder, error=CheckpointError, **settings) -> str:
    with pytest.raises(error) as caught:
        load(folder, **settings)
    return str(caught.value)


def test_every_wrong_tensor_is_in_one_error(f):
    def damage(stored):
        del (
            stored["model.language_model.norm.weight"],
            stored["model.language_model.layers.3.mlp.up_proj.weight"],
        )
        stored["model.vision_embedder.pos_embedding"] = torch.zeros(16, 32)
        stored["model.language_model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        stored["model.language_model.layers.2.self_attn.v_proj.weight"] = torch.zeros(3)

    rewrite(f, damage)
    message = refusal(f)
    assert "2 missing:" in message and "model.language_model.norm.weight [60]" in message
    assert "model.language_model.layers.3.mlp.up_proj.weight [128, 60]" in message
    assert "1 of another shape:" in message
    assert "pos_embedding is [16, 32], config.json asks for [16, 2, 32]" in message
    assert "2 unexpected:" in message and "layers.9.mlp.up_proj.weight [2]" in message
    assert "layers.2.self_attn.v_proj.weight [3]" in message  # values are keys in that block


def test_a_long_list_is_cut_and_says_so(f):
    rewrite(f, lambda stored: [stored.pop(key) for key in list(stored) if "layers" in key])
    message = refusal(f)
    assert f"... and {6 * 14 - 2 - loading.MOST_LINES} more" in message  # two blocks have no v_proj


def test_a_missing_scalar_is_an_error_that_says_why_it_matters(f):
    rewrite(f, lambda stored: stored.pop(SCALAR))
    message = refusal(f)
    assert f"{SCALAR} [1]" in message and "saved parameters only" in message


def test_two_spellings_of_one_tensor_are_refused(f):
    rewrite(f, lambda stored: stored.update({"model.norm.weight": torch.zeros(60)}))
    assert "model.norm.weight [60]" in refusal(f)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(f):
    rewrite(f, lambda stored: stored.update({"lm_head.weight": stored[EMBEDDING] + 1e-3}))
    message = refusal(f)
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in message
    edit_config(f, lambda config: config.update(tie_word_embeddings=False))
    assert not torch.equal(load(f).w_u, load(f).w_e)


def test_an_untied_config_without_a_head_says_what_decides(f):
    edit_config(f, lambda config: config.update(tie_word_embeddings=False))
    message = refusal(f)
    assert "lm_head.weight [300, 60]" in message and "tie_word_embeddings is false" in message


@pytest.mark.parametrize("left", [0, 5, 40, 0.5, 0.999])
def test_a_truncated_file_is_refused(f, left):
    file = f / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(left * len(content)) if isinstance(left, float) else left])
    assert "is damaged or no safetensors file" in refusal(f)


@pytest.mark.parametrize("content", [b"\xff" * 4096, b"PK\x03\x04" + bytes(5000), b"{}" * 400])
def test_a_file_of_another_kind_is_refused(f, content):
    (f / "model.safetensors").write_bytes(content)
    assert "is damaged or no safetensors file" in refusal(f)


def test_a_git_lfs_pointer_is_told_apart(f):
    (f / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "git lfs pull" in refusal(f)


def split(folder, **placed) -> Path:
    """The checkpoint in two files with an index, `placed` entries of it overridden."""
    stored = tensors(folder)
    halves = [dict(list(stored.items())[:20]), dict(list(stored.items())[20:])]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    (folder / "model.safetensors").unlink()
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / loading.INDEX).write_text(json.dumps({"weight_map": weight_map | placed}))
    return folder


def test_an_index_that_is_whole_is_read(f, checkpoints):
    assert_same_weights(load(split(f)), load(checkpoints["wrapper"]))


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "sub/model.safetensors", 7]
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(f, name):
    save_file(tensors(f), f.parent / "elsewhere.safetensors")
    assert loading.INDEX in refusal(split(f, extra=name))


def test_an_index_that_names_a_missing_file_is_refused(f):
    (split(f) / "model-00002-of-00002.safetensors").unlink()
    assert "'model-00002-of-00002.safetensors', which is missing" in refusal(f)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": {}}}']
)
def test_an_index_that_is_none_is_refused(f, content):
    (split(f) / loading.INDEX).write_text(content)
    assert "is no index of safetensors files" in refusal(f)


def test_one_tensor_in_two_files_is_refused(f):
    file = split(f) / "model-00002-of-00002.safetensors"
    first = load_file(f / "model-00001-of-00002.safetensors")
    save_file(
        load_file(file)
        | {EMBEDDING: first.get(EMBEDDING, torch.zeros(1)), **dict(list(first.items())[:1])},
        file,
    )
    assert "and so does another file" in refusal(f)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model-q4.gguf"])
def test_other_formats_are_refused_by_name(f, name):
    (f / "model.safetensors").rename(f / name)
    message = refusal(f)
    assert name in message and "a pickle can run code" in message


def test_an_empty_download_is_refused(f):
    (f / "model.safetensors").unlink()
    assert "found no weights at all" in refusal(f)


def pack_to_bytes(stored):
    stored[SCALAR.replace("layer_scalar", "mlp.up_proj.weight")] = torch.zeros(
        128 * 30, 1, dtype=torch.uint8
    )


def scale_beside(stored):
    stored[SCALAR.replace("layer_scalar", "mlp.up_proj.weight_scale")] = torch.ones(128, 1)


def float8(stored):
    key = SCALAR.replace("layer_scalar", "mlp.up_proj.weight")
    stored[key] = stored[key].to(torch.float8_e4m3fn)


@pytest.mark.parametrize("change", [pack_to_bytes, scale_beside, float8])
def test_packed_weights_are_refused_as_quantised(f, change):
    rewrite(f, change)
    message = refusal(f)
    assert "a quantised checkpoint" in message and "mlp.up_proj.weight" in message


def test_a_quantised_config_is_refused(f):
    edit_config(
        f, lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"})
    )
    assert "quantization_config" in refusal(f, ValueError)


def test_another_model_type_is_refused(f):
    edit_config(f, lambda config: config.update(model_type="gemma3"))
    assert "'gemma3'" in refusal(f, ValueError)


# -- where checkpoints are ----------------------------------------------------------------------------


def test_tiny_is_the_shipped_one_unless_a_folder_of_that_name_stands_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = loading.resolve("tiny")
    assert (shipped / "config.json").is_file()
    (tmp_path / "tiny").mkdir()
    assert loading.resolve("tiny").resolve() == (tmp_path / "tiny").resolve() != shipped.resolve()


def test_what_is_neither_folder_nor_hub_id_says_so(tmp_path):
    for given in (tmp_path / "nothing", "no-owner", "a/b/c", ""):
        if given:
            with pytest.raises(FileNotFoundError, match="no folder"):
                loading.resolve(given)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        loading.resolve(tmp_path / "file")


def test_a_hub_id_is_found_in_the_cache_without_the_network(checkpoints, tmp_path):
    """The Hub client's own layout: a reference, a snapshot of links, blobs."""
    repo = tmp_path / "models--someone--gemma-small"
    snapshot, commit = repo / "snapshots" / ("0" * 40), "0" * 40
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    for file in checkpoints["wrapper"].iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repo / "blobs" / file.name)
    found = loading.resolve("someone/gemma-small", cache_dir=tmp_path, local_files_only=True)
    assert found.resolve() == snapshot.resolve()
    assert_same_weights(load(found), load(checkpoints["wrapper"]))
    model = HookedModel.from_pretrained(
        "someone/gemma-small", cache_dir=tmp_path, local_files_only=True
    )
    assert model.cfg.model_name == "gemma-small"
    with pytest.raises(
        OSError, match="'someone/gemma-small' is no folder here and could not be had"
    ):
        loading.resolve(
            "someone/gemma-small", revision="other", cache_dir=tmp_path, local_files_only=True
        )


def test_what_the_hub_client_is_asked_for(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **settings: asked.update(settings, name=name) or str(tmp_path),
    )
    loading.resolve("a/b", revision="r", token="t", cache_dir="c")
    assert {
        key: asked[key] for key in ("name", "revision", "token", "cache_dir", "local_files_only")
    } == {
        "name": "a/b",
        "revision": "r",
        "token": "t",
        "cache_dir": "c",
        "local_files_only": False,
    }
    from huggingface_hub.utils import filter_repo_objects

    offered = [
        "config.json",
        "model-00001-of-00002.safetensors",
        loading.INDEX,
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "processor_config.json",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/consolidated.safetensors",
        "README.md",
    ]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(offered, **patterns)) == offered[:7]


# -- a loaded transformers model ----------------------------------------------------------------------


def shared(hf_model, **settings) -> Gemma4:
    network = loading.on_meta(loading.config_of(hf_model))
    loading.share_storage(hf_model, network, **settings)
    network.match_dtype()
    return network


def fingerprint(hf_model):
    """Everything that sharing could change in a model."""
    return (
        {
            name: (id(p), p.data_ptr(), p.requires_grad, p._version)
            for name, p in hf_model.named_parameters()
        },
        {name: (id(b), b.data_ptr(), b._version) for name, b in hf_model.named_buffers()},
        [
            (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in hf_model.named_modules()
        ],
        hf_model.config.to_json_string(use_diff=False),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_transformers_models_storage_is_shared_and_nothing_in_it_changes(checkpoints, name):
    theirs = in_transformers(checkpoints[name]).train()
    before = fingerprint(theirs)
    ours = shared(theirs)
    assert fingerprint(theirs) == before
    pointers = {value.data_ptr() for value in theirs.state_dict().values()}
    assert {weight.data_ptr() for _, weight in ours.named_weights()} == pointers
    assert not any(weight.requires_grad for weight in ours.parameters())
    assert same_logits(ours, theirs.eval())
    with torch.no_grad():
        theirs.get_input_embeddings().weight[5] += 1
    assert same_logits(ours, theirs)  # one storage: the change is seen


def test_the_parts_of_a_model_are_shared_too(checkpoints):
    theirs = in_transformers(checkpoints["wrapper"])
    for part in (theirs.model, theirs.model.language_model):
        assert same_logits(shared(part), theirs)
    assert shared(theirs.model.language_model).cfg.model_type == "gemma4_unified_text"


def test_the_users_class_shares(checkpoints):
    theirs = in_transformers(checkpoints["wrapper"])
    model = HookedModel.from_pretrained(hf_model=theirs)
    assert model.w_e.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()
    assert model.tokenizer is None
    assert same_logits(model, theirs)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8])
def test_a_model_that_sees_both_ways_keeps_its_window(window):
    """transformers 5.10 holds half of it, and hands that out as the file's."""
    config = copy.deepcopy(BIDIRECTIONAL)
    config["text_config"]["sliding_window"] = window
    from transformers.models.gemma4_unified import Gemma4UnifiedConfig

    class Model:
        pass

    Model.config = Gemma4UnifiedConfig(**copy.deepcopy(config))
    read = loading.config_of(Model)
    assert read.window_size // 2 == window // 2  # the reach, w // 2 + 1, is what the mask uses
    assert read.window_size == window - window % 2


def test_a_config_made_in_memory_is_read():
    from transformers.models.gemma4_unified import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    text = {k: v for k, v in TEXT_CONFIG.items() if k not in ("model_type", "layer_types")}
    theirs = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**text)).eval()
    assert same_logits(shared(theirs), theirs)
    assert shared(theirs).cfg.model_name == "gemma4"


def test_a_head_that_was_tied_after_loading_is_shared_once(checkpoints):
    theirs = in_transformers(checkpoints["untied wrapper"])
    theirs.lm_head.weight = theirs.get_input_embeddings().weight
    ours = shared(theirs)
    assert ours.w_u.data_ptr() == ours.w_e.data_ptr()
    assert same_logits(ours, theirs)


def test_a_head_that_was_untied_after_loading_is_refused(checkpoints):
    theirs = in_transformers(checkpoints["wrapper"])
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach() + 1)
    with pytest.raises(CheckpointError, match="is not the embedding"):
        shared(theirs)


def test_what_cannot_be_shared_is_refused(checkpoints):
    theirs = in_transformers(checkpoints["wrapper"])
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16"):
        shared(theirs, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="device=meta"):
        shared(theirs, device="meta")
    assert shared(theirs, dtype=torch.float32, device="cpu").dtype == torch.float32
    theirs.model.language_model.norm.bfloat16()
    with pytest.raises(
        CheckpointError, match=r"\['torch.bfloat16', 'torch.float32'\] on \['cpu'\]"
    ):
        shared(theirs)
    with pytest.raises(CheckpointError, match=r"on \['meta'\]"):
        shared(in_transformers(checkpoints["text"]).to("meta"))
    quantised = in_transformers(checkpoints["text"])
    quantised.is_quantized = True
    with pytest.raises(CheckpointError, match="hf_model is quantised"):
        shared(quantised)


def test_a_model_whose_layers_were_replaced_is_refused_with_the_list(checkpoints):
    theirs = in_transformers(checkpoints["text"])
    theirs.model.layers[1].mlp.up_proj = torch.nn.Sequential(theirs.model.layers[1].mlp.up_proj)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.0\.weight"):
        shared(theirs)


# -- saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_loads_in_transformers_to_identical_logits(
    checkpoints, tmp_path, name, dtype
):
    theirs = in_transformers(checkpoints[name], dtype=dtype)
    loading.save(load(checkpoints[name], dtype=dtype), tmp_path)
    saved = in_transformers(tmp_path)
    assert saved.dtype == dtype
    assert type(saved) is type(theirs)
    ours = load(tmp_path)
    assert same_logits(ours, theirs) and same_logits(ours, saved)
    assert tensors(tmp_path).keys() == tensors(checkpoints[name]).keys()


@pytest.mark.parametrize("seed", range(6))
def test_random_ones_do_too_in_whatever_dialect_they_came(seed, tmp_path):
    config = random_config(random.Random(100 + seed))
    theirs = in_transformers(make_checkpoint(config, tmp_path / "theirs"))
    loading.save(load(tmp_path / "theirs"), tmp_path / "ours")
    assert same_logits(load(tmp_path / "ours"), theirs)
    assert same_logits(load(tmp_path / "theirs"), in_transformers(tmp_path / "ours"))


def test_sizes_by_block_are_saved_so_that_every_release_reads_them(checkpoints, tmp_path):
    """transformers 5.10 would read its default of 512 for the full blocks' heads."""
    folder = Path(shutil.copytree(checkpoints["wrapper"], tmp_path / "new"))

    def by_block(config):
        text = config["text_config"]
        del text["global_head_dim"], text["num_global_key_value_heads"]
        text["per_layer_config"] = {
            f"{i:02}": {"head_dim": 32, "num_key_value_heads": 1} for i in (2, 5)
        }

    edit_config(folder, by_block)
    loading.save(load(folder), tmp_path / "both")
    assert same_logits(load(folder), in_transformers(tmp_path / "both"))
    text = json.loads((tmp_path / "both" / "config.json").read_text())["text_config"]
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (32, 1)
    assert "per_layer_config" not in text  # beside the Hub's words it stops 5.14


def test_a_model_that_sees_both_ways_keeps_its_window_through_saving(tmp_path):
    theirs = in_transformers(make_checkpoint(BIDIRECTIONAL, tmp_path / "a"))
    loading.save(load(tmp_path / "a"), tmp_path / "b")
    loading.save(shared(in_transformers(tmp_path / "b")), tmp_path / "c")
    for folder in ("b", "c"):
        text = json.loads((tmp_path / folder / "config.json").read_text())["text_config"]
        assert text["sliding_window"] == BIDIRECTIONAL["text_config"]["sliding_window"]
    assert same_logits(load(tmp_path / "c"), theirs)


def test_shards_are_no_larger_than_asked_and_their_index_is_whole(checkpoints, tmp_path):
    network = load(checkpoints["wrapper"])
    loading.save(network, tmp_path, max_shard_size="100KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3 and not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / loading.INDEX).read_text())
    for file in files:
        with safe_open(file, "pt") as opened:
            assert all(index["weight_map"].pop(key) == file.name for key in opened.keys())  # noqa: SIM118
            held = sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
            assert held <= 100_000
            assert opened.metadata() == {"format": "pt"}
    assert not index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        weight.nbytes for _, weight in network.named_weights()
    )
    assert same_logits(load(tmp_path), in_transformers(tmp_path))


@pytest.mark.parametrize("size", ["5 apples", "", "-1GB", 0, "0MB"])
def test_a_size_that_is_none_is_refused(checkpoints, tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size is"):
        loading.save(load(checkpoints["text"]), tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("size", "count"), [(7, 7), ("7", 7), ("2KB", 2000), ("1.5 MB", 1_500_000), ("1GiB", 2**30)]
)
def test_sizes_are_read(size, count):
    assert loading._bytes(size) == count


def test_saving_over_a_sharded_checkpoint_leaves_none_of_its_files(checkpoints, tmp_path):
    loading.save(load(checkpoints["untied wrapper"]), tmp_path, max_shard_size="100KB")
    for name in ("tokenizer.json", "model-card.md", "model-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    loading.save(load(checkpoints["text"]), tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "model-card.md",
        "model-mine.safetensors",
    }
    assert same_logits(load(tmp_path), in_transformers(checkpoints["text"]))


def test_a_checkpoint_may_be_saved_over_itself(f, checkpoints):
    network = load(f)  # its weights lie on the map of the file that is replaced
    loading.save(network, f)
    assert_same_weights(load(f), load(checkpoints["wrapper"]))
    assert_same_weights(network, load(checkpoints["wrapper"]))


@pytest.mark.parametrize("stop_at", ["_write_shard", "_config_json", "_replace"])
def test_an_unfinished_write_leaves_the_old_checkpoint_whole(f, checkpoints, monkeypatch, stop_at):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, stop_at, stop)
    with pytest.raises(KeyboardInterrupt):
        loading.save(load(checkpoints["untied wrapper"]), f)
    monkeypatch.undo()
    assert_same_weights(load(f), load(checkpoints["wrapper"]))
    assert not list(f.glob(".saving-*"))


def test_a_folder_is_no_checkpoint_while_files_are_moved_into_it(
    checkpoints, tmp_path, monkeypatch
):
    loading.save(load(checkpoints["wrapper"]), tmp_path)
    moves = []

    def stop(self, target):
        moves.append(target)
        if len(moves) > 2:
            raise OSError("disk full")
        return original(self, target)

    original = Path.replace
    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(OSError, match="disk full"):
        loading.save(load(checkpoints["wrapper"]), tmp_path, max_shard_size="100KB")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        HookedConfig.from_hf(tmp_path)


def test_where_nothing_can_be_saved(checkpoints, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        loading.save(load(checkpoints["text"]), tmp_path / "file")
    with pytest.raises(ValueError, match="holds no weights yet"):
        loading.save(loading.on_meta(HookedConfig.from_hf(F_CONFIG)), tmp_path / "out")


def test_the_saved_config_names_the_dtype_everywhere_and_no_path(checkpoints, tmp_path):
    theirs = in_transformers(checkpoints["wrapper"])
    loading.save(shared(theirs.bfloat16()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parts = [config] + [part for part in config.values() if isinstance(part, dict)]
    assert {part.get("dtype", "bfloat16") for part in parts} == {"bfloat16"}
    assert config["dtype"] == "bfloat16"
    assert str(checkpoints["wrapper"]) not in json.dumps(config)


def test_one_storage_under_two_names_is_saved_twice(checkpoints, tmp_path):
    theirs = in_transformers(checkpoints["untied wrapper"])
    theirs.lm_head.weight = theirs.get_input_embeddings().weight
    loading.save(shared(theirs), tmp_path)
    assert same_logits(load(tmp_path), theirs)
    assert "lm_head.weight" in tensors(tmp_path)


# -- conversion ---------------------------------------------------------------------------------------


def test_conversion_is_a_cast_of_what_is_stored(f, tmp_path):
    """A file may hold float32 under a config that says bfloat16: converting to float32 must not round."""
    edit_config(f, lambda config: config.update(dtype="bfloat16"))
    (f / "tokenizer.json").write_text("{}")
    exact = loading.convert(f, tmp_path / "exact", dtype=torch.float32)
    stored = tensors(f)
    assert all(torch.equal(value, stored[key]) for key, value in tensors(exact).items())
    assert tensors(exact).keys() == stored.keys()
    default = loading.convert(f, tmp_path / "default")
    assert all(
        torch.equal(value, stored[key].bfloat16()) for key, value in tensors(default).items()
    )
    assert not torch.equal(tensors(default)[EMBEDDING].float(), stored[EMBEDDING])
    assert (default / "tokenizer.json").read_text() == "{}"


def test_conversion_writes_one_spelling_whatever_it_read(f, checkpoints, tmp_path):
    rewrite(f, in_memory_names)
    target = loading.convert(f, tmp_path / "out", max_shard_size="100KB")
    assert tensors(target).keys() == tensors(checkpoints["wrapper"]).keys()
    assert same_logits(load(f), in_transformers(target))


def test_a_source_is_not_converted_into_itself(f):
    with pytest.raises(ValueError, match="is the source itself"):
        loading.convert(f, f.parent / "x" / ".." / "f")
    assert load(f) is not None


def test_the_script_converts(f, tmp_path):
    script = [
        sys.executable,
        str(ROOT / "weights" / "convert.py"),
        str(f),
        str(tmp_path / "out"),
        "--dtype",
        "bfloat16",
    ]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out")
    assert load(tmp_path / "out").dtype == torch.bfloat16
    assert same_logits(load(tmp_path / "out"), in_transformers(tmp_path / "out"))
