"""The command line parses, calls, and ends with the right code; a bad request is one line and no traceback."""

import re
import subprocess
import sys

import pytest
import talking
import torch

import lens_gemma4
from lens_gemma4 import HookedModel, check, demo, names, report
from lens_gemma4.__main__ import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return talking.make(tmp_path_factory.mktemp("talking"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"lens-gemma4 {lens_gemma4.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["demo", "--dtype", "int4"], ["names", "--markdown", "--model", "x"]],
)
def test_a_request_that_cannot_be_parsed(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: lens-gemma4" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(
        re.search(rf"^    {command} ", out, flags=re.MULTILINE)
        for command in ("demo", "report", "names", "check", "convert")
    )


# -- demo ---------------------------------------------------------------------------------------------


def test_demo_writes_its_page_where_it_is_called(folder, here, capsys):
    assert main(["demo", "--model", str(folder), "--answer", " Paris", "--versus", " Rome"]) == 0
    assert (here / "demo.html").is_file()
    assert "why ' Paris' rather than ' Rome'?" in capsys.readouterr().out


def test_demo_passes_everything_on(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "run", lambda *given: seen.append(given))
    words = [
        "--prompt",
        "p",
        "--answer",
        "a",
        "--versus",
        "v",
        "--model",
        "m",
        "--device",
        "d",
        "--dtype",
        "float64",
        "-o",
        "o",
    ]
    assert main(["demo", *words]) == 0
    assert main(["demo"]) == 0
    assert seen[0] == ("p", "a", "v", "m", "d", "float64", "o")
    assert seen[1] == (demo.PROMPT, None, None, "tiny", None, None, demo.PAGE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--answer", " Paris Rome"], "is 2 tokens"),
        (["--answer", " Paris", "--versus", " Paris"], "give two tokens to compare"),
        (["--answer", ""], "is 0 tokens"),
        (["--prompt", "the " * 200], "128 positions"),
        (["--model", "no-such-model"], "no folder no-such-model"),
        (["--model", "/no/such/folder"], "no folder /no/such/folder"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["-o", "missing/page.html"], "no folder"),
        (["-o", "."], "is a folder"),
    ],
)
def test_a_bad_request_is_one_line(folder, here, capsys, arguments, said):
    model = [] if "--model" in arguments else ["--model", str(folder)]
    assert main(["demo", *model, *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("lens-gemma4 demo: ") and said in told.err
    assert "Traceback" not in told.err and not told.out
    assert list(here.iterdir()) == []


def test_a_users_file_is_not_overwritten(folder, here, capsys):
    (here / "demo.html").write_text("mine")
    assert main(["demo", "--model", str(folder)]) == 2
    assert "name another file with -o" in capsys.readouterr().err
    assert (here / "demo.html").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_is_not_there(folder, here, capsys):
    assert main(["demo", "--model", str(folder), "--device", "cuda"]) == 2
    assert "device 'cuda' cannot be used" in capsys.readouterr().err


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def broken(*given):
        raise TypeError("a bug")

    monkeypatch.setattr(demo, "run", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["demo"])


def test_an_interruption_ends_quietly(monkeypatch, capsys):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130


# -- report -------------------------------------------------------------------------------------------


def test_report_passes_everything_on(monkeypatch):
    seen = []
    monkeypatch.setattr(report, "run", lambda *given, **options: seen.append((given, options)))
    words = "--prompt p --answer a --versus v --image x --image y --image-tokens 70".split()
    words += "--ablation mean --ablate-last-only --device d --dtype float64 -o o".split()
    assert main(["report", "m", *words]) == 0
    assert main(["report"]) == 0
    assert main(["report", "--no-ablation"]) == 0
    options = {"image_tokens": 70, "ablation": "mean", "ablate_last_only": True}
    assert seen[0] == (("p", "a", "v", "m", ["x", "y"], "d", "float64", "o"), options)
    plain = {"image_tokens": None, "ablation": "zero", "ablate_last_only": False}
    assert seen[1] == ((report.PROMPT, None, None, "tiny", None, None, None, report.PAGE), plain)
    assert seen[2][1]["ablation"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--answer", " Paris Rome"], "is 2 tokens, [' Paris', ' Rome']"),
        (["--image", "cat.png"], "no vision embedder"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["-o", "missing/page.html"], "no folder"),
    ],
)
def test_a_bad_report_is_one_line(folder, here, capsys, arguments, said):
    assert main(["report", str(folder), *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("lens-gemma4 report: ") and said in told.err
    assert "Traceback" not in told.err and not told.out
    assert list(here.iterdir()) == []


# -- names --------------------------------------------------------------------------------------------


def test_names_lists_every_row(capsys):
    assert main(["names"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(names.ROWS) + 1
    for line, row in zip(out[1:], names.ROWS, strict=True):
        assert line.startswith(row.name) and row.axes in line and row.meaning in line
        assert all(alias in line for alias in row.standard)


def test_names_as_markdown_is_the_readmes(capsys):
    assert main(["names", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == names.markdown()


def test_names_of_a_checkpoint_says_what_it_lacks(folder, capsys):
    assert main(["names", "--model", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = {
        start: next(line for line in lines if line.startswith(start))
        for start in ("vision.hook_out", "hook_embed")
    }
    assert (
        "no this checkpoint (gemma4_unified_text) has no vision embedder" in line["vision.hook_out"]
    )
    assert re.search(r"hook_embed +yes", line["hook_embed"])
    assert main(["names", "--model", "/no/such/folder"]) == 2


def test_a_pipe_that_closes_early_is_no_error():
    command = f"{sys.executable} -m lens_gemma4 names | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0" and "Error" not in done.stderr


# -- check and convert --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1])
def test_check_passes_on_what_was_asked_and_what_was_found(monkeypatch, folder, code):
    seen = []
    monkeypatch.setattr(check, "run", lambda *given: seen.append(given) or code)
    assert main(["check", str(folder)]) == code
    assert (
        main(
            [
                "check",
                str(folder),
                "--dtype",
                "bfloat16",
                "--attn",
                "eager",
                "--device",
                "meta",
                "--seed",
                "3",
            ]
        )
        == code
    )
    assert seen == [
        (folder, None, "sdpa,eager", "cpu", 0),
        (folder, "bfloat16", "eager", "meta", 3),
    ]


def test_check_of_nothing(capsys):
    assert main(["check", "/no/such/folder"]) == 2
    assert "lens-gemma4 check: no folder" in capsys.readouterr().err


def test_convert_writes_a_checkpoint_that_loads(folder, tmp_path, capsys):
    target = tmp_path / "copy"
    assert main(["convert", str(folder), str(target), "--dtype", "bfloat16"]) == 0
    assert str(target) in capsys.readouterr().out
    ids = torch.tensor([[2, 5, 6]])
    copy = HookedModel.from_pretrained(target)
    assert copy.dtype == torch.bfloat16
    assert torch.equal(copy(ids), HookedModel.from_pretrained(folder, dtype=torch.bfloat16)(ids))
    assert main(["convert", "/no/such/folder", str(target)]) == 2
