"""The hardware that a dry run assumes."""

import pytest
import torch

from config import InputError, load
from engines.memory import GIB
from job.hardware import Hardware, check_assumptions

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")


def config(*settings: str):
    return load("sft.yaml", ["model.path=m", "data.train_files=t", *settings])


def test_without_assumptions_the_hardware_is_that_of_this_machine():
    hardware = Hardware.of(config("dry_run=true"), CPU)
    assert hardware == Hardware(1, "cpu", 0)
    assert hardware.describe() == "1 rank on cpu"


def test_a_laptop_plans_for_gpus():
    settings = config("dry_run=true", "assume.num_gpus=16", "assume.gpu_memory_gib=79")
    hardware = Hardware.of(settings, CPU)
    assert hardware == Hardware(16, "cuda", 79 * GIB, is_assumed=True)
    assert hardware.describe() == "16 ranks on cuda with 79.0 GiB each (assumed)"
    one = Hardware.of(config("dry_run=true", "assume.gpu_memory_gib=22.5"), CPU)
    assert (one.world_size, one.device_bytes) == (1, 22.5 * GIB)


def test_gpus_without_memory_are_a_mistake():
    settings = config("dry_run=true", "assume.num_gpus=8")
    with pytest.raises(InputError, match="assume.num_gpus=8 needs assume.gpu_memory_gib"):
        Hardware.of(settings, CPU)


@pytest.mark.parametrize("setting", ["assume.num_gpus=8", "assume.gpu_memory_gib=79"])
def test_assumptions_are_for_dry_runs(setting):
    check_assumptions(config(setting, "dry_run=true"))
    with pytest.raises(InputError, match=f"{setting} does nothing without dry_run=true"):
        check_assumptions(config(setting))
