# The server, bubblewrap and the sandboxes' Python, for clients over HTTP, as a user without rights.
# How to run it, and what is reached then: docs/operate/install.md#in-a-container.
# Any base with apt and Python 3.11 or newer.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS made
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv
WORKDIR /source
COPY . .
# Everything by the locks' hashes, hatchling too, with the packages it needs.
RUN export PIP_NO_CACHE_DIR=1 \
    && python3 -m venv /opt/glovebox \
    && awk '/^[a-z]/ { kept = /^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==/ } kept' requirements-dev.lock >/build.lock \
    && /opt/glovebox/bin/pip install --require-hashes --only-binary=:all: --no-compile --target /build -r /build.lock \
    && PYTHONPATH=/build /opt/glovebox/bin/python -m hatchling build -t wheel -d /wheel \
    && /opt/glovebox/bin/pip install --require-hashes --only-binary=:all: -r requirements.lock \
    && /opt/glovebox/bin/pip install --no-deps --no-index /wheel/*.whl \
    && /opt/glovebox/bin/glovebox setup --data-dir /opt/glovebox/data

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 8321 --no-create-home --home-dir /var/lib/glovebox glovebox \
    && install -d -m 0700 -o glovebox -g glovebox /var/lib/glovebox \
    && install -d /workspace
COPY --from=made /opt/glovebox /opt/glovebox
ENV HOME=/var/lib/glovebox \
    GLOVEBOX_DATA_DIR=/opt/glovebox/data \
    GLOVEBOX_STATE_DIR=/var/lib/glovebox/state \
    GLOVEBOX_WORKSPACE=/workspace
USER glovebox
VOLUME /var/lib/glovebox
EXPOSE 8321
# Not by urllib, which would ask a proxy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["/opt/glovebox/bin/python", "-I", "-c", "\
import http.client\n\
server = http.client.HTTPConnection('127.0.0.1', 8321, timeout=4)\n\
server.request('GET', '/ready')\n\
raise SystemExit(server.getresponse().status != 200)"]
ENTRYPOINT ["/opt/glovebox/bin/glovebox"]
CMD ["serve", "--transport", "http", "--host", "0.0.0.0", "--allowed-host", "127.0.0.1:8321", "--allowed-host", "localhost:8321"]
