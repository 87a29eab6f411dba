"""From chat messages to the token ids of a prompt, in one place: the supervised start and the generators must agree."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, str]]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """The chat template with the generation prompt if the tokenizer has one, else the contents one after the other.

    Raises whatever a template raises: templates are programs, which refuse roles, orders, …
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has them
    return list(tokenizer("".join(m["content"] for m in messages))["input_ids"])
