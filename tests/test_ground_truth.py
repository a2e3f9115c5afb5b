"""What is known to solve the shipped checkpoint's tasks: each tool finds it, wrong formulas do not, and it is true of the weights."""

from __future__ import annotations

import doctest
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import truth_prompts
import truth_search
import truth_tools
import truth_words

from lens_gemma4 import HookedModel, ablate, knockout, patch
from lens_gemma4 import ground_truth as ground_truth_module
from lens_gemma4.attribution import residual_gain
from lens_gemma4.ground_truth import FILE, GroundTruth, Task, load, opened, score
from lens_gemma4.loading import CheckpointError
from lens_gemma4.selection import joined
from lens_gemma4.sweep import run_once

TINY = Path(__file__).parent.parent / "weights" / "tiny"
TASKS = list(truth_prompts.MAKERS)
PICTURES = ("colour", "shape")
PROMPTS = 16  # of each task, here; the figures in the file are of all
PICTURE_PROMPTS = 8

TRUTH = load("tiny")
# What each tool must reach in each task, and averaged over tasks, over the heads that it can find.
LEAST_AUC = {
    "attribution": (0.7, 0.9),  # of years little: MLPs make the answer of what heads carry
    "ablation, mean": (0.85, 0.95),
    "ablation, resample": (0.85, 0.93),
    "ablation, estimated": (0.7, 0.88),
    "patching": (0.95, 0.98),
    "patching, estimated": (0.85, 0.95),
    "edges": (0.95, 0.98),
    "knockout": (0.8, 0.95),
    "detect_head": (0.9, 0.95),
    # It counts what a head adds to all prompts alike, too: in some tasks it finds little.
    "ablation, zero": (0.0, 0.7),
}
EVERY_TOOL = [(task, tool) for task in TASKS for tool in truth_tools.found_by(TRUTH[task])]


@pytest.fixture(scope="module")
def runs(tiny_model) -> dict[str, truth_tools.Prepared]:
    """Some prompts of each task, prepared once."""
    return {
        name: truth_tools.prepared(
            tiny_model, TRUTH[name].some(PICTURE_PROMPTS if name in PICTURES else PROMPTS)
        )
        for name in TASKS
    }


@pytest.fixture(scope="module")
def maps(runs):
    """Each tool's map of a task, made once."""
    made: dict[tuple[str, str], torch.Tensor] = {}

    def get(task: str, tool: str) -> torch.Tensor:
        if (task, tool) not in made:
            made[task, tool] = truth_tools.found_by(TRUTH[task])[tool][0](runs[task])
        return made[task, tool]

    return get


# -- what is stored -----------------------------------------------------------------------------------


def test_every_task_has_prompts_and_heads():
    assert list(TRUTH) == TASKS
    for task in TRUTH.values():
        assert 32 <= len(task.prompts) <= 64
        n = len(task.prompts)
        assert n == len(task.corrupt) == len(task.answers) == len(task.versus)
        assert all(len(rows) == n for rows in task.places.values())
        assert all(a != b for a, b in zip(task.prompts, task.corrupt, strict=True)) or task.pictures
        assert not set(task.answers[0]) & set(task.versus[0])
        assert task.heads and task.statement and task.sources
        assert all(head.name in str(task.sources) for head in task.heads)


@pytest.mark.parametrize("name", TASKS)
def test_the_prompts_are_those_that_are_drawn(name, tiny_model):
    drawn, stored = truth_prompts.draw(name, tiny_model.tokenizer), TRUTH[name]
    for part in ("prompts", "corrupt", "answers", "versus", "places"):
        assert getattr(drawn, part) == getattr(stored, part)
    if name in PICTURES:
        for part in ("pictures", "corrupt_pictures"):
            ours, theirs = getattr(drawn, part), getattr(stored, part)
            same = [
                opened(a).tobytes() == opened(b).tobytes()
                for a, b in zip(ours[:4], theirs[:4], strict=True)
            ]
            assert all(same)


