"""What a save leaves on the disk, and which checkpoint a run finds there."""

import json
import os
import pickle
import shutil
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path, PosixPath

import numpy
import pytest
import torch
from safetensors.torch import load_file

from config import InputError
from engines.checkpoint import storage
from engines.checkpoint.__main__ import main as export_main
from engines.checkpoint.checkpointer import (
    Checkpointer,
    holds_rng_state,
    read_files,
    read_progress,
)
from engines.checkpoint.export import export_checkpoint, export_hf
from engines.checkpoint.storage import MetadataUnpickler, Writer
from engines.model.model_files import fingerprint
from tests.engines.stub_engine import Killed, StubEngine, StubTokenizer, save
from tests.support.models import make_model
from tests.support.training import flip_bit
from tests.support.traps import without_checksums

pytestmark = pytest.mark.usefixtures("process_group")

TOKENIZER = "hf/tokenizer.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2_tied")


@pytest.fixture
def engine(model) -> StubEngine:
    return StubEngine(model)


@pytest.fixture
def checkpointer(tmp_path) -> Checkpointer:
    return Checkpointer(tmp_path / "checkpoints", max_checkpoints=1, asynchronous=False)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- on the disk -----------------------------------------------------------------------------------


def test_what_a_killed_run_was_writing_is_removed(checkpointer, engine):
    """Also if it is the checkpoint of another step."""
    for name in ("step_00000002.tmp", "step_00000007.tmp"):
        (checkpointer.directory / name / "hf").mkdir(parents=True)
    save(checkpointer, 2, engine)
    assert names_in(checkpointer.directory) == ["latest", "step_00000002"]


def test_a_checkpoint_loses_its_name_before_it_is_deleted(checkpointer, engine, monkeypatch):
    def die(path: Path) -> None:
        raise Killed

    save(checkpointer, 1, engine)
    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Killed):
        save(checkpointer, 2, engine)
    left = ["latest", "step_00000001.deleted.tmp", "step_00000002"]
    assert names_in(checkpointer.directory) == left
    monkeypatch.undo()
    save(checkpointer, 3, engine)
    assert names_in(checkpointer.directory) == ["latest", "step_00000003"]


def test_a_checkpoint_replaces_one_of_the_same_step(checkpointer, engine):
    save(checkpointer, 1, engine)
    checkpointer.save(1, engine, {"step": 1, "again": True}, StubTokenizer())
    assert checkpointer.load(checkpointer.latest(), engine) == {"step": 1, "again": True}
    assert names_in(checkpointer.directory) == ["latest", "step_00000001"]


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(
    checkpointer, engine, monkeypatch
):
    """And its name is there before the save ends."""
    synced = []
    missing = []
    fsync = os.fsync
    rename = Path.rename

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def check(path: Path, target: Path) -> Path:
        if path.name == "step_00000001.tmp":
            missing.append({path, *path.rglob("*")} - {*synced})
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    checkpointer.save(1, engine, {"step": 1}, StubTokenizer(), files={"more": b"1"})
    assert missing == [set()]
    assert synced[-1] == checkpointer.directory


def test_files_of_a_script_are_read_in_the_order_of_their_names(checkpointer, engine):
    files = {f"rank_{rank}": bytes([rank]) for rank in (3, 0, 4, 1, 2, 5)}
    checkpointer.save(1, engine, {"step": 1}, StubTokenizer(), files)
    saved = checkpointer.latest()
    assert read_files(saved) == [bytes([rank]) for rank in range(6)]
    flip_bit(saved / "files" / "rank_1")
    with pytest.raises(InputError, match="damaged: files/rank_1 has changed since it was written"):
        checkpointer.find("auto")


def test_a_checkpoint_has_the_random_generators_of_its_own_ranks(checkpointer, engine):
    saved = save(checkpointer, 1, engine)
    assert holds_rng_state(saved, "rank_0")
    for other in ("rank_1", "rank_"):
        assert not holds_rng_state(saved, other)


# -- in the background -----------------------------------------------------------------------------


class BackgroundEngine(StubEngine):
    """Writes at once, but reports the end only when a test says so."""

    def write(self, states: dict, directory: Path, group) -> Future:
        assert group is not None, "to communicate while training goes on"
        super().write(states, directory, group)
        self.writing = Future()
        return self.writing


