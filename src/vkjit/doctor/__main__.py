"""``python -m vkjit.doctor``."""

from __future__ import annotations

import sys

from vkjit.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
