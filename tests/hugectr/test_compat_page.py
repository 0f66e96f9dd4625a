"""docs/hugectr-compat.md is what the tables say, and the names that it lists are there."""

from pathlib import Path

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.compat_page import page
from terarec.hugectr.errors import IllegalCallError
from terarec.hugectr.tables import names
from terarec.hugectr.tables.solver import RELEASES
from terarec.hugectr.tables.table import Status

PAGE = Path(__file__).parents[2] / "docs" / "hugectr-compat.md"


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text() == page(), "run: python -m terarec.hugectr.compat_page > docs/hugectr-compat.md"


def found(name):
    thing = hugectr
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


IN_PYTHON = [row for row in names.NAMES if row not in names.COMMANDS]


@pytest.mark.parametrize("row", IN_PYTHON, ids=lambda row: row.name)
def test_names_are_there_or_refused(row):
    assert RELEASES.index(row.since) <= RELEASES.index(row.until)
    assert bool(row.why) == (row.status is not Status.SUPPORTED)
    if row.status is not Status.REFUSED:
        assert found(row.name).__doc__
    elif row.name.startswith("Model."):
        with pytest.raises(IllegalCallError):
            found(row.name)(None)
    elif row.name != "inference":
        with pytest.raises(AttributeError, match=row.why if "." not in row.name else row.name.rpartition(".")[2]):
            found(row.name)


def test_serving_says_that_it_comes_later():
    with pytest.raises(IllegalCallError, match=r"CreateInferenceSession: serving .* `terarec serve`"):
        from terarec.hugectr.inference import CreateInferenceSession  # noqa: F401