def test_a_checkpoint_that_is_being_written_is_published_before_the_wait_ends(model, tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", 3, asynchronous=True)
    engine = BackgroundEngine(model)
    saved = save(checkpointer, 1, engine)
    assert checkpointer.latest() is None
    engine.writing.set_result(None)
    checkpointer.wait()
    assert checkpointer.latest() == saved


def test_a_write_that_fails_in_the_background_leaves_nothing(model, tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", 3, asynchronous=True)
    engine = BackgroundEngine(model)
    save(checkpointer, 1, engine)
    engine.writing.set_exception(RuntimeError("a node is gone"))
    with pytest.raises(RuntimeError, match="a node is gone"):
        checkpointer.wait()
    assert names_in(checkpointer.directory) == []
    checkpointer.wait()  # the error is reported once


def test_a_save_that_waits_writes_without_a_group(checkpointer, engine, monkeypatch):
    groups = []
    write = engine.write

    def note(states: dict, directory: Path, group) -> None:
        groups.append(group)
        write(states, directory, group)

    monkeypatch.setattr(engine, "write", note)
    save(checkpointer, 1, engine)
    assert groups == [None]


# -- without room ----------------------------------------------------------------------------------


def test_a_disk_without_room_is_noticed_before_weights_are_written(
    checkpointer, engine, monkeypatch
):
    saved = save(checkpointer, 1, engine)
    num_bytes = sum(tensor.nbytes for tensor in engine.weights.values())
    usage = shutil.disk_usage(saved)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes - 1))
    monkeypatch.setattr(Writer, "write_data", None)
    with pytest.raises(InputError, match=r"the disk is full: .*weights needs .* are free; make"):
        save(checkpointer, 2, engine)
    assert names_in(checkpointer.directory) == ["latest", "step_00000001"]


def test_the_error_of_a_rank_is_raised_in_place_of_torchs(checkpointer, engine, monkeypatch):
    def fail(*arguments) -> None:
        raise OSError("the network file system is gone")

    monkeypatch.setattr(Writer, "write_data", fail)
    with pytest.raises(OSError, match="the network file system is gone"):
        save(checkpointer, 1, engine)
    assert names_in(checkpointer.directory) == []


# -- what is found ---------------------------------------------------------------------------------


@pytest.fixture
def two(checkpointer, engine) -> tuple[Path, Path]:
    """Return an intact checkpoint, and a newer one whose tokenizer is damaged."""
    checkpointer.max_checkpoints = 2
    intact = save(checkpointer, 1, engine)
    damaged = save(checkpointer, 2, engine)
    flip_bit(damaged / TOKENIZER)
    return intact, damaged


def test_a_dry_run_reports_damage_and_changes_nothing(checkpointer, two, capsys):
    intact, damaged = two
    problem = f"{damaged} is damaged: {TOKENIZER} has changed since it was written"
    assert checkpointer.find("auto", dry_run=True) == intact
    assert capsys.readouterr().out == f"{problem}; the run would resume from {intact}\n"
    assert damaged.is_dir()
    assert (checkpointer.directory / "latest").read_text() == "step_00000002\n"

    assert checkpointer.find("auto") == intact
    reported = f"{problem}; renamed to step_00000002.damaged, resuming from {intact}\n"
    assert capsys.readouterr().out == reported


def test_a_run_that_never_resumes_verifies_nothing(checkpointer, two):
    assert checkpointer.find("never") == two[1]
    assert two[1].is_dir()


def test_without_an_intact_checkpoint_the_newest_ones_damage_is_reported(checkpointer, two):
    (two[0] / "weights" / "__0_0.distcp").unlink()
    with pytest.raises(InputError) as caught:
        checkpointer.find("auto")
    problem = f"{two[1]} is damaged: {TOKENIZER} has changed since it was written"
    assert str(caught.value) == f"{problem}; no other checkpoint is intact"
    assert two[0].is_dir()
    assert two[1].is_dir()


