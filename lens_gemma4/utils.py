"""TransformerLens's small helpers, under its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.data import Dataset

from lens_gemma4.names import get_act_name
from lens_gemma4.spans import token_text

if TYPE_CHECKING:
    import numpy
    import pandas

SliceInput = int | slice | tuple[int, ...] | list[int] | Tensor | None  # arrays of numpy's too

# -- tensors --------------------------------------------------------------------------------


class Slice:
    """Some places of an axis, in one object that can be handed on.

    Args:
        input_slice: an int (the axis goes), `(stop,)`, `(start, stop)` or `(start, stop, step)` or
            a slice, a list, array or tensor of places, or None for all of them.

    Raises:
        TypeError: anything else.

    >>> Slice((1, 3)).apply(torch.arange(5), dim=0)
    tensor([1, 2])
    >>> Slice([3, 0]).apply(torch.arange(5))
    tensor([3, 0])
    """

    def __init__(self, input_slice: Any = None) -> None:
        input_slice = _plain_number(input_slice)
        self.slice: Any = input_slice
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, tuple):
            self.slice, self.mode = slice(*input_slice), "slice"
        elif isinstance(input_slice, slice):
            self.mode = "slice"
        elif isinstance(input_slice, int) and not isinstance(input_slice, bool):
            self.mode = "int"
        elif isinstance(input_slice, (list, range)) or hasattr(input_slice, "__array__"):
            self.slice, self.mode = _places(input_slice), "array"
        else:
            raise TypeError(
                f"a slice is an int, a tuple, a list or None, got {type(input_slice).__name__}"
            )

    @classmethod
    def unwrap(cls, slice_input: Any) -> Slice:
        """A Slice of anything that can be one; an int keeps its axis here, with one entry."""
        if isinstance(slice_input, Slice):
            return slice_input
        slice_input = _plain_number(slice_input)
        is_int = isinstance(slice_input, int) and not isinstance(slice_input, bool)
        return cls([slice_input] if is_int else slice_input)

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen places along `dim`; an int drops the axis.

        Raises:
            IndexError: a place outside the axis.
        """
        size = tensor.shape[dim]
        if not self._fits(size):  # on a GPU torch would end the process
            raise IndexError(
                f"{self!r} does not fit an axis of {size}: places run from {-size} to {size - 1}"
            )
        index: list[Any] = [slice(None)] * tensor.ndim
        index[dim] = self.slice.to(tensor.device) if self.mode == "array" else self.slice
        return tensor[tuple(index)]

    def _fits(self, size: int) -> bool:
        if self.mode not in ("int", "array"):
            return True
        places = torch.as_tensor(self.slice).reshape(-1)
        if places.dtype == torch.bool:
            return len(places) == size
        return bool(((-size <= places) & (places < size)).all())

    def indices(self, max_ctx: int | None = None) -> numpy.ndarray:
        """The chosen places of an axis of `max_ctx` as numbers; an int gives an array of one."""
        if self.mode == "int":
            return to_numpy(torch.tensor([self.slice]))
        if max_ctx is None:
            raise ValueError(f"which places {self!r} takes depends on the axis: give max_ctx")
        return to_numpy(self.apply(torch.arange(max_ctx)))

    def __repr__(self) -> str:
        return f"Slice({self.slice})"


def _plain_number(value: Any) -> Any:
    """A number that numpy or torch returned (`.argmax()`) as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _places(values: Any) -> Tensor:
    """A list, array or tensor of places, on the CPU."""
    places = torch.as_tensor(values).detach().cpu()
    if places.numel() == 0:
        places = places.long()
    if places.ndim != 1 or places.is_floating_point():
        raise TypeError(
            "a slice's places are whole numbers in one row, got "
            f"{places.dtype} {list(places.shape)}"
        )
    return places


def to_numpy(tensor: Any) -> numpy.ndarray:
    """Any tensor, list or number as numpy; bfloat16, unknown there, as float32."""
    import numpy as np

    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(tensor)


def remove_batch_dim(tensor: Shaped[Tensor, "batch ..."]) -> Tensor:
    """Without the first axis when it has one entry, else as it is."""
    return tensor[0] if tensor.shape[0] == 1 else tensor


# -- predictions ----------------------------------------------------------------------------


def lm_cross_entropy_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
    per_token: bool = False,
    targets: Bool[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, ""] | Float[Tensor, "batch target"]:
    """Next-token loss in nats, in float32 (float64 for float64 logits).

    Args:
        attention_mask: 1 on real tokens. A target counts when it and the token it is read from are
            real, so the loss of a padded row, on either side, is that of the row alone.
        per_token: `[batch pos-1]`, 0 where a target does not count, in place of the mean.
        targets: False where a token is no target for another reason, as a placeholder.

    Raises:
        ValueError: a mean over no target at all.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = wide[:, :-1].log_softmax(-1)
    losses = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]  # [batch pos-1]
    counts = counted_targets(tokens, attention_mask, targets)
    losses = torch.where(counts, losses, torch.zeros_like(losses))
    if per_token:
        return losses
    if not bool(counts.any()):
        raise ValueError(
            f"no token of {list(tokens.shape)} [batch pos] is a target: the first has none before "
            "it, and padding and placeholders do not count"
        )
    return losses.sum() / counts.sum()


