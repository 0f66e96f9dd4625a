# SPDX-License-Identifier: Apache-2.0
"""Record the data that a script of HugeCTR reads, and how the files are laid out, without training anything.

``python -m tools.upstream_files.probe OUT.json SCRIPT.py [ARGUMENTS]`` runs the script with a model that only takes
notes; a training file of 2.3 to 3.0 may stand in its place. What the script does with results may fail then; the notes
up to there are what counts.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.upstream_files.data import KEYS_OF_A_SLOT

from terarec import hugectr
from terarec.hugectr.command_line import provide_modules
from terarec.hugectr.readers import params_of_input
from terarec.hugectr.release import release_number
from terarec.hugectr.training_json import SolverParser, read_training


@dataclasses.dataclass(kw_only=True)
class Demand:
    """Files that a script reads together, in one layout.

    Attributes:
        kind: Format, as terarec names it.
        sources: Training data.
        keysets: A keyset of each source; empty for none.
        eval_source: Evaluation data.
        label_dim: Labels of a sample.
        dense_dim: Dense numbers of a sample.
        nnz: Keys of each slot.
        is_fixed: Whether all samples have that many keys.
        slot_sizes: Keys of each slot; empty for unknown.
        key_bytes: Bytes of a key.
        checksum: Whether Norm files have checksums.
        is_float: Whether Raw files hold floats.
        rows: Training samples that the script needs.
        eval_rows: Evaluation samples.
    """

    kind: str
    sources: list[str]
    keysets: list[str]
    eval_source: str
    label_dim: int
    dense_dim: int
    nnz: list[int]
    is_fixed: bool
    slot_sizes: list[int]
    key_bytes: int
    checksum: bool
    is_float: bool
    rows: int
    eval_rows: int


DEMANDS: list[Demand] = []
_GENERATED: set[str] = set()


class _Anything:
    """A result that takes every use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: object, **options: object) -> Any:
        return _Anything()

    def __iter__(self) -> Any:
        return iter(())


@dataclasses.dataclass
class _Sizes:
    """The keys of each slot, as the embeddings of a file have them."""

    slot_size_array: list[int]


class _Model(_Anything):
    """A model that notes its data."""

    def __init__(self, solver: Any, reader_params: Any = None, *_: object, **options: Any) -> None:
        self.solver, self.reader = solver, reader_params or options.get("reader_params")
        self.parts: list[Any] = []
        self.source = ""

    def add(self, part: Any) -> None:
        self.parts.append(part)
        if isinstance(part, hugectr.Input) and not isinstance(self.reader, hugectr.DataReaderParams):
            self.reader = params_of_input(part)  # 3.0

    def construct_from_json(self, graph_config_file: str, *_: object, **options: object) -> None:
        layers = json.loads(Path(graph_config_file).read_text())["layers"]
        self.parts.append(input_of(next(layer for layer in layers if layer["type"] == "Data")))
        sizes = [layer.get("sparse_embedding_hparam", {}).get("slot_size_array", ()) for layer in layers]
        self.parts.append(_Sizes([size for of_layer in sizes for size in of_layer]))

    def graph_to_json(self, graph_config_file: str, *_: object, **options: object) -> None:
        # A later script of the same notebook begins with it; training writes the whole file.
        path, inputs = Path(graph_config_file), next(part for part in self.parts if isinstance(part, hugectr.Input))
        if not path.exists():
            path.write_text(json.dumps({"layers": [_clause_of(inputs.values())]}))

    def compile(self, *_: object, **options: object) -> None:
        self._note(_strings(self.reader.source), _strings(self.reader.keyset), self.reader.eval_source)

    def set_source(self, source: Any = (), keyset: Any = (), eval_source: str = "", **_: object) -> None:
        self._note(_strings(source), _strings(keyset), eval_source or self.reader.eval_source)

    def _note(self, sources: list[str], keysets: list[str], eval_source: str) -> None:
        if self.parts:
            DEMANDS.append(_demand(self.solver, self.reader, self.parts, (sources, keysets, eval_source)))

    def train(self, *_: object, **options: object) -> bool:
        return False

    def eval(self, *_: object, **options: object) -> bool:
        return False

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        return [("AUC", 1.0)]

    def get_data_reader_train(self) -> _Reader:
        return _Reader(self, is_eval=False)

    def get_data_reader_eval(self) -> _Reader:
        return _Reader(self, is_eval=True)

    def get_embedding_training_cache(self) -> _Cache:
        return _Cache(self)

    get_model_oversubscriber = get_embedding_training_cache


class _Session(_Model):
    """A model over a training file of 2.3 to 3.0."""

    def __init__(self, solver_config: Any, config_file: str, *_: object, **options: object) -> None:
        training = read_training(config_file)
        super().__init__(solver_config, training.reader)
        self.parts += training.parts
        self.compile()


class _Reader(_Anything):
    """A reader that notes the sources that it is given."""

    def __init__(self, model: _Model, *, is_eval: bool) -> None:
        self._model, self._is_eval = model, is_eval

    def set_source(self, source: str = "", **_: object) -> None:
        if source:
            if self._is_eval:
                self._model._note([], [], source)
            else:
                self._model.source = source
                self._model._note([source], [], self._model.reader.eval_source)

    set_file_list_source = set_source  # 2.3


class _Cache(_Anything):
    """A training cache that notes the keyset of the source that was set last."""

    def __init__(self, model: _Model) -> None:
        self._model = model

    def update(self, keyset: str, *_: object) -> None:
        self._model._note([self._model.source], [keyset], self._model.reader.eval_source)


