# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, and options that are fields of a spec.

The meaning, accepted words and default of a field are in the spec alone: `spec_option`, `SpecFields` and `Settings`
read them from there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import typer

from terarec.errors import ConfigError
from terarec.spec import Numbers, RunSpec, TrainingSpec
from terarec.spec.checks import is_count, quoted
from terarec.spec.codec import documentation_of, hints_of, kinds_of, members, present, specs_of, words_of

_MOST_KINDS = 3
"""Kinds of models that a line of help names."""


@dataclass(frozen=True, kw_only=True)
class SpecField:
    """A field of a spec as an option of a command.

    Attributes:
        hint: Type of the field.
        meaning: First sentence of its documentation.
        default: Its default value.
    """

    hint: Any
    meaning: str
    default: Any

    @classmethod
    def at(cls, spec_type: type, path: str) -> SpecField:
        """Find the field at a dotted path, such as "model.width": in all kinds of models that have it."""
        *groups, leaf = path.split(".")
        owners, holder = [spec_type], ""
        for group in groups:
            holder = next(documentation_of(owner).get(group, "") for owner in owners)
            hints = [hints_of(owner)[group] for owner in owners if _field(owner, group)]
            owners = list(dict.fromkeys(spec for hint in hints for spec in specs_of(hint)))
        # Kinds are class variables and no fields: the field above them has the documentation.
        if leaf == "kind":
            return cls(hint=kinds_of(typing.Union[tuple(owners)]), meaning=_sentence(holder), default=None)  # noqa: UP007
        having = [owner for owner in owners if _field(owner, leaf)]
        leaf_field = _field(having[0], leaf)
        assert leaf_field is not None
        meaning = _sentence(documentation_of(having[0]).get(leaf, ""))
        if len(having) < len(owners) and len(having) <= _MOST_KINDS:
            # Most models share most fields; a line names the models of the others alone.
            meaning = f"{meaning.rstrip('.')} ({', '.join(owner.kind for owner in having)})."  # type: ignore[attr-defined]
        # The first class stands for all: options of several models are left to the spec where they are not given.
        default = (
            leaf_field.default if leaf_field.default_factory is dataclasses.MISSING else leaf_field.default_factory()
        )
        return cls(hint=hints_of(having[0])[leaf], meaning=meaning, default=default)

    @property
    def type(self) -> type:
        """The Python type of the option: numbers and flags are checked where the option is read, all else later."""
        # A dict has the kinds of a union.
        hint = present(self.hint) if not isinstance(self.hint, dict) else str
        return hint if hint in (int, float, bool) and float | str != self.hint else str

    @property
    def is_repeatable(self) -> bool:
        """True for a field of several texts, or of values by name."""
        return typing.get_origin(present(self.hint)) in (tuple, Mapping) and not self.is_sizes

    @property
    def annotation(self) -> Any:
        """Type of the option, with None where the field may be None."""
        if self.is_repeatable:
            return list[str] | None
        if self.is_sizes:
            return str | None
        return self.type | None if type(None) in members(self.hint) else self.type

    @property
    def parameter_default(self) -> Any:
        """Default of the option; that of several values is left to the spec."""
        if self.default is dataclasses.MISSING:
            return inspect.Parameter.empty
        return None if self.is_repeatable or self.is_sizes else self.default

    def parse(self, option: str, texts: Sequence[str]) -> tuple[str, ...] | dict[str, Any]:
        """Return the values of a repeatable option.

        Raises:
            ConfigError: No ``NAME=VALUE`` or, where the values are integers, another value.
        """
        if typing.get_origin(present(self.hint)) is tuple:
            return comma_separated(texts)
        if typing.get_args(present(self.hint))[1] is not int:
            return distinct_pairs(option, texts, "NAME=VALUE")  # whole: a value may have commas
        return numbers_by_name(option, comma_separated(texts), "NAME=N")

    @property
    def is_sizes(self) -> bool:
        """True for a field of several numbers, which an option joins by hyphens."""
        return typing.get_origin(present(self.hint)) is tuple and typing.get_args(present(self.hint))[0] is int

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value in the help."""
        if isinstance(self.hint, dict):
            return "|".join(self.hint)
        if words := words_of(self.hint):
            return "|".join(map(str, words))
        if self.is_sizes:
            return "N-N-..."
        if typing.get_origin(present(self.hint)) is tuple:
            return "A,B,..."
        if typing.get_origin(present(self.hint)) is Mapping:
            return "A=N,..." if typing.get_args(present(self.hint))[1] is int else "NAME=VALUE"
        return None


def repeatable(summary: str) -> str:
    """Return the help of an option that may be given several times."""
    return f"{summary.rstrip('.')}; repeatable."


def _field(spec_type: type, name: str) -> dataclasses.Field[Any] | None:
    return next((field for field in dataclasses.fields(spec_type) if field.name == name), None)


def _sentence(text: str) -> str:
    """Return the first sentence, without the marks of code."""
    first = re.split(r"(?<=\.) (?=[A-Z\"])", text)[0].replace("`", "").removeprefix("Whether to ")
    # On the command line None is an option that is not given.
    unset = re.sub(r"\bNone for\b", "if unset,", first[:1].upper() + first[1:])
    return re.sub(r"\bNone\b", "none", unset)


def spec_option(
    name: str,
    spec_type: type,
    path: str,
    *,
    metavar: str | None = None,
    summary: str | None = None,
    is_plain: bool = False,
) -> Any:
    """Declare the option ``--name`` for the field at `path` of `spec_type`.

    Args:
        name: Name of the option, with underscores.
        spec_type: Class of the spec.
        path: Dotted path of the field.
        metavar: Placeholder of the value in the help; None for that of the field's type.
        summary: Help; None for the first sentence of the field's documentation.
        is_plain: Whether a flag has no negative form, as its default is False.
    """
    field = SpecField.at(spec_type, path)
    flag = f"--{name.replace('_', '-')}"
    # Without a negative form, a setting of a configuration file could not be taken back.
    words = f"{flag}/--no-{flag[2:]}" if field.type is bool and not is_plain else flag
    shown = ",".join(field.default) if field.is_repeatable and isinstance(field.default, tuple) else ""
    return typer.Option(
        words, metavar=metavar or field.metavar, help=summary or field.meaning, show_default=shown.strip(",") or True
    )


class OptionGroup(Protocol):
    """Marks a field of a command's options that expands to several options: ``Annotated[type, group]``."""

    def parameters(self, hint: Any) -> list[inspect.Parameter]:
        """Return the options of a field of the type `hint`."""

    def value(self, hint: Any, values: Mapping[str, Any]) -> object:
        """Return the field's value for the values of the options."""


