"""`python -m kvferry`: the same as the `kvferry` command."""

import sys

from kvferry.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
