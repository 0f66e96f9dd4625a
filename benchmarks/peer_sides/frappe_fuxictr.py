# SPDX-License-Identifier: Apache-2.0
"""FuxiCTR: its layers as in its model zoo, its training loop, and its loader of arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import Tensor

from peer_sides.frappe_job import LABEL, SPLITS, FrappeJob

NAME = "frappe_x1"


class DeepFM(BaseModel):
    """The product terms and linear terms of FuxiCTR next to its MLP, over the same vectors."""

    def __init__(self, features: FeatureMap, job: FrappeJob) -> None:
        super().__init__(
            features,
            model_id="deepfm",
            monitor="AUC",
            metrics=["AUC", "logloss"],
            model_root=job.folder,
            early_stop_patience=10**6,  # every side trains all epochs
            embedding_regularizer=job.l2,
            verbose=0,
        )
        self.embedding_layer = FeatureEmbedding(
            features, job.width, embedding_initializer=f"partial(nn.init.normal_, std={job.init_scale})"
        )
        self.fm = FactorizationMachine(features)
        self.mlp = MLP_Block(
            input_dim=features.sum_emb_out_dim(),
            output_dim=1,
            hidden_units=list(job.hidden),
            dropout_rates=job.dropout,
            batch_norm=True,
        )
        self.compile("adam", "binary_crossentropy", job.lr)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = self.get_inputs(inputs)
        vectors = self.embedding_layer(keys)
        logits = self.fm(keys, vectors) + self.mlp(vectors.flatten(start_dim=1))
        return {"y_pred": self.output_activation(logits)}


class FuxiCTR:
    """Implements `Side`. The data are in memory; the loader has no worker processes, which are slower on few cores."""

    version = f"FuxiCTR {version('fuxictr')}, torch {torch.__version__}"

    def __init__(self, job: FrappeJob) -> None:
        self.job = job
        (Path(job.folder) / NAME).mkdir()  # it keeps the best weights there
        self.features = FeatureMap(NAME, job.folder)
        for field, rows in job.rows.items():
            self.features.features[field] = {"source": "", "type": "categorical", "vocab_size": rows}
        self.features.labels = [LABEL]
        self.features.default_emb_dim = job.width
        self.features.num_fields = self.features.get_num_fields()
        self.features.set_column_index()
        self.readers = RankDataLoader(
            self.features,
            **{f"{split}_data": job.file(split) for split in SPLITS},
            batch_size=job.batch_size,
            num_workers=0,
        )

    def train(self, *, seed: int, epochs: int) -> None:
        seed_everything(seed)
        self.model = DeepFM(self.features, self.job)
        self.model.fit(self.readers[0], epochs=epochs, validation_data=self.readers[1])

    def test(self) -> tuple[float, float]:
        figures = self.model.evaluate(self.readers[2])
        return float(figures["AUC"]), float(figures["logloss"])
