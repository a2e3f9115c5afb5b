"""Builds the API reference from docstrings, and the pages beside it: `make docs`, then open docs/_build/index.html.

python docs/build_api.py [FOLDER]
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pdoc
import pdoc.doc
import pdoc.doc_types
import pdoc.render
import pdoc.render_helpers
import snippets

ROOT = snippets.ROOT
FOLDER = ROOT / "docs" / "_build"
# What the pages import beside the package itself, whose `__all__` has patching and utils; and what its classes inherit from.
MODULES = tuple(
    f"lens_gemma4.{name}"
    for name in (
        "attribution circuits evals ground_truth hooks inputs interventions model names pictures plots readings report report_data stacks sweep"
    ).split()
)
PAGES = [*snippets.PAGES, ROOT / "weights" / "tiny" / "README.md"]
STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; } code { font-size: .9em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #ccc; padding: .25rem .5rem; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #ddd; } pre { background: #242424; } a { color: #8ab4f8; }
  td, th { border-color: #444; }
}
"""


class Written(str):
    """An annotation as the source has it: `Float[Tensor, "batch pos d_model"]` says more than what it stands for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def as_written(annotation: Any, *_: Any) -> Any:
    """In place of pdoc's looking up what an annotation stands for."""
    return Written(annotation) if isinstance(annotation, str) else annotation


def build(folder: Path = FOLDER) -> Path:
    """Write the site; its first page."""
    pdoc.doc.safe_eval_type = pdoc.doc_types.safe_eval_type = as_written
    pdoc.render.configure(docformat="google", math=False, show_source=False, search=True)
    pdoc.pdoc("lens_gemma4", *MODULES, output_directory=folder)
    for page in PAGES:
        out = place(page, folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(rendered(page, folder), encoding="utf-8")
    first = os.path.relpath(place(ROOT / "docs" / "index.md", folder), folder)
    (folder / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={first}">', encoding="utf-8"
    )
    return folder / "index.html"


def place(page: Path, folder: Path) -> Path:
    """Where a page of the repository is written."""
    return folder / page.relative_to(ROOT).with_suffix(".html")


def rendered(page: Path, folder: Path) -> str:
    """A page as HTML, its links to other pages and to files of the repository kept."""
    out = place(page, folder)

    def linked(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        target = (page.parent / path).resolve()
        target = place(target, folder) if target in PAGES else target
        return f"]({os.path.relpath(target, out.parent)}{mark}{anchor})"

    text = re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", linked, page.read_text(encoding="utf-8"))
    around = {
        "map": place(ROOT / "docs" / "index.md", folder),
        "README": place(ROOT / "README.md", folder),
        "API": folder / "lens_gemma4.html",
    }
    bar = " · ".join(
        f'<a href="{os.path.relpath(where, out.parent)}">{name}</a>'
        for name, where in around.items()
    )
    style = STYLE + pdoc.render_helpers.formatter.get_style_defs("pre")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{snippets.title(text)}</title>'
        f"<style>{style}</style><nav>{bar}</nav>{pdoc.render_helpers.to_html(text)}</html>"
    )


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
