"""The shape of the project: who imports whom, what the network may not do, what is shipped, what stays shut."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fixtures
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lens_gemma4"

TOP_LEVEL = {
    *(".ci", ".gitignore", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("benchmarks", "docs", "lens_gemma4", "notebooks", "tests", "weights"),
}
# Each module may import those named, all of them above it: imports run one way, from first to last.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "outputs": set(),
    "visible": set(),
    "pages": set(),
    "config": set(),
    "names": {"config", "errors"},
    "kept": set(),
    "hooks": {"kept", "errors"},
    "masks": {"config"},
    "local": {"masks"},
    "kv_cache": {"config"},
    "products": set(),
    "recompute": {"hooks"},
    "norms": {"hooks", "kept"},
    "media": {"config", "hooks", "norms", "errors"},
    "model": {
        *(
            "config",
            "names",
            "hooks",
            "masks",
            "local",
            "kv_cache",
            "products",
            "recompute",
            "norms",
            "kept",
            "media",
            "errors",
        ),
    },
    "loading": {"config", "names", "model", "errors"},
    "spans": {"config"},
    "forms": {"spans"},
    "chat": set(),
    # the list of a prepared call's keys, and the files that a checkpoint's text needs
    "inputs": {"config", "model", "loading", "spans", "forms", "chat", "errors"},
    "plots": set(),
    "overlays": {"plots"},
    "utils": {"names", "spans", "errors"},
    "attribution": {"config", "plots", "utils"},
    "stacks": {"config", "attribution", "utils"},
    "cache": {"names", "config", "kept", "stacks", "utils", "errors"},
    "factored": {"errors"},
    "circuits": {"config", "norms", "model", "cache", "factored", "errors"},
    "sampling": set(),
    "new_text": set(),
    "generate": {
        *("config", "hooks", "spans", "chat", "kv_cache", "cache"),
        *("sampling", "new_text", "errors"),
    },
    "readings": {"config", "spans", "attribution"},
    "rows": {"masks", "model", "utils"},
    "lenses": {"config", "model", "spans", "attribution", "cache", "readings", "utils", "plots"},
    "hooked_model": {
        *(
            "config",
            "names",
            "hooks",
            "masks",
            "model",
            "loading",
            "spans",
            "forms",
            "chat",
            "inputs",
            "kv_cache",
            "attribution",
            "cache",
        ),
        *("utils", "factored", "circuits", "lenses", "rows", "generate", "errors"),
    },
    "patchscopes": {"cache", "readings", "lenses", "hooked_model", "plots"},
    "tuned_lens": {"attribution", "cache", "readings", "lenses", "hooked_model"},
    "heads": {"hooks", "cache", "hooked_model", "errors"},
    "evals": {"utils", "hooked_model", "heads", "errors"},
    "interventions": {"config"},
    "variants": {"model", "products", "interventions"},
    "identities": set(),
    "metrics": {"identities", "model", "hooked_model", "lenses", "interventions"},
    "results": {"plots"},
    "plans": {"identities", "version", "hooked_model", "interventions", "metrics"},
    "ground_truth": {"loading", "hooked_model", "metrics", "results", "plans"},
    "sweep": {"spans", "hooked_model", "interventions", "variants", "metrics", "results", "plans"},
    "changes": {"identities", "spans", "hooked_model", "interventions", "sweep"},
    "maps": {"hooked_model", "interventions", "changes", "metrics", "results", "sweep"},
    "knockouts": {"hooked_model", "interventions", "changes", "metrics", "sweep"},
    "pairs": {
        *(
            "plots",
            "hooked_model",
            "interventions",
            "metrics",
            "results",
            "sweep",
            "maps",
            "changes",
        ),
    },
    "selection": {
        *(
            "plots",
            "hooked_model",
            "interventions",
            "metrics",
            "results",
            "sweep",
            "maps",
            "changes",
        ),
        "pairs",
    },
    "patch_loop": {"names", "cache", "hooked_model", "interventions", "errors"},
    "patching": {
        *("hooked_model", "interventions", "metrics", "results", "sweep", "patch_loop", "errors"),
    },
    "gradients": {"hooked_model", "metrics", "changes"},
    "estimates": {
        *(
            "hooked_model",
            "interventions",
            "metrics",
            "results",
            "plans",
            "sweep",
            "maps",
            "changes",
        ),
        "gradients",
    },
    "paths": {
        *(
            "config",
            "hooked_model",
            "interventions",
            "metrics",
            "results",
            "sweep",
            "maps",
            "changes",
        ),
        "gradients",
    },
    "edges": {
        *("plots", "norms", "model", "hooked_model", "interventions", "metrics", "results"),
        *("sweep", "maps", "changes", "gradients", "estimates", "paths"),
    },
    "pictures": {
        *("masks", "spans", "forms", "plots", "overlays", "attribution", "cache", "lenses"),
        *("hooked_model", "results"),
    },
    "watching": {"names", "attribution", "readings", "lenses", "hooked_model"},
    "question": {"visible", "spans", "attribution", "hooked_model", "metrics"},
    "report_data": {
        *("version", "config", "names", "spans", "attribution", "cache", "hooked_model", "maps"),
        *("pictures", "watching", "question"),
    },
    "report": {"outputs", "pages", "hooked_model", "question", "report_data"},
    "parallel": {"model", "sweep", "errors"},
    "check": {"config", "names", "loading", "hooked_model"},
}
# They see everything, and nothing of the package sees them.
ENTRANCES = {"__init__", "__main__", "demo", "prompt_files"}
NO_TRANSFORMERS = (
    "config",
    "names",
    "kept",
    "hooks",
    "masks",
    "local",
    "norms",
    "media",
    "model",
    "loading",
    "attribution",
    "stacks",
    "cache",
    "errors",
)
ONLY_STANDARD_LIBRARY = ("version", "config", "names", "errors")
# A function whose body is longer than this gives its reason here.
LONGEST_FUNCTION = 50
LONG_FOR_A_REASON = {
    "config.from_hf": "one keyword for each number of the architecture",
    "names._block_rows": "a table: a row for each hook point of a block",
}


def modules() -> dict[str, ast.Module]:
    return {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.glob("*.py"))
    }


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but what stands under `if TYPE_CHECKING:`, which never runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from without_type_checking(node)


def imported(tree: ast.AST) -> set[str]:
    """Full names of the modules a file imports, wherever in it."""
    found: set[str] = set()
    for node in without_type_checking(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import: spell the package out"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def siblings(tree: ast.AST) -> set[str]:
    """Modules of the package that a file imports; `__init__` for what only the package itself exports."""
    known = {path.stem for path in PACKAGE.glob("*.py")}
    inner = {name.split(".")[1] for name in imported(tree) if name.startswith("lens_gemma4.")}
    return {name if name in known else "__init__" for name in inner}


# -- who imports whom ---------------------------------------------------------------------------------


def test_the_table_runs_one_way():
    """Each module may import only what stands above it."""
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        above = order[: order.index(name)]
        assert allowed <= set(above), f"{name}: {allowed - set(above)} stand below it"


def test_every_module_has_a_place_in_the_table():
    assert set(modules()) <= {*MAY_IMPORT, *ENTRANCES}


def test_modules_import_only_what_the_table_allows():
    trees = modules()
    for name, tree in trees.items():
        if name not in ENTRANCES:
            assert siblings(tree) <= MAY_IMPORT[name], (
                f"{name} imports {siblings(tree) - MAY_IMPORT[name]}"
            )
    assert "hooks" in siblings(trees["model"])  # imports are found at all
    backwards = ast.parse("def f():\n    from lens_gemma4.hooked_model import HookedModel")
    assert not siblings(backwards) <= MAY_IMPORT["model"]


def test_the_network_stands_without_transformers():
    trees = modules()
    for name in NO_TRANSFORMERS:
        packages = {one.split(".")[0] for one in imported(trees[name])}
        assert "transformers" not in packages, name
    assert any(
        "transformers" in one for one in imported(trees["inputs"])
    )  # and where it is used, it is seen


def test_config_and_names_need_only_the_standard_library():
    trees = modules()
    for name in ONLY_STANDARD_LIBRARY:
        packages = {one.split(".")[0] for one in imported(trees[name])}
        assert packages <= {*sys.stdlib_module_names, "lens_gemma4"}, name
    assert {one.split(".")[0] for one in imported(trees["hooks"])} <= {
        *sys.stdlib_module_names,
        "torch",
        "lens_gemma4",
    }


def test_the_plotting_library_has_one_importer():
    for name, tree in modules().items():
        if name != "plots":
            assert not any(one.split(".")[0] == "plotly" for one in imported(tree)), name


# -- what the network may not do ----------------------------------------------------------------------

# What each module may move, and why.
MOVED = {
    # on the CPU, as transformers' loader computes them: powers on a card round unlike
    "model": {"rotary_frequencies(layer.rotary, layer.d_head, dtype).to(like.device)"},
    # what a user asked to be kept elsewhere
    "hooks": {"value.to(self.device)"},
    "cache": {"value.to(device)", "v.to(device)"},
}


FILES_AND_PRINTING = set(
    "open print read_text write_text read_bytes write_bytes unlink mkdir".split()
)


def deeds(tree: ast.AST) -> list[str]:
    """Calls that read or write files, print, or place a tensor on a device."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).split(".")[-1]
        places = name == "to" and any(
            "device" in ast.unparse(given) for given in [*node.args, *node.keywords]
        )
        moves = name in ("cuda", "cpu") and isinstance(node.func, ast.Attribute)
        if places or moves or name in FILES_AND_PRINTING:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "name", ["model", "masks", "local", "norms", "media", "hooks", "names", "attribution", "cache"]
)
def test_no_files_no_printing(name):
    tree = modules()[name]
    assert not {one.split(".")[0] for one in imported(tree)} & {
        "os",
        "io",
        "pathlib",
        "shutil",
        "tempfile",
        "logging",
    }
    assert set(deeds(tree)) <= MOVED.get(name, set())


