# SPDX-License-Identifier: Apache-2.0
"""A shop's events in the layout of REES46's logs, drawn from a planted model of purchases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.click_model import bias_for
from terarec.apps.synthetic.draws import Tastes, chance
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, pack, write_log

FILE = "2019-Oct.csv"
CATEGORIES = (
    *("electronics.smartphone", "electronics.audio.headphone", "electronics.video.tv", "electronics.clocks"),
    *("computers.notebook", "computers.desktop", "appliances.kitchen.kettle", "appliances.kitchen.washer"),
    *("appliances.environment.vacuum", "apparel.shoes", "apparel.shoes.keds", "furniture.bedroom.bed"),
)
_HEADER = "event_time,event_type,product_id,category_id,category_code,brand,price,user_id,user_session\n"
_FIRST_SECOND = 1_569_888_000  # 2019-10-01 00:00 UTC
_SECONDS = 30 * 86_400  # the number of events of a visit is random: the rest of October is a reserve
_LONGEST_LOOK = 900
"""Seconds from a visit's first view to its end."""

_BRANDS = 20
_UNNAMED_CATEGORIES, _UNNAMED_BRANDS = 0.1, 0.1
"""Shares of the products without a category code and without a brand."""
_ENDED_SHARE = 0.7
"""Share of the visits that end with a product in the cart or bought; the others end with a view."""
_EVENTS_A_VISIT = 2.0 + _ENDED_SHARE
_BOUGHT_SHARE = 0.4
_FIT, _BRAND_EFFECT, _EVENING_EFFECT, _PRICE_EFFECT = 1.0, 1.0, 0.8, -0.8

_BLOCK_VISITS = 16_384
_PILOT_VISITS = 16_384
_VIEW, _CART, _PURCHASE = 0, 1, 2
_BRAND, _BRANDLESS, _CODELESS, _VIEWS, _ENDS, _MOMENT, _LABEL, _LOOK, _SESSION = range(9)
_EXPENSIVE, _BRAND_TASTE, _HOUR_TASTE = 20, 30, 40


def generate(out: Path, *, rows: int, seed: int = 0, progress: Progress | None = None) -> GenerateReport:
    """Write ``out/2019-Oct.csv``, with a header line, and ``out/generated.json``.

    A visit is a session: one to three views of a product, and then it is put into the cart, or bought. A sample of the
    best AUC is a cart or purchase; its label is whether it is a purchase. That depends on the user's favourite
    categories, on product, brand and price, and on brand and hour together. Events are in order of time.

    `rows` are the events, all three types together; other arguments and errors are those of `raw_log.write_log`.
    """
    return write_log(out, _pieces(rows, seed), rows=rows, seed=seed, progress=progress)


@dataclass(frozen=True, slots=True)
class _Events:
    """Events [n] in any order: the number of the visit, type, second, and for a cart or purchase P(purchase)."""

    visit: NDArray[np.int64]
    kind: NDArray[np.int64]
    second: NDArray[np.int64]
    chance: NDArray[np.float64]

    def at(self, indices: NDArray[np.int64] | NDArray[np.bool_]) -> _Events:
        """Return the events at `indices`."""
        return _Events(self.visit[indices], self.kind[indices], self.second[indices], self.chance[indices])

    def followed_by(self, others: _Events) -> _Events:
        """Concatenate these events and the `others`."""
        pairs = zip(
            (self.visit, self.kind, self.second, self.chance),
            (others.visit, others.kind, others.second, others.chance),
            strict=True,
        )
        return _Events(*(np.concatenate(pair) for pair in pairs))


