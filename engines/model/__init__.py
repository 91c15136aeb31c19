"""What a Hugging Face model is, for both engines and for vLLM.

    hf              config.json, and the model's modules without memory (on the meta device)
    shape           the sizes of its layers
    logits          how it turns hidden states into logits
    flops           its number of floating-point operations
    lengths         checks of rotary embeddings and sliding windows against the run's lengths
    model_files     the safetensors files of a model directory
    names           names in the files and names in the model
    weights         checks of the files, and loading them into a sharded model
    lora, freeze    what is trained: adapters, or all parameters but some
    experts, mtp    mixtures of experts, and layers for multi-token prediction
    guard           proof that sequences in one batch do not see each other, by computing it
    mimo, quirks    models that transformers lacks, and how families differ in config.json

Nothing here knows how an engine divides a model over ranks, except that parameters may be DTensors.
"""
