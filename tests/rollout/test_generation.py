"""How requests are given to vLLM, and what is made of its outputs. Their tokens are given.

One engine without a model serves all cases. test_rollout.py and others run vLLM with models.
"""

import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from config import load
from data.batching.batch import Batch, make_cu_seqlens
from engines.model.routes import FIELD, no_route
from examples.arithmetic import make_tokenizer
from rollout.episodes.jobs import EndedEpisode
from rollout.episodes.stepping import WAIT_SECONDS, EpisodeLoop
from rollout.responses import Responses
from rollout.vllm.adapters import lora_request
from rollout.vllm.continuing import ContinuingRollout, RandomStreams
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import NUM_TIES
from tests.support.models import make_model
from tests.support.ranks import on_ranks

MAX_TOKENS = 22
MAX_PROMPT = 16
SETTINGS = [
    "data.train_files=unused",
    f"data.max_prompt_length={MAX_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={MAX_TOKENS}",
    "rollout.max_num_seqs=4",
    "rollout.routing_replay=true",
    "rollout.stop=[unused]",  # so that vLLM has a tokenizer
    "rollout.top_k=2",
]
# The first token of each prompt, and its length. A sequence ends at the position of its first
# token, so some responses have a single token, and others reach MAX_TOKENS.
PROMPTS = [(60, 2), (9, 9), (70, 16), (20, 5), (12, 3), (23, 1), (30, 8), (5, 3), (40, 6), (29, 7)]
PROMPTS += [(15, 11), (90, 1)]
SEEDS = [1000 + 7 * first for first, _ in PROMPTS]


@pytest.fixture(scope="module")
def given():
    from tests.rollout import given_tokens  # imports vLLM, which takes seconds

    return given_tokens


