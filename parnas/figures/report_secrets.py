"""What a report does not show: passwords, tokens, keys and secrets, and the accounts in addresses."""

import re
import shlex
from collections.abc import Sequence

HIDDEN = "***"
# Words of a name; `data.tokenizer.kind` and `train_tokens_per_s` are settings and figures.
_SECRET = re.compile(
    r"password|passwd|pwd|passphrase|secret|credential|token(?!iz|s?_per|s?_len)|(?<!mon)(?<!tur)key(?!board|word)"
)
_NAMED = re.compile(r"(?<![\w.-])([\w.-]++)[\"']?+[ \t]*+([=:])(?!//)[ \t]*+")
_OPTION = re.compile(r"(?<!\S)(--?[\w.-]++)([ \t]++)(?![-=:])")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*+\"|'(?:\\.|''|[^'\\])*+'")
_NULL = re.compile(r"null(?!\S)")
_WORD = re.compile(r"\S+?(?=['\")}\]]{0,3}(?:\s|$))")
_LINE = re.compile(r"[^\n]+?(?=['\")}\]]{0,3}(?:\n|$))")
# A colon begins a password, which may hold any sign, unless it is a port.
_ACCOUNT = re.compile(
    r"(?<![\w+.-])([\w+.-]++://)(?:[^\s/@:'\"]{0,200}:(?!\d+(?:/|$))[^\s'\"]{0,1000}@|[^\s/@'\"]{1,1000}@)"
)


def is_secret(name: str) -> bool:
    """Whether something of that name is to be hidden."""
    return _SECRET.search(name.lower()) is not None


def hide(text: str) -> str:
    """The text without accounts in addresses, and without the values of what is named as a secret.

    These are `name=value` and `name: value`, with or without quotes, and `--name value`.
    """
    text = _ACCOUNT.sub(rf"\1{HIDDEN}@", text)
    for pattern in (_NAMED, _OPTION):
        text = _hide_after(pattern, text)
    return text


def hide_command(words: Sequence[str]) -> str:
    """A command line, quoted for a shell, without secrets."""
    shown: list[str] = []
    follows = False  # the value of an option
    for word in words:
        name, equals, _ = word.partition("=")
        if follows:
            shown.append(HIDDEN)
        elif equals and is_secret(name) and not re.search(r"\s", name):
            shown.append(f"{shlex.quote(name)}={HIDDEN}")
        else:
            hidden = hide(word)
            shown.append(hidden if shlex.quote(word) == word else shlex.quote(hidden))
        follows = not follows and not equals and word.startswith("-") and is_secret(word)
    return " ".join(shown)


def _hide_after(pattern: re.Pattern[str], text: str) -> str:
    """Replace the value after each name of a secret; one after a colon ends with its line, another with its word."""
    kept, at = [], 0
    for found in pattern.finditer(text):
        if found.start() < at or not is_secret(found[1]) or _NULL.match(text, found.end()):
            continue
        to_line_end = found[2] == ":" or text.startswith(("'", '"'), found.end())
        value = _QUOTED.match(text, found.end()) or (_LINE if to_line_end else _WORD).match(text, found.end())
        if value:
            kept += [text[at : found.end()], HIDDEN]
            at = value.end()
    return "".join([*kept, text[at:]])
