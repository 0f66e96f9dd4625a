# SPDX-License-Identifier: Apache-2.0
"""Each metric of one label by its definition, in Python's floats, sample by sample."""

import math
from collections import defaultdict
from fractions import Fraction


def auc(rows):
    """By counting pairs; a row is (logit, score, label, weight, group)."""
    wins = pairs = 0.0
    for logit, _, label, weight, _ in rows:
        for other, _, its, its_weight, _ in rows:
            mass = weight * label * its_weight * (1 - its)
            pairs += mass
            wins += mass * (0.5 if logit == other else logit > other)
    return wins / pairs if pairs else math.nan


def groups_of(rows):
    found = defaultdict(list)
    for row in rows:
        if row[4] is not None:
            found[row[4]].append(row)
    return list(found.values())


def gauc(rows):
    total = of_weights = 0.0
    for group in groups_of(rows):
        value = auc(group)
        if not math.isnan(value):
            weight = sum(row[3] for row in group)
            total += weight * value
            of_weights += weight
    return total / of_weights if of_weights else math.nan


def mean(rows, term):
    weights = sum(row[3] for row in rows)
    return sum(row[3] * term(row) for row in rows) / weights if weights else math.nan


def cross_entropy(row):
    p = 1 / (1 + math.exp(-row[0]))
    return -(row[2] * math.log(p) + (1 - row[2]) * math.log(1 - p))


def normalized_entropy(rows):
    if not rows:
        return math.nan
    q = mean(rows, lambda row: row[2])
    if q in (0.0, 1.0):
        return math.nan
    return mean(rows, cross_entropy) / -(q * math.log(q) + (1 - q) * math.log(1 - q))


def symmetric(row):
    total = (row[1] + row[2]) / 2
    return abs(row[1] - row[2]) / total if total else 0.0


def gain(ranked, k):
    return sum(row[2] / math.log2(place + 1) for place, row in enumerate(ranked[:k], start=1))


def of_ranking(name, ranked, k):
    places = [place for place, row in enumerate(ranked, start=1) if row[2] > 0 and (k is None or place <= k)]
    relevant = sum(row[2] > 0 for row in ranked)
    if name == "ndcg":
        return gain(ranked, k) / gain(sorted(ranked, key=lambda row: -row[2]), k)
    if name == "recall":
        return len(places) / relevant
    if name == "precision":
        return len(places) / k
    if name == "hit_rate":
        return float(len(places) > 0)
    if name == "mrr":
        return 1 / places[0] if places else 0.0
    precisions = sum(number / place for number, place in enumerate(places, start=1))
    return precisions / (relevant if k is None else min(k, relevant))


def ranking(rows, name, k):
    total = of_weights = 0.0
    for group in groups_of(rows):
        if any(row[2] > 0 for row in group):
            weight = sum(row[3] for row in group) / len(group)
            ranked = sorted(group, key=lambda row: (-row[0], row[2]))
            total += weight * of_ranking(name, ranked, k)
            of_weights += weight
    return total / of_weights if of_weights else math.nan


def score_bits(score):
    """The 11 leading bits of a score and their exponent; what is below 2^-32 counts alike."""
    mantissa, exponent = math.frexp(score)
    return (exponent, int(mantissa * 2**11)) if score >= 2**-32 * (1 + 2**-10) else (-32, 0)


def calibration(rows, bins, binning="count"):
    """Return the means of score and label and the weight of each bin, sample by sample, in exact numbers."""
    rows = [tuple(map(Fraction, row[1:4])) for row in rows]
    parts = defaultdict(list)
    total = sum(weight for *_, weight in rows)
    for score, label, weight in rows:
        if binning == "width":
            number = max(0, next(k for k in range(bins) if float(score) <= (k + 1) / bins))
        else:
            bits = score_bits(float(score))
            below = sum(its for other, _, its in rows if score_bits(float(other)) < bits)
            equal = sum(its for other, _, its in rows if score_bits(float(other)) == bits)
            number = min(math.floor(bins * (below + equal / 2) / total), bins - 1)
        parts[number].append((score, label, weight))
    return [
        (sum(w * s for s, _, w in part) / mass, sum(w * y for _, y, w in part) / mass, mass)
        for _, part in sorted(parts.items())
        if (mass := sum(w for *_, w in part))
    ]


def calibration_error(rows, bins):
    curve = calibration(rows, bins)
    total = sum(mass for *_, mass in curve)
    return float(sum(mass * abs(score - label) for score, label, mass in curve) / total) if total else math.nan


MEANS = {
    "logloss": cross_entropy,
    "mse": lambda row: (row[1] - row[2]) ** 2,
    "mae": lambda row: abs(row[1] - row[2]),
    "smape": symmetric,
    "accuracy": lambda row: float((row[1] > 0.5) == (row[2] > 0.5)),
}


def expected(name, rows):
    """Return the metric called `name` of rows (logit, score, label, weight, group) with a weight and a known label."""
    rows = [row for row in rows if row[3] > 0 and not math.isnan(row[2])]
    base, _, k = name.partition("@")
    if base in ("auc", "gauc"):
        return {"auc": auc, "gauc": gauc}[base](rows)
    if base == "ece":
        return calibration_error(rows, int(k or 10))
    if base == "ne":
        return normalized_entropy(rows)
    if base == "rmse":
        return math.sqrt(mean(rows, MEANS["mse"]))
    if base in MEANS:
        return mean(rows, MEANS[base])
    return ranking(rows, base, int(k) if k else None)