@pytest.mark.parametrize("name", TASKS)
def test_places_hold_what_they_are_called(name, tiny_model):
    task = TRUTH[name]
    ids = task.inputs(tiny_model)["input_ids"]
    assert ids.shape == (len(task.prompts), task.length)
    assert torch.equal(
        task.where("the last token").nonzero()[:, 1], torch.full((len(ids),), task.length - 1)
    )
    at = {place: [row[0] for row in rows] for place, rows in task.places.items() if all(rows)}
    said = {
        place: [
            tiny_model.to_single_str_token(int(row[p])) for row, p in zip(ids, places, strict=True)
        ]
        for place, places in at.items()
    }
    answers = [words[0] for words in task.answers]
    holds_the_answer = {
        "repeats": "what followed it",
        "gifts": "the receiver's name",
        "having": "its thing",
        "code": "the code",
    }
    if name in holds_the_answer:
        # The first word of a text has no space in front.
        assert [w.strip() for w in said[holds_the_answer[name]]] == [a.strip() for a in answers]
    if name == "facts":
        assert all(
            word.strip() in prompt
            for word, prompt in zip(said["the country"], task.prompts, strict=True)
        )
        assert len(set(said["the country"])) > 30
    if name == "years":
        starts = [int(word) for word in said["the first year"]]
        assert [int(words[0]) for words in task.answers] == [start + 1 for start in starts]
    if name in PICTURES:
        assert set(said["the shape's patch"]) == {"<|image|>"}
        assert set(said["the corner's two words"]) <= {" top", " bottom"}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_solved_and_counterparts_ask_for_something_else(name, tiny_model):
    task = replace(TRUTH[name], by_probability=False)
    kept = [
        run_once(tiny_model, some, task.score(tiny_model), [])[1] for some in both(task, tiny_model)
    ]
    right, other = (scores["accuracy"].mean().item() for scores in kept)
    assert right >= 0.95
    assert other <= (0.6 if name == "years" else 0.15)  # a later year is often greater than either


def both(task: Task, model: HookedModel):
    return task.inputs(model), task.corrupted(model)


# -- what is said -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_the_statement_is_what_was_measured(name):
    task = TRUTH[name]
    assert truth_words.statement(task) == task.statement
    # A claim that does not hold is not written.
    lost = replace(task, heads=[])
    with pytest.raises(ValueError, match="there are"):
        truth_words.statement(lost)
    measured = json.loads(json.dumps(task.measured))
    measured["score"]["with these alone"] = 0.1
    with pytest.raises(ValueError, match="these heads are enough"):
        truth_words.statement(replace(task, measured=measured))


@pytest.mark.parametrize("name", TASKS)
def test_the_heads_are_needed_enough_and_the_only_ones(name, runs, monkeypatch):
    """Measured again, on some of the prompts."""
    monkeypatch.setattr(truth_search, "DRAWS", 3)
    task = runs[name].task
    names = [head.name for head in task.heads]
    minor = [f"L{layer}H{head}" for layer, head in task.minor]
    search = truth_search.Search(runs[name].model, task)
    found = truth_search.together(search, names, minor)
    assert found["as it is"] >= 0.9
    assert found["with these alone"] >= 0.75
    assert found["without as many others, at worst"] >= 0.75
    assert found["without these"] < found["as it is"] - 0.1
    assert found["with these of the counterpart"] <= found["of the counterparts"] + 0.1
    assert found["with all others of the counterpart"] >= 0.85
    # As many heads, one block too late, are not enough.
    late = {f"L{(head.layer + 1) % len(task.mlps)}H{head.head}" for head in task.heads}
    others = joined("", (one for name, one in search.means("heads").items() if name not in late))
    assert search.scores([others])[0] < found["with these alone"] - 0.1


# -- what finds it ------------------------------------------------------------------------------------


def least(tool: str) -> tuple[float, float]:
    return LEAST_AUC[tool] if tool in LEAST_AUC else LEAST_AUC[tool.split(", ")[0]]


def found_with(name: str, tool: str, found: torch.Tensor):
    return score(found, TRUTH[name], truth_tools.found_by(TRUTH[name])[tool][1])


@pytest.mark.parametrize(("name", "tool"), EVERY_TOOL)
def test_each_tool_finds_the_heads(name, tool, maps):
    found = found_with(name, tool, maps(name, tool))
    assert found.auc >= least(tool)[0]
    if tool != "ablation, zero":
        assert found.precision > found.chance + 0.05


@pytest.mark.parametrize("tool", truth_tools.TOOLS)
def test_each_tool_finds_the_heads_of_most_tasks(tool, maps):
    aucs = [found_with(name, tool, maps(name, tool)).auc for name in TASKS]
    assert sum(aucs) / len(aucs) >= least(tool)[1]


