"""What a command is asked for, tried before its work: a device that runs, a place for its page."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch

MADE_HERE = b'name="generator" content="lens-gemma4"'  # near the top of every page of ours


def device(name: str | None) -> torch.device | None:
    """A device that works, tried before a model is loaded.

    Raises:
        ValueError: it does not.
    """
    if name is None:
        return None
    try:
        found = torch.device(name)
        torch.zeros(1, device=found).item()
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch's ways of saying so
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return found


def place(path: Path, example: str = "page.html") -> Path:
    """Where a page may be written, found out before the work. A page of ours is overwritten, another file is not.

    Raises:
        OSError: it may not; the message says why.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder: name the page's file, e.g. -o {path / example}"
        )
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} to write {path.name} to")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to: name another place with -o")
    if path.exists():
        with path.open("rb") as file:
            if MADE_HERE not in file.read(2000):
                raise FileExistsError(
                    f"{path} exists and is no page of this command: name another file with -o"
                )
    return path


def write(path: Path, text: str) -> None:
    """All or nothing: an interrupted write leaves the old page, and no file that was there is touched."""
    unfinished = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
