"""Maps of prompts in a file, from the command line."""

import json

import pytest
import torch

from lens_gemma4 import HookedModel, SweepResult, ablate, logit_difference, patch, prompt_files
from lens_gemma4.__main__ import main

PAIRS = [
    {
        "clean": "The capital of France is",
        "corrupted": "The capital of Italy is",
        "answer": " Paris",
        "versus": " Rome",
    },
    {
        "clean": "The capital of Italy is",
        "corrupted": "The capital of France is",
        "answer": " Rome",
        "versus": " Paris",
    },
]
ROWS = [
    {"prompt": row["clean"], "answer": row["answer"], "versus": row["versus"], "note": "1"}
    for row in PAIRS
]


@pytest.fixture(scope="module")
def model():
    return HookedModel.from_pretrained("tiny")


@pytest.fixture
def files(tmp_path):
    """The same prompts as JSON lines and as CSV, and pairs."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    head, *rest = [
        "prompt,answer,versus",
        *(f"{r['prompt']},{r['answer']},{r['versus']}" for r in ROWS),
    ]
    (tmp_path / "a.csv").write_text("\ufeff" + "\n".join([head, *rest]), encoding="utf-8")
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in PAIRS))
    return tmp_path


def asked(model):
    columns = [[model.to_single_token(row[name]) for row in ROWS] for name in ("answer", "versus")]
    return logit_difference(*(torch.tensor(column) for column in columns))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_ablate_a_file(model, files, name, capsys):
    out = files / "out.parquet"
    command = [
        "ablate",
        str(files / name),
        "-o",
        str(out),
        "--mode",
        "mean",
        "--positions",
        "last",
        "--top",
        "3",
    ]
    assert main(command) == 0
    want = ablate(
        model, [row["prompt"] for row in ROWS], asked(model), mode="mean", positions="last"
    )
    found = SweepResult.load(out)
    assert found.names == want.names and torch.equal(found.values, want.values)
    printed = capsys.readouterr().out
    assert all(word in printed for word, _ in want.top(3)) and "2 prompts" in printed
    assert not list(files.glob("*.parts"))


def test_patch_a_file(model, files):
    out = files / "out.parquet"
    command = [
        "patch",
        str(files / "pairs.jsonl"),
        "-o",
        str(out),
        "--units",
        "heads",
        "--positions",
        "1,2",
    ]
    assert (
        main(
            [
                *command,
                "--metric",
                "logit_difference,log_prob",
                "--layers",
                "0,2",
                "--direction",
                "noise",
            ]
        )
        == 0
    )
    texts = [[row[name] for row in PAIRS] for name in ("clean", "corrupted")]
    want = patch(
        model,
        *texts,
        asked(model),
        units="heads",
        layers=[0, 2],
        positions=[1, 2],
        direction="noise",
    )
    assert torch.equal(SweepResult.load(files / "out.logit_difference.parquet").values, want.values)
    assert (files / "out.log_prob.parquet").exists() and not out.exists()


def test_units_by_name_and_factors(files, capsys):
    command = [
        "ablate",
        str(files / "a.csv"),
        "-o",
        str(files / "b.parquet"),
        "--metric",
        "kl_to_clean",
    ]
    assert main([*command, "--units", "L0H1, 2_mlp_out & L1H0", "--mode", "0.5"]) == 0
    found = SweepResult.load(files / "b.parquet")
    assert found.names == ["L0H1", "2_mlp_out & L1H0"] and found.plan["arguments"]["mode"] == 0.5


def test_a_stopped_command_goes_on(files, monkeypatch):
    out = files / "out.parquet"
    command = ["ablate", str(files / "a.jsonl"), "-o", str(out), "--batch-size", "4"]
    save = SweepResult.save
    monkeypatch.setattr(
        SweepResult, "save", lambda self, path: (_ for _ in ()).throw(OSError("disk full"))
    )
    assert main(command) == 2
    assert list(
        (files / "out.parquet.parts").glob("*.safetensors")
    )  # what was measured is not lost
    monkeypatch.setattr(SweepResult, "save", save)
    monkeypatch.setattr("lens_gemma4.sweep.Runner.run", None)  # nothing is run again
    assert main(command) == 0 and out.exists()


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ("not json", [], "line 2, is no JSON"),
        ("[1, 2]", [], "line 2, is no object"),
        (
            '{"prompt": "x", "answer": " Paris"}',
            [],
            "line 2, needs text under 'versus'; it has prompt, answer",
        ),
        ('{"prompt": "", "answer": " Paris", "versus": " Rome"}', [], "needs text under 'prompt'"),
        ('{"prompt": "x", "answer": " no single token", "versus": " Rome"}', [], "no single token"),
        (None, ["--units", "head"], "units is 'head'"),
        (None, ["--metric", "accuracy"], "no metric 'accuracy'"),
        (None, ["--mode", "median"], "mode is 'median'"),
        (None, ["--positions", "first"], "'first' is no list"),
        (None, ["--layers", "0,99"], "no block 99"),
        (None, ["--batch-size", "0"], "batch_size is 0"),
        (None, ["-o", "out.csv"], "to be a parquet file"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(files, line, more, message, capsys):
    path = files / "a.jsonl"
    if line is not None:
        path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    out = files / "out.parquet"
    assert main(["ablate", str(path), "-o", str(out), *more]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not out.exists()


def test_files_that_are_no_prompts(files, capsys):
    (files / "empty.jsonl").write_text("\n")
    (files / "a.txt").write_text("x")
    pair = {**PAIRS[0], "corrupted": "The capital of Italy is not"}
    (files / "unlike.jsonl").write_text(json.dumps(PAIRS[1]) + "\n" + json.dumps(pair))
    out = str(files / "out.parquet")
    for kind, name, message in (
        ("ablate", "empty.jsonl", "holds no prompts"),
        ("ablate", "a.txt", "neither JSON lines"),
        ("ablate", "nowhere.csv", "No such file"),
        ("patch", "unlike.jsonl", "prompt 2: clean has"),
    ):
        assert main([kind, str(files / name), "-o", out]) == 2
        assert message in capsys.readouterr().err
    (files / "there.parquet").write_bytes(b"mine")
    assert main(["ablate", str(files / "a.csv"), "-o", str(files / "there.parquet")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (files / "there.parquet").read_bytes() == b"mine"


def test_every_metric_can_be_named():
    assert set(prompt_files.METRICS) == {
        "logit_difference",
        "logit",
        "log_prob",
        "prob",
        "rank",
        "kl_to_clean",
        "loss",
    }
    assert prompt_files.needed(["kl_to_clean", "loss"]) == []
    assert prompt_files.needed(["rank", "logit_difference"]) == ["answer", "versus"]
