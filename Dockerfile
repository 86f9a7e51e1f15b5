# One image for the worker, the MLflow server and the Prefect server: the same locked packages, so client and server versions agree.
FROM python:3.12.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libgl1 libglib2.0-0 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home bevj6

ENV DO_NOT_TRACK=true \
    DVC_NO_ANALYTICS=true \
    GX_ANALYTICS_ENABLED=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

COPY requirements.lock services/requirements.txt /build/
RUN pip install --no-deps -r /build/requirements.lock && pip install -r /build/requirements.txt -c /build/requirements.lock

# The project itself is mounted here (its git history and DVC cache are needed, and results belong in the checkout).
WORKDIR /project
ENV PYTHONPATH=/project HOME=/home/bevj6
USER 1000:1000
ENTRYPOINT ["tini", "--"]
