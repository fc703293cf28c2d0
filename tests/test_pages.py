"""The pages in a real browser: no error, nothing from elsewhere, tables that scroll, dark colours,
the numbers of the files."""

from __future__ import annotations

import functools
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedml_noniid.metrics import METRICS
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.tracking import runs, view
from fedml_noniid.pipelines.tracking.store import Store
from tests.pipelines.small import PARAMS, ROOT, environment, run_stages

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium"),
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType"),
]
WIDTH = {"wide": 1280, "narrow": 500}  # pixels
CONTRAST = 4.5  # of text, as WCAG's level AA asks
# The smallest contrast of a page's texts with what is behind them, by the formula of WCAG 2.
LOWEST_CONTRAST = """
() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = colour => parts(colour).slice(0, 3)
    .map(x => x / 255).map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return getComputedStyle(at).backgroundColor;
    }
    return getComputedStyle(document.documentElement).colorScheme === "dark" ?
      "rgb(18, 18, 18)" : "rgb(255, 255, 255)";
  };
  const ratios = [...document.querySelectorAll("h1, h2, p, li, td, th, code")]
    .filter(one => one.innerText.trim() && one.checkVisibility())
    .map(one => {
      const pair = [luminance(getComputedStyle(one).color), luminance(behind(one))];
      return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), one.innerText.slice(0, 40)];
    });
  return ratios.sort((a, b) => a[0] - b[0])[0];
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Seen:
    """A page, with what went wrong on it."""

    def __init__(
        self, browser: Any, address: str, width: int, scheme: str, height: int = 900
    ) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page, self.errors, self.from_elsewhere = context.new_page(), list[str](), list[str]()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(address)

    def _said(self, message: Any) -> None:
        # MLflow's own page asks for a user, also where there are none.
        if message.type == "error" and "users/current" not in message.location["url"]:
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            self.from_elsewhere.append(request.url)

    def check(self) -> None:
        assert not self.errors and not self.from_elsewhere
        width = self.page.viewport_size["width"]
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        ratio, text = self.page.evaluate(LOWEST_CONTRAST)
        assert ratio >= CONTRAST, text


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTH.values(), ids=[*WIDTH])
def test_the_report(browser: Any, study: Path, width: int, scheme: str) -> None:
    seen = Seen(browser, (study / "report" / "report.html").as_uri(), width, scheme)
    seen.check()
    assert seen.page.evaluate("[...document.images].every(one => one.naturalWidth > 100)")
    tables = "[...document.querySelectorAll('.wide')].map(x => [x.scrollWidth, x.clientWidth])"
    wider = [inner > outer for inner, outer in seen.page.evaluate(tables)]
    assert any(wider) == (width == WIDTH["narrow"]), "a table scrolls in its own box"
    background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (lightness < 60) == (scheme == "dark") or background == "rgba(0, 0, 0, 0)"


def test_the_reports_numbers_are_those_of_the_file(browser: Any, study: Path) -> None:
    seen = Seen(browser, (study / "report" / "report.html").as_uri(), 1280, "light")
    rows = seen.page.locator("table").first.locator("tr").all()
    shown = [row.locator("th, td").all_inner_texts() for row in rows]
    column = {title: place for place, title in enumerate(shown[0])}
    cells = {row[0].split()[0]: row for row in shown[1:]}
    lines = table(study / "report" / "summary.csv")
    assert len(lines) == 2
    for line in lines:
        row, percent = cells[line["recipe"]], METRICS["accuracy"]
        for title, name in (
            ("last round, %", "final"),
            ("last 5, %", "last_5_rounds"),
            ("balanced, %", "balanced_accuracy"),
            ("macro-F1, %", "macro_f1"),
            ("worst client, %", "worst_client"),
        ):
            assert row[column[title]] == percent.number(float(line[f"{name}_mean"])), title
        assert row[column["seeds"]] == line["final_seeds"]


@pytest.mark.slow
def test_mlflows_view(browser: Any, study: Path) -> None:
    """The best method is on top, each line ends where the data end, and bars have two digits."""
    from fedml_noniid.pipelines.tracking.sync import sync

    store = Store(study, None)
    sync(store, study, "small")
    (experiment_id,) = (
        one.experiment_id for one in store.client().search_experiments() if one.name == "small"
    )
    methods = [
        run
        for run in runs.search(store.client(), experiment_id)
        if run.data.tags.get("kind") == "method"
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fedml_noniid", "ui", "--root", str(study), f"--port={port}"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        seen = Seen(browser, view.link(address, experiment_id), 1280, "light", 2500)
        best, *_ = sorted(methods, key=lambda run: -run.data.metrics["final/mean_accuracy_percent"])
        score = f"{best.data.metrics['final/mean_accuracy_percent']:.2f}".rstrip("0").rstrip(".")
        seen.page.locator(".bartext").filter(has_text=score).first.wait_for(timeout=120_000)
        names = seen.page.locator(".ag-row a[href*='/runs/']").all_inner_texts()
        assert names[0] == best.info.run_name
        assert not seen.errors and not seen.from_elsewhere
    finally:
        server.terminate()
        server.wait(30)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_the_documentation(browser: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    environment_ = environment() | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=environment_)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for page in ("index.html", "methods.html"):
            for width in WIDTH.values():
                for scheme in ("light", "dark"):
                    address = f"http://127.0.0.1:{server.server_port}/{page}"
                    Seen(browser, address, width, scheme).check()
        server.shutdown()
