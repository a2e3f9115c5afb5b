"""Sweeps that are stopped: they go on by their plan, end with the same table to the last bit, and refuse another's folder."""

import functools
import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from small import hooked

from lens_gemma4 import (
    SweepResult,
    ablate,
    kl_to_clean,
    knockout,
    log_prob,
    logit_difference,
    patch,
    sweep,
)
from lens_gemma4.identities import digest, fingerprint
from lens_gemma4.interventions import scaled, units_of
from lens_gemma4.metrics import Metric
from lens_gemma4.plans import PLAN, Journal, of_weights

IDS = torch.tensor([[2, 5, 6, 7, 8, 9, 10], [2, 15, 16, 17, 18, 19, 11]])
ASK = logit_difference(7, 9)
CHILD = """
import sys
import torch
from lens_gemma4 import HookedModel, ablate, kl_to_clean, logit_difference
torch.set_num_threads(1)
model = HookedModel.from_pretrained("tiny")
metrics = [logit_difference(7, 9), kl_to_clean()]
found = ablate(model, "The capital of France is", metrics, positions="each", batch_size=2, save_to=sys.argv[1])
for name, one in found.items():
    one.save(sys.argv[1] + "." + name.split()[0] + ".parquet")
"""


@pytest.fixture(scope="module")
def model():
    return hooked("shared, own values")


def size(groups):
    return sum(len(group.variants) for group in groups)


def run_child(folder, kill_after=None):
    """Sweep in another process; killed as soon as it has finished so many batches more. Whether it was."""
    before = len(list(folder.glob("*.safetensors"))) if folder.exists() else 0
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stderr=subprocess.PIPE)
    while kill_after is not None and child.poll() is None:
        if folder.exists() and len(list(folder.glob("*.safetensors"))) >= before + kill_after:
            child.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    _, errors = child.communicate()
    assert child.returncode in (0, -signal.SIGKILL), errors.decode()
    return child.returncode != 0


def test_a_sweep_killed_five_times_ends_with_the_same_bytes(tmp_path):
    """kill -9 at random points; two metrics, each saved as a file."""
    rng = random.Random(time.time_ns())
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    killed = [run_child(stopped, rng.randint(1, 12)) for _ in range(5)]
    assert all(killed), "the sweep was over before it could be killed"
    assert (
        5
        <= len(list(stopped.glob("*.safetensors")))
        < len(json.loads((stopped / PLAN).read_text())["batches"])
    )
    run_child(stopped)
    run_child(whole)
    for name in ("logit", "KL"):
        one, other = (tmp_path / f"{kind}.{name}.parquet" for kind in ("stopped", "whole"))
        assert one.read_bytes() == other.read_bytes() and one.stat().st_size > 1000


def test_what_is_done_is_read_and_not_run(model, tmp_path, monkeypatch):
    whole = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path / "a")
    runs = []
    run = sweep.Runner.run
    monkeypatch.setattr(sweep.Runner, "run", lambda self, g: runs.append(size(g)) or run(self, g))
    again = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path / "a")
    assert not runs and torch.equal(again.values, whole.values)
    parts = sorted((tmp_path / "a").glob("*.safetensors"))
    parts[2].unlink(), parts[4].unlink()
    again = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path / "a")
    assert runs == [3, 3] and torch.equal(again.values, whole.values)


def test_a_write_that_was_cut_off_is_not_taken_for_a_batch(model, tmp_path):
    whole = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path / "a")
    part = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    part.with_name(f"{part.name}.{dead.pid}.partial").write_bytes(part.read_bytes()[:20])
    part.unlink()
    again = ablate(model, IDS, ASK, batch_size=3, save_to=tmp_path / "a")
    assert torch.equal(again.values, whole.values) and not list((tmp_path / "a").glob("*.partial"))