@pytest.fixture(scope="module")
def cases(given, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("generation")
    model = make_model(folder / "model", "qwen3_moe", vocab_size=262, eos_token_id=given.END)
    make_tokenizer().save_pretrained(model)
    (results,) = on_ranks(1, folder, run_cases, given, model)
    return results


def run_cases(given, model: Path) -> dict:
    """Return the results of all cases, with one engine."""
    rollout = given.start(load("ppo.yaml", [f"model.path={model}", *SETTINGS]))
    run_cases.rollout = rollout  # until this process ends: vLLM would leave its process group
    executor = rollout.llm.llm_engine.model_executor
    results = {}
    update(rollout)
    rollout.drafts.counts[:] = 5
    results["closed"] = generate(rollout)
    results["closed batch"] = rollout.closed_batch_share
    results["drafts"] = rollout.drafts.counts.tolist()
    results["requests"] = [(r.first, r.params) for r in executor.admitted]
    executor.admitted.clear()
    for _ in range(2):
        rollout.generate([prompts()[2]], [0], sampling())
    rollout.sleep()
    update(rollout)
    rollout.generate([prompts()[2]], [0], sampling())
    results["cached"] = [r.num_cached for r in executor.admitted]
    closed_batch_scheduler = rollout.scheduler
    results["continued, closed"] = continued(rollout)
    results["played, closed"] = played(rollout)
    rollout.scheduler = None
    results["continued, open"] = continued(rollout)
    results["played, open"] = played(rollout)
    executor.preempted.clear()
    results["open"] = generate(rollout)
    results["ended while preempted"] = len(executor.preempted)
    results["closed batch of an open one"] = rollout.closed_batch_share
    rollout.scheduler = closed_batch_scheduler
    results["nothing"] = rollout.generate([], [], sampling())
    results["begins"] = begins(rollout)
    executor.admitted.clear()
    results["log-probs"] = rollout.log_probs(scored_batch(), 0.7)
    results["scored"] = [(r.prompt, r.params) for r in executor.admitted]
    results["kept"] = len(rollout.recorder.kept)
    results["stopped"] = stopped(rollout, given)
    results["with adapter"] = lora_errors(rollout)
    slot_routes = rollout.recorder.slot_routes
    results["slots"] = [slot_routes.slots is not None]
    rollout.sleep()
    results["slots"].append(slot_routes.slots is not None)
    results["rounds"] = rounds(rollout)
    results["rounds with an adapter"] = rounds_with_adapter(rollout)
    return results


def update(rollout: Rollout) -> None:
    rollout.wake("weights")
    rollout.update_weights(iter([("norm", torch.ones(1))]))
    rollout.wake("kv_cache")


def sampling(**changes):
    values = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": []}
    return OmegaConf.create({**values, "max_tokens": MAX_TOKENS, **changes})


def prompts() -> list[list[int]]:
    return [[first, *range(50, 49 + length)] for first, length in PROMPTS]


def generate(rollout: Rollout) -> tuple[Batch, torch.Tensor]:
    return rollout.generate(prompts(), SEEDS, sampling())


def continued(rollout: Rollout) -> list[dict]:
    """Generate parts of responses, until all are complete; return what each part was."""
    continuing = ContinuingRollout(rollout)
    executor = rollout.llm.llm_engine.model_executor
    engine_core = rollout.llm.llm_engine.engine_core.engine_core
    parts = []
    tokens = [[] for _ in PROMPTS]
    running = list(range(len(PROMPTS)))
    while running:
        assert len(parts) < len(PROMPTS), "at least one is complete in each part"
        num_calls = 0
        goal = min(2, len(running))

        def is_enough(ended) -> bool:
            nonlocal num_calls
            num_calls += 1
            return len(ended) >= goal

        executor.admitted.clear()
        texts = [prompts()[i] + tokens[i] for i in running]
        num_drawn = [len(tokens[i]) for i in running]
        seeds = [SEEDS[i] for i in running]
        arguments = (seeds, num_drawn, sampling(top_k=2), is_enough)
        responses, reasons = continuing.generate(texts, *arguments)
        parts.append(
            {
                "running": running,
                "num_drawn": num_drawn,
                "rows": [responses.row(i) for i in range(len(running))],
                "routes": responses.routes,
                "reasons": reasons,
                "steps": (continuing.num_steps, num_calls),
                "left": (
                    len(engine_core.scheduler.requests),
                    rollout.llm.llm_engine.get_num_unfinished_requests(),
                    len(engine_core.batch_queue),
                    len(continuing.streams.num_skipped),
                    len(rollout.recorder.kept),
                ),
                "closed": rollout.closed_batch_share,
                "requests": [(r.first, r.params) for r in executor.admitted],
            }
        )
        for row, i in enumerate(running):
            tokens[i] += responses.row(row)[0].tolist()
        running = [i for row, i in enumerate(running) if row not in reasons]
    return parts


PLAYED = [PROMPTS[0], PROMPTS[7]]  # one reaches MAX_TOKENS, and the other does not
BUSY_SECONDS = 0.01


def played(rollout: Rollout) -> dict:
    """Play two episodes of one turn each, which are suspended once, and go on with new weights.

    At first, vLLM has nothing to do. While it works, nothing arrives.
    """
    waits = []
    answers = []

    def inbox(seconds: float) -> list[dict]:
        waits.append(seconds)
        time.sleep(seconds or BUSY_SECONDS)
        if seconds == 0 or len(waits) == 1:
            return []
        if len(waits) > 2:
            return [{"ended": [EndedEpisode(i, None, 0) for i in range(2)], "is_over": True}]
        messages = []
        for i, (first, length) in enumerate(PLAYED):
            prompt = prompts()[PROMPTS.index((first, length))]
            messages.append({"attempt": f"key {i}", "index": i})
            request = {"prompt_ids": prompt, "max_tokens": MAX_TOKENS, "stop": []}
            messages.append({"id": i, "episode": f"key {i}", **request})
        return messages

    streams = RandomStreams(rollout)
    loop = EpisodeLoop(rollout, sampling(top_k=2), inbox, answers.append, streams)
    playing = [loop.add(i, (i,)) for i in range(2)]
    runs = []
    for version, is_enough in ((5, lambda: len(waits) == 8), (6, None)):
        num_waits = len(waits)
        loop.run(is_enough, version)
        busy_seconds = BUSY_SECONDS * waits[num_waits:].count(0)
        waiting = loop.times.total - loop.times.idle
        runs.append((loop.num_steps, loop.num_tokens, waiting - busy_seconds, loop.times.idle))
    return {
        "waits": waits,
        "answers": {answer["id"]: answer for answer in answers},
        "branches": [play.episode.branches for play in playing],
        "runs": runs,
    }


class Recorded:
    """Memory and an adapter whose calls are written down, and do nothing.

    They stand for classes of rollout/vllm/device_memory.py, and for Adapter.
    """

    def __init__(self):
        self.calls: list[str] = []

    def free(self, keep_weights: bool) -> None:
        self.calls.append("free the cache" if keep_weights else "free all")

    def restore(self, part: str, are_weights_valid: bool) -> None:
        self.calls.append(f"restore {'valid ' * are_weights_valid}{part}")

    def forget_host_copies(self) -> None:
        self.calls.append("forget copies")

    @contextmanager
    def unwrapped(self):
        self.calls.append("unwrap")
        yield
        self.calls.append("wrap")

    def register(self) -> None:
        self.calls.append("register")

    def update(self, matrices: dict) -> None:
        self.calls.append(f"update {list(matrices)}")

    def take(self) -> list[str]:
        calls = self.calls
        self.calls = []
        return calls

    def export(self):
        """Yield two weights."""
        for name in ("a", "b"):
            self.calls.append(f"send {name}")
            yield name, torch.ones(1)


def rounds(rollout: Rollout) -> list[list[str]]:
    """Return the calls of two rounds, and of an update that fails; vLLM sleeps at first."""
    recorded = Recorded()
    rollout.memory = recorded
    rollout.closed_batch_share = 0.25
    calls = []
    executor = rollout.llm.llm_engine.model_executor
    executor.num_encoder_resets = 0
    for _ in range(2):
        rollout.wake("weights")
        rollout.wake("weights")
        rollout.update_weights(recorded.export())
        rollout.wake("kv_cache")
        metrics = rollout.sleep()
        rollout.sleep()
        calls.append(recorded.take())
    calls.append([f"{name} {value}" for name, value in metrics.items()])
    calls.append([f"{executor.num_encoder_resets} encoder resets"])
    rollout.wake("weights")
    rollout.update_weights(recorded.export())
    with pytest.raises(ZeroDivisionError):
        rollout.update_weights((name, 1 / 0) for name in ("a", "b"))
    calls.append(["is current" if rollout.is_current else "is not current"])
    rollout.sleep()
    return calls


def rounds_with_adapter(rollout: Rollout) -> dict:
    """Return the calls of rounds with a separate adapter, whose base is updated once."""
    recorded = Recorded()
    rollout.memory = recorded
    rollout.adapter = recorded
    rollout.sync.adapter = recorded
    rollout.needed = {"base", "adapter"}
    executor = rollout.llm.llm_engine.model_executor
    executor.admitted.clear()
    rollout.wake("weights")
    rollout.sleep()
    calls = [recorded.take()]
    rollout.wake("weights")
    rollout.update_weights(recorded.export())
    states = [(rollout.has_base, rollout.is_current)]
    for _ in range(2):
        rollout.wake("weights")
        rollout.update_adapter(recorded.export())
        states.append((rollout.has_base, rollout.is_current))
        rollout.wake("kv_cache")
        rollout.generate([prompts()[2]], [0], sampling())
        rollout.sleep()
        states.append((rollout.has_base, rollout.is_current))
        calls.append(recorded.take())
    rollout.wake("weights")
    rollout.sleep()
    rollout.wake("weights")
    rollout.update_adapter(recorded.export())
    recorded.take()
    recorded.update = lambda matrices: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rollout.update_adapter(recorded.export())
    states.append((rollout.has_base, rollout.is_current))
    recorded.take()
    # The process group is still needed.
    rollout.llm.llm_engine.engine_core.shutdown = lambda: recorded.calls.append("shut down")
    rollout.shutdown()
    calls.append(recorded.take())
    return {"calls": calls, "states": states, "cached": [r.num_cached for r in executor.admitted]}


def stopped(rollout: Rollout, given) -> tuple[list[list[int]], dict[int, str]]:
    """Continue a response of which two of a stop string's three tokens were drawn, and begin one
    whose stop string is the same.
    """
    first, start = PROMPTS[0]
    tokens = [given.given_token(first, start + i) for i in range(3)]
    stop = make_tokenizer().decode(tokens)
    assert len(stop) == 3
    texts = [prompts()[0] + tokens[:2], prompts()[11]]
    responses, reasons = ContinuingRollout(rollout).generate(
        texts, [0, 1], [2, 0], sampling(stop=[stop]), lambda ended: False
    )
    return [responses.row(i)[0].tolist() for i in range(2)], reasons


def lora_errors(rollout: Rollout) -> list[str]:
    """Return vLLM's errors, since this engine has no adapters, for requests with one."""
    errors = []
    rollout.lora_request = lora_request()
    for call in (generate, lambda rollout: rollout.log_probs(scored_batch(), 1.0)):
        with pytest.raises(Exception, match="LoRA is not enabled") as error:
            call(rollout)
        errors.append(str(error.value))
    rollout.lora_request = None
    return errors


def begins(rollout: Rollout) -> list[bool]:
    """Return whether the scheduler for closed batches takes a batch with a stop string, and one
    without any.
    """
    begun = []
    for stops in ([], ["\n"]), ([], []):
        params = [rollout.sampling_params(sampling(stop=stop), 0) for stop in stops]
        begun.append(rollout.begin_batch(Responses(2, MAX_TOKENS, 0), params))
        rollout.end_batch(begun[-1])
    return begun


def scored_batch() -> Batch:
    """Return three sequences, of which some tokens are to be scored."""
    ids = torch.tensor([40, 41, 42, 43, 50, 51, 60, 61, 62])
    mask = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 0, 1])
    return Batch(ids, make_cu_seqlens(torch.tensor([4, 2, 3])), {"loss_mask": mask})


