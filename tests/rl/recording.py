"""An engine and a vLLM that only record what the roles of a run ask of them."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from engines import schedule

GAE = "algorithm.adv_estimator=gae"
REFERENCE = "algorithm.use_kl_loss=true"


class RecordingEngine:
    """An engine that trains nothing and reports the learning rate of each step.

    Its log-probabilities are its number, negative while its adapters are disabled.

    options: the keyword arguments that it was built with
    batches: those that it has computed or was trained on
    on_device: the parts that would be in the device's memory
    """

    num_built = 0
    head = SimpleNamespace(vocab_size=9)

    def __init__(self, config, device, total_steps, **options):
        RecordingEngine.num_built += 1
        self.number = RecordingEngine.num_built
        self.config = config
        self.total_steps = total_steps
        self.options = options
        self.on_device = {"parameters", "optimizer"}
        self.has_adapters = True
        self.batches = []

    def offload(self, *parts):
        self.on_device -= set(parts)

    def onload(self):
        self.on_device = {"parameters", "optimizer"}

    def train_batch(self, batch, loss_fn, step, micro_batches):
        self.onload()
        self.batches.append(batch)
        rate = schedule.learning_rate(self.config.optim, step, self.total_steps)
        return {"lr": rate, "skipped": 0}

    @contextmanager
    def without_adapters(self):
        self.has_adapters = False
        yield
        self.has_adapters = True

    def log_probs(self, batch, micro_batches):
        self.onload()
        self.batches.append(batch)
        number = self.number if self.has_adapters else -self.number
        return torch.full((2,), number), None, None

    def values(self, batch, micro_batches):
        self.batches.append(batch)
        return torch.full((2,), 10 * self.number)

    def token_outputs(self, batch, head, micro_batches):
        self.batches.append(batch)
        return (torch.zeros(2, 3),)

    def output_matrix(self):
        return torch.zeros(9, 3)

    def export_weights(self, include_unused):
        return ("weights", self.has_adapters, include_unused)

    def export_adapter(self):
        return "adapter"


class RecordingRollout:
    """A vLLM that generates nothing. It records what engines hold on the device when it wakes.

    held: the part of vLLM that wakes up -> role -> the parts that its engine holds
    """

    is_current = False
    has_base = True
    adapter = None
    drafter = None
    awake = False

    def __init__(self, engines):
        self.engines = engines
        self.held = {}
        self.calls = []

    def update_weights(self, weights):
        self.calls.append(weights)

    def update_adapter(self, weights):
        self.calls.append(weights)

    def sleep(self):
        self.calls.append("sleep")

    def shutdown(self):
        self.calls.append("shutdown")

    def wake(self, part):
        self.held[part] = {role: set(engine.on_device) for role, engine in self.engines.items()}


def make_share():
    part = (None, SimpleNamespace(micro_batches=None))
    share = SimpleNamespace(parts=[part], batch=SimpleNamespace(fields={}), num_mini_batches=1)
    share.without_routes = share
    share.teacher_batch = None
    return share
