"""Wrong arguments of every public call are `InvalidRequest` with the argument's name, before anything happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tidewal
from tidewal import actors, runtime
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.arguments import Kind, _tests_of, checked
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import InvalidRequest, InvalidRows, InvalidSchema
from tidewal.runtime.groups.group_consumer import GroupConsumer
from tidewal.runtime.log.policy_codec import decode_policy, encode_policy
from tidewal.runtime.log.wal_base import CALLS
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

HOT = "runs once for each record, or only calculates: what is wrong there is its caller's"
OURS = "made or called by Tidewal alone"
FORWARDED = "every argument goes to the call of the same name of `Client`"
EXEMPT = {
    **dict.fromkeys(
        [
            "physical_ms",
            "add_ms",
            "pchannel_of",
            "shown_url",
            "split_url",
            "decode",
            "encode",
            "shard_of",
            "announcements",
        ],
        HOT,
    ),
    **dict.fromkeys(
        ["HybridClock.observe", "HybridClock.believes", "Names.may_hold_data", "Append", "Entry", "Delivered"], HOT
    ),
    **dict.fromkeys(["Record", "MsgPack", "Position", "ControlAppend", "Announcement", "Appended", "SyncPoint"], HOT),
    **dict.fromkeys(
        [
            "WriteResult",
            "SendResult",
            "TransactionResult",
            "QueryResult",
            "Stats",
            "LoadState",
            "ChannelInfo",
            "Capabilities",
            "GroupInfo",
            "Catalog",
            "Collection",
        ],
        OURS,
    ),
    **dict.fromkeys(
        ["Cut", "CutEnd", "Health", "Deferred", "Observer", "ChannelOwnerObserver", "Request", "Node", "Role", "Proxy"],
        OURS,
    ),
    **dict.fromkeys(
        ["MixCoord", "DataNode", "QueryNode", "ActorRef.__init__", "ActorSystem.forget", "SyncClient.__init__"], OURS
    ),
    "StreamingNode": OURS,
    **dict.fromkeys(
        ["ActorSystem.escalate", "CatalogLog", "CollectionSchema", "DeadLetters", "RpcServer", "Settings"], OURS
    ),
    **dict.fromkeys(["Clock", "Wal", "GroupMember", "SystemClock"], "an interface: its implementations stand below"),
    **dict.fromkeys(["Metrics.counter", "Metrics.gauge", "Metrics.histogram", "Metrics.forget", "Metrics.value"], HOT),
    **dict.fromkeys(["Metrics.series", "Actor.on_message", "Actor.on_pack", "Actor.weigh"], OURS),
    **dict.fromkeys(["KeyedTable.__init__", "Producer.__init__", "RecordPack", "FixedWindows", "SessionWindows"], OURS),
    **dict.fromkeys(["SyncStandalone.__init__", "RetryPolicy.is_transient", "RetryPolicy.pause_s"], OURS),
    "Codec": "an interface: what implements it is the user's",
    **dict.fromkeys(["Lookup.get", "ActorRef.ask"], HOT),
    "SyncClient": FORWARDED,
    "SyncTopicMember": "every argument goes to the call of the same name of `TopicMember`",
    "SyncTransaction": "every argument goes to the call of the same name of `Transaction`",
    "Transaction.__init__": OURS,
    **dict.fromkeys(["Topic", "TopicMessage", "TopicPack", "TopicMember.__init__", "TopicReply", "TopicRequest"], OURS),
}


class Call(NamedTuple):
    """One public call, and one of its arguments, which is wrong."""

    name: str
    call: Callable[..., Any]
    bound: bool
    argument: str


def public() -> Iterator[tuple[str, Any, bool]]:
    """All public calls: functions, constructors and methods, and those of the logs behind `Wal`."""
    seen: set[int] = set()
    for face in (tidewal, runtime, actors):
        for name in face.__all__:
            value = getattr(face, name)
            if id(value) in seen or (inspect.isclass(value) and issubclass(value, Exception)):
                continue
            seen.add(id(value))
            if inspect.isfunction(value):
                yield name, value, False
            elif inspect.isclass(value):
                yield from methods(name, value, lambda each: not each.startswith("_") or each == "__init__")
    for log in (RocksMQ, MemoryWal):
        yield from methods(log.__name__, log, CALLS.__contains__)
    yield from methods("GroupConsumer", GroupConsumer, ("acknowledge", "commit", "redeliver", "seek").__contains__)


def methods(name: str, kind: type, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any, bool]]:
    for each, method in inspect.getmembers(kind, inspect.isfunction):
        if wanted(each) and method.__module__.startswith("tidewal"):
            yield f"{name}.{each}", method, True


def exempt(name: str) -> bool:
    return name in EXEMPT or name.partition(".")[0] in EXEMPT


def wrong_arguments() -> Iterator[Call]:
    for name, call, bound in public():
        if not exempt(name):
            for _, argument, *_ in _tests_of(declared(name, call)):
                yield Call(name, call, bound, argument)


def declared(name: str, call: Any) -> Any:
    kind, _, method = name.partition(".")
    return getattr(tidewal.Wal, method) if kind in ("RocksMQ", "MemoryWal") and hasattr(tidewal.Wal, method) else call


class Wrong:
    """What fits no annotation but a class: it has no length, no letters, no digits."""


def arguments_of(each: Call) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that fit, but for the wrong one."""
    function = declared(each.name, each.call)
    kinds: dict[str, Kind] = {name: kind for _, name, _, kind in _tests_of(function)}
    named: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(inspect.unwrap(function)).parameters.items())[each.bound :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name == each.argument:
            named[name] = next(value for value in UNFIT if not kinds[name].fits(value))
        elif parameter.default is parameter.empty:
            named[name] = next(value for value in FIT if name not in kinds or kinds[name].fits(value))
    return [Wrong()] if each.bound else [], named


async def answer_of(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


UNFIT = ["a text", 1.5, Wrong(), None, b"bytes", True]
FIT = ["a text", 7, b"bytes", ["a text"], [1.5], {}, [], Wrong(), [Wrong()], None, True, len, "int64", "all", 0.5]


@pytest.mark.parametrize("each", list(wrong_arguments()), ids=lambda each: f"{each.name} {each.argument}")
async def test_a_wrong_argument_is_named(each: Call):
    positional, named = arguments_of(each)
    with pytest.raises(InvalidRequest) as raised:
        await answer_of(each.call(*positional, **named))
    assert raised.value.fields["argument"] == each.argument
    assert each.argument in raised.value.message


def test_every_public_call_is_looked_at_or_exempt_by_name():
    for name, call, bound in public():
        parameters = list(inspect.signature(call).parameters)[bound:]
        looked_at = {argument for _, argument, *_ in _tests_of(declared(name, call))}
        assert exempt(name) or hasattr(call, "__wrapped__") or not set(parameters) & looked_at, name


def test_no_exemption_is_left_over():
    names = {name for name, _, _ in public()}
    whole = names | {name.partition(".")[0] for name in names}
    assert {name for name in EXEMPT if name not in whole and not hasattr(runtime, name)} == set()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda client: client.insert("c", "a text"), InvalidRequest, "rows of insert"),
        (lambda client: client.insert("c", 5), InvalidRequest, "rows of insert"),
        (lambda client: client.delete("c", "year < 2003"), InvalidRequest, "query their keys first"),
        (lambda client: client.search("c", "v", [[1.0], [2.0]]), InvalidRequest, "one vector"),
        (lambda client: client.query("c", consistency="strnog"), InvalidRequest, "did you mean 'strong'"),
        (lambda client: client.query("c", columns="id"), InvalidRequest, "columns of query must be a list of texts"),
        (lambda client: client.query("c", limit=2.5), InvalidRequest, "limit of query must be an integer"),
        (lambda client: client.flush("c", deadline_s="5"), InvalidRequest, "deadline_s of flush must be a number"),
        (lambda client: client.flush("c", deadline_s=float("nan")), InvalidRequest, "deadline_s"),
        (lambda client: client.create_collection({"name": "c"}), InvalidRequest, "a CollectionSchema"),
    ],
)
async def test_what_users_get_wrong_with_a_client(call: Callable[[Any], Any], error: type[Exception], says: str):
    client = tidewal.Client(MemoryWal(MemoryLog()))
    with pytest.raises(error, match=says):
        await call(client)


