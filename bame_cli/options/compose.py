"""From words to options: Hydra's composition for every verb, and its refusals in one line each."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from yaml import YAMLError

from bame_cli.errors import ConfigError, first_line, follows, near_misses
from bame_cli.options import registration
from bame_cli.options.schema import from_hydra, known_keys, to_yaml


def run_jobs(words: list[str], job: Callable[[Any], float]) -> None:
    """Hand a command line to Hydra, which composes each job, of one run or of a sweep, and calls `job` with it."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, and we say them in one line
    registration.register()
    own, others = apart(words)
    sys.argv = ["bame train", *own, *others]
    try:
        hydra.main(config_path="pkg://bame_cli.conf", config_name="train", version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, words) from error


def run_listed(
    flags: list[str], job: Callable[[Any], float], jobs: list[list[str]], begin: Callable[[list[Any]], list[int]]
) -> None:
    """Hand jobs, each a list of words, to Hydra's launcher.

    Hydra's own sweepers cross lists and know a job when its turn comes. Here all are composed first: `begin` gets their
    nodes and says which of them shall start. flags: Hydra's own words, see `apart`.
    """
    registration.register()
    args = get_args_parser().parse_args(flags)
    path = create_config_search_path("pkg://bame_cli.conf")
    if args.config_dir:
        path.prepend("command-line", f"file://{os.path.abspath(args.config_dir)}")
    try:
        loader = Hydra.create_main_hydra2("bame", path).config_loader
        ours = [*args.overrides, "hydra.mode=MULTIRUN"]
        master = loader.load_configuration(args.config_name or "train", ours, run_mode=RunMode.MULTIRUN)
        quiet = True if follows() else None  # None: where standard error is no terminal
        bar = tqdm(jobs, "options", unit="job", leave=False, disable=quiet, delay=2)  # a large table takes a minute
        chosen = begin([_node(loader.load_sweep_config(master, list(words))) for words in bar])
        if chosen:
            context = HydraContext(config_loader=loader, callbacks=Callbacks(master))
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=job, config=master)
            launcher.launch([jobs[index] for index in chosen], initial_job_idx=0)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, [word for words in jobs for word in words]) from error
    finally:
        GlobalHydra.instance().clear()


def _node(composed: Any) -> Any:
    """A job's options without Hydra's own."""
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    return composed


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's own words (its flags, then what begins with hydra), and those of the jobs.

    Its parser wants overrides in one piece: a flag between two of them would end them.
    """
    flags, own, others, value = list[str](), list[str](), list[str](), False
    for word in words:
        if value or word.startswith("-"):
            flags.append(word)
        elif word.lstrip("+~").startswith(("hydra.", "hydra/")):
            own.append(word)
        else:
            others.append(word)
        value = _takes_value(word)
    return [*flags, *own], others


def crossed(words: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination of what is a list; of two words for one key the later counts."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None) or [[]]
    except HydraException as error:
        raise explain(error, words) from error
    return [list(job) for job in jobs]


def _takes_value(word: str) -> bool:
    """Of Hydra's flags, some are followed by a word: --cfg job."""
    return word.startswith("-") and "=" not in word and word not in ("-m", "--multirun", "--resolve")


def demand_assignments(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that assigns nothing, and for flags that Hydra does not know."""
    takes_value = False
    for word in words:
        if word.startswith("="):
            raise ConfigError(f"{word!r} has no key before its =")
        if not (takes_value or word.startswith(("-", "~")) or "=" in word):
            raise ConfigError(f"{word!r} is not key=value (bame train --help shows the keys)")
        takes_value = _takes_value(word)
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.parse_args(apart(words)[0])


def _refuse(message: str) -> NoReturn:
    """What Hydra's parser of flags has to say, without its usage."""
    hint = " (options have no dashes: key=value)" if "unrecognized" in message else ""
    raise ConfigError(f"{message}{hint}")


def configs(words: list[str]) -> list[Any]:
    """The options that the words describe; comma lists make several, in the order of a sweep."""
    demand_assignments(words)
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: this verb takes key=value words only; lists need no -m")
    return [composed(job) for job in crossed(words)]


def differences(words: list[str]) -> list[str]:
    """What sets each of a sweep's jobs apart, besides its method and its pattern."""
    jobs = crossed(words)
    shared = set[str].intersection(*map(set, jobs))
    return [" ".join(w for w in job if w not in shared and not w.startswith(("method=", "sparsity="))) for job in jobs]


def composed(words: list[str], *, plain: bool = False) -> Any:
    """Options composed outside a run; their YAML text when `plain`."""
    registration.register()
    try:
        with initialize_config_module("bame_cli.conf", version_base="1.3"):
            node = compose("train", overrides=words)
            return to_yaml(node) if plain else from_hydra(node)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, words) from error


# --- errors of composition, in one line ---


def explain(error: Exception, words: Sequence[str]) -> ConfigError:
    """What Hydra or OmegaConf refuse, as one line with the near misses."""
    text = str(error)
    if match := re.search(r"hydra/(?:launcher|sweeper)/(joblib|submitit_local|submitit_slurm|optuna)'", text):
        return ConfigError(f"{match[1]} is not installed: pip install 'bame-cli[{match[1].partition('_')[0]}]'")
    if options := getattr(error, "options", None):
        group, _, name = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        known = [option for option in options if not option.endswith("_schema")]
        return ConfigError(f"{group}={name}: no such {group}{near_misses(name, known)} ({', '.join(known)})")
    if match := re.match(r"Ambiguous value for argument '([^']*)'", text):
        return ConfigError(f"{match[1]} is a list: add -m to sweep over it, or write key=[a,b] for one value")
    if match := re.match(r"Could not (?:override|append to config) '?([\w./@]+)", text):
        return _unknown_key(match[1], words)
    if match := re.match(r"Error merging override (.*)", text):
        return ConfigError(f"{match[1]}: {first_line(error.__cause__ or error)}")
    if match := re.search(r"full_key: (\S+)", text):
        return ConfigError(f"{match[1]}: {first_line(error)}")
    return ConfigError(first_line(error))


def _unknown_key(key: str, words: Sequence[str]) -> ConfigError:
    if key in ("sparsity.overrides", "model.args", "recipe.optimizer_args") or key.startswith("model.args."):
        return ConfigError(f"{key} takes new entries: write +{next((w for w in words if w.startswith(key)), key)}")
    chosen = next((word.partition("=")[2] for word in reversed(words) if word.startswith("method=")), "bame")
    known = list(known_keys(chosen))
    return ConfigError(f"no such option: {key}{near_misses(key, known)} (bame train --help lists them)")
