# SPDX-License-Identifier: Apache-2.0
"""Measure what the access log, served records and traces cost a model server: processor time of what they write.

In this process, without a transport: the time of all threads for each request that is written, next to that of scoring
a request of one record of Criteo's 39 fields by a small DLRM. The share of the requests that an option names is the
share of this time that a request pays.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from record import Row, append_rows

from terarec.apps.synthetic.criteo import generate
from terarec.etl import prepare
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceSession, ServedModel
from terarec.serve.access_log import AccessLog
from terarec.serve.calls import Call
from terarec.serve.protocol import InferRequest, Tensor
from terarec.serve.served_records import ServedRecords
from terarec.serve.tracing import Traces
from terarec.spec import DLRMSpec, RunSpec, SplitByFiles, TrainingSpec, WatchingSpec
from terarec.train.run import build

CALLS = 250
NUMBERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


def trained(root: Path) -> tuple[Path, list[InferRequest]]:
    """Train a run; return it with requests of one record."""
    report = generate(root / "raw", rows=4_000, days=2, seed=7)
    days = [root / "raw" / file for file in report.files]
    prepare(Workflow.of(criteo(min_count=2, split=SplitByFiles(valid=1))), days, root / "data")
    model = DLRMSpec(width=16, bottom=(64, 16), top=(64, 32))
    training = TrainingSpec(batch_size=128, max_steps=1, reader_threads=1)
    build(RunSpec(data=str(root / "data"), model=model, training=training), root / "run").fit()
    return root / "run", [request_of(line.split("\t")) for line in days[-1].read_text().splitlines()[:CALLS]]


def request_of(row: list[str]) -> InferRequest:
    numbers = [(name, "FP32", int(text) if text else None) for name, text in zip(NUMBERS, row[1:14], strict=True)]
    texts = [(name, "BYTES", text) for name, text in zip(CATEGORIES, row[14:], strict=True)]
    inputs = (Tensor(name=name, datatype=kind, shape=(1,), data=[value]) for name, kind, value in (*numbers, *texts))
    return InferRequest(inputs=tuple(inputs), id="u1")


def costs(repeats: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run, requests = trained(root)
        model = ServedModel(InferenceSession.open(run), name="model")
        call = Call(method="POST", path="/v2/models/model/infer", route="/v2/models/{name}/infer")
        answers = [model.submit(request, call) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            answer.result()
            call.request(request, "model", None)
        call.end(200, sent_bytes=200)

        def score() -> None:
            for request in requests:
                model.submit(request).result()

        def log() -> None:
            for _ in range(CALLS):
                access_log.finish(call)
            access_log.poll()

        def keep() -> None:
            for request, answer in zip(requests, answers, strict=True):
                records.observe(request, model, answer)
            records.poll()

        def trace() -> None:
            for _ in range(CALLS):
                traces.finish(call)
            traces.poll()

        scored = cheapest(score, repeats)
        watching = WatchingSpec(
            access_log=str(root / "log"),
            record_directory=str(root / "records"),
            record_share=1.0,
            otlp_endpoint="http://127.0.0.1:1",  # nobody listens there
        )
        with AccessLog(watching) as access_log, ServedRecords(watching) as records, Traces(watching) as traces:
            for case, write in (("a line", log), ("a record and its scores", keep), ("five spans", trace)):
                yield Row(
                    case=case,
                    metric="processor time of a request that is written",
                    value=cheapest(write, repeats),
                    unit="us",
                    peer="scoring the request",
                    peer_value=scored,
                )
        model.close()


def cheapest(function: Callable[[], None], repeats: int) -> float:
    """Return the least processor time of all threads for a request, in microseconds."""
    spent = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        function()
        spent.append(time.process_time() - begin)
    return 1e6 * min(spent[1:]) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    append_rows("serve_watching", costs(options.repeats), dry=options.dry)


if __name__ == "__main__":
    main()
