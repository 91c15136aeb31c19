"""The tests that `make quick` leaves to `make test` although they start neither torchrun nor vLLM.

They take a good part of a second each, and what they catch is mostly caught by a test that stays:
the same on fewer ranks, with another setting, or one step later.
"""

from collections.abc import Iterable

import pytest

from tests.support.tables import entry_of

# As in tests/support/thorough.py. Test, or a pattern -> the cases, as they stand in brackets after
# its name; None: all.
LENGTHY: dict[str, Iterable[str] | None] = {
    "tests/data/test_chat.py::test_every_turn_is_its_content_and_the_end": None,
    "tests/data/test_dataset.py::test_parallel_equals_serial": None,
    "tests/data/test_dataset.py::test_runs_that_write_the_same_cache_*": None,
    "tests/data/test_images.py::test_all_models_of_a_run_have_the_same_tokens_*": (
        "algorithm.distill.teacher",
    ),
    "tests/data/test_images.py::test_a_layer_of_a_tower_is_counted_*": ("qwen2_5_vl",),
    "tests/data/test_plan.py::test_a_batch_that_needs_twice_the_passes_*": None,
    "tests/data/test_prompts.py::test_parallel_equals_serial": None,
    "tests/data/test_selection.py::test_a_selection_is_the_same_in_several_processes": None,
    "tests/engines/fsdp/test_between_steps.py::test_it_changes_no_number_of_the_next_step": (
        "padded",
        "another head",
        "offloaded",
        "without adapters",
        "log_probs",
    ),
    "tests/engines/fsdp/test_checkpoints.py::test_a_checkpoint_finds_its_models_*": ("the rest",),
    "tests/engines/fsdp/test_experts.py::test_tokens_that_ranks_share_count_once_*": None,
    "tests/engines/fsdp/test_families.py::test_families_that_are_compared_in_this_process": (
        "deepseek_v4-False",
        "zaya-True",
    ),
    "tests/engines/fsdp/test_freezing.py::test_a_dry_run_without_weights_*": None,
    "tests/engines/fsdp/test_memory.py::test_dry_run_counts_keys_and_values_*": None,
    "tests/engines/fsdp/test_memory.py::test_vllm_decodes_as_many_responses_*": None,
    "tests/engines/test_both_engines.py::test_megatron_trains_as_fsdp_does": (
        "tensor_parallel",
        "pipeline",
    ),
    "tests/engines/test_divergence.py::test_ranks_that_divide_the_vocabulary": (
        "forward_kl-0-33",
        "forward_kl-0-73",
        "jsd-0-33",
        "jsd-0-73",
        "reverse_kl-0-33",
        "reverse_kl-0-73",
        "forward_kl-5-53",
        "reverse_kl-5-53",
    ),
    "tests/engines/test_low_precision.py::test_muon_is_rounded_the_same_*": None,
    "tests/engines/test_low_precision.py::test_small_updates_count": (
        "0.0001-bfloat16, 8-bit moments",
        "0.0001-fp32, 8-bit moments",
        "1e-05-bfloat16, 8-bit moments",
        "1e-06-bfloat16, 8-bit moments",
        "1e-06-fp32, 8-bit moments",
    ),
    "tests/engines/test_megatron_refusals.py::test_estimate_of_activations": None,
    "tests/engines/test_parallel.py::test_ranks_that_share_sequences_attend_as_one": (
        "False-4",
        "True-4",
    ),
    "tests/job/test_order.py::test_ranks_agree_or_all_of_them_report_the_error": (
        "return [RANK if batch_index == 5 else 0] * batch_size",
        "return [RANK * 20] * batch_size",
        "return [batch_index] * batch_size",
    ),
    "tests/job/test_setup.py::test_a_reward_is_checked_with_a_row_of_each_file": ("val",),
    "tests/job/test_sft_distillation.py::test_a_step_equals_plain_autograd_in_float64": (
        "1-forward_kl-0-False",
    ),
    "tests/job/test_tracking.py::test_a_correction_that_costs_half_*": (
        "age_0_shares1-sample_sizes1-False",
        "age_0_shares2-sample_sizes2-False",
    ),
    "tests/preferences/test_planning.py::test_pairs_stay_together": (
        "dynamic context parallelism",
        "padded",
    ),
    "tests/repository/test_docs_snippets.py::test_the_quickstart_reads_a_data_set_of_the_hub": None,
    "tests/repository/test_examples.py::test_right_replies_are_counted_*": None,
    "tests/repository/test_examples.py::test_traces_of_the_calculator_are_right_*": None,
    "tests/repository/test_model_configs.py::test_the_numbers_of_parameters_*": None,
    "tests/repository/test_recipes.py::test_results_can_be_drawn": None,
    "tests/rl/test_distillation.py::test_a_step_equals_plain_autograd_in_float64": (
        "1-reverse_kl-0-False-several",
    ),
    "tests/rl/test_reward_model.py::test_scores_in_this_process_*": ("512-30", "512-200"),
    "tests/rollout/test_drawing.py::test_all_ranks_know_the_numbers_*": ("3-1", "2-2"),
    "tests/rollout/test_episode_workers.py::test_a_module_of_the_working_directory_*": None,
    "tests/rollout/test_episode_workers.py::test_the_client_of_openai_plays_*": None,
    "tests/rollout/test_partial_groups.py::test_every_rank_forgets_the_groups_*": ("2",),
    "tests/rollout/test_probe.py::test_the_base_is_recorded_without_the_adapters_*": None,
    "tests/rollout/test_rewards.py::test_a_call_beside_one_that_ended_the_worker_*": None,
    "tests/rollout/test_rewards.py::test_a_call_is_made_again_if_the_time_of_another_*": None,
    "tests/rollout/test_rewards.py::test_a_new_worker_may_take_longer_to_start_than_a_call": None,
    "tests/rollout/test_sharing.py::test_each_response_reaches_the_ranks_that_train_on_it": (
        "context_parallel_size=auto-9-dp_ranks1",
    ),
    "tests/rollout/test_speculation.py::test_drafts_change_no_token_of_the_v1_model_runner": None,
}


def mark_lengthy(items: list[pytest.Item]) -> None:
    """Mark the tests among the collected ones as slow."""
    for item in items:
        if entry_of(item.nodeid, LENGTHY):
            item.add_marker(pytest.mark.slow)
