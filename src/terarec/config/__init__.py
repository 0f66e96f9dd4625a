"""Files and command line words <-> specs, with the exact path in every error."""

from terarec.config.files import load_run, save_run
from terarec.config.overrides import override, parse_assignments

__all__ = ["load_run", "override", "parse_assignments", "save_run"]