async def test_the_page_of_collections_names_the_error_for_an_argument_of_a_wrong_type() -> None:
    page = (Path(__file__).parents[1] / "docs" / "collections.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if 'limit="10"' in line]
    with pytest.raises(InvalidRequest) as caught:
        await tidewal.Client(MemoryWal(MemoryLog())).query("c", limit="10")  # pyright: ignore[reportArgumentType]
    assert row.startswith(f"| `{type(caught.value).__name__}` |")
    assert caught.value.argument == "limit"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda wal: wal.append("ch", "text"), "payload of append must be bytes"),
        (lambda wal: wal.append_many(tidewal.Append("ch", b"")), "entries of append_many must be a list of Append"),
        (lambda wal: wal.append_many([("ch", b"")]), "a list of Append"),
        (lambda wal: wal.join("g", "ch"), "channels of join must be a list of texts, not 'ch'"),
        (lambda wal: wal.seek_group("g", "ch", "latest"), "start of seek_group"),
        (lambda wal: wal.read("ch", datetime.now(UTC)), "start of read .* FromTime.at makes a start of a datetime"),
        (lambda wal: produced(wal, tidewal.Record(tidewal.RecordType.ROWS, key="front")), "key of Record"),
        (lambda wal: produced(wal, tidewal.Record(tidewal.RecordType.ROWS, tags={1: 2})), "tags of Record"),
        (lambda wal: produced(wal, tidewal.Record(tidewal.RecordType.ROWS, tags={"a": [1]})), "tags of Record"),
        (lambda wal: produced(wal, tidewal.Record(tidewal.RecordType.ROWS, tags=None)), "tags of Record"),
        (lambda wal: wal.join("g", ["ch"], session_timeout_s=-3), "session_timeout_s is -3"),
        (lambda wal: tidewal.open_wal("memory://", readonly=True), "no option 'readonly'; did you mean 'read_only'"),
        (lambda wal: tidewal.open_wal("rocksmq://./none", ownn=True), "no option 'ownn'"),
        (lambda wal: tidewal.MsgStream(wal, tidewal.HybridClock()).as_consumer("ch"), "channels of as_consumer"),
        (lambda wal: tidewal.MsgStream(wal, tidewal.HybridClock()).as_consumer(["ch"], "earliest"), "start"),
        (lambda wal: tidewal.MsgStream(wal, tidewal.HybridClock()).seek(tidewal.FromTime(1)), "positions of seek"),
        (lambda wal: tidewal.MsgStream(wal, tidewal.HybridClock()).produce(RECORD), "messages of produce"),
        (lambda wal: tidewal.MsgStream("rocksmq:///x", tidewal.HybridClock()), "wal of MsgStream must be a Wal"),
        (lambda wal: tidewal.FromTime.at(datetime(2026, 1, 1)), "no time zone"),  # noqa: DTZ001 -- the wrong one
        (lambda wal: tidewal.FromTime.at("2026-01-01"), "moment"),
        (lambda wal: tidewal.FromTime(datetime.now(UTC)), "tidewal.to_timestamp makes a timestamp of a datetime"),
        (lambda wal: runtime.encode(tidewal.Record(tidewal.RecordType.ROWS, key="front")), "key of Record"),
        (lambda wal: runtime.encode(tidewal.Record(tidewal.RecordType.ROWS, body="text")), "body of Record"),
        (lambda wal: runtime.encode(tidewal.Record(tidewal.RecordType.ROWS, tags={"a": [1, {}, object()]})), "tags"),
        (lambda wal: tidewal.ChannelPolicy(acks="all"), "acks of ChannelPolicy must be a Durability"),
    ],
)
async def test_what_users_get_wrong_with_logs_and_streams(call: Callable[[Any], Any], says: str):
    wal = MemoryWal(MemoryLog())
    with pytest.raises(InvalidRequest, match=says):
        await answer_of(call(wal))
    await wal.close()


