"""Check whether a model can be trained, and whether its export is complete.

    python -m engines.check model.path=DIR [key=value ...]

Takes the keys of train_sft.py. Start it with torchrun to check a layout of several ranks.

It builds the engine, whose guard compares sequences in one batch with the same sequences one at a
time. Then it exports the weights and reads them again. On one rank, it also compares
log-probabilities with transformers and, if installed, with vLLM. It prints one line per check, and
stops with exit code 2 at the first failure.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from torch import Tensor

from config import InputError, run
from data.batching.batch import Batch
from engines.base import Engine
from engines.build import engine_class
from engines.checkpoint.export import write_safetensors
from engines.model import float8, guard
from engines.model.hf import auto_class, read_hf_config
from engines.model.model_files import weight_files
from engines.parallel import device

# The largest difference in log-probabilities (root mean square, in nats) that another
# implementation's kernels may cause.
KERNEL_BOUNDS = {"float32": 1e-3, "bfloat16": 0.25}
# vLLM would read these environment variables and join this program's process group.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Tensors that some model files contain although the model computes them itself.
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Reference:
    """The log-probabilities that the engine computes with the weights of model.path.

    batch      two short sequences
    log_probs  [T], fp32 in host memory
    bound      the largest difference in log_probs, in nats, that rounding may cause
    """

    batch: Batch
    log_probs: Tensor
    bound: float


def main(config: DictConfig) -> None:
    """Run all checks; raise InputError at the first failure."""
    if config.model.lora.rank:
        raise InputError("engines.check does not support adapters: leave out model.lora")
    if config.model.images:
        raise InputError("engines.check does not support images: leave out model.images")
    if float8.is_used(config):
        raise InputError(
            "engines.check compares results up to rounding in the compute dtype: leave out "
            "engine.float8"
        )
    this_device = device.init()
    exported = Path(config.output_dir) / "check"
    try:
        reference = check_engine_and_export(config, this_device, exported)
        check_reload(config, this_device, exported, reference)
        if dist.get_world_size() == 1:
            check_transformers(config, this_device, reference)
            if importlib.util.find_spec("vllm") is not None:
                check_vllm(config, exported, reference)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(exported, ignore_errors=True)
    device.shutdown()


# -- checks ---------------------------------------------------------------------------------------


def check_engine_and_export(
    config: DictConfig, this_device: torch.device, exported: Path
) -> Reference:
    """Build the engine, which runs the guard, and compare its export with model.path."""
    engine = engine_class(config.model_engine)(config, this_device, total_steps=1)
    difference, bound = guard.check_isolation(engine)
    form = "packed" if config.engine.use_remove_padding else "padded"
    subject = f"the outputs of {form} sequences and of one sequence at a time"
    report("guard", f"{subject} {describe(difference, bound)}")
    batch = guard.make_batches(engine).two_sequences
    reference = Reference(batch, engine.log_probs(batch)[0].cpu(), bound)

    export(engine, exported)
    path = Path(config.model.path)
    is_tied = read_hf_config(path).tie_word_embeddings
    differences = list(find_differences(path, exported, is_tied))
    if differences:
        raise InputError(
            f"export: {len(differences)} tensors are not as in model.path: {differences[0]}"
        )
    report("export", "has every tensor of model.path, with the same values")
    return reference


def check_reload(
    config: DictConfig, this_device: torch.device, exported: Path, reference: Reference
) -> None:
    """Load the export into a new engine, and compare log-probabilities."""
    reloaded = OmegaConf.merge(config, {"model": {"path": str(exported)}})
    engine = engine_class(config.model_engine)(reloaded, this_device, total_steps=1)
    log_probs = engine.log_probs(reference.batch)[0].cpu()
    require_close(
        "reload", "the engine's log-probabilities before and after the export", log_probs, reference
    )


def check_transformers(config: DictConfig, this_device: torch.device, reference: Reference) -> None:
    """Compare the reference with the log-probabilities that transformers computes."""
    dtype = getattr(torch, config.engine.compute_dtype)
    path = Path(config.model.path)
    log_probs = transformers_log_probs(path, reference.batch, dtype, this_device)
    bound = KERNEL_BOUNDS[config.engine.compute_dtype]
    require_close(
        "transformers", "its log-probabilities and the engine's", log_probs, reference, bound
    )


def check_vllm(config: DictConfig, exported: Path, reference: Reference) -> None:
    """Compare the reference with the log-probabilities that vLLM computes from the export.

    If vLLM has no class for the model, this is reported but is not a failure.
    """
    try:
        dtype = getattr(torch, config.engine.compute_dtype)
        log_probs = vllm_log_probs(exported, reference.batch, dtype)
    except Exception as error:  # vLLM may raise any error for an unsupported model
        reason = " ".join(str(error).split())[:300]
        message = f"vLLM cannot run the export: {reason}"
        if is_supported_by_vllm(exported):
            raise InputError(message) from error
        report("vLLM", message, passed=False)
        return
    bound = KERNEL_BOUNDS[config.engine.compute_dtype]
    require_close(
        "vLLM", "its log-probabilities for the export and the engine's", log_probs, reference, bound
    )


# -- the report -----------------------------------------------------------------------------------


def report(check: str, result: str, passed: bool = True) -> None:
    """Print a line of the report, on rank 0."""
    if dist.get_rank() == 0:
        status = "ok" if passed else "--"
        print(f"{check:<12}  {status}  {result}", flush=True)


def describe(difference: float, bound: float) -> str:
    return f"differ by {difference:.1g} nats (at most {bound:.1g} allowed)"


def require_close(
    check: str,
    subject: str,
    log_probs: Tensor,
    reference: Reference,
    bound: float | None = None,
) -> None:
    """Raise InputError if log_probs [T] differ from the reference by more than the bound.

    bound: the root mean square difference allowed, in nats. None: the bound of the reference.
    """
    if bound is None:
        bound = reference.bound
    difference = (log_probs - reference.log_probs).square().mean().sqrt().item()
    result = f"{subject} {describe(difference, bound)}"
    if not difference <= bound:  # also true for NaN
        raise InputError(f"{check}: {result}")
    report(check, result)


# -- exports --------------------------------------------------------------------------------------


def export(engine: Engine, directory: Path) -> None:
    """Write the engine's weights and configuration. Called by all ranks; rank 0 writes."""
    weights = engine.export_weights()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        engine.save_config(directory)
        write_safetensors(weights, directory)
    for _ in weights:  # the other ranks take part in gathering each tensor
        pass
    dist.barrier()


