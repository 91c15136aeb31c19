"""FSDP2 around a Hugging Face model.

engine.py has the engine: it trains, evaluates and offloads. Around it, by subject: transforms.py
(everything that changes the model before it is sharded), sharding.py, packed_model.py (the module
that FSDP shards), attention.py and recurrence.py (layers over packed sequences), vision.py and
tower_attention.py (images), router_loss.py, state.py (exports and checkpoints), and checks.py and
tracing.py (what is rejected before weights are read).

Not here: anything that holds for every engine (engines/), for a Hugging Face model wherever it runs
(engines/model/), or for collectives and memory in general (engines/parallel/). This engine and
engines/megatron do not import each other.
"""
