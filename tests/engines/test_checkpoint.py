"""Checkpoints of one rank, with an engine that is only a dictionary of tensors."""

import shutil
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from config import InputError
from engines.checkpoint.checkpointer import Checkpointer, find_checkpoint, read_progress
from engines.checkpoint.export import export_checkpoint, export_hf
from engines.checkpoint.storage import read_tensors
from engines.model.model_files import fingerprint
from tests.engines.stub_engine import Killed, StubEngine, StubTokenizer, save
from tests.support.models import make_model
from tests.support.training import flip_bit
from tests.support.traps import set_trap

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2_tied")


@pytest.fixture
def engine(model) -> StubEngine:
    return StubEngine(model)


@pytest.fixture
def checkpointer(tmp_path) -> Checkpointer:
    return Checkpointer(tmp_path / "checkpoints", max_checkpoints=3, asynchronous=False)


def kill_at_rename(monkeypatch, name: str) -> None:
    """Let the process die when a file or directory of this name is about to be renamed."""
    rename = Path.rename

    def rename_or_die(path: Path, target: Path):
        if path.name == name:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)


# step_00000002.tmp: before the checkpoint has its name. latest.tmp: after that, before `latest`
# names it.
@pytest.mark.parametrize("renamed", ["step_00000002.tmp", "latest.tmp"])
def test_a_crash_while_publishing_leaves_latest_on_a_complete_checkpoint(
    checkpointer, engine, monkeypatch, renamed
):
    """Also if a run keeps a single checkpoint, which the new one replaces."""
    checkpointer.max_checkpoints = 1
    save(checkpointer, 1, engine)
    kill_at_rename(monkeypatch, renamed)
    with pytest.raises(Killed):
        save(checkpointer, 2, engine)

    latest = checkpointer.directory / "latest"
    assert latest.read_text() == "step_00000001\n"
    assert (checkpointer.directory / "step_00000001" / "trainer.json").is_file()


def test_latest_names_the_checkpoint_that_was_saved_last(checkpointer, engine):
    for step in (1, 2):
        saved = save(checkpointer, step, engine)
        assert (checkpointer.directory / "latest").read_text() == saved.name + "\n"
        assert checkpointer.latest() == saved


def test_a_save_reports_the_error_of_the_one_before_it(checkpointer, engine):
    checkpointer.pending = Future()
    checkpointer.pending.set_exception(RuntimeError("the disk is gone"))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        save(checkpointer, 1, engine)
    assert save(checkpointer, 2, engine).is_dir()


@pytest.mark.parametrize("max_checkpoints, kept", [(1, [5]), (3, [3, 4, 5]), (-1, [1, 2, 3, 4, 5])])
def test_the_newest_checkpoints_are_kept(checkpointer, engine, max_checkpoints, kept):
    checkpointer.max_checkpoints = max_checkpoints
    for step in range(1, 6):
        save(checkpointer, step, engine)
    directories = sorted(checkpointer.directory.glob("step_*"))
    assert [path.name for path in directories] == [f"step_{step:08d}" for step in kept]


def test_checkpoints_are_in_the_order_of_their_steps(checkpointer):
    """Not of their names: later steps may have more digits."""
    for name in ("step_99999999", "step_100000000", "step_00000007"):
        (checkpointer.directory / name).mkdir(parents=True)
    assert checkpointer.latest().name == "step_100000000"


def test_an_engine_that_leaves_weights_unused_names_the_model_that_has_them(
    checkpointer, model, monkeypatch
):
    """An export finds it from any directory, although the run was given a relative path."""
    monkeypatch.chdir(model.parent)
    engine = StubEngine(Path(model.name))
    monkeypatch.setattr(StubEngine, "has_unused_weights", True)
    progress = read_progress(save(checkpointer, 1, engine))
    assert progress == {"step": 1, "export_dtype": "float32", "rest": str(model.absolute())}


def test_loading_restores_weights_progress_and_random_numbers(checkpointer, engine, model):
    saved = save(checkpointer, 1, engine)
    expected = torch.rand(3)

    other = StubEngine(model)
    for tensor in other.weights.values():
        tensor.zero_()
    progress = checkpointer.load(saved, other)

    assert progress == {"step": 1, "export_dtype": "float32"}
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in engine.weights.items():
        assert torch.equal(other.weights[name], tensor), name