@pytest.mark.parametrize(
    "deed", ["open('x')", "print(1)", "x.to(device)", "x.to(y.device)", "x.cuda()", "p.read_text()"]
)
def test_the_search_for_deeds_finds_one(deed):
    assert deeds(ast.parse(deed)) == [deed]
    assert not deeds(ast.parse("x.to(dtype)"))


def test_long_functions_have_a_reason():
    long = set()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body and body[-1].end_lineno - body[0].lineno >= LONGEST_FUNCTION:
                    long.add(f"{name}.{node.name}")
    assert long == set(LONG_FOR_A_REASON)


# -- what is shipped ----------------------------------------------------------------------------------


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


def test_the_top_level_is_what_the_layout_lists():
    assert {file.split("/")[0] for file in tracked()} <= TOP_LEVEL


def test_no_large_file_is_committed():
    """The checkpoint that ships stays under 10 MB in all."""
    files = [ROOT / file for file in tracked() if (ROOT / file).is_file()]
    assert sum(file.stat().st_size for file in files if "weights/tiny" in file.as_posix()) < 10e6
    assert all(file.stat().st_size < 1e6 for file in files if "weights/tiny" not in file.as_posix())


def test_the_wheel_holds_the_checkpoint_and_not_its_training(tmp_path, monkeypatch):
    from hatchling.builders.wheel import WheelBuilder

    monkeypatch.chdir(ROOT)
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    held = {
        name.removeprefix("lens_gemma4/_tiny/")
        for name in names
        if name.startswith("lens_gemma4/_tiny/")
    }
    whole = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "ground_truth.json"}
    assert whole <= held
    assert not any(name.endswith(".py") for name in held)
    assert not any(name.startswith("state") for name in held)
    assert {name.split("/")[0] for name in names} == {
        "lens_gemma4",
        f"lens_gemma4-{version()}.dist-info",
    }
    assert "lens_gemma4/py.typed" in names
    page = {name.rsplit("/", 1)[1] for name in names if "/report_page/" in name}
    assert {"page.html", "page.css", "main.js"} <= page