def find_differences(path: Path, exported: Path, is_tied: bool) -> Iterator[str]:
    """Yield a description of each tensor that differs between a model and its export.

    Values may differ by rounding to the export's dtype. is_tied: the output matrix may be missing.
    """
    may_be_missing = (*COMPUTED_TENSORS, "lm_head.weight") if is_tied else COMPUTED_TENSORS
    exported_files = {}
    for file in weight_files(exported):
        with safe_open(file, framework="pt") as tensors:
            exported_files |= dict.fromkeys(tensors.keys(), file)
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if name in exported_files:
                    exported_tensor = read_tensor(exported_files.pop(name), name)
                    original = tensors.get_tensor(name).to(exported_tensor.dtype)
                    if not torch.equal(original, exported_tensor):
                        yield f"{name} has different values"
                elif not name.endswith(may_be_missing):
                    yield f"{name} is missing"
    for name in exported_files:
        yield f"{name} is not in model.path"


def read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


# -- other implementations ------------------------------------------------------------------------


@torch.no_grad()
def transformers_log_probs(
    path: Path, batch: Batch, dtype: torch.dtype, this_device: torch.device
) -> Tensor:
    """Return log-probabilities [T] fp32, computed one sequence at a time; 0 for first tokens."""
    model = auto_class(read_hf_config(path)).from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    model = model.to(this_device).eval()
    log_probs = torch.zeros(len(batch.input_ids))
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        ids = batch.input_ids[start : start + length].to(this_device)
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        of_targets = logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        log_probs[start + 1 : start + length] = of_targets.cpu()
    return log_probs


def is_supported_by_vllm(path: Path) -> bool:
    """Return whether vLLM has a class for a model."""
    from vllm import ModelRegistry

    architectures = read_hf_config(path).architectures or ()
    return not {*ModelRegistry.get_supported_archs()}.isdisjoint(architectures)


def vllm_log_probs(path: Path, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return log-probabilities [T] fp32; 0 for first tokens."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path),
        dtype=dtype,
        max_model_len=max(batch.lengths) + 1,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        language_model_only=True,
    )
    sequences = [ids.tolist() for ids in batch.input_ids.split(batch.lengths)]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in sequences],
        use_tqdm=False,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    log_probs = []
    for output, ids in zip(outputs, sequences):
        for candidates, token in zip(output.prompt_logprobs, ids):
            is_first = candidates is None
            log_probs.append(0.0 if is_first else candidates[token].logprob)
    return torch.tensor(log_probs)


if __name__ == "__main__":
    sys.argv.insert(1, "data.train_files=none")  # train_sft.py requires data; this script does not
    run(main, "sft.yaml", __doc__)