class SpecFields:
    """A spec whose fields are options, with its own defaults and checks.

    A list is an option ``A,B,...`` that may be repeated, a mapping a repeatable ``NAME=VALUE``.

    Args:
        names: Fields whose options have their names.
        others: Option -> field, where the names differ.
    """

    def __init__(self, *names: str, **others: str) -> None:
        self._options = {**{name: name for name in names}, **{field: option for option, field in others.items()}}

    def parameters(self, hint: Any) -> list[inspect.Parameter]:
        """Return an option for each field; see `OptionGroup`."""
        # Parameters have the names of fields, so that an error in a field finds the option that set it.
        fields = {name: SpecField.at(hint, name) for name in self._options}
        return [
            _parameter(
                name,
                field.parameter_default,
                Annotated[
                    field.annotation,
                    spec_option(
                        option,
                        hint,
                        name,
                        summary=repeatable(field.meaning) if field.is_repeatable else None,
                        is_plain=True,
                    ),
                ],
            )
            for (name, option), field in zip(self._options.items(), fields.values(), strict=True)
        ]

    def value(self, hint: Any, values: Mapping[str, Any]) -> object:
        """Build the spec."""
        data: dict[str, Any] = {}
        for name, value in values.items():
            field = SpecField.at(hint, name)
            option = f"--{self._options[name].replace('_', '-')}"
            if field.is_sizes:
                if value is not None:
                    data[name] = _sizes(option, value)
            elif not field.is_repeatable:
                data[name] = value
            elif value is not None:
                data[name] = field.parse(option, value)
        return hint(**data)


