"""The notebooks run from top to bottom without the network, their numbers are what their words say, what is committed is
what they show today, and one line makes them run on another checkpoint.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
import seeing
import shapes
import small
import talking
import torch
from execute import execute, main, troubles
from nbformat.v4 import new_code_cell, new_notebook
from torch.utils.flop_counter import FlopCounterMode
from words import COLOURS

import lens_gemma4
from lens_gemma4 import HookedConfig, ablate, logit, patch
from lens_gemma4.loading import manifest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "weights" / "tiny"
LENS, DIRECT, ABLATION, IMAGES, TOUR, GIFTS, STEERING, SIZES = NAMES = (
    *("logit_lens", "direct_logit_attribution", "head_ablation", "image_tokens"),
    *("tour", "patching_ioi", "steering", "tiny_to_12b"),
)
MOST_CELLS = 25
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
    ABLATION: {
        **{name: name for name in "prompts answers others first_name before_names".split()},
        **{name: name for name in "hook_miss bos_moves length_left country unchanged".split()},
        **{name: name for name in "apart_before apart_after ks sets curves rest".split()},
        **{name: name for name in "n_found shared only_needed agreement certain".split()},
        "values": "{way: one.values.tolist() for way, one in found.items()}",
        "intervals": "{way: one.interval().tolist() for way, one in found.items()}",
        "heads": "list(means.index)",
        "shares": "shares.T.to_dict('list')",
        "attn_map": "attn_map.tolist()",
        "last": "table_at_last.to_dict()",
        "by_group": "by_group.T.to_dict()",
        "recovered": "recovered.tolist()",
        "ends": "[patched.source.item(), patched.baseline.item()]",
        "by_block": "by_block.values[:, 0].tolist()",
        "by_head": "by_head.values.view(n_layers, -1).tolist()",
        "twice": "twice.tolist()",
        "scores": "scores.tolist()",
        "induction": "induction.T.to_dict()",
    },
    IMAGES: {
        **{name: name for name in "answer versus n_moved n_exactly farthest same counts".split()},
        **{name: name for name in "padded_moves real_moves rules_apart shares n_names".split()},
        **{name: name for name in "from_picture from_words rest asked remainder".split()},
        **{name: name for name in "without_quarter sum_of_quarter n_quarter".split()},
        **{name: name for name in "said circle cuts carried same_pixels".split()},
        "recovered": "recovered.tolist()",
        "positions": "span.positions.tolist()",
        "effects": "effects.tolist()",
        "read": "read.tolist()",
        "at": "PATCH[1] * span.shape[0] + PATCH[0]",
        "moved": "moved.tolist()",
        "moved_exactly": "moved_exactly.tolist()",
        "pixels": "torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(384, 384, 3).tolist()",
    },
}
VALUES |= {
    TOUR: {
        **{name: name for name in "one_tensor sums n_kept n_early to_the_bit says country".split()},
        **{name: name for name in "name lost lost_beside plain steered text n_written".split()},
        "probability": "probability[answer].item()",
        "looks": "looks.tolist()",
        "grid": "grid.tolist()",
        "baseline": "found.baseline.item()",
        "words": "[PROMPT, OTHER, ANSWER, OTHER_ANSWER]",
        "by_block": "by_block.mean().tolist()",
    },
    GIFTS: {
        **{name: name for name in "clean corrupted people again differs right ends".split()},
        **{name: name for name in "telling by_looking movers tells from_receiver cuts".split()},
        **{name: name for name in "guessed exact ks faithful without same_sign".split()},
        "stream_map": "stream_map.tolist()",
        "recovered": "recovered.to_dict()",
        "parts": "parts.T.to_dict()",
        "places": "[at_receiver.tolist(), at_giver.tolist()]",
        "seen": "{name: row[SEEN].tolist() for name, row in circuit.iterrows()}",
        "works_at": "circuit['works at'].to_dict()",
        "to_logits": "to_logits.to_dict()",
        "told_by": "told_by.to_dict()",
        "end": "tokens.shape[1] - 1",
    },
    STEERING: {
        **{name: name for name in "knows works best weak strong is_country is_word".split()},
        **{name: name for name in "strength FACTORS layer forgets written unsteered_after".split()},
        **{name: name for name in "pairs COUNTRIES MADE_FROM ASKED LANGUAGE K".split()},
        "relative": "relative.tolist()",
        "lengths": "[v.norm(dim=-1).mean().item() for v in (vectors, random_vectors)]",
        "answers": "[capitals.tolist(), languages.tolist()]",
        "random_language": "by_meaning['its language, random, strength 3']",
        "price": "price.to_dict()",
    },
    SIZES: {
        **{name: name for name in "weights held exact counted real work finite".split()},
        **{name: name for name in "kv_counted kv_grows LONG same_choice apart local_apart".split()},
        **{name: name for name in "RELEASED POS spared rate grows LENGTHS n_long".split()},
        "kv_held": "kv.nbytes",
        "kl": "kl.max().item()",
        "left": "[remaining('here', POS, *how)[1] for how in list(SWEEPS.values())[:3]]",
        "costs": "costs.to_dict()",
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


class Runs:
    """Each notebook is run when it is first asked for."""

    def __init__(self, folder_of):
        self.folder_of, self.done = folder_of, {}

    def __getitem__(self, name):
        if name not in self.done:
            self.done[name] = run(name, self.folder_of(name))
        return self.done[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another checkpoint for the same texts: bfloat16 as the 12B is, other sizes, blocks that borrow keys and values."""
    folder = tmp_path_factory.mktemp("other")
    vocabulary = json.loads((TINY / "config.json").read_text())["text_config"]["vocab_size"]
    text = small.SHARED | {"vocab_size": vocabulary, "final_logit_softcapping": 30.0}
    talking.make(folder, torch.bfloat16, **text)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, folder)
    return folder


