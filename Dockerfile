# A node in a container: `make image`, or `make dist && docker build -t tidewal .`. It runs as a user without rights, and
# writes to /var/lib/tidewal and /tmp alone: the rest may be read-only.
ARG PYTHON=3.13-slim-bookworm

FROM python:${PYTHON} AS build
ARG UV=0.13.8
RUN pip install --no-cache-dir --disable-pip-version-check "uv==${UV}" && python -m venv /opt/tidewal
COPY requirements.lock /build/
COPY dist/*.whl /build/
# The versions of the lock, checked by its hashes; compiled here, since nothing can be written later.
RUN wheel=$(ls /build/*.whl) && uv pip install --no-cache --compile-bytecode --only-binary :all: \
        --python /opt/tidewal/bin/python --constraint /build/requirements.lock \
        "tidewal[node,kafka,pulsar] @ file://${wheel}"

FROM python:${PYTHON}
RUN useradd --system --uid 10001 --home-dir /var/lib/tidewal --create-home --shell /usr/sbin/nologin tidewal
COPY --from=build /opt/tidewal /opt/tidewal
ENV PATH=/opt/tidewal/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TIDEWAL__METRICS__HOST=0.0.0.0 \
    TIDEWAL__METRICS__PORT=9464 \
    TIDEWAL__LOG__FORMAT=json
USER 10001
WORKDIR /var/lib/tidewal
VOLUME /var/lib/tidewal
EXPOSE 9464
# Of the log that the settings name, or of the embedded one: exit status 1 where its nodes are not healthy.
HEALTHCHECK --interval=30s --timeout=20s --start-period=60s --retries=3 \
    CMD tidewal status "${TIDEWAL__WAL:-/var/lib/tidewal}"
ENTRYPOINT ["tidewal"]
CMD ["run", "--data", "/var/lib/tidewal"]
