"""`python -m inferserve.router --boot-fd N`."""

import sys

from inferserve.process import run
from inferserve.router.main import body

sys.exit(run(body))