def test_each_engine_of_a_checkpoint_gets_its_own_weights(checkpointer, engine, model, tmp_path):
    """An export has those of the first one alone."""
    critic = StubEngine(model)
    for tensor in critic.weights.values():
        tensor.add_(1)
    expected = {"actor": dict(engine.weights), "critic": dict(critic.weights)}
    progress = {"step": 1, "export_dtype": "float32"}
    checkpointer.save(1, engine, progress, StubTokenizer(), critic=critic)
    saved = checkpointer.latest()

    loaded = {"actor": StubEngine(model), "critic": StubEngine(model)}
    for other in loaded.values():
        for tensor in other.weights.values():
            tensor.zero_()
    checkpointer.load(saved, loaded["actor"], critic=loaded["critic"])
    for role, other in loaded.items():
        for name, tensor in expected[role].items():
            assert torch.equal(other.weights[name], tensor), (role, name)
    export_checkpoint(saved, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == expected["actor"].keys()
    for name, tensor in expected["actor"].items():
        assert torch.equal(exported[name], tensor), name


def test_after_loading_other_pickles_can_be_read_again(checkpointer, engine, tmp_path):
    """Only the checkpoint must consist of data; a reward function may load its own objects."""
    torch.save(Fraction(1, 3), tmp_path / "fraction.pt")
    checkpointer.load(save(checkpointer, 1, engine), engine)
    assert torch.load(tmp_path / "fraction.pt", weights_only=False) == Fraction(1, 3)


def test_tensors_are_read_in_their_own_dtype_and_exported_in_that_of_the_run(
    checkpointer, engine, tmp_path
):
    names = sorted(engine.weights)
    for name in names[:3]:
        engine.weights[name] = engine.weights[name].bfloat16()
    saved = save(checkpointer, 1, engine)
    stored = dict(read_tensors(saved, "engine.model.", lambda name: name == names[-1]))
    assert sorted(stored) == names[:-1]
    for name, tensor in stored.items():
        assert tensor.dtype == engine.weights[name].dtype, name
        assert torch.equal(tensor, engine.weights[name]), name
    export_checkpoint(saved, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    for name, tensor in exported.items():
        assert torch.equal(tensor, engine.weights[name].float()), name


@pytest.mark.parametrize("trap", [".metadata", "part"])
def test_a_pickle_with_code_is_not_loaded(checkpointer, engine, tmp_path, monkeypatch, trap):
    """PyTorch's own loader runs it: otherwise the test would prove nothing."""
    state = engine.state
    with_text = {"text": ["not a tensor"]}
    monkeypatch.setattr(engine, "state", lambda loading=False: state() | with_text)
    saved = save(checkpointer, 1, engine)
    mark = tmp_path / "mark"
    set_trap(trap, saved, mark)
    with pytest.raises(InputError, match="contains code, which calls posix.system"):
        checkpointer.load(saved, engine)
    assert not mark.exists()
    if trap == "part":
        dcp.load({"engine": engine.state()}, checkpoint_id=saved / "weights")
    else:
        dcp.FileSystemReader(saved / "weights").read_metadata()
    assert mark.exists()


DAMAGED = ("hf/tokenizer.json", "weights/__0_0.distcp", "weights/.metadata")


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_checkpoint_is_not_resumed_from(checkpointer, engine, file):
    intact = save(checkpointer, 1, engine)
    damaged = save(checkpointer, 2, engine)
    flip_bit(damaged / file)

    assert checkpointer.find("auto") == intact
    assert not damaged.exists()
    assert damaged.with_name("step_00000002.damaged").is_dir()
    assert (checkpointer.directory / "latest").read_text() == "step_00000001\n"


def test_a_run_resumes_from_its_own_checkpoints_rather_than_from_another_run(
    checkpointer, engine, tmp_path
):
    """A run that is started again with the same command must not begin anew."""
    other = save(checkpointer, 5, engine)
    own = Checkpointer(tmp_path / "own", max_checkpoints=3, asynchronous=False)
    assert own.find(str(other)) == other
    saved = save(own, 1, engine)
    assert own.find(str(other)) == saved


def test_a_dry_run_reports_damaged_checkpoints_and_leaves_them(checkpointer, engine, capsys):
    intact = save(checkpointer, 1, engine)
    damaged = [save(checkpointer, step, engine) for step in (2, 3)]
    for path in damaged:
        flip_bit(path / DAMAGED[0])
    latest = checkpointer.directory / "latest"
    assert checkpointer.find("auto", dry_run=True) == intact
    assert latest.read_text() == damaged[1].name + "\n"
    newer, older = capsys.readouterr().out.splitlines()
    for line, path in ((newer, damaged[1]), (older, damaged[0])):
        assert path.is_dir()
        assert line.startswith(f"{path} is damaged: {DAMAGED[0]}")
        assert line.endswith(f"the run would resume from {intact}")


def test_progress_that_was_changed_is_damage(checkpointer, engine):
    intact = save(checkpointer, 1, engine)
    file = save(checkpointer, 2, engine) / "trainer.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    assert checkpointer.find("auto") == intact


def test_a_save_that_fails_leaves_nothing(checkpointer, engine, monkeypatch):
    def fail(*arguments) -> None:
        raise RuntimeError("a node is gone")

    saved = save(checkpointer, 1, engine)
    monkeypatch.setattr(engine, "write", fail)
    with pytest.raises(RuntimeError, match="a node is gone"):
        save(checkpointer, 2, engine)
    assert {*checkpointer.directory.iterdir()} == {saved, saved.with_name("latest")}


def test_an_earlier_damaged_checkpoint_of_the_same_step_is_kept(checkpointer, engine):
    intact = save(checkpointer, 1, engine)
    for _ in range(2):
        flip_bit(save(checkpointer, 2, engine) / DAMAGED[0])
        assert checkpointer.find("auto") == intact
    damaged = [path.name for path in sorted(checkpointer.directory.glob("*.damaged*"))]
    assert damaged == ["step_00000002.damaged", "step_00000002.damaged1"]


def test_a_file_of_weights_that_is_not_listed_is_damage(checkpointer, engine):
    """As one that a crashed run of more ranks has left: torch would read it, too."""
    intact = save(checkpointer, 1, engine)
    damaged = save(checkpointer, 2, engine)
    shutil.copy(damaged / "weights" / "__0_0.distcp", damaged / "weights" / "__1_0.distcp")
    assert checkpointer.find("auto") == intact


def test_in_place_of_a_damaged_checkpoint_of_another_run_its_newest_one_is_named(
    checkpointer, engine, tmp_path
):
    save(checkpointer, 1, engine)
    intact = save(checkpointer, 2, engine)
    damaged = save(checkpointer, 3, engine)
    flip_bit(damaged / DAMAGED[0])
    own = Checkpointer(tmp_path / "own", max_checkpoints=3, asynchronous=False)
    with pytest.raises(InputError, match=f"step_00000003 is damaged.*; {intact} is intact"):
        own.find(str(damaged))
    assert damaged.is_dir(), "it belongs to the other run"


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_checkpoint_is_not_exported(checkpointer, engine, tmp_path, file):
    damaged = save(checkpointer, 1, engine)
    flip_bit(damaged / file)

    with pytest.raises(InputError, match=f"step_00000001 is damaged.*{file}"):
        export_checkpoint(damaged, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_export_holds_the_weights_of_the_checkpoint(checkpointer, engine, tmp_path):
    export_checkpoint(save(checkpointer, 1, engine), tmp_path / "exported")

    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == engine.weights.keys()
    for name, tensor in engine.weights.items():
        assert torch.equal(exported[name], tensor), name
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    assert (tmp_path / "exported" / "config.json").is_file()


def test_an_export_replaces_an_older_one_once_it_is_complete(engine, tmp_path):
    out = tmp_path / "hf"
    export_hf(engine, StubTokenizer(), out)
    (out / "left over").touch()
    for tensor in engine.weights.values():
        tensor.add_(1)
    expected = {name: tensor.clone() for name, tensor in engine.weights.items()}

    class FullDisk(StubTokenizer):
        def save_pretrained(self, directory: Path) -> None:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        export_hf(engine, FullDisk(), out)
    assert (out / "left over").exists(), "the older one is still there"
    export_hf(engine, StubTokenizer(), out)
    assert not (out / "left over").exists()
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_adapters_are_merged_only_into_the_model_that_they_were_trained_with(
    checkpointer, engine, model, tmp_path
):
    base = shutil.copytree(model, tmp_path / "base")
    progress = {"step": 1, "export_dtype": "float32", "lora": {"rank": 2, "base": str(base)}}
    progress["run"] = {"frozen weights": fingerprint(base)}
    checkpointer.save(1, engine, progress, StubTokenizer())
    flip_bit(base / "model.safetensors")
    with pytest.raises(InputError, match="trained with a different model from the one that is now"):
        export_checkpoint(checkpointer.latest(), tmp_path / "merged", merge=True)
    shutil.rmtree(base)
    with pytest.raises(InputError, match="the frozen model was in .*base, which does not exist"):
        export_checkpoint(checkpointer.latest(), tmp_path / "merged", merge=True)


def test_an_export_finds_the_newest_checkpoint_of_a_run(tmp_path, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step_00000009", "step_00000010", "step_00000011.tmp"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "trainer.json").touch()
    (checkpoints / "latest").write_text("step_00000009\n")
    (tmp_path / "empty").mkdir()
    newest = checkpoints / "step_00000010"
    for path in (newest, tmp_path / "run", checkpoints):
        assert find_checkpoint(path) == newest
    assert find_checkpoint(checkpoints / "latest") == checkpoints / "step_00000009"
    assert capsys.readouterr().out.splitlines()[0] == f"checkpoint: {newest}"
    with pytest.raises(InputError, match="empty has no checkpoint: give a directory such as"):
        find_checkpoint(tmp_path / "empty")
    with pytest.raises(InputError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")
