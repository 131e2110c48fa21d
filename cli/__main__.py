"""`python -m fusekit_cli` is `fusekit`."""

import sys

from fusekit_cli.main import main

sys.exit(main())
