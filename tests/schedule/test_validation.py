"""docs/validation.md says what benchmarks/validation.py computes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def validation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("validation")


def test_the_page_has_the_figures_of_the_script(validation: ModuleType) -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    for row in validation.collective_rows():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row['what']} ")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:4] == [
            f"{row['measured'] * 1e6:,.0f} us",
            f"{row['predicted'] * 1e6:,.0f} us",
            f"{row['predicted'] / row['measured']:.2f}",
        ], row["what"]


def test_the_model_of_the_links_is_near_what_others_measured(validation: ModuleType) -> None:
    """No row is off by a factor, and half of them are within an eighth."""
    ratios = [row["predicted"] / row["measured"] for row in validation.collective_rows()]
    assert all(0.5 < ratio < 1.5 for ratio in ratios)
    assert sum(7 / 8 < ratio < 8 / 7 for ratio in ratios) >= len(ratios) / 2


def test_eight_bits_halve_the_bytes_and_take_their_own_rate(validation: ModuleType) -> None:
    (work,) = validation.eight_bits({"k": validation.Work(10, 8, 1)}).values()
    assert work == validation.Work(10, 4, 1, (("f8", 10),))
