# SPDX-License-Identifier: Apache-2.0
"""The model that MLServer serves for `served_model`; it is imported by its name."""

from __future__ import annotations

from pathlib import Path

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from terarec.serve import InferenceSession


class Model(MLModel):
    """The scores of `InferenceSession.predict` for the tensors of a request."""

    async def load(self) -> bool:
        parameters = self.settings.parameters
        assert parameters is not None
        self.session = InferenceSession.open(Path(str(parameters.uri)))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        columns = {one.name: list(one.data.root) for one in payload.inputs}
        scores = self.session.predict(columns)[:, 0].tolist()
        output = ResponseOutput(name="score", shape=[len(scores), 1], datatype="FP32", data=scores)
        return InferenceResponse(model_name=self.name, outputs=[output])
