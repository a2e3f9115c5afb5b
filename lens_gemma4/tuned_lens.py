"""The tuned lens: an affine map for each block, after which the logit lens reads what the block has already decided.

Early streams are written in a basis of their own, which the last norm and the head were never trained on. The map of a
block is trained to carry its stream over: the KL divergence from the model's own answer to the lens's is made small,
block by block, on a user's text. The model never changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from lens_gemma4.attribution import widest
from lens_gemma4.cache import ActivationCache
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.lenses import MAX_BYTES, Translate, logit_lens, project
from lens_gemma4.readings import row_bytes

TENSORS, ABOUT = "tuned_lens.safetensors", "tuned_lens.json"
WARM_UP = 0.1  # share of the steps until the peak rate; from there it falls to nothing, in a straight line
# Autograd keeps several tensors as large as a chunk's logits, so a chunk of training is smaller than one of reading.
TRAINING_BYTES = 2**26
SAMPLED_ROWS = 64  # of the unembedding, for its fingerprint

Texts = Sequence[str | Tensor] | Tensor


class TunedLens(nn.Module):
    """Affine maps of `resid_post`, one for each block but the last, which is left as it is.

    A fresh one changes nothing, so it is the logit lens. Use it as `model.logit_lens(text, tuned=lens)`.

    Args:
        model: whose streams it maps; sizes, device and dtype (float32 at least) are taken from it.

    `record` says how it was trained; it is saved with it.

    Source: Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens" (2023),
    arXiv 2303.08112.

    >>> model = HookedModel.from_pretrained("tiny")
    >>> lens = train_tuned_lens(model, ["The capital of France is Paris."], steps=2, progress=False)
    >>> model.logit_lens("The capital of France is", tuned=lens).top(layer=-1)[0][0]
    ' Paris'
    """

    def __init__(self, model: HookedModel) -> None:
        super().__init__()
        cfg = model.cfg
        self.n_layers, self.d_model = cfg.n_layers, cfg.d_model
        self.model_name = cfg.model_name
        self.unembedding = fingerprint(model)
        self.record: dict[str, Any] = {}
        empty: dict[str, Any] = {"dtype": widest(model.dtype), "device": model.device}
        trained = range(cfg.n_layers - 1)
        # The map less the identity: at zero the stream goes through unrounded.
        self.weights = nn.ParameterList(
            [torch.zeros(cfg.d_model, cfg.d_model, **empty) for _ in trained]
        )
        self.biases = nn.ParameterList([torch.zeros(cfg.d_model, **empty) for _ in trained])

    def forward(
        self, stream: Float[Tensor, "*axes d_model"], layer: int
    ) -> Float[Tensor, "*axes d_model"]:
        """The stream leaving block `layer`, as if it were the last one; in the stream's own dtype.

        Raises:
            IndexError: no such block.
        """
        if not -self.n_layers <= layer < self.n_layers:
            raise IndexError(f"no block {layer}: this lens has blocks 0 to {self.n_layers - 1}")
        layer %= self.n_layers
        if layer == self.n_layers - 1:
            return stream
        weight, bias = self.weights[layer], self.biases[layer]
        wide = stream.to(weight.dtype)
        return (wide + F.linear(wide, weight) + bias).to(stream.dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the maps and what they belong to. An unfinished write never looks like a lens."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        about = {
            "n_layers": self.n_layers,
            "d_model": self.d_model,
            "model_name": self.model_name,
            "unembedding": self.unembedding,
            "record": self.record,
        }
        (place / ABOUT).unlink(missing_ok=True)  # of an older lens: its tensors go first
        tensors = {name: value.contiguous() for name, value in self.state_dict().items()}
        with _renamed(place / TENSORS) as part:
            safetensors.torch.save_file(tensors, part)
        with _renamed(place / ABOUT) as part:
            part.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: HookedModel) -> TunedLens:
        """Load a lens for the model it was trained on.

        Raises:
            FileNotFoundError: no lens there.
            ValueError: it was trained on another model; the message says what differs.
        """
        place = Path(folder)
        for name in (ABOUT, TENSORS):
            if not (place / name).is_file():
                raise FileNotFoundError(
                    f"{place} holds no tuned lens: {name} is missing. save_pretrained writes one"
                )
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        lens = cls(model)
        ours = {"n_layers": lens.n_layers, "d_model": lens.d_model, "unembedding": lens.unembedding}
        if unlike := [name for name in ours if about[name] != ours[name]]:
            told = "; ".join(
                f"{name} is {about[name]} there and {ours[name]} here" for name in unlike
            )
            raise ValueError(
                f"the tuned lens in {place} was trained on another model ({about['model_name']!r}; this is "
                f"{lens.model_name!r}): {told}. Train one on this model"
            )
        lens.load_state_dict(safetensors.torch.load_file(place / TENSORS))
        lens.record = about["record"]
        return lens.requires_grad_(False)


def fingerprint(model: HookedModel) -> str:
    """Of what reads the stream: rows of the unembedding and the final norm's gain, rounded to bfloat16, so that a
    checkpoint loaded in another dtype is still the same."""
    rows = torch.linspace(0, model.cfg.d_vocab - 1, SAMPLED_ROWS).long()
    gain = model.ln_final.weight
    assert gain is not None
    seen = hashlib.sha256()
    for value in (model.unembedding[rows.to(model.device)], gain):
        seen.update(_bytes(value.detach().to(torch.bfloat16).view(torch.int16)))
    return seen.hexdigest()


def _bytes(value: Tensor) -> bytes:
    return value.cpu().numpy().tobytes()


# -- training -----------------------------------------------------------------------------------------


def train_tuned_lens(
    model: HookedModel,
    texts: Texts,
    *,
    held_out: Texts | None = None,
    steps: int = 250,
    batch_size: int = 8,
    max_tokens: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
    state: str | Path | None = None,
    save_every: int = 50,
    max_bytes: int = TRAINING_BYTES,
    progress: bool = True,
) -> TunedLens:
    """Train a tuned lens by Adam on KL(final || lens), averaged over the real tokens of each batch.

    The rate rises over the first tenth of the steps and then falls to zero. A bias moves in steps of the size of its
    block's stream (the layer scalars make streams of very unlike length). Nothing of the model changes.

    Args:
        texts: texts, or ids (`[pos]` each, or `[row pos]`, as `tokenize_and_concatenate` makes them); each is cut
            after `max_tokens`.
        held_out: other texts on which both lenses are measured at the end; see `record["held_out"]`.
        steps, batch_size: batches, and texts in each; texts come in a new order each time round.
        learning_rate: Adam's, at its peak.
        seed: of the order of the texts.
        state: a file for the state of the training, written every `save_every` steps beside its place and then put
            there, so that a killed training goes on from it, to the same maps. It stays when the training is done.
        max_bytes: of one chunk of logits, counted in float32; a step keeps about eight such chunks.
        progress: show a bar.
    Raises:
        ValueError: no text; a number below 1; a state that was written with other settings or texts, or for another model.

    `record` of the lens then holds the settings, `losses` (mean over blocks, nats, each step) and, with `held_out`,
    `held_out`: mean KL by block, nats, of the "logit lens" and the "tuned lens".

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> lens = train_tuned_lens(model, ["The capital of Italy is Rome."] * 8, steps=3, progress=False)
    >>> len(lens.record["losses"])
    3
    """
    _at_least_one(steps=steps, batch_size=batch_size, max_tokens=max_tokens, save_every=save_every)
    rows = _token_rows(model, texts, max_tokens)
    held_rows = None if held_out is None else _token_rows(model, held_out, max_tokens)
    lens = TunedLens(model)
    settings = {
        "steps": steps,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "learning_rate": learning_rate,
        "seed": seed,
        "texts": hashlib.sha256(b"|".join(map(_bytes, rows))).hexdigest(),
        "unembedding": lens.unembedding,
        "dtype": str(widest(model.dtype)),
    }
    optimizer = _optimizer(lens)
    file = None if state is None else Path(state)
    losses = _resume(file, settings, lens, optimizer)
    bar = tqdm(
        range(len(losses), steps),
        desc="tuned lens",
        initial=len(losses),
        total=steps,
        disable=None if progress else True,
    )
    for step in bar:
        streams = _streams(model, _batch(rows, step, batch_size, seed))
        if step == 0:
            _measure_units(optimizer, streams)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["unit"] * _share_of_rate(step, steps)
        optimizer.zero_grad()
        losses.append(_accumulate(model, lens, streams, max_bytes))
        optimizer.step()
        bar.set_postfix_str(f"KL {losses[-1]:.4f} nats")
        if file is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
            _save_state(file, settings, lens, optimizer, losses)
    lens.requires_grad_(False)
    lens.record = {**settings, "losses": losses}
    if held_rows is not None:
        lens.record["held_out"] = {
            name: kl_by_block(model, held_rows, tuned, batch_size).tolist()
            for name, tuned in (("logit lens", None), ("tuned lens", lens))
        }
    return lens


def kl_by_block(
    model: HookedModel,
    texts: Texts,
    tuned: Translate | None = None,
    batch_size: int = 8,
    max_tokens: int = 256,
    max_bytes: int = MAX_BYTES,
) -> Float[Tensor, " layer"]:
    """KL(final || lens) after each block, in nats, averaged over the texts' tokens; without a lens, the logit lens's.

    Args:
        texts, batch_size, max_tokens: as in `train_tuned_lens`.
        max_bytes: as in `logit_lens`.
    """
    _at_least_one(batch_size=batch_size, max_tokens=max_tokens)
    rows = _token_rows(model, texts, max_tokens)
    total = torch.zeros(model.cfg.n_layers, dtype=torch.float64)
    for begin in range(0, len(rows), batch_size):
        ids, mask = _padded(rows[begin : begin + batch_size], model)
        seen = logit_lens(
            model,
            ids,
            attention_mask=mask.long(),
            top_k=1,
            entropy=False,
            tuned=tuned,
            max_bytes=max_bytes,
        )
        assert seen.kl is not None
        total += seen.kl[:, mask].double().sum(-1).cpu()
    return total / sum(map(len, rows))


def _token_rows(model: HookedModel, texts: Texts, max_tokens: int) -> list[Int[Tensor, " pos"]]:
    """Each text's ids, on the CPU."""
    if isinstance(texts, str):
        raise ValueError("texts is one text: give a list of them")
    given = (model.to_tokens(text)[0] if isinstance(text, str) else text for text in texts)
    rows = [row[:max_tokens].cpu() for row in given]
    if not rows or not all(map(len, rows)):
        raise ValueError("there is no text to read: texts is empty, or one of them is")
    return rows


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it is 1 or more")


