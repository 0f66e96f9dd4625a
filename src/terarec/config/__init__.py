"""Specs from files and command line words and back, with the exact path in every error."""

from terarec.config.files import (
    CHECKPOINT_DIRECTORY,
    DATASET_DIRECTORY,
    RUN_FILE,
    commented_json,
    load_run,
    load_served_tables,
    load_update_stream,
    override,
    parse_assignments,
    read_graph,
    save_run,
    with_graph,
)
from terarec.config.starting_run import StartingRun, starting_run

__all__ = [
    "CHECKPOINT_DIRECTORY",
    "DATASET_DIRECTORY",
    "RUN_FILE",
    "StartingRun",
    "commented_json",
    "load_run",
    "load_served_tables",
    "load_update_stream",
    "override",
    "parse_assignments",
    "read_graph",
    "save_run",
    "starting_run",
    "with_graph",
]
