"""`python -m parnas` is the command `parnas`."""

from parnas.cli import main

if __name__ == "__main__":
    main()
