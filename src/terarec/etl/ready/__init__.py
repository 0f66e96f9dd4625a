"""Workflows for public data sets, ready to run or to write out and change. Described in docs/ready-workflows.md."""

from collections.abc import Callable, Mapping

from terarec.etl.ready.adult import adult
from terarec.etl.ready.amazon import amazon
from terarec.etl.ready.avazu import avazu
from terarec.etl.ready.criteo import criteo, criteo_terabyte
from terarec.etl.ready.csv_table import CsvOptions, csv_workflow
from terarec.etl.ready.mind import mind
from terarec.etl.ready.movielens import movielens
from terarec.etl.ready.published_sizes import PUBLISHED_SIZES, PublishedSizes, SizeDifference, compare_sizes
from terarec.etl.ready.rees46 import rees46
from terarec.spec import WorkflowSpec

READY: Mapping[str, Callable[..., WorkflowSpec]] = {
    "criteo": criteo,
    "criteo-terabyte": criteo_terabyte,
    "avazu": avazu,
    "rees46": rees46,
    "mind": mind,
    "movielens": movielens,
    "adult": adult,
    "amazon": amazon,
}
"""Name -> function that makes the workflow; all arguments are keywords with defaults."""

__all__ = [
    "PUBLISHED_SIZES",
    "READY",
    "CsvOptions",
    "PublishedSizes",
    "SizeDifference",
    "adult",
    "amazon",
    "avazu",
    "compare_sizes",
    "criteo",
    "criteo_terabyte",
    "csv_workflow",
    "mind",
    "movielens",
    "rees46",
]
