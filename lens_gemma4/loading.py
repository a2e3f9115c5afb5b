"""Checkpoints to networks and back. Weights are stored as transformers stores them: loading is renaming.

A network is built on the meta device and each weight put in its place, straight from the file's memory map
where dtype and device allow it, so nothing is held twice.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from lens_gemma4.config import HookedConfig
from lens_gemma4.model import Gemma4

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
DOWNLOADED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "tokenizer*",
)
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
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
STORED_DTYPES = ("BF16", "F16", "F32", "F64")
# What quantisers write beside or in place of a weight.
PACKED = re.compile(
    r"(weight_packed|weight_scale|qweight|qzeros|scales|absmax|quant_map|quant_state\S*|weight_scale_inv)$"
)
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

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
    **{
        f"{norm}.{part}": f"{norm}.{part}"
        for norm in ("patch_ln1", "patch_ln2", "pos_norm")
        for part in ("weight", "bias")
    },
    "w_patch": "patch_dense.weight",
    "b_patch": "patch_dense.bias",
    "w_pos": "pos_embedding",
}


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of a kind this package does not read."""


def spellings(name: str) -> tuple[str, ...]:
    """Every name under which transformers keeps one of our weights; the first is the wrapper's on disk.

    A model without a head (`Gemma4UnifiedModel`) saves the same names without `model.` in front.

    >>> spellings("blocks.3.mlp.w_in")[:2]
    ('model.language_model.layers.3.mlp.up_proj.weight', 'model.layers.3.mlp.up_proj.weight')
    """
    if name == "w_u":
        return ("lm_head.weight",)
    full = _with_head(name)
    return (*full, *(theirs.removeprefix("model.") for theirs in full))


def _with_head(name: str) -> tuple[str, str]:
    if name == "audio.w_out":
        theirs = "model.embed_audio.embedding_projection.weight"
        return (theirs, theirs)
    if name == "vision.projector.w_out":
        on_disk = "model.embed_vision.embedding_projection.weight"
        return (on_disk, on_disk.replace("embed_vision", "embed_vision.multimodal_embedder"))
    if name.startswith("vision."):
        theirs = PIXELS[name.removeprefix("vision.")]
        return (f"model.vision_embedder.{theirs}", f"model.embed_vision.{theirs}")
    found = re.match(r"blocks\.(\d+)\.(.+)", name)
    theirs = f"layers.{found[1]}.{IN_BLOCK[found[2]]}" if found else TEXT[name]
    return (f"model.language_model.{theirs}", f"model.{theirs}")


def disk_name(name: str, cfg: HookedConfig) -> str:
    """The name to save one of our weights under."""
    if name == "w_u":
        return "lm_head.weight"
    return _with_head(name)[0 if cfg.is_wrapper else 1]


def on_meta(cfg: HookedConfig) -> Gemma4:
    """The network with shapes and no weights."""
    with torch.device("meta"):
        return Gemma4(cfg)


def manifest(cfg: HookedConfig) -> dict[str, list[int]]:
    """Every tensor a checkpoint of this config holds on disk: name and shape.

    >>> cfg = HookedConfig.from_hf({"model_type": "gemma4_unified_text", "hidden_size": 60})
    >>> manifest(cfg)["model.norm.weight"]
    [60]
    """
    return {
        disk_name(name, cfg): list(weight.shape) for name, weight in on_meta(cfg).named_weights()
    }


# -- where checkpoints are ----------------------------------------------------------------------------


def shipped_checkpoint() -> Path:
    """The folder of the checkpoint that ships with the package."""
    here = Path(__file__).parent
    for folder in (here / "_tiny", here.parent / "weights" / "tiny"):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        "the shipped checkpoint is not in this installation: reinstall lens-gemma4"
    )


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
        raise CheckpointError(
            f"{path} is a file; give the folder that holds config.json and the weights"
        )
    if isinstance(name_or_path, Path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)):
        raise FileNotFoundError(
            f"no folder {path}, and {str(name_or_path)!r} is no Hub id of the form owner/name"
        )
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
                ignore_patterns=["*/*"],  # other formats that some repositories keep in folders
            )
        )
    except Exception as error:  # whatever the network stack raises, in words that say what to do
        raise OSError(
            f"{name_or_path!r} is no folder here and could not be had from the Hub: {type(error).__name__}: {error}\n"
            "  Check the id, log in with `hf auth login` when the model is gated, or give a folder."
        ) from error


