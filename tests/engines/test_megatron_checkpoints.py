"""Checkpoints of the Megatron engine: on other layouts, in the background, damaged, exported."""

import os
import resource
import shutil
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from config import InputError
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import StoredModel, export_checkpoint, export_hf, stored_weights
from engines.checkpoint.storage import Writer
from engines.heads import Head
from engines.megatron import checkpoint_files
from engines.megatron.engine import MegatronEngine
from engines.model.model_files import fingerprint
from job.progress import adapter as adapter_identity
from tests.engines.megatron_checks import BOUND, ROUNDED_BOUND, make_config
from tests.engines.megatron_worker import (
    AUTO,
    BF16,
    BUCKETS,
    CASES,
    CP2,
    EP2,
    EPS,
    LORA,
    OVERLAP,
    PP2,
    REPLICATED,
    SHORT,
    TOTAL_STEPS,
    TP2,
    VPP2,
    Case,
    build,
    evaluate,
    keys,
    save_tensors,
    train,
    work,
)
from tests.engines.test_megatron import FREEZE_ALL_BUT_EXPERTS, REFERENCES
from tests.support.cases import CaseKey, id_of, needs
from tests.support.estimates import checkpoint_bytes
from tests.support.guarded import unguarded
from tests.support.launch import export
from tests.support.models import make_model
from tests.support.plain import column, tensor_bytes, worst
from tests.support.training import digest, flip_bit, gather, make_batch, make_tokenizer
from tests.support.traps import TRAPS, set_trap

pytestmark = pytest.mark.slow
SAVED_AT = 2
STEP_DIRECTORY = f"step_{SAVED_AT:08d}"
# All of the second of two pipeline stages.
FREEZE_LAST_STAGE = f"model.freeze=['lm_head','layers[.][23][.]','model[.]norm'] {EPS}"

# -- from one layout to another --------------------------------------------------------------------


@dataclass(frozen=True)
class Resume:
    """A run that saves on one layout and resumes on another.

    saved_on, resumed_on: numbers of ranks
    """

    family: str
    saved_on: int
    saved_settings: str
    resumed_on: int
    resumed_settings: str

    @property
    def is_rounded(self) -> bool:
        return BF16 in self.saved_settings

    @property
    def has_lora(self) -> bool:
        return LORA in self.saved_settings

    @property
    def has_reference(self) -> bool:
        """Whether the FSDP2 engine trains the same model with the same settings."""
        is_plain = not self.has_lora and "model.freeze" not in self.saved_settings
        return is_plain and not self.is_rounded and self.reference in REFERENCES

    @property
    def reference(self) -> CaseKey:
        return 1, f"reference {self.family}"


