"""The shipped checkpoint and how it is made: what is held out, what a picture is, how each task is answered, whether losses fall."""

from __future__ import annotations

import csv
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import batches
import card
import evaluation
import network
import pytest
import shapes
import tasks
import torch
import train
import words
from tokenizer import build_processor, build_tokenizer

from lens_gemma4 import HookedModel

TINY = Path(__file__).parent.parent / "weights" / "tiny"
DRAWS = 400


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def shipped() -> evaluation.Checkpoint:
    return evaluation.load(TINY)


# -- what is drawn ------------------------------------------------------------------------------------


def what_is_held_out(task: str, pieces: list[tasks.Piece]) -> bool:
    """Found in the sentence itself, whatever its maker was asked for."""
    text = tasks.plain(pieces)
    said = text.replace(".", " .").replace(",", " ,").split()
    if task == "gifts":
        return tasks.pair_is_held_out(*dict.fromkeys(w for w in said if w in words.NAMES))
    if task == "facts":
        (country,) = (w for w in words.COUNTRIES if f" {w}" in text)
        return any(
            text == tasks.plain(tasks.fact_of(country, r, tasks.held_out_template(country, r)))
            for r in words.RELATIONS
        )
    if task == "having":
        pairs = zip(said[::5], said[3::5], strict=True)
        return any(tasks.belonging_is_held_out(*pair) for pair in pairs)
    if task == "years":
        return tasks.year_is_held_out(said[1], int(said[6][:2]), int(said[6][2:]))
    return tasks.code_is_held_out(int(said[3]))


@pytest.mark.parametrize("task", tasks.SENTENCES)
def test_training_never_draws_what_is_held_out(task):
    rng, make = random.Random(task), tasks.SENTENCES[task]
    assert not any(what_is_held_out(task, make(rng)) for _ in range(DRAWS))
    assert all(what_is_held_out(task, make(rng, held_out=True)) for _ in range(DRAWS))


def test_no_later_wording_has_a_held_out_one_within():
    """Nor with another word in front of it: "People say that the continent of Italy is" is not drawn."""

    def shown(country, relation):
        _, kept = tasks.held_out_template(country, relation).split(" ", 1)
        kept = kept.removesuffix(" {answer}.").format(country=country)
        return any(kept in text for text in drawn[country])

    drawn: dict[str, set[str]] = {country: set() for country in words.COUNTRIES}
    rng = random.Random(3)
    for _ in range(20_000):
        text = tasks.plain(tasks.later_fact(rng))
        (country,) = (w for w in words.COUNTRIES if f" {w} " in text)
        drawn[country].add(text)
    pairs = [(country, relation) for country in words.COUNTRIES for relation in words.RELATIONS]
    assert not any(shown(*pair) for pair in pairs)
    # All else is drawn, and the wording held out for one country is there for others.
    for country, texts in drawn.items():
        every = (tasks.shown_templates(country, relation) for relation in words.RELATIONS)
        assert len(texts) == sum(map(len, every))
    assert any("the continent of" in text for texts in drawn.values() for text in texts)
    drawn["Italy"].add("The continent of Italy is Europe.")
    assert shown("Italy", words.CONTINENT)


def test_no_training_picture_holds_what_is_held_out():
    rng = random.Random(0)

    def unseen(scene):
        return [shapes.is_held_out(one.colour, one.shape, i) for i, one in enumerate(scene)]

    assert not any(any(unseen(shapes.scene(rng))) for _ in range(DRAWS))
    asked = [(case % 4, shapes.scene(rng, case % 4)) for case in range(DRAWS)]
    assert all(unseen(scene) == [i == corner for i in range(4)] for corner, scene in asked)
    # What is unseen is the whole alone: each two of colour, shape and corner are seen together.
    every = [(c, s, i) for c in words.COLOURS for s in words.SHAPES for i in range(4)]
    seen = [one for one in every if not shapes.is_held_out(*one)]
    for left_out in range(3):
        pairs = [{one[:left_out] + one[left_out + 1 :] for one in some} for some in (seen, every)]
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize("task", tasks.SENTENCES)
def test_pieces_are_the_sentence_and_answers_are_one_token(task, tokenizer):
    rng, writer = random.Random(task), batches.Writer(tokenizer)
    for _ in range(50):
        pieces = tasks.paragraph(tasks.SENTENCES[task], rng, 2)
        ids, weights = writer.ids(pieces)
        assert [tokenizer.bos_token_id, *ids] == tokenizer(tasks.plain(pieces))["input_ids"]
        answers = [tokenizer.decode([i]) for i, w in zip(ids, weights, strict=True) if w == 1]
        assert answers == [text for text, is_answer in pieces if is_answer]


def test_a_later_year_is_later():
    rng = random.Random(0)
    for _ in range(DRAWS):
        prompt, answer = tasks.first_case(tasks.lasting(rng))
        assert int(answer) > int(prompt.split(" to ")[0][-2:])