def expected_response(given, first: int, start: int) -> list[int]:
    """Return the tokens of a response after a prompt of `start` tokens."""
    end = min(first + 1, start + MAX_TOKENS) if first >= start else start + MAX_TOKENS
    return [given.given_token(first, position) for position in range(start, end)]


def log_probs_of(given, first: int, start: int, length: int) -> list[float]:
    return [given.given_log_prob(first, start + i) for i in range(length)]


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_each_response_has_the_tokens_and_numbers_of_its_request(given, cases, scheduler):
    batch, truncated = cases[scheduler]
    sequences = batch.input_ids.split(batch.lengths)
    masks = batch.fields["loss_mask"].split(batch.lengths)
    all_log_probs = batch.fields["rollout_log_probs"].split(batch.lengths)
    all_routes = batch.fields[FIELD].split(batch.lengths)
    assert len(sequences) == len(PROMPTS)
    for i, (first, start) in enumerate(PROMPTS):
        response = expected_response(given, first, start)
        assert sequences[i].tolist() == prompts()[i] + response
        assert masks[i].tolist() == [0] * start + [1] * len(response)
        expected = [0] * start + log_probs_of(given, first, start, len(response))
        assert all_log_probs[i].tolist() == pytest.approx(expected)
        assert truncated[i] == (response[-1] != given.END)
        *routes, last = all_routes[i].tolist()
        assert routes == [given.given_experts(first, position) for position in range(len(routes))]
        assert set(sum(last, [])) == {no_route(torch.uint8)}, "the last token was not read"
    assert 0 < truncated.sum() < len(PROMPTS)
    assert cases["ended while preempted"] > 0, "by a token that was in flight"


