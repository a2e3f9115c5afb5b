"""The README is run, and its table is the code's own."""

import re
from pathlib import Path

import pytest

from lens_gemma4 import names

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_table_of_hook_points_is_generated():
    assert names.markdown() in README, "paste the output of `lens-gemma4 names --markdown`"


def test_there_are_snippets():
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_snippet_runs(number, tmp_path, monkeypatch, tiny_model):
    """Each stands on its own after the imports and the model of the first."""
    monkeypatch.chdir(tmp_path)
    code = SNIPPETS[number]
    if "google/gemma-4-12B" in code:
        code = re.sub(r'"google/gemma-4-12B", device="cuda", dtype=torch.bfloat16', '"tiny"', code)
        assert "google/gemma-4-12B" not in code
    import torch

    from lens_gemma4 import HookedModel

    scope = {"torch": torch, "HookedModel": HookedModel, "model": tiny_model, "tmp_path": tmp_path}
    exec(compile(code, f"README snippet {number}", "exec"), scope)
    assert not tiny_model.list_hooks()
