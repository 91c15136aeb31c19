"""vLLM's scheduler for a closed batch: all prompts are known, and nobody waits for a single response.

Between two events (a request ends, one is admitted, memory is short) every running request gets one more token, and nothing
else changes. So this scheduler works on arrays of all requests: it asks for a block where a request's last one is full,
compares the new tokens with those that end a response, and keeps them in arrays until it ends. Every event is left to
vLLM's own code, which finds the requests of the event as it would have left them. So the results are vLLM's, bit for bit.

Tested with vLLM 0.25.1 (V2 model runner, asynchronous) and 0.32.0 (V1 model runner on a CPU).
"""

from collections import defaultdict
from copy import copy
from itertools import compress

import numpy as np
from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rollout.responses import Responses

VERSION = __version__.partition("+")[0]
# The attributes that limit the number of running requests.
MAX_RUNNING = {
    "0.25.1": ("max_num_running_reqs",),
    "0.32.0": ("max_num_running_reqs", "max_num_active_reqs"),
}[VERSION]
COUNTS_IN_FLIGHT = (
    VERSION == "0.32.0"
)  # the tokens that a request's steps in flight compute, its prompt's too


def skip_ranks() -> None:
    """Let vLLM's sampler on CUDA not count how many words are likelier than the drawn one, which nobody here asks. It reads all
    logits for that, and takes a third of the time of log-probabilities."""
    from vllm.v1.worker.gpu.sample import logprob

    logprob._ranks_kernel = defaultdict(
        lambda: lambda *arguments, **options: None
    )  # launched as kernel[grid](...)


