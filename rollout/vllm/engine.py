"""vLLM in this process: generates on the trainer's own weights and gives its memory back while training.

The order of one round; each step is an error at any other time:
    wake("weights") -> update_weights(...) -> wake("kv_cache") -> generate(...) -> sleep()
With model.lora and merge=false, update_adapter(...) comes after update_weights(...), which is needed once: the base stays.
"""

import hashlib
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from config import InputError
from data.batching.packing import Batch
from engines.memory import CPU_KV_CACHE_GIB, max_num_seqs
from engines.model import mtp
from engines.model.experts import num_chosen
from engines.model.hf import RECURRENT, layer_configs, read_hf_config
from engines.parallel.device import capacity
from rollout.responses import Responses
from rollout.vllm import adapters, cpu, images, speculation
from rollout.vllm.names import arguments_of_kind, names_in_vllm

PREFILL_TOKENS = 8192  # of prompts, in one forward pass
TIES = 8  # words that may be as likely as the last of the top_k, and are kept with it
SCHEDULED = ("0.25.1", "0.32.0")  # versions of vLLM that rollout/vllm/scheduler.py was tested with
MAX_GROWTH_GIB = 1.0


class Rollout:
    """One replica of vLLM for every rollout.tensor_parallel_size neighbouring ranks, all of which get its results.

    replica, num_replicas  the replica of this rank, and how many there are;  tp_rank  this rank's place in its replica
    base                   the weights of model.path as views of vLLM's tensors, where the trainer is to use them as its own frozen
                           ones (and to read the files into them): {name in the files: tensor}; else None
    """

    def __init__(self, config: DictConfig, device: torch.device):
        """Start vLLM with weights that are not valid yet, asleep.

        Raises InputError when this many ranks, or the memory, cannot hold it.
        """
        rollout = config.rollout
        check(config, dist.get_world_size())
        self.device, self.drafter, num_drafted = (
            device,
            mtp.drafter(config),
            mtp.num_drafted(config),
        )
        tp = rollout.tensor_parallel_size
        self.replica, self.num_replicas = dist.get_rank() // tp, dist.get_world_size() // tp
        self.tp_rank, self.tp_size = dist.get_rank() % tp, tp
        whole = read_hf_config(
            config.model.path
        )  # a key that config.json lacks has its class's default
        self.tied, hf_config = whole.tie_word_embeddings, whole.get_text_config()
        self.vocab_size, self.names = (
            hf_config.vocab_size,
            names_in_vllm(Path(config.model.path), config.model.images),
        )
        # The trainer puts features in place of a placeholder. Where the model says one, the response ends, so that nothing follows
        # from it; were they forbidden, the log-probabilities of all other words would not be the trainer's.
        self.placeholders = images.placeholder_ids(whole) if config.model.images else []
        self.stop_ids = stop_token_ids(Path(config.model.path)) + [
            i for i in self.placeholders if i < self.vocab_size
        ]
        # What is pushed before every use may be dropped, with level 2, but for buffers of a drafter; Ascend has level 1 only.
        self.sleep_level = 1 if device.type == "npu" or self.drafter == "mtp" else 2
        self.awake, self.asleep_gib, self.own_steps = {"weights", "kv_cache"}, [], 0.0
        swapped, shared = (
            adapters.are_swapped(config),
            adapters.is_shared(config, dist.get_world_size()),
        )
        self.needed, self.valid = (
            {"base", "adapter"} if swapped else {"base"},
            set(),
        )  # valid: now the trainer's
        self.host_copies: dict[int, Tensor] = {}

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, SamplingParams, __version__

        self.SamplingParams, version = SamplingParams, __version__.partition("+")[0]
        # A tied output matrix keeps a packed copy of old weights on a CPU: untie it, and send both, if they are not the trainer's.
        arguments = model_arguments(config, self.tied and shared) | (
            adapters.arguments(config) if swapped else {}
        )
        if shared and device.type == "cpu":
            adapters.keep_plain_weights()
        options = {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": True,
        }
        if device.type == "cpu":
            options = {
                "skip_mm_profiling": True
            }  # of the memory for images, which sets nothing here, and takes 14 s
            cpu.free_shared_memory(range(self.replica * tp, (self.replica + 1) * tp), self.tp_rank)
        elif num_chosen(hf_config):
            options["moe_backend"] = (
                "triton"  # others lay experts out anew, which update_weights does not
            )
            if version == "0.25.1" and self.drafter not in (
                "ngram",
                "suffix",
            ):  # else it has a faster model runner,
                os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # but not for all by default
        if RECURRENT & set(getattr(hf_config, "layer_types", None) or ()):
            options["enable_prefix_caching"] = (
                False  # their states are cached only where prompts are cut into chunks
            )
        num_seqs = max_num_seqs(config, dist.get_world_size(), capacity(device))
        eager = rollout.enforce_eager or device.type == "cpu"
        if not eager:  # left to itself vLLM stops at 512, and larger batches have none
            options["compilation_config"] = {
                "max_cudagraph_capture_size": speculation.graph_tokens(num_seqs, num_drafted)
            }
            show_graphs()
        if self.drafter:
            options["speculative_config"] = speculation.start(config, version, device.type)
        if version in SCHEDULED:
            from rollout.vllm.scheduler import ClosedBatchScheduler, skip_ranks

            if not self.drafter:
                options["scheduler_cls"] = ClosedBatchScheduler
            if device.type == "cuda":
                skip_ranks()
        else:
            warnings.warn(
                f"rollout/vllm/scheduler.py was tested with vLLM {' and '.join(SCHEDULED)}, this is {version}: its own "
                "scheduler is used, which takes up to three times as long with small models",
                stacklevel=2,
            )
        kv_cache_gib = rollout.kv_cache_gib or (CPU_KV_CACHE_GIB if device.type == "cpu" else None)
        if kv_cache_gib:
            options["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        try:
            with untouched_random_state():
                self.llm = LLM(
                    **arguments,
                    distributed_executor_backend="external_launcher",
                    tensor_parallel_size=tp,
                    load_format="dummy",
                    max_num_seqs=num_seqs,
                    # A prompt cut into chunks draws from its request's generator too early; on a CPU that is a crash.
                    enable_chunked_prefill=False,
                    enforce_eager=eager,
                    max_num_batched_tokens=max(
                        PREFILL_TOKENS, arguments["max_model_len"], num_seqs * (1 + num_drafted)
                    ),
                    **options,
                )
        except ValueError as error:
            raise InputError(f"vLLM cannot start: {error}") from error
        # Some families are tied whatever hf_overrides say, and have no output matrix to send.
        self.tied = self.tied and any(
            name.endswith("lm_head") for name, _ in self.modules()[0].named_modules()
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.drafts = speculation.Drafts(scheduler)
        self.scheduler = scheduler if "scheduler_cls" in options else None
        self.adapter = adapters.Adapter(self.modules()[0], config) if swapped else None
        self.base = self._share_base(config) if shared else None
        if swapped and not shared and rollout.share_base == "auto":
            reason = adapters.why_not_shared(config, dist.get_world_size())
            self._say(f"rollout.share_base: {reason}, so vLLM has a copy of the frozen weights")
        self.request = adapters.request() if swapped else None
        self.sleep()

    def _share_base(self, config: DictConfig) -> dict[str, Tensor] | None:
        base = self.adapter.base(config)
        if isinstance(base, str):
            if config.rollout.share_base == "always":
                raise InputError(f"rollout.share_base=always: {base}")
            self._say(
                f"rollout.share_base: {base}, so the trainer has a copy of the frozen weights"
            )
            return None
        saved = sum(x.nbytes for x in base.values()) / 2**30
        self._say(
            f"vLLM and the trainer share the frozen weights, which saves {saved:.3g} GiB on each rank"
        )
        self.adapter.register()
        self.valid = {"base"}  # once the trainer has read the files into them
        return base

    # -- generating -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        sampling: DictConfig,
        shown: Sequence[images.Shown] | None = None,
    ) -> tuple[Batch, Tensor]:
        """One response to each prompt, each from its own seed, whatever else is in the batch.

        Ranks of one replica must pass the same arguments. sampling: temperature (0: greedy), top_p, top_k (-1: all),
        min_p, max_tokens, stop (strings). shown: the prompts with their images, where there are any, and then on all ranks.
        Returns (batch, truncated [n] bool): prompts and responses end to end, with the fields loss_mask (1 on the
        response, its end token included) and rollout_log_probs, of the distribution sampled from (temperature, top_p, ...
        applied), both fp32, and where top_k bounds their number the words that each token was drawn from, kept_words int32
        [T, top_k + TIES] (see Batch); truncated where max_tokens ended the response. Of a model of images a response may end with
        a placeholder of one, which the trainer has to feed as another word.
        Raises RuntimeError while asleep, or when vLLM's weights are not the trainer's, and InputError as images.enqueue() does.
        """
        self._check_ready("generate()")
        responses = Responses(len(prompts), sampling.max_tokens, self._num_kept(sampling))
        params = [self._params(sampling, seed) for seed in seeds]
        self.drafts.counts.zero_()
        with untouched_random_state():
            truncated = self._run(prompts, params, responses, shown)
        return responses.batch(prompts), truncated

    def log_probs(self, batch: Batch, temperature: float) -> Tensor:
        """[asked tokens] fp32: the log-probabilities of the tokens of short sequences whose fields["loss_mask"] is not 0. Raises
        RuntimeError as generate() does."""
        self._check_ready("log_probs()")
        prompts, params, asked = [], [], []
        for ids, mask in zip(
            *(x.split(batch.lengths) for x in (batch.input_ids, batch.fields["loss_mask"]))
        ):
            for place in mask.nonzero().flatten().tolist():
                prompts.append({"prompt_token_ids": ids[:place].tolist()})
                asked.append(int(ids[place]))
                params.append(
                    self.SamplingParams(
                        temperature=temperature,
                        max_tokens=1,
                        seed=0,
                        detokenize=False,
                        logprob_token_ids=asked[-1:],
                    )
                )
        with untouched_random_state():
            outputs = self.llm.generate(prompts, params, lora_request=self.request, use_tqdm=False)
        return torch.tensor(
            [output.outputs[0].logprobs[0][token].logprob for output, token in zip(outputs, asked)]
        )

    def _check_ready(self, what: str) -> None:
        if self.awake != {"weights", "kv_cache"} or not self.is_current:
            awake = " and ".join(sorted(self.awake)) or "nothing"
            valid = (
                "weights valid"
                if self.is_current
                else f"{' and '.join(sorted(self.needed - self.valid))} not valid"
            )
            raise RuntimeError(f"{what} with {awake} awake and {valid}: wake, update, wake first")

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: list,
        responses: Responses,
        shown: Sequence | None,
    ) -> Tensor:
        """Fill `responses`; [n] bool, whether max_tokens ended each. On a terminal, rank 0 shows in one line how far its
        replica is, which disappears at the end."""
        replicas = f" (vLLM 1 of {self.num_replicas})" if self.num_replicas > 1 else ""
        # A stop string has to be looked for in text, token by token.
        in_arrays = (
            self.scheduler is not None
            and not any(p.stop for p in params)
            and self.scheduler.begin(responses)
        )
        if shown is None:
            self.llm.enqueue(
                [{"prompt_token_ids": p} for p in prompts],
                params,
                lora_request=self.request,
                use_tqdm=False,
            )
        else:
            images.enqueue(self.llm, prompts, shown, params, self.placeholders)
        outputs, num_tokens, engine = {}, 0, self.llm.llm_engine
        with tqdm(
            total=len(prompts),
            leave=False,
            dynamic_ncols=True,
            disable=dist.get_rank() != 0 or None,  # None: no terminal
            bar_format=f"generate{replicas} |{{bar:20}}| {{n_fmt}}/{{total_fmt}} responses{{postfix}}",
        ) as bar:
            start = time.perf_counter()
            while engine.has_unfinished_requests():
                finished = {
                    int(output.request_id): output.outputs[0]
                    for output in engine.step()
                    if output.finished
                }
                outputs |= finished
                num_tokens += sum(len(output.token_ids) for output in finished.values())
                speed = (responses.lengths.sum() if in_arrays else num_tokens) / (
                    time.perf_counter() - start
                )
                bar.set_postfix_str(f"{tqdm.format_sizeof(speed)} tokens/s", refresh=False)
                bar.update(len(finished))
        outputs, self.own_steps = [outputs[number] for number in sorted(outputs)], 0.0
        if in_arrays:
            self.own_steps = self.scheduler.end()
        else:
            for row, output in enumerate(outputs):
                responses.set(
                    row,
                    *(
                        np.array(x).reshape(len(output.token_ids), -1)
                        for x in (output.logprobs.token_ids, output.logprobs.logprobs)
                    ),
                )
        return torch.tensor(
            [output.finish_reason == "length" for output in outputs], dtype=torch.bool
        )

    def modules(self) -> list[torch.nn.Module]:
        """vLLM's model on this rank."""
        return self.llm.apply_model(lambda model: model)

    def coordinates(self) -> dict:
        """As Engine.coordinates()."""
        return {
            "dp": [self.replica, self.num_replicas],
            "cp": [0, 1],
            "tp": [self.tp_rank, self.tp_size],
            "pp": [0, 1],
            "first_layers": [0],
        }

    def _num_kept(self, sampling: DictConfig) -> int:
        """How many of the likeliest words to ask for, so that all are among them which sampling keeps; 0 where it keeps
        any number, or is greedy."""
        return (
            0
            if sampling.temperature == 0 or sampling.top_k <= 0
            else min(sampling.top_k + TIES, self.vocab_size)
        )

    def _params(self, sampling: DictConfig, seed: int):
        greedy = sampling.temperature == 0
        return self.SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else max(sampling.top_k, 0),
            min_p=0.0 if greedy else sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            stop_token_ids=self.stop_ids,
            seed=seed,
            logprobs=self._num_kept(sampling),
            flat_logprobs=True,
            # A stop string may hold special tokens.
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )

    # -- weights and memory -------------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether vLLM's weights are the trainer's, as of the last update and since it last slept."""
        return self.valid == self.needed

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over all weights, (Hugging Face name, full tensor) one after another; called by all ranks together. With an
        adapter they are those of the base alone, and it has to be updated after them.

        Raises RuntimeError while the weights' memory is asleep, as vLLM would write past it in silence, and where it is the
        trainer's own.
        """
        if self.base is not None:
            raise RuntimeError(
                "update_weights() of weights that are the trainer's own: there is nothing to send"
            )
        if "weights" not in self.awake:
            raise RuntimeError("update_weights() while the weights sleep: wake('weights') first")
        self.valid, self.host_copies = set(), {}
        of_drafter: list[tuple[str, Tensor]] = []
        weights = speculation.noting(self._in_vllm(weights), of_drafter)
        with self.adapter.unwrapped() if self.adapter else nullcontext():
            if self.device.type == "cuda":  # in place, 10 times as fast as reload_weights
                self.llm.apply_model(lambda model: model.load_weights(weights) and None)
            else:  # CPU linears are packed once loaded; this unpacks and packs them again
                if self.device.type == "cpu":
                    self.llm.apply_model(cpu.forget_packed_experts)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        for _ in weights:  # collectives that other ranks wait for, should vLLM have stopped early
            pass
        if self.drafter == "mtp":
            speculation.update(self.llm, of_drafter, self.device.type)
        if self.adapter:
            self.adapter.register()
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()  # the old tower's features, by image
        self.valid = {"base"}

    def update_adapter(self, adapter: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the adapter as Engine.export_adapter() gives it; called by all ranks together.

        Raises RuntimeError while the weights' memory is asleep, or holds no base.
        """
        if "weights" not in self.awake or "base" not in self.valid:
            raise RuntimeError(
                "update_adapter() before the base is there: wake('weights'), update_weights first"
            )
        self.valid = {"base"}
        self.adapter.update(dict(adapter))
        self.llm.reset_prefix_cache()
        self.valid = {"base", "adapter"}

    def _in_vllm(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in weights:
            if (
                name := self.names.get(name, name)
            ) is None:  # a vision tower's, which this vLLM does without
                continue
            yield name, tensor
            if self.tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", tensor

    def sleep(self) -> dict[str, float]:
        """Give up the memory of KV cache and weights; of the KV cache alone, where the weights are the trainer's, too. On a CPU
        nothing moves, but generate() is refused all the same. A base beside an adapter stays valid.

        Returns rollout/closed_batch, the share of the last generate()'s steps that rollout/vllm/scheduler.py made itself; and
        perf/memory_awake_gib and perf/memory_asleep_gib, the memory in use on the device before and after, by any process, but
        for a CPU. Warns when the memory in use while asleep grows.
        """
        awake = used_gib(self.device)
        if self.awake and self.device.type != "cpu":
            self._give_up()
        self.awake, self.valid = set(), self.valid & {"base"} if self.adapter else set()
        asleep = used_gib(self.device)
        metrics = {"rollout/closed_batch": self.own_steps}
        if asleep is None:
            return metrics
        self.asleep_gib.append(asleep)
        settled = self.asleep_gib[2:3]  # the first rounds still bring new buffers
        if settled and asleep > settled[0] + MAX_GROWTH_GIB:
            warnings.warn(
                f"{asleep:.1f} GiB are in use while vLLM sleeps, {settled[0]:.1f} in its third round",
                stacklevel=2,
            )
        return metrics | {"perf/memory_awake_gib": awake, "perf/memory_asleep_gib": asleep}

    def _give_up(self) -> None:
        if self.base is not None:
            adapters.drop_kv_cache()
        elif self.host_copies:
            self.llm.sleep(level=2)
            adapters.wake_from(self.host_copies)
        else:  # level 1 copies the weights to host memory
            self.llm.sleep(level=1 if self.adapter and self.valid else self.sleep_level)

    def wake(self, part: str) -> None:
        """Take back the memory of "weights", whose content is to be pushed then (but for a base that stayed valid), or after that
        of the "kv_cache"."""
        if part not in ("weights", "kv_cache") or part == "kv_cache" and not self.is_current:
            raise RuntimeError(
                f"wake({part!r}) before the weights were updated: wake('weights'), update_weights, then this"
            )
        if part not in self.awake and self.device.type != "cpu":
            self._take_back(part)
        self.awake.add(part)

    def _take_back(self, part: str) -> None:
        if self.base is None:
            if part == "weights" and self.valid and self.device.type == "cuda":
                self.host_copies = adapters.host_copies()
            self.llm.wake_up(tags=[part])
            if self.adapter:
                self.adapter.forget()
        elif part == "kv_cache":
            self.llm.collective_rpc("wake_up", kwargs={"tags": [part]})

    def shutdown(self) -> None:
        """End vLLM and, with it, the process group. It wakes for that: CUDA cannot free memory that is asleep."""
        for part in {"weights", "kv_cache"} - self.awake if self.device.type != "cpu" else ():
            self._take_back(part)
        self.llm.llm_engine.engine_core.shutdown()

    def _say(self, what: str) -> None:
        if dist.get_rank() == 0:
            print(what, flush=True)


def check(config: DictConfig, world_size: int) -> None:
    """Raise InputError for what vLLM would refuse only after models have been loaded."""
    tp = config.rollout.tensor_parallel_size
    if world_size % tp:
        raise InputError(
            f"rollout.tensor_parallel_size={tp} does not divide the {world_size} ranks"
        )
    for layer in layer_configs(read_hf_config(config.model.path).get_text_config()):
        if (heads := getattr(layer, "num_attention_heads", tp)) % tp:
            raise InputError(
                f"rollout.tensor_parallel_size={tp} does not divide the model's {heads} attention heads"
            )
    images.check(config)
    adapters.check(config, world_size)
    speculation.check(config)


def model_arguments(config: DictConfig, tied: bool = False) -> dict:
    """What vLLM is told of the model."""
    longest = config.data.max_prompt_length + max(
        config.rollout.max_tokens, config.validation.max_tokens
    )
    return {
        "model": config.model.path,
        "max_model_len": longest,
        "dtype": config.engine.compute_dtype,
        # Only a stop string needs text. Ids that end a response come from the model's files.
        "skip_tokenizer_init": not (config.rollout.stop or config.validation.stop),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(s.top_k + TIES for s in (config.rollout, config.validation)),
        "seed": config.trainer.seed % 2**32,
        **arguments_of_kind(read_hf_config(config.model.path), tied, config.model.images),
    }


def check_model(config: DictConfig) -> None:
    """Raise InputError for a model, or a length, that vLLM refuses. Importing vLLM takes seconds."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import ModelConfig

    arguments = model_arguments(config)
    if adapters.are_swapped(config):
        adapters.arguments(config)
    images.check_packages(config)
    try:
        ModelConfig(**arguments)
    except ValueError as error:
        said = " ".join(str(error).split("Value error, ")[-1].split()).split(" [type=")[0]
        raise InputError(
            f"vLLM refuses model.path={config.model.path} with data.max_prompt_length + max_tokens = "
            f"{arguments['max_model_len']}: {said}"
        ) from error


def stop_token_ids(path: Path) -> list[int]:
    """The ids that end a response: eos_token_id of generation_config.json and of config.json."""
    ids = set()
    for name in ("generation_config.json", "config.json"):
        found = (
            json.loads((path / name).read_text()).get("eos_token_id")
            if (path / name).is_file()
            else None
        )
        ids |= set(found) if isinstance(found, list) else {found} - {None}
    if not ids:
        raise InputError(
            f"model.path={path}: neither generation_config.json nor config.json has an eos_token_id"
        )
    return sorted(ids)


def request_seed(*numbers: int) -> int:
    """A seed for one response, from e.g. (trainer.seed, step, prompt, sample); 62 bits of their SHA-256."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 2


@contextmanager
def untouched_random_state():
    """vLLM seeds and draws from every global generator, even when each request has a seed of its own."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.get_device_module().set_rng_state(device)


def used_gib(device: torch.device) -> float | None:
    """GiB in use on the device, of all allocators (torch's own does not see vLLM's); None on a CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module().mem_get_info()
    return (total - free) / 2**30


def show_graphs() -> None:
    """Let rank 0 print what vLLM says of the time and memory of its CUDA graphs."""
    for name in ("gpu.model_runner", "gpu_model_runner") if dist.get_rank() == 0 else ():
        logger, handler = (
            logging.getLogger(f"vllm.v1.worker.{name}"),
            logging.StreamHandler(sys.stdout),
        )
        logger.setLevel(logging.INFO)
        handler.addFilter(lambda record: "Graph capturing finished" in record.msg)
        handler.setFormatter(logging.Formatter("vLLM: %(message)s"))
        logger.addHandler(handler)
