"""The scripted conversation: a coding agent repairs a small ledger. Users and assistants alternate strictly.

Tool calls and their results are written into the messages' text, so that any chat template takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atom.entrypoints.demo.player import Message

SYSTEM = """You are a coding agent that works in a checkout on the user's machine. You see the project through tools and
change it through tools. Think before you act, read before you write, and run the tests before you say that you are done.

Tools, one call a message, written as a line that starts with CALL:
  CALL list_files FOLDER            names of the files below a folder
  CALL read_file PATH               the whole text of a file
  CALL replace PATH OLD NEW         replace one exact occurrence of a text
  CALL run_tests [NAME]             run the test suite, or the tests whose name contains NAME
The result of a call comes back as a message that starts with RESULT.

Rules:
  1. Change as little as the task needs. Keep names, style and public functions as they are.
  2. Amounts are whole cents. Never introduce floats into a sum.
  3. A bug that you repair gets a test that fails without the repair.
  4. When something is unclear, say what you assume and go on.
"""

TASK = """Our month-end report is off by a few cents for customers that pay in instalments. The sum of the instalments does
not match the invoice. Find out why, repair it and add a test. The code is in the folder ledger, start with money.py.
"""

MONEY_PY = '''RESULT read_file ledger/money.py
"""Amounts of money in whole cents, with their currency."""

from __future__ import annotations

from dataclasses import dataclass


class CurrencyMismatch(ValueError):
    """Two amounts of different currencies cannot be combined."""


@dataclass(frozen=True)
class Money:
    """An amount in cents. Immutable; every operation returns a new amount."""

    cents: int
    currency: str = "EUR"

    def __add__(self, other: Money) -> Money:
        self._check(other)
        return Money(self.cents + other.cents, self.currency)

    def __sub__(self, other: Money) -> Money:
        self._check(other)
        return Money(self.cents - other.cents, self.currency)

    def __lt__(self, other: Money) -> bool:
        self._check(other)
        return self.cents < other.cents

    def split(self, parts: int) -> list[Money]:
        """Divide the amount into equal parts."""
        share = round(self.cents / parts)
        return [Money(share, self.currency) for _ in range(parts)]

    def _check(self, other: Money) -> None:
        if self.currency != other.currency:
            raise CurrencyMismatch(f"{self.currency} and {other.currency}")
'''

INVOICE_PY = '''RESULT read_file ledger/invoice.py
"""Invoices and the instalments that pay them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta

from ledger.money import Money


@dataclass
class Instalment:
    """One payment of a plan, due on a day."""

    due: date
    amount: Money
    paid: bool = False


@dataclass
class Invoice:
    """What a customer owes, and the plan of how it is paid."""

    number: str
    total: Money
    issued: date
    plan: list[Instalment] = field(default_factory=list)

    def make_plan(self, count: int, days_between: int = 30) -> None:
        """Replace the plan by ``count`` instalments of the same size."""
        self.plan = [
            Instalment(self.issued + timedelta(days=days_between * number), amount)
            for number, amount in enumerate(self.total.split(count), start=1)
        ]

    def open_instalments(self, today: date) -> Iterator[Instalment]:
        """Instalments that are due and not paid, the oldest first."""
        for instalment in sorted(self.plan, key=lambda item: item.due):
            if instalment.due <= today and not instalment.paid:
                yield instalment

    @property
    def balance(self) -> Money:
        """What is still to be paid."""
        paid = sum(item.amount.cents for item in self.plan if item.paid)
        return Money(self.total.cents - paid, self.total.currency)
'''

TEST_RESULT = """RESULT run_tests invoice
tests/test_invoice.py::test_plan_has_one_instalment_a_month PASSED
tests/test_invoice.py::test_balance_after_every_instalment_is_zero FAILED
    invoice = Invoice("2024-117", Money(10000), date(2024, 1, 31))
    invoice.make_plan(3)
    for instalment in invoice.plan:
        instalment.paid = True
>   assert invoice.balance == Money(0)
E   AssertionError: assert Money(cents=1, currency='EUR') == Money(cents=0, currency='EUR')
1 failed, 1 passed
"""

CORRECTION = """Good find. Give the spare cents to the first instalments, one each, so that no two of them differ by more than
a cent and the sum is exact. Also refuse a number of parts below one with a ValueError. Show me the new split function.
"""

BRANCH_DOCS = """Stop here, I will repair that myself. Write a short docstring for Money.split instead, one that says what
happens with cents that cannot be divided evenly.
"""

BRANCH_REVIEW = """Before you change anything, review this file for other mistakes of this kind and list them by line. Look
at the comparison, at the rounding, and at amounts in different currencies.
"""

UNRELATED = """Summarise this weather report in one sentence, for a sailor.

The low over the northern sea deepens and moves east overnight. Winds in the strait back to the south-west and increase to
force six by dawn, seven in gusts near the capes, and veer to the north-west behind the front around noon. Showers, some
with thunder, in which visibility falls below two miles. Sea state four to five, falling to three in the evening. The
following day brings a ridge from the west with light winds, fog patches at first and a long, low swell.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. ``messages`` makes the conversation from the answers that earlier turns got, by name."""

    name: str
    messages: Callable[[Mapping[str, str]], list[Message]]


def _opening() -> list[Message]:
    return [
        {"role": "system", "content": SYSTEM},
        *_dialogue(TASK, "CALL read_file ledger/money.py", MONEY_PY, "CALL read_file ledger/invoice.py", INVOICE_PY),
    ]


def _dialogue(*texts: str) -> list[Message]:
    """Texts as alternating messages, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def _after_first(answers: Mapping[str, str], *texts: str) -> list[Message]:
    return [*_opening(), {"role": "assistant", "content": answers["cold"]}, *_dialogue(*texts)]


def _in_the_middle(text: str) -> list[Message]:
    """Another way on after the first file: inside a message, where no earlier prompt ended."""
    return [
        {"role": "system", "content": SYSTEM},
        *_dialogue(TASK, "CALL read_file ledger/money.py", f"{MONEY_PY}\n{text}"),
    ]


SCRIPT: Sequence[Turn] = (
    Turn("cold", lambda _: _opening()),
    Turn("resent", lambda _: _opening()),
    Turn("continued", lambda answers: _after_first(answers, TEST_RESULT)),
    Turn("continued again", lambda answers: _after_first(answers, TEST_RESULT, answers["continued"], CORRECTION)),
    Turn("sibling A", lambda _: _in_the_middle(BRANCH_DOCS)),
    Turn("sibling B", lambda _: _in_the_middle(BRANCH_REVIEW)),
    Turn("unrelated", lambda _: [{"role": "user", "content": UNRELATED}]),
)
