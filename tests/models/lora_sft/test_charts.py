"""SVG charts: well-formed text, points where they belong, gaps, thinned curves."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from vkjit_models.lora_sft.charts import HEIGHT, WIDTH, Mark, Series, line_chart, ticks


def svg_of(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</figure>")])


def path_of(figure: str) -> str:
    (path,) = [one for one in svg_of(figure).iter("path")]
    return path.attrib["d"]


def test_a_chart_is_well_formed_and_inside_its_frame() -> None:
    curve = Series("a < b & c", [1, 2, 3], [4.0, 2.0, 1.0], "#123456", points=True)
    held = Series("held", [2], [2.5], "#654321", ranges=[(2.0, 3.0)])
    figure = line_chart("loss <nats>", [curve, held], [Mark(2.0, "alarm & all", "#f00")])
    root = svg_of(figure)
    assert "loss &lt;nats&gt;" in figure
    texts = [one.text for one in root.iter("text")]
    assert "a < b & c" in texts
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]
    assert len(circles) == 3
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in circles)
    ys = [y for _, y in circles]
    assert ys == sorted(ys)  # falling values are drawn downwards
    assert any(one.text == "alarm & all" for one in root.iter("title"))


def test_values_that_are_not_finite_leave_a_gap() -> None:
    figure = line_chart("x", [Series("x", [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0], "#000")])
    assert re.sub(r"[\d. ]", "", path_of(figure)) == "MML"


def test_nothing_to_draw() -> None:
    assert line_chart("x", [Series("x", [1.0], [math.nan], "#000")]) == ""
    assert line_chart("x", []) == ""
    assert "<svg" in line_chart("x", [Series("x", [1.0], [0.0], "#000")])


def test_long_curves_are_thinned() -> None:
    steps = list(range(100_000))
    figure = line_chart("x", [Series("x", steps, [float(s) for s in steps], "#000")])
    assert 700 < path_of(figure).count("L") < 1500


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1.0, 60.0, [20.0, 40.0, 60.0])],
)
def test_ticks_are_round_numbers(low: float, high: float, want: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(want)
