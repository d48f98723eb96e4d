"""The rows of the log on object storage in the table of metrics."""

from __future__ import annotations

from ...runtime.metrics.metric import Metric, counter, seconds

METRICS: tuple[Metric, ...] = (
    counter("objects_requests_total", "Requests to the object store, by kind: create, get, head, list, delete", "kind"),
    counter("objects_failed_requests_total", "Requests that the object store did not answer, or refused", "kind"),
    counter("objects_hedged_requests_total", "Requests for blocks that were sent once more, their answer being late"),
    counter("objects_sent_bytes_total", "Bytes of the objects that were created", unit="bytes"),
    counter("objects_received_bytes_total", "Bytes of objects that were read", unit="bytes"),
    counter(
        "objects_dollars_total",
        "What the requests cost by the prices of S3 in us-east-1; its rate times 86400 is dollars a day",
    ),
    seconds("objects_create_duration_seconds", "One request that creates an object"),
)
