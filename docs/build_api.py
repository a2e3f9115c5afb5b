"""Builds the API reference from docstrings: `make docs`, then open docs/_build/lens_gemma4.html.

python docs/build_api.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pdoc
import pdoc.doc
import pdoc.doc_types
import pdoc.render

FOLDER = Path(__file__).resolve().parent / "_build"
# What the pages import beside the package itself, whose `__all__` has patching and utils.
MODULES = tuple(
    f"lens_gemma4.{name}"
    for name in (
        *(
            "attribution",
            "circuits",
            "evals",
            "interventions",
            "names",
            "pictures",
            "plots",
            "sweep",
        ),
    )
)


class Written(str):
    """An annotation as the source has it: `Float[Tensor, "batch pos d_model"]` says more than what it stands for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def as_written(annotation: Any, *_: Any) -> Any:
    """In place of pdoc's looking up what an annotation stands for."""
    return Written(annotation) if isinstance(annotation, str) else annotation


def build(folder: Path = FOLDER) -> Path:
    """Write the pages; the first of them."""
    pdoc.doc.safe_eval_type = pdoc.doc_types.safe_eval_type = as_written
    pdoc.render.configure(docformat="google", math=False, show_source=False, search=True)
    pdoc.pdoc("lens_gemma4", *MODULES, output_directory=folder)
    return folder / "lens_gemma4.html"


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
