# SPDX-License-Identifier: Apache-2.0
"""What `DataReaderParams` makes of the order of training data, and `AsyncParam` of the layout of a file."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.readers import async_layout_of, drops_short_batches, shuffle_seed
from tests.errors import at
from tests.hugectr.families import collection_dlrm, raw_async_reader
from tests.hugectr.planted import Planted, write_raw_async

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


@pytest.mark.parametrize(
    ("settings", "trained"), [({}, [100] * 4), ({"drop_incomplete_batch": False}, [100, 100, 50, 100])]
)
def test_a_repeating_pass_over_a_raw_file_ends_its_batch(tmp_path, settings, trained):
    """HugeCTR cuts such a file in each pass alike: a last batch counts its own rows, or is left out of the training."""
    source = write_raw_async(tmp_path / "data.bin", Planted(250))
    made = collection_dlrm(
        raw_async_reader(source, source, 250, 250), batchsize=100, batchsize_eval=100, i64_input_key=True, **settings
    )
    made.start_data_reading()
    steps, evaluated = [], []
    for _ in range(4):
        assert made.eval()
        evaluated.append(made.check_out_tensor("dense", hugectr.Tensor_t.Evaluate))
        assert made.train()
        steps.append(made.check_out_tensor("dense", hugectr.Tensor_t.Train))
    assert [len(rows) for rows in evaluated] == [100, 100, 50, 100]
    assert [len(rows) for rows in steps] == trained
    assert (evaluated[3] == evaluated[0]).all()


def test_a_file_without_a_whole_batch_to_repeat_is_named_with_the_setting(tmp_path):
    source = write_raw_async(tmp_path / "data.bin", Planted(50))
    made = collection_dlrm(
        raw_async_reader(source, source, 50, 50), batchsize=100, batchsize_eval=100, i64_input_key=True
    )
    with pytest.raises(WrongInputError, match=r"holds 50 samples.*drop_incomplete_batch=False", check=at("set_source")):
        made.start_data_reading()


@pytest.mark.parametrize(
    ("release", "settings", "expected"),
    [
        ("25.03", {}, (True, False)),
        ("4.3", {}, (True, False)),
        ("4.2", {}, (True, True)),
        ("3.8", {"drop_incomplete_batch": False}, (False, False)),
        ("3.7", {}, (True, True)),
        ("3.3", {"is_dlrm": True}, (False, False)),
        ("3.2", {"is_dlrm": True}, (True, True)),
        ("3.1", {}, (True, True)),
        ("3.0", {}, (False, False)),
        ("2.3", {}, (False, False)),
    ],
)
def test_a_release_leaves_short_batches_out_of_training_and_of_evaluation(release, settings, expected):
    reader = raw_async_reader("train.bin", "eval.bin", 8, 8)
    norm = reader.with_values(data_reader_type=hugectr.DataReaderType_t.Norm)
    for repeats in (True, False):
        solver = hugectr.CreateSolver(repeat_dataset=repeats, compat_release=release, **settings)
        assert drops_short_batches(solver, reader) == expected
        assert drops_short_batches(solver, norm) == ((False, False) if repeats else expected)


@pytest.mark.parametrize(("release", "drops"), [("25.03", True), ("3.0", True), ("2.3", False)])
def test_a_session_of_3_0_leaves_short_batches_out_of_training(release, drops, monkeypatch):
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", release)
    solver = hugectr.solver_parser_helper(repeat_dataset=False, batchsize=8, batchsize_eval=8, vvgpu=[[0]])
    assert drops_short_batches(solver, raw_async_reader("train.bin", "eval.bin", 8, 8)) == (drops, False)
