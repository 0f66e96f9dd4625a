import json

import pytest

from terarec.spec.json_text import TooDeepError, parse_json


def test_whatever_is_wrong_with_the_text_is_a_value_error() -> None:
    for text in ("[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(TooDeepError, match="recursion"):
            parse_json(text)
    for text in ("[1,", b"\xff", "1" * 5000):
        with pytest.raises(ValueError, match=r".") as caught:
            parse_json(text)
        assert not isinstance(caught.value, TooDeepError)


def test_it_reads_what_json_reads_with_its_hooks() -> None:
    text = '{"a": [1, 2.5, NaN], "a": null}'
    assert parse_json(text) == json.loads(text)
    assert parse_json(text, parse_constant=str, object_pairs_hook=list) == [("a", [1, 2.5, "NaN"]), ("a", None)]
