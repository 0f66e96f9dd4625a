# SPDX-License-Identifier: Apache-2.0
"""Score records by a server: JSON lines of raw values in, the same lines with their scores out.

    terarec serve adult-output/run --port 8000 --name income
    python examples/serve_client.py people.jsonl --url http://127.0.0.1:8000 --model income

A record names the columns of the log; a column that it lacks is missing. A record that is not accepted is reported with
its line and the server's reason, and the others are scored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from terarec.errors import FormatError, TerarecError
from terarec.serve import InferenceClient

Record = Mapping[str, Any]
"""Raw column -> value; None is missing."""


class Scorer:
    """Scores records by a server; `rejected` counts those that were not accepted."""

    def __init__(self, client: InferenceClient, source: str) -> None:
        # Asked once: without a server, and for a model that it does not have, this is where the error is raised.
        self._columns = [item.name for item in client.metadata.inputs]
        self._client = client
        self._source = source
        self.rejected = 0

    def lines(self, records: Sequence[tuple[int, Record]]) -> Iterator[str]:
        """Yield a JSON line for each of the (line number, record) that is accepted."""
        try:
            scores = self._scores([record for _, record in records])
        except TerarecError as error:
            if error.problem.startswith("no answer"):
                raise
            if len(records) == 1:
                self.report(records[0][0], error)
                return
            # The error of a batch names one of its records at most: each by itself has its own.
            for one in records:
                yield from self.lines([one])
            return
        for (_, record), score in zip(records, scores, strict=True):
            yield json.dumps({**record, "score": score})

    def report(self, line: int, error: TerarecError) -> None:
        """Print the error of a line, and count it."""
        self.rejected += 1
        print(f"{self._source}: line {line}: {error}", file=sys.stderr)

    def _scores(self, records: Sequence[Record]) -> list[list[float]]:
        # Columns that the model lacks are sent, too: the error names the nearest one that it has.
        names = dict.fromkeys([*self._columns, *(name for record in records for name in record)])
        answer = self._client.infer({name: [record.get(name) for record in records] for name in names})
        return answer["score"].tolist()


def read(path: Path, scorer: Scorer) -> Iterator[tuple[int, Record]]:
    """Yield the number and the record of each line; lines that are no JSON objects are reported."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                scorer.report(number, FormatError(f"got {line.strip()[:60]!r}, expected JSON ({error})"))
                continue
            if isinstance(record, dict):
                yield number, record
            else:
                scorer.report(number, FormatError(f"got {line.strip()[:60]!r}, expected an object with raw columns"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="JSON lines with raw columns")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", default="model", help="name of the model, as `terarec serve --name` sets it")
    parser.add_argument("--batch-size", type=int, default=256, help="records of a request")
    options = parser.parse_args()
    try:
        scorer = Scorer(InferenceClient(options.url, options.model), str(options.records))
        records = read(options.records, scorer)
        while batch := list(islice(records, options.batch_size)):
            for line in scorer.lines(batch):
                print(line)
    except (TerarecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if scorer.rejected else 0


if __name__ == "__main__":
    sys.exit(main())
