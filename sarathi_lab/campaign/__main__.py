"""`python -m sarathi_lab.campaign`: measure everything on this GPU, or try all of it on the CPU with --dry-run."""

from __future__ import annotations

import sys

from sarathi_lab.campaign.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
