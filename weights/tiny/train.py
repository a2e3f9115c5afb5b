"""Make the checkpoint in this folder: tokenizer, processor, weights, model card, from one seed.

    python weights/tiny/train.py --out DIR               build and train everything: about an hour on one core
    python weights/tiny/train.py --out DIR --resume      go on where an interrupted training stopped
    python weights/tiny/train.py --out DIR --tenth       a tenth of the steps, to see that every loss falls
    python weights/tiny/train.py --out DIR --evaluate    only measure what is in DIR

The network is transformers' own `Gemma4UnifiedForConditionalGeneration` at a size that trains on a
laptop (`network.py`). It learns to repeat what it has seen; to name the person a thing is given to
and the thing a person has; facts on countries; which years come later; a code told far back; and
the colour and shape in a named corner of a picture (`tasks.py`, `shapes.py`).
"""

import argparse
import csv
import shutil
import time
from pathlib import Path

import torch
from batches import SECOND_PART, Rows, Writer, hidden_states, rows_of_step
from card import write_card, write_prompts
from evaluation import evaluate, table
from network import LAYER_SCALARS, SEED, build_config, build_model, save, set_layer_scalars
from tasks import TASKS
from tokenizer import build_processor, build_tokenizer
from torch import Tensor, nn
from tqdm import tqdm

STEPS = 3600
SAVE_EVERY = 100
LOG_EVERY = 10
PEAK_RATE = 3e-3
PIXEL_RATE = 0.1  # of the rate, for weights that read 6912 pixels: each moves with all the others
WARM_UP = 60  # steps until the peak rate
LAST_RATE = 0.005  # of the peak


