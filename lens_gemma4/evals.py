"""Quick measures of a model: loss on texts, repeating random tokens, naming the indirect object.

They say whether a model runs as it should and whether an edit broke it; nothing is downloaded, texts are yours.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from lens_gemma4.heads import repeated_tokens
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.utils import lm_cross_entropy_loss, tokenize_and_concatenate

TEXT = (
    "A lens does not add anything to what it shows. It bends light that was there before, and what seemed one grey patch "
    "turns out to be made of parts, each with a shape of its own. Whoever first looked at a drop of water in this way could "
    "not say what the moving things in it were, but could draw them, count them, and come back the next day to see whether "
    "they were still there. Explanations came later, and most of the early ones were wrong."
)

# -- loss on text -------------------------------------------------------------------------------------


@torch.no_grad()
def sanity_check(model: HookedModel) -> Float[Tensor, ""]:
    """Loss on a paragraph of plain English, in nats per token.

    Under 5 in a pretrained model; far above, something is wrong with the weights or the run. A base model of made-up
    sentences such as "tiny" has not learned English and is above.

    >>> loss = sanity_check(HookedModel.from_pretrained("tiny"))
    """
    return model(TEXT, return_type="loss")


def make_data_loader(
    texts: Iterable[Any],
    tokenizer: Any,
    batch_size: int = 8,
    max_length: int = 1024,
    column_name: str = "text",
) -> DataLoader:
    """Your texts as full rows of ids for `evaluate_on_dataset`, in order.

    Args:
        texts: strings, or rows with `column_name` (a datasets.Dataset).
        tokenizer: transformers' own, as `model.tokenizer`.
        max_length: tokens of a row, BOS counted. What is left after the last full row is dropped.
    Raises:
        ValueError: too little text for one row.
    """
    rows = tokenize_and_concatenate(
        texts, tokenizer, max_length=max_length, column_name=column_name
    )
    return DataLoader(rows, batch_size=batch_size)


@torch.no_grad()
def evaluate_on_dataset(
    model: HookedModel, data_loader: Iterable[Mapping[str, Tensor]], truncate: int = 100
) -> float:
    """Mean loss over the targets of the first `truncate` batches, in nats per token.

    Args:
        data_loader: batches with "tokens" `[batch pos]` and, where rows are padded, "attention_mask".
    Raises:
        ValueError: there is no batch, or truncate is below 1.
    """
    if truncate < 1:
        raise ValueError(f"truncate is {truncate}: the least is one batch")
    total, targets = 0.0, 0
    batches = zip(range(truncate), data_loader, strict=False)
    for _, batch in tqdm(batches, desc="loss", delay=2, leave=False):
        tokens, mask = batch["tokens"], batch.get("attention_mask")
        loss = model(tokens, attention_mask=mask, return_type="loss")
        seen = torch.ones_like(tokens) if mask is None else mask
        n = int((seen[:, :-1].bool() & seen[:, 1:].bool()).sum())
        total, targets = total + float(loss) * n, targets + n
    if not targets:
        raise ValueError("the loader gave no batch")
    return total / targets


def evaluate(
    model: HookedModel,
    texts: Iterable[Any] | Mapping[str, Iterable[Any]],
    truncate: int = 100,
    batch_size: int = 8,
    tokenizer: Any = None,
    max_length: int = 1024,
) -> dict[str, float]:
    """Loss on your texts, or on several named sets of them, in nats per token.

    TransformerLens's downloads four sets; here you bring them.

    Args:
        texts: strings, or `{name: strings}`.
        truncate: at most this many batches of each.
        max_length: tokens of a row; texts are joined and cut (`make_data_loader`).
    Returns:
        `{"name_loss": loss}`; the name of a single set is "text".

    >>> model = HookedModel.from_pretrained("tiny")
    >>> texts = ["The capital of France is Paris.", "People in Egypt speak Arabic."]
    >>> evaluate(model, texts, max_length=15)["text_loss"] < 3
    True
    """
    sets = texts if isinstance(texts, Mapping) else {"text": texts}
    words = model.tokenizer if tokenizer is None else tokenizer
    return {
        f"{name}_loss": evaluate_on_dataset(
            model, make_data_loader(some, words, batch_size, max_length), truncate
        )
        for name, some in sets.items()
    }


# -- repeating ----------------------------------------------------------------------------------------


@torch.no_grad()
def induction_loss(
    model: HookedModel,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    *,
    seed: int = 0,
) -> Float[Tensor, ""]:
    """Loss on the second coming of random tokens, in nats per token: near 0 in a model that repeats what it has seen,
    the logarithm of the vocabulary or more in one that does not.

    Args:
        tokenizer: of no effect, as ids are drawn; for TransformerLens's signature.
        subseq_len: tokens that come twice; all of a row differ. "tiny" was trained on up to 40: give it 24.
        prepend_bos: None means on. The BOS stands in front, in place of no token.
        seed: of the tokens.
    Raises:
        ValueError: fewer ordinary tokens than subseq_len.

    The first of the second coming cannot be known and does not count. Rows run one by one.

    >>> bool(induction_loss(HookedModel.from_pretrained("tiny"), subseq_len=16) < 0.1)
    True
    """
    bos = prepend_bos is None or prepend_bos
    tokens = repeated_tokens(model, batch_size, subseq_len, prepend_bos=bos, seed=seed)
    first = subseq_len + bos  # the loss at position p is of what comes at p + 1
    losses = [
        lm_cross_entropy_loss(model(row), row, per_token=True)[:, first:].mean()
        for row in tqdm(tokens.split(1), desc="induction loss", delay=2, leave=False)
    ]
    return torch.stack(losses).mean()


# -- indirect object ----------------------------------------------------------------------------------

NAMES = (
    "Mary John Tom Anna Peter Lucy Paul Emma James Kate David Sarah Mark Laura Alice Simon".split()
)
TEMPLATES = [
    "When [A] and [B] went to the [PLACE], [B] gave a [OBJECT] to [A]",
    "When [B] and [A] went to the [PLACE], [B] gave a [OBJECT] to [A]",
    "After [A] and [B] came to the [PLACE], [B] gave a [OBJECT] to [A]",
    "After [B] and [A] came to the [PLACE], [B] gave a [OBJECT] to [A]",
]
NOUNS = {
    "PLACE": "shop park school market station garden office library".split(),
    "OBJECT": "drink book ball letter ring flower map key".split(),
}


class IOIDataset(Dataset):
    """Prompts that end with the name of the one who is given something.

    An entry holds "prompt" `[pos]`, whose last token is the answer, "IO" `[1]`, the answer, and "S" `[1]`, the other name.

    Args:
        tokenizer: transformers' own, as `model.tokenizer`.
        templates: sentences with "[A]", the receiver, "[B]", the giver, and names of `nouns` in square brackets; each ends
            with " [A]". By default four of our own, both orders of the two.
        names: each must be one token behind a space. By default those of `NAMES` that are.
        nouns: words by placeholder, `{"PLACE": [...], "OBJECT": [...]}`.
        num_samples: how many; with `symmetric` in pairs of the same sentence with the names exchanged.
        prepend_bos: put the BOS in front.
        seed: the same one gives the same samples; None draws anew. Python's own generator is not touched.
    Raises:
        ValueError: a name of several tokens, fewer than two names, a template without [A], [B] or the answer at its end, a
            placeholder without nouns, an odd number of samples in pairs.
    Source: Wang et al., "Interpretability in the Wild" (2022), for the task; TransformerLens for the signature.

    >>> data = IOIDataset(HookedModel.from_pretrained("tiny").tokenizer, num_samples=2, seed=0)
    >>> sorted(data[0])
    ['IO', 'S', 'prompt']
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        nouns: Mapping[str, Sequence[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer, self.prepend_bos = tokenizer, prepend_bos
        self.templates = list(TEMPLATES if templates is None else templates)
        self.nouns = dict(NOUNS if nouns is None else nouns)
        self.names = self._single_tokens(names)
        for template in self.templates:
            _check_template(template, self.nouns)
        if symmetric and num_samples % 2:
            raise ValueError(f"num_samples is {num_samples}: symmetric samples come in pairs")
        rng = random.Random(seed)
        self.samples: list[dict[str, str]] = []
        while len(self.samples) < num_samples:
            self.samples += self._drawn(rng, symmetric)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        ids = self._ids(sample["text"])
        if self.prepend_bos:
            ids = [self.tokenizer.bos_token_id, *ids]
        return {
            "prompt": torch.tensor(ids),
            "IO": torch.tensor(self._ids(sample["IO"])),
            "S": torch.tensor(self._ids(sample["S"])),
        }

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _single_tokens(self, names: Sequence[str] | None) -> list[str]:
        several = {
            name: len(ids)
            for name in (NAMES if names is None else names)
            if len(ids := self._ids(f" {name}")) != 1
        }
        if names is not None and several:
            raise ValueError(
                f"names must be one token behind a space, as the answer is read at one position; these are more: {several}"
            )
        single = [name for name in (NAMES if names is None else names) if name not in several]
        if len(set(single)) < 2:
            raise ValueError(
                f"two names are needed, and there are {sorted(set(single))}: give names= that are one token in this "
                "tokenizer"
            )
        return single

    def _drawn(self, rng: random.Random, symmetric: bool) -> list[dict[str, str]]:
        text = rng.choice(self.templates)
        for placeholder, words in self.nouns.items():
            text = text.replace(f"[{placeholder}]", rng.choice(words))
        receiver, giver = rng.sample(sorted(set(self.names)), 2)
        pairs = [(receiver, giver), (giver, receiver)][: 1 + symmetric]
        return [
            {"text": text.replace("[A]", a).replace("[B]", b), "IO": f" {a}", "S": f" {b}"}
            for a, b in pairs
        ]


def _check_template(template: str, nouns: Mapping[str, Sequence[str]]) -> None:
    bare = template
    for placeholder in nouns:
        bare = bare.replace(f"[{placeholder}]", "")
    if not template.endswith(" [A]") or template.count("[A]") < 2 or "[B]" not in template:
        raise ValueError(
            f"{template!r} must name [A] and [B], and end with ' [A]', the answer: 'Then [B] and [A] met, and [B] gave a book "
            "to [A]'"
        )
    if "[" in bare.replace("[A]", "").replace("[B]", ""):
        raise ValueError(f"{template!r} has a placeholder without nouns; given are {sorted(nouns)}")


@torch.no_grad()
def ioi_eval(
    model: HookedModel,
    dataset: Any = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
    *,
    seed: int = 0,
) -> dict[str, float]:
    """How often, and by how much, the receiver's name is likelier than the giver's.

    Args:
        dataset: an `IOIDataset`, or anything with its entries; by default one of `num_samples`, `symmetric`, `seed`.
        batch_size: prompts run together; unlike lengths are padded on the right.
    Returns:
        "Logit Difference", receiver's minus giver's logit (after the softcap), averaged, and "Accuracy", the share of
        prompts where it is above 0: 0.5 is chance.
    Raises:
        ValueError: an answer of several tokens, or one that is not the prompt's last token; an empty dataset.

    >>> ioi_eval(HookedModel.from_pretrained("tiny"), num_samples=32)["Accuracy"] > 0.9
    True
    """
    if dataset is None:
        words = model.tokenizer if tokenizer is None else tokenizer
        dataset = IOIDataset(words, num_samples=num_samples, symmetric=symmetric, seed=seed)
    size = len(dataset)
    if not size:
        raise ValueError("the dataset is empty")
    differences: list[Tensor] = []
    for start in tqdm(range(0, size, batch_size), desc="IOI", delay=2, leave=False):
        samples = [dataset[i] for i in range(start, min(start + batch_size, size))]
        differences.append(_name_differences(model, samples))
    all_of_them = torch.cat(differences)
    return {
        "Logit Difference": all_of_them.mean().item(),
        "Accuracy": (all_of_them > 0).double().mean().item(),
    }


def _name_differences(
    model: HookedModel, samples: Sequence[Mapping[str, Tensor]]
) -> Float[Tensor, " sample"]:
    """The receiver's logit minus the giver's where the prompt's last token is predicted, in float64."""
    for sample in samples:
        io, s, prompt = (sample[key].tolist() for key in ("IO", "S", "prompt"))
        if len(io) != 1 or len(s) != 1 or prompt[-1:] != io:
            raise ValueError(
                f"an entry's IO is {io}, its S {s}, its prompt ends with {prompt[-1:]}: IO and S must be one token each, "
                "and IO the prompt's last"
            )
    lengths = torch.tensor([len(sample["prompt"]) - 1 for sample in samples])
    pad = model.cfg.pad_token_id or 0
    ids = torch.nn.utils.rnn.pad_sequence(
        [sample["prompt"][:-1] for sample in samples], batch_first=True, padding_value=pad
    )
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # [sample pos]
    logits = model(ids, attention_mask=mask)
    here = torch.arange(len(samples), device=logits.device)
    last = logits[here, (lengths - 1).to(logits.device)].double().cpu()  # [sample d_vocab]
    answer, other = (torch.cat([sample[key] for sample in samples]) for key in ("IO", "S"))
    rows = torch.arange(len(samples))
    return last[rows, answer] - last[rows, other]


__all__ = [
    "IOIDataset",
    "evaluate",
    "evaluate_on_dataset",
    "induction_loss",
    "ioi_eval",
    "make_data_loader",
    "sanity_check",
]
