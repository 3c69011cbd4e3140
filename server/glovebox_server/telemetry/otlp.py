"""Sends traces and totals over OTLP, as the standard ``OTEL_*`` variables say. The only module that needs the SDK.

A collector that is slow or gone costs spans and exports, not calls: threads of their own send both, and no call waits
for them.
"""

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from time import time_ns
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Span, SpanContext, Status

from glovebox_server.telemetry.names import CONNECTIONS_MADE, Metric
from glovebox_server.telemetry.spans import SpanPart
from glovebox_server.telemetry.totals import SCALE, Series

#: Seconds that the end of a server waits for what is not sent yet.
END_SECONDS: Final = 1.0
_MOST_CHARACTERS = 8192
_IDS, _SCOPE = RandomIdGenerator(), InstrumentationScope("glovebox")


def resource(version: str, state_dir: Path) -> Resource:
    """Return whose telemetry it is: of all servers of a state directory; the operator's variables come first."""
    instance = uuid.uuid5(uuid.NAMESPACE_URL, f"file://{socket.gethostname()}{state_dir.absolute()}")
    ours = {"service.name": "glovebox", "service.version": version, "service.instance.id": str(instance)}
    named = {each.partition("=")[0].strip() for each in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    named |= {"service.name"} if os.environ.get("OTEL_SERVICE_NAME") else set()
    return Resource.create({name: value for name, value in ours.items() if name not in named})


class SpanSender(BatchSpanProcessor):
    """Sends spans without what exceptions say, which may repeat what callers and programs did."""

    def __init__(self, whose: Resource) -> None:
        super().__init__(OTLPSpanExporter())
        self._whose = whose

    def write(self, around: Span, part: SpanPart) -> None:
        """Send a part of a span under way; cheaper than the SDK's own way, and the same on the wire."""
        of = around.get_span_context()
        own = SpanContext(of.trace_id, _IDS.generate_span_id(), is_remote=False, trace_flags=of.trace_flags)
        events = [Event(CONNECTIONS_MADE, attributes, at) for at, attributes in part.events]
        times: dict[str, Any] = {"start_time": part.begin, "end_time": part.end}
        super().on_end(ReadableSpan(part.name, own, of, self._whose, {}, events, instrumentation_scope=_SCOPE, **times))

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that is over."""
        if span.status.description or span.events:
            span = ReadableSpan(
                span.name, span.context, span.parent, span.resource, span.attributes, (), span.links, span.kind,
                status=Status(span.status.status_code), start_time=span.start_time, end_time=span.end_time,
                instrumentation_scope=span.instrumentation_scope,
            )  # fmt: skip
        super().on_end(span)


@contextmanager
def tracing(whose: Resource) -> Iterator[SpanSender]:
    """Send the spans of this process until the end of the block."""
    sender, limits = SpanSender(whose), SpanLimits(max_attribute_length=_MOST_CHARACTERS)
    provider = TracerProvider(resource=whose, span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(sender)
    trace.set_tracer_provider(provider)
    try:
        yield sender
    finally:
        ending = threading.Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_SECONDS)


class MetricSender:
    """Sends totals, one export at a time."""

    def __init__(self, whose: Resource) -> None:
        self.seconds = 60.0
        with suppress(KeyError, ValueError):
            self.seconds = float(os.environ["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000
        self._exporter, self._whose = OTLPMetricExporter(), whose
        self._sending: threading.Thread | None = None

    def send(self, totals: list[Series], since: float) -> None:
        """Send these; nothing if the ones before are not sent yet."""
        if self._sending is None or not self._sending.is_alive():
            data = encoded(totals, since, self._whose)
            self._sending = threading.Thread(target=self._exporter.export, args=(data,), daemon=True)
            self._sending.start()

    def close(self) -> None:
        """Wait for the last ones for a moment."""
        if self._sending is not None:
            self._sending.join(END_SECONDS)


def encoded(totals: list[Series], since: float, whose: Resource) -> sdk.MetricsData:
    """Return totals in the SDK's form, with all that was counted since the beginning."""
    times = {"start_time_unix_nano": int(since * 1e9), "time_unix_nano": time_ns()}
    metrics = [
        sdk.Metric(name=metric.name, description=metric.help, unit=metric.unit, data=_data(metric, [*each], times))
        for metric, each in groupby(totals, key=lambda series: series.metric)
    ]
    scope = sdk.ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    return sdk.MetricsData([sdk.ResourceMetrics(resource=whose, scope_metrics=[scope], schema_url="")])


def _data(metric: Metric, totals: list[Series], times: dict[str, Any]) -> sdk.DataT:
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    if metric.kind == "histogram":
        return sdk.ExponentialHistogram([_histogram(each, times) for each in totals], cumulative)
    numbers = [sdk.NumberDataPoint(attributes=each.labels, value=each.value, **times) for each in totals]
    return sdk.Gauge(numbers) if metric.kind == "gauge" else sdk.Sum(numbers, cumulative, is_monotonic=True)


def _histogram(series: Series, times: dict[str, Any]) -> sdk.ExponentialHistogramDataPoint:
    """Return one with the bounds of its outermost buckets as its extremes."""
    counts = dict(series.exponents)
    first, last = min(counts), max(counts)
    return sdk.ExponentialHistogramDataPoint(
        attributes=series.labels, count=sum(counts.values()), sum=series.value, scale=SCALE, zero_count=0,
        positive=sdk.Buckets(first, [counts.get(each, 0) for each in range(first, last + 1)]),
        negative=sdk.Buckets(0, []), flags=0, min=2 ** (first / 2**SCALE), max=2 ** ((last + 1) / 2**SCALE), **times,
    )  # fmt: skip