def test_another_sweep_is_refused_and_nothing_is_lost(model, tmp_path):
    folder = tmp_path / "a"
    ablate(model, IDS, ASK, save_to=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    mask = torch.ones_like(IDS)
    mask[1, -1] = 0
    others = {
        "prompts": lambda: ablate(model, IDS.flip(0), ASK, save_to=folder),
        "inputs": lambda: ablate(model, IDS, ASK, save_to=folder, attention_mask=mask),
        "metrics": lambda: ablate(model, IDS, logit_difference(7, 8), save_to=folder),
        "arguments": lambda: ablate(model, IDS, ASK, mode="mean", save_to=folder),
        "batch_size": lambda: ablate(model, IDS, ASK, batch_size=1, save_to=folder),
        "variants": lambda: sweep.sweep(
            model,
            IDS,
            [scaled(u, 0.5) for u in units_of("heads", model.cfg)],
            ASK,
            save_to=folder,
            arguments=json.loads((folder / PLAN).read_text())["plan"]["arguments"],
        ),
    }
    for what, other in others.items():
        with pytest.raises(ValueError, match=rf"another sweep: its {what} is"):
            other()
    changed = hooked("shared, own values")
    with torch.no_grad():
        changed.blocks[1].mlp.w_in[0, 0] += 1.0
    with pytest.raises(ValueError, match="another sweep: its weights is"):
        ablate(changed, IDS, ASK, save_to=folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        ablate(model, IDS, ASK, save_to=tmp_path / "b")


def test_running_out_of_memory_halves_the_plan_too(model, tmp_path, monkeypatch):
    run, sizes = sweep.Runner.run, []

    def small(self, groups):
        sizes.append(size(groups))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("too many")
        return run(self, groups)

    whole = ablate(model, IDS, ASK)
    monkeypatch.setattr(sweep.Runner, "run", small)
    found = ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")
    assert (found.values - whole.values).abs().max() < 1e-12
    planned = json.loads((tmp_path / "a" / PLAN).read_text())["batches"]
    assert sorted(i for part in planned.values() for i in part) == list(range(len(found.names)))
    assert max(len(part) for part in planned.values()) <= 3
    assert sizes.count(8) == 1 and sizes.count(4) == 1  # the size that failed is not tried again
    sizes.clear()
    again = ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")
    assert not sizes and torch.equal(again.values, found.values)


def test_a_cpu_without_memory_counts_and_other_errors_do_not(model, monkeypatch):
    error = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
    assert sweep.out_of_memory(RuntimeError(error))
    assert not sweep.out_of_memory(RuntimeError("size mismatch"))

    def broken(self, variants):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(sweep.Runner, "run", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ablate(model, IDS, ASK)

    def full(self, variants):
        raise torch.OutOfMemoryError("one is too many")

    monkeypatch.setattr(sweep.Runner, "run", full)
    with pytest.raises(torch.OutOfMemoryError, match="one is too many"):
        ablate(model, IDS, ASK)


def test_patches_and_knockouts_go_on_too(model, tmp_path):
    for name, call in {
        "patch": lambda to: patch(model, IDS, IDS.flip(0), [ASK, kl_to_clean()], save_to=to),
        "knockout": lambda to: knockout(model, IDS, [ASK, log_prob(3)], save_to=to),
    }.items():
        whole = call(tmp_path / name)
        next((tmp_path / name).glob("*.safetensors")).unlink()
        for metric, again in call(tmp_path / name).items():
            assert torch.equal(again.values, whole[metric].values)


def test_digests_tell_what_differs():
    value = torch.arange(6.0).view(2, 3)
    assert digest(value) == digest(value.clone())
    others = [value.view(3, 2), value.double(), value + 1e-6, value.T]
    assert len({digest(one) for one in [value, *others]}) == 5
    one, other = hooked("text"), hooked("text")
    assert of_weights(one) == of_weights(other)
    with torch.no_grad():
        other.blocks[2].layer_scalar += 0.01
    assert of_weights(one) != of_weights(other)


def test_a_journal_holds_no_time(model, tmp_path):
    first, second = (Journal(tmp_path / name, {"a": 1}, {"0": [0]}) for name in "ab")
    for one in (first, second):
        one.add("0", torch.ones(1, 2, 3))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert torch.equal(first.done("0"), torch.ones(1, 2, 3)) and first.done("1") is None


def test_prompts_in_parts_are_the_same(model, tmp_path, monkeypatch):
    """So many prompts that their clean run would not fit run some at a time; tokens, masks and values go with their prompts."""
    ids = torch.randint(3, 80, (5, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[4, 4:] = 0
    where = torch.zeros(5, 7, dtype=torch.bool)
    where[torch.arange(5), torch.tensor([1, 2, 3, 4, 2])] = True
    answers = torch.tensor([7, 8, 9, 10, 11])
    asked = [logit_difference(answers, 3), kl_to_clean(), log_prob(answers, positions=where)]
    calls = {
        "mean": lambda to: ablate(
            model, ids, asked, mode="mean", positions="last", attention_mask=mask, save_to=to
        ),
        "resample": lambda to: ablate(
            model, ids, asked, units="neurons", layers=[1], mode="resample", save_to=to
        ),
        "at": lambda to: ablate(
            model, ids, asked, units="kv_heads", positions=where, mode=0.5, save_to=to
        ),
        "patch": lambda to: patch(model, ids, ids.flip(0), asked, units="mlp", save_to=to),
        "knockout": lambda to: knockout(
            model, ids, asked, sources=where, queries="last", renormalise=False, save_to=to
        ),
    }
    whole = {name: call(None) for name, call in calls.items()}
    monkeypatch.setattr(sweep, "room", lambda device: 45_000)
    for name, call in calls.items():
        found = call(tmp_path / name)
        assert len(list((tmp_path / name).glob("prompts-*"))) > 1, name
        for metric, one in found.items():
            assert (one.values - whole[name][metric].values).abs().max() < 1e-12
            assert (one.baseline - whole[name][metric].baseline).abs().max() < 1e-12
        assert torch.equal(call(tmp_path / name)[asked[0].name].values, found[asked[0].name].values)
    sizes = []
    ablate(model, ids, lambda lg: sizes.append(len(lg)) or lg[:, -1, 7])
    assert set(sizes) == {5}  # a function of all logits sees all prompts


# -- what tells one sweep from another ----------------------------------------------------------------


def closing_over(word):
    return lambda lg: lg[:, -1, word]


class Asking:
    def __init__(self, word):
        self.word = word

    def __call__(self, lg):
        return lg[:, -1, self.word]

    def ask(self, lg):
        return lg[:, -1, self.word]


def with_default(word):
    def ask(lg, word=word):
        return lg[:, -1, word]

    return ask


OF_WORDS = {
    "closure": closing_over,
    "object": Asking,
    "method": lambda word: Asking(word).ask,
    "default": with_default,
    "partial": lambda word: functools.partial(lambda word, lg: lg[:, -1, word], word),
    "Metric": lambda word: Metric("mine", lambda read: read.logits(word)),
    "tensor": lambda word: closing_over(torch.tensor(word)),
}


@pytest.mark.parametrize("form", OF_WORDS)
def test_functions_are_told_apart_by_what_they_use(model, tmp_path, form):
    make = OF_WORDS[form]
    whole = ablate(model, IDS, make(7), save_to=tmp_path / "a")
    again = ablate(model, IDS, make(7), save_to=tmp_path / "a")  # an equal one goes on
    assert torch.equal(again.values, whole.values)
    with pytest.raises(ValueError, match="another sweep: its metrics is"):
        ablate(model, IDS, make(8), save_to=tmp_path / "a")


def test_a_function_that_cannot_be_told_apart_is_not_saved(model, tmp_path):
    generator = (i for i in range(3))

    def ask(lg):
        return lg[:, -1, 7] + 0 * len([generator])

    assert fingerprint(ask) is None
    assert ablate(model, IDS, ask).values.shape[1] == 2
    with pytest.raises(ValueError, match="cannot be told from another"):
        ablate(model, IDS, ask, save_to=tmp_path / "a")


def test_globals_count(model):
    scope: dict = {"WORD": 7}
    exec("ask = lambda lg: lg[:, -1, WORD]", scope)
    first = fingerprint(scope["ask"])
    scope["WORD"] = 8
    assert first is not None and fingerprint(scope["ask"]) != first


@pytest.mark.parametrize("where", ["w_o", "w_in", "w_e"])
def test_any_changed_weight_is_another_sweep(tmp_path, where):
    one = hooked("text")
    ablate(one, IDS, ASK, save_to=tmp_path / "a")
    weight = {"w_o": one.blocks[2].attn.w_o, "w_in": one.blocks[0].mlp.w_in, "w_e": one.w_e}[where]
    with torch.no_grad():
        weight[3, 1] *= 1 + 1e-12
    with pytest.raises(ValueError, match="another sweep: its weights is"):
        ablate(one, IDS, ASK, save_to=tmp_path / "a")


def test_a_strangers_folder_is_left_as_it_is(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "download.partial").write_text("half")
    with pytest.raises(ValueError, match="is not empty"):
        ablate(model, IDS, ASK, save_to=tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "thesis.tex": "mine",
        "download.partial": "half",
    }


def test_other_memory_resumes_the_plan_that_is_there(model, tmp_path, monkeypatch):
    ids = torch.randint(3, 80, (5, 7), generator=torch.Generator().manual_seed(0))
    for name in ("few", "many"):
        first, second = (45_000, 2**29) if name == "few" else (2**29, 45_000)
        monkeypatch.setattr(sweep, "room", lambda device, n=first: n)
        whole = ablate(model, ids, ASK, save_to=tmp_path / name)
        monkeypatch.setattr(sweep, "room", lambda device, n=second: n)
        with monkeypatch.context() as patched:
            patched.setattr(sweep.Runner, "run", None)  # nothing is run again
            assert torch.equal(
                ablate(model, ids, ASK, save_to=tmp_path / name).values, whole.values
            )


def test_damaged_files_are_named(model, tmp_path):
    ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")
    part = sorted((tmp_path / "a").glob("*.safetensors"))[1]
    good = part.read_bytes()
    part.write_bytes(good[:30])
    with pytest.raises(ValueError, match=rf"{part.name} is damaged"):
        ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")
    part.write_bytes(safetensors.torch.save({"values": torch.zeros(1, 1, 1)}))
    with pytest.raises(ValueError, match="planned are"):
        ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")
    part.write_bytes(good)
    (tmp_path / "a" / PLAN).write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        ablate(model, IDS, ASK, batch_size=8, save_to=tmp_path / "a")


def test_arguments_of_any_kind_of_number_are_saved(model, tmp_path):
    found = ablate(
        model,
        IDS,
        log_prob([np.int64(7), torch.tensor(8)], positions=range(2, 4)),
        layers=[np.int64(0), np.int64(1)],
        positions=range(1, 3),
        mode=np.float32(0.5),
        save_to=tmp_path / "a",
    )
    found.save(tmp_path / "a.parquet")
    plan = SweepResult.load(tmp_path / "a.parquet").plan
    assert plan["arguments"]["layers"] == [0, 1] and plan["arguments"]["positions"] == [1, 2]
