"""Images in rows of data, from the row to the tensors that a vision-language model reads.

sources.py finds the images of a row and reads them; stored.py keeps their pixels in a cache folder;
processor.py is the model's own processor. How an engine computes with images is not here but in
engines/fsdp/vision.py, and how vLLM gets them is in rollout/vllm/.
"""
