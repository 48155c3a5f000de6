"""The code blocks of README.md, CONTRIBUTING.md and docs/: their kinds, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parnas.config.loader import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

PROGRAMS = re.compile(
    r"(\w+=\S* )*"  # variables of the environment
    r"(parnas|python3?|make|torchrun|srun|pip|export|source|git|cd|cp|mkdir|apt-get|su|echo|chmod|pg_ctlcluster|docker"
    r"|pre-commit|tensorboard|jupyter|ssh|rsync|nohup|#SBATCH|\.|\.venv/bin/\w+)( |$)"
)
"""Start of a shell command."""
SCRIPTS = ("search.py", "derive.py", "retrain.py", "evaluate.py")
LANGUAGES = {"python": "python", "py": "python", "sh": "shell", "bash": "shell", "shell": "shell", "console": "shell"}


@dataclass(frozen=True)
class Block:
    """A code block, indented or fenced.

    kind: shell, python, session (of Python, with its answers), configuration, another language that its fence names,
    or `None` where it is not known.
    """

    page: Path
    line: int
    text: str
    kind: str | None

    @property
    def place(self) -> str:
        """Return page and line, for messages."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page in order."""
    result: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        start = number
        if fence := re.match(r"( *)```+ *(\w*)", lines[number]):
            number += 1
            while number < len(lines) and not lines[number].startswith(f"{fence[1]}```"):
                number += 1
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[start + 1 : number])
            result.append(Block(page, start + 2, text, guess(text) or LANGUAGES.get(fence[2], fence[2] or None)))
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[start:number]).rstrip()
            result.append(Block(page, start + 1, text, guess(text)))
            continue
        number += 1
    return result


def guess(text: str) -> str | None:
    """Guess the kind of a block without a language by its first line."""
    first = text.lstrip().partition("\n")[0]
    if first.startswith(">>> "):
        return "session"
    if PROGRAMS.match(first):
        return "shell"
    if first.removesuffix(":") in Config.model_fields:
        return "configuration"
    return "python" if re.match(r"(import|from) \w", first) else None


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block without prompts and comments, with continued lines joined."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        command = line.removeprefix("$ ").strip()
        if command and not command.startswith("# "):
            yield command


def words(command: str) -> list[str]:
    """Split a command as a shell does, without a comment at its end."""
    return shlex.split(command, comments=not command.startswith("#"))


def parnas_words(command: str) -> list[str] | None:
    """Return the arguments of `parnas`, also of its scripts, torchrun and srun; `None` for other commands."""
    arguments = words(command)
    if arguments[:1] == ["torchrun"]:
        arguments = ["python", *arguments[arguments.index("--") + 1 :]] if "--" in arguments else []
    if arguments[:1] == ["srun"]:
        arguments = arguments[1:]
    if arguments[:1] == ["parnas"]:
        return arguments[1:]
    if arguments[:3] == ["python", "-m", "parnas"]:
        return arguments[3:]
    if len(arguments) > 1 and arguments[0] in ("python", "python3") and arguments[1] in SCRIPTS:
        return [Path(arguments[1]).stem, *arguments[2:]]
    return None


def spoken_commands(page: Path) -> list[str]:
    """Return the commands of parnas between backticks in running text, without those that contain an ellipsis."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    commands_in_text = re.findall(r"`((?:parnas|python \w+\.py) [^`]+)`", text)
    return [re.sub(r"\s+", " ", each) for each in commands_in_text if "…" not in each and "[" not in each]