def test_the_share_of_steps_is_that_of_the_last_batch(cases):
    assert 0.5 < cases["closed batch"] < 1
    assert cases["closed batch of an open one"] == 0


def test_drafts_are_counted_anew_in_each_batch(cases):
    assert cases["drafts"] == [0, 0, 0, 0]


def test_all_requests_name_the_adapter(cases):
    for error in cases["with adapter"]:
        assert "lora_name='policy', lora_int_id=1" in error
    assert len(cases["with adapter"]) == 2, "of generate() and of log_probs()"


def test_requests_have_their_own_seeds_and_the_sampling_of_the_call(cases):
    assert sorted(first for first, _ in cases["requests"]) == sorted(first for first, _ in PROMPTS)
    seed_of = {first: seed for (first, _), seed in zip(PROMPTS, SEEDS)}
    for first, params in cases["requests"]:
        assert params.seed == seed_of[first]
        assert params.temperature == 0.9
        assert params.max_tokens == MAX_TOKENS


def test_blocks_of_prompts_do_not_outlive_the_weights(cases):
    # All but the last of the prompt's four blocks: vLLM computes the last token again.
    assert cases["cached"] == [0, 12, 0], "tokens of a prompt at first, again, and with new weights"


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_responses_continue_until_they_are_complete(given, cases, scheduler):
    parts = cases[f"continued, {scheduler}"]
    assert len(parts) > 3
    assert any(parts[1]["num_drawn"]), "responses that were interrupted keep their tokens"
    reasons = {}
    drawn = {i: ([], []) for i in range(len(PROMPTS))}
    for part in parts:
        assert (part["closed"] > 0) == (scheduler == "closed")
        assert len(part["reasons"]) >= min(2, len(part["running"])), "as many as were enough"
        num_steps, num_calls = part["steps"]
        # It is not asked when no request is left.
        assert num_calls - num_steps == (len(part["reasons"]) < len(part["running"]))
        for row, i in enumerate(part["running"]):
            assert part["num_drawn"][row] == len(drawn[i][0])
            tokens, log_probs, candidates = part["rows"][row]
            # Each was drawn from itself alone, of two candidates and NUM_TIES more.
            assert [c[:2] for c in candidates.tolist()] == [[token, token] for token in tokens]
            assert candidates.shape == (len(tokens), 1 + 2 + NUM_TIES)
            assert (candidates[:, 2:] == -1).all()
            drawn[i][0].extend(tokens.tolist())
            drawn[i][1].extend(log_probs.tolist())
            if row in part["reasons"]:
                assert i not in reasons
                reasons[i] = part["reasons"][row]
    for i, (first, start) in enumerate(PROMPTS):
        response = expected_response(given, first, start)
        tokens, log_probs = drawn[i]
        assert tokens == response
        assert log_probs == pytest.approx(log_probs_of(given, first, start, len(response)))
        assert reasons[i] == ("stop" if response[-1] == given.END else "length")


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_turns_of_episodes_continue_after_a_suspension(given, cases, scheduler):
    result = cases[f"played, {scheduler}"]
    for i, (first, start) in enumerate(PLAYED):
        response = expected_response(given, first, start)
        answer = result["answers"][i]
        assert answer["token_ids"] == response
        expected = log_probs_of(given, first, start, len(response))
        assert answer["log_probs"] == pytest.approx(expected)
        assert answer["finish_reason"] == ("stop" if response[-1] == given.END else "length")
        (branch,) = result["branches"][i]
        assert branch.token_ids[start:] == response
        assert branch.is_sampled == [False] * start + [True] * len(response)
        (candidates,) = branch.candidates
        assert candidates.shape == (len(response), 1 + 2 + NUM_TIES)
        assert candidates[:, 0].tolist() == response
    versions = result["branches"][0][0].versions
    assert versions == sorted(versions)
    assert {*versions} == {5, 6}


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_vllm_waits_for_requests_only_while_it_has_none(cases, scheduler):
    result = cases[f"played, {scheduler}"]
    idle, *busy = result["waits"][1:-1]
    assert result["waits"][0] == idle == result["waits"][-1] == WAIT_SECONDS
    assert {*busy} == {0}
    lengths = [len(answer["token_ids"]) for answer in result["answers"].values()]
    assert sum(num_tokens for _, num_tokens, *_ in result["runs"]) == sum(lengths)
    num_steps = sum(run[0] for run in result["runs"])
    assert num_steps >= max(lengths)
    for (_, _, working, waiting), num_waits in zip(result["runs"], (2, 1)):
        assert waiting >= num_waits * WAIT_SECONDS
        assert working > 0, "the time in which vLLM has worked is not idle"


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_a_response_keeps_its_seed_and_the_limit_of_its_whole_length(cases, scheduler):
    seed_of = {first: seed for (first, _), seed in zip(PROMPTS, SEEDS)}
    for part in cases[f"continued, {scheduler}"]:
        num_drawn = {PROMPTS[i][0]: num for i, num in zip(part["running"], part["num_drawn"])}
        for first, params in part["requests"]:
            assert params.seed == seed_of[first]
            assert params.max_tokens == MAX_TOKENS - num_drawn[first]


