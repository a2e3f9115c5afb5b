"""The script for a card, at toy scale: on the CPU by default, on the card with `make gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch

from lens_gemma4 import HookedModel

BENCHMARKS = Path(gpu.__file__).parent

CARD = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=CARD)]


def pair(device: str, dtype: torch.dtype) -> tuple[Any, HookedModel]:
    hf_model = gpu.build(small=True, device=device, dtype=dtype)
    return hf_model, HookedModel.from_pretrained(hf_model=hf_model)


def test_the_small_run_finds_no_difference(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--small",
        "--device",
        "cpu",
        "--rounds",
        "2",
    ]
    run = subprocess.run([*command, "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = (tmp_path / "out").read_text()
    assert said == run.stdout
    assert said.count("largest difference 0,") == 8
    assert "equal to the last bit" in said


def test_the_full_size_needs_a_card():
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "--small" in run.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equal_on_every_prompt(device, dtype, attention):
    hf_model, model = pair(device, dtype)
    for prompt, inputs in gpu.prompts(model.cfg, device).items():
        row = gpu.compare(hf_model, model, prompt, inputs, attention)
        assert row.holds, row


@pytest.mark.parametrize("device", DEVICES)
def test_one_bit_in_one_scalar_is_a_difference(device):
    hf_model, model = pair(device, torch.float32)
    other = HookedModel.from_pretrained(hf_model=hf_model)
    scalar = other.blocks[2].layer_scalar
    other.blocks[2].layer_scalar = scalar.nextafter(
        torch.zeros_like(scalar)
    )  # the shared one stays
    inputs = gpu.prompts(model.cfg, device)["text"]
    assert gpu.compare(hf_model, model, "text", inputs, "sdpa").holds
    row = gpu.compare(hf_model, other, "text", inputs, "sdpa")
    assert not row.holds
    assert 0 < row.difference < 1


@pytest.mark.parametrize("device", DEVICES)
def test_listening_changes_nothing(device):
    _, model = pair(device, torch.bfloat16)
    for inputs in gpu.prompts(model.cfg, device).values():
        logits, cache = model.run_with_cache(**inputs)
        assert torch.equal(logits, model(**inputs))
        assert cache["resid_post", -1].device.type == device
