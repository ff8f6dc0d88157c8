"""The words of a command line: a verb's own key=value words, told apart from the rest."""

from __future__ import annotations

from collections.abc import Sequence

from bame_cli.errors import ConfigError


def split(words: Sequence[str], own: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The verb's own key=value words (with defaults), and the rest."""
    mine, rest = dict(own), []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in own:
            mine[key] = value
        else:
            rest.append(word)
    return mine, rest


def demand_one_of(known: Sequence[str], **given: str) -> None:
    """Raise ConfigError for a value that is none of the known ones."""
    for key, value in given.items():
        if value not in known:
            raise ConfigError(f"{key}={value}: {', '.join(known[:-1])} or {known[-1]}")


def positive(key: str, text: str) -> int:
    """A whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: a whole number from 1")
    return int(text)


def yes(key: str, text: str) -> bool:
    """true or false."""
    demand_one_of(("true", "false"), **{key: text})
    return text == "true"


def one_name(rest: Sequence[str], usage: str) -> str:
    """The verb's one positional. Raises ConfigError, with the usage, when there is none, or anything else."""
    stray = next((word for word in rest if "=" in word or word.startswith("-")), None)
    if stray or len(rest) != 1:
        raise ConfigError(f"{stray} has no place here: {usage}" if stray else usage)
    return rest[0]