def test_a_stop_string_may_begin_before_the_interruption(cases):
    """The first response continues within a stop string of three tokens; the second one is new."""
    tokens, reasons = cases["stopped"]
    assert reasons == {0: "stop", 1: "length"}
    assert [len(of_row) for of_row in tokens] == [1, MAX_TOKENS]


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_nothing_of_an_interrupted_batch_is_left_in_vllm(cases, scheduler):
    """No request, no step in flight, which could use memory that is freed, and no record."""
    for part in cases[f"continued, {scheduler}"]:
        assert part["left"] == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("scheduler", ["closed", "open"])
def test_parts_have_the_experts_of_their_tokens(given, cases, scheduler):
    """A request that has drawn a token has those of all tokens but the last."""
    missing = no_route(torch.uint8)
    for part in cases[f"continued, {scheduler}"]:
        start = 0
        for row, i in enumerate(part["running"]):
            first, num_prompt = PROMPTS[i]
            num_new = len(part["rows"][row][0])
            length = num_prompt + part["num_drawn"][row] + num_new
            routes = part["routes"][start : start + length]
            start += length
            is_missing = (routes == missing).all((1, 2)).tolist()
            if num_new:
                assert is_missing == [False] * (length - 1) + [True]
            for position, experts in enumerate(routes.tolist()):
                if not is_missing[position]:
                    assert experts == given.given_experts(first, position)
        assert start == len(part["routes"])


