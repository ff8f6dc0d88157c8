"""The key=value words of a command line: a verb's own apart from the rest, and read as what they must be."""

from __future__ import annotations

from bame_cli.errors import ConfigError


def split(words: list[str], own: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The verb's own key=value words (with defaults), and the rest."""
    mine, rest = dict(own), []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in own:
            mine[key] = value
        else:
            rest.append(word)
    return mine, rest


def demand_format(value: str) -> None:
    if value not in ("text", "json"):
        raise ConfigError(f"format={value}: text or json")


def number(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: a whole number from 1")
    return int(text)


def flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{key}={text}: true or false")
    return text == "true"
