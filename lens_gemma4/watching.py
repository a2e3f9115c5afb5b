"""One run looked at part by part while it goes: how long each value is, what the head would say of it, and what it
gives to a logit along the stream. Of each value only that is kept, so that memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens_gemma4 import lenses, names, readings
from lens_gemma4.attribution import gains_at, widened
from lens_gemma4.hooked_model import HookedModel

# The parts of a block, as a run makes them, under the names that they have in it.
PARTS = (
    *("hook_resid_pre", "ln1.hook_out"),
    *("attn.hook_q", "attn.q_norm.hook_out", "attn.hook_rot_q"),
    *("attn.hook_k", "attn.k_norm.hook_out", "attn.hook_rot_k"),
    *("attn.hook_v", "attn.v_norm.hook_out"),
    *("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "attn.hook_out"),
    *("hook_attn_out", "hook_resid_mid", "ln2.hook_out"),
    *("mlp.hook_pre", "mlp.hook_act", "mlp.hook_pre_linear", "mlp.hook_post", "mlp.hook_out"),
    *("hook_mlp_out", "hook_resid_sum", "hook_resid_post"),
)
# Those as wide as the stream, of which the head can be asked.
WIDE = tuple(part for part in PARTS if names.BY_NAME[f"blocks.{{i}}.{part}"].axes == names.STREAM)
# Those that lie on the stream or are added to it, so that a share of a logit is theirs.
DIRECT = tuple(part for part in WIDE if part.startswith("hook_"))
SQUARES = ("attn.hook_attn_scores", "attn.hook_pattern")  # masked, of no length that says anything


@dataclass
class Watch:
    """What is kept of a run of one prompt. Everything lies on the CPU, in float32 at least.

    Args:
        model: that runs.
        toward: direction of the final norm's input along which the asked logit grows, before that norm's scale.
        asked: ids whose rank and logits are kept beside the likeliest.
        positions: at which the head is asked about every part; about the stream it is asked at all.
        top_k: how many of the likeliest tokens are kept.
    """

    model: HookedModel
    toward: Float[Tensor, " d_model"]
    asked: Sequence[int]
    positions: Sequence[int]
    top_k: int = 5
    shapes: dict[str, list[int]] = field(default_factory=dict)
    norms: dict[str, Float[Tensor, " pos"]] = field(default_factory=dict)
    along: dict[str, Float[Tensor, " pos"]] = field(default_factory=dict)
    seen: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """For every part of every block that this model has."""
        there = {name for name, _ in names.points(self.model.cfg)}
        every = (f"blocks.{i}.{part}" for i in range(self.model.cfg.n_layers) for part in PARTS)
        # Scores and pattern cost something to listen to, and are all alike in shape.
        return [(name, self._look) for name in every if name in there and not _is_square(name)]

    def _look(self, value: Tensor, hook: Any) -> None:
        name, one = hook.name, value[0].detach()
        part = name.split(".", 2)[2]
        self.shapes[name] = list(value.shape)
        self.norms[name] = torch.linalg.vector_norm(widened(one).flatten(1), dim=-1).cpu()
        if part in DIRECT:
            self.along[name] = (widened(one) @ self.toward.to(widened(one))).cpu()
        if part in WIDE:
            stream = part == "hook_resid_post" or name == "blocks.0.hook_resid_pre"
            self.seen[name] = self._ask(one if stream else one[list(self.positions)])

    def _ask(self, rows: Float[Tensor, "row d_model"]) -> dict[str, Tensor]:
        """What the head says of streams, a chunk of logits at a time."""
        model = self.model
        asked = readings.asked_for(
            model.cfg, model.to_single_token, self.top_k, list(self.asked), False, model.device
        )
        size = max(1, lenses.MAX_BYTES // readings.row_bytes(model.cfg.d_vocab, rows.dtype))
        parts = [readings.read(lenses.project(model, chunk), asked) for chunk in rows.split(size)]
        return {key: torch.cat([part[key] for part in parts]).cpu() for key in parts[0]}

    # -- as arrays ------------------------------------------------------------------------------------

    def lengths(self) -> Float[Tensor, "part layer pos"]:
        """Euclidean length of each part at each position, over all its other axes; nan where there is none."""
        return self._stacked(PARTS, lambda name: self.norms.get(name))

    def direct(
        self, scale: Float[Tensor, " pos"], layer_scalars: Sequence[Tensor]
    ) -> Float[Tensor, "part layer pos"]:
        """What each of `DIRECT` gives to the asked logit of its own position along the stream, the final norm at the run's scale.

        Args:
            scale: `ln_final.hook_scale` of the run.
            layer_scalars: which the stream passes on its way.
        """
        n = self.model.cfg.n_layers
        gains = gains_at(layer_scalars, n)  # from inside a block; behind its own scalar, the next

        def given(name: str) -> Tensor | None:
            layer = int(name.split(".")[1])
            gain = gains[layer + name.endswith("hook_resid_post")]
            return gain * self.along[name] / scale.cpu().to(self.along[name])

        return self._stacked(DIRECT, given)

    def said(
        self, key: str
    ) -> Float[Tensor, "part layer place k"] | Int[Tensor, "part layer place k"]:
        """A field of `readings.Readings` for each of `WIDE`, at `positions`."""
        n_pos = next(iter(self.norms.values())).shape[0]

        def chosen(name: str) -> Tensor | None:
            # Entering a block is what left the one before.
            layer = int(name.split(".")[1])
            if name.endswith("hook_resid_pre") and layer:
                name = f"blocks.{layer - 1}.hook_resid_post"
            found = self.seen[name][key]
            return found[list(self.positions)] if len(found) == n_pos else found

        return self._stacked(WIDE, chosen)

    def lens(self, key: str) -> Float[Tensor, "place pos k"] | Int[Tensor, "place pos k"]:
        """A field of `readings.Readings` of the stream before block 0 and after each block, at every position."""
        blocks = range(self.model.cfg.n_layers)
        places = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in blocks)]
        return torch.stack([self.seen[name][key] for name in places])

    def _stacked(self, parts: Iterable[str], of: Callable[[str], Tensor | None]) -> Tensor:
        rows = [
            [of(f"blocks.{i}.{part}") for i in range(self.model.cfg.n_layers)] for part in parts
        ]
        some = next(value for row in rows for value in row if value is not None)
        empty = torch.full_like(some, torch.nan) if some.is_floating_point() else some
        return torch.stack(
            [torch.stack([empty if value is None else value for value in row]) for row in rows]
        )


def _is_square(name: str) -> bool:
    return name.endswith(SQUARES)
