"""The notebooks run from top to bottom without the network, their numbers are what their words say, what is committed is
what they show today, and one line makes them run on another checkpoint.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from functools import partial
from pathlib import Path

import nbformat
import pytest
import small
import talking
import torch
from execute import execute, main, troubles
from nbformat.v4 import new_code_cell, new_notebook

import lens_gemma4

ROOT = Path(__file__).parent.parent
LENS, DIRECT = NAMES = ("logit_lens", "direct_logit_attribution")
MODEL_LINE = re.compile(r'^MODEL = "tiny"', flags=re.MULTILINE)
LARGEST = 1_500_000  # bytes of a committed notebook

OFFLINE = """
import os, socket
os.environ["HF_HUB_OFFLINE"] = "1"
def refuse(*args, **kwargs):
    raise AssertionError(f"a notebook asked for the network: {args}")
socket.getaddrinfo = refuse
"""
# What the tests read in the kernel after the last cell.
VALUES = {
    LENS: {
        "kl": "lens.kl[last].tolist()",
        **{name: name for name in "last_difference ranks_kept too_sure running_miss".split()},
        **{name: name for name in "frozen_miss lens_miss held_out works".split()},
        "others": "int(others)",
    },
    DIRECT: {
        **{name: name for name in "plain_miss weighted_miss plain_logit weighted_logit".split()},
        **{name: name for name in "asked remainder head_remainder source_remainder".split()},
        **{name: name for name in "neuron_remainder norm_miss no_norm_miss split_miss".split()},
        **{name: name for name in "halved_before halved_after strongest ranks_kept slope".split()},
        **{name: name for name in "with_cap without_cap".split()},
        "heads": "heads.tolist()",
        "other_parts": "[value.item() for value in by_head.others.values()]",
        "effects": "effects.drop(columns='head').to_dict('list')",
        "shrunk": "shrunk['shrunk by 1 %'].tolist()",
        "predicted": "shrunk['predicted'].tolist()",
        "logprob": "[x.item() for x in (by_logprob.sum(), by_logprob.total, by_logprob.actual)]",
    },
}
# After everything else: the cell with the sums once more, as if nobody knew of the scalars.
FORGET = "attribution.gains_at = lambda scalars, layer: [1.0] * (layer + 1)"
SUMS = "sum_of_writes"


def committed(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def run(name, folder, model=None):
    """Execute a copy, and read the kernel's values at the end."""
    notebook = committed(name)
    shown = len(notebook.cells)
    if model is not None:
        sources = [cell for cell in notebook.cells if cell.cell_type == "code"]
        places = [cell for cell in sources if MODEL_LINE.search(cell.source)]
        assert places == sources[:1]  # in the first code cell and nowhere else
        places[0].source = MODEL_LINE.sub(f"MODEL = {str(model)!r}", places[0].source)
    sums = [cell.source for cell in notebook.cells if cell.id == SUMS]
    told = ", ".join(f"{key!r}: {value}" for key, value in VALUES[name].items())
    after = [f"import json\nprint(json.dumps({{{told}}}))", *(FORGET for _ in sums), *sums]
    after += ["print(json.dumps([plain_miss, weighted_miss]))" for _ in sums]
    notebook.cells.insert(0, new_code_cell(OFFLINE, id="offline"))
    notebook.cells += [new_code_cell(source, id=f"after{i}") for i, source in enumerate(after)]
    wrong = execute(notebook, folder)
    assert not wrong, "\n".join(wrong)
    values = json.loads(notebook.cells[shown + 1].outputs[0].text)
    if sums:
        values["forgotten"] = json.loads(notebook.cells[-1].outputs[0].text)
    notebook.cells = notebook.cells[1 : shown + 1]
    return notebook, values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {name: run(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another checkpoint for the same texts: bfloat16 as the 12B is, other sizes, blocks that borrow keys and values."""
    folder = tmp_path_factory.mktemp("other")
    text = small.SHARED | {"vocab_size": 1254, "final_logit_softcapping": 30.0}
    talking.make(folder, torch.bfloat16, **text)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "weights" / "tiny" / file, folder)
    return folder


# -- what is committed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_was_run_in_order_and_is_small(name):
    notebook = committed(name)
    assert troubles(notebook) == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_what_the_notebook_shows_today(name, runs):
    """`make notebooks` runs them again."""
    then, now = committed(name), runs[name][0]
    assert stale(then, now) == []
    changed = copy.deepcopy(then)
    said = next(o for cell in changed.cells for o in cell.get("outputs", []) if words(o))
    said.data["text/markdown"] = re.sub(r"\d", "9", said.data["text/markdown"])
    assert len(stale(changed, now)) == 1  # the control: another number
    said.data["text/markdown"] = "Something else."
    assert len(stale(changed, now)) == 1


NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?")


def words(output):
    return output.get("data", {}).get("text/markdown", "")


def stale(then, now):
    """Cells whose outputs are others: of another kind, with other words or, beyond rounding, with other numbers."""
    found = []
    for old, new in zip(then.cells, now.cells, strict=True):
        assert old.source == new.source
        before, after = old.get("outputs", []), new.get("outputs", [])
        kinds = [
            [(o.output_type, sorted(o.get("data", {}))) for o in some] for some in (before, after)
        ]
        text = ["\n".join(map(words, some)) for some in (before, after)]
        numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(some)] for some in text]
        same = kinds[0] == kinds[1] and NUMBER.sub("#", text[0]) == NUMBER.sub("#", text[1])
        if not same or numbers[0] != pytest.approx(numbers[1], rel=0.05, abs=0.01):
            found.append(f"{old.id}: {text[0]!r}, now {text[1]!r}")
    return found


# -- what they say ------------------------------------------------------------------------------------


def check_sums(values, rounding):
    """The weighted sum is the stream; what leaves the scalars or the post-norms out is not."""
    assert values["weighted_miss"] < 1e-4 and values["plain_miss"] > 0.1
    assert values["weighted_logit"] == pytest.approx(values["asked"], abs=rounding)
    assert abs(values["plain_logit"] - values["asked"]) > 0.1


def check_attribution(values, rounding):
    check_sums(values, rounding)
    for name in ("remainder", "head_remainder", "source_remainder", "neuron_remainder"):
        assert abs(values[name]) < 1e-4, name
    assert values["norm_miss"] < rounding and values["no_norm_miss"] > 0.1
    assert values["halved_before"] < 0.1 * values["halved_after"]
    assert values["split_miss"] < rounding
    assert values["ranks_kept"] and 0 < values["slope"] < 1


def test_attribution_adds_up_on_the_shipped_checkpoint(runs):
    check_attribution(runs[DIRECT][1], rounding=1e-4)


def test_attribution_adds_up_after_changing_one_line(other, tmp_path):
    check_attribution(run(DIRECT, tmp_path, model=other)[1], rounding=0.05)


def test_the_numbers_are_the_models_own(runs, tiny_model):
    """Not only in agreement with each other: the runs are made here once more."""
    values = runs[DIRECT][1]
    prompt = "When Mary and John went to the shop, John gave a drink to"
    answer, versus = (tiny_model.to_single_token(token) for token in (" Mary", " John"))

    def difference(hooks=()):
        with tiny_model.hooks(fwd_hooks=list(hooks)):
            _, cache = tiny_model.run_with_cache(prompt)
        raw = cache["hook_logits_raw"][0, -1]
        return (raw[answer] - raw[versus]).item()

    def zero(head, z, hook):
        z[:, :, head] = 0

    asked = difference()
    assert values["asked"] == pytest.approx(asked, abs=1e-4)
    assert sum(values["heads"]) + sum(values["other_parts"]) == pytest.approx(asked, abs=1e-4)
    for i, place in enumerate(values["strongest"][:3]):
        layer, head = divmod(place, tiny_model.cfg.n_heads)
        zeroed = difference([(f"blocks.{layer}.attn.hook_z", partial(zero, head))]) - asked
        assert values["effects"]["zeroed"][i] == pytest.approx(zeroed, abs=1e-3)
        assert values["effects"]["direct"][i] != pytest.approx(zeroed, abs=0.05)
        assert values["effects"]["subtracted"][i] != pytest.approx(zeroed, abs=0.05)
    probability = tiny_model(prompt)[0, -1].softmax(-1)[answer].item()
    assert values["with_cap"] == pytest.approx(probability, abs=1e-5)
    assert values["without_cap"] - probability > 1e-3


def test_first_order_predicts_small_changes_and_is_no_sum(runs):
    values = runs[DIRECT][1]
    found, predicted = (torch.tensor(values[name]).double() for name in ("shrunk", "predicted"))
    assert (found - predicted).norm() < 0.1 * found.norm()
    assert (found + predicted).norm() > found.norm()
    total_of_parts, total, actual = values["logprob"]
    assert total_of_parts == pytest.approx(total, abs=1e-4)
    assert abs(total - actual) > 0.01


def check_lens(values, rounding):
    assert values["last_difference"] == 0.0  # to the bit
    assert values["kl"][-1] == pytest.approx(0, abs=1e-6) and min(values["kl"][:-1]) > 0.01
    assert values["ranks_kept"] and values["too_sure"] > 1e-3
    assert values["running_miss"] < rounding and values["frozen_miss"] > 0.1
    assert values["lens_miss"] < rounding
    assert values["others"] > 0


def test_the_lens_ends_in_the_model(runs):
    check_lens(runs[LENS][1], rounding=1e-4)


def test_the_lens_ends_in_the_model_after_changing_one_line(other, tmp_path):
    check_lens(run(LENS, tmp_path, model=other)[1], rounding=0.1)


def test_the_tuned_lens_is_nearer_at_every_block_but_the_last(runs):
    held_out = runs[LENS][1]["held_out"]
    untuned, tuned = held_out["logit lens"], held_out["tuned lens"]
    assert all(t < u for t, u in zip(tuned[:-1], untuned[:-1], strict=True))
    assert tuned[-1] == untuned[-1] == pytest.approx(0, abs=1e-6)


def test_a_patched_country_is_spoken_of(runs):
    works = runs[LENS][1]["works"]
    assert works["true"] >= works["false"] >= 1


# -- these checks can fail ----------------------------------------------------------------------------


def test_without_the_scalars_the_check_of_sums_fails(runs):
    plain, weighted = runs[DIRECT][1]["forgotten"]
    assert weighted == pytest.approx(plain, rel=1e-4)
    with pytest.raises(AssertionError):
        check_sums(runs[DIRECT][1] | {"weighted_miss": weighted}, rounding=1e-4)


def test_a_broken_cell_is_seen_and_nothing_is_kept(tmp_path, capsys):
    sources = [
        OFFLINE,
        "1 / 0",
        "import sys\nprint('a word', file=sys.stderr)",
        "socket.create_connection(('example.org', 80))",
        "print('fine')",
    ]
    notebook = new_notebook(
        cells=[new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    )
    file = tmp_path / "broken.ipynb"
    nbformat.write(notebook, file)
    text = file.read_text(encoding="utf-8")
    assert main([str(file)]) == 1
    said = capsys.readouterr().err
    assert "cell c1: ZeroDivisionError" in said and "cell c2, standard error: a word" in said
    assert "cell c3: AssertionError: a notebook asked for the network" in said
    assert "c0" not in said and "c4" not in said
    assert file.read_text(encoding="utf-8") == text
    assert [trouble.split()[1] for trouble in troubles(notebook)] == ["c0", "c1", "c2", "c3", "c4"]


def test_the_package_knows_nothing_of_notebooks():
    package = Path(lens_gemma4.__file__).parent
    known = [path.read_text(encoding="utf-8") for path in package.glob("*.py")]
    assert known and not any(
        re.search(r"IPython|ipykernel|nbformat|nbclient", text) for text in known
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    runtime = project.split("[project.optional-dependencies]")[0]
    assert "torch" in runtime and "nbclient" in project
    assert not re.search(r"ipykernel|nbformat|nbclient", runtime)
