"""docs/hugectr-compat.md is generated from the schemas, and the names that it lists are there."""

from pathlib import Path

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import IllegalCallError
from terarec.hugectr.schema.generate import page
from terarec.hugectr.schema.table import Status, names
from terarec.hugectr.schema.types import RELEASES

PAGE = Path(__file__).parents[2] / "docs" / "hugectr-compat.md"


def test_the_page_is_what_the_schemas_say():
    assert PAGE.read_text() == page(), "run: python -m terarec.hugectr.schema.generate page > docs/hugectr-compat.md"


def found(name):
    thing = hugectr
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("section", [section for section in names() if section != "Commands"])
def test_names_exist_or_are_rejected(section):
    for row in names()[section]:
        assert RELEASES.index(row.since) <= RELEASES.index(row.until)
        assert bool(row.why) == (row.status is not Status.SUPPORTED)
        if row.status is not Status.REJECTED:
            assert found(row.name).__doc__, row.name
        elif row.name.startswith("Model."):
            with pytest.raises(IllegalCallError):
                found(row.name)(None)
        elif row.name != "inference":
            with pytest.raises(AttributeError, match=row.why if "." not in row.name else row.name.rpartition(".")[2]):
                found(row.name)


def test_serving_says_that_it_comes_later():
    with pytest.raises(IllegalCallError, match=r"CreateInferenceSession: serving .* `terarec serve`"):
        from terarec.hugectr.inference import CreateInferenceSession  # noqa: F401
