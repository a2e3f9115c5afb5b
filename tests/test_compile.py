"""Compiled blocks: the same numbers to rounding where nobody listens, and every hook point as soon as somebody does.

In processes of their own: annotations checked at run time are not for the compiler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import copy, sys, warnings
import torch
sys.path.insert(0, {tests!r})
from small import build, text_inputs
from lens_gemma4 import KVCache

calls = 0
def counted(graph, inputs):
    global calls
    def run(*args):
        global calls
        calls += 1
        return graph.forward(*args)
    return run

backend = counted if {backend!r} == "counted" else {backend!r}
torch.set_num_threads(1)
ids = text_inputs(2, 11)["input_ids"]
for kind in ("text", "shared"):
    model = build(kind, torch.float64, seed=1)
    want = model(ids)
    model.compile(backend=backend)
    before = calls
    got = model(ids)
    assert (got - want).abs().max() < 1e-10
    ran = calls - before
    assert backend != counted or ran == model.cfg.n_layers, ran
    # a block with a hook runs as it is, and only that one
    seen, before = [], calls
    def edit(value, hook):
        seen.append(hook.name)
        return value + 1
    hooks = [("blocks.1.attn.hook_pattern", edit), ("blocks.2.hook_resid_post", edit)]
    moved = model.run_with_hooks(ids, fwd_hooks=hooks)
    assert seen == [name for name, _ in hooks]
    assert backend != counted or calls - before == model.cfg.n_layers - 2
    # weights that change, copies, caches: never those of another time
    twin = copy.deepcopy(model)
    twin.blocks[1].layer_scalar.mul_(0.5)
    assert (twin(ids) - model(ids)).abs().max() > 1e-3
    assert (model(ids) - want).abs().max() < 1e-10
    _, kept = model.run_and_store(ids)
    kv = KVCache(model.cfg)
    assert torch.equal(model(ids, kv_cache=kv), want)
    model.uncompile()
    assert torch.equal(model(ids), want)
    assert (model.run_with_hooks(ids, fwd_hooks=hooks) - moved).abs().max() < 1e-10
    assert (moved - want).abs().max() > 1e-3
    _, plain = model.run_and_store(ids)
    assert list(kept) == list(plain)
    assert all(torch.equal(kept[name], plain[name]) for name in plain)
    twin.uncompile()
    before = calls
    twin(ids)
    assert calls == before
print("fine")
"""


def run(backend: str) -> str:
    tests = str(Path(__file__).parent)
    script = SCRIPT.format(tests=tests, backend=backend)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(tests).parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_blocks_are_compiled_only_where_nobody_listens():
    assert "fine" in run("counted")


@pytest.mark.slow
def test_the_compiler_proper_gives_the_same_numbers():
    assert "fine" in run("inductor")
