"""Pulsar's administration over its web service: topics, their properties and policies, cursors.

Every method blocks and is called on a thread. Each is idempotent, so it is retried until `timeout_s` while the broker
restarts or a topic moves to another broker; then it raises `Unavailable`.
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from http.client import HTTPException
from typing import cast
from urllib.parse import quote

from ...runtime.errors import Closed, ConfigError, InvalidRequest, Unavailable, Unsupported
from ...runtime.log.checks import not_found
from ...runtime.log.redaction import shown_url
from .client import Security
from .failures import Outcome, web_outcome
from .ids import MessagePlace
from .topics import INCARNATION_PROPERTY, POLICY_PROPERTY, PulsarTopic, TopicContents, contents_of

Json = dict[str, object]

log: logging.Logger = logging.getLogger("tidewal.pulsar")

DEFAULT_MESSAGE_BYTES = 5 * 1024 * 1024
FIRST_PAUSE_S = 0.1  # before the second attempt; doubled each time
LONGEST_PAUSE_S = 2.0
ONE_TRY_S = 10.0
LOOK_AGAIN_S = 0.02  # between two checks whether a policy is in effect
_TRY_AGAIN = frozenset({408, 412, 425, 429, 500, 502, 503, 504})  # 412: the topic has moved to another broker


class Admin:
    """The administration of one namespace through the web service at `web_url`."""

    def __init__(self, web_url: str, namespace: str, timeout_s: float, security: Security) -> None:
        self._root = f"{web_url.rstrip('/')}/admin/v2/"
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._headers = {"Content-Type": "application/json"}
        if security.token:
            self._headers["Authorization"] = f"Bearer {security.token}"
        # Brokers are reached without a proxy, as the client library reaches them; `_once` follows redirects.
        self._web = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirects, urllib.request.HTTPSHandler(context=_context(security))
        )

    def close(self) -> None:
        """End the calls that wait for another attempt."""
        self._closing.set()

    def reach(self, within_s: float) -> None:
        """Return once the web service answers, whatever it says. Raises `Unavailable` where it does not, in time."""
        deadline = time.monotonic() + within_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                self._once("GET", f"{self._root}namespaces/{self._namespace}", None, max(left_s, FIRST_PAUSE_S))
            except (OSError, HTTPException) as error:
                if left_s <= FIRST_PAUSE_S:
                    raise Unavailable(
                        f"Pulsar's web service does not answer at {shown_url(self._root)}: "
                        f"{getattr(error, 'reason', error)}. Check the address (`web_url`, pulsar.webport), that the "
                        f"broker runs, and that this machine reaches it"
                    ) from error
            except (_Refused, json.JSONDecodeError):
                return
            else:
                return
            if self._closing.wait(FIRST_PAUSE_S):
                raise Closed("the Pulsar log is closed")

    def prepare_namespace(self) -> None:
        """Create the namespace where there is none, and switch automatic topic creation off: otherwise the producer of
        a deleted channel would create its topic again, which is not a channel, and appends would be acknowledged there.

        In an existing namespace the switch is logged. Where the namespace has topics of other applications, including
        non-persistent ones, whose clients may rely on it, it is not switched off: `ConfigError`. The brokers know a
        non-persistent topic without partitions only while a client uses it."""
        path = f"namespaces/{self._namespace}"
        created = self._call("GET", path, absent=None) is None and self._call("PUT", path, conflict=False) is not False
        try:
            if not created and not self._makes_topics(path):
                return
            other = None if created else self._topic_of_others()
            if other is None:
                self._call("POST", f"{path}/autoTopicCreation", {"allowAutoTopicCreation": False})
                if not created:
                    log.warning(
                        "topics were created automatically in the namespace %s; allowAutoTopicCreation is switched off "
                        "there now, since a deleted channel would come back: clients that need it need another one",
                        self._namespace,
                    )
                return
        except ConfigError as error:  # not authorized to read or change it
            log.warning("allowAutoTopicCreation must be off in the namespace %s: %s", self._namespace, error)
            return
        raise ConfigError(
            f"in {self._namespace} topics are created automatically when a client asks for them, so a deleted channel "
            f"would come back as something else. There are other topics, such as {other!r}, so this is not "
            f"switched off here: use a namespace for Tidewal alone, or set allowAutoTopicCreation=false",
            key="pulsar.namespace",
        )

    def check_namespace(self) -> None:
        """Check that readers create nothing in the namespace. Raises `Unavailable` where there is no namespace, and
        `ConfigError` where topics are created automatically: a reader of a deleted channel would create its topic."""
        path = f"namespaces/{self._namespace}"
        try:
            is_there = self._call("GET", path, absent=None) is not None
            makes_topics = is_there and self._makes_topics(path)
        except ConfigError as error:  # not authorized to read it
            log.warning("allowAutoTopicCreation must be off in the namespace %s: %s", self._namespace, error)
            return
        if not is_there:
            raise Unavailable(
                f"there is no log to read, for there is no namespace {self._namespace}: check the URL, or start a "
                f"node, which creates it"
            )
        if makes_topics:
            raise ConfigError(
                f"in {self._namespace} topics are created automatically, so a reader of a deleted channel would create "
                f"its topic again: set allowAutoTopicCreation=false there, as a node does",
                key="pulsar.namespace",
            )

    def _makes_topics(self, path: str) -> bool:
        """Whether a topic is created when a client asks for it."""
        rule = cast("Json | None", self._call("GET", f"{path}/autoTopicCreation", absent=None))
        if rule is not None:
            return bool(rule["allowAutoTopicCreation"])
        return str(self._configuration().get("allowAutoTopicCreation", "true")) == "true"

    def _topic_of_others(self) -> str | None:
        """A topic that is neither a channel, nor the log of a group, nor Pulsar's own; None for none."""
        namespace = f"non-persistent/{self._namespace}"  # Tidewal's are persistent
        not_persistent = self._list(namespace) + self._list(f"{namespace}/partitioned")
        other = next((name for name in not_persistent if not name.startswith("__")), None)
        if other is not None:
            return other
        return next((name for name in self.topics() if not self._is_ours(name)), None)

    def _is_ours(self, name: str) -> bool:
        if name.startswith("__"):
            return True
        path = f"persistent/{self._namespace}/{quote(name, safe='')}/properties"
        properties = cast("Json | None", self._call("GET", path, absent=None))
        return properties is None or POLICY_PROPERTY in properties

    def _configuration(self) -> Json:
        """The broker's configuration; empty without authorization."""
        try:
            return cast(Json, self._call("GET", "brokers/configuration/runtime"))
        except (ConfigError, InvalidRequest):
            return {}

    def max_message_bytes(self) -> int:
        """The largest message in bytes, including its metadata, that the brokers accept; Pulsar's default without
        authorization."""
        try:
            return int(str(self._configuration()["maxMessageSize"]))
        except (KeyError, ValueError):
            return DEFAULT_MESSAGE_BYTES

    def topics(self) -> list[str]:
        """The local names of all persistent topics."""
        return self._list(f"persistent/{self._namespace}")

    def _list(self, path: str) -> list[str]:
        """The local names of the topics listed at `path`."""
        return [name.rpartition("/")[2] for name in cast("list[str]", self._call("GET", path))]

    def partitions(self, topic: str) -> int:
        """The number of partitions of a topic; 0 for one without, and where there is none."""
        path = f"persistent/{self._namespace}/{quote(topic, safe='')}/partitions?checkAllowAutoCreation=false"
        found = cast("dict[str, int] | None", self._call("GET", path, absent=None))
        return 0 if found is None else found["partitions"]

    def require_namespace(self) -> None:
        """Raise `Unavailable` where there is no namespace."""
        if self._call("GET", f"namespaces/{self._namespace}", absent=None) is None:
            raise Unavailable(
                f"there is no namespace {self._namespace} with topics of others: check the URL, or have it made"
            )

    def create(self, topic: PulsarTopic) -> bool:
        """Create the topic with its properties, in one step. Returns False when it exists already."""
        incarnation = f"{time.time_ns() // 1_000_000}-{uuid.uuid4().hex}"
        properties: Json = {**topic.properties, INCARNATION_PROPERTY: incarnation}
        return self._call("PUT", self._path(topic), properties, conflict=False) is not False

    def set_policies(self, topic: PulsarTopic) -> None:
        """Set retention and deduplication, which brokers keep apart from properties. Returns once duplicates are
        removed: the broker answers before a policy takes effect, and until then stores a message again that is resent.
        Raises `Unsupported` where the broker has no policies for single topics."""
        path = self._path(topic)
        try:
            self._call("POST", f"{path}/retention", topic.retention, topic=topic)
            self._call("POST", f"{path}/deduplicationEnabled", True, topic=topic)
        except InvalidRequest as error:
            raise Unsupported(
                f"the broker takes no policies for single topics (topicLevelPoliciesEnabled), so it cannot keep "
                f"{topic.channel} as asked: {error}",
                capability="retention",
            ) from error
        deadline = time.monotonic() + self._timeout_s
        while not self._deduplicates(topic):
            if time.monotonic() > deadline:
                raise Unavailable(f"deduplication does not take effect in {topic.channel}")
            if self._closing.wait(LOOK_AGAIN_S):
                raise Closed("the Pulsar log is closed")

    def ensure_deduplication(self, topic: PulsarTopic) -> None:
        """Return once the broker removes duplicates in the topic, also where its creator died before `set_policies`.
        Raises `ChannelNotFound`."""
        if not self._deduplicates(topic):
            self.set_policies(topic)

    def _deduplicates(self, topic: PulsarTopic) -> bool:
        found = cast(Json, self._call("GET", f"{self._path(topic)}/stats", topic=topic))
        return found["deduplicationStatus"] == "Enabled"

    def set_property(self, topic: PulsarTopic, name: str, value: str) -> None:
        self._call("PUT", f"{self._path(topic)}/properties", {name: value}, topic=topic)

    def delete(self, topic: PulsarTopic) -> None:
        """Delete the topic with its cursors, also while clients use it."""
        self._call("DELETE", f"{self._path(topic)}?force=true", absent=None)

    def contents(self, topic: PulsarTopic) -> TopicContents:
        """The contents of the topic. Raises `ChannelNotFound`."""
        return contents_of(topic, cast(Json, self._call("GET", f"{self._path(topic)}/internalStats", topic=topic)))

    def last(self, topic: PulsarTopic) -> MessagePlace:
        """The last message of the topic; its entry is -1 where there is none. Raises `ChannelNotFound`."""
        found = cast("dict[str, int]", self._call("GET", f"{self._path(topic)}/lastMessageId", topic=topic))
        return MessagePlace(found["ledgerId"], found["entryId"], max(found.get("batchIndex", 0), 0))

    def publishers(self, topic: PulsarTopic) -> dict[str, str]:
        """The names of the connected producers, and since when each is connected. Raises `ChannelNotFound`."""
        found = cast("dict[str, list[dict[str, str]]]", self._call("GET", f"{self._path(topic)}/stats", topic=topic))
        return {each["producerName"]: each.get("connectedSince", "") for each in found["publishers"]}

    def make_cursor(self, topic: PulsarTopic, name: str) -> None:
        """Create a durable cursor of that name at the beginning, unless it exists. Raises `ChannelNotFound`."""
        path = f"{self._path(topic)}/subscription/{quote(name, safe='')}"
        beginning: Json = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}
        self._call("PUT", path, beginning, topic=topic, conflict=False)

    def keep_cursor(self, topic: PulsarTopic, name: str, place: MessagePlace) -> None:
        """Set the durable cursor of that name to the entry of `place`, so that the broker keeps the entries from there
        on. Raises `ChannelNotFound`."""
        path = f"{self._path(topic)}/subscription/{quote(name, safe='')}"
        where: Json = {"ledgerId": place.ledger, "entryId": place.entry, "partitionIndex": -1, "batchIndex": -1}
        if self._call("PUT", path, where, topic=topic, conflict=False) is False:
            self._call("POST", f"{path}/resetcursor", where, topic=topic)

    def drop_cursor(self, topic: PulsarTopic, name: str) -> None:
        """Delete the cursor, if it exists."""
        self._call("DELETE", f"{self._path(topic)}/subscription/{quote(name, safe='')}?force=true", absent=None)

    def _path(self, topic: PulsarTopic) -> str:
        return f"persistent/{self._namespace}/{quote(topic.name, safe='')}"

    def _call(
        self,
        method: str,
        path: str,
        body: Json | bool | None = None,
        *,
        topic: PulsarTopic | None = None,
        absent: object = ...,
        conflict: object = ...,
    ) -> object:
        """Send a request until it is answered. Returns the answer's JSON, `absent` for 404 and `conflict` for 409 where
        given. Raises `ChannelNotFound` for 404 when a topic is given. An error has `outcome_unknown` where one of the
        attempts may have changed something."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = FIRST_PAUSE_S
        unknown: dict[str, bool] = {}
        while True:
            try:
                return self._once(method, self._root + path, body)
            except _Refused as error:
                if method != "GET" and web_outcome(error.code) is Outcome.UNKNOWN:
                    unknown = {"outcome_unknown": True}
                if error.code == 404 and absent is not ...:
                    return absent
                if error.code == 404 and topic is not None:
                    raise not_found(topic.channel) from error
                if error.code == 409 and conflict is not ...:
                    return conflict
                failure = f"{method} {path} was answered {error.code}: {error.reason}"
                if error.code in (401, 403):
                    raise ConfigError(failure, key="pulsar.authParams", **unknown) from error
                if error.code not in _TRY_AGAIN:
                    raise InvalidRequest(failure, **unknown) from error
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                if method != "GET" and web_outcome(error) is Outcome.UNKNOWN:
                    unknown = {"outcome_unknown": True}
                failure = f"Pulsar's web service does not answer {method} {path}: {error}"
            if time.monotonic() + pause_s > deadline:
                raise Unavailable(failure, **unknown)
            if self._closing.wait(pause_s):
                raise Closed("the Pulsar log is closed", **unknown)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(self, method: str, url: str, body: Json | bool | None, limit_s: float = ONE_TRY_S) -> object:
        data = None if body is None else json.dumps(body).encode()
        for _ in range(5):  # brokers redirect to the one that owns the topic
            request = urllib.request.Request(url, data, self._headers, method=method)
            try:
                with self._web.open(request, timeout=min(self._timeout_s, limit_s)) as answer:
                    content: bytes = answer.read()
                    return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                with error:
                    location = error.headers.get("Location")
                    if error.code not in (301, 302, 307, 308) or not location:
                        raise _Refused(error.code, _reason(error)) from error
                url = location
        raise OSError(f"{shown_url(url)} redirects in a circle")


class _Refused(Exception):
    """An answer of 400 and more."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Disables the library's redirects, which are for GET only; `_once` follows all, with the same method and body."""

    def redirect_request(self, req: object, fp: object, code: int, msg: str, headers: object, newurl: str) -> None:
        return None


def _context(security: Security) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.trusted_certificates or None)
    context.check_hostname = security.validate_hostname
    if security.certificate:
        context.load_cert_chain(security.certificate, security.key or None)
    return context


def _reason(error: urllib.error.HTTPError) -> str:
    content = error.read()
    try:
        return str(cast("Mapping[str, object]", json.loads(content))["reason"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace") or str(error.reason)
