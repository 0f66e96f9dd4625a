# SPDX-License-Identifier: Apache-2.0
"""Devices of tensors, and batches that are copied ahead, as far as it can be checked without a GPU."""

import dataclasses
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from terarec.batch import Batch, to_device
from terarec.data import InMemorySource, Reader
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.nn.precision import CPU
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    BinarySpec,
    DynamicTablesSpec,
    MultiClassSpec,
    PairwiseSpec,
    RegressionSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer
from terarec.train.devices import batches_on, copied_ahead, resolve_device
from tests.errors import at
from tests.models.every import ALLOWED, MODELS, dataset, random_batch
from tests.params import in_every_run
from tests.processes import run_new_python

COLUMNS = dataset()
DLRM, DEEPFM = MODELS["dlrm"], MODELS["deepfm"]


class Elsewhere(TorchFunctionMode):
    """Puts every tensor that terarec makes without saying on which device onto "meta", where no data is.

    So what meets the model's tensors, or is read, raises: on a GPU it would be on the wrong device. The compiled core
    and metrics are left out, since both work on the CPU alone.
    """

    ON_THE_CPU = ("/kernels/cpu/", "/metrics/")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and self._is_of_terarec():
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

    def _is_of_terarec(self):
        frame = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        file = frame.f_code.co_filename
        return "/terarec/" in file and not any(part in file for part in self.ON_THE_CPU)


def weighted_batches():
    batches = (random_batch(COLUMNS, size, seed=size) for size in (9, 8, 5))
    return [dataclasses.replace(batch, weight=torch.full((batch.batch_size,), 0.5)) for batch in batches]


def train_elsewhere(spec, objective=None, **training):
    """Train on batches on the CPU and evaluate, while tensors without a device go elsewhere."""
    made = build_objective(objective or BinarySpec())
    outputs = made.num_outputs(len(COLUMNS.labels))
    model = build_model(spec, COLUMNS, num_outputs=outputs, seed=1, allow_import=ALLOWED)
    batches = weighted_batches()
    with Elsewhere():
        optimizers = Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1))
        trainer = Trainer(model, TrainingSpec(**training), optimizers, objective=made)
        trainer.train_step(batches[0])
        trainer.train_step(*batches[1:])
        trainer.evaluate(batches)
    assert all(value.device == CPU for value in model.state_dict().values())


@pytest.mark.parametrize("name", in_every_run([name for name in MODELS if "-" not in name], MODELS))
def test_models_make_their_tensors_where_their_inputs_are(name):
    train_elsewhere(MODELS[name])


@pytest.mark.parametrize(
    "objective",
    [
        BinarySpec(label_weights=(2.0,)),
        MultiClassSpec(classes=2),
        RegressionSpec(),
        RegressionSpec(loss="huber"),
        PairwiseSpec(),
        PairwiseSpec(group="a"),
    ],
    ids=str,
)
def test_objectives_make_their_tensors_where_their_inputs_are(objective):
    train_elsewhere(DLRM, objective)


@pytest.mark.parametrize(
    ("spec", "training"),
    [
        (DLRM, {"clip_norm": 0.1}),
        (DLRM, {"loss_scale": 128.0}),
        (DLRM, {"loss_scale": "dynamic", "precision": "bf16"}),
        (dataclasses.replace(DLRM, tables=DynamicTablesSpec()), {}),
        (dataclasses.replace(DEEPFM, dropout=0.5, batch_norm=True), {}),
        (dataclasses.replace(DEEPFM, activation="dice"), {}),
    ],
    ids=["clip", "scaled", "dynamic-scale", "dynamic-tables", "dropout", "dice"],
)
def test_training_makes_its_tensors_where_the_model_is(spec, training):
    train_elsewhere(spec, **training)


def test_a_tensor_without_a_device_is_found():
    def made_by(file):
        held = {"torch": torch}
        with Elsewhere():
            exec(compile("made = torch.zeros(3), torch.zeros(3, device='cpu')", file, "exec"), held)
        return [tensor.device.type for tensor in held["made"]]

    assert made_by("/src/terarec/nn/careless.py") == ["meta", "cpu"]
    assert made_by("/src/terarec/kernels/cpu/launcher.py") == ["cpu", "cpu"]
    assert made_by("/src/other/nn/careless.py") == ["cpu", "cpu"]


def test_batches_for_the_cpu_come_unchanged_and_the_reader_is_not_ahead():
    batches = weighted_batches()
    seen = []

    def read():
        for number, batch in enumerate(batches):
            seen.append(number)
            yield batch, number

    for number, (batch, payload) in enumerate(copied_ahead(read(), CPU)):
        assert batch is batches[number]
        assert (payload, seen) == (number, list(range(number + 1)))


def test_batches_for_another_device_are_copied_there():
    batch = weighted_batches()[0]
    ((there, _),) = copied_ahead([(batch, None)], torch.device("meta"))
    tensors = (there.dense, there.label, there.weight, there.sparse.keys, there.sparse.offsets)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_offsets_that_are_on_the_device_are_not_copied():
    batch = weighted_batches()[0]
    offsets = batch.sparse.offsets.to("meta")
    assert to_device(batch, "meta", offsets=offsets).sparse.offsets is offsets


def test_the_state_of_a_reader_for_the_cpu_is_its_own():
    source = InMemorySource(dataset(categorical=()), torch.zeros(5, 1).numpy(), torch.zeros(5, 2).numpy(), [])
    reader = Reader(source, batch_size=2)
    found = list(batches_on(reader, CPU))
    assert [(batch.batch_size, *read) for batch, read in found] == [(2, None, 2), (2, None, 2), (1, None, 1)]
    assert all(isinstance(batch, Batch) for batch, _ in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_rejected():
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, check=at("device")):
        resolve_device("cuda:1")


CODE = """
import resource, torch
from terarec.train.devices import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(48 << 18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
left = faults()
kept = keep_freed_memory()
faults()
print(int(kept), left, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_blocks_are_reused_without_page_faults() -> None:
    # What a process of `run_python` has allocated before it was forked decides where its large blocks go.
    kept, faults_before, faults_after = map(int, run_new_python(CODE).stdout.split())
    if not kept:
        pytest.skip("this C library does not take the setting")
    assert faults_after < faults_before / 10
