"""Images, from a row of data to the input tensors of a vision-language model.

sources.py finds and reads the images of a row; stored.py stores their pixels in a cache folder;
processor.py wraps the processor of the model. engines/fsdp/vision.py passes images to the model,
and rollout/vllm/image_prompts.py to vLLM.
"""