def test_attribution_needs_the_layer_scalars(tiny_model, maps):
    """Without them early blocks seem to write as loudly as late ones."""
    gain = residual_gain([block.layer_scalar for block in tiny_model.blocks])
    right, loud = [], []
    for name in TASKS:
        found = maps(name, "attribution")
        right.append(found_with(name, "attribution", found).auc)
        loud.append(found_with(name, "attribution", found / gain.to(found)[:, None]).auc)
    assert sum(loud) < sum(right) - 0.1 * len(TASKS)


@pytest.mark.parametrize("tool", truth_tools.TOOLS)
def test_a_block_too_far_finds_little(tool, maps):
    """A map whose rows are one block late."""
    right = [found_with(name, tool, maps(name, tool)).auc for name in TASKS]
    late = [found_with(name, tool, maps(name, tool).roll(1, dims=0)).auc for name in TASKS]
    assert sum(late) < sum(right) - 0.15 * len(TASKS)
    assert sum(late) / len(TASKS) < 0.7


# Where the answer's word stands, or what decides it: the one place in which prompt and counterpart differ.
DIFFER = {
    "gifts": "the giver's name, the second time",
    "facts": "the country",
    "years": "the first year",
    "code": "the code",
    "colour": "the shape's patch",
}


@pytest.mark.parametrize(("name", "place"), DIFFER.items())
def test_patching_finds_the_place_and_the_block_that_reads_it(name, place, runs):
    run = runs[name]
    metric = run.task.metric(run.model)

    def back(where):
        both = (run.inputs, run.corrupted)
        return patch(run.model, *both, metric, units="resid_pre", positions=where).recovered()

    source, last = run.task.where(place), run.task.where("the last token")
    there, arrived = back(source), back(last)
    assert there[0] > 0.9 and arrived[0] < 0.05  # all of it lies there at first, nothing at the end
    assert there[-1] < 0.5 < arrived[-1]  # and the other way round in the last block
    readers = [head.layer for head in run.task.heads if head.reads == place]
    assert there[min(readers)] > there[min(readers) + 1] + 0.2
    beside = source.roll(1, dims=1) & ~last
    assert back(beside).abs().max() < 0.3 * there[0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("code", "the code"),
        ("having", "its thing"),
        ("repeats", "what followed it"),
        ("gifts", "the receiver's name"),
    ],
)
def test_a_knockout_beside_the_place_finds_nothing(name, place, runs, maps):
    run = runs[name]
    where = run.task.where(place).roll(1, dims=1)
    cut = {"sources": where, "queries": ~where}
    beside = knockout(run.model, None, run.task.metric(run.model), **cut, **run.inputs).grid()
    heads = TRUTH[name].reading(place)
    assert (
        score(beside, TRUTH[name], heads).auc
        < score(maps(name, f"knockout, {place}"), TRUTH[name], heads).auc - 0.1
    )
    assert beside.abs().sum() < 0.5 * maps(name, f"knockout, {place}").abs().sum()


# -- the score ----------------------------------------------------------------------------------------


def test_a_perfect_map_a_random_one_and_a_wrong_one():
    task = TRUTH["repeats"]
    truth = task.truth()
    perfect = score(truth.nan_to_num(0.5), task)
    assert perfect.auc == perfect.precision == 1 and not perfect.missed and not perfect.wrong
    wrong = score(1 - truth.nan_to_num(0.5), task)
    assert wrong.auc == wrong.precision == 0 and len(wrong.missed) == wrong.k
    flat = score(torch.zeros_like(truth), task)
    assert flat.auc == 0.5
    generator = torch.Generator().manual_seed(0)
    drawn = [score(torch.rand(truth.shape, generator=generator), task) for _ in range(300)]
    aucs = torch.tensor([one.auc for one in drawn])
    assert aucs.mean() == pytest.approx(0.5, abs=0.03)
    assert aucs.std() == pytest.approx(flat.auc_spread, rel=0.15)
    mean_precision = sum(one.precision for one in drawn) / len(drawn)
    assert mean_precision == pytest.approx(flat.chance, abs=0.03)


def test_the_size_of_a_number_counts_unless_the_highest_are_asked_for():
    task = TRUTH["code"]
    lower = -task.truth().nan_to_num(0.5)
    assert score(lower, task).auc == 1
    assert score(lower, task, largest="highest").auc == 0


