"""`python -m dshistory`: the command line."""

import sys

from dshistory.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
