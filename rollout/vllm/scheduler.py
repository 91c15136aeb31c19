"""A faster vLLM scheduler, for batches between begin() and end().

In most steps, every running request gets one more token, and nothing else changes. This scheduler
handles such steps with arrays over all requests: it allocates a new block for each request whose
last block is full, checks whether the new tokens end a response, and stores the tokens.

Everything else is an event: a request ends, a request is admitted, or memory runs short. A request
with stop strings has an event in every step, because vLLM looks for them in the text. Events are
left to vLLM's own code. Before an event, its requests are brought to the state that they would have
in vLLM's own code. So the results are bit-identical to vLLM's.

Python code runs once per step and per event, but not once per token.

vLLM-private: `scheduler_cls` is an option, but vLLM declares that the interface of schedulers is
not public. Every attribute and method of vLLM in this file may change with any release.
"""

from copy import copy
from itertools import compress

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rollout.responses import Responses
from rollout.vllm.versions import SUPPORTED, installed_version

RELEASE = SUPPORTED[installed_version()]

# How much longer a step takes if it also computes prompts, however few, because it cannot use the
# CUDA graphs for decoding. The unit is a step that only decodes. Measured with 0.5B on an H100.
PROMPT_STEP_COST = 1.0


class RequestArrays:
    """The state of all requests of a batch: one row per request.

    Attributes:
        row_of: {request id: row}.
        free_rows: the rows without a request, the next one last. The first requests get the rows 0,
            1, 2, ... in the order of their arrival.
        num_prompt: int64 [n], the number of prompt tokens.
        num_computed: int64 [n], the number of tokens in the KV cache after the steps in flight.
        last_computed: int64 [n], the value of `num_computed` when the step in flight draws the last
            token that the length limits permit.
        num_prefilled: int64 [n], one less than the number of prompt tokens that were computed in
            the step that admitted the request.
        num_known: int64 [n], the number of response tokens that were known before that step.
        has_stop_strings: bool [n], whether every step is an event of the request.
        is_tracked: bool [n], whether the request is running and its state is kept in this row
            rather than in vLLM's Request. False for requests that are waiting, preempted or ended.
        is_alive: bool [n + 1], whether the request has not ended. Row -1 is for requests of earlier
            batches, and is False.
        running: int64 [running], the rows of the scheduler's list of running requests.
    """

    def __init__(self, num_requests: int):
        self.row_of: dict[str, int] = {}
        self.free_rows = list(range(num_requests))[::-1]
        self.num_prompt = np.zeros(num_requests, np.int64)
        self.num_computed = np.zeros(num_requests, np.int64)
        self.last_computed = np.zeros(num_requests, np.int64)
        self.num_prefilled = np.zeros(num_requests, np.int64)
        self.num_known = np.zeros(num_requests, np.int64)
        self.has_stop_strings = np.zeros(num_requests, bool)
        self.is_tracked = np.zeros(num_requests, bool)
        self.is_alive = np.zeros(num_requests + 1, bool)
        self.running = np.zeros(0, np.int64)

    def add(self, request_id: str) -> int:
        """Return the row of a new request."""
        row = self.free_rows.pop()
        self.row_of[request_id] = row
        self.is_alive[row] = True
        return row

    def end(self, rows: list[int]) -> None:
        """Note that the requests in these rows have ended. They keep their rows."""
        self.is_alive[rows] = False
        self.is_tracked[rows] = False
        self.running = self.running[self.is_alive[self.running]]

    def remove(self, request_id: str) -> int:
        """Free the row of a request that has ended, and return it."""
        row = self.row_of.pop(request_id)
        self.free_rows.append(row)
        return row


