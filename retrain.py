"""Train a discrete architecture from scratch. The same as `parnas retrain`."""

import sys

from parnas.cli.main import main

if __name__ == "__main__":
    main(["retrain", *sys.argv[1:]])
