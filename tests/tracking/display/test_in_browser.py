"""The report in a browser: everything draws, nothing fails, nothing is asked of the network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_run import HOSTILE, write_run

selenium = pytest.importorskip("selenium", reason="selenium is not installed (pip install '.[dev]')")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("browser")
    run = write_run(place / "halo", host=HOSTILE)
    naive = write_run(place / "naive", naive=4)
    path = run / "report.html"
    path.write_text(render(build_page(read_run_files(run), read_run_files(naive), num_parts=4)))
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


def test_every_figure_draws_points(browser):
    browser.execute_script("domainpar.drawAll()")
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.figure')].map((div) => [div.id, "
        "div.querySelectorAll('.scatterlayer .js-line, .scatterlayer .point, .barlayer .point path').length, "
        "div.querySelectorAll('.xtitle').length, div.querySelectorAll('.legend .traces').length])"
    )
    assert len(drawn) == 19
    for name, points, titles, traces in drawn:
        few = name in ("track-resolution", "track-pulls", "track-bias")  # of a small run no bin has enough tracks
        assert (points > 0) != few, name
        assert titles > 0, name
        assert traces > 0 or few, name


def test_every_figure_comes_by_itself_when_it_comes_into_view(browser):
    last = browser.find_elements(By.CSS_SELECTOR, ".figure")[-1]
    browser.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", last)
    WebDriverWait(browser, 10).until(lambda _: last.find_elements(By.CSS_SELECTOR, ".plot-container"))


def test_matching_styles_change_all_figures_of_tracks(browser):
    browser.execute_script("domainpar.drawAll()")
    heights = "return document.getElementById('track-efficiency').data.map((one) => [...(one.text || [])].join())"
    before = browser.execute_script(heights)
    browser.execute_script("document.querySelector('[data-switches] button[value=two_way]').click()")
    assert browser.execute_script("return domainpar.figures.get('track-fakes').shown") == "two_way"
    pressed = "return document.querySelector('[data-switches] [aria-pressed=true]').value"
    assert browser.execute_script(pressed) == "two_way"
    browser.execute_script("document.querySelector('[data-switches] button[value=atlas]').click()")
    assert browser.execute_script(heights) == before


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
    assert legend.endswith(f"borrows {ghosts} halo nodes")
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
