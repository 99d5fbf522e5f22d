"""`python -m pipefit`, for a machine where the `pipefit` script is not on the path."""

import sys

from pipefit.cli import main

sys.exit(main())