RECORD = tidewal.Record(tidewal.RecordType.ROWS)


def produced(wal: Any, message: tidewal.Record) -> Any:
    """A call that produces the message."""
    stream = tidewal.MsgStream(wal, tidewal.HybridClock())
    stream.as_producer(["ch"])
    return stream.produce([message])


def test_a_field_of_a_wrong_type_names_the_nearest():
    with pytest.raises(InvalidSchema, match="did you mean 'int64'"):
        tidewal.Field("id", "int46")  # type: ignore[arg-type]
    with pytest.raises(InvalidSchema, match="dim of Field"):
        tidewal.Field("v", "float_vector", dim="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["retention_s", "retention_bytes", "max_message_bytes", "ephemeral_bytes"])
def test_a_policy_has_no_negative_numbers(name: str):
    with pytest.raises(InvalidRequest, match=f"{name} of ChannelPolicy is -1") as raised:
        tidewal.ChannelPolicy(**{name: -1})  # type: ignore[arg-type]
    assert raised.value.argument == name


def test_a_stored_policy_with_a_negative_number_is_read_with_the_same_effect():
    wire = {**encode_policy(tidewal.ChannelPolicy()), "retention_s": -3, "retention_bytes": -1}
    assert decode_policy(wire) == tidewal.ChannelPolicy(retention_s=0, retention_bytes=0)


def test_one_row_is_no_list_of_rows():
    from tidewal.actors.rows import to_batch

    schema = tidewal.CollectionSchema("c", (tidewal.Field("id", "int64"),), "id")
    with pytest.raises(InvalidRows, match=r"for one row give a list of it, \[\{…\}\]"):
        to_batch({"id": 1}, schema, op="insert")


def test_what_behaves_like_the_type_is_taken():
    import numpy as np

    @checked
    def call(numbers: list[float], count: int, settings: Settings) -> int:
        return count

    assert call(np.array([1.0, 2.0]), np.int64(3), Wrong()) == 3  # type: ignore[arg-type]
