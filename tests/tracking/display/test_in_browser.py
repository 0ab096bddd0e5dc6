"""The report in a browser: everything draws, nothing fails, nothing is asked of the network."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import small_run
from small_run import HOSTILE, simulated, write_run

selenium = pytest.importorskip("selenium", reason="selenium is not installed (pip install '.[dev]')")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

from domainpar.tracking.display import resolutions  # noqa: E402
from domainpar.tracking.display.chart import Colour  # noqa: E402
from domainpar.tracking.display.html import render  # noqa: E402
from domainpar.tracking.display.run_files import read_run_files  # noqa: E402
from domainpar.tracking.display.sections import build_page  # noqa: E402
from domainpar.tracking.reco.performance.lost import REASONS  # noqa: E402

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-unsafe-swiftshader --window-size=1400,1000"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver (Debian: apt install chromium chromium-driver)"
)

# Pixels of the canvas of each view that are neither white nor grey.
COLOURED = """
return domainpar.display.views.slice(0, 2).map((view) => {
  view.draw();
  const data = view.context.getImageData(0, 0, view.canvas.width, view.canvas.height).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 40) count++;
  }
  return count;
});
"""

# Of each panel its name, and the boxes of the element, of its frame, of what is drawn in it, and of its words, where
# all variants are shown; and how wide the page is.
PANELS = """
const hidden = [...document.querySelectorAll(".chart[hidden]")];
for (const chart of hidden) chart.hidden = false;
const box = (element) => {
  const { left, right, top, bottom } = element.getBoundingClientRect();
  return { left, right, top: top + scrollY, bottom: bottom + scrollY };
};
const panels = [...document.querySelectorAll("figure > svg")].map((svg) => {
  const shapes = [...svg.querySelectorAll("path, circle")];
  return {
    name: svg.getAttribute("aria-label").split(" against ")[0].split(" [")[0], svg: box(svg),
    frame: box(shapes.find((it) => it.getAttribute("stroke") === "FRAME")),
    data: shapes.filter((it) => !["FRAME", "GRID", "#ffffff"].includes(it.getAttribute("stroke") ||
      it.getAttribute("fill"))).map(box),
    texts: [...svg.querySelectorAll("text")].map(box),
  };
});
for (const chart of hidden) chart.hidden = true;
return [panels, document.documentElement.scrollWidth];
""".replace("FRAME", Colour.FRAME).replace("GRID", Colour.GRID)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A report of two runs. Fits tell errors that are far too small, and some particles have two tracks."""
    place, tracks_of, differences = tmp_path_factory.mktemp("browser"), small_run.tracks_of, resolutions.differences
    graphs = [simulated(0), simulated(1), simulated(2, 6000)]

    def in_halves(hits, every):
        track_id = tracks_of(hits, every)
        other = (track_id >= 0) & (hits.particle_id % 5 == 1) & (np.arange(len(hits)) % 2 == 1)
        _, first, which = np.unique(2 * track_id + other, return_index=True, return_inverse=True)
        return np.where(track_id < 0, -1, np.argsort(np.argsort(np.where(track_id[first] < 0, -1, first)))[which] - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run, "tracks_of", in_halves)
        run, naive = write_run(place / "halo", graphs, host=HOSTILE), write_run(place / "naive", graphs, naive=4)
        patch.setattr(resolutions, "differences", lambda *event: differences(*event) * np.r_[np.ones(8), [3.5] * 5])
        page = build_page(read_run_files(run), read_run_files(naive), num_parts=4)
    path = run / "report.html"
    path.write_text(render(page))
    return path


@pytest.fixture(scope="module")
def browser(files, tmp_path_factory):
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        browser.get(Path(files).as_uri())
        WebDriverWait(browser, 30).until(lambda _: browser.execute_script("return 'domainpar' in window"))
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def display(browser):
    """The event display as it was at first."""
    browser.execute_script(
        "const d = domainpar.display; d.choose(null); d.setPart(-1); for (const view of d.views) view.reset();"
        "for (const name of Object.keys(d.layers)) if (d.layers[name].there) d.setLayer(name, name === 'hits');"
    )
    return browser


