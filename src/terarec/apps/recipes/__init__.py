# SPDX-License-Identifier: Apache-2.0
"""Recipes for published results: the settings of each run, and the preparation of its data.

``<data>/data.json`` holds one of `AnyDataSpec`. Recipes are `RecipeSpec`s in ``<data>/<model>.json``, but those of a
`SequenceDataSpec` are the same runs for all such data, ``sequences/<model>.json``, and differ in the published metrics.
The data themselves are the user's: their licences do not let a package hold them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar, cast

from terarec.errors import DataNotFoundError
from terarec.etl.source.files import name_order
from terarec.spec import RunSpec, from_data
from terarec.spec.codec import parse_json
from terarec.spec.recipe import LOG, AnyDataSpec, RecipeDataSpec, RecipeSpec, SequenceDataSpec
from terarec.spec.registry import unknown_name

_DATA = "data.json"
_RUNS_OF_SEQUENCES = "sequences"
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
"""Compressions that the source of the preparation reads."""

_Spec = TypeVar("_Spec")


def recipe_names() -> Mapping[str, tuple[str, ...]]:
    """Name of the data -> names of the models, in alphabetical order."""
    # By `importlib.resources`: the package may be installed in an archive.
    folders = sorted((folder for folder in files(__package__).iterdir() if folder.is_dir()), key=_name)
    # Python leaves other folders here, such as __pycache__.
    of_data = [folder for folder in folders if (folder / _DATA).is_file()]
    return {folder.name: _run_names(folder) or _run_names(_shared_runs()) for folder in of_data}


def load_recipe(data: str, model: str) -> RecipeSpec:
    """Read a recipe of the package.

    Args:
        data: Name of the data, such as "frappe_x1".
        model: Name of the model, such as "deepfm".
    """
    models = _models_of(data)
    if model not in models:
        raise unknown_name(f"recipe for {data}", model, models)
    described = load_recipe_data(data)
    if isinstance(described, SequenceDataSpec):
        run = _read(RunSpec, _shared_runs() / f"{model}.json")
        return RecipeSpec(published=described.published[model], run=dataclasses.replace(run, data=data))
    return _read(RecipeSpec, files(__package__) / data / f"{model}.json")


def load_recipe_data(data: str) -> AnyDataSpec:
    """Read the description of the files of the recipes for `data`, and of their preparation."""
    import terarec.etl.ops  # noqa: F401  the operators of a recipe's workflow register themselves

    _models_of(data)
    # A union is no class, which `from_data` reads as well.
    return _read(cast(type[AnyDataSpec], AnyDataSpec), files(__package__) / data / _DATA)


def find_recipe_files(spec: AnyDataSpec, directory: Path) -> tuple[Path, ...]:
    """Find the files of a recipe's data in a directory, in the order of their splits.

    Each may be compressed. Of several names that a file may have, the first one that is there counts. What matches a
    pattern is in the order of the numbers in the names.
    """
    if not directory.is_dir():
        raise DataNotFoundError(directory, f"no such directory, expected the files of {spec.source}")
    if not isinstance(spec, RecipeDataSpec):
        return _find(spec.source, spec.kind, spec.names, directory)
    paths = tuple(path for part, names in spec.files.items() for path in _find(spec.source, part, names, directory))
    if LOG in spec.files and len(paths) != spec.log_files:
        names = " or ".join(spec.files[LOG])
        raise DataNotFoundError(
            directory, f"has {len(paths)} files {names}, expected {spec.log_files} with a number in place of the star"
        )
    return paths


def _find(source: str, part: str, names: Sequence[str], directory: Path) -> tuple[Path, ...]:
    entries = sorted((path for path in directory.iterdir() if path.is_file()), key=lambda path: name_order(path.name))
    for name in names:
        pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
        # A file beside its compressed copy is one: the first suffix counts.
        by_name: dict[str, Path] = {}
        for suffix in ("", *_COMPRESSED):
            for path in entries:
                plain = path.name.removesuffix(suffix)
                if path.name.endswith(suffix) and pattern.fullmatch(plain):
                    by_name.setdefault(plain, path)
        if by_name:
            return tuple(by_name[plain] for plain in sorted(by_name, key=name_order))
    raise DataNotFoundError(
        directory,
        f"no file for {part!r}, expected {' or '.join(names)}, plain or compressed "
        f"({', '.join(_COMPRESSED)}), of {source}",
    )


def _models_of(data: str) -> tuple[str, ...]:
    names = recipe_names()
    if data not in names:
        raise unknown_name("recipes", data, names)
    return names[data]


def _shared_runs() -> Traversable:
    return files(__package__) / _RUNS_OF_SEQUENCES


def _run_names(folder: Traversable) -> tuple[str, ...]:
    names = sorted(map(_name, folder.iterdir()))
    return tuple(name.removesuffix(".json") for name in names if name != _DATA)


def _read(spec_type: type[_Spec], file: Traversable) -> _Spec:
    return from_data(spec_type, parse_json(file.read_text(encoding="utf-8")), where=f"{file.name}: $")


def _name(entry: Traversable) -> str:
    return entry.name
