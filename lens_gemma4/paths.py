"""Path patching: receivers read one sender as it is in another run, and everything else as it was.

A sender (block 0's input, a head, an MLP) adds to the stream, and a receiver (a head's queries, keys or values, an MLP, the
final norm) reads it. On the way a write is multiplied by the layer scalars in between, and nothing else happens to it.
Source: Wang et al. 2022, arXiv 2211.00593.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import metrics, sweep
from lens_gemma4.config import HookedConfig
from lens_gemma4.gradients import START, two_runs, wide
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Edit, Intervention, Place
from lens_gemma4.metrics import Measure, Metrics
from lens_gemma4.results import SweepResult

# -- the graph ----------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A sender or a receiver: "L3H2", "L3H2.q", "L3KV0.k", "3_mlp", "embed", "logits"."""

    name: str
    kind: Literal["embed", "head", "mlp", "q", "k", "v", "logits"]
    layer: int
    number: int = 0

    @property
    def written(self) -> int:
        """Of a sender: the first reading place that its write reaches. In a block the attention reads, then the MLP."""
        return {"embed": 0, "head": 2 * self.layer + 1, "mlp": 2 * self.layer + 2}[self.kind]

    @property
    def read(self) -> int:
        """Of a receiver: its reading place."""
        return 2 * self.layer + (self.kind == "mlp")

    @property
    def axes(self) -> dict[str, int]:
        """Of a sender, on a map."""
        axes = {"embed": {}, "mlp": {"layer": self.layer}}
        return axes.get(self.kind, {"layer": self.layer, "head": self.number})


def senders_of(cfg: HookedConfig) -> list[Node]:
    """Every sender, in the order of their writes: "embed", then each block's heads and MLP."""
    found = [Node("embed", "embed", 0)]
    for layer in cfg.layers:
        n = layer.index
        found += [Node(f"L{n}H{i}", "head", n, i) for i in range(layer.n_heads)]
        found.append(Node(f"{n}_mlp", "mlp", n))
    return found


def receivers_of(cfg: HookedConfig) -> list[Node]:
    """Every receiver, in the order of their reading: each block's queries, keys, values and MLP, then "logits".

    A block that borrows its keys and values has queries alone; its lender's are read by both.
    """
    found = []
    for layer in cfg.layers:
        n, kv_heads = layer.index, layer.n_key_value_heads if layer.lender is None else 0
        found += [Node(f"L{n}H{i}.q", "q", n, i) for i in range(layer.n_heads)]
        found += [Node(f"L{n}KV{i}.k", "k", n, i) for i in range(kv_heads)]
        found += [Node(f"L{n}KV{i}.v", "v", n, i) for i in range(kv_heads)]
        found.append(Node(f"{n}_mlp", "mlp", n))
    return [*found, Node("logits", "logits", cfg.n_layers)]


_SENDERS = {"heads": "head", "mlp": "mlp", "embed": "embed", "all": ""}
_RECEIVERS = {"queries": "q", "keys": "k", "values": "v", "mlp": "mlp"}


def _chosen(
    what: str | Sequence[str], every: Sequence[Node], kinds: Mapping[str, str], role: str
) -> list[Node]:
    """Nodes by kind or by name.

    Raises:
        ValueError: no such node.
    """
    if isinstance(what, str) and what in kinds:
        return [node for node in every if kinds[what] in ("", node.kind)]
    known = {node.name: node for node in every}
    names = [what] if isinstance(what, str) else list(what)
    lost = [name for name in names if name not in known]
    if lost or not names:
        examples = ", ".join({node.kind: node.name for node in reversed(every)}.values())
        raise ValueError(
            f"there is no {role} {', '.join(map(repr, lost)) or '(the list is empty)'} in this model: kinds are "
            f"{', '.join(map(repr, kinds))}, names are as {examples}. A block that borrows its keys and values has queries alone: "
            "name its lender's"
        )
    return [known[name] for name in names]


