"""Checkpoints and exports."""

import json
import os
import resource
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import InputError
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_checkpoint, export_hf, write_safetensors
from engines.model.model_files import fingerprint, weight_files
from job.progress import adapter as adapter_record
from tests.engines.fsdp.cases import (
    CP2,
    LORA,
    answers_of,
    build,
    make_config,
    on_ranks,
    register,
    train,
    worker_case,
)
from tests.support.cases import needs
from tests.support.estimates import checkpoint_bytes
from tests.support.launch import export
from tests.support.plain import (
    LOSS_BOUND,
    check_answers,
    column,
    plain_answers,
    plain_training,
    tensor_bytes,
    worst,
)
from tests.support.training import flip_bit, gather, make_tokenizer
from tests.support.traps import without_checksums

FAMILIES = ("qwen2_tied", "llama", "lora")  # lora: adapters of qwen3


def checkpoint(folder: Path, device: torch.device, family: str) -> dict:
    """Resume on any number of ranks what 4 ranks have saved after 3 steps, for 3 more.

    4 ranks also go on without interruption, save again, and export. llama is saved in the
    background.
    """
    directory = folder / f"checkpoints_{family}"
    result = {}
    lora = family == "lora"
    model = folder / ("qwen3" if lora else family)
    checkpointer = Checkpointer(directory, 2, asynchronous=family == "llama")
    if dist.get_world_size() == 4:
        engine = build(model, device, CP2, lora=lora)
        tokenizer = make_tokenizer()
        progress = {"export_dtype": "float32"}
        adapter = {}
        if lora:
            frozen_weights = {"frozen weights": fingerprint(model)}
            adapter = {
                "lora": adapter_record(engine.config, str(engine.config.model.path)),
                "run": frozen_weights,
            }
        train(engine, range(3))
        listings = set()
        stop = threading.Event()
        whole = directory / "step_00000003"
        watcher = threading.Thread(target=watch, args=(whole, listings, stop), daemon=True)
        if dist.get_rank() == 0:  # the rank whose results are written
            watcher.start()
        checkpointer.save(3, engine, {"step": 3, **progress}, tokenizer)
        result["random"] = gather(torch.rand(1).item())
        # While an asynchronous save is still writing.
        result["uninterrupted"] = train(engine, range(3, 6))
        checkpointer.wait()
        stop.set()
        if watcher.is_alive():
            watcher.join()
        result["published"] = [sorted(listing) for listing in listings]
        checkpointer.save(6, engine, {"step": 6, **progress, **adapter}, tokenizer)
        checkpointer.wait()
        export_hf(engine, tokenizer, folder / f"hf_{family}")
        asked = answers_of(engine)
        if dist.get_rank() == 0:
            save_file({"asked": asked}, folder / f"4 checkpoint {family}.safetensors")
    engine = build(model, device, CP2 if dist.get_world_size() == 4 else "", lora=lora)
    result["progress"] = checkpointer.load(directory / "step_00000003", engine)
    result["random_again"] = gather(torch.rand(1).item())
    result["resumed"] = train(engine, range(3, 6))
    return result


for each_family in FAMILIES:
    case_name = f"checkpoint {each_family}"
    register(partial(checkpoint, family=each_family), case_name, [1, 2, 4], [(4, case_name)])


def watch(directory: Path, listings: set, stop: threading.Event) -> None:
    """Record each different listing (names and sizes) of a directory from when it first exists."""
    going = True
    while going:
        going = not stop.wait(0.0005)
        if directory.exists():
            files = [path for path in directory.rglob("*") if path.is_file()]
            listing = [(str(file.relative_to(directory)), file.stat().st_size) for file in files]
            listings.add(frozenset(listing))


def family_params(*ranks: int, families: tuple[str, ...] = FAMILIES) -> list:
    """Return parameter sets (number of ranks, family); each needs the checkpoint of 4 ranks."""
    params = []
    for family in families:
        name = f"checkpoint {family}"
        params += [
            pytest.param(world, family, marks=needs((world, name), (4, name))) for world in ranks
        ]
    return params


