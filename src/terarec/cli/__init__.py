"""The command line: one file per command, each parse -> spec -> one call -> show."""

from terarec.cli.entry import main

__all__ = ["main"]
