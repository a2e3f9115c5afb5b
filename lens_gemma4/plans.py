"""What a sweep is, in words and digests: for the record of a result, and so that a stopped one can go on.

A sweep with a folder writes its plan there first, then every batch of variants as it is done, each file whole or not
at all. Started again it must have the same plan; batches that are there are read, the others run as they were planned, so
the table is that of an undisturbed run to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import metrics
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.identities import digest, plain
from lens_gemma4.interventions import Intervention
from lens_gemma4.version import __version__

PLAN = "plan.json"
Batches = dict[str, list[int]]  # a name for each batch, and the variants in it
_CHUNK = 2**22  # numbers of a weight that are summed at a time
CHUNKS = "prompts.json"


def record(
    model: HookedModel,
    tensors: Mapping[str, Any],
    measured: Mapping[str, metrics.Measure],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """What it takes to do a sweep again."""
    return {
        "checkpoint": model.cfg.model_name,
        "config": digest(json.dumps(model.cfg.raw, sort_keys=True, default=str)),
        "attention": [model.attn_implementation, model.image_mask],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "versions": {"lens_gemma4": __version__, "torch": torch.__version__},
        "prompts": tensors["input_ids"].tolist(),
        "inputs": {
            name: digest(value)
            for name, value in sorted(tensors.items())
            if name != "input_ids" and value is not None
        },
        "metrics": {name: metrics.identity(metric) for name, metric in measured.items()},
        "arguments": plain(arguments),
    }


def of_weights(model: HookedModel, dtype: torch.dtype | None = None) -> str:
    """Of every number of the weights, as they are or in a dtype."""
    return digest(
        *(
            part
            for name, weight in model.named_weights()
            for part in (name, _sums(weight if dtype is None else weight.to(dtype)))
        )
    )


def _sums(weight: Tensor) -> list[int]:
    """Sums of a weight's bits, plain and by place: a change of any number changes them."""
    bits = weight.detach().contiguous().view(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    total, placed = 0, 0
    for number, part in enumerate(bits.view(kind).split(_CHUNK)):
        wide = part.to(torch.int64)
        places = torch.arange(1, 2 * len(wide), 2, device=wide.device)
        total += int(wide.sum())
        placed += (number + 1) * int((wide * places).sum())
    return [total, placed]


def of_variants(variants: Sequence[Intervention]) -> str:
    """Of everything that they change."""
    seen: dict[int, str] = {}

    def once(tensor: Tensor | None) -> str:
        if tensor is None:
            return ""
        if id(tensor) not in seen:  # masks are shared by many
            seen[id(tensor)] = digest(tensor)
        return seen[id(tensor)]

    state = hashlib.sha256()
    for one in variants:
        for edit in one.edits:
            tensors = (edit.positions, edit.add, edit.sources, edit.within)
            text = f"{one.name} {edit.where} {edit.scale} {[once(tensor) for tensor in tensors]}"
            state.update(text.encode())
    return state.hexdigest()[:16]


class Journal:
    """A folder with a sweep's plan and the batches that are done.

    Args:
        folder: made if it is not there.
        plan: what decides the numbers.
        batches: as they would be run now; those of the plan that is already there are taken instead.
    Raises:
        ValueError: the folder holds another sweep, or no sweep.
    """

    def __init__(self, folder: str | Path, plan: Mapping[str, Any], batches: Batches) -> None:
        self.folder = Path(folder)
        self.plan = json.loads(json.dumps(plan))
        self.batches = batches
        path = self.folder / PLAN
        if path.exists():
            self.batches = self._known(path)
            _sweep_up(self.folder)
        else:
            _own(self.folder, PLAN)
            self._write_plan()

    def _known(self, path: Path) -> Batches:
        there = _read(path)
        for key in sorted(self.plan.keys() | there["plan"].keys()):
            old, new = there["plan"].get(key), self.plan.get(key)
            if old != new:
                raise ValueError(
                    f"{self.folder} holds another sweep: its {key} is {_short(old)}, here it is {_short(new)}. "
                    "Give another folder, or remove this one"
                )
        return dict(there["batches"])

    def _write_plan(self) -> None:
        text = json.dumps({"plan": self.plan, "batches": self.batches}, indent=1, sort_keys=True)
        _write(self.folder, PLAN, text.encode())

    def replan(self, batches: Batches) -> None:
        """Other batches from now on, as after running out of memory."""
        self.batches = dict(batches)
        self._write_plan()

    def done(
        self, name: str, shape: Sequence[int] = ()
    ) -> Float[Tensor, "metric variant batch"] | None:
        """A batch's values, if it was run.

        Raises:
            ValueError: its file is damaged.
        """
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            values = safetensors.torch.load_file(path)["values"]
        except (safetensors.SafetensorError, KeyError, OSError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and its variants run again"
            ) from None
        if shape and list(values.shape) != list(shape):
            raise ValueError(
                f"{path} holds {list(values.shape)}, planned are {list(shape)} [metric variant batch]: remove it, and its "
                "variants run again"
            )
        return values

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").exists()

    def add(self, name: str, values: Float[Tensor, "metric variant batch"]) -> None:
        content = safetensors.torch.save({"values": values.cpu().contiguous()})
        _write(self.folder, f"{name}.safetensors", content)


def settled(folder: str | Path, name: str, value: Any) -> Any:
    """What a folder of ours says under a name; if nothing yet, this.

    Raises:
        ValueError: the folder is somebody else's.
    """
    path = Path(folder) / name
    if path.exists():
        return _read(path)
    _own(Path(folder), name)
    _write(Path(folder), name, json.dumps(value).encode())
    return value


def _own(folder: Path, name: str) -> None:
    """Make a folder, or take one that holds nothing but ours."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(
        path.name not in (PLAN, CHUNKS) and ".partial" not in path.name for path in folder.iterdir()
    ):
        raise ValueError(f"{folder} is not empty and holds no {name}: give a folder of its own")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): give another folder") from None


def _write(folder: Path, name: str, content: bytes) -> None:
    """Whole or not at all, also when the power goes."""
    partial = folder / f"{name}.{os.getpid()}.partial"
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / name)
    with contextlib.suppress(OSError):  # no such thing as a folder's sync on every system
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _sweep_up(folder: Path) -> None:
    """Remove writes that were cut off: those of processes that are no more."""
    for partial in folder.glob("*.*.partial"):
        owner = partial.suffixes[-2][1:]
        if owner.isdigit() and not _runs(int(owner)):
            partial.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}... (digest {digest(value)})"
