"""Benchmarks beside the peers, in one run: correctness first, then medians, then ratios.

``python -m benchmarks.gemm --peers-python PEERS/bin/python`` runs one of them, ``python -m
benchmarks`` the quick cases of all. README.md in this folder says how a figure is taken.
"""

from __future__ import annotations
