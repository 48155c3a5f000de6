"""`python -m parnas` is the command `parnas`."""

from parnas.cli.main import main

if __name__ == "__main__":
    main()
