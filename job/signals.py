"""Make all ranks agree on when to stop and when to save, by signals and by time."""

import os
import signal
import time

from configs.environment import is_rank0

# After a Ctrl-C, ranks receive SIGINT twice: from the terminal, and from torchrun.
SECONDS_OF_ONE_CTRL_C = 2
# The signals that stop a run after its step.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Agreement:
    """The ranks' decision after every step: whether to stop, and whether to save.

    SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or SIGHUP on any rank stops all ranks after their step, with a
    checkpoint. Before the first step a signal ends the process at once, and so does a second
    Ctrl-C at any time.

    Attributes:
        stop: whether a rank has received a signal.
        save: whether to save a checkpoint after this step.
    """

    def __init__(self, save_freq: int, save_minutes: float):
        """
        Args:
            save_freq: steps between checkpoints; -1: do not save by steps.
            save_minutes: minutes between checkpoints; 0: do not save by time.
        """
        self.save_freq = save_freq
        self.save_seconds = 60 * save_minutes
        self.total_steps = 0
        self.stop = False
        self.save = False
        self.is_training = False
        self.received_at: float | None = None
        self.saved_at = time.monotonic()
        for number in STOPPING:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN  # nohup ignores SIGHUP
            if not is_ignored:
                signal.signal(number, self._receive)

    def begin(self, total_steps: int) -> None:
        """From now on, let a signal take effect at the end of the step."""
        self.total_steps = total_steps
        self.is_training = True
        self.saved_at = time.monotonic()

    def describe(self) -> str:
        """Describe when checkpoints are saved, for the log."""
        occasions = []
        if self.save_freq > 0:
            occasions.append(f"every {self.save_freq} steps")
        if self.save_seconds > 0:
            occasions.append(f"every {self.save_seconds / 60:g} minutes")
        occasions.append("when asked to stop")
        return f"checkpoints: {', '.join(occasions)}, and after the last step"

    def _receive(self, number: int, _) -> None:
        now = time.monotonic()
        is_first = self.received_at is None
        is_second_ctrl_c = (
            not is_first
            and number == signal.SIGINT
            and now - self.received_at > SECONDS_OF_ONE_CTRL_C
        )
        stops_at_once = is_second_ctrl_c or not self.is_training
        if stops_at_once:
            effect = "stopped at once"
        else:
            effect = (
                "a checkpoint will be saved after this step; a second Ctrl-C stops at once, "
                "without it"
            )
        if is_rank0() and (is_first or is_second_ctrl_c):
            # print() is not safe in a signal handler.
            os.write(2, f"\n{signal.Signals(number).name}: {effect}\n".encode())
        if stops_at_once:
            os._exit(128 + number)
        if is_first:
            self.received_at = now

    def update(self, step: int, device) -> None:
        """Set `stop` and `save` after `step`, to the same values on all ranks.

        Called by all ranks.
        """
        import torch
        import torch.distributed as dist

        # Clocks differ between ranks, so only rank 0 decides whether save_minutes have passed.
        seconds = time.monotonic() - self.saved_at
        is_due = dist.get_rank() == 0 and 0 < self.save_seconds <= seconds
        flags = torch.tensor([float(self.received_at is not None), float(is_due)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.stop, is_due = (bool(flag) for flag in flags.tolist())
        is_frequent = self.save_freq > 0 and step % self.save_freq == 0
        self.save = is_due or self.stop or is_frequent or step == self.total_steps
        if self.save:
            self.saved_at = time.monotonic()
