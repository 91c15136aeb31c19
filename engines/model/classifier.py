"""Sequence classifiers with one label: the form in which reward models are stored.

transformers' AutoModelForSequenceClassification with num_labels=1 is a decoder and a matrix
`score` [1, h], which it applies to the last hidden state of the last token. An engine with a value
head computes the same: it is a causal language model whose output matrix has one row. Only the
names in the files differ.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from config import InputError
from configs.errors import errors_about_model
from engines.model.model_files import check_is_no_adapter, shapes_in_files

SCORE = "score.weight"
# The names of a value head: in a causal language model of transformers, and in Megatron's.
VALUE_HEADS = ("lm_head.weight", "output_layer.weight")
PADDING_ADVICE = "score one conversation at a time, or set pad_token_id in its config.json"


def classifier_class(hf_config) -> type:
    """Return transformers' sequence classifier for a model's configuration.

    Raises:
        InputError: transformers has none.
    """
    from transformers import AutoModelForSequenceClassification  # imported here because it is slow

    classes = AutoModelForSequenceClassification._model_mapping
    if type(hf_config) not in classes:
        raise InputError(
            "transformers has no AutoModelForSequenceClassification for "
            f"model_type={hf_config.model_type}, so a reward model of this family could not be "
            "loaded elsewhere: choose a text model of another family, such as llama or qwen3"
        )
    return classes[type(hf_config)]


def check_trainable(hf_config, hf: nn.Module) -> None:
    """Check that transformers' classifier computes what an engine with a value head trains.

    Args:
        hf: the language model on the meta device, with a value head.

    Raises:
        InputError: transformers has no classifier, or its parameters have other names than the
            language model's.
    """
    kind = classifier_class(hf_config)
    hf_config.num_labels = 1
    with torch.device("meta"):
        classifier = kind(hf_config)
    expected = {name for name, _ in as_classifier(hf.named_parameters())}
    actual = {name for name, _ in classifier.named_parameters()}
    if expected != actual:
        different = min(expected ^ actual)
        raise InputError(
            f"{kind.__name__} of transformers has other parameters than the language model, such "
            f"as {different}: a reward model of this family is not supported"
        )


def as_classifier(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights, with the value head named as in a sequence classifier."""
    for name, weight in weights:
        yield SCORE if name in VALUE_HEADS else name, weight


def value_head_name(hf: nn.Module) -> str | None:
    """Return the name of a model's value head; None if it has an output matrix."""
    output = hf.get_output_embeddings()
    if output is None or output.out_features != 1:
        return None
    return next(f"{name}.weight" for name, module in hf.named_modules() if module is output)


def check_score_shape(path: Path, shapes: dict[str, list[int]]) -> None:
    """Raise InputError if the files have a score head that does not have exactly one label.

    Args:
        shapes: of the tensors in the files.
    """
    shape = shapes.get(SCORE)
    if shape is not None and shape[0] != 1:
        raise InputError(
            f"model.path={path} is a classifier with {shape[0]} labels ({SCORE} has shape "
            f"{shape}), and a reward model has one: give a model with num_labels=1, or a language "
            "model"
        )


def check_is_reward_model(key: str, path: str) -> None:
    """Raise InputError for a model without a score head of one label.

    Args:
        key: the configuration key that names the model.
    """
    with errors_about_model(key, path):
        check_is_no_adapter(Path(path))
        shape = shapes_in_files(Path(path)).get(SCORE)
    if shape is None:
        raise InputError(
            f"{key}={path} is not a reward model: its files have no {SCORE}. Give a sequence "
            "classifier with one label (num_labels=1 in transformers), such as the export of "
            "train_rm.py"
        )
    if shape[0] != 1:
        raise InputError(
            f"{key}={path} is a classifier with {shape[0]} labels: a reward model has one "
            "(num_labels=1 in transformers)"
        )


def describe_as_classifier(hf_config, padding_id: int | None) -> None:
    """Turn a language model's configuration into the configuration of a one-label classifier.

    Args:
        padding_id: the token that transformers takes for padding. The score is read at the last
            other token, so no conversation may end with it. None: transformers then refuses
            batches of several conversations.
    """
    hf_config.architectures = [classifier_class(hf_config).__name__]
    hf_config.num_labels = 1
    hf_config.pad_token_id = padding_id
