"""The command line, `lens-gemma4`: it parses, calls, and turns errors of the user's into one line and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
CHECKPOINT = "a Hub id, a folder, or 'tiny', which ships with the package (default)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 done, 1 a check that failed, 2 a request that cannot be met."""
    arguments = parser().parse_args(argv)
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a token that the terminal cannot show is no reason to stop
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return int(arguments.call(arguments))
    except BrokenPipeError:  # `lens-gemma4 names | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError, RuntimeError, AssertionError) as error:
        told = str(error).lower()
        if isinstance(error, (RuntimeError, AssertionError)) and not (
            "device" in told or "cuda" in told or "nvidia" in told
        ):
            raise  # a fault of ours, not of what was asked
        print(f"lens-gemma4 {arguments.command}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    root = argparse.ArgumentParser(prog="lens-gemma4", description="Look inside Gemma 4 unified.")
    root.add_argument("--version", action="version", version=_version())
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, options, call) in COMMANDS.items():
        command = commands.add_parser(
            name, help=about, description=about[0].upper() + about[1:] + "."
        )
        options(command)
        command.set_defaults(call=call)
    return root


def _page_options(command: argparse.ArgumentParser, versus: str, output: str) -> None:
    """What commands that write a page on a prompt have in common."""
    command.add_argument(
        "--prompt", default="The capital of France is", help="any text (default: %(default)r)"
    )
    command.add_argument(
        "--answer",
        help="one token, with its leading space, e.g. ' Paris' (default: the first choice)",
    )
    command.add_argument("--versus", help=f"the token to compare it with (default: {versus})")
    command.add_argument("--device", help="e.g. cpu, cuda, cuda:1 (default: cpu)")
    command.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's own)"
    )
    command.add_argument(
        "-o", "--output", default=output, help="the page to write (default: %(default)s)"
    )


def _demo_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="tiny", help=CHECKPOINT)
    _page_options(command, versus="the next choice", output="demo.html")


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", default="tiny", help=CHECKPOINT)
    _page_options(command, versus="none", output="report.html")
    command.add_argument(
        "--image", action="append", help="a picture's file or address; again for several"
    )
    command.add_argument(
        "--image-tokens", type=int, help="budget of each: 70, 140, 280, 560 or 1120"
    )
    ablation = command.add_mutually_exclusive_group()
    ablation.add_argument(
        "--ablation",
        choices=("zero", "mean"),
        default="zero",
        help="what takes a head's place in the ablation map (default: %(default)s)",
    )
    ablation.add_argument(
        "--no-ablation",
        dest="ablation",
        action="store_const",
        const=None,
        help="leave the ablation maps out, which take most of the time",
    )
    command.add_argument(
        "--ablate-last-only",
        action="store_true",
        help="change heads at the last position alone, which is quicker",
    )


def _names_options(command: argparse.ArgumentParser) -> None:
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--model", metavar="FOLDER", help="also say which of them a checkpoint has, and why not"
    )
    kind.add_argument("--markdown", action="store_true", help="as docs/hook_points.md has it")


def _check_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", help="a checkpoint's folder, a Hub id, or 'tiny'")
    command.add_argument(
        "--dtype", choices=DTYPES[:3], help="of both (default: the checkpoint's own)"
    )
    command.add_argument(
        "--attn", default="sdpa,eager", help="attention implementations (default: %(default)s)"
    )
    command.add_argument("--device", default="cpu", help="default: %(default)s")
    command.add_argument(
        "--seed", type=int, default=0, help="of the random prompts (default: %(default)s)"
    )


def _convert_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", help="a Hub id, a folder, or 'tiny'")
    command.add_argument("target", help="the folder to write")
    command.add_argument(
        "--dtype", choices=DTYPES, help="of the weights written (default: as they are)"
    )
    command.add_argument(
        "--max-shard-size", default="5GB", help="of one file (default: %(default)s)"
    )


def _map_options(command: argparse.ArgumentParser, units: str, positions: str) -> None:
    command.add_argument("prompts", metavar="FILE", help="prompts, JSON lines (.jsonl) or .csv")
    command.add_argument("-o", "--output", required=True, help="the parquet file to write")
    command.add_argument(
        "--units", default=units, help="a kind, or names with commas between (default: %(default)s)"
    )
    command.add_argument("--layers", help="blocks, with commas between (default: all)")
    command.add_argument(
        "--positions",
        default=positions,
        help="all, last, each, or numbers with commas between (default: %(default)s)",
    )
    command.add_argument(
        "--metric",
        default="logit_difference",
        help="logit_difference, logit, log_prob, prob, rank, kl_to_clean, loss; several with commas between (default: %(default)s)",
    )
    command.add_argument("--model", default="tiny", help="a Hub id, a folder, or 'tiny' (default)")
    command.add_argument("--device", help="e.g. cpu, cuda, cuda:1 (default: cpu)")
    command.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    command.add_argument("--batch-size", type=int, help="variants at a time (default: what fits)")
    command.add_argument(
        "--top", type=int, default=10, help="variants to print (default: %(default)s)"
    )


