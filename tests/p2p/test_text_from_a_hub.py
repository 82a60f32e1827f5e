"""Real nodes that train on a data set of a hub, which is a server on this machine."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE
from gasloc_p2p.data.supply import DATA_FOLDER
from gasloc_p2p.node.events import Invitation, Notice, Online, Training
from gasloc_p2p.node.result import read_thetas
from tests.data.hub import MockHub
from tests.data.texts import documents, write_parquet
from tests.p2p.real import QUICK, RealNode, real_swarm, sets
from tests.train.tiny_models import write_model

pytestmark = [pytest.mark.p2p, pytest.mark.slow, pytest.mark.timeout(240)]

SETTINGS = ("data.validation_fraction=0.1", "checkpoint.every_rounds=1", "run.rounds=16")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    for shard in range(3):
        write_parquet(tmp_path / "source" / f"{shard}.parquet", documents(shard, 600), rows=50)
    with MockHub(tmp_path / "source").served() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        yield served


def told(node: RealNode, words: str) -> bool:
    return any(words in notice.text for notice in node.of(Notice))


async def test_a_node_trains_on_through_a_bad_hub_and_ends_as_with_a_good_one(
    hub: MockHub, tmp_path: Path
) -> None:
    text = (f"data.path=hub:{hub.name}", *SETTINGS)
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        hub.script.extend(["ok", "503", "ok", "cut", "ok", "503"])
        [node] = await swarm.nodes_of_run("bad", entry, 1, *text)
        await node.reached(4)
        # They come one after the other, so this is text for more than ten rounds.
        assert await asyncio.to_thread(hub.wait_for, 40)
        hub.down = True
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        [node] = await swarm.nodes_of_run("bad", entry, 1, *text)
        await node.reached(9)
        hub.down = False
        assert await node.ended() == 0
        bad = node.left().report

        (tmp_path / "calm").mkdir()
        shutil.copy(tmp_path / "bad" / "identity", tmp_path / "calm" / "identity")
        [node] = await swarm.nodes_of_run("calm", entry, 1, *text)
        assert await node.ended() == 0
    calm = node.left().report
    assert bad.train_loss == calm.train_loss
    assert bad.val_loss == calm.val_loss
    assert bad.theta_digest == calm.theta_digest
    assert read_thetas(tmp_path / "bad") is not None


async def test_a_node_leaves_while_it_waits_for_text(hub: MockHub, tmp_path: Path) -> None:
    text = (f"data.path=hub:{hub.name}", *SETTINGS)
    hub.down = True
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        [node] = await swarm.nodes_of_run("start", entry, 1, *text)
        await node.until(lambda: told(node, "out of order (503)") or None)
        node.signal(signal.SIGINT)
        assert await node.ended() == INTERRUPTED_EXIT_CODE

        hub.down = False
        [node] = await swarm.nodes_of_run("start", entry, 1, *text, "data.buffer_mb=1")
        await node.reached(2)
        hub.down = True
        # What was read ahead is gone, as on a machine that was away for long.
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        for unit in (tmp_path / "start" / DATA_FOLDER).glob("unit-*"):
            unit.unlink()
        [node] = await swarm.nodes_of_run("start", entry, 1, *text, "data.buffer_mb=1")
        await node.until(lambda: told(node, "training waits: the text buffer is empty") or None)
        node.signal(signal.SIGINT)
        assert await node.ended() == 0
        assert not node.left().finished

        hub.down = False
        hub.script.extend(["gated"] * 2)
        node = await swarm.launch("gated", "start", *sets("run.id=gated", *text))
        assert await node.ended() == 11
        assert "is gated" in node.child.last_words()
        assert not node.of(Online)
        assert not (tmp_path / "gated").exists()


async def test_nodes_train_a_model_of_a_hub_and_tell_its_troubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", "llama")
    with MockHub(tmp_path / "model", name="their/model").served() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        hub.listings.extend(["429", "503"])
        async with real_swarm(tmp_path) as swarm:
            entry = await swarm.bootstrap()
            model = ("model.name=their/model", "model.weights=existing", "run.initial_peers=2")
            founder = await swarm.found("founder", entry, *QUICK, *model)
            await founder.first(Invitation)
            hub.down = True
            joiner = await swarm.join("joiner", founder)
            for node in (founder, joiner):
                assert await node.ended() == 0
                [training] = node.of(Training)
                assert (training.model, training.architecture) == ("their/model", "Llama")
        words = founder.child.last_words()
        assert [line.split(" wants ")[-1].split(" is out ")[-1] for line in words.splitlines()] == [
            "fewer requests (429); next try in 7 s",
            "of order (503); next try in 2 s",
        ]
        assert joiner.child.last_words() == ""
        assert told(joiner, "the copy in")

        hub.down = False
        async with real_swarm(tmp_path) as swarm:
            absent = await swarm.launch("absent", "start", *sets("model.name=their/modle"))
            assert await absent.ended() == 11
        assert "no model their/modle on the hub" in absent.child.last_words()
        assert "Traceback" not in absent.child.last_words()