def test_any_later_year_is_right_in_the_second_part(tokenizer):
    writer, rng = batches.Writer(tokenizer), random.Random(0)
    make = tasks.SENTENCES
    texts = [tasks.paragraph(make[task], rng, 3) for task in ("years", "facts")]
    rows = writer.rows(["years", "facts"], texts, 60)
    soft = writer.any_later_year(rows)
    assert torch.equal(soft.ids, rows.ids) and torch.equal(soft.weights, rows.weights)
    assert torch.equal(soft.targets[1], rows.targets[1]) and (soft.spans[1] == 1).all()
    answers = rows.weights[0] == 1
    assert int(answers.sum()) == 3 and (soft.spans[0][~answers] == 1).all()
    said = tasks.plain(texts[0]).split(".")
    for sentence, first, span in zip(
        said, soft.targets[0][answers].tolist(), soft.spans[0][answers].tolist(), strict=False
    ):
        start = int(sentence.split(" to ")[0][-2:])
        years = [tokenizer.decode([token]) for token in range(first, first + span)]
        assert years == [f"{year:02d}" for year in range(start + 1, 100)]


def test_the_loss_where_several_are_right_is_what_a_draw_costs_on_average(tokenizer):
    model = network.build_model(network.build_config(tokenizer)).eval()
    writer = batches.Writer(tokenizer)
    text = [("The war lasted from the year 1795 to the year 17", False), ("98", True)]
    rows = writer.rows(["years"], [text], 20)
    soft = writer.any_later_year(rows)
    at = int((rows.weights[0] == 1).nonzero())
    known = int((rows.weights[0, :at] > 0).sum())
    each = []
    for year in (96, 97, 98, 99):
        rows.targets[0, at] = writer.words(f"{year}")[0]
        each.append(train.target_losses(model, rows)[known].item())
    found = train.target_losses(model, soft)
    assert found[known].item() == pytest.approx(sum(each) / 4, rel=1e-5)
    assert max(each) - min(each) > 1e-3  # the control: they are not all alike
    others = torch.arange(len(found)) != known
    plain = train.target_losses(model, rows)
    torch.testing.assert_close(found[others], plain[others])


def test_the_rate_goes_on_where_the_second_part_begins():
    steps = train.STEPS
    rates = [train.learning_rate(step, steps) for step in range(steps)]
    begins = round(batches.SECOND_PART * steps)
    falls = [a - b for a, b in itertools.pairwise(rates)]
    assert max(rates) == pytest.approx(train.PEAK_RATE)
    assert all(fall >= 0 for fall in falls[train.WARM_UP :]) and rates[-1] < 0.01 * max(rates)
    assert max(falls) == pytest.approx(falls[begins - 2])  # no jump: the steepest is the first line
    assert falls[begins - 2] > 1.2 * falls[begins + 1] > 0


def test_a_picture_is_what_the_processor_makes_of_it(tokenizer):
    rng, processor = random.Random(1), build_processor(tokenizer)
    scene = shapes.scene(rng)
    image, pieces = shapes.picture(scene), shapes.answers(scene, [2, 0, 3, 1])
    made = processor(
        text=f"<|image|>{tasks.plain(pieces)}",
        images=[image],
        return_tensors="pt",
        images_kwargs={"max_soft_tokens": shapes.BUDGET},
    )
    n = len(shapes.positions())
    assert torch.equal(made["pixel_values"][0, :n], shapes.patches(image))
    assert not torch.equal(made["pixel_values"][0, :n], shapes.patches(image.rotate(90)))
    assert torch.equal(made["image_position_ids"][0, :n], shapes.positions())
    assert (made["image_position_ids"][0, n:] == -1).all()
    ids, _ = batches.Writer(tokenizer).ids(pieces)
    assert made["input_ids"][0].tolist() == [*batches.picture_front(tokenizer), *ids]


