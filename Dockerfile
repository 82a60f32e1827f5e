# A gasloc node on the CPU. docker-compose.yml shows a bootstrap and four trainers.
FROM python:3.11-slim-bookworm

# On x86-64 the default torch brings CUDA along. For a small image name PyTorch's index of CPU
# wheels: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=

WORKDIR /opt/gasloc
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gasloc_p2p ./gasloc_p2p
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt . \
    && useradd --create-home --uid 1000 gasloc \
    && install -d -o gasloc -g gasloc /swarm

ENV PATH=/opt/venv/bin:$PATH
USER gasloc
VOLUME /swarm
# SIGINT is what Ctrl-C sends: the node says goodbye and leaves.
STOPSIGNAL SIGINT
ENTRYPOINT ["gasloc"]
CMD ["--help"]
