"""Writes what a shop logs, in the columns of REES46's public logs, with a known rule for which carts are bought."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from terarec.metrics import AUC

CATEGORIES = (
    *("electronics.smartphone", "electronics.audio.headphone", "electronics.video.tv", "electronics.clocks"),
    *("computers.notebook", "computers.desktop", "appliances.kitchen.kettle", "appliances.kitchen.washer"),
    *("appliances.environment.vacuum", "apparel.shoes", "apparel.shoes.keds", "furniture.bedroom.bed"),
)
BRANDS = 20
PRODUCTS = 600
USERS = 800
FIRST_DAY = np.datetime64("2019-10-01T00:00:00")
DAYS = 14


def write_events(path: Path, carts: int, seed: int = 0) -> float:
    """Write a CSV file of views, carts and purchases in order of time.

    A product lies in a cart after one to five views. Its purchase is more likely for some brands, categories and users,
    for what was looked at often and what is cheap for its category; and brands differ in which hours suit them.

    Args:
        path: of the file.
        carts: products that are put into carts.
        seed: the same seed gives the same events.

    Returns:
        The AUC of the true chances: no model can beat it but by chance.
    """
    rng = np.random.default_rng(seed)
    category, brand = rng.integers(0, len(CATEGORIES), PRODUCTS), rng.integers(0, BRANDS, PRODUCTS)
    expensive = rng.normal(size=PRODUCTS)
    price = np.round(np.exp(3.0 + 0.3 * category + 0.5 * expensive), 2)

    user, product = rng.integers(0, USERS, carts), (PRODUCTS * rng.random(carts) ** 1.5).astype(int)
    views = rng.integers(1, 6, carts)
    second = np.sort(rng.integers(900, DAYS * 86_400, carts))
    evening = np.where(second % 86_400 // 3600 >= 16, 1.0, -1.0)

    logit = 0.5 * (views - 3) - 0.7 * expensive[product] - 0.4
    logit += rng.normal(size=BRANDS)[brand[product]] + rng.normal(size=len(CATEGORIES))[category[product]]
    logit += rng.normal(size=BRANDS)[brand[product]] * evening + 0.5 * rng.normal(size=USERS)[user]
    chance = 1 / (1 + np.exp(-logit))
    is_bought = rng.random(carts) < chance

    # Views before the cart, a purchase a few minutes after it.
    which = np.concatenate([np.repeat(np.arange(carts), views), np.arange(carts), np.flatnonzero(is_bought)])
    kind = np.repeat([0, 1, 2], [views.sum(), carts, is_bought.sum()])
    moment = second[which] + np.choose(kind, [-rng.integers(10, 900, len(kind)), 0, rng.integers(60, 900, len(kind))])
    order = np.argsort(moment, kind="stable")
    which, kind, moment = which[order], kind[order], moment[order]
    item = product[which]
    times = np.char.add(np.char.replace((FIRST_DAY + moment).astype("U19"), "T", " "), " UTC")
    columns = {
        "event_time": times,
        "event_type": np.array(["view", "cart", "purchase"])[kind],
        "product_id": 1_000_000 + 17 * item,
        "category_id": 2_053_013_550_000_000_000 + category[item],
        "category_code": np.array(CATEGORIES)[category[item]],
        "brand": np.char.add("brand", brand[item].astype(str)),
        "price": price[item],
        "user_id": 512_000_000 + user[which],
        "user_session": np.char.add("session", which.astype(str)),
    }
    csv.write_csv(pa.table(columns), path)
    return AUC().update(chance.astype(np.float32), is_bought.astype(np.float32)).compute()