def test_shapes_lie_in_their_quarters():
    rng = random.Random(2)
    for _ in range(DRAWS):
        for corner, one in enumerate(shapes.scene(rng)):
            for start, cell in ((one.left, corner % 2), (one.top, corner // 2)):
                assert shapes.CELL * cell <= start
                assert start + one.size <= shapes.CELL * (cell + 1)


def test_repeats_repeat_and_only_what_can_be_known_counts(tokenizer):
    rows = batches.repeated_rows(20, [5, 9], len(tokenizer), torch.Generator().manual_seed(0))
    for ids, targets, weights, period in zip(
        rows.ids, rows.targets, rows.weights, (5, 9), strict=True
    ):
        assert torch.equal(ids[1 + period :], ids[1:-period])
        assert len(set(ids[1 : 1 + period].tolist())) == period
        assert torch.equal(targets[:-1], ids[1:])
        assert weights.tolist() == [float(at > period) for at in range(20)]


# -- how it is made -----------------------------------------------------------------------------------


def test_layer_scalars_come_in_without_changing_a_word(tokenizer):
    model = network.build_model(network.build_config(tokenizer)).eval()
    ids = torch.arange(20, 60)[None]
    before = model(input_ids=ids).logits
    network.set_layer_scalars(model, network.LAYER_SCALARS)
    after = model(input_ids=ids).logits
    torch.testing.assert_close(
        after, before, atol=0.02, rtol=0
    )  # eps weighs more in a small stream
    for block in model.model.language_model.layers:
        block.layer_scalar.fill_(1)  # they do count: without them the gains are wrong
    assert (model(input_ids=ids).logits - before).abs().max() > 1


def test_no_gain_and_no_scalar_is_at_one(shipped):
    assert min(network.distance_from_one(shipped.model).values()) > 0.1
    scalars = [block.layer_scalar.item() for block in shipped.model.model.language_model.layers]
    assert scalars == pytest.approx(network.LAYER_SCALARS)
    assert min(scalars) == pytest.approx(0.05) and 0.9 < max(scalars) < 1


def test_the_shipped_tokenizer_is_the_one_that_is_built(shipped, tokenizer):
    assert shipped.tokenizer.get_vocab() == tokenizer.get_vocab()


LOSSES = """
import sys
sys.path.insert(0, sys.argv[1])
import train
from pathlib import Path
train.SAVE_EVERY = 3
out, steps, resume = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
whole = train.rows_of_step
train.rows_of_step = lambda writer, seed, progress, step, pace: whole(writer, seed, step / 6, step)
train.learning_rate = lambda step, steps: 1e-3
model, logged, _ = train.train(out, train.build_tokenizer(), resume, steps)
train.torch.save(model.state_dict(), out / f"{steps}.pt")
"""


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path):
    def run(folder, steps, resume):
        command = [sys.executable, "-c", LOSSES, TINY, tmp_path / folder, str(steps), resume]
        (tmp_path / folder).mkdir(exist_ok=True)
        subprocess.run(command, check=True, capture_output=True)
        return torch.load(tmp_path / folder / f"{steps}.pt", weights_only=True)

    whole = run("whole", 6, "fresh")
    half = run("parts", 3, "fresh")
    resumed = run("parts", 6, "resume")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)


@pytest.mark.slow
def test_every_loss_falls_in_a_tenth_of_the_training(tmp_path):
    command = [sys.executable, TINY / "train.py", "--out", tmp_path, "--tenth"]
    subprocess.run(command, check=True, capture_output=True)
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    for task in tasks.TASKS:
        losses = [float(row[f"loss_{task}"]) for row in rows if row[f"loss_{task}"]]
        first, last = sum(losses[:2]) / 2, sum(losses[-2:]) / 2
        assert last < 0.8 * first, task
    assert (tmp_path / "README.md").exists() and not (tmp_path / "state").exists()


# -- what it can do -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_cases() -> Iterator[None]:
    """A few cases of each task; the card has the thousand."""
    patch = pytest.MonkeyPatch()
    patch.setattr(evaluation, "CASES", 120)
    patch.setattr(evaluation, "ROWS", 32)
    yield
    patch.undo()


@pytest.mark.parametrize("task", evaluation.MEASURES)
def test_each_task_is_answered_on_what_was_held_out(shipped, some_cases, task):
    for found in evaluation.MEASURES[task](shipped):
        assert found.share > 0.9 > found.guessing, found


@pytest.mark.slow
def test_the_card_tells_what_the_file_does():
    results = evaluation.evaluate(TINY)
    card_text = (TINY / "README.md").read_text()
    assert all(one.share >= 0.95 for one in results if not one.within)
    assert all(one.share >= 0.9 for one in results)
    assert evaluation.table(results) in card_text
    assert all(line in card_text for line in card.weak(results))


def test_without_its_full_blocks_no_code_comes_from_afar(shipped, tiny_model):
    """Only they look beyond the window."""
    cases = evaluation.drawn(tasks.code, 40, fillers=[4])

    def right(**hooks):
        said = [tiny_model.run_with_hooks(prompt, **hooks)[0, -1].argmax() for prompt, _ in cases]
        asked = [tiny_model.to_single_token(answer) for _, answer in cases]
        return sum(int(a) == b for a, b in zip(said, asked, strict=True)) / len(cases)

    def blind(pattern, hook):
        return pattern.triu(-15)  # [batch head pos kv_pos]: no more than the window of the others

    full = [i for i in range(tiny_model.cfg.n_layers) if tiny_model.cfg.layer(i).kind == "full"]
    assert right() > 0.9
    assert right(fwd_hooks=[(f"blocks.{i}.attn.hook_pattern", blind) for i in full]) < 0.3


@pytest.mark.parametrize(
    "row", json.loads((TINY / "prompts.json").read_text()), ids=lambda r: r["prompt"][:40]
)
def test_the_example_prompts_are_answered(tiny_model: HookedModel, row):
    media = {}
    if "picture" in row:
        scene = [shapes.Drawn(**one) for one in row["picture"]]
        media = {"images": [shapes.picture(scene)], "image_tokens": shapes.BUDGET}
    said = tiny_model.to_single_str_token(int(tiny_model(row["prompt"], **media)[0, -1].argmax()))
    assert said in row.get("answers", [row.get("answer")])
    assert said not in row.get("wrong", [row.get("versus")])
