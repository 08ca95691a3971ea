"""`python -m effops` is the `effops` command."""

import sys

from effops.cli import main

sys.exit(main())
