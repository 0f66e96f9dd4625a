"""What `DataReaderParams` makes of the order of training data."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.readers import shuffle_seed

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
