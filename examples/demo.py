# SPDX-License-Identifier: Apache-2.0
"""Prepare, train, evaluate and serve, first on real data, then on logs in the Criteo layout: `make demo`.

Every step is a command that you can run yourself; each is printed before it runs. Results go to demo-output/.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from terarec.serve.client import InferenceClient

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-output"
TERAREC = str(Path(sys.executable).with_name("terarec"))
ADULT_GATE = 0.905  # about what logistic regression on one-hot features reaches

ROWS, DAYS = 600_000, 4
MODEL = ["--model", "dlrm", "--width", "16", "--bottom", "64-16", "--top", "128-64"]
TRAINING = ["--batch-size", "1024", "--sparse-lr", "0.05"]
CURVE = ["--set", "training.eval_every=110"]  # four points of the AUC curve in one epoch


def show(command: list[str]) -> None:
    words = [Path(command[0]).name, *command[1:]]
    print("\n\033[1m$ " + " ".join(word.replace(f"{ROOT}/", "") for word in words) + "\033[0m", flush=True)


def run(command: list[str]) -> dict:
    """Run one command; show its log in the terminal, and return its JSON result."""
    show(command)
    process = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(process.stdout.strip().splitlines()[-1])


def adult() -> dict:
    print("\n== 1. Real data: Wide & Deep on UCI Adult (who earns over 50K?)")
    figures = run([sys.executable, "examples/adult_wide_deep.py", "--out", str(OUT / "adult")])
    if figures["test_auc"] < ADULT_GATE:
        sys.exit(f"test AUC {figures['test_auc']:.4f} is below {ADULT_GATE}")
    return figures


def criteo() -> dict:
    print("\n== 2. Logs in the Criteo layout: generate, prepare, train DLRM, evaluate")
    raw, data, model = OUT / "raw", OUT / "data", OUT / "run"
    generated = run([TERAREC, "generate", "criteo", "--rows", str(ROWS), "--days", str(DAYS), "--out", str(raw)])
    days = [str(raw / f"day_{day}.tsv") for day in range(DAYS)]
    run([TERAREC, "prepare", "criteo", *days, "--out", str(data)])
    run([TERAREC, "train", *MODEL, *TRAINING, *CURVE, "--data", str(data), "--out", str(model)])
    scored = run([TERAREC, "evaluate", str(model), "--data", str(data)])
    return {"best_auc": generated["best_auc"], "auc": scored["auc"]}


def first_record(path: Path) -> dict:
    """Return the first line of a raw day as the columns of a request; an empty field is a missing value."""
    with path.open() as lines:
        fields = lines.readline().rstrip("\n").split("\t")
    numbers = {f"I{i}": [float(fields[i]) if fields[i] else None] for i in range(1, 14)}
    return numbers | {f"C{i}": [fields[13 + i]] for i in range(1, 27)}


def serve() -> float:
    print("\n== 3. Serve the model and score one raw record")
    command = [TERAREC, "serve", str(OUT / "run"), "--port", "0", "--name", "dlrm", "--json"]
    show(command[:-1])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        url = json.loads(server.stdout.readline())["url"]
        record = first_record(OUT / "raw" / f"day_{DAYS - 1}.tsv")
        score = float(InferenceClient(url, model="dlrm").infer(record)["score"].reshape(-1)[0])
    finally:
        server.terminate()
        server.wait(timeout=30)
    print(f"POST {url}/v2/models/dlrm/infer -> score {score:.4f}")
    return score


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    adult_figures = adult()
    figures = criteo()
    score = serve()
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print("\n== Done")
    print(f"UCI Adult, Wide & Deep     test AUC {adult_figures['test_auc']:.4f} (required: {ADULT_GATE})")
    print(f"Criteo layout, DLRM        valid AUC {figures['auc']:.4f} (best reachable: {figures['best_auc']:.4f})")
    print(f"one raw record served      score {score:.4f}")
    print("curves                     demo-output/run/report.html")
    print(f"{time.perf_counter() - start:.0f} seconds, at most {peak_gib:.1f} GiB in one process")


if __name__ == "__main__":
    main()
