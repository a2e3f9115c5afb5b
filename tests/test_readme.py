"""The README is run, and its table is the code's own."""

import re
from pathlib import Path

import pytest

from lens_gemma4 import names

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTIONS = {
    part.splitlines()[0]: re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
    for part in README.split("\n## ")[1:]
}
WITH_CODE = {title: snippets for title, snippets in SECTIONS.items() if snippets}


def test_the_table_of_hook_points_is_generated():
    assert names.markdown() in README, "paste the output of `lens-gemma4 names --markdown`"


def test_there_are_snippets():
    assert sum(len(snippets) for snippets in WITH_CODE.values()) >= 15


@pytest.mark.parametrize("title", WITH_CODE)
def test_the_snippets_of_a_section_run_one_after_another(title, tmp_path, monkeypatch, tiny_model):
    """A section stands on its own after the imports and the model of the first."""
    monkeypatch.chdir(tmp_path)
    import torch

    from lens_gemma4 import HookedModel

    scope = {"torch": torch, "HookedModel": HookedModel, "model": tiny_model, "tmp_path": tmp_path}
    for number, code in enumerate(WITH_CODE[title]):
        if "google/gemma-4-12B" in code:
            code = re.sub(
                r'"google/gemma-4-12B", device="cuda", dtype=torch.bfloat16', '"tiny"', code
            )
            assert "google/gemma-4-12B" not in code
        exec(compile(code, f"README, {title}, snippet {number}", "exec"), scope)
        assert not tiny_model.list_hooks()