def _strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def input_of(layer: dict[str, Any]) -> Any:
    """Return the `Input` of a file's clause Data."""
    sparse = [
        hugectr.DataReaderSparseParam(
            one["top"],
            one.get("nnz_per_slot", one.get("max_nnz", one.get("max_feature_num_per_sample", 1))),
            one.get("is_fixed_length", False),
            one["slot_num"],
        )
        for one in layer["sparse"]
    ]
    label = layer["label"]
    dims = label["label_dim"]
    return hugectr.Input(
        label_dim=sum(dims) if isinstance(dims, list) else dims,
        label_name="label",
        dense_dim=layer["dense"]["dense_dim"],
        dense_name="dense",
        data_reader_sparse_param_array=sparse,
    )


def _clause_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the clause Data of an `Input`, as far as `input_of` reads it."""
    return {
        "type": "Data",
        "label": {"label_dim": inputs.get("label_dims") or inputs["label_dim"]},
        "dense": {"dense_dim": inputs["dense_dim"]},
        "sparse": [
            {"top": one.top_name, "nnz_per_slot": one.nnz_per_slot, "slot_num": one.slot_num}
            | {"is_fixed_length": one.is_fixed_length}
            for one in inputs["data_reader_sparse_param_array"]
        ],
    }


def _demand(solver: Any, reader: Any, parts: list[Any], paths: tuple[list[str], list[str], str]) -> Demand:
    inputs = next(part.values() for part in parts if isinstance(part, hugectr.Input))
    slots = inputs["data_reader_sparse_param_array"]
    nnz = [most for slot in slots for most in slot.nnz_per_slot]
    own = [part.slot_size_array for part in parts if isinstance(part, hugectr.SparseEmbedding | _Sizes)]
    sizes = list(reader.slot_size_array) or [size for of_part in own for size in of_part] or table_sizes(parts, slots)
    kind = {"Norm": "norm", "Raw": "raw", "Parquet": "parquet", "RawAsync": "raw_async"}[reader.data_reader_type.name]
    is_float = reader.float_label_dense
    if kind == "raw_async":
        from terarec.hugectr.readers import async_layout_of  # loads torch

        number = release_number(solver.compat_release)
        _, is_float = async_layout_of(reader.async_param, number, is_one_hot=all(most == 1 for most in nnz))
    return Demand(
        kind=kind,
        sources=paths[0],
        keysets=paths[1],
        eval_source=paths[2],
        label_dim=sum(inputs.get("label_dims") or [inputs["label_dim"]]),
        dense_dim=inputs["dense_dim"],
        nnz=nnz,
        is_fixed=all(slot.is_fixed_length for slot in slots),
        slot_sizes=sizes,
        key_bytes=8 if solver.i64_input_key else 4,
        checksum=reader.check_type is hugectr.Check_t.Sum,
        is_float=is_float,
        rows=reader.num_samples or 4 * solver.batchsize,
        eval_rows=reader.eval_num_samples or solver.batchsize_eval * min(solver.max_eval_batches, 4),
    )


def table_sizes(parts: list[Any], slots: list[Any]) -> list[int]:
    """Return the keys of each slot: the rows of the smallest table that looks it up in an embedding collection."""
    rows: dict[str, int] = {}
    for collection in (part for part in parts if isinstance(part, hugectr.EmbeddingCollectionConfig)):
        for lookup in collection.lookups:
            size = lookup.table.max_vocabulary_size
            if size > 0:  # else the table grows
                rows[lookup.bottom_name] = min(size, rows.get(lookup.bottom_name, size))
    return [rows.get(slot.top_name, KEYS_OF_A_SLOT) for slot in slots for _ in slot.nnz_per_slot] if rows else []


def _install() -> None:
    """Put the model that takes notes, and stand-ins of everything that computes, in place of HugeCTR's names."""
    provide_modules()
    package: Any = sys.modules["hugectr"]
    package.Model, package.Session = _Model, _Session
    inference: Any = sys.modules["hugectr.inference"]
    for name in ("HPS", "InferenceModel", "InferenceSession", "CreateInferenceSession", "CreateParameterServer"):
        setattr(inference, name, _Anything())
    converter: Any = sys.modules["hugectr2onnx.converter"]
    converter.convert = lambda *_, **options: None
    tools: Any = sys.modules["hugectr.tools"]
    tools.DataGenerator = _Generator
    # Children would train, or wait for each other.
    multiprocessing.Process.start = _end_at_the_next_pause  # type: ignore
    multiprocessing.Process.join = lambda self, *_: None  # type: ignore
    os.system = lambda command: 0
    subprocess.run = subprocess.check_call = subprocess.check_output = lambda *_, **options: None  # type: ignore


def _end_at_the_next_pause(self: object) -> None:
    """Stand in for the start of a process: a script that then sleeps waits for what the process would do."""

    def end(seconds: float) -> None:
        sys.exit("it waits for a process that was not started")

    time.sleep = end


class _Generator(_Anything):
    def __init__(self, params: Any) -> None:
        _GENERATED.update((params.source, params.eval_source))


def main() -> None:
    """Run the script and write its demands."""
    out, script, *arguments = sys.argv[1:]
    _install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    warnings.simplefilter("ignore")
    try:
        if script.endswith(".json"):
            _Session(SolverParser(script), script)
        else:
            runpy.run_path(script, run_name="__main__")
    except BaseException as error:  # whatever stands behind the last model
        print(f"the probe ended with {type(error).__name__}: {error}", file=sys.stderr)
    wanted = [one for one in DEMANDS if not _GENERATED & {*one.sources, one.eval_source}]
    Path(out).write_text(json.dumps([dataclasses.asdict(one) for one in wanted]))


if __name__ == "__main__":
    main()
