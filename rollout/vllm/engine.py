"""vLLM in this process: it generates with the trainer's weights, and frees memory for training.

In each round, the calls have this order; any other order raises RuntimeError:

    wake("weights") -> update_weights(...) -> wake("kv_cache") -> generate(...) -> sleep()

With a separate adapter (model.lora.merge=false), the base stays valid between rounds. So the first
round calls update_weights() and update_adapter(), and later rounds call only update_adapter().
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from config import InputError
from data.batching.batch import Batch
from engines.model import mtp
from engines.model.hf import read_hf_config
from engines.parallel.device import on_all_ranks
from rollout.responses import Responses
from rollout.vllm import adapters, speculation
from rollout.vllm.arguments import Host, engine_arguments
from rollout.vllm.device_memory import PARTS, CpuMemory, OwnMemory, SharedMemory, used_gib
from rollout.vllm.generation import next_token_log_probs, step_requests
from rollout.vllm.image_prompts import (
    ImagePrompt,
    enqueue_image_prompts,
    find_placeholder_ids,
)
from rollout.vllm.quantization import is_quantized
from rollout.vllm.routing import RouteRecorder
from rollout.vllm.sampling import (
    RequestSampling,
    count_candidates,
    find_stop_token_ids,
    preserved_random_state,
    sampling_params,
)
from rollout.vllm.settings import check_rollout
from rollout.vllm.startup import prepare_process, print_once, quiet_vllm
from rollout.vllm.weight_names import vllm_weight_names
from rollout.vllm.weight_sync import NamedWeights, WeightSync

MAX_GROWTH_GIB = 1.0  # if the memory in use while vLLM sleeps grows by more, warn
SETTLED_ROUND = 2  # earlier rounds still allocate new buffers


class Rollout:
    """One replica of vLLM per rollout.tensor_parallel_size consecutive ranks.

    All ranks of a replica pass the same requests, and all get the results.

    Attributes:
        replica: The index of this rank's replica.
        num_replicas: The number of replicas.
        tp_rank: This rank's index in its replica.
        drafter: "mtp", "ngram", "suffix", or None.
        drafts: Counts the drafts of the last generate().
        awake: The parts of the memory that are awake: "weights", "kv_cache", or both.
        shared_weights: {name in the model's files: view of vLLM's tensor}. The trainer reads the
            files into these tensors, and uses them as its frozen weights. None if nothing is
            shared.
        adapter: The adapter that vLLM stores separately from the base, or None.
        recorder: Keeps the experts that vLLM chose; None without rollout.routing_replay.
        scheduler: The scheduler for closed batches; None if vLLM's own scheduler is used.
        closed_batch_share: The fraction of the last batch's steps that were scheduled by
            `scheduler` rather than by vLLM's own code.
    """

    def __init__(self, config: DictConfig, device: torch.device):
        """Start vLLM and put it to sleep, with weights that are not valid yet.

        Raises:
            InputError: vLLM cannot run this configuration, on this many ranks, in this memory.
        """
        check_rollout(config, dist.get_world_size())
        self.device = device
        self.drafter = mtp.drafter(config)
        self._set_coordinates(config.rollout.tensor_parallel_size)
        self._set_tokens(config)
        shares_base = adapters.shares_base(config, dist.get_world_size())
        self._start(config, shares_base)
        self._attach(config)
        self.shared_weights = self._share_weights(config) if shares_base else None
        self._report_copy_of_base(config, shares_base)
        self.memory = self._make_memory()
        self.sleep()

    def _set_coordinates(self, tp_size: int) -> None:
        self.tp_size = tp_size
        self.replica, self.tp_rank = divmod(dist.get_rank(), tp_size)
        self.num_replicas = dist.get_world_size() // tp_size

    def _set_tokens(self, config: DictConfig) -> None:
        """Find the size of the vocabulary and the tokens that end a response."""
        hf_config = read_hf_config(config.model.path)
        self.vocab_size = hf_config.get_text_config().vocab_size
        self.stop_token_ids = find_stop_token_ids(Path(config.model.path))
        self.placeholder_ids = find_placeholder_ids(hf_config) if config.model.images else []
        # A response ends when the model samples the placeholder of an image, because the trainer
        # would put image features in its place and compute other log-probabilities after it.
        # Excluding placeholders from sampling would change the log-probabilities of all tokens.
        self.stop_token_ids += [i for i in self.placeholder_ids if i < self.vocab_size]

    def _start(self, config: DictConfig, shares_base: bool) -> None:
        quiet_vllm()
        from vllm import LLM

        host = Host.current(self.device)
        prepare_process(config, host, shares_base)
        arguments = engine_arguments(config, host, shares_base)
        try:
            with preserved_random_state():
                self.llm = LLM(**arguments)
        except ValueError as error:
            rollout = config.rollout
            raise InputError(
                f"vLLM cannot start: {error} (rankwise sets vLLM's memory with "
                f"rollout.kv_cache_gib={rollout.kv_cache_gib} and "
                f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization})"
            ) from error
        # vLLM-private: no method returns the scheduler or the number of steps in flight.
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.scheduler = scheduler if "scheduler_cls" in arguments else None
        self.drafts = speculation.DraftCounter(scheduler)
        self.closed_batch_share = 0.0
        self.recorder = None
        if config.rollout.routing_replay:
            self.recorder = RouteRecorder(self.llm, config)

    def _attach(self, config: DictConfig) -> None:
        """Prepare updates of vLLM's weights, which are marked as invalid."""
        vllm_model = self.model()
        self.adapter = None
        self.lora_request = None
        self.needed = {"base"}  # the parts that must be valid before generate()
        if adapters.has_separate_adapter(config):
            self.adapter = adapters.Adapter(vllm_model, config)
            self.lora_request = adapters.lora_request()
            self.needed = {"base", "adapter"}
        names = vllm_weight_names(Path(config.model.path), config.model.images)
        self.sync = WeightSync(
            self.llm, self.device.type, names, self.adapter, self.drafter, is_quantized(config)
        )
        if read_hf_config(config.model.path).tie_word_embeddings:
            self.sync.untie_output_matrix(vllm_model)
        self.awake = set(PARTS)
        self.valid: set[str] = set()  # the parts that hold the trainer's current weights
        self.asleep_gib: list[float] = []  # memory in use during each sleep

    def _share_weights(self, config: DictConfig) -> dict[str, Tensor] | None:
        """Return views of vLLM's base weights for the trainer, or None if the layouts differ."""
        try:
            weights = self.adapter.base_weights(getattr(torch, config.engine.compute_dtype))
        except adapters.LayoutError as error:
            if config.rollout.share_base == "always":
                raise InputError(f"rollout.share_base=always: {error}") from error
            print_once(
                f"rollout.share_base: {error}, so the trainer has its own copy of the frozen "
                "weights"
            )
            return None
        num_gib = sum(weight.nbytes for weight in weights.values()) / 2**30
        print_once(
            f"vLLM and the trainer share the frozen weights, which saves {num_gib:.3g} GiB on each "
            "rank"
        )
        self.adapter.register()
        self.valid = {"base"}  # the trainer will read the model's files into these tensors
        return weights

    def _report_copy_of_base(self, config: DictConfig, shares_base: bool) -> None:
        if self.adapter and not shares_base and config.rollout.share_base == "auto":
            obstacle = adapters.sharing_obstacle(config, dist.get_world_size())
            print_once(
                f"rollout.share_base: {obstacle}, so vLLM has its own copy of the frozen weights"
            )

    def _make_memory(self) -> CpuMemory | SharedMemory | OwnMemory:
        if self.device.type == "cpu":
            return CpuMemory()
        if self.shared_weights is not None:
            return SharedMemory(self.llm)
        # Level 2 drops the weights, which are updated before each use. It also drops a drafter's
        # buffers, which are not updated, so MTP needs level 1. Ascend supports only level 1.
        level = 1 if self.device.type == "npu" or self.drafter == "mtp" else 2
        return OwnMemory(self.llm, self.adapter, self.device.type, level)

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        sampling: DictConfig,
        image_prompts: Sequence[ImagePrompt] | None = None,
    ) -> tuple[Batch, Tensor]:
        """Generate one response to each prompt; it depends only on the prompt and the seed.

        All ranks of a replica must pass the same arguments.

        Args:
            sampling: temperature (0: greedy), top_p, top_k (-1: all), min_p, max_tokens, and stop
                (strings).
            image_prompts: The prompts with their images. Either all ranks pass them, or none does.

        Returns:
            The batch of prompts and responses, and bool [n], True for responses that were cut off
            at max_tokens. The batch has the fields

            * loss_mask, fp32 [T]: 1 for tokens of responses, including the token that ends them;
            * rollout_log_probs, fp32 [T]: under the distribution that tokens were sampled from,
              i.e. after temperature, top_p etc.;
            * candidate_ids, int32 [T, top_k + NUM_TIES], if top_k is set: the token ids that each
              token was sampled from (see Batch);
            * routed_experts [T, L, k], with rollout.routing_replay: see engines/model/routes.py.

            A response of a vision-language model may end with the placeholder of an image. The
            trainer must replace it with another token in the model's input.

        Raises:
            RuntimeError: vLLM is asleep, or its weights are not the trainer's.
            InputError: On any rank; see `enqueue_image_prompts`. Raised on all ranks.
        """
        self._check_ready("generate()")
        params = [self.sampling_params(sampling, seed) for seed in seeds]
        num_candidates = count_candidates(sampling, self.vocab_size)
        responses = Responses(len(prompts), sampling.max_tokens, num_candidates)
        self.drafts.counts.zero_()
        with preserved_random_state():
            truncated = self.fill(responses, prompts, params, image_prompts)
        return responses.batch(prompts), truncated

    def sampling_params(self, sampling: DictConfig | RequestSampling, seed: int):
        """Return vLLM's SamplingParams for one request of generate()."""
        return sampling_params(sampling, seed, self.stop_token_ids, self.vocab_size)

    def fill(
        self,
        responses: Responses,
        prompts: Sequence[list[int]],
        params: list,
        image_prompts: Sequence[ImagePrompt] | None = None,
    ) -> Tensor:
        """Generate one response per prompt into `responses`.

        Args:
            params: vLLM's SamplingParams of each request.

        Returns:
            bool [n], True for responses that were cut off at max_tokens.
        """
        is_closed_batch = self.begin_batch(responses, params)
        request_ids = self.enqueue(prompts, params, image_prompts)
        reasons, _ = step_requests(
            self.llm.llm_engine,
            request_ids,
            responses,
            is_closed_batch,
            progress_label=self.progress_label,
        )
        self.end_batch(is_closed_batch)
        if self.recorder:
            lengths = [len(prompt) for prompt in prompts] + responses.lengths
            responses.routes = self.recorder.take_all(request_ids, lengths)
        is_truncated = [reasons[i] == "length" for i in range(len(prompts))]
        return torch.tensor(is_truncated, dtype=torch.bool)

    def begin_batch(self, responses: Responses, params: Sequence = ()) -> bool:
        """Return whether the scheduler for closed batches takes the next requests.

        It then appends their tokens to `responses` until end_batch().

        Args:
            params: vLLM's SamplingParams of the requests that are known already.
        """
        # vLLM searches for stop strings after every token, so there is nothing to be gained.
        has_stop_strings = any(request_params.stop for request_params in params)
        if self.scheduler is None or has_stop_strings:
            return False
        return self.scheduler.begin(responses)

    def end_batch(self, is_closed_batch: bool) -> None:
        """Leave everything to vLLM's own scheduler again, and record the share of its steps."""
        self.closed_batch_share = self.scheduler.end() if is_closed_batch else 0.0

    def enqueue(
        self,
        prompts: Sequence[list[int]],
        params: list,
        image_prompts: Sequence[ImagePrompt] | None = None,
    ) -> list[str]:
        """Give requests to vLLM, and return their ids. The arguments are as for fill()."""
        if image_prompts is None:
            if not prompts:
                return []
            return self.llm.enqueue(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                params,
                lora_request=self.lora_request,
                use_tqdm=False,
            )
        arguments = (self.llm, prompts, image_prompts, params, self.placeholder_ids)
        return on_all_ranks(enqueue_image_prompts, *arguments)

    @property
    def progress_label(self) -> str:
        """The text after "generate" in the line that shows the progress."""
        return f" (vLLM 1 of {self.num_replicas})" if self.num_replicas > 1 else ""

    def log_probs(self, batch: Batch, temperature: float) -> Tensor:
        """Return the log-probabilities of the tokens whose loss_mask is not 0: fp32 [tokens].

        Each token needs a request of its own, with all earlier tokens as the prompt. So use this
        only for a few short sequences.

        Raises:
            RuntimeError: vLLM is asleep, or its weights are not the trainer's.
        """
        self._check_ready("log_probs()")
        with preserved_random_state():
            log_probs = next_token_log_probs(self.llm, batch, temperature, self.lora_request)
        if self.recorder:
            self.recorder.forget()
        return log_probs

    def _check_ready(self, call: str) -> None:
        """Raise RuntimeError unless all memory is awake and holds the trainer's weights."""
        if self.awake == set(PARTS) and self.is_current:
            return
        awake = " and ".join(sorted(self.awake)) or "nothing"
        invalid = " and ".join(sorted(self.needed - self.valid))
        state = f"{invalid} not valid" if invalid else "weights valid"
        raise RuntimeError(
            f"{call} with {awake} awake and {state}: call wake('weights'), update the weights, and "
            "then call wake('kv_cache')"
        )

    def model(self) -> torch.nn.Module:
        """Return vLLM's model on this rank."""
        return self.modules()[0]

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that a profiler may hook, like Engine.modules()."""
        return self.llm.apply_model(lambda model: model)

    def coordinates(self) -> dict:
        """Return this rank's coordinates in the parallel layout, like Engine.coordinates()."""
        return {
            "dp": [self.replica, self.num_replicas],
            "cp": [0, 1],
            "tp": [self.tp_rank, self.tp_size],
            "pp": [0, 1],
            "first_layers": [0],
        }

    def padding(self) -> None:
        """Return None, as Engine.padding() does if padding is not known."""

    # -- weights ----------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether vLLM has the trainer's current weights, updated since the last sleep."""
        return self.valid == self.needed

    @property
    def has_base(self) -> bool:
        """Whether the weights are valid, apart from those of a separate adapter."""
        return "base" in self.valid

    def update_weights(self, weights: NamedWeights) -> None:
        """Copy all weights into vLLM. Called by all ranks together.

        With a separate adapter, these are the base's weights, and update_adapter() must follow.

        Args:
            weights: Yields pairs (Hugging Face name, full tensor).

        Raises:
            RuntimeError: The weights are asleep, in which case vLLM would silently write to other
                memory, or vLLM and the trainer share the weights.
        """
        if self.shared_weights is not None:
            raise RuntimeError(
                "update_weights() while vLLM and the trainer share the weights: do not call it"
            )
        if "weights" not in self.awake:
            raise RuntimeError(
                "update_weights() while the weights are asleep: call wake('weights') first"
            )
        self.valid = set()
        self.memory.forget_host_copies()
        self.sync.load(weights)
        self.valid = {"base"}

    def update_adapter(self, adapter: NamedWeights) -> None:
        """Copy the adapter's matrices into vLLM. Called by all ranks together.

        Args:
            adapter: As yielded by Engine.export_adapter().

        Raises:
            RuntimeError: The weights are asleep, or the base is not valid.
        """
        if "weights" not in self.awake or not self.has_base:
            raise RuntimeError(
                "update_adapter() without a valid base: call wake('weights') and update_weights() "
                "first"
            )
        self.valid = {"base"}
        self.adapter.update(dict(adapter))
        self.llm.reset_prefix_cache()
        self.valid = {"base", "adapter"}

    # -- sleeping and waking ----------------------------------------------------------------------

    def sleep(self) -> dict[str, float]:
        """Free the memory of the KV cache and, unless the trainer shares them, of the weights.

        On a CPU no memory is freed, but generate() still raises an error until wake() is called.
        The base of a separate adapter stays valid. Warns if more memory is in use than during
        earlier sleeps.

        Returns:
            rollout/closed_batch: The fraction of steps of the last generate() that were scheduled
                by the scheduler for closed batches.
            perf/memory_awake_gib, perf/memory_asleep_gib: The memory in use on the device by all
                processes, before and after. Not on a CPU.
        """
        metrics = {"rollout/closed_batch": self.closed_batch_share}
        awake_gib = used_gib(self.device)
        keeps_base = self.adapter is not None and bool(self.valid)
        if self.awake:
            self.memory.free(keep_weights=keeps_base)
        if self.recorder:
            self.recorder.slot_routes.free()
        self.awake = set()
        self.valid = self.valid & {"base"} if self.adapter else set()
        asleep_gib = used_gib(self.device)
        if asleep_gib is not None:
            self._check_growth(asleep_gib)
            metrics["perf/memory_awake_gib"] = awake_gib
            metrics["perf/memory_asleep_gib"] = asleep_gib
        return metrics

    def _check_growth(self, asleep_gib: float) -> None:
        self.asleep_gib.append(asleep_gib)
        if len(self.asleep_gib) <= SETTLED_ROUND:
            return
        settled_gib = self.asleep_gib[SETTLED_ROUND]
        if asleep_gib > settled_gib + MAX_GROWTH_GIB:
            warnings.warn(
                f"{asleep_gib:.1f} GiB are in use on the device while vLLM sleeps, up from "
                f"{settled_gib:.1f} GiB in round {SETTLED_ROUND + 1}",
                stacklevel=3,
            )

    def wake(self, part: str) -> None:
        """Restore the memory of the "weights" or, after their update, of the "kv_cache".

        The contents are lost, except for the base of a separate adapter.

        Raises:
            RuntimeError: The part is unknown, or it is the KV cache but the weights are not valid.
        """
        if part not in PARTS:
            raise RuntimeError(f"wake({part!r}): the part must be 'weights' or 'kv_cache'")
        if part == "kv_cache" and not self.is_current:
            raise RuntimeError(
                "wake('kv_cache') before the weights were updated: call wake('weights'), then "
                "update_weights(), then this"
            )
        if part not in self.awake:
            self.memory.restore(part, are_weights_valid=bool(self.valid))
        if part == "kv_cache" and self.recorder:
            self.recorder.slot_routes.allocate()
        self.awake.add(part)

    def shutdown(self) -> None:
        """Shut down vLLM, which also destroys the default process group.

        Wakes vLLM first, since CUDA cannot free memory that is asleep.
        """
        for part in PARTS:
            if part not in self.awake:
                self.memory.restore(part, are_weights_valid=bool(self.valid))
        # vLLM-private: LLM has no method that shuts it down.
        self.llm.llm_engine.engine_core.shutdown()
