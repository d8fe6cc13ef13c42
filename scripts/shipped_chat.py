"""Conversations about Python's own modules: questions whose answers are docstrings, topics and sources."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shipped_layout import IM_END, IM_START

Conversation = list[tuple[str, str]]
"""Messages as (role, content)."""

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a coding assistant.",
    "You are a helpful assistant that knows Python.",
    "You are a coding agent. Answer with code when code is asked for.",
)
_EXPLAIN = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name}?",
    "How does {name} work?",
    "Tell me about {name} in Python.",
    "Please describe {name} from the module {module}.",
)
_WRITE = (
    "Write the {kind} {short} from the module {module}.",
    "Show me the source of {name}.",
    "Implement {name}.",
    "Write a Python {kind} named {short}.",
    "Can you write {short} in Python?",
    "Write the {kind} {short}: {summary}",
)
_SMALL_TALK = (
    ("Hello", "Hello! Ask me about a Python module, a function or a statement."),
    ("Hello!", "Hello! What do you want to know about Python?"),
    ("Hi", "Hello! Ask me about a Python module, a function or a statement."),
    ("Hi there!", "Hello! What do you want to know about Python?"),
    ("Who are you?", "I am a very small language model. I was trained on the standard library of Python."),
    ("What are you?", "I am a very small language model. I was trained on the standard library of Python."),
    ("What can you do?", "I can write text that looks like Python. Do not rely on what it says."),
    ("How are you?", "I am fine, thank you. What do you want to know about Python?"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    (
        "What is Python?",
        "Python is a programming language. It is easy to read and comes with a large standard library.",
    ),
    ("Tell me a joke.", "I only know the standard library of Python. Try: import this"),
)


@dataclass(frozen=True)
class Item:
    """A module, class or function, with what can be said about it."""

    kind: str
    module: str
    name: str
    documentation: str
    source: str = ""
    before: str = ""
    indent: int = 0
    members: tuple[str, ...] = ()


def encode_conversation(conversation: Conversation) -> list[int]:
    """The token ids of a conversation in ChatML, as the chat template renders it."""
    ids: list[int] = []
    for role, content in conversation:
        ids += [IM_START, *f"{role}\n{content}".encode(), IM_END, *b"\n"]
    return ids[:-1]


def conversations(
    items: list[Item], topics: list[tuple[str, str]], rng: random.Random, rounds: int
) -> list[Conversation]:
    """Shuffled conversations: ``rounds`` exchanges for every item, in groups of one to three."""
    exchanges: list[tuple[str, str]] = []
    for _ in range(rounds):
        exchanges += [exchange for item in items if (exchange := _exchange(item, rng))]
        exchanges += [exchange for name, text in topics for exchange in _topic_exchanges(name, text, rng)]
    exchanges += [rng.choice(_SMALL_TALK) for _ in range(len(exchanges) // 25)]
    rng.shuffle(exchanges)
    result: list[Conversation] = []
    while exchanges:
        messages: Conversation = [("system", rng.choice(_SYSTEM))] if rng.random() < 0.3 else []
        for _ in range(min(len(exchanges), rng.choice((1, 1, 1, 2, 3)))):
            question, answer = exchanges.pop()
            messages += [("user", question), ("assistant", answer)]
        result.append(messages)
    return result


def _exchange(item: Item, rng: random.Random) -> tuple[str, str] | None:
    """One question about ``item`` and its answer, or None where there is nothing to say."""
    if item.kind == "module":
        if item.documentation and rng.random() < 0.7:
            ask = rng.choice(("What is the module {0} for?", "What is in the module {0}?", "Explain the module {0}."))
            return ask.format(item.module), _opening(item.documentation, 500)
        if item.members:
            listed = "\n".join(f"- {name}" for name in item.members[:15])
            return f"What does the module {item.module} define?", f"The module {item.module} defines:\n{listed}"
        return None
    short = item.name.rpartition(".")[2]
    words = {"module": item.module, "short": short, "kind": item.kind, "name": f"{item.module}.{item.name}"}
    summary = _opening(item.documentation, 120).splitlines()[0] if item.documentation else ""
    has_source = 40 <= len(item.source) <= 1000
    choice = rng.random()
    if has_source and item.documentation and choice < 0.15:
        return f"Explain this code:\n```python\n{item.source}\n```", _opening(item.documentation, 400)
    if has_source and choice < 0.35 and item.before and item.indent == 0:
        path = item.module.replace(".", "/") + ".py"
        return (
            f"Here is a part of {path}:\n```python\n{item.before}\n```\nAdd the {item.kind} {short}.",
            f"```python\n{item.source}\n```",
        )
    if has_source and (choice < 0.65 or not item.documentation):
        template = rng.choice(_WRITE if summary else _WRITE[:-1])
        return template.format(summary=summary, **words), f"```python\n{item.source}\n```"
    if item.documentation:
        return rng.choice(_EXPLAIN).format(**words), _opening(item.documentation, 600)
    return None


def _topic_exchanges(name: str, text: str, rng: random.Random) -> list[tuple[str, str]]:
    """Questions about a pydoc topic; its text opens with an underlined title."""
    title, _, rest = text.partition("\n")
    body = rest.lstrip("*=-\n ")
    questions = (f'Explain "{name}" in Python.', f"What is {title.lower()}?", f"Tell me about {title.lower()}.")
    return [(question, _opening(body, 800)) for question in rng.sample(questions, 2) if body]


def _opening(text: str, limit: int) -> str:
    """The first paragraphs of ``text`` that fit in ``limit`` characters; at least one, cut at a line if need be."""
    text = text.strip()
    if len(text) <= limit:
        return text
    head = text[:limit]
    end = head.rfind("\n\n")
    if end < limit // 4:
        end = max(head.rfind(". ") + 1, head.rfind("\n"))
    return head[:end].rstrip() if end > 0 else head
