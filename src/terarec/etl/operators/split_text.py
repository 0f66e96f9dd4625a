"""Parts of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column, ColumnType, Kind, from_arrow, offsets_of
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import HEX_DIGITS, refused
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import SplitText

_FORMS = {
    "integer": "-?[0-9]+",
    "hex32": HEX_DIGITS.pattern,
    "number": r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?",
}
_NAMES = {"integer": "a 64-bit integer", "hex32": "up to 8 hexadecimal digits", "number": "a finite number"}


class SplitTextCode(StepCode[SplitText]):
    """Code of `SplitText`."""

    accepted = ("text",)
    refuses = True

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """As told."""
        (name,) = self.spec.columns
        if self.input_type(types, name).is_list:
            raise ConfigError(f"column {name!r} holds {types[name]}, expected one text a row")
        return {output: ColumnType(kind) for output, kind in zip(self.spec.outputs, self.spec.types, strict=True)}

    def apply(self, block: Block, state: State | None) -> Block:
        """The parts.

        Raises:
            FormatError: a part is no value of its type.
        """
        (name,) = self.spec.columns
        split = pc.split_pattern(block.columns[name].values.fill_null(""), self.spec.separator)
        offsets = offsets_of(split.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        parts = split.flatten()
        made: dict[str, Column] = {}
        for place, (output, kind) in enumerate(zip(self.spec.outputs, self.spec.types, strict=True)):
            position = offsets[:-1] + place
            there = position < offsets[1:]
            part = parts.take(pa.array(np.where(there, position, 0), mask=~there))
            part = pc.if_else(pc.equal(part, ""), pa.scalar(None, part.type), part)
            made[output] = self._read(block, part, kind, place)
        return block.with_columns(made)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain texts."""
        return [PlainFunction(self.spec.columns, self.spec.outputs, self._plain)]

    def _plain(self, texts: list[str | None]) -> Sequence[Any]:
        split = [text.split(self.spec.separator) if text else () for text in texts]
        return [
            _plain_part([(parts[place] or None) if place < len(parts) else None for parts in split], kind)
            for place, kind in enumerate(self.spec.types)
        ]

    def _read(self, block: Block, part: pa.Array, kind: Kind, place: int) -> Column:
        if kind == "text":
            return Column("text", part.cast(pa.large_string()))
        well_formed = pc.fill_null(pc.match_substring_regex(part, f"^({_FORMS[kind]})$"), True)
        try:
            if pc.all(well_formed, min_count=0).as_py():
                read = _numbers(part, kind)
                if kind != "number" or np.isfinite(read.values[~part.is_null().to_numpy(zero_copy_only=False)]).all():
                    return read
        except pa.ArrowInvalid:
            pass
        pairs = zip(part.to_pylist(), well_formed.to_pylist(), strict=True)
        wrong = np.array([text is not None and not (formed and _is_held(text, kind)) for text, formed in pairs])
        raise refused(block, self.spec.columns[0], wrong, accepted_part(self.spec, place))


def accepted_part(spec: SplitText, place: int) -> str:
    """What the part at `place` is, where that is no text."""
    return f"{_NAMES[spec.types[place]]} as part {place + 1} between {spec.separator!r}"


def _plain_part(part: list[str | None], kind: Kind) -> Any:
    for row, text in enumerate(part):
        if kind == "text" or text is None:
            continue
        if not (re.fullmatch(_FORMS[kind], text) and _is_held(text, kind)):
            raise RefusedValueError(row)
    if kind == "integer":
        return [None if text is None else int(text) for text in part]
    if kind == "number":
        return np.array([np.nan if text is None else float(text) for text in part], dtype=np.float64)
    return part


def _numbers(part: pa.Array, kind: Kind) -> Column:
    if kind == "hex32":
        part = pc.binary_join_element_wise(pa.scalar("0x", part.type), part, pa.scalar("", part.type))
    return from_arrow(part, kind)


def _is_held(text: str, kind: Kind) -> bool:
    """Whether `text`, which has the form of a value of `kind`, is one."""
    if kind == "integer":
        return -(2**63) <= int(text) < 2**63
    return kind == "hex32" or bool(np.isfinite(float(text)))
