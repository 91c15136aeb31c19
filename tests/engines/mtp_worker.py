"""The cases of test_mtp.py: it writes down numbers, which test_mtp.py judges.

    torchrun --nproc-per-node 2 tests/engines/mtp_worker.py FOLDER [NAME ...]       NAME: of a case or a function; default: all

Reads models from FOLDER/{family}; writes FOLDER/results.json, and FOLDER/{case}.safetensors with gradients and final weights.
"""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from data.batching.batch import Batch
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.megatron import bridge
from engines.megatron.engine import MegatronEngine
from engines.parallel import device
from tests.engines.megatron_worker import (
    AUTO,
    BF16,
    CP2,
    FULL,
    NO_SP,
    OVERLAP,
    PADDED,
    PP2,
    REPLICATED,
    SELECTIVE,
    SHORT,
    TP2,
    VPP2,
    Case,
    build,
    count_bytes,
    share_of,
)
from tests.support.training import gather, make_batch, make_loss, make_tokenizer

MTP = "model.mtp.enable=true model.mtp.enable_train=true model.mtp.mtp_loss_scaling_factor=0.3"
DETACHED, STEPS, SAVED_AT = "model.mtp.detach_encoder=true", 4, 2
FROZEN = "model.mtp.enable=true"
EPS = "optim.eps=1e-5"  # one that Adam notices: no whole step of a rounding error


@dataclass
class MTPCase(Case):
    """Gradients are compared where every rank has them whole, with the replicated optimizer."""

    steps: int = STEPS

    @property
    def gradients(self) -> bool:
        return REPLICATED in self.engine


def case(family: str, *settings: str, **others) -> MTPCase:
    return MTPCase(family, " ".join((MTP, EPS, *settings)), **others)


CASES = {
    "tp2": case("two", TP2, REPLICATED),
    "tp2 no sp padded": case("mimo", TP2, NO_SP, PADDED, REPLICATED),
    "tp2 full detached": case("two", TP2, FULL, DETACHED, REPLICATED),
    "pp2": case("mimo", PP2, REPLICATED, SELECTIVE),
    "pp2 detached padded": case("two", PP2, DETACHED, PADDED),
    "pp2 vpp2": case("two", PP2, VPP2),
    "pp2 vpp2 tied full": case("tied", PP2, VPP2, FULL, REPLICATED),
    "cp2": case("two", CP2, REPLICATED),
    "cp2 padded full": case("mimo", CP2, PADDED, FULL, REPLICATED),
    "dp2 overlap": case("mimo", OVERLAP),
    "dp2 uneven": case("two", REPLICATED, uneven=True),
    "tied detached": case("tied", REPLICATED, DETACHED),
    "bf16 tp2": case("mimo", TP2, BF16),
    "auto": case("two", AUTO, SHORT, REPLICATED),
    "auto padded full": case("mimo", AUTO, SHORT, PADDED, FULL, REPLICATED),
}
RESUMES = {"saved": f"{MTP} {EPS} {TP2}", "resumed": f"{MTP} {EPS} {PP2}"}


def main(folder: Path, *names: str) -> None:
    this_device, results = device.init(), {}
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for name, each in CASES.items():
        if not names or name in names:
            results[name] = run(folder, this_device, name, each)
    for work in (untouched, passes, empty, resume):
        if not names or work.__name__ in names:
            results[work.__name__] = work(folder, this_device)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    device.shutdown()


def train(
    engine: MegatronEngine,
    steps,
    case: Case,
    gradients: dict | None = None,
    batch: Batch | None = None,
) -> list[dict]:
    """gradients: those of the first step, to fill. batch: in place of the step's"""
    results, update = [], engine.step_optimizer

    def noted(lr: float) -> float:
        if gradients == {}:
            gradients.update(
                (name, x.clone())
                for name, x in bridge.export(
                    engine.mapping,
                    engine.models,
                    torch.float32,
                    engine.device,
                    lambda p: p.main_grad.detach(),
                )
            )
        return update(lr)

    engine.step_optimizer = noted
    for step in steps:
        share, planned, num_tokens = (
            (batch, None, len(batch.input_ids)) if batch else share_of(engine, step, case)
        )
        results.append(engine.train_batch(share, make_loss(num_tokens), step, planned))
    engine.step_optimizer = update
    return results


