# SPDX-License-Identifier: Apache-2.0
"""Data in HugeCTR's formats with a planted answer, or with labels that follow from nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from terarec.formats.hugectr import write_file_list
from terarec.formats.hugectr.norm import NormWriter
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_async_types
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


class Samples:
    """Any samples: label float32[n, L], dense float32[n, F], keys int64[slots, n]; `best_auc` where it is known."""

    def __init__(self, label, dense, keys, best_auc=None):
        self.label, self.dense, self.keys, self.best_auc = label, dense, keys, best_auc


def clicks(chance, rng):
    """Labels float32[n, 1] drawn with these chances, and the best AUC."""
    label = (rng.random((len(chance), 1)) < chance[:, None]).astype(np.float32)
    return label, AUC().update(chance.astype(np.float32)[:, None], label).compute()


def histories(samples, *, length=4, items=20, seed=0, is_random=False):
    """Slots: user, `length` items of a history and the one shown, then their categories.

    An item's category is its number modulo 2; a user stays with one, and clicks on what has it.
    """
    rng = np.random.default_rng(seed)
    taste = rng.integers(0, 2, samples)
    past = 2 * rng.integers(0, items // 2, (length, samples)) + taste
    shown = rng.integers(0, items, samples)
    chance = np.full(samples, 0.5) if is_random else np.where(shown % 2 == taste, 0.9, 0.1)
    label, best = clicks(chance, rng)
    goods = np.vstack([past, shown])
    keys = np.vstack([rng.integers(0, 10, (1, samples)), goods + 100, goods % 2 + 200])
    dense = np.full((samples, 1), float(length), np.float32)
    return Samples(label, dense, keys, best)


def ratings(samples, *, seed=0, is_random=False):
    """Slots: user and item, with the keys of items behind those of users; a click where hidden factors agree."""
    factors = np.random.default_rng(7).normal(size=(2, ROWS, 2))
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, ROWS, (2, samples))
    logit = 2 * (factors[0, user] * factors[1, item]).sum(1)
    label, best = clicks(1 / (1 + np.exp(-logit * (not is_random))), rng)
    return Samples(label, np.zeros((samples, 1), np.float32), np.vstack([user, item + ROWS]), best)


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


def write_norm(directory: Path, data: Planted | Samples, *, files=2, checksum=True, name="data") -> str:
    """A file list of Norm files, of planted data with keys that no two slots share; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    slots = len(data.keys)
    of_file = layout(slots, data.dense.shape[1], data.label.shape[1], name=name)
    keys = data.keys + ROWS * np.arange(slots)[:, None] if isinstance(data, Planted) else data.keys
    paths = []
    for number, part in enumerate(np.array_split(np.arange(len(data.label)), files)):
        paths.append(directory / f"{number}.data")
        with NormWriter(paths[-1], of_file, checksum=checksum) as writer:
            writer.write(data.label[part], data.dense[part], [slot[part] for slot in keys])
            writer.close()
    write_file_list(directory / "list.txt", paths)
    return str(directory / "list.txt")


def write_raw_async(path: Path, data: Planted) -> str:
    """A RawAsync file, whose keys count from 0 in each slot; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    of_file = layout(len(data.keys), data.dense.shape[1], data.label.shape[1], key_bytes=8)
    types = raw_async_types(of_file, is_dense_float=True, multi_hot=True)
    with FixedRecordWriter(path, of_file, types) as writer:
        writer.write(data.label, data.dense, list(data.keys))
        writer.close()
    return str(path)
