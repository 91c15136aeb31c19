"""Loss and accuracy on rows that are not trained on."""

from dataclasses import dataclass

import torch.distributed as dist
from tqdm import tqdm

from data.preference_dataset import PreferenceDataset
from preferences.losses import AnswerCounts
from preferences.trainer import PreferenceTrainer


@dataclass
class Totals:
    """Sums over batches: of losses and right answers, and of the rewards of each kind of answer."""

    loss: float = 0.0
    num_right: float = 0.0
    chosen: float = 0.0
    rejected: float = 0.0
    num_losses: int = 0
    num_chosen: int = 0
    num_rejected: int = 0

    def add(self, means: dict[str, float], counts: AnswerCounts, num_losses: int) -> None:
        """Add the means over a batch."""
        self.loss += means["loss"] * num_losses
        self.num_right += means["rewards/accuracies"] * num_losses
        # A batch without answers of a kind has no mean of them.
        self.chosen += means.get("rewards/chosen", 0.0) * counts.num_chosen
        self.rejected += means.get("rewards/rejected", 0.0) * counts.num_rejected
        self.num_losses += num_losses
        self.num_chosen += counts.num_chosen
        self.num_rejected += counts.num_rejected

    def metrics(self) -> dict[str, float]:
        """Return the means over all rows. There is no margin without answers of both kinds."""
        metrics = {
            "val/loss": self.loss / self.num_losses,
            "val/rewards/accuracies": self.num_right / self.num_losses,
        }
        if self.num_chosen and self.num_rejected:
            chosen = self.chosen / self.num_chosen
            rejected = self.rejected / self.num_rejected
            metrics["val/rewards/margins"] = chosen - rejected
        return metrics


def divide_rows(num_rows: int, batch_size: int) -> list[range]:
    """Return the rows of each batch.

    A single row at the end belongs to the batch before: the baseline of KTO is estimated with
    answers to the other prompts of a batch.
    """
    parts = [
        range(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)
    ]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts.pop()
        parts[-1] = range(parts[-1].start, num_rows)
    return parts


def validate(
    trainer: PreferenceTrainer, val: PreferenceDataset, batch_size: int
) -> dict[str, float]:
    """Return the loss, the accuracy and the margin of the rewards over every row of `val`.

    For a loss with a KL baseline, each batch has its own. Called by all ranks.
    """
    totals = Totals()
    # Only rank 0 shows a bar, and only if standard error is a terminal (tqdm's None).
    hides_bar = None if dist.get_rank() == 0 else True
    parts = divide_rows(len(val), batch_size)
    for rows in tqdm(parts, desc="validate", leave=False, disable=hides_bar):
        batch = val.batch(rows)
        counts = AnswerCounts.of(batch)
        means = trainer.evaluate(batch)
        totals.add(means, counts, counts.num_losses(trainer.loss.takes_pairs))
    return totals.metrics()
