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
    "tests/data/test_images.py::test_a_dry_run_counts_*": None,
    "tests/data/test_images.py::test_a_layer_of_a_tower_is_counted_*": (
        "qwen2_5_vl",
        "qwen3_vl",
    ),
    "tests/data/test_images.py::test_activations_of_images_are_estimated": None,
    "tests/data/test_images.py::test_all_models_of_a_run_have_the_same_tokens_*": (
        "algorithm.distill.teacher",
    ),
    "tests/data/test_images.py::test_the_tower_keeps_activations_*": None,
    "tests/data/test_images.py::test_token_types_that_a_model_needs_*": None,
    "tests/data/test_plan.py::test_a_batch_that_needs_twice_the_passes_*": None,
    "tests/data/test_prompts.py::test_parallel_equals_serial": None,
    "tests/data/test_selection.py::test_a_selection_is_the_same_in_several_processes": None,
    "tests/engines/fsdp/test_adapters.py::test_adapters_beside_matrices_*": None,
    "tests/engines/fsdp/test_adapters.py::test_an_adapter_that_is_not_plain_*": None,
    "tests/engines/fsdp/test_adapters.py::test_an_export_of_a_part_*": None,
    "tests/engines/fsdp/test_between_steps.py::test_it_changes_no_number_of_the_next_step": (
        "padded",
        "another head",
        "offloaded",
        "without adapters",
        "log_probs",
    ),
    "tests/engines/fsdp/test_checkpoints.py::test_a_checkpoint_finds_its_models_*": None,
    "tests/engines/fsdp/test_experts.py::test_tokens_that_ranks_share_count_once_*": None,
    "tests/engines/fsdp/test_families.py::test_families_that_are_compared_in_this_process": None,
    "tests/engines/fsdp/test_freezing.py::test_a_dry_run_without_weights_*": None,
    "tests/engines/fsdp/test_freezing.py::test_a_run_prints_once_*": None,
    "tests/engines/fsdp/test_memory.py::test_dry_run_counts_keys_and_values_*": None,
    "tests/engines/fsdp/test_memory.py::test_dry_run_counts_what_waits_*": None,
    "tests/engines/fsdp/test_memory.py::test_vllm_decodes_as_many_responses_*": None,
    "tests/engines/fsdp/test_rejections.py::test_experts_that_transformers_transposes_*": None,
    "tests/engines/fsdp/test_rejections.py::test_models_that_cannot_work": None,
    "tests/engines/fsdp/test_rounding.py::test_rounding_to_the_nearest_reports_the_share": None,
    "tests/engines/test_both_engines.py::test_megatron_trains_as_fsdp_does": (
        "tensor_parallel",
        "pipeline",
    ),
    "tests/engines/test_divergence.py::test_ranks_that_divide_the_vocabulary": (
        "forward_kl-0-33",
        "forward_kl-0-53",
        "forward_kl-0-73",
        "forward_kl-5-53",
        "jsd-0-33",
        "jsd-0-73",
        "reverse_kl-0-33",
        "reverse_kl-0-53",
        "reverse_kl-0-73",
        "reverse_kl-5-53",
    ),
    "tests/engines/test_divergence.py::test_trl": None,
    "tests/engines/test_estimate.py::test_gathered_weights_and_unreduced_*": None,
    "tests/engines/test_low_precision.py::test_muon_is_rounded_the_same_*": None,
    "tests/engines/test_low_precision.py::test_small_updates_count": (
        "0.0001-bfloat16, 8-bit moments",
        "0.0001-fp32, 8-bit moments",
        "1e-05-bfloat16, 8-bit moments",
        "1e-06-bfloat16, 8-bit moments",
        "1e-06-fp32, 8-bit moments",
    ),
    "tests/engines/test_megatron_refusals.py::test_estimate_of_activations": None,
    "tests/engines/test_megatron_refusals.py::test_models_without_a_faithful_translation": None,
    "tests/engines/test_megatron_refusals.py::test_tied_matrices_must_be_equal_*": None,
    "tests/engines/test_parallel.py::test_groups_are_powers_of_two_*": None,
    "tests/engines/test_parallel.py::test_ranks_that_divide_the_vocabulary_compute_*": ("True",),
    "tests/engines/test_parallel.py::test_ranks_that_share_sequences_attend_as_one": (
        "False-4",
        "True-4",
    ),
    "tests/job/test_memory_plan.py::test_the_advice_names_the_size_*": None,
    "tests/job/test_order.py::test_ranks_agree_or_all_of_them_report_the_error": (
        "return [RANK if batch_index == 5 else 0] * batch_size",
        "return [RANK * 20] * batch_size",
        "return [batch_index] * batch_size",
    ),
    "tests/job/test_setup.py::test_a_reward_is_checked_with_a_row_of_each_file": ("val",),
    "tests/job/test_setup.py::test_a_token_that_only_a_validation_row_has_*": None,
    "tests/job/test_sft_distillation.py::test_a_step_equals_plain_autograd_in_float64": (
        "1-forward_kl-0-False",
    ),
    "tests/job/test_tracking.py::test_a_correction_that_costs_half_*": (
        "age_0_shares1-sample_sizes1-False",
        "age_0_shares2-sample_sizes2-False",
    ),
    "tests/job/test_tracking.py::test_a_run_that_begins_anew_*": None,
    "tests/job/test_tracking.py::test_a_validation_of_an_earlier_step_*": None,
    "tests/job/test_tracking.py::test_a_vllm_that_computes_something_else_*": (
        "engine.compute_dtype=bfloat16 rollout.top_p=0.9-gaps3-False",
        "engine.compute_dtype=bfloat16-gaps2-False",
        "engine.compute_dtype=float32-gaps1-False",
    ),
    "tests/preferences/test_planning.py::test_pairs_stay_together": (
        "dynamic context parallelism",
        "padded",
    ),
    "tests/repository/test_benchmarks.py::test_the_commands_of_a_shell_script_*": None,
    "tests/repository/test_config.py::test_the_schema_of_the_yaml_files": (
        "dpo",
        "rm",
    ),
    "tests/repository/test_docs_episodes.py::test_an_episode_of_the_page": None,
    "tests/repository/test_docs_snippets.py::test_a_reward_grades_in_its_process": None,
    "tests/repository/test_docs_snippets.py::test_the_quickstart_reads_a_data_set_of_the_hub": None,
    "tests/repository/test_examples.py::test_right_replies_are_counted_*": None,
    "tests/repository/test_examples.py::test_traces_of_the_calculator_are_right_*": None,
    "tests/repository/test_model_configs.py::test_the_numbers_of_parameters_*": None,
    "tests/repository/test_recipes.py::test_a_picture_over_seconds_*": None,
    "tests/repository/test_recipes.py::test_results_can_be_drawn": None,
    "tests/rl/test_distillation.py::test_a_step_equals_plain_autograd_in_float64": (
        "1-reverse_kl-0-False-several",
    ),
    "tests/rl/test_distillation.py::test_tokens_of_the_student_alone_*": None,
    "tests/rl/test_episodes.py::test_branches_of_an_episode_may_be_*": None,
    "tests/rl/test_reward_model.py::test_scores_in_this_process_*": (
        "512-30",
        "512-200",
    ),
    "tests/rl/test_step_rewards.py::test_grpo_steps_is_the_same_on_two_ranks": None,
    "tests/rollout/test_drawing.py::test_all_ranks_expect_the_parts_*": None,
    "tests/rollout/test_drawing.py::test_all_ranks_know_the_numbers_*": (
        "3-1",
        "2-2",
    ),
    "tests/rollout/test_episode_director.py::test_a_process_that_is_blocked_*": None,
    "tests/rollout/test_episode_director.py::test_a_validation_neither_*": None,
    "tests/rollout/test_episode_director.py::test_a_worker_that_cannot_start_*": None,
    "tests/rollout/test_episode_director.py::test_an_episode_*": None,
    "tests/rollout/test_episode_director.py::test_close_ends_*": None,
    "tests/rollout/test_episode_director.py::test_episodes_*": None,
    "tests/rollout/test_episode_director.py::test_time_between_draws_*": None,
    "tests/rollout/test_episode_workers.py::test_a_module_of_the_working_directory_*": None,
    "tests/rollout/test_episode_workers.py::test_another_interpreter_*": None,
    "tests/rollout/test_episode_workers.py::test_close_ends_episodes_*": None,
    "tests/rollout/test_episode_workers.py::test_secrets_reach_an_episode_*": None,
    "tests/rollout/test_episode_workers.py::test_the_client_of_openai_plays_*": None,
    "tests/rollout/test_partial_groups.py::test_every_rank_forgets_the_groups_*": ("2",),
    "tests/rollout/test_probe.py::test_the_base_is_recorded_without_the_adapters_*": None,
    "tests/rollout/test_rewards.py::test_a_call_beside_one_that_ended_the_worker_*": None,
    "tests/rollout/test_rewards.py::test_a_call_is_made_again_if_the_time_of_another_*": None,
    "tests/rollout/test_rewards.py::test_a_new_worker_may_take_longer_to_start_than_a_call": None,
    "tests/rollout/test_rewards.py::test_functions_that_end_their_process": None,
    "tests/rollout/test_rewards.py::test_secrets_reach_a_worker_*": None,
    "tests/rollout/test_rewards.py::test_text_that_a_function_writes_*": None,
    "tests/rollout/test_rewards.py::test_the_state_of_a_module_*": None,
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
