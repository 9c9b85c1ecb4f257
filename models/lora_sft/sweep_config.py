"""The configuration of a sweep: a run's config, and values that are tried at its keys.

```toml
[sweep]
base = "configs/smollm2_stdlib.toml" # from the current directory, as all paths
folder = "runs/sweep"
seeds = [0, 1]                       # optional: each run once with each

[sweep.set]                          # optional: values of all runs
train.steps = 80

[sweep.grid]                         # every combination
optimizer.learning_rate = [2e-5, 2e-4]
optimizer.weight_decay = [0.0, 0.1]

[[sweep.runs]]                       # or, beside the grid or in its place, single runs
optimizer.learning_rate = 1e-3
```
"""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vkjit.errors import ConfigError

from .config import RunConfig, load_config, parse_config

SEED = "train.seed"
_KEYS = ("base", "folder", "grid", "runs", "seeds", "set")


@final
@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Args:
        name: Of its folder: keys and values.
        values: What differs between runs, by dotted key.
        config: The whole run.
    """

    name: str
    values: Mapping[str, Any]
    config: RunConfig


@final
@dataclass(frozen=True)
class SweepConfig:
    """A sweep.

    Args:
        name: The file's.
        folder: Where results go.
        factors: Keys that differ between runs, in the order of the file.
        runs: In the order in which they are made.
    """

    name: str
    folder: Path
    factors: tuple[str, ...]
    runs: tuple[SweepRun, ...]


def load_sweep(path: Path, *, steps: int | None = None) -> SweepConfig:
    """Reads a sweep and validates the config of every run.

    Args:
        path: The TOML file.
        steps: Replaces ``train.steps`` in all runs.

    Raises:
        ConfigError: A file cannot be read, a key is unknown, or a value is outside its domain.
    """
    section = _section(path)
    base = Path(_text(section, "base"))
    whole = load_config(base, steps=steps)  # says what is wrong with it under its own name
    content = tomllib.loads(base.read_text(encoding="utf-8"))
    common = _flat(section.get("set", {}), "sweep.set")
    if steps is not None:
        common["train.steps"] = steps
        common["schedule.warmup_steps"] = whole.schedule.warmup_steps  # no longer than the steps
    folder = Path(_text(section, "folder"))
    varied = _varied(section)
    factors = tuple(dict.fromkeys(key for values in varied for key in values))
    runs: dict[str, SweepRun] = {}
    for values in varied:
        # A run that says nothing of a factor has the base's value of it.
        shown = {key: values.get(key, _value(content, common, key)) for key in factors}
        name = ",".join(f"{key.rpartition('.')[2]}={_word(shown[key])}" for key in factors)
        if name in runs:
            raise ConfigError(f"sweep: {path}: two runs are {name}, expected each once; remove one")
        changes = {**common, **values, "output.folder": str(folder / "runs" / name)}
        config = _changed(content, changes, f"{path}, run {name}")
        runs[name] = SweepRun(name, shown, config)
    return SweepConfig(path.stem, folder, factors, tuple(runs.values()))


def _section(path: Path) -> Mapping[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"sweep: cannot read {path}: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"sweep: {path} is not valid TOML: {error}; correct it") from error
    section = data.get("sweep")
    if not isinstance(section, dict) or len(data) != 1:
        raise ConfigError(
            f"sweep: {path} has the tables {sorted(data)}, expected [sweep] alone; the run's own "
            "config is named by sweep.base"
        )
    unknown = sorted(section.keys() - set(_KEYS))
    if unknown:
        raise ConfigError(f"sweep: unknown key sweep.{unknown[0]}; valid: {', '.join(_KEYS)}")
    return section


def _text(section: Mapping[str, Any], key: str) -> str:
    value = section.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"sweep: sweep.{key} is {value!r}, expected a path; give it one")
    return value


def _varied(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each run changes: the grid's combinations, then single runs, each with each seed."""
    grid = _flat(section.get("grid", {}), "sweep.grid")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"sweep: sweep.grid.{key} is {values!r}, expected a list of values; write "
                f"[{values}] or move it to sweep.set"
            )
    varied = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    single = section.get("runs", [])
    if not isinstance(single, list) or not all(isinstance(one, dict) for one in single):
        raise ConfigError("sweep: sweep.runs is no list of tables; write [[sweep.runs]]")
    varied = [*(varied if grid else []), *(_flat(one, "sweep.runs") for one in single)]
    if not varied or not any(varied):
        raise ConfigError("sweep: there is no run, expected [sweep.grid] or [[sweep.runs]]")
    seeds = section.get("seeds")
    if seeds is None:
        return varied
    if not isinstance(seeds, list) or not seeds:
        raise ConfigError(f"sweep: sweep.seeds is {seeds!r}, expected a list of seeds")
    # A seed also chooses the data: all runs of one seed stand together, so they are packed once.
    return [{**values, SEED: seed} for seed in seeds for values in varied]


def _flat(table: Any, where: str) -> dict[str, Any]:
    """Values by ``section.key`` of a table of tables; quoted dotted keys are taken as well."""
    if not isinstance(table, dict):
        raise ConfigError(f"sweep: {where} is {table!r}, expected a table of the config's keys")
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and "." not in key:
            found |= {f"{key}.{name}": one for name, one in value.items()}
        elif "." in key:
            found[key] = value
        else:
            raise ConfigError(
                f"sweep: {where}.{key} names no section, expected a key such as "
                "optimizer.learning_rate"
            )
    return found


def _value(content: Mapping[str, Any], common: Mapping[str, Any], key: str) -> Any:
    """The value of a key that a run does not set itself."""
    config = _changed(content, common, "sweep.set")
    section, _, name = key.partition(".")
    return getattr(getattr(config, section, None), name, None)


def _changed(content: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> RunConfig:
    """A config with other values at dotted keys."""
    made = copy.deepcopy(dict(content))
    for key, value in changes.items():
        section, _, last = key.partition(".")
        made.setdefault(section, {})[last] = value
    return parse_config(made, name)


def _word(value: Any) -> str:
    """A value as a part of a folder's name."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)