@pytest.mark.parametrize("width", [1400, 700])
def test_every_panel_is_high_holds_its_data_and_cuts_no_word(browser, width):
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    panels, wide = browser.execute_script(PANELS)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width, "the page cannot be read without scrolling sideways"
    assert len(panels) > 60
    assert {"width of the pull of z0", "duplicates per found target"} <= {panel["name"] for panel in panels}
    columns = {round(panel["svg"]["left"]) for panel in panels}
    assert len(columns) == {1400: 3, 700: 2}[width]
    for panel in panels:
        svg, frame = panel["svg"], panel["frame"]
        assert frame["bottom"] - frame["top"] > 150, panel["name"]
        assert frame["right"] - frame["left"] > 200, panel["name"]
        assert panel["data"], f"nothing is drawn of {panel['name']}"
        for box in panel["data"]:
            assert within(box, frame, 5), panel["name"]  # half of a marker
        for place, box in enumerate(panel["texts"]):
            assert within(box, svg, 0.5), (panel["name"], box)
            assert not any(overlap(box, other) for other in panel["texts"][:place]), (panel["name"], box)
            assert within(box, {"left": 0, "right": width, "top": 0, "bottom": 1e6}, 0.5), (panel["name"], box)


def within(box, other, spare):
    return (
        box["left"] >= other["left"] - spare
        and box["right"] <= other["right"] + spare
        and box["top"] >= other["top"] - spare
        and box["bottom"] <= other["bottom"] + spare
    )


def overlap(box, other):
    return all(
        min(box[high], other[high]) - max(box[low], other[low]) > 1
        for low, high in (("left", "right"), ("top", "bottom"))
    )


def test_matching_styles_change_all_charts_of_tracks(browser):
    shown = "return [...document.querySelectorAll('[data-variant]')].filter((it) => !it.hidden).map((it) => it.id)"
    before = browser.execute_script(shown)
    assert {"track-efficiency-atlas", "track-fakes-atlas"} < set(before)
    browser.execute_script("document.querySelector('.switch button[value=two_way]').click()")
    assert browser.execute_script(shown) == [name.replace("atlas", "two_way") for name in before]
    pressed = "return document.querySelector('.switch [aria-pressed=true]').value"
    assert browser.execute_script(pressed) == "two_way"
    browser.execute_script("document.querySelector('.switch button[value=atlas]').click()")
    assert browser.execute_script(shown) == before


def test_hits_are_painted_in_both_views_and_go_when_they_are_switched_off(display):
    painted = display.execute_script(COLOURED)
    assert min(painted) > 300
    display.find_element(By.CSS_SELECTOR, "[data-layer=hits]").click()
    assert max(display.execute_script(COLOURED)) < 20


@pytest.mark.parametrize("layer", ["cut", "truth", "found", "others", "missed"])
def test_each_layer_paints_something_of_its_own(display, layer):
    display.execute_script("domainpar.display.setLayer('hits', false)")
    display.execute_script(f"document.querySelector('[data-layer={layer}]').click()")
    assert min(display.execute_script(COLOURED)) > 50


def test_a_chosen_part_tells_its_ghosts(display):
    Select(display.find_element(By.CSS_SELECTOR, "[data-control=part]")).select_by_value("1")
    legend = display.find_element(By.CSS_SELECTOR, "#event-display .legend").text
    ghosts = display.execute_script("return domainpar.display.ghosts.length")
    assert ghosts > 0
    assert legend.endswith(f"borrows {ghosts:,} halo nodes")
    foreign = display.execute_script(
        "const d = domainpar.display; return [...d.ghosts].every((hit) => d.part[hit] !== 1)"
    )
    assert foreign


