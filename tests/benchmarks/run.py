"""Runs one benchmark of this folder; README.md lists them.

python tests/benchmarks/run.py NAME [OPTION ...]     its own options: NAME --help
torchrun --nproc-per-node=2 tests/benchmarks/run.py ranks
"""

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__))


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.stderr.write(f"usage: python {sys.argv[0]} NAME [OPTION ...]; NAME is one of {', '.join(NAMES)}\n")
        return 2
    sys.path[0] = str(HERE.parent)
    name = sys.argv.pop(1)
    sys.argv[0] += f" {name}"  # for the usage line of its options
    return import_module(f"{HERE.name}.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
