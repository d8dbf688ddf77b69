"""`python -m inferserve.http --boot-fd N`."""

from __future__ import annotations

import sys

from inferserve.http.main import body
from inferserve.process import run

if __name__ == "__main__":
    sys.exit(run(body))