WRITES = ("attn.hook_z", "hook_mlp_out")  # and block 0's input: what senders are taken from
_LENT = ("attn.hook_k", "attn.k_norm.hook_out", "attn.hook_v")  # a borrower makes none


def hooks_of(cfg: HookedConfig, *points: str) -> list[str]:
    """These points of every block that has them."""
    return [
        f"blocks.{layer.index}.{point}"
        for layer in cfg.layers
        for point in points
        if layer.lender is None or point not in _LENT
    ]


def _gain(model: HookedModel, sender: Node, receiver: Node) -> Float[Tensor, " 1"]:
    """What a sender's write is multiplied by on its way to a receiver."""
    gain = torch.ones_like(wide(model.blocks[0].layer_scalar))
    for block in model.blocks[sender.layer : receiver.layer]:
        gain = gain * wide(block.layer_scalar)
    return gain


# -- patching ---------------------------------------------------------------------------------------


def path_patch(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metrics,
    senders: str | Sequence[str],
    receivers: str | Sequence[str],
    *,
    direction: Literal["denoise", "noise"] = "denoise",
    batch_size: int | None = None,
) -> Any:
    """A metric of one run when receivers read a sender as it is in another, and everything else as it was.

    The sender's output is the other run's, what lies between it and the receivers is held, so that they read its direct write
    alone; what they then make (queries, keys, values, an MLP's output) takes its place in the run, and what follows from them
    is computed anew. "logits" is the final norm: the write is added to the last stream.

    Args:
        senders: "heads", "mlp", "embed", "all" (those that write before a receiver reads), or names: "L3H2", "3_mlp", "embed";
            each is a variant of its own.
        receivers: "queries", "keys", "values", "mlp", or names: "L5H1.q", "L5KV0.k", "L5KV0.v", "5_mlp", "logits"; all of them
            together. Keys and values of a lender are also its borrowers'.
        model, clean, corrupted, metric, direction, batch_size: as in `patch`.
    Returns:
        A `SweepResult` of variants "L3H2 -> L9H1.q", or for several metrics a dictionary of them.
    Raises:
        ValueError: no such sender or receiver, or a sender that writes after all receivers read.
    Source: arXiv 2211.00593.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit_difference(*(model.to_single_token(word) for word in (" Paris", " Rome")))
    >>> prompts = "The capital of France is", "The capital of Italy is"
    >>> path_patch(model, *prompts, ask, "mlp", ["logits"]).names[:2]
    ['0_mlp -> logits', '1_mlp -> logits']
    """
    to = _chosen(receivers, receivers_of(model.cfg), _RECEIVERS, "receiver")
    every = senders_of(model.cfg)
    given, base = two_runs(model, clean, corrupted, direction)
    pairs: list[tuple[Node, list[Node]]] = []
    late: list[tuple[Node, list[Node]]] = []
    for sender in _chosen(senders, every, _SENDERS, "sender"):
        after = [receiver for receiver in to if sender.written <= receiver.read]
        (pairs if after else late).append((sender, after))
    by_kind = isinstance(senders, str) and senders in _SENDERS
    if not pairs or (late and not by_kind):
        raise ValueError(
            f"{late[0][0].name} writes after {_joined(to)} read{'s' if len(to) == 1 else ''}: there is no path"
        )
    found = path_patched(model, given, base, metrics.named(metric), pairs, batch_size)
    return next(iter(found.values())) if metrics.is_one(metric) else found


def _joined(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes]
    return " + ".join(names) if len(names) < 4 else f"{names[0]} + {len(names) - 1} more"


