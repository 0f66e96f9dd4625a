# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be read, apart from any library."""

from typing import Any

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import ServedModels
from terarec.serve.api import InferenceApi
from terarec.serve.columns import ColumnReader
from terarec.serve.grpc.conversion import infer_request
from terarec.serve.grpc.messages import message_class
from terarec.serve.grpc.service import GrpcService, PendingInference, failure_of
from terarec.serve.session import InputColumn
from tests.errors import at


def pending_of(models: ServedModels, **fields: Any) -> PendingInference:
    message = message_class("ModelInferRequest")(model_name="dlrm", id="7")
    contents = {name: fields.pop(name) for name in list(fields) if name.endswith("_contents")}
    message.inputs.add(name="I1", shape=[1], contents=contents, **fields)
    return GrpcService(InferenceApi(models), 8).infer(message.SerializeToString())


def test_an_error_of_a_stream_has_the_id_of_its_request(models: ServedModels) -> None:
    pending = pending_of(models, datatype="FP8")
    with pytest.raises(ConfigError, check=at("inputs[0].datatype")) as caught:
        pending.response()
    answer = message_class("ModelStreamInferResponse").FromString(pending.stream_failure(failure_of(caught.value)))
    assert answer.infer_response.id == "7"
    assert answer.error_message.startswith("inputs[0].datatype: got 'FP8'")


@pytest.mark.parametrize("is_masked", [False, True])
def test_nan_at_the_end_of_a_list_is_an_item_in_every_form(is_masked: bool) -> None:
    """Among typed contents, and beside a mask, it was taken for padding."""
    reader = ColumnReader((InputColumn(name="prices", kind="number", hotness=None),), max_batch=8)
    request = message_class("ModelInferRequest")
    values, mask = np.array([1.0, np.nan], np.float32), np.array([False, False])
    lists = []
    for is_raw in (True, False):
        message = request()
        for name, datatype, array in (("prices", "FP32", values), ("prices.missing", "BOOL", mask))[: 1 + is_masked]:
            contents = {"fp32_contents" if datatype == "FP32" else "bool_contents": array.tolist()}
            message.inputs.add(name=name, datatype=datatype, shape=[1, 2], contents=None if is_raw else contents)
            if is_raw:
                message.raw_input_contents.append(array.tobytes())
        lists.append(reader(infer_request(message)).columns["prices"])
    for found in lists:
        np.testing.assert_array_equal(found, [[1.0, np.nan]])


def test_elements_of_another_datatype_are_not_passed_over(models: ServedModels) -> None:
    pending = pending_of(models, datatype="FP32", fp32_contents=[1.0], int_contents=[3])
    with pytest.raises(ConfigError, check=at("inputs[0].contents.int_contents", "expected them in fp32_contents")):
        pending.response()
