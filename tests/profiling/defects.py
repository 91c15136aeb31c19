"""Plants defects in the weights of a model, and asks profiling.compare where they are.

    python -m tests.profiling.defects FOLDER

dumps one update of the sound model and of every defective model in every layout, with the default
settings, and compares the sound model in each layout with each defective model in each layout. It
prints how many defects were found in the right layer. test_compare_layouts.py does the same for
two of them.

    torchrun --nproc-per-node N tests/profiling/defects.py FOLDER LAYOUT MODEL ...

dumps the update of some models (directories FOLDER/models/{name}) in one layout for N ranks, as
FOLDER/runs/{layout}/{name}.
"""

import contextlib
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from engines.parallel import device
from job import setup as job
from profiling import compare
from tests.engines.megatron_worker import new_layout
from tests.profiling.profiling_worker import (
    CP2,
    NO_SP,
    PP2,
    TOTAL_STEPS,
    TP2,
    VPP2,
    Layout,
    configure,
    engine_class,
    share_of,
)
from tests.support.launch import launch
from tests.support.models import make_model
from tests.support.training import make_batch, make_loss

SOUND = "sound"
STAGE = "train_batch"
# By number of ranks. Tensor parallelism has sequence parallelism unless NO_SP is set.
LAYOUTS = {
    1: {
        "fsdp": Layout("fsdp"),
        "fsdp rows": Layout("fsdp", settings=["engine.use_remove_padding=false"]),
        "megatron": Layout("megatron"),
    },
    2: {
        "fsdp dp2": Layout("fsdp"),
        "fsdp cp2": Layout("fsdp", settings=[CP2]),
        "tp2": Layout("megatron", settings=[TP2]),
        "tp2 without sp": Layout("megatron", settings=[TP2, NO_SP]),
        "tp2 recompute": Layout("megatron", settings=[TP2, "engine.recompute=full"]),
        "pp2": Layout("megatron", settings=[PP2]),
        "pp2 vpp2": Layout("megatron", settings=[PP2, VPP2]),
        "cp2": Layout("megatron", settings=[CP2]),
    },
}


@dataclass(frozen=True)
class Defect:
    """A weight that is scaled.

    Attributes:
        weight: its name in the model's file.
        place: what compare must name: the layer ("layers.2."), or a module outside of the layers.
    """

    weight: str
    place: str


def in_layer(number: int, weight: str) -> Defect:
    return Defect(f"model.layers.{number}.{weight}.weight", f"layers.{number}.")


DEFECTS = {
    "q 0": in_layer(0, "self_attn.q_proj"),
    "input norm 0": in_layer(0, "input_layernorm"),
    "o 0": in_layer(0, "self_attn.o_proj"),
    "gate 0": in_layer(0, "mlp.gate_proj"),
    "down 0": in_layer(0, "mlp.down_proj"),
    "k 1": in_layer(1, "self_attn.k_proj"),
    "k norm 1": in_layer(1, "self_attn.k_norm"),
    "mlp norm 1": in_layer(1, "post_attention_layernorm"),
    "v 2": in_layer(2, "self_attn.v_proj"),
    "up 2": in_layer(2, "mlp.up_proj"),
    "q norm 2": in_layer(2, "self_attn.q_norm"),
    "input norm 3": in_layer(3, "input_layernorm"),
    "down 3": in_layer(3, "mlp.down_proj"),
    "embedding": Defect("model.embed_tokens.weight", "embed"),
    "last norm": Defect("model.norm.weight", "norm"),
    "head": Defect("lm_head.weight", "head"),
}
FACTOR = 1.01


def make_models(folder: Path, names: Iterable[str]) -> None:
    """Write a sound model of four layers, and a copy of it with each of the defects."""
    for name in (SOUND, *names):
        directory = folder / "models" / slug(name)
        make_model(directory, "qwen3", num_hidden_layers=4)
        if name == SOUND:
            continue
        path = directory / "model.safetensors"
        weights = load_file(path)
        weights[DEFECTS[name].weight] *= FACTOR
        save_file(weights, path, metadata={"format": "pt"})


