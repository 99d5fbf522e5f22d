"""Entry point of `python -m pipefit`, for machines without the `pipefit` script on the path."""

import sys

from pipefit.cli import main

sys.exit(main())
