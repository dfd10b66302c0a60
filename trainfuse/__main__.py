"""`python -m trainfuse`."""

from __future__ import annotations

from trainfuse.integrations.cli import main

if __name__ == "__main__":
    main()
