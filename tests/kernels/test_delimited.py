# SPDX-License-Identifier: Apache-2.0
"""The compiled parser of delimited text equals plain Python on good, damaged and random text, for any layout."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terarec.etl.columns import flat, kind_of, null_mask, numpy_values
from terarec.kernels.cpu import delimited as cpu
from terarec.kernels.cpu.delimited import DelimitedField, DelimitedLayout
from tests.kernels import plain_delimited as ref
from tests.params import examples

F = DelimitedField
WORDS = {
    "integer": [b"0", b"7", b"-1", b"1234567", b"12345678", b"-9223372036854775808", b"9223372036854775807", b"007"],
    "number": [b"1.5", b"-0", b"3e-7", b".5", b"5.", b"1e308", b"2.2250738585072011e-308", b"1e-400", b"nan", b"0.1"],
    "hex32": [b"0", b"deadBEEF", b"1a", b"00000000", b"ffffffff"],
    "text": [b"a", b"two words", b"caf\xc3\xa9", b"a longer text of more than sixteen bytes", b"1"],
    "skip": [b"x", b"", b"\xff"],
}
BAD = [b"-", b"+1", b"1.5.2", b"9223372036854775808", b"inf", b"-Infinity", b"1e999", b"1e-", b"nan(1)", b"0x10", b"g"]
BAD += [b"123456789", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"NULL", b"?", b" 1 "]
BAD += [b"1.0", b"-7.", b"-7.00", b"1.01", b"9223372036854775808.0", b'"a\nb"', b'"\r\n"', b'" 1\n"', b'""\n"']
BAD += [b'"', b'"a', b'"a"b', b'""', b'"a""b"', b' "1" ', b'"1', b"a|b||1", b"|"]


def same(text, layout):
    found, expected = cpu.parse_delimited(text, layout), ref.parse_delimited(text, layout)
    for mine, other in zip(found.columns, expected.columns, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            mine.validate(full=True)
            assert mine.null_count == other.null_count
            assert mine.equals(other)
            values = flat(mine)
            if kind_of(values) in ("integer", "hex32") and values.null_count:
                assert not numpy_values(values)[null_mask(values)].any()  # `Rows.zero_nulls`
    np.testing.assert_array_equal(found.kept, expected.kept)
    for name in ("num_lines", "num_rows", "fault_counts", "faults"):
        assert getattr(found, name) == getattr(expected, name), name
    counted = cpu.count_rows(text, layout.quoting)
    assert counted == ref.count_rows(text, layout.quoting)
    assert cpu.first_record_bytes(text, layout.quoting) == ref.first_record_bytes(text, layout.quoting)
    assert cpu.lines_of_rows(text, layout.quoting).tolist() == ref.lines_of_rows(text, layout.quoting)
    if not (found.faults and layout.policy == "raise") and "quote" not in found.fault_counts:
        assert counted[:2] == (found.num_lines, found.num_rows)
    return found


@st.composite
def layouts(draw):
    lists = st.sampled_from([b"", b"", b"", b"|", b"; "])
    fields = draw(
        st.lists(
            st.builds(F, st.sampled_from(["skip", "text", "integer", "number", "hex32"]), lists), min_size=1, max_size=6
        )
    )
    return DelimitedLayout(
        fields=tuple(fields),
        delimiter=draw(st.sampled_from([b"\t", b",", b",", b"::", b" ", b"1"])),
        quote=draw(st.booleans()),
        trim=draw(st.booleans()),
        trim_quoted=draw(st.booleans()),
        missing=draw(st.sampled_from([(), (b"?",), (b"NULL", b"-1"), (b"0",)])),
        policy=draw(st.sampled_from(["raise", "skip", "missing"])),
        max_line_bytes=draw(st.sampled_from([1 << 20, 40])),
    )


def random_field(random, field):
    if random.random() < 0.15:
        return random.choice(BAD)
    if random.random() < 0.2:
        return b""
    words = [random.choice(WORDS[field.type]) for _ in range(random.randint(1, 3) if field.separator else 1)]
    content = field.separator.join(words)
    return b'"' + content + b'"' if random.random() < 0.2 else content


def random_text(random, layout):
    lines = []
    for _ in range(random.randint(0, 8)):
        fields = [random_field(random, field) for field in layout.fields]
        if random.random() < 0.1:
            fields = fields[: random.randint(0, len(fields))] if random.random() < 0.5 else [*fields, b"7"]
        lines.append(layout.delimiter.join(fields) + random.choice([b"\n", b"\n", b"\r\n"]))
    text = b"".join(lines)
    return text if random.random() < 0.5 else text.removesuffix(b"\n")


@given(layouts(), st.integers(0, 2**32))
@settings(max_examples=examples(400))
def test_text_parses_as_in_plain_python(layout, seed):
    same(random_text(Random(seed), layout), layout)


@given(layouts(), st.integers(0, 2**32), st.binary(max_size=12), st.integers(0, 400), st.integers(0, 12))
@settings(max_examples=examples(200))
def test_damaged_text_parses_as_in_plain_python(layout, seed, patch, start, length):
    text = random_text(Random(seed), layout)
    same(text[:start] + patch + text[start + length :], layout)
    same(text[start:], layout)


@given(layouts(), st.binary(max_size=300))
@example(DelimitedLayout(fields=(F("text"),)), b"")
@example(DelimitedLayout(fields=(F("text"),)), b"\r\n\n\r")
@settings(max_examples=examples(200))
def test_random_bytes_parse_as_in_plain_python(layout, text):
    same(text, layout)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["r", ".3e", ".20g", ".30f", ".5f", ".2f"]))
def test_numbers_are_rounded_to_the_nearest(number, form):
    text = (repr(number) if form == "r" else format(number, form)).encode()
    parsed = cpu.parse_delimited(text, DelimitedLayout(fields=(F("number"),)))
    if np.isinf(float(text)):
        assert parsed.fault_counts == {"infinite": 1}
    else:
        assert parsed.columns[0].to_pylist() == [float(text)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_runs_of_columns_of_one_type(end):
    random = Random(3)
    lines = []
    for _ in range(60):
        numbers = [
            b"%d" % random.randint(-(10 ** random.randint(0, 18)), 10 ** random.randint(0, 18)) for _ in range(14)
        ]
        words = [
            random.choice([b"%08x" % random.getrandbits(32), b"%x" % random.getrandbits(20), b""]) for _ in range(26)
        ]
        lines.append(b"\t".join(numbers + words))
    text = (end or b"\n").join(lines) + end
    for types in (["integer"] * 14 + ["hex32"] * 26, ["number"] * 14 + ["text"] * 26):
        parsed = same(text, DelimitedLayout(fields=tuple(map(F, types))))
        assert parsed.num_rows == 60
        assert not parsed.faults


def test_a_dropped_line_leaves_nothing_behind():
    layout = DelimitedLayout(
        fields=(F("integer"), F("text", b"|"), F("text"), F("hex32")), delimiter=b",", policy="skip"
    )
    text = b"1,a|b,x,1\n,c|d,,zz\n\n3,e,y,2\n4,f\n5,,z,3,9\n"
    parsed = same(text, layout)
    assert parsed.kept.tolist() == [0, 2]
    assert parsed.columns[0].to_pylist() == [1, 3]
    assert parsed.columns[0].null_count == 0
    assert parsed.columns[1].to_pylist() == [["a", "b"], ["e"]]
    assert parsed.columns[2].to_pylist() == ["x", "y"]
    assert parsed.fault_counts == {"hex": 1, "short_line": 1, "long_line": 1}
    assert [(fault.line, fault.field) for fault in parsed.faults] == [(1, 3), (4, 2), (5, 5)]


def test_a_wrong_field_becomes_missing():
    layout = DelimitedLayout(fields=(F("number"), F("integer"), F("text", b"|")), delimiter=b",", policy="missing")
    parsed = same(b"x,1,a\n2,99999999999999999999,\xff|b\n3\n4,5,c,6\ninf,nan,\n", layout)
    assert parsed.kept is None
    assert parsed.columns[0].to_pylist() == [None, 2, 3, 4, None]
    assert parsed.columns[1].to_pylist() == [1, None, None, 5, None]
    assert parsed.columns[2].to_pylist() == [["a"], [], [], ["c"], []]
    assert parsed.fault_counts == {
        "number": 1, "integer_range": 1, "utf8": 1, "short_line": 1, "long_line": 1, "infinite": 1, "integer": 1
    }  # fmt: skip


def test_only_the_first_faults_are_kept():
    parsed = same(b"x" * 200 + b"\n" + b"y\n" * 30, DelimitedLayout(fields=(F("integer"),), policy="skip"))
    assert parsed.fault_counts == {"integer": 31}
    assert len(parsed.faults) == 10
    assert parsed.faults[0].text == b"x" * 80
