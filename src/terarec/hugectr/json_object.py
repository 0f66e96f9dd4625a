"""Objects of a JSON file, whose errors name the path to what is wrong."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from terarec.errors import DataNotFoundError
from terarec.formats import folder_and_name, new_files, read_text
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.tables.kinds import Kind
from terarec.hugectr.tables.table import REQUIRED
from terarec.spec.codec import parse_json
from terarec.spec.quoting import quoted


class JsonObject:
    """One ``{...}`` of a file; every key is to be taken, what is left over is an error.

    Args:
        data: the object.
        where: path to it, such as ``graph.json: layers[3]``.

    Raises:
        WrongInputError: anything else than an object.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise WrongInputError(f"{where}: got {quoted(data)}, expected an object")
        self.where = where
        self._data = data
        self._left = set(data)

    def has(self, key: str) -> bool:
        """Whether there is a value of `key`."""
        return key in self._data

    def take(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """The value of `key`, or `default`.

        Raises:
            WrongInputError: no value without a default, or one of another kind.
        """
        if key not in self._data:
            if default is REQUIRED:
                raise WrongInputError(f"{self.where}: no {key}, expected {kind.expected}")
            return default
        self._left.discard(key)
        try:
            return kind.read(self._data[key])
        except (ValueError, TypeError):
            found = self._data[key]
            raise WrongInputError(f"{self.where}.{key}: got {quoted(found)}, expected {kind.expected}") from None

    def child(self, key: str) -> JsonObject:
        """The object of `key`; an empty one where there is none."""
        self._left.discard(key)
        return JsonObject(self._data.get(key, {}), f"{self.where}.{key}")

    def children(self, key: str) -> list[JsonObject]:
        """The objects in the list of `key`.

        Raises:
            WrongInputError: no list.
        """
        self._left.discard(key)
        found = self._data.get(key)
        if not isinstance(found, list):
            raise WrongInputError(f"{self.where}.{key}: got {quoted(found)}, expected a list")
        return [JsonObject(item, f"{self.where}.{key}[{place}]") for place, item in enumerate(found)]

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raise if a key was not taken and is not among `ignored`.

        Raises:
            WrongInputError: naming the first one.
        """
        left = sorted(self._left - set(ignored))
        if left:
            known = ", ".join(sorted((set(self._data) - self._left) | set(ignored)))
            raise WrongInputError(f"{self.where}: got an unknown key {left[0]!r}, beside {known}")


def read_json(path: str) -> JsonObject:
    """The object in the file `path`.

    Raises:
        FileCannotOpenError: no such file.
        BrokenFileError: no JSON.
    """
    try:
        data = parse_json(read_text(path))
    except DataNotFoundError:
        raise FileCannotOpenError(f"{path}: does not exist, expected a JSON file") from None
    except ValueError as error:  # a FormatError is a ValueError, too
        raise BrokenFileError(f"{path}: not JSON: {error}") from None
    return JsonObject(data, str(path))


def write_json(path: str, data: Any) -> None:
    """Write `data` as the file `path`, beside it first."""
    folder, name = folder_and_name(path)
    with new_files(folder) as held:
        (held / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
