# SPDX-License-Identifier: Apache-2.0
"""One rank of a run on a host of its own: ``python -m tests.dist.host_worker DATA OUT SECONDS``, as torchrun starts it.

It prints "step N" after each step, and at the end a line of JSON: the steps done, or what was raised.
"""

import json
import sys
from pathlib import Path

import torch

from terarec.dist import join
from terarec.errors import CollectiveError
from terarec.spec import RunSpec
from terarec.train import Callback, Trainer
from terarec.train.run import build
from tests.dist.test_training import run_spec


class Told(Callback):
    """Prints the number of each step."""

    def on_step(self, trainer: Trainer) -> None:
        print(f"step {trainer.step}", flush=True)


def spec_of(data: Path) -> RunSpec:
    return run_spec(data, epochs=12, checkpoint_every=15)


def main(data: Path, out: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    try:
        ranks = join(timeout=seconds, link_timeout=200.0)
        report = build(spec_of(data), out, [Told()], ranks=ranks).fit(resume=True)
        print(json.dumps({"steps": report.steps}), flush=True)
    except CollectiveError as error:
        found = {"error": str(error), "collective": error.collective, "step": error.step, "pairs": error.pairs}
        print(json.dumps(found), flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
