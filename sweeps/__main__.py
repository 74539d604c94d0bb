"""`python -m sweeps` is the command `sweep`."""

import sys

from sweeps.cli import main

sys.exit(main())