# -- reading ------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; one whole file goes before an index, as in transformers.

    Raises:
        CheckpointError: none; only pickles; an index that names a missing file or one outside the folder.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    suffixes = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    raise CheckpointError(
        f"{folder} holds no model.safetensors and no {INDEX}; found {others or 'no weights at all'}. "
        "Pickled weights are not read, since a pickle can run code: load them where you trust them and "
        "save them with save_pretrained, which writes safetensors."
    )


def _indexed_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{index} names {name!r}, which is missing: the download may be incomplete, repeat it"
            )
    return [folder / name for name in files]


def read_checkpoint(
    folder: Path,
    cfg: HookedConfig,
    network: Gemma4,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> None:
    """Fill a network built on the meta device.

    Args:
        dtype: of every weight; by default what config.json names, else the stored embedding's.
        device: where they go; the CPU by default, where they stay on the memory map if the dtype is kept.

    Raises:
        CheckpointError: everything that does not fit, in one message.
        ValueError: weights cannot be of that dtype.
    """
    _check_dtype(dtype)
    with stored_weights(folder, network) as weights:
        dtype = dtype or default_dtype(cfg, weights["w_e"]())
        where = torch.device("cpu" if device is None else device)
        for name, read in tqdm(weights.items(), desc="weights", delay=2, leave=False):
            put(network, name, read().to(device=where, dtype=dtype))


@contextmanager
def stored_weights(folder: Path, network: Gemma4) -> Iterator[Mapping[str, Callable[[], Tensor]]]:
    """For each of our weights a function that reads it, on the file's memory map and in its own dtype.

    What a checkpoint holds is checked as a whole before anything is read.
    """
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in weight_files(folder):
            handle = _open(stack, file)
            if twice := sorted(set(handles) & set(handle.keys())):
                raise CheckpointError(
                    f"{file.name} holds {twice[0]!r}, and so does another file of {folder}"
                )
            handles |= dict.fromkeys(handle.keys(), handle)
        slices = {key: handle.get_slice(key) for key, handle in handles.items()}
        _refuse_packed({key: str(part.get_dtype()) for key, part in slices.items()})
        places = match({key: tuple(part.get_shape()) for key, part in slices.items()}, network)
        reads = {name: partial(handles[key].get_tensor, key) for name, key in places.items()}
        if network.cfg.tied and HEAD in handles:
            _check_tied_head(handles[HEAD].get_tensor(HEAD), reads["w_e"]())
        yield reads


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError, ValueError) as error:
        with file.open("rb") as content:
            pointer = content.read(30).startswith(b"version https://git-lfs")
        what = (
            "is a git-lfs pointer and not the weights: run `git lfs pull`"
            if pointer
            else f"is damaged or no safetensors file ({file.stat().st_size} bytes): {error}. Download it again"
        )
        raise CheckpointError(f"{file} {what}.") from error


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
            misshapen.append(
                f"{found[0]} is {list(shapes[found[0]])}, config.json asks for {list(weight.shape)}"
            )
    known = set(places.values()) | ({HEAD} if network.cfg.tied else set())
    unexpected = [f"{key} {list(shapes[key])}" for key in shapes if key not in known]
    if missing or misshapen or unexpected:
        raise CheckpointError(_report(missing, misshapen, unexpected))
    return places


def _report(missing: list[str], misshapen: list[str], unexpected: list[str]) -> str:
    lines = ["the checkpoint does not fit its config.json:"]
    for what, entries in (
        ("missing", missing),
        ("of another shape", misshapen),
        ("unexpected", unexpected),
    ):
        if entries:
            lines.append(f"{len(entries)} {what}:")
            lines += [f"  {entry}" for entry in entries[:MOST_LINES]]
            if len(entries) > MOST_LINES:
                lines.append(f"  ... and {len(entries) - MOST_LINES} more")
    if any(entry.startswith(HEAD) for entry in missing):
        lines.append(
            "tie_word_embeddings is false (in a wrapper the top level of config.json decides), so the head has weights "
            "of its own: set it to true if the embedding is the head."
        )
    if any("layer_scalar" in entry for entry in missing):
        lines.append(
            "Without its layer_scalar a block's whole output would be of another size (values from 0.005 to 0.92 on the "
            "12B). It is a buffer: whatever wrote this file saved parameters only."
        )
    return "\n".join(lines)


