# SPDX-License-Identifier: Apache-2.0
"""``prepare --parts --keysets`` and ``train --passes --tiers``: what the same run gives with its rows in memory."""

from terarec.memory import BudgetError
from terarec.models.artifact import load_model
from tests.cli.conftest import figures, rejected
from tests.train.small_run import assert_same, weights


def test_parts_in_tiers_give_the_run_in_memory(tmp_path):
    log, data = tmp_path / "visits.csv", tmp_path / "data"
    lines = [f"{7 * row % 80},{row % 11},{int(row % 80 < 40)}" for row in range(400)]
    log.write_text("\n".join(["shop,hour,bought", *lines]) + "\n")
    columns = ["--label", "bought", "--ids", "shop", "--dense", "hour", "--valid-fraction", 0.25]
    parts = ["--parts", 3, "--keysets", "--rows-per-shard", 100]
    figures("prepare", "csv", log, "--out", data, *columns, *parts)
    shape = ["--model", "dlrm", "--width", 4, "--bottom", "8-4", "--top", "8", "--batch-size", 20, "--passes"]
    places = {"memory": [], "tiers": ["--tiers", f"host=3KiB,file={tmp_path / 'rows'}"]}
    found = {}
    for name, place in places.items():
        found[name] = figures("train", "--data", data, "--out", tmp_path / name, *shape, *place)
    assert found["tiers"]["auc"] == found["memory"]["auc"]
    models = [load_model(tmp_path / name).model for name in places]
    assert_same(weights(models[0]), weights(models[1]))
    small = ["--tiers", f"host=1KiB,file={tmp_path / 'few'}"]
    reported = rejected("train", "--data", data, "--out", tmp_path / "small", *shape, *small, error=BudgetError)
    assert reported["where"].startswith("step 1: tiers host='1KiB': table 'shop'")
