"""Consumer groups: which member reads which channel, and how far each group has got. Adapters bring the storage.

The coordinator's side: `coordinator.py` over `membership.py`, `assignment.py`, `progress.py`, `subscriptions.py`;
its clients are `*_client.py`. A member's side: `group_consumer.py` with a `member_fetcher.py` per channel,
`unacknowledged.py` and `member_committer.py`; `record_member.py` over it. Working through what a member gets:
`processing.py` with `work.py`, `retries.py` and `group_letters.py`. Where all this lies in the log as records (Pulsar):
`group_log.py`, `group_state.py`, `commands.py`.
"""
