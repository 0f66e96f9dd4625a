"""Ids of a categorical column -> the raw values that they stand for, through the column's encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.spec import FIRST_ID, MISSING_ID, RARE_ID, BucketizeEncoder, CategoricalEncoder, VocabularyEncoder


def raw_values(directory: Path, encoder: CategoricalEncoder | None, ids: NDArray[np.int64]) -> Sequence[str]:
    """What each of `ids` stands for, as text.

    Args:
        directory: holds dataset.json, from which the encoder's files are named.
        encoder: of the column; None means that ids are the raw values.
        ids: int64[n].

    Returns:
        n texts; ``(missing)`` and ``(rare or unseen)`` for the ids that encoders reserve.
    """
    if isinstance(encoder, BucketizeEncoder):
        return [_interval(encoder, int(row)) for row in ids]
    if isinstance(encoder, VocabularyEncoder):
        return _vocabulary_values(directory / encoder.file, encoder, ids)
    return [str(row) for row in ids]


def _interval(encoder: BucketizeEncoder, row: int) -> str:
    if row == MISSING_ID:
        return "(missing)"
    ends = ["-inf", *(f"{boundary:g}" for boundary in encoder.boundaries), "inf"]
    return f"[{ends[row - 1]}, {ends[row]})"


def _vocabulary_values(path: Path, encoder: VocabularyEncoder, ids: NDArray[np.int64]) -> list[str]:
    column = pq.read_table(path, columns=["value"]).column("value")
    reserved = {MISSING_ID: "(missing)", RARE_ID: "(rare or unseen)"}
    texts: list[str] = []
    for row in ids.tolist():
        value = reserved.get(row)
        if value is None:
            raw = column[row - FIRST_ID].as_py()
            value = f"{raw:08x}" if encoder.value_type == "hex32" and isinstance(raw, int) else str(raw)
        texts.append(value)
    return texts
