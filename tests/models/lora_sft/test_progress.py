"""Ctrl-C waits for the end of a step; the display without a terminal."""

from __future__ import annotations

import io
import signal

import pytest
from rich.console import Console

from vkjit_models.lora_sft.progress import Display, Interrupt, peak_memory_mib


def test_the_first_interrupt_is_a_request_and_the_second_is_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_terminal_there_are_plain_lines() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=100), total=2, done=0) as display:
        display.show(1, 2.5, 310.0)
        display.show(2, 2.25, 320.4)
    lines = output.getvalue().strip().splitlines()
    assert lines[0].startswith("step 1/2  loss 2.5000  310 tok/s  peak ")
    assert "loss 2.2500  320 tok/s" in lines[1]


def test_peak_memory_is_that_of_this_process() -> None:
    assert 10.0 < peak_memory_mib() < 1e6
