"""The reward of the GRPO benchmark, as cheap as possible.

python train_ppo.py reward.function=benchmarks/even_words.py:even_words ...
"""


def even_words(prompt: str, response: str, row: dict) -> float:
    """Return the share of the response's words, such as w12, that have an even number."""
    numbers = [int(word[1:]) for word in response.split() if word[1:].isdigit()]
    num_even = sum(number % 2 == 0 for number in numbers)
    return num_even / max(len(numbers), 1)
