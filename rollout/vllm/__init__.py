"""vLLM inside the trainer's process, one replica for every `rollout.tensor_parallel_size` ranks.

engine          `Rollout`: generates responses, receives weights, frees its memory for training
settings        checks the configuration before any model is loaded
arguments       computes the arguments of `vllm.LLM` from the configuration
versions        lists the supported vLLM releases, and how their interfaces differ
startup         changes settings of this process before vLLM starts
sampling        parameters and seeds of requests
generation      steps vLLM until the requests of a batch have ended
continuing      generates parts of responses, which continue later
scheduler       a faster scheduler for batches whose prompts are all known
weight_sync     copies the trainer's weights into vLLM
weight_names    maps the names of weights to their names in vLLM
adapters        a LoRA adapter that vLLM stores separately from its frozen base
capacity        how many responses vLLM decodes at once
copies          finds out where vLLM copies weights
device_memory   frees and restores vLLM's device memory
image_prompts   prompts with images
speculation     speculative decoding
probe           compares the log-probabilities of vLLM and the trainer after a sync
cpu             workarounds for vLLM's CPU build

Responses are graded and shared among ranks in `rollout/`; training is in `engines/` and `rl/`.

Few of the vLLM interfaces that are needed here are documented. Every use of an undocumented one has
a comment that begins with "vLLM-private:" and gives the reason. To support a new release, add it to
`versions.py` and check all places that have this comment.
"""
