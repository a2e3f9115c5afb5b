"""The main job: numbers that add up and match a plain computation, and requests that cannot be met."""

import re

import pytest
import talking
import torch

from lens_gemma4 import HookedModel, attribution, demo, outputs, plots
from lens_gemma4.attribution import Target
from lens_gemma4.demo import Question, ask

PROMPT = "The capital of France is"
EXACT = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return talking.make(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In float64, so that sums can be exact."""
    return HookedModel.from_pretrained(talking.make(tmp_path_factory.mktemp("wide"), torch.float64))


def by_head(question, cache):
    return attribution.by_head(cache, Target(question.answer, question.versus), positions=-1)


@pytest.fixture(scope="module")
def asked(model):
    return ask(model, PROMPT, " Paris", " Rome")


def raw_difference(model, question):
    _, cache = model.run_with_cache(question.tokens, names_filter="hook_logits_raw")
    raw = cache["hook_logits_raw"][0, -1]
    return (raw[question.answer] - raw[question.versus]).item()


def column(section, name, table=0):
    return list(
        [item for item in section.content if isinstance(item, plots.Table)][table].columns[name]
    )


# -- the question -------------------------------------------------------------------------------------


def test_by_default_the_models_first_two_choices_are_compared(model):
    question, _ = ask(model, PROMPT)
    first, second = model(PROMPT)[0, -1].topk(2).indices.tolist()
    assert (question.answer, question.versus) == (first, second)
    assert (question.answer_name, question.versus_name) == (
        demo.named(model, first),
        demo.named(model, second),
    )


def test_what_is_given_is_not_its_own_alternative(model):
    first, second = model(PROMPT)[0, -1].topk(2).indices.tolist()
    best = model.to_single_str_token(first)
    assert ask(model, PROMPT, answer=best)[0].versus == second
    assert ask(model, PROMPT, versus=best)[0].answer == second
    assert ask(model, PROMPT, answer=" Paris")[0].versus == first


def test_a_question_is_of_two_tokens(model):
    with pytest.raises(ValueError, match=r"is 2 tokens, \[' Paris', ' Rome'\]"):
        ask(model, PROMPT, " Paris Rome")
    with pytest.raises(ValueError, match="both ' Rome'"):
        ask(model, PROMPT, " Rome", " Rome")


# -- what is shown ------------------------------------------------------------------------------------


def test_the_next_tokens_are_the_models(model, asked):
    question, cache = asked
    section = demo.next_tokens(model, question, cache)
    logits = model(PROMPT)[0, -1].float()
    ids, ranks = column(section, "id"), column(section, "rank")
    assert ids[:10] == logits.topk(10).indices.tolist() and ranks[:10] == list(range(10))
    assert {question.answer, question.versus} <= set(ids)
    order = logits.argsort(descending=True).tolist()
    assert ranks == [order.index(i) for i in ids]
    assert column(section, "probability") == pytest.approx(logits.softmax(-1)[ids].tolist())


def test_the_lens_ends_at_the_models_own_answer(model, asked):
    question, cache = asked
    section = demo.lens(model, question, cache)
    logits = model(PROMPT)[0, -1].float()
    assert column(section, "after") == ["input", *(f"block {i}" for i in range(model.cfg.n_layers))]
    assert column(section, "P(answer)")[-1] == pytest.approx(
        logits.softmax(-1)[question.answer].item()
    )
    differences = column(section, "difference")
    assert differences[-1] == pytest.approx(
        (logits[question.answer] - logits[question.versus]).item(), abs=1e-6
    )
    assert column(section, "first choice")[-1] == repr(
        model.to_single_str_token(int(logits.argmax()))
    )
    for i in (0, 1, 2):  # and before it at each block's own stream
        stream = model(question.tokens, stop_at_layer=i + 1)[0, -1]
        there = model.project_on_vocab(stream)
        assert differences[i + 1] == pytest.approx(
            (there[question.answer] - there[question.versus]).item(), abs=1e-6
        )
    assert abs(differences[1] - differences[-1]) > 0.01


def test_the_parts_add_up_to_the_models_own_difference(model, asked):
    question, cache = asked
    own = by_head(question, cache).actual
    assert own.item() == pytest.approx(raw_difference(model, question), rel=1e-12)
    assert by_head(question, cache).remainder.abs().max() < EXACT * own.abs()
    section = demo.written_by(model, question, cache)
    told = dict(zip(column(section, "part"), column(section, "contribution"), strict=True))
    parts_told = told["input (embeddings)"] + told["all heads"] + told["all MLPs"]
    assert (
        parts_told
        == pytest.approx(told["sum of the parts"])
        == pytest.approx(told["the model's own"])
    )
    assert abs(told["remainder"]) < 1e-9
    numbers = section.numbers.columns
    assert sum(numbers["contribution"]) + told["input (embeddings)"] == pytest.approx(own.item())
    assert sum(numbers["contribution"]) != pytest.approx(
        own.item(), rel=0.01
    )  # not without the input


def test_the_remainder_is_not_what_is_left_over(model, asked):
    """With one wrong weight the parts miss, and the remainder says so."""
    question, cache = asked
    honest = cache.weights["layer_scalar"]
    try:
        cache.weights["layer_scalar"] = [torch.ones_like(scalar) for scalar in honest]
        found = by_head(question, cache)
        assert found.remainder.abs().max() > 0.01 * found.actual.abs()
        section = demo.written_by(model, question, cache)
        told = dict(zip(column(section, "part"), column(section, "contribution"), strict=True))
        assert told["remainder"] == pytest.approx(found.remainder.item())
    finally:
        cache.weights["layer_scalar"] = honest


def test_an_ablated_head_is_one_whose_output_weights_are_zero(model, asked):
    question, _ = asked
    clean, effects = demo.ablate_heads(model, question)
    assert clean == pytest.approx(raw_difference(model, question), rel=1e-12)
    assert effects.shape == (model.cfg.n_layers, model.cfg.n_heads)
    for layer, head in ((0, 1), (1, 3), (3, 0)):
        weight = model.blocks[layer].attn.W_O[head]
        kept = weight.clone()
        with torch.no_grad():
            weight.zero_()
            want = raw_difference(model, question) - clean
            weight.copy_(kept)
        assert effects[layer, head].item() == pytest.approx(want, abs=1e-9)
    assert effects.abs().min() > 1e-6  # each does something, and no two the same
    assert len(effects.flatten().unique()) == effects.numel()
    assert not model.list_hooks()


def test_ablation_is_not_direct_attribution(model, asked):
    question, cache = asked
    _, effects = demo.ablate_heads(model, question)
    direct = by_head(question, cache).values[..., 0, -1]
    assert (effects + direct).abs().max() > 0.01


def test_the_largest_come_first():
    table = demo.largest({"a": 1.0, "b": -3.0, "c": 2.0}, "change")
    assert list(table.columns["change"]) == [-3.0, 2.0, 1.0]
    assert len(demo.largest({str(i): float(i) for i in range(30)}, "x").columns["x"]) == 10


# -- the whole ----------------------------------------------------------------------------------------


def test_the_job_prints_and_writes_the_same(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert demo.run(PROMPT, " Paris", " Rome", str(folder), output=page) == page
    out = capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    for heading in ("Next token", "Logit lens", "Who wrote the difference", "Without each head"):
        assert heading in out and f"<h2>{heading}</h2>" in text
    remainder = re.search(r"^remainder +(\S+)$", out, flags=re.MULTILINE)
    assert remainder and abs(float(remainder[1])) < 1e-4
    assert f'<td class="number">{remainder[1]}</td>' in text
    assert all(f"<td>L{i}H{j}</td>" in text for i in range(4) for j in range(4))
    assert text.count("Plotly.newPlot(") >= 4 and str(page) in out
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_in_other_dtypes(folder, tmp_path, capsys, dtype):
    demo.run(PROMPT, model=str(folder), dtype=dtype, output=tmp_path / "page.html")
    out = capsys.readouterr().out
    remainder = float(re.search(r"^remainder +(\S+)$", out, flags=re.MULTILINE)[1])
    assert dtype in out and abs(remainder) < (0.2 if dtype == "bfloat16" else 1e-10)


def test_without_a_softcap(tmp_path, capsys):
    folder = talking.make(tmp_path / "plain", final_logit_softcapping=None)
    demo.run(PROMPT, model=str(folder), output=tmp_path / "page.html")
    assert "remainder" in capsys.readouterr().out


def test_the_shipped_checkpoint_answers(tmp_path, capsys):
    demo.run(output=tmp_path / "page.html")
    out = capsys.readouterr().out
    assert out.startswith("'The capital of France is': why ' Paris' rather than ")


# -- files --------------------------------------------------------------------------------------------


def test_its_own_page_is_overwritten_and_nothing_else(folder, tmp_path):
    page = tmp_path / "page.html"
    demo.run(PROMPT, " Paris", model=str(folder), output=page)
    demo.run(PROMPT, " Rome", model=str(folder), output=page)
    assert "why &#x27; Rome&#x27;" in page.read_text()
    page.write_text("notes of a user")
    with pytest.raises(FileExistsError, match="no page of this command"):
        demo.run(PROMPT, model=str(folder), output=page)
    assert page.read_text() == "notes of a user"


def test_a_page_that_cannot_be_written_is_found_out_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr(
        HookedModel, "from_pretrained", lambda *a, **k: pytest.fail("the model was loaded")
    )
    with pytest.raises(FileNotFoundError, match="no folder"):
        demo.run(output=tmp_path / "missing" / "page.html")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        demo.run(output=tmp_path)
    monkeypatch.setattr(
        plots, "require", lambda: (_ for _ in ()).throw(ImportError("plots need plotly"))
    )
    with pytest.raises(ImportError, match="plotly"):
        demo.run(output=tmp_path / "page.html")


def test_an_interrupted_write_leaves_the_old_page(monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    outputs.write(page, "old")
    with pytest.raises(UnicodeEncodeError):
        outputs.write(page, "\udc80")
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


def test_what_is_read_is_what_attribution_needs(asked):
    model_names = [name for by in ("part", "head") for name in attribution.needed(by, asked[1].cfg)]
    assert all(asked[1][name.replace("*", "0")].shape[1] == 1 for name in model_names)


def test_the_rounding_of_a_low_precision_run_is_a_part_of_its_own(folder):
    model = HookedModel.from_pretrained(folder, dtype=torch.bfloat16)
    question, cache = ask(model, PROMPT, " Paris", " Rome")
    section = demo.written_by(model, question, cache)
    told = dict(zip(column(section, "part"), column(section, "contribution"), strict=True))
    assert abs(told["remainder"]) < 1e-4 < abs(told["rounding"])


def test_a_question_is_written_out(model):
    question = Question(torch.tensor([[2, 5]]), 4, 5, "' a'", "token 5")
    assert question.difference == "' a' minus token 5"
    assert [demo.named(model, token) for token in (11, 100)] == ["' Paris'", "token 100"]
