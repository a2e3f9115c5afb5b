"""Checkpoints to networks and back. Weights are stored as transformers stores them: loading is renaming.

A network is built on the meta device and each weight put in its place, straight from the file's memory map
where dtype and device allow it, so nothing is held twice.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from lens_gemma4.config import HookedConfig
from lens_gemma4.model import Gemma4

INDEX = "model.safetensors.index.json"
DOWNLOADED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "tokenizer*")
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
MOST_LINES = 30  # of a list of wrong tensors

_NORMS = {
    "ln1": "input_layernorm",
    "ln1_post": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ln2_post": "post_feedforward_layernorm",
}
IN_BLOCK = {
    "layer_scalar": "layer_scalar",
    **{f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _NORMS.items()},
    **{f"attn.w_{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    "mlp.w_gate": "mlp.gate_proj.weight",
    "mlp.w_in": "mlp.up_proj.weight",
    "mlp.w_out": "mlp.down_proj.weight",
}
TEXT = {"w_e": "embed_tokens.weight", "ln_final.weight": "norm.weight"}
# On disk the image embedder is `vision_embedder`, in memory `embed_vision`; its projection moves as well.
PIXELS = {
    **{f"{norm}.{part}": f"{norm}.{part}" for norm in ("patch_ln1", "patch_ln2", "pos_norm") for part in ("weight", "bias")},
    "w_patch": "patch_dense.weight",
    "b_patch": "patch_dense.bias",
    "w_pos": "pos_embedding",
}


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of a kind this package does not read."""


def spellings(name: str) -> tuple[str, ...]:
    """Every name under which transformers keeps one of our weights; the first is the wrapper's on disk.

    >>> spellings("blocks.3.mlp.w_in")
    ('model.language_model.layers.3.mlp.up_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    if name == "w_u":
        return ("lm_head.weight",)
    if name == "audio.w_out":
        return ("model.embed_audio.embedding_projection.weight",)
    if name == "vision.projector.w_out":
        return (
            "model.embed_vision.embedding_projection.weight",
            "model.embed_vision.multimodal_embedder.embedding_projection.weight",
        )
    if name.startswith("vision."):
        theirs = PIXELS[name.removeprefix("vision.")]
        return (f"model.vision_embedder.{theirs}", f"model.embed_vision.{theirs}")
    found = re.match(r"blocks\.(\d+)\.(.+)", name)
    theirs = f"layers.{found[1]}.{IN_BLOCK[found[2]]}" if found else TEXT[name]
    return (f"model.language_model.{theirs}", f"model.{theirs}")


def disk_name(name: str, cfg: HookedConfig) -> str:
    """The name to save one of our weights under."""
    names = spellings(name)
    return names[0] if cfg.is_wrapper else names[-1]


# -- where checkpoints are ----------------------------------------------------------------------------


def shipped_checkpoint() -> Path:
    """The folder of the checkpoint that ships with the package."""
    here = Path(__file__).parent
    for folder in (here / "_tiny", here.parent / "weights" / "tiny"):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError("the shipped checkpoint is not in this installation: reinstall lens-gemma4")


def resolve(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a checkpoint: a folder as it is, "tiny", or a Hub id downloaded or from the cache.

    Raises:
        FileNotFoundError: no such folder, and no Hub id either.
        OSError: the Hub does not have it, does not let you, or cannot be reached; the message says which.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if str(name_or_path) == "tiny":
        return shipped_checkpoint()
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights")
    if isinstance(name_or_path, Path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)):
        raise FileNotFoundError(f"no folder {path}, and {str(name_or_path)!r} is no Hub id of the form owner/name")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(name_or_path),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=list(DOWNLOADED),
            )
        )
    except Exception as error:  # whatever the network stack raises, in words that say what to do
        raise OSError(
            f"{name_or_path!r} is no folder here and could not be had from the Hub: {type(error).__name__}: {error}\n"
            "  Check the id, log in with `hf auth login` when the model is gated, or give a folder."
        ) from error


# -- reading ------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index when it is in several.

    Raises:
        CheckpointError: none; only pickles; an index that names a missing file or one outside the folder.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
        for name in files:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is not a file of this folder")
            if not (folder / name).is_file():
                raise CheckpointError(f"{index} names {name!r}, which is missing: the download may be incomplete")
        return [folder / name for name in files]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf"))
    raise CheckpointError(
        f"{folder} holds no model.safetensors and no {INDEX}; found {others or 'no weights at all'}. "
        "Pickled weights are not read, since a pickle can run code: save them again with safe_serialization."
    )


def read_checkpoint(
    folder: Path,
    cfg: HookedConfig,
    network: Gemma4,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Fill a network built on the meta device.

    Args:
        dtype: of every weight; by default what config.json names, else the stored embedding's.
        device: where they go; the CPU by default, where they stay on the memory map if the dtype is kept.

    Raises:
        CheckpointError: everything that does not fit, in one message.
    """
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in weight_files(folder):
            stored |= dict.fromkeys(_keys(handle := _open(stack, file)), handle)
        shapes = {key: tuple(handle.get_slice(key).get_shape()) for key, handle in stored.items()}
        places = match(shapes, network)
        _refuse_packed(stored, places)
        _check_tied_head(stored, places, cfg)
        if dtype is None:
            dtype = _named_dtype(cfg) or stored[places["w_e"]].get_tensor(places["w_e"]).dtype
        for name, key in tqdm(places.items(), desc="weights", delay=2, leave=False):
            put(network, name, stored[key].get_tensor(key).to(device=device or "cpu", dtype=dtype))


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged or no safetensors file ({file.stat().st_size} bytes): {error}. Download it again."
        ) from error


