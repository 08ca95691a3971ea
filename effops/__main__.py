"""`python -m effops` is the `effops` command."""

import sys

from effops.commands.main import main

sys.exit(main())