# -- what is committed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_was_run_in_order_and_is_small(name):
    notebook = committed(name)
    assert troubles(notebook) == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert len(notebook.cells) <= MOST_CELLS
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
        measured = "measured" in old.metadata.get("tags", [])  # times are other times
        if not same or not (
            measured or numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.01)
        ):
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
    assert 1 - values["without_cap"] < 0.5 * (1 - probability)  # without it, too sure


def test_first_order_predicts_small_changes_and_is_no_sum(runs):
    values = runs[DIRECT][1]
    found, predicted = (torch.tensor(values[name]).double() for name in ("shrunk", "predicted"))
    assert (found - predicted).norm() < 0.1 * found.norm()
    assert (found + predicted).norm() > found.norm()
    total_of_parts, total, actual = values["logprob"]
    assert total_of_parts == pytest.approx(total, abs=1e-4)
    assert abs(total - actual) > 0.1 * max(abs(total), abs(actual))


def check_lens(values, rounding):
    assert values["last_difference"] == 0.0  # to the bit
    assert values["kl"][-1] == pytest.approx(0, abs=1e-6) and min(values["kl"][:-1]) > 1e-4
    assert values["ranks_kept"] and values["too_sure"] > 1e-4
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


def test_a_patched_name_is_the_one_that_is_named(runs):
    works = runs[LENS][1]["works"]
    assert works["true"] >= works["false"] >= 1


# -- head ablation ------------------------------------------------------------------------------------


def check_ablation(values, rounding):
    """What holds of any checkpoint."""
    assert values["hook_miss"] < rounding
    largest = torch.tensor(values["attn_map"]).abs().max()
    assert values["before_names"] < min(rounding, 0.2 * largest)
    assert all(sum(shares) == pytest.approx(1, abs=1e-6) for shares in values["shares"].values())
    carried = torch.tensor(values["recovered"])[:, values["country"]]
    assert carried[0] == pytest.approx(1, abs=rounding)
    assert values["recovered"][0][-1] == pytest.approx(0, abs=rounding)
    assert values["apart_after"] < rounding < values["apart_before"]
    assert 0.5 < values["length_left"] < 2
    assert values["unchanged"]
    for kind, some in values["sets"].items():
        draws = len(some) // len(values["ks"])
        assert [len(names) for names in some] == [k for k in values["ks"] for _ in range(draws)]
        assert kind != "of the rest" or set().union(*some) <= set(values["rest"])
    found = {name for some in list(values["sets"].values())[:2] for names in some for name in names}
    assert values["rest"] and not found & set(values["rest"])


def test_ablation_holds_together_on_the_shipped_checkpoint(runs):
    check_ablation(runs[ABLATION][1], rounding=1e-4)


def test_ablation_holds_together_after_changing_one_line(other, tmp_path):
    check_ablation(run(ABLATION, tmp_path, model=other)[1], rounding=0.1)


def asked(model, values, hooks=()):
    """The notebook's question, by hooks: receiver minus giver, `[prompt]`."""
    tokens = model.to_tokens(values["prompts"])
    logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks))[:, -1]
    rows = range(len(tokens))
    return logits[rows, values["answers"]] - logits[rows, values["others"]]


def kept(model, values, name):
    return model.run_with_cache(model.to_tokens(values["prompts"]), names_filter=[name])[1][name]


def put(heads, new):
    """A hook that puts something in the place of heads' z."""

    def edit(z, hook):
        z[:, :, heads] = new

    return edit


def place_of(name):
    return map(int, re.fullmatch(r"L(\d+)[HKV]+(\d+)", name).groups())


def close(found, wanted, to=1e-3):
    return torch.tensor(found) == pytest.approx(wanted, abs=to)


def telling(values, tiny_model):
    """The head that zero changes most, the one that resampling does, and where these two differ most."""
    clean = asked(tiny_model, values).mean()
    zero, resample = (
        torch.tensor(values["values"][way]).mean(1) - clean for way in ("zero", "resample")
    )
    most = [effect.abs().argmax().item() for effect in (zero, resample, zero - resample)]
    return [values["heads"][i] for i in dict.fromkeys(most)]


def test_each_way_of_ablation_is_what_hooks_make_of_it(runs, tiny_model):
    values = runs[ABLATION][1]
    beyond = [one_way_is_its_own(name, values, tiny_model) for name in telling(values, tiny_model)]
    assert values["bos_moves"] > 0.01 and any(beyond)


def one_way_is_its_own(name, values, tiny_model):
    """Checks a head's effects; whether zero does what no other prompt's z does."""
    layer, head = place_of(name)
    point = f"blocks.{layer}.attn.hook_z"
    z = kept(tiny_model, values, point)[:, :, head]  # [prompt pos d_head]
    found = {way: each[values["heads"].index(name)] for way, each in values["values"].items()}

    def instead(new):
        return asked(tiny_model, values, [(point, put(head, new))])

    own = {
        "zero": instead(0),
        "mean": instead(z[:, 1:].mean((0, 1))),
        "mean by position": instead(z.mean(0)),
    }
    for way, wanted in own.items():
        assert close(found[way], wanted)
        assert not any(close(found[w], wanted, to=0.01) for w in found if w != way)
    # Every other prompt's, in turn: a mean of some of these lies between the least and the largest.
    donors = torch.stack([instead(z.roll(i, 0)) for i in range(1, len(z))])  # [donor prompt]
    low, high = donors.min(0).values - 1e-3, donors.max(0).values + 1e-3
    drawn, zeroed = (torch.tensor(found[way]) for way in ("resample", "zero"))
    assert ((low <= drawn) & (drawn <= high)).all()
    return not ((low <= zeroed) & (zeroed <= high)).all()