def _refuse_packed(dtypes: Mapping[str, str]) -> None:
    packed = {
        key: kind for key, kind in dtypes.items() if kind not in STORED_DTYPES or PACKED.search(key)
    }
    if packed:
        some = ", ".join(f"{key} ({kind})" for key, kind in list(packed.items())[:3])
        raise CheckpointError(
            f"a quantised checkpoint: {len(packed)} of {len(dtypes)} tensors are not plain weights of 16 bits or more, "
            f"e.g. {some}. Give the original weights, or dequantise them first."
        )


def _check_tied_head(head: Tensor, embedding: Tensor) -> None:
    """A head beside the embedding it is tied to must be the embedding."""
    same = head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
    if not (same or (head.shape == embedding.shape and torch.equal(head, embedding.to(head)))):
        raise CheckpointError(
            f"tie_word_embeddings is true, but {HEAD} is not the embedding: set it to false in config.json "
            f"if the head was trained apart, or remove {HEAD}"
        )


def default_dtype(cfg: HookedConfig, embedding: Tensor) -> torch.dtype:
    """What config.json names, else the stored embedding's."""
    name = cfg.dtype_name
    if name is None or name == "auto":
        return embedding.dtype
    if name not in DTYPES:
        raise CheckpointError(
            f"config.json says the weights are {name!r}; computed are {', '.join(DTYPES)}: choose one with dtype="
        )
    return DTYPES[name]


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype}; weights are computed with in {', '.join(DTYPES)}")


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
    # to_dict() rather than attributes: since 5.15 reading a size that differs between blocks raises.
    raw = json.loads(json.dumps(hf_model.config.to_dict(), default=str))
    text = raw.get("text_config") or raw
    loaded = getattr(hf_model.config, "text_config", None) or hf_model.config
    if (
        text.get("use_bidirectional_attention") == "all"
        and text["sliding_window"] == loaded.sliding_window
    ):
        # 5.10 keeps the reach in place of the window and hands it out as if it were the file's.
        text["sliding_window"] = (loaded.sliding_window - 1) * 2
    return HookedConfig.from_hf(raw)


