"""The `gasloc` command line.

Commands import what they need after their arguments are read, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from gasloc_p2p.commands.loading import layers_of, loaded_from, swarm_config
from gasloc_p2p.commands.options import (
    AlgorithmName,
    ChaosSeed,
    Codec,
    CompareSolo,
    ConfigFile,
    Debug,
    EngineName,
    Format,
    Keep,
    LocalSteps,
    OutputFormat,
    Peers,
    Report,
    Rounds,
    Seed,
    Set,
    Topology,
)
from gasloc_p2p.commands.tokenizer import app as tokenizer_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Train a language model together, without data centre or coordinator.\n\n"
    "Try it on this machine with `gasloc testnet`. With others, the first one runs `gasloc start` "
    "and passes on the invite that it prints; everybody else runs `gasloc join INVITE`.",
)
config_app = typer.Typer(no_args_is_help=True, help="Write, check and explain settings.")
app.add_typer(config_app, name="config")
bench_app = typer.Typer(no_args_is_help=True, help="Measure codecs and streams on this machine.")
app.add_typer(bench_app, name="bench")
app.add_typer(tokenizer_app, name="tokenizer")


def _show_version(wanted: bool) -> None:
    if wanted:
        from gasloc_p2p import __version__

        print(f"gasloc {__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("testnet", short_help="Run a whole swarm on this machine.")
def run_testnet(
    peers: Peers = 4,
    rounds: Rounds = None,
    algorithm: AlgorithmName = "gasloc",
    topology: Topology = None,
    codec: Codec = None,
    local_steps: LocalSteps = None,
    seed: Seed = None,
    compare_solo: CompareSolo = False,
    report: Report = None,
    keep: Keep = None,
    chaos: ChaosSeed = None,
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Run a whole swarm on this machine: a bootstrap and several nodes, real DHT, real libp2p.

    The nodes are processes of their own that meet on loopback, train a small model on the source of
    Python's standard library, and exchange parameters in random pairs. Takes about a minute.
    Ctrl-C ends all of them.
    """
    loaded = swarm_config(
        peers,
        config,
        set_,
        algorithm,
        rounds,
        topology,
        codec,
        local_steps,
        seed,
        on_one_machine=True,
    )
    from gasloc_p2p.commands import testnet as command

    code = command.run(
        loaded.config,
        algorithm=algorithm,
        peers=peers,
        compare_solo=compare_solo,
        report_path=report,
        keep=keep,
        chaos_seed=chaos,
    )
    raise typer.Exit(code)


