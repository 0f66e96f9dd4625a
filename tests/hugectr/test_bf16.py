# SPDX-License-Identifier: Apache-2.0
"""bfloat16 finds what float32 finds, to a thousandth of AUC."""

import pytest
import torch

from terarec.data.records import NormSource, RecordReader
from terarec.models import GraphModel
from terarec.spec import AdamSpec
from tests.hugectr.graphs import new_trainer
from tests.hugectr.planted import Planted, layout, write_norm
from tests.hugectr.scripts import dcn


def auc_of(spec, precision, sources):
    torch.manual_seed(5)
    adam = AdamSpec(lr=0.01)
    trainer = new_trainer(GraphModel(spec, seed=5), adam, {"rows0": adam}, precision=precision, epochs=3)
    train, valid = (
        RecordReader(NormSource(source, layout(), checksum=True), batch_size=500, drop_last=True) for source in sources
    )
    trainer.fit(train)
    return trainer.evaluate(valid).auc


@pytest.mark.slow
def test_bf16_keeps_auc_within_a_thousandth(tmp_path):
    sources = write_norm(tmp_path / "train", Planted(20_000)), write_norm(tmp_path / "valid", Planted(20_000, seed=1))
    spec = dcn(*sources).module.spec
    narrow, wide = (auc_of(spec, precision, sources) for precision in ("bf16", "fp32"))
    assert wide > 0.9
    assert abs(narrow - wide) < 0.001
