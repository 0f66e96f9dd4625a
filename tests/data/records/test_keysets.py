"""The distinct keys of a source are those of its batches."""

import numpy as np
import pytest

from terarec.data.records import RawSource, RecordReader, distinct_keys
from terarec.errors import ConfigError
from terarec.formats.hugectr import FixedRecordWriter, raw_types
from tests.data.records.samples import norm_source
from tests.errors import at
from tests.formats.hugectr.samples import make_layout, make_rows


@pytest.mark.parametrize("threads", [1, 3])
def test_norm(tmp_path, threads):
    source = norm_source(tmp_path, (40, 0, 300, 7))
    batches = list(RecordReader(source, batch_size=50, repeat=False, drop_last=False, threads=1))
    expected = sorted({key for batch in batches for key in batch.sparse.keys.tolist()})
    found = distinct_keys(source, threads=threads)
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_keys_have_the_offsets_of_their_slots(tmp_path):
    layout = make_layout(slots=((1, True),) * 2, sizes=(1000, 1000))
    rows = make_rows(layout, 20_000)
    types = raw_types(layout, float_label_dense=True)
    with FixedRecordWriter(tmp_path / "x.bin", layout, types) as writer:
        writer.write(*rows)
        writer.close()
    source = RawSource(tmp_path / "x.bin", layout, num_samples=20_000, float_label_dense=True)
    expected = np.union1d(rows[2][0][0], rows[2][1][0] + 1000)
    np.testing.assert_array_equal(distinct_keys(source), expected)


def test_no_keys(tmp_path):
    source = norm_source(tmp_path, (3,), layout=make_layout(slots=()))
    assert distinct_keys(source).tolist() == []
    with pytest.raises(ConfigError, check=at("threads")):
        distinct_keys(source, threads=0)