def _sizes(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,18}(-[0-9]{1,18})*", text):
        raise ConfigError(option, f"got {quoted(text)}, expected numbers such as 16 or 16-64")
    return tuple(map(int, text.split("-")))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option that sets a field: its dotted path, and help that the spec does not have."""

    path: str
    metavar: str | None = None
    summary: str | None = None


class Settings:
    """Options that set fields of a spec where they are given: their value is a mapping of dotted paths to texts."""

    def __init__(self, spec_type: type, settings: Mapping[str, Setting]) -> None:
        self._spec_type = spec_type
        self._settings = settings

    def parameters(self, hint: Any) -> list[inspect.Parameter]:
        """Return an option for each setting; see `OptionGroup`."""
        del hint
        return [
            _parameter(
                name,
                None,
                Annotated[
                    SpecField.at(self._spec_type, setting.path).type | None,
                    spec_option(name, self._spec_type, setting.path, metavar=setting.metavar, summary=setting.summary),
                ],
            )
            for name, setting in self._settings.items()
        ]

    def value(self, hint: Any, values: Mapping[str, Any]) -> object:
        """Return the texts of the options that are given."""
        del hint
        # As texts, so that an option and ``--set PATH=VALUE`` are read and rejected by the same code.
        return {self._settings[name].path: str(value) for name, value in values.items() if value is not None}


def _parameter(name: str, default: object, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def comma_separated(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the values of an option ``A,B,...`` that may be repeated."""
    return tuple(word.strip() for text in texts or () if text for word in text.split(","))


def pairs(option: str, texts: Sequence[str], expected: str, *, last: bool = False) -> list[tuple[str, str]]:
    """Split texts such as ``NAME=VALUE``.

    Args:
        option: Option that has them, for the error.
        texts: The texts.
        expected: Their form, for the error.
        last: Whether the last equals sign separates, for names that may have one; otherwise the first.
    """
    split_texts = []
    for text in texts:
        name, sign, value = text.rpartition("=") if last else text.partition("=")
        if not name or not sign or not value:
            raise ConfigError(option, f"got {text!r}, expected {expected}")
        split_texts.append((name, value))
    return split_texts


def check_unset(is_set: Mapping[str, bool], purpose: str) -> None:
    """Reject options that do not apply to the command's input.

    Args:
        is_set: Option -> whether it is given.
        purpose: End of the message, such as ``"for raw files"``.
    """
    for option, is_given in is_set.items():
        if is_given:
            raise ConfigError(option, f"has no meaning {purpose}")


def changed(options: object, *names: str) -> dict[str, bool]:
    """Return option -> whether its value is not the default, for some fields of options or of a spec."""
    assert dataclasses.is_dataclass(options)
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {f"--{name.replace('_', '-')}": getattr(options, name) != defaults[name] for name in names}


def numbers_by_name(option: str, texts: Sequence[str], expected: str) -> dict[str, int]:
    """Split texts such as ``NAME=N``, each of another name; see `pairs`."""
    numbers = distinct_pairs(option, texts, expected, last=True)
    for name, count in numbers.items():
        if not is_count(count):
            raise ConfigError(option, f"got '{name}={count}', expected {expected}")
    return {name: int(count) for name, count in numbers.items()}


def distinct_pairs(option: str, texts: Sequence[str], expected: str, *, last: bool = False) -> dict[str, str]:
    """Split texts such as ``NAME=VALUE``, each of another name; see `pairs`."""
    values: dict[str, str] = {}
    for name, value in pairs(option, texts, expected, last=last):
        if name in values:
            raise ConfigError(option, f"got {name!r} twice, expected it once")
        values[name] = value
    return values


AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import", metavar="PACKAGE", help="A package whose code the workflow or the model may name; repeatable."
    ),
]
"""Code of other packages is rejected when a workflow is read, or a model is built."""

Force = Annotated[bool, typer.Option("--force", help="Replace an existing file at --out.")]
"""Without it nothing that exists is replaced."""

NumbersOption = Annotated[Numbers, SpecFields("row_type", "precision")]
"""The options ``--row-type`` and ``--precision`` of what scores with a trained model."""
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="STEP|best|last",
        help="Checkpoint of RUN; the last one, or the best one of a run with training.patience.",
    ),
]
DEVICES = "auto|cpu|cuda|cuda:N"
DeviceOption = Annotated[str | None, spec_option("device", TrainingSpec, "device", metavar=DEVICES)]
"""Checked by the spec, or by `terarec.train.devices.resolve_device`."""
TiersOption = Annotated[
    str | None, spec_option("tiers", RunSpec, "model.tables.tiers", metavar="device=SIZE,host=SIZE,file=DIR")
]
ShareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--share",
        metavar="OWNER=COLUMN",
        help="Let COLUMN look up the tables of OWNER, a column of the same ids, e.g. item=history; repeatable.",
    ),
]