def counted_targets(
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    targets: Bool[Tensor, "batch pos"] | None = None,
) -> Bool[Tensor, "batch target"]:
    """Whether each token but the first counts in a loss, at the position before it; arguments as in `lm_cross_entropy_loss`."""
    counts = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    if attention_mask is not None:
        counts &= attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()
    return counts if targets is None else counts & targets[:, 1:]


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    per_token: bool = False,
) -> Float[Tensor, ""] | Bool[Tensor, "batch target"]:
    """How often the likeliest next token is the next token; `per_token` gives `[batch pos-1]`."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return right if per_token else right.float().mean()


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " batch"]:
    """Draw one token for each row.

    Args:
        top_k: keep the k likeliest.
        top_p: keep the fewest of the likeliest that together hold probability p; with `top_k`, of
            what that left.
        temperature: divides the logits; 0 takes the likeliest, whatever the rest says.
        freq_penalty: subtracted, after the temperature, for each time a token is in `tokens`.
        seed: for a draw that can be repeated; or `generator`, on the logits' device.

    Raises:
        ValueError: a value out of its range; a penalty without tokens; seed and generator.

    >>> sample_logits(torch.tensor([[0.0, 9.0, 1.0]]), temperature=0.0)
    tensor([1])
    """
    _check_sampling(top_k, top_p, temperature, final_logits.shape[-1])
    if temperature == 0:
        return final_logits.argmax(-1)
    logits = (
        final_logits if final_logits.dtype == torch.float64 else final_logits.float()
    ) / temperature
    if freq_penalty:
        if tokens is None:
            raise ValueError("freq_penalty counts the tokens so far: give tokens=")
        counts = torch.zeros_like(logits).scatter_add(
            1, tokens, torch.ones_like(tokens, dtype=logits.dtype)
        )
        logits = logits - freq_penalty * counts
    if top_k is not None:
        logits = logits.masked_fill(
            logits < logits.topk(top_k, dim=-1).values[:, -1:], float("-inf")
        )
    if top_p is not None:
        ranked, order = logits.sort(descending=True, stable=True, dim=-1)
        probs = ranked.softmax(-1)
        beyond = (probs.cumsum(-1) - probs >= top_p) & (probs < probs[:, :1])  # never the likeliest
        logits = logits.masked_fill(
            torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf")
        )
    if seed is not None:
        if generator is not None:
            raise ValueError("seed and generator were both given: give one")
        generator = torch.Generator(logits.device).manual_seed(seed)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _check_sampling(
    top_k: int | None, top_p: float | None, temperature: float, d_vocab: int
) -> None:
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 or above")
    if top_k is not None and not 0 < top_k <= d_vocab:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {d_vocab}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


def logits_to_df(
    logits: Float[Tensor, " d_vocab"], tokenizer: Any = None, top_k: int | None = None
) -> pandas.DataFrame:
    """One position's logits as a table, likeliest first.

    Args:
        tokenizer: a tokenizer, or a model that has one, for the column of strings.
        top_k: this many rows; None gives the whole vocabulary.

    Returns:
        Columns `token_index`, `token_string` (with a tokenizer), `logit`, `log_prob` (nats),
        `probability`.
    """
    import pandas as pd

    wide = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    order = wide.sort(descending=True, stable=True).indices[:top_k]
    log_probs = wide.log_softmax(-1)[order]
    columns: dict[str, Any] = {"token_index": order.tolist()}
    if tokenizer is not None:
        columns["token_string"] = [token_text(tokenizer, i) for i in order.tolist()]
    columns |= {
        "logit": wide[order].tolist(),
        "log_prob": log_probs.tolist(),
        "probability": log_probs.exp().tolist(),
    }
    return pd.DataFrame(columns)


def test_prompt(
    prompt: str,
    answer: str | Sequence[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
    printer: Callable[[str], None] = print,
) -> list[list[int]]:
    """How well a model answers: each answer token's rank, logit, probability, and the top tokens.

    Args:
        answer: one, or several that are compared; each may be several tokens, and each token is
            asked for after those before it.
        prepend_space_to_answer: put a space in front when there is none.
        printer: takes each line.

    Returns:
        By answer, the rank of each of its tokens, 0 the likeliest. (TransformerLens only prints.)

    >>> model = HookedModel.from_pretrained("tiny")
    >>> test_prompt("The capital of France is", "Paris", model, print_details=False)
    [[0]]
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [text if text.startswith(" ") else f" {text}" for text in answers]
    say = printer if print_details else _say_nothing
    say(f"Prompt: {model.to_str_tokens(prompt, prepend_bos=prepend_bos)}")
    return [_ranks(prompt, text, model, prepend_bos, top_k, say) for text in answers]


