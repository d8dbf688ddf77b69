"""`python -m inferserve.engine --boot-fd N`: one engine rank, started by the launcher."""

import sys

from inferserve.engine.main import body
from inferserve.process import run

sys.exit(run(body))