def test_a_replica_without_prompts_generates_nothing(cases):
    batch, truncated = cases["nothing"]
    assert len(batch) == len(truncated) == len(batch.input_ids) == 0
    assert batch.fields[FIELD].shape[0] == 0


def test_a_batch_in_which_any_request_has_stop_strings_is_left_to_vllm(cases):
    assert cases["begins"] == [False, True]


def test_log_probs_of_tokens_follow_their_own_prompts(given, cases):
    """Each token whose loss_mask is 1 is scored after all earlier tokens of its sequence."""
    scored = [([40], 41), ([40, 41, 42], 43), ([50], 51), ([60, 61], 62)]
    expected = [given.given_log_prob(prompt[0], len(prompt), token) for prompt, token in scored]
    assert cases["log-probs"].tolist() == pytest.approx(expected)
    assert [(prompt, params.logprob_token_ids[0]) for prompt, params in cases["scored"]] == scored
    assert {params.temperature for _, params in cases["scored"]} == {0.7}
    assert cases["kept"] == 0, "no experts of these tokens are kept"


def test_the_memory_for_experts_sleeps_too(cases):
    assert cases["slots"] == [True, False]


def test_memory_is_freed_once_and_restored_before_it_is_written(cases):
    """All weights are sent, although vLLM takes only the first: other ranks wait for the rest."""
    first, second, metrics, resets, after_error = cases["rounds"]
    before_generating = ["restore weights", "forget copies", "send a", "send b"]
    assert first == second == [*before_generating, "restore valid kv_cache", "free all"]
    assert metrics == ["rollout/closed_batch 0.25"]
    assert resets == ["2 encoder resets"], "features of images were computed with old weights"
    assert after_error == ["is not current"]


def test_with_a_separate_adapter_the_base_stays_valid_from_round_to_round(cases):
    """Only the adapter is sent again, and no block of a prompt outlives it."""
    result = cases["rounds with an adapter"]
    without_base, first, second, shutdown = result["calls"]
    assert without_base == ["restore weights", "free all"]
    sent = ["send a", "send b"]
    of_base = ["restore weights", "forget copies", "unwrap", "send a", "wrap", "send b", "register"]
    of_adapter = [*sent, "update ['a', 'b']", "restore valid kv_cache", "free the cache"]
    assert first == [*of_base, *of_adapter]
    assert second == ["restore valid weights", *of_adapter]
    # (the base is valid, and so is the adapter)
    assert result["states"] == [
        (True, False),  # base
        (True, True),  # adapter
        (True, False),  # asleep
        (True, True),
        (True, False),
        (True, False),  # after an update that failed
    ]
    assert result["cached"] == [0, 0]
    assert shutdown == ["restore valid kv_cache", "shut down"], "what sleeps is woken first"
