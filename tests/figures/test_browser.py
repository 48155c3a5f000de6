"""The report page in headless Chromium: behaviour, layout, contrast, and no request to the network.

Skipped where Chromium or the package that drives it is absent; `make test-browser` installs both.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.report_helpers import EVIL, make_all, make_search, row, write_comparison

from parnas.figures.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-browser does it")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; make test-browser installs it"),
]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

# The contrast of each text with what is behind it, up to the first opaque background; text in SVG has a fill.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const parts = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const opaque = (colour) => parts(colour)[3] === 255;
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [red, green, blue] = parts(colour).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrasts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !element.checkVisibility() || element.closest("script")) continue;
    if (element.classList.contains("visually-hidden")) continue;
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    let behind = null;
    for (let at = element; at && !behind; at = at.parentElement) {
      if (opaque(getComputedStyle(at).backgroundColor)) behind = getComputedStyle(at).backgroundColor;
    }
    const [low, high] = [light(ink), light(behind || "rgb(255, 255, 255)")].sort((a, b) => a - b);
    contrasts.push([(high + 0.05) / (low + 0.05), element.className.toString(), walk.currentNode.textContent.trim()]);
  }
  return contrasts;
}"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    profile = tmp_path_factory.mktemp("profile")
    environment = {**os.environ, "HOME": str(profile)}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=environment)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a search with a name that would be markup, long strings in its neighbours, and a comparison."""
    place = tmp_path_factory.mktemp("runs")
    folder = make_all(place, blocks=3, lines=7)
    long = make_search(place / EVIL, blocks=40, lines=4, derived=None, search__space=("s", "s:heads=2", "f", "i"))
    return write_report([folder, long.folder], place / "page")


@pytest.fixture
def open_page(chromium: Any, report: Path) -> Iterator[Any]:
    """Open the page with options of a context; a console message or a request fails the test at its end."""
    contexts, trouble = [], []

    def show(**options: Any) -> Any:
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.on("request", lambda asked: trouble.append(asked.url) if asked.url != report.as_uri() else None)
        page.goto(report.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert [text for text in trouble if not text.startswith("data:")] == []


def player(page: Any) -> Any:
    return page.locator(".player").first


def state(page: Any) -> tuple[str, str, str, str]:
    """Step, string, the text of the slider and the colour of the first cell, as shown."""
    shown = player(page)
    slider = shown.locator("input")
    return (
        shown.locator(".now .step").inner_text(),
        shown.locator(".now .string").inner_text(),
        slider.get_attribute("aria-valuetext"),
        shown.locator(".cell").first.evaluate("(cell) => getComputedStyle(cell).backgroundColor"),
    )


def framed(page: Any) -> list[int]:
    """Return the places of the framed cells, column by column."""
    cells = player(page).locator(".cell").evaluate_all("(cells) => cells.map((cell) => cell.className)")
    return [place for place, name in enumerate(cells) if "chosen" in name]


def test_the_slider_moves_cells_text_and_frames(open_page: Any) -> None:
    page = open_page()
    last = state(page)
    assert last[:3] == ("70", "sfi", "step 70, tau 0.143, sfi")
    assert framed(page) == [0, 4, 8]
    player(page).locator("input").fill("0")
    first = state(page)
    assert first[:3] == ("10", "sss", "step 10, tau 1.000, sss")
    assert framed(page) == [0, 3, 6]
    assert first[3] != last[3]
    player(page).locator("input").fill("6")
    assert state(page) == last
    assert framed(page) == [0, 4, 8]


def test_the_keyboard_reaches_and_works_everything(open_page: Any) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    player(page).locator("input").focus()
    page.keyboard.press("ArrowLeft")
    assert state(page)[0] == "60"
    page.keyboard.press("Home")
    assert state(page)[0] == "10"
    player(page).locator("button").focus()
    page.keyboard.press("Space")
    assert player(page).locator("button").inner_text().endswith("Pause")
    page.keyboard.press("Enter")
    assert player(page).locator("button").inner_text().endswith("Play")
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    reached, page = set(), open_page()
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName"))
        if page.evaluate("document.activeElement === document.body"):
            break
    assert {"A", "BUTTON", "INPUT", "SUMMARY", "DIV"} <= reached


def test_play_shows_every_step_to_the_last_and_then_stops(open_page: Any) -> None:
    page = open_page()
    page.evaluate(
        """() => {
          window.seen = [];
          const step = document.querySelector(".player .now .step");
          new MutationObserver(() => window.seen.push(step.textContent)).observe(step, {childList: true});
        }"""
    )
    button = player(page).locator("button")
    button.click()
    assert button.inner_text().endswith("Pause")
    playwright.expect(button).to_contain_text("Play")
    assert button.get_attribute("aria-pressed") is None  # the name says it, and both would contradict each other
    assert page.evaluate("window.seen") == ["10", "20", "30", "40", "50", "60", "70"]
    assert button.inner_text().endswith("Play")


def test_columns_sort_both_ways_and_say_so(open_page: Any) -> None:
    page = open_page()
    table = page.locator("table.sortable").first

    def column(number: int) -> list[str]:
        return table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()

    head = table.locator("thead th", has_text="ppl per token")
    for direction, order in (
        ("ascending", ["derived", "interleaved", "search"]),
        ("descending", ["search", "interleaved", "derived"]),
    ):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        assert column(1) == order
    name = table.locator("thead th").first
    name.locator("button").press("Enter")
    assert (name.get_attribute("aria-sort"), head.get_attribute("aria-sort")) == ("ascending", "none")
    assert column(1) == ["derived", "interleaved", "search"]


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_sticks_out_at_any_width(open_page: Any, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 740})
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate(
        """[...document.querySelectorAll('.chart svg')].filter((each) => each.checkVisibility())
        .map((each) => each.getBoundingClientRect().width)"""
    )
    assert min(sizes) > 200


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "a-run-with-a-name-of-" + "very-" * 12 + "many-letters"
    rows = [row(name, "sffi" * 8), row("other", "s:heads=2 f " * 16), row("odd", "zz" * 60)]
    return write_report([write_comparison(tmp_path_factory.mktemp("long") / "comparison", rows)])