def run(folder: Path, this_device: torch.device, title: str, case: MTPCase) -> dict:
    print(title, flush=True)
    engine, gradients = build(MegatronEngine, folder / case.family, this_device, case.engine), {}
    result = {
        "steps": train(engine, range(case.steps), case, gradients if case.gradients else None),
        "flops": engine.flops([3, 5], 4),
        "bytes": gather(count_bytes(engine)),
    }
    weights = dict(engine.export_weights())
    if dist.get_rank() == 0:
        tensors = weights | {f"gradient of {n}": x for n, x in gradients.items()}
        save_file({n: x.contiguous() for n, x in tensors.items()}, folder / f"{title}.safetensors")
    return result


def untouched(folder: Path, this_device: torch.device) -> dict:
    """What ten steps report that leave the MTP layers out; writes the weights after them, and the gradients of the first."""
    results = {}
    for name, family, settings in (
        ("frozen", "mimo", FROZEN),
        ("left out", "two", ""),
        ("bf16", "mimo", f"{FROZEN} {BF16}"),
        ("tied", "tied", ""),
    ):
        engine, gradients = (
            build(MegatronEngine, folder / family, this_device, f"{settings} {EPS} {REPLICATED}"),
            {},
        )
        results[name] = train(engine, range(10), MTPCase(family), gradients)
        weights = dict(engine.export_weights()) | {
            f"gradient of {n}": x for n, x in gradients.items()
        }
        if dist.get_rank() == 0:
            save_file(
                {n: x.contiguous() for n, x in weights.items()}, folder / f"{name}.safetensors"
            )
        if name == "frozen":
            progress = {"step": 10, "export_dtype": "float32"}
            Checkpointer(folder / "checkpoints", 2, asynchronous=False).save(
                10, engine, progress, make_tokenizer()
            )
    return results


def passes(folder: Path, this_device: torch.device) -> list[int]:
    """How often the MTP layer ran: in a step, of so many micro-batches; and for log-probabilities."""
    engine, ran, batch = build(MegatronEngine, folder / "mimo", this_device, MTP), [], make_batch(0)
    engine.models[-1].mtp.layers[0].register_forward_hook(lambda *_: ran.append(1))
    train(engine, [0], MTPCase("mimo"), batch=batch)
    in_step, planned = len(ran), len(engine.divide_share(batch.lengths))
    engine.log_probs(batch)
    return [in_step, planned, len(ran) - in_step]


def empty(folder: Path, this_device: torch.device) -> dict:
    """A step without any token to train, and one where only second tokens are, which no MTP layer predicts."""
    results = {}
    for name in ("none", "second"):
        engine, batch, gradients = (
            build(MegatronEngine, folder / "mimo", this_device, f"{MTP} {REPLICATED}"),
            make_batch(0),
            {},
        )
        batch.fields["loss_mask"] = ((batch.position_ids == 1) & (name == "second")).float()
        step = train(engine, [0], MTPCase("mimo"), gradients, batch)[0]
        results[name] = step | {
            "gradients of MTP": sum(
                x.abs().sum().item() for n, x in gradients.items() if "mtp_layers" in n
            )
        }
    return results


def resume(folder: Path, this_device: torch.device) -> dict:
    """Whether what is read is exported to the bit; steps after a checkpoint, without interruption and on another layout."""
    engine, this = (
        build(MegatronEngine, folder / "two", this_device, RESUMES["saved"]),
        MTPCase("two"),
    )
    exported = dict(engine.export_weights())
    files = load_file(folder / "two" / "model.safetensors")
    result = {
        "round trip": exported.keys() == files.keys()
        and all(torch.equal(exported[n], x) for n, x in files.items())
    }
    train(engine, range(SAVED_AT), this)
    checkpointer = Checkpointer(folder / "checkpoints", 2, asynchronous=False)
    progress = {"step": SAVED_AT, "export_dtype": "float32"}
    checkpointer.save(SAVED_AT, engine, progress, make_tokenizer())
    export_hf(engine, make_tokenizer(), folder / "hf")
    result["saved"] = train(engine, range(SAVED_AT, STEPS), this)
    engine = build(MegatronEngine, folder / "two", this_device, RESUMES["resumed"])
    checkpointer.load(checkpointer.directory / f"step_{SAVED_AT:08d}", engine)
    return result | {"resumed": train(engine, range(SAVED_AT, STEPS), this)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
