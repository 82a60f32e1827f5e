"""Intervals and verdicts against numbers worked out by hand."""

from __future__ import annotations

import pytest

from gasloc_p2p.studies.comparison import Claim, difference, verdict_sentence
from gasloc_p2p.studies.format import loss_text, percent_text
from gasloc_p2p.studies.statistics import (
    NORMAL_QUANTILE,
    T_QUANTILES,
    Estimate,
    at_least,
    at_most,
    estimate,
    relative_difference,
    t_quantile,
)


def test_quantiles() -> None:
    """Corner points of the printed table; the rest lies between them and falls."""
    assert len(T_QUANTILES) == 30
    assert (t_quantile(1), t_quantile(2), t_quantile(10)) == (12.706, 4.303, 2.228)
    assert (t_quantile(30), t_quantile(31), t_quantile(1000)) == (2.042, 1.960, 1.960)
    assert list(T_QUANTILES) == sorted(T_QUANTILES, reverse=True)
    assert T_QUANTILES[-1] > NORMAL_QUANTILE


def test_an_interval_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, variance 5/3, t(3) = 3.182; 3.182 sqrt(5/3/4) = 2.0540."""
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert found.mean == 2.5
    assert found.half_width == pytest.approx(2.0540, abs=1e-4)
    assert found.low == pytest.approx(0.4460, abs=1e-4)
    assert found.high == pytest.approx(4.5540, abs=1e-4)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    found = estimate([2.0])
    assert found == Estimate(mean=2.0, half_width=None, count=1)
    assert found.low is None
    assert found.high is None
    assert estimate([]) is None


def test_differences_are_paired() -> None:
    """+1 %, +3 %: mean 2, deviation sqrt 2, t(1) = 12.706; half width 12.706."""
    found = relative_difference([(2.02, 2.0), (4.12, 4.0)])
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.half_width == pytest.approx(12.706)
    assert difference({0: 2.02, 1: 4.12, 2: 9.0}, {1: 4.0, 0: 2.0, 5: 1.0}) == found
    assert difference({0: 1.0}, {1: 1.0}) is None


def between(low: float, high: float) -> Estimate:
    return Estimate(mean=(low + high) / 2, half_width=(high - low) / 2, count=3)


@pytest.mark.parametrize(
    ("found", "limit", "most", "least"),
    [
        (between(-1.0, 0.5), 0.5, "holds", "not decided"),
        (between(0.5, 1.0), 0.5, "not decided", "holds"),
        (between(0.6, 1.0), 0.5, "does not hold", "holds"),
        (between(-1.0, 0.4), 0.5, "holds", "does not hold"),
        (between(0.0, 1.0), 0.5, "not decided", "not decided"),
        (Estimate(mean=0.0, half_width=None, count=1), 0.5, "not decided", "not decided"),
        (None, 0.5, "not decided", "not decided"),
    ],
)
def test_verdicts(found: Estimate | None, limit: float, most: str, least: str) -> None:
    assert at_most(found, limit) == most
    assert at_least(found, limit) == least


def test_claims_in_words() -> None:
    claim = Claim(label="A", baseline="B", bound="at most", limit=0.5, words="A is near B")
    assert claim.short == "≤ +0.5 %"
    assert claim.judge(between(0.6, 1.0)) == "does not hold"
    found = verdict_sentence(
        claim.words, {"8 peers": "holds", "16 peers": "not decided", "32 peers": "holds"}
    )
    assert found == "A is near B: holds at 8 peers, 32 peers; not decided at 16 peers."
    assert verdict_sentence(claim.words, {"": "holds"}) == "A is near B: holds."


def test_numbers_in_tables() -> None:
    assert loss_text(None) == "–"
    assert loss_text(Estimate(mean=2.0104, half_width=None, count=1)) == "2.0104"
    assert loss_text(Estimate(mean=2.0104, half_width=0.00124, count=3)) == "2.0104 ± 0.0012"
    assert percent_text(Estimate(mean=0.311, half_width=0.5, count=3)) == "+0.31 ± 0.50 %"
    assert percent_text(Estimate(mean=-0.001, half_width=None, count=1)) == "+0.00 %"
