# SPDX-License-Identifier: Apache-2.0
"""Objects of a JSON file, whose errors name the path to the wrong value, and the optimizers in them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from terarec.errors import DataNotFoundError
from terarec.hugectr.enums import Optimizer_t, Update_t
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.objects import OptimizerWithSchedule, OptParamsPy
from terarec.hugectr.schema.record import Record
from terarec.hugectr.schema.types import BOOL, Type, member_name, one_of
from terarec.io.directories import atomic_entries
from terarec.io.files import write_json as write_json_file
from terarec.io.remote import folder_and_name, read_text
from terarec.spec.checks import REQUIRED, nearest_or_all, quoted
from terarec.spec.codec import parse_json

_LOGGER = logging.getLogger(__name__)
Value = TypeVar("Value")
Made = TypeVar("Made", bound=Record)


class JsonObject:
    """An object of a JSON file; keys that were not read are an error.

    Args:
        data: The object.
        where: Path to it, such as ``graph.json: layers[3]``.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise WrongInputError(where, f"got {quoted(data)}, expected an object")
        self.where = where
        self._data = data
        self._left = set(data)
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the object has `key`."""
        return key in self._data

    def take(self, key: str, kind: Type[Value], default: Any = REQUIRED) -> Value:
        """Return the value of `key`, or `default`."""
        self._known.add(key)
        if key not in self._data:
            if default is REQUIRED:
                raise WrongInputError(self.where, f"no {key}, expected {kind.expected}", field=key)
            return cast("Value", default)
        self._left.discard(key)
        try:
            return kind.read(self._data[key])
        except (ValueError, TypeError):
            value = self._data[key]
            problem = f"got {quoted(value)}, expected {kind.expected}"
            raise WrongInputError(f"{self.where}.{key}", problem, field=key, received=value) from None

    def child(self, key: str) -> JsonObject:
        """Return the object of `key`; an empty one where there is none."""
        self.accept(key)
        self._left.discard(key)
        return JsonObject(self._data.get(key, {}), f"{self.where}.{key}")

    def accept(self, key: str) -> None:
        """Name `key` among the known ones in errors."""
        self._known.add(key)

    def values(self) -> dict[str, Any]:
        """Return all keys and values."""
        return dict(self._data)

    def children(self, key: str) -> list[JsonObject]:
        """Return the objects in the list of `key`."""
        self.accept(key)
        self._left.discard(key)
        entries = self._data.get(key)
        if not isinstance(entries, list):
            raise WrongInputError(f"{self.where}.{key}", f"got {quoted(entries)}, expected a list")
        return [JsonObject(item, f"{self.where}.{key}[{place}]") for place, item in enumerate(entries)]

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raise if a key was not taken and is not among `ignored`."""
        # HugeCTR passes over keys that it does not know, so that a misspelt one silently has no effect.
        left = sorted(self._left - set(ignored))
        if left:
            hint = nearest_or_all(left[0], sorted(self._known | set(ignored)))
            raise WrongInputError(self.where, f"got an unknown key {left[0]!r}, {hint}", field=left[0])

    def warn_unknown(self) -> None:
        """Log a warning for each key that was not taken."""
        for key in sorted(self._left):
            _LOGGER.warning(
                "%s: ignores the unknown key %r, %s", self.where, key, nearest_or_all(key, sorted(self._known))
            )
        self._left.clear()

    def make(self, cls: type[Made], arguments: Mapping[str, Any]) -> Made:
        """Return the object that a HugeCTR call creates from `arguments`, the values of this object.

        Raises:
            WrongInputError: The call rejects them; the message has the path of this object before the call's.
        """
        try:
            return cls(**arguments)
        except WrongInputError as error:
            where, problem = error.where, error.problem
            raise WrongInputError(self.where, where, problem, field=error.field, received=error.received) from None