@pytest.mark.slow
@pytest.mark.parametrize("world, family", family_params(1, 2, 4))
def test_resume_on_any_number_of_ranks(results, folder, family, world):
    """A resumed run computes what the uninterrupted one does, and that what a plain loop does."""
    whole = results(4)[f"checkpoint {family}"]
    result = results(world)[f"checkpoint {family}"]
    assert result["progress"] == {"step": 3, "export_dtype": "float32"}
    assert result["random_again"] == whole["random"][:world]
    has_adapters = family == "lora"
    plain = plain_training(folder / ("qwen3" if has_adapters else family), lora=has_adapters)
    uninterrupted = column(whole["uninterrupted"], "loss")
    assert worst(uninterrupted, plain.losses[3:6]) < LOSS_BOUND
    assert worst(column(result["resumed"], "loss"), uninterrupted) < LOSS_BOUND
    if world == 4:
        assert result["resumed"] == whole["uninterrupted"]


@pytest.mark.slow
@pytest.mark.parametrize("world, family", family_params(4))
def test_checkpoint_appears_complete(results, folder, world, family):
    """From its first moment step_00000003 has all its files, of the size that a dry run reports."""
    listings = results(world)[f"checkpoint {family}"]["published"]
    assert len(listings) == 1, "it changed after it had appeared"
    names = {name for name, size in listings[0] if size > 0}
    assert {f"weights/__{rank}_0.distcp" for rank in range(4)} <= names
    weights = folder / f"checkpoints_{family}" / "step_00000003" / "weights"
    written = tensor_bytes(FileSystemReader(weights).read_metadata())
    settings = [f"model.path={folder / family}"]
    if family == "lora":
        settings = [f"model.path={folder / 'qwen3'}", *(f"model.lora.{key}" for key in LORA)]
    assert checkpoint_bytes(make_config(folder, *settings)) == pytest.approx(written, rel=0.01)
    assert {"weights/.metadata", "trainer.json", "hf/config.json", "hf/tokenizer.json"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("world, family", family_params(4, families=("qwen2_tied", "llama")))
def test_export(results, folder, tmp_path, world, family):
    """transformers computes with it what the engine did; an offline export has the same bits."""
    results(world)
    exported = folder / f"hf_{family}"
    asked = load_file(folder / f"4 checkpoint {family}.safetensors")["asked"]
    check_answers(asked, plain_answers(exported), cp=2)
    change = plain_answers(exported) - plain_answers(folder / family)
    assert change[0].abs().max() > 0.1, "training changed nothing"
    assert AutoTokenizer.from_pretrained(exported)("a b a").input_ids == [1, 2, 1]

    checkpoint = folder / f"checkpoints_{family}" / "step_00000006"
    export(checkpoint, tmp_path / "offline", fresh=True)
    online = load_file(exported / "model.safetensors")
    offline = load_file(tmp_path / "offline" / "model.safetensors")
    assert online.keys() == offline.keys()
    assert all(torch.equal(online[n], offline[n]) for n in online)
    assert ("lm_head.weight" in online) == (family == "llama")
    offline_config = (tmp_path / "offline" / "config.json").read_text()
    assert (exported / "config.json").read_text() == offline_config
    AutoTokenizer.from_pretrained(tmp_path / "offline")

    assert "already exists" in export(checkpoint, tmp_path / "offline", returncode=2)


@pytest.mark.slow
@needs((4, "checkpoint lora"))
def test_export_of_an_adapter(results, folder, tmp_path):
    """peft computes with it what the engine did; so does the merged offline export."""
    results(4)
    exported = folder / "hf_lora"
    checkpoint = folder / "checkpoints_lora" / "step_00000006"
    asked = load_file(folder / "4 checkpoint lora.safetensors")["asked"]
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    PeftModel.from_pretrained(base, exported).merge_and_unload().save_pretrained(
        tmp_path / "by peft"
    )
    check_answers(asked, plain_answers(tmp_path / "by peft"), cp=2)
    change = plain_answers(tmp_path / "by peft") - plain_answers(folder / "qwen3")
    assert change[0].abs().max() > 0.1
    assert not (exported / "config.json").exists()
    assert AutoTokenizer.from_pretrained(exported)("a b a").input_ids == [1, 2, 1]
    for name, more in (("adapter", []), ("merged", ["--merge"])):
        export(checkpoint, tmp_path / name, *more)
    online = load_file(exported / "adapter_model.safetensors")
    offline = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert online.keys() == offline.keys()
    assert all(torch.equal(online[n], offline[n]) for n in online)
    offline_config = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert (exported / "adapter_config.json").read_text() == offline_config
    check_answers(asked, plain_answers(tmp_path / "merged"), cp=2)

    weights = load_file(folder / "qwen3" / "model.safetensors")
    save_file(
        {n: w + 1 for n, w in weights.items()},
        folder / "qwen3" / "model.safetensors",
        metadata={"format": "pt"},
    )
    told = export(checkpoint, tmp_path / "other", "--merge", returncode=2)
    save_file(weights, folder / "qwen3" / "model.safetensors", metadata={"format": "pt"})
    assert "were trained with a different model from" in told


@worker_case(1, 2, reads=[(2, "rotate")])
def rotate(folder: Path, device: torch.device) -> dict:
    """Save steps 1 and 2 on two ranks; then step 3 on one rank, which finds them.

    It also finds a directory that a killed run has left, and copies of checkpoints.
    """
    directory = folder / "rotation"
    steps = [1, 2] if dist.get_world_size() == 2 else [3]
    engine = build(folder / "qwen3", device)
    checkpointer = Checkpointer(directory, 2, asynchronous=False)
    if steps == [3]:
        (directory / "step_00000009.tmp").mkdir()
        for name in ("step_00000009.bak", "step_00000009.damaged", "step_9"):
            (directory / name).mkdir()
    found = str(checkpointer.latest())
    deleted = []
    synced = set()
    fsync = os.fsync

    def note(descriptor):
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), directory))
        fsync(descriptor)

    def note_deletion(event, arguments):
        if event == "shutil.rmtree":
            deleted.append(Path(arguments[0]).name)

    sys.addaudithook(note_deletion)
    os.fsync = note
    for step in steps:
        checkpointer.save(step, engine, {"step": step}, make_tokenizer())
    os.fsync = fsync
    return {
        "found": found,
        "left": sorted(p.name for p in directory.iterdir()),
        "deleted": list(deleted),
        "synced": sorted(synced),
        "latest": [checkpointer.latest().name, (directory / "latest").read_text().strip()],
    }


