"""Find what solves each task of the checkpoint in this folder, and write ground_truth.json beside it.

    python weights/tiny/ground_truth.py            find everything afresh from the weights
    python weights/tiny/ground_truth.py --check    do so, and compare with the file that is there

For each task: prompts drawn from what training held out (`truth_prompts.py`), the heads and MLPs that matter
and what they read (`truth_search.py`), a statement in words of which every claim is tested (`truth_words.py`), and how well
the package's tools find the heads (`truth_tools.py`). No head is named in any of these files. It takes some minutes on one core.
"""

import argparse
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import truth_prompts
import truth_search
import truth_tools
import truth_words

from lens_gemma4 import HookedModel
from lens_gemma4.ground_truth import FILE, Task, sha256
from lens_gemma4.plans import of_weights

FOLDER = Path(__file__).parent
DIGITS = 4
CLOSE = 0.03  # what rounding on another machine may do to a figure


def find(folder: Path, tasks: list[str]) -> dict[str, Any]:
    """Everything that the file holds.

    Raises:
        ValueError: a claim of a statement is not true of these weights.
    """
    model = HookedModel.from_pretrained(folder)
    found = {}
    for name in tasks:
        task = truth_search.solve(model, truth_prompts.draw(name, model.tokenizer))
        task = replace(task, statement=truth_words.statement(task), recovered_by=tools(model, task))
        found[name] = task
        print(f"{name}: {task.statement}\n", flush=True)
    pictures = list(
        dict.fromkeys(
            picture
            for task in found.values()
            for picture in [*(task.pictures or []), *(task.corrupt_pictures or [])]
        )
    )
    return {
        "checkpoint": sha256(folder / "model.safetensors"),
        "weights": of_weights(model, torch.float32),
        "made by": "python weights/tiny/ground_truth.py",
        "tasks": {name: row(task, pictures) for name, task in found.items()},
        "pictures": [base64.b64encode(picture).decode() for picture in pictures],
    }


def tools(model: HookedModel, task: Task) -> dict[str, dict[str, Any]]:
    """How well each tool that applies finds the heads that it can find."""
    run, scores = truth_tools.prepared(model, task), {}
    for name, (tool, heads) in truth_tools.found_by(task).items():
        one = truth_tools.recovery(run, tool, heads)
        scores[name] = {
            "heads": [head.name for head in heads],
            "auc": one.auc,
            "precision": one.precision,
            "chance": one.chance,
        }
    return scores


def row(task: Task, pictures: list[bytes]) -> dict[str, Any]:
    """A task as JSON."""
    prompts: dict[str, Any] = {
        "seed": truth_prompts.SEED,
        "n": len(task.prompts),
        "texts": task.prompts,
        "corrupt": task.corrupt,
        "answers": task.answers,
        "versus": task.versus,
        "places": task.places,
    }
    if task.pictures is not None and task.corrupt_pictures is not None:
        prompts["pictures"] = [pictures.index(one) for one in task.pictures]
        prompts["corrupt_pictures"] = [pictures.index(one) for one in task.corrupt_pictures]
        prompts["image_tokens"] = task.image_tokens
    return rounded(
        {
            "statement": task.statement,
            "by_probability": task.by_probability,
            "heads": [head._asdict() for head in task.heads],
            "minor": [list(at) for at in task.minor],
            "mlps": [mlp._asdict() for mlp in task.mlps],
            "sources": task.sources,
            "measured": task.measured,
            "recovered_by": task.recovered_by,
            "prompts": prompts,
        }
    )


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return value


def text_of(value: Any, indent: int = 0) -> str:
    """JSON with what is small on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent < 140 or not value or not isinstance(value, (dict, list)):
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {text_of(part, indent + 1)}" for key, part in value.items()]
        return "{\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "}"
    parts = [text_of(part, indent + 1) for part in value]
    return "[\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "]"


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Where two files say different things; figures may differ by rounding, and sentences hold figures."""
    if where.endswith("statement"):
        return []
    if where.endswith("heads") and all(isinstance(one, dict) for one in [*old, *new]):
        old, new = ({f"L{h['layer']}H{h['head']}": h for h in some} for some in (old, new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [d for key in old for d in differences(old[key], new[key], f"{where} / {key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where} / {i}")]
    if isinstance(old, float) and isinstance(new, float):
        return [] if abs(old - new) <= CLOSE else [f"{where}: {old} there, {new} now"]
    return [] if old == new else [f"{where}: {str(old)[:80]} there, {str(new)[:80]} now"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the file that is there")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the checkpoint")
    parser.add_argument(
        "--tasks", nargs="+", choices=truth_prompts.MAKERS, help="only some, printed"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = find(arguments.folder, arguments.tasks or list(truth_prompts.MAKERS))
    if arguments.tasks:
        return
    if not arguments.check:
        (arguments.folder / FILE).write_text(text_of(found) + "\n", encoding="utf-8")
        return
    there = json.loads((arguments.folder / FILE).read_text(encoding="utf-8"))
    if unlike := differences(there, found):
        raise SystemExit("\n".join([f"{FILE} says something else:", *unlike[:20]]))
    print(f"{FILE} says the same")


if __name__ == "__main__":
    main()