def test_a_file_that_is_missing_is_named(checkpointer, engine):
    saved = save(checkpointer, 1, engine)
    (saved / TOKENIZER).unlink()
    with pytest.raises(InputError, match=f"damaged: {TOKENIZER}: No such file or directory"):
        checkpointer.find("auto")
    (saved / "trainer.json").write_text("{")
    with pytest.raises(InputError, match="not a checkpoint, or is damaged: cannot read trainer"):
        checkpointer.find("auto")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_file_is_verified_by_one_rank(tmp_path, num_ranks):
    """Also the last one, and if there are more ranks than files."""
    names = [f"weights/__{rank}_0.distcp" for rank in range(3)] + ["hf/config.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    storage.write_manifest(tmp_path, {"step": 1}, {})
    manifest = storage.read_manifest(tmp_path)
    assert manifest.progress == {"step": 1}
    assert manifest.checksums.keys() == {*names}

    def damage() -> list[str]:
        found = []
        for rank in range(num_ranks):
            found += storage.find_damage(tmp_path, manifest.checksums, rank, num_ranks)
        return found

    assert damage() == []
    for name in names:
        content = (tmp_path / name).read_bytes()
        flip_bit(tmp_path / name)
        assert damage() == [f"{name} has changed since it was written"]
        (tmp_path / name).unlink()
        assert damage() == [f"{name}: No such file or directory"]
        (tmp_path / name).write_bytes(content)
    (tmp_path / "weights" / "__9_0.distcp").touch()
    assert damage() == ["weights/__9_0.distcp is not listed in trainer.json"]


def test_a_checkpoint_of_an_early_version_is_not_verified(checkpointer, two, capsys):
    without_checksums(two[1])
    assert checkpointer.find("auto") == two[1]
    assert f"{two[1]} cannot be verified: an earlier version wrote" in capsys.readouterr().out


@pytest.mark.parametrize("allowed", [torch.float32, torch.Size, PosixPath])
def test_names_of_harmless_classes_are_unpickled(allowed):
    assert MetadataUnpickler(BytesIO(pickle.dumps(allowed))).load() is allowed


@pytest.mark.parametrize("rejected", [torch.load, numpy.float32, os.system])
def test_other_names_are_not_unpickled(rejected):
    with pytest.raises(pickle.UnpicklingError, match=f"GLOBAL .*{rejected.__name__}"):
        MetadataUnpickler(BytesIO(pickle.dumps(rejected))).load()


# -- exports ---------------------------------------------------------------------------------------


def test_the_command_exports_a_checkpoint_once(checkpointer, engine, tmp_path, capsys):
    saved = save(checkpointer, 1, engine)
    out = tmp_path / "hf"
    arguments = ["export", str(checkpointer.directory), str(out)]
    export_main(arguments)
    assert capsys.readouterr().out == f"checkpoint: {saved}\nmodel: {out}\n"
    (out / "mine").touch()
    with pytest.raises(SystemExit) as exited:
        export_main(arguments)
    assert exited.value.code == 2
    problem = f"error: {out} already exists: remove it, or export to another directory\n"
    assert capsys.readouterr().err == problem
    assert (out / "mine").exists()
    with pytest.raises(SystemExit):
        export_main([*arguments[:2], str(tmp_path / "merged"), "--merge"])
    assert f"--merge: {saved} has no adapters: leave out --merge" in capsys.readouterr().err
    assert names_in(tmp_path) == ["checkpoints", "hf"]


def test_an_export_needs_the_model_with_the_weights_that_were_not_trained(
    checkpointer, engine, tmp_path
):
    progress = {"export_dtype": "float32", "rest": str(tmp_path / "gone")}
    checkpointer.save(1, engine, progress, StubTokenizer())
    with pytest.raises(InputError, match="other weights were in .*gone, which does not exist: re"):
        export_checkpoint(checkpointer.latest(), tmp_path / "hf")
    # A reward model has no other weights.
    checkpointer.save(2, engine, progress | {"is_classifier": True}, StubTokenizer())
    export_checkpoint(checkpointer.latest(), tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


LAYER = "model.layers.0.self_attn.q_proj"


def save_adapters(checkpointer: Checkpointer, model: Path, is_classifier: bool) -> StubEngine:
    """Save adapters of one layer; of a reward model, also a value head, named as in an engine."""
    engine = StubEngine(model)
    q_proj = engine.weights[f"{LAYER}.weight"]
    engine.weights = {
        f"{LAYER}.lora_A.weight": torch.ones(2, q_proj.shape[1]),
        f"{LAYER}.lora_B.weight": torch.arange(2.0 * len(q_proj)).view(-1, 2),
    }
    if is_classifier:
        engine.weights["lm_head.weight"] = torch.arange(32.0)[None]
    settings = {"rank": 2, "alpha": 6, "dropout": 0.25}
    record = settings | {"base": str(model), "base_name": "the/hub", "exclude_modules": []}
    progress = {
        "export_dtype": "bfloat16",
        "lora": record | {"target_modules": [LAYER.removeprefix("model.")]},
        "run": {"frozen weights": fingerprint(model)},
        "is_classifier": is_classifier,
    }
    checkpointer.save(1, engine, progress, StubTokenizer())
    return engine


@pytest.mark.parametrize("is_classifier", [False, True], ids=["policy", "reward model"])
def test_adapters_are_exported_for_peft(checkpointer, model, tmp_path, is_classifier, capsys):
    engine = save_adapters(checkpointer, model, is_classifier)
    out = tmp_path / "adapter"
    export_main(["export", str(checkpointer.latest()), str(out)])
    assert capsys.readouterr().out == f"adapter: {out}\n"
    files = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert names_in(out) == files
    written = json.loads((out / "adapter_config.json").read_text())
    expected = {
        "task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_classifier else None,
        "base_model_name_or_path": "the/hub",
        "r": 2,
        "lora_alpha": 6,
        "lora_dropout": 0.25,
        "target_modules": [LAYER],
    }
    assert written.items() >= expected.items()
    tensors = load_file(out / "adapter_model.safetensors")
    score = engine.weights.pop("lm_head.weight", None)
    if is_classifier:
        assert torch.equal(tensors.pop("base_model.model.score.weight"), score)
    assert tensors.keys() == {f"base_model.model.{name}" for name in engine.weights}
    for name, tensor in engine.weights.items():
        assert torch.equal(tensors[f"base_model.model.{name}"], tensor), name


@pytest.mark.parametrize("base_name", [None, "the/hub"])
def test_an_adapter_names_its_model_from_any_directory(model, tmp_path, monkeypatch, base_name):
    """By its absolute path, if it has no other name."""
    monkeypatch.chdir(model.parent)
    engine = StubEngine(Path(model.name))
    settings = {"rank": 2, "alpha": 6, "dropout": 0.0, "exclude_modules": []}
    engine.config.model.lora = settings | {"target_modules": ["q_proj"]}
    name = f"{LAYER}.lora_A.weight"
    engine.export_adapter = lambda: iter([(name, torch.ones(2, 32))])
    export_hf(engine, StubTokenizer(), tmp_path / "adapter", base_name)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == (base_name or str(model))
    assert written["target_modules"] == ["q_proj"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert [*tensors] == [f"base_model.model.{name}"]


@pytest.mark.parametrize("is_classifier", [False, True], ids=["policy", "reward model"])
def test_merged_adapters_change_their_layer_alone(checkpointer, model, tmp_path, is_classifier):
    adapter = save_adapters(checkpointer, model, is_classifier).weights
    export_checkpoint(checkpointer.latest(), tmp_path / "merged", merge=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    if is_classifier:
        score = merged.pop("score.weight")
        assert score.dtype == torch.bfloat16
        assert torch.equal(score, adapter["lm_head.weight"].bfloat16())
    base = load_file(model / "model.safetensors")
    product = adapter[f"{LAYER}.lora_B.weight"] @ adapter[f"{LAYER}.lora_A.weight"]
    base[f"{LAYER}.weight"] = base[f"{LAYER}.weight"].bfloat16().float() + 6 / 2 * product
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(merged[name], tensor.bfloat16()), name
    assert (tmp_path / "merged" / "config.json").is_file()


def test_adapters_need_no_model_to_be_exported(checkpointer, model, tmp_path):
    """An early version named the frozen model only by its directory. It may be gone by now."""
    save_adapters(checkpointer, model, is_classifier=False)
    progress = read_progress(checkpointer.latest())
    del progress["lora"]["base_name"]
    progress["lora"]["base"] = str(tmp_path / "gone")
    progress["rest"] = str(tmp_path / "gone")
    engine = StubEngine(model)
    name = f"{LAYER}.lora_A.weight"
    engine.weights = {name: torch.ones(2, 32)}
    checkpointer.save(2, engine, progress, StubTokenizer())
    export_checkpoint(checkpointer.latest(), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "gone")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert [*tensors] == [f"base_model.model.{name}"]


def test_an_adapter_of_a_part_of_a_model_names_whole_layers(checkpointer, model, tmp_path):
    """Otherwise PEFT would adapt layers of the other part that have the same last names."""
    save_adapters(checkpointer, model, is_classifier=False)
    progress = read_progress(checkpointer.latest())
    progress["lora"]["target_modules"] = ["q_proj"]
    for step, rest in ((2, None), (3, str(model))):
        engine = StubEngine(model)
        engine.weights = {f"{LAYER}.lora_A.weight": torch.ones(2, 32)}
        checkpointer.save(step, engine, progress | {"rest": rest}, StubTokenizer())
        export_checkpoint(checkpointer.latest(), tmp_path / str(step))
        written = json.loads((tmp_path / str(step) / "adapter_config.json").read_text())
        assert written["target_modules"] == [LAYER if rest else "q_proj"]
