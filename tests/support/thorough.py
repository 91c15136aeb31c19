"""The tests that `make test` leaves to `make thorough`.

They take long, and what they catch is mostly caught by a quicker test, too: further layouts of
something that runs in several, and scripts and packages that change rarely. `make test` has to end
in time on slow machines. `make thorough` runs these alone; run it before a release, and after a
change of what they test.
"""

from collections.abc import Iterable

import pytest

from tests.support.tables import entry_of

# Test, or a pattern -> the cases, as they stand in brackets after its name; None: all.
THOROUGH: dict[str, Iterable[str] | None] = {
    # They install other packages, and wait for those to start.
    "tests/repository/test_docs_clients.py::test_a_client_plays": None,
    # Scripts that start several processes.
    "tests/repository/test_benchmarks.py::test_a_benchmark_runs_*": (
        "episodes_gpu.py",
        "grpo_vs_trl.py",
        "long_tails.py",
        "memory_h200.py",
        "precision.py",
        "profiling_cost.py",
        "resume.py",
        "routing_replay.py",
        "scaling.py",
        "sft_vs_trl.py",
        "speculative_h200.py",
        "tokenize_speed.py",
    ),
    # Two nodes with a slow link: no code of the product is about it, and it takes over a minute.
    "tests/job/test_slow_link.py::test_delays_and_lost_packets_*": None,
    "tests/repository/test_benchmarks.py::test_a_step_with_images_is_prepared": None,
    "tests/repository/test_examples.py::test_the_demo_with_tools_in_short": None,
    # Further numbers of GPUs, and models that are like others.
    "tests/repository/test_model_configs.py::test_a_launch_is_valid_and_fits": (
        "gemma_3_4b/grpo on 16",
        "gemma_3_4b/grpo_lora on 1",
        "gemma_3_4b/sft on 8",
        "gemma_3_4b/sft on 16",
        "gemma_3_4b/sft_lora on 1",
        "llama_3_1_8b/grpo on 8",
        "llama_3_1_8b/grpo on 16",
        "llama_3_1_8b/grpo_lora on 1",
        "llama_3_1_8b/sft on 16",
        "llama_3_1_8b/sft_lora on 1",
        "qwen2_5_vl_7b/grpo on 16",
        "qwen2_5_vl_7b/sft on 8",
        "qwen2_5_vl_7b/sft on 16",
        "qwen3_30b_a3b/grpo_lora on 8",
        "qwen3_30b_a3b/sft on 8",
        "qwen3_30b_a3b/sft on 16",
        "qwen3_30b_a3b/sft_lora on 1",
        "qwen3_4b/grpo on 8",
        "qwen3_4b/grpo on 16",
        "qwen3_4b/grpo_lora on 1",
        "qwen3_4b/sft on 8",
        "qwen3_4b/sft on 16",
        "qwen3_4b/sft_lora on 1",
        "qwen3_8b/grpo on 16",
        "qwen3_8b/sft on 8",
        "qwen3_8b/sft on 16",
    ),
    # Estimates of every model on every GPU, and runs of every recipe.
    "tests/repository/test_what_fits.py::test_the_page_has_the_tables_that_are_printed": None,
    "tests/repository/test_tools.py::test_both_recipes_run_with_a_small_model": None,
    "tests/repository/test_game.py::test_both_recipes_run_with_a_small_model": None,
    "tests/repository/test_self_play.py::test_both_players_learn_*": None,
    # Combinations of layouts that are tested one by one, too.
    "tests/engines/test_m*.py::test_*": (
        "2-auto_critic",
        "2-auto_moe_ep2",
        "2-auto_padded_full",
        "2-auto_windows_padded",
        "2-bf16_cp2",
        "2-bf16_dp2_replicated",
        "2-critic_cp2",
        "2-critic_pp2",
        "2-dp2_overlap",
        "2-dp2_replicated_overlap",
        "2-frozen_critic_pp2",
        "2-frozen_pp2_tied",
        "2-lora_bf16_tp2",
        "2-lora_critic_bf16_pp2",
        "2-lora_pp2_tied_full",
        "2-lora_tp2_no_sp",
        "2-lora_yarn_tp2",
        "2-mistral_cp2",
        "2-mistral_pp2_vpp2",
        "2-mixtral_pp2",
        "2-moe_bf16_ep2",
        "2-moe_cp2_ep2",
        "2-moe_tp2_ep2_padded",
        "2-pp2_full",
        "2-pp2_padded",
        "2-tp2_full",
        "2-tp2_padded",
        "2-tp2_selective",
        "2-windows_cp2_padded",
        "2-yarn_pp2_full",
        "2-yarn_tp2_no_sp_padded",
        "4-auto_moe_tp2_ep4",
        "4-auto_padded",
        "4-auto_pp2_vpp2",
        "4-auto_tp2_full",
        "4-critic_tp2_pp2",
        "4-lora_tp2_pp2_full",
        "4-moe_tp2_ep4",
        "4-pp2_cp2",
        "4-tp4",
    ),
    "tests/engines/test_mtp.py::test_*": (
        "mtp_auto_padded_full",
        "mtp_bf16_tp2",
        "mtp_cp2_padded_full",
        "mtp_pp2_detached_padded",
        "mtp_pp2_vpp2_tied_full",
        "mtp_tp2_no_sp_padded",
    ),
    "tests/engines/test_megatron_checkpoints.py::test_*": (
        "bf16_dp2_to_replicated",
        "bf16_replicated_tp2_to_dp2",
        "buckets_dp4_to_tp2",
        "frozen_moe_pp2_to_ep2",
        "replicated_pp2_to_dp2",
    ),
    "tests/engines/fsdp/test_training.py::test_*": (
        "1-compiled",  # for two minutes; compiled losses and updates are compared elsewhere, too
        "2-lora_cp2",
        "2-lora_offload",
        "2-uneven_padded",
        "4-again_cp2_dp2",
        "4-again_auto",
        "4-auto_bf16",
        "4-auto_hybrid",
        "4-auto_padded",
        "4-auto_sliding_window",
        "4-auto_without_heads_for_two",
        "4-fp32_master_cp2",
        "4-hybrid_cp2",
        "4-lora_hybrid_cp2",
        "4-uneven",
        "4-uneven_cp2_dp2",
    ),
    # Two other layouts repeat their bits, too, and with Megatron the dynamic one.
    "tests/engines/fsdp/test_training.py::test_same_layout_same_bits": (
        "4-again auto-auto",
        "4-again cp2 dp2-cp2 dp2",
    ),
    "tests/engines/fsdp/test_checkpoints.py::test_*": ("4-llama", "4-lora"),
    # The text of two further models of images is trained in `make test`.
    "tests/engines/fsdp/test_families.py::test_the_text_of_a_model_of_images_*": (
        "gemma3 with images",
        "mistral3 with images",
    ),
    "tests/rollout/test_rollout.py::test_the_closed_batch_scheduler_*": (
        "tied-2-rollout.tensor_parallel_size=2",
    ),
    # "tied_unsaid" differs from "tied" in the names of its weights.
    "tests/rollout/test_rollout*.py::test_*": (
        "tied_unsaid",
        "tied_unsaid-0.6",
        "tied_unsaid-1.0",
        "tied_unsaid-Rollout()",
        "tied_unsaid-generate()",
        "tied_unsaid-min_p",
        "tied_unsaid-temperature",
        "tied_unsaid-top_k",
        "tied_unsaid-top_p",
    ),
    "tests/data/test_images.py::test_rows_are_what_*": (
        "2-qwen2_5_vl recompute",
        "2-qwen3_vl",
        "2-frozen",
    ),
    # Other levels and dtypes of something that is tested with one of them.
    "tests/profiling/test_msprobe.py::test_calls_are_dumped_also_*": ("L1",),
    "tests/profiling/test_msprobe.py::test_engines_dump_all_they_run": ("megatron-statistics-",),
    "tests/engines/test_low_precision.py::test_the_compiled_update_is_the_same": (
        "bfloat16, 8-bit moments",
        "bfloat16, fp32 moments",
        "fp32, 8-bit moments",
    ),
    "tests/job/test_sft.py::test_a_full_disk_is_one_line": ("the third checkpoint",),
    "tests/job/test_output.py::test_a_hang_names_the_rank_that_did_not_come": (
        "earlier-1 rank is missing: rank 1 was last seen in stage 'reward' of step 7, entered ",
    ),
    "tests/rl/test_train_ppo.py::test_nothing_that_is_learned_*": (
        "2 ranks, LoRA",
        "4 ranks",
        "Megatron PP2",
    ),
    "tests/rl/test_partial_runs.py::test_a_run_resumes_with_another_number_of_replicas": None,
    "tests/profiling/test_compare.py::test_engines_agree": None,
    # A scaled matrix is found in `make test`, with the commands of the docs.
    "tests/profiling/test_compare.py::test_the_planted_defect_is_found": None,
    "tests/engines/test_mtp.py::test_another_vllm_drafts_with_the_exported_layer": None,
    "tests/engines/test_divergence.py::test_compiled": ("forward_kl-0", "jsd-0", "reverse_kl-5"),
    # TRL takes long to import. `make test` compares the same losses and estimators with verl's, and
    # those of pairs with the formulas of their papers.
    "tests/rl/test_trl_policy_losses.py::test_*": None,
    "tests/preferences/test_trl.py::test_*": None,
    "tests/reward_models/test_trl.py::test_*": None,
    # A run with tools is tested, too; this one is that of the text about forking.
    "tests/repository/test_forking.py::test_a_turn_of_a_tool": None,
    # Runs of the same script with other settings are killed in `make test`.
    "tests/rl/test_killed_runs.py::test_a_killed_run_with_*": None,
    # Layouts that the engines' own tests compare, too.
    "tests/reward_models/test_train_rm.py::test_losses_and_gradients_do_not_*": (
        "lora-2 ranks",
        "pairs-context parallel",
        "pairs-large micro-batches",
        "pairs-dynamic context parallel",
        "pairs-Megatron CP",
        "pairs-Megatron PP",
        "pairs-Megatron TP",
        "margins-2 ranks",
        "mixture of experts-2 ranks",
        "lora-Megatron TP",
        "scores-2 ranks",
    ),
    "tests/reward_models/test_train_rm.py::test_peft_loads_*": ("Megatron TP",),
    "tests/reward_models/test_train_rm.py::test_kill_and_resume_*": ("LoRA", "Megatron"),
    "tests/preferences/test_train_dpo.py::test_losses_and_gradients_do_not_*": (
        "dpo-2 ranks, padded",
        "dpo-dynamic context parallel",
        "lora-2 ranks, cached",
        "lora-a model of its own",
        "dpo-large micro-batches, cached",
        "dpo-Megatron CP",
        "dense reference-Megatron EP, cached",
        "kto-dynamic context parallel",
        "lora-Megatron TP",
        "mixture of experts-Megatron",
        "mixture of experts-padded, cached",
    ),
    "tests/rl/test_reward_model.py::test_scores_are_those_of_transformers": (
        "a number, gdpo",
        "a policy with experts",
        "a teacher",
        "another tokenizer, 2 ranks",
        "one vLLM for 2 ranks",
        "context parallel",
        "Megatron",
        "Megatron PP",
        "Megatron TP",
        "partial",
        "adapters",
        "parts, gdpo",
        "the policy's tokenizer, 2 ranks",
    ),
    "tests/rl/test_routing_replay.py::test_every_token_has_its_experts": (
        "critic",
        "partial",
        "partial episodes",
        "vllm tp2",
        "adapters",
    ),
    "tests/rl/test_partial_episode_runs.py::test_with_the_same_weights_*": (
        "two replicas",
        "tp",
        "validation",
    ),
    # Runs with episodes alone, and with responses that continue, are killed in `make test`.
    "tests/rl/test_partial_episode_runs.py::test_a_run_that_is_killed_*": None,
    "tests/rl/test_partial_runs.py::test_with_the_same_weights_*": (
        "tp",
        "two replicas",
    ),
    "tests/rl/test_partial_runs.py::test_responses_to_pictures_continue": None,
    "tests/rl/test_episode_runs.py::test_other_layouts_*": (
        "Megatron",
        "LoRA",
    ),
    "tests/rollout/test_adapters.py::test_*": ("merged_tp2", "shared_replicated"),
    "tests/rollout/test_routes.py::test_vllm_records_the_experts_of_every_token": (
        "grouped",
        "ngram",
        "preempted",
        "tp2",
    ),
    "tests/rollout/test_partial_reference.py::test_*": (
        "episodes, tp",
        "tp",
        "replicas",
    ),
}


def mark_thorough(items: list[pytest.Item]) -> None:
    """Mark the tests among the collected ones."""
    for item in items:
        if entry_of(item.nodeid, THOROUGH):
            item.add_marker(pytest.mark.thorough)
