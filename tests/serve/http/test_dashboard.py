# SPDX-License-Identifier: Apache-2.0
"""The dashboard: its page needs nothing from elsewhere, and works in a browser."""

import os
import re
import shutil
from typing import Literal

import httpx
import numpy as np
import pytest

from terarec.serve import InferenceSession, ServedModels
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import served
from tests.serve.http.test_drift_route import drift_of_two, models
from tests.waiting import PATIENCE

__all__ = ["models"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_needs_nothing_from_elsewhere(models: ServedModels) -> None:
    with served(models) as server:
        answer = httpx.get(f"{server.url}/", timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe-eval'" not in policy
    urls = set(re.findall(r"https?://[^\s\"']+", answer.text))
    assert urls == {"http://www.w3.org/2000/svg"}  # the name of a language, which nothing is loaded from
    assert not re.search(r"<script\s|<img|<iframe|@import|url\(|innerHTML|eval\(", answer.text)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_record_is_scored_in_a_browser(
    models: ServedModels, session: InferenceSession, trained: TrainedRun, width: int, scheme: Literal["light", "dark"]
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    record = {name: values[0] for name, values in trained.records(0, 1).items()}
    problems: list[str] = []
    with served(models, drift=drift_of_two()) as server, sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.goto(f"{server.url}/")
        page.wait_for_selector("#latency text", state="attached")
        axes = page.eval_on_selector_all("#latency text", "all => all.map(one => one.textContent)")
        page.wait_for_selector("#fields input")
        for name, value in record.items():
            page.fill(f"#fields input[name={name}]", "" if value is None else str(value))
        page.click("#form button")
        page.wait_for_selector("#result td")
        shown = float(page.inner_text("#result b"))
        rows = page.query_selector_all("#result tr")[1:]
        moves = [[cell.inner_text() for cell in row.query_selector_all("td")[:2]] for row in rows]
        page.wait_for_selector("#latency path[d^=M]", state="attached")  # two looks at the metrics, and a request
        assert page.inner_text("#models tr:nth-child(2)").split()[:3] == ["dlrm", "3", "READY"]
        cells = [row.query_selector_all("td") for row in page.query_selector_all("#drift tr")[1:]]
        drifts = [tuple(cell.inner_text().strip() for cell in row[1:4]) for row in cells]
        rests = page.inner_text("#rests")
        assert page.inner_text("#problem") == page.inner_text("#refused") == ""
        assert "answers 100 %" in page.inner_text("#models tr:nth-child(2)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        models_box = "document.getElementById('models').parentElement"
        assert page.evaluate(f"{models_box}.scrollWidth <= {models_box}.clientWidth")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        if "TERAREC_SCREENSHOTS" in os.environ:
            page.screenshot(path=f"{os.environ['TERAREC_SCREENSHOTS']}/dashboard-{width}-{scheme}.png", full_page=True)
        page.fill("#fields input[name=I1]", "<b>1")
        page.click("#form button")
        page.wait_for_function("document.getElementById('refused').textContent.startsWith('I1: got')")
        browser.close()
    assert problems == []
    assert axes == ["", "", "", "5 min ago", "now", "no requests yet"]
    assert drifts == [("C1", "0.71", "large"), ("I1", "0.12", "moderate"), ("C2", "\u2013", "")]
    assert "the last 420 records of the sample, compared with 131,072 rows" in rests
    assert "other, version 1: shop/data: no data set" in rests
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")
    score = float(session.predict(trained.records(0, 1))[0, 0])
    assert shown == pytest.approx(score, rel=1e-4)
    given = [name for name, value in record.items() if value not in (None, "")]
    assert {name for name, _ in moves} == set(given)
    for name, moved in moves:
        without = session.predict({key: [None if key == name else value] for key, value in record.items()})
        assert float(moved.replace("\u2212", "-")) == pytest.approx(score - float(without[0, 0]), rel=0.01, abs=1e-6)
    sizes = [abs(float(moved.replace("\u2212", "-"))) for _, moved in moves]
    assert np.all(np.diff(sizes) <= 0)
