"""One WAL backend each, found through the entry-point group `tidewal.wal`.

Public are the names below: what the author of an adapter needs (docs/backends.md, "Write an adapter").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime import errors as errors
    from ..runtime.config.section import BackendSettings as BackendSettings
    from ..runtime.groups.coordinator_client import (
        Ack as Ack,
        AssignedChannel as AssignedChannel,
        CoordinatorClient as CoordinatorClient,
        MemberAssignment as MemberAssignment,
    )
    from ..runtime.groups.group_wal import GroupWal as GroupWal
    from ..runtime.log.backend import Check as Check, Inspection as Inspection, WalBackend as WalBackend
    from ..runtime.log.blocking_reader import BlockingReader as BlockingReader
    from ..runtime.log.checks import (
        check_name as check_name,
        check_plain as check_plain,
        check_size as check_size,
        not_found as not_found,
        other_policy as other_policy,
    )
    from ..runtime.log.opening import (
        find_backend as find_backend,
        installed_backends as installed_backends,
        open_wal as open_wal,
    )
    from ..runtime.log.payloads import as_bytes as as_bytes, owned as owned
    from ..runtime.log.policy_codec import decode_policy as decode_policy, encode_policy as encode_policy
    from ..runtime.log.redaction import shown_url as shown_url, split_url as split_url
    from ..runtime.log.wal import (
        TOMBSTONE as TOMBSTONE,
        Append as Append,
        Capabilities as Capabilities,
        ChannelInfo as ChannelInfo,
        ChannelPolicy as ChannelPolicy,
        ControlAppend as ControlAppend,
        Delivered as Delivered,
        Delivery as Delivery,
        Durability as Durability,
        Entry as Entry,
        From as From,
        FromId as FromId,
        FromTime as FromTime,
        GroupInfo as GroupInfo,
        GroupMember as GroupMember,
        Headers as Headers,
        OnAppended as OnAppended,
        Payload as Payload,
        Start as Start,
        Tombstone as Tombstone,
        Wal as Wal,
    )
    from ..runtime.log.wal_base import WalBase as WalBase
    from ..runtime.loop_bridge import (
        EventSignal as EventSignal,
        LoopNotifier as LoopNotifier,
        LoopNotifiers as LoopNotifiers,
    )
    from ..runtime.metrics.metric import (
        Metric as Metric,
        counter as counter,
        gauge as gauge,
        milliseconds as milliseconds,
        seconds as seconds,
        sizes as sizes,
    )
    from ..runtime.metrics.metrics import Metrics as Metrics
else:
    from ..runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "..runtime": "errors",
            "..runtime.config.section": "BackendSettings",
            "..runtime.groups.coordinator_client": "Ack AssignedChannel CoordinatorClient MemberAssignment",
            "..runtime.groups.group_wal": "GroupWal",
            "..runtime.log.backend": "Check Inspection WalBackend",
            "..runtime.log.blocking_reader": "BlockingReader",
            "..runtime.log.checks": "check_name check_plain check_size not_found other_policy",
            "..runtime.log.opening": "find_backend installed_backends open_wal",
            "..runtime.log.payloads": "as_bytes owned",
            "..runtime.log.policy_codec": "decode_policy encode_policy",
            "..runtime.log.redaction": "shown_url split_url",
            "..runtime.log.wal": (
                "Append Capabilities ChannelInfo ChannelPolicy ControlAppend Delivered Delivery Durability Entry "
                "From FromId FromTime GroupInfo GroupMember Headers OnAppended Payload Start TOMBSTONE Tombstone Wal"
            ),
            "..runtime.log.wal_base": "WalBase",
            "..runtime.loop_bridge": "EventSignal LoopNotifier LoopNotifiers",
            "..runtime.metrics.metric": "Metric counter gauge milliseconds seconds sizes",
            "..runtime.metrics.metrics": "Metrics",
        },
    )