class ClosedBatchScheduler(AsyncScheduler):
    """vLLM's own, but between begin() and end().

    Each request is a row, numbered in the order in which they are added. For each row:
    prompt    tokens of its prompt
    computed  tokens in the KV cache, those of the steps in flight included
    prefill   tokens of its prompt that the step computes with which it began to run, less one, and
    begun     tokens of its response that were known then
    last      the value of `computed` with which its last token is drawn, if nothing ends it before
    inside    it runs, and only the arrays are kept up to date; else vLLM's own code has it: it waits, was preempted, or ended
    alive     it has not ended
    """

    responses: Responses | None = None

    def begin(self, responses: Responses) -> bool:
        """The next requests are a closed batch, one for each row of `responses`. False where vLLM's own path has to be taken:
        for a model or a feature whose steps differ from each other in more than their tokens."""
        groups = self.kv_cache_config.kv_cache_groups
        if (
            self.use_pp
            or self.num_spec_tokens
            or self.connector
            or len(groups) != 1
            or self.lora_config
            and self.lora_config.max_loras > 1
            or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            or self.requests
        ):
            return False
        n, vocab_size = len(responses.lengths), self.vllm_config.model_config.get_vocab_size()
        self.responses, self.row, self.rows = (
            responses,
            {},
            np.zeros(0, np.int64),
        )  # rows: of self.running
        self.prompt, self.computed, self.prefill, self.begun, self.last = (
            np.zeros(n, np.int64) for _ in range(5)
        )
        self.inside, self.alive, self.ends = (
            np.zeros(n, bool),
            np.arange(n + 1) < n,
            np.zeros(vocab_size, bool),
        )
        self.num_steps = self.num_preempting = 0
        return True

    def end(self) -> float:
        """Back to vLLM's own path. The share of the steps that were not left to it, because memory was short."""
        self.responses = None
        return 1 - self.num_preempting / max(self.num_steps, 1)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.responses is None:
            return
        row, params = (
            self.row.setdefault(request.request_id, len(self.row)),
            request.sampling_params,
        )
        self.prompt[row] = request.num_prompt_tokens
        self.last[row] = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len) - 1
        self.ends[
            [
                token
                for token in (params.eos_token_id, *(params.stop_token_ids or ()))
                if token is not None
            ]
        ] = True

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed: int, num_new: int, budget: int, *args, **more
    ) -> tuple:
        """Let a prompt wait whose images do not fit yet beside those of the steps in flight: vLLM would cut it before them."""
        found = super()._try_schedule_encoder_inputs(
            request, num_computed, num_new, budget, *args, **more
        )
        return found if found[1] == num_new else ([], 0, budget, *([] for _ in found[3:]))

    # -- what the next step computes -------------------------------------------------------------------------------------

    def schedule(self, *args) -> SchedulerOutput:
        if self.responses is None:
            return super().schedule(*args)
        self.num_steps += 1
        goes_on = (
            self.computed[self.rows] < self.last[self.rows]
        )  # else its last token is in flight
        rows = self.rows[goes_on]
        full = np.flatnonzero(self.computed[rows] % self.block_size == 0)
        if len(full) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return self._preempt(*args)
        requests = list(compress(self.running, goes_on.tolist()))
        blocks = [None] * len(requests)
        for i in full.tolist():
            requests[i].num_computed_tokens = int(self.computed[rows[i]])
            blocks[i] = self.kv_cache_manager.allocate_slots(requests[i], 1).get_block_ids(
                allow_none=True
            )

        output = self._admit(len(requests), *args)
        ids, computed, cached = (
            [r.request_id for r in requests],
            self.computed[rows],
            output.scheduled_cached_reqs,
        )
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(ids)
        output.num_scheduled_tokens = dict.fromkeys(ids, 1) | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += len(ids)
        cached.req_ids, cached.new_block_ids = ids + cached.req_ids, blocks + cached.new_block_ids
        cached.num_computed_tokens = computed.tolist() + cached.num_computed_tokens
        cached.num_output_tokens = (
            computed - self.prompt[rows] + 1
        ).tolist() + cached.num_output_tokens
        self.computed[rows] += 1
        return output

    def _admit(self, num_scheduled: int, *args) -> SchedulerOutput:
        """Let vLLM's own code admit requests that wait, into the room that the running ones leave."""
        running, self.running = self.running, []
        for name in MAX_RUNNING:
            setattr(self, name, getattr(self, name) - len(running))
        self.max_num_scheduled_tokens -= num_scheduled
        output = super().schedule(*args)
        self.max_num_scheduled_tokens += num_scheduled
        for name in MAX_RUNNING:
            setattr(self, name, getattr(self, name) + len(running))
        self._enter(self.running)
        self.running = running + self.running
        return output

    def _preempt(self, *args) -> SchedulerOutput:
        """Leave a whole step to vLLM's own code, because there are not enough free blocks."""
        self.num_preempting += 1
        for request, row in zip(self.running, self.rows.tolist()):
            self._catch_up(request, row, self.responses.lengths[row])
        output = super().schedule(*args)
        self.inside[self.rows], self.rows = False, self.rows[:0]
        self._enter(self.running)
        return output

    def _enter(self, requests: list[Request]) -> None:
        rows = np.array([self.row[request.request_id] for request in requests], np.int64)
        self.inside[rows], self.begun[rows] = True, self.responses.lengths[rows]
        self.computed[rows] = [request.num_computed_tokens for request in requests]
        if COUNTS_IN_FLIGHT:
            self.prefill[rows] = [
                request.num_in_flight_tokens - request.num_output_placeholders
                for request in requests
            ]
        self.rows = np.concatenate([self.rows, rows])

    def _catch_up(self, request: Request, row: int, num_tokens: int) -> None:
        """Bring a Request to where vLLM's own code would have it once it knows num_tokens of the response."""
        request.append_output_token_ids(
            self.responses.tokens[row, request.num_output_tokens : num_tokens].tolist()
        )
        request.num_computed_tokens = int(self.computed[row])
        known = request.num_tokens - 1  # the newest token's keys and values are yet to be computed
        request.num_output_placeholders = request.num_computed_tokens - known
        if COUNTS_IN_FLIGHT:
            prefill = int(self.prefill[row]) if num_tokens == self.begun[row] else 0
            request.num_in_flight_tokens = request.num_output_placeholders + prefill
        self.kv_cache_manager.cache_blocks(request, known)

    # -- what a step has drawn -------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict:
        if self.responses is None or not model_output.req_ids:
            return super().update_from_output(scheduler_output, model_output)
        # A step may have begun before its request was known to have ended; with the last of a batch, in the next one.
        rows = np.array([self.row.get(name, -1) for name in model_output.req_ids])
        places = np.flatnonzero(self.alive[rows])
        rows, (token_ids, log_probs) = rows[places], (x[places] for x in model_output.logprobs[:2])
        self.responses.append(rows, token_ids, log_probs)
        num_tokens = self.responses.lengths[rows]
        begun = num_tokens == self.begun[rows] + 1
        for place in places[begun].tolist() if self.max_num_encoder_input_tokens else ():
            self.encoder_cache_manager.free(
                self.requests[model_output.req_ids[place]]
            )  # its images are in the KV cache
        event = (
            self.ends[token_ids[:, 0]]
            | (self.prompt[rows] + num_tokens > self.last[rows])
            | ~self.inside[rows]
        )
        if not event.any():
            return {}
        ids = [model_output.req_ids[place] for place in places[event]]
        rows, num_tokens = rows[event], num_tokens[event]
        for name, row, number in zip(ids, rows.tolist(), num_tokens.tolist()):
            if self.inside[row]:
                self._catch_up(
                    self.requests[name], row, number - 1
                )  # the newest one is vLLM's own code to append
        step, drawn = copy(scheduler_output), copy(model_output)
        step.num_scheduled_tokens, drawn.logprobs = (
            {name: scheduler_output.num_scheduled_tokens[name] for name in ids},
            None,
        )
        outputs = super().update_from_output(step, drawn)
        self.alive[rows] = [name in self.requests for name in ids]
        self.rows = self.rows[self.alive[self.rows]]
        return outputs
