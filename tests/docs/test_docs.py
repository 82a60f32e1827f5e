"""The documentation says what the code does.

`python tests/docs/test_docs.py` writes the generated part of docs/configuration.md again.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main
from typer.core import TyperGroup

from gasloc_p2p.cli import app
from gasloc_p2p.commands.failure import UNEXPECTED_EXIT_CODE
from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE
from gasloc_p2p.config import ENV_PREFIX, SHARED_SECTIONS, Config, environment_layer, known_keys
from gasloc_p2p.core.errors import GaslocError
from gasloc_p2p.core.stability import radius
from gasloc_p2p.node.report import EdgeCounts, PeerReport
from gasloc_p2p.report import CurvePoint, FaultReport, SwarmReport

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gasloc_p2p"
DOCS = ROOT / "docs"
CONFIGURATION = DOCS / "configuration.md"
GENERATED = "<!-- generated: do not edit below this line -->\n"

PAGES = sorted(DOCS.glob("*.md")) + [path for path in [ROOT / "README.md"] if path.is_file()]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# Markdown, as far as it is needed here.


def code_blocks(text: str) -> list[str]:
    """Return fenced blocks and blocks that are indented by four spaces."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    return fenced + re.findall(r"(?<=\n\n)((?: {4}.*\n|\n)+)", without_fences(text))


def code_spans(text: str) -> list[str]:
    """Return inline code; a line break inside counts as a space."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_fences(text))]


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return every table as its rows, each from heading to cell."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.M):
        # An escaped bar is part of a cell.
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        heading, _, *rows = ([cell.strip() for cell in line] for line in lines)
        found.append([dict(zip(heading, row, strict=True)) for row in rows])
    return found


def slugs(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_fences(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in slugs(file.read_text()), target


# The report.


@pytest.mark.parametrize(
    ("index", "struct"),
    list(enumerate([SwarmReport, PeerReport, EdgeCounts, CurvePoint, FaultReport])),
    ids=str,
)
def test_report_fields(index: int, struct: type[msgspec.Struct]) -> None:
    rows = tables((DOCS / "report.md").read_text())[index]
    described = [(row["Field"].strip("`"), row["When null"] != "never") for row in rows]
    types = {field.name: str(field.type) for field in msgspec.structs.fields(struct)}
    assert described == [(name, "None" in types[name]) for name in types]


# Errors.


def error_classes(base: type[GaslocError] = GaslocError) -> Iterator[type[GaslocError]]:
    """Yield the classes that have a code of their own."""
    if "code" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from error_classes(derived)


def test_error_codes() -> None:
    rows = tables((DOCS / "errors.md").read_text())[1]
    described = [(row["Code"], row["Exit code"], row["Class"]) for row in rows]
    classes = sorted(error_classes(), key=lambda kind: (kind.exit_code, kind.code))
    assert described == [
        (f"`{kind.code}`", str(kind.exit_code), f"`{kind.__name__}`") for kind in classes
    ]
    assert all(cell for row in rows for cell in row.values())


def test_errors_live_in_one_place_and_have_exit_codes_of_their_own() -> None:
    """So that the test above knows all of them."""
    declared = {path for path in PACKAGE.rglob("*.py") if '= "GL-' in path.read_text()}
    assert declared == {PACKAGE / "core" / "errors.py"}
    exit_codes = [kind.exit_code for kind in error_classes()]
    assert len(set(exit_codes)) == len(exit_codes)


def test_exit_codes_without_an_error_code() -> None:
    rows = tables((DOCS / "errors.md").read_text())[0]
    expected = [0, UNEXPECTED_EXIT_CODE, INTERRUPTED_EXIT_CODE]
    assert [int(row["Exit code"]) for row in rows] == expected


# Settings.


def configuration_text() -> str:
    """Return the generated part of docs/configuration.md."""
    lines: list[str] = []
    section = ""
    for key, field in known_keys().items():
        head = key.partition(".")[0]
        if head != section:
            section = head
            purpose = " ".join((Config.model_fields[head].annotation.__doc__ or "").split())
            shared = " (shared)" if head in SHARED_SECTIONS else ""
            lines += ["", f"### {head}{shared}", "", purpose, ""]
            lines += ["| Key | Default | Accepted | Meaning |", "|---|---|---|---|"]
        cells = (f"`{key}`", default_of(field), accepted_by(key), field.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def default_of(field: Any) -> str:
    return "random" if field.default_factory else f"`{json.dumps(field.default)}`"


def accepted_by(key: str) -> str:
    """Return in words which values a setting takes."""
    section, _, name = key.partition(".")
    schema = Config.model_json_schema()
    reference = schema["properties"][section]["$ref"].rpartition("/")[2]
    rules = schema["$defs"][reference]["properties"][name]
    if "enum" in rules:
        return ", ".join(f"`{choice}`" for choice in rules["enum"])
    if "pattern" in rules:
        return f"text like `{rules['pattern']}`"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    bounds = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    limits = [f"{word} {number(rules[rule])}" for rule, word in bounds if rule in rules]
    return ", ".join([words.get(rules["type"], "list of texts"), *limits])


def number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_configuration_is_up_to_date() -> None:
    written = CONFIGURATION.read_text().partition(GENERATED)[2]
    assert written == configuration_text(), "run python tests/docs/test_docs.py"


@every_page
def test_settings_exist(page: Path) -> None:
    text = page.read_text()
    sections = "|".join(Config.model_fields)
    keys = re.findall(r"--set[ =]([a-z_]+\.[a-z_0-9]+)", text)
    for span in code_spans(text):
        if re.fullmatch(rf"(?:{sections})\.\w+", span) and not is_file_name(span):
            keys.append(span)
    names = set(re.findall(rf"\b{ENV_PREFIX}[A-Z]\w*", text)) - {f"{ENV_PREFIX}SECTION_KEY"}
    keys += environment_layer(dict.fromkeys(names, "")).values
    assert set(keys) <= set(known_keys())


def is_file_name(text: str) -> bool:
    return text.endswith((".py", ".md", ".toml", ".json", ".yml"))


# The command line.


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one command takes.

    Attributes:
        flags: options without a value.
        options: options with one.
        arguments: how many positional arguments it takes.
        subcommands: by name; none for a command that does something.
    """

    flags: frozenset[str]
    options: frozenset[str]
    arguments: int
    subcommands: dict[str, Command]