def read_json(path: str) -> JsonObject:
    """Return the object in the file `path`.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
    """
    try:
        data = parse_json(read_text(path))
    except DataNotFoundError:
        raise FileCannotOpenError(path, "does not exist, expected a JSON file") from None
    except ValueError as error:  # a FormatError is a ValueError, too
        raise BrokenFileError(path, f"not JSON: {error}") from None
    return JsonObject(data, str(path))


def write_json(path: str, data: object) -> None:
    """Write `data` to the file `path`, atomically."""
    folder, name = folder_and_name(path)
    with atomic_entries(folder) as local:
        write_json_file(local / name, data)


KEY_TYPES = one_of("I32", "I64")
"""Values of ``input_key_type`` in training and inference files."""

LOSS_SCALES = one_of(128, 256, 512, 1024)
"""Values of ``mixed_precision`` there: the scale of the loss."""

HYPERPARAMETERS: dict[Optimizer_t, tuple[str, tuple[str, ...]]] = {
    Optimizer_t.Ftrl: ("ftrl_hparam", ("beta", "lambda1", "lambda2")),
    Optimizer_t.Adam: ("adam_hparam", ("beta1", "beta2", "epsilon")),
    Optimizer_t.RMSProp: ("rmsprop_hparam", ()),
    Optimizer_t.AdaGrad: ("adagrad_hparam", ("initial_accu_value", "epsilon")),
    Optimizer_t.MomentumSGD: ("momentum_sgd_hparam", ("momentum_factor",)),
    Optimizer_t.Nesterov: ("nesterov_hparam", ("momentum_factor",)),
    Optimizer_t.SGD: ("sgd_hparam", ("atomic_update",)),
}
"""For every kind of optimizer the object with its parameters, and their keys, which are those of CreateOptimizer."""

SCHEDULE = ("learning_rate", "warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
"""Keys of the learning rate, which training files up to 3.0 have in the same object."""


def optimizer_to_json(optimizer: OptParamsPy) -> dict[str, Any]:
    """Return `optimizer` for `json.dumps`."""
    clause, keys = HYPERPARAMETERS[optimizer.optimizer_type]
    return {
        "update_type": optimizer.update_type.name,
        "type": optimizer.optimizer_type.name,
        clause: {key: getattr(optimizer, key) for key in keys},
    }


def read_optimizer(data: JsonObject) -> OptParamsPy:
    """Return the optimizer in `data`; a learning rate there is left to the solver."""
    params = _read(data, OptParamsPy)
    return data.make(OptParamsPy, {name: value for name, value in params.items() if name not in SCHEDULE})


def read_optimizer_with_schedule(data: JsonObject) -> OptimizerWithSchedule:
    """Return the optimizer and its learning rate in the clause ``optimizer`` of a training file."""
    return data.make(OptimizerWithSchedule, _read(data, OptimizerWithSchedule))


def _read(data: JsonObject, cls: type[OptParamsPy]) -> dict[str, Any]:
    kind = data.take("type", member_name(Optimizer_t))
    # `global_update`, a flag, is the older spelling of `update_type`, which counts where a file has both.
    arguments: dict[str, Any] = {"optimizer_type": kind, "update_type": Update_t.Local}
    if data.take("global_update", BOOL, False):
        arguments["update_type"] = Update_t.Global
    arguments["update_type"] = data.take("update_type", member_name(Update_t), arguments["update_type"])
    clause, keys = HYPERPARAMETERS[kind]
    values = data.child(clause)
    for key in (*keys, *SCHEDULE):
        # Missing keys are left to `CreateOptimizer`, which has the defaults of the release.
        if values.has(key):
            # Files up to 3.0 have the rate's keys with every optimizer: for a plain one they are validated and left
            # out.
            owner = cls if key in cls.names() else OptimizerWithSchedule
            arguments[key] = values.take(key, owner.parameter(key).type)
    values.finish()
    # A file may also hold the parameters of other kinds, which are ignored.
    data.finish([name for name, _ in HYPERPARAMETERS.values()])
    return arguments
