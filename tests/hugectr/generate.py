# SPDX-License-Identifier: Apache-2.0
"""Generates the compatibility page and the stubs of objects and names from the schemas.

``python -m tests.hugectr.generate page > docs/hugectr-compat.md``,
``python -m tests.hugectr.generate stub > src/terarec/hugectr/objects.pyi`` and
``python -m tests.hugectr.generate names > src/terarec/hugectr/__init__.pyi``.
"""

from __future__ import annotations

import csv
import inspect
import keyword
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from terarec import hugectr
from terarec.hugectr import enums, objects
from terarec.hugectr.layers import JsonKey, layer_formats
from terarec.hugectr.release import NEWEST, OLDEST, release_number
from terarec.hugectr.schema.record import Record
from terarec.hugectr.schema.table import REQUIRED, Form, Name, Parameter, Status, forms, names

UPSTREAM = Path(__file__).with_name("upstream.csv")
"""Results of ``tools/upstream.py``."""
# The page says which counts of a file are smaller, the table also by how much.
_UPSTREAM_NUMBERS = re.compile(r" \d+(?: to \d+)? -> \d+(?:, \d+ -> \d+)*")

_HEAD = """# HugeCTR compatibility

Scripts for HugeCTR, releases 2.3 to 25.03, run with one line changed, `import terarec.hugectr as hugectr`, or with
none: `python -m terarec.hugectr SCRIPT.py`. This page lists every name and parameter. It is generated from the schemas
that the code validates by (`python -m tests.hugectr.generate page`).

* **supported**: it has the same effect as in HugeCTR.
* **ignored**: it is validated and can be read back, but has no effect, for the reason given.
* **rejected**: any value but the default raises an error with the reason, because it would change results.

A value of another type, an unknown name and a missing value raise `WrongInputError`, in one line. The column of
releases is empty if all releases of the call have the parameter; parameters of different releases may be combined.
Positional arguments have the order of this page; those of inference are the ones of the selected release. Where a
default has changed, the older ones and the last release of each follow it: they count in a selected release."""


def page() -> str:
    """Return the compatibility page."""
    parts = [
        _HEAD,
        "## Commands",
        _names(names()["Commands"]),
        "## Objects",
        _contents(),
        *(_call(name) for name in forms()),
        *(f"## {section}\n\n{_names(rows)}" for section, rows in names().items() if section != "Commands"),
        "## Enumerations",
        "Members are also attributes of the package (`hugectr.Adam`), unless two enumerations have the same name.",
        _rows(
            ("enumeration", "members"), ([f"`{enum.__name__}`", ", ".join(enum.__members__)] for enum in enums.ENUMS)
        ),
        "## Layers in JSON",
        "The keys that `Model.graph_to_json` writes, and that `Model.construct_from_json` and training files accept, "
        "besides `type`, `bottom` and `top`. A tensor that several layers read is copied by a Slice, whose key "
        "`is_copy` tells readers to leave it out again:",
        _rows(("layer", "keys"), ([f"`{layer.name}`", _keys(found.keys)] for layer, found in layer_formats().items())),
        "## Labels of CrossEntropyLoss",
        _CROSS_ENTROPY,
        "## Upstream's own files",
        _UPSTREAM,
        *_upstream(),
    ]
    return "\n\n".join(parts) + "\n"


_CROSS_ENTROPY = """\
The loss has two classes. Labels [batch, 2], the shape that upstream documents, are one number for each class, and the
second decides: at least 1/2 is the second class. Upstream's kernel instead reads number i of the flattened labels for
sample i, so that with two labels a sample it gets those of other samples. Labels [batch, 1], one number a sample, give
the same loss in both."""

_UPSTREAM = """\
`tools/upstream.py DIR` runs the tests, samples, notebooks and documentation of a checkout of HugeCTR that need no
program for GPUs, on data generated in the layout that each file describes; with `--csv tests/hugectr/upstream.csv` it
puts the results here. Files are unchanged but for smaller counts of iterations, samples, files and keys, and smaller
batches, which "changed" stands for. Files of the Sparse Operation Kit and of `hps_tf` (4.3 to 24.06) need
`terarec[tensorflow]` and tf_keras; tests of the former that upstream starts on several processes run on one and on two
of mpirun, of which not all were tried. Two tests that compare with scores of a model that upstream does not publish get
a model with these scores. "Not run": what needs a GPU, a cluster, or data that upstream does not publish, what was not
tried, and mistakes of upstream's own; of a notebook, the cells that are not run. Training tests end by comparing their
AUC with that of upstream's data after all iterations; where fewer iterations on generated data stay below it, the row
says so."""


