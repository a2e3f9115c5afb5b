"""The pages of docs/: they run, show what they print, link to what is there, and hold no figure that nothing made."""

import doctest
import html
import inspect
import os
import re
import shlex
import subprocess
import sys

import generated
import pytest
import snippets
import torch

import lens_gemma4
from lens_gemma4 import HookedModel, names
from lens_gemma4.__main__ import parser

ROOT = snippets.ROOT
PAGES = [page for page in snippets.PAGES if page.name != "README.md"]
GUIDES = [page for page in PAGES if page.parent.name == "guides"]
ALL = [ROOT / "README.md", *PAGES]
FENCE = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)


def named(page):
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without code, made parts and addresses of links."""
    for pattern in (generated.MADE, FENCE, re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)]*\)")):
        text = pattern.sub(" ", text)
    return text


# -- snippets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=named
)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (part,) = snippets.parts(page)
    assert (
        snippets.difference(part, snippets.rewritten(part, snippets.fresh(page), page.name)) is None
    )


def test_every_guide_has_a_tool_a_control_and_pitfalls():
    assert len(GUIDES) == 7
    for page in GUIDES:
        text = page.read_text()
        assert "**Question.**" in text and text.count(snippets.SHOWN) > 5, page.name
        for heading in ("## How to know it is right", "## Pitfalls of this architecture"):
            if page.stem != "is_it_right" or "Pitfalls" in heading:
                assert heading in text, f"{page.name} has no {heading}"


@pytest.mark.parametrize("page", ALL, ids=named)
def test_prose_names_no_head_and_no_block_of_a_checkpoint(page):
    """These are other ones after another training: only code that has run says which."""
    text = re.sub(r"<!-- end.*", "", prose(page.read_text()))
    assert not re.search(r"\bL\d+H\d+\b|\bblock [1-9]", text)


@pytest.mark.parametrize("page", ALL, ids=named)
def test_a_command_is_one_that_exists(page):
    makefile = (ROOT / "Makefile").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0].endswith("lens-gemma4"):
            parser().parse_args(words[1:])
        elif words and words[0] == "make":
            assert f"\n{words[1]}:" in makefile, line
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert f"\n{target}:" in makefile, f"make {target}"


# -- links ----------------------------------------------------------------------------------------------


def anchors(page) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def broken(page, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", ALL, ids=named)
def test_links_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_a_link_to_nowhere_is_found():
    page = ROOT / "README.md"
    assert broken(page, "[a](docs/nothing.md) [b](README.md#nothing) [c](#start)") == [
        "docs/nothing.md",
        "README.md#nothing",
    ]


def test_every_page_is_on_the_map():
    linked = re.findall(r"\]\(([^)#]+)", (ROOT / "docs" / "index.md").read_text())
    on_map = {(ROOT / "docs" / link).resolve() for link in linked}
    assert set(PAGES) - on_map == {ROOT / "docs" / "index.md"}


# -- made parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_made_parts_are_todays(page):
    text = page.read_text()
    assert generated.rewritten(text) == text, "python docs/generated.py"


def test_every_part_stands_somewhere():
    held = [found[1] for page in PAGES for found in generated.MADE.findall(page.read_text())]
    assert sorted(held) == sorted(generated.PARTS)


def test_the_table_of_hook_points_is_the_commands():
    assert names.markdown() in (ROOT / "docs" / "hook_points.md").read_text()


def test_the_benchmarks_page_has_no_figure_of_its_own():
    text = re.sub(r"<!-- end.*|\b12B\b", "", prose((ROOT / "docs" / "benchmarks.md").read_text()))
    assert not re.search(r"\d", text), re.findall(r".{30}\d.{10}", text)


def test_every_figure_of_the_benchmarks_is_in_its_file():
    """Of the tables, each number is one of the file's, or the rounded median of some."""
    for name in ("decode", "sweep", "sweep_long", "lens", "loading", "long"):
        text = (generated.RESULTS / f"{name}.txt").read_text()
        held = set(re.findall(r"\d+(?:[.,]\d+)*", text))
        rounded = {
            f"{float(number):.2f}"
            for number in held
            if number.count(".") == 1 and "," not in number
        }
        cells = [line for line in generated.PARTS[name]().splitlines() if line.startswith("| ")]
        for number in re.findall(r"\d+(?:[.,]\d+)*", "\n".join(cells)):
            assert number in held | rounded, f"{number} is not in {name}.txt"


def test_the_forward_table_is_the_median_of_the_runs():
    (line,) = [
        line
        for line in (generated.RESULTS / "forward.txt").read_text().splitlines()
        if re.match(r"mid +32 forward ", line)
    ]
    runs = [float(x) for x in re.findall(r"\d\.\d{3}", line)][1::3]
    rows = [row.split(" | ") for row in generated.forward().splitlines() if row.startswith("| ")]
    column = rows[0].index("mid 32")
    (cell, _) = [row[column] for row in rows if row[0] == "| forward"]
    assert cell == f"{sorted(runs)[1]:.2f}" and len(runs) == 3


