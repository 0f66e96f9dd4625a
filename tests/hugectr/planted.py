"""Data in HugeCTR's formats with a planted answer, or with labels that follow from nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from terarec.formats.hugectr import NormWriter, write_file_list
from terarec.metrics import AUC
from terarec.spec import RecordLayout, SparseInput

ROWS = 20  # keys of each slot


def layout(slots=4, dense=3, labels=1, key_bytes=8, name="data", nnz=1):
    return RecordLayout(
        label_dim=labels,
        dense_dim=dense,
        inputs=(SparseInput(name=name, nnz_per_slot=(nnz,) * slots, is_fixed_length=True),),
        key_bytes=key_bytes,
    )


class Planted:
    """Samples whose click has the probability sigmoid(2 (effects of the keys + first two dense numbers)).

    Attributes:
        label float32[n, labels], dense float32[n, F], keys int64[slots, n] from 0 in each slot.
        best_auc: of the probabilities themselves.
    """

    def __init__(self, samples, *, slots=4, dense=3, labels=1, seed=0, is_random=False):
        effects = np.random.default_rng(99).normal(size=(slots, ROWS))
        rng = np.random.default_rng(seed)
        self.keys = rng.integers(0, ROWS, (slots, samples))
        self.dense = rng.normal(size=(samples, dense)).astype(np.float32)
        hidden = effects[np.arange(slots)[:, None], self.keys].sum(0) + self.dense[:, :2].sum(1)
        chance = 1 / (1 + np.exp(-2 * hidden))
        if is_random:
            chance = np.full(samples, 0.5)
        self.label = (rng.random((samples, labels)) < chance[:, None]).astype(np.float32)
        self.best_auc = AUC().update(chance.astype(np.float32), self.label[:, 0]).compute()


def write_norm(directory: Path, data: Planted, *, files=2, checksum=True, name="data") -> str:
    """A file list of Norm files with keys that no two slots share; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    slots = len(data.keys)
    of_file = layout(slots, data.dense.shape[1], data.label.shape[1], name=name)
    keys = data.keys + ROWS * np.arange(slots)[:, None]
    paths = []
    for number, part in enumerate(np.array_split(np.arange(len(data.label)), files)):
        paths.append(directory / f"{number}.data")
        with NormWriter(paths[-1], of_file, checksum=checksum) as writer:
            writer.write(data.label[part], data.dense[part], [slot[part] for slot in keys])
            writer.close()
    write_file_list(directory / "list.txt", paths)
    return str(directory / "list.txt")
