"""Hugging Face models: everything about them that both engines and vLLM need.

    hf              config.json, and the model's modules without memory (on the meta device)
    shape           the sizes of the model's layers
    logits          how the model turns hidden states into logits
    flops           floating-point operations of a forward and backward pass
    lengths         checks of rotary embeddings and sliding windows against the run's lengths
    model_files     the safetensors files of a model directory
    names           weight names in the files and in the model
    weights         checks of the files, and loading them into a sharded model
    lora, freeze    training only adapters, or freezing some parameters
    experts, mtp    mixtures of experts, and layers for multi-token prediction
    guard           a numerical check that sequences in one batch do not see each other
    mimo, quirks    a model that transformers lacks, and how families differ in config.json

Nothing here knows how an engine divides a model over ranks, except that parameters may be DTensors.
"""
