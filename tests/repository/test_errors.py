"""Errors that are one line: a missing package, and a mistake about one of several models."""

import sys

import pytest

import config
from config import InputError
from configs import packages
from configs.errors import errors_about_model


def import_nothing() -> None:
    import nowhere_to_be_found  # noqa: F401


@pytest.mark.parametrize(
    "ranks, is_printed",
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True),
        # Of a launcher that does not tell the rank within a node, the first rank alone prints.
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
    ],
)
def test_a_missing_package_is_named_once_a_node(monkeypatch, capsys, ranks, is_printed):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        try:
            import_nothing()
        except ModuleNotFoundError as error:
            packages.exit_without(error)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    expected = f" has no module 'nowhere_to_be_found', which {__file__} imports: activate the env"
    assert (expected in printed) == is_printed
    assert printed.startswith(f"error: {sys.executable} (Python 3.") == is_printed


def test_a_script_without_a_package_ends_like_one_with_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_sft.py", "model.path=m", "data.train_files=t"])
    with pytest.raises(SystemExit) as ended:
        config.run(lambda _: import_nothing(), "sft.yaml", "doc")
    assert ended.value.code == 2
    assert "has no module 'nowhere_to_be_found'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, problem, message",
    [
        ("critic.path", "model.path=m has no weights", "critic.path=m has no weights"),
        ("critic.path", "it has no weights", "critic.path=m: it has no weights"),
        ("critic.path", "model.path=other is used", "critic.path=m: model.path=other is used"),
        ("model.path", "it has no weights", "it has no weights"),
        (
            "critic.path",
            "reference.model.path=m is used",
            "critic.path=m: reference.model.path=m is used",
        ),
    ],
)
def test_a_mistake_about_a_model_names_the_key_of_its_path(key, problem, message):
    with pytest.raises(InputError) as caught, errors_about_model(key, "m"):
        raise InputError(problem, problem)
    assert caught.value.problems == (message, message)
