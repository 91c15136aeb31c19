"""Run vLLM with weights and a KV cache in FP8, and write down numbers.

    torchrun --nproc-per-node 1 tests/rollout/fp8_worker.py MODEL CACHE_DTYPE OUT.json

CACHE_DTYPE is rollout.kv_cache_dtype: some CPUs have no FP8 cache. One vLLM serves all cases.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from config import load
from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout
from rollout.vllm.fp8_weights import Fp8Weights, fp8_layers
from rollout.vllm.sampling import request_seed

SETTINGS = [
    "data.train_files=unused",
    "data.max_prompt_length=16",
    "rollout.max_tokens=16",
    "rollout.kv_cache_gib=0.05",
    "engine.compute_dtype=bfloat16",
    "algorithm.rollout_is=token",
    "rollout.quantization=fp8",
]
NUM_PROMPTS = 8


def main(model: Path, cache_dtype: str, out: Path) -> None:
    this_device = device.init()
    cache = f"rollout.kv_cache_dtype={cache_dtype}"
    config = load("ppo.yaml", [f"model.path={model}", *SETTINGS, cache])
    engine = FSDPEngine(config, this_device, total_steps=1)
    rollout = Rollout(config, this_device)
    results = {"cache dtypes": cache_dtypes(rollout)}
    rollout.wake("weights")
    addresses = addresses_of(rollout)
    for name, scale in (("first", 1.0), ("second", 3.0)):
        weights = scaled(engine, scale)
        rollout.update_weights(iter(weights.items()))
        results[f"{name} errors"] = errors(rollout, weights)
        results[f"{name} in place"] = addresses_of(rollout) == addresses
        rollout.wake("kv_cache")
        results[f"{name} gap"] = gap(rollout, engine, config)
    results["rows written"] = written_rows(rollout, scaled(engine, 0.5))
    out.write_text(json.dumps(results))
    device.shutdown()


def cache_dtypes(rollout: Rollout) -> list[str]:
    caches = rollout.llm.apply_model(
        lambda model: [str(module.kv_cache_dtype) for module in attention_layers(model)]
    )[0]
    return sorted(set(caches))


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "kv_cache_dtype")]


def scaled(engine: FSDPEngine, scale: float) -> dict[str, Tensor]:
    """Return the engine's weights with other projections in the layers' MLPs."""
    return {
        name: weight.bfloat16() * (scale if ".mlp." in name else 1.0)
        for name, weight in engine.export_weights(include_unused=False)
    }


def addresses_of(rollout: Rollout) -> list[int]:
    """Return where vLLM's FP8 weights are in memory."""
    return [layer.weight.data_ptr() for layer in fp8_layers(rollout.model())]


def errors(rollout: Rollout, weights: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of vLLM's weights in the first layer."""
    layer = rollout.model().model.layers[0]
    prefix = "model.layers.0."
    parts = {
        layer.self_attn.qkv_proj: [f"self_attn.{x}_proj" for x in "qkv"],
        layer.self_attn.o_proj: ["self_attn.o_proj"],
        layer.mlp.gate_up_proj: ["mlp.gate_proj", "mlp.up_proj"],
        layer.mlp.down_proj: ["mlp.down_proj"],
    }
    result = {}
    for module, names in parts.items():
        exact = torch.cat([weights[f"{prefix}{name}.weight"] for name in names]).double()
        stored = module.weight.t().double() * module.weight_scale.double()
        result[names[0]] = ((stored - exact).norm() / exact.norm()).item()
    return result


def gap(rollout: Rollout, engine: FSDPEngine, config) -> dict[str, float]:
    """Return the mean difference from the trainer's log-probabilities, and their spread."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = engine.hf_config.vocab_size
    prompts = torch.randint(vocab_size, (NUM_PROMPTS, 6), generator=generator).tolist()
    seeds = [request_seed(0, 0, number) for number in range(NUM_PROMPTS)]
    batch, _ = rollout.generate(prompts, seeds, config.rollout)
    mask = batch.fields["loss_mask"] > 0
    sampled = batch.fields["rollout_log_probs"][mask]
    trained = engine.log_probs(Batch(batch.input_ids, batch.cu_seqlens))[0][mask]
    return {
        "mean": (sampled - trained).abs().mean().item(),
        "spread": trained.std().item(),
        "tokens": int(mask.sum()),
    }


def written_rows(rollout: Rollout, weights: dict[str, Tensor]) -> dict:
    """Write weights into vLLM directly, then let vLLM load them itself, and compare.

    On a CPU, updates do not use Fp8Weights, since vLLM packs the other layers.
    """
    model = rollout.model()
    named = dict(rollout.sync.renamed(iter(weights.items())))
    shapes = {name: weight.shape for name, weight in named.items()}
    fp8_weights = Fp8Weights(model, shapes, torch.bfloat16)
    others = [name for name, _ in fp8_weights.write(named.items())]
    written = fp8_tensors(rollout)
    rollout.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named.items())})
    loaded = fp8_tensors(rollout)
    return {
        "layers": len(fp8_layers(model)),
        "tensors": len(written),
        "equal": sum(torch.equal(a, b) for a, b in zip(written, loaded)),
        "others": sorted({name.rpartition("layers.")[2].lstrip("0123456789.") for name in others}),
    }


def fp8_tensors(rollout: Rollout) -> list[Tensor]:
    """Return copies of vLLM's FP8 weights and their scales, in fp32."""
    layers = fp8_layers(rollout.model())
    return [x.float().clone() for layer in layers for x in (layer.weight, layer.weight_scale)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
