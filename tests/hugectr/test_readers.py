# SPDX-License-Identifier: Apache-2.0
"""What `DataReaderParams` makes of the order of training data, and `AsyncParam` of the layout of a file."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.readers import async_layout_of, shuffle_seed

ASYNC, RAW = hugectr.DataReaderType_t.RawAsync, hugectr.DataReaderType_t.Raw


@pytest.mark.parametrize(("kind", "shuffle", "expected"), [(ASYNC, True, 5), (ASYNC, False, None), (RAW, True, None)])
def test_only_an_asynchronous_reader_shuffles(kind, shuffle, expected):
    reader = hugectr.DataReaderParams(
        data_reader_type=kind,
        source="train.bin",
        eval_source="eval.bin",
        check_type=hugectr.Check_t.Non,
        num_samples=8,
        eval_num_samples=8,
        async_param=hugectr.AsyncParam(2, 4, shuffle=shuffle),
    )
    assert shuffle_seed(hugectr.CreateSolver(seed=5), reader) == expected
    drawn = shuffle_seed(hugectr.CreateSolver(), reader)
    assert (drawn is None) == (expected is None)


SEVEN = (32, 4, 10, 2, 4096, True, hugectr.Alignment_t.Auto)
BLOCK = (32, 4, 552960, 2, 512, True, hugectr.Alignment_t.Auto)


@pytest.mark.parametrize(
    ("given", "named", "release", "is_one_hot", "expected"),
    [
        (BLOCK, {}, (25, 3), False, (False, False)),  # a block of bytes is of 3.1 to 4.0, whatever the solver says
        (SEVEN, {}, (4, 3), False, (False, False)),
        (SEVEN, {}, (23, 2), False, (False, False)),
        (SEVEN, {}, (23, 4), False, (True, True)),
        (SEVEN, {}, (25, 3), True, (False, False)),
        ((), {"multi_hot_reader": True}, (23, 2), False, (True, False)),
        ((), {"multi_hot_reader": True}, (23, 4), False, (True, True)),
        ((), {"multi_hot_reader": True, "is_dense_float": False}, (25, 3), False, (True, False)),
        ((*SEVEN, False, False), {}, (25, 3), False, (False, False)),
        ((*SEVEN, False), {}, (25, 3), False, (False, False)),
    ],
)
def test_the_layout_of_a_file_is_that_of_the_release_where_a_call_leaves_it_open(
    given, named, release, is_one_hot, expected
):
    assert async_layout_of(hugectr.AsyncParam(*given, **named), release, is_one_hot=is_one_hot) == expected
