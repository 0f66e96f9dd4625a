# SPDX-License-Identifier: Apache-2.0
"""Recommender models with embedding tables too large for one device: training, preparation and serving.

The names that most programs need are here, and each is imported when it is first used; the rest is in the packages:
`terarec.spec`, `terarec.etl`, `terarec.data`, `terarec.embedding`, `terarec.nn`, `terarec.models`, `terarec.train`, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terarec.lazy_imports import lazy_names

if TYPE_CHECKING:
    from terarec.batch import Batch, Jagged
    from terarec.config import load_run
    from terarec.data import Reader, open_reader
    from terarec.embedding import Embedding, EmbeddingBag, EmbeddingCollection, replace_embeddings
    from terarec.errors import TerarecError
    from terarec.etl import prepare
    from terarec.etl.workflow import Workflow
    from terarec.export import export_run
    from terarec.models import build_model
    from terarec.optim import RowOptimizer
    from terarec.serve import InferenceClient, InferenceSession
    from terarec.spec import DatasetSpec, DynamicTableSpec, FeatureSpec, RunSpec, TableSpec, TrainingSpec
    from terarec.train import Callback, Optimizers, Trainer

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Callback",
    "DatasetSpec",
    "DynamicTableSpec",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FeatureSpec",
    "InferenceClient",
    "InferenceSession",
    "Jagged",
    "Optimizers",
    "Reader",
    "RowOptimizer",
    "RunSpec",
    "TableSpec",
    "TerarecError",
    "Trainer",
    "TrainingSpec",
    "Workflow",
    "__version__",
    "build_model",
    "export_run",
    "load_run",
    "open_reader",
    "prepare",
    "replace_embeddings",
]

_HOMES = {
    "batch": ("Batch", "Jagged"),
    "config": ("load_run",),
    "data": ("Reader", "open_reader"),
    "embedding": ("Embedding", "EmbeddingBag", "EmbeddingCollection", "replace_embeddings"),
    "errors": ("TerarecError",),
    "etl": ("prepare",),
    "etl.workflow": ("Workflow",),
    "export": ("export_run",),
    "models": ("build_model",),
    "optim": ("RowOptimizer",),
    "serve": ("InferenceClient", "InferenceSession"),
    "spec": ("DatasetSpec", "DynamicTableSpec", "FeatureSpec", "RunSpec", "TableSpec", "TrainingSpec"),
    "train": ("Callback", "Optimizers", "Trainer"),
}
"""Package -> its names above, which type checkers read from the imports."""


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
