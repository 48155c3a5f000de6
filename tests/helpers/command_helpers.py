"""The command line, called in this process or in a new one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import CONTEXT

from parnas.cli.main import main


def run_command(*arguments: object) -> int:
    """Run the command line and return its exit code; all exceptions except `SystemExit` fail the test."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def run_in_process(arguments: list[str], environment: dict[str, str]) -> int | None:
    """Run the command line in a new process, with additional environment variables; return its exit code."""
    process = CONTEXT.Process(target=_run_there, args=(arguments, Path.cwd(), {**os.environ, **environment}))
    process.start()
    process.join(120)
    process.kill()
    return process.exitcode


def _run_there(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the command line in a folder with an environment."""
    os.chdir(folder)
    os.environ.update(environment)
    main(arguments)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail with exit code 2 and one short message; return the message."""
    capsys.readouterr()
    assert run_command(*arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert len(error) < 4000
    return error


def result_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with `--json`; return the object that it prints."""
    capsys.readouterr()
    assert run_command(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(Path(path).is_file() for path in found["written"])
    return found


def files_of(folder: Path) -> dict[str, tuple[int, float]]:
    """Return size and time of all files below a folder, which are equal if nothing was written."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
