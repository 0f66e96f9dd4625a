# SPDX-License-Identifier: Apache-2.0
"""Published sizes of Criteo's categories, and the differences of a data set from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terarec.errors import ConfigError
from terarec.etl.ready.tables import CATEGORY_NAMES
from terarec.spec import DatasetSpec
from terarec.spec.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSizes:
    """Numbers of values of Criteo's categories C1 to C26 in a whole data set.

    Attributes:
        publisher: Publisher and place of publication.
        rows: Rows of the data set.
        min_count: Values that occur less often are not counted.
        modulo: Values are taken modulo this first; None: as they are.
        sizes: Sizes of the columns; a missing value counts as one.
        slack: Accepted difference: others count the missing value, or reserved ids, where we do not.
    """

    publisher: str
    rows: int
    min_count: int
    sizes: tuple[int, ...]
    slack: int
    modulo: int | None = None


_SIZES: Mapping[str, PublishedSizes] = {
    "kaggle": PublishedSizes(
        publisher="DLRM of facebookresearch: the sizes of embedding tables of the Kaggle run, all rows, no threshold",
        rows=45_840_617,
        min_count=1,
        sizes=(
            *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992),
            *(5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
        ),
        slack=1,
    ),
    "terabyte": PublishedSizes(
        publisher="DLRM of facebookresearch and NVIDIA: the 24 days without a threshold",
        rows=4_373_472_329,
        min_count=1,
        sizes=(
            *(227_605_432, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 130_229_467, 3_067_956, 405_282, 10),
            *(2_209, 11_938, 155, 4, 976, 14, 292_775_614, 40_790_948, 187_188_510, 590_152, 12_973, 108, 36),
        ),
        slack=1,
    ),
    "terabyte-15": PublishedSizes(
        publisher="DLRM of NVIDIA's DeepLearningExamples: frequency threshold 15, rare values sharing one id",
        rows=4_195_197_692,
        min_count=15,
        sizes=(
            *(7_912_889, 33_823, 17_139, 7_339, 20_046, 4, 7_105, 1_382, 63, 5_554_114, 582_469, 245_828, 11, 2_209),
            *(10_667, 104, 4, 968, 15, 8_165_896, 2_675_940, 7_156_453, 302_516, 12_022, 97, 35),
        ),
        slack=2,
    ),
    "kaggle-modulo": PublishedSizes(
        publisher="HugeCTR's DLRM sample for Kaggle: slot sizes of values modulo 10 million",
        rows=45_840_617,
        min_count=1,
        sizes=(
            *(1_459, 583, 6_373_320, 1_977_439, 305, 24, 12_513, 633, 3, 92_719, 5_681, 5_666_265, 3_193, 27, 14_986),
            *(4_209_368, 10, 5_652, 2_173, 4, 5_058_596, 18, 15, 282_062, 105, 141_594),
        ),
        slack=1,
        modulo=10_000_000,
    ),
    "terabyte-modulo": PublishedSizes(
        publisher="HugeCTR's and MLPerf's DLRM for Terabyte: slot sizes of values modulo 40 million",
        rows=4_373_472_329,
        min_count=1,
        sizes=(
            *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10),
            *(2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36),
        ),
        slack=1,
        modulo=40_000_000,
    ),
}
PUBLISHED_SIZES = Registry("published sizes", _SIZES)
"""Name -> sizes. Prepare with ``criteo(min_count=..., modulo=..., split=None)`` to compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeDifference:
    """A column whose size differs from the published one by more than the tolerance.

    Attributes:
        column: Name.
        obtained: Values that have an id of their own.
        published: Size that was published; see `PublishedSizes`.
    """

    column: str
    obtained: int
    published: int

    def __str__(self) -> str:
        return f"{self.column}: {self.obtained:,} values, published are {self.published:,}"


def compare_sizes(dataset: DatasetSpec, published: str) -> tuple[SizeDifference, ...]:
    """Return the columns of a prepared Criteo data set whose sizes differ from the published ones; () if none does.

    For all rows to be training rows, as the published sizes count them, prepare with ``criteo(split=None)``, and with
    the `min_count` and `modulo` of the sizes.

    Args:
        dataset: Spec as `terarec.formats.read_dataset` gives it.
        published: Key of `PUBLISHED_SIZES`.

    Raises:
        ConfigError: Unknown sizes, or the data set's columns are not Criteo's.
    """
    expected = PUBLISHED_SIZES.find(published)
    rows = {column.name: column.rows for column in dataset.categorical}
    absent = [name for name in CATEGORY_NAMES if rows.get(name) is None]
    if absent:
        raise ConfigError(
            f"data set {dataset.name!r}", f"has no ids in column {absent[0]!r}, expected Criteo's C1 to C26"
        )
    obtained = {name: (rows[name] or 0) - _RESERVED for name in CATEGORY_NAMES}
    return tuple(
        SizeDifference(column=name, obtained=obtained[name], published=size)
        for name, size in zip(CATEGORY_NAMES, expected.sizes, strict=True)
        if abs(obtained[name] - size) > expected.slack
    )


_RESERVED = 2
"""Ids of a vocabulary that stand for no value: missing, and rare or unseen."""