def test_lists_of_heads_and_results_of_sweeps_are_taken_too(runs):
    task = TRUTH["code"]
    named = [head.name for head in task.heads]
    assert score(named, task).precision == score(named, "code").precision == 1
    assert score(named[:2], task).k == 2 and score(named[:2], task).precision == 1
    others = [(i, j) for i, j in (task.truth() == 0).nonzero().tolist()]
    half = score([*((h.layer, h.head) for h in task.heads[:1]), *others[:1]], task)
    assert half.precision == 0.5 and half.wrong == [f"L{others[0][0]}H{others[0][1]}"]
    run = runs["code"]
    found = ablate(
        run.model, run.inputs, run.task.metric(run.model), mode="mean", per_position=True
    )
    assert score(found, task) == score(found.grid(), task)


def test_heads_in_between_count_neither_way():
    task = next(task for task in TRUTH.values() if task.minor)
    first = [*task.minor, *((head.layer, head.head) for head in task.heads)]
    assert score(first, task).auc == 1
    assert score(first, task).precision == 1


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(3, 4), "a map is"),
        (torch.full((8, 4), torch.nan), "not finite"),
        ([], "empty"),
        ([(3, 0), (3, 0)], "twice"),
        ([(99, 0)], "no head"),
        (["3.2"], "a head is"),
    ],
)
def test_what_is_no_answer_is_refused(found, message):
    with pytest.raises(ValueError, match=message):
        score(found, TRUTH["code"])


def test_another_task_and_another_place_are_refused():
    with pytest.raises(KeyError, match="repeats, gifts"):
        TRUTH["chess"]
    with pytest.raises(ValueError, match="the code"):
        TRUTH["code"].where("the moon")
    with pytest.raises(ValueError, match="largest"):
        score(torch.zeros(8, 4), TRUTH["code"], largest="smallest")
    mine = [one.name for one in TRUTH["code"].heads]
    others = [one for one in TRUTH["gifts"].heads if one.name not in mine]
    with pytest.raises(ValueError, match=f"{others[0].name}.*not among the heads of 'code'"):
        score(torch.zeros(8, 4), TRUTH["code"], heads=others)


# -- whose truth it is --------------------------------------------------------------------------------


def test_other_weights_are_refused(tiny_model):
    other = HookedModel.from_pretrained("tiny")
    with torch.no_grad():
        other.blocks[2].attn.w_o[0, 0] += 1e-3
    with pytest.raises(CheckpointError, match="not those that this is the truth about"):
        TRUTH["code"].inputs(other)
    with pytest.raises(CheckpointError):
        TRUTH["colour"].corrupted(HookedModel.from_pretrained("tiny", dtype=torch.bfloat16))
    wide = HookedModel.from_pretrained("tiny", dtype=torch.float64)
    assert len(TRUTH["code"].inputs(wide)["input_ids"]) == len(TRUTH["code"].prompts)


def test_a_file_about_other_weights_is_refused(tmp_path):
    for file in ("config.json", FILE, "model.safetensors"):
        shutil.copy(TINY / file, tmp_path / file)
    assert isinstance(load(tmp_path), GroundTruth)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="make it again"):
        load(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(FileNotFoundError, match=FILE):
        load(tmp_path)


def test_the_script_compares(tmp_path):
    import ground_truth

    there = json.loads((TINY / FILE).read_text())
    assert ground_truth.differences(there, json.loads(ground_truth.text_of(there))) == []
    now = json.loads(json.dumps(there))
    now["tasks"]["code"]["heads"][0]["share"] += 0.001
    assert ground_truth.differences(there, now) == []
    now["tasks"]["code"]["heads"].pop()
    assert ground_truth.differences(there, now)


@pytest.mark.slow
def test_the_file_is_what_the_script_finds():
    command = [sys.executable, TINY / "ground_truth.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_run():
    ran = doctest.testmod(ground_truth_module)
    assert ran.attempted and not ran.failed


def test_a_metric_of_other_prompts_is_refused(tiny_model):
    task = TRUTH["code"]
    with pytest.raises(ValueError, match="of a task's 2 prompts, and the run has 4"):
        ablate(tiny_model, task.some(4).inputs(tiny_model), task.some(2).metric(tiny_model))
