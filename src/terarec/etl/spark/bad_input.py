"""What is bad in the rows, as it goes into the journal and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from terarec.errors import FormatError
from terarec.etl.engine.preparation import Result
from terarec.etl.source import FAULTS_SHOWN
from terarec.etl.source.bad_input import FATAL
from terarec.spec import BadInputPolicy


class PlacedFault(NamedTuple):
    """One thing that is wrong: position of its file among the sources, line or row there, row id, and what is told."""

    file: int
    number: int
    row: int
    told: str


class BadRows(Protocol):
    """Rows that were found bad while rows were computed."""

    def counts(self) -> Mapping[str, int]:
        """Kind -> how often it occurred."""
        ...

    def first(self) -> Sequence[PlacedFault]:
        """The first `FAULTS_SHOWN` in the order of the sources."""
        ...


def bad_input(policy: BadInputPolicy, parts: Sequence[BadRows]) -> Result:
    """What was found, as `terarec.etl.engine.fitting.bad_input_to_json` has it; of one line in the order of `parts`.

    Raises:
        FormatError: something, and the policy is "raise", or a fault that no policy passes over.
    """
    counts = sum((Counter(part.counts()) for part in parts), Counter[str]())
    found = [fault for part in parts for fault in part.first()]
    found.sort(key=lambda fault: fault[:3])
    fatal = [part for part in parts if FATAL in part.counts()]
    if fatal and policy != "raise":
        raise FormatError(fatal[0].first()[0].told)
    if found and policy == "raise":
        raise FormatError(found[0].told)
    return {"counts": dict(sorted(counts.items())), "first": [fault.told for fault in found[:FAULTS_SHOWN]]}
