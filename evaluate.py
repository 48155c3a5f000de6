"""Compare perplexities and costs of runs in one table. The same as `parnas evaluate`."""

import sys

from parnas.cli.main import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