@app.command(short_help="Run a swarm in one process, on a virtual network.")
def simulate(
    peers: Peers = 4,
    rounds: Rounds = None,
    algorithm: AlgorithmName = "gasloc",
    engine: EngineName = None,
    topology: Topology = None,
    codec: Codec = None,
    local_steps: LocalSteps = None,
    seed: Seed = None,
    compare_solo: CompareSolo = False,
    report: Report = None,
    keep: Keep = None,
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Run the same swarm in one process, on a simulated network and clock.

    The code of a round is the one that real nodes run, so with the same seed, codec none and one
    thread the parameters come out equal to those of `gasloc testnet`, bit for bit.
    """
    loaded = swarm_config(
        peers, config, set_, algorithm, rounds, topology, codec, local_steps, seed, engine
    )
    from gasloc_p2p.commands import simulate as command

    command.run(
        loaded.config,
        algorithm=algorithm,
        peers=peers,
        compare_solo=compare_solo,
        report_path=report,
        keep=keep,
    )


@app.command(short_help="Run a named experiment: a table and a plot.")
def study(
    name: Annotated[
        str,
        typer.Argument(
            help="multi-step, single-step, local-steps, outer-sensitivity, topology, poison, "
            "codec or straggler (docs/benchmarks.md)."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of its results, made if it is not there.")
    ],
    full: Annotated[
        bool, typer.Option("--full", help="With 134 M and 551 M parameters, on GPUs.")
    ] = False,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SETTINGS",
            help="Compare an algorithm of your own too, as in "
            "'mine=outer.rule=local,gossip.topology=ring'; may be repeated.",
        ),
    ] = None,
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Run a named experiment: many simulations, one table and one plot.

    It says first how long it will take. Results are kept as they come: after Ctrl-C or a power cut
    the same command goes on where it was. --set study.seeds=5 adds seeds to what is there,
    --set study.jobs=2 runs two simulations at a time.
    """
    layers = layers_of(config, set_)
    from gasloc_p2p.commands import study as command

    arguments = [name, "--out", out.name]
    arguments += ["--full"] if full else []
    arguments += [part for text in also or () for part in ("--also", text)]
    arguments += ["--config", config.name] if config is not None else []
    arguments += [part for text in set_ or () for part in ("--set", text)]
    code = command.run(
        name, out=out, full=full, also=also or (), layers=layers, arguments=arguments
    )
    raise typer.Exit(code)


@app.command(short_help="Found a run and train in it; prints the invite.")
def start(config: ConfigFile = None, set_: Set = None, debug: Debug = False) -> None:
    """Found a run and train in it; prints the invite with which others join.

    A lone founder trains alone until somebody joins; --set run.initial_peers=2 waits for a second
    peer, and --set run.rounds=500 makes the run longer. Ctrl-C leaves the swarm properly, a second
    one at once. To be reachable from other machines, listen on a fixed port that your router lets
    in:  gasloc start --set net.listen=/ip4/0.0.0.0/tcp/31330
    """
    loaded = loaded_from(config, set_)
    from gasloc_p2p.commands import node

    node.start(loaded)


@app.command(short_help="Join a run by its invite and train in it.")
def join(
    invite: Annotated[str, typer.Argument(help="The invite, or @FILE to read it from a file.")],
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Join a run by its invite and train in it.

    Nothing else is needed: what all peers share is fetched from the swarm and checked against the
    invite. Ctrl-C leaves the swarm properly, a second one at once.
    """
    layers = layers_of(config, set_)
    from gasloc_p2p.commands import node

    node.join(invite, layers)


@app.command(short_help="Go on with a run of this machine.")
def resume(
    run: Annotated[
        str, typer.Argument(help="Name of the run, or its node's home. [default: the only one]")
    ] = "",
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Go on with a run that this machine founded or joined, from its last checkpoint.

    Nothing has to be repeated: the run's settings, and this machine's own as its node was started
    last, are in its home. --set changes one of this machine's own.
    """
    layers = layers_of(config, set_)
    from gasloc_p2p.commands.resume import resume as go_on

    go_on(run, layers)


@app.command(short_help="Run an entry point for others, without training.")
def bootstrap(config: ConfigFile = None, set_: Set = None, debug: Debug = False) -> None:
    """Run an entry point that others find each other through; it does not train.

    One bootstrap serves any number of runs. It keeps its identity, and so its address, in
    ~/.gasloc/bootstrap. Give it a fixed port:  gasloc bootstrap --set
    net.listen=/ip4/0.0.0.0/tcp/31337
    """
    loaded = loaded_from(config, set_)
    from gasloc_p2p.commands import bootstrap as command

    command.bootstrap(loaded)


@app.command(short_help="Write a checkpoint's model for transformers.")
def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A run, a node's home, or a checkpoint in it."),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write, empty or not there yet.")],
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's model so that transformers reads it; of a home, the newest one's."""
    from gasloc_p2p.commands.export import export as write

    write(source, folder, layers_of(config, set_))


@config_app.command("init")
def config_init(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
) -> None:
    """Write a TOML file that holds every default, commented."""
    from gasloc_p2p.commands import settings

    settings.init(file)


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="The file to check.")],
    set_: Set = None,
) -> None:
    """Check a TOML file, and whether its outer step is stable."""
    from gasloc_p2p.commands import settings

    settings.check(loaded_from(file, set_))


@config_app.command("show")
def config_show(config: ConfigFile = None, set_: Set = None) -> None:
    """Show every setting: its value, where the value came from, and what it means."""
    from gasloc_p2p.commands import settings

    settings.show(loaded_from(config, set_))


@bench_app.command("codec")
def bench_codec(
    form: Format = OutputFormat.TEXT,
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Measure how fast and how exact every codec is, on one core.

    Codecs of your own are measured too, with --set node.extensions=FILE. Takes a few seconds.
    """
    loaded = loaded_from(config, set_)
    from gasloc_p2p.commands import bench as command

    command.codec(loaded.config, as_json=form is OutputFormat.JSON)


@bench_app.command("stream")
def bench_stream(form: Format = OutputFormat.TEXT, debug: Debug = False) -> None:
    """Measure libp2p streams between two processes over loopback, beside plain TCP.

    Each process has a p2pd of its own. Takes about half a minute; Ctrl-C leaves nothing behind.
    """
    from gasloc_p2p.commands import bench as command

    command.stream(as_json=form is OutputFormat.JSON)


def main() -> None:
    """Run the command line; errors that a person can mend end in one clear message."""
    debug = "--debug" in sys.argv
    if not debug:
        # The libraries read these when they are imported.
        os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except Exception as error:
        from gasloc_p2p.commands.failure import explain

        if debug:
            traceback.print_exception(error)
        sys.exit(explain(error))
