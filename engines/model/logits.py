"""How a model turns its last hidden states into logits."""

from operator import itemgetter

import torch
from torch import Tensor, nn

from config import InputError

# A hidden state in the linear range of any soft cap, and one that reaches the cap.
SMALL = 2.0**-10
HUGE = 2.0**60


def logit_constants(hf: nn.Module) -> tuple[float, float | None]:
    """Return the constants (scale, soft cap) with which the engines compute a model's logits.

    The logits are z = scale * hidden @ weight.T or, with a soft cap c, c * tanh(z / c). To measure
    the constants, we run the model's own forward pass with known hidden states, and with the
    identity in place of the output matrix.

    Raises:
        InputError: if the model computes its logits in another way.
    """
    samples = [SMALL, HUGE, *torch.linspace(-100, 100, 41)]
    hidden = torch.tensor(samples).view(1, 1, -1)
    logits = logits_of_hidden_states(hf, hidden)
    if logits is None or logits.is_meta:
        raise InputError(
            f"{type(hf).__name__} does not compute its logits from its base model's hidden states, "
            "which is not supported"
        )
    scale = logits[0, 0, 0].item() / SMALL
    largest = logits[0, 0, 1].item()
    if largest == scale * HUGE:
        softcap = None
        expected = scale * hidden
    else:
        softcap = largest
        expected = softcap * torch.tanh(scale * hidden / softcap)
    if not torch.allclose(logits.float(), expected, rtol=1e-5):
        raise InputError(f"{type(hf).__name__} computes its logits in a way that is not supported")
    return scale, softcap


def logits_of_hidden_states(hf: nn.Module, hidden: Tensor) -> Tensor | None:
    """Return a model's logits for hidden states, with the identity as the output matrix.

    Returns None if the model's forward pass fails.
    """
    base = hf.base_model
    output_matrix = hf.get_output_embeddings()
    base.forward = lambda *_, **__: BaseModelOutput([hidden])
    output_matrix.forward = lambda x: x
    try:
        input_ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        return hf(input_ids=input_ids).logits
    except Exception:  # the model may raise any error, since its modules are replaced
        return None
    finally:
        del base.forward
        del output_matrix.forward


class BaseModelOutput(tuple):
    """Replaces a base model's output: has the hidden states, and None for all other attributes."""

    last_hidden_state = property(itemgetter(0))

    def __getattr__(self, name: str) -> None:
        return None
