"""Losses of reward models, which learn a score of a conversation.

Each function names the arguments it needs, and is called with them by name. A loss of pairs may
name these, all [n] fp32 for n pairs:

    chosen_scores, rejected_scores    with gradient
    margins                           by how much the chosen answer is better; 0 if a row has none

A loss of single answers may name these, for n answers:

    scores                            [n] fp32, with gradient
    targets                           [n] fp32: the scores of the rows

It returns the losses, [n], which are averaged over the pairs, or answers, of the whole batch. All
other parameters are the function's own.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor, **_) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin).

    Without a margin, this is the negative log-likelihood of the preference (Bradley and Terry 1952,
    Ouyang et al. 2022); the margin comes from Llama 2 (Touvron et al. 2023).
    """
    return -logsigmoid(chosen_scores - rejected_scores - margins)


def regression(scores: Tensor, targets: Tensor, **_) -> Tensor:
    """Return the squared errors (score - target)^2."""
    return (scores - targets) ** 2


REWARD_LOSSES = {"bradley_terry": bradley_terry, "regression": regression}
