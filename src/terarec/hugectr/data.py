"""hugectr.data: where files lie."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from terarec.hugectr.tables.data_source import DataSourceParams

if TYPE_CHECKING:
    from terarec.hugectr.data_source import DataSource

__all__ = ["DataSource", "DataSourceParams"]


def __getattr__(name: str) -> Any:
    if name == "DataSource":  # which loads what reads files when a script first names it
        return importlib.import_module("terarec.hugectr.data_source").DataSource
    raise AttributeError(f"hugectr.data has no {name!r}; it has {', '.join(__all__)}")
