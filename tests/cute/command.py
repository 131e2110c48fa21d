"""What `fusekit exec` is called as, and what it prints."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXECUTE = (sys.executable, "-m", "fusekit", "exec", "--")
LINE = re.compile(r"fusekit: (\d+) hits, (\d+) misses, (\d+\.\d) s saved\n")
