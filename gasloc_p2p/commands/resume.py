"""`gasloc resume`: go on with a run of this machine, as its node was started last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gasloc_p2p.commands.home import RUN_FILE, home_layers, homes
from gasloc_p2p.commands.node import start
from gasloc_p2p.config import Layer, load
from gasloc_p2p.core.errors import ConfigError


def resume(run: str, layers: Sequence[Layer]) -> None:
    """Take part in a run again, with the settings that its home holds, until it ends.

    Args:
        run: name of the run, or the home of its node; empty: the only one of this machine.
        layers: settings of this machine's own that are to be others than before.

    Raises:
        ConfigError: there is no such run, or it is not clear which one is meant.
        GaslocError: anything else that a person has to mend first.
    """
    home = home_of_run(run or load(layers).config.node.home)
    there = Layer(name="resume", values={"node.home": str(home)})
    start(load(home_layers(home, [*layers, there])))


def home_of_run(run: str) -> Path:
    """Return the home of the node that took part in `run`; empty: the only one of this machine.

    Raises:
        ConfigError: there is none, or there are several.
    """
    known = homes()
    if not run and len(known) == 1:
        return known[0]
    names = ", ".join(home.name for home in known)
    if not run and known:
        raise ConfigError(
            f"{len(known)} runs could be resumed",
            why=f"the newest first, there are: {names}",
            fix=f"name one: gasloc resume {known[0].name}",
        )
    named = Path(run).expanduser()
    for home in (named, *(home for home in known if home.name == run)):
        if run and (home / RUN_FILE).is_file():
            return home.absolute()
    raise ConfigError(
        f"there is no run {run} to resume" if run else "there is no run to resume",
        why=f"on this machine there are: {names}"
        if known
        else "none was started on this machine yet, unless with a node.home of its own",
        fix="name one of these, or the folder that was its node.home; `gasloc start` founds a run",
    )