def _ablate_options(command: argparse.ArgumentParser) -> None:
    _map_options(command, "heads", "all")
    command.add_argument(
        "--mode", default="zero", help="zero, mean, resample or a factor (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of resampling (default: %(default)s)")


def _patch_options(command: argparse.ArgumentParser) -> None:
    _map_options(command, "resid_pre", "each")
    command.add_argument(
        "--direction",
        choices=("denoise", "noise"),
        default="denoise",
        help="clean values into the corrupted run, or the other way round (default: %(default)s)",
    )


# Imports stand inside: parsing and help wait for none of them.


def _version() -> str:
    from lens_gemma4 import __version__

    return f"lens-gemma4 {__version__}"


def _demo(given: argparse.Namespace) -> int:
    from lens_gemma4 import demo

    demo.run(
        given.prompt,
        given.answer,
        given.versus,
        given.model,
        given.device,
        given.dtype,
        given.output,
    )
    return 0


def _report(given: argparse.Namespace) -> int:
    from lens_gemma4 import report

    report.run(
        given.prompt,
        given.answer,
        given.versus,
        given.model,
        given.image,
        given.device,
        given.dtype,
        given.output,
        image_tokens=given.image_tokens,
        ablation=given.ablation,
        ablate_last_only=given.ablate_last_only,
    )
    return 0


def _names(given: argparse.Namespace) -> int:
    from lens_gemma4 import names, plots

    if given.markdown:
        print(names.markdown())
        return 0
    columns = {
        "hook point": [row.name + " *" * row.starred for row in names.ROWS],
        "standard name": [", ".join(row.standard) for row in names.ROWS],
        "in transformers": [row.hf for row in names.ROWS],
        "axes": [row.axes for row in names.ROWS],
        "what it is": [row.meaning for row in names.ROWS],
    }
    if given.model is not None:
        support = _support(given.model)
        columns = {
            "hook point": columns.pop("hook point"),
            "there": [f"{row['available']} {row['why']}" for row in support],
        } | columns
    print(plots.Table(columns).text())
    return 0


def _support(folder: str) -> list[dict[str, str]]:
    """What a checkpoint has, from its config.json alone."""
    import torch

    from lens_gemma4 import HookedConfig, HookedModel, loading

    with torch.device("meta"):
        return HookedModel(HookedConfig.from_hf(loading.resolve(folder))).support()


def _check(given: argparse.Namespace) -> int:
    from lens_gemma4 import check, loading

    return check.run(
        loading.resolve(given.folder), given.dtype, given.attn, given.device, given.seed
    )


def _convert(given: argparse.Namespace) -> int:
    import torch

    from lens_gemma4 import loading

    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    print(
        loading.convert(
            given.source, given.target, dtype=dtype, max_shard_size=given.max_shard_size
        )
    )
    return 0


def _ablate(given: argparse.Namespace) -> int:
    mode: str | float = given.mode
    with contextlib.suppress(ValueError):
        mode = float(given.mode)
    return _map("ablate", given, mode=mode, seed=given.seed)


def _patch(given: argparse.Namespace) -> int:
    return _map("patch", given, direction=given.direction)


def _map(kind: str, given: argparse.Namespace, **options: Any) -> int:
    from lens_gemma4 import HookedModel, prompt_files

    in_words = given.positions in ("all", "last", "each")
    prompt_files.run(
        kind,
        given.prompts,
        given.output,
        model=HookedModel.from_pretrained(given.model, device=given.device, dtype=given.dtype),
        metric=given.metric,
        top=given.top,
        units=[name.strip() for name in given.units.split(",")]
        if "," in given.units
        else given.units,
        layers=None if given.layers is None else _numbers(given.layers),
        positions=given.positions if in_words else _numbers(given.positions),
        batch_size=given.batch_size,
        **options,
    )
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers with commas between") from None


COMMANDS = {
    "demo": (
        "why a model goes on with one token rather than another: tables and a page",
        _demo_options,
        _demo,
    ),
    "report": (
        "what a model does on a prompt, as a page: every part of every block, lens, attribution, ablation, patterns",
        _report_options,
        _report,
    ),
    "ablate": (
        "what a metric is without each head, MLP, neuron, ...: a table for every prompt of a file",
        _ablate_options,
        _ablate,
    ),
    "patch": (
        "what a metric is with each value taken from another prompt's run: a table for every pair of a file",
        _patch_options,
        _patch,
    ),
    "names": ("the table of hook points, in both vocabularies", _names_options, _names),
    "check": (
        "compare a checkpoint here and in transformers, value by value",
        _check_options,
        _check,
    ),
    "convert": (
        "write a checkpoint so that every supported transformers reads it",
        _convert_options,
        _convert,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
