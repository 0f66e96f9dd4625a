# SPDX-License-Identifier: Apache-2.0
"""Workflows for public data sets, ready to run or to write out and change. Described in docs/ready-workflows.md."""

from collections.abc import Callable

from terarec.etl.ready.histories import amazon, mind, movielens, rees46
from terarec.etl.ready.published_sizes import PUBLISHED_SIZES, compare_sizes
from terarec.etl.ready.tables import adult, avazu, criteo, criteo_terabyte, csv_workflow
from terarec.spec import CsvOptions, WorkflowSpec
from terarec.spec.registry import Registry

PRESETS: Registry[Callable[..., WorkflowSpec]] = Registry(
    "workflow",
    {
        "criteo": criteo,
        "criteo-terabyte": criteo_terabyte,
        "avazu": avazu,
        "rees46": rees46,
        "mind": mind,
        "movielens": movielens,
        "adult": adult,
        "amazon": amazon,
    },
)
"""Name -> function that makes the workflow; all arguments are keywords with defaults."""

__all__ = [
    "PRESETS",
    "PUBLISHED_SIZES",
    "CsvOptions",
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
