"""The examples of docs/foreign-topics.md work against a broker, and print what the page says."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from aiokafka.admin import NewTopic

from tests.adapters.kafka.foreign_topics import administration
from tests.test_docs import examples_of, run

pytestmark = pytest.mark.broker

PAGE = "foreign-topics.md"


def test_the_examples_run_in_order_and_print_what_the_page_says(kafka, tmp_path, capsys):
    unique = uuid4().hex
    names = {"orders": f"orders-{unique}", "bills": f"bills-{unique}", "billing": f"billing-{unique}"}

    async def make() -> None:
        async with administration(kafka) as admin:
            await admin.create_topics([NewTopic(names["orders"], 12, 1), NewTopic(names["bills"], 3, 1)])

    asyncio.run(make())
    examples = [example for example in examples_of(PAGE) if "kafka://" in example.code]
    assert len(examples) == 3
    for example in examples:
        code = example.code.replace("localhost:9092", kafka.bootstrap)
        for word, name in names.items():
            code = code.replace(f'"{word}"', f'"{name}"').replace(f'"{word}:', f'"{name}:')
        run(code, tmp_path)
        assert capsys.readouterr().out == example.printed