def test_each_missed_particle_is_listed_with_the_reason_of_its_loss(display):
    rows = display.execute_script(
        "return [...document.querySelector('.list').querySelectorAll('tr')].map((row) => row.lastChild.textContent)"
    )
    reasons = {f"{reason}: {why}" for reason, why in REASONS.items()}
    assert rows
    assert set(rows) <= reasons


def test_a_missed_particle_is_marked_and_brought_into_view(display):
    whole = display.execute_script("return domainpar.display.views[0].scale[0]")
    display.execute_script("document.querySelector('.list button').click()")
    assert display.execute_script("return domainpar.display.views[0].scale[0]") > 1.2 * whole
    assert display.find_element(By.CSS_SELECTOR, ".chosen").text.startswith("black line: particle")
    inside = display.execute_script(
        "const d = domainpar.display, v = d.views[0]; return [...d.marked].every((hit) => "
        "v.inside(v.offset[0] + v.x[hit] * v.scale[0], v.offset[1] - v.y[hit] * v.scale[1]))"
    )
    assert inside


def test_pointing_at_a_hit_tells_its_names(display):
    told = display.execute_script(
        "const d = domainpar.display, v = d.views[0], hit = d.particleRows[0];"
        "v.hover(v.offset[0] + v.x[hit] * v.scale[0], v.offset[1] - v.y[hit] * v.scale[1]);"
        "return [v.tip.hidden, v.tip.textContent]"
    )
    assert told[0] is False
    for word in ("hit ", "volume ", "layer ", "part ", "particle ", "track"):
        assert word in told[1]


def test_an_id_can_be_looked_for_and_an_unknown_one_is_said_to_be(display):
    show = (
        "const d = domainpar.display; d.root.querySelector('[data-control=where]').value = 'hit';"
        "d.root.querySelector('[data-control=word]').value = arguments[0]; d.search();"
        "return d.root.querySelector('.chosen').textContent"
    )
    assert "hit 5" in display.execute_script(show, "5")
    assert display.execute_script(show, "<b>x</b>") == "no hit <b>x</b> in this event"


def test_zooming_keeps_the_point_under_the_pointer(display):
    before, after = display.execute_script(
        "const v = domainpar.display.views[1]; const a = v.toData(200, 150); v.zoom(3, 200, 150);"
        "return [a, v.toData(200, 150)]"
    )
    assert after == pytest.approx(before)


def test_a_view_that_was_not_moved_shows_everything_in_a_window_of_any_size_and_a_moved_one_keeps_its_middle(display):
    state = (
        "const v = domainpar.display.views[0], { width, height } = v.inner;"
        "return [v.scale[0] * 2 * v.range()[1] / Math.min(width, height), ...v.toData(62 + width / 2, 12 + height / 2)]"
    )

    def resized():
        for width in (700, 1400):
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            display.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            time.sleep(0.3)
            yield display.execute_script(state)
        display.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    for share, *middle in resized():
        assert share == pytest.approx(1 / 1.03, abs=0.01)
        assert middle == pytest.approx([0, 0], abs=1)
    display.execute_script("domainpar.display.views[0].pan(40, 0)")
    _, *before = display.execute_script(state)
    for _, *middle in resized():
        assert middle == pytest.approx(before, abs=1)


def test_the_third_view_opens(display):
    display.execute_script("document.querySelectorAll('[data-view]')[2].click()")
    WebDriverWait(display, 10).until(lambda _: display.execute_script("return domainpar.display.views[2].width > 500"))
    display.execute_script("document.querySelectorAll('[data-view]')[2].click()")


def test_no_script_failed_no_request_was_made_and_no_word_of_the_run_became_code(browser):
    """Last in this file: it looks at all that happened before."""
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    assert any(url.startswith("file:") for url in asked)
    assert not [url for url in asked if url.startswith(("http", "ws"))]
    assert browser.execute_script("return window.hacked") is None
