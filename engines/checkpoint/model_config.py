"""Writes the files of an exported model other than its weights and tokenizer."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from common.end_tokens import add_end_ids
from engines.model import mimo
from engines.model.classifier import describe_as_classifier
from engines.model.hf import auto_class, read_hf_config

# generation_config.json lists the tokens that end a response; *processor_config.json describes how
# to read images. We never run the Python files, but if auto_map in config.json names them, programs
# that load the export need them.
SIDE_FILES = ("generation_config.json", "*processor_config.json", "*.py")


def save_model_config(
    model_path: Path, dtype: torch.dtype, directory: Path, new_end_ids: Iterable[int] = ()
) -> None:
    """Write config.json for weights of this dtype, and copy SIDE_FILES, into a directory.

    Args:
        new_end_ids: tokens that end a response of the exported model, besides those that the files
            of model_path name. They are added to generation_config.json.
    """
    hf_config = read_hf_config(model_path)
    hf_config.architectures = [auto_class(hf_config)._model_mapping[type(hf_config)].__name__]
    write_files(hf_config, model_path, dtype, directory)
    add_end_ids(directory, new_end_ids)


def save_classifier_config(
    model_path: Path, dtype: torch.dtype, directory: Path, padding_id: int | None
) -> None:
    """Do the same for a reward model, whose value head becomes a classifier of one label.

    Args:
        padding_id: see engines.model.classifier.describe_as_classifier().
    """
    hf_config = read_hf_config(model_path)
    describe_as_classifier(hf_config, padding_id)
    write_files(hf_config, model_path, dtype, directory)


def write_files(hf_config, model_path: Path, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json, and copy SIDE_FILES."""
    hf_config.dtype = dtype
    hf_config.get_text_config().dtype = dtype
    mimo.write_config_class(hf_config, directory)
    hf_config.save_pretrained(directory)
    for pattern in SIDE_FILES:
        for file in model_path.glob(pattern):
            shutil.copy(file, directory)
