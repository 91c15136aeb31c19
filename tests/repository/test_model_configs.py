"""The configurations in configs/models fit into GPUs of 80 GB, as config.json alone tells.

Every launch command in a file's header is checked and estimated like in a dry run, for as many GPUs
as it starts. For some of them, the dry run itself is made.
"""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from transformers import PreTrainedTokenizerBase

from benchmarks.known_models import CONFIGS, write_config
from benchmarks.shapes import image_tokenizer
from config import InputError, load
from engines.build import engine_class
from engines.memory import GIB
from examples.arithmetic import make_tokenizer
from examples.colours import TOKENS
from job.hardware import Hardware
from job.memory_plan import FULL, MemoryPlan
from preferences.reference import (
    check_models as check_preference_models,
    role_configs as preference_roles,
)
from preferences.settings import check_settings as check_preferences
from reward_models.settings import (
    ROLE as REWARD_MODEL,
    check_model as check_reward_model,
    check_settings as check_reward_settings,
)
from rl.models import check_models, role_configs
from rl.settings import check_settings
from rollout.vllm.capacity import count_parameters
from rollout.vllm.settings import check_rollout, check_vllm_model
from tests.support.launch import ROOT, run

FILES = sorted(ROOT.glob("configs/models/*/*.yaml"))
GPU_GIB = 79
NOT_RUN = "# Not run: a dry run has checked the settings and estimated the memory from config.json."
NUM_ROWS = 256  # a batch
# The rows of a script; the others read "train".
DATA = {"train_ppo.py": "problems", "train_rm.py": "pairs"}
# What vLLM needs for vision-language models, and a CPU build of torch may lack.
HAS_TORCHVISION = find_spec("torchvision") is not None


@dataclass(frozen=True)
class Launch:
    """A launch command of a file's header.

    Attributes:
        file: the configuration.
        num_gpus: the number of GPUs of all nodes.
        script: train_sft.py, train_dpo.py, train_rm.py or train_ppo.py.
        arguments: the arguments of the script.
    """

    file: Path
    num_gpus: int
    script: str
    arguments: list[str]

    @property
    def name(self) -> str:
        return f"{self.file.parent.name}/{self.file.stem} on {self.num_gpus}"


def launches_of(file: Path) -> list[Launch]:
    header = file.read_text().partition("\n\n")[0]
    commands = re.findall(r"^#     (\S.*)$", header.replace(" \\\n#    ", ""), re.MULTILINE)
    return [read_command(file, shlex.split(command)) for command in commands]


def read_command(file: Path, words: list[str]) -> Launch:
    sizes = {"--nnodes": 1, "--nproc-per-node": 1}
    for option in sizes:
        if option in words:
            sizes[option] = int(words[words.index(option) + 1])
    script = next(word for word in words if word.endswith(".py"))
    arguments = words[words.index(script) + 1 :]
    assert arguments[0] == str(file.relative_to(ROOT)), "the command names another file"
    num_gpus = sizes["--nnodes"] * sizes["--nproc-per-node"]
    return Launch(file, num_gpus, script, arguments)


LAUNCHES = {launch.name: launch for file in FILES for launch in launches_of(file)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return directories with a config.json and a tokenizer, by the name of the model."""
    directory = tmp_path_factory.mktemp("models")
    paths = {}
    for name in {OmegaConf.load(file).model.path for file in FILES}:
        paths[name] = write_config(name, directory)
        add_tokenizer(paths[name], make_tokenizer())
    add_image_files(paths["Qwen/Qwen2.5-VL-7B-Instruct"])
    return paths


def add_tokenizer(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the demo's tokenizer, and that its responses end with its end token."""
    tokenizer.save_pretrained(path)
    generation = {"eos_token_id": tokenizer.eos_token_id}
    (path / "generation_config.json").write_text(json.dumps(generation))


def add_image_files(path: Path) -> None:
    """Add a tokenizer with tokens for images, their ids, and the image processor."""
    tokenizer = image_tokenizer()
    add_tokenizer(path, tokenizer)
    config = json.loads((path / "config.json").read_text())
    names = ("image", "video", "vision_start", "vision_end")
    for name, token in zip(names, TOKENS.values(), strict=True):
        config[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token)
    (path / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))


def write_rows(directory: Path) -> dict[str, Path]:
    """Write chats and problems, and an image that rows for vision-language models refer to."""
    picture = directory / "picture.png"
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(picture)
    files = {}
    question = {"prompt": "What is 2+3?"}
    answered = question | {"answer": "5", "response": "5"}
    pair = question | {"chosen": "5", "rejected": "6"}
    for name, row in (("train", answered), ("problems", answered), ("pairs", pair)):
        for kind, more in (("text", {}), ("images", {"images": [str(picture)]})):
            prompt = "<image>" * bool(more) + row["prompt"]
            line = json.dumps({**row, **more, "prompt": prompt}) + "\n"
            files[f"{name} {kind}"] = directory / f"{name}_{kind}.jsonl"
            files[f"{name} {kind}"].write_text(line * NUM_ROWS)
    return files


def settings_of(launch: Launch, models: dict[str, Path]) -> list[str]:
    """Return the arguments of a launch, with a model that is on this machine."""
    path = models[OmegaConf.load(launch.file).model.path]
    return [*launch.arguments, f"model.path={path}", "dry_run=true"]