def _keys(handle: Any) -> Iterable[str]:
    return handle.keys()


def match(shapes: Mapping[str, tuple[int, ...]], network: Gemma4) -> dict[str, str]:
    """For each of our weights the stored tensor's name.

    Raises:
        CheckpointError: lists every missing, misshapen and unexpected tensor.
    """
    places: dict[str, str] = {}
    missing, misshapen = [], []
    for name, weight in network.named_weights():
        found = [key for key in spellings(name) if key in shapes]
        if not found:
            missing.append(f"{disk_name(name, network.cfg)} {list(weight.shape)}")
            continue
        places[name] = found[0]
        if tuple(shapes[found[0]]) != tuple(weight.shape):
            misshapen.append(f"{found[0]} is {list(shapes[found[0]])}, config.json asks for {list(weight.shape)}")
    known = set(places.values()) | ({"lm_head.weight"} if network.cfg.tied else set())
    unexpected = [f"{key} {list(shapes[key])}" for key in shapes if key not in known]
    if missing or misshapen or unexpected:
        raise CheckpointError(_report(missing, misshapen, unexpected))
    return places


def _report(missing: list[str], misshapen: list[str], unexpected: list[str]) -> str:
    lines = ["the checkpoint does not fit its config.json:"]
    for what, entries in (("missing", missing), ("of another shape", misshapen), ("unexpected", unexpected)):
        if entries:
            lines.append(f"{len(entries)} {what}:")
            lines += [f"  {entry}" for entry in entries[:MOST_LINES]]
            if len(entries) > MOST_LINES:
                lines.append(f"  ... and {len(entries) - MOST_LINES} more")
    if any("layer_scalar" in entry for entry in missing):
        lines.append(
            "Without its layer_scalar a block's whole output would be of another size (values from 0.005 to 0.92 on the "
            "12B). It is a buffer: whatever wrote this file saved parameters only."
        )
    return "\n".join(lines)


def _refuse_packed(stored: Mapping[str, Any], places: Mapping[str, str]) -> None:
    packed = {}
    for key in places.values():
        kind = stored[key].get_slice(key).get_dtype()
        if not re.fullmatch(r"(BF16|F16|F32|F64)", str(kind)):
            packed[key] = str(kind)
    if packed:
        some = dict(list(packed.items())[:3])
        raise CheckpointError(
            f"{len(packed)} tensors are not floating point of 16 bits or more, e.g. {some}: a quantised checkpoint. "
            "Give the original weights, or dequantise them first."
        )


def _check_tied_head(stored: Mapping[str, Any], places: Mapping[str, str], cfg: HookedConfig) -> None:
    """A head saved beside the embedding it is tied to must be the embedding."""
    head = "lm_head.weight"
    if not (cfg.tied and head in stored):
        return
    embedding = stored[places["w_e"]].get_tensor(places["w_e"])
    if not torch.equal(stored[head].get_tensor(head), embedding):
        raise CheckpointError(
            "tie_word_embeddings is true, but lm_head.weight is not the embedding: set it to false in config.json if "
            "the head was trained apart, or remove lm_head.weight"
        )


def _named_dtype(cfg: HookedConfig) -> torch.dtype | None:
    name = cfg.dtype_name
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def put(network: nn.Module, name: str, value: Tensor) -> None:
    """Set one weight, frozen, without copying it."""
    path, _, leaf = name.rpartition(".")
    owner = network.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value.detach()
    else:
        owner._parameters[leaf] = nn.Parameter(value.detach(), requires_grad=False)


# -- a loaded transformers model ----------------------------------------------------------------------