class ClosedBatchScheduler(AsyncScheduler):
    """vLLM's own scheduler, except between begin() and end().

    Requests may also arrive while others run. take() then frees the row of one that has ended.

    Attributes:
        responses: The responses that the batch's tokens are appended to; None outside of a batch.
        batch: The state of the batch's requests.
        ends_response: bool [vocabulary], whether a token ends a response.
        num_steps: The number of steps of the batch so far.
        num_vllm_steps: The number of steps that were left entirely to vLLM's own code.
        num_admissions: The number of steps that admitted requests.
        num_steps_waited: The number of steps that requests have waited although they could have
            been admitted, summed over the requests and counted from the last admission.
    """

    responses: Responses | None = None

    def begin(self, responses: Responses) -> bool:
        """Declare the next requests to be a batch, at most one for each row of `responses`.

        Returns:
            False if vLLM's own code has to run the batch, because the model or a configured feature
            changes more in each step than the tokens.
        """
        if not self._supports_closed_batches():
            return False
        self.responses = responses
        self.batch = RequestArrays(len(responses.lengths))
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        self.ends_response = np.zeros(vocab_size, bool)
        self.num_steps = 0
        self.num_vllm_steps = 0
        self.num_admissions = 0
        self.num_steps_waited = 0
        return True

    def _supports_closed_batches(self) -> bool:
        groups = self.kv_cache_config.kv_cache_groups
        has_several_adapters = self.lora_config and self.lora_config.max_loras > 1
        is_special = (
            self.use_pp
            or self.num_spec_tokens
            or self.connector
            or has_several_adapters
            or self.requests
        )
        if is_special or len(groups) != 1:
            return False
        return isinstance(groups[0].kv_cache_spec, FullAttentionSpec)

    def end(self) -> float:
        """Leave everything to vLLM's own code again.

        Returns:
            The fraction of the batch's steps that were not left entirely to vLLM's own code.
        """
        self.responses = None
        return 1 - self.num_vllm_steps / max(self.num_steps, 1)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.responses is None:
            return
        batch = self.batch
        row = batch.add(request.request_id)
        batch.num_prompt[row] = request.num_prompt_tokens
        max_length = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        batch.last_computed[row] = max_length - 1
        params = request.sampling_params
        batch.has_stop_strings[row] = bool(params.stop)
        end_tokens = [params.eos_token_id, *(params.stop_token_ids or ())]
        self.ends_response[[token for token in end_tokens if token is not None]] = True

    def take(self, request_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the tokens of a request that has ended, and free its row.

        Returns:
            tokens [k], log_probs [k] and candidates [k, 1 + num_candidates], as in Responses.
        """
        row = self.batch.remove(request_id)
        taken = self.responses.row(row)
        self.responses.lengths[row] = 0
        return taken

    def finish_requests(self, request_ids, *args):
        """Abort requests. Those that have ended already are ignored."""
        finished = super().finish_requests(request_ids, *args)
        if self.responses is not None:
            batch = self.batch
            ended = [row for name, row in batch.row_of.items() if name not in self.requests]
            batch.end(ended)
        return finished

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed: int, num_new: int, budget: int, *args, **options
    ) -> tuple:
        """Make a prompt wait until its images have room besides those of steps in flight.

        vLLM would cut the prompt before the images, but prompts must not be cut into chunks.
        """
        scheduled = super()._try_schedule_encoder_inputs(
            request, num_computed, num_new, budget, *args, **options
        )
        num_schedulable = scheduled[1]
        if num_schedulable == num_new:
            return scheduled
        no_other_inputs = [[] for _ in scheduled[3:]]
        return ([], 0, budget, *no_other_inputs)

    # -- scheduling a step ------------------------------------------------------------------------

    def schedule(self, *args) -> SchedulerOutput:
        if self.responses is None:
            return super().schedule(*args)
        self.num_steps += 1
        batch = self.batch
        # Requests that do not continue are still running, but their last token is in flight.
        continues = batch.num_computed[batch.running] < batch.last_computed[batch.running]
        rows = batch.running[continues]
        num_computed = batch.num_computed[rows]
        needs_block = np.flatnonzero(num_computed % self.block_size == 0)
        if len(needs_block) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return self._leave_step_to_vllm(*args)
        requests = list(compress(self.running, continues.tolist()))
        new_blocks = [None] * len(requests)
        for index in needs_block.tolist():
            new_blocks[index] = self._allocate_block(requests[index], int(num_computed[index]))

        output = self._admit(len(requests), *args)
        request_ids = [request.request_id for request in requests]
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(request_ids)
        output.num_scheduled_tokens = dict.fromkeys(request_ids, 1) | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += len(request_ids)
        num_output = num_computed - batch.num_prompt[rows] + 1
        cached = output.scheduled_cached_reqs
        cached.req_ids = request_ids + cached.req_ids
        cached.new_block_ids = new_blocks + cached.new_block_ids
        cached.num_computed_tokens = num_computed.tolist() + cached.num_computed_tokens
        cached.num_output_tokens = num_output.tolist() + cached.num_output_tokens
        batch.num_computed[rows] += 1
        return output

    def _allocate_block(self, request: Request, num_computed: int):
        """Return the ids of the new block for a request's next token."""
        request.num_computed_tokens = num_computed
        blocks = self.kv_cache_manager.allocate_slots(request, 1)
        return blocks.get_block_ids(allow_none=True)

    def _is_time_to_admit(self, num_scheduled: int) -> bool:
        """Return whether this step is to compute the prompts of waiting requests.

        Such a step takes longer, for all `num_scheduled` requests that it continues. So waiting
        requests gather until the steps that they have lost amount to what their admission costs.
        This keeps the sum of both losses near its minimum, however often requests arrive and
        however short they are.
        """
        num_waiting = self.get_num_unfinished_requests() - len(self.running)
        num_free = self.max_num_running_reqs - len(self.running)
        self.num_steps_waited += min(num_waiting, num_free)
        if self.num_steps_waited < PROMPT_STEP_COST * num_scheduled:
            return False
        self.num_steps_waited = 0
        return True

    def _admit(self, num_scheduled: int, *args) -> SchedulerOutput:
        """Let vLLM's own code admit waiting requests in addition to the running ones.

        While it does so, the running requests are hidden, and vLLM's limits are lowered by them.
        """
        limits = {name: getattr(self, name) for name in RELEASE.running_limits}
        is_time = self._is_time_to_admit(num_scheduled)
        running = self.running
        self.running = []
        for name, limit in limits.items():
            setattr(self, name, limit - len(running) if is_time else 0)
        self.max_num_scheduled_tokens -= num_scheduled
        output = super().schedule(*args)
        self.max_num_scheduled_tokens += num_scheduled
        for name, limit in limits.items():
            setattr(self, name, limit)
        self._track(self.running)
        self.num_admissions += bool(self.running)
        self.running = running + self.running
        return output

    def _leave_step_to_vllm(self, *args) -> SchedulerOutput:
        """Leave a whole step to vLLM's own code, which preempts requests if blocks run out."""
        self.num_vllm_steps += 1
        batch = self.batch
        for request, row in zip(self.running, batch.running.tolist()):
            self._update_request(request, row, self.responses.lengths[row])
        output = super().schedule(*args)
        batch.is_tracked[batch.running] = False
        batch.running = batch.running[:0]
        self._track(self.running)
        return output

    def _track(self, requests: list[Request]) -> None:
        """Start to track requests that vLLM's own code has just scheduled."""
        batch = self.batch
        rows = np.array([batch.row_of[request.request_id] for request in requests], np.int64)
        batch.is_tracked[rows] = True
        batch.num_known[rows] = self.responses.lengths[rows]
        batch.num_computed[rows] = [request.num_computed_tokens for request in requests]
        if RELEASE.counts_tokens_in_flight:
            batch.num_prefilled[rows] = [
                request.num_in_flight_tokens - request.num_output_placeholders
                for request in requests
            ]
        batch.running = np.concatenate([batch.running, rows])

    def _update_request(self, request: Request, row: int, num_tokens: int) -> None:
        """Bring a Request to the state that it would have in vLLM's own code.

        Args:
            num_tokens: The number of response tokens that the Request should contain.
        """
        batch = self.batch
        new_tokens = self.responses.tokens[row, request.num_output_tokens : num_tokens]
        request.append_output_token_ids(new_tokens.tolist())
        request.num_computed_tokens = int(batch.num_computed[row])
        # The keys and values of the newest token have not been computed yet.
        num_cached = request.num_tokens - 1
        request.num_output_placeholders = request.num_computed_tokens - num_cached
        if RELEASE.counts_tokens_in_flight:
            is_first_step_in_flight = num_tokens == batch.num_known[row]
            num_prefilled = int(batch.num_prefilled[row]) if is_first_step_in_flight else 0
            request.num_in_flight_tokens = request.num_output_placeholders + num_prefilled
        self.kv_cache_manager.cache_blocks(request, num_cached)

    # -- processing the output of a step ----------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> dict:
        if self.responses is None or not model_output.req_ids:
            return super().update_from_output(scheduler_output, model_output)
        batch = self.batch
        # The output may include requests that ended after the step was scheduled, even requests of
        # an earlier batch.
        rows = np.array([batch.row_of.get(name, -1) for name in model_output.req_ids])
        positions = np.flatnonzero(batch.is_alive[rows])
        rows = rows[positions]
        token_ids, log_probs = (values[positions] for values in model_output.logprobs[:2])
        self.responses.append(rows, token_ids, log_probs)
        num_tokens = self.responses.lengths[rows]
        if self.max_num_encoder_input_tokens:
            is_first_token = num_tokens == batch.num_known[rows] + 1
            self._free_images(model_output, positions[is_first_token])
        is_event = (
            batch.has_stop_strings[rows]
            | self.ends_response[token_ids[:, 0]]
            | (batch.num_prompt[rows] + num_tokens > batch.last_computed[rows])
            | ~batch.is_tracked[rows]
        )
        if not is_event.any():
            return {}
        event_ids = [model_output.req_ids[i] for i in positions[is_event]]
        event_rows = rows[is_event]
        for name, row, length in zip(event_ids, event_rows.tolist(), num_tokens[is_event].tolist()):
            if batch.is_tracked[row]:
                # vLLM's own code appends the newest token itself.
                self._update_request(self.requests[name], row, length - 1)
        outputs = self._leave_events_to_vllm(scheduler_output, model_output, event_ids)
        ended = [batch.row_of[name] for name in event_ids if name not in self.requests]
        batch.end(ended)
        return outputs

    def _free_images(self, model_output: ModelRunnerOutput, positions: np.ndarray) -> None:
        """Free the image features of prompts that are now in the KV cache."""
        for i in positions.tolist():
            request = self.requests[model_output.req_ids[i]]
            self.encoder_cache_manager.free(request)

    def _leave_events_to_vllm(
        self,
        scheduler_output: SchedulerOutput,
        model_output: ModelRunnerOutput,
        request_ids: list[str],
    ) -> dict:
        """Let vLLM's own code process a step's output for some of its requests."""
        step = copy(scheduler_output)
        step.num_scheduled_tokens = {
            name: scheduler_output.num_scheduled_tokens[name] for name in request_ids
        }
        drawn = copy(model_output)
        drawn.logprobs = None  # these are in self.responses
        return super().update_from_output(step, drawn)
