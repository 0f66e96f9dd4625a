# SPDX-License-Identifier: Apache-2.0
"""Scripts in the public style of their releases, over data that they generate, run with not a line changed.

Their labels follow from nothing, so each AUC must hover at 0.5.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("releases")
# What each of them tells besides its metrics.
LOGGED = {
    "v2_3_session": ["iterations 24", "trained with data in data2/file_list.txt", "resumed equals True"],
    "v3_1_oversubscriber": ["Use training cache mode with number of epochs: 1", "(110,) (110, 1)\n(100,) (100, 8)"],
    "v3_2_continuous": [
        "incremental [True, True]",
        "updated True 16 float32",
        "Use training cache mode",
        "stays in memory: Update_t.Global",
    ],
    "v3_4_training_cache": ["iterations 16 loss", "incremental [(100,)]", "Use training cache mode"],
    "v3_0_inference": ["scores 64 True True"],
    "v3_5_hps": ["scores (4096,) float32", "looked up True True", "from a file True"],
    "v23_6_offline_inference": ["predictions (4096, 2)", "tensor (1024, 16)"],
    "v4_1_hybrid": ["vvgpu names 4 devices", "Iter: 40 ", "Loss: 0 lr:0", "Finish 40 iterations"],
    "v23_6_training_cache": ["Use training cache mode", "widths [1, 16] True", "both slots True True"],
    "v25_03_collection": [
        "Iter: 40 ",
        "['start', ('eval_start', 19), ('eval_end', 19, ['AUC']), ('eval_start', 39), ('eval_end', 39, ['AUC']), "
        "('end', 39)]",
        "checked out (512, 8)",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGGED)
def test_a_script_of_a_release_runs(tmp_path, name):
    command = [sys.executable, "-m", "terarec.hugectr", str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [logged for logged in LOGGED[name] if logged not in done.stdout] == []
    aucs = [float(number) for number in re.findall(r"Evaluation, AUC: ([\d.]+)", done.stdout)]
    assert aucs
    assert all(abs(auc - 0.5) < 0.05 for auc in aucs)
