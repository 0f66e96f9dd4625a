"""One served model behind the messages of the Open Inference Protocol; every transport calls this."""

from __future__ import annotations

from collections.abc import Mapping

import terarec
from terarec.errors import ConfigError
from terarec.serve.protocol import (
    INTEGER_BITS,
    Elements,
    InferRequest,
    InferResponse,
    ModelMetadata,
    RequestTooLargeError,
    ServerMetadata,
    Tensor,
    TensorMetadata,
    UnknownModelError,
    float32_elements,
)
from terarec.serve.session import ColumnKind, InferenceSession, InputColumn
from terarec.spec import ServingSpec
from terarec.spec.checks import quoted
from terarec.spec.registry import unknown_name

SCORE = "score"
"""Name of the output: FP32 [B, C], the scores of the run's objective, such as the probability of each label."""

_DATATYPES: Mapping[ColumnKind, tuple[str, ...]] = {
    "string": ("BYTES",),
    "integer": tuple(INTEGER_BITS),
    "number": ("FP32", "FP64", "FP16", *INTEGER_BITS),
}
"""Kind of a raw column -> the datatypes that it accepts; the first is the one that the metadata names."""


class InferenceService:
    """Answers the protocol's requests for one model. Thread-safe.

    Attributes:
        spec: Name, address and limits.
    """

    def __init__(self, session: InferenceSession, spec: ServingSpec) -> None:
        self.spec = spec
        self._session = session
        self._max_batch = spec.max_batch
        # Made once, so that the version in a client's path stays valid while the session follows a training.
        self._metadata = _metadata(session, spec.name)
        self._inputs = {column.name: column for column in session.inputs}

    def server_metadata(self) -> ServerMetadata:
        """Return name and version of the server."""
        return ServerMetadata(name="terarec", version=terarec.__version__)

    def model_metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """Return the inputs and outputs of the model.

        Raises:
            UnknownModelError: It is not served under that name and version.
        """
        if name != self._metadata.name:
            raise UnknownModelError(f"model {quoted(name)}", f"not served here, expected {self._metadata.name!r}")
        if version is not None and version not in self._metadata.versions:
            expected = ", ".join(map(repr, self._metadata.versions))
            raise UnknownModelError(f"model {name!r}", f"has no version {quoted(version)}, expected {expected}")
        return self._metadata

    def infer(self, request: InferRequest, name: str, version: str | None = None) -> InferResponse:
        """Score the records of `request`.

        Raises:
            UnknownModelError: The model is not served under that name and version.
            RequestTooLargeError: More records than `ServingSpec.max_batch`.
            ConfigError: An input that is unknown, missing, repeated or of the wrong type or shape.
        """
        metadata = self.model_metadata(name, version)
        for index, wanted in enumerate(request.outputs):
            # Checked although there is one output: a client that names another would take its scores for that.
            if wanted.name != SCORE:
                raise ConfigError(f"outputs[{index}].name", f"got {quoted(wanted.name)}, expected {SCORE!r}")
        scores = self._session.predict(self._columns(request))
        output = Tensor(name=SCORE, datatype="FP32", shape=scores.shape, data=float32_elements(scores))
        return InferResponse(
            model_name=metadata.name, model_version=metadata.versions[0], outputs=(output,), id=request.id
        )

    def _columns(self, request: InferRequest) -> Mapping[str, Elements]:
        columns: dict[str, Elements] = {}
        for index, tensor in enumerate(request.inputs):
            column = self._checked_column(tensor, f"inputs[{index}]")
            if tensor.name in columns:
                raise ConfigError(f"inputs[{index}].name", f"the input {tensor.name!r} occurs twice, expected it once")
            columns[tensor.name] = tensor.data if column.hotness == 1 else _lists(tensor)
        return columns

    def _checked_column(self, tensor: Tensor, where: str) -> InputColumn:
        """Return the raw column that `tensor` gives, if its datatype and shape are right."""
        column = self._inputs.get(tensor.name)
        if column is None:
            raise unknown_name(f"{where}.name", tensor.name, self._inputs)
        accepted = _DATATYPES[column.kind]
        if tensor.datatype not in accepted:
            raise ConfigError(
                f"{where}.datatype", f"got {tensor.datatype} for {tensor.name!r}, expected {' or '.join(accepted)}"
            )
        if not _fits(tensor.shape, column.hotness):
            bound = "" if column.hotness is None else f" with n <= {column.hotness}"
            expected = "[B] or [B, 1]" if column.hotness == 1 else f"[B, n]{bound}"
            raise ConfigError(
                f"{where}.shape",
                f"got {quoted(list(tensor.shape))} for {tensor.name!r}, expected {expected} for B records",
            )
        # The size of a body bounds records only roughly; what a batch takes in the model follows from their number.
        if tensor.shape[0] > self._max_batch:
            raise RequestTooLargeError(
                f"{where}.shape", f"got {tensor.shape[0]} records, expected at most {self._max_batch} in one request"
            )
        return column


def _fits(shape: tuple[int, ...], hotness: int | None) -> bool:
    if len(shape) == 1 or hotness is None:
        # A flat tensor has one value a record; lists of any length need their second dimension.
        return len(shape) == (1 if hotness == 1 else 2)
    return len(shape) == 2 and shape[1] <= hotness and (hotness > 1 or shape[1] == 1)


def _lists(tensor: Tensor) -> Elements:
    """Return the values of each record of a tensor [B, n]; null fills the rows of records that have fewer than n."""
    num_records, width = tensor.shape
    # The protocol's tensors are rectangular, so lists of several lengths come padded by null.
    rows = (tensor.data[row * width : (row + 1) * width] for row in range(num_records))
    return [[value for value in row if value is not None] for row in rows]


def _metadata(session: InferenceSession, name: str) -> ModelMetadata:
    inputs = tuple(
        TensorMetadata(
            name=column.name,
            datatype=_DATATYPES[column.kind][0],
            shape=(-1,) if column.hotness == 1 else (-1, column.hotness or -1),
        )
        for column in session.inputs
    )
    return ModelMetadata(
        name=name,
        versions=(str(session.step),),
        platform=f"terarec_{session.run.model.kind}",
        inputs=inputs,
        outputs=(TensorMetadata(name=SCORE, datatype="FP32", shape=(-1, len(session.score_names))),),
    )
