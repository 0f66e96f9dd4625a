"""Files and command line words <-> specs, with the exact path in every error."""

from terarec.config.files import load_run, read_graph, save_run, with_graph
from terarec.config.overrides import override, parse_assignments

__all__ = ["load_run", "override", "parse_assignments", "read_graph", "save_run", "with_graph"]
