"""Train a SuperNet and record pi. The same as `parnas search`."""

import sys

from parnas.cli.main import main

if __name__ == "__main__":
    main(["search", *sys.argv[1:]])