def slug(name: str) -> str:
    """Return a name for a folder: msprobe accepts no spaces in paths."""
    return name.replace(" ", "_")


def run_folder(folder: Path, layout: str, model: str) -> Path:
    return folder / "runs" / slug(layout) / slug(model)


def dump(folder: Path, model: str, name: str, this_device: torch.device) -> None:
    """Dump one update of a model in a layout of this launch."""
    layout = LAYOUTS[dist.get_world_size()][name]
    new_layout()
    out = run_folder(folder, name, model)
    settings = ["data.max_tokens_per_micro_batch=96", *layout.settings]
    path = folder / "models" / slug(model)
    config = configure(layout.engine, path, out, "statistics", *settings)
    profiler = job.start_profiler(config, this_device, TOTAL_STEPS, [STAGE])
    engine = engine_class(layout.engine)(config, this_device, TOTAL_STEPS)
    batch = make_batch(2)
    profiler.begin_step(2)
    with profiler.stage(STAGE, engine):
        share = share_of(batch, engine)
        results = engine.train_batch(share, make_loss(len(batch.input_ids)), 1)
    profiler.close()
    if dist.get_rank() == 0:
        line = {"step": 2, **{f"train/{key}": value for key, value in results.items()}}
        (out / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def dump_all(folder: Path, layout: str, models: list[str]) -> None:
    this_device = device.init()
    for model in models:
        dump(folder, model, layout, this_device)
    device.shutdown()


def compare_runs(folder: Path, layout_a: str, layout_b: str, defect: str) -> tuple[int, str]:
    """Compare the sound model with a defective one; return the exit code and the printed lines."""
    printed = io.StringIO()
    a = run_folder(folder, layout_a, SOUND)
    b = run_folder(folder, layout_b, defect)
    with contextlib.redirect_stdout(printed):
        code = compare.compare_runs(a, b, 2, None, compare.Settings())
    return code, printed.getvalue()


def named_place(printed: str) -> str:
    """Return the tensor that the first line about the stage names."""
    found = re.search(rf"^{STAGE}.*? diverges (?:first on \w+, )?at (.*)$", printed, re.M)
    return found[1].split(", relative")[0] if found else ""


def is_right(defect: str, printed: str) -> bool:
    """Return whether the first divergence is where the defect is."""
    place = DEFECTS[defect].place
    named = named_place(printed)
    others = {number for number in re.findall(r"layers\.(\d+)\.", named)}
    if place.startswith("layers."):
        return others == {place.split(".")[1]}
    return not others and place in named


def main(folder: Path) -> None:
    """Run the whole experiment, and print a table of the defects found per pair of layouts."""
    make_models(folder, DEFECTS)
    for num_ranks, layouts in LAYOUTS.items():
        for layout in layouts:
            launch(num_ranks, "tests/profiling/defects.py", folder, layout, SOUND, *DEFECTS)
    names = [*LAYOUTS[1], *LAYOUTS[2]]
    found = Counter()
    for layout_a, layout_b in itertools.product(names, names):
        code, printed = compare_runs(folder, layout_a, layout_b, SOUND)
        if code != 0:
            print(f"no defect, {layout_a} / {layout_b}: exit code {code}\n{printed}")
        for defect in DEFECTS:
            code, printed = compare_runs(folder, layout_a, layout_b, defect)
            if code == 1 and is_right(defect, printed):
                found[layout_a, layout_b] += 1
            else:
                print(f"missed: {defect}, {layout_a} / {layout_b}: exit code {code}\n{printed}")
    print(f"defects found in the right layer, of {len(DEFECTS)}")
    for layout_a in names:
        counts = " ".join(f"{found[layout_a, layout_b]:>3}" for layout_b in names)
        print(f"{layout_a:>16} {counts}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        dump_all(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    else:
        main(Path(sys.argv[1]))
