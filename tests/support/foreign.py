"""Shapes of tiny models that differ from llama in attention, logits, experts or recurrence.

Each is a change to tests.support.models.SHAPE, under the name of its family.
"""

DELTA_NET = dict(
    num_hidden_layers=4,
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=8,
    num_key_value_heads=4,
)
FOREIGN = {
    "mistral": dict(model_type="mistral", sliding_window=7),
    "granite": dict(
        model_type="granite",
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
    "gemma2": dict(
        model_type="gemma2",
        head_dim=8,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        sliding_window=7,
    ),
    "gemma3_text": dict(model_type="gemma3_text", head_dim=8, sliding_window=7),
    "cohere2": dict(model_type="cohere2", num_hidden_layers=4, logit_scale=0.25, sliding_window=7),
    "minicpm3": dict(model_type="minicpm3", dim_model_base=16, **LATENT),
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "mixtral": dict(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    ),
    "glm4_moe": dict(
        model_type="glm4_moe",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=16,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
    ),
    # Has experts beside an MLP, and its own name for the number of experts per token.
    "gemma4 with experts": dict(
        model_type="gemma4_text",
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=97,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "nemotron_h": dict(
        model_type="nemotron_h",
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        head_dim=8,
        num_experts_per_tok=2,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
    "qwen3_next": dict(
        model_type="qwen3_next",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        **DELTA_NET,
    ),
    "qwen3_5": dict(model_type="qwen3_5_text", **DELTA_NET),
    # Its files have three convolutions where a layer has one, [c, 1, k].
    "olmo_hybrid": dict(model_type="olmo_hybrid", **DELTA_NET),
    # Passes positions to its recurrent blocks, which return a tuple.
    "recurrent_gemma": dict(
        model_type="recurrent_gemma",
        lru_width=32,
        attention_window_size=64,
        conv1d_width=4,
        logits_soft_cap=30.0,
    ),
    "bamba": dict(
        model_type="bamba",
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=16,
        attn_layer_indices=[1],
    ),
}