@pytest.mark.slow
@needs((1, "rotate"), (2, "rotate"))
def test_rotation_is_found_on_disk(results):
    assert results(2)["rotate"]["found"] == "None"
    assert results(2)["rotate"]["left"] == ["latest", "step_00000001", "step_00000002"]
    assert results(1)["rotate"]["found"].endswith("step_00000002"), (
        "an unfinished checkpoint was taken for a whole one"
    )
    assert results(1)["rotate"]["left"] == [
        "latest",
        "step_00000002",
        "step_00000003",
        "step_00000009.bak",
        "step_00000009.damaged",
        "step_9",
    ], "copies are no checkpoints"
    assert results(2)["rotate"]["latest"] == ["step_00000002"] * 2
    assert results(1)["rotate"]["latest"] == ["step_00000003"] * 2


@pytest.mark.slow
@needs((1, "rotate"))
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(results):
    """And a checkpoint loses its name before it is deleted."""
    new = {
        f"step_00000003.tmp{name}"
        for name in (
            "",
            "/hf",
            "/weights",
            "/trainer.json",
            "/weights/.metadata",
            "/weights/__0_0.distcp",
            "/hf/config.json",
            "/hf/tokenizer.json",
        )
    }
    assert new | {"."} <= set(results(1)["rotate"]["synced"])
    assert results(1)["rotate"]["deleted"] == ["step_00000009.tmp", "step_00000001.deleted.tmp"]


