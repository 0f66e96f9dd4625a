"""Side tables, which every engine reads in one way, and what is bad in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from terarec.errors import ConfigError
from terarec.etl.engine.phases import Result
from terarec.etl.ops import Statistic
from terarec.etl.source import FAULTS_SHOWN, BadInputReport, open_source
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions


def check_tables(workflow: Workflow, options: PrepareOptions) -> None:
    """Raise unless `workflow` joins every side table that `options` name files for.

    Raises:
        ConfigError: it does not join one.
    """
    for name in options.tables:
        if name not in workflow.spec.tables:
            known = ", ".join(map(repr, workflow.spec.tables)) or "no table"
            raise ConfigError(f"side table {name!r}: the workflow joins none of this name, expected {known}")


def observe_table(workflow: Workflow, name: str, options: PrepareOptions, statistic: Statistic) -> Result:
    """Show the rows of the side table `name` to `statistic`.

    Returns:
        "bad_table": its name and what is bad in it, for `bad_input` to find among the results of phases.

    Raises:
        ConfigError: `options` name no file for it.
        DataNotFoundError: there is no such file.
        FormatError: bad input, under the policy "raise".
    """
    if name not in options.tables:
        raise ConfigError(f"side table {name!r}: no file, expected --table {name}=PATH")
    source = open_source(workflow.spec.tables[name], options.tables[name], options.bad_input, options.threads)
    for block in source.blocks():
        statistic.merge(statistic.observe(block))
    return {"bad_table": {"table": name, **told(source.bad_input)}}


def told(found: BadInputReport) -> Result:
    """Bad input as it goes into the journal: "counts" of each kind, and the "first" faults, each in one line."""
    return {"counts": dict(found.counts), "first": [str(fault) for fault in found.first]}


def bad_input(rows: Result, phases: Iterable[Result]) -> Result:
    """What is bad in the rows and, before them, in the side tables, as `told` tells of each.

    Args:
        rows: of the sources.
        phases: results of all phases. Steps that join the same table read it alike: it counts once.
    """
    tables = {phase["bad_table"]["table"]: phase["bad_table"] for phase in phases if "bad_table" in phase}
    parts = [*tables.values(), rows]
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    first = [line for part in parts for line in part["first"]]
    return {"counts": dict(sorted(counts.items())), "first": first[:FAULTS_SHOWN]}