# A launch on 2 ranks comes before one on 4, and that before one on 1.
RESUMES = {
    "tp2 to one": Resume("qwen2_tied", 2, TP2, 1, ""),
    "pp2 to tp2 pp2": Resume("mistral", 2, PP2, 4, f"{TP2} {PP2}"),
    "tp2 to pp2 vpp2": Resume("qwen2_tied", 2, TP2, 2, f"{PP2} {VPP2}"),
    "tp2 pp2 to one": Resume("llama_yarn", 4, f"{TP2} {PP2}", 1, ""),
    "lora bf16 tp2 to pp2 vpp2": Resume(
        "qwen2_tied", 2, f"{LORA} {BF16} {TP2}", 2, f"{LORA} {BF16} {PP2} {VPP2}"
    ),
    "lora pp2 dp2 to one": Resume("qwen3", 4, f"{LORA} {PP2}", 1, LORA),
    "moe ep2 to tp2": Resume("qwen3_moe", 2, EP2, 2, TP2),
    "moe tp2 ep2 to one": Resume("mixtral", 2, f"{TP2} {EP2}", 1, ""),
    "moe pp2 to ep2 replicated": Resume(
        "qwen3_moe", 2, f"{PP2} {REPLICATED}", 2, f"{EP2} {REPLICATED}"
    ),
    # With padded buckets: the tied matrix has one of its own, and where reduction overlaps, so have
    # layers.
    "pp2 dp2 to one": Resume("qwen2_tied", 4, PP2, 1, ""),
    "bf16 pp2 vpp2 dp2": Resume("qwen2_tied", 4, f"{BF16} {PP2} {VPP2}", 4, f"{BF16} {PP2} {VPP2}"),
    "buckets dp4 to tp2": Resume("qwen3", 4, f"{OVERLAP} {BUCKETS}", 4, TP2),
    "moe buckets ep2 to one": Resume("qwen3_moe", 4, f"{EP2} {OVERLAP} {BUCKETS}", 1, ""),
    "dp2 to replicated tp2": Resume("qwen3", 2, "", 2, f"{TP2} {REPLICATED}"),
    "replicated pp2 to dp2": Resume("qwen2_tied", 2, f"{PP2} {REPLICATED}", 2, ""),
    "bf16 dp2 to replicated": Resume("qwen3", 2, BF16, 2, f"{BF16} {REPLICATED}"),
    # The whole first stage is frozen.
    "frozen moe pp2 to ep2": Resume(
        "qwen3_moe", 2, f"{FREEZE_ALL_BUT_EXPERTS} {PP2}", 2, f"{FREEZE_ALL_BUT_EXPERTS} {EP2}"
    ),
    "frozen pp2": Resume("llama", 2, f"{FREEZE_LAST_STAGE} {PP2}", 2, f"{FREEZE_LAST_STAGE} {PP2}"),
    "cp2 to auto": Resume("llama", 2, CP2, 2, f"{AUTO} {SHORT}"),
    "auto to cp2": Resume("qwen3", 4, f"{AUTO} {SHORT}", 4, CP2),
    "bf16 replicated tp2 to dp2": Resume("qwen3", 2, f"{BF16} {TP2} {REPLICATED}", 2, BF16),
}
ADAPTED = [name for name, run in RESUMES.items() if run.has_lora]
NOT_ADAPTED = [name for name, run in RESUMES.items() if not run.has_lora]


def save(folder: Path, this_device: torch.device, name: str) -> dict:
    """Write a checkpoint after SAVED_AT steps; return the steps after it without interruption."""
    run = RESUMES[name]
    case = Case(run.family, run.saved_settings)
    with unguarded():
        engine = build(MegatronEngine, folder / run.family, this_device, run.saved_settings)
    train(engine, range(SAVED_AT), case)
    checkpointer = Checkpointer(folder / "checkpoints" / name, 2, asynchronous=False)
    progress = {"step": SAVED_AT, "export_dtype": "float32"}
    if run.has_lora:
        progress["lora"] = adapter_identity(engine.config, str(engine.config.model.path))
        progress["run"] = {"frozen weights": fingerprint(folder / run.family)}
    checkpointer.save(SAVED_AT, engine, progress, make_tokenizer())
    random = gather(torch.rand(1).item())
    steps = train(engine, range(SAVED_AT, 2 * SAVED_AT), case)
    export_hf(engine, make_tokenizer(), folder / "hf" / name)
    return {"random": random, "steps": steps}


def resume(folder: Path, this_device: torch.device, name: str) -> dict:
    """Resume from the checkpoint; write down the weights and adapters, and return more steps."""
    run = RESUMES[name]
    with unguarded():
        engine = build(MegatronEngine, folder / run.family, this_device, run.resumed_settings)
    checkpointer = Checkpointer(folder / "checkpoints" / name, 2, asynchronous=False)
    progress = checkpointer.load(checkpointer.find("auto"), engine)
    weights = dict(engine.export_weights()) | dict(engine.export_adapter())
    save_tensors(weights, folder / f"resumed {name}.safetensors")
    return {
        "progress": progress,
        "random": gather(torch.rand(1).item()),
        "steps": train(engine, range(SAVED_AT, 2 * SAVED_AT), Case(run.family)),
    }


def cases_of(name: str) -> list[CaseKey]:
    """Return the cases that save and resume."""
    run = RESUMES[name]
    return [(run.saved_on, f"save {name}"), (run.resumed_on, f"resume {name}")]


for name, run in RESUMES.items():
    CASES.add(run.saved_on, f"save {name}", partial(save, name=name))
    CASES.add(run.resumed_on, f"resume {name}", partial(resume, name=name))