def share_storage(
    hf_model: Any,
    network: Gemma4,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> None:
    """Fill a network with a transformers model's own tensors. Nothing in that model changes.

    Raises:
        CheckpointError: tensors that do not fit, several dtypes or devices, quantised or unloaded weights.
        ValueError: another dtype or device than the model's was asked for.
    """
    if (
        getattr(hf_model, "is_quantized", False)
        or getattr(hf_model, "hf_quantizer", None) is not None
    ):
        raise CheckpointError(
            "hf_model is quantised: its tensors are packed and cannot be shared; load it unquantised"
        )
    # Parameters and persistent buffers; keep_vars, since detached ones would be other objects.
    theirs = hf_model.state_dict(keep_vars=True)
    places = match({name: tuple(value.shape) for name, value in theirs.items()}, network)
    used = [theirs[key] for key in places.values()]
    _check_alike(used, dtype, None if device is None else torch.device(device))
    if network.cfg.tied and HEAD in theirs:
        _check_tied_head(theirs[HEAD], theirs[places["w_e"]])
    for name, key in places.items():
        put(network, name, theirs[key])


def _check_alike(
    used: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
) -> None:
    """One dtype that is computed with, on one device, and as asked for."""
    kinds, places = {value.dtype for value in used}, {value.device for value in used}
    kind, place = used[0].dtype, used[0].device
    if len(kinds) > 1 or len(places) > 1 or kind not in DTYPES.values() or place.type == "meta":
        raise CheckpointError(
            f"hf_model's weights are {sorted(map(str, kinds))} on {sorted(map(str, places))}; needed is one of "
            f"{', '.join(DTYPES)} on one device: load it with from_pretrained(dtype=...) and without a device_map"
        )
    moved = device is not None and (
        device.type != place.type or device.index not in (None, place.index)
    )
    if dtype not in (None, kind) or moved:
        raise ValueError(
            f"hf_model is {kind} on {place} and its storage is shared: dtype={dtype}, device={device} would copy it. "
            "Move hf_model first, or load from a folder."
        )


# -- writing ------------------------------------------------------------------------------------------


def save(
    network: Gemma4,
    folder: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and safetensors that every supported transformers loads to identical logits.

    Everything is written beside its place and moved there when whole, config.json last, so an unfinished write
    never looks like a checkpoint. Weights of an earlier checkpoint in the folder are replaced, other files stay.

    Args:
        max_shard_size: bytes, or "5GB": the most in one file, unless one tensor is larger.
        dtype: to write in; by default the network's. Cast one file at a time.
    """
    _check_dtype(dtype)
    if network.device.type == "meta":
        raise ValueError(
            "this network holds no weights yet: fill it with read_checkpoint or share_storage first"
        )
    folder, dtype = Path(folder), dtype or network.dtype
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give a folder to save into")
    weights = {
        disk_name(name, network.cfg): value.detach() for name, value in network.named_weights()
    }
    shards = _shards(
        {key: value.numel() * dtype.itemsize for key, value in weights.items()},
        _bytes(max_shard_size),
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as work:
        for name, keys in tqdm(shards.items(), desc="writing", delay=2, leave=False):
            _write_shard({key: weights[key] for key in keys}, Path(work) / name, dtype)
        if len(shards) > 1:
            _write_json(_index(shards, weights, dtype), Path(work) / INDEX)
        _write_json(_config_json(network.cfg, dtype), Path(work) / "config.json")
        _replace(Path(work), folder)


def _bytes(size: str | int) -> int:
    """
    >>> _bytes("1.5MB")
    1500000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size))
    if not found or found[2].upper() not in UNITS or not float(found[1]) > 0:
        raise ValueError(
            f'max_shard_size is {size!r}; give bytes, or a number with KB, MB or GB such as "5GB"'
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def _shards(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Tensors by file, in order, each file at most that large unless one tensor is larger."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    total = len(shards)
    return {f"model-{i:05}-of-{total:05}.safetensors": keys for i, keys in enumerate(shards, 1)}


def _write_shard(weights: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    tensors, seen = {}, set()
    for key, value in weights.items():
        value = value.to(device="cpu", dtype=dtype).contiguous()
        # safetensors refuses one storage under two names, which an untied head that is the embedding has.
        tensors[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    file.touch()  # with the user's own permissions: safetensors would keep the file from everybody else
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def _index(
    shards: Mapping[str, list[str]], weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    total = sum(value.numel() for value in weights.values())
    return {
        "metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
        "weight_map": {key: name for name, keys in shards.items() for key in sorted(keys)},
    }


def _write_json(content: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(work: Path, folder: Path) -> None:
    """Finished files into their places. While there is no config.json, the folder is no checkpoint."""
    (folder / "config.json").unlink(missing_ok=True)
    for old in folder.iterdir():
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name):
            old.unlink()
    for file in sorted(work.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
        file.replace(folder / file.name)


def _config_json(cfg: HookedConfig, dtype: torch.dtype) -> dict[str, Any]:
    raw = cfg.to_hf()
    raw.pop("_name_or_path", None)  # where it was loaded from is nobody's business
    raw["architectures"] = [
        f"Gemma4Unified{'ForConditionalGeneration' if cfg.is_wrapper else 'ForCausalLM'}"
    ]
    name = str(dtype).removeprefix("torch.")
    for level in (raw, *(part for part in raw.values() if isinstance(part, dict))):
        for key in ("torch_dtype", "dtype"):
            if key in level:
                level[key] = name
    raw["dtype"] = name
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
    """Read a checkpoint in any spelling and write it as every supported transformers reads it.

    Args:
        source: a folder, a Hub id, or "tiny".
        dtype: to write in; by default what config.json names, else the embedding's.

    Returns:
        The folder written.
    """
    _check_dtype(dtype)
    folder, target = resolve(source), Path(target)
    if folder.resolve() == target.resolve():
        raise ValueError(
            f"{target} is the source itself: give another folder, so that nothing is lost if this fails"
        )
    cfg = HookedConfig.from_hf(folder)
    network = on_meta(cfg)
    with stored_weights(folder, network) as weights:
        for name, read in weights.items():
            put(network, name, read())  # on the memory map, in its own dtype
        save(
            network,
            target,
            max_shard_size=max_shard_size,
            dtype=dtype or default_dtype(cfg, network.w_e),
        )
    copy_text_files(folder, target)
    return target
