"""Take the argmax of pi into arch.yaml. The same as `parnas derive`."""

import sys

from parnas.cli.main import main

if __name__ == "__main__":
    main(["derive", *sys.argv[1:]])