HARMS = {
    "a bit of rank 0's part": lambda path: flip_bit(path / "weights" / "__0_0.distcp"),
    "a bit of rank 3's part": lambda path: flip_bit(path / "weights" / "__3_0.distcp"),
    "a bit of .metadata": lambda path: flip_bit(path / "weights" / ".metadata"),
    "a bit of the tokenizer": lambda path: flip_bit(path / "hf" / "tokenizer.json"),
    "the step": lambda path: rewrite(path / "trainer.json", '"step": 6', '"step": 7'),
    "a checksum": lambda path: rewrite(
        path / "trainer.json", '"weights/__1_0.distcp": "', '"weights/__1_0.distcp": "0'
    ),
    "a part that is missing": lambda path: (path / "weights" / "__2_0.distcp").unlink(),
    "a part that is cut off": lambda path: os.truncate(path / "weights" / "__1_0.distcp", 10_000),
    "a zero more": lambda path: (path / "weights" / "__1_0.distcp").open("ab").write(b"\0"),
    "an empty part more": lambda path: (path / "weights" / "__4_0.distcp").touch(),
    "an empty trainer.json": lambda path: os.truncate(path / "trainer.json", 0),
    "no trainer.json": lambda path: (path / "trainer.json").unlink(),
    "a file in its place": lambda path: (shutil.rmtree(path), path.touch()),
}


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@worker_case(2, reads=[(4, "checkpoint llama")])
def harmed(folder: Path, device: torch.device) -> dict:
    """Return which checkpoint two ranks find if the newest one is damaged.

    Four ranks have saved it in the background.
    """
    results = {}
    harmless = {"nothing": lambda path: None, "no checksums": without_checksums}
    for name, harm in {**harmless, **HARMS}.items():
        directory = folder / "harmed" / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "checkpoints_llama", directory)
            harm(directory / "step_00000006")
        dist.barrier()
        here = Checkpointer(directory, 2, False)
        elsewhere = Checkpointer(folder / "empty", 2, False)
        result = {
            "dry": here.find("auto", dry_run=True).name,
            "untouched": sorted(p.name for p in directory.iterdir()),
        }
        dist.barrier()
        try:
            result["named"] = elsewhere.find(str(directory / "step_00000006")) and "found"
        except InputError as error:
            result["named"] = str(error)
        result |= {
            "found": here.find("auto").name,
            "left": sorted(p.name for p in directory.iterdir()),
        }
        results[name] = result | {
            "latest": (directory / "latest").read_text(),
            "agreed": len(set(gather(str(result)))) == 1,
        }
    if dist.get_rank() == 0:
        flip_bit(directory / "step_00000003" / "hf" / "config.json")
    dist.barrier()
    try:
        here.find("auto")
    except InputError as error:
        results["both"] = gather(str(error))
    return results


@pytest.mark.slow
@needs((2, "harmed"))
@pytest.mark.parametrize("name", ["nothing", "no checksums", *HARMS])
def test_a_damaged_checkpoint_is_passed_over_and_kept(results, name):
    """4 ranks have written it in the background, 2 ranks verify it."""
    result = results(2)["harmed"][name]
    before = ["latest", "step_00000003", "step_00000006"]
    whole = name not in HARMS
    assert result["agreed"]
    assert result["untouched"] == before
    newest_intact = "step_00000006" if whole else "step_00000003"
    assert result["dry"] == newest_intact
    assert result["found"] == newest_intact
    assert result["left"] == (before if whole else [*before[:2], "step_00000006.damaged"])
    assert result["latest"] == result["found"] + "\n"
    if whole:
        assert result["named"] == "found"
    elif name in ("no trainer.json", "a file in its place"):
        assert result["named"] is None, "no checkpoint at all"
    else:
        assert "step_00000006" in result["named"]
        assert "step_00000003 is intact" in result["named"]
        assert "damaged" in result["named"]


@pytest.mark.slow
@needs((2, "harmed"))
def test_without_an_intact_checkpoint_nothing_begins_anew(results):
    first, second = results(2)["harmed"]["both"]
    assert first == second
    assert (
        "step_00000003 is damaged: hf/config.json has changed since it was written; no other"
        in first
    )


@worker_case(2)
def full(folder: Path, device: torch.device) -> dict:
    """Save while rank 1 has no room.

    The limit of its files' sizes is less than its tensors need.
    """
    engine = build(folder / "qwen3", device)
    results = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for asynchronous in (False, True):
        checkpointer = Checkpointer(folder / f"full_{asynchronous}", 2, asynchronous)
        checkpointer.save(1, engine, {"step": 1}, make_tokenizer())
        checkpointer.wait()
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
            checkpointer.wait()
        except InputError as error:
            results[str(asynchronous)] = {"told": gather(str(error))}
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        results[str(asynchronous)]["left"] = sorted(
            p.name for p in checkpointer.directory.iterdir()
        )
        checkpointer.save(3, engine, {"step": 3}, make_tokenizer())
        checkpointer.wait()
        results[str(asynchronous)]["found"] = checkpointer.find("auto").name
    return results


@pytest.mark.slow
@needs((2, "full"))
@pytest.mark.parametrize("asynchronous", ["False", "True"])
def test_a_save_without_room_on_one_rank_is_told_by_all_and_leaves_the_others(
    results, asynchronous
):
    result = results(2)["full"][asynchronous]
    first, second = result["told"]
    assert first == second
    assert f"full_{asynchronous}/step_00000002.tmp/weights needs" in first
    assert "a file reached the limit of its size" in first
    assert "are free" in first
    assert result["left"] == ["latest", "step_00000001"]
    assert result["found"] == "step_00000003"


