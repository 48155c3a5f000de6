"""Select the best architecture of a search within the cost target, and write arch.yaml. Like `parnas derive`."""

import sys

from parnas.cli.main import main

if __name__ == "__main__":
    main(["derive", *sys.argv[1:]])
