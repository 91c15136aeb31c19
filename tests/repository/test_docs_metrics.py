"""docs/metrics.md has every metric that the code can write, and no other."""

import json
import re
from functools import cache

import pytest

from tests.repository.test_house import PRODUCT
from tests.support.launch import ROOT
from tests.support.metric_names import (
    PLACEHOLDER,
    Code,
    check_run,
    documented,
    matches,
    undocumented,
)

# Keys with a slash that are no metrics.
NO_METRICS = {
    "prompt/completion": "the name of a format of rows",
    "val/samples": "a table for wandb",
}


@cache
def code() -> Code:
    """Read the whole product, which takes a second."""
    return Code([*PRODUCT, ROOT / "examples/self_play.py"])


def code_name(name: str) -> str:
    """Return a name of the page with "*" for its placeholders, as in the code's names."""
    return PLACEHOLDER.sub("*", name)


def is_documented(name: str) -> bool:
    """A name that the code knows completely stands on the page as it is."""
    if "*" not in name:
        return name in documented()
    pattern = re.escape(name).replace(r"\*", "[^/]+")
    return any(re.fullmatch(pattern, code_name(known)) for known in documented())


def test_the_page_has_every_metric_of_the_code():
    names = code().names - NO_METRICS.keys()
    assert len(names) > 80
    assert [name for name in sorted(names) if not is_documented(name)] == []


def test_the_exceptions_exist():
    assert NO_METRICS.keys() <= code().names


@pytest.mark.parametrize("name", documented())
def test_the_code_can_write_every_metric_of_the_page(name):
    """Losses and engines name their metrics without the role, which is put before them."""
    role, _, last_part = name.rpartition("/")
    is_of_role = role in ("actor", "critic", "train", "rollout_corr") and last_part in code().keys
    assert code_name(name) in code().names or is_of_role or name == "step"


def test_no_metric_stands_on_the_page_twice():
    assert len(documented()) == len(set(documented())) > 80


def test_a_placeholder_stands_for_one_part():
    assert matches("val/NAME/pass@K", "val/math/pass@4")
    assert not matches("val/NAME", "val/math/pass@4")
    assert undocumented(["actor/pg_loss", "actor/unknown"]) == ["actor/unknown"]


@pytest.mark.parametrize("loss_mode, is_error", [("ppo", True), ("my.py:loss", False)])
def test_every_launch_of_the_tests_is_checked(tmp_path, loss_mode, is_error):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/mine": 0.5}) + "\n")
    (tmp_path / "config.yaml").write_text(f"algorithm:\n  loss_mode: {loss_mode}\n")
    if is_error:
        with pytest.raises(AssertionError, match=r"lacks \['actor/mine'\]"):
            check_run(tmp_path)
    else:
        check_run(tmp_path)
