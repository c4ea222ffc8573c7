"""Runs the command line, for `python -m dshistory`."""

import sys

from dshistory.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
