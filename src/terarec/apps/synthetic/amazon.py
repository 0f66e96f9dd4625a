# SPDX-License-Identifier: Apache-2.0
"""Reviews of products in the layouts of the Amazon review data, drawn from a planted model of preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.click_model import category_values
from terarec.apps.synthetic.draws import Tastes, chance
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, check_choice, drawn, write_log

Layout = Literal["2018", "2023"]
FILES = {"2018": ("reviews.json", "meta.json"), "2023": ("reviews.jsonl", "meta.jsonl")}

CATEGORIES = (
    *("Headphones", "Cameras", "Televisions", "Laptops", "Tablets", "Routers", "Keyboards", "Mice", "Monitors"),
    *("Printers", "Chargers", "Cables", "Speakers", "Drones", "Projectors", "Scanners"),
)
_BRANDS = 40
_BRAND_EFFECT = 0.7
_LIKED_SHARE = 0.7
_UNNAMED_BRANDS = 0.1
_FIRST_DAY, _DAYS = 14_610, 3_000  # 2010-01-01

_BLOCK_ROWS = 32_768
_PILOT_ROWS = 32_768
_DAY, _LABEL, _STARS, _BRAND, _BRANDLESS, _PRICE, _SECOND = range(7)
_BRAND_TASTE = 30


def generate(
    out: Path, *, rows: int, layout: Layout = "2018", seed: int = 0, progress: Progress | None = None
) -> GenerateReport:
    """Write reviews and products, one JSON object a line, and ``generated.json`` into `out`.

    ``2018``: ``reviews.json`` with ``overall``, ``reviewerID``, ``asin``, ``unixReviewTime`` in seconds and more, and
    ``meta.json``. ``2023``: ``reviews.jsonl`` with ``rating``, ``user_id``, ``parent_asin``, ``timestamp`` in
    milliseconds and more, and ``meta.jsonl``. Reviews are in no order. The label of a sample is whether it gives at
    least 4 stars; that depends on the product, its brand, and whether its category is a favourite of the user's.

    `rows` are the reviews, and `layout` is one of those above; other arguments and errors are those of
    `raw_log.write_log`.
    """
    check_choice("layout", layout, get_args(Layout))
    pieces = _pieces(rows, layout, seed)
    return write_log(out, pieces, rows=rows, seed=seed, options={"layout": layout}, progress=progress)


@dataclass(frozen=True, slots=True)
class _Products:
    """Products, users and click model of the reviews."""

    tastes: Tastes
    bias: float

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Products:
        tastes = Tastes(
            seed=seed,
            # A user needs several reviews, and a product many, so that a model can fit what is planted in them.
            num_users=max(rows // 25, 10),
            num_items=min(max(rows // 100, 160), 500_000),
            num_groups=len(CATEGORIES),
        )
        return cls(tastes, tastes.planted_bias(_PILOT_ROWS, _LIKED_SHARE, cls(tastes, 0.0).logits))

    def brands(self, products: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the brand's number of each of `products`; the last means none."""
        return self.tastes.brands(products, (_BRAND, _BRANDLESS), _BRANDS, _UNNAMED_BRANDS)

    def logits(self, users: NDArray[np.int64], products: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits of P(rating >= 4)."""
        taste = draws.normal_traits(self.tastes.seed, _BRAND_TASTE, self.brands(products))
        return self.bias + self.tastes.logits(users, products) + _BRAND_EFFECT * taste


def _pieces(rows: int, layout: Layout, seed: int) -> Iterator[LogText]:
    products = _Products.plan(rows, seed)
    reviews, meta = FILES[layout]
    for block in blocks(rows, _BLOCK_ROWS):
        # A piece is computed from the numbers of its reviews alone, so that memory does not grow with the log.
        yield _reviews(products, reviews, layout, np.arange(*block))
    for block in blocks(products.tastes.num_items, _BLOCK_ROWS):
        yield _meta(products, meta, layout, np.arange(*block))


def _reviews(products: _Products, file: str, layout: Layout, numbers: NDArray[np.int64]) -> LogText:
    seed = products.tastes.seed
    users = products.tastes.draw_users(numbers)
    bought = products.tastes.draw_items(users, numbers)
    liked, packed = drawn(chance(products.logits(users, bought)), draws.traits(seed, _LABEL, numbers))
    place = draws.traits(seed, _STARS, numbers)
    stars = np.where(liked, 4 + (place * 2).astype(int), 1 + (place * 3).astype(int))
    seconds = (_FIRST_DAY + draws.choices(seed, _DAY, numbers, _DAYS)) * 86_400
    # With escapes and a letter beyond ASCII, which a reader of JSON lines has to get right.
    review = raw_log.choose([r"Not what I \"hoped\" for.\nSad.", "Does what it says, \u00e0 la carte."], liked * 1)
    reviewers = raw_log.concatenated("A", pc.utf8_upper(_hidden(users)))
    if layout == "2018":
        columns = [
            *('{"overall": ', stars, '.0, "verified": true, "reviewTime": "', raw_log.clock(seconds, "%m %d, %Y")),
            *('", "reviewerID": "', reviewers, '", "asin": "', _asins(bought), '", "reviewerName": "Reader"'),
            *(', "reviewText": "', review, '", "summary": "Tried it", "unixReviewTime": ', seconds, "}"),
        ]
    else:
        second = draws.choices(seed, _SECOND, numbers, 86_400_000)
        columns = [
            *('{"rating": ', stars, '.0, "title": "Tried it", "text": "', review, '", "images": [], "asin": "'),
            *(_asins(bought), '", "parent_asin": "', _asins(bought), '", "user_id": "', reviewers),
            *('", "timestamp": ', seconds * 1000 + second, ', "helpful_vote": 0, "verified_purchase": true}'),
        ]
    return LogText(file, raw_log.joined(columns, ""), len(numbers), packed)


def _meta(products: _Products, file: str, layout: Layout, numbers: NDArray[np.int64]) -> LogText:
    """Return the metadata lines of the products `numbers`."""
    category = raw_log.choose(CATEGORIES, products.tastes.groups(numbers))
    brand = raw_log.choose([*(f"Brand {number}" for number in range(_BRANDS)), ""], products.brands(numbers))
    price = raw_log.decimals(5 + 200 * draws.traits(products.tastes.seed, _PRICE, numbers) ** 2, 2)
    if layout == "2018":
        columns = [
            *('{"category": ["Electronics", "', category, '"], "title": "Product ', numbers, '", "brand": "', brand),
            *('", "price": "$', price, '", "asin": "', _asins(numbers), '"}'),
        ]
    else:
        columns = [
            *('{"main_category": "', category, '", "title": "Product ', numbers, '", "store": "', brand),
            *('", "price": ', price, ', "parent_asin": "', _asins(numbers), '", "categories": ["Electronics", "'),
            *(category, '"]}'),
        ]
    return LogText(file, raw_log.joined(columns, ""))


def _hidden(numbers: NDArray[np.int64]) -> pa.Array:
    """Return eight hexadecimal digits for each of `numbers`, all different, that hide their order."""
    return raw_log.hexadecimal(category_values(0, numbers).astype(np.uint32))


def _asins(products: NDArray[np.int64]) -> pa.Array:
    return raw_log.concatenated("B0", pc.utf8_upper(_hidden(products)))
