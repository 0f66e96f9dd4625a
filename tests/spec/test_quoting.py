# SPDX-License-Identifier: Apache-2.0
"""Input that errors quote: cut to a stated bound, on one line, at no cost that grows with the input."""

from collections.abc import Callable

import pytest

from terarec.errors import ConfigError
from terarec.spec import ServingSpec, from_data
from terarec.spec.checks import MESSAGE_CHARACTERS, QUOTED_CHARACTERS, one_line, quoted, shortened


def make_deep() -> object:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


LARGE: dict[str, Callable[[], object]] = {
    "text": lambda: "x" * 10**6,
    "bytes": lambda: b"x" * 10**6,
    "list": lambda: [0] * 10**6,
    "object": lambda: {"a": [1] * 10**6},
    "integer": lambda: 10**5000,
    "deep": make_deep,
    "lines": lambda: "\n" * 99,
}


@pytest.mark.parametrize("case", LARGE)
def test_s3_a_quotation_is_short_and_on_one_line(case: str) -> None:
    value = LARGE[case]()
    for is_json in (False, True):
        text = quoted(value, is_json=is_json)
        assert len(text) <= QUOTED_CHARACTERS
        assert text.isprintable()


@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "it's", b"a\n", [], [1, "a"], (), (1,), (1, 2), {}, {"a": [None, {"b": 2}]}]
)
def test_s3_a_short_value_is_spelled_as_python_spells_it(value: object) -> None:
    assert quoted(value) == repr(value)


def test_s3_json_uses_its_own_names() -> None:
    assert quoted([None, True, (1,), {"a": False}], is_json=True) == "[null, true, [1], {'a': false}]"


def test_s3_a_message_is_cut_and_its_control_characters_are_escaped() -> None:
    assert one_line("a\n\x1b[31mb\x00\x85\u2028c \u00fc") == "a\\n\\x1b[31mb\\x00\\x85\\u2028c \u00fc"
    assert len(one_line("\n" * 10**6)) == MESSAGE_CHARACTERS
    assert shortened("abcdef", 5) == "ab..."


SPECS: dict[str, dict[str, object]] = {
    "value": {"max_batch": 0, "name": "x" * 10**6},
    "name": {"name": "/" * 10**6},
    "type": {"name": make_deep()},
    "field": {"n" * 10**6: 1},
    "number": {"max_batch": -(10**4000)},
    "text": {"max_batch": "\x1b[2J" * 10**5},
}


@pytest.mark.parametrize("case", SPECS)
def test_s3_errors_of_specs_are_short(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_data(ServingSpec, SPECS[case], where="$")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
