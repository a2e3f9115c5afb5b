"""The README is run, shows what it prints, and stays short."""

import pytest
import snippets

from lens_gemma4.__main__ import COMMANDS

README = snippets.ROOT / "README.md"
PARTS = {snippets.title(part): part for part in snippets.parts(README) if "```python" in part}


def test_there_are_snippets():
    assert len(PARTS) >= 2
    assert len(snippets.FENCED.findall(README.read_text(encoding="utf-8"))) >= 4


@pytest.mark.parametrize("title", PARTS)
def test_the_snippets_of_a_section_run_and_print_what_is_shown(title, tmp_path, monkeypatch):
    """A section stands on its own after the imports and the model that every section starts with."""
    monkeypatch.chdir(tmp_path)
    scope = snippets.fresh(README)
    now = snippets.rewritten(PARTS[title], scope, f"README, {title}")
    assert snippets.difference(PARTS[title], now) is None
    assert not scope["model"].list_hooks()


def test_it_gets_to_a_finding_before_it_explains():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 250, "details belong into docs/"
    first = snippets.FENCED.findall(text)[0]
    own = [line for line in first.splitlines() if line and not line.startswith(snippets.SHOWN)]
    assert len(own) <= 22 and snippets.SHOWN in first


def test_it_names_every_notebook_and_every_command():
    text = README.read_text(encoding="utf-8")
    missing = [n.name for n in (snippets.ROOT / "notebooks").glob("*.ipynb") if n.name not in text]
    assert not missing
    assert all(f" {name} " in f" {text} ".replace("`", " ") for name in COMMANDS)


def test_a_figure_that_is_another_is_found():
    """The negative control of every comparison above and in test_docs."""
    code = "print(f'{1 / 3:.2f} of 7')\n# > 0.33 of 7\n"
    assert snippets.run(code, {}, "here") == code
    page = f"```python\n{code}```"
    for wrong in ("0.35 of 7", "-0.33 of 7", "0.33 of 8", "0.33 by 7", "0.33 of 7 "):
        shown = page.replace("0.33 of 7", wrong)
        found = snippets.difference(shown, snippets.rewritten(shown, {}, "here"))
        assert (found is None) == (wrong == "0.33 of 7 "), wrong
    longer = page.replace("# > 0.33 of 7", "# > 0.33 of 7\n# > and more")
    assert snippets.difference(longer, snippets.rewritten(longer, {}, "here")) is not None
    assert snippets.alike("0.331 of  7", "0.332 of 7")  # the last digit may round otherwise
