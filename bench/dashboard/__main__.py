"""The dashboard's figures: those of the store's queries, then those of the page in a browser.

python -m bench.dashboard [--rollouts 100000] [--minutes 30]
"""

from __future__ import annotations

import argparse
import sys

from bench.dashboard import page, store


def main(arguments: list[str]) -> int:
    """Return 1 if a figure missed its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", default="100000")
    parser.add_argument("--minutes", default="30", help="of a live run, for the page's memory")
    options = parser.parse_args(arguments)
    missed = store.main(["--rollouts", options.rollouts])
    return page.main(["--rollouts", options.rollouts, "--minutes", options.minutes]) or missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
