"""Recommender models with embedding tables too large for one device: training, preparation and serving.

The names that most programs need are here, and each is imported when it is first used; the rest is in the packages:
`terarec.spec`, `terarec.etl`, `terarec.data`, `terarec.embedding`, `terarec.nn`, `terarec.models`, `terarec.train`, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    """Import a name on first use: ``import terarec`` alone loads neither torch nor pyarrow."""
    # PEP 562: called for names that the module does not have yet.
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'terarec' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"terarec.{home}"), name)
    # Kept, so that the next access costs no call.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
