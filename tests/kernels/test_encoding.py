"""The compiled encoding kernels against plain Python, on whatever bytes and values Hypothesis finds."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.encoding_types import LineFaultError, RefusedValueError
from terarec.kernels.ref import encoding as ref

ODD_INTEGERS = [b"", b"", b"-2147483648", b"2147483647", b"-0", b"00000000000000007", b"9999999", b"10000000", b"-1"]
ODD_CATEGORIES = [b"", b"", b"0", b"f", b"ABCDEF01", b"aB3", b"ffffffff", b"00000000"]


def random_line(random):
    """A line in the layout; drawn from a seed, since Hypothesis draws 40 fields one by one in milliseconds."""
    integers = [
        random.choice(ODD_INTEGERS) if random.random() < 0.3 else b"%d" % random.randint(-3, 10 ** random.randint(0, 8))
        for _ in range(13)
    ]
    categories = [
        random.choice(ODD_CATEGORIES) if random.random() < 0.3 else b"%08x" % random.getrandbits(32) for _ in range(26)
    ]
    return b"\t".join([random.choice([b"0", b"1"]), *integers, *categories])


LINES = st.integers(0, 2**32).map(lambda seed: random_line(Random(seed)))
BAD_FIELDS = st.one_of(
    st.binary(max_size=12).filter(lambda field: b"\n" not in field),
    st.sampled_from(
        [b"2147483648", b"-2147483649", b"-", b"+1", b"1.5", b" 1", b"123456789", b"0000000g", b"\xff" * 8]
    ),
)


def outcome(parse, block):
    """The parsed arrays, or the row and the reason of the first fault."""
    try:
        parsed = parse(block)
    except LineFaultError as fault:
        return fault.row, fault.reason
    return tuple(array.tolist() for array in (parsed.label, parsed.integers, parsed.categories, parsed.missing))


@st.composite
def blocks(draw):
    lines = draw(st.lists(LINES, max_size=8))
    ends = draw(st.sampled_from([b"\n", b"\r\n"]))
    block = b"".join(line + ends for line in lines)
    return block if draw(st.booleans()) else block.removesuffix(b"\n")


@given(blocks())
def test_lines_parse_as_in_plain_python(block):
    assert outcome(cpu.parse_criteo, block) == outcome(ref.parse_criteo, block)
    assert cpu.count_lines(block) == ref.count_lines(block)


@given(st.lists(LINES, min_size=1, max_size=8), st.integers(0, 7), st.integers(0, 39), BAD_FIELDS)
def test_a_bad_field_is_found_where_plain_python_finds_it(lines, row, column, field):
    fields = lines[row % len(lines)].split(b"\t")
    fields[column] = field
    lines[row % len(lines)] = b"\t".join(fields)
    block = b"\n".join(lines)
    assert outcome(cpu.parse_criteo, block) == outcome(ref.parse_criteo, block)


@given(blocks(), st.integers(0, 4000), st.integers(0, 4000), st.binary(max_size=20))
def test_cut_and_patched_blocks_parse_as_in_plain_python(block, start, stop, patch):
    start, stop = min(start, len(block)), min(stop, len(block))
    for damaged in (block[start:stop], block[:start] + patch + block[stop:]):
        assert outcome(cpu.parse_criteo, damaged) == outcome(ref.parse_criteo, damaged)


@given(st.binary(max_size=600))
@example(b"")
@example(b"\n")
@example(b"\r\n")
@example(b"0" + b"\t" * 39)
def test_random_bytes_parse_as_in_plain_python(block):
    assert outcome(cpu.parse_criteo, block) == outcome(ref.parse_criteo, block)


@pytest.mark.parametrize(
    ("column", "field", "reason"),
    [
        (0, b"2", "column 1 (label): got '2', expected 0 or 1"),
        (0, b"", "column 1 (label): got '', expected 0 or 1"),
        (2, b"1e3", "column 3 (I2): got '1e3', expected an integer or nothing"),
        (13, b"2147483648", "column 14 (I13): got '2147483648', expected an integer from -2147483648 to 2147483647"),
        (14, b"xyz", "column 15 (C1): got 'xyz', expected up to 8 hexadecimal digits or nothing"),
        (39, b"123456789", "column 40 (C26): got '123456789', expected up to 8 hexadecimal digits or nothing"),
    ],
)
@pytest.mark.parametrize("implementation", [cpu, ref], ids=["cpu", "ref"])
def test_a_fault_names_row_column_value_and_what_is_accepted(implementation, column, field, reason):
    good = b"\t".join([b"1"] + [b"5"] * 13 + [b"0a1b2c3d"] * 26)
    fields = good.split(b"\t")
    fields[column] = field
    with pytest.raises(LineFaultError) as caught:
        implementation.parse_criteo(good + b"\n" + good + b"\n" + b"\t".join(fields) + b"\n" + good)
    assert (caught.value.row, caught.value.reason) == (2, reason)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.integers(-5, 5).map(np.int16),
    st.floats(),
    st.text("0123456789abcdefABCDEFgé\ud800", max_size=10),
    st.sampled_from(["", "7", "a", "0000000a", "A"]),
    st.binary(max_size=3),
)


def found_list(find, values):
    try:
        return find(values).tolist()
    except RefusedValueError as refused:
        return f"row {refused.row}"


@given(st.lists(ANYTHING, max_size=8))
@settings(max_examples=200, deadline=None)
def test_lists_of_anything_are_read_as_numbers_or_refused_as_in_plain_python(values):
    numbers = [found_list(module.numbers_of_list, values) for module in (cpu, ref)]
    if isinstance(numbers[0], str):
        assert numbers[0] == numbers[1]
    else:
        np.testing.assert_array_equal(*numbers)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(-100, 20_000))
def test_logs_of_integers_equal_those_of_numpy(values, shift):
    for array in (np.array(values, dtype=np.int32), np.array(values, dtype=np.float64)):
        np.testing.assert_array_equal(cpu.log_shift(array, shift), ref.log_shift(array, shift))


@given(st.lists(st.floats(allow_infinity=False, width=32), max_size=50), st.floats(-1e6, 1e6))
def test_logs_of_numbers_equal_those_of_numpy(values, shift):
    array = np.array(values, dtype=np.float64)
    logs = cpu.log_shift(array, shift)
    # NumPy's and the C library's logarithm may differ in the last bit before they are rounded to float32.
    np.testing.assert_allclose(logs, ref.log_shift(array, shift), rtol=1.2e-7, atol=0)
    assert (logs >= 0).all()