@dataclass(frozen=True, slots=True)
class _Shop:
    """Products, users and click model of the visits."""

    tastes: Tastes
    visits_a_second: float
    bias: float

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Shop:
        tastes = Tastes(
            seed=seed,
            num_users=max(rows // 200, 20),
            num_items=min(max(rows // 500, 120), 150_000),
            num_groups=len(CATEGORIES),
            fit=_FIT,
        )
        shop = cls(tastes, max(rows / _EVENTS_A_VISIT, 1.0) / _SECONDS, 0.0)
        pilot = -1 - np.arange(_PILOT_VISITS)  # no visit of the log
        moments = draws.choices(seed, _MOMENT, pilot, _SECONDS)
        return cls(tastes, shop.visits_a_second, bias_for(shop.logits(pilot, moments), _BOUGHT_SHARE))

    def people_and_products(self, visits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the users and products of `visits`."""
        users = self.tastes.draw_users(visits)
        return users, self.tastes.draw_items(users, visits)

    def logits(self, visits: NDArray[np.int64], seconds: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits of P(purchase) at the end of each of `visits`."""
        seed = self.tastes.seed
        users, products = self.people_and_products(visits)
        brands = self.brands(products)
        evening = np.where(seconds % 86_400 >= 16 * 3600, 1.0, -1.0)
        total = self.bias + self.tastes.logits(users, products)
        total += _PRICE_EFFECT * draws.normal_traits(seed, _EXPENSIVE, products)
        total += _BRAND_EFFECT * draws.normal_traits(seed, _BRAND_TASTE, brands)
        total += _EVENING_EFFECT * draws.normal_traits(seed, _HOUR_TASTE, brands) * evening
        return total

    def brands(self, products: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the brand's number of each of `products`; the last means none."""
        return self.tastes.brands(products, (_BRAND, _BRANDLESS), _BRANDS, _UNNAMED_BRANDS)

    def starts(self, visits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the start of each visit: ascending, and before all events of the visit."""
        return (visits / self.visits_a_second).astype(np.int64)

    def events(self, visits: NDArray[np.int64]) -> _Events:
        """Return all events of `visits`."""
        seed = self.tastes.seed
        ends = self.starts(visits) + _LONGEST_LOOK
        logits = self.logits(visits, ends)
        views = 1 + draws.choices(seed, _VIEWS, visits, 3)
        looked = np.repeat(visits, views)
        order = np.arange(len(looked)) - np.repeat(np.cumsum(views) - views, views)
        before = 1 + (draws.traits(seed, _LOOK, looked * 4 + order) * (_LONGEST_LOOK - 1)).astype(np.int64)
        seen = _Events(looked, np.full(len(looked), _VIEW), np.repeat(ends, views) - before, np.zeros(len(looked)))
        is_ended = draws.traits(seed, _ENDS, visits) < _ENDED_SHARE
        chances = chance(logits)
        # The packed scores of the AUC are of float32, so the label is drawn with these.
        bought = draws.traits(seed, _LABEL, visits) < chances.astype(np.float32)
        ended = _Events(visits, np.where(bought, _PURCHASE, _CART), ends, chances).at(is_ended)
        return seen.followed_by(ended)


def _pieces(rows: int, seed: int) -> Iterator[LogText]:
    yield LogText(FILE, _HEADER.encode())
    shop = _Shop.plan(rows, seed)
    waiting, start, done = shop.events(np.arange(0)), 0, 0
    while done < rows:
        visits = np.arange(start, start + _BLOCK_VISITS)
        start += _BLOCK_VISITS
        waiting = waiting.followed_by(shop.events(visits))
        # Events before the next visit's start are complete; visits to come may add events before the others.
        is_due = waiting.second < shop.starts(np.array([start]))[0]
        due, waiting = waiting.at(is_due), waiting.at(~is_due)
        due = due.at(np.lexsort((due.kind, due.visit, due.second))[: rows - done])
        done += len(due.visit)
        yield _piece(shop, due)


def _piece(shop: _Shop, events: _Events) -> LogText:
    users, products = shop.people_and_products(events.visit)
    groups = shop.tastes.groups(products)
    seed = shop.tastes.seed
    is_codeless = draws.traits(seed, _CODELESS, products) < _UNNAMED_CATEGORIES
    dearness = draws.normal_traits(seed, _EXPENSIVE, products)
    columns = [
        raw_log.clock(_FIRST_SECOND + events.second, "%Y-%m-%d %H:%M:%S UTC"),
        raw_log.choose(["view", "cart", "purchase"], events.kind),
        1_000_000 + 17 * products,
        2_053_013_550_000_000_000 + 100_000_007 * groups,
        raw_log.choose([*CATEGORIES, ""], np.where(is_codeless, len(CATEGORIES), groups)),
        raw_log.choose([*(f"brand{number}" for number in range(_BRANDS)), ""], shop.brands(products)),
        raw_log.decimals(np.exp(3.0 + 0.3 * groups + 0.5 * dearness), 2),
        512_000_000 + users,
        _sessions(seed, events.visit),
    ]
    is_sample = events.kind != _VIEW
    labels = (events.kind[is_sample] == _PURCHASE).astype(np.uint8)
    packed = pack(events.chance[is_sample].astype(np.float32), labels)
    return LogText(FILE, raw_log.joined(columns, ","), len(events.visit), packed)


def _sessions(seed: int, visits: NDArray[np.int64]) -> pa.Array:
    """Return a text like a UUID for each of `visits`; all differ, since the last 8 digits count the visits."""
    first, second, third = (
        raw_log.hexadecimal((draws.traits(seed, _SESSION + part, visits) * 2**32).astype(np.uint32))
        for part in range(3)
    )
    parts = [first, *(pc.utf8_slice_codeunits(text, at, at + 4) for text in (second, third) for at in (0, 4))]
    return pc.binary_join_element_wise(*parts[:4], pc.binary_join_element_wise(parts[4], _counted(visits), ""), "-")


def _counted(visits: NDArray[np.int64]) -> pa.Array:
    return raw_log.hexadecimal(visits.astype(np.uint32))
