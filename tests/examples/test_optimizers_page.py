# SPDX-License-Identifier: Apache-2.0
"""docs/optimizers.md keeps its promises: its Python runs, its run description is one, its kinds are all."""

import json
import re
from pathlib import Path

from terarec.config.overrides import override, parse_assignments
from terarec.kernels.row_rules import RULE_KINDS
from terarec.spec import AdamSpec, RowOptions, RunSpec, from_data

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()


def test_the_python_runs_and_prints_the_output_in_its_comment(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "optimizers.md", "exec"), {})
        assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)\s+# (.+)", block)


def test_the_run_descriptions_are_some():
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    options, named = (from_data(RunSpec, json.loads(block)) for block in blocks)
    rows = RowOptions(mode="lazy_global", clip_global_norm=1.0)
    assert options.sparse_optimizer == AdamSpec(lr=0.01, rows=rows)
    tables = named.model.tables
    assert tables.table("item_id", rows=3, width=2).optimizer in named.row_optimizers
    assert tables.table("user_id", rows=3, width=2).optimizer == "default"


def test_the_command_line_sets_the_same_fields():
    (command,) = re.findall(r"`terarec train (.*)`", PAGE)
    changes = parse_assignments(re.findall(r"--set (\S+)", command))
    run = override(RunSpec(data="d", sparse_optimizer=AdamSpec()), changes)
    assert run.sparse_optimizer.rows == RowOptions(mode="lazy_global", table_lr={"shop": 0.1})


def test_every_kind_is_reported_of():
    assert sorted(re.findall(r"^\| `\w+Spec` \| `(\w+)`", PAGE, re.MULTILINE)) == sorted(RULE_KINDS)
