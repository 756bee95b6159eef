"""Makes the checkpoints that the quickstarts begin with.

python scripts/make_start.py moe configs/starts/moe
python scripts/make_start.py dense configs/starts/dense
"""

from __future__ import annotations

import argparse
from pathlib import Path

from onegrid.study.start import MODELS, make_start


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.42)
    parser.add_argument("--max-steps", type=int, default=2000)
    args = parser.parse_args()
    make_start(MODELS[args.model], args.folder, seed=args.seed, target=args.target, max_steps=args.max_steps)


if __name__ == "__main__":
    main()
