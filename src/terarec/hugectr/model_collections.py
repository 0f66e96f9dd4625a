"""The part of `Model` that writes and reads the tables of embedding collections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from terarec.formats import local_copy, new_files
from terarec.formats.hugectr import COLLECTION_FILES
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.model_files import ModelFiles
from terarec.hugectr.weights import check_collection, dump_collection, dump_folder, load_collection
from terarec.storage import DynamicTable, StaticTable


class ModelCollections(ModelFiles):
    """Dumps of embedding collections: at paths, or at URLs that fsspec knows."""

    @as_hugectr_errors("embedding_dump")
    def embedding_dump(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Write the tables of embedding collections below `path`; all of them if none is named.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a table that is not there.
            StorageError: the disk is full.
        """
        collections = list(self._collections("embedding_dump", table_names))
        with new_files(self._url(path), replaceable=COLLECTION_FILES) as held:
            for number, tables, names in collections:
                folder = dump_folder(held, number)
                dump_collection(tables, folder, names=names, key_bytes=8 if self.solver.i64_input_key else 4)

    @as_hugectr_errors("embedding_load")
    def embedding_load(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Take tables of embedding collections from what `embedding_dump` wrote; all that it holds if none is named.

        Raises:
            IllegalCallError: before `compile`.
            WrongInputError: a table that is not there.
            FileCannotOpenError: no dump.
            BrokenFileError: a dump of other tables; none is changed then.
        """
        collections = list(self._collections("embedding_load", table_names))
        with local_copy(self._url(path)) as held:
            for number, tables, names in collections[1:]:
                check_collection(tables, dump_folder(held, number), names=names)
            for number, tables, names in collections:
                load_collection(tables, dump_folder(held, number), names=names)

    def _collections(
        self, call: str, table_names: Sequence[str]
    ) -> Iterator[tuple[int, Mapping[str, StaticTable | DynamicTable], list[str]]]:
        """Number and tables of each collection that has some of `table_names`, and which these are."""
        engine = self._compiled(call)
        configs = self._network.of_kind(EmbeddingCollectionConfig)
        known = [name for config in configs for name in config.table_names()]
        if not configs:
            raise IllegalCallError(
                f"{call}: the model has no embedding collection; expected save_params_to_files and load_sparse_weights "
                "for a SparseEmbedding"
            )
        for name in table_names:
            if name not in known:
                raise WrongInputError(
                    f"{call}: table_names: got {name!r}, expected some of {', '.join(known) or 'none'}"
                )
        for number, (config, parts) in enumerate(zip(configs, engine.plan.collections, strict=True)):
            held = {name: table for part in parts for name, table in engine.model.collection(part).tables.items()}
            names = [name for name in table_names if name in held]
            if names or not table_names:
                yield number, {name: held[name] for name in config.table_names()}, names
