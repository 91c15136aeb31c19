"""Models as the engines load them from their files: on the CPU, in fp32."""

from pathlib import Path

import torch
from torch import nn

from engines.heads import Head
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.names import model_names
from engines.model.weights import Placement, load_weights

CPU = torch.device("cpu")


def on_meta(path: Path, head: Head = Head.LOG_PROBS) -> nn.Module:
    return build_on_meta(read_hf_config(path), torch.float32, head)


def loaded(path: Path, **options) -> nn.Module:
    """Return a model with its weights. options: of load_weights()."""
    hf = on_meta(path, options.get("head", Head.LOG_PROBS))
    placement = Placement(CPU, CPU, torch.float32)
    load_weights(hf, path, model_names(hf, path), placement, **options)
    return hf