def path_patched(
    model: HookedModel,
    given: Mapping[str, Any],
    base: Mapping[str, Any],
    measured: Mapping[str, Measure],
    pairs: Sequence[tuple[Node, Sequence[Node]]],
    batch_size: int | None,
) -> dict[str, SweepResult]:
    sweep.check(model, [Intervention("", ())])
    writes = [START, *hooks_of(model.cfg, *WRITES)]
    read = hooks_of(model.cfg, "hook_resid_pre", "hook_attn_out", "hook_resid_mid", "attn.hook_v")
    other, source = sweep.run_once(model, given, measured, writes)
    own, _ = sweep.run_once(model, base, measured, sorted({*writes, *read}))
    paths = Paths(model, own, other)
    arguments = {
        "path patching": [[s.name, [r.name for r in to]] for s, to in pairs],
        "from": given["input_ids"].tolist(),
    }
    found = sweep.sweep(
        model,
        None,
        [paths.patched(sender, to) for sender, to in pairs],
        measured,
        batch_size=batch_size,
        arguments=arguments,
        **base,
    )
    return {name: replace(one, source=source[name]) for name, one in found.items()}


class Paths:
    """Path patches between two runs.

    Args:
        base: the run that is changed: every block's streams, z, values and outputs under our names.
        given: the run that senders are taken from: its block-0 input, z and MLP outputs.
    """

    def __init__(
        self, model: HookedModel, base: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> None:
        self.model, self.base, self.given = model, base, given
        self._write = functools.lru_cache(maxsize=1)(self._written)

    @torch.no_grad()
    def patched(self, sender: Node, receivers: Sequence[Node]) -> Intervention:
        """The run in which these receivers read another write of the sender."""
        edits = tuple(
            edit for receiver in receivers for edit in self._edits(sender, receiver, receivers)
        )
        return Intervention(f"{sender.name} -> {_joined(receivers)}", edits, sender.axes)

    def _written(self, sender: Node) -> Float[Tensor, "batch pos d_model"]:
        """By how much the sender's write differs, where it is written."""
        if sender.kind == "embed":
            return self.given[START] - self.base[START]
        block, name = self.model.blocks[sender.layer], f"blocks.{sender.layer}."
        if sender.kind == "mlp":
            return self.given[name + "hook_mlp_out"] - self.base[name + "hook_mlp_out"]
        z = self.base[name + "attn.hook_z"].clone()
        z[:, :, sender.number] = self.given[name + "attn.hook_z"][:, :, sender.number]
        out = block.ln1_post.plain(F.linear(z.flatten(2), block.attn.w_o))
        return out - self.base[name + "hook_attn_out"]

    def _edits(self, sender: Node, receiver: Node, among: Sequence[Node]) -> Iterator[Edit]:
        """What a receiver makes of it, put into the run."""
        gain = _gain(self.model, sender, receiver)
        change = (wide(self._write(sender)) * gain).to(self.model.dtype)
        layer, i, kind = receiver.layer, receiver.number, receiver.kind
        if kind == "logits":
            yield Edit(Place(layer - 1, "hook_resid_post"), scale=1.0, add=change)
            return
        block, name = self.model.blocks[layer], f"blocks.{layer}."
        if kind == "mlp":
            x = block.ln2.plain(self.base[name + "hook_resid_mid"] + change)
            yield Edit(Place(layer, "hook_mlp_out"), add=block.ln2_post.plain(block.mlp(x)))
            return
        x = block.ln1.plain(self.base[name + "hook_resid_pre"] + change)
        attn = block.attn
        w = attn.w_q if kind == "q" else attn.w_k if kind == "k" or block.cfg.k_eq_v else attn.w_v
        rows = slice(i * block.cfg.d_head, (i + 1) * block.cfg.d_head)
        yield Edit(Place(layer, f"attn.hook_{kind}", i), add=F.linear(x, w[rows]))
        values = any((other.kind, other.layer, other.number) == ("v", layer, i) for other in among)
        if kind == "k" and block.cfg.k_eq_v and not values:
            # The projection feeds both: the values stay as they were.
            yield Edit(Place(layer, "attn.hook_v", i), add=self.base[name + "attn.hook_v"][:, :, i])
