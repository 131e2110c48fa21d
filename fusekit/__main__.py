"""`python -m fusekit` is the command `fusekit`."""

import sys

from fusekit_cli.main import main

sys.exit(main())
