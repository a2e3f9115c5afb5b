"""TransformerLens's small helpers, with its names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.names import get_act_name

if TYPE_CHECKING:
    import numpy
    import pandas

SliceInput = int | slice | tuple[int, ...] | list[int] | Tensor | None


class Slice:
    """Some places of an axis: an int (the axis goes), (stop,), (start, stop[, step]), a list, or None for all.

    >>> Slice((1, 3)).apply(torch.arange(5), dim=0)
    tensor([1, 2])
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any
        if isinstance(input_slice, bool) or not isinstance(input_slice, (int, slice, tuple, list, Tensor, type(None))):
            raise TypeError(f"a slice is an int, a tuple, a list or None, got {type(input_slice).__name__}")
        if isinstance(input_slice, tuple):
            self.slice, self.mode = slice(*input_slice), "slice"
        elif isinstance(input_slice, slice) or input_slice is None:
            self.slice, self.mode = input_slice or slice(None), "slice"
        elif isinstance(input_slice, int):
            self.slice, self.mode = input_slice, "int"
        else:
            self.slice, self.mode = torch.as_tensor(input_slice), "array"

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen places along `dim`; an int drops the axis."""
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice.to(tensor.device) if self.mode == "array" else self.slice
        try:
            return tensor[tuple(index)]
        except IndexError as error:
            raise IndexError(f"{self!r} does not fit an axis of {tensor.shape[dim]}") from error

    def indices(self, max_ctx: int) -> Any:
        """The chosen places as numbers."""
        return to_numpy(self.apply(torch.arange(max_ctx)))

    def __repr__(self) -> str:
        return f"Slice({self.slice})"


def to_numpy(tensor: Any) -> numpy.ndarray:
    """As numpy; bfloat16, which numpy does not have, as float32."""
    import numpy as np

    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(tensor)


def remove_batch_dim(tensor: Float[Tensor, "batch *rest"]) -> Tensor:
    """Without the first axis when it has one entry, else as it is."""
    return tensor[0] if tensor.ndim and tensor.shape[0] == 1 else tensor


def lm_cross_entropy_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    counts: Tensor | None = None,
    per_token: bool = False,
) -> Float[Tensor, ""] | Float[Tensor, "batch targets"]:
    """Next-token loss in nats.

    Args:
        counts: 1 where a token is a target that counts; padding and placeholders do not.
        per_token: `[batch pos-1]`, 0 where the target does not count, in place of the mean.
    """
    log_probs = logits[:, :-1].log_softmax(-1)
    losses = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]  # [batch pos-1]
    counted = torch.ones_like(losses, dtype=torch.bool) if counts is None else counts[:, 1:].bool()
    losses = torch.where(counted, losses, torch.zeros_like(losses))
    return losses if per_token else losses.sum() / counted.sum()


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], per_token: bool = False
) -> Float[Tensor, ""] | Bool[Tensor, "batch targets"]:
    """How often the likeliest next token is the next token."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return right if per_token else right.float().mean()


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " batch"]:
    """Draw one token for each row; temperature 0 takes the likeliest.

    Args:
        top_k, top_p: keep the k likeliest, or the likeliest that hold probability p together.
        freq_penalty: subtracted from a logit for each time its token is in `tokens`.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 or above")
    if temperature == 0:
        return final_logits.argmax(-1)
    logits = final_logits / temperature
    if freq_penalty:
        if tokens is None:
            raise ValueError("freq_penalty counts the tokens so far: give tokens=")
        logits = logits - freq_penalty * torch.zeros_like(logits).scatter_add_(1, tokens, torch.ones_like(tokens, dtype=logits.dtype))
    if top_k is not None:
        if not 0 < top_k <= logits.shape[-1]:
            raise ValueError(f"top_k is {top_k}; it must be 1 to {logits.shape[-1]}")
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], float("-inf"))
    if top_p is not None:
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
        ranked, order = logits.sort(descending=True, dim=-1)
        before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        drop = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0]


def logits_to_df(model: Any, logits: Float[Tensor, " d_vocab"], k: int = 10) -> pandas.DataFrame:
    """The k likeliest tokens of one position: token, logit, log-probability, probability."""
    import pandas as pd

    values, ids = logits.float().topk(k)
    log_probs = logits.float().log_softmax(-1)[ids]
    return pd.DataFrame(
        {
            "token": [model.to_single_str_token(int(i)) for i in ids],
            "id": ids.tolist(),
            "logit": values.tolist(),
            "log_prob": log_probs.tolist(),
            "prob": log_probs.exp().tolist(),
        }
    )


def test_prompt(
    prompt: str,
    answer: str | Sequence[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
    printer: Callable[[str], None] = print,
) -> list[int]:
    """How well a model answers: rank, logit and probability of each answer token, and the top tokens.

    Returns:
        The rank of the (first) answer's tokens, 0 the likeliest.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    ranks: list[list[int]] = []
    for text in answers:
        text = f" {text}" if prepend_space_to_answer and not text.startswith(" ") else text
        start = model.to_tokens(prompt, prepend_bos=prepend_bos)
        target = model.to_tokens(text, prepend_bos=False)
        logits = model(torch.cat([start, target], dim=1))[0]
        ranks.append([])
        for offset, token in enumerate(target[0].tolist()):
            at = logits[start.shape[1] - 1 + offset].float()
            ranks[-1].append(int((at > at[token]).sum()))
            if print_details:
                name, prob = model.to_single_str_token(token), at.softmax(-1)[token]
                printer(f"{name!r}: rank {ranks[-1][-1]}, logit {at[token]:.2f}, probability {prob:.2%}")
                printer(logits_to_df(model, at, top_k).to_string(index=False))
    return ranks[0]


test_prompt.__test__ = False  # type: ignore[attr-defined]  # TransformerLens's name; pytest would collect it


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
) -> Int[Tensor, "row pos"]:
    """Texts joined by the end token and cut into full rows; what is left over is dropped.

    Args:
        dataset: rows with `column_name` (a list of dictionaries, a datasets.Dataset) or plain texts.
        add_bos_token: each row begins with one.
    """
    del streaming  # rows are read one by one either way
    ids: list[int] = []
    for row in dataset:
        text = row if isinstance(row, str) else row[column_name]
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    width = max_length - int(add_bos_token)
    rows = torch.tensor(ids[: len(ids) // width * width], dtype=torch.long).view(-1, width)
    if not len(rows):
        raise ValueError(f"the texts hold {len(ids)} tokens; one row of max_length={max_length} needs {width}")
    if not add_bos_token:
        return rows
    return torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], dim=1)


__all__ = [
    "Slice",
    "get_act_name",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "logits_to_df",
    "remove_batch_dim",
    "sample_logits",
    "test_prompt",
    "to_numpy",
    "tokenize_and_concatenate",
]
