"""hugectr.data: where files lie."""

from terarec.hugectr.tables.data_source import DataSourceParams

__all__ = ["DataSourceParams"]