def config_of(hf_model: Any) -> HookedConfig:
    """The config of a loaded transformers model."""
    raw = json.loads(json.dumps(hf_model.config.to_dict(), default=str))
    text = raw.get("text_config") or raw
    loaded = getattr(hf_model.config, "text_config", None) or hf_model.config
    if text.get("use_bidirectional_attention") == "all" and text["sliding_window"] == loaded.sliding_window:
        # 5.10 keeps the reach in place of the window and hands it out as if it were the file's.
        text["sliding_window"] = (loaded.sliding_window - 1) * 2
    return HookedConfig.from_hf(raw)


def share_storage(
    hf_model: Any, network: Gemma4, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> None:
    """Fill a network with a transformers model's own tensors. Nothing in that model changes.

    Raises:
        CheckpointError: tensors that do not fit, several dtypes or devices, quantised or unloaded weights.
        ValueError: another dtype or device than the model's was asked for.
    """
    if getattr(hf_model, "is_quantized", False) or getattr(hf_model, "hf_quantizer", None) is not None:
        raise CheckpointError("hf_model is quantised: its tensors are packed and cannot be shared; load it unquantised")
    theirs = dict(_tensors(hf_model))
    places = match({name: tuple(value.shape) for name, value in theirs.items()}, network)
    used = [theirs[key] for key in places.values()]
    kinds, where = {value.dtype for value in used}, {value.device for value in used}
    if len(kinds) > 1 or len(where) > 1 or not used[0].is_floating_point() or used[0].is_meta:
        raise CheckpointError(
            f"hf_model's weights are {sorted(map(str, kinds))} on {sorted(map(str, where))}; needed are one floating "
            "dtype on one device: load it with from_pretrained(dtype=...) and without a device_map"
        )
    if dtype not in (None, used[0].dtype) or (device is not None and torch.device(device).type != used[0].device.type):
        raise ValueError(
            f"hf_model is {used[0].dtype} on {used[0].device} and its storage is shared: dtype={dtype}, device={device} "
            "would copy it. Move hf_model first, or load from a folder."
        )
    for name, key in places.items():
        put(network, name, theirs[key])


def _tensors(hf_model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under their module names; a tied head is left out."""
    tensors = hf_model.state_dict(keep_vars=True)
    head, embedding = hf_model.get_output_embeddings(), hf_model.get_input_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    yield from ((name, value) for name, value in tensors.items() if not (tied and name == "lm_head.weight"))


# -- writing ------------------------------------------------------------------------------------------


def save(network: Gemma4, folder: str | Path, *, max_shard_size: str | int = "5GB") -> None:
    """Write config.json and safetensors that every supported transformers loads to identical logits.

    Everything is written beside its place and moved there when whole, config.json last; weights of an earlier
    checkpoint in the folder are replaced, other files stay.
    """
    import huggingface_hub

    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {disk_name(name, network.cfg): value.detach() for name, value in network.named_weights()}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as work:
        huggingface_hub.save_torch_state_dict(weights, work, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size)
        (Path(work) / "config.json").write_text(json.dumps(_config_json(network), indent=2) + "\n", encoding="utf-8")
        for old in [*folder.glob("model*.safetensors"), folder / INDEX, folder / "config.json"]:
            old.unlink(missing_ok=True)
        for file in sorted(Path(work).iterdir(), key=lambda file: (file.name == "config.json", file.name)):
            file.replace(folder / file.name)


def _config_json(network: Gemma4) -> dict[str, Any]:
    cfg = network.cfg
    raw = cfg.to_hf()
    raw["architectures"] = [f"Gemma4Unified{'ForConditionalGeneration' if cfg.is_wrapper else 'ForCausalLM'}"]
    dtype = str(network.dtype).removeprefix("torch.")
    for level in (raw, raw.get("text_config") or {}):
        for key in ("torch_dtype", "dtype"):
            if key in level:
                level[key] = dtype
    raw["dtype"] = dtype
    return raw


def copy_text_files(source: Path, target: Path) -> None:
    """Tokenizer, processor and generation settings, as they are."""
    if source.resolve() != target.resolve():
        for name in TEXT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Read a checkpoint in any spelling and write it as every supported transformers reads it."""
    folder, target = resolve(source), Path(target)
    if target.exists() and folder.resolve() == target.resolve():
        raise ValueError(f"{target} is the source itself: give another folder, so that nothing is lost if this fails")
    cfg = HookedConfig.from_hf(folder)
    with torch.device("meta"):
        network = Gemma4(cfg)
    read_checkpoint(folder, cfg, network, dtype=dtype)
    save(network, target, max_shard_size=max_shard_size)
    copy_text_files(folder, target)
    return target