@pytest.mark.parametrize(("width", "media"), [(320, "screen"), (1280, "screen"), (720, "print")])
def test_tables_show_every_block_of_long_strings_and_the_end_of_long_names(
    chromium: Any, long_names: Path, width: int, media: str
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto(long_names.as_uri())
    page.emulate_media(media=media)
    cells = "table td, table tbody th, .whole, .tiles span"
    clipped = page.evaluate(
        """(cells) => [...document.querySelectorAll(cells)].filter((each) => {
          const home = each.closest("td, th").getBoundingClientRect(), own = each.getBoundingClientRect();
          const beyond = own.right > home.right + 1 || own.bottom > home.bottom + 1;
          return beyond || (each.clientWidth && each.scrollWidth > each.clientWidth + 1);
        }).map((each) => each.textContent)""",
        cells,
    )
    assert clipped == []
    assert page.locator(".tiles").first.locator("span").count() == 32
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_the_contrast_of_wcag_aa(open_page: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for frame in ("0", "3", "6"):
        player(page).locator("input").fill(frame)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 200
        assert [each for each in contrasts if each[0] < 4.5] == []


def test_dark_and_light_are_different_and_follow_the_system(open_page: Any) -> None:
    page = open_page(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light, cell = page.evaluate(background), state(page)[3]
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    assert state(page)[3] != cell


def test_paper_shows_the_last_frame_and_all_details(open_page: Any) -> None:
    page = open_page(color_scheme="dark")
    player(page).locator("input").fill("0")
    page.emulate_media(media="print")
    playwright.expect(player(page).locator(".now .step")).to_have_text("70")
    assert not player(page).locator("input").is_visible()
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("pre.config").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(format="A4")[:4] == b"%PDF"
    page.emulate_media(media="screen")
    playwright.expect(page.locator("details[open]")).to_have_count(0)


def test_less_motion_is_respected(open_page: Any) -> None:
    page = open_page(reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate("document.getAnimations().length") == 0


def test_every_picture_and_control_has_a_name(open_page: Any) -> None:
    page = open_page()
    tree = page.locator("body").aria_snapshot()
    for line in tree.splitlines():
        for role in ("img", "button", "slider", "link", "region", "table"):
            assert line.strip().rstrip(":") != f"- {role}", line
    assert "Heatmap of pi" in tree
    assert page.locator("output, [aria-live], [role=status]").count() == 0
    assert 'slider "Step"' in tree


def test_it_can_be_read_without_scripts(open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    assert player(page).locator(".now .step").inner_text() == "70"
    assert player(page).locator(".cell").first.text_content() == "0.91"
    assert page.locator("table.sortable tbody tr").count() >= 3
