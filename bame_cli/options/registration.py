"""The options made known to Hydra: their schemas, and the two groups that are generated rather than listed.

`sparsity` has an option for every valid N:M, `model` for every timm name; a YAML file of ours of that name wins over
the generated one.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from bame_cli.methods import METHODS
from bame_cli.options.schema import Config
from bame_cli.sparsity.pattern import Pattern


class GeneratedOptions(ConfigSource):
    """The options of `sparsity` (all N:M) and `model` (all timm names) that no file has to list."""

    @staticmethod
    def scheme() -> str:
        return "bame"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group == "sparsity":
            pattern = Pattern.parse(name)
            node: dict[str, Any] = {"n": pattern.n, "m": pattern.m}
        else:
            node = {"name": name}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(node), header={"package": group}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "sparsity", "model")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return group in ("sparsity", "model") and bool(name) and "/" not in name

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class GeneratedPath(SearchPathPlugin):
    """Puts the generated options last on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("bame", "bame://generated")


def register() -> None:
    """Make the schemas and the generated options known to Hydra; again does no harm."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, kind in METHODS.items():
        store.store(group="method", name=f"{name}_schema", node=kind)
    plugins = Plugins.instance()
    known = plugins.discover(ConfigSource)
    for plugin in (GeneratedOptions, GeneratedPath):
        if plugin not in known:
            plugins.register(plugin)
