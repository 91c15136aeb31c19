"""Ranks that start with different settings, files or libraries."""

import importlib.metadata
import platform
import shutil
import sys

import pytest
import torch.distributed as dist

from config import InputError, load
from job import consistency
from job.consistency import check_ranks_agree, describe_rank, files_named_in, first_difference
from tests.support.launch import LIMIT, start
from tests.support.ports import unused_port
from tests.support.ranks import on_ranks


def configure(tmp_path, *settings: str):
    reward = tmp_path / "mine.py"
    if not reward.exists():
        reward.write_text("def f(response):\n    return 0.0\n")
    return load(
        "ppo.yaml",
        ["model.path=x", "data.train_files=x", f"reward.function={reward}:f", *settings],
    )


def test_equal_ranks_have_no_difference(tmp_path):
    setup = describe_rank(configure(tmp_path))
    assert setup == describe_rank(configure(tmp_path))
    assert setup["optim.lr"] == "1e-06"
    assert "rankwise's rl/losses.py" in setup
    assert "rankwise's rollout/vllm/scheduler.py" in setup
    assert "rankwise's configs/ppo.yaml" in setup
    assert "rankwise's configs/model_engine/fsdp.yaml" in setup
    assert "rankwise's train_ppo.py" in setup
    assert not any("tests/" in name for name in setup)
    assert setup["Python"] == platform.python_version().rpartition(".")[0]
    assert {"torch", "transformers", "vLLM"} < setup.keys()
    assert "not installed" not in {setup[name] for name in consistency.LIBRARIES}


def test_the_first_key_that_differs_is_named_with_its_ranks(tmp_path):
    setup = describe_rank(configure(tmp_path))
    other = describe_rank(configure(tmp_path, "optim.lr=5e-2", "rollout.n=4"))
    assert first_difference([setup, setup, other, other], ["a"] * 4).startswith(
        "rollout.n differs between ranks: 8 on rank 0, 4 on ranks 2, 3: start all ranks"
    )


def test_nodes_that_differ_are_named():
    setups = [{"torch": version} for version in ("2.11", "2.11", "2.12", "2.12")]
    assert first_difference(setups, ["a", "a", "b", "b"]).startswith(
        "torch differs between ranks: 2.11 on rank 0 (a), 2.12 on ranks 2, 3 (b): start all ranks"
    )


def test_only_ranks_with_the_same_other_value_are_named():
    setups = [{"torch": version} for version in ("2.11", "2.12", "2.13", "2.12")]
    assert first_difference(setups, ["a"] * 4).startswith(
        "torch differs between ranks: 2.11 on rank 0, 2.12 on ranks 1, 3: start all ranks"
    )


def test_what_a_rank_lacks_is_missing_there():
    setups = [{"torch": "2.11"}, {"torch": "2.11", "the file mine.py": "1f"}]
    assert first_difference(setups, ["a", "a"]) == (
        "the file mine.py differs between ranks: missing on rank 0, 1f on rank 1: start all ranks "
        "with the same command, files and libraries"
    )


def test_ranks_of_many_nodes_are_shortened():
    """Each node of two ranks is named once."""
    setups = [{"torch": "2.11"}] + [{"torch": "2.12"}] * 19
    hosts = [f"node{rank // 2}" for rank in range(20)]
    others = "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... (node0, node1, node2, node3, node4, node5, node6,"
    assert f"2.11 on rank 0 (node0), 2.12 on {others} node7, ...): start" in first_difference(
        setups, hosts
    )


def test_the_order_of_settings_can_differ_alone():
    setups = [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]
    assert first_difference(setups, ["a", "a"]) == (
        "the ranks have the same settings in another order: start all ranks with the same command, "
        "files and libraries"
    )


def test_a_library_has_the_version_of_its_first_installed_distribution():
    version = importlib.metadata.version("pytest")
    assert consistency.installed_version(["no-such-package", "pytest", "torch"]) == version
    assert consistency.installed_version(["no-such-package"]) == "not installed"


def test_a_file_that_the_configuration_names_is_compared(tmp_path, monkeypatch):
    before = describe_rank(configure(tmp_path))
    (tmp_path / "mine.py").write_text("def f(response):\n    return 1.0\n")
    after = describe_rank(configure(tmp_path))
    assert first_difference([before, after], ["a", "a"]).startswith(
        f"the file {tmp_path}/mine.py differs"
    )
    assert files_named_in(["x" * 5000, 3, str(tmp_path)]) == []
    file = tmp_path / "mine.py"
    assert files_named_in([3, "x" * 5000, f"{file}:f"]) == [file]
    monkeypatch.setattr(consistency, "MAX_FILE_BYTES", file.stat().st_size - 1)
    assert files_named_in(str(file)) == [], "data, which rank 0 reads for all"


def test_the_code_is_compared(tmp_path, monkeypatch):
    before = describe_rank(configure(tmp_path))
    copy = tmp_path / "copy"
    shutil.copytree(consistency.ROOT / "rl", copy / "rl")
    shutil.copytree(consistency.ROOT / "configs", copy / "configs")
    monkeypatch.setattr(consistency, "ROOT", copy)
    names = {name for name in describe_rank(configure(tmp_path)) if "rl/" in name}
    assert names == {name for name in before if "rankwise's rl/" in name}
    with (copy / "rl" / "losses.py").open("a") as file:
        file.write("# changed\n")
    changed = describe_rank(configure(tmp_path))
    assert {name for name in names if changed[name] != before[name]} == {"rankwise's rl/losses.py"}


def test_secrets_are_compared_but_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefgh")
    pair = "trainer.experiment_name=abcdefgh"
    setup = describe_rank(configure(tmp_path, pair))
    assert "abcdefgh" not in str(setup)
    assert setup["trainer.experiment_name"].startswith("secret ")


def error_of_rank(folder, seeds: list[int]) -> str:
    """Return the error of ranks with these seeds; "" if there is none."""
    try:
        check_ranks_agree(configure(folder, f"trainer.seed={seeds[dist.get_rank()]}"))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seeds, values", [([3, 3], None), ([3, 4], "3 on rank 0, 4 on rank 1")])
def test_all_ranks_hear_what_differs(tmp_path, seeds, values):
    configure(tmp_path)
    for error in on_ranks(2, tmp_path, error_of_rank, tmp_path, seeds):
        expected = f"trainer.seed differs between ranks: {values}: start all" if values else ""
        assert error.startswith(expected)
        assert bool(error) == bool(values)


@pytest.mark.slow
def test_two_ranks_with_different_learning_rates_do_not_start(tmp_path):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused_port(), "WORLD_SIZE": "2"}
    processes = []
    for rank, lr in enumerate(("1e-3", "5e-2")):
        command = [
            sys.executable,
            "train_sft.py",
            f"model.path={tmp_path}",
            f"data.train_files={tmp_path}/none.jsonl",
            f"output_dir={tmp_path}/out",
            f"optim.lr={lr}",
        ]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(start(command, tmp_path / f"log_{rank}", **environment, **own))
    assert [process.wait(LIMIT) for process in processes] == [2, 2]
    (line,) = (tmp_path / "log_0").read_text().splitlines()
    assert "optim.lr differs between ranks: 0.001 on rank 0, 0.05 on rank 1" in line
    assert not (tmp_path / "out").exists()
