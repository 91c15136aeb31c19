"""vLLM inside the trainer's process, one replica for every `rollout.tensor_parallel_size` ranks.

engine          `Rollout`: generates responses, receives weights, gives its memory back
settings        checks of the configuration before any model is loaded
arguments       the arguments of `vllm.LLM`, computed from the configuration
versions        the vLLM releases that are supported, and how their interfaces differ
startup         changes to this process before vLLM starts
sampling        parameters and seeds of requests
generation      steps vLLM until a batch has ended
scheduler       a scheduler for batches whose prompts are all known
weight_sync     copies the trainer's weights into vLLM; weight_names: their names in vLLM
adapters        a LoRA adapter that vLLM keeps apart from its frozen base
capacity        how many responses are decoded at once
copies          finds out where vLLM copies weights
device_memory   sleeping and waking
image_prompts   prompts with images
speculation     drafters
probe           compares log-probabilities of vLLM and of the trainer after a sync
cpu             workarounds for vLLM's build for CPUs

Responses are graded and shared among ranks in `rollout/`; training is in `engines/` and `rl/`.

vLLM documents few of the interfaces that are needed here. Every use of an undocumented one has a
comment that begins with "vLLM-private:" and gives the reason. When a new release is added to
`versions.py`, a search for this mark finds the places to check.
"""
