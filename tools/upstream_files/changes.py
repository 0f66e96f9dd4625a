# SPDX-License-Identifier: Apache-2.0
"""The only changes to upstream's files: smaller counts, and folders of its containers below a temporary one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

FOLDERS = (
    "criteo", "data", "dlrm_parquet", "dump_infer", "hugectr", "hugectr_e2e", "hugectr_temp_data", "model", "models",
    "onnx_converter", "raid", "samples", "scratch", "tmp_dir", "wdl_infer", "wdl_train", "workdir",
)  # fmt: skip
"""Folders at the root of upstream's containers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A smaller count in place of upstream's.

    Attributes:
        name: What is counted, for the table.
        pattern: Where the number stands; its last group is the number.
        smaller: Function of the number.
    """

    name: str
    pattern: re.Pattern[str]
    smaller: Callable[[int], int]


def _value(names: str, smaller: Callable[[int], int], name: str = "") -> Rule:
    # An argument, an assignment, an item or a key of a JSON file; of argparse options, the default.
    spelled = rf"(?<![\w.])\"?(?:{names})\"?\]?\s*[=:]\s*([0-9]+)(?![\w.*])"
    return Rule(name or names.replace("|", ", "), re.compile(spelled), smaller)


def _fewer(number: int) -> int:
    # Rounded up: of 1,001 iterations the one after the last interval of 1,000 stays.
    return -(-number // (1_000 if number >= 20_000 else 100)) if number >= 100 else number


CONVERTED = 6_400
"""Samples that the tests of the converter compare, in batches of 64."""


def _batch(number: int) -> int:
    # The scripts whose predictions the converter's tests compare evaluate exactly these samples, in one batch.
    if number < 1024 or number == CONVERTED:
        return number
    smaller = number // 64
    if smaller <= 64 or number % 64:
        return smaller
    # Batches are divided among up to 64 devices, or a number such as 112: odd factors stay.
    return next(number // divisor for divisor in (64, 32, 16, 8, 4, 2, 1) if number // divisor % 64 == 0)


RULES = (
    # Snapshots are named by iterations, so all counts of these shrink alike.
    _value("max_iter|display|eval_interval|snapshot", _fewer, "iterations"),
    _value("iters|NUM_ITERS", lambda number: min(number, 10), "iterations"),
    _value("NUM_TABLES", lambda number: min(number, 10), "tables"),
    _value("sleep_seconds", lambda number: min(number, 1), "seconds"),
    Rule("iterations", re.compile(r"range\(([0-9]{4,})\)"), _fewer),
    Rule("iterations", re.compile(r"_([0-9]{3,})(?=\.model|\.npy|[\"'])"), _fewer),
    Rule("iterations", re.compile(r"str\(([0-9]{3,})\)"), _fewer),
    _value("max_eval_batches", lambda number: min(number, 2)),
    _value("batchsize|batchsize_eval|batch_size|max_batchsize|global_batch_size", _batch, "batch size"),
    _value(
        "num_samples|eval_num_samples|TRAIN_NUM_SAMPLES|EVAL_NUM_SAMPLES|NUM_SAMPLES",
        lambda n: min(n, 16_384),
        "samples",
    ),
    Rule("vocabulary", re.compile(r'"max_vocabulary_size"\] = ([0-9]{8,})'), lambda number: min(number, 20_000)),
    _value("max_vocabulary_size_per_gpu", lambda number: min(number, 100_000), "vocabulary"),
    _value("num_samples_per_file", lambda number: min(number, 4_096), "samples"),
    _value("num_files|eval_num_files", lambda number: min(number, 4), "files"),
)
"""Counts by name. Sizes of vocabularies are in lists, see `_VOCABULARY`."""

_LIST = re.compile(r"\[\s*[0-9]+(?:\s*,\s*[0-9]+)+\s*,?\s*\]")
_MOST_KEYS = 2_000
_FOLDER = re.compile(rf"(?<=[\"'\s=(,])/({'|'.join(FOLDERS)})(?=[/\"'\s,)])")


@dataclass(slots=True)
class Changes:
    """The changes to one file.

    Attributes:
        counts: Name of a count -> each (upstream's number, the smaller one), in the order of the file.
    """

    counts: dict[str, dict[int, int]] = field(default_factory=dict)

    def note(self, name: str, before: int, after: int) -> None:
        """Record a smaller number."""
        self.counts.setdefault(name, {})[before] = after

    def __str__(self) -> str:
        return "; ".join(f"{name} {_shown(numbers)}" for name, numbers in self.counts.items())


def _shown(numbers: Mapping[int, int]) -> str:
    if len(set(numbers.values())) == 1 and len(numbers) > 1:
        return f"{min(numbers)} to {max(numbers)} -> {next(iter(numbers.values()))}"
    return ", ".join(f"{before} -> {after}" for before, after in sorted(numbers.items()))


def shrink(text: str, root: PurePosixPath) -> tuple[str, Changes]:
    """Return a file's text with smaller counts and its folders below `root`; no line is added or removed."""
    changes = Changes()
    for rule in RULES:
        text = rule.pattern.sub(lambda match, rule=rule: _replaced(match, rule.name, rule.smaller, changes), text)
    if "vocabulary_range" not in text:  # sizes beside ranges of keys, which would no longer fit
        text = _LIST.sub(lambda match: _shrunk_list(match.group(), changes), text)
    return _FOLDER.sub(lambda match: f"{root}/{match.group(1)}", text), changes


def _replaced(match: re.Match[str], name: str, smaller: Callable[[int], int], changes: Changes) -> str:
    number = int(match.group(1))
    if smaller(number) == number:
        return match.group()
    changes.note(name, number, smaller(number))
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return f"{match.group()[:start]}{smaller(number)}{match.group()[end:]}"


def _shrunk_list(text: str, changes: Changes) -> str:
    """Return a list of sizes of vocabularies with no more than `_MOST_KEYS` keys each."""

    def shrunk(match: re.Match[str]) -> str:
        number = int(match.group())
        if number <= _MOST_KEYS:
            return match.group()
        changes.note("vocabulary", number, _MOST_KEYS)
        return str(_MOST_KEYS)

    return re.sub(r"[0-9]+", shrunk, text)


def table_of_rules() -> str:
    """Return the rules in lines, for the head of a report."""
    examples = {rule.name: rule for rule in reversed(RULES)}
    lines = [
        f"  {name}: {', '.join(f'{n} -> {rule.smaller(n)}' for n in (300, 2_300, 16_384, 4_000_000))}"
        for name, rule in reversed(examples.items())
    ]
    return "\n".join([*lines, f"  lists of numbers (vocabularies): at most {_MOST_KEYS} each"])
