"""What a sweep gives back: a metric under every variant, with labelled axes, as tables, figures and files."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

AXES = ("layer", "head", "kv_head", "neuron", "image", "x", "y", "pos", "source")
_KEY = b"lens_gemma4"  # of our part of a parquet file's metadata


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A metric under each variant.

    Args:
        names: of the variants: "L3H2", "L3H2 @ 5", ...
        at: where each stands on the axes of the map: `{"layer": 3, "head": 2, "pos": 5}`.
        values: `[variant batch]`, in the metric's unit.
        baseline: `[batch]`, without any change.
        metric: its name.
        source: `[batch]`, the metric of the run that values were patched from.
        tokens: of the prompts, position by position.
        plan: what it takes to do it again: checkpoint, config's hash, prompts, metric, versions, dtype, arguments.
        lacks: `[variant batch]`, prompts without what a variant changes, as without a picture's patches; their values are nan and
            they are left out of averages. None where every prompt has everything.
    """

    names: list[str]
    at: list[dict[str, int]]
    values: Float[Tensor, "variant batch"]
    baseline: Float[Tensor, " batch"]
    metric: str
    source: Float[Tensor, " batch"] | None = None
    tokens: list[list[str]] | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    lacks: Bool[Tensor, "variant batch"] | None = None

    @property
    def effect(self) -> Float[Tensor, "variant batch"]:
        """`values - baseline`."""
        return self.values - self.baseline

    def mean(self) -> Float[Tensor, " variant"]:
        """Effects averaged over the prompts that have what is changed."""
        return self.averaged(self.effect)

    def averaged(self, values: Float[Tensor, "variant batch"]) -> Float[Tensor, " variant"]:
        """Numbers of one's own, averaged over the prompts that have what is changed."""
        if self.lacks is None:
            return values.mean(1)
        has = ~self.lacks.to(values.device)
        return torch.where(has, values, 0).sum(1) / has.sum(1)  # nan where nobody has it

    def recovered(self) -> Float[Tensor, " variant"]:
        """How much of the way from this run's metric to the other's each patch goes: 0 nothing, 1 all of it.

        Raises:
            ValueError: nothing was patched from another run, or both runs have the same metric.
        """
        if self.source is None:
            raise ValueError(
                "only `patch` has another run to recover; for an ablation use `effect`"
            )
        way = self.averaged((self.source - self.baseline).expand_as(self.values))
        size = torch.stack([self.source, self.baseline]).abs().max()
        if bool((way.abs() <= 100 * torch.finfo(way.dtype).eps * size).any()):
            raise ValueError("both runs have the same metric: there is nothing to recover")
        return self.mean() / way

    def interval(
        self, level: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> Float[Tensor, "2 variant"]:
        """Bootstrap interval of `mean` over prompts: lower and upper end; nan of what fewer than two prompts have.

        Raises:
            ValueError: there is one prompt, which says nothing of others, or the level is none.
        """
        batch = self.values.shape[1]
        if batch < 2:
            raise ValueError("an interval over prompts needs several; there is one")
        if draws < 1:
            raise ValueError(f"draws is {draws}; at least one is needed")
        if not 0 < level < 1:
            raise ValueError(f"a level lies between 0 and 1, got {level}")
        generator = torch.Generator().manual_seed(seed)
        weights = torch.zeros(draws, batch, dtype=self.values.dtype)
        chosen = torch.randint(batch, (draws, batch), generator=generator)
        weights.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=weights.dtype))
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=weights.dtype)
        if self.lacks is None:
            means = weights @ self.effect.cpu().T / batch  # [draw variant]
            return torch.cat([part.quantile(ends, dim=0) for part in means.split(4096, dim=1)], 1)
        has = ~self.lacks.cpu()
        means = weights @ torch.where(has, self.effect.cpu(), 0).T / (weights @ has.to(weights).T)
        means[:, has.sum(1) < 2] = torch.nan  # one prompt says nothing of others
        return torch.cat([part.nanquantile(ends, dim=0) for part in means.split(4096, dim=1)], 1)

    def part(self, chosen: slice) -> SweepResult:
        """Some of the variants."""
        return replace(
            self,
            names=self.names[chosen],
            at=self.at[chosen],
            values=self.values[chosen],
            lacks=None if self.lacks is None else self.lacks[chosen],
        )

    # -- as a map ---------------------------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, list[int]]:
        """The map's axes and what stands on each, in order: `{"layer": [0, 1, ...], "head": [0, ...]}`.

        Raises:
            ValueError: the variants are no map, but a list of sets, say.
        """
        shared = [axis for axis in AXES if all(axis in at for at in self.at)]
        taken = {tuple(at[axis] for axis in shared) for at in self.at}
        if not shared or len(taken) < len(self.at) or any(len(at) > len(shared) for at in self.at):
            raise ValueError(
                f"these {len(self.at)} variants are no grid: they do not differ on axes that all of them have"
            )
        return {axis: sorted({at[axis] for at in self.at}) for axis in shared}

    def grid(self, values: Float[Tensor, " variant"] | None = None) -> Float[Tensor, "*axes"]:
        """Mean effects, or other numbers of the variants, on `axes`; nan where there is no such variant.

        Raises:
            ValueError: the variants are no map.
        """
        axes = self.axes
        values = self.mean() if values is None else values
        place = {axis: {at: i for i, at in enumerate(ticks)} for axis, ticks in axes.items()}
        index = torch.tensor([[place[axis][at[axis]] for axis in axes] for at in self.at])
        out = values.new_full([len(ticks) for ticks in axes.values()], torch.nan)
        out[tuple(index.T.to(values.device))] = values
        return out

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k largest mean effects, whichever their sign; those that are no number come last.

        Of a variant at a position of one prompt's image, the name tells the patch too: "2_resid_pre @ 64 image[0] (3, 2)".
        """
        if k < 0:
            raise ValueError(f"k is {k}; it is how many")
        named = zip(self._told(), self.mean().tolist(), strict=True)
        return sorted(named, key=lambda one: (math.isnan(one[1]), -abs(one[1])))[:k]

    def _told(self) -> list[str]:
        """Names of the variants, with the patch that a position is."""
        if self.tokens is None or len(self.tokens) > 1:
            return self.names
        patch = [re.fullmatch(r"(image|frame|audio)\[\d+\] .+", token) for token in self.tokens[0]]
        return [
            f"{name} {self.tokens[0][at['pos']]}" if "pos" in at and patch[at["pos"]] else name
            for name, at in zip(self.names, self.at, strict=True)
        ]

    def to_dataframe(self) -> Any:
        """A pandas row for each variant and prompt: `variant`, the axes, `prompt value baseline effect`.

        Where variants are told apart by position, `token` is the prompt's token there, "image[0] (3, 2)" a patch.
        """
        import pandas as pd

        n, batch = self.values.shape
        columns: dict[str, Any] = {"variant": [name for name in self.names for _ in range(batch)]}
        for axis in AXES:
            if any(axis in at for at in self.at):
                each = [at.get(axis) for at in self.at for _ in range(batch)]
                columns[axis] = pd.array(each, dtype="Int64")
        columns["prompt"] = list(range(batch)) * n
        if self.tokens is not None and any("pos" in at for at in self.at):
            columns["token"] = [
                row[at["pos"]] if "pos" in at else None for at in self.at for row in self.tokens
            ]
        columns["value"] = self.values.flatten().cpu().numpy()
        columns["baseline"] = self.baseline.expand(n, batch).flatten().cpu().numpy()
        columns["effect"] = self.effect.flatten().cpu().numpy()
        return pd.DataFrame(columns)

    def plot(self, k: int = 30) -> Any:
        """A plotly map where the variants are one, rows of units by positions where it has more axes; else the k largest as bars."""
        from lens_gemma4 import plots

        unit = f"change of {self.metric}"
        try:
            grid, axes = self.grid(), self.axes
        except ValueError:
            grid, axes = self.mean(), {}
        if grid.ndim == 1:
            best = self.top(k)
            return plots.bars([value for _, value in best], [name for name, _ in best], unit=unit)
        if list(axes)[-2:] == ["x", "y"]:  # rows of a picture go down
            grid = grid.transpose(-1, -2)
            axes = {axis: axes[axis] for axis in [*list(axes)[:-2], "y", "x"]}
        *outer, last = axes
        rows = list(itertools.product(*(axes[axis] for axis in outer)))
        words = ["block" if axis == "layer" else axis for axis in outer]
        labels = [
            " ".join(f"{word} {tick}" for word, tick in zip(words, row, strict=True))
            if len(outer) > 1
            else str(row[0])
            for row in rows
        ]
        return plots.heatmap(
            grid.flatten(0, -2).tolist(),
            labels,
            self._ticks(last, axes[last]),
            row_title=" and ".join(words),
            column_title="position" if last == "pos" else last,
            unit=unit,
        )

    def _ticks(self, axis: str, ticks: Sequence[int]) -> list[str]:
        if axis not in ("pos", "source") or self.tokens is None or len(self.tokens) > 1:
            return [str(tick) for tick in ticks]
        return [f"{tick} {self.tokens[0][tick]}" for tick in ticks]

    def __repr__(self) -> str:
        n, batch = self.values.shape
        best = ", ".join(f"{name} {value:+.3g}" for name, value in self.top(3))
        return (
            f"SweepResult of {n} variants, {batch} prompt(s): {self.metric}; largest effects {best}"
        )

    # -- files ------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """A parquet file of `to_dataframe`, with everything else in its metadata; the same result gives the same bytes.

        Raises:
            ImportError: pyarrow is not installed.
        """
        parquet = pyarrow()
        import pyarrow as pa

        table = pa.Table.from_pandas(self.to_dataframe(), preserve_index=False)
        about = {
            "metric": self.metric,
            "tokens": self.tokens,
            "plan": self.plan,
            "source": None if self.source is None else self.source.tolist(),
            "lacks": None if self.lacks is None else self.lacks.nonzero().tolist(),
        }
        text = json.dumps(about, sort_keys=True).encode()
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: text})
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        parquet.write_table(table, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> SweepResult:
        """What `save` wrote.

        Raises:
            ValueError: a parquet file of something else.
        """
        table = pyarrow().read_table(path)
        text = (table.schema.metadata or {}).get(_KEY)
        if text is None:
            raise ValueError(f"{path} holds no sweep's result: only files written by `save` do")
        about, frame = json.loads(text), table.to_pandas()
        batch = int(frame["prompt"].max()) + 1
        first = frame[frame["prompt"] == 0]
        axes = [axis for axis in AXES if axis in frame]
        at = [
            {
                axis: int(tick)
                for axis, tick in zip(axes, row, strict=True)
                if tick == tick and tick is not None
            }
            for row in first[axes]
            .astype(object)
            .where(first[axes].notna(), None)
            .itertuples(index=False)
        ]
        values = torch.tensor(frame["value"].to_numpy()).view(-1, batch)
        source, lacks = about["source"], None
        if about.get("lacks") is not None:
            lacks = torch.zeros(values.shape, dtype=torch.bool)
            lacks[tuple(torch.tensor(about["lacks"]).T)] = True
        return cls(
            list(first["variant"]),
            at,
            values,
            torch.tensor(frame["baseline"].to_numpy())[:batch],
            about["metric"],
            None if source is None else torch.tensor(source, dtype=values.dtype),
            about["tokens"],
            about["plan"],
            lacks,
        )


def pyarrow() -> Any:
    """Its module for parquet files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "parquet files need pyarrow: pip install 'lens-gemma4[parquet]'; `to_dataframe().to_csv(path)` needs nothing"
        ) from error
    return parquet
