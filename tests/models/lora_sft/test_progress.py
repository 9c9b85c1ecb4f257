"""Ctrl-C waits for the end of a step; the display without a terminal."""

from __future__ import annotations

import io
import math
import signal

import pytest
from rich.console import Console

from vkjit_models.lora_sft.progress import Display, Interrupt, StepView, sparkline
from vkjit_models.lora_sft.receipt import process_peak


def test_the_first_interrupt_is_a_request_and_the_second_is_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def views() -> list[StepView]:
    return [
        StepView(1, 2.5, 0.0, 1.25, 310.0, 2**30, ["clipped"], {"sum": 2.5, "product": math.nan}),
        StepView(2, 2.25, 1e-3, 0.5, 320.4, 2**30, [], {"sum": 2.0, "product": 3.0}, 2.125),
    ]


def test_without_a_terminal_there_are_plain_lines() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=60), total=2, done=0) as display:
        for view in views():
            display.show(view)
    lines = output.getvalue().splitlines()
    assert lines == [
        "step 1/2  loss 2.5000  lr 0  |g| 1.25  310 tok/s  peak 1024 MiB  clipped",
        "step 2/2  loss 2.2500  lr 0.001  |g| 0.5  320 tok/s  peak 1024 MiB",
    ]


def test_a_terminal_shows_bar_curve_and_categories() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    with Display(console, total=2, done=0) as display:
        for view in views():
            display.show(view)
    text = output.getvalue()
    for part in ("2/2", "█▁ 2.2500", "held out", "2.1250", "product", "3.0000", "1,024 MiB"):
        assert part in text
    assert "nan" not in text


def test_a_sparkline_marks_what_is_no_number() -> None:
    assert sparkline([1.0, 2.0, math.nan, 8.0]) == "▁▂x█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([math.inf]) == "x"
    assert sparkline([]) == ""


def test_peak_memory_is_that_of_this_process() -> None:
    assert 10 * 2**20 < process_peak() < 2**40
