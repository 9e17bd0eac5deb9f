"""Every setting, declared once: its type, default, bounds and what it does.

Knows: the config file (TOML in the user's config folder), and how a wrong one is named.
Must not know: what the settings are used for; the screen's actions (it checks their names).
"""

from __future__ import annotations

import dataclasses
import difflib
import getpass
import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from kldtui.errors import ConfigError

ENV_PATH = "KLDTUI_CONFIG"
ROOT_ORDERS = ("position", "cost", "kld", "margin", "queue")
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be: a number between `low` and `high`, or one of `choices`."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The rule in words; empty if every value of the type will do."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.low is None or self.high is None:
            return ""
        return f"{self.low} to {self.high}"


def _setting(
    default: Any,
    text: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    return field(default=default, metadata={"rule": Rule(text, low, high, choices)})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings as they hold. `Config()` is the defaults; command-line options go above."""

    near_tie: float = _setting(
        0.3,
        "A root that costs less than this many nats is a near tie, unless a floor is measured.",
        0,
        100,
    )
    top_n_shown: int = _setting(10, "Tokens that the top-N pane shows of each model.", 1, 200)
    top_n_stored: int = _setting(
        40, "Tokens whose log-probability is asked of the server and stored at each step.", 1, 1000
    )
    branch_tokens: int = _setting(
        128, "Tokens that a branch is continued by, and that `+` adds.", 1, 1_000_000
    )
    root_order: str = _setting(
        "position", "The root list's order when a review opens.", choices=ROOT_ORDERS
    )
    auto_branch: bool = _setting(
        False, "While judging, branch at each root by itself as it is reached (the key `A`)."
    )
    heat_low: float = _setting(0.01, "Where the heat scale begins, in nats.", 0.0001, 100)
    heat_high: float = _setting(3.0, "Where the heat scale ends, in nats.", 0.0001, 100)
    reviewer: str = _setting("", "Your name in the labels; empty: your user name on this computer.")
    theme: str = _setting("textual-dark", "The colours, by the name of a Textual theme.")
    keys: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "rule": Rule(
                'Keys by action, as `action = "key,key"`; the help screen names the actions.'
            )
        },
    )

    @property
    def reviewer_name(self) -> str:
        """`reviewer`, or the user's name on this computer."""
        return self.reviewer or _user()

    def check_keys(self, actions: Collection[str]) -> None:
        """Raises ConfigError if `keys` names an action that is not among `actions`, or one key
        for two of them."""
        taken: dict[str, str] = {}
        for name in self.keys:
            if name not in actions:
                raise ConfigError(
                    f"config: [keys] has no action {name!r}{_nearest(name, actions)}; "
                    "the help screen (?) names the actions"
                )
            for key in self.keys[name].split(","):
                if taken.setdefault(key, name) != name:
                    raise ConfigError(
                        f"config: [keys] gives {_short(key)} to {taken[key]} and to {name}"
                    )


def rule_of(setting: dataclasses.Field[Any]) -> Rule:
    """The rule that a field of `Config` was declared with."""
    rule = setting.metadata["rule"]
    if not isinstance(rule, Rule):
        raise TypeError(f"{setting.name} is declared without a rule")
    return rule


def default_path() -> Path:
    """`$KLDTUI_CONFIG`, else config.toml in the user's config folder for kldtui."""
    given = os.environ.get(ENV_PATH)
    return Path(given) if given else platformdirs.user_config_path("kldtui") / "config.toml"


def load_config(path: Path | None = None) -> Config:
    """Read a config file; the defaults if there is none at the default place.

    Raises ConfigError, naming file and setting, for what cannot be read or is not a setting, and
    for a file that was asked for (by argument or `$KLDTUI_CONFIG`) and is not there.
    """
    asked = path is not None or bool(os.environ.get(ENV_PATH))
    path = path if path is not None else default_path()
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        if asked:
            raise ConfigError(f"{path}: there is no such config file") from None
        return Config()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"{path}: not TOML: {words}; correct it or remove it") from None
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(data: Mapping[str, Any]) -> Config:
    """A Config of what a TOML file held. Raises ConfigError, naming the setting."""
    known = {setting.name: setting for setting in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"there is no setting {_short(name)}{_nearest(name, known)}")
        values[name] = _checked(known[name], value)
    config = Config(**values)
    if config.heat_low >= config.heat_high:
        raise ConfigError(
            f"heat_low ({config.heat_low:g}) must be below heat_high ({config.heat_high:g})"
        )
    return config


def _checked(setting: dataclasses.Field[Any], value: Any) -> Any:
    name, rule = setting.name, rule_of(setting)
    if name == "keys":
        return _checked_keys(value)
    wanted = {
        "float": "a number",
        "int": "a whole number",
        "str": "a text in quotes",
        "bool": "true or false",
    }
    kind = str(setting.type)
    fits = {
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[kind]
    if not fits:
        raise ConfigError(f"{name} must be {wanted[kind]}, not {_short(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be {rule.words}, not {value}")
    if rule.choices and value not in rule.choices:
        raise ConfigError(
            f"{name} must be {rule.words}, not {_short(value)}{_guess(value, rule.choices)}"
        )
    if rule.low is not None and rule.high is not None and not rule.low <= value <= rule.high:
        raise ConfigError(f"{name} must be {rule.words}, not {_short(value)}")
    return float(value) if kind == "float" else value


def _checked_keys(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError('keys must be a table: [keys], then lines of action = "key,key"')
    for action, keys in value.items():
        if not isinstance(keys, str) or not all(key.strip() for key in keys.split(",")):
            raise ConfigError(
                f'[keys] {_bare(action)} must be keys in quotes, as "b" or "b,ctrl+b", '
                f"not {_short(keys)}"
            )
    return {
        action: ",".join(key.strip() for key in keys.split(",")) for action, keys in value.items()
    }


def _guess(name: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {found[0]!r}?" if found else ""


def _nearest(name: str, known: Collection[str]) -> str:
    return _guess(name, known) or f"; known are {', '.join(known)}"


def _bare(name: str) -> str:
    return _short(name)[1:-1]


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "unknown"
