"""`python -m inferserve.detokenize --boot-fd N`."""

import sys

from inferserve.detokenize.main import body
from inferserve.process import run

sys.exit(run(body))