def version() -> str:
    import lens_gemma4

    return lens_gemma4.__version__


# -- what stays shut ----------------------------------------------------------------------------------


def in_a_fresh_process(code: str, home: Path, *arguments: str) -> str:
    """Run code with an empty home directory and no Hub settings; what it printed."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "XDG_"))
    }
    environment = {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LOADED = "print(json.dumps([m for m in sys.modules if m.startswith('transformers.models.gemma4')]))"


def test_importing_does_not_import_transformers_models(tmp_path):
    out = in_a_fresh_process(f"import json, sys, lens_gemma4; {LOADED}", tmp_path)
    assert json.loads(out) == []
    control = f"import json, sys; from transformers import Gemma4UnifiedConfig; {LOADED}"
    assert json.loads(in_a_fresh_process(control, tmp_path)) != []


def test_loading_and_running_a_folder_does_not_import_transformers_models(tmp_path, folder):
    code = f"""
        import json, sys, torch
        from lens_gemma4 import HookedModel
        HookedModel.from_pretrained(sys.argv[1])(torch.tensor([[2, 5, 6]]))
        {LOADED}
    """
    assert json.loads(in_a_fresh_process(code, tmp_path, str(folder))) == []


# Every attribute of transformers' Gemma modules, its attention functions and torch.nn.Module, by identity.
FINGERPRINT = """
import sys, torch, transformers.masking_utils, transformers.integrations.sdpa_attention
import transformers.models.gemma4_unified.modeling_gemma4_unified as modeling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
def fingerprint():
    seen = {}
    places = [modeling, transformers.masking_utils, transformers.integrations.sdpa_attention, torch.nn.Module,
              torch.nn.functional]
    places += [v for v in vars(modeling).values() if isinstance(v, type)]
    for place in places:
        seen |= {(place.__name__, key): id(value) for key, value in vars(place).items() if not key.startswith("__")}
    seen |= {("attention", key): id(value) for key, value in dict(ALL_ATTENTION_FUNCTIONS).items()}
    return seen
