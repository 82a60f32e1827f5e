"""`gasloc simulate`: a swarm in one process, in virtual time."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from gasloc_p2p.commands.arguments import check_output_file, make_folder
from gasloc_p2p.commands.model import with_model_here
from gasloc_p2p.config import Config
from gasloc_p2p.display import Display, make_display
from gasloc_p2p.report import SwarmReport
from gasloc_p2p.simulate.swarm import simulate

SOLO = {"topology": "none"}


def run(
    config: Config,
    *,
    algorithm: str,
    peers: int,
    compare_solo: bool,
    report_path: Path | None,
    keep: Path | None,
) -> None:
    """Simulate a swarm, show it, and write its report.

    Args:
        config: settings of every peer.
        algorithm: the name under which `config` was loaded.
        peers: how many.
        compare_solo: also train the same peers alone and report their mean loss.
        report_path: where the report goes, None for nowhere.
        keep: folder for every peer's report and parameters, laid out as `gasloc testnet` does.
    """
    check_output_file(report_path)
    config = with_model_here(config)
    if keep is not None:
        make_folder(keep)
    display = make_display(
        config.display.mode,
        title=f"simulated run {config.run.id}: {peers} peers, {config.gossip.topology}",
        peers=peers,
        rounds=config.run.rounds,
    )
    with display:
        simulation = simulate(config, peers=peers, observe=display.observe, algorithm=algorithm)
    solo_val_loss = None
    if compare_solo:
        display.say("training the same peers alone, for comparison")
        solo_val_loss = solo_loss(config, peers=peers)
    report = msgspec.structs.replace(simulation.report, solo_val_loss=solo_val_loss)
    if keep is not None:
        for index, result in enumerate(simulation.results):
            result.write(keep / f"peer-{index}")
    finish(report, display, report_path)


def solo_loss(config: Config, *, peers: int) -> float:
    """Train the same peers, seeds and steps with gossip off; return their mean validation loss."""
    alone = config.model_copy(
        update={
            "gossip": config.gossip.model_copy(update=SOLO),
            "run": config.run.model_copy(update={"closing_rounds": 0}),
        }
    )
    report = simulate(alone, peers=peers, observe=lambda index, event: None).report
    losses = [peer.val_loss for peer in report.peers if peer.val_loss is not None]
    return sum(losses) / len(losses)


def finish(report: SwarmReport, display: Display, report_path: Path | None) -> None:
    """Say what a swarm reached, and write its report."""
    for line in summary(report):
        display.say(line)
    if report_path is not None:
        report.write(report_path)
        display.say(f"report: {report_path}")


def summary(report: SwarmReport) -> list[str]:
    """Return what a swarm reached, in a few lines."""
    lines = [f"validation loss at the start {report.initial_val_loss:.4f}"]
    if report.averaged_val_loss is not None and not math.isfinite(report.averaged_val_loss):
        lines.append("the averaged model is useless: its loss is not a finite number")
    elif report.averaged_val_loss is not None:
        share = report.averaged_val_loss / report.initial_val_loss
        lines.append(
            f"validation loss of the averaged model {report.averaged_val_loss:.4f} "
            f"({share:.0%} of the start)"
        )
    if report.solo_val_loss is not None:
        lines.append(f"the same peers trained alone {report.solo_val_loss:.4f} on average")
        if report.averaged_val_loss is not None:
            gain = 1 - report.averaged_val_loss / report.solo_val_loss
            lines.append(
                f"training together is {abs(gain):.1%} {'better' if gain > 0 else 'worse'}"
            )
    if report.consensus_distance is not None:
        closing = report.closing_consensus_distance
        lines.append(
            f"consensus distance {report.consensus_distance:.4f} after training"
            + (f", {closing:.5f} after the closing rounds" if closing is not None else "")
        )
    if report.text_overlap is not None:
        lines.append(
            f"two peers trained on the same parts of the text to {report.text_overlap:.1%}"
        )
    if report.simulated_s is not None:
        lines.append(f"trained after {report.simulated_s:.1f} s of virtual time")
    for fault in report.faults:
        after = fault.absorbed_after_rounds
        end = "not absorbed" if after is None else f"absorbed {after} round(s) later"
        lines.append(f"{fault.kind} of peer {fault.peer} in round {fault.round}: {end}")
    lines.append(f"{report.wall_s:.1f} s")
    return lines
