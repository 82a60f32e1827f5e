"""What every network promises of its streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.testing.promise import (
    PIECE_BYTES,
    Trial,
    checks_of,
    expect,
    read_exactly,
    stalled,
    write_until_closed,
)


async def _bytes_come_back_whole_and_in_order(trial: Trial) -> None:
    first, second = await trial.pair()
    callers = []

    async def echo(stream: Stream) -> None:
        callers.append(stream.peer_id)
        while piece := await stream.read(PIECE_BYTES):
            await stream.write(piece)
        await stream.aclose()

    await first.serve("gasloc/test-echo/1", echo)
    payload = random.Random(0).randbytes(3 * PIECE_BYTES)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-echo/1")
    async with asyncio.timeout(trial.wait_s), asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.write(memoryview(payload)))
        returned = await read_exactly(stream, len(payload))
    assert returned == payload
    await stream.aclose()
    assert stream.peer_id == first.peer_id, "the dialled end is not whom it dialled"
    assert callers == [second.peer_id], "the dialling end is not known for who it is"


async def _streams_do_not_mix(trial: Trial) -> None:
    first, second = await trial.pair()

    async def twice(stream: Stream) -> None:
        data = await read_exactly(stream, 1000)
        for part in (data, b"", data):
            await stream.write(part)
        await stream.aclose()

    await first.serve("gasloc/test-twice/1", twice)

    async def ask(number: int) -> None:
        stream = await trial.dial(second, first.peer_id, "gasloc/test-twice/1")
        await stream.write(bytes([number]) * 1000)
        assert await read_exactly(stream, 2000) == bytes([number]) * 2000
        assert await stream.read(1) == b""
        await stream.aclose()

    async with asyncio.timeout(trial.wait_s), asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(ask(number))


async def _a_written_buffer_may_be_reused(trial: Trial) -> None:
    first, second = await trial.pair()

    async def answer(stream: Stream) -> None:
        buffer = bytearray(100_000)
        for index in range(20):
            buffer[:] = bytes([index]) * len(buffer)
            await stream.write(buffer)
        await stream.aclose()

    await first.serve("gasloc/test-reuse/1", answer)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-reuse/1")
    expected = b"".join(bytes([index]) * 100_000 for index in range(20))
    async with asyncio.timeout(trial.wait_s):
        assert await read_exactly(stream, len(expected)) == expected
        assert await stream.read(1) == b""
    await stream.aclose()


async def _a_writer_waits_for_a_slow_reader(trial: Trial) -> None:
    first, second = await trial.pair()
    read_on = asyncio.Event()
    received: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def slow(stream: Stream) -> None:
        await read_on.wait()
        total = 0
        while piece := await stream.read(PIECE_BYTES):
            total += len(piece)
        received.set_result(total)
        await stream.aclose()

    await first.serve("gasloc/test-slow/1", slow)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-slow/1")
    written, enough = 0, asyncio.Event()

    async def push() -> None:
        nonlocal written
        while written < trial.buffered_bytes and not enough.is_set():
            await stream.write(bytes(PIECE_BYTES))
            written += PIECE_BYTES
        await stream.aclose()

    async with asyncio.timeout(trial.wait_s), asyncio.TaskGroup() as tasks:
        pushing = tasks.create_task(push())
        await stalled(pushing, lambda: written, below=trial.buffered_bytes)
        enough.set()
        read_on.set()
        taken = await received
    assert taken == written, "bytes were lost"


async def _a_blocked_writer_is_woken_by_its_own_close(trial: Trial) -> None:
    first, second = await trial.pair()
    done = asyncio.Event()

    async def unread(stream: Stream) -> None:
        await done.wait()
        await stream.aclose()

    await first.serve("gasloc/test-unread/1", unread)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-unread/1")
    written = 0

    async def push() -> None:
        nonlocal written
        while written < trial.buffered_bytes:
            await stream.write(bytes(PIECE_BYTES))
            written += PIECE_BYTES

    pushing = asyncio.create_task(push())
    async with asyncio.timeout(trial.wait_s):
        await stalled(pushing, lambda: written, below=trial.buffered_bytes)
        await stream.aclose()
        await asyncio.wait({pushing})
    done.set()
    assert isinstance(pushing.exception(), ConnectionError)


async def _last_words_arrive_although_not_everything_was_read(trial: Trial) -> None:
    first, second = await trial.pair()
    refusal = b"R" * 1000

    async def refuse(stream: Stream) -> None:
        await stream.read(1)
        await stream.write(refusal)
        await stream.aclose()

    await first.serve("gasloc/test-refuse/1", refuse)
    for _ in range(20):
        stream = await trial.dial(second, first.peer_id, "gasloc/test-refuse/1")
        async with asyncio.timeout(trial.wait_s):
            # It fails where the network buffers less.
            with contextlib.suppress(ConnectionError):
                await stream.write(bytes(200_000))
            assert await read_exactly(stream, len(refusal)) == refusal
            assert await stream.read(1) == b""
        await stream.aclose()


async def _an_end_that_closes_is_seen_at_once(trial: Trial) -> None:
    first, second = await trial.pair()

    async def greet(stream: Stream) -> None:
        await stream.write(b"hello")
        await stream.read(1)
        await stream.aclose()

    await first.serve("gasloc/test-greet/1", greet)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-greet/1")
    async with asyncio.timeout(trial.wait_s):
        assert await read_exactly(stream, 5) == b"hello"
        await stream.write(b"!")
    async with asyncio.timeout(trial.prompt_s):
        assert await stream.read(1) == b""
        await write_until_closed(stream)
    await stream.aclose()


async def _a_closed_end_neither_reads_nor_writes(trial: Trial) -> None:
    first, second = await trial.pair()

    async def send(stream: Stream) -> None:
        await stream.write(bytes(200_000))
        await stream.aclose()

    await first.serve("gasloc/test-send/1", send)
    stream = await trial.dial(second, first.peer_id, "gasloc/test-send/1")
    async with asyncio.timeout(trial.wait_s):
        await read_exactly(stream, 1)
        await stream.aclose()
        await stream.aclose()
        for _ in range(3):
            assert await stream.read(1) == b""
        await expect(ConnectionError, stream.write(b"too late"))


async def _a_peer_without_the_protocol_is_named(trial: Trial) -> None:
    first, second = await trial.pair()
    dialling = second.open_stream(first.peer_id, "gasloc/test-none/1", deadline_s=trial.wait_s)
    error = await expect(PeerUnreachableError, dialling)
    assert first.peer_id in str(error)


async def _a_dial_that_leads_nowhere_ends_by_its_deadline(trial: Trial) -> None:
    _, second = await trial.pair()
    stranger = Identity.derived(seed=0, index=1_000_000).peer_id
    async with asyncio.timeout(trial.prompt_s):
        await expect(
            (PeerUnreachableError, TimeoutError),
            second.open_stream(stranger, "gasloc/test-none/1", deadline_s=trial.prompt_s / 4),
        )
    junk = second.open_stream("junk", "gasloc/test-none/1", deadline_s=trial.wait_s)
    await expect((PeerUnreachableError, TimeoutError), junk)


async def _a_network_that_closes_takes_its_streams_and_handlers_along(trial: Trial) -> None:
    first = await trial.start(0)
    leaver = await trial.start(2)
    serving, ended, heard_the_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def endless(stream: Stream) -> None:
        serving.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def listen(stream: Stream) -> None:
        await stream.write(b"in")
        while await stream.read(1):
            pass
        heard_the_end.set()
        await stream.aclose()

    await leaver.serve("gasloc/test-endless/1", endless)
    await first.serve("gasloc/test-listen/1", listen)
    to_leaver = await trial.dial(first, leaver.peer_id, "gasloc/test-endless/1")
    from_leaver = await trial.dial(leaver, first.peer_id, "gasloc/test-listen/1")
    async with asyncio.timeout(trial.wait_s):
        assert await read_exactly(from_leaver, 2) == b"in"
        await serving.wait()
        await leaver.aclose()
        assert ended.is_set(), "a handler goes on after the end of its network"
    async with asyncio.timeout(trial.prompt_s):
        assert await to_leaver.read(1) == b""
        await write_until_closed(to_leaver)
        await heard_the_end.wait()
        assert await from_leaver.read(1) == b""
    await expect(ConnectionError, from_leaver.write(b"too late"))
    await to_leaver.aclose()


STREAM_CHECKS: Final = checks_of(
    (
        _bytes_come_back_whole_and_in_order,
        _streams_do_not_mix,
        _a_written_buffer_may_be_reused,
        _a_writer_waits_for_a_slow_reader,
        _a_blocked_writer_is_woken_by_its_own_close,
        _last_words_arrive_although_not_everything_was_read,
        _an_end_that_closes_is_seen_at_once,
        _a_closed_end_neither_reads_nor_writes,
        _a_peer_without_the_protocol_is_named,
        _a_dial_that_leads_nowhere_ends_by_its_deadline,
        _a_network_that_closes_takes_its_streams_and_handlers_along,
    )
)
