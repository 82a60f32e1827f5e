"""The study `codec`: what its figures are made of, and what its claims say."""

from __future__ import annotations

from gasloc_p2p.config import Config
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.report import EdgeReport, RoundReport
from gasloc_p2p.studies.cell import Outcome, SwarmCell, SwarmResult, cell_key
from gasloc_p2p.studies.codec import CLAIMS, CodecStudy
from gasloc_p2p.studies.measure import run_cell
from gasloc_p2p.studies.traffic import Traffic, exchanged_blocks

from .tiny import SHORT, setup_of

PARAMETERS = 1000


def round_of(number: int, *edges: EdgeReport, bytes_sent: int) -> RoundReport:
    return RoundReport(
        round=number,
        closing=False,
        local_steps=1,
        train_loss=1.0,
        edges=edges,
        bytes_sent=bytes_sent,
        bytes_received=0,
        train_s=0.0,
        exchange_s=0.0,
        wait_s=0.0,
    )


def edge(repaired: int = 0, kind: EdgeKind = EdgeKind.APPLIED) -> EdgeReport:
    return EdgeReport(partner="p", kind=kind, repaired_blocks=repaired)


def test_bits_and_repairs_are_those_of_mixed_edges() -> None:
    traffic = Traffic()
    assert traffic.bits_per_parameter(PARAMETERS) is None
    traffic.note(round_of(0, edge(2), edge(0), bytes_sent=1000))
    traffic.note(round_of(0, edge(1, EdgeKind.ASYMMETRIC), bytes_sent=500))
    traffic.note(round_of(1, edge(0, EdgeKind.LOST), bytes_sent=100))
    traffic.note(round_of(2, edge(6), bytes_sent=900))
    assert traffic.bits_per_parameter(PARAMETERS) == 8 * 2500 / (4 * PARAMETERS)
    assert traffic.repaired_shares(10) == (3 / 30, 6 / 10)
    assert traffic.repaired_shares(None) == ()


def test_blocks_are_those_of_all_vectors_of_the_codec() -> None:
    def blocks(codec: str, rule: str = "nesterov") -> int | None:
        settings = {"gossip": {"codec": codec}, "outer": {"rule": rule}}
        return exchanged_blocks(Config.model_validate(settings), PARAMETERS)

    assert blocks("none") is None
    assert blocks("mod4") == 16
    assert blocks("mod4", "noloco") == 32


def test_a_run_counts_its_bits_and_its_repairs() -> None:
    study = CodecStudy(peers=(4,), codecs=("none", "mod4"), topologies=("pairs",))
    uncompressed, compressed = (
        run_cell(cell, lambda rounds: None) for cell in study.cells(setup_of(SHORT, seeds=1), 0, [])
    )
    assert isinstance(uncompressed, SwarmResult)
    assert isinstance(compressed, SwarmResult)
    assert uncompressed.bits_per_parameter is not None
    assert 32 < uncompressed.bits_per_parameter < 32.5
    assert uncompressed.repaired_shares == ()
    assert compressed.bits_per_parameter is not None
    assert 4.375 < compressed.bits_per_parameter < 7
    assert len(compressed.repaired_shares) == 2
    assert all(0 <= share < 0.2 for share in compressed.repaired_shares)


FOUND = {"none": (0.0, 1.0, 32.0), "mod8": (0.05, 1.9, 8.4), "mod4": (0.5, 4.0, 4.79)}
"""Percent of loss above none's, multiple of its distance, and bits."""


def outcomes(**changes: tuple[float, float, float]) -> list[Outcome]:
    """Return made-up runs, in which losses differ by a hundredth of a percent between seeds."""
    study, found = CodecStudy(codecs=tuple(FOUND)), {**FOUND, **changes}
    made = []
    for cell in study.cells(setup_of({}, seeds=3), 0, []):
        assert isinstance(cell, SwarmCell)
        percent, times, bits = found[str(cell.labels["gossip.codec"])]
        base = 2.0 + cell.seed
        loss = base * (1 + (percent + 0.01 * cell.seed * (percent > 0)) / 100)
        result = SwarmResult(
            initial_val_loss=9.0,
            averaged_val_loss=loss,
            own_val_loss=loss,
            consensus_distance=0.01 * base * times,
            closing_consensus_distance=None,
            bytes_sent=1,
            simulated_s=None,
            wall_s=1.0,
            bits_per_parameter=bits,
            repaired_shares=() if bits > 9 else (0.03, 0.01),
        )
        made.append(Outcome(key=cell_key(cell), cell=cell, result=result))
    return made


def test_figures_are_paired_with_those_without_compression() -> None:
    figures, _ = CodecStudy().summary(outcomes()).tables
    rows = {row[:2]: row[2:] for row in figures.rows}
    assert list(rows)[:3] == [("pairs", "none"), ("pairs", "mod8"), ("pairs", "mod4")]
    assert rows["ring", "mod8"][1] == rows["ring", "mod8"][3] == "+0.06 ± 0.02 %"
    assert rows["ring", "mod8"][5:] == ("1.90 ± 0.00", "8.40 ± 0.00", "2.00 ± 0.00")
    assert rows["ring", "none"][1::2] == ("–", "–", "–", "–")


def test_claims_hold_or_not() -> None:
    _, claims = CodecStudy().summary(outcomes(mod4=(0.5, 4.0, 4.9))).tables
    verdicts = {row[:3]: row[4:] for row in claims.rows}
    assert len(verdicts) == 2 * len(CLAIMS)
    assert verdicts["mod8", "own loss", "pairs"] == ("≤ 0.1 %", "holds")
    assert verdicts["mod8", "distance", "ring"] == ("≤ 2 times", "holds")
    assert verdicts["mod8", "bits per parameter", "ring"] == ("≤ 8.5 bits", "holds")
    assert verdicts["mod4", "averaged loss", "pairs"] == ("≤ 0.4 %", "does not hold")
    assert verdicts["mod4", "bits per parameter", "pairs"] == ("≤ 4.8 bits", "does not hold")
    sentences = CodecStudy().summary(outcomes(mod8=(0.1, 2.1, 8.4))).verdicts
    assert (
        "With mod8 the own loss is within 0.1 % of that without compression: not decided at "
        "pairs, ring." in sentences
    )
    assert any("twice" in text and "does not hold at pairs, ring" in text for text in sentences)


def test_a_run_that_diverged_decides_nothing() -> None:
    _, claims = CodecStudy().summary(outcomes(none=(900.0, 1.0, 32.0))).tables
    assert {row[5] for row in claims.rows} == {"not decided"}