def resume_params(names: list[str], with_reference: bool = False) -> list:
    params = []
    for name in names:
        cases = cases_of(name)
        if with_reference and RESUMES[name].has_reference:
            cases.append(RESUMES[name].reference)
        params.append(pytest.param(name, marks=needs(*cases), id=id_of(name)))
    return params


@pytest.mark.parametrize("name", resume_params(list(RESUMES), with_reference=True))
def test_resume_on_another_layout(megatron_results, name):
    """With the optimizer's state: every step is as without interruption."""
    run = RESUMES[name]
    saved = megatron_results[run.saved_on][f"save {name}"]
    resumed = megatron_results[run.resumed_on][f"resume {name}"]
    assert resumed["progress"]["step"] == SAVED_AT
    assert resumed["progress"]["export_dtype"] == "float32"
    assert len(resumed["steps"]) == SAVED_AT
    num_shared = min(run.saved_on, run.resumed_on)
    assert resumed["random"][:num_shared] == saved["random"][:num_shared]
    bound = ROUNDED_BOUND if run.is_rounded else BOUND
    for key in ("loss", "grad_norm", "lr"):
        assert worst(column(resumed["steps"], key), column(saved["steps"], key)) < bound, key
        if run.has_reference:
            _, reference = run.reference
            steps = megatron_results[1][reference]["steps"][SAVED_AT : 2 * SAVED_AT]
            assert worst(column(saved["steps"], key), column(steps, key)) < bound, key


@pytest.mark.parametrize("name", resume_params(list(RESUMES)))
def test_estimate_of_a_checkpoint_is_what_there_is(megatron_results, megatron_folder, name):
    run = RESUMES[name]
    weights = megatron_folder / "checkpoints" / name / STEP_DIRECTORY / "weights"
    stored = tensor_bytes(FileSystemReader(weights).read_metadata())
    dtype = "bfloat16" if run.is_rounded else "float32"
    config = make_config(
        megatron_folder,
        f"model.path={megatron_folder / run.family}",
        f"engine.compute_dtype={dtype}",
        *keys(run.saved_settings),
    )
    assert checkpoint_bytes(config) == pytest.approx(stored, rel=0.01)


# -- exports ---------------------------------------------------------------------------------------

EXPORTED_OFFLINE = ["tp2 to one", "tp2 pp2 to one", "moe tp2 ep2 to one"]
FROZEN = ["frozen moe pp2 to ep2", "frozen pp2"]


@pytest.mark.parametrize("name", resume_params(NOT_ADAPTED))
def test_exported_directory_loads(megatron_results, megatron_folder, name):
    directory = megatron_folder / "hf" / name
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(megatron_folder / RESUMES[name].family)
    assert type(model) is type(original)
    assert model.config.architectures == [type(original).__name__]
    assert model.config.rope_parameters == original.config.rope_parameters


