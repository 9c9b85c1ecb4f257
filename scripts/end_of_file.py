"""Ends each text file named on the command line with exactly one newline; 1 if any changed."""

from __future__ import annotations

import sys
from pathlib import Path


def mended(text: bytes) -> bytes:
    """The text with its last line ended once; an empty file stays empty."""
    stripped = text.rstrip(b"\r\n")
    return stripped + b"\n" if stripped else b""


def main() -> int:
    """Rewrites the files that need it."""
    changed = False
    for path in map(Path, sys.argv[1:]):
        text = path.read_bytes()
        if text != mended(text):
            path.write_bytes(mended(text))
            changed = True
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
