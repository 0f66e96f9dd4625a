# SPDX-License-Identifier: Apache-2.0
"""People as in UCI's Adult files, drawn from a planted model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.click_model import MISSING_CATEGORY, ClickModel, SignalShape, plant
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, check_count, drawn, write_log

TRAIN_FILE, TEST_FILE = "adult.data", "adult.test"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """Column of texts: the one of rank r has a probability in proportion to ``(r + 1) ** -fall``."""

    values: tuple[str, ...]
    fall: float
    missing: float = 0.0


_EDUCATION = (
    *("HS-grad", "Some-college", "Bachelors", "Masters", "Assoc-voc", "11th", "Assoc-acdm", "10th"),
    *("7th-8th", "Prof-school", "9th", "12th", "Doctorate", "5th-6th", "1st-4th", "Preschool"),
)
_EDUCATION_NUMBERS = (9, 10, 13, 14, 11, 7, 12, 6, 4, 15, 5, 8, 16, 3, 2, 1)
_OCCUPATION = (
    *("Prof-specialty", "Craft-repair", "Exec-managerial", "Adm-clerical", "Sales", "Other-service"),
    *("Machine-op-inspct", "Transport-moving", "Handlers-cleaners", "Farming-fishing", "Tech-support"),
    *("Protective-serv", "Priv-house-serv", "Armed-Forces"),
)
_STATUS = (
    *("Married-civ-spouse", "Never-married", "Divorced", "Separated", "Widowed"),
    *("Married-spouse-absent", "Married-AF-spouse"),
)
_COUNTRY = ("United-States", "Mexico", "Philippines", "Germany", "Canada", "India", "England", "Cuba", "China", "Japan")
_WORDS = {
    "workclass": _Words(
        values=("Private", "Self-emp-not-inc", "Local-gov", "State-gov", "Self-emp-inc", "Federal-gov", "Without-pay"),
        fall=2.0,
        missing=0.056,
    ),
    "education": _Words(values=_EDUCATION, fall=1.0),
    "marital_status": _Words(values=_STATUS, fall=1.0),
    "occupation": _Words(values=_OCCUPATION, fall=0.4, missing=0.057),
    "relationship": _Words(
        values=("Husband", "Not-in-family", "Own-child", "Unmarried", "Wife", "Other-relative"), fall=0.8
    ),
    "race": _Words(values=("White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other"), fall=3.0),
    "sex": _Words(values=("Male", "Female"), fall=1.0),
    "native_country": _Words(values=_COUNTRY, fall=3.5, missing=0.018),
}
_NAMES = tuple(_WORDS)
_SHAPE = SignalShape(
    medians=(37.0, 400.0, 200.0, 40.0),  # age, capital gain, capital loss, hours per week
    crossed=((_NAMES.index("education"), _NAMES.index("occupation")), (_NAMES.index("marital_status"), 6)),
    positive_share=0.24,
)
_GAINS = np.array([7298, 7688, 3103, 5178, 15024, 4386, 99999, 2174, 4650, 3325])
_LOSSES = np.array([1902, 1977, 1887, 1848, 1485, 2415, 1602, 1740, 1590, 1876])

_BLOCK_ROWS = 32_768
_PILOT_ROWS = 32_768
_LABEL_STREAM, _MODEL_STREAM, _PILOT_STREAM, _NUMBER_STREAM, _WEIGHT_STREAM, _COLUMN_STREAM = 0, 1, 2, 10, 20, 100


def generate(out: Path, *, rows: int, seed: int = 0, progress: Progress | None = None) -> GenerateReport:
    """Write ``out/adult.data``, two thirds of the rows, ``out/adult.test``, and ``out/generated.json``.

    As in UCI's files, fields are separated by a comma and a space, ``?`` is a missing one, and in ``adult.test`` the
    first line is a remark and labels end with a dot.

    `rows` are the people in both files; other arguments and errors are those of `raw_log.write_log`.
    """
    check_count("rows", rows, 3)
    return write_log(out, _pieces(rows, seed), rows=rows, seed=seed, progress=progress)


def _pieces(rows: int, seed: int) -> Iterator[LogText]:
    pilot = _draw(seed, (_PILOT_STREAM,), 0, _PILOT_ROWS)
    num_values = tuple(len(words.values) for words in _WORDS.values())
    model = plant(draws.numbers(seed, (_MODEL_STREAM,)), rows, num_values, pilot, _SHAPE)
    # UCI's files have 32,561 and 16,281 rows.
    train = rows * 2 // 3
    for block in blocks(train, _BLOCK_ROWS):
        yield _piece(model, seed, TRAIN_FILE, *block)
    yield LogText(TEST_FILE, b"|1x3 Cross validator\n")
    for block in blocks(rows, _BLOCK_ROWS, train):
        yield _piece(model, seed, TEST_FILE, *block)


def _piece(model: ClickModel, seed: int, file: str, start: int, stop: int) -> LogText:
    numbers, ranks = _draw(seed, (), start, stop)
    chances = model.probabilities(numbers, ranks).astype(np.float64)
    is_rich, packed = drawn(chances, draws.uniforms(seed, (_LABEL_STREAM,), start, stop))
    age, gain, loss, hours = numbers
    weight = (20_000 + 380_000 * draws.uniforms(seed, (_WEIGHT_STREAM,), start, stop)).astype(np.int64)
    words = {name: _texts(column, ranks[index]) for index, (name, column) in enumerate(_WORDS.items())}
    schooling = np.array(_EDUCATION_NUMBERS)[ranks[_NAMES.index("education")]]
    dot = "." if file == TEST_FILE else ""
    columns = [
        *(age, words["workclass"], weight, words["education"], schooling),
        *(words["marital_status"], words["occupation"], words["relationship"], words["race"], words["sex"]),
        *(gain, loss, hours, words["native_country"]),
        raw_log.choose([f"<=50K{dot}", f">50K{dot}"], is_rich.astype(np.int64)),
    ]
    return LogText(file, raw_log.joined(columns, ", "), stop - start, packed)


def _draw(seed: int, stream: tuple[int, ...], start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Draw age, gain, loss and hours int32[4, n], and ranks int64[8, n] of the columns of texts."""
    age, gain, loss, hours = (
        draws.uniforms(seed, (*stream, _NUMBER_STREAM + index), start, stop) for index in range(len(_SHAPE.medians))
    )
    numbers = np.stack(
        [
            17 + 73 * age**1.8,
            # One uniform number decides whether there is a gain and, stretched, which one; so does the next for losses.
            np.where(gain < 0.08, _GAINS[(gain / 0.08 * len(_GAINS)).astype(int) % len(_GAINS)], 0),
            np.where(loss < 0.05, _LOSSES[(loss / 0.05 * len(_LOSSES)).astype(int) % len(_LOSSES)], 0),
            np.where(hours < 0.45, 40, 1 + 98 * (hours - 0.45) / 0.55),
        ]
    )
    ranks = [
        _draw_words(words, draws.uniforms(seed, (*stream, _COLUMN_STREAM + index), start, stop))
        for index, words in enumerate(_WORDS.values())
    ]
    return numbers.astype(np.int32), np.stack(ranks)


def _draw_words(words: _Words, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    weights = np.arange(1, len(words.values) + 1) ** -words.fall
    bounds = words.missing + (1.0 - words.missing) * np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(bounds[:-1], uniforms, side="right")
    return np.where(uniforms < words.missing, MISSING_CATEGORY, ranks)


def _texts(words: _Words, ranks: NDArray[np.int64]) -> pa.Array:
    return raw_log.choose([*words.values, "?"], np.where(ranks == MISSING_CATEGORY, len(words.values), ranks))