def learning_rate(step: int, steps: int) -> float:
    """Up in a line, down in a line, and less steeply in the second part.

    The two lines down meet where that begins: before it the first is above the second, then below.
    """
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    aim, second = steps * 8 / 9, SECOND_PART * steps  # the first line would reach 0 at `aim`
    meeting = (aim - second) / (aim - WARM_UP)
    lines = (aim - step) / (aim - WARM_UP), meeting * (steps - step) / (steps - second)
    return PEAK_RATE * max(LAST_RATE, *lines)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, gains and places do not."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pixels = [p for name, p in trained.items() if "patch_dense" in name or "patch_ln1" in name]
    matrices = [
        p for name, p in trained.items() if p.ndim == 2 and all(p is not pixel for pixel in pixels)
    ]
    named = {id(p) for p in [*pixels, *matrices]}
    groups = [
        {"params": matrices, "weight_decay": 0.02, "factor": 1.0},
        {"params": pixels, "weight_decay": 0.0, "factor": PIXEL_RATE},
        {
            "params": [p for p in trained.values() if id(p) not in named],
            "weight_decay": 0.0,
            "factor": 1.0,
        },
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def target_losses(model: nn.Module, rows: Rows) -> Tensor:
    """Loss of every target in nats, [target]; the head is run where there is one only.

    Where several tokens are right the loss is the mean over them, so what a draw among them would
    cost on average: the same gradient, without the noise of the draw.
    """
    hidden = hidden_states(model, rows.ids, rows.pixels)
    known = rows.weights > 0
    logits = model.lm_head(hidden[known])
    cap = model.config.text_config.final_logit_softcapping
    logits = cap * torch.tanh(logits / cap)
    if rows.spans is None:
        return nn.functional.cross_entropy(logits, rows.targets[known], reduction="none")
    tokens, first = torch.arange(logits.shape[-1]), rows.targets[known][:, None]
    right = (tokens >= first) & (tokens < first + rows.spans[known][:, None])
    return -logits.log_softmax(-1).where(right, 0).sum(-1) / right.sum(-1)


def backward(model: nn.Module, rows: Rows) -> dict[str, float]:
    """Add the gradient of these rows' loss, the sum over tasks of their weighted means.

    Returns each task's mean loss over its answers alone, in nats.
    """
    losses, known = target_losses(model, rows), rows.weights > 0
    weights = rows.weights[known]
    tasks = rows.tasks[:, None].expand_as(rows.weights)[known]
    total, answers = torch.zeros(()), {}
    for task in tasks.unique().tolist():
        here = tasks == task
        total = total + (losses[here] * weights[here]).sum() / weights[here].sum()
        if (here & (weights == 1)).any():  # a row may have been cut before its first answer
            answers[TASKS[task]] = losses[here & (weights == 1)].mean().item()
    total.backward()
    return answers


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, writer: Writer, step: int, steps: int
) -> dict[str, float]:
    """One step of AdamW; returns the mean loss of each task's answers, in nats."""
    losses: dict[str, float] = {}
    for rows in rows_of_step(writer, SEED, step / steps, step, pace=min(1.0, steps / STEPS)):
        losses |= backward(model, rows)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps) * group["factor"]
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(
    out: Path, tokenizer, resume: bool, steps: int
) -> tuple[nn.Module, list[list], dict[str, float | list[int]]]:
    """Train from scratch, or from the state in `out/state`.

    Returns the model, the rows of losses.csv and the seconds it took, on the clock ("seconds") and of
    processor time ("cpu_seconds", what counts on a machine that others use too), with the steps at
    which it was resumed ("stops").
    Raises: FileNotFoundError, nothing to resume.
    """
    model = build_model(build_config(tokenizer), SEED).train()
    optimizer, writer = make_optimizer(model), Writer(tokenizer)
    start, logged, spent, stops = 0, [], {"seconds": 0.0, "cpu_seconds": 0.0}, []
    if resume:
        state = torch.load(state_file(out), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, logged, spent = state["step"], state["logged"], state["spent"]
        stops = [*state.get("stops", []), start]
    clock, cpu_clock = time.time() - spent["seconds"], time.process_time() - spent["cpu_seconds"]
    bar = tqdm(range(start, steps), initial=start, total=steps, desc="training", unit="step")
    recent: dict[str, list[float]] = {}
    for step in bar:
        for task, loss in train_step(model, optimizer, writer, step, steps).items():
            recent.setdefault(task, []).append(loss)
        spent = {"seconds": time.time() - clock, "cpu_seconds": time.process_time() - cpu_clock}
        if (step + 1) % LOG_EVERY == 0:
            means = {task: round(sum(values) / len(values), 4) for task, values in recent.items()}
            seconds = [round(spent["seconds"], 1), round(spent["cpu_seconds"], 1)]
            logged.append([step + 1, *seconds, *(means.get(task) for task in TASKS)])
            bar.set_postfix(means)
            recent = {}
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step + 1, "logged": logged, "spent": spent, "stops": stops}
            save_state(state, state_file(out))
            write_losses(logged, out / "losses.csv")
    return model.eval(), logged, spent | {"stops": stops}


def state_file(out: Path) -> Path:
    """Where a training keeps what it needs to go on; gone once the folder is complete."""
    return out / "state" / "state.pt"


def save_state(state: dict, file: Path) -> None:
    """Write beside and rename, so that a kill while saving leaves the last good state."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def write_losses(logged: list[list], file: Path) -> None:
    """Means over the last steps, of each task's answers; nothing where a task had not begun."""
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(["step", "seconds", "cpu_seconds", *(f"loss_{task}" for task in TASKS)])
        writer.writerows(logged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state")
    parser.add_argument("--evaluate", action="store_true", help="measure OUT, train nothing")
    parser.add_argument("--tenth", action="store_true", help="a tenth of the steps")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps to train ({STEPS})")
    options = parser.parse_args()
    steps = options.steps // 10 if options.tenth else options.steps
    if not options.evaluate:
        options.out.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer()
        model, logged, spent = train(options.out, tokenizer, options.resume, steps)
        set_layer_scalars(model, LAYER_SCALARS)
        write_losses(logged, options.out / "losses.csv")
        save(model, build_processor(tokenizer), options.out)
        write_prompts(options.out)
    results = evaluate(options.out)
    print(table(results))
    if not options.evaluate:
        write_card(
            options.out, dict(zip(TASKS, logged[-1][3:], strict=True)), spent, steps, results
        )
        shutil.rmtree(state_file(options.out).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
