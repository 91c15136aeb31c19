"""Images in rows of data, from the row to the tensors that a vision-language model reads.

sources.py finds the images of a row and reads them; stored.py keeps their pixels in a cache folder;
processor.py wraps the model's own processor. The engine's part is in engines/fsdp/vision.py, and
images are passed to vLLM in rollout/vllm/.
"""