def test_intervals_are_those_of_another_bootstrap(runs, tiny_model):
    values = runs[ABLATION][1]
    clean = asked(tiny_model, values)
    generator = torch.Generator().manual_seed(7)
    for way, each in values["values"].items():
        effect = torch.tensor(each) - clean  # [head prompt]
        chosen = torch.randint(effect.shape[1], (2000, effect.shape[1]), generator=generator)
        own = effect[:, chosen].mean(-1).quantile(torch.tensor([0.025, 0.975]), dim=1)
        found = torch.tensor(values["intervals"][way])
        width = (own[1] - own[0]).clamp(min=1e-3)
        assert ((found - own).abs() < 0.25 * width).all()
        spread = effect.quantile(torch.tensor([0.025, 0.975]), dim=1)  # the control: of prompts
        assert not ((found - spread).abs() < 0.25 * width).all()
    low, high = torch.tensor(values["intervals"]["resample"])
    sure = ((low > 0) | (high < 0)).tolist()
    assert values["certain"] == [n for n, some in zip(values["heads"], sure, strict=True) if some]
    assert 0 < len(values["certain"]) < len(sure)


def test_how_much_of_a_head_tells_prompts_apart_is_in_its_z(runs, tiny_model):
    values = runs[ABLATION][1]
    assert set(telling(values, tiny_model)) & {*values["shares"]}
    for name, (always, by_position, by_prompt) in values["shares"].items():
        layer, head = place_of(name)
        z = kept(tiny_model, values, f"blocks.{layer}.attn.hook_z")[:, 1:, head].double()
        square = z.square().sum(-1).mean()
        own = z.var(0, correction=0).sum(-1).mean() / square
        assert by_prompt == pytest.approx(own.item(), abs=1e-5)
        varies = z.flatten(0, 1).var(0, correction=0).sum() / square
        assert by_position + by_prompt == pytest.approx(varies.item(), abs=1e-5)
        assert always == pytest.approx(1 - varies.item(), abs=1e-5)
    told = [by_prompt for _, _, by_prompt in values["shares"].values()]
    assert max(told) - min(told) > 0.01  # the control: heads differ in it


def test_what_heads_do_at_the_last_position_is_told_from_the_rest(runs, tiny_model):
    """What the last block writes elsewhere nobody reads; of what earlier ones write much is read."""
    last = runs[ABLATION][1]["last"]
    apart = {
        name: last["everywhere"][name] - last["last position"][name] for name in last["everywhere"]
    }
    final = [n for n in apart if n.startswith(f"L{tiny_model.cfg.n_layers - 1}H")]
    assert all(abs(apart[name]) < 1e-3 for name in final)
    assert max(abs(apart[name]) for name in apart if name not in final) > 0.2


def test_a_group_is_its_heads_together_and_not_their_sum(runs, tiny_model):
    values = runs[ABLATION][1]
    clean = asked(tiny_model, values)
    assert len(values["by_group"]) == 6 * 2 + 2
    rows = values["by_group"]
    most = max(rows, key=lambda name: abs(rows[name]["difference"]))
    for name in dict.fromkeys(("L3KV0", "L7KV0", most)):
        layer, group = place_of(name)
        size = 4 if layer in (3, 7) else 2
        point, heads = f"blocks.{layer}.attn.hook_z", range(group * size, (group + 1) * size)
        together = asked(tiny_model, values, [(point, put(slice(heads.start, heads.stop), 0))])
        each = [asked(tiny_model, values, [(point, put(head, 0))]) - clean for head in heads]
        row = rows[name]
        assert row["heads"] == size and row["block"] == ("full" if size == 4 else "sliding")
        assert row["together"] == pytest.approx((together - clean).mean().item(), abs=1e-3)
        assert row["sum of its heads"] == pytest.approx(sum(each).mean().item(), abs=1e-3)
        assert name != most or abs(row["together"] - row["sum of its heads"]) > 0.3
    assert values["length_left"] == pytest.approx(1, abs=0.1)


def test_patching_and_knockout_are_what_hooks_make_of_them(runs, tiny_model):
    values, country = runs[ABLATION][1], 4
    clean, corrupted = (f"The capital of {name} is" for name in ("France", "Italy"))
    ids = [tiny_model.to_single_token(word) for word in (" Paris", " Rome")]

    def difference(prompt, hooks=()):
        logits = tiny_model.run_with_hooks(prompt, fwd_hooks=list(hooks))[0, -1]
        return (logits[ids[0]] - logits[ids[1]]).item()

    source, base = ends = [difference(clean), difference(corrupted)]
    assert values["ends"] == pytest.approx(ends, abs=1e-3) and values["country"] == country
    recovered = torch.tensor(values["recovered"])  # where some of the way is gone, not none or all
    some = (recovered - 0.5).abs().flatten().argsort()[:3].tolist()
    for layer, pos in (divmod(place, recovered.shape[1]) for place in some):
        point = f"blocks.{layer}.hook_resid_pre"
        stream = tiny_model.run_with_cache(clean, names_filter=[point])[1][point]

        def swap(value, hook, stream=stream, pos=pos):
            value[:, pos] = stream[:, pos]

        way = (difference(corrupted, [(point, swap)]) - base) / (source - base)
        assert values["recovered"][layer][pos] == pytest.approx(way, abs=1e-4)
        assert 0.01 < way < 0.99

    def blind(heads, renormalise=True):
        def edit(value, hook):
            value[:, heads, -1, country] = torch.finfo(value.dtype).min if renormalise else 0

        return edit

    by_block, by_head = (torch.tensor(values[name]) for name in ("by_block", "by_head"))
    readers = by_block.argsort()[:2].tolist()  # what most depends on
    for layer in readers:
        head = by_head[layer].argmin().item()
        scores, pattern = (
            f"blocks.{layer}.attn.hook_{kind}" for kind in ("attn_scores", "pattern")
        )
        wanted = difference(clean, [(scores, blind(slice(None)))])
        other = difference(clean, [(pattern, blind(slice(None), renormalise=False))])
        assert values["by_block"][layer] == pytest.approx(wanted, abs=1e-3)
        if layer == readers[0]:  # the controls
            assert abs(wanted - other) > 0.05 and abs(wanted - source) > 1
        wanted = difference(clean, [(scores, blind(head))])
        assert values["by_head"][layer][head] == pytest.approx(wanted, abs=1e-3)


