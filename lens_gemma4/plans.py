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

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import metrics
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention
from lens_gemma4.version import __version__

PLAN = "plan.json"
Batches = dict[str, list[int]]  # a name for each batch, and the variants in it
_SAMPLE = 64  # values of each weight that its fingerprint holds


def digest(*values: Any) -> str:
    """Of tensors by their bytes, of the rest by its text."""
    state = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            state.update(f"{value.dtype} {list(value.shape)}".encode())
            state.update(
                value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            state.update(repr(value).encode())
    return state.hexdigest()[:16]


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
        "arguments": dict(arguments),
    }


def fingerprint(model: HookedModel) -> str:
    """Of the weights: some values of each."""
    sampled = []
    for name, weight in model.named_weights():
        flat = weight.detach().view(-1)
        step = max(1, len(flat) // _SAMPLE)
        sampled += [name, flat[::step][:_SAMPLE].cpu()]
    return digest(*sampled)


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
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("*.partial"):  # a write that was cut off
            left.unlink()
        path = self.folder / PLAN
        if path.exists():
            self.batches = self._known(path)
        elif any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty and holds no {PLAN}: give a folder of its own"
            )
        else:
            self._write_plan()

    def _known(self, path: Path) -> Batches:
        there = json.loads(path.read_text(encoding="utf-8"))
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
        self._write(PLAN, text.encode())

    def replan(self, batches: Batches) -> None:
        """Other batches from now on, as after running out of memory."""
        self.batches = dict(batches)
        self._write_plan()

    def done(self, name: str) -> Float[Tensor, "metric variant batch"] | None:
        """A batch's values, if it was run."""
        path = self.folder / f"{name}.safetensors"
        return safetensors.torch.load_file(path)["values"] if path.exists() else None

    def add(self, name: str, values: Float[Tensor, "metric variant batch"]) -> None:
        self._write(
            f"{name}.safetensors", safetensors.torch.save({"values": values.cpu().contiguous()})
        )

    def _write(self, name: str, content: bytes) -> None:
        """Whole or not at all, also when the power goes."""
        partial = self.folder / f"{name}.partial"
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / name)
        with contextlib.suppress(OSError):  # no such thing as a folder's sync on every system
            handle = os.open(self.folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}... (digest {digest(value)})"