before = fingerprint()
def changed():
    after = fingerprint()
    return sorted(str(key) for key in {*before, *after} if before.get(key) != after.get(key))
"""


def test_importing_and_running_patch_nothing(tmp_path, folder):
    work = """
from lens_gemma4 import HookedModel
model = HookedModel.from_pretrained(sys.argv[1])
model.run_with_cache(torch.tensor([[2, 5, 6]]))
"""
    assert in_a_fresh_process(f"{FINGERPRINT}{work}print(changed())", tmp_path, str(folder)) == "[]"
    patch = "modeling.Gemma4UnifiedTextAttention.forward = lambda self: None\n"
    control = in_a_fresh_process(f"{FINGERPRINT}{patch}print(changed())", tmp_path)
    assert "Gemma4UnifiedTextAttention" in control


# Audit events come from the interpreter itself: nothing that opens a socket gets past them.
NO_SOCKETS = """
import sys
def refuse(event, args):
    if event.startswith("socket."):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(refuse)
"""


def test_a_folder_loads_without_a_socket(tmp_path, folder):
    code = f"""{NO_SOCKETS}
import torch
from lens_gemma4 import HookedModel
print(tuple(HookedModel.from_pretrained(sys.argv[1])(torch.tensor([[2, 5, 6]])).shape[:2]))
"""
    assert in_a_fresh_process(code, tmp_path, str(folder)) == "(1, 3)"


def test_the_shipped_checkpoint_runs_on_text_without_a_socket(tmp_path):
    code = f"""{NO_SOCKETS}
from lens_gemma4 import HookedModel
model = HookedModel.from_pretrained("tiny")
print(model.to_string(model("The capital of France is")[0, -1:].argmax(-1)))
"""
    assert in_a_fresh_process(code, tmp_path).strip() == "Paris"


def test_the_guard_against_sockets_sees_one(tmp_path):
    code = f"""{NO_SOCKETS}
import socket
try:
    socket.socket()
except RuntimeError as error:
    print("refused", str(error).split()[0])
"""
    assert in_a_fresh_process(code, tmp_path) == "refused socket.__new__"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random multimodal checkpoint."""
    return fixtures.make_f(tmp_path_factory.mktemp("checkpoint"))
