"""FSDP2 around a Hugging Face model.

    engine                      trains, evaluates and offloads a model
    checks, tracing             reject unsupported models and settings before reading weights
    transforms                  everything that changes the model before it is sharded
    sharding                    how FSDP divides the model
    packed_model                the module that FSDP shards
    attention, recurrence       layers over packed sequences
    vision, tower_attention     images
    router_loss                 the auxiliary loss of a mixture of experts
    state                       exports and checkpoints
    sharded_memory              estimates of memory

Not here: code for all engines (engines/), for Hugging Face models in general (engines/model/), or
for collectives and memory in general (engines/parallel/). This engine and engines/megatron do not
import each other.
"""
