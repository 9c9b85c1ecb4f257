"""Primitives that run programs: loops, branches, recomputation, custom rules, calls of the host.

Their rules transform the programs inside with the passes, which is why they stand above them.
"""