def described(command: Any) -> Command:
    """Return what typer knows of a command."""
    takes = [param for param in command.params if param.param_type_name == "option"]
    names = {False: set[str](), True: {"-h", "--help"}}
    for param in takes:
        names[param.is_flag].update(param.opts, param.secondary_opts)
    group = isinstance(command, TyperGroup)
    return Command(
        flags=frozenset(names[True]),
        options=frozenset(names[False]),
        arguments=len(command.params) - len(takes),
        subcommands={n: described(c) for n, c in command.commands.items()} if group else {},
    )


GASLOC = described(typer.main.get_command(app))


def all_options(command: Command) -> frozenset[str]:
    return (command.flags | command.options).union(*map(all_options, command.subcommands.values()))


def command_lines(text: str) -> Iterator[str]:
    """Yield what follows `gasloc` in inline code and in lines of code blocks."""
    start = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?gasloc (.+)")
    lines = code_spans(text)
    for block in code_blocks(text):
        lines += block.replace("\\\n", " ").splitlines()
    for line in lines:
        match = start.fullmatch(line.strip())
        if match:
            yield match[1]


def complaint(arguments: Sequence[str], command: Command = GASLOC) -> str:
    """Return why `command` does not take `arguments`; empty when it does."""
    rest = list(arguments)
    if rest and command.subcommands and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.subcommands:
            return f"no command {name}"
        return complaint(rest, command.subcommands[name])
    positional = 0
    while rest:
        name, equals, _ = rest.pop(0).partition("=")
        if name in ("|", "&", "&&", ";", ">"):
            break
        if name in command.options:
            if not equals and not rest:
                return f"{name} without a value"
            del rest[: not equals]
        elif name.startswith("-") and name not in command.flags:
            return f"no option {name}"
        else:
            positional += name not in command.flags
    return "too many arguments" if positional > command.arguments else ""


