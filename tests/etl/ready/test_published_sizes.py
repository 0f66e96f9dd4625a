# SPDX-License-Identifier: Apache-2.0
"""Published sizes: of the right columns, and a data set is compared with them column by column."""

import dataclasses
import math

import pytest

from terarec.errors import ConfigError
from terarec.etl.ready import PUBLISHED_SIZES, compare_sizes
from terarec.etl.ready.published_sizes import SizeDifference
from terarec.spec import CategoricalColumn, DatasetSpec, LabelColumn
from tests.errors import at


def data_set(sizes: tuple[int, ...]) -> DatasetSpec:
    """A prepared Criteo data set: two ids a column are reserved."""
    return DatasetSpec(
        name="criteo",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(),
        categorical=tuple(CategoricalColumn(name=f"C{n}", rows=size + 2) for n, size in enumerate(sizes, 1)),
    )


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_equal_sizes_differ_nowhere(name: str) -> None:
    sizes = PUBLISHED_SIZES[name].sizes
    assert len(sizes) == 26
    assert compare_sizes(data_set(sizes), name) == ()


def test_sums_are_those_that_are_reported_with_the_lists() -> None:
    assert sum(PUBLISHED_SIZES["kaggle"].sizes) == 33_762_577
    assert sum(PUBLISHED_SIZES["terabyte"].sizes) == 882_774_559


@pytest.mark.parametrize(("whole", "merged"), [("kaggle", "kaggle-modulo"), ("terabyte", "terabyte-modulo")])
def test_values_modulo_a_number_are_as_many_as_chance_makes_them(whole: str, merged: str) -> None:
    modulo = PUBLISHED_SIZES[merged].modulo
    assert modulo is not None
    for values, found in zip(PUBLISHED_SIZES[whole].sizes, PUBLISHED_SIZES[merged].sizes, strict=True):
        assert found == pytest.approx(modulo * -math.expm1(-values / modulo), rel=0.003, abs=3)


def test_a_column_beyond_the_slack_is_reported() -> None:
    sizes = list(PUBLISHED_SIZES["kaggle"].sizes)
    sizes[0] -= 1  # the missing value counts as one there
    sizes[5] += 2
    sizes[25] = 0
    differences = compare_sizes(data_set(tuple(sizes)), "kaggle")
    assert differences == (
        SizeDifference(column="C6", obtained=26, published=24),
        SizeDifference(column="C26", obtained=0, published=142_572),
    )
    assert str(differences[1]) == "C26: 0 values, published are 142,572"


def test_unknown_names_and_other_data_sets_are_rejected() -> None:
    whole = data_set(PUBLISHED_SIZES["kaggle"].sizes)
    with pytest.raises(ConfigError, check=at("published sizes")):
        compare_sizes(whole, "avazu")
    short = dataclasses.replace(whole, categorical=whole.categorical[:-1])
    with pytest.raises(ConfigError, check=at("data set 'criteo'")):
        compare_sizes(short, "kaggle")
