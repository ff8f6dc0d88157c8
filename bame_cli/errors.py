"""The one error that is the user's to mend: a wrong command, configuration or file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class ConfigError(Exception):
    """One clear line that says what is wrong and what would be right. The command line exits with 2."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; of YAML that does not parse, what and where."""
    if mark := getattr(error, "problem_mark", None):
        return f"line {mark.line + 1}: {getattr(error, 'problem', 'no YAML')}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def near_misses(word: str, known: Iterable[str], *, most: int = 3) -> str:
    """`; did you mean 'a', 'b'?`, or the empty string when nothing known is close to `word`."""
    names = {name.lower(): name for name in known}
    tails = {key: name for key, name in names.items() if key.rpartition(".")[2] == word.lower()}
    close = [names[key] for key in difflib.get_close_matches(word.lower(), names, n=most, cutoff=0.6)]
    close = list(dict.fromkeys([*tails.values(), *close]))[:most]
    return f"; did you mean {', '.join(repr(name) for name in close)}?" if close else ""


def follows() -> bool:
    """Whether torchrun started this process as one of several, and not the one that speaks."""
    return int(os.environ.get("RANK", 0)) > 0
