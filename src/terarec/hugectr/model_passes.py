"""The part of `Model` that trains pass by pass, each with a keyset of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from terarec.hugectr.errors import IllegalCallError
from terarec.hugectr.model_collections import ModelCollections
from terarec.hugectr.training_cache import IncrementalModel, TrainingCache
from terarec.hugectr.weights import FileNames, is_single_file


class ModelPasses(ModelCollections):
    """The training cache of a model, under its names in all releases."""

    _cache: TrainingCache | None = None

    def compile(self, loss_names: Sequence[str] = (), loss_weights: Sequence[float] = ()) -> None:
        """Build the model, and its training cache where one was asked for; see `ModelBase.compile`.

        Raises:
            WrongInputError: also for another number of folders than embeddings.
            FormatError: a folder that does not fit its embedding.
        """
        super().compile(loss_names, loss_weights)
        if self._etc_params is not None:
            files, model = self._embedding_files(), self.module
            collections = [model.collection(file.name) for file in files]
            key_bytes = 8 if self.solver.i64_input_key else 4
            self._cache = TrainingCache(self._etc_params, files, collections, key_bytes=key_bytes)

    def get_embedding_training_cache(self) -> TrainingCache:
        """What takes the keyset of each pass.

        Raises:
            IllegalCallError: before `compile`, or of a model without a training cache.
        """
        self._compiled("get_embedding_training_cache")
        if self._cache is None:
            raise IllegalCallError("get_embedding_training_cache: the model has none, expected Model(..., etc_params)")
        return self._cache

    get_model_oversubscriber = get_embedding_training_cache

    def get_incremental_model(self) -> IncrementalModel:
        """Keys int64[n] and vectors float32[n, D] of each embedding, of the passes since the last call.

        Raises:
            IllegalCallError: before `compile`, or of a model without a training cache.
        """
        return self.get_embedding_training_cache().incremental_model()

    def dump_incremental_model_2kafka(self) -> NoReturn:
        """Refused: there is no producer for Kafka; `get_incremental_model` gives the same rows."""
        raise IllegalCallError(
            "dump_incremental_model_2kafka: rows are not sent to Kafka, expected get_incremental_model for them"
        )

    def _save_embeddings(self, folder: Path, names: FileNames) -> None:
        if self._cache is None:
            super()._save_embeddings(folder, names)
        else:
            self._cache.save(folder, names, single_file=is_single_file(self.solver.compat_release))