class SlowDisk(Checkpointer):
    def _publish(self, *arguments) -> None:
        time.sleep(0.5)
        super()._publish(*arguments)


@worker_case(1, 2)
def publish(folder: Path, device: torch.device) -> dict:
    """Wait for an asynchronous save whose renaming is slow, and for one that cannot be renamed."""
    directory = folder / f"publishing_{dist.get_world_size()}"
    engine = build(folder / "qwen3", device)
    checkpointer = SlowDisk(directory, -1, asynchronous=True)
    checkpointer.save(1, engine, {"step": 1}, make_tokenizer())
    checkpointer.wait()
    result = {"there_after_wait": gather((directory / "step_00000001").is_dir())}
    time.sleep(1)  # whatever the answer, nothing of step 1 may run into what follows
    if dist.get_world_size() == 1:
        (directory / "step_00000002").write_text("in the way")
        checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
        try:
            checkpointer.wait()
        except Exception as error:
            result["raised"] = str(error)
    return result


@pytest.mark.slow
@on_ranks("publish", 1, 2)
def test_after_wait_the_checkpoint_is_published(results, world):
    assert results(world)["publish"]["there_after_wait"] == [True] * world


@pytest.mark.slow
@needs((1, "publish"))
def test_wait_raises_what_publishing_raised(results):
    assert "step_00000002" in results(1)["publish"].get("raised", "nothing was raised")


def test_weights_in_several_files(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    weights = dict(model.named_parameters())
    max_bytes = 20_000
    model.config.save_pretrained(tmp_path)
    write_safetensors(((n, p.detach()) for n, p in weights.items()), tmp_path, max_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in weights.values())
    held = {file: load_file(tmp_path / file) for file in files}
    assert {n: file for file in files for n in held[file]} == index["weight_map"]
    for tensors in held.values():
        assert sum(tensor.numel() * 4 for tensor in tensors.values()) <= max_bytes
    assert any(len(held[file]) > 1 for file in files[1:]), "not the first file alone is filled"
    assert {p.name for p in tmp_path.iterdir()} == {
        *files,
        "config.json",
        "model.safetensors.index.json",
    }
    loaded = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters()
    )
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[n], weights[n]) for n in weights)

    # The hub's cache has links to files elsewhere; an index that names them leads out of the
    # directory.
    hub = tmp_path / "snapshot"
    index_file = tmp_path / "snapshot" / "model.safetensors.index.json"
    hub.mkdir()
    shutil.copy(tmp_path / index_file.name, hub)
    for file in files:
        (hub / file).symlink_to(f"../{file}")
    assert [f.name for f in weight_files(hub)] == files
    for name in (f"../{files[0]}", str(tmp_path / files[0]), f"x/../../{files[0]}"):
        index_file.write_text(
            json.dumps({"weight_map": index["weight_map"] | {"model.norm.weight": name}})
        )
        with pytest.raises(InputError, match="which is not in the model's directory"):
            weight_files(hub)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("lora", [False, True], ids=["the rest", "the base of adapters"])
def test_a_checkpoint_finds_its_models_from_any_directory(folder, tmp_path, monkeypatch, lora):
    """The path of the model may be relative to the directory of the run."""
    model = Path("qwen3" if lora else "gemma3 with images")
    monkeypatch.chdir(folder)
    engine = build(model, torch.device("cpu"), lora=lora)
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1, asynchronous=False)
    record = adapter_record(engine.config, str(model))
    run = {"frozen weights": fingerprint(model)}
    progress = {"export_dtype": "float32", "lora": record, "run": run}
    checkpointer.save(1, engine, progress, make_tokenizer())
    expected = dict(engine.export_weights())
    export_hf(engine, make_tokenizer(), tmp_path / "online", str(model))
    monkeypatch.chdir(tmp_path)
    export_checkpoint(checkpointer.latest(), tmp_path / "hf", merge=lora)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    if lora:
        export_checkpoint(checkpointer.latest(), tmp_path / "offline")
        check_same_files(tmp_path / "online", tmp_path / "offline")


def check_same_files(first: Path, second: Path) -> None:
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
