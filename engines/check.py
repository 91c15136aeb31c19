"""Whether a model can be trained, and what becomes of its weights.

    python -m engines.check model.path=DIR [key=value ...]        keys as for train_sft.py; with torchrun, a layout of several ranks

Builds the engine, whose guard compares sequences side by side with one at a time; exports the weights, and reads them again. On one
rank transformers and vLLM, if it is installed, answer as well. Prints what holds; exit code 2 if something does not.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from torch import Tensor

from config import InputError, run
from data.batching.batch import Batch
from engines.build import engine_class
from engines.checkpoint.export import write_safetensors
from engines.model import guard
from engines.model.hf import auto_class, read_hf_config
from engines.model.model_files import weight_files
from engines.parallel import device

KERNELS = {
    "float32": 1e-3,
    "bfloat16": 0.25,
}  # nats, root mean square: what those of others may make of it


def main(config: DictConfig) -> None:
    if config.model.lora.rank:
        raise InputError("engines.check is for whole models: leave out model.lora")
    if config.model.images:
        raise InputError("engines.check is for text: leave out model.images")
    this_device, path, exported = (
        device.init(),
        Path(config.model.path),
        Path(config.output_dir) / "check",
    )
    kind, dtype = engine_class(config.model_engine), getattr(torch, config.engine.compute_dtype)
    try:
        engine = kind(config, this_device, total_steps=1)
        found, bound = guard.check_isolation(engine)
        way = "packed" if config.engine.use_remove_padding else "padded"
        tell(
            f"guard: {way} sequences and one at a time are {found:.1g} nats apart, {bound:.1g} are allowed"
        )
        batch = guard.make_batches(engine).two_sequences
        said = engine.log_probs(batch)[0].cpu()
        weights = engine.export_weights()
        if dist.get_rank() == 0:
            shutil.rmtree(exported, ignore_errors=True)
            exported.mkdir(parents=True)
            engine.save_config(exported)
            write_safetensors(weights, exported)
        for _ in weights:  # the other ranks gather them, too
            pass
        dist.barrier()
        lost = list(differences(path, exported, read_hf_config(path).tie_word_embeddings))
        if lost:
            raise InputError(f"export: {lost[0]}, one of {len(lost)} such tensors")
        tell("export: every tensor of model.path, with its value")
        del engine, weights
        engine = kind(
            OmegaConf.merge(config, {"model": {"path": str(exported)}}), this_device, total_steps=1
        )
        require(
            "reload: the log-probabilities of what was exported",
            engine.log_probs(batch)[0].cpu() - said,
            bound,
        )
        del engine
        if dist.get_world_size() == 1:
            by_others = transformers_log_probs(path, batch, dtype, this_device) - said
            require(
                "transformers: its log-probabilities",
                by_others,
                KERNELS[config.engine.compute_dtype],
            )
            if importlib.util.find_spec("vllm") is not None:
                try:
                    by_others = vllm_log_probs(exported, batch, dtype) - said
                except (
                    Exception
                ) as error:  # vLLM may raise anything where it is not made for a model
                    said = (
                        f"vLLM cannot run what was exported: {' '.join(str(error).split())[:300]}"
                    )
                    if in_vllm(exported):
                        raise InputError(said) from error
                    tell(said)
                else:
                    require(
                        "vLLM: its log-probabilities of what was exported",
                        by_others,
                        KERNELS[config.engine.compute_dtype],
                    )
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(exported, ignore_errors=True)
    device.shutdown()


def tell(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def require(what: str, differences: Tensor, bound: float) -> None:
    """differences [T], nats"""
    gap = differences.square().mean().sqrt().item()
    said = f"{what} are {gap:.1g} nats apart, {bound:.1g} are allowed"
    if not gap <= bound:
        raise InputError(said)
    tell(said)


def differences(path: Path, exported: Path, tied: bool) -> Iterator[str]:
    """What the files of two models do not have in common, but for rounding to the second's dtype."""
    files = {}
    for file in weight_files(exported):
        with safe_open(file, framework="pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if name not in files:
                    if not (
                        tied
                        and name.endswith("lm_head.weight")
                        or name.endswith("rotary_emb.inv_freq")
                    ):
                        yield f"{name} is lost"
                    continue
                with safe_open(files.pop(name), framework="pt") as others:
                    other = others.get_tensor(name)
                if not torch.equal(tensors.get_tensor(name).to(other.dtype), other):
                    yield f"{name} has another value"
    yield from (f"{name} is new" for name in files)


@torch.no_grad()
def transformers_log_probs(
    path: Path, batch: Batch, dtype: torch.dtype, this_device: torch.device
) -> Tensor:
    """[T], one sequence at a time; 0 for first tokens."""
    model = auto_class(read_hf_config(path)).from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    model = model.to(this_device).eval()
    answers = torch.zeros(len(batch.input_ids))
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        ids = batch.input_ids[start : start + length].to(this_device)
        log_probs = model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        answers[start + 1 : start + length] = log_probs.gather(-1, ids[1:, None])[:, 0].cpu()
    return answers


def in_vllm(path: Path) -> bool:
    """Whether vLLM has a class for a model."""
    from vllm import ModelRegistry

    return not {*ModelRegistry.get_supported_archs()}.isdisjoint(
        read_hf_config(path).architectures or ()
    )


def vllm_log_probs(path: Path, batch: Batch, dtype: torch.dtype) -> Tensor:
    """The same of vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):  # vLLM would join these ranks
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
    sequences = [x.tolist() for x in batch.input_ids.split(batch.lengths)]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in sequences],
        use_tqdm=False,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    return torch.tensor(
        [
            0.0 if said is None else said[token].logprob
            for output, ids in zip(outputs, sequences)
            for said, token in zip(output.prompt_logprobs, ids)
        ]
    )


if __name__ == "__main__":
    sys.argv.insert(1, "data.train_files=none")  # without a key of its own for what needs no data
    run(main, "sft.yaml", __doc__)
