"""The JSON file that the generator of synthetic logs writes next to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from terarec.errors import FormatError
from terarec.io import is_remote
from terarec.spec.codec import parse_json
from terarec.spec.quoting import quoted

SIDECAR = "generated.json"


def is_sidecar(path: Path) -> bool:
    """Return whether a file is the `SIDECAR` of a generator, and not a log of that name."""
    if path.name != SIDECAR or not path.is_file():
        return False
    try:
        content = parse_json(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {"best_auc", "files", "seed"} <= content.keys()


def read_best_auc(sources: Sequence[str | Path]) -> float | None:
    """``best_auc`` of the `SIDECAR` in the lowest directory that holds all `sources`; None without one, or behind URLs.

    Raises:
        FormatError: The file is not JSON, or holds no ``best_auc`` from 0 to 1.
    """
    if not sources or any(is_remote(source) for source in sources):
        return None
    path = Path(os.path.commonpath([Path(source).resolve().parent for source in sources])) / SIDECAR
    if not path.is_file():
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error})") from error
    best_auc = content.get("best_auc") if isinstance(content, dict) else None
    if isinstance(best_auc, bool) or not isinstance(best_auc, int | float) or not 0 <= best_auc <= 1:
        raise FormatError(f"{path}: $.best_auc", f"got {quoted(best_auc)}, expected a number from 0 to 1")
    return float(best_auc)
