# SPDX-License-Identifier: Apache-2.0
"""docs/workflows.md keeps its word: its hashes and its workflow.json."""

import json
import re
from pathlib import Path

import terarec.etl.ops  # noqa: F401  # registers the operators that the page names
from terarec.kernels.cpu.encoding import xxh64_list
from terarec.spec import WorkflowSpec, from_data, to_data

PAGE = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text()


def test_the_hashes_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| (text|integer|hex32) (.+?) \| (-?\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for kind, shown, expected, bucket in rows:
        found = re.search(r"`(.+?)`", shown)
        value = found[1] if found else re.match(r"-?\d+", shown)[0]  # type: ignore[index]
        hashed = xxh64_list([value if kind == "text" else int(value, 16 if kind == "hex32" else 10)])
        assert (int(hashed[0]), int(hashed[0] % 1000)) == (int(expected), int(bucket)), shown


def test_the_workflow_of_the_page_is_one() -> None:
    block = re.search(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block
    content = json.loads(block[1])
    spec = from_data(WorkflowSpec, content["workflow"])
    assert from_data(WorkflowSpec, json.loads(json.dumps(to_data(spec)))) == spec
