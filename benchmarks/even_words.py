"""The reward of the GRPO benchmark, as cheap as possible: the share of a response's words that have an even number.

python train_ppo.py reward.function=benchmarks/even_words.py:even_words ...
"""


def even_words(prompt: str, response: str, row: dict) -> float:
    words = [word for word in response.split() if word[1:].isdigit()]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
