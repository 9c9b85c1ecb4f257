"""Runs the quick cases of every benchmark: ``python -m benchmarks [options]``."""

from __future__ import annotations

import importlib
import sys

from benchmarks import harness

NAMES = (
    "gemm",
    "quant_gemm",
    "elementwise",
    "rows",
    "loss",
    "mlp_step",
    "call_overhead",
    "compile_time",
    "layers",
    "lora_step",
)


def main() -> int:
    """One table after another; 1 if vkjit failed or was wrong in any."""
    failed = 0
    for name in NAMES:
        cases = importlib.import_module(f"benchmarks.{name}").CASES
        failed |= harness.main(name, cases, ["--cases", "quick", *sys.argv[1:]])
    return failed


if __name__ == "__main__":
    sys.exit(main())