def _upstream() -> Iterator[str]:
    """Yield the sums of each checkout by group of files, and the rows of files that were not run as they are."""
    with UPSTREAM.open(newline="") as file:
        results = list(csv.DictReader(file))
    outcomes = ("unchanged", "changed", "failed", "not run")
    sums = Counter((row["checkout"], row["group"], row["outcome"]) for row in results)
    groups = dict.fromkeys((row["checkout"], row["group"]) for row in results)
    yield _rows(
        ("checkout", "files", *outcomes),
        ([*group, *(str(sums[*group, outcome] or "") for outcome in outcomes)] for group in groups),
    )
    yield _rows(
        ("checkout", "file", "outcome", "what"),
        (
            [row["checkout"], f"`{row['file']}`", row["outcome"], _UPSTREAM_NUMBERS.sub("", row["detail"])]
            for row in results
            if row["outcome"] != "unchanged"
        ),
    )


def _contents() -> str:
    links = (f"[{name}](#{name.lower().replace('.', '')})" for name in forms())
    return "\n".join(textwrap.wrap(", ".join(links) + ".", 120, break_long_words=False, break_on_hyphens=False))


def _call(name: str) -> str:
    parts = [f"### {name}"]
    if len(forms()[name]) > 1:
        parts.append(f"{len(forms()[name])} forms, by release or by arguments.")
    newest, *older = forms()[name]
    return "\n\n".join([*parts, _form(newest), *(_form(form, newest) for form in older)])


def _form(form: Form, newest: Form | None = None) -> str:
    """Return the table of a form; of an older one, only the parameters that differ from the newest form's."""
    text, parameters = _sentence(form.meaning), form.parameters
    if newest is not None:
        described = {one.name: _parameter_row(one) for one in newest.parameters}
        parameters = tuple(one for one in parameters if described.get(one.name) != _parameter_row(one))
        if len(parameters) < len(form.parameters):
            order = ", ".join(f"`{one.name}`" for one in form.parameters)
            text += f" Its parameters are {order}"
            text += ", as above." if not parameters else "; as above, but for:"
            text = "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))
    if not parameters:
        return text
    head = ("parameter", "default", "releases", "status", "meaning")
    return f"{text}\n\n{_rows(head, map(_parameter_row, parameters))}"


def _parameter_row(one: Parameter) -> list[str]:
    default = _default(one.default)
    for until, value in reversed(one.earlier_defaults):
        default += f"; {_default(value)} up to {until}"
    return [_title(one), default, _releases(one), _status(one), one.meaning]


def _names(rows: Iterable[Name]) -> str:
    return _rows(
        ("name", "releases", "status", "meaning"),
        ([f"`{row.name}`", _releases(row), _status(row), row.meaning] for row in rows),
    )


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _title(row: Parameter) -> str:
    return ", ".join(f"`{name}`" for name in (row.name, *row.aliases))


