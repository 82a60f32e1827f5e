"""`python -m gasloc_p2p.testing chaos --seed N`: run one random case again and tell its story."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gasloc_p2p.core.errors import GaslocError
from gasloc_p2p.testing.chaos import MODEL_SETTINGS, REPLAY, Case, ChaosFailure
from gasloc_p2p.testing.trace import SwarmTrace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the case that `arguments` describe; return 0 if everything held, 1 if not."""
    case = _parse(arguments)
    try:
        print(f"{case.peers} peers, {case.rounds} rounds, seed {case.seed}. The plan:")
        print(_indented(str(case.plan)))
        trace = case.run()
    except ChaosFailure as failure:
        _tell(failure.trace)
        print(f"FAILED: {failure}")
        return 1
    except (GaslocError, ValueError) as error:
        print(f"{REPLAY}: {error}", file=sys.stderr)
        return 2
    _tell(trace)
    print(f"everything held\n  digest: {trace.digest}")
    return 0


def _tell(trace: SwarmTrace) -> None:
    print("What happened:")
    print(_indented("\n".join(map(str, trace.disturbances))))
    print("What the peers did:")
    print(_indented(trace.tell()))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _parse(arguments: Sequence[str] | None) -> Case:
    parser = argparse.ArgumentParser(prog="python -m gasloc_p2p.testing")
    commands = parser.add_subparsers(required=True)
    chaos = commands.add_parser("chaos", help="run a swarm with random faults, in virtual time")
    chaos.add_argument("--seed", type=int, required=True, help="of the faults and of the run")
    chaos.add_argument("--peers", type=int, default=16)
    chaos.add_argument("--rounds", type=int, default=40, help="training rounds")
    chaos.add_argument("--model", choices=list(MODEL_SETTINGS), default="quadratic")
    chaos.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    given = parser.parse_args(arguments)
    return Case(
        seed=given.seed,
        peers=given.peers,
        rounds=given.rounds,
        model=given.model,
        settings=tuple(given.set),
    )


if __name__ == "__main__":
    sys.exit(main())
