"""Settings: declared once, documented, read, and refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kldtui.config import Config, default_path, load_config, parse_config, rule_of
from kldtui.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs" / "config.md"


def row_of(setting: dataclasses.Field[Any]) -> str:
    if setting.name == "keys":
        return f"| `[keys]` | {rule_of(setting).help} | none | any action |"
    free = "true or false" if isinstance(setting.default, bool) else "any text"
    may_be = rule_of(setting).words or free
    default = json.dumps(setting.default)
    return f"| `{setting.name}` | {rule_of(setting).help} | `{default}` | {may_be} |"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documentation_lists_every_setting_as_it_is_declared() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [row_of(setting) for setting in dataclasses.fields(Config)]


def test_the_documented_example_is_a_config_file(tmp_path: Path) -> None:
    example = DOCS.read_text().split("```toml\n")[1].split("```")[0]
    config = load_config(write(tmp_path, example))
    assert (config.near_tie, config.reviewer_name, config.root_order) == (0.2, "Ann", "cost")
    assert config.keys["branch"] == "b,ctrl+b"


def test_defaults_keep_the_rules_they_are_declared_with() -> None:
    defaults = {s.name: s.default for s in dataclasses.fields(Config) if s.name != "keys"}
    assert parse_config(defaults) == Config()


def test_the_file_is_where_the_system_keeps_configs_or_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KLDTUI_CONFIG", raising=False)
    assert default_path() == platformdirs.user_config_path("kldtui") / "config.toml"
    monkeypatch.setenv("KLDTUI_CONFIG", str(write(tmp_path, "near_tie = 1")))
    assert load_config() == Config(near_tie=1.0)
    monkeypatch.setenv("KLDTUI_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"absent\.toml: there is no such config file"):
        load_config()


def test_without_a_file_there_are_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KLDTUI_CONFIG", raising=False)
    monkeypatch.setattr(platformdirs, "user_config_path", lambda _: tmp_path / "nothing" / "here")
    assert load_config() == Config()
    assert Config().reviewer_name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("near_ties = 0.3", "no setting 'near_ties'; did you mean 'near_tie'"),
        ("branch_token = 5", "did you mean 'branch_tokens'"),
        ("[key]\nbranch = 'b'", "no setting 'key'; did you mean 'keys'"),
        ("zzz = 5", "no setting 'zzz'; known are near_tie, "),
        ("near_tie = '0.3'", "near_tie must be a number, not '0.3'"),
        ("near_tie = true", "near_tie must be a number, not True"),
        ("near_tie = nan", "near_tie must be 0 to 100, not nan"),
        ("near_tie = -0.1", "near_tie must be 0 to 100, not -0.1"),
        ("branch_tokens = 0", "branch_tokens must be 1 to 1000000, not 0"),
        ("branch_tokens = 1.5", "branch_tokens must be a whole number, not 1.5"),
        ("root_order = 'costs'", "must be one of position, .*not 'costs'; did you mean 'cost'"),
        ("reviewer = 5", "reviewer must be a text in quotes, not 5"),
        ("heat_low = 3.0", r"heat_low \(3\) must be below heat_high \(3\)"),
        ("keys = 5", "keys must be a table"),
        ("[keys]\nbranch = ['b']", r"\[keys\] branch must be keys in quotes"),
        ("[keys]\nbranch = 'b,'", r"\[keys\] branch must be keys in quotes"),
        ("near_tie = ", "not TOML"),
        ("near_tie = 1\nnear_tie = 2", "not TOML"),
        ("x = " + "[" * 5000, "not TOML"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line_that_names_file_and_setting(
    tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_text_or_no_file_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_a_text_from_the_file_cannot_move_the_terminal() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"near\x1b[2J\n": 5})
    assert str(caught.value).isprintable()


def test_neither_can_the_name_of_an_action() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"keys": {"bra\x1b\nnch": 5}})
    assert str(caught.value).isprintable()


def test_an_unknown_action_is_named_with_the_nearest_one() -> None:
    config = Config(keys={"brnch": "b"})
    with pytest.raises(ConfigError, match="no action 'brnch'; did you mean 'branch'"):
        config.check_keys(["branch", "next-root"])
    Config(keys={"branch": "b,ctrl+b"}).check_keys({"branch": 1})


def test_one_key_for_two_actions_is_refused() -> None:
    config = Config(keys={"branch": "b,x", "next-root": "x"})
    with pytest.raises(ConfigError, match="gives 'x' to branch and to next-root"):
        config.check_keys(["branch", "next-root"])


@given(
    st.dictionaries(
        st.sampled_from([s.name for s in dataclasses.fields(Config)]) | st.text(max_size=5),
        st.none() | st.integers() | st.floats() | st.text() | st.dictionaries(st.text(), st.text()),
    )
)
def test_any_content_is_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    try:
        config = parse_config(data)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert all(getattr(config, name) is not None for name in data)


def test_a_file_saved_by_a_windows_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbfnear_tie = 1\r\n")
    assert load_config(path).near_tie == 1.0