def _default(value: Any) -> str:
    if value is REQUIRED:
        return ""
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key.name}: {item}" for key, item in value.items()) + "}`"
    return f"`{value!r}`" if isinstance(value, bool | int | float | str | list | None) else f"`{type(value).__name__}`"


def _releases(row: Parameter | Name) -> str:
    if (row.since, row.until) == (OLDEST, NEWEST):
        return ""
    if row.until == NEWEST:
        return f"{row.since} on"
    return row.since if row.since == row.until else f"{row.since} to {row.until}"


def _status(row: Parameter | Name) -> str:
    if row.status is Status.SUPPORTED:
        return "supported"
    return f"{row.status.value}: {row.why}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _keys(keys: Iterable[JsonKey]) -> str:
    return ", ".join(f"`{'.'.join(key.path)}`" for key in keys)


_STUB_HEAD = """# SPDX-License-Identifier: Apache-2.0
# Generated by python -m tests.hugectr.generate stub
# ruff: noqa: A002
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal, overload

from terarec.hugectr.enums import (
{enums}
)
from terarec.hugectr.schema.record import Record
"""


def stub() -> str:
    """Return the stubs of `terarec.hugectr.objects`: every attribute, and every form of a call as an overload."""
    things = vars(objects).values()
    classes = [thing for thing in things if getattr(thing, "__module__", "") == objects.__name__]
    body = "\n".join(line for cls in classes for line in (_record if issubclass(cls, Record) else _plain_class)(cls))
    words = set(re.findall(r"\w+", body))
    used = sorted((enum.__name__ for enum in enums.ENUMS if enum.__name__ in words), key=str.lower)
    return (_STUB_HEAD.format(enums="\n".join(f"    {name}," for name in used)) + "\n" + body).replace("'", '"')


def _plain_class(cls: type) -> Iterator[str]:
    yield f"class {cls.__name__}:"
    for name, method in vars(cls).items():
        if inspect.isfunction(method):
            signature = str(inspect.signature(method)).replace("'", "")
            yield f"    def {name}{signature}: ..."
    yield ""


def _record(cls: type[Record]) -> Iterator[str]:
    own, inherited = _attributes(cls), _attributes(cls.__bases__[0])
    yield f"class {cls.__name__}({cls.__bases__[0].__name__}):"
    for name, annotation in own.items():
        if name not in inherited:
            yield f"    {name}: {annotation if cls.is_writable else f'Final[{annotation}]'}"
    signatures = [signature for form in forms()[cls.CALL] for signature in _signatures(form)]
    for signature in dict.fromkeys(signatures):
        if len(set(signatures)) > 1:
            yield "    @overload"
        yield signature
    yield ""


def _attributes(cls: type) -> dict[str, str]:
    """Return attribute -> annotation, by the newest form that has it."""
    if not (issubclass(cls, Record) and cls.CALL):
        return {}
    versions = [form for base in cls.__mro__ if issubclass(base, Record) and base.CALL for form in forms()[base.CALL]]
    return {
        one.name: one.type.kept
        for form in reversed(versions)
        for one in form.parameters
        if not keyword.iskeyword(one.name)
    }


def _signatures(form: Form) -> Iterator[str]:
    """Yield the signature of a form; two if required parameters follow optional ones, by position and by name."""
    shown = [one for one in form.parameters if not keyword.iskeyword(one.name)]
    positional = [one for one in form.positional(release_number(form.until)) if one in shown]
    last = max((place for place, one in enumerate(positional) if one.default is REQUIRED), default=-1)
    first = next((place for place, one in enumerate(positional) if one.default is not REQUIRED), len(positional))
    named = [_argument(one) for one in shown if one not in positional]
    named += [_argument(one, alias) for one in shown for alias in one.aliases]
    if len(shown) < len(form.parameters):
        named.append("**keywords: float")
    required = [_argument(one, is_required=True) for one in positional[: last + 1]]
    yield _definition([*required, *map(_argument, positional[last + 1 :])], named)
    if first < last:
        yield _definition([*map(_argument, positional[:first])], [*map(_argument, positional[first:]), *named])


def _argument(one: Parameter, name: str = "", *, is_required: bool = False) -> str:
    spelled = f"{name or one.name}: {one.type.argument}"
    if one.default is REQUIRED or is_required:
        return spelled
    if isinstance(one.default, Enum):
        return f"{spelled} = {one.default}"
    is_plain = isinstance(one.default, bool | int | float | str | None)
    return f"{spelled} = {one.default!r}" if is_plain else f"{spelled} = ..."


def _definition(positional: Sequence[str], named: Sequence[str]) -> str:
    has_star = named and not named[0].startswith("**")
    arguments = ["self", *positional, *(["*"] if has_star else []), *named]
    line = f"    def __init__({', '.join(arguments)}) -> None: ..."
    if len(line) <= 120:
        return line
    inner = f"        {', '.join(arguments)}"
    if len(inner) <= 120:
        return f"    def __init__(\n{inner}\n    ) -> None: ..."
    return "    def __init__(\n" + "\n".join(f"        {one}," for one in arguments) + "\n    ) -> None: ..."


_NAMES_HEAD = """# SPDX-License-Identifier: Apache-2.0
# Generated by python -m tests.hugectr.generate names
# ruff: noqa: I001, RUF022
from typing import Final
"""


def names_stub() -> str:
    """Return the stubs of the package: each of its names where it is defined, and the members of its enumerations."""
    imports: dict[str, set[str]] = {}
    synonyms = []
    public = {*hugectr.__all__, *hugectr._ON_USE}
    for name in sorted(public):
        value = getattr(hugectr, name)
        is_module = isinstance(value, ModuleType)
        owner, own_name = (hugectr.__name__, name) if is_module else (value.__module__, value.__qualname__)
        # A stub exports an imported name only with `as` and the name itself; others need an assignment.
        imports.setdefault(owner, set()).add(
            f"    {own_name} as {own_name},\n" if own_name in public else f"    {own_name},\n"
        )
        if own_name != name:
            synonyms.append(f"{name} = {own_name}\n")
    parts = [_NAMES_HEAD]
    parts += [f"from {owner} import (\n{''.join(sorted(lines))})\n" for owner, lines in sorted(imports.items())]
    parts += ["\n__version__: Final[str]\n", *synonyms]
    for enum in enums.ENUMS:
        for member in enum.__members__:
            # A name that two enumerations have is an error at run time, so no checker may find it.
            if len(enums.owners_of(member)) == 1:
                parts.append(f"{member}: Final = {enum.__name__}.{member}\n")
    listed = "".join(f'    "{name}",\n' for name in hugectr.__all__)
    return "".join([*parts, f"\n__all__ = [\n{listed}]\n"])


if __name__ == "__main__":
    print({"page": page, "stub": stub, "names": names_stub}[sys.argv[1]](), end="")