@every_page
def test_command_lines_are_accepted(page: Path) -> None:
    for line in command_lines(page.read_text()):
        assert not complaint(shlex.split(line, comments=True)), f"gasloc {line}"


@every_page
def test_options_exist(page: Path) -> None:
    named = {
        span.split()[0].partition("=")[0]
        for span in code_spans(page.read_text())
        if span.startswith("--")
    }
    assert named <= all_options(GASLOC)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ""),
        ("--help", ""),
        ("config", ""),
        ("start --set inner.lr=1 --config FILE --debug", ""),
        ("start --set=inner.lr=1 | tee log", ""),
        ("join INVITE", ""),
        ("config check FILE --set outer.lr=1", ""),
        ("strat", "no command strat"),
        ("config chek FILE", "no command chek"),
        ("start --announce ADDRESS", "no option --announce"),
        ("start INVITE", "too many arguments"),
        ("config check one.toml two.toml", "too many arguments"),
        ("testnet --report", "--report without a value"),
        ("testnet --compare-solo report.json", "too many arguments"),
    ],
)
def test_complaints(line: str, expected: str) -> None:
    """The judge of the command lines above can say no."""
    assert complaint(shlex.split(line)) == expected


def test_command_lines_are_found_where_people_write_them() -> None:
    text = (
        "Run `gasloc\nstart` or `make`:\n\n    $ gasloc join X  # as you like\n    gasloc-p2p y\n\n"
        "```sh\n.venv/bin/gasloc testnet \\\n  --peers 2\nA=1 gasloc simulate\n```\n"
    )
    found = [shlex.split(line, comments=True) for line in command_lines(text)]
    expected = [["start"], ["testnet", "--peers", "2"], ["simulate"], ["join", "X"]]
    assert sorted(found) == sorted(expected)


# Places and values in the code.


@every_page
def test_paths_exist(page: Path) -> None:
    text = page.read_text()
    written_there = set(re.findall(r"^```python\n# (\S+\.py)$", text, flags=re.M))
    for token in re.findall(r"[\w./-]+", "\n".join(code_spans(text) + code_blocks(text))):
        if token in written_there:
            continue
        top = token.partition("/")[0]
        is_folder = token.endswith("/") and any((base / top).is_dir() for base in (ROOT, PACKAGE))
        if token.endswith(".py") or is_folder:
            assert any((base / token).exists() for base in (ROOT, PACKAGE)), token


@every_page
def test_constants_have_the_values_that_are_written(page: Path) -> None:
    for path, name, value in re.findall(r"`([\w/]+)\.py:(\w+)` = ([\d.]+)", page.read_text()):
        module = importlib.import_module(f"gasloc_p2p.{path.replace('/', '.')}")
        assert getattr(module, name) == float(value), name


def test_some_constants_are_written() -> None:
    assert "`core/roster.py:JOIN_ROUNDS` = " in (DOCS / "design.md").read_text()


def test_stability_figures() -> None:
    (rows,) = (t for t in tables((DOCS / "design.md").read_text()) if "Radius" in t[0])
    for row in rows:
        found = radius(
            row["outer.rule"],
            float(row["outer.lr"]),
            float(row["outer.momentum"]),
            1.0,
            row["gossip.topology"],
        )
        assert f"{found:.2f}" == row["Radius"], row


def test_what_the_code_says_about_the_docs() -> None:
    """Pages, and sections of docs/design.md, that docstrings and messages name exist."""
    design = (DOCS / "design.md").read_text()
    for path in PACKAGE.rglob("*.py"):
        text = " ".join(path.read_text().split())
        for name in re.findall(r"\bdocs/\w+\.md", text):
            assert (ROOT / name).is_file(), f"{path}: {name}"
        for numbers in re.findall(r"docs/design\.md,? sections? (\d+(?:(?: and |, )\d+)*)", text):
            for number in re.findall(r"\d+", numbers):
                assert f"\n## {number}. " in design, f"{path}: section {number}"


if __name__ == "__main__":
    prose, marker, _ = CONFIGURATION.read_text().partition(GENERATED)
    CONFIGURATION.write_text(prose + marker + configuration_text())
