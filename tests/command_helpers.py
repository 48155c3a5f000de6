"""The command line in this process."""

import pytest

from parnas.cli import main


def run_command(*arguments: object) -> int:
    """The exit code of the command line; anything but `SystemExit` passes through, and fails a test."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message, of a screen at most, of a command that must fail with exit code 2."""
    capsys.readouterr()
    assert run_command(*arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert len(error) < 4000
    return error