def _ranks(
    prompt: str,
    answer: str,
    model: Any,
    prepend_bos: bool | None,
    top_k: int,
    say: Callable[[str], None],
) -> list[int]:
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)  # [1 pos]
    target = model.to_tokens(answer, prepend_bos=False)
    with torch.no_grad():
        logits = model(torch.cat([start, target], dim=1))[0].float()
    before = logits[start.shape[1] - 1 : -1]  # what each answer token is read from
    ranks = []
    for at, token in zip(before, target[0].tolist(), strict=True):
        ranks.append(int((at > at[token]).sum()))
        prob = at.softmax(-1)[token]
        say(
            f"{model.to_single_str_token(token)!r}: rank {ranks[-1]}, logit {at[token]:.2f}, "
            f"probability {prob:.2%}"
        )
        say(logits_to_df(at, model, top_k).to_string(index=False))
    return ranks


def _say_nothing(line: str) -> None:
    pass


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it

# -- texts ----------------------------------------------------------------------------------


class TokenRows(Dataset):
    """Rows of ids for a DataLoader: `rows["tokens"]` `[row pos]`, `rows[3]["tokens"]` `[pos]`."""

    def __init__(self, tokens: Int[Tensor, "row pos"]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, item: int | str) -> Any:
        if isinstance(item, str):
            return {"tokens": self.tokens}[item]
        return {"tokens": self.tokens[item]}


def tokenize_and_concatenate(
    dataset: Iterable[Any],
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int = 1,
) -> TokenRows:
    """Texts joined by the end token and cut into full rows; what is left over is dropped.

    Args:
        dataset: rows with `column_name` (a list of dictionaries, a datasets.Dataset), or plain
            texts.
        tokenizer: transformers' own, as `model.tokenizer`.
        max_length: tokens of a row, BOS counted.
        add_bos_token: each row begins with one, and no other token is one.
        streaming, num_proc: of no effect, as rows are read one by one; for TransformerLens's
            signature.

    Raises:
        ValueError: too little text for one row; no end token; no BOS where one is asked for.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None or (add_bos_token and bos is None):
        raise ValueError(
            f"the tokenizer's end token is {eos} and its BOS {bos}: both are needed, "
            "or add_bos_token=False without the latter"
        )
    ids: list[int] = []
    for row in dataset:
        text = row if isinstance(row, str) else row[column_name]
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [word for word in words if word != bos or not add_bos_token] + [eos]
    width = max_length - int(add_bos_token)
    if width < 1 or len(ids) < width:
        raise ValueError(
            f"the texts are {len(ids)} tokens; a row of max_length={max_length} takes {width}"
        )
    rows = torch.tensor(ids[: len(ids) // width * width]).view(-1, width)  # [row pos]
    if add_bos_token:
        rows = torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)
    return TokenRows(rows)


__all__ = [
    "Slice",
    "TokenRows",
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
