# An image for flow processes, and for the head and the workers of a Ray cluster. docs/clusters.md has the commands.

# A base with python3, or one of Debian or Ubuntu, which gets theirs: nvidia/cuda:13.0.1-runtime-ubuntu24.04 (Python 3.12).
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of the package: torch or jax, and s3 for buckets.
ARG EXTRA=torch,s3
# A version from an index; empty: the one wheel in dist/.
ARG VERSION=
# Where torch comes from: cpu, cu130, …, or auto for that of the building machine (uv pip install --help has them all).
ARG TORCH_BACKEND=cpu
# Further requirements, such as "jax[cuda12] gcsfs".
ARG PACKAGES=
# Versions that are known to work together; empty: the newest.
ARG CONSTRAINTS=constraints.txt

# tini ends orphaned processes and forwards signals, and KubeRay's probes call wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && if ! command -v python3; then apt-get install --yes --no-install-recommends python3 python3-venv; fi \
    && apt-get install --yes --no-install-recommends ca-certificates procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "uv>=0.9,<1" \
    && useradd --create-home --uid 10001 train

ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1

# The wheel is mounted, so no layer holds it. PACKAGES is split into words.
# hadolint ignore=SC2086
RUN --mount=type=bind,target=/context \
    set -eu; \
    if [ -n "$VERSION" ]; then \
        package="prefect-elastic-train[$EXTRA]==$VERSION"; \
    else \
        set -- /context/dist/*.whl; \
        [ "$#" -eq 1 ] && [ -f "$1" ] || { echo "dist/ must hold one wheel: python -m build"; exit 1; }; \
        package="$1[$EXTRA]"; \
    fi; \
    uv pip install --no-cache --compile-bytecode --torch-backend "$TORCH_BACKEND" \
        ${CONSTRAINTS:+--constraint "/context/$CONSTRAINTS"} "$package" $PACKAGES; \
    elastic-train --version

# A number, so that Kubernetes' runAsNonRoot can check it.
USER 10001
WORKDIR /home/train
ENTRYPOINT ["tini", "--"]
CMD ["elastic-train", "--help"]
