"""`python -m kvferry` runs the `kvferry` command."""

import sys

from kvferry.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