@pytest.mark.parametrize("over", ["forward", "forward, fresh memory", "transformers"])
def test_a_bound_that_was_missed_is_marked_in_the_table(over, monkeypatch):
    told = f" of {over}: 1.300;" if over != "transformers" else ""
    line = f"mid 32 all cached 1.0 ms 1.0 MB  1.0 1.4 1.5 {told} bound 1.20: 0 of 1 ABOVE"
    monkeypatch.setattr(generated, "lines", lambda name: ["2026-12-01  torch", "1 run", line])
    ratio = f"of {over}: 1.300, " if told else ""
    assert f"| all cached | 1.40 ({ratio}ABOVE 1.20) |" in generated.forward()


# -- the API reference ----------------------------------------------------------------------------------

# Public names without an example of their own, and why.
NO_EXAMPLE = {
    **dict.fromkeys(
        ("CheckpointError", "ConfigError", "HookNameError", "HookShapeError", "Unavailable"),
        "raised, never called: the message says what to do",
    ),
    "Attribution": "what `HookedModel.attribute` gives back, whose example reads it",
    "Edges": "what `edge_attribution` gives back, whose example reads it",
    "Estimate": "what `attribution_patch` gives back, whose example reads it",
    "ImageFeatures": "what `HookedModel.embed_image` gives back",
    "Inputs": "what `HookedModel.prepare` gives back",
    "Lens": "what `logit_lens` gives back, whose example reads it",
    "PairEffects": "what `pair_effects` gives back, whose example reads it",
    "Patchscope": "what `patchscope` gives back, whose example reads it",
    "Span": "a part of `Inputs`: `inputs.spans`",
    "SweepResult": "what `ablate` gives back, whose example reads it",
    "HookedRootModule": "what HookedModel is built on: its examples are HookedModel's",
    "Target": "docs/reference/attribution.md uses it with a cache",
    "utils": "a module: its functions have examples",
    "__version__": "a text",
}


def test_every_public_name_has_a_docstring_with_an_example_or_a_reason():
    for name in lens_gemma4.__all__:
        told = inspect.getdoc(getattr(lens_gemma4, name)) or ""
        assert told, f"{name} has no docstring"
        assert (">>>" in told) != (name in NO_EXAMPLE), f"{name}: an example, or why there is none"
    assert set(NO_EXAMPLE) <= set(lens_gemma4.__all__)
    text = "\n".join(page.read_text() for page in PAGES)
    for name, why in NO_EXAMPLE.items():
        if "docs/" in why:
            assert re.search(rf"\b{name}\(", text), f"no page calls {name}"


def test_the_examples_of_public_names_run():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    ran = 0
    for name in lens_gemma4.__all__:
        value = getattr(lens_gemma4, name)
        scope = vars(inspect.getmodule(value) or lens_gemma4) | {"HookedModel": HookedModel}
        for test in finder.find(value, name, globs=scope | {"torch": torch, name: value}):
            result = runner.run(test)
            ran += result.attempted
            assert not result.failed, f"the example of {name}"
    assert ran > 20


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc builds the API reference: pip install -e '.[dev]'")
    # In a process of its own: here annotations are checked at run time, and functions wrapped for it.
    script = [sys.executable, "-W", "error", str(ROOT / "docs" / "build_api.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sys.path)))}
    ran = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    text = (tmp_path / "lens_gemma4.html").read_text(encoding="utf-8")
    for name in lens_gemma4.__all__:
        if name not in ("__version__", "patching", "utils"):
            assert f'id="{name}"' in text, name
    plain = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "vector: Float[Tensor" in plain and "'batch pos'" in plain
    assert "jaxtyping." not in plain, "annotations as they are written"
    assert 'id="Stacks.decompose_resid"' in (tmp_path / "lens_gemma4" / "stacks.html").read_text()
    pages = [tmp_path / page.relative_to(ROOT).with_suffix(".html") for page in ALL]
    dead = [(page.name, link) for page in pages for link in dead_links(page)]
    assert not dead
    assert dead_links(pages[0], '<a href="none.html"> <a href="README.html#none">') != []


def dead_links(page, text: str | None = None) -> list[str]:
    """Links of a built page that lead to no file, or to no heading of one."""
    found = []
    for link in re.findall(r'<a href="(?!https?:)([^"]+)"', text or page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and f'id="{anchor}"' not in target.read_text()):
            found.append(link)
    return found


def test_the_api_reference_has_every_module_that_a_page_imports_from():
    build_api = pytest.importorskip("build_api", reason="pdoc is not installed")
    text = "\n".join(page.read_text() for page in ALL)
    used = set(re.findall(r"^from (lens_gemma4\.\w+) import", text, flags=re.MULTILINE))
    held = {f"lens_gemma4.{name}" for name in ("patching", "utils")} | set(build_api.MODULES)
    assert used <= held, used - held
