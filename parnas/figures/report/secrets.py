"""Replacement of passwords, tokens, keys and other secrets, and of accounts in URLs, by `***`."""

import re
import shlex
from collections.abc import Sequence

HIDDEN = "***"
# Parts of a name that make it a secret's, such as `token`, but not in `data.tokenizer.kind` or `train_tokens_per_s`.
_SECRET = re.compile(
    r"password|passwd|pwd|passphrase|secret|credential|token(?!iz|s|_per|_len)|(?<!mon)(?<!tur)key(?!board|word)"
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
    """Check whether `name` names a secret, such as `api_key`, so that its value must be hidden."""
    return _SECRET.search(name.lower()) is not None


def hide(text: str) -> str:
    """Return a text with `***` for the accounts in URLs and for the values of secrets.

    A value is recognised by the name before it, in `name=value`, `name: value` (with or without quotes) and
    `--name value`.
    """
    text = _ACCOUNT.sub(rf"\1{HIDDEN}@", text)
    for pattern in (_NAMED, _OPTION):
        text = _hide_after(pattern, text)
    return text


def hide_command(words: Sequence[str]) -> str:
    """Return the words of a command line as one text, quoted for a shell, with `***` for secrets."""
    shown: list[str] = []
    follows = False  # whether the next word is the value of a secret option
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
    """Replace by `***` the value after each name of a secret that `pattern` finds.

    A quoted value ends at its closing quote, a value after a colon at the end of the line, any other value at the end
    of the word.
    """
    parts, at = [], 0
    for name in pattern.finditer(text):
        if name.start() < at or not is_secret(name[1]) or _NULL.match(text, name.end()):
            continue
        to_line_end = name[2] == ":" or text.startswith(("'", '"'), name.end())
        value = _QUOTED.match(text, name.end()) or (_LINE if to_line_end else _WORD).match(text, name.end())
        if value:
            parts += [text[at : name.end()], HIDDEN]
            at = value.end()
    return "".join([*parts, text[at:]])