def load_launch(launch: Launch, models: dict[str, Path], *more: str) -> DictConfig:
    defaults = launch.script.removeprefix("train_").replace(".py", ".yaml")
    return load(defaults, [*settings_of(launch, models), *more])


def roles_of(config: DictConfig) -> dict:
    """Return the configuration of each engine, by role."""
    if "center_rewards_coefficient" in config.get("algorithm", {}):
        return {REWARD_MODEL: config}
    if "rollout" in config:
        return role_configs(config)
    if "reference" in config:
        return preference_roles(config, check_preferences(config))
    return {None: config}


def fits(config: DictConfig, num_gpus: int) -> bool:
    """Return whether a run would start, and without a warning about memory."""
    plan = MemoryPlan(roles_of(config), Hardware(num_gpus, "cuda", GPU_GIB * GIB))
    _, num_bytes = plan.largest()
    if num_bytes > FULL * GPU_GIB * GIB:
        return False
    try:
        return "rollout" not in config or not plan.generation_warnings()
    except InputError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_is_valid_and_fits(models, name):
    launch = LAUNCHES[name]
    config = load_launch(launch, models)
    if launch.script == "train_sft.py":
        engine_class(config.model_engine).check(config, launch.num_gpus)
    elif launch.script == "train_dpo.py":
        check_preference_models(config, check_preferences(config), launch.num_gpus)
    elif launch.script == "train_rm.py":
        check_reward_settings(config)
        check_reward_model(config, launch.num_gpus)
    else:
        check_settings(config)
        check_models(config, launch.num_gpus)
        check_rollout(config, launch.num_gpus)
        if config.model.images and not HAS_TORCHVISION:
            with pytest.raises(InputError, match="No module named 'torchvision'"):
                check_vllm_model(config)
        else:
            check_vllm_model(config)
    assert fits(config, launch.num_gpus)


@pytest.mark.slow
@pytest.mark.parametrize("name", [launches_of(file)[0].name for file in FILES])
def test_no_setting_for_memory_is_there_without_need(models, name):
    """With the default of any of them, a run would warn, or end at once."""
    launch = LAUNCHES[name]
    written = OmegaConf.load(launch.file)
    defaults = {
        "data.max_tokens_per_micro_batch": 16384,
        "engine.activation_checkpointing": "false",
        "engine.cpu_offload": "false",
        "rollout.tensor_parallel_size": 1,
    }
    for key, default in defaults.items():
        if OmegaConf.select(written, key) is not None:
            config = load_launch(launch, models, f"{key}={default}")
            assert not fits(config, launch.num_gpus), key


DRY_RUNS = (
    "qwen3_4b/sft on 16",
    "qwen3_4b/rm on 8",
    "qwen2_5_vl_7b/sft on 8",
    "qwen3_30b_a3b/grpo on 16",
)


@pytest.mark.slow
def test_dry_runs_on_a_machine_without_gpus_print_that_the_runs_fit(models, tmp_path):
    rows = write_rows(tmp_path)
    requests = {}
    for name in DRY_RUNS:
        launch = LAUNCHES[name]
        data = DATA.get(launch.script, "train")
        kind = "images" if "vl" in name else "text"
        requests[name] = [
            launch.script,
            *settings_of(launch, models),
            f"data.train_files={rows[f'{data} {kind}']}",
            f"data.cache_dir={tmp_path}/cache",
            f"output_dir={tmp_path}/out",
            f"assume.num_gpus={launch.num_gpus}",
            f"assume.gpu_memory_gib={GPU_GIB}",
        ]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    worker = ROOT / "tests/repository/dry_runs_worker.py"
    run([sys.executable, worker, tmp_path / "requests.json", tmp_path / "results.json"], cwd=ROOT)
    for name, printed in json.loads((tmp_path / "results.json").read_text()).items():
        assert "warning: " not in printed
        assert "error: " not in printed
        num_gpus = LAUNCHES[name].num_gpus
        assert f"layout: {num_gpus} ranks on cuda with {GPU_GIB}.0 GiB each (assumed)" in printed
        assert "this plan follows from config.json" in printed
        assert "this run fits: training needs about" in printed


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_header_says_how_to_launch_and_that_it_was_not_run(file):
    assert NOT_RUN in file.read_text().splitlines()
    num_gpus = [launch.num_gpus for launch in launches_of(file)]
    assert num_gpus in ([1], [8], [8, 16], [16])


def test_the_numbers_of_parameters_are_those_of_the_model_cards(tmp_path):
    billions = {
        "Qwen/Qwen3-0.6B": 0.6,
        "Qwen/Qwen3-1.7B": 1.7,
        "Qwen/Qwen3-4B": 4.0,
        "Qwen/Qwen3-8B": 8.2,
        "Qwen/Qwen3-14B": 14.8,
        "Qwen/Qwen3-32B": 32.8,
        "Qwen/Qwen3-30B-A3B": 30.5,
        "Qwen/Qwen2.5-VL-7B-Instruct": 8.3,
        "meta-llama/Llama-3.1-8B-Instruct": 8.0,
        "meta-llama/Llama-3.1-70B-Instruct": 70.6,
        "google/gemma-3-4b-it": 4.3,
    }
    assert billions.keys() == CONFIGS.keys()
    for name, expected in billions.items():
        path = write_config(name, tmp_path)
        has_images = "vision_config" in CONFIGS[name]
        number = count_parameters(str(path), has_images, 0).total
        assert round(number / 1e9, 1) == expected, name
