# SPDX-License-Identifier: Apache-2.0
"""The model that LitServe serves for `served_model`, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from litserve import LitAPI

from terarec.serve import InferenceSession

Columns = dict[str, list[Any]]


class Api(LitAPI):
    """The scores of `InferenceSession.predict` for the joined records of some requests."""

    def __init__(self, run: str, **options: Any) -> None:
        super().__init__(**options)
        self.run = run

    def setup(self, device: str) -> None:
        self.session = InferenceSession.open(Path(self.run))

    def batch(self, inputs: list[Columns]) -> tuple[list[int], Columns]:
        sizes = [len(next(iter(one.values()))) for one in inputs]
        return sizes, {name: [value for one in inputs for value in one[name]] for name in inputs[0]}

    def predict(self, inputs: tuple[list[int], Columns]) -> tuple[list[int], list[float]]:
        sizes, columns = inputs
        return sizes, self.session.predict(columns)[:, 0].tolist()

    def unbatch(self, output: tuple[list[int], list[float]]) -> list[list[float]]:
        sizes, scores = output
        begins = [sum(sizes[:place]) for place in range(len(sizes))]
        return [scores[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def encode_response(self, output: list[float]) -> dict[str, list[float]]:
        return {"score": output}