def _batch(
    rows: Sequence[Tensor], step: int, batch_size: int, seed: int
) -> list[Int[Tensor, " pos"]]:
    """The texts of one step, known from its number alone, so that a resumed training sees the same."""
    chosen = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        time_round, at = divmod(place, len(rows))
        order = torch.Generator().manual_seed(seed + time_round)
        chosen.append(rows[int(torch.randperm(len(rows), generator=order)[at])])
    return chosen


def _padded(
    rows: Sequence[Tensor], model: HookedModel
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Rows of ids to the right of which padding stands, and the mask of what is none."""
    ids = nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=model.cfg.pad_token_id or 0
    )
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(model.device), mask.to(model.device)


@torch.no_grad()
def _streams(model: HookedModel, rows: Sequence[Tensor]) -> list[Float[Tensor, "row d_model"]]:
    """What leaves each block at the real tokens of a batch."""
    ids, mask = _padded(rows, model)
    _, cache = model.run_with_cache(
        ids,
        attention_mask=mask.long(),
        names_filter="blocks.*.hook_resid_post",
        return_type=None,
    )
    assert isinstance(cache, ActivationCache)
    return [cache["resid_post", layer][mask] for layer in range(model.cfg.n_layers)]


def _accumulate(
    model: HookedModel, lens: TunedLens, streams: Sequence[Tensor], max_bytes: int
) -> float:
    """Put the gradients of each block's mean KL into its map; the mean over blocks, before the step."""
    size = max(1, max_bytes // row_bytes(model.cfg.d_vocab, streams[0].dtype))
    n_rows, total = len(streams[-1]), 0.0
    for begin in range(0, n_rows, size):
        chunk = slice(begin, begin + size)
        with torch.no_grad():
            final = _logprobs(model, streams[-1][chunk])
        for layer, weights in enumerate(_maps(lens)):
            with torch.enable_grad():
                said = _logprobs(model, lens(streams[layer][chunk], layer))
                kl = F.kl_div(said, final, reduction="sum", log_target=True) / n_rows
            # Not `backward`: it would leave gradients on a model whose weights are not frozen.
            for weight, gradient in zip(weights, torch.autograd.grad(kl, weights), strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            total += kl.item()
    return total / max(1, len(streams) - 1)


def _maps(lens: TunedLens) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return zip(lens.weights, lens.biases, strict=True)


def _logprobs(
    model: HookedModel, rows: Float[Tensor, "row d_model"]
) -> Float[Tensor, "row d_vocab"]:
    logits = project(model, rows)
    return logits.to(widest(logits.dtype)).log_softmax(-1)


def _optimizer(lens: TunedLens) -> torch.optim.Adam:
    """A group for each bias, which has a unit of its own: the size of the stream it is added to."""
    groups: list[dict[str, Any]] = [{"params": list(lens.weights), "unit": 1.0}]
    groups += [{"params": [bias], "unit": 1.0} for bias in lens.biases]
    return torch.optim.Adam(groups, lr=0.0)


def _measure_units(optimizer: torch.optim.Adam, streams: Sequence[Tensor]) -> None:
    for group, stream in zip(optimizer.param_groups[1:], streams[:-1], strict=True):
        group["unit"] = stream.to(widest(stream.dtype)).pow(2).mean().sqrt().item()


def _share_of_rate(step: int, steps: int) -> float:
    """Of the peak rate, at a step."""
    return min((step + 1) / (WARM_UP * steps), (steps - step) / steps, 1.0)


# -- the state of a training --------------------------------------------------------------------------


def _save_state(
    file: Path,
    settings: dict[str, Any],
    lens: TunedLens,
    optimizer: torch.optim.Adam,
    losses: list[float],
) -> None:
    state = {
        "settings": settings,
        "lens": lens.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
    }
    with _renamed(file) as part:
        torch.save(state, part)


def _resume(
    file: Path | None, settings: dict[str, Any], lens: TunedLens, optimizer: torch.optim.Adam
) -> list[float]:
    """Take up a state where there is one; the losses of the steps it has behind it."""
    if file is None or not file.exists():
        return []
    state = torch.load(file, map_location="cpu", weights_only=True)
    then = state["settings"]
    if unlike := [name for name in settings if then.get(name) != settings[name]]:
        told = "; ".join(f"{name} was {then.get(name)}, now {settings[name]}" for name in unlike)
        raise ValueError(
            f"{file} holds a training with other settings: {told}. Use the same ones, or another file"
        )
    lens.load_state_dict(state["lens"])
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])


class _renamed:
    """A file under another name until it is whole."""

    def __init__(self, file: Path) -> None:
        self.file, self.part = file, file.with_name(file.name + ".part")

    def __enter__(self) -> Path:
        return self.part

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.part.replace(self.file)
        self.part.unlink(missing_ok=True)
