# SPDX-License-Identifier: Apache-2.0
"""DeepCTR-Torch: its DeepFM and training loop, on arrays in memory."""

from __future__ import annotations

from importlib.metadata import version

import torch
from deepctr_torch.callbacks import Callback
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from peer_sides.frappe_job import LABEL, SPLITS, FrappeJob


class TrainingMode(Callback):
    """A callback that sets the model to training mode: an evaluation leaves it in evaluation mode."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.model.train()


class DeepCTRTorch:
    """Implements `Side`."""

    version = f"DeepCTR-Torch {version('deepctr-torch')}, torch {torch.__version__}"

    def __init__(self, job: FrappeJob) -> None:
        self.job = job
        self.columns = [
            SparseFeat(field, vocabulary_size=rows, embedding_dim=job.width) for field, rows in job.rows.items()
        ]
        self.splits = {}
        for split in SPLITS:
            arrays = job.load(split)
            self.splits[split] = ({field: arrays[field] for field in job.rows}, arrays[LABEL])

    def train(self, *, seed: int, epochs: int) -> None:
        job = self.job
        # It sums the loss over the batch, and its L2 term is w^2 instead of w^2 / 2.
        l2 = job.l2 / 2 * job.batch_size
        self.model = DeepFM(
            self.columns,
            self.columns,
            dnn_hidden_units=job.hidden,
            l2_reg_linear=l2,
            l2_reg_embedding=l2,
            init_std=job.init_scale,
            seed=seed,
            dnn_dropout=job.dropout,
            dnn_use_bn=True,
        )
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
        adam = torch.optim.Adam(self.model.parameters(), lr=job.lr)
        self.model.compile(adam, "binary_crossentropy", metrics=["auc"])
        keys, labels = self.splits["train"]
        self.model.fit(
            keys,
            labels,
            batch_size=job.batch_size,
            epochs=epochs,
            verbose=0,
            validation_data=self.splits["valid"],
            callbacks=[TrainingMode()],
        )

    def test(self) -> tuple[float, float]:
        keys, labels = self.splits["test"]
        scores = self.model.predict(keys, self.job.batch_size)[:, 0]
        return float(roc_auc_score(labels, scores)), float(log_loss(labels, scores))
