"""`python -m inferserve.metrics --boot-fd N`: the metrics process."""

import sys

from inferserve.metrics.main import body
from inferserve.process import run

sys.exit(run(body))