def test_induction_heads_are_found_and_confirmed(runs, tiny_model):
    values = runs[ABLATION][1]
    tokens = torch.tensor(values["twice"])  # [row pos]
    length = tokens.shape[1] // 2
    at = range(length + 1, 2 * length)
    names = [f"blocks.{i}.attn.hook_pattern" for i in range(8)]
    _, cache = tiny_model.run_with_cache(tokens, names_filter=names)
    # The last position too has a place to look at, and no token after it.
    patterns = torch.stack([cache[name] for name in names])  # [layer row head pos kv_pos]
    seen = [patterns[..., q, q - length + 1] for q in (*at, 2 * length)]
    scores = torch.stack(seen).mean((0, 2))  # [layer head]
    assert close(values["scores"], scores, to=1e-4)
    duplicate = torch.stack([patterns[..., q, q - length] for q in at]).mean((0, 2))
    assert not close(values["scores"], duplicate, to=0.1)  # the control: one position beside
    strongest = scores.flatten().argsort(descending=True)[: values["n_found"]].tolist()
    assert {i // 4 for i in strongest} <= {3, 7} and len(strongest) >= 4

    def log_prob(names):
        def emptied(name):
            layer, head = place_of(name)
            z = clean[f"blocks.{layer}.attn.hook_z"]
            return f"blocks.{layer}.attn.hook_z", put(head, z[:, 1:, head].mean((0, 1)))

        logits = tiny_model.run_with_hooks(tokens, fwd_hooks=[emptied(name) for name in names])
        return sum(
            logits[:, p].log_softmax(-1).gather(1, tokens[:, p + 1, None]).mean().item() for p in at
        ) / len(at)

    points = [name.replace("pattern", "z") for name in names]
    _, clean = tiny_model.run_with_cache(tokens, names_filter=points)
    found, others = (values["sets"][kind][-1] for kind in ("induction heads", "of the rest"))
    assert sorted(found) == sorted(f"L{i // 4}H{i % 4}" for i in strongest)
    before, without = log_prob([]), log_prob(found)
    curves = values["curves"]
    assert curves["induction heads"][-1] == pytest.approx(without - before, abs=0.02)
    # Together they are the repeating itself; one of them alone, or as many others, hardly matter.
    assert without - before < -5 < -0.5 < log_prob(others) - before
    assert curves["of the rest"][-1] > -0.5
    assert abs(curves["induction heads"][0]) < 0.05 * abs(curves["induction heads"][-1])
    # What costs the logit most are heads that look there, and those that tell them where.
    logit = {name: row["logit"] for name, row in values["induction"].items()}
    needed = sorted(logit, key=logit.get)[: len(strongest)]
    assert {*found} & {*needed} == {*values["shared"]} and len(values["shared"]) >= 3
    assert values["only_needed"] == [name for name in needed if name not in found]
    assert values["agreement"]["logit"] > values["agreement"]["log-probability"] + 0.1
    assert values["agreement"]["logit"] > 0.3


# -- a tour -------------------------------------------------------------------------------------------


def check_tour(values, n_layers):
    """What holds of any checkpoint."""
    assert values["one_tensor"] and values["to_the_bit"] and values["sums"] < 0.02
    assert values["n_kept"] == n_layers and values["n_early"] == 2
    assert values["text"] == values["plain"] and values["n_written"] <= values["country"] + 5
    grid = torch.tensor(values["grid"])
    layer, head = place_of(values["name"])
    assert grid[layer, head] == grid.min() and len(grid) == n_layers


def test_the_tour_is_true_of_the_shipped_checkpoint(runs, tiny_model):
    values = runs[TOUR][1]
    check_tour(values, tiny_model.cfg.n_layers)
    prompt, _, answer, other_answer = values["words"]
    ids = [tiny_model.to_single_token(word) for word in (answer, other_answer)]
    assert values["says"] == repr(other_answer) and values["probability"] > 0.9
    assert values["plain"].startswith(prompt + answer)
    assert values["steered"].startswith(prompt + other_answer)  # the swap works while it writes

    def difference(hooks=()):
        logits = tiny_model.run_with_hooks(prompt, fwd_hooks=list(hooks))[0, -1]
        return (logits[ids[0]] - logits[ids[1]]).item()

    layer, head = place_of(values["name"])
    point, at = f"blocks.{layer}.attn.hook_z", values["country"]
    asked = difference()
    effect = difference([(point, put(head, 0))]) - asked
    assert values["baseline"] == pytest.approx(asked, abs=1e-3)
    assert values["grid"][layer][head] == pytest.approx(effect, abs=1e-3) and effect < -1
    pattern = tiny_model.run_with_cache(prompt)[1]["pattern", layer][0, head, -1, at]
    assert values["looks"][layer][head] == pytest.approx(pattern.item(), abs=1e-5)

    def blind(position, scores, hook):
        scores[:, head, -1, position] = torch.finfo(scores.dtype).min

    scores = f"blocks.{layer}.attn.hook_attn_scores"
    for told, position in ((values["lost"], at), (values["lost_beside"], at - 1)):
        cut = difference([(scores, partial(blind, position))]) - asked
        assert told == pytest.approx(cut, abs=1e-3)
    assert values["lost"] < -1 < -0.2 < values["lost_beside"]


def test_the_tour_holds_together_after_changing_one_line(other, tmp_path):
    check_tour(run(TOUR, tmp_path, model=other)[1], n_layers=6)


# -- the path of an indirect object -------------------------------------------------------------------


def check_gifts(values, rounding):
    """What holds of any checkpoint."""
    assert values["differs"] == [values["again"]]
    way = torch.tensor(values["stream_map"])  # [layer pos]
    assert way[-1, -1] == pytest.approx(1, abs=rounding)  # the last stream is the answer
    assert way[-1, :-1].abs().max() < rounding
    assert way[:, : values["again"]].abs().max() < rounding  # before it both prompts are alike
    assert all(sum(shares) == pytest.approx(1, abs=0.02) for shares in values["seen"].values())
    assert values["ks"][0] == 0 and values["faithful"][0] == pytest.approx(0, abs=1e-5)
    assert values["without"][0] == pytest.approx(1, abs=1e-5)
    assert set(values["movers"]) <= set(values["to_logits"])


def test_gifts_hold_together_after_changing_one_line(other, tmp_path):
    check_gifts(run(GIFTS, tmp_path, model=other)[1], rounding=0.1)


@pytest.fixture(scope="module")
def gifts(runs, tiny_model):
    """The notebook's values, and its question by hooks: receiver minus giver, `[prompt]`."""
    values = runs[GIFTS][1]
    receivers, givers = torch.tensor(values["people"]).T

    def difference(prompts, hooks=()):
        logits = tiny_model.run_with_hooks(values[prompts], fwd_hooks=list(hooks))[:, -1]
        rows = torch.arange(len(logits))
        return logits[rows, receivers] - logits[rows, givers]

    return values, difference


def test_patching_gifts_is_what_hooks_make_of_it(gifts, tiny_model):
    values, difference = gifts
    check_gifts(values, rounding=1e-4)
    clean, corrupted = (difference(prompts).mean().item() for prompts in ("clean", "corrupted"))
    assert values["right"] == 1 and values["ends"] == pytest.approx([clean, corrupted], abs=1e-3)
    _, cache = tiny_model.run_with_cache(values["clean"])

    def recovered(point, at):
        def swap(value, hook):
            value[at] = cache[point][at]

        found = difference("corrupted", [(point, swap)]).mean()
        return ((found - corrupted) / (clean - corrupted)).item()

    stream = torch.tensor(values["stream_map"])
    halfway = (stream - 0.5).abs().flatten().argsort()[:2].tolist()
    for layer, pos in (divmod(place, stream.shape[1]) for place in halfway):
        way = recovered(f"blocks.{layer}.hook_resid_post", (slice(None), pos))
        assert stream[layer, pos].item() == pytest.approx(way, abs=1e-4) and 0.1 < way < 0.95
    for name in values["telling"][:3]:
        layer, head = place_of(name)
        way = recovered(f"blocks.{layer}.attn.hook_z", (slice(None), slice(None), head))
        beside = recovered(f"blocks.{layer}.attn.hook_z", (slice(None), slice(None), head - 1))
        assert values["recovered"][name] == pytest.approx(way, abs=1e-4)
        assert abs(way - beside) > 1e-3  # the control
    for name in values["movers"]:  # they differ by where they look
        layer, head = place_of(name)
        way = recovered(f"blocks.{layer}.attn.hook_pattern", (slice(None), head))
        assert values["parts"][name]["patterns"] == pytest.approx(way, abs=1e-3)
        assert abs(values["parts"][name]["values of its group"]) < 0.1 * way


def test_the_writers_of_a_gift_read_the_receiver_and_write_it(gifts, tiny_model):
    """The direct path by hand: the write's difference through the post-norm, times the scalars to come."""
    values, _ = gifts
    model, rows = tiny_model, torch.arange(len(values["clean"]))
    receivers, givers = torch.tensor(values["people"]).T
    _, clean = model.run_with_cache(values["clean"])
    _, base = model.run_with_cache(values["corrupted"])
    way = values["ends"][0] - values["ends"][1]
    assert values["movers"]
    for name in values["movers"]:
        layer, head = place_of(name)
        point, added = f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_attn_out"
        seen = {}

        def swap(z, hook, head=head, point=point):
            z[:, :, head] = clean[point][:, :, head]

        def keep(value, hook, seen=seen):
            seen["added"] = value.clone()

        model.run_with_hooks(values["corrupted"], fwd_hooks=[(point, swap), (added, keep)])
        gain = torch.stack([block.layer_scalar for block in model.blocks[layer:]]).prod()
        stream = base["resid_post", -1][:, -1] + gain * (seen["added"] - base[added])[:, -1]
        logits = model.project_on_vocab(stream)
        direct = (logits[rows, receivers] - logits[rows, givers]).mean().item() - values["ends"][1]
        assert values["to_logits"][name] == pytest.approx(direct / way, abs=1e-3)
        assert direct / way > 0.02
        part, total = values["from_receiver"][name]
        assert part > 0.5 * total > 0 and values["seen"][name][0] > 0.4
        pattern = clean["pattern", layer][rows, head, -1, torch.tensor(values["places"][0])]
        assert values["seen"][name][0] == pytest.approx(pattern.mean().item(), abs=1e-4)


def test_the_heads_of_the_circuit_are_enough_and_others_are_not(gifts, tiny_model):
    values, difference = gifts
    place = values["ks"].index(len(values["telling"]))
    every = [
        f"L{i}H{h}" for i in range(tiny_model.cfg.n_layers) for h in range(tiny_model.cfg.n_heads)
    ]
    both = values["clean"] + values["corrupted"]
    names = [f"blocks.{i}.attn.hook_z" for i in range(tiny_model.cfg.n_layers)]
    _, cache = tiny_model.run_with_cache(both, names_filter=names)

    def kept(heads):
        def fill(z, hook):
            mean = cache[hook.name].mean(0)
            for head in range(z.shape[2]):
                if f"L{hook.layer()}H{head}" not in heads:
                    z[:, :, head] = mean[:, head]

        return difference("clean", [(name, fill) for name in names]).mean().item()

    def share(heads):
        return (kept(heads) - kept([])) / (values["ends"][0] - kept([]))

    assert values["faithful"][place] == pytest.approx(share(values["telling"]), abs=1e-3)
    assert values["faithful"][place] > 0.8 > 0.3 > abs(values["without"][place])
    rest = [name for name in every if name not in values["telling"]]
    assert share(rest) == pytest.approx(values["without"][place], abs=1e-3)
    assert share(rest[: len(values["telling"])]) < 0.2  # the control: as many others


def test_cutting_a_gift_is_what_hooks_make_of_it(gifts):
    values, difference = gifts
    clean, rows = difference("clean"), torch.arange(len(values["clean"]))
    columns = {
        "giver again": torch.full_like(rows, values["again"]),
        "receiver": torch.tensor(values["places"][0]),
        "the word before": torch.full_like(rows, values["end"] - 1),
    }
    for what, (each, every) in values["cuts"].items():

        def blind(scores, hook, at=columns[what]):
            scores[rows, :, -1, at] = torch.finfo(scores.dtype).min

        layers = range(len(each))
        most = max(layers, key=lambda i: abs(each[i]))
        for told, blocks in ((each[most], [most]), (every, layers)):
            hooks = [(f"blocks.{i}.attn.hook_attn_scores", blind) for i in blocks]
            cut = (difference("clean", hooks) - clean).mean().item()
            assert told == pytest.approx(cut, abs=1e-3)
    assert abs(values["cuts"]["the word before"][1]) < 0.5
    assert max(values["cuts"][what][1] for what in ("giver again", "receiver")) < -3


def test_edges_were_run(gifts):
    values, _ = gifts
    signs = [g * e > 0 for g, e in zip(values["guessed"], values["exact"], strict=True)]
    assert values["same_sign"] == sum(signs) / len(signs) > 0.8
    assert len(signs) == 30 and values["guessed"] != values["exact"]


# -- steering -----------------------------------------------------------------------------------------


def check_steering(values, rounding):
    """What holds of any checkpoint."""
    assert values["relative"][0][1] < rounding  # the last tokens are alike before any block has run
    plain, random = values["lengths"]
    assert plain == pytest.approx(random, rel=1e-3)
    shares = [share for some in values["works"].values() for share in some]
    assert all(0 <= share <= 1 for share in shares) and values["unsteered_after"]
    assert len(values["pairs"]) == 56 and all(a != b for a, b in values["pairs"])
    own, other, rest, random = values["strength"].values()
    unsteered = values["FACTORS"].index(0.0)
    assert other[unsteered] == pytest.approx(random[unsteered], abs=1e-6)
    assert [sum(one) for one in zip(own, other, rest, strict=True)] == pytest.approx([1] * len(own))
    assert abs(values["forgets"]["last token"][0]) < rounding


def test_steering_holds_together_after_changing_one_line(other, tmp_path):
    check_steering(run(STEERING, tmp_path, model=other)[1], rounding=0.02)


def test_steering_works_beside_its_controls(runs, tiny_model):
    values = runs[STEERING][1]
    check_steering(values, rounding=1e-4)
    works, best = values["works"], values["best"]
    assert min(values["knows"].values()) > 0.9
    for place in ("country", "last"):
        assert works[f"{place} token"][best[place]] > 0.8
        assert max(works[f"random, {place} token"]) < 0.1
    weak, strong, country, word = (values[k] for k in ("weak", "strong", "is_country", "is_word"))
    assert weak[country] > 0.8 > 0.1 > max(values["random_language"])
    assert strong[word] > strong[country] + 0.2  # late, it is a word and no country
    texts, answers = values["written"], tiny_model.to_str_tokens(torch.tensor(values["answers"][0]))
    asked = values["MADE_FROM"][0].format(values["COUNTRIES"][0])
    for kind, answer in (("as it is", 0), ("random", 0), ("steered", 1)):
        assert texts[kind].startswith(asked + answers[answer])
    for place in ("country", "last"):
        assert min(values["forgets"][f"{place} token"]) < -1
        assert min(values["forgets"][f"random, {place} token"]) > -0.5


def test_a_steered_run_is_what_a_hook_makes_of_it(runs, tiny_model):
    """One pair of countries at a time, from streams that are made here."""
    values = runs[STEERING][1]
    countries, layer = values["COUNTRIES"], values["best"]["last"]
    point = f"blocks.{layer}.hook_resid_pre"

    def stream(text):
        return tiny_model.run_with_cache(text, names_filter=[point])[1][point][0, -1]

    means = torch.stack(
        [torch.stack([stream(w.format(c)) for w in values["MADE_FROM"]]).mean(0) for c in countries]
    )
    said = {}
    for sign in (1, -1):  # the control: the other way
        said[sign] = []
        for a, b in values["pairs"]:

            def push(resid, hook, vector=sign * (means[b] - means[a])):
                resid[:, -1] += vector

            text = values["ASKED"].format(countries[a])
            logits = tiny_model.run_with_hooks(text, fwd_hooks=[(point, push)])[0, -1]
            said[sign].append(int(logits.argmax()) == values["answers"][0][b])
    share = sum(said[1]) / len(said[1])
    assert values["works"]["last token"][layer] == pytest.approx(share, abs=0.02)
    assert sum(said[-1]) == 0


def test_a_direction_is_projected_out(runs, tiny_model):
    values = runs[STEERING][1]
    forgets = values["forgets"]["country token"]
    layer = min(range(len(forgets)), key=forgets.__getitem__)
    point, texts = f"blocks.{layer}.hook_resid_pre", values["MADE_FROM"]
    at = {w: w.split().index("{}") + 1 for w in texts}  # BOS, and each word one token

    def streams(wording):
        prompts = [wording.format(country) for country in values["COUNTRIES"]]
        return tiny_model.run_with_cache(prompts, names_filter=[point])[1][point][:, at[wording]]

    means = torch.stack([streams(wording) for wording in texts]).mean(0)
    basis = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[: values["K"]]
    prompts = [texts[0].format(country) for country in values["COUNTRIES"]]

    def log_prob(span=None):
        def take_out(resid, hook):
            value = resid[:, at[texts[0]]]
            resid[:, at[texts[0]]] = value - (value - value.mean(0)) @ span.T @ span

        hooks = [] if span is None else [(point, take_out)]
        logits = tiny_model.run_with_hooks(prompts, fwd_hooks=hooks)[:, -1].log_softmax(-1)
        return logits[range(len(prompts)), values["answers"][0]].mean().item()

    assert forgets[layer] == pytest.approx(log_prob(basis) - log_prob(), abs=1e-2)
    assert abs(log_prob(basis[:1]) - log_prob() - forgets[layer]) > 0.1  # the control: fewer


# -- from tiny to 12B ---------------------------------------------------------------------------------


def check_sizes(values, rounding):
    """What holds of any checkpoint."""
    assert values["exact"] and values["counted"] == values["real"] and values["finite"]
    assert values["kv_counted"] <= values["kv_held"] <= 2.1 * values["kv_counted"]
    assert values["local_apart"] < rounding and values["n_long"] >= 48
    assert values["kl"] < 0.1 and 0 <= values["same_choice"] <= 1
    assert min(values["rate"].values()) > 0
    shares = values["costs"]["share of as many forwards"].values()
    assert all(0 < share < 1 for share in shares)


def test_sizes_hold_together_after_changing_one_line(other, tmp_path):
    check_sizes(run(SIZES, tmp_path, model=other)[1], rounding=0.5)


def test_sizes_are_those_of_the_files(runs, tiny_model):
    values = runs[SIZES][1]
    check_sizes(values, rounding=1e-3)
    released = json.loads((ROOT / "weights" / "gemma-4-12B.tensors.json").read_text())
    shapes = {name: one["shape"] for name, one in released.items()}
    config = HookedConfig.from_hf(values["RELEASED"])
    assert {name: [*shape] for name, shape in manifest(config).items()} == shapes
    assert values["weights"]["12B"] == sum(map(math.prod, shapes.values()))
    assert values["weights"]["here"] == sum(w.numel() for _, w in tiny_model.named_weights())
    window = config.window_size
    at = values["LONG"].index(262_144)
    kept = 40 * 2 * window * 8 * 256 + 8 * 2 * 262_144 * 512
    assert values["kv_grows"][at] == pytest.approx(2 * kept / 1e9)
    patterns = values["grows"]["patterns"][values["LENGTHS"].index(1024)]
    assert patterns == pytest.approx(2 * 48 * 16 * 1024**2 / 1e9)


def test_the_work_is_what_torch_counts(runs, tiny_model):
    values = runs[SIZES][1]
    pos, cfg = values["POS"], tiny_model.cfg
    tokens = torch.randint(5, 1000, (1, pos), generator=torch.Generator().manual_seed(0))

    def counted(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    tiny_model.set_attn_implementation("eager")  # which multiplies the square, and torch counts it
    try:
        whole = counted(lambda: tiny_model(tokens))
    finally:
        tiny_model.set_attn_implementation("sdpa")
    hidden = sum(
        4
        * layer.n_heads
        * layer.d_head
        * sum(pos - min(i + 1, layer.window or pos) for i in range(pos))
        for layer in cfg.layers
    )
    assert whole == values["work"]["here"] + hidden and hidden > 0.02 * whole
    # Sweeps: what is really multiplied is less than the estimate, and most of it.
    clean = counted(lambda: tiny_model(tokens, stop_at_layer=cfg.n_layers))
    metric, other = logit(5), tokens.flip(1)
    sweeps = (
        lambda: ablate(tiny_model, tokens, metric),
        lambda: ablate(tiny_model, tokens, metric, positions="last"),
        lambda: patch(tiny_model, tokens, other, metric),
    )
    for estimate, sweep in zip(values["left"], sweeps, strict=True):
        assert 1 <= estimate / (counted(sweep) - clean) < 1.3


# -- image tokens -------------------------------------------------------------------------------------


def check_images(values, rounding):
    """What holds of any checkpoint."""
    assert values["n_exactly"] == 1 and values["farthest"] == 1 < values["n_moved"] <= 9
    assert [i for i, far in enumerate(values["moved_exactly"]) if far] == [values["at"]] == [10]
    assert values["moved"][10] > 0
    assert values["same"] and values["same_pixels"]
    assert values["padded_moves"] == 0.0 < values["real_moves"]
    assert values["rules_apart"] > 0.01
    counts = {int(budget): given for budget, given in values["counts"].items()}
    for budget, (n, columns, rows) in counts.items():
        assert 0.85 * budget < n == columns * rows <= budget
    assert counts[70] == [64, 8, 8] and len(counts) == 5
    assert values["asked"] == pytest.approx(
        values["from_picture"] + values["from_words"] + values["rest"], abs=rounding
    )
    assert values["remainder"] < rounding
    assert sum(values["read"]) == pytest.approx(values["from_picture"], abs=rounding)
    assert 0 < max(values["shares"]) <= 1.001 and len(values["effects"]) == 64
    assert values["n_quarter"] == 16
    # Entering block 0 the two pictures' runs differ in one row; it is all of the way.
    first = [*values["recovered"][0]]
    assert first.pop(values["circle"]) == pytest.approx(1, abs=4 * rounding)
    assert max(map(abs, first)) < 4 * rounding
    for rows in zip(*values["carried"].values(), values["recovered"], strict=True):
        assert sum(rows[:-1]) == pytest.approx(sum(rows[-1][2:-1]) + rows[-1][-1], abs=1e-3)


def test_image_tokens_hold_together_on_the_shipped_checkpoint(runs):
    check_images(runs[IMAGES][1], rounding=1e-4)


def test_image_tokens_hold_together_after_changing_one_line(tmp_path):
    folder = seeing.checkpoint(tmp_path / "other", torch.bfloat16)
    check_images(run(IMAGES, tmp_path, model=folder)[1], rounding=0.05)


def test_the_picture_is_one_that_the_shipped_checkpoint_knows(runs):
    """Drawn in the notebook as `shapes.py` draws them."""
    scene = [
        shapes.Drawn("red", "circle", 102, 54, 40),
        shapes.Drawn("green", "square", 246, 100, 40),
        shapes.Drawn("yellow", "triangle", 54, 294, 38),
        shapes.Drawn("blue", "cross", 294, 244, 42),
    ]
    pixels = torch.tensor(runs[IMAGES][1]["pixels"], dtype=torch.uint8)
    assert torch.equal(pixels, torch.tensor(np.asarray(shapes.picture(scene))))
    other = [scene[0], dataclasses.replace(scene[1], shape="circle"), *scene[2:]]
    assert not torch.equal(pixels, torch.tensor(np.asarray(shapes.picture(other))))


def test_the_numbers_of_patches_are_what_hooks_make_of_them(runs, tiny_model):
    values = runs[IMAGES][1]
    prompt = f"{tiny_model.image_token} the shape at the top left is"
    pixels = torch.tensor(values["pixels"], dtype=torch.uint8)
    inputs = tiny_model.prepare(prompt, images=[pixels], image_tokens=70)
    where = values["positions"]
    assert tiny_model.to_single_str_token(values["answer"]) == " red"

    def difference(rows=()):
        def zero(stream, hook):
            stream[0, [where[i] for i in rows]] = 0

        hooks = [("blocks.0.hook_resid_pre", zero)]
        logits = tiny_model.run_with_hooks(**inputs, fwd_hooks=hooks)[0, -1]
        return (logits[values["answer"]] - logits[values["versus"]]).item()

    clean = difference()
    strongest = max(range(64), key=lambda i: abs(values["effects"][i]))
    for i in (strongest, 0, 31):
        assert values["effects"][i] == pytest.approx(difference([i]) - clean, abs=1e-3)
    quarter = [8 * y + x for y in range(4) for x in range(4)]
    assert values["without_quarter"] == pytest.approx(difference(quarter) - clean, abs=1e-3)
    singly = sum(values["effects"][i] for i in quarter)
    assert values["sum_of_quarter"] == pytest.approx(singly, abs=1e-4)
    beside = [8 * y + x for y in range(4) for x in range(4, 8)]
    assert abs(values["without_quarter"] - difference(beside) + clean) > 0.1  # the control
    _, cache = tiny_model.run_with_cache(inputs, names_filter="*pattern")
    for layer, share in enumerate(values["shares"]):
        pattern = cache["pattern", layer][0, :, -1, where]
        assert share == pytest.approx(pattern.sum(1).mean().item(), abs=1e-4)


def test_the_answer_moves_from_its_patch_to_the_last_position(runs, tiny_model):
    values = runs[IMAGES][1]
    assert tiny_model.to_single_str_token(values["said"]) == " orange"
    prompt = f"{tiny_model.image_token} the shape at the top left is"
    pixels = torch.tensor(values["pixels"], dtype=torch.uint8)
    red = torch.tensor(COLOURS["red"], dtype=torch.uint8)
    orange = torch.tensor(COLOURS["orange"], dtype=torch.uint8)
    repainted = torch.where((pixels == red).all(-1, keepdim=True), orange, pixels)
    first, second = (
        tiny_model.prepare(prompt, images=[image], image_tokens=70) for image in (pixels, repainted)
    )
    _, kept = tiny_model.run_with_cache(first, names_filter="*hook_resid_pre")

    def difference(inputs, **hooks):
        logits = tiny_model.run_with_hooks(**inputs, **hooks)[0, -1]
        return (logits[values["answer"]] - logits[values["said"]]).item()

    low, high, last = difference(second), difference(first), len(values["recovered"][0]) - 1

    def carries(layer, position):
        def put(stream, hook):
            stream[0, position] = kept["resid_pre", layer][0, position]

        hooks = [(f"blocks.{layer}.hook_resid_pre", put)]
        return (difference(second, fwd_hooks=hooks) - low) / (high - low)

    n_layers = tiny_model.cfg.n_layers
    for layer, position in ((1, values["circle"]), (n_layers - 1, values["circle"]), (5, last)):
        want = carries(layer, position)
        assert values["recovered"][layer][position] == pytest.approx(want, abs=1e-4)
    read = [row[last] for row in values["recovered"]]
    assert read[0] == pytest.approx(0, abs=1e-6) and read[-1] > 0.5
    assert values["recovered"][-1][values["circle"]] < 0.5
    # Only full blocks look so far back, and cutting any other look changes nothing.
    full = [i for i in range(n_layers) if tiny_model.cfg.layer(i).kind == "full"]
    changed = [i for i, change in enumerate(values["cuts"]) if abs(change) > 1e-4]
    assert changed == full and min(values["cuts"]) < -0.5 * (high - low)


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


# -- no number is typed ---------------------------------------------------------------------------------

# Definitions and settings: ends of a scale, numbers of a list, block 0, names ("12B"), patches of 48 pixels, words of 12B's
# vocabulary, bits of precision, 10⁹ bytes, intervals of 95 %, strengths that a cell sets. Whatever a run found is computed.
DEFINED = set("0 1 2 3 4 8 10 12 24 48 95 1.5 262,144".split())
NUMBER = re.compile(r"(?<![A-Za-z_\d.])\d[\d.,]*(?<![.,])")


def typed_numbers(notebook):
    """Numbers in the words of a notebook, those of cells and those that code shows as words."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for call in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.M))):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Markdown":
                    parts = [x.value for x in ast.walk(call) if isinstance(x, ast.Constant)]
                    texts += [x for x in parts if isinstance(x, str) and len(x.split()) > 1]
    bare = [re.sub(r"`[^`]*`|\([^)\s]*\)", "", text) for text in texts]
    return {number for text in bare for number in NUMBER.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_no_number_that_was_found_is_typed(name):
    notebook = committed(name)
    assert typed_numbers(notebook) <= DEFINED
    for source, kind in (
        ("9 of 32 heads", "markdown"),
        ('Markdown(f"is {x} of 32 heads")', "code"),
    ):
        wrong = copy.deepcopy(notebook)
        cell = new_code_cell(source)
        cell.cell_type = kind
        wrong.cells.append(cell)
        assert typed_numbers(wrong) - DEFINED, source