@pytest.mark.parametrize("name", resume_params(EXPORTED_OFFLINE))
def test_offline_export(megatron_results, megatron_folder, tmp_path, name):
    """A checkpoint as a model directory has the bits that a resumed engine exports."""
    checkpoint = megatron_folder / "checkpoints" / name / STEP_DIRECTORY
    export(checkpoint, tmp_path / "hf")
    check_exported_weights(megatron_folder, tmp_path / "hf", name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.vocab_size == 97


@pytest.mark.parametrize("name", resume_params(FROZEN))
def test_export_of_a_model_with_frozen_layers(megatron_results, megatron_folder, tmp_path, name):
    """Their checkpoints name the tensors of each layer."""
    checkpoint = megatron_folder / "checkpoints" / name / STEP_DIRECTORY
    export_checkpoint(checkpoint, tmp_path / "hf")
    check_exported_weights(megatron_folder, tmp_path / "hf", name)


def check_exported_weights(folder: Path, directory: Path, name: str) -> None:
    """Assert that a model directory has the weights that the resumed engine exported."""
    expected = load_file(folder / f"resumed {name}.safetensors")
    weights = load_file(directory / "model.safetensors")
    assert weights.keys() == expected.keys()
    for hf_name, weight in weights.items():
        assert torch.equal(weight, expected[hf_name]), hf_name


@pytest.mark.parametrize("name", resume_params(ADAPTED))
def test_adapters_of_a_checkpoint(megatron_results, megatron_folder, tmp_path, name):
    """A checkpoint holds only adapters; exported, they are to the bit those of a resumed engine."""
    expected = load_file(megatron_folder / f"resumed {name}.safetensors")
    checkpoint = megatron_folder / "checkpoints" / name / STEP_DIRECTORY
    export_checkpoint(checkpoint, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    adapter = {hf_name.removeprefix("base_model.model."): x for hf_name, x in stored.items()}
    assert adapter.keys() == {hf_name for hf_name in expected if ".lora_" in hf_name}
    for hf_name, matrix in adapter.items():
        assert torch.equal(matrix, expected[hf_name]), hf_name
        assert matrix.any(), hf_name


@pytest.mark.parametrize("comes_first", ["the value head", "an adapter"])
def test_adapters_are_exported_wherever_the_value_head_is(tmp_path, comes_first):
    """The order of the tensors in a checkpoint depends on the ranks that wrote them."""
    make_model(tmp_path / "checkpoint" / "hf", "qwen3")
    head = {"engine.output_layer.weight": torch.rand(1, 8)}
    layer = "model.layers.0.self_attn.q_proj"
    adapter = {f"engine.{layer}.lora_{matrix}.weight": torch.rand(2, 8) for matrix in "AB"}
    state = head | adapter if comes_first == "the value head" else adapter | head
    weights = tmp_path / "checkpoint" / "weights"
    dcp.save(state, checkpoint_id=weights, no_dist=True)
    (weights / "metadata.json").write_text("{}")  # marks the format of Megatron
    progress = {"export_dtype": "float32", "is_classifier": True, "lora": {"rank": 2}}
    stored = StoredModel.of(tmp_path / "checkpoint", progress)
    exported = dict(stored_weights(stored))
    assert exported.keys() == {
        "score.weight",
        f"{layer}.lora_A.weight",
        f"{layer}.lora_B.weight",
    }
    assert torch.equal(exported["score.weight"], head["engine.output_layer.weight"])


@pytest.mark.parametrize("name", resume_params(ADAPTED))
def test_merged_adapters_of_a_checkpoint(megatron_results, megatron_folder, tmp_path, name):
    """Merged by us or by PEFT, the exported adapters give the resumed engine's weights."""
    family = megatron_folder / RESUMES[name].family

    def merged_by_peft(adapter: Path) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()

    expected = load_file(megatron_folder / f"resumed {name}.safetensors")
    checkpoint = megatron_folder / "checkpoints" / name / STEP_DIRECTORY
    export_checkpoint(checkpoint, tmp_path / "adapter")
    export_checkpoint(checkpoint, tmp_path / "merged", merge=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    by_peft = merged_by_peft(tmp_path / "adapter")
    after_more_steps = merged_by_peft(megatron_folder / "hf" / name)
    largest_change = 0.0
    for hf_name, weight in merged.items():
        assert (by_peft[hf_name] - weight).abs().max() < 1e-6, hf_name
        bound = 1e-6 if expected[hf_name].dtype is torch.float32 else 0.01
        assert (weight - expected[hf_name]).abs().max() < bound, hf_name
        change = (after_more_steps[hf_name] - weight).abs().max().item()
        largest_change = max(largest_change, change)
    assert largest_change > 1e-3


# -- several engines in a process ------------------------------------------------------------------


@work(2)
def roles(folder: Path, this_device: torch.device) -> dict:
    """Train an actor and a critic next to a reference; save both in one checkpoint, and load it.

    The actor is saved before its first step, as while the critic warms up.
    """
    actor_case = Case("qwen2_tied")
    critic_case = Case("qwen2_tied", critic=True)
    actor, critic, reference = build_roles(folder, this_device)
    train(critic, range(2), critic_case)
    answers = evaluate(reference, actor_case)[0]
    checkpointer = Checkpointer(folder / "checkpoints" / "roles", 1, asynchronous=False)
    checkpointer.save(2, actor, {"step": 2}, make_tokenizer(), critic=critic)
    result = {
        "saved": role_digests(actor, critic),
        "answers": answers.nan_to_num().tolist(),
        "bare": gather(reference.optimizer is None and reference.stages is reference.models),
        "steps": [train(actor, [2], actor_case), train(critic, [2], critic_case)],
    }
    actor, critic, reference = build_roles(folder, this_device)
    checkpointer.load(checkpointer.latest(), actor, critic=critic)
    result["loaded"] = role_digests(actor, critic)
    result["resumed"] = [train(actor, [2], actor_case), train(critic, [2], critic_case)]
    return result


def build_roles(folder: Path, this_device: torch.device) -> list[MegatronEngine]:
    """Build an actor, a critic, and a reference whose temperature is 2."""
    actor = build(MegatronEngine, folder / "qwen2_tied", this_device, TP2)
    critic = MegatronEngine(actor.config, this_device, TOTAL_STEPS, head=Head.VALUES)
    reference = MegatronEngine(
        actor.config, this_device, TOTAL_STEPS, optimize=False, temperature=2.0
    )
    return [actor, critic, reference]


def role_digests(actor: MegatronEngine, critic: MegatronEngine) -> list[list[str]]:
    return gather([digest(dict(engine.export_weights())) for engine in (actor, critic)])


@needs((2, "roles"))
def test_roles_share_a_process_and_a_checkpoint(megatron_results):
    result = megatron_results[2]["roles"]
    assert result["bare"] == [True, True], "a reference has neither DDP nor an optimizer"
    assert result["saved"] == result["loaded"]
    of_first_rank, of_second_rank = result["saved"]
    assert of_first_rank == of_second_rank
    assert len(set(of_first_rank)) == 2
    assert result["steps"] == result["resumed"]


@needs((2, "roles"))
def test_temperature_divides_a_references_logits(megatron_results, megatron_folder):
    log_probs = torch.tensor(megatron_results[2]["roles"]["answers"][0])
    model = AutoModelForCausalLM.from_pretrained(
        megatron_folder / "qwen2_tied", dtype=torch.float32
    )
    batch = make_batch(0)
    start, end = batch.cu_seqlens[1:3].tolist()
    with torch.no_grad():
        logits = model(batch.input_ids[None, start:end]).logits[0, :-1]
    targets = batch.input_ids[start + 1 : end, None]
    expected = (logits / 2).log_softmax(-1).gather(-1, targets)[:, 0]
    assert (log_probs[start + 1 : end] - expected).abs().max() < 1e-4


# -- in the background -----------------------------------------------------------------------------


@work(2)
def background(folder: Path, this_device: torch.device) -> dict:
    """Save in the foreground, and to a disk that waits until training has gone on; load both."""
    case = Case("qwen3_moe")
    engine = build(MegatronEngine, folder / "qwen3_moe", this_device, EP2)
    disk_is_ready = threading.Event()

    class SlowDisk(Writer):
        def write_data(self, *arguments):
            disk_is_ready.wait(60)
            return super().write_data(*arguments)

    train(engine, range(2), case)
    checkpoints = folder / "checkpoints"
    foreground = Checkpointer(checkpoints / "foreground", 2, asynchronous=False)
    in_background = Checkpointer(checkpoints / "background", 2, asynchronous=True)
    foreground.save(2, engine, {"step": 2}, make_tokenizer())
    saved = digest(dict(engine.export_weights()))
    checkpoint_files.Writer = SlowDisk
    in_background.save(2, engine, {"step": 2}, make_tokenizer())
    result = {"steps": train(engine, range(2, 4), case)}
    files = sorted(path.name for path in (checkpoints / "background").iterdir())
    result["meanwhile"] = [str(in_background.latest()), files]
    disk_is_ready.set()
    in_background.wait()
    checkpoint_files.Writer = Writer
    for kind, checkpointer in (("foreground", foreground), ("background", in_background)):
        engine = build(MegatronEngine, folder / "qwen3_moe", this_device, EP2)
        checkpointer.load(checkpointer.latest(), engine)
        restored = gather(digest(dict(engine.export_weights())) == saved)
        result[kind] = {"restored": restored, "steps": train(engine, range(2, 4), case)}
    return result


@needs((2, "background"))
def test_background_save_appears_complete(megatron_results):
    """Until then there is only what a kill would leave behind."""
    assert megatron_results[2]["background"]["meanwhile"] == ["None", ["step_00000002.tmp"]]


@needs((2, "background"))
@pytest.mark.parametrize("kind", ["foreground", "background"])
def test_a_save_is_of_its_moment(megatron_results, kind):
    """Training while the disk waits does not show in the checkpoint."""
    result = megatron_results[2]["background"]
    assert result[kind]["restored"] == [True, True]
    assert result[kind]["steps"] == result["steps"]


# -- damage ----------------------------------------------------------------------------------------


@work(2)
def damaged(folder: Path, this_device: torch.device) -> dict:
    """Load checkpoints that run a command or have a flipped bit; return each rank's error."""
    results = {}
    engine = build(MegatronEngine, folder / "qwen2_tied", this_device, TP2)
    for name in (*TRAPS, "a bit"):
        directory = folder / "traps" / name
        mark = folder / "traps" / f"{name} ran"
        if dist.get_rank() == 0:
            shutil.copytree(folder / "checkpoints" / "tp2 to one", directory)
            checkpoint = directory / STEP_DIRECTORY
            if name in TRAPS:
                set_trap(name, checkpoint, mark)
            else:
                flip_bit(checkpoint / "weights" / "__1_0.distcp")
        dist.barrier()
        checkpointer = Checkpointer(directory, 2, asynchronous=False)
        try:
            checkpointer.load(checkpointer.find("auto"), engine)
        except InputError as error:
            results[name] = gather(str(error))
        results[f"{name} ran"] = mark.exists()
    return results


DAMAGED = needs((2, "damaged"), (2, "save tp2 to one"))


@DAMAGED
@pytest.mark.parametrize("trap", TRAPS)
def test_a_checkpoint_that_runs_commands_is_not_loaded(megatron_results, trap):
    first, second = megatron_results[2]["damaged"][trap]
    assert first == second
    assert "a pickle in it contains code, which calls posix.system" in first
    assert megatron_results[2]["damaged"][f"{trap} ran"] is False


@DAMAGED
def test_a_checkpoint_that_runs_commands_is_not_exported(megatron_results, megatron_folder):
    traps = megatron_folder / "traps"
    checkpoint = traps / ".metadata" / STEP_DIRECTORY
    mark = traps / ".metadata ran"
    assert "calls posix.system" in export(checkpoint, traps / "hf", returncode=2)
    assert not mark.exists()
    assert not list(traps.glob("hf*"))
    FileSystemReader(checkpoint / "weights").read_metadata()
    assert mark.exists(), "a trap that does not work shows nothing"


@DAMAGED
def test_a_flipped_bit_is_found(megatron_results):
    errors = megatron_results[2]["damaged"]["a bit"]
    assert len(errors) == 2
    for error in errors:
        assert "weights/__1_0.distcp has changed since it was written" in error


@work(2)
def full_disk(folder: Path, this_device: torch.device) -> dict:
    """Save where the disk of rank 1 has no room; return each rank's error, and what is left."""
    results = {}
    engine = build(MegatronEngine, folder / "qwen2_tied", this_device, TP2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for asynchronous in (False, True):
        kind = f"full_{asynchronous}"
        checkpointer = Checkpointer(folder / kind, 2, asynchronous)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
            checkpointer.wait()
        except InputError as error:
            results[kind] = gather(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        results[f"{kind} left"] = os.listdir(checkpointer.directory)
    return results


@needs((2, "full_disk"))
@pytest.mark.parametrize("kind", ["full_False", "full_True"])
def test_a_full_disk_is_reported(megatron_results, kind):
    first, second = megatron_results[2]["full_disk"][kind]
    assert first == second
    assert f"{kind}/step_00000002.tmp/weights needs" in first
    assert megatron_results[2]["full_disk"][f"{kind} left"] == []
