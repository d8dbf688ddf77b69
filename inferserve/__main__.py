"""`python -m inferserve` is the same as the `inferserve` command."""

import sys

from inferserve.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
